"""Random variables by rejection, on the host: pure functions of a Philox key, a counter and parameters.

The first attempt of every element takes its words where the counter says; those that are rejected try again with words
from 2**128 blocks further on, as often as it takes, so the draws of one stream never meet.  A CUDA array's parameters
come to the host and the numbers go back: the same bits on every device.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from tapegrad.device.numerics import bits, special
from tapegrad.device.types import Array, DType, Namespace
from tapegrad.errors import DomainError

_FURTHER = 128
_FEW = 10.0


def blocks(size: int) -> int:
    """How many Philox blocks each function here takes for ``size`` numbers."""
    return size


def _host(x: Array) -> Array:
    """A NumPy array of float64."""
    return np.asarray(x.get() if hasattr(x, "get") else x, dtype=np.float64).reshape(-1)


def _open(key: int, counter: int, rows: int, count: int) -> Array:
    """``rows`` of ``count`` numbers strictly between 0 and 1."""
    words = bits.philox(key, counter, rows * count) >> np.uint64(11)
    return (words.reshape(count, rows).T + 0.5) * 2.0**-53


def _until_accepted(key: int, counter: int, out: Array, rows: int, attempt: Callable[..., tuple[Array, Array]]) -> None:
    """Fill ``out``: ``attempt(places, words)`` gives values for some places and whether they are accepted."""
    todo = np.arange(out.size)
    further = 0
    with np.errstate(all="ignore"):
        while todo.size:
            values, good = attempt(todo, _open(key, counter + (further << _FURTHER), rows, todo.size))
            out[todo[good]] = values[good]
            todo = todo[~good]
            further += 1


def log_gamma(xp: Namespace, a: Array, *, key: int, counter: int, dtype: DType) -> Array:
    """Logarithms of gamma variables of shapes ``a``; NaN where that is not positive.

    G. Marsaglia and W. W. Tsang, "A simple method for generating gamma variables", ACM TOMS 26 (2000).  Below 1 a
    variable of shape ``a + 1`` is multiplied by a power of a uniform one: its logarithm never underflows.
    """
    shapes = _host(a)
    more = np.where(shapes < 1, shapes + 1, shapes)
    d = more - 1 / 3
    c = 1 / np.sqrt(9 * np.where(d > 0, d, 1.0))

    def attempt(places: Array, u: Array) -> tuple[Array, Array]:
        normal = np.sqrt(-2 * np.log(u[0])) * np.cos(2 * np.pi * u[1])
        v = 1 + c[places] * normal
        log_v = 3 * np.log(np.where(v > 0, v, 1.0))
        scale = d[places]
        value = np.log(scale) + log_v
        bound = 0.5 * normal * normal + scale * (1 - np.exp(log_v) + log_v)
        good = (v > 0) & (np.log(u[2]) < bound)
        below = shapes[places]
        value = np.where(below < 1, value + np.log(u[3]) / below, value)
        wrong = ~(below > 0)
        return np.where(wrong, np.nan, value), good | wrong | np.isinf(below)

    out = np.empty(shapes.size)
    _until_accepted(key, counter, out, 4, attempt)
    return xp.asarray(out.reshape(a.shape).astype(dtype))


def _log_factorial(k: Array) -> Array:
    return special.value(np, "gammaln", (k + 1.0,))


def poisson(xp: Namespace, lam: Array, *, key: int, counter: int, dtype: DType) -> Array:
    """Poisson variables: by inversion where ``lam`` is small, else by transformed rejection.

    W. Hoermann, "The transformed rejection method for generating Poisson random variables" (1993): algorithm PTRS.
    """
    mean = _host(lam)
    if not (mean >= 0).all() or np.isinf(mean).any():
        raise DomainError(f"random_poisson: lam must be finite and not negative, got {mean[~(mean >= 0)][:1]}")
    root, log_mean = np.sqrt(mean), np.log(np.where(mean > 0, mean, 1.0))
    b = 0.931 + 2.53 * root
    a = -0.059 + 0.02483 * b
    inverse, usual = 1.1239 + 1.1328 / (b - 3.4), 0.9277 - 3.6224 / (b - 2)

    def attempt(places: Array, words: Array) -> tuple[Array, Array]:
        few = mean[places] < _FEW
        u, v, m = words[0] - 0.5, words[1], mean[places]
        left = 0.5 - np.abs(u)
        k = np.floor((2 * a[places] / left + b[places]) * u + m + 0.43)
        whole = np.maximum(k, 0)
        level = np.log(v * inverse[places] / (a[places] / (left * left) + b[places]))
        good = level <= -m + whole * log_mean[places] - _log_factorial(whole)
        good &= (k >= 0) & ((left >= 0.013) | (v <= left))
        good |= (left >= 0.07) & (v <= usual[places])
        k[few] = _inverted(words[0][few], np.exp(-m[few]), lambda n: m[few] / n, 200)
        return k, good | few

    out = np.empty(mean.size)
    _until_accepted(key, counter, out, 2, attempt)
    return xp.asarray(out.reshape(lam.shape).astype(dtype))


def _inverted(u: Array, first: Array, ratio: Callable[..., Array], most: int) -> Array:
    """The least ``k`` with a probability of at most ``k`` above ``u``; ``ratio(k)``: of two neighbours'."""
    k, term, total = np.zeros(u.size), first.copy(), first.copy()
    for n in range(1, most + 1):
        beyond = u > total
        if not beyond.any():
            break
        k += beyond
        term = term * ratio(n)
        total = total + term
    return k


def binomial(xp: Namespace, n: Array, p: Array, *, key: int, counter: int, dtype: DType) -> Array:
    """Binomial variables: by inversion where ``n p`` is small, else by transformed rejection.

    W. Hoermann, "The generation of binomial random variates", J. Stat. Comput. Simul. 46 (1993): algorithm BTRS.
    """
    trials, chance = _host(n), _host(p)
    if not ((trials >= 0) & (trials == np.floor(trials)) & (chance >= 0) & (chance <= 1)).all():
        raise DomainError("random_binomial: n must be whole and not negative, and p must lie in [0, 1]")
    swapped = chance > 0.5
    rare = np.where(swapped, 1 - chance, chance)
    mean, odds = trials * rare, rare / (1 - rare)
    spread = np.sqrt(mean * (1 - rare))
    b = 1.15 + 2.53 * spread
    a = -0.0873 + 0.0248 * b + 0.01 * rare
    usual, alpha = 0.92 - 4.2 / b, (2.83 + 5.1 / b) * spread
    mode = np.floor((trials + 1) * rare)
    top = _log_factorial(mode) + _log_factorial(trials - mode)
    log_odds = np.log(np.where(odds > 0, odds, 1.0))

    def attempt(places: Array, words: Array) -> tuple[Array, Array]:
        few = mean[places] < _FEW
        u, v, most = words[0] - 0.5, words[1], trials[places]
        left = 0.5 - np.abs(u)
        k = np.floor((2 * a[places] / left + b[places]) * u + mean[places] + 0.5)
        whole = np.clip(k, 0, most)
        level = np.log(v * alpha[places] / (a[places] / (left * left) + b[places]))
        bound = top[places] - _log_factorial(whole) - _log_factorial(most - whole)
        good = level <= bound + (whole - mode[places]) * log_odds[places]
        good &= k == whole
        good |= (left >= 0.07) & (v <= usual[places]) & (k == whole)
        n_few, odds_few = most[few], odds[places][few]
        none = np.exp(n_few * np.log1p(-rare[places][few]))
        k[few] = _inverted(words[0][few], none, lambda j: np.maximum(n_few - j + 1, 0) / j * odds_few, 200)
        k[few] = np.minimum(k[few], n_few)
        return k, good | few

    out = np.empty(trials.size)
    _until_accepted(key, counter, out, 2, attempt)
    out = np.where(swapped, trials - out, out)
    return xp.asarray(out.reshape(n.shape).astype(dtype))


def integers(
    xp: Namespace, *, key: int, counter: int, shape: tuple[int, ...], low: int, count: int, dtype: DType
) -> Array:
    """Integers of ``low``, ..., ``low + count - 1``, each exactly as likely.

    A 64-bit word is rejected beyond the last multiple of ``count``.
    """
    size = 1
    for n in shape:
        size *= n
    out = np.empty(size, np.uint64)
    whole = 2**64 // count * count
    todo, further = np.arange(size), 0
    while todo.size:
        words = bits.philox(key, counter + (further << _FURTHER), todo.size)
        good = np.ones(todo.size, bool) if whole == 2**64 else words < np.uint64(whole)
        out[todo[good]] = words[good] if count == 2**64 else words[good] % np.uint64(count)
        todo, further = todo[~good], further + 1
    return xp.asarray((out + np.uint64(low % 2**64)).view(np.int64).reshape(shape).astype(dtype))
