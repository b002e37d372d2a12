"""Launching the CUDA kernels of gathering and scattering, and the one that checks indices."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Any

from tapegrad.device import cuda_types, dtypes
from tapegrad.device.kernel import Kernel
from tapegrad.device.traffic import contiguous, passed
from tapegrad.device.types import Array, DType
from tapegrad.errors import IndexingError

if TYPE_CHECKING:
    from tapegrad.device.cuda import CudaDevice

_take = Kernel("gather.cu", "tg_take")
_scatter_add = Kernel("gather.cu", "tg_scatter_add")
_count_pieces = Kernel("gather.cu", "tg_count_pieces")
_scatter_pieces = Kernel("gather.cu", "tg_scatter_pieces")
_last_place = Kernel("gather.cu", "tg_last_place")
_put_rows = Kernel("gather.cu", "tg_put_rows")

_within = Kernel("check.cu", "tg_within")

_THREADS = 256
_MOST_BLOCKS = 2**31 - 1
_SEGMENT = 256
"""Rows that one thread adds up in a round of a scatter-add (SEGMENT in ``gather.cu``)."""


def run(
    device: CudaDevice, kernel: Kernel, rows: int, width: int, dtype: DType, *args: object, sums: DType | None = None
) -> None:
    """Run a kernel over ``rows`` results of ``width`` elements; its last parameters are the width and the lanes.

    ``sums``: the dtype of results, where the kernel asks.
    """
    whole = 16 // max(dtype.itemsize, 0 if sums is None else sums.itemsize)
    pack = whole if width % whole == 0 else 1
    lanes = min(8, max(0, (width // pack - 1).bit_length()))
    grid = min(_MOST_BLOCKS, -(-rows // (_THREADS >> lanes)))
    macros: dict[str, Any] = {} if sums is None else {"SUM": sums}
    kernel(
        device,
        grid,
        _THREADS,
        (*args, cuda_types.long(width), cuda_types.index(lanes, False)),
        T=dtype,
        PACK=pack,
        **macros,
    )


def take(device: CudaDevice, x: Array, indices: Array, *, axis: int, out: Array) -> None:
    """Elements of ``x`` at ``indices`` (in range) along ``axis``."""
    if not out.size:
        return
    if not x.size:
        raise IndexingError(f"take: axis {axis} of {x.shape} has no elements to take")
    x, indices = contiguous(device.xp, x), contiguous(device.xp, indices)
    before, n, width = prod(x.shape[:axis]), x.shape[axis], prod(x.shape[axis + 1 :])
    sizes = cuda_types.long(before), cuda_types.long(n), cuda_types.long(indices.size)
    run(device, _take, before * indices.size, width, x.dtype, x, indices, out, *sizes)


def scatter_add(device: CudaDevice, x: Array, indices: Array, *, axis: int, n: int, out: Array) -> None:
    """Zeros, with slices of ``x`` added at ``indices`` along ``axis``.

    Slices of one index are added in their order in groups of 256, then the sums of the groups likewise.
    """
    if not out.size:
        return
    if not x.size:
        out.fill(0)
        return
    xp = device.xp
    places, x = contiguous(xp, indices).reshape(-1), contiguous(xp, x)
    if xp is None:  # a dry run: only the copies are noted
        return
    before, width, count = prod(x.shape[:axis]), prod(x.shape[axis + indices.ndim :]), places.size
    order = xp.argsort(places, kind="stable")
    starts = xp.searchsorted(places[order], xp.arange(n + 1))
    later = False
    while True:
        sizes = cuda_types.long(before), cuda_types.long(n), cuda_types.long(count)
        args = (x, order, starts, out, *sizes, cuda_types.index(later, False))
        run(device, _scatter_add, before * n, width, x.dtype, *args, sums=out.dtype)
        if count <= _SEGMENT:
            return
        most = count // _SEGMENT + count // (_SEGMENT + 1)  # pieces of indices that have more rows than a segment
        pieces = device.empty((n + 1,), starts.dtype)
        _count_pieces(device, -(-(n + 1) // _THREADS), _THREADS, (starts, pieces, cuda_types.long(n)))
        firsts = xp.cumsum(pieces)
        parts = device.empty((before, most, width), dtypes.accumulator(x.dtype))
        piece_args = (x, order, starts, firsts, parts, *sizes, cuda_types.long(most))
        run(device, _scatter_pieces, before * most, width, x.dtype, *piece_args, sums=parts.dtype)
        x, order, starts, count, later = parts, xp.arange(most), firsts, most, True


def put_rows(device: CudaDevice, table: Array, rows: Array, new: Array) -> None:
    """Write ``new[k]`` over row ``rows[k]`` of ``table``; -1 is no row, others occur once."""
    if new.size:
        new, rows = contiguous(device.xp, new), contiguous(device.xp, rows)
        count, width = rows.size, prod(table.shape[1:])
        run(device, _put_rows, count, width, table.dtype, new, rows, table, cuda_types.long(count))


def last_place(device: CudaDevice, indices: Array, *, n: int, out: Array) -> None:
    """For each of ``n`` positions the number of the last index that names it, or -1."""
    out.fill(-1)
    if indices.size:
        args = (contiguous(device.xp, indices), out, cuda_types.long(indices.size))
        _last_place(device, -(-indices.size // _THREADS), _THREADS, args)


_MOST_LOOKING = 1024  # blocks: enough to fill any device


def within(device: Any, x: Array, low: int, high: int, kind: int) -> None:
    """Check on the device that integers lie in ``[low, high]``; ``kind``: the check whose error is raised if not."""
    with device.active():
        x = contiguous(device.xp, x)
        grid = min(_MOST_LOOKING, -(-x.size // _THREADS))
        args = (x, device.checks.argument(kind, low, high), cuda_types.long(x.size))
        _within(device, grid, _THREADS, args, T=x.dtype)
        passed(x.nbytes, 0)
