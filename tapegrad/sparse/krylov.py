"""Iterative solves with implicit derivatives: whatever the iteration did, ``A x = b`` holds at its end.

A solve is one call on the tape.  Backward it solves with the adjoint of ``A``, forward with ``A`` itself, by the same
method; how ``A`` depends on watched values is found by running it once at the solution.  All that happens in tensors,
so derivatives of any order follow, and nothing of the iteration is kept.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from tapegrad.autodiff.batching import Batches
from tapegrad.autodiff.forward import Tangents
from tapegrad.autodiff.functional import vjp
from tapegrad.autodiff.recording import Trace
from tapegrad.autodiff.zeros import zeros_of
from tapegrad.core.buffer import Buffer
from tapegrad.core.node import Node
from tapegrad.core.protocols import Call, Recorder
from tapegrad.core.state import during, thread, unrecorded
from tapegrad.device import dtypes
from tapegrad.device.numerics import scipy
from tapegrad.engine.evaluate import array_of
from tapegrad.errors import DTypeError, GradientError, ShapeError
from tapegrad.ops.dispatch import cast, promote, tensor
from tapegrad.ops.products.products import matmul as dense_matmul
from tapegrad.ops.shape.join import stack
from tapegrad.ops.shape.shape import reshape
from tapegrad.sparse.array import SparseTensor, is_foreign
from tapegrad.sparse.array import matmul as sparse_matmul
from tapegrad.sparse.direct import square
from tapegrad.tensor import Tensor, alias, from_array

Operator = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class _Method:
    """One of SciPy's iterative solvers, with its options; ``hermitian``: it takes only matrices that are their own
    adjoint."""

    name: str
    hermitian: bool
    options: dict[str, Any]

    def run(self, a: Operator, b: Tensor, x0: Tensor | None, m: Operator | None) -> tuple[Tensor, int]:
        """The solution, and SciPy's report: 0, or the number of iterations after which it gave up."""
        start = None if x0 is None else unrecorded(array_of, x0._buffer).reshape(-1)
        x, info = unrecorded(partial(during, self._iterated, a, b, start, m, deferring=None))
        return from_array(x, b.device), int(info)

    def _iterated(self, a: Operator, b: Tensor, start: Any, m: Operator | None) -> tuple[Any, int]:
        device = b.device
        linalg = scipy.sparse(device.xp).linalg
        operators = [None if f is None else self._operator(linalg, f, b) for f in (a, m)]
        with device.active():
            vector = array_of(b._buffer).reshape(-1)
            x, info = getattr(linalg, self.name)(operators[0], vector, start, M=operators[1], **self.options)
            return device.xp.asarray(x, dtype=b.dtype).reshape(b.shape), info

    def _operator(self, linalg: Any, f: Operator, b: Tensor) -> Any:
        def run(vector: Any) -> Any:
            x = from_array(b.device.xp.array(vector, dtype=b.dtype).reshape(b.shape), b.device)
            return array_of(self.applied(f, x)._buffer).reshape(-1)

        return linalg.LinearOperator((b.size, b.size), matvec=run, dtype=b.dtype)

    def applied(self, f: Operator, x: Tensor) -> Tensor:
        """``f(x)``, checked.  Raises ShapeError, DTypeError."""
        y = tensor(self.name, f(x), x)
        if y.shape != x.shape:
            raise ShapeError(f"{self.name}: the operator made {y.shape} of {x.shape}; it must keep the shape")
        if y.dtype.kind == "c" and x.dtype.kind != "c":
            raise DTypeError(f"{self.name}: the operator made {y.dtype} of {x.dtype}; give b that dtype")
        return cast(y, x.dtype)


class _Captures:
    """A recorder that finds what a function uses of the values that the outer recorders follow."""

    def __init__(self, outer: tuple[Recorder, ...]) -> None:
        self._outer = outer
        self._made: set[int] = set()
        self.found: dict[int, Buffer] = {}

    def record(self, node: Node, inputs: tuple[Buffer, ...], out: Buffer) -> None:
        """Note what was not made here and is followed."""
        for b in inputs:
            if b.node.index not in self._made and any(r.follows(b) for r in self._outer):
                self.found[b.node.index] = b
        self._made.add(node.index)

    def read(self, variable: Any, value: Buffer) -> None:
        """Let tapes watch the variable."""
        for r in self._outer:
            r.read(variable, value)

    def follows(self, buffer: Buffer) -> bool:
        """Whether an outer recorder does."""
        return any(r.follows(buffer) for r in self._outer)

    def record_call(self, call: Call, inputs: tuple[Buffer, ...], outputs: tuple[Buffer, ...]) -> None:
        """As for one node."""
        for b in outputs:
            self.record(b.node, inputs, b)


class _Solve:
    """One solve as a tape's record sees it: inputs are ``b`` and what ``A`` depends on."""

    def __init__(
        self, method: _Method, a: Operator, m: Operator | None, b: Tensor, x: Tensor, captured: list[Buffer]
    ) -> None:
        self.name = method.name
        self._method, self._a, self._m = method, a, m
        self._b, self._x = b, x
        self._captured = captured
        self.again: Callable[[list[Any]], list[Any]] | None = None

    def _at(self) -> Tensor:
        """The solution as outer recorders know it: solved again from where it ended, which takes one look."""
        return _solved(self._method, self._a, self._m, self._b, self._x)[0] if thread.recorders else self._x

    def _again(self, taken: list[Any]) -> list[Any]:
        """The solution for another ``b``, as vmap asks for it.  Raises GradientError if ``A`` is to differ."""
        if any(t._buffer is not b for t, b in zip(taken[1:], self._captured, strict=True)):
            raise GradientError(
                f"{self.name}: the operator differs from example to example of a vmap; use spsolve, or loop over them"
            )
        return [_solved(self._method, self._a, self._m, taken[0], None)[0]]

    def pullback(self, cts: list[Any], needed: frozenset[int], lead: int | None, come: dict[int, Any]) -> list[Any]:
        """``db`` from the adjoint solve; the rest by pulling ``-db`` through ``A`` at the solution."""
        (ct,) = cts
        if lead is None:
            return self._pulled(ct, needed)
        rows = [self._pulled(ct[i], needed) for i in range(lead)]
        columns = zip(*rows, strict=True)
        return [None if all(g is None for g in column) else _stacked(column) for column in columns]

    def _pulled(self, ct: Tensor, needed: frozenset[int]) -> list[Any]:
        adjoint, m = self._a, self._m
        if not self._method.hermitian:
            adjoint, m = _adjoint(self._a, self._b), None if m is None else _adjoint(m, self._b)
        found: list[Any] = [None] * (1 + len(self._captured))
        found[0] = _solved(self._method, adjoint, m, ct, None)[0]
        places = [i for i in range(len(self._captured)) if i + 1 in needed]
        if places:
            x = self._at()
            trace = Trace(self._captured[i].node for i in places)
            y = trace.during(self._method.applied, self._a, x)
            for i, g in zip(places, trace.pull({y._buffer.node.index: -found[0]}), strict=True):
                found[i + 1] = g
        return found

    def pushforward(self, tangents: list[Any]) -> list[Any]:
        """``A^-1 (db - dA x)``."""
        right = tangents[0]
        moving = [(b, t) for b, t in zip(self._captured, tangents[1:], strict=True) if t is not None]
        if moving:
            x = self._at()
            tangents_of = Tangents()

            def applied() -> Tensor:
                for b, t in moving:
                    tangents_of.seed(Tensor(b), t)
                return self._method.applied(self._a, x)

            moved = tangents_of.pushed(tangents_of.during(applied))
            if moved is not None:
                right = -moved if right is None else right - moved
        return [None if right is None else _solved(self._method, self._a, self._m, right, None)[0]]


def _stacked(column: tuple[Any, ...]) -> Tensor:
    known = next(g for g in column if g is not None)
    return stack([zeros_of(known._buffer.node.aval) if g is None else g for g in column])


def _adjoint(a: Operator, like: Tensor) -> Operator:
    pull = vjp(a, zeros_of(like._buffer.node.aval))[1]
    return lambda ct: pull(ct)[0]


def _solved(method: _Method, a: Operator, m: Operator | None, b: Tensor, x0: Tensor | None) -> tuple[Tensor, int]:
    x, info = method.run(a, b, x0, m)
    outer = thread.recorders
    if not outer:
        return x, info
    captures = _Captures(outer)
    during(method.applied, a, x, recorders=(captures,))
    out = Tensor(alias(x._buffer))
    call = _Solve(method, a, m, b, x, list(captures.found.values()))
    inputs = (b._buffer, *captures.found.values())
    if isinstance(outer[0], Batches):
        _batched(outer[0], call, inputs, out)
    call.again = call._again
    for recorder in outer:
        recorder.record_call(call, inputs, (out._buffer,))
    call.again = None  # a method of its own would be a cycle
    return out, info


def _batched(batches: Batches, call: _Solve, inputs: tuple[Buffer, ...], out: Tensor) -> None:
    """The solutions of all examples of the outermost vmap, which nobody else would compute."""
    companions = [batches.pushed(Tensor(b)) for b in inputs]
    if any(c is not None for c in companions) and batches.n:
        pairs = list(zip(inputs, companions, strict=True))

        def solve() -> None:
            again = call._again
            rows = [again([Tensor(b) if c is None else c[i] for b, c in pairs])[0] for i in range(batches.n)]
            batches.seed(out, stack(rows))

        batches.alone(solve)


def _operator(op: str, a: Any, b: Tensor) -> Operator:
    """A matrix or a function as a function of tensors.  Raises ShapeError, DTypeError."""
    if isinstance(a, SparseTensor) or is_foreign(a):
        matrix = square(op, a)
        return lambda x: sparse_matmul(matrix, x)
    if callable(a):
        return a
    t = tensor(op, a, b)
    if t.ndim != 2 or t.shape[0] != t.shape[1]:
        raise ShapeError(f"{op}: a matrix of shape {t.shape}; need a square one, or a function")
    return lambda x: dense_matmul(t, x)


def _iterate(method: _Method, a: Any, b: Any, x0: Any, m: Any) -> tuple[Tensor, int]:
    op = method.name
    (right,) = promote(op, (b,), dtypes.in_float)
    if isinstance(a, SparseTensor) and dtypes.is_inexact(a.dtype):
        right = cast(right, dtypes.result_type(right.dtype, a.dtype))
    if not callable(a) and right.ndim == 2 and right.shape[1] == 1:  # SciPy takes a column, too
        found, info = _iterate(method, a, reshape(right, (-1,)), None if x0 is None else reshape(x0, (-1,)), m)
        return reshape(found, right.shape), info
    if not callable(a) and right.ndim != 1:
        raise ShapeError(f"{op}: a right-hand side {right.shape}; need (n,), or spsolve for several columns")
    start = None
    if x0 is not None:
        start = cast(tensor(op, x0, right), right.dtype)
        if start.shape != right.shape:
            raise ShapeError(f"{op}: x0 has shape {start.shape}, b {right.shape}")
    operator = _operator(op, a, right)
    if not callable(a) and a.shape[1] != right.shape[0]:
        raise ShapeError(f"{op}: a matrix {tuple(a.shape)} and a right-hand side {right.shape}")
    preconditioner = None if m is None else _operator(op, m, right)
    return _solved(method, operator, preconditioner, right, start)


def cg(
    A: Any, b: Any, x0: Any = None, *, rtol: float = 1e-5, atol: float = 0.0, maxiter: int | None = None, M: Any = None
) -> tuple[Tensor, int]:
    """Solve ``A x = b`` for a Hermitian positive definite ``A`` by conjugate gradients (scipy.sparse.linalg.cg).

    A: a function of a tensor like ``b``, linear in it, or a matrix: sparse, or dense ``(n, n)``; b: ``(n,)``, or of any
    shape for a function; M: an approximate inverse, likewise.  Returns ``x`` and 0, or the number of iterations done
    without reaching ``norm(b - A x) <= max(rtol * norm(b), atol)``.  Gradients for ``b`` and for all that ``A`` depends
    on, as accurate as the solve; ``x0`` and ``M`` get none.  Raises ShapeError, DTypeError.
    """
    options = {"rtol": rtol, "atol": atol, "maxiter": maxiter}
    return _iterate(_Method("cg", True, options), A, b, x0, M)


def gmres(
    A: Any,
    b: Any,
    x0: Any = None,
    *,
    rtol: float = 1e-5,
    atol: float = 0.0,
    restart: int | None = None,
    maxiter: int | None = None,
    M: Any = None,
) -> tuple[Tensor, int]:
    """Solve ``A x = b`` for any invertible ``A`` by restarted GMRES (scipy.sparse.linalg.gmres); see :func:`cg`.

    restart: iterations between restarts (SciPy's default: 20).  Raises ShapeError, DTypeError.
    """
    options = {"rtol": rtol, "atol": atol, "restart": restart, "maxiter": maxiter}
    return _iterate(_Method("gmres", False, options), A, b, x0, M)
