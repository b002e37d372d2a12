"""Rules of small nodes, listed once: what a rule does in tensors, as the nodes that it makes.

For small arrays the handling of tensors costs more than the arithmetic.  The operations of a rule depend on avals
alone, so they are listed once, on values that nobody computes; what no result needs is left out.  Then an executor runs
the list (:meth:`Steps.run`); where nobody counts, the list is one Python function that calls the same functions on the
same arrays in the same order (``Steps.pull``).  So the same works run whether somebody counts or not, and no bit
differs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from copy import copy
from functools import partial
from operator import attrgetter
from typing import Any, NamedTuple

from tapegrad.core.aval import ShapedArray, shaped
from tapegrad.core.buffer import Buffer
from tapegrad.core.node import Node, leaf
from tapegrad.core.primitive import Elementwise, Primitive, Site
from tapegrad.core.state import during, thread
from tapegrad.device.types import Params
from tapegrad.engine.executor import EXECUTOR, Executor
from tapegrad.engine.lowering import Application
from tapegrad.ops.dispatch import constant
from tapegrad.tensor import Tensor

Rules = Callable[[Tensor, dict[int, Tensor]], list[Tensor]]
Pull = Callable[[Any, Sequence[Buffer]], tuple[Any, ...] | None]
Constant = tuple[Any, Any, Any]
"""Value, dtype, device."""

_array = attrgetter("array")


class _ValueNeeded(Exception):
    """A rule reads values, or makes values from no operand: it cannot be listed."""


class _Constants(dict[Any, Buffer]):
    """Stand-ins for constants, by key (see ``ops.dispatch.constant``)."""

    def get(self, key: Any, default: object = None) -> Buffer:
        """The stand-in for the constant ``key``."""
        if key not in self:
            self[key] = Buffer(None, leaf(shaped((), key[3], key[4])))
        return self[key]


class _Listing(Executor):
    """Lists every node made, with its operands and its buffer, which stays empty."""

    def __init__(self) -> None:
        self.nodes: list[tuple[Node, tuple[Buffer, ...], Buffer]] = []
        self._constants = _Constants()

    @property
    def constants(self) -> _Constants:
        """Stand-ins."""
        return self._constants

    def apply(self, node: Node, inputs: tuple[Buffer, ...]) -> Buffer:
        """List it."""
        out = Buffer(None, node)
        self.nodes.append((node, inputs, out))
        return out

    def kernel(self, targets: list[Buffer]) -> None:
        """A rule asks for a value, so it cannot be listed."""
        raise _ValueNeeded

    def values(self, work: object) -> list[Buffer]:
        """A rule makes values from no operand, so it cannot be listed."""
        raise _ValueNeeded


class Step(NamedTuple):
    """A primitive to be applied to values by number; ``dead``: those that nothing reads afterwards.

    ``site``: of an elementwise one, without the plans that lead back to here.
    """

    prim: Primitive
    params: Params
    aval: ShapedArray
    site: Site | None
    operands: tuple[int, ...]
    dead: tuple[int, ...]


class Steps:
    """Steps on values by number: the cotangent, residuals, constants, then the results of the steps in order.

    ``pull(ct, residuals)``: what they yield on arrays, from an array and buffers (None: some buffer is not filled).
    """

    def __init__(
        self, constants: list[Constant], steps: list[Step], results: list[int], avals: Sequence[ShapedArray]
    ) -> None:
        """``avals``: of the cotangent and the residuals."""
        self._constants, self._steps, self._results = constants, steps, results
        self._ct, self._arguments, self._first = avals[0], len(avals), len(avals) + len(constants)
        self.pull: Pull = self._compiled("a0, residuals", counted=False)
        self._counted: Callable[..., Any] | None = None
        for c in constants:  # there from now on, as if the rules had run
            constant(*c)

    def run(self, ct: Any, residuals: Sequence[Buffer]) -> list[Buffer] | None:
        """Cotangents, by the executor in force; None: some buffer is not filled."""
        values: list[Any] = [self._buffer(ct), *residuals]
        arrays = list(map(_array, values))  # a budget evicts none of them meanwhile
        for array in arrays:
            if array is None:
                return None
        if self._constants:
            values += [constant(*c) for c in self._constants]
        run = thread.executor.run
        for prim, params, aval, site, operands, dead in self._steps:
            inputs = tuple([values[i] for i in operands])
            for i in dead:
                values[i] = None
            values.append(run(Node(prim, params, aval, site), inputs))
            del inputs
        return [values[i] for i in self._results]

    def _buffer(self, ct: Any) -> Buffer:
        return ct if isinstance(ct, Buffer) else Buffer(ct, leaf(self._ct))

    def count(self, ct: Any, residuals: Sequence[Buffer], wrap: Callable[..., Buffer]) -> Sequence[Buffer] | None:
        """Return cotangents as buffers; ``wrap(step, array, *operands)`` makes one of the result of each step.

        None: some buffer is not filled, or not all steps are small, so that they must be run one by one.
        """
        if self._counted is None:
            small = all(step.site is not None and step.site.small for step in self._steps)
            self._counted = self._compiled("b0, residuals, wrap", counted=True) if small else lambda *args: None
        return self._counted(self._buffer(ct), residuals, wrap)

    # Code ------------------------------------------------------------------------------------------------------

    def _compiled(self, parameters: str, counted: bool) -> Callable[..., Any]:
        """A function that runs the steps on arrays; ``counted``: and makes a buffer of each result."""
        rest = range(1, self._arguments)
        names, results = [f"a{i}" for i in range(self._arguments)], ["b0", *(f"residuals[{i - 1}]" for i in rest)]
        lines = ["a0 = b0.array"] if counted else []
        lines += [f"a{i} = residuals[{i - 1}].array" for i in rest]
        lines.append(f"if {' or '.join(f'{a} is None' for a in names)}: return None")
        known: dict[str, Any] = {}
        for c in self._constants:
            value, dtype, device = c
            name = f"k{len(names)}"
            if counted:
                known[f"c{name}"] = partial(constant, *c)
                lines += [f"b{name} = c{name}()", f"{name} = b{name}.array"]
            else:
                known[name] = device.constant(value, dtype)
            names.append(name)
            results.append(f"b{name}" if counted else name)
        for step in self._steps:
            number = len(names)
            operands = ", ".join(names[i] for i in step.operands)
            known[f"f{number}"] = _on_arrays(step.prim, step.params, step.aval, step.site)
            lines.append(f"v{number} = f{number}({operands})")
            if not step.aval.ndim and (counted or number in self._results):
                known["asarray"] = step.aval.device.xp.asarray  # ufuncs turn 0-d arrays into scalars
                lines.append(f"v{number} = asarray(v{number})")
            if counted:
                known[f"s{number}"] = step
                lines.append(f"b{number} = wrap(s{number}, v{number}, {operands})")
            names.append(f"v{number}")
            results.append(f"b{number}")
            lines += [f"del v{i}{f', b{i}' if counted else ''}" for i in step.dead if i >= self._first]
        lines.append(f"return {_tuple((results if counted else names)[i] for i in self._results)}")
        source = "\n".join([f"def pull({parameters}):", *(f"    {line}" for line in lines)])
        exec(compile(source, f"{__file__} (steps)", "exec"), known)  # a frame of this package's, not of the program
        pull: Callable[..., Any] = known.pop("pull")  # otherwise the two would refer to each other
        return pull


def _tuple(parts: Iterable[str]) -> str:
    return f"({''.join(f'{part}, ' for part in parts)})"


def _on_arrays(prim: Primitive, params: Params, aval: ShapedArray, site: Site | None) -> Callable[..., Any]:
    if isinstance(prim, Elementwise) and prim.ufunc is not None:
        return getattr(aval.device.xp, prim.ufunc)
    if site is not None:
        return lambda *arrays: EXECUTOR.small(site, list(arrays))
    return lambda *arrays: EXECUTOR.do(Application(prim, arrays, params, aval))[0]


def listed(rules: Rules, ct: ShapedArray, slots: tuple[int, ...], avals: list[ShapedArray]) -> Steps | None:
    """The steps of ``rules`` for a cotangent of ``ct`` and residuals of ``avals`` in ``slots``; None: it has none."""
    arguments = [Tensor(Buffer(None, leaf(a))) for a in (ct, *avals)]
    values, listing = dict(zip(slots, arguments[1:], strict=True)), _Listing()
    try:
        results = during(rules, arguments[0], values, executor=listing, recorders=(), batches=(), deferring=None)
    except _ValueNeeded:
        return None
    return _steps(listing, [t._buffer for t in arguments], [t._buffer for t in results])


def _steps(listing: _Listing, arguments: list[Buffer], results: list[Buffer]) -> Steps:
    """The listed nodes that some result needs, with values by number."""
    needed = {id(b) for b in results}
    nodes = []
    for node, inputs, out in reversed(listing.nodes):
        if id(out) in needed:
            needed.update(id(b) for b in inputs)
            nodes.append((node, inputs, out))
    nodes.reverse()
    read = [(key, b) for key, b in listing.constants.items() if id(b) in needed]
    numbers = {id(b): i for i, b in enumerate([*arguments, *(b for _, b in read), *(out for _, _, out in nodes)])}
    last = {numbers[id(b)]: at for at, (_, inputs, _) in enumerate(nodes) for b in inputs}
    last.update((numbers[id(b)], len(nodes)) for b in results)
    steps = []
    for at, (node, inputs, _) in enumerate(nodes):
        operands = tuple(numbers[id(b)] for b in inputs)
        site = copy(node.site)
        if site is not None:
            site.plans = None
        dead = tuple(i for i in set(operands) if last[i] == at)
        steps.append(Step(node.prim, node.params, node.aval, site, operands, dead))
    constants = [(key[0], key[3], key[4]) for key, _ in read]
    return Steps(constants, steps, [numbers[id(b)] for b in results], [b.node.aval for b in arguments])
