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
Together = Callable[[Any, Sequence[Any], Any], Sequence[Any] | None]
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
    ``together(ct, residuals, who)``: the same from what has arrays, as cotangents, of which ``who``, the account in
    force, is told in one step (None: the steps must be run one by one).
    """

    def __init__(
        self, constants: list[Constant], steps: list[Step], results: list[int], arguments: list[ShapedArray]
    ) -> None:
        self._constants, self._steps, self._results = constants, steps, results
        self._arguments = len(arguments)
        self._first = len(arguments) + len(constants)
        self.pull: Pull = self._pull()
        self._made = [i for i in dict.fromkeys(results) if i >= self._first]
        self._tellable = self._runs(arguments)
        self.together: Together = self._first_together
        for c in constants:  # there from now on, as if the rules had run
            constant(*c)

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

    def _runs(self, arguments: list[ShapedArray]) -> tuple[Run, Run] | None:
        """What an account is told, and where the cotangent is one element, repeated; None: it must follow each step."""
        if self._constants and not all(a.ndim for a in arguments):  # one of them may be a constant itself
            return None
        if any(self._arguments <= i < self._first for i in self._results):
            return None
        if any(step.site is None or not step.site.small for step in self._steps):
            return None
        sizes = [a.nbytes for a in arguments] + [dtype.itemsize for _, dtype, _ in self._constants]
        return self._run(sizes), self._run([arguments[0].dtype.itemsize, *sizes[1:]])

    def _run(self, sizes: list[int]) -> Run:
        """The run of the steps, if their operands have so many bytes."""
        nodes = []
        for step in self._steps:
            nbytes = step.aval.nbytes
            moved = sum([sizes[i] for i in set(step.operands)]) + nbytes
            gone = tuple([i - self._first for i in step.dead if i >= self._first])
            nodes.append(Evaluated(step.prim.name, nbytes, moved, gone))
            sizes.append(nbytes)
        return Run(tuple(nodes), tuple([i - self._first for i in self._made]))

    def _first_together(self, ct: Any, residuals: Sequence[Any], who: Any) -> Sequence[Any] | None:
        self.together = self._together()
        return self.together(ct, residuals, who)

    # Code ------------------------------------------------------------------------------------------------------

    def _pull(self) -> Pull:
        arguments = [f"a{i}" for i in range(self._arguments)]
        lines = [f"a{i} = residuals[{i - 1}].array" for i in range(1, self._arguments)]
        lines.append(f"if {' or '.join(f'{a} is None' for a in arguments)}: return None")
        known, names = self._run_on_arrays(lines)
        return _compiled("pull(a0, residuals)", [*lines, f"return {_tuple(names[i] for i in self._results)}"], known)

    def _together(self) -> Together:
        """Each array must have bytes of its own and come once; only the cotangent may be one element, repeated."""
        if self._tellable is None:
            return _nothing_together
        rest = range(1, self._arguments)
        lines = ["try:", "    a0 = ct.array"]  # a plain array has none
        lines += [f"    a{i} = residuals[{i - 1}].array" for i in rest]
        if self._steps:  # what is not there has no base
            lines.append("    base = a0.base")
            tests = [f"a{i}.base is not None" for i in rest] + [f"a{i} is a{k}" for i in rest for k in range(i)]
            lines += [f"    if {' or '.join(tests)}: return None"] if tests else []
        lines += ["except AttributeError: return None"]
        if self._steps:
            lines += ["if base is None or type(ct) is Cotangent: run = own"]
            lines += ["elif any(a0.strides) or not a0.size: return None", "else: run = spread"]
        else:
            lines += [f"if {' or '.join(f'a{i} is None' for i in (0, *rest))}: return None"]
        constants = {f"c{i}": c for i, c in enumerate(self._constants)}
        if constants:
            lines.append(f"if {' or '.join(f'{c}() is None' for c in constants)}: share(globals())")
        known, names = self._run_on_arrays(lines)
        known["own"], known["spread"] = self._tellable
        known.update(constants=constants, share=_share, Cotangent=Cotangent)
        _share(known)
        if self._made:
            lines.append(f"if not who.pulled(run, {', '.join(names[i] for i in self._made)}): return None")
        for i in self._made:
            lines.append(f"g{i} = Cotangent(); g{i}.array = {names[i]}; g{i}.step = s{i}")
            known[f"s{i}"] = self._steps[i - self._first]
        results = [f"g{i}" if i >= self._first else f"residuals[{i - 1}]" if i else "ct" for i in self._results]
        return _compiled("together(ct, residuals, who)", [*lines, f"return {_tuple(results)}"], known)

    def _run_on_arrays(self, lines: list[str]) -> tuple[dict[str, Any], list[str]]:
        """Add the lines that run the steps on arrays; what they refer to by name, and the names of all values."""
        names = [f"a{i}" for i in range(self._arguments)]
        known: dict[str, Any] = {}
        for value, dtype, device in self._constants:
            names.append(f"k{len(names)}")
            known[names[-1]] = device.constant(value, dtype)
        for step in self._steps:
            name, f = f"v{len(names)}", f"f{len(names)}"
            known[f] = _on_arrays(step.prim, step.params, step.aval, step.site)
            lines.append(f"{name} = {f}({', '.join(names[i] for i in step.operands)})")
            names.append(name)
            lines += [f"del {names[i]}" for i in step.dead if i >= self._first]
        for i in dict.fromkeys(self._results):
            if i >= self._first and not (aval := self._steps[i - self._first].aval).ndim:
                known["asarray"] = aval.device.xp.asarray  # ufuncs turn 0-d arrays into scalars
                lines.append(f"{names[i]} = asarray({names[i]})")
        return known, names


def _compiled(head: str, lines: list[str], known: dict[str, Any]) -> Any:
    """The function of that head and these lines."""
    exec("\n".join([f"def {head}:", *(f"    {line}" for line in lines)]), known)
    return known.pop(head.partition("(")[0])  # otherwise the two would refer to each other


def _tuple(parts: Iterable[str]) -> str:
    return f"({''.join(f'{part}, ' for part in parts)})"


def _nothing_together(ct: Any, residuals: Sequence[Any], who: Any) -> None:
    """Steps of which no account can be told in one."""


def _share(known: dict[str, Any]) -> None:
    """Let there be the shared constants that a function reads."""
    known.update({name: ref(constant(*c)) for name, c in known["constants"].items()})


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
