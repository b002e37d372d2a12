"""Convolutions as matrix products of columns, for CuPy; ``conv_cpu`` has NumPy's.

The windows of a block of positions are copied into columns, and the kernel multiplies those: never the columns of a
whole batch at once, but of as many positions as fit a bounded scratch.  Blocks, their order and the parts of a long sum
follow from the shapes alone, so no bit depends on the number of threads.

With ``c`` channels and ``o`` outputs in each of ``g`` groups, a kernel of ``k`` taps and ``t`` positions:

* forward: ``out (o, t) = w (o, c k) @ columns (c k, t)``;
* transposed in the image: ``columns = w.T @ ct``, added back to where they were copied from;
* transposed in the kernel: ``ct (o, t) @ columns.T (t, c k)``, summed over images and blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product
from math import prod
from typing import NamedTuple

import numpy as np

from tapegrad.device import gemm, threads
from tapegrad.device.dtypes import accumulator
from tapegrad.device.numerics import blas, conv_cpu
from tapegrad.device.numerics.conv_cpu import Prepared
from tapegrad.device.numerics.windows import Moves, taps
from tapegrad.device.types import Array, DType, Namespace

# In elements.  On a CPU 1 MiB of float32 columns stays in a core's second cache; a GPU wants few, large launches.
_COLUMNS_CPU, _COLUMNS_GPU = 2**18, 2**24
_LEAST = 256  # positions: below, the packing of the kernel for each product takes longer than the product
_PIECES = 16  # tasks into which one long sum, or one image, is cut at most
_PIECE = 2**22  # multiply-adds that are worth a task
_GRAINS = 8 * 512  # what a pool adds to round the arrays of a block
_PARTS = 2**20  # elements that the parts of a sum over images may take


class Unmade:
    """A C-contiguous array yet to be made, as far as preparing a convolution asks for one."""

    class flags:
        c_contiguous = True

    def __init__(self, shape: tuple[int, ...], dtype: DType) -> None:
        self.shape, self.dtype, self.size = shape, dtype, prod(shape)
        self.nbytes = self.size * dtype.itemsize


class _Block(NamedTuple):
    """Groups, images and rows of positions whose columns are in memory at the same time."""

    groups: slice
    images: slice
    rows: slice


class _Cut(NamedTuple):
    """How many groups, images and rows of positions a block takes."""

    groups: int
    images: int
    rows: int


def _cut(xp: Namespace, images: int, groups: int, height: int, positions: tuple[int, ...]) -> _Cut:
    """The cut for columns of ``height`` elements: rows of one image, else images of one group, else several groups."""
    limit = _COLUMNS_CPU if xp is np else _COLUMNS_GPU
    width, row = max(_LEAST, limit // height), prod(positions[1:])
    whole = width // (row * positions[0])
    if not whole:
        return _Cut(1, 1, max(1, width // row))
    together = min(groups, whole)
    return _Cut(together, min(images, whole // together), positions[0])


def _slices(count: int, step: int) -> list[slice]:
    return [slice(i, min(i + step, count)) for i in range(0, count, step)]


def _split(count: int, parts: int) -> list[slice]:
    return _slices(count, -(-count // max(1, min(parts, count))))


class _Run:
    """One convolution: its operands with the groups as an axis of their own, scratch and products."""

    def __init__(
        self, xp: Namespace, image: tuple[int, ...], kernel: tuple[int, ...], dtype: DType, moves: Moves
    ) -> None:
        self.xp = xp
        self.window = moves.over(image[2:], kernel[2:])
        self.groups = moves.groups
        self.positions = self.window.positions
        self.taps = prod(kernel[2:])
        self.wide = accumulator(dtype)
        # NumPy multiplies float16 element by element; cuBLAS reads it and adds up in float32.
        self.inner = self.wide if xp is np else dtype

    def apart(self, x: Array) -> Array:
        """``(n, c, ...)`` as ``(groups, n, c / groups, ...)``."""
        return self.xp.moveaxis(x.reshape(x.shape[0], self.groups, -1, *x.shape[2:]), 1, 0)

    def matrices(self, w: Array) -> Array:
        """The kernel as ``(groups, outputs, channels * taps)``."""
        w = self.xp.ascontiguousarray(w).reshape(self.groups, w.shape[0] // self.groups, -1)
        return w if w.dtype == self.inner else w.astype(self.inner)

    def multiply(self, x: Array, y: Array, out: Array) -> None:
        if self.xp is np:
            np.matmul(x, y, out=out)
        else:
            gemm.matmul(self.xp, x, y, out)

    def spread(self, worker: Callable[[], Callable[[int], None]], tasks: int) -> None:
        """Run all tasks; each thread works with a ``worker`` of its own."""
        if self.xp is not np:
            threads.run([worker()], tasks)
            return
        with blas.one_thread():
            threads.run([worker() for _ in range(self.workers(tasks))], tasks)

    def workers(self, tasks: int) -> int:
        """How many threads share so many tasks."""
        return min(threads.get_num_threads(), tasks) if self.xp is np else 1

    def block(self, cut: _Cut, rows: int) -> int:
        """Bytes of scratch for a block of ``rows`` rows of matrices: columns, outputs and products of a group."""
        return _GRAINS + rows * cut.groups * cut.images * cut.rows * prod(self.positions[1:]) * self.inner.itemsize

    def kernel_bytes(self, w: Array) -> int:
        """Bytes that :meth:`matrices` takes."""
        once = 0 if w.flags.c_contiguous else w.nbytes
        return once + (0 if w.dtype == self.inner else w.size * self.inner.itemsize)


class _Scratch:
    """A worker's memory for columns, for the block of the other operand, and for products."""

    def __init__(self, run: _Run) -> None:
        self.run = run
        self.buffers: dict[str, Array] = {}
        self.bordered: tuple[slice, tuple[int, ...]] | None = None

    def take(self, name: str, shape: tuple[int, ...], dtype: DType) -> Array:
        """An array of ``shape`` on the worker's memory called ``name``, whose contents stay from use to use."""
        size = prod(shape)
        buffer = self.buffers.get(name)
        if buffer is None or buffer.size < size:
            buffer = self.buffers[name] = self.run.xp.empty(size, dtype)
        return buffer[:size].reshape(shape)

    def columns(self, image: Array, block: _Block, channels: slice) -> Array:
        """``(groups, channels * taps, images * positions)`` of ``image``, ``(groups, images, channels, ...)``."""
        run, window = self.run, self.run.window
        part = run.xp.moveaxis(image[block.groups, block.images, channels], 1, 2)
        g, c, n = part.shape[:3]
        count = block.rows.stop - block.rows.start
        shape = (g, c, run.taps, n, count, *run.positions[1:])
        matrix = self.take("columns", shape, run.inner)
        key = (block.rows, shape)
        meeting = taps(window, block.rows.start, count)
        if self.bordered != key:  # zeros around the image stay while blocks have one form
            matrix.fill(0)
            self.bordered = key
        for tap in meeting:
            matrix[tap.columns] = part[(..., *tap.meets)]
        return matrix.reshape(g, c * run.taps, -1)

    def add_columns(self, columns: Array, image: Array, block: _Block) -> None:
        """Add columns to where in ``image``, ``(groups, images, channels, ...)``, they belong."""
        run = self.run
        count = block.rows.stop - block.rows.start
        part = run.xp.moveaxis(image, 1, 2)
        g, c, n = part.shape[:3]
        columns = columns.reshape(g, c, run.taps, n, count, *run.positions[1:])
        for tap in taps(run.window, block.rows.start, count):
            window = part[(..., *tap.meets)]
            run.xp.add(window, columns[tap.columns], out=window)

    def outputs(self, ct: Array, block: _Block) -> Array:
        """``(groups, outputs, images * positions)`` of ``ct``, ``(groups, images, outputs, rows, ...)``."""
        part = self.run.xp.moveaxis(ct[block.groups, block.images, :, block.rows], 1, 2)
        g, o, n = part.shape[:3]
        matrix = self.take("outputs", part.shape, self.run.inner)
        matrix[...] = part
        return matrix.reshape(g, o, -1)


def _blocks(groups: list[slice], images: list[slice], rows: list[slice]) -> Iterator[_Block]:
    return (_Block(*each) for each in product(groups, images, rows))


def forward(xp: Namespace, x: Array, w: Array, out: Array, moves: Moves) -> Prepared:
    """``x``: (n, channels, ...), ``w``: (outputs, channels / groups, ...), ``out``: (n, outputs, positions ...)."""
    if xp is np:
        return conv_cpu.forward(x, w, out, moves)
    if not out.size or not w.size:
        return Prepared(0, lambda: out.fill(0))
    run, groups = _Run(xp, x.shape, w.shape, out.dtype, moves), moves.groups
    o, height = w.shape[0] // groups, prod(w.shape[1:])
    cut = _cut(xp, x.shape[0], groups, max(o, height), run.positions)
    blocks = list(_blocks(*map(_slices, (groups, x.shape[0], run.positions[0]), cut)))

    def worker(kernel: Array, image: Array, result: Array) -> Callable[[int], None]:
        scratch = _Scratch(run)

        def task(number: int) -> None:
            block = blocks[number]
            columns = scratch.columns(image, block, slice(None))
            target = xp.moveaxis(result[block.groups, block.images, :, block.rows], 1, 2)
            products = scratch.take("products", target.shape, run.inner)
            run.multiply(kernel[block.groups], columns, products.reshape(len(target), o, -1))
            target[...] = products

        return task

    def work() -> None:
        operands = run.matrices(w), run.apart(x), run.apart(out)
        run.spread(lambda: worker(*operands), len(blocks))

    return Prepared(run.kernel_bytes(w) + run.workers(len(blocks)) * run.block(cut, height + o), work)


def in_image(xp: Namespace, ct: Array, w: Array, out: Array, moves: Moves) -> Prepared:
    """The transpose in the image: ``ct``: (n, outputs, positions ...), ``out``: (n, channels, ...)."""
    if xp is np:
        return conv_cpu.in_image(ct, w, out, moves)
    if not out.size or not ct.size:
        return Prepared(0, lambda: out.fill(0))
    run, groups = _Run(xp, out.shape, w.shape, out.dtype, moves), moves.groups
    run.inner = run.wide  # products are added up afterwards, several to an element
    o, height = w.shape[0] // groups, prod(w.shape[1:])
    cut = _cut(xp, out.shape[0], groups, max(o, height), run.positions)
    several = list(product(_slices(groups, cut.groups), _slices(out.shape[0], cut.images)))
    pieces = _pieces(xp, ct.size * height) // len(several)
    channels = _split(height // run.taps, pieces)
    rows = _slices(run.positions[0], cut.rows)
    apart = out.dtype != run.wide

    def worker(kernel: Array, given: Array, image: Array) -> Callable[[int], None]:
        scratch = _Scratch(run)

        def task(number: int) -> None:
            (group, images), part = several[number // len(channels)], channels[number % len(channels)]
            target = image[group, images, part]
            mine = kernel[group, :, part.start * run.taps : part.stop * run.taps]
            for block in _blocks([group], [images], rows):
                outputs = scratch.outputs(given, block)
                columns = scratch.take("columns", (len(mine), mine.shape[2], outputs.shape[2]), run.inner)
                run.multiply(mine.swapaxes(1, 2), outputs, columns)
                scratch.add_columns(columns, target, block)

        return task

    def work() -> None:
        total = xp.empty(out.shape, run.wide) if apart else out
        total.fill(0)
        operands = run.matrices(w), run.apart(ct), run.apart(total)
        run.spread(lambda: worker(*operands), tasks)
        if apart:
            out[...] = total

    tasks = len(several) * len(channels)
    each = run.workers(tasks) * run.block(cut, o + channels[0].stop * run.taps)
    return Prepared(run.kernel_bytes(w) + each + (out.size * run.wide.itemsize if apart else 0), work)


def in_kernel(xp: Namespace, x: Array, ct: Array, out: Array, moves: Moves) -> Prepared:
    """The transpose in the kernel: ``x``: (n, channels, ...), ``ct``: (n, outputs, positions ...)."""
    if xp is np:
        return conv_cpu.in_kernel(x, ct, out, moves)
    if not x.size or not ct.size:
        return Prepared(0, lambda: out.fill(0))
    run, groups = _Run(xp, x.shape, out.shape, out.dtype, moves), moves.groups
    n, o, c = x.shape[0], ct.shape[1] // groups, x.shape[1] // groups
    pieces = _pieces(xp, ct.size * c * run.taps)
    sums = _split(n, min(pieces, max(1, _PARTS // out.size)))
    channels = _split(c, -(-pieces // len(sums)))
    each = channels[0].stop
    cut = _cut(xp, sums[0].stop, groups, max(o, each * run.taps), run.positions)
    group = _slices(groups, cut.groups)
    tasks = list(product(range(len(sums)), group, channels))
    rows = _slices(run.positions[0], cut.rows)

    def worker(image: Array, given: Array, totals: Array) -> Callable[[int], None]:
        scratch = _Scratch(run)

        def task(number: int) -> None:
            part, some, several = tasks[number]
            images = [slice(i, min(i + cut.images, sums[part].stop)) for i in
                      range(sums[part].start, sums[part].stop, cut.images)]  # fmt: skip
            total = totals[part, some, :, several]
            total.fill(0)
            for block in _blocks([some], images, rows):
                columns = scratch.columns(image, block, several)
                outputs = scratch.outputs(given, block)
                products = scratch.take("products", total.shape, run.inner)
                run.multiply(outputs, columns.swapaxes(1, 2), products.reshape(len(total), o, -1))
                xp.add(total, products, out=total)

        return task

    def work() -> None:
        totals = xp.empty((len(sums), groups, o, c, run.taps), run.wide)
        operands = run.apart(x), run.apart(ct), totals
        run.spread(lambda: worker(*operands), len(tasks))
        whole = totals[0] if len(sums) == 1 else xp.sum(totals, axis=0)
        out[...] = whole.reshape(out.shape)

    products = cut.groups * o * each * run.taps * run.inner.itemsize
    mine = run.workers(len(tasks)) * (run.block(cut, each * run.taps + o) + products)
    return Prepared(mine + (len(sums) + (len(sums) > 1)) * out.size * run.wide.itemsize, work)


def _pieces(xp: Namespace, work: int) -> int:
    """How many tasks so many multiply-adds are worth."""
    return min(_PIECES, max(1, work // _PIECE)) if xp is np else 1
