"""Running a region as CUDA kernels: its form is chosen, its text compiled once, its arguments collected.

The grid of a reduction, and so the order of its additions, depends on the loop's shape alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import tapegrad.engine.cuda.layout as layouts
from tapegrad.core import locks
from tapegrad.core.aval import Shape
from tapegrad.core.buffer import Buffer
from tapegrad.device import cxx, phantom
from tapegrad.device.kernel import options
from tapegrad.engine.cuda import element, emit
from tapegrad.engine.cuda.element import TILED
from tapegrad.engine.cuda.emit import COLUMN, ROW, Form
from tapegrad.engine.cuda.layout import BY_DIMS, VALUE, Loop
from tapegrad.engine.region import Region, Stages
from tapegrad.engine.region import stages as stages_of

_lock = locks.lock()
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
    drawn = element.drawn_of(region)
    tiled = any(b.node.prim.cxx_drawn == TILED for b in drawn)
    early = {id(k) for b in (*stages.loop, *stages.totals) for k in b.keeps}
    in_loop = [i for i, b in enumerate(region.leaves) if id(b) in early]
    loop, found = layouts.loop_of(shape, axes, [leaves[i] for i in in_loop], full, tiled)
    loop = replace(loop, strides={in_loop[i]: strides for i, strides in loop.strides.items()})
    kinds = [layouts.kind_of_late(x) for x in leaves]
    for i, kind in zip(in_loop, found):
        kinds[i] = kind
    if axes is not None:
        return loop, kinds, form_of(loop)
    return loop, kinds, Form(tiled=tiled, sharing=element.sharing_of(drawn, loop.vec))


@dataclass
class Run:
    """What running a region did: names of its primitives, its outputs, and per kernel the bytes read and written."""

    names: tuple[str, ...]
    outputs: list[Any]
    moved: list[tuple[int, int]]
    scratch: int


@dataclass
class Ready:
    """A region's kernel with all that does not change from one run to the next; made once for each shape and layout.

    ``by_value``: which leaves are numbers; ``full``, ``results``: which targets are of full size, and which come of
    reductions; ``places``: lengths and strides of leaves; ``sizes``: the arguments after the outputs; ``parts``: of a
    split reduction, sizes and dtypes of the arrays in between; ``late``: leaves that joining them reads.
    """

    names: tuple[str, ...]
    kernel: Kernel | None
    by_value: list[bool]
    full: list[int]
    results: list[int]
    places: tuple[Any, ...]
    sizes: tuple[Any, ...]
    grid: tuple[int, ...]
    parts: list[tuple[int, Any]]
    late: list[int]
    last_sizes: tuple[Any, ...]
    last_grid: tuple[int, ...]


_ready: dict[Any, Ready] = {}


def run(region: Region, targets: list[Buffer], shape: Shape, axes: tuple[int, ...] | None, device: Any) -> Run:
    """Evaluate ``targets`` over ``shape``, reducing ``axes``; outputs have the targets' own shapes."""
    leaves = [b.array for b in region.leaves]
    key = (device, structure(region, targets), shape, axes, tuple(map(_lies, leaves)))
    ready = _ready.get(key)
    if ready is None:
        ready = _prepare(region, targets, shape, axes, leaves, device)
        if not phantom.mode.dry:  # its kernel was not compiled
            with _lock:
                if len(_ready) >= _MOST:
                    _ready.clear()
                _ready[key] = ready
    outputs = [device.empty(b.node.aval.shape, b.node.aval.dtype) for b in targets]
    if ready.kernel is None:
        return Run(ready.names, outputs, [], 0)
    full, results = [outputs[i] for i in ready.full], [outputs[i] for i in ready.results]
    parts = [device.empty((size,), dtype) for size, dtype in ready.parts]
    moved = [moved_by(leaves, [*full, *(parts or results)])]
    if parts:
        moved.append(moved_by(parts, results))
    if not phantom.mode.dry:
        _launch(region, ready, leaves, full, results, parts, device)
    return Run(ready.names, outputs, moved, sum(x.nbytes for x in parts))


def _launch(
    region: Region, ready: Ready, leaves: list[Any], full: list[Any], results: list[Any], parts: list[Any], device: Any
) -> None:
    kernel: Any = ready.kernel
    args = [cxx.argument(x.value) if by_value else x for x, by_value in zip(leaves, ready.by_value)]
    late = [args[i] for i in ready.late]
    for b in element.drawn_of(region):
        args += cxx.key(b.node.params["key"], b.node.params["counter"])
    first = parts or results
    device.launch(kernel.function, ready.grid, (_THREADS,), (*args, *full, *ready.places, *first, *ready.sizes))
    if parts:
        last = (*late, *parts, *results, *ready.last_sizes)
        device.launch(kernel.finish, ready.last_grid, (_THREADS,), last)


def _lies(x: Any) -> Any:
    """What of a leaf decides how it is read."""
    return None if cxx.is_argument(x) else (x.shape, x.strides, cxx.address(x) % 16)


class _Fresh:
    """An output yet to be made: a device's allocations are aligned to 256 bytes and more."""

    class data:
        ptr = 0

    def __init__(self, itemsize: int) -> None:
        self.itemsize = itemsize


def planned(targets: list[Buffer]) -> list[Any]:
    """Stand-ins for the outputs of ``targets``, for :func:`plan`."""
    return [_Fresh(b.node.aval.dtype.itemsize) for b in targets]


def _prepare(
    region: Region, targets: list[Buffer], shape: Shape, axes: tuple[int, ...] | None, leaves: list[Any], device: Any
) -> Ready:
    names = tuple(b.node.prim.name for b in region.order)
    number = {id(b): i for i, b in enumerate(targets)}
    stages, full, results, loop, kinds, form = _plan_of(region, targets, shape, axes, leaves)
    by_dims = [i for i, kind in enumerate(kinds) if kind in BY_DIMS]
    places = [*loop.dims[1:], *(s for i in by_dims for s in loop.strides[i])] if by_dims else []
    ready = Ready(
        names, None, [kind == VALUE for kind in kinds], [number[id(b)] for b in full],
        [number[id(b)] for b in results], tuple(cxx.index(n, loop.wide) for n in places), (), (), [],
        element.late_of(region, stages), (), (),
    )  # fmt: skip
    if _is_empty(loop, results):
        return ready
    ready.kernel = _kernel(region, stages, targets, kinds, loop, form, device)
    if axes is None:
        ready.sizes = (cxx.index(loop.size, loop.wide),)
        packs = max(1, loop.size // loop.vec)
        ready.grid = (min(-(-packs // (_THREADS * (4 if form.tiled else form.sharing))), _MOST_BLOCKS),)
    else:
        _prepare_reduction(ready, stages, loop, form)
    return ready


def _plan_of(
    region: Region, targets: list[Buffer], shape: Shape, axes: tuple[int, ...] | None, leaves: list[Any]
) -> tuple[Stages, list[Buffer], list[Buffer], Loop, list[str], Form]:
    """All that decides the kernel: stages, targets of full size, those of reductions; and of :func:`plan`."""
    stages = stages_of(region, targets)
    full, results = stages.divide(targets)
    return stages, full, results, *plan(region, stages, shape, axes, leaves, planned(full))


def _is_empty(loop: Loop, results: list[Buffer]) -> bool:
    return not (loop.size or any(b.node.aval.size for b in results))


def text_of(region: Region, targets: list[Buffer], shape: Shape, axes: tuple[int, ...] | None) -> str:
    """The text of the kernel that :func:`run` launches; empty where nothing is to be computed."""
    stages, _, results, loop, kinds, form = _plan_of(region, targets, shape, axes, [b.array for b in region.leaves])
    return "" if _is_empty(loop, results) else emit.text_of(region, stages, targets, kinds, loop, form)


def _prepare_reduction(ready: Ready, stages: Stages, loop: Loop, form: Form) -> None:
    split = split_of(loop)
    if form.split:
        ready.parts = [(split.parts * loop.writes, r.wide) for r in element.reductions_of(stages.totals)]
    numbers = [loop.writes, loop.reads, split.part]
    numbers += [n for n, _ in loop.kept[1:]] + [s for _, s in loop.kept]
    numbers += [n for n, _ in loop.reduced[1:]] + [s for _, s in loop.reduced]
    ready.sizes = tuple(cxx.index(n, loop.wide) for n in numbers)
    per_block = form.lanes * loop.vec if form.walk == COLUMN else _THREADS // form.lanes
    ready.grid = (-(-loop.writes // per_block), split.parts)
    ready.last_sizes = (cxx.index(loop.writes, loop.wide), cxx.index(split.parts, loop.wide))
    ready.last_grid = (-(-loop.writes // (_THREADS if form.walk == COLUMN and form.lanes == 32 else 8)),)


def _kernel(
    region: Region, stages: Stages, targets: list[Buffer], kinds: list[str], loop: Loop, form: Form, device: Any
) -> Kernel:
    if phantom.mode.dry:
        return Kernel("", None, None)
    key = (device, structure(region, targets), tuple(kinds), len(loop.dims), len(loop.kept), len(loop.reduced),
           loop.vec, loop.wide, form)  # fmt: skip
    found = _kernels.get(key)
    if found is None:
        text = emit.text_of(region, stages, targets, kinds, loop, form)
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
    return sum(distinct.values()), sum([x.nbytes for x in written])
