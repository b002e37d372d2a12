"""Running extremes and those of groups, on either library: CuPy's ufuncs accumulate sums and products only."""

from __future__ import annotations

import numpy as np

from tapegrad.device.types import Array, Namespace


def accumulate(xp: Namespace, ufunc: str, x: Array, axis: int) -> Array:
    """``ufunc`` (``maximum`` or ``minimum``) of all elements so far along ``axis``."""
    f = getattr(xp, ufunc)
    if xp is np:
        return f.accumulate(x, axis=axis)
    out, reach, n = x.copy(), 1, x.shape[axis]
    lead = (slice(None),) * axis
    while reach < n:  # by doubling, log n steps of whole arrays
        joined = f(out[(*lead, slice(reach, None))], out[(*lead, slice(n - reach))])
        out[(*lead, slice(reach, None))] = joined
        reach *= 2
    return out


def last_extreme(xp: Namespace, x: Array, axis: int, ufunc: str) -> Array:
    """For each place along ``axis`` the last place up to it where the extreme element, or a NaN, stands."""
    most = accumulate(xp, ufunc, x, axis)
    places = xp.arange(x.shape[axis]).reshape((-1,) + (1,) * (x.ndim - 1 - axis))
    hits = x == most
    if x.dtype.kind not in "biu":
        hits = xp.logical_or(hits, xp.isnan(x))
    return accumulate(xp, "maximum", xp.where(hits, places, 0), axis)


def extreme_of_groups(xp: Namespace, x: Array, ids: Array, n: int, ufunc: str, worst: float) -> Array:
    """``ufunc`` of the slices in each of ``n`` groups, which begins with ``worst``; a NaN stays."""
    out = xp.full((n, *x.shape[1:]), worst, dtype=x.dtype)
    if xp is np:
        getattr(xp, ufunc).at(out, ids, x)
        return out
    if x.dtype.kind in "iu":  # CuPy has no loop of these for narrow integers, nor for int64
        wide, top = (xp.uint64, 0) if x.dtype.kind == "u" else (xp.uint64, 2**63)
        signed = x.astype("u8" if x.dtype.kind == "u" else "i8")
        keys = signed.view(wide) ^ xp.uint64(top)
        extremes = xp.full(out.shape, int(worst) + top if x.dtype.kind == "i" else worst, dtype=wide)
        getattr(xp, ufunc).at(extremes, ids, keys)
        return (extremes ^ xp.uint64(top)).view(signed.dtype).astype(x.dtype)
    wide = x if x.dtype.itemsize >= 4 else x.astype("f4")
    extremes = out.astype(wide.dtype)
    getattr(xp, ufunc).at(extremes, ids, wide)
    lost = xp.zeros(out.shape, "i4")  # CuPy's loop may pass over a NaN
    xp.add.at(lost, ids, xp.isnan(x).astype("i4"))
    return xp.where(lost > 0, xp.asarray(xp.nan, wide.dtype), extremes).astype(x.dtype)
