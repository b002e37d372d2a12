"""Rules of small nodes, listed once: what a rule does in tensors, as the nodes that it makes.

For small arrays the handling of tensors costs more than the arithmetic.  The operations of a rule depend on avals
alone, so they are listed once, on values that nobody computes; what no result needs is left out.  Then an executor runs
the list (:meth:`Steps.run`); where nobody counts, the list is one Python function that calls the same functions on the
same arrays in the same order (``Steps.pull``).  So the same works run whether somebody counts or not, and no bit
differs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from typing import Any, NamedTuple
from weakref import ref

from tapegrad.core import account
from tapegrad.core.aval import ShapedArray, shaped
from tapegrad.core.buffer import Buffer
from tapegrad.core.node import Node, leaf
from tapegrad.core.primitive import Elementwise, Primitive, Site
from tapegrad.core.run import Evaluated, Run
from tapegrad.core.state import during, executed, thread
from tapegrad.device.types import Params
from tapegrad.engine.executor import PLAIN, Executor
from tapegrad.engine.make import Application
from tapegrad.ops.dispatch import constant
from tapegrad.tensor import Tensor

Rules = Callable[[Tensor, dict[int, Tensor]], list[Tensor]]
Pull = Callable[[Any, Sequence[Buffer]], tuple[Any, ...] | None]
Constant = tuple[Any, Any, Any]
"""Value, dtype, device."""


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

    def elementwise(self, node: Node, inputs: tuple[Buffer, ...]) -> Buffer:
        """List it."""
        out = Buffer(None, node)
        self.nodes.append((node, inputs, out))
        return out

    apply = elementwise

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


class Cotangent:
    """An array that ``step`` has made in a walk, and that an account knows; its buffer, if somebody has asked for one.

    Made without ``__init__``, as records are.
    """

    __slots__ = ("array", "owner", "step")
    array: Any
    step: Step
    owner: Buffer

    def buffer(self) -> Buffer:
        """Its buffer."""
        if not hasattr(self, "owner"):
            step = self.step
            out = Buffer(None, Node(step.prim, step.params, step.aval, step.site))
            out.array = self.array
            account.current.owned(out)
            self.owner = out
        return self.owner


class Steps:
    """Steps on values by number: the cotangent, residuals, constants, then the results of the steps in order.

    ``pull(ct, residuals)``: what they yield on arrays, from an array and buffers (None: some buffer is not filled).
    """

    def __init__(
        self, constants: list[Constant], steps: list[Step], results: list[int], arguments: list[ShapedArray]
    ) -> None:
        self._constants, self._steps, self._results = constants, steps, results
        self._arguments = len(arguments)
        self._first = len(arguments) + len(constants)
        self.pull = self._function([], results)
        self._made = [i for i in dict.fromkeys(results) if i >= self._first]
        self._makers = [steps[i - self._first] for i in self._made]
        self._only = self._makers[0] if len(results) == 1 and results == self._made else None  # most often
        self._told = self._run(arguments)
        self._dense: Pull | None = None
        self._shared: list[ref[Buffer]] = [
            ref(constant(*c)) for c in constants
        ]  # there from now on, as if the rules had run

    def run(self, ct: Buffer, residuals: Sequence[Buffer]) -> list[Buffer] | None:
        """Cotangents, by the executor in force; None: some buffer is not filled."""
        values: list[Any] = [ct, *residuals]
        for b in values:
            if b.array is None:
                return None
        if self._constants:
            values += [constant(*c) for c in self._constants]
        executor = thread.executor
        for step in self._steps:
            inputs = tuple([values[i] for i in step.operands])
            for i in step.dead:
                values[i] = None
            run = executor.run if step.site is None else executor.run_elementwise
            values.append(run(Node(step.prim, step.params, step.aval, step.site), inputs))
            del inputs
        return [values[i] for i in self._results]

    def _run(self, arguments: list[ShapedArray]) -> Run | None:
        """What an account is told; None: the steps must be run one by one."""
        sizes = [a.nbytes for a in arguments] + [dtype.itemsize for _, dtype, _ in self._constants]
        if self._constants and not all(a.ndim for a in arguments):  # one of them may be a constant itself
            return None
        if any(self._arguments <= i < self._first for i in self._results):
            return None
        nodes = []
        for step in self._steps:
            if step.site is None or not step.site.small:
                return None
            nbytes = step.aval.nbytes
            moved = sum([sizes[i] for i in set(step.operands)]) + nbytes
            gone = tuple([i - self._first for i in step.dead if i >= self._first])
            nodes.append(Evaluated(step.prim.name, nbytes, moved, gone))
            sizes.append(nbytes)
        return Run(tuple(nodes), tuple([i - self._first for i in self._made]))

    def together(self, ct: Any, residuals: Sequence[Any]) -> Sequence[Any] | None:
        """Cotangents by ``pull``, of which the account is told in one step; None: the steps must be run one by one."""
        run = self._told
        if run is None:
            return None
        for weak in self._shared:
            if weak() is None:
                self._shared = [ref(constant(*c)) for c in self._constants]
                break
        arrays = (self._dense or self._made_dense())(ct.array, residuals)
        if arrays is None or (arrays and not account.current.pulled(run, arrays)):
            return None
        if self._only is not None:
            g = Cotangent()
            (g.array,), g.step = arrays, self._only
            return (g,)
        made: dict[int, Cotangent] = {}
        for i, step, array in zip(self._made, self._makers, arrays):
            made[i] = g = Cotangent()
            g.array, g.step = array, step
        return [made[i] if i >= self._first else residuals[i - 1] if i else ct for i in self._results]

    def _made_dense(self) -> Pull:
        self._dense = dense = self._function(self._distinct(), self._made)
        return dense

    def _distinct(self) -> list[str]:
        """Code that returns None unless each array has bytes of its own and comes once."""
        count = self._arguments
        tests = [f"type(a{i}) is not ndarray or a{i}.base is not None" for i in range(count)]
        tests += [f"a{i} is a{k}" for i in range(count) for k in range(i)]
        return [f"    if {' or '.join(tests)}: return None"]

    def _function(self, guards: list[str], wanted: list[int]) -> Pull:
        count = self._arguments
        names = [f"a{i}" for i in range(count)]
        known: dict[str, Any] = {}
        lines = [f"    a{i} = residuals[{i - 1}].array" for i in range(1, count)]
        lines.append(f"    if {' or '.join(f'{a} is None' for a in names)}: return None")
        for value, dtype, device in self._constants:
            names.append(f"k{len(names)}")
            known[names[-1]] = device.constant(value, dtype)
        if guards and self._steps:
            lines += guards
            known["ndarray"] = self._steps[0].aval.device.xp.ndarray
        for step in self._steps:
            names.append(f"v{len(names)}")
            f = f"f{len(names)}"
            known[f] = _on_arrays(step.prim, step.params, step.aval, step.site)
            lines.append(f"    {names[-1]} = {f}({', '.join(names[i] for i in step.operands)})")
            lines += [f"    del {names[i]}" for i in step.dead if i >= self._first]
        avals = {count + len(self._constants) + i: step.aval for i, step in enumerate(self._steps)}
        results = []
        for i in wanted:
            flat = i in avals and not avals[i].ndim
            if flat:
                known["asarray"] = avals[i].device.xp.asarray  # ufuncs turn 0-d arrays into scalars
            results.append(f"asarray({names[i]})" if flat else names[i])
        exec(
            "\n".join(["def pull(a0, residuals):", *lines, f"    return ({''.join(f'{r}, ' for r in results)})"]), known
        )
        return known.pop("pull")  # otherwise the two would refer to each other


def _on_arrays(prim: Primitive, params: Params, aval: ShapedArray, site: Site | None) -> Callable[..., Any]:
    if isinstance(prim, Elementwise) and prim.ufunc is not None:
        return getattr(aval.device.xp, prim.ufunc)
    if site is not None:
        return lambda *arrays: PLAIN.small(site, list(arrays))
    return lambda *arrays: PLAIN.do(Application(prim, arrays, params, aval))[0]


def listed(rules: Rules, ct: ShapedArray, slots: tuple[int, ...], avals: list[ShapedArray]) -> Steps | None:
    """The steps of ``rules`` for a cotangent of ``ct`` and residuals of ``avals`` in ``slots``; None: it has none."""
    arguments = [Tensor(Buffer(None, leaf(a))) for a in (ct, *avals)]
    listing = _Listing()
    try:
        results = during(_followed, listing, rules, arguments, slots, recorders=(), batches=(), deferring=None)
    except _ValueNeeded:
        return None
    return _steps(listing, [t._buffer for t in arguments], [t._buffer for t in results])


def _followed(listing: _Listing, rules: Rules, arguments: list[Tensor], slots: tuple[int, ...]) -> list[Tensor]:
    return executed(rules, arguments[0], dict(zip(slots, arguments[1:], strict=True)), by=listing)


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
