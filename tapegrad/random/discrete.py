"""Whole numbers.  They have no gradient; asking one of a float dtype for it raises NoGradientError."""

from __future__ import annotations

import math
from collections.abc import Sequence
from math import prod
from operator import index

from tapegrad.autodiff.custom_gradient import stop_gradient
from tapegrad.core.aval import shaped
from tapegrad.core.primitive import Bad, Primitive, Sample, general
from tapegrad.device import CPU, Device, dtypes
from tapegrad.device.numerics import sampling
from tapegrad.device.types import Array, Namespace
from tapegrad.errors import DomainError, DTypeError, ShapeError
from tapegrad.ops import exp, maximum, stack, sum, where
from tapegrad.ops.dispatch import barrier, cast, tensor
from tapegrad.random.drawing import Domain, Draw, distribution, home, infer_drawn, lengths_of, within
from tapegrad.random.gammas import _log_gamma
from tapegrad.random.stream import Generator, default_generator
from tapegrad.tensor import DTypeLike, Tensor, TensorLike

poisson_p = general(
    "random_poisson",
    impl=sampling.poisson,
    infer=infer_drawn,
    draws=True,
    samples=[
        Sample([0.0, 3.0, 70.0], key=3, counter=0, dtype=dtypes.float64),
        Bad([-1.0], key=3, counter=0, dtype=dtypes.float64, error=DomainError),
    ],
    doc="A Poisson number.",
)


binomial_p = general(
    "random_binomial",
    impl=sampling.binomial,
    infer=infer_drawn,
    draws=True,
    samples=[
        Sample([0.0, 5.0, 900.0], [0.5, 0.9, 0.3], key=3, counter=0, dtype=dtypes.float64),
        Bad([3.0], [1.5], key=3, counter=0, dtype=dtypes.float64, error=DomainError),
    ],
    doc="A binomial number.",
)


def _run_geometric(xp: Namespace, e: Array, p: Array) -> Array:
    sure = p >= 1
    tries = xp.floor(e / -xp.log1p(xp.where(sure, -0.5, -p))) + 1
    return xp.where(sure, 1.0, xp.maximum(tries, 1)).astype(e.dtype)


geometric_p = general(
    "random_geometric",
    impl=_run_geometric,
    infer=lambda e, p: e,
    samples=[Sample([0.5, 3.0, 0.1], [0.3, 0.2, 1.0])],
    doc="A geometric number made of an exponential one.",
)


integers_p = general(
    "random_integers",
    impl=lambda xp, *, key, counter, shape, low, count, dtype, device: sampling.integers(
        xp, key=key, counter=counter, shape=shape, low=low, count=count, dtype=dtype
    ),
    infer=lambda *, key, counter, shape, low, count, dtype, device: shaped(shape, dtype, device),
    draws=True,
    samples=[Sample(key=3, counter=0, shape=(2, 3), low=-2, count=10, dtype=dtypes.int64, device=CPU)],
    doc="Integers, each as likely.",
)


_ATTEMPTS: Domain = {"a whole n >= 0": lambda n: (n < 0) | (n % 1 != 0)}
_CHANCE: Domain = {"0 < p <= 1": lambda p: (p <= 0) | (p > 1) | (p != p)}


def _of(d: Draw, prim: Primitive, *parameters: Tensor) -> Tensor:
    """The numbers that a primitive draws, as floats, so that asking for their gradient raises an error."""
    full = [d.full(p) for p in parameters]
    key, counter = d.generator.draw(full[0].size, sampling.blocks)
    return barrier(prim, *full, key=key, counter=counter, dtype=dtypes.float64)


@distribution({"0 <= lam < inf": lambda lam: (lam < 0) | (lam != lam) | (lam == math.inf)}, counts=True, lam=1.0)
def poisson(d: Draw, lam: Tensor) -> Tensor:
    """Poisson numbers of mean ``lam``: by inversion below 10, else by transformed rejection (Hoermann 1993).

    Raises DomainError for a negative, infinite or NaN ``lam``, ShapeError, DTypeError.
    """
    return _of(d, poisson_p, lam)


@distribution({**_ATTEMPTS, "0 <= p <= 1": lambda p: (p < 0) | (p > 1) | (p != p)}, counts=True, n=1, p=0.5)
def binomial(d: Draw, n: Tensor, p: Tensor) -> Tensor:
    """How many of ``n`` attempts of chance ``p`` succeed: by inversion, or transformed rejection (Hoermann 1993).

    Raises DomainError for an ``n`` that is negative or not whole and a ``p`` outside [0, 1], ShapeError, DTypeError.
    """
    return _of(d, binomial_p, n, p)


@distribution({"n > 0": lambda n: n <= 0, **_CHANCE}, counts=True, n=1, p=0.5)
def negative_binomial(d: Draw, n: Tensor, p: Tensor) -> Tensor:
    """How many attempts of chance ``p`` fail before ``n`` succeed: Poisson numbers of gamma means.

    Raises DomainError where ``n`` is not positive or ``p`` outside (0, 1], ShapeError, DTypeError.
    """
    mean = stop_gradient(exp(_log_gamma(d, n))) * (1 - p) / p
    return _of(d, poisson_p, mean)


@distribution(_CHANCE, counts=True, p=0.5)
def geometric(d: Draw, p: Tensor) -> Tensor:
    """How many attempts of chance ``p`` there are up to the first success: 1, 2, ...

    Raises DomainError for a ``p`` outside (0, 1], ShapeError, DTypeError.
    """
    return barrier(geometric_p, d.exponential(), d.full(p))


def integers(
    shape: int | Sequence[int] = (),
    low: int = 0,
    high: int | None = None,
    dtype: DTypeLike = "int64",
    generator: Generator | None = None,
    *,
    endpoint: bool = False,
    device: Device | str | None = None,
) -> Tensor:
    """Integers from ``low`` up to, not including, ``high`` (None: from 0 up to ``low``), each exactly as likely.

    endpoint: whether ``high`` is one of them.  Raises DomainError for an empty range or one beyond the dtype's,
    DTypeError, ShapeError.
    """
    lengths = lengths_of(shape, low, high)
    wanted = dtypes.asdtype(dtype)
    low, above = (0, low) if high is None else (low, high)
    low, above = index(low), index(above) + endpoint
    if not dtypes.is_integer(wanted):
        raise DTypeError(f"random.integers: dtype must be an integer, got {wanted}")
    if low >= above or low < dtypes.iinfo(wanted).min or above - 1 > dtypes.iinfo(wanted).max:
        raise DomainError(f"random.integers: no {wanted} lies in [{low}, {above}), or not all of it")
    key, counter = (generator or default_generator).draw(prod(lengths), lambda size: -(-size // 4))
    return barrier(
        integers_p, key=key, counter=counter, shape=lengths, low=low, count=above - low, dtype=wanted,
        device=home(device),
    )  # fmt: skip


def multinomial(
    n: TensorLike,
    pvals: TensorLike,
    shape: int | Sequence[int] = (),
    dtype: DTypeLike = "int64",
    generator: Generator | None = None,
    device: Device | str | None = None,
) -> Tensor:
    """How often each of ``K`` outcomes occurs in ``n`` attempts; the last axis of the result has length ``K``.

    pvals: ``(..., K)`` chances that sum to 1 (the last is what is left); n: broadcasts with ``shape`` and those before
    ``K``.  Raises DomainError for an ``n`` that is negative or not whole, for chances outside [0, 1] and where all but
    the last sum to more than 1, ShapeError, DTypeError.
    """
    chances = tensor("random.multinomial", pvals)
    if not chances.ndim or not chances.shape[-1]:
        raise ShapeError(f"random.multinomial: pvals of shape {chances.shape}; need (..., K)")
    d = Draw("multinomial", shape, (n, chances[..., 0]), "float64", generator, device)
    most = 1.0 + math.sqrt(dtypes.finfo(dtypes.in_float(chances.dtype)).eps)
    wide = cast(chances, dtypes.float64)
    within("multinomial", _ATTEMPTS, {"n": d.checkable[0]})
    within(
        "multinomial",
        {
            "0 <= pvals <= 1": lambda pvals: (pvals < 0) | (pvals > 1) | (pvals != pvals),
            "sum(pvals[:-1]) <= 1": lambda pvals: sum(pvals[..., :-1], axis=-1) > most,
        },
        {"pvals": wide},
    )
    left: Tensor = d.full(d.parameters[0])
    rest: float | Tensor = 1.0
    counts: list[Tensor] = []
    for k in range(chances.shape[-1] - 1):
        p = wide[..., k]
        share = where(rest > 0, p / where(rest > 0, rest, 1.0), 0.0) if k else p
        counts.append(_of(d, binomial_p, left, where(share < 1, share, 1.0)))
        left, rest = left - counts[-1], maximum(rest - p, 0.0)
    return cast(stack([*counts, left], axis=-1), dtypes.asdtype(dtype))
