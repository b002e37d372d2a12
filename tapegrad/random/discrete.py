"""Whole numbers.  They have no gradient; asking one of a float dtype for it raises NoGradientError."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tapegrad.autodiff.custom_gradient import stop_gradient
from tapegrad.core.aval import ShapedArray, shaped
from tapegrad.core.primitive import Bad, Sample, general
from tapegrad.device import CPU, dtypes
from tapegrad.device.numerics import sampling
from tapegrad.errors import DomainError, DTypeError, ShapeError
from tapegrad.ops.dispatch import barrier, cast, tensor
from tapegrad.ops.elementwise.arithmetic import maximum
from tapegrad.ops.elementwise.exponential import exp
from tapegrad.ops.elementwise.selection import where
from tapegrad.ops.shape.join import stack
from tapegrad.random.drawing import Draw, lengths_of, place
from tapegrad.random.gammas import _log_gamma
from tapegrad.random.stream import Generator, default_generator
from tapegrad.tensor import Tensor


def _infer_one(lam: ShapedArray, *, key: int, counter: int, dtype: Any) -> ShapedArray:
    return lam.with_dtype(dtype)


poisson_p = general(
    "random_poisson",
    impl=sampling.poisson,
    infer=_infer_one,
    samples=[
        Sample([0.0, 3.0, 70.0], key=3, counter=0, dtype=dtypes.float64),
        Bad([-1.0], key=3, counter=0, dtype=dtypes.float64, error=DomainError),
    ],
    doc="A Poisson number.",
)


def _infer_two(n: ShapedArray, p: ShapedArray, *, key: int, counter: int, dtype: Any) -> ShapedArray:
    return n.with_dtype(dtype)


binomial_p = general(
    "random_binomial",
    impl=sampling.binomial,
    infer=_infer_two,
    samples=[
        Sample([0.0, 5.0, 900.0], [0.5, 0.9, 0.3], key=3, counter=0, dtype=dtypes.float64),
        Bad([3.0], [1.5], key=3, counter=0, dtype=dtypes.float64, error=DomainError),
    ],
    doc="A binomial number.",
)


def _run_geometric(xp: Any, e: Any, p: Any) -> Any:
    sure = p >= 1
    found = xp.floor(e / -xp.log1p(xp.where(sure, -0.5, -p))) + 1
    return xp.where(sure, 1.0, xp.maximum(found, 1)).astype(e.dtype)


geometric_p = general(
    "random_geometric",
    impl=_run_geometric,
    infer=lambda e, p: e,
    samples=[Sample([0.5, 3.0, 0.1], [0.3, 0.2, 1.0])],
    doc="A geometric number made of an exponential one.",
)


def _infer_integers(
    *, key: int, counter: int, shape: tuple[int, ...], low: int, count: int, dtype: Any, device: Any
) -> ShapedArray:
    return shaped(shape, dtype, device)


integers_p = general(
    "random_integers",
    impl=lambda xp, *, key, counter, shape, low, count, dtype, device: sampling.integers(
        xp, key=key, counter=counter, shape=shape, low=low, count=count, dtype=dtype
    ),
    infer=_infer_integers,
    samples=[Sample(key=3, counter=0, shape=(2, 3), low=-2, count=10, dtype=dtypes.int64, device=CPU)],
    doc="Integers, each as likely.",
)


def _counts(op: str, shape: Any, parameters: tuple, dtype: Any, generator: Any, device: Any) -> tuple[Draw, Any]:
    """A draw computed in float64, and the dtype of its result."""
    return Draw(op, shape, parameters, "float64", generator, device), dtypes.asdtype(dtype)


def _of(d: Draw, prim: Any, dtype: Any, *parameters: Tensor) -> Tensor:
    """What a primitive draws, in a dtype: drawn as floats where that is one, so that a gradient can be refused."""
    full = [d.full(p) for p in parameters]
    key, counter = d.generator.take(sampling.blocks(full[0].size))
    return cast(barrier(prim, *full, key=key, counter=counter, dtype=dtypes.float64), dtype)


def poisson(
    shape: int | Sequence[int] = (),
    lam: Any = 1.0,
    dtype: Any = "int64",
    generator: Generator | None = None,
    device: Any = None,
) -> Tensor:
    """Poisson numbers of mean ``lam``: by inversion below 10, else by transformed rejection (Hoermann 1993).

    Raises DomainError for a negative, infinite or NaN ``lam``, ShapeError, DTypeError.
    """
    d, wanted = _counts("poisson", shape, (lam,), dtype, generator, device)
    return _of(d, poisson_p, wanted, *d.parameters)


def binomial(
    shape: int | Sequence[int] = (),
    n: Any = 1,
    p: Any = 0.5,
    dtype: Any = "int64",
    generator: Generator | None = None,
    device: Any = None,
) -> Tensor:
    """How many of ``n`` attempts of chance ``p`` succeed: by inversion, or transformed rejection (Hoermann 1993).

    Raises DomainError for a negative ``n`` or a ``p`` outside [0, 1], ShapeError, DTypeError.
    """
    d, wanted = _counts("binomial", shape, (n, p), dtype, generator, device)
    return _of(d, binomial_p, wanted, *d.parameters)


def negative_binomial(
    shape: int | Sequence[int] = (),
    n: Any = 1,
    p: Any = 0.5,
    dtype: Any = "int64",
    generator: Generator | None = None,
    device: Any = None,
) -> Tensor:
    """How many attempts of chance ``p`` fail before ``n`` succeed: Poisson numbers of gamma means.

    Raises DomainError where ``n`` or ``p`` is not positive, ShapeError, DTypeError.
    """
    d, wanted = _counts("negative_binomial", shape, (n, p), dtype, generator, device)
    n, p = d.parameters
    mean = stop_gradient(exp(_log_gamma(d, n))) * (1 - p) / p
    return _of(d, poisson_p, wanted, mean)


def geometric(
    shape: int | Sequence[int] = (),
    p: Any = 0.5,
    dtype: Any = "int64",
    generator: Generator | None = None,
    device: Any = None,
) -> Tensor:
    """How many attempts of chance ``p`` there are up to the first success: 1, 2, ...

    Raises ShapeError, DTypeError.
    """
    d, wanted = _counts("geometric", shape, (p,), dtype, generator, device)
    (p,) = d.parameters
    return cast(barrier(geometric_p, d.exponential(), d.full(p)), wanted)


def integers(
    shape: int | Sequence[int] = (),
    low: int = 0,
    high: int | None = None,
    dtype: Any = "int64",
    generator: Generator | None = None,
    *,
    endpoint: bool = False,
    device: Any = None,
) -> Tensor:
    """Integers from ``low`` up to, not including, ``high`` (None: from 0 up to ``low``), each exactly as likely.

    endpoint: whether ``high`` is one of them.  Raises DomainError for an empty range or one beyond the dtype's,
    DTypeError, ShapeError.
    """
    wanted = dtypes.asdtype(dtype)
    if high is None:
        low, high = 0, low
    low, above = int(low), int(high) + endpoint
    if not dtypes.is_integer(wanted):
        raise DTypeError(f"random.integers: dtype must be an integer, got {wanted}")
    if low >= above or low < dtypes.iinfo(wanted).min or above - 1 > dtypes.iinfo(wanted).max:
        raise DomainError(f"random.integers: no {wanted} lies in [{low}, {above}), or not all of it")
    lengths = lengths_of(shape)
    size = 1
    for length in lengths:
        size *= length
    key, counter = (generator or default_generator).take(-(-size // 4))
    return barrier(
        integers_p, key=key, counter=counter, shape=lengths, low=low, count=above - low, dtype=wanted,
        device=place(device),
    )  # fmt: skip


def multinomial(
    n: Any,
    pvals: Any,
    shape: int | Sequence[int] = (),
    dtype: Any = "int64",
    generator: Generator | None = None,
    device: Any = None,
) -> Tensor:
    """How often each of ``K`` outcomes occurs in ``n`` attempts; the last axis of the result has length ``K``.

    pvals: ``(..., K)`` chances that sum to 1 (the last is what is left); n: broadcasts with ``shape`` and those before
    ``K``.  Raises DomainError, ShapeError, DTypeError.
    """
    chances = tensor("random.multinomial", pvals)
    if not chances.ndim or not chances.shape[-1]:
        raise ShapeError(f"random.multinomial: pvals of shape {chances.shape}; need (..., K)")
    d, wanted = _counts("multinomial", shape, (n, chances[..., 0]), dtype, generator, device)
    left: Tensor = d.full(d.parameters[0])
    rest: Any = 1.0
    found = []
    for k in range(chances.shape[-1] - 1):
        p = cast(chances[..., k], dtypes.float64)
        share = where(rest > 0, p / where(rest > 0, rest, 1.0), 0.0) if k else p
        found.append(_of(d, binomial_p, dtypes.float64, left, where(share < 1, share, 1.0)))
        left, rest = left - found[-1], maximum(rest - p, 0.0)
    return cast(stack([*found, left], axis=-1), wanted)
