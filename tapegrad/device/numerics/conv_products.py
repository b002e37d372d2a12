"""The products of a convolution on a CPU: of matrices of the kernel and of slices of rows (see ``conv_cpu``).

Three ways: a product for each tap; one for all taps that differ along the last axis alone, which read copies of the
image that are moved against each other; one for all taps, whose slices are copied one below the other.  The last two
are for few channels, of which products are thin.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from enum import Enum
from math import prod
from typing import Any, NamedTuple

import numpy as np

from tapegrad.device.numerics import blas
from tapegrad.device.numerics.conv_grid import Grid, Group, Sizes
from tapegrad.device.types import Array, DType

LEAST = 256  # positions of a block: below, the packing of the kernel for each product takes longer than the product
PRODUCT = 1_000_000  # multiply-adds of a product: OpenBLAS does not pack the operands of so small ones
_LONG = 4096  # positions of larger products
STACKED_ELEMENTS = 2**17  # elements of slices copied one below the other: 512 KiB of float32
STACK = 16  # rows of slices that make a product: below, those of all taps are copied for one product
COPY = 48  # channels: below, those of taps along the last axis are copied for one product


class Way(Enum):
    """How slices become products."""

    STACKED = "the slices of all taps are copied one below the other"
    COPIED = "taps that differ along the last axis alone are one product of copies of the image"
    DIRECT = "a product for each tap"


def way_of(inner: int, outer: int, kernel: Sizes, dtype: DType) -> Way:
    """Of ``inner`` channels of sources and ``outer`` ones of targets in a group."""
    if inner * kernel[-1] < STACK or not blas.adds(dtype):
        return Way.STACKED
    return Way.COPIED if inner < COPY else Way.DIRECT


def sliced(x: Array, slices: Sequence[slice]) -> Array:
    """``x`` sliced along its last axes."""
    index: Any = (..., *slices)
    part: Array = x[index]
    return part


class Scratch:
    """A worker's memory."""

    def __init__(self) -> None:
        self.buffers: dict[object, Array] = {}
        self.laid: dict[object, object] = {}

    def take(self, name: object, shape: Sizes, dtype: DType) -> Array:
        """An array of ``shape`` on the worker's memory called ``name``, whose contents stay from use to use."""
        size = prod(shape)
        buffer = self.buffers.get(name)
        if buffer is None or buffer.size < size:
            buffer = self.buffers[name] = np.empty(size, dtype)
            self.laid.pop(name, None)
        return buffer[:size].reshape(shape)

    def lay(self, name: object, part: Array, grid: Grid, front: int, line: int, rows: Array) -> None:
        """Put ``part``, (groups, channels, images, sizes ...), from ``line`` on into ``rows``, (groups, channels, row).

        Zeros around the images stay while blocks have one form.
        """
        g, c, n = part.shape[:3]
        form = (grid, part.shape)
        if self.laid.get(name) != form:
            rows.fill(0)
            self.laid[name] = form
        where = rows[:, :, front : front + n * prod(grid.sizes)].reshape(g, c, n, *grid.sizes)
        places = slice(line, line + part.shape[3]), *(slice(length) for length in part.shape[4:])
        sliced(where, places)[...] = part


class Read(NamedTuple):
    """What the taps of a group read: (groups, channels, row), its place at the first position, and the taps."""

    rows: Array
    at: int
    taps: tuple[int, ...]


def reads_of(groups: Sequence[Group], rows: list[Array], offsets: Sequence[int]) -> list[Read]:
    reads = []
    for group, at in zip(groups, offsets):
        copies = rows[group.source][:, slice(*group.copies)]
        reads.append(Read(copies.reshape(len(copies), -1, copies.shape[-1]), at, group.taps))
    return reads


def matrices_of(w: Array, number: int, groups: Sequence[Group], way: Way, dtype: DType, turned: bool) -> list[Array]:
    """The kernel's part for each group of taps; stacked: of all of them as one.

    ``(groups, outputs, taps * channels)``; turned: ``(groups, channels, taps * outputs)``, as a view of the transpose.
    """
    kernel = w.reshape(number, w.shape[0] // number, w.shape[1], -1)
    kernel = kernel.transpose((0, 3, 1, 2) if turned else (0, 1, 3, 2))
    taps = [group.taps for group in groups]
    if way is Way.STACKED:
        taps = [tuple(tap for each in taps for tap in each)]
    outputs, channels = w.shape[0] // number, w.shape[1]
    shapes = ((len(each), outputs) if turned else (outputs, len(each)) for each in taps)
    whole = [np.empty((number, *shape, channels), dtype) for shape in shapes]
    step = max(1, STACKED_ELEMENTS // max(1, number * channels * kernel.shape[1 if turned else 2]))
    for low in range(0, outputs, step):  # so many that what one tap has fetched is in the cache for the others
        part = slice(low, low + step)
        for matrix, each in zip(whole, taps):
            for i, tap in enumerate(each):
                if turned:
                    matrix[:, i, part] = kernel[:, tap, part]
                else:
                    matrix[:, part, i] = kernel[:, part, tap]
    if turned:
        return [matrix.reshape(number, -1, channels).swapaxes(1, 2) for matrix in whole]
    return [matrix.reshape(number, outputs, -1) for matrix in whole]


def by_products(reads: list[Read], kernel: list[Array], turned: bool, found: Array, length: int) -> None:
    """``found`` as the sum of products, one for each group of taps and piece of the positions."""
    g, o, row = found.shape
    dtype, width = found.dtype, found.dtype.itemsize
    step = _step(o * max(matrix.shape[2] for matrix in kernel))
    to = address(found)
    places = [(address(read.rows) + read.at * width, *read.rows.shape[1:], read.rows.strides[0], address(matrix))
              for read, matrix in zip(reads, kernel)]  # fmt: skip
    for i in range(g):
        for low in range(0, length, step):
            n, out, more = min(step, length - low), (to + (i * o * row + low) * width, row), False
            for start, k, given, stride, matrix in places:
                x, y = (matrix + i * o * k * width, o if turned else k), (start + i * stride + low * width, given)
                blas.add_product(dtype, o, n, k, x, y, out, more, x_turned=turned)
                more = True


def _step(each: int) -> int:
    """The positions of a product that takes ``each`` multiply-adds for a position."""
    step = PRODUCT // each
    return step if step >= 2 * LEAST else _LONG


def address(x: Array) -> int:
    """Where the first element of an array is."""
    try:
        memory: Any = x
        return ctypes.addressof(ctypes.c_char.from_buffer(memory))  # in a third of the time of the other
    except (TypeError, ValueError, BufferError):  # read-only, in pieces, or empty
        found: int = x.__array_interface__["data"][0]
        return found


def _stacked(scratch: Scratch, reads: list[Read], low: int, count: int, gaps: Array | None = None) -> Array:
    """What all taps read at positions from ``low`` on, in ``gaps`` zeros: ``(groups, taps * channels, positions)``."""
    g, c = reads[0].rows.shape[:2]
    slices = scratch.take("slices", (g, len(reads), c, count), reads[0].rows.dtype)
    for i, read in enumerate(reads):
        slices[:, i] = read.rows[:, :, read.at + low : read.at + low + count]
    if gaps is not None:
        slices[..., gaps[low : low + count]] = 0
    return slices.reshape(g, -1, count)


def by_stacking(scratch: Scratch, reads: list[Read], kernel: list[Array], found: Array, length: int) -> None:
    """``found`` by one product for each piece of the positions, of slices one below the other."""
    (matrix,) = kernel
    step = slice_step(len(matrix) * matrix.shape[2], exact=False)
    for low in range(0, length, step):
        count = min(step, length - low)
        np.matmul(matrix, _stacked(scratch, reads, low, count), out=found[:, :, low : low + count])


def slice_step(each: int, exact: bool) -> int:
    """Positions of slices that take ``each`` elements for a position."""
    return LEAST if exact else max(LEAST, STACKED_ELEMENTS // each)


def add_products(reads: list[Read], outputs: Array, length: int, total: Array) -> None:
    """Add to ``total``, (groups, taps * channels, outputs), what a block's ``outputs`` and ``reads`` yield."""
    g, o, row = outputs.shape
    dtype, width = outputs.dtype, outputs.dtype.itemsize
    step = _step(o * max(read.rows.shape[1] for read in reads))
    to, given = address(total), address(outputs)
    for i in range(g):
        for low in range(0, length, step):
            n, y, at = min(step, length - low), (given + (i * o * row + low) * width, row), to + i * total.strides[0]
            for read in reads:
                k, line = read.rows.shape[1:]
                x = address(read.rows) + i * read.rows.strides[0] + (read.at + low) * width
                blas.add_product(dtype, k, o, n, (x, line), y, (at, o), True, y_turned=True)
                at += k * o * width


def add_stacked(
    scratch: Scratch, reads: list[Read], outputs: Array, length: int, total: Array, gaps: Array | None = None
) -> None:
    """The same by one product for each piece of the positions, of slices one below the other."""
    step = slice_step(prod(total.shape[:2]), exact=gaps is not None)
    found = scratch.take("products", total.shape, total.dtype)
    for low in range(0, length, step):
        count = min(step, length - low)
        left = outputs[:, :, low : low + count].swapaxes(1, 2)
        np.add(total, np.matmul(_stacked(scratch, reads, low, count, gaps), left, out=found), out=total)


def gaps_of(shape: Sizes, grid: Grid) -> Array:
    """Which positions of a grid, one after the other, lie between those of ``shape``, (images, sizes ...)."""
    gaps = np.ones((shape[0], *grid.sizes), bool)
    sliced(gaps, [slice(length) for length in shape[1:]])[...] = False
    return gaps.reshape(-1)
