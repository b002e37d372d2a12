"""Matrix products on CUDA: cuBLAS's strided batched product, called directly.

CuPy's own ``matmul`` converts stacks of float16 to float32, refuses stacks of bfloat16 and copies transposed operands
of stacks.  Here a product of any floating dtype is one call wherever one call can say it, and a transposed view is
passed as what it is: memory with a flag.

cuBLAS thinks in columns.  The memory of a row-major ``(r, c)`` matrix is that of a column-major ``(c, r)`` one, its
transpose; so ``out = x @ y`` is asked for as ``out' = y' @ x'``, and "not transposed" means row-major throughout.

How a batch becomes calls: leading dimensions that both operands step through evenly are one dimension (step 0 where an
operand is broadcast).  Where several remain, rows of ``x`` that share one ``y`` are first taken as rows of a taller
matrix.  Where there are still several, either the operands that do not step evenly are copied out, or there is one call
for each index of all dimensions but the longest: whichever is cheaper, a call being worth ``CALL`` bytes of copying.

The dtypes that are not in ``KINDS`` (integers, bool) go to CuPy's ``matmul``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from math import prod
from typing import Any, NamedTuple

import numpy as np

from tapegrad.core.aval import Shape, ShapedArray
from tapegrad.device import cublas
from tapegrad.device.dtypes import bfloat16, complex64, complex128, float16, float32, float64
from tapegrad.device.traffic import contiguous
from tapegrad.device.types import DType

KINDS = {
    float16: (cublas.R_16F, cublas.COMPUTE_32F, np.float32),
    bfloat16: (cublas.R_16BF, cublas.COMPUTE_32F, np.float32),
    float32: (cublas.R_32F, cublas.COMPUTE_32F, np.float32),
    float64: (cublas.R_64F, cublas.COMPUTE_64F, np.float64),
    complex64: (cublas.C_32F, cublas.COMPUTE_32F, np.complex64),
    complex128: (cublas.C_64F, cublas.COMPUTE_64F, np.complex128),
}
"""By dtype: what cuBLAS calls it, what it accumulates in, and the type of the factors alpha and beta."""

CALL = 4 * 2**20
"""A call takes as long as moving so many bytes (some 3 microseconds at an A100's 1.5 TB/s)."""

_MOST = 2**31 - 1  # sizes are C ints
_MOST_PRODUCTS = 4096  # of which is known how they are made

_numbers = {t: (np.ones((), t), np.zeros((), t)) for t in (np.float32, np.float64, np.complex64, np.complex128)}
_one_and_zero: dict[Any, Any] = {t: tuple(x.ctypes.data for x in pair) for t, pair in _numbers.items()}


def temporaries(aval: ShapedArray, x: Any, y: Any) -> Sequence[tuple[Shape, DType]]:
    """What :func:`matmul` copies operands into that cuBLAS cannot read, for a result of ``aval``."""
    dtype = aval.dtype
    if dtype not in KINDS or not aval.size or not x.shape[-1] or max(*x.shape[-2:], y.shape[-1]) > _MOST:
        return ()
    product = _product(x.shape, x.strides, y.shape, y.strides, aval.shape[:-2], dtype.itemsize, CALL)
    return [(shape, dtype) for shape in product.copies] if product.copies else ()


def matmul(xp: Any, x: Any, y: Any, out: Any, temporaries: Sequence[Any] = (), tf32: bool = False) -> None:
    """``x @ y`` into C-contiguous ``out``: stacks of matrices, of which leading dimensions broadcast.

    ``xp``: CuPy; None: nothing is multiplied, but the copies that it would take are told of (see ``tally``).
    ``temporaries``: the arrays to copy into; none: they are made.  ``tf32``: float32 operands may be rounded to 10 bits
    of fraction, for tensor cores.

    Raises KernelError where cuBLAS is not installed.
    """
    x_shape, y_shape, dtype = x.shape, y.shape, out.dtype
    if dtype not in KINDS or not x.dtype == y.dtype == dtype or max(*x_shape[-2:], y_shape[-1]) > _MOST:
        if xp is not None:
            xp.matmul(x, y, out=out)
    elif not x_shape[-1]:
        out.fill(0)
    elif out.size:
        product = _product(x_shape, x.strides, y_shape, y.strides, out.shape[:-2], dtype.itemsize, CALL)
        if xp is None:
            _copied(xp, x, product.a.copies, ())
            _copied(xp, y, product.b.copies, ())
        elif out.device.id == xp.cuda.runtime.getDevice():
            _multiply(xp, product, x, y, out, temporaries, tf32)
        else:
            with out.device:
                _multiply(xp, product, x, y, out, temporaries, tf32)


class _Stack(NamedTuple):
    """A stack of matrices as cuBLAS is told of it; steps and leading dimension in elements.

    ``copies``: the shapes, one after the other, in which it is copied first.
    """

    copies: tuple[Shape, ...]
    transposed: bool
    ld: int
    steps: tuple[int, ...]  # for each dimension of the batch


class _Product(NamedTuple):
    """The calls that make a product: one (``inner``: count, steps of a, b and out) for each index of ``outer``."""

    m: int
    n: int
    k: int
    a: _Stack
    b: _Stack
    inner: tuple[int, int, int, int]
    outer: tuple[tuple[int, int, int, int], ...]
    copies: tuple[Shape, ...]


@lru_cache(_MOST_PRODUCTS)
def _product(
    x_shape: Shape, x_strides: Shape, y_shape: Shape, y_strides: Shape, batch: Shape, width: int, call: int
) -> _Product:
    """How arrays that lie so are multiplied; ``width``: bytes of an element, ``call``: what a call is worth."""
    (m, k), n = x_shape[-2:], y_shape[-1]
    a, b = _stack(x_shape, x_strides, batch, width), _stack(y_shape, y_strides, batch, width)
    dims, rows = _joined(batch, a.steps, b.steps), m
    if len(dims) > 1 and not a.transposed and dims[-1][1:] == (m * a.ld, 0) and m * dims[-1][0] <= _MOST:
        rows *= dims.pop()[0]
    if len(dims) > 1:
        uneven = [len(_joined(batch, stack.steps)) > 1 for stack in (a, b)]
        copied = sum(prod(batch) * k * length for length, copy in zip((m, n), uneven) if copy)
        calls = prod(count for count, *_ in dims) // max(dims)[0]
        if 2 * copied * width < (calls - 1) * call:
            rows = m
            a = _spread(a, (*batch, m, k), width) if uneven[0] else a
            b = _spread(b, (*batch, k, n), width) if uneven[1] else b
            dims = _joined(batch, a.steps, b.steps)
    steps_out = [rows * n * prod(count for count, *_ in dims[i + 1 :]) for i in range(len(dims))]
    loops = [(count, of_a, of_b, step) for (count, of_a, of_b), step in zip(dims, steps_out)]
    longest = max(range(len(loops)), key=lambda i: loops[i][0], default=0)
    inner = loops.pop(longest) if loops else (1, 0, 0, rows * n)
    return _Product(rows, n, k, a, b, inner, tuple(loops), a.copies + b.copies)


def _copied(xp: Any, x: Any, copies: tuple[Shape, ...], temporaries: Sequence[Any]) -> Any:
    """``x`` in C order, in each of these shapes: without what broadcasting repeats, or with it."""
    for i, shape in enumerate(copies):
        if prod(shape) < x.size:
            x = x[tuple([slice(length) for length in shape])]
        else:
            x = (np if xp is None else xp).broadcast_to(x, shape)
        x = contiguous(xp, x, temporaries[i] if temporaries else None)
    return x


def _multiply(xp: Any, product: _Product, x: Any, y: Any, out: Any, temporaries: Sequence[Any], tf32: bool) -> None:
    """Make the copies and the calls."""
    dtype, device = out.dtype, out.device
    width, (kind, compute, factors) = dtype.itemsize, KINDS[dtype]
    if tf32 and dtype == float32:
        compute = cublas.COMPUTE_32F_FAST_TF32
    own = cublas.mine.handles.get(device.id)
    if own is None:
        own = cublas.made(xp, device)
    stream = xp.cuda.get_current_stream().ptr
    if stream != own.stream:
        own.follow(stream)
    mode = cublas.NO_HALF_SUMS if width == 2 else cublas.DEFAULT_MATH
    if own.mode != mode:
        own.turn(mode)
    one, zero = _one_and_zero[factors]
    m, n, k, a, b, (count, step_a, step_b, step_out), outer, copies = product
    if copies:
        x = _copied(xp, x, a.copies, temporaries)
        y = _copied(xp, y, b.copies, temporaries[len(a.copies) :])
    first = x.data.ptr, y.data.ptr, out.data.ptr
    for at_a, at_b, at_out in _places(first, outer, width) if outer else (first,):
        status = own.multiply(
            own.value, cublas.T if b.transposed else cublas.N, cublas.T if a.transposed else cublas.N, n, m, k,
            one, at_b, kind, b.ld, step_b, at_a, kind, a.ld, step_a, zero, at_out, kind, n, step_out,
            count, compute, cublas.DEFAULT_ALGORITHM,
        )  # fmt: skip
        if status:
            raise cublas.CUBLASError(status)


def _places(first: tuple[int, ...], outer: Sequence[tuple[int, ...]], width: int) -> Iterator[tuple[int, ...]]:
    """Where each call finds a, b and out: ``first``, and so many steps of each dimension further."""
    for index in np.ndindex(*(count for count, *_ in outer)):
        yield tuple(at + width * sum(i * loop[j] for i, loop in zip(index, outer)) for j, at in enumerate(first, 1))


def _stack(shape: Shape, strides: Shape, batch: Shape, width: int) -> _Stack:
    """How cuBLAS reads a stack; what it cannot read is copied, though not what broadcasting repeats along the batch."""
    lead = len(shape) - 2
    found = _layout(shape, strides, width)
    if found is not None:
        return _Stack((), *found, _steps(shape, strides, batch, width))
    once = (*(n if stride else 1 for n, stride in zip(shape[:lead], strides)), *shape[lead:])
    return _Stack((once,), False, once[-1], _steps(once, _in_order(once, width), batch, width))


def _spread(stack: _Stack, shape: Shape, width: int) -> _Stack:
    """The same with every matrix of the batch in memory."""
    steps = _steps(shape, _in_order(shape, width), shape[:-2], width)
    return _Stack((*stack.copies, shape), False, shape[-1], steps)


def _steps(shape: Shape, strides: Shape, batch: Shape, width: int) -> tuple[int, ...]:
    """Steps along the batch, 0 where an operand is broadcast."""
    own = [0 if length == 1 else stride // width for length, stride in zip(shape[:-2], strides)]
    return (*[0] * (len(batch) - len(own)), *own)


def _in_order(shape: Shape, width: int) -> Shape:
    """The strides of a C-contiguous array."""
    return tuple(width * prod(shape[i + 1 :]) for i in range(len(shape)))


def _layout(shape: Shape, strides: Shape, width: int) -> tuple[bool, int] | None:
    """Whether the memory holds the transposes, and the leading dimension; None if cuBLAS cannot read it."""
    for stride, length in zip(strides, shape):
        if length > 1 and (stride < 0 or stride % width):
            return None
    (r, c), (pitch_r, pitch_c) = shape[-2:], strides[-2:]
    rows, columns = (r, pitch_r // width), (c, pitch_c // width)
    for transposed, (length, stride), (others, pitch) in ((False, columns, rows), (True, rows, columns)):
        pitch = pitch if others > 1 else length  # the stride of a dimension of length 1 says nothing
        if (length == 1 or stride == 1) and length <= pitch <= _MOST:
            return transposed, pitch
    return None


def _joined(batch: tuple[int, ...], *steps: tuple[int, ...]) -> list[tuple[int, ...]]:
    """The dimensions of a batch, each with its steps, those that all operands step through evenly made one."""
    dims: list[tuple[int, ...]] = []
    for count, *own in zip(batch, *steps):
        if count == 1:
            continue
        if dims and all(outer == count * step for outer, step in zip(dims[-1][1:], own)):
            dims[-1] = (dims[-1][0] * count, *own)
        else:
            dims.append((count, *own))
    return dims
