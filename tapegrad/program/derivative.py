"""A captured function on a tape: one record, whose forward and backward are programs of their own.

The function and its gradient are written down in one dry run.  What the backward reads of the forward (arguments,
contents of variables, values made on the way) is carried from one program to the other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tapegrad import nest
from tapegrad.autodiff.tape import GradientTape
from tapegrad.core.aval import shaped
from tapegrad.core.buffer import Buffer
from tapegrad.device import Device, dtypes
from tapegrad.engine.evaluate import fill
from tapegrad.program.capture import Call, UncapturableError, in_a_dry_run
from tapegrad.program.program import Kind, Layouts, Output, Program, Slot, Step, View, pruned
from tapegrad.tensor import Tensor
from tapegrad.variable import Variable

_BYTE = dtypes.asdtype("uint8")


@dataclass(eq=False)
class Joint:
    """The two programs.

    ``count``: leaves of the result; after them the forward yields what is carried.  ``weighed``: the leaves that have
    cotangents.  ``carried``: what the backward takes before the cotangents: arguments (by position), variables, values
    (leaves of the result by number, others None).
    ``sources``: what it yields gradients of: arguments (by position) and variables; None where there is none.
    ``depends``: of each of these gradients, the cotangents on which it depends (by position among the weighed).
    ``outside``: values made before that the function uses, of which it yields no gradient.
    """

    forward: Program
    backward: Program
    count: int
    weighed: list[int]
    carried: list[tuple[Kind, Any]]
    sources: list[int | Variable]
    has_gradient: list[bool]
    depends: list[frozenset[int]]
    outside: list[Buffer]


def capture_joint(
    f: Callable[..., Any], args: Sequence[Any], named: dict[str, Any], layouts: Layouts | None = None
) -> Joint:
    """The programs of ``f(*args, **named)`` and of its gradient.  Raises UncapturableError, and what ``f`` raises."""
    return in_a_dry_run(lambda call: _captured(call, f, args, named), layouts)


def _captured(call: Call, f: Callable[..., Any], args: Sequence[Any], named: dict[str, Any]) -> Joint:
    with GradientTape() as tape:

        def watched(*inputs: Any, **by_name: Any) -> Any:
            tape.watch([t for t in call.tensors if dtypes.is_inexact(t.dtype)])
            return f(*inputs, **by_name)

        result = call.result(watched, args, named)
    forward = call.program(result)
    if forward.communicates:
        raise UncapturableError("it holds collectives, and the ranks agree on each walk through them")
    steps, arguments = len(forward.steps), len(call.tensors)
    leaves = nest.flatten(result)
    weighed = [i for i, x in enumerate(leaves) if type(x) is Tensor and dtypes.is_inexact(x.dtype)]
    cts = [call.stand_in(leaves[i]._buffer.node.aval) for i in weighed]
    first = {id(t): i for i, t in reversed(list(enumerate(call.tensors[:arguments])))}  # one tensor may be given twice
    inputs = [i for i in sorted(first.values()) if dtypes.is_inexact(call.tensors[i].dtype)]
    variables = list(tape.watched_variables())
    wanted = [*(call.tensors[i] for i in inputs), *variables]
    grads: list[Any] = [None] * len(wanted)
    if weighed:
        grads = tape.gradient([leaves[i] for i in weighed], wanted, output_gradients=cts)
    found = [g for g in grads if g is not None]
    fill([g._buffer for g in found])
    backward = call.recorder.steps[steps:]
    carrier = _Carrier(arguments, backward)
    outputs = [carrier.output(call.output(g), call) for g in found]
    rewritten = [carrier.step(step) for step in backward]
    outputs = [carrier.placed(output) for output in outputs]
    leaf_of = {id(o.view.slot): i for i, o in enumerate(forward.outputs) if o.view is not None and o.view.is_whole}
    kinds = [carrier.kind(slot, leaf_of) for slot in carrier.slots]
    made = [s for s, kind in zip(carrier.slots, kinds, strict=True) if kind == (Kind.MADE, None)]
    forward.outputs += [Output(_bytes_of(s), _flat(s, forward.device)) for s in made]
    taken = [*carrier.slots, *(v.slot for v in call.arguments[arguments:])]
    given = [carrier.whole(slot, call) for slot in taken]
    return Joint(
        pruned(forward),
        pruned(Program(rewritten, found, outputs, [], given, [], device=forward.device)),
        len(leaves), weighed, kinds, [*inputs, *variables], [g is not None for g in grads],
        _dependence(rewritten, outputs, given[len(carrier.slots) :], len(carrier.slots)),
        list(call.recorder.outside.values()),
    )  # fmt: skip


def _dependence(
    steps: Sequence[Step], outputs: Sequence[Output], cotangents: Sequence[View], before: int
) -> list[frozenset[int]]:
    """For each gradient the cotangents on which it depends; ``before``: the arguments before the first of them."""
    nothing: frozenset[int] = frozenset()
    known = {id(v.slot): frozenset([j]) for j, v in enumerate(cotangents)}
    for step in steps:
        together = nothing.union(*(known.get(id(v.slot), nothing) for v in step.reads))
        for v in step.writes:
            known[id(v.slot)] = known.get(id(v.slot), nothing) | together
    return [
        known.get(id(o.view.slot), nothing)
        if o.view is not None
        else nothing if o.argument is None else frozenset([o.argument - before])
        for o in outputs
    ]  # fmt: skip


class _Carrier:
    """Gives the backward slots of its own for what the forward has left."""

    def __init__(self, arguments: int, backward: Sequence[Step]) -> None:
        self._arguments = arguments
        self._made = {id(v.slot) for step in backward for v in (*step.writes, *step.temporaries)}
        self._new: dict[int, Slot] = {}
        self.slots: list[Slot] = []
        """The slots of the forward that are carried."""

    def slot(self, slot: Slot) -> Slot:
        """What stands for a slot of the forward."""
        if slot.kind is Kind.CONSTANT or id(slot) in self._made:
            return slot
        new = self._new.get(id(slot))
        if new is None:
            new = self._new[id(slot)] = Slot(Kind.ARGUMENT, slot.nbytes)
            if not self._is_cotangent(slot):
                self.slots.append(slot)
        return new

    def _is_cotangent(self, slot: Slot) -> bool:
        return slot.kind is Kind.ARGUMENT and slot.source >= self._arguments

    def _view(self, view: View) -> View:
        return view._replace(slot=self.slot(view.slot))

    def output(self, output: Output, call: Call) -> Output:
        """A gradient, in the backward's slots."""
        if output.argument is not None and output.argument < self._arguments:  # it is an argument of the forward
            view = call.arguments[output.argument]
            output = Output(view, call.tensors[output.argument]._buffer.node.aval)
        return output if output.view is None else output._replace(view=self._view(output.view))

    def placed(self, output: Output) -> Output:
        """A gradient that is a cotangent itself, by its position among what the backward takes."""
        if output.argument is None:
            return output
        return output._replace(argument=len(self.slots) + output.argument - self._arguments)

    def step(self, step: Step) -> Step:
        """A step of the backward, in its slots."""
        reads = [self._view(v) for v in step.reads]
        return replace(step, reads=reads)

    def kind(self, slot: Slot, leaf_of: dict[int, int]) -> tuple[Kind, Any]:
        """What is carried: an argument by position, a variable's cell, a leaf of the result by number, or a value."""
        if slot.kind in (Kind.MADE, Kind.NUMBER):
            return Kind.MADE, leaf_of.get(id(slot))
        return slot.kind, slot.source

    def whole(self, slot: Slot, call: Call) -> View:
        """All of a slot, as the backward takes it."""
        new = self.slot(slot)
        if slot.kind is Kind.ARGUMENT:
            return call.arguments[slot.source]._replace(slot=new)
        if slot.kind is Kind.VARIABLE:
            return call.recorder.cells.views[slot.source]._replace(slot=new)
        return View(new, 0, (slot.nbytes,), (1,), _BYTE)


def _bytes_of(slot: Slot) -> View:
    return View(slot, 0, (slot.nbytes,), (1,), _BYTE)


def _flat(slot: Slot, device: Device) -> Any:
    return shaped((slot.nbytes,), _BYTE, device)
