"""Launching the CUDA kernels of convolutions (``kernels/conv.cuh`` says how they work), or cuDNN's.

A kernel of one tap that meets each element once is a product of cuBLAS.  All else is cuDNN's, where it is installed and
has something for the operands (:mod:`tapegrad.device.cudnn`): operands that are not in C order are copied, so that bits
depend on shapes alone, and bias and relu follow in a kernel of ours, so that they round as operations of their own.

Otherwise a result of few channels in each group has kernels of its own, and what remains is one product of tiles, which
tensor cores compute of numbers of 16 bits, and of float32 where that is allowed.  Operands are read where they lie,
with any strides.  The sum over images and positions of a kernel's cotangent is cut into parts, by shapes alone, which a
second launch adds up in order.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

from tapegrad.core.aval import Shape
from tapegrad.device import cuda_types, cudnn, gemm
from tapegrad.device.dtypes import accumulator, float32, uint8
from tapegrad.device.kernel import Kernel
from tapegrad.device.numerics import blas
from tapegrad.device.numerics.conv_lead import Prepared, Unmade
from tapegrad.device.numerics.windows import Moves, Window
from tapegrad.device.types import Array, DType

if TYPE_CHECKING:
    from tapegrad.device.cuda import CudaDevice

_conv = Kernel("conv.cu", "tg_conv")
_conv_in_w = Kernel("conv_in_w.cu", "tg_conv_in_w")
_conv_few = Kernel("conv.cu", "tg_conv_few")
_conv_few_in_w = Kernel("conv_in_w.cu", "tg_conv_few_in_w")
_conv_join = Kernel("conv_in_w.cu", "tg_conv_join")
_conv_finish = Kernel("conv_finish.cu", "tg_conv_finish")

_BLOCK, _TILE, _PLANE = 256, 128, 1024
"""Threads; columns of a tile; elements of a plane that a block computes where there are few channels."""
_FEW = 4
"""Products of channels and outputs of a group: up to so many, each element of a result is one thread's."""
BLOCKS = 512
"""Blocks that a sum over positions is cut into: some for each multiprocessor of the largest GPUs."""
_GRAIN = 512
"""Bytes of which the pool's blocks are multiples."""
SHARE = 128
"""Positions that are worth a part."""


class _Geometry(NamedTuple):
    """What kernels are told; strides of operands are in elements."""

    images: int
    groups: int
    inner: int
    outer: int
    source: Shape
    target: Shape
    window: Window
    x: tuple[int, ...]
    """Steps of the source: from image to image, channel to channel, and along its sizes."""
    y: tuple[int, ...]
    """Steps of the other operand: from group to group, row to row, along what is summed, and along its sizes."""

    def args(self) -> tuple[Any, ...]:
        """In the order of ``TG_GEOMETRY``."""
        window = self.window
        lows = tuple(low for low, _ in window.padding)
        axes = [(self.source, 1), (self.target, 1), (window.kernel, 1), (window.strides, 1), (lows, 0),
                (window.dilation, 1)]  # fmt: skip
        sizes = [n for values, rest in axes for n in (rest,) * (3 - len(values)) + tuple(values)]
        missing = (0,) * (3 - len(self.source))
        steps = [*self.x[:2], *missing, *self.x[2:], *self.y[:3], *missing, *self.y[3:]]
        counts = (self.images, self.groups, self.inner, self.outer, *sizes)
        return (*(cuda_types.index(n, wide=False) for n in counts), *(cuda_types.long(n) for n in steps))


def _steps(x: Array) -> tuple[int, ...]:
    return tuple(stride // x.itemsize for stride in x.strides)


def _readable(device: CudaDevice, x: Array) -> Array:
    """``x``, or a copy where its elements do not lie whole elements apart."""
    return device.xp.ascontiguousarray(x) if any(stride % x.itemsize for stride in x.strides) else x


def _copied(*arrays: Array) -> int:
    """Bytes that :func:`_readable` takes, at most."""
    return sum(x.nbytes for x in arrays if any(stride % x.itemsize for stride in getattr(x, "strides", ())))


def _macros(dtype: DType, inner: int, outer: int, tf32: bool) -> dict[str, Any]:
    """``ROWS``: as many as there are, and as registers hold; ``TENSOR``: whether tensor cores multiply."""
    wide = accumulator(dtype)
    most = 8 * 4 // wide.itemsize // (2 if wide.kind == "c" else 1)
    rows = min(most, 2 if outer <= 16 else 4 if outer <= 32 else 8)
    tensor = inner * outer > _FEW and (dtype.itemsize == 2 or tf32 and dtype == float32)
    return {"T": dtype, "ROWS": rows, "TENSOR": int(tensor)}


def forward(
    device: CudaDevice, x: Array, w: Array, out: Array, moves: Moves, bias: Array | None = None, clips: bool = False
) -> Prepared:
    """``x``: (n, channels, ...), ``w``: (outputs, channels / groups, ...), ``out``: (n, outputs, positions ...).

    ``bias``: (outputs,), which is added; ``clips``: with one, the result is what is above 0 of that.
    """
    return _applied(device, x, w, out, moves, False, bias, clips)


def in_image(device: CudaDevice, ct: Array, w: Array, out: Array, moves: Moves) -> Prepared:
    """The transpose in the image: ``ct``: (n, outputs, positions ...), ``out``: (n, channels, ...)."""
    return _applied(device, ct, w, out, moves, True)


def _applied(
    device: CudaDevice, x: Array, w: Array, out: Array, moves: Moves, turned: bool, bias: Array | None = None,
    clips: bool = False,
) -> Prepared:  # fmt: skip
    window, groups = moves.over((out if turned else x).shape[2:], w.shape[2:]), moves.groups
    if not out.size or not x.size or not w.size:
        return Prepared(0, partial(_of_nothing, device, out, bias, clips))
    if bias is None and groups == 1 and window.is_pointwise and _readable_by_cublas(x, w, out):
        return Prepared(0, partial(_product, device, x, w, out, turned, moves.tf32))
    kind = cudnn.IN_IMAGE if turned else cudnn.FORWARD
    if (known := _by_cudnn(device, kind, x, w, out, moves, bias, clips)) is not None:
        return known
    inner, outer = x.shape[1] // groups, out.shape[1] // groups
    macros = {**_macros(out.dtype, inner, outer, moves.tf32), "TRANSPOSED": int(turned)}
    macros["EPILOGUE"] = 0 if bias is None else 1 + clips

    def run() -> None:
        image, kernel = _readable(device, x), _readable(device, w)
        added = kernel if bias is None else device.xp.ascontiguousarray(bias)
        o, c, *taps = _steps(kernel)
        y = (inner * o, c, o, *taps) if turned else (outer * o, o, c, *taps)
        shape = _Geometry(x.shape[0], groups, inner, outer, x.shape[2:], out.shape[2:], window, _steps(image), y)
        if inner * outer <= _FEW:
            tiles = -(-prod(out.shape[2:]) // _PLANE)
            grid = tiles * out.shape[0] * out.shape[1]
            args = (image, kernel, added, out, cuda_types.long(tiles), *shape.args())
            _conv_few(device, grid, _BLOCK, args, **macros)
            return
        strides = window.strides if turned else ()
        phase = [-(-n // s) for n, s in zip(out.shape[2:], strides)] if turned else out.shape[2:]
        tiles = -(-x.shape[0] * prod(phase) // _TILE)
        grid = tiles * -(-outer // (8 * macros["ROWS"])) * groups * prod(strides)
        args = (image, kernel, added, out, cuda_types.long(tiles), *shape.args())
        _conv(device, grid, _BLOCK, args, **macros)

    return Prepared(_copied(x, w) + (0 if bias is None else bias.nbytes), run)


def _of_nothing(device: CudaDevice, out: Array, bias: Array | None, clips: bool) -> None:
    """Sums of no products: 0, or the bias."""
    out[...] = 0 if bias is None else bias.reshape(*bias.shape, *(1,) * (out.ndim - 2))
    if clips:
        device.xp.maximum(out, 0, out=out)


def _by_cudnn(
    device: CudaDevice, kind: str, x: Array, y: Array, out: Array, moves: Moves, bias: Array | None = None,
    clips: bool = False,
) -> Prepared | None:  # fmt: skip
    """The convolution of ``kind`` by cuDNN, then bias and relu in place; None where it is left to us."""
    library = device.cudnn
    plan = None if library is None else library.plan(kind, x.shape, y.shape, out.shape, out.dtype, moves)
    if library is None or plan is None:
        return None

    def run() -> None:
        operands = [a if _lies_for_cudnn(a) else device.xp.array(a, order="C") for a in (x, y)]
        spare = device.empty((plan.workspace,), uint8) if plan.workspace else None
        stream = device.xp.cuda.get_current_stream().ptr
        room = 0 if spare is None else cuda_types.address(spare)
        library.run(plan, stream, *cuda_types.addresses([*operands, out]), workspace=room)
        if bias is not None:
            finish(device, out, bias, clips)

    taken = [plan.workspace, *(a.nbytes for a in (x, y) if not _lies_for_cudnn(a))]
    if bias is None:
        return Prepared(_in_pool(taken), run)
    return Prepared(_in_pool([*taken, bias.nbytes]), run, out.nbytes)


def _in_pool(sizes: Sequence[int]) -> int:
    """Bytes that allocations of these sizes take, each of which the pool rounds."""
    return sum(-(-nbytes // _GRAIN) * _GRAIN for nbytes in sizes)


def _lies_for_cudnn(x: Array) -> bool:
    """Whether it is in C order and where vectors of elements can be read; one not yet made will be."""
    return x.flags.c_contiguous and (isinstance(x, Unmade) or cuda_types.address(x) % cudnn.ALIGNMENT == 0)


def finish(device: CudaDevice, out: Array, bias: Array, clips: bool) -> None:
    """Add to each output of ``out``: (n, outputs, positions ...) its number of ``bias``, and clip that, in place."""
    added = device.xp.ascontiguousarray(bias)
    args = (out, added, cuda_types.long(out.size), cuda_types.long(prod(out.shape[2:])), cuda_types.long(out.shape[1]))
    _conv_finish(device, -(-out.size // _BLOCK), _BLOCK, args, T=out.dtype, EPILOGUE=1 + clips)


def _readable_by_cublas(x: Array, w: Array, out: Array) -> bool:
    return out.dtype in gemm.KINDS and x.flags.c_contiguous and w.flags.c_contiguous


def _product(device: CudaDevice, x: Array, w: Array, out: Array, turned: bool, tf32: bool) -> None:
    kernel = w.reshape(1, *w.shape[:2])
    places = prod(out.shape[2:])
    flat = out.reshape(*out.shape[:2], places)
    blas.matmul(device.xp, kernel.swapaxes(1, 2) if turned else kernel, x.reshape(*x.shape[:2], places), flat, tf32)


def in_kernel(device: CudaDevice, x: Array, ct: Array, out: Array, moves: Moves) -> Prepared:
    """The transpose in the kernel: ``x``: (n, channels, ...), ``ct``: (n, outputs, positions ...)."""
    if not x.size or not ct.size or not out.size:
        return Prepared(0, lambda: out.fill(0))
    if (known := _by_cudnn(device, cudnn.IN_KERNEL, x, ct, out, moves)) is not None:
        return known
    groups, taps, wide = moves.groups, prod(out.shape[2:]), accumulator(out.dtype)
    inner, outer = x.shape[1] // groups, ct.shape[1] // groups
    few, macros = inner * outer <= _FEW, _macros(out.dtype, inner, outer, moves.tf32)
    tiles = out.size // taps if few else -(-outer // (8 * macros["ROWS"])) * -(-taps * inner // _TILE) * groups
    many = _many(tiles, ct.shape[0] * prod(ct.shape[2:]), (x.nbytes + ct.nbytes) // (out.size * wide.itemsize))

    def run() -> None:
        image, given = _readable(device, x), _readable(device, ct)
        n, o, *sizes = _steps(given)
        window = moves.over(x.shape[2:], out.shape[2:])
        y = (outer * o, o, n, *sizes)
        shape = _Geometry(x.shape[0], groups, inner, outer, x.shape[2:], ct.shape[2:], window, _steps(image), y)
        parts = device.empty((many, out.size), wide)
        args = (image, given, parts, cuda_types.long(many), *shape.args())
        if few:
            _conv_few_in_w(device, tiles * many, _BLOCK, args, **macros)
        else:
            _conv_in_w(device, tiles * many, _BLOCK, args, **macros)
        last = (
            parts,
            out,
            cuda_types.long(many),
            cuda_types.long(out.size),
            cuda_types.index(inner, wide=False),
            cuda_types.index(taps, wide=False),
        )
        _conv_join(device, -(-out.size // _BLOCK), _BLOCK, last, **macros)

    nbytes = many * out.size * wide.itemsize
    return Prepared(_copied(x, ct) + nbytes, run, nbytes)


def _many(tiles: int, positions: int, worth: int) -> int:
    """Into how many parts a sum over positions is cut of which a part has so many tiles.

    ``worth``: as many parts have the operands' bytes; those that are written and read are a quarter of that at most.
    """
    return max(1, min(-(-BLOCKS // tiles), positions // SHARE, worth // 8))
