"""Convolutions on a CPU, as matrix products on images laid out on a grid (``conv_grid`` says how): no columns.

Blocks of images (of one large image: of lines) that stay in a core's second cache are copied into a grid; there what a
tap meets is one slice of a channel's row.  With ``c`` channels and ``o`` outputs in each of ``g`` groups, and ``t``
positions on the grid:

* forward: ``out (o, t) = sum over taps of w[tap] (o, c) @ slice (c, t)``;
* transposed in the image: the same of the cotangent with ``w[tap].T``, for each phase of the image;
* transposed in the kernel: ``dw[tap] (o, c) = ct (o, t) @ slice.T (t, c)``, summed over blocks.

A kernel of one tap multiplies the images where they are.  Blocks, their order and the parts of a long sum follow from
the shapes alone, so no bit depends on the number of threads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import product
from math import prod
from typing import NamedTuple

import numpy as np

from tapegrad.device import threads
from tapegrad.device.dtypes import accumulator
from tapegrad.device.numerics import blas, conv_grid
from tapegrad.device.numerics import conv_products as products
from tapegrad.device.numerics.conv_grid import Grid, Job, Sizes
from tapegrad.device.numerics.conv_lead import Prepared
from tapegrad.device.numerics.conv_products import Scratch, Way
from tapegrad.device.numerics.windows import Moves, Window
from tapegrad.device.types import Array, DType

BLOCK = 2**18  # elements on the grid: 1 MiB of float32 stays in a core's second cache
_WHOLE = 16  # elements of an image: below, products of images together are faster than one for each
_PIECES = 16  # tasks into which one long sum is cut at most
PIECE = 2**22  # multiply-adds that are worth a task
_PARTS = 2**20  # elements that the parts of a sum over images may take
_GRAINS = 8 * 512  # what a pool adds to round the arrays of a block


class _Block(NamedTuple):
    """Groups, images and lines that are on the grid at the same time."""

    groups: slice
    images: slice
    lines: tuple[int, int]


class _Run:
    """A kind of convolution: how it is cut into blocks, and what they take."""

    def __init__(
        self, job: Job, size: Sizes, positions: Sizes, shape: tuple[int, ...], dtype: DType, block: int, least: int
    ) -> None:
        """``shape``: images, groups, and the channels of the sources and of the targets of a group.

        ``block``, ``least``: elements and least positions of a block.
        """
        self.job, self.dtype = job, accumulator(dtype)
        self.images, self.groups, self.inner, self.outer = shape
        self.sources = tuple(conv_grid.lengths(slices, size) for slices in job.sources)
        self.targets = tuple(conv_grid.lengths(target.slices, positions) for target in job.targets)
        self.lines = max(target[0] for target in self.targets)
        self.rows = sum(map(len, job.moves)) * self.inner + self.outer
        self.cut = self._cut(block, least)
        groups, images, lines = self.cut
        grids = [self.grid(images, (i, min(i + lines, self.lines))) for i in range(0, self.lines, lines)]
        copies = sum(map(len, job.moves)) * self.inner
        self.longest = max(grid.length for grid in grids)
        self.taken = groups * max(copies * g.row + self.outer * images * prod(g.sizes) for g in grids)
        """Elements of a block's rows."""
        self._blocks: dict[tuple[int, range], list[_Block]] = {}

    def _cut(self, block: int, least: int) -> tuple[int, int, int]:
        """Groups, images and lines of a block: lines of one image, else images of one group, else several groups."""
        whole = prod(self.grid(1, (0, self.lines)).sizes)
        width = max(least, block // self.rows)
        together = width // whole
        if together:
            groups = min(self.groups, max(1, together // self.images))
            return groups, min(self.images, together), self.lines
        return 1, 1, max(1, min(self.lines, width * self.lines // whole))

    def grid(self, images: int, lines: tuple[int, int]) -> Grid:
        return conv_grid.grid(self.job, self.sources, self.targets, images, lines)

    def blocks(self, groups: int, images: range) -> list[_Block]:
        """The blocks of some images, in order."""
        known = self._blocks.get((groups, images))
        if known is not None:
            return known
        lines = [(i, min(i + self.cut[2], self.lines)) for i in range(0, self.lines, self.cut[2])]
        several = [slice(i, min(i + self.cut[1], images.stop)) for i in range(images.start, images.stop, self.cut[1])]
        blocks = [_Block(*each) for each in product(_slices(self.groups, groups), several, lines)]
        self._blocks[groups, images] = blocks
        return blocks

    def on_grid(self, scratch: Scratch, phases: Sequence[Array], block: _Block, grid: Grid) -> list[Array]:
        """Of each source, whose phases are (groups, channels, images, sizes ...), (groups, copies, channels, row)."""
        base = min(start for start, _ in grid.first)
        found = []
        for i, (phase, (start, count), moves) in enumerate(zip(phases, grid.first, self.job.moves, strict=True)):
            part = phase[block.groups, :, block.images, start : start + count]
            rows = scratch.take(i, (len(part), len(moves), self.inner, grid.row), self.dtype)
            scratch.lay(i, part, grid, grid.front, start - base, rows[:, 0])
            for copy, move in enumerate(moves[1:], 1):
                rows[:, copy, :, : grid.row - move] = rows[:, 0, :, move:]
            found.append(rows)
        return found

    def block_bytes(self, more: int) -> int:
        """Bytes of a block's rows, and of ``more`` elements."""
        return _GRAINS + (self.taken + more) * self.dtype.itemsize


@lru_cache(maxsize=1024)
def _known_run(job: Job, size: Sizes, positions: Sizes, shape: tuple[int, ...], dtype: DType, *limits: int) -> _Run:
    return _Run(job, size, positions, shape, dtype, *limits)


def _slices(count: int, step: int) -> list[slice]:
    return [slice(i, min(i + step, count)) for i in range(0, count, step)]


def _spread(worker: Callable[[], Callable[[int], None]], tasks: int) -> None:
    """Run all tasks; each thread works with a ``worker`` of its own."""
    with blas.one_thread():
        threads.run([worker() for _ in range(_workers(tasks))], tasks)


def _workers(tasks: int) -> int:
    return min(threads.get_num_threads(), tasks)


def _apart(x: Array, groups: int) -> Array:
    """``(n, c, sizes ...)`` as ``(groups, c / groups, n, sizes ...)``."""
    return np.moveaxis(x.reshape(x.shape[0], groups, -1, *x.shape[2:]), 0, 2)


def forward(x: Array, w: Array, out: Array, moves: Moves) -> Prepared:
    """``x``: (n, channels, ...), ``w``: (outputs, channels / groups, ...), ``out``: (n, outputs, positions ...)."""
    return _applied(conv_grid.forward, x, w, out, moves, turned=False)


def in_image(ct: Array, w: Array, out: Array, moves: Moves) -> Prepared:
    """The transpose in the image: ``ct``: (n, outputs, positions ...), ``out``: (n, channels, ...)."""
    return _applied(conv_grid.transposed, ct, w, out, moves, turned=True)


def _applied(job_of: Callable[..., Job], x: Array, w: Array, out: Array, moves: Moves, turned: bool) -> Prepared:
    """The targets of the job, phases of ``out``, from its sources, phases of ``x``."""
    if not out.size or not x.size or not w.size:
        return Prepared(0, lambda: out.fill(0))
    groups, image = moves.groups, out.shape if turned else x.shape
    window = moves.over(image[2:], w.shape[2:])
    if _is_pointwise(window) and x.dtype == accumulator(x.dtype):
        return _pointwise(x, w, out, groups, turned)
    shape = x.shape[0], groups, x.shape[1] // groups, out.shape[1] // groups
    way = products.way_of(shape[2], shape[3], w.shape[2:], accumulator(out.dtype))
    job = job_of(window, way is Way.COPIED)
    if not any(target.groups for target in job.targets):
        return Prepared(0, lambda: out.fill(0))
    run = _known_run(job, x.shape[2:], out.shape[2:], shape, out.dtype, BLOCK, products.LEAST)
    blocks = run.blocks(run.cut[0], range(x.shape[0]))

    def worker(matrices: list[list[Array]], given: Array, result: Array) -> Callable[[int], None]:
        scratch = Scratch()
        sources = [products.sliced(given, slices) for slices in job.sources]
        targets = [products.sliced(result, target.slices) for target in job.targets]

        def task(number: int) -> None:
            block = blocks[number]
            grid = run.grid(block.images.stop - block.images.start, block.lines)
            rows = run.on_grid(scratch, sources, block, grid)
            for target, whole, kernel, offsets in zip(job.targets, targets, matrices, grid.offsets):
                part = whole[block.groups, :, block.images, slice(*block.lines)]
                if part.size:
                    mine = [matrix[block.groups] for matrix in kernel]
                    found = scratch.take("found", (*part.shape[:2], part.shape[2] * prod(grid.sizes)), run.dtype)
                    reads = products.reads_of(target.groups, rows, offsets)
                    if way is Way.STACKED:
                        products.by_stacking(scratch, reads, mine, found, grid.length)
                    else:
                        products.by_products(reads, mine, turned, found, grid.length)
                    on_grid = found.reshape(*part.shape[:3], *grid.sizes)
                    sizes = [slice(length) for length in part.shape[3:]]
                    np.copyto(part, products.sliced(on_grid, sizes), casting="same_kind")

        return task

    def work() -> None:
        if not job.covers:
            out.fill(0)
        matrices = [products.matrices_of(w, groups, target.groups, way, run.dtype, turned) for target in job.targets]
        operands = matrices, _apart(x, groups), _apart(out, groups)
        _spread(lambda: worker(*operands), len(blocks))

    wide = run.dtype.itemsize
    return Prepared(2 * w.size * wide + _workers(len(blocks)) * run.block_bytes(_slice_size(run, way)), work)


def _is_pointwise(window: Window) -> bool:
    """Whether a product of each image will do; of few elements it pays to take images together."""
    return window.is_pointwise and prod(window.size) >= _WHOLE


def _slice_size(run: _Run, way: Way, exact: bool = False) -> int:
    """Elements that slices of all taps take, at most."""
    if way is not Way.STACKED and not exact:
        return 0
    taps = max(sum(len(group.taps) for group in target.groups) for target in run.job.targets)
    groups = run.cut[0]
    return groups * taps * run.inner * min(run.longest, products.slice_step(groups * taps * run.inner, exact))


def _pointwise(x: Array, w: Array, out: Array, groups: int, turned: bool) -> Prepared:
    """A kernel of one tap on each element: a product without copies."""
    places = prod(x.shape[2:])

    def work() -> None:
        given = np.ascontiguousarray(x).reshape(x.shape[0], groups, -1, places)
        kernel = np.ascontiguousarray(w).reshape(groups, w.shape[0] // groups, w.shape[1])
        kernel = kernel.swapaxes(1, 2) if turned else kernel
        blas.matmul(np, kernel[None], given, out.reshape(x.shape[0], groups, -1, places))

    return Prepared(sum(a.nbytes for a in (x, w) if not a.flags.c_contiguous), work)


def in_kernel(x: Array, ct: Array, out: Array, moves: Moves) -> Prepared:
    """The transpose in the kernel: ``x``: (n, channels, ...), ``ct``: (n, outputs, positions ...)."""
    if not x.size or not ct.size or not out.size:
        return Prepared(0, lambda: out.fill(0))
    groups, taps = moves.groups, prod(out.shape[2:])
    shape = x.shape[0], groups, x.shape[1] // groups, ct.shape[1] // groups
    wide = accumulator(out.dtype)
    window = moves.over(x.shape[2:], out.shape[2:])
    if _is_pointwise(window) and wide == out.dtype and blas.adds(wide):
        return _pointwise_in_kernel(x, ct, out, groups)
    way = products.way_of(shape[2], shape[3], out.shape[2:], wide)
    job = conv_grid.forward(window, way is Way.COPIED)
    (target,) = job.targets
    if not target.groups:
        return Prepared(0, lambda: out.fill(0))
    met = [tap for group in target.groups for tap in group.taps]
    run = _known_run(job, x.shape[2:], ct.shape[2:], shape, out.dtype, BLOCK, products.LEAST)
    sums = _ranges(x.shape[0], _pieces(ct.size * run.inner * taps, out.size))
    tasks = list(product(range(len(sums)), _slices(groups, run.cut[0])))

    def worker(image: Array, given: Array, totals: Array, exact: bool) -> Callable[[int], None]:
        scratch = Scratch()
        phases = [products.sliced(image, slices) for slices in job.sources]

        def task(number: int) -> None:
            part, some = tasks[number]
            total = totals[part, some]
            total.fill(0)
            for block in run.blocks(groups, sums[part]):
                grid = run.grid(block.images.stop - block.images.start, block.lines)
                rows = run.on_grid(scratch, phases, block._replace(groups=some), grid)
                mine = given[some, :, block.images, slice(*block.lines)]
                outputs = scratch.take("outputs", (*mine.shape[:2], mine.shape[2] * prod(grid.sizes)), run.dtype)
                scratch.lay("outputs", mine, grid, 0, 0, outputs)
                reads = products.reads_of(target.groups, rows, grid.offsets[0])
                if exact or way is Way.STACKED:
                    gaps = products.gaps_of(mine.shape[2:], grid) if exact else None
                    products.add_stacked(scratch, reads, outputs, grid.length, total, gaps)
                else:
                    products.add_products(reads, outputs, grid.length, total)

        return task

    def whole(exact: bool) -> Array:
        totals = np.empty((len(sums), groups, len(met) * run.inner, run.outer), run.dtype)
        operands = _apart(x, groups), _apart(ct, groups), totals, exact
        _spread(lambda: worker(*operands), len(tasks))
        return totals[0] if len(sums) == 1 else np.sum(totals, axis=0)

    def work() -> None:
        found = whole(False)
        if not np.isfinite(found).all():
            found = whole(True)  # what lies in gaps times 0 is not 0 if it is not finite
        if len(met) < taps:
            out.fill(0)
        apart = out.reshape(groups, run.outer, run.inner, taps)
        apart[..., met] = found.reshape(groups, len(met), run.inner, run.outer).transpose(0, 3, 2, 1)

    more = run.cut[0] * run.outer * run.inner * taps
    more += max(_slice_size(run, way), _slice_size(run, way, exact=True))
    mine = _workers(len(tasks)) * run.block_bytes(more)
    return Prepared(mine + (len(sums) + (len(sums) > 1)) * out.size * run.dtype.itemsize, work)


def _pointwise_in_kernel(x: Array, ct: Array, out: Array, groups: int) -> Prepared:
    """The transpose of a product without copies, summed over images."""
    n, places, dtype = x.shape[0], prod(x.shape[2:]), out.dtype
    c, o = x.shape[1] // groups, ct.shape[1] // groups
    pieces = _pieces(x.size * o, out.size)
    sums = _ranges(n, pieces)

    def work() -> None:
        given, mine = (np.ascontiguousarray(a).reshape(n, groups, -1, places) for a in (x, ct))
        totals = np.zeros((len(sums), groups, o, c), dtype)

        def task(number: int) -> None:
            for i, g in product(sums[number], range(groups)):
                total, image, outputs = totals[number, g], given[i, g], mine[i, g]
                at = (
                    (products.address(outputs), places),
                    (products.address(image), places),
                    (products.address(total), c),
                )
                blas.add_product(dtype, o, c, places, *at, True, y_turned=True)

        _spread(lambda: task, len(sums))
        whole = totals[0] if len(sums) == 1 else np.sum(totals, axis=0)
        np.copyto(out, whole.reshape(out.shape))

    copies = sum(a.nbytes for a in (x, ct) if not a.flags.c_contiguous)
    return Prepared(copies + (len(sums) + (len(sums) > 1)) * out.nbytes, work)


def _pieces(work: int, size: int) -> int:
    """Into how many parts a sum over images is cut that takes so many multiply-adds, for a kernel of ``size``."""
    return min(_PIECES, max(1, work // PIECE), max(1, _PARTS // size))


def _ranges(count: int, pieces: int) -> list[range]:
    each = -(-count // pieces)
    return [range(i, min(i + each, count)) for i in range(0, count, each)]
