"""A captured function on a tape: one record, whose forward and backward are programs of their own.

The function and its gradient are written down in one dry run.  What the backward reads of the forward (arguments,
contents of variables, values made on the way) is carried from one program to the other.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tapegrad import nest
from tapegrad.autodiff.tape import GradientTape
from tapegrad.capture.capture import Call, UncapturableError, in_a_dry_run, name_of
from tapegrad.capture.planner.schedule import Graph
from tapegrad.capture.program import Kind, Layouts, Output, Program, Slot, Step, View, pruned, results
from tapegrad.core.aval import ShapedArray, shaped
from tapegrad.core.buffer import Buffer
from tapegrad.core.cell import Cell
from tapegrad.device import Device, dtypes
from tapegrad.engine.realize import realize
from tapegrad.tensor import Tensor
from tapegrad.variable import Variable

_BYTE = dtypes.asdtype("uint8")
_BETWEEN = -1
"""The number of the step that stands between forward and backward."""


@dataclass(eq=False)
class Whole:
    """The function and its gradient as they are written down: the backward reads slots of the forward.

    ``gradients``: what the backward yields, of the tensors ``found``.  ``arguments``: of the function, ``given`` of
    them, then the cotangents; ``avals``: theirs.  ``variables``: how they lie.
    """

    forward: Program
    backward: list[Step]
    gradients: list[Output]
    found: list[Tensor]
    arguments: list[View]
    given: int
    avals: list[ShapedArray]
    variables: dict[Cell, View]

    def program(self, alignment: int) -> Program:
        """Both as one program, in slots of its own; a step between them takes the results and gives cotangents."""
        between = Step(("backward",), list(results(self.forward)), self.arguments[self.given :], (), lambda *_: [],
                       effect=True, once=True, number=_BETWEEN)  # fmt: skip
        return self._rewritten([*self.forward.steps, between, *self.backward], self.arguments[: self.given], alignment)

    def gradient(self, alignment: int) -> Program:
        """Return the program, in slots of its own, that takes arguments and cotangents and yields the gradients."""
        program = self._rewritten([*self.forward.steps, *self.backward], self.arguments, alignment)
        return replace(program, name=f"{self.forward.name}, gradient")

    def _rewritten(self, steps: list[Step], arguments: list[View], alignment: int) -> Program:
        program = replace(self.forward, steps=steps, outputs=self.gradients, writes=[], arguments=arguments)
        return Graph(program, alignment).rewritten(range(len(steps)))

    def function(self, alignment: int) -> Program:
        """The function alone, in slots of its own: nothing is carried to a backward."""
        return Graph(self.forward, alignment).rewritten(range(len(self.forward.steps)))

    def as_in(self, program: Program) -> Whole:
        """Forward and backward, done as in ``program``: what a plan has made of both as one."""
        at = next(i for i, step in enumerate(program.steps) if step.number == _BETWEEN)
        between = program.steps[at]
        taken = iter(between.reads)
        outputs = [o.moved(lambda _: next(taken)) for o in self.forward.outputs]
        writes = [w.moved(lambda _: next(taken)) for w in self.forward.writes]
        forward = replace(
            self.forward, steps=program.steps[:at], outputs=outputs, writes=writes, arguments=program.arguments
        )
        arguments = [*program.arguments, *between.writes]
        return replace(self, forward=forward, backward=program.steps[at + 1 :], gradients=program.outputs,
                       arguments=arguments)  # fmt: skip

    def divided(self) -> tuple[Program, Program, list[tuple[Kind, Any]], list[frozenset[int]]]:
        """Two programs; what the second takes of the first; and the cotangents on which each gradient depends."""
        carrier = _Carrier(self)
        outputs = [carrier.output(output) for output in self.gradients]
        rewritten = [carrier.step(step) for step in self.backward]
        outputs = [carrier.placed(output) for output in outputs]
        forward, count = self.forward, len(carrier.slots)
        leaf_of = {id(o.view.slot): i for i, o in enumerate(forward.outputs) if o.view is not None and o.view.is_whole}
        kinds = [carrier.kind(slot, leaf_of) for slot in carrier.slots]
        made = [s for s, kind in zip(carrier.slots, kinds, strict=True) if kind == (Kind.MADE, None)]
        carried = [Output(_bytes_of(s), _flat(s, forward.device)) for s in made]
        given = [carrier.whole(s) for s in (*carrier.slots, *(v.slot for v in self.arguments[self.given :]))]
        return (
            pruned(replace(forward, outputs=[*forward.outputs, *carried], name=f"{forward.name}, forward")),
            pruned(Program(rewritten, self.found, outputs, [], given, [], asked=forward.asked, device=forward.device,
                           name=f"{forward.name}, backward")),  # fmt: skip
            kinds, _dependence(rewritten, outputs, given[count:], count),
        )  # fmt: skip


@dataclass(eq=False)
class Joint:
    """The two programs.

    ``count``: leaves of the result; after them the forward yields what is carried.  ``weighed``: the leaves that have
    cotangents.  ``carried``: what the backward takes before the cotangents: arguments (by position), variables, values
    (leaves of the result by number, others None).
    ``sources``: what it yields gradients of: arguments (by position) and variables; None where there is none.
    ``depends``: of each of these gradients, the cotangents on which it depends (by position among the weighed).
    ``outside``: values made before that the function uses, of which it yields no gradient.
    ``whole``: both as they were written down.
    """

    forward: Program
    backward: Program
    carried: list[tuple[Kind, Any]]
    depends: list[frozenset[int]]
    count: int
    weighed: list[int]
    sources: list[int | Variable]
    has_gradient: list[bool]
    outside: list[Buffer]
    whole: Whole

    @property
    def is_closed(self) -> bool:
        """Whether the function reads nothing but its arguments, and writes nothing but its results."""
        forward = self.forward
        return not (forward.writes or forward.reads or forward.streams or forward.afterwards)

    def connected(self, gradients: Sequence[Tensor], absent: Collection[int] = ()) -> list[Tensor | None]:
        """Return those of the sources, of what the backward yields; None where all come from ``absent`` cotangents."""
        pairs = zip(gradients, self.depends, strict=True)
        known = [None if absent and on and on.issubset(absent) else gradient for gradient, on in pairs]
        rest = iter(known)
        return [next(rest) if has else None for has in self.has_gradient]

    def limited(self) -> Joint:
        """The same, whose programs a budget limits."""
        forward, backward = (replace(program, limited=True) for program in (self.forward, self.backward))
        return replace(self, forward=forward, backward=backward)

    def as_in(self, program: Program) -> Joint:
        """The two programs, done as in ``program``: what a plan has made of ``whole`` as one program."""
        forward, backward, carried, depends = self.whole.as_in(program).divided()
        return replace(self, forward=forward, backward=backward, carried=carried, depends=depends)


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
    forward = call.program(result, name_of(f))
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
    realize([g._buffer for g in found])
    whole = Whole(
        forward, call.recorder.steps[steps:], [call.output(g) for g in found], found, call.arguments, arguments,
        [t._buffer.node.aval for t in call.tensors], call.recorder.cells.views,
    )  # fmt: skip
    return Joint(
        *whole.divided(), len(leaves), weighed, [*inputs, *variables], [g is not None for g in grads],
        list(call.recorder.outside.values()), whole,
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

    def __init__(self, whole: Whole) -> None:
        self._whole, self._arguments = whole, whole.given
        self._made = {id(v.slot) for step in whole.backward for v in (*step.writes, *step.temporaries)}
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

    def output(self, output: Output) -> Output:
        """A gradient, in the backward's slots."""
        if output.argument is not None and output.argument < self._arguments:  # it is an argument of the forward
            output = Output(self._whole.arguments[output.argument], self._whole.avals[output.argument])
        return output.moved(self._view)

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

    def whole(self, slot: Slot) -> View:
        """All of a slot, as the backward takes it."""
        new = self.slot(slot)
        if slot.kind is Kind.ARGUMENT:
            return self._whole.arguments[slot.source]._replace(slot=new)
        if slot.kind is Kind.VARIABLE:
            return self._whole.variables[slot.source]._replace(slot=new)
        return View(new, 0, (slot.nbytes,), (1,), _BYTE)


def _bytes_of(slot: Slot) -> View:
    return View(slot, 0, (slot.nbytes,), (1,), _BYTE)


def _flat(slot: Slot, device: Device) -> Any:
    return shaped((slot.nbytes,), _BYTE, device)
