"""Checking derivatives: against central differences, forward against reverse, to any order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tapegrad import nest, random
from tapegrad.autodiff.functional import jvp, vjp
from tapegrad.errors import TapegradError
from tapegrad.ops.create.creation import asarray
from tapegrad.ops.elementwise.complex import conj, real
from tapegrad.ops.reduce.reductions import sum
from tapegrad.tensor import Tensor, TensorLike


class DerivativeError(TapegradError, AssertionError):
    """A derivative differs from differences, or from that of the other mode."""


def check_grads(
    f: Callable[..., object],
    args: Sequence[TensorLike],
    order: int = 2,
    modes: Sequence[str] = ("fwd", "rev"),
    eps: float = 1e-5,
    rtol: float = 1e-4,
    atol: float = 1e-6,
    seed: int = 0,
) -> None:
    """Check ``f``'s derivatives at ``args`` up to ``order`` along random directions.

    Forward mode against central differences; reverse mode against forward mode by the adjoint identity
    ``<ct, J t> = <J' ct, t>``; each order differentiates the one below.  ``args``: float64 or complex128 arrays or
    tensors, in the interior of the domain (complex: both parts are moved, and ``<a, b> = Re sum(conj(a) b)``).  Raises
    DerivativeError naming the order and mode.
    """
    generator = random.Generator(seed)
    _check(f, [asarray(a) for a in args], 1, order, tuple(modes), eps, rtol, atol, generator)


def _check(
    f: Callable[..., object],
    xs: list[Tensor],
    level: int,
    order: int,
    modes: tuple[str, ...],
    eps: float,
    rtol: float,
    atol: float,
    g: random.Generator,
) -> None:
    ts = [_direction(x, g) for x in xs]
    up = nest.flatten(f(*[x + eps * t for x, t in zip(xs, ts, strict=True)]))
    down = nest.flatten(f(*[x - eps * t for x, t in zip(xs, ts, strict=True)]))
    numeric = [(a - b) / (2 * eps) for a, b in zip(up, down, strict=True)]
    cts = [_direction(n, g) for n in numeric]
    expected = _inner(cts, numeric)
    if "fwd" in modes:
        pushed = nest.flatten(jvp(f, tuple(xs), tuple(ts))[1])
        for n, p in zip(numeric, pushed, strict=True):
            _compare(f"order {level}, forward mode against differences", p.numpy(), n.numpy(), rtol, atol)
    if "rev" in modes:
        y, pull = vjp(f, *xs)
        pulled = pull(nest.rebuild(y, iter(cts)))
        _compare(f"order {level}, reverse mode against differences", _inner(pulled, ts), expected, rtol, atol)
    if level < order:

        def derivative(*inner: Tensor) -> Any:
            y, pull = vjp(f, *inner)
            return pull(nest.rebuild(y, iter(cts)))

        def directional(*inner: Tensor) -> Any:
            return jvp(f, inner, tuple(ts))[1]

        if "rev" in modes:
            _check(derivative, xs, level + 1, order, modes, eps, rtol, atol, g)
        if "fwd" in modes:
            _check(directional, xs, level + 1, order, modes, eps, rtol, atol, g)


def _direction(x: Tensor, g: random.Generator) -> Tensor:
    """A random direction; of complex numbers both parts are drawn."""
    if x.dtype.kind != "c":
        return random.normal(x.shape, dtype=x.dtype, generator=g, device=x.device)
    part = real(x).dtype
    re, im = (random.normal(x.shape, dtype=part, generator=g, device=x.device) for _ in range(2))
    return re + 1j * im


def _inner(xs: Sequence[Tensor], ys: Sequence[Tensor]) -> float:
    """The real inner product, in which a complex number counts as two real ones (TensorFlow's convention)."""
    total = 0.0
    for x, y in zip(xs, ys, strict=True):
        total += float(sum(real(conj(x) * y)).item())
    return total


def _compare(what: str, got: object, wanted: Any, rtol: float, atol: float) -> None:
    error = abs(got - wanted)
    good = error <= atol + rtol * abs(wanted)
    if not (good if isinstance(good, bool) else good.all()):
        worst = error if isinstance(error, float) else error.max()
        raise DerivativeError(f"{what}: off by {worst:.3g} where {wanted!r} is expected, got {got!r}")
