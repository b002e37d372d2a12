"""Running a region as CUDA kernels: its form is chosen, its text compiled once, its arguments collected.

The grid of a reduction, and so the order of its additions, depends on the loop's shape alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any

import tapegrad.engine.cuda.layout as layouts
from tapegrad.core import locks
from tapegrad.core.aval import Shape
from tapegrad.core.buffer import Buffer
from tapegrad.core.primitive import Drawn
from tapegrad.device import CPU, Device, cuda_types
from tapegrad.device.abstract_array import AbstractArray, unread
from tapegrad.device.dtypes import uint64
from tapegrad.device.kernel import options
from tapegrad.device.types import Array
from tapegrad.engine.cuda import element, emit
from tapegrad.engine.cuda.element import TILED
from tapegrad.engine.cuda.emit import COLUMN, ROW, Form
from tapegrad.engine.cuda.layout import BY_DIMS, VALUE, Loop
from tapegrad.engine.region import Region, Stages
from tapegrad.engine.region import stages as stages_of
from tapegrad.engine.task import Call, Lies, Task, nbytes_of

_lock = locks.lock()
_kernels: dict[Any, Kernel] = {}
MOST = 8192
_THREADS = 256
_MOST_BLOCKS = 16384  # of a kernel without reductions; beyond, threads take several packs

# A row up to this length is a warp's, a shorter one that of fewer lanes, each with a pack of four.  Few rows, or few
# columns, are cut into parts so that every processor has work; a part is long enough to pay for joining it.
_WARP_ROW = 1024
_ENOUGH_BLOCKS = 1024
_ROW_PART, _COLUMN_PART = 8192, 32
_MOST_PARTS_BY_THREAD = 64  # where a thread joins the parts of a column, one after another


@dataclass
class Kernel:
    """A compiled region: its text and its function."""

    text: str
    function: Any


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
    tiled = any(element.template_of(b) == TILED for b in drawn)
    early = {id(k) for b in (*stages.loop, *stages.totals) for k in b.inputs}
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
class Ready:
    """A region's kernel with all that does not change from one run to the next; made once for each shape and layout.

    ``kernel``: None before the first run; ``form_key``: the loop, how leaves are read, how the kernel walks; ``empty``:
    whether nothing is to be computed; ``by_value``: which leaves are numbers; ``full``, ``results``: which targets are
    of full size, and which come of reductions; ``places``: lengths and strides of leaves; ``sizes``: the arguments
    after the outputs; ``parts``: of a split reduction, shapes and dtypes of the arrays in between, and of the counts of
    blocks that have come, together ``scratch_bytes``; ``drawn``: which nodes draw.
    """

    names: tuple[str, ...]
    kernel: Kernel | None
    form_key: tuple[Loop, list[str], Form]
    empty: bool
    by_value: list[int]
    full: list[int]
    results: list[int]
    places: tuple[Any, ...]
    sizes: tuple[Any, ...]
    grid: tuple[int, ...]
    parts: list[Lies]
    drawn: list[int]
    scratch_bytes: int = 0


prepared: dict[Any, Ready] = {}


class Launch(Task):
    """One evaluation of ``targets`` over ``shape``, reducing ``axes``, as one CUDA kernel.

    ``held``: whether the keys of random numbers are read from memory (see ``keys``).
    """

    def __init__(
        self, region: Region, targets: list[Buffer], shape: Shape, axes: tuple[int, ...] | None, device: Device,
        held: bool = False,
    ) -> None:  # fmt: skip
        self._region, self._targets, self._shape, self._axes = region, targets, shape, axes
        self.device = device
        self.reads: list[Any] = region.arrays
        array_type = device.xp.ndarray
        lies: list[Any] = []
        x: Any
        for x in self.reads:  # what of a leaf decides how it is read
            if type(x) is array_type and array_type is not CPU.xp.ndarray:
                lies.append((x.shape, x.strides, x.data.ptr % 16))
            else:
                lies.append(None if cuda_types.is_argument(x) else (x.shape, x.strides, cuda_types.address(x) % 16))
        key = (device, structure(region, targets), shape, axes, tuple(lies), held)
        ready = prepared.get(key)
        if ready is None:
            ready = _prepare(region, targets, shape, axes, self.reads, held)
            with _lock:
                if len(prepared) >= MOST:
                    prepared.clear()
                prepared[key] = ready
        self._ready = ready
        self.names, self.temporaries = ready.names, ready.parts
        self.writes = list(map(_lies, targets))
        self.keys = [region.order[i].node.params for i in ready.drawn] if ready.drawn else ()
        self.scratch_bytes = ready.scratch_bytes

    def moves(self, outputs: list[Array], temporaries: list[Array]) -> list[tuple[Sequence[Array], Sequence[Array]]]:
        """Of each kernel: the arrays that it reads, and those that it writes."""
        ready = self._ready
        if ready.empty:
            return []
        full, results = map(outputs.__getitem__, ready.full), list(map(outputs.__getitem__, ready.results))
        return [
            (self.reads, [*full, *temporaries, *results])
        ]  # parts are read again in the same kernel, from the cache

    def run(self, outputs: list[Array], temporaries: list[Array]) -> list[Array]:
        """Evaluate into ``outputs``."""
        for x in self.reads:
            if type(x) is AbstractArray:
                raise unread("an array")
        if self._ready.kernel is None:
            self._compile()
        for launch, args in self._launches(self.reads, outputs, temporaries):
            launch(*args)
        return outputs

    def kept(self) -> Task:
        """A task with its kernel, which takes keys from memory; what the region's buffers read may be forgotten."""
        task = self
        if self.keys:
            task = Launch(self._region, self._targets, self._shape, self._axes, self.device, held=True)
        task._compile()
        task._region = task._targets = None  # type: ignore[assignment]
        return task

    def calls(self, reads: Sequence[Array], outputs: list[Array], temporaries: list[Array]) -> list[Call]:
        """The launches themselves; after the arrays that it reads come those that hold the keys."""
        return self._launches(reads, outputs, temporaries)

    def _compile(self) -> None:
        ready = self._ready
        if ready.kernel is None and not ready.empty:
            ready.kernel = _compiled(self._region, self._targets, *ready.form_key, self.device)

    def _launches(self, reads: Sequence[Array], outputs: list[Array], temporaries: list[Array]) -> list[Call]:
        """The kernel."""
        ready, device, count = self._ready, self.device, len(self.reads)
        if ready.kernel is None:
            return []
        args: list[Any] = list(reads[:count])
        for i in ready.by_value:
            args[i] = cuda_types.argument(args[i].value)
        for n, params in enumerate(self.keys):
            if ready.form_key[2].held:
                args += [reads[count + n], cuda_types.offset(params["counter"])]
            else:
                args += cuda_types.key(params["key"], params["counter"])
        full, results = map(outputs.__getitem__, ready.full), list(map(outputs.__getitem__, ready.results))
        sizes = (*ready.places, *temporaries, *results, *ready.sizes)
        return [(device.launch, (ready.kernel.function, ready.grid, (_THREADS,), (*args, *full, *sizes)))]

    def text(self) -> str:
        """The kernel's text; empty where nothing is to be computed."""
        if self._ready.empty:
            return ""
        loop, kinds, form = self._ready.form_key
        stages = stages_of(self._region, self._targets)
        return emit.text_of(self._region, stages, self._targets, kinds, loop, form)


class _Fresh:
    """Stands for an output that is not allocated yet: allocations are aligned to 256 bytes or more."""

    class data:
        ptr = 0

    def __init__(self, itemsize: int) -> None:
        self.itemsize = itemsize


def planned(targets: list[Buffer]) -> list[Any]:
    """Stand-ins for the outputs of ``targets``, for :func:`plan`."""
    return [_Fresh(b.node.aval.dtype.itemsize) for b in targets]


def _prepare(
    region: Region, targets: list[Buffer], shape: Shape, axes: tuple[int, ...] | None, leaves: list[Array],
    held: bool = False,
) -> Ready:  # fmt: skip
    names = tuple(b.node.prim.name for b in region.order)
    number = {id(b): i for i, b in enumerate(targets)}
    stages = stages_of(region, targets)
    full, results = stages.divide(targets)
    loop, kinds, form = plan(region, stages, shape, axes, leaves, planned(full))
    form = replace(form, held=held)
    by_dims = [i for i, kind in enumerate(kinds) if kind in BY_DIMS]
    places = [*loop.dims[1:], *(s for i in by_dims for s in loop.strides[i])] if by_dims else []
    empty = not (loop.size or any(b.node.aval.size for b in results))
    ready = Ready(
        names, None, (loop, kinds, form), empty, [i for i, kind in enumerate(kinds) if kind == VALUE],
        [number[id(b)] for b in full], [number[id(b)] for b in results],
        tuple(cuda_types.index(n, loop.wide) for n in places), (), (), [],
        [i for i, b in enumerate(region.order) if isinstance(b.node.prim, Drawn)],
    )  # fmt: skip
    if empty:
        return ready
    if axes is None:
        ready.sizes = (cuda_types.index(loop.size, loop.wide),)
        packs = max(1, loop.size // loop.vec)
        ready.grid = (min(-(-packs // (_THREADS * (4 if form.tiled else form.sharing))), _MOST_BLOCKS),)
    else:
        _prepare_reduction(ready, stages, loop, form)
    return ready


def _prepare_reduction(ready: Ready, stages: Stages, loop: Loop, form: Form) -> None:
    split = split_of(loop)
    numbers = [loop.writes, loop.reads, split.part]
    numbers += [n for n, _ in loop.kept[1:]] + [s for _, s in loop.kept]
    numbers += [n for n, _ in loop.reduced[1:]] + [s for _, s in loop.reduced]
    ready.sizes = tuple(cuda_types.index(n, loop.wide) for n in numbers)
    per_block = form.lanes * loop.vec if form.walk == COLUMN else _THREADS // form.lanes
    groups = -(-loop.writes // per_block)
    ready.grid = (groups, split.parts)
    if form.split:
        ready.parts = [((split.parts * loop.writes,), r.wide) for r in element.reductions_of(stages.totals)]
        ready.parts.append(((groups,), uint64))
        ready.scratch_bytes = nbytes_of(ready.parts)


def _compiled(
    region: Region, targets: list[Buffer], loop: Loop, kinds: list[str], form: Form, device: Device
) -> Kernel:
    key = (device, structure(region, targets), tuple(kinds), len(loop.dims), len(loop.kept), len(loop.reduced),
           loop.vec, loop.wide, form)  # fmt: skip
    kernel = _kernels.get(key)
    if kernel is None:
        text = emit.text_of(region, stages_of(region, targets), targets, kinds, loop, form)
        with _lock:
            if len(_kernels) >= MOST:
                _kernels.clear()
            function = device.compile(text, "tg_fused", options())
            kernel = _kernels[key] = Kernel(text, function)
    return kernel


_dtype = attrgetter("node.aval.dtype")
_lies = attrgetter("node.aval.shape", "node.aval.dtype")


def structure(region: Region, targets: list[Buffer]) -> tuple[Any, ...]:
    """What of a region decides its text, apart from how its arrays lie."""
    number = dict(zip(map(id, region.leaves), range(len(region.leaves))))
    code = []
    for b in region.order:
        node = b.node
        code.append(
            (node.prim, node.aval.dtype, node.params.get("dtype"), tuple(map(number.__getitem__, map(id, b.inputs))))
        )
        number[id(b)] = len(number)
    leaves = tuple(map(_dtype, region.leaves))
    return tuple(code), leaves, tuple(map(number.__getitem__, map(id, targets)))
