"""Iterative solves with implicit derivatives: whatever the iteration did, ``A x = b`` holds at its end.

A solve is one call on the tape.  Backward it solves with the adjoint of ``A``, forward with ``A`` itself, by the same
method; running it once at the solution shows how ``A`` depends on watched values.  All of this is done in tensors, so
there are derivatives of any order, and nothing of the iteration is kept.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any, TypeAlias

from tapegrad.autodiff.batching import Batches
from tapegrad.autodiff.collective_walk import told
from tapegrad.autodiff.forward import Tangents
from tapegrad.autodiff.functional import vjp
from tapegrad.autodiff.recording import Trace
from tapegrad.autodiff.zeros import zeros_of
from tapegrad.core.aval import Shape
from tapegrad.core.buffer import Buffer
from tapegrad.core.node import Node
from tapegrad.core.protocols import Call, Recorder
from tapegrad.core.state import during, thread, unrecorded
from tapegrad.device import dtypes
from tapegrad.device.numerics import bits, scipy
from tapegrad.device.types import Array
from tapegrad.engine.realize import array_of
from tapegrad.errors import DistributedError, DTypeError, GradientError, ShapeError
from tapegrad.ops import reshape, stack
from tapegrad.ops.dispatch import cast, promote, tensor
from tapegrad.ops.products.products import matmul as dense_matmul
from tapegrad.sparse import iterations
from tapegrad.sparse.array import SparseLike, SparseTensor, is_sparse
from tapegrad.sparse.array import matmul as sparse_matmul
from tapegrad.sparse.direct import square
from tapegrad.sparse.iterations import Reduce, System
from tapegrad.tensor import Tensor, TensorLike, alias, from_array

Operator: TypeAlias = Callable[[Tensor], Tensor]
Matrix: TypeAlias = "TensorLike | SparseLike | Operator"
_BLOCKS = (
    "let each rank have a block of one vector, and give reduce=tg.distributed.all_reduce: cut b by b[part(n)], call "
    "all_gather at the beginning of the operator, reduce_scatter at its end, and all_gather on the solution"
)


class _Noting:
    """A function, and the operations of its first call in which other processes take part."""

    def __init__(self, f: Callable[[Tensor], Any]) -> None:
        self._f = f
        self.effects: Sequence[Node] | None = None
        """None: it was not called."""

    def __call__(self, x: Tensor) -> Any:
        if self.effects is not None:
            return self._f(x)
        captures = _Captures(())
        y = during(self._f, x, recorders=(*thread.recorders, captures))
        self.effects = captures.effects
        return y


@dataclass(frozen=True)
class _Method:
    """One of the iterative solvers, with its options; ``hermitian``: it takes only matrices that are their own adjoint.

    ``reduce``: sums over processes, of which each has a block of the vectors; None: each has whole vectors.
    """

    name: str
    hermitian: bool
    reduce: Reduce | None
    options: dict[str, Any]

    def run(self, a: Operator, b: Tensor, x0: Tensor | None, m: Operator | None) -> tuple[Tensor, int, Sequence[Node]]:
        """The solution, SciPy's report (0, or the number of iterations after which it gave up), and who takes part.

        Raises DistributedError on every rank if ``a`` has collectives, and whole vectors are not the same on all.
        """
        notings = [None if f is None else _Noting(f) for f in (m, self.reduce)]
        operator, (inverse, reduce) = _Noting(a), notings
        if reduce is None:
            x, info = unrecorded(partial(during, self._by_scipy, operator, b, x0, inverse, deferring=None))
        else:
            inverted = None if inverse is None else partial(self.applied, inverse)
            system = System(self.name, partial(self.applied, operator), inverted, b, reduce)
            solve = partial(getattr(iterations, self.name), system, x0, **self.options)
            x, info = unrecorded(partial(during, solve, deferring=None))
        return x, int(info), [node for f in (operator, *notings) if f is not None for node in f.effects or ()]

    def _by_scipy(self, a: _Noting, b: Tensor, x0: Tensor | None, m: _Noting | None) -> tuple[Tensor, int]:
        start = None if x0 is None else array_of(x0._buffer).reshape(-1)
        x, info = self._iterated(a, b, start, m)
        if a.effects is None:  # of a zero b; those that others have may not be zero
            self.applied(a, b)
            self._check_whole(a, b, start)
        return from_array(x, b.device), info

    def _check_whole(self, a: _Noting, b: Tensor, start: Array | None) -> None:
        if a.effects:
            arrays = [x for x in (array_of(b._buffer), start) if x is not None]
            sums = lambda: [bits.checksum(b.device.numpy(x)) for x in arrays]
            everyone = told(a.effects, (self.name, thread.executor.in_earnest(sums, [b""])))
            if any(theirs != everyone[0] for theirs in everyone):
                raise DistributedError(
                    f"{self.name}: the operator has collectives ({a.effects[0].prim.name}), but b or x0 is not the "
                    f"same on all ranks: {_BLOCKS}"
                )

    def _iterated(self, a: _Noting, b: Tensor, start: Array | None, m: _Noting | None) -> tuple[Array, int]:
        device = b.device
        linalg = scipy.sparse(device.xp).linalg
        operators = [None if f is None else self._operator(linalg, f, b, start) for f in (a, m)]
        with device.active():
            vector = array_of(b._buffer).reshape(-1)
            x, info = getattr(linalg, self.name)(operators[0], vector, start, M=operators[1], **self.options)
            return device.xp.asarray(x, dtype=b.dtype).reshape(b.shape), info

    def _operator(self, linalg: ModuleType, f: _Noting, b: Tensor, start: Array | None) -> Any:
        """The library's LinearOperator."""

        def matvec(vector: Array) -> Array:
            x = from_array(b.device.xp.array(vector, dtype=b.dtype).reshape(b.shape), b.device)
            first = f.effects is None
            y = array_of(self.applied(f, x)._buffer).reshape(-1)
            if first:
                self._check_whole(f, b, start)
            return y

        return linalg.LinearOperator((b.size, b.size), matvec=matvec, dtype=b.dtype)

    def applied(self, f: Operator, x: Tensor) -> Tensor:
        """``f(x)``, checked.  Raises ShapeError, DTypeError."""
        y = tensor(self.name, f(x), x)
        if y.shape != x.shape:
            raise ShapeError(f"{self.name}: the operator made {y.shape} of {x.shape}; it must keep the shape")
        if y.dtype.kind == "c" and x.dtype.kind != "c":
            raise DTypeError(f"{self.name}: the operator made {y.dtype} of {x.dtype}; give b that dtype")
        return cast(y, x.dtype)


class _Captures:
    """A recorder of the values that the outer recorders follow and a function uses."""

    def __init__(self, outer: tuple[Recorder, ...]) -> None:
        self._outer = outer
        self._made: set[int] = set()
        self.used: dict[int, Buffer] = {}
        self.effects: list[Node] = []
        """Operations in which other processes take part."""

    def record(self, node: Node, inputs: tuple[Buffer, ...], out: Buffer) -> None:
        """Note inputs that come from outside and are followed."""
        if node.prim.effect is not None:
            self.effects.append(node)
        for b in inputs:
            if b.node.index not in self._made and any(r.follows(b) for r in self._outer):
                self.used[b.node.index] = b
        self._made.add(node.index)

    def read(self, variable: object, value: Buffer) -> None:
        """Let tapes watch the variable."""
        for r in self._outer:
            r.read(variable, value)

    def follows(self, buffer: Buffer) -> bool:
        """Whether an outer recorder follows it."""
        return any(r.follows(buffer) for r in self._outer)

    def record_call(self, call: Call, inputs: tuple[Buffer, ...], outputs: tuple[Buffer, ...]) -> None:
        """As for one node."""
        self.effects += call.effects
        for b in outputs:
            self.record(b.node, inputs, b)


class _Solve:
    """One solve as a tape's record sees it: inputs are ``b`` and what ``A`` depends on."""

    def __init__(
        self, method: _Method, a: Operator, m: Operator | None, b: Tensor, x: Tensor, captured: list[Buffer],
        effects: Sequence[Node],
    ) -> None:  # fmt: skip
        self.name, self.effects = method.name, effects
        self._method, self._a, self._m = method, a, m
        self._b, self._x = b, x
        self._captured = captured
        self.again: Callable[[list[Tensor]], list[Tensor]] | None = None

    def _at(self) -> Tensor:
        """The solution for outer recorders: a solve that starts at the solution, so it takes no iteration."""
        return _solved(self._method, self._a, self._m, self._b, self._x)[0] if thread.recorders else self._x

    def _again(self, inputs: list[Tensor]) -> list[Tensor]:
        """The solution for another ``b``, as vmap asks for it.  Raises GradientError if ``A`` is to differ."""
        if any(t._buffer is not b for t, b in zip(inputs[1:], self._captured, strict=True)):
            raise GradientError(
                f"{self.name}: the operator differs from example to example of a vmap; use spsolve, or loop over them"
            )
        return [_solved(self._method, self._a, self._m, inputs[0], None)[0]]

    def pullback(self, cts: list[Any], needed: frozenset[int], lead: int | None, come: dict[int, Any]) -> list[Any]:
        """``db`` from the adjoint solve; the rest by pulling ``-db`` through ``A`` at the solution."""
        if self.effects and self._method.reduce is None:
            raise DistributedError(
                f"{self.name}: a solve whose operator has collectives ({self.effects[0].prim.name}) and whose vectors "
                f"every rank has as a whole has no gradient: {_BLOCKS}"
            )
        ct = zeros_of(self._x._buffer.node.aval, lead) if cts[0] is None else cts[0]
        if lead is None:
            return self._pulled(ct, needed)
        rows = [self._pulled(ct[i], needed) for i in range(lead)]
        columns = zip(*rows, strict=True)
        return [None if all(g is None for g in column) else _stacked(column) for column in columns]

    def _pulled(self, ct: Tensor, needed: frozenset[int]) -> list[Tensor | None]:
        adjoint, m = self._a, self._m
        if not self._method.hermitian:
            adjoint, m = _adjoint(self._a, self._b), None if m is None else _adjoint(m, self._b)
        db = _solved(self._method, adjoint, m, ct, None)[0]
        cotangents: list[Tensor | None] = [db, *[None] * len(self._captured)]
        pulled = [i for i in range(len(self._captured)) if i + 1 in needed]
        if pulled or self.effects:  # elsewhere something may be pulled
            x = self._at()
            trace = Trace(self._captured[i].node for i in pulled)
            y = trace.during(self._method.applied, self._a, x)
            for i, g in zip(pulled, trace.pull({y._buffer.node.index: -db}), strict=True):
                cotangents[i + 1] = g
        return cotangents

    def pushforward(self, tangents: list[Tensor | None]) -> list[Tensor | None]:
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


def _stacked(column: tuple[Tensor | None, ...]) -> Tensor:
    known = next(g for g in column if g is not None)
    return stack([zeros_of(known._buffer.node.aval) if g is None else g for g in column])


def _adjoint(a: Operator, like: Tensor) -> Operator:
    pull = vjp(a, zeros_of(like._buffer.node.aval))[1]
    return lambda ct: pull(ct)[0]


def _solved(method: _Method, a: Operator, m: Operator | None, b: Tensor, x0: Tensor | None) -> tuple[Tensor, int]:
    x, info, effects = method.run(a, b, x0, m)
    outer = thread.recorders
    if not outer:
        return x, info
    captures = _Captures(outer)
    during(method.applied, a, x, recorders=(captures,))
    out = Tensor(alias(x._buffer))
    call = _Solve(method, a, m, b, x, list(captures.used.values()), effects)
    inputs = (b._buffer, *captures.used.values())
    if isinstance(outer[0], Batches):
        _batched(outer[0], call, inputs, out)
    call.again = call._again
    for recorder in outer:
        recorder.record_call(call, inputs, (out._buffer,))
    call.again = None  # a bound method would make a cycle
    return out, info


def _batched(batches: Batches, call: _Solve, inputs: tuple[Buffer, ...], out: Tensor) -> None:
    """The solutions of all examples of the outermost vmap, which are computed here only."""
    companions = [batches.pushed(Tensor(b)) for b in inputs]
    if any(c is not None for c in companions) and batches.n:
        pairs = list(zip(inputs, companions, strict=True))

        def solve() -> None:
            again = call._again
            rows = [again([Tensor(b) if c is None else c[i] for b, c in pairs])[0] for i in range(batches.n)]
            batches.seed(out, stack(rows))

        batches.alone(solve)


def _operator(op: str, a: Matrix, b: Tensor) -> Operator:
    """A matrix or a function as a function of tensors.  Raises ShapeError, DTypeError."""
    if is_sparse(a):
        matrix = square(op, a)
        shape: Shape = matrix.shape
        product: Operator = lambda x: sparse_matmul(matrix, x)
    elif callable(a):
        return a
    else:
        t = tensor(op, a, b)
        shape, product = t.shape, lambda x: dense_matmul(t, x)
        if t.ndim != 2 or t.shape[0] != t.shape[1]:
            raise ShapeError(f"{op}: a matrix of shape {t.shape}; need a square one, or a function")
    if b.ndim == 1 and shape[1] != b.shape[0]:
        raise ShapeError(f"{op}: a matrix {shape} and a right-hand side {b.shape}")
    return product


def _iterate(method: _Method, a: Matrix, b: TensorLike, x0: TensorLike | None, m: Matrix | None) -> tuple[Tensor, int]:
    op = method.name
    (right,) = promote(op, (b,), dtypes.in_float)
    if isinstance(a, SparseTensor) and dtypes.is_inexact(a.dtype):
        right = cast(right, dtypes.result_type(right.dtype, a.dtype))
    if not callable(a) and right.ndim == 2 and right.shape[1] == 1:  # SciPy takes a column, too
        x, info = _iterate(method, a, reshape(right, (-1,)), None if x0 is None else reshape(x0, (-1,)), m)
        return reshape(x, right.shape), info
    if not callable(a) and right.ndim != 1:
        raise ShapeError(f"{op}: a right-hand side {right.shape}; need (n,), or spsolve for several columns")
    start = None
    if x0 is not None:
        start = cast(tensor(op, x0, right), right.dtype)
        if start.shape != right.shape:
            raise ShapeError(f"{op}: x0 has shape {start.shape}, b {right.shape}")
    return _solved(method, _operator(op, a, right), None if m is None else _operator(op, m, right), right, start)


def cg(
    A: Matrix,
    b: TensorLike,
    x0: TensorLike | None = None,
    *,
    rtol: float = 1e-5,
    atol: float = 0.0,
    maxiter: int | None = None,
    M: Matrix | None = None,
    reduce: Reduce | None = None,
) -> tuple[Tensor, int]:
    """Solve ``A x = b`` for a Hermitian positive definite ``A`` by conjugate gradients (scipy.sparse.linalg.cg).

    A: a function of a tensor like ``b``, linear in it, or a matrix: sparse, or dense ``(n, n)``; b: ``(n,)``, or of any
    shape for a function; M: an approximate inverse, likewise.  Returns ``x`` and 0, or the number of iterations done
    without reaching ``norm(b - A x) <= max(rtol * norm(b), atol)``.  Gradients for ``b`` and for all that ``A`` depends
    on, as accurate as the solve; ``x0`` and ``M`` get none.

    reduce: where ``b`` and ``x`` are each rank's blocks of one vector, and ``A`` has collectives
    (``tg.distributed.halo_exchange``, say), the function that sums inner products over ranks:
    ``tg.distributed.all_reduce``.  Without it every rank has the whole ``b``, and there are no gradients through
    collectives.

    Raises ShapeError, DTypeError; DistributedError on every rank if ``A`` has collectives and ``reduce`` is missing.
    """
    options = {"rtol": rtol, "atol": atol, "maxiter": maxiter}
    return _iterate(_Method("cg", True, reduce, options), A, b, x0, M)


def gmres(
    A: Matrix,
    b: TensorLike,
    x0: TensorLike | None = None,
    *,
    rtol: float = 1e-5,
    atol: float = 0.0,
    restart: int | None = None,
    maxiter: int | None = None,
    M: Matrix | None = None,
    reduce: Reduce | None = None,
) -> tuple[Tensor, int]:
    """Solve ``A x = b`` for any invertible ``A`` by restarted GMRES (scipy.sparse.linalg.gmres); see :func:`cg`.

    restart: iterations between restarts (SciPy's default: 20).  Raises ShapeError, DTypeError.
    """
    options = {"rtol": rtol, "atol": atol, "restart": restart, "maxiter": maxiter}
    return _iterate(_Method("gmres", False, reduce, options), A, b, x0, M)
