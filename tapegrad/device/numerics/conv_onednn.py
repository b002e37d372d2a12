"""Convolutions on a CPU by oneDNN (Intel), where it is installed: float32, kernels of more than one tap.

oneDNN multiplies channels that lie side by side, 16 as a rule.  Blocks of images (of one large image: of lines) are
copied into that order, computed while they are in a core's second cache, and copied back.  Blocks, their order and the
parts of a long sum follow from the shapes alone, and each is computed by one thread, so no bit depends on the number of
threads.

* transposed in the image, with strides of 1: a convolution of the cotangent with the kernel turned round;
* transposed in the image, with other strides: left to ``conv_cpu``, which is faster.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from math import prod
from typing import NamedTuple

import numpy as np

from tapegrad.device import onednn, threads
from tapegrad.device.numerics.conv_lead import Prepared
from tapegrad.device.numerics.conv_products import address, sliced
from tapegrad.device.numerics.windows import Moves, Window
from tapegrad.device.onednn import Layout, OneDNN, Primitive
from tapegrad.device.types import Array

Sizes = tuple[int, ...]

BLOCK = 2**18  # elements of a block's image and result together: 1 MiB of float32
_PARTS = 16  # parts of a sum over blocks, at most
_PART = 2**20  # elements that these may take together
_RESULT = 2  # among the operands of a convolution
_ALIGNMENT = 64


class _Channels(NamedTuple):
    """Images, groups, and the channels of the image and of the result in each group."""

    images: int
    groups: int
    inner: int
    outer: int


class _Block(NamedTuple):
    """Images and lines of the result, and the lines of the image that they meet, with the padding above and below."""

    images: range
    lines: range
    rows: range
    around: tuple[int, int]


class _Step:
    """What computes blocks of one size: a convolution, and what copies its operands into its layouts, and back."""

    def __init__(self, library: OneDNN, code: Primitive, plain: Sequence[Layout]) -> None:
        """``plain``: where the operands of ``code`` are, of which the last is the result."""
        self.code, self.copies, self.sizes = code, list[Primitive | None](), list[int]()
        for i, (mine, theirs) in enumerate(zip(plain, code.layouts.values(), strict=True)):
            same, ends = mine.is_same(theirs), (theirs, mine) if i == _RESULT else (mine, theirs)
            self.copies.append(None if same else library.reorder(*ends))
            self.sizes.append(0 if same else theirs.nbytes)
        self.scratch = max(p.scratch for p in (code, *self.copies) if p is not None)

    def brought(self, operand: int, at: int, room: int, scratch: int) -> int:
        """Where an operand is as ``code`` wants it: ``at`` its own place, or copied to ``room``."""
        copy = self.copies[operand]
        if copy is None:
            return at
        copy.run(at, room, scratch=scratch)
        return room

    def compute(self, first: int, second: int, target: int, room: int, scratch: int) -> None:
        """The result at ``target``, by way of ``room`` if ``code`` writes it otherwise."""
        copy = self.copies[_RESULT]
        self.code.run(first, second, target if copy is None else room, scratch=scratch)
        if copy is not None:
            copy.run(room, target, scratch=scratch)


class _Plan:
    """The blocks, each with its step."""

    def __init__(self, library: OneDNN, blocks: list[tuple[_Block, _Step]]) -> None:
        self.library, self.blocks = library, blocks
        self.steps = list(dict.fromkeys(step for _, step in blocks))
        self.scratch = max(step.scratch for step in self.steps)
        self.copies = [max(sizes) for sizes in zip(*(step.sizes for step in self.steps))]
        """Bytes of a copy of each operand that will do for every block."""


class _Memory:
    """Memory for parts of so many bytes, and ``at`` which address each begins: that of a cache line."""

    def __init__(self, *sizes: int) -> None:
        self._array = np.empty(_room(*sizes), np.uint8)
        line, self.at = -(-address(self._array) // _ALIGNMENT), list[int]()
        for size in sizes:
            self.at.append(line * _ALIGNMENT)
            line += -(-size // _ALIGNMENT)


def _room(*sizes: int) -> int:
    """Bytes that :class:`_Memory` takes."""
    return sum(sizes) + _ALIGNMENT * (len(sizes) + 1)


def _workers(tasks: int) -> int:
    return min(threads.get_num_threads(), tasks)


def _blocks(window: Window, channels: _Channels) -> list[_Block]:
    """Blocks of some images, or of some lines of one."""
    positions, (low, _) = window.positions, window.padding[0]
    step, reach, size = window.strides[0], (window.kernel[0] - 1) * window.dilation[0], window.size[0]
    whole = channels.groups * (channels.inner * prod(window.size) + channels.outer * prod(positions))
    images = max(1, min(channels.images, BLOCK // whole))
    least = -(-(reach + 1) // step)  # lines that meet more of the image than their neighbours do
    lines = positions[0] if whole <= BLOCK else max(least, positions[0] * BLOCK // whole)
    found = []
    for some in _ranges(channels.images, images):
        for part in _ranges(positions[0], lines):
            start, stop = part.start * step - low, (part.stop - 1) * step - low + reach + 1
            rows = range(max(start, 0), min(stop, size))
            found.append(_Block(some, part, rows, (rows.start - start, stop - rows.stop)))
    return found


def _ranges(count: int, most: int) -> list[range]:
    """Ranges of about the same length, at most ``most``."""
    pieces = -(-count // most)
    each = -(-count // pieces)
    return [range(i, min(i + each, count)) for i in range(0, count, each)]


def _plan(library: OneDNN, make: Callable[..., Primitive], window: Window, channels: _Channels) -> _Plan | None:
    """The plan of a convolution, or of its kernel's gradient, by ``make``; None if oneDNN is not worth it."""
    if window.is_pointwise:
        return None
    reach = [(k - 1) * d for k, d in zip(window.kernel, window.dilation)]
    if any(not 0 <= p <= far for pair, far in zip(window.padding, reach) for p in pair):
        return None  # windows in the padding alone
    steps: dict[_Block, _Step] = {}
    blocks = []
    try:
        with library.one_thread():
            for block in _blocks(window, channels):
                size = range(len(block.images)), range(len(block.lines)), range(len(block.rows))
                shape = _Block(*size, block.around)
                if shape not in steps:
                    steps[shape] = _step(library, make, window, channels, shape)
                blocks.append((block, steps[shape]))
    except onednn.UnsupportedError:
        return None
    return _Plan(library, blocks)


def _step(library: OneDNN, make: Callable[..., Primitive], window: Window, channels: _Channels, shape: _Block) -> _Step:
    """What computes blocks of that shape."""
    n, groups, inner, outer = len(shape.images), *channels[1:]
    x = (n, groups * inner, len(shape.rows), *window.size[1:])
    y = (n, groups * outer, len(shape.lines), *window.positions[1:])
    w = (outer, inner, *window.kernel) if groups == 1 else (groups, outer, inner, *window.kernel)
    gaps = tuple(d - 1 for d in window.dilation)
    before, after = (tuple(pair[i] for pair in (shape.around, *window.padding[1:])) for i in (0, 1))
    code = make(library, x, w, y, window.strides, gaps, before, after)
    mine = {
        "x": library.layout(x, _strides((n, groups * inner, *window.size))),
        "w": library.layout(w, _strides(w)),
        "y": library.layout(y, _strides((n, groups * outer, *window.positions))),
    }
    return _Step(library, code, [mine[name] for name in ("xwy" if onednn.WEIGHTS in code.layouts else "xyw")])


def _strides(shape: Sizes) -> Sizes:
    """Steps, in elements, of an array in C order."""
    return tuple(prod(shape[i + 1 :]) for i in range(len(shape)))


def forward(x: Array, w: Array, out: Array, moves: Moves) -> Prepared | None:
    """``x``: (n, channels, ...), ``w``: (outputs, channels / groups, ...), ``out``: (n, outputs, positions ...).

    None where ``conv_cpu`` is to do it.
    """
    return _applied(x, w, out, moves, turned=False)


def in_image(ct: Array, w: Array, out: Array, moves: Moves) -> Prepared | None:
    """The transpose in the image: ``ct``: (n, outputs, positions ...), ``out``: (n, channels, ...)."""
    return _applied(ct, w, out, moves, turned=True)


def _applied(x: Array, w: Array, out: Array, moves: Moves, turned: bool) -> Prepared | None:
    """The convolution with a kernel, or with the kernel ``turned`` round, of which inputs and outputs change places."""
    library, groups = _library_for(x, w, out), moves.groups
    plan = None if library is None else plan_of_products(library, x.shape, w.shape, out.shape, moves, turned)
    if plan is None:
        return None
    tasks, theirs, ours = len(plan.blocks), plan.copies[0], plan.copies[_RESULT]
    kernels = [step.sizes[1] for step in plan.steps]

    def work() -> None:
        image, result = np.ascontiguousarray(x), _contiguous(out)
        kernel = np.ascontiguousarray(_turned(w, groups) if turned else w)
        read, written = address(image), address(result)
        shared = _Memory(plan.scratch, *kernels)
        spare, *rooms = shared.at
        with plan.library.one_thread():
            weights = {s: s.brought(1, address(kernel), room, spare) for s, room in zip(plan.steps, rooms)}

        def worker() -> Callable[[int], None]:
            mine = _Memory(plan.scratch, theirs, ours)

            def task(number: int) -> None:
                spare, source, target = mine.at
                block, step = plan.blocks[number]
                with plan.library.one_thread():
                    given = step.brought(0, read + _offset(image, block.images, block.rows), source, spare)
                    goal = written + _offset(result, block.images, block.lines)
                    step.compute(given, weights[step], goal, target, spare)

            return task

        threads.run([worker() for _ in range(_workers(tasks))], tasks)
        if result is not out:
            np.copyto(out, result)

    all_ = _room(plan.scratch, *kernels) + w.nbytes + _copies(x, out)
    return Prepared(all_ + _workers(tasks) * _room(plan.scratch, theirs, ours), work)


def in_kernel(x: Array, ct: Array, out: Array, moves: Moves) -> Prepared | None:
    """The transpose in the kernel: ``x``: (n, channels, ...), ``ct``: (n, outputs, positions ...)."""
    library = _library_for(x, ct, out)
    plan = None if library is None else plan_in_kernel(library, x.shape, ct.shape, out.shape, moves)
    if plan is None:
        return None
    pieces = max(1, min(_PARTS, len(plan.blocks), _PART // out.size))
    parts = _ranges(len(plan.blocks), -(-len(plan.blocks) // pieces))
    sizes = plan.scratch, *plan.copies

    def work() -> None:
        image, cotangent = np.ascontiguousarray(x), np.ascontiguousarray(ct)
        first, second = address(image), address(cotangent)
        totals = np.zeros((len(parts), out.size), np.float32)

        def worker() -> Callable[[int], None]:
            mine, found = _Memory(*sizes), np.empty(out.size, np.float32)
            written = address(found)

            def task(number: int) -> None:
                spare, *rooms = mine.at
                for block, step in plan.blocks[parts[number].start : parts[number].stop]:
                    with plan.library.one_thread():
                        source = step.brought(0, first + _offset(image, block.images, block.rows), rooms[0], spare)
                        given = step.brought(1, second + _offset(cotangent, block.images, block.lines), rooms[1], spare)
                        step.compute(source, given, written, rooms[_RESULT], spare)
                    np.add(totals[number], found, out=totals[number])

            return task

        threads.run([worker() for _ in range(_workers(len(parts)))], len(parts))
        np.copyto(out, (totals[0] if len(parts) == 1 else np.sum(totals, axis=0)).reshape(out.shape))

    mine = (len(parts) + (len(parts) > 1)) * out.nbytes + _copies(x, ct)
    return Prepared(mine + _workers(len(parts)) * (_room(*sizes) + out.nbytes), work)


def _library_for(*operands: Array) -> OneDNN | None:
    """The library, where it is installed, and has something for such operands."""
    for a in operands:
        if a.dtype != np.float32 or not a.size:
            return None
    return onednn.library()


@lru_cache(maxsize=512)
def plan_of_products(library: OneDNN, x: Sizes, w: Sizes, out: Sizes, moves: Moves, turned: bool) -> _Plan | None:
    """The plan of :func:`_applied` for these shapes."""
    window = moves.over(x[2:], w[2:])
    if turned:
        if set(moves.strides) != {1}:
            return None
        reach = [(k - 1) * d for k, d in zip(w[2:], moves.dilation)]
        around = tuple((far - low, far - high) for far, (low, high) in zip(reach, moves.padding))
        window = window._replace(padding=around)
    channels = _Channels(x[0], moves.groups, x[1] // moves.groups, out[1] // moves.groups)
    return _plan(library, OneDNN.convolution, window, channels)


@lru_cache(maxsize=512)
def plan_in_kernel(library: OneDNN, x: Sizes, ct: Sizes, out: Sizes, moves: Moves) -> _Plan | None:
    """The plan of :func:`in_kernel` for these shapes."""
    channels = _Channels(x[0], moves.groups, x[1] // moves.groups, ct[1] // moves.groups)
    return _plan(library, OneDNN.in_weights, moves.over(x[2:], out[2:]), channels)


def _turned(w: Array, groups: int) -> Array:
    """``(outputs, channels / groups, ...)`` as ``(channels, outputs / groups, ...)``, each axis of taps backwards."""
    apart = w.reshape(groups, -1, *w.shape[1:]).swapaxes(1, 2)
    return sliced(apart.reshape(-1, *apart.shape[2:]), [slice(None, None, -1)] * (w.ndim - 2))


def _contiguous(out: Array) -> Array:
    """``out``, or an array for it where its elements are not in C order."""
    return out if out.flags.c_contiguous else np.empty(out.shape, out.dtype)


def _copies(*operands: Array) -> int:
    return sum(a.nbytes for a in operands if not a.flags.c_contiguous)


def _offset(x: Array, images: range, lines: range) -> int:
    """Bytes from the first element of an array to an image's line."""
    return images.start * x.strides[0] + lines.start * x.strides[2]
