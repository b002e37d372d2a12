"""Launching the CUDA kernels that walk along rows (``kernels/rows.cuh`` says how a row is cut among threads)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from math import prod
from typing import TYPE_CHECKING, Any

from tapegrad.core.aval import Shape, ShapedArray
from tapegrad.device import checks, cuda_types
from tapegrad.device.dtypes import accumulator, uint64
from tapegrad.device.kernel import Kernel
from tapegrad.device.traffic import contiguous, passed
from tapegrad.device.types import Array, DType
from tapegrad.errors import IndexingError

if TYPE_CHECKING:
    from tapegrad.device.cuda import CudaDevice

_softmax = Kernel("softmax.cu", "tg_softmax")
_softmax_vjp = Kernel("softmax.cu", "tg_softmax_vjp")
_log_softmax = Kernel("softmax.cu", "tg_log_softmax")
_log_softmax_vjp = Kernel("softmax.cu", "tg_log_softmax_vjp")
_layer_norm = Kernel("layer_norm.cu", "tg_layer_norm")
_layer_norm_vjp_x = Kernel("layer_norm.cu", "tg_layer_norm_vjp_x")
_layer_norm_vjp = Kernel("layer_norm.cu", "tg_layer_norm_vjp")
_layer_norm_moments = Kernel("layer_norm.cu", "tg_layer_norm_moments")
_layer_norm_vjp_gamma = Kernel("layer_norm.cu", "tg_layer_norm_vjp_gamma")
_layer_norm_vjp_gamma_sum = Kernel("layer_norm.cu", "tg_layer_norm_vjp_gamma_sum")
_cross_entropy = Kernel("cross_entropy.cu", "tg_cross_entropy")
_cross_entropy_vjp = Kernel("cross_entropy.cu", "tg_cross_entropy_vjp")

_MOST_BLOCKS = 2**31 - 1
_WARP, _BLOCK, _LONG = 32, 256, 512
"""Threads of a row that is short, that still fits registers, and that does not."""


class _Rows:
    """How the rows of an array are cut among threads, which their width and dtype alone decide.

    ``arrays``: how many rows a thread holds at a time, of 32 registers that are left for elements.
    """

    def __init__(self, shape: Shape, dtype: DType, arrays: int) -> None:
        rows, width = prod(shape[:-1]), shape[-1]
        whole = 16 // dtype.itemsize
        pack = whole if width % whole == 0 else 1
        most = 32 // (accumulator(dtype).itemsize // 4) // arrays
        if pack == 1:
            most //= 2  # elements loaded one by one need an address and a condition each
        threads = next((n for n in (_WARP, _BLOCK) if width <= n * most), _LONG)
        held = 0
        if threads != _LONG:
            packs = max(1, -(-width // (threads * pack)))
            held = 1 << (packs - 1).bit_length()  # powers of two: few variants to compile
        each = _BLOCK // _WARP if threads == _WARP else 1
        self.block = threads * each
        self.grid = min(_MOST_BLOCKS, -(-rows // each))
        self.macros: dict[str, Any] = {"T": dtype, "PACK": pack, "HELD": held, "ROW_THREADS": threads}
        self.sizes = (cuda_types.long(rows), cuda_types.long(width))

    def run(self, device: CudaDevice, kernel: Kernel, *args: object, **macros: Any) -> None:
        """Run a kernel whose last parameters are the number of rows and their width."""
        kernel(device, self.grid, self.block, (*args, *self.sizes), **self.macros, **macros)


_known_rows = lru_cache(4096)(_Rows)


def _rows(x: Array, arrays: int = 1) -> _Rows:
    return _known_rows(x.shape, x.dtype, arrays)


def _contiguous(device: CudaDevice, *arrays: Array) -> list[Array]:
    found = list(arrays)
    for i, x in enumerate(arrays):
        if not x.flags.c_contiguous:
            found[i] = contiguous(device.xp, x)
    return found


def _leads(x: Array, out: Array) -> object:
    """How many cotangents share the rows of ``x``, as an argument of a kernel."""
    return cuda_types.long(prod(out.shape[: out.ndim - x.ndim]))


def _walk(kernel: Kernel) -> Callable[..., None]:
    """The function that runs ``kernel`` over the rows of one array."""

    def run(device: CudaDevice, x: Array, *, out: Array) -> None:
        if out.size:
            (x,) = _contiguous(device, x)
            _rows(x).run(device, kernel, x, out)

    return run


def _walk_back(kernel: Kernel, arrays: int) -> Callable[..., None]:
    """The function that runs ``kernel`` over the rows of a value and of each of its cotangents."""

    def run(device: CudaDevice, y: Array, g: Array, *, out: Array) -> None:
        if out.size:
            y, g = _contiguous(device, y, g)
            _rows(y, arrays).run(device, kernel, y, g, out, _leads(y, out))

    return run


softmax = _walk(_softmax)
log_softmax = _walk(_log_softmax)
softmax_vjp = _walk_back(_softmax_vjp, 2)
log_softmax_vjp = _walk_back(_log_softmax_vjp, 1)


def layer_norm(device: CudaDevice, x: Array, gamma: Array, beta: Array, *, out: Array, eps: float) -> None:
    """``(x - mean) / sqrt(variance + eps) * gamma + beta`` of each row."""
    if out.size:
        x, gamma, beta = _contiguous(device, x, gamma, beta)
        _rows(x).run(device, _layer_norm, x, gamma, beta, out, cuda_types.real(eps, x.dtype))


def layer_norm_vjp_x(device: CudaDevice, x: Array, gamma: Array, g: Array, *, out: Array, eps: float) -> None:
    """The cotangent of the rows."""
    if out.size:
        x, gamma, g = _contiguous(device, x, gamma, g)
        _rows(x, 2).run(device, _layer_norm_vjp_x, x, gamma, g, out, cuda_types.real(eps, x.dtype), _leads(x, out))


_GROUP = 16
"""As in the kernel: so many blocks' sums are joined by one of them."""
_BLOCK_ROWS, _MOST_SUMMING = {_WARP: 4, _BLOCK: 16, _LONG: 16}, 256
"""Rows that a block's warps, or the block, take at least, by threads of a row, and blocks at most: each has sums of its
own, which are to be few beside the rows."""


def _summing_blocks(rows: _Rows) -> int:
    """Blocks that share the rows where columns are summed: by the shape alone, since they decide the order."""
    threads = rows.macros["ROW_THREADS"]
    return max(1, min(_MOST_SUMMING, -(-rows.grid // _BLOCK_ROWS[threads])))


def layer_norm_vjp_temporaries(
    aval: ShapedArray, x: Array, gamma: Array, g: Array, *, eps: float
) -> list[tuple[Shape, DType]]:
    """Sums of each block, and counts of the blocks that have come."""
    return _summing(x, g) if x.size and g.size else []


def _summing(x: Array, g: Array) -> list[tuple[Shape, DType]]:
    blocks, leads = _summing_blocks(_rows(x, 2)), g.size // x.size
    wide = accumulator(x.dtype)
    return [((leads, blocks, 2, x.shape[-1]), wide), ((leads, -(-blocks // _GROUP) + 1), uint64)]


def layer_norm_vjp(
    device: CudaDevice, x: Array, gamma: Array, g: Array, *, out: Array, eps: float, temporaries: Sequence[Array] = ()
) -> None:
    """The cotangents of the rows, and of ``gamma`` and ``beta``, one after the other."""
    if not x.size or not g.size:
        if out.size:
            out.fill(0)
        return
    x, gamma, g = _contiguous(device, x, gamma, g)
    rows, leads = _rows(x, 2), g.size // x.size
    parts, arrived = temporaries or [device.empty(*lies) for lies in _summing(x, g)]
    args = (x, gamma, g, out, parts, arrived, cuda_types.real(eps, x.dtype), cuda_types.long(leads), *rows.sizes)
    grid = (_summing_blocks(rows), min(leads, _MOST_LEADS))
    _layer_norm_vjp(device, grid, rows.block, args, **rows.macros)


_CHUNK, _MOST_CHUNKS = 64, 256
_MOST_LEADS = 65535


def layer_norm_vjp_gamma(device: CudaDevice, x: Array, g: Array, *, out: Array, eps: float) -> None:
    """The cotangent of ``gamma``: chunks of rows are summed first, then the chunks in order."""
    if not out.size:
        return
    if not x.size:
        out.fill(0)
        return
    x, g = _contiguous(device, x, g)
    count, width, wide = prod(x.shape[:-1]), x.shape[-1], accumulator(x.dtype)
    rows = _rows(x)
    mean, rstd = device.empty((count,), wide), device.empty((count,), wide)
    rows.run(device, _layer_norm_moments, x, mean, rstd, cuda_types.real(eps, x.dtype))
    passed(x.nbytes, 2 * mean.nbytes)
    chunk = max(_CHUNK, -(-count // _MOST_CHUNKS))
    chunks, leads = -(-count // chunk), out.size // width
    partials = device.empty((chunks, leads, width), wide)
    grid = (-(-width // (_WARP * rows.macros["PACK"])), chunks, min(leads, _MOST_LEADS))
    args = (x, g, mean, rstd, partials, cuda_types.long(leads), *rows.sizes, cuda_types.long(chunk))
    _layer_norm_vjp_gamma(device, grid, _BLOCK, args, T=x.dtype, PACK=rows.macros["PACK"])
    passed(2 * mean.nbytes + partials.nbytes, partials.nbytes)
    last = (partials, out, cuda_types.long(chunks), cuda_types.long(out.size))
    _layer_norm_vjp_gamma_sum(device, -(-out.size // _BLOCK), _BLOCK, last, T=x.dtype)


def _bad_label(least: int, most: int, low: int, high: int) -> IndexingError:
    return IndexingError(
        f"cross_entropy: the label of row {least} is out of range for {high} classes; mask ignored rows with where"
    )


_LABELS = checks.kind("labels", _bad_label)


def cross_entropy(device: CudaDevice, x: Array, labels: Array, *, out: Array) -> None:
    """``logsumexp(row) - row[label]`` of each row.  A label out of range raises IndexingError later."""
    if not out.size:
        return
    x, labels = _contiguous(device, x, labels)
    check = device.checks.argument(_LABELS, 0, x.shape[-1])
    _rows(x).run(device, _cross_entropy, x, labels, out, check, L=labels.dtype)


def cross_entropy_vjp(device: CudaDevice, x: Array, labels: Array, g: Array, *, out: Array) -> None:
    """``(softmax(x) - onehot(label)) * g`` of each row; the labels were checked on the way forward."""
    if out.size:
        x, labels, g = _contiguous(device, x, labels, g)
        _rows(x).run(device, _cross_entropy_vjp, x, labels, g, out, _leads(x, out), L=labels.dtype)
