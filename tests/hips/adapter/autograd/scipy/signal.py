"""``autograd.scipy.signal.convolve``, which convolves along some axes, and sums products along others."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np

import tapegrad as tg

from .._values import plain, tensor


def _parts(x: Any, along: Any, summed: Any) -> tuple[Any, tuple[int, ...], tuple[int, ...]]:
    """The axes that are neither, then those summed over, then those convolved along; lengths of the first two."""
    along, summed = [a % x.ndim for a in along], [a % x.ndim for a in summed]
    rest = [a for a in range(x.ndim) if a not in along and a not in summed]
    shape = [tuple(x.shape[a] for a in axes) for axes in (rest, summed)]
    return tg.permute_dims(x, (*rest, *summed, *along)), shape[0], shape[1]


def convolve(A: Any, B: Any, axes: Any = None, dot_axes: Any = ((), ()), mode: str = "full") -> Any:
    a, b = tensor(A), tensor(B)
    axes = (range(a.ndim), range(b.ndim)) if axes is None else axes
    a, rest_a, summed = _parts(a, axes[0], dot_axes[0])
    b, rest_b, _ = _parts(b, axes[1], dot_axes[1])
    found = []
    for i, j in itertools.product(np.ndindex(rest_a), np.ndindex(rest_b)):
        found.append(sum(tg.signal.convolve(a[i + k], b[j + k], mode, "direct") for k in np.ndindex(summed)))
    return plain(tg.stack(found).reshape((*rest_a, *rest_b, *found[0].shape)))
