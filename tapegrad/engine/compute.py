"""The value of one primitive applied to arrays, at once: no laziness, no counting, nobody told.

In a dry run (``device/phantom.py``) it has a shape and a layout, and no contents.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tapegrad.core.aval import ShapedArray
from tapegrad.core.primitive import Primitive
from tapegrad.device import dtypes, phantom


def compute_elementwise(prim: Primitive, arrays: Sequence[Any], aval: ShapedArray) -> Any:
    """The value of an elementwise primitive, from arrays, at once."""
    out = aval.device.empty(aval.shape, aval.dtype)
    if not phantom.mode.dry:
        prim.impl(aval.device.xp, out, *arrays)
    return out


def compute(prim: Primitive, arrays: Sequence[Any], params: dict[str, Any], aval: ShapedArray) -> Any:
    """The value of one application, from arrays."""
    device = aval.device
    if phantom.mode.dry:
        return phantom.computed(prim, arrays, params, aval, lambda x: _reduced(prim, x, params, aval))
    if device.lazy:
        return _compute_on_gpu(prim, arrays, params, aval)
    if prim.into:
        out = device.empty(aval.shape, aval.dtype)
        prim.impl(device.xp, *arrays, out=out, **params)
        return out
    if not prim.view:
        device.make_way(aval.nbytes)
    if prim.reduce is not None:
        found = _reduced(prim, arrays[0], params, aval)
    else:
        found = prim.impl(device.xp, *arrays, **params)
    if type(found) is not device.xp.ndarray or found.dtype != aval.dtype:
        found = device.xp.asarray(found, dtype=aval.dtype)
    return found


def _reduced(prim: Primitive, x: Any, params: dict[str, Any], aval: ShapedArray) -> Any:
    ufunc = getattr(aval.device.xp, prim.reduce)  # type: ignore[arg-type]
    kept = params.get("keepdims", False)
    return ufunc.reduce(x, axis=params["axis"], dtype=dtypes.accumulator(aval.dtype), keepdims=kept)


def _compute_on_gpu(prim: Primitive, arrays: Sequence[Any], params: dict[str, Any], aval: ShapedArray) -> Any:
    """A barrier or view there: its own kernels if it declares any, else what the library offers."""
    device = aval.device
    with device.active():
        if prim.cuda is not None:
            out = device.empty(aval.shape, aval.dtype)
            prim.cuda(device, *arrays, out=out, **params)
            return out
        if prim.into:
            out = device.empty(aval.shape, aval.dtype)
            prim.impl(device.xp, *arrays, out=out, **params)
            return out
        found = prim.impl(device.xp, *arrays, **params)
        return found if found.dtype == aval.dtype else found.astype(aval.dtype)


def copied(array: Any, aval: ShapedArray) -> Any:
    """A copy of ``array``, whose aval is ``aval``, in memory of its own."""
    out = aval.device.empty(aval.shape, aval.dtype)
    if not phantom.mode.dry:
        with aval.device.active():
            aval.device.xp.copyto(out, array)
    return out
