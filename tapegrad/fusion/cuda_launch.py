"""Running a region as CUDA kernels: its form is chosen, its text compiled once, its arguments collected.

The grid of a reduction, and so the order of its additions, depends on the loop's shape alone.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import tapegrad.fusion.cuda_layout as layouts
from tapegrad.aval import Shape
from tapegrad.buffer import Buffer
from tapegrad.device import cxx
from tapegrad.device.kernel import options
from tapegrad.fusion import cuda_element, cuda_emit
from tapegrad.fusion.cuda_element import TILED, Element
from tapegrad.fusion.cuda_emit import COLUMN, ROW, Form
from tapegrad.fusion.cuda_layout import BY_DIMS, VALUE, Loop
from tapegrad.fusion.region import Region, Stages

_lock = threading.Lock()
_kernels: dict[Any, Kernel] = {}
_MOST = 8192
_THREADS = 256
_MOST_BLOCKS = 16384  # of a kernel without reductions; beyond, threads take several packs

# A row up to this length is a warp's, a shorter one that of fewer lanes, each with a pack of four.  Few rows, or few
# columns, are cut into parts so that every processor has work; a part is long enough to pay for the second kernel.
_WARP_ROW = 1024
_ENOUGH_BLOCKS = 1024
_ROW_PART, _COLUMN_PART = 8192, 32
_MOST_PARTS_BY_THREAD = 64  # where a thread joins the parts of a column, one after another


@dataclass
class Kernel:
    """A compiled region: its text, its function and (of a split reduction) the one that joins the parts."""

    text: str
    function: Any
    finish: Any


@dataclass(frozen=True)
class Split:
    """How a reduction is cut: elements of a part, number of parts."""

    part: int
    parts: int


def split_of(loop: Loop) -> Split:
    """The parts of a reduction, by its shape alone."""
    n, kept = loop.reads, max(1, loop.writes)
    if loop.by_columns:
        most = -(-_ENOUGH_BLOCKS // -(-kept // 128))
        parts = min(most if kept < 128 else min(most, _MOST_PARTS_BY_THREAD), n // _COLUMN_PART)
    else:
        parts = min(-(-_ENOUGH_BLOCKS // kept), n // _ROW_PART)
    if parts <= 1:
        return Split(n, 1)
    part = -(-n // parts)
    part += -part % 4
    return Split(part, -(-n // part))


def form_of(loop: Loop) -> Form:
    """How the kernel of a reduction walks: by its shape alone, too, since lanes decide the order of additions."""
    split = split_of(loop).parts > 1
    if loop.by_columns:
        beside = loop.writes // 4 if loop.writes % 4 == 0 else loop.writes
        return Form(COLUMN, split, 32 if loop.writes >= 128 else _power_of_2(beside, 16))
    return Form(ROW, split, _power_of_2(-(-loop.reads // 4), 32) if loop.reads <= _WARP_ROW else _THREADS)


def _power_of_2(n: int, most: int) -> int:
    """The least power of 2 that is ``n`` or more, at most ``most``."""
    return min(most, 1 << max(0, n - 1).bit_length())


def plan(
    region: Region, stages: Stages, shape: Shape, axes: tuple[int, ...] | None, leaves: list[Any], full: list[Any]
) -> tuple[Loop, list[str], Form]:
    """The loop over ``shape``, how each leaf is read, and how the kernel walks; ``full``: outputs of full size."""
    tiled = any(b.node.prim.cxx_drawn == TILED for b in cuda_element.drawn_of(region))  # type: ignore[union-attr]
    early = {id(k) for b in (*stages.loop, *stages.totals) for k in b.keeps}
    in_loop = [i for i, b in enumerate(region.leaves) if id(b) in early]
    loop, found = layouts.loop_of(shape, axes, [leaves[i] for i in in_loop], full, tiled)
    loop = replace(loop, strides={in_loop[i]: strides for i, strides in loop.strides.items()})
    kinds = [layouts.kind_of_late(x) for x in leaves]
    for i, kind in zip(in_loop, found):
        kinds[i] = kind
    return loop, kinds, Form(tiled=tiled) if axes is None else form_of(loop)


@dataclass
class Run:
    """What running a region did: names of its primitives, its outputs, and per kernel the bytes read and written."""

    names: tuple[str, ...]
    outputs: list[Any]
    moved: list[tuple[int, int]]
    scratch: int


def run(
    region: Region, stages: Stages, targets: list[Buffer], shape: Shape, axes: tuple[int, ...] | None, device: Any
) -> Run:
    """Evaluate ``targets`` over ``shape``, reducing ``axes``; outputs have the targets' own shapes."""
    leaves = [b.array for b in region.leaves]
    outputs = [device.empty(b.node.aval.shape, b.node.aval.dtype) for b in targets]
    names = tuple(b.node.prim.name for b in region.order)  # type: ignore[union-attr]
    out = {id(b): x for b, x in zip(targets, outputs)}
    full, results = ([out[id(b)] for b in part] for part in stages.divide(targets))
    loop, kinds, form = plan(region, stages, shape, axes, leaves, full)
    if not (loop.size or any(x.size for x in results)):
        return Run(names, outputs, [], 0)
    kernel = _kernel(region, stages, targets, kinds, loop, form, device)
    args = _arguments(region, leaves, kinds, loop, full)
    if axes is None:
        args.append(cxx.index(loop.size, loop.wide))
        packs = max(1, loop.size // loop.vec)
        blocks = -(-packs // (_THREADS * 4 if form.tiled else _THREADS))
        device.launch(kernel.function, (min(blocks, _MOST_BLOCKS),), (_THREADS,), tuple(args))
        return Run(names, outputs, [moved_by(leaves, outputs)], 0)
    late = [_argument(leaves[i], kinds[i]) for i in Element(region, stages, targets, kinds, loop).late]
    moved, scratch = _reduce(kernel, form, loop, args, late, stages, leaves, full, results, device)
    return Run(names, outputs, moved, scratch)


def _reduce(
    kernel: Kernel, form: Form, loop: Loop, args: list[Any], late: list[Any], stages: Stages,
    leaves: list[Any], full: list[Any], results: list[Any], device: Any,
) -> tuple[list[tuple[int, int]], int]:  # fmt: skip
    split = split_of(loop)
    first = results
    if form.split:
        reductions = cuda_element.reductions_of(stages.totals)
        first = [device.empty((split.parts * loop.writes,), r.wide) for r in reductions]
    numbers = [loop.writes, loop.reads, split.part]
    numbers += [n for n, _ in loop.kept[1:]] + [s for _, s in loop.kept]
    numbers += [n for n, _ in loop.reduced[1:]] + [s for _, s in loop.reduced]
    args = [*args, *first, *(cxx.index(n, loop.wide) for n in numbers)]
    per_block = form.lanes * loop.vec if form.walk == COLUMN else _THREADS // form.lanes
    blocks = -(-loop.writes // per_block)
    device.launch(kernel.function, (blocks, split.parts), (_THREADS,), tuple(args))
    moved = [moved_by(leaves, [*full, *first])]
    if not form.split:
        return moved, 0
    numbers = [cxx.index(loop.writes, loop.wide), cxx.index(split.parts, loop.wide)]
    blocks = -(-loop.writes // (_THREADS if form.walk == COLUMN and form.lanes == 32 else 8))
    device.launch(kernel.finish, (blocks,), (_THREADS,), (*late, *first, *results, *numbers))
    return [*moved, moved_by(first, results)], sum(x.nbytes for x in first)


def _argument(x: Any, kind: str) -> Any:
    return cxx.argument(x.value) if kind == VALUE else x


def _arguments(region: Region, leaves: list[Any], kinds: list[str], loop: Loop, full: list[Any]) -> list[Any]:
    """In the order of ``cuda_element.Element.params``."""
    args = [_argument(x, kind) for x, kind in zip(leaves, kinds)]
    for b in cuda_element.drawn_of(region):
        args += cxx.key(b.node.params["key"], b.node.params["counter"])
    args += full
    by_dims = [i for i, kind in enumerate(kinds) if kind in BY_DIMS]
    if by_dims:
        args += [cxx.index(n, loop.wide) for n in loop.dims[1:]]
        args += [cxx.index(s, loop.wide) for i in by_dims for s in loop.strides[i]]
    return args


def _kernel(
    region: Region, stages: Stages, targets: list[Buffer], kinds: list[str], loop: Loop, form: Form, device: Any
) -> Kernel:
    key = (device, structure(region, targets), tuple(kinds), len(loop.dims), len(loop.kept), len(loop.reduced),
           loop.vec, loop.wide, form)  # fmt: skip
    found = _kernels.get(key)
    if found is None:
        text = cuda_emit.text_of(region, stages, targets, kinds, loop, form)
        with _lock:
            if len(_kernels) >= _MOST:
                _kernels.clear()
            function = device.compile(text, "tg_fused", options())
            finish = device.compile(text, "tg_finish", options()) if form.split else None
            found = _kernels[key] = Kernel(text, function, finish)
    return found


def structure(region: Region, targets: list[Buffer]) -> tuple:
    """What of a region decides its text, apart from how its arrays lie."""
    number = {id(b): i for i, b in enumerate(region.leaves)}
    code = []
    for b in region.order:
        node = b.node
        code.append((node.prim, node.aval.dtype, node.params.get("dtype"), tuple(number[id(k)] for k in b.keeps)))
        number[id(b)] = len(number)
    leaves = tuple(b.node.aval.dtype for b in region.leaves)
    return tuple(code), leaves, tuple(number[id(b)] for b in targets)


def moved_by(read: Sequence[Any], written: Sequence[Any]) -> tuple[int, int]:
    """Bytes of distinct arrays read and written, what broadcasting repeats counted once."""
    distinct = {id(x): cxx.extent(x) for x in read}
    return sum(distinct.values()), sum(x.nbytes for x in written)
