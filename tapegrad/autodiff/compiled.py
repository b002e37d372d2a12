"""Rules as functions of arrays: what a rule does in tensors, written out once as calls of ufuncs.

For small arrays the handling of tensors costs more than the arithmetic.  A rule's operations depend on avals alone, so
they are recorded once, on stand-in values, and become one Python function; it calls the same functions on the same
arrays in the same order, so not a bit differs.  It serves backward walks that nobody records or measures.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tapegrad.autodiff.companions import Listener
from tapegrad.core.aval import ShapedArray
from tapegrad.core.buffer import Buffer
from tapegrad.core.node import Node
from tapegrad.core.state import during, thread
from tapegrad.engine.make import Application
from tapegrad.tensor import Tensor, from_array

Rules = Callable[[Tensor, dict[int, Tensor]], list[Tensor]]


class _Listing(Listener):
    """A recorder that lists every node made, with its operands and its buffer."""

    def __init__(self) -> None:
        self.nodes: list[tuple[Node, tuple[Buffer, ...], Buffer]] = []

    def record(self, node: Node, inputs: tuple[Buffer, ...], out: Buffer) -> None:
        """List it."""
        self.nodes.append((node, inputs, out))


def compile_rules(rules: Rules, ct: ShapedArray, slots: tuple[int, ...], values: list[ShapedArray]) -> Callable:
    """``f(ct, residuals) -> cotangents``: of an array and of buffers, arrays (None: some buffer is not filled).

    ``values``: avals of the residuals in ``slots``.
    """
    seed = _stand_in(ct)
    residuals = [_stand_in(a) for a in values]
    listing = _Listing()
    with ct.device.xp.errstate(all="ignore"):  # the stand-in may lie outside the domain
        results = during(rules, seed, dict(zip(slots, residuals, strict=True)), recorders=(listing,))
    return _Writer(listing, [seed, *residuals]).function(results)


def _stand_in(aval: ShapedArray) -> Tensor:
    array = aval.device.empty(aval.shape, aval.dtype)
    array[...] = 1
    return from_array(array, aval.device)


class _Writer:
    """Writes the listed nodes as the body of a Python function; what no result needs is left out."""

    def __init__(self, listing: _Listing, arguments: list[Tensor]) -> None:
        self.listing = listing
        self.names = {id(t._buffer): f"a{i}" for i, t in enumerate(arguments)}
        self.count = len(arguments)
        self.globals: dict[str, Any] = {}
        self.lines: list[str] = []

    def function(self, results: list[Tensor]) -> Callable:
        for node, inputs, out in self._needed(results):
            operands = ", ".join(self._name(b) for b in inputs)
            name = self.names[id(out)] = f"v{len(self.lines)}"
            self.lines.append(f"    {name} = {self._call(node, operands)}")
        found = ", ".join(self._result(t) for t in results)
        guards = " or ".join(f"a{i} is None" for i in range(self.count))
        head = ["def pull(a0, residuals):"]
        head += [f"    a{i} = residuals[{i - 1}].array" for i in range(1, self.count)]
        head += [f"    if {guards}: return None"]
        exec("\n".join([*head, *self.lines, f"    return ({found},)"]), self.globals)
        return self.globals["pull"]

    def _needed(self, results: list[Tensor]) -> list[tuple[Node, tuple[Buffer, ...], Buffer]]:
        wanted = {id(t._buffer) for t in results}
        kept = []
        for node, inputs, out in reversed(self.listing.nodes):
            if id(out) in wanted:
                wanted.update(id(b) for b in inputs)
                kept.append((node, inputs, out))
        return kept[::-1]

    def _name(self, b: Buffer) -> str:
        """An argument, an earlier result, or a constant."""
        if id(b) not in self.names:
            name = self.names[id(b)] = f"k{len(self.globals)}"
            self.globals[name] = b.array
        return self.names[id(b)]

    def _call(self, node: Node, operands: str) -> str:
        prim = node.prim
        f = f"f{len(self.globals)}"
        if prim.ufunc is not None:
            self.globals[f] = getattr(node.aval.device.xp, prim.ufunc)
        else:
            self.globals[f] = lambda *arrays: thread.executor.do(Application(prim, arrays, node.params, node.aval))[0]
        return f"{f}({operands})"

    def _result(self, t: Tensor) -> str:
        name = self._name(t._buffer)
        if t.ndim:
            return name
        self.globals["asarray"] = t.device.xp.asarray  # ufuncs turn 0-d arrays into scalars
        return f"asarray({name})"
