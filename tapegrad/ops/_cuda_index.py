"""Launching the CUDA kernels of gathering and scattering."""

from __future__ import annotations

from math import prod
from typing import Any

from tapegrad.device import cxx, phantom
from tapegrad.device.kernel import Kernel
from tapegrad.device.tally import contiguous
from tapegrad.errors import IndexingError

_take = Kernel("gather.cu", "tg_take")
_scatter_add = Kernel("gather.cu", "tg_scatter_add")
_last_place = Kernel("gather.cu", "tg_last_place")

_THREADS = 256
_MOST_BLOCKS = 2**31 - 1


def _run(device: Any, kernel: Kernel, rows: int, width: int, dtype: Any, *args: Any) -> None:
    """Run a kernel over ``rows`` results of ``width`` elements; its last parameters are the width and the lanes."""
    whole = 16 // dtype.itemsize
    pack = whole if width % whole == 0 else 1
    lanes = min(8, max(0, (width // pack - 1).bit_length()))
    grid = min(_MOST_BLOCKS, -(-rows // (_THREADS >> lanes)))
    kernel(device, grid, _THREADS, (*args, cxx.long(width), cxx.index(lanes, False)), T=dtype, PACK=pack)


def take(device: Any, x: Any, indices: Any, *, axis: int, out: Any) -> None:
    """Elements of ``x`` at ``indices`` (in range) along ``axis``."""
    if not out.size:
        return
    if not x.size:
        raise IndexingError(f"take: axis {axis} of {x.shape} has no elements to take")
    x, indices = contiguous(device.xp, x), contiguous(device.xp, indices)
    before, n, width = prod(x.shape[:axis]), x.shape[axis], prod(x.shape[axis + 1 :])
    sizes = cxx.long(before), cxx.long(n), cxx.long(indices.size)
    _run(device, _take, before * indices.size, width, x.dtype, x, indices, out, *sizes)


def scatter_add(device: Any, x: Any, indices: Any, *, axis: int, n: int, out: Any) -> None:
    """Zeros, with slices of ``x`` added at ``indices`` along ``axis``, those of one index in their order."""
    if not out.size:
        return
    if not x.size:
        out.fill(0)
        return
    xp = device.xp
    places, x = contiguous(xp, indices).reshape(-1), contiguous(xp, x)
    if phantom.mode.dry:
        return
    before, width = prod(x.shape[:axis]), prod(x.shape[axis + indices.ndim :])
    order = xp.argsort(places, kind="stable")
    starts = xp.searchsorted(places[order], xp.arange(n + 1))
    sizes = cxx.long(before), cxx.long(n), cxx.long(places.size)
    _run(device, _scatter_add, before * n, width, x.dtype, x, order, starts, out, *sizes)


def last_place(device: Any, indices: Any, *, n: int, out: Any) -> None:
    """For each of ``n`` positions the number of the last index that names it, or -1."""
    out.fill(-1)
    if indices.size:
        args = (contiguous(device.xp, indices), out, cxx.long(indices.size))
        _last_place(device, -(-indices.size // _THREADS), _THREADS, args)
