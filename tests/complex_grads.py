"""Derivatives of functions of complex arrays, checked on their real and imaginary parts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

import tapegrad as tg
from tapegrad import nest
from tapegrad.testing import check_grads


def parts(y: Any) -> list[tg.Tensor]:
    """The real tensors that a result, or a structure of them, consists of."""
    found = []
    for t in nest.flatten(y):
        found += [tg.real(t), tg.imag(t)] if t.dtype.kind == "c" else [t]
    return found


def check_parts(f: Callable[..., Any], *xs: Any, order: int = 2, **options: Any) -> None:
    """``check_grads`` of ``f``, of real or complex ``xs``."""
    xs = tuple(np.asarray(x) for x in xs)
    flat = [part for x in xs for part in ((x.real.copy(), x.imag.copy()) if x.dtype.kind == "c" else (x,))]

    def g(*reals: tg.Tensor) -> list[tg.Tensor]:
        given, rest = [], list(reals)
        for x in xs:
            given.append(rest.pop(0) + 1j * rest.pop(0) if x.dtype.kind == "c" else rest.pop(0))
        return parts(f(*given))

    check_grads(g, flat, order=order, **options)
