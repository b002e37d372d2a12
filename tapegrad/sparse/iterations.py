"""Conjugate gradients and GMRES for vectors of which each process has a block: inner products are sums over all.

SciPy's serve a process that has whole vectors.  Here every decision rests on sums that all processes have with the same
bits, so all take the same steps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf, sqrt
from typing import Any

from tapegrad.device import CPU
from tapegrad.engine.realize import realize
from tapegrad.errors import ShapeError
from tapegrad.ops import asarray, stack, vdot, zeros_like
from tapegrad.tensor import Tensor, TensorLike

Operator = Callable[[Tensor], Tensor]
Reduce = Callable[[Tensor], TensorLike]


@dataclass(frozen=True)
class System:
    """``a(x) = b``; ``m``: an approximate inverse of ``a``; ``reduce`` sums a tensor over processes, elementwise."""

    name: str
    a: Operator
    m: Operator | None
    b: Tensor
    reduce: Reduce

    def inverted(self, x: Tensor) -> Tensor:
        """About the solution for another right-hand side."""
        return x if self.m is None else self.m(x)

    def dots(self, *pairs: tuple[Tensor, Tensor]) -> list[Any]:
        """Inner products of whole vectors: Python's numbers.  Raises ShapeError."""
        return self._summed(stack([vdot(x, y) for x, y in pairs]))

    def norm(self, x: Tensor) -> float:
        """Of the whole vector."""
        return sqrt(self.dots((x, x))[0].real)

    def size(self) -> int:
        """Of whole vectors."""
        return int(self._summed(asarray([self.b.size]))[0])

    def _summed(self, parts: Tensor) -> list[Any]:
        total = asarray(self.reduce(parts))
        if total.shape != parts.shape:
            raise ShapeError(f"{self.name}: reduce made {total.shape} of {parts.shape}; it must sum over ranks alone")
        numbers: list[Any] = total._read().tolist()
        return numbers


def cg(system: System, start: Tensor | None, rtol: float, atol: float, maxiter: int | None) -> tuple[Tensor, int]:
    """The solution by conjugate gradients, and SciPy's report; two sums over processes for each iteration."""
    b = system.b
    least = max(rtol * system.norm(b), atol)
    most = 10 * system.size() if maxiter is None else maxiter
    x, r = (zeros_like(b), b) if start is None else (start, b - system.a(start))
    p, before = b, 0.0
    for k in range(most):
        z = system.inverted(r)
        squares, rho = system.dots((r, r), (r, z))
        if sqrt(squares.real) <= least:
            return x, 0
        p = z + (rho / before) * p if k else z
        q = system.a(p)
        curvature = system.dots((p, q))[0]
        if not curvature:
            break
        x, r, before = x + (rho / curvature) * p, r - (rho / curvature) * q, rho
        realize((x._buffer, r._buffer))
    return x, most


def gmres(
    system: System, start: Tensor | None, rtol: float, atol: float, restart: int | None, maxiter: int | None
) -> tuple[Tensor, int]:
    """The solution by restarted GMRES, preconditioned from the right, and SciPy's report.

    Three sums over processes for each iteration: vectors are made orthogonal twice, to all before them at once.
    """
    b = system.b
    least = max(rtol * system.norm(b), atol)
    size = system.size() if restart is None or maxiter is None else 0
    each, most = min(20, size) if restart is None else restart, 10 * size if maxiter is None else maxiter
    x = zeros_like(b) if start is None else start
    r = b if start is None else b - system.a(x)
    for _ in range(most):
        length = system.norm(r)
        if length <= least:
            return x, 0
        if not length < inf:
            return x, most
        x = x + system.inverted(_correction(system, r, length, each, least))
        r = b - system.a(x)
        realize((x._buffer, r._buffer))
    return x, 0 if system.norm(r) <= least else most


def _correction(system: System, r: Tensor, length: float, most: int, least: float) -> Tensor:
    """The vector of a Krylov space of at most ``most`` dimensions whose image is nearest to ``r``, of that length."""
    vectors, xp = [r / length], CPU.xp
    projected = xp.zeros((most + 1, most), xp.result_type(r.dtype, xp.float64))
    found = xp.zeros(0)
    for k in range(most):
        w = system.a(system.inverted(vectors[-1]))
        for _ in range(2):
            parts = system.dots(*((v, w) for v in vectors))
            projected[: k + 1, k] += parts
            w = w - _combined(parts, vectors)
            realize((w._buffer,))
        projected[k + 1, k] = system.norm(w)
        if not xp.isfinite(projected[: k + 2, k]).all():
            return w
        right = xp.zeros(k + 2)
        right[0] = length
        found = xp.linalg.lstsq(projected[: k + 2, : k + 1], right, rcond=None)[0]
        left = xp.linalg.norm(right - projected[: k + 2, : k + 1] @ found)
        if left <= least or abs(projected[k + 1, k]) <= 1e-14 * xp.abs(projected[: k + 1, k]).max():
            break
        vectors.append(w / float(projected[k + 1, k].real))
    return _combined(found.tolist(), vectors)


def _combined(numbers: Sequence[complex], vectors: Sequence[Tensor]) -> Tensor:
    total = numbers[0] * vectors[0]
    for c, v in zip(numbers[1:], vectors[1:], strict=False):
        total = total + c * v
    return total
