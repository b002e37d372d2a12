"""Running a program tile by tile, on several threads, with scratch that is reused.

No intermediate is ever full size.  The tiles of a region without reductions may have any size (``set_tile_size``): each
element's arithmetic is the same in any tile.  The tiles of a reduction are fixed by the loop's shape alone, and partial
results are combined in tile order, so a sum's bits depend neither on threads nor on how its operand came to be.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import zip_longest
from math import prod
from typing import Any, NamedTuple

from tapegrad.core.aval import Shape
from tapegrad.device import CPU, Device, cuda_types, threads
from tapegrad.device.types import Array, DType, Namespace
from tapegrad.engine.cpu.emit import FULL, SCALAR, STRIDED, Program
from tapegrad.engine.cpu.native.steps import Run, Steps, is_interpreted, nest_of
from tapegrad.engine.task import Call, Task, into, nbytes_of

TILE = 131072
"""Elements.  Measured on 2 cores (1 MiB of L2 cache each), gelu and a chain of tanh, forward and backward, float32:
128 Ki take 0.75 to 0.85 of the time of 64 Ki and half of that of 32 Ki, since threads hand over the interpreter's lock
less often; 256 Ki gain little and leave arrays of 1 Mi four tiles."""
REDUCTION_TILE = TILE
_SCRATCH = 2**20
"""Bytes of scratch of a worker, at most, where the steps of a region have many values: what a core's L2 cache holds."""
_tile = [TILE]


def set_tile_size(elements: int) -> None:
    """Elements per tile of regions without reductions; changes no result."""
    _tile[0] = max(1, int(elements))


Tasks = Callable[[int], Iterable[Call]]
"""The calls of a task, by its number; each must run before the next one is taken."""


@dataclass(frozen=True)
class Grid:
    """The tiles of a loop: one index per axis before ``axis``, a chunk of ``axis``, everything after.

    ``kept`` axes before ``axis`` are enumerated by tasks; ``reduced`` ones are walked in order inside a task.
    """

    shape: Shape
    axis: int
    chunk: int
    chunks: int
    kept: tuple[int, ...]
    reduced: tuple[int, ...]

    @property
    def tasks(self) -> int:
        """How many independent tasks there are."""
        return prod(self.shape[a] for a in self.kept) * self.chunks

    def begin(self, number: int) -> tuple[list[int], int]:
        """Return where task ``number`` begins along the axes up to ``axis``, and how many rows of that it has."""
        number, chunk = divmod(number, self.chunks)
        first = [0] * self.axis + [chunk * self.chunk]
        for a, i in zip(self.kept, _indices(number, [self.shape[a] for a in self.kept]), strict=True):
            first[a] = i
        return first, min(self.chunk, self.shape[self.axis] - first[-1])


def grid(shape: Shape, tile: int, axes: tuple[int, ...]) -> Grid:
    """Cut ``shape`` into tiles of at most ``tile`` elements, reducing over ``axes``."""
    inner = 1
    axis = len(shape)
    while axis > 0 and inner * shape[axis - 1] <= tile:
        axis -= 1
        inner *= shape[axis]
    if axis == 0:
        return Grid(shape, 0, shape[0], 1, (), ())
    axis -= 1
    chunks = -(-shape[axis] // max(1, tile // inner))
    chunk = -(-shape[axis] // chunks)
    before = range(axis)
    return Grid(
        shape, axis, chunk, -(-shape[axis] // chunk),
        tuple(a for a in before if a not in axes), tuple(a for a in before if a in axes),
    )  # fmt: skip


def _indices(number: int, sizes: list[int]) -> list[int]:
    found = []
    for n in reversed(sizes):
        number, i = divmod(number, n)
        found.append(i)
    return found[::-1]


def layout(x: Any, shape: Shape) -> str:
    """How leaf ``x`` lies in memory under a loop of ``shape``."""
    if not any(x.strides) or x.size == 1:
        return SCALAR
    return FULL if x.shape == shape and x.flags.c_contiguous else STRIDED


def _scalar(x: Any) -> Any:
    """The element of an array whose elements all lie at one address, as a 0-d array."""
    return x[(slice(0, 1),) * x.ndim].reshape(()) if x.ndim else x


def _with_axes(x: Any, shape: Shape, kind: str) -> Any:
    """A leaf with as many axes as the loop over ``shape``."""
    return x.reshape(shape) if kind == FULL else x.reshape((1,) * (len(shape) - x.ndim) + x.shape)


class Tiling(Task):
    """One evaluation of ``program`` over ``shape``: what it writes and takes for itself, and how it runs.

    ``writes``, ``temporaries``: shapes and dtypes.  Reductions write their outputs in keepdims form, by way of partial
    results; each worker has rows of scratch for one tile.
    """

    def __init__(
        self,
        program: Program,
        shape: Shape,
        leaves: list[Array],
        layouts: list[str],
        writes: list[tuple[Shape, DType]],
        axes: tuple[int, ...],
        device: Device,
        frame: _Frame | None = None,
    ) -> None:
        """``frame``: tiles and workers; None: those of the current tile size and number of threads."""
        self._program, self.shape, self._layouts, self._axes = program, shape, layouts, axes
        self.device, self.names, self.reads, self.writes = device, program.names, leaves, writes
        if frame is None:
            frame = _frame(program, shape, STRIDED in layouts, tuple(writes), axes, _tile[0], threads.get_num_threads())
        self._frame = frame
        self._cut, self._workers, self._partials, self.temporaries, self.scratch_bytes = frame
        looped = frame.cut.shape
        self._leaves = [
            x if x.shape == looped else _scalar(x) if kind == SCALAR else _with_axes(x, looped, kind)
            for x, kind in zip(leaves, layouts, strict=True)
        ]

    def run(self, outputs: list[Array], temporaries: list[Array]) -> list[Array]:
        """Evaluate into ``outputs``."""
        workers, partials = self._workers_on(outputs, temporaries, self._machine_code(outputs, temporaries))
        threads.run([_doing(w) for w in workers], self._cut.tasks)
        _finish(self._program, self._cut, partials, outputs, self.device.xp)
        return outputs

    def calls(self, reads: Sequence[Array], outputs: list[Array], temporaries: list[Array]) -> list[Call]:
        """Of a single tile each step by itself; else all tiles, on threads."""
        program, cut = self._program, self._cut
        other = self._on(reads)
        if cut.tasks > 1:
            return [(other._run_on, (list(reads), outputs, temporaries))]
        workers, partials = other._workers_on(outputs, temporaries, None)
        calls = list(workers[0](0))  # no axis is walked in order
        if any(part is not outputs[r.output] for r, part in zip(program.reductions, partials, strict=True)):
            calls.append((_finish, (program, cut, partials, outputs, self.device.xp)))
        return calls

    def _on(self, reads: Sequence[Array]) -> Tiling:
        """Return the same task on other arrays of the same layouts, with the same tiles and workers."""
        return Tiling(
            self._program, self.shape, list(reads), self._layouts, list(self.writes), self._axes, self.device,
            self._frame,
        )  # fmt: skip

    def _run_on(self, reads: list[Array], outputs: list[Array], temporaries: list[Array]) -> None:
        self._on(reads).run(outputs, temporaries)

    def _workers_on(
        self, outputs: list[Array], temporaries: list[Array], runs: Sequence[Run] | None
    ) -> tuple[list[Tasks], list[Array]]:
        """Tasks with scratch of each worker's own, and the parts of reductions; ``runs``: what does their steps."""
        program, cut, xp = self._program, self._cut, self.device.xp
        whole = outputs
        if cut.shape != self.shape and not program.reductions:
            whole = [x.reshape(cut.shape) for x in outputs]
        parts = iter(temporaries)
        partials = [
            outputs[r.output] if part is None else next(parts)
            for r, part in zip(program.reductions, self._partials, strict=True)
        ]
        every = self._scratch_in(temporaries)
        workers = [
            _worker(program, cut, self._leaves, whole, partials, rows, self._axes, xp, run)
            for rows, run in zip_longest(every, runs or ())
        ]
        return workers, partials

    def _scratch_in(self, temporaries: list[Array]) -> list[list[Array]]:
        """The rows of scratch of each worker, which lie behind the parts of reductions."""
        count = len(self._program.scratch)
        first = len(temporaries) - self._workers * count
        return [temporaries[first + i * count : first + (i + 1) * count] for i in range(self._workers)]

    def _machine_code(self, outputs: list[Array], temporaries: list[Array]) -> list[Run] | None:
        """For each worker the machine code that does the steps of a tile; None: there is none."""
        program, arrays = self._program, [*self._leaves, *outputs]
        if is_interpreted():
            return None
        if not all(type(x) is CPU.xp.ndarray and x.flags.aligned for x in arrays):
            return None
        code = _code(program, self._cut, tuple([(x.shape, x.strides, x.dtype) for x in arrays]))
        at, count = cuda_types.addresses(arrays), len(self._leaves)
        if not code.ready or not set(at[:count]).isdisjoint(at[count:]):  # a tile could not be done again
            return None
        constants = cuda_types.addresses(program.constants)
        return [code.bound_to([*at, *cuda_types.addresses(rows), *constants]) for rows in self._scratch_in(temporaries)]

    def text(self) -> str:
        """What it does, for readers: its tiles, and the steps of one (x: read, y: written, s: scratch)."""
        return _text_of(self._program, self._cut, len(self._layouts))


class TileCode:
    """Machine code for the steps of a tile, for leaves and outputs of one memory layout."""

    def __init__(self, program: Program, cut: Grid, layouts: tuple[tuple[Shape, Shape, DType], ...]) -> None:
        leaves, dtypes = layouts[: len(layouts) - program.outputs], tuple(dtype for _, _, dtype in layouts)
        tile = (cut.chunk, *cut.shape[cut.axis + 1 :])
        reduced = {r.output for r in program.reductions}
        nowhere = (0,) * len(cut.shape)
        along = [_strides(shape, strides, cut.shape) for shape, strides, _ in leaves]
        for i, dtype in enumerate(dtypes[len(leaves) :]):
            along.append(nowhere if i in reduced else _contiguous(cut.shape, dtype.itemsize))
        inside = [strides[cut.axis :] for strides in along]
        for i, dtype in enumerate(program.scratch):
            inside.append(_contiguous(tile, dtype.itemsize) if i in program.lasting else nowhere[cut.axis :])
        inside += [nowhere[cut.axis :]] * len(program.constants)
        self._nest = nest_of(tile, tuple(inside))
        self._steps = None if self._nest is None else _steps(program, self._nest.strides[-1][: len(layouts)], dtypes)
        self._axes = list(zip(*along, strict=True))[: cut.axis + 1]

    @property
    def ready(self) -> bool:
        """Whether machine code is available; see :attr:`Steps.ready`."""
        return self._steps is not None and self._steps.ready

    def bound_to(self, addresses: Sequence[int]) -> Run:
        """Return the function that runs one tile, for leaves, outputs, scratch and constants at ``addresses``."""
        return self._bind(addresses)

    @cached_property
    def _bind(self) -> Callable[[Sequence[int]], Run]:
        assert self._steps is not None and self._nest is not None
        return self._steps.binder(self._nest, self._axes)


_code = lru_cache(4096)(TileCode)


def _strides(shape: Shape, strides: Shape, looped: Shape) -> Shape:
    """Return the strides of a leaf along the axes of a loop over ``looped``, 0 where it is broadcast."""
    return tuple(0 if n == 1 else s for n, s in zip(shape, strides, strict=True)) if shape else (0,) * len(looped)


@lru_cache(4096)
def _steps(program: Program, strides: tuple[int, ...], dtypes: tuple[DType, ...]) -> Steps:
    """Return the steps of a program for machine code, on leaves and outputs of ``strides`` and ``dtypes``."""
    scratch = len(dtypes)
    every = (*dtypes, *program.scratch, *(x.dtype for x in program.constants))
    along = (*strides, *(dtype.itemsize for dtype in program.scratch), *[0] * len(program.constants))
    needed = {*range(scratch - program.outputs, scratch), *(scratch + i for i in program.lasting)}
    return Steps(program.steps, program.labels, every, along, scratch, needed)


def _contiguous(shape: Shape, itemsize: int) -> Shape:
    """The strides of a C-contiguous array."""
    return tuple(itemsize * prod(shape[a + 1 :]) for a in range(len(shape)))


class _Frame(NamedTuple):
    """The tiles of a loop, the workers, the parts of reductions (None: the output), temporaries and scratch bytes."""

    cut: Grid
    workers: int
    partials: list[tuple[Shape, DType] | None]
    temporaries: list[tuple[Shape, DType]]
    scratch_bytes: int


@lru_cache(4096)
def _frame(
    program: Program, shape: Shape, strided: bool, writes: tuple[tuple[Shape, DType], ...], axes: tuple[int, ...],
    tile: int, count: int,
) -> _Frame:  # fmt: skip
    """Return the frame of a loop over ``shape``, in tiles of ``tile`` elements, on at most ``count`` threads."""
    count = count if is_long(prod(shape) * (len(program.steps) + len(program.reductions))) else 1
    cut = tiles(program, shape, strided, axes, tile)
    workers = min(count, cut.tasks)
    partials = [_partial(cut, r.dtype, *writes[r.output], axes) for r in program.reductions]
    inner, rows = cut.shape[cut.axis + 1 :], _rows_at_once(program, cut)
    sizes = [cut.chunk if i in program.lasting else rows for i in range(len(program.scratch))]
    scratch = [((n, *inner), dtype) for n, dtype in zip(sizes, program.scratch, strict=True)]
    temporaries = [part for part in partials if part is not None] + workers * scratch
    return _Frame(cut, workers, partials, temporaries, workers * nbytes_of(scratch))


def _most_elements(program: Program) -> int:
    """Elements of a tile whose scratch takes no more than it may."""
    return _SCRATCH // max(1, sum(d.itemsize for i, d in enumerate(program.scratch) if i not in program.lasting))


def _rows_at_once(program: Program, cut: Grid) -> int:
    """The rows of a tile whose steps are done before those of the next ones."""
    return max(1, min(cut.chunk, _most_elements(program) // max(1, prod(cut.shape[cut.axis + 1 :]))))


def tiles(program: Program, shape: Shape, strided: bool, axes: tuple[int, ...], tile: int) -> Grid:
    """Return the tiles of a program's loop, in one dimension unless some leaf is ``strided``."""
    if program.reductions:
        return grid(shape, REDUCTION_TILE, axes)
    return grid(shape if strided else (prod(shape),), min(tile, _most_elements(program)), axes)


def _text_of(program: Program, cut: Grid, leaves: int) -> str:
    inner, turns = cut.chunk * prod(cut.shape[cut.axis + 1 :]), prod(cut.shape[a] for a in cut.reduced)
    lines = [
        f"{cut.tasks * turns} tiles of at most {inner} elements, {len(program.scratch)} rows of scratch; "
        f"ufuncs in order: {', '.join(program.names)}"
    ]
    counts = {"x": leaves, "y": program.outputs, "s": len(program.scratch)}
    names = [f"{letter}{i}" for letter, count in counts.items() for i in range(count)]
    name = [*names, *(f"{x:.9g}" for x in program.constants)].__getitem__
    for label, (_, operands, result) in zip(program.labels, program.steps, strict=True):
        lines.append(f"  {name(result)} = {label}({', '.join(map(name, operands))})")
    lines += [f"  y{r.output} = {r.ufunc}.reduce({name(r.source)}), in {r.dtype}" for r in program.reductions]
    return "\n".join(lines)


def _finish(program: Program, cut: Grid, partials: list[Array], outputs: list[Array], xp: Namespace) -> None:
    """Combine the parts of reductions."""
    for r, partial in zip(program.reductions, partials, strict=True):
        out = outputs[r.output]
        if partial is not out:
            ufunc = getattr(xp, r.ufunc)
            if partial.shape == out.shape:
                xp.copyto(out, partial, casting="unsafe")
            else:
                ufunc.reduce(partial, axis=cut.axis, out=out, keepdims=True, dtype=r.dtype)


def is_long(operations: int) -> bool:
    """Whether so many operations on elements are worth waking threads: 0.1 ms for some 0.15 ms of work."""
    return operations >= 2**20


def _partial(
    cut: Grid, dtype: DType, shape: Shape, out_dtype: DType, axes: tuple[int, ...]
) -> tuple[Shape, DType] | None:
    """Where tiles leave their parts of a reduction: an array with a row per chunk, or (None) the output itself."""
    if cut.axis not in axes or cut.chunks == 1:
        return None if out_dtype == dtype else (shape, dtype)
    return (*shape[: cut.axis], cut.chunks, *shape[cut.axis + 1 :]), dtype


def _worker(
    program: Program,
    cut: Grid,
    leaves: list[Array],
    outputs: list[Array],
    partials: list[Array],
    scratch: list[Array],
    axes: tuple[int, ...],
    xp: Namespace,
    run: Run | None,
) -> Tasks:
    """The calls of each task, with scratch of its own; ``run`` does the steps, or leaves them to NumPy."""
    if cut.axis == 0 and not program.reductions:
        return _rows_worker(program, cut, leaves, outputs, scratch, run)
    axis = cut.axis
    reduced_sizes = [cut.shape[a] for a in cut.reduced]
    steps = program.steps
    tile_axes = tuple(a - axis for a in axes if a >= axis)
    whole, most = {r.output for r in program.reductions}, _rows_at_once(program, cut)
    ufuncs = [getattr(xp, r.ufunc) for r in program.reductions]
    sources = [(x, _fixed(x.shape, axis) if x.ndim else None) for x in leaves]

    def view(x: Any, fixed: Any, before: list[int], rows: slice) -> Any:
        if fixed is None:
            return x
        index = [0 if fixed[a] else before[a] for a in range(axis)]
        return x[(*index, slice(None) if fixed[axis] else rows)]

    def values_of(before: list[int], start: int, first: int, count: int) -> list[Any]:
        """All values on so many rows, the first of which is number ``first`` of the tile that begins at ``start``."""
        rows = slice(start + first, start + first + count)
        tile: tuple[Any, ...] = (*before, rows)
        values: list[Any] = [view(x, fixed, before, rows) for x, fixed in sources]
        values += [None if i in whole else out[tile] for i, out in enumerate(outputs)]
        values += [s[first : first + count] if i in program.lasting else s[:count] for i, s in enumerate(scratch)]
        return [*values, *program.constants]

    def task(number: int) -> Iterator[Call]:
        (*before, start), count = cut.begin(number)
        rows, chunk = slice(start, start + count), start // cut.chunk
        for turn in range(prod(reduced_sizes)):
            for a, i in zip(cut.reduced, _indices(turn, reduced_sizes), strict=True):
                before[a] = i
            if run is None or not run((*before, start), count):
                for first in range(0, count, most):
                    values = values_of(before, start, first, min(most, count - first))
                    for fn, operands, result in steps:
                        yield into(fn, [values[i] for i in operands], values[result])
            values = values_of(before, start, 0, count) if program.reductions else []
            for r, ufunc, partial in zip(program.reductions, ufuncs, partials, strict=True):
                row = slice(chunk, chunk + 1) if axis in axes else rows
                slot: tuple[Any, ...] = (*(0 if a in axes else before[a] for a in range(axis)), row)
                part, value = partial[slot], values[r.source]
                if turn == 0:
                    yield ufunc.reduce, (value, tile_axes, r.dtype, part, True)
                else:
                    yield into(ufunc, (part, ufunc.reduce(value, tile_axes, r.dtype, None, True)), part)

    return task


def _rows_worker(
    program: Program, cut: Grid, leaves: list[Array], outputs: list[Array], scratch: list[Array], run: Run | None
) -> Tasks:
    """The calls of each task of a loop that is cut along its first axis alone, without reductions."""
    length, arrays = cut.shape[0], [*leaves, *outputs]

    def task(number: int) -> Iterator[Call]:
        (start,), count = cut.begin(number)
        if run is not None and run((start,), count):
            return
        values = [*arrays, *scratch]
        if cut.chunks > 1:
            rows = slice(start, start + count)
            values = [x[rows] if x.ndim and x.shape[0] == length else x for x in arrays]
            values += scratch if count == cut.chunk else [x[:count] for x in scratch]
        values += program.constants
        for f, operands, result in program.steps:
            yield into(f, [values[i] for i in operands], values[result])

    return task


def _doing(tasks: Tasks) -> Callable[[int], None]:
    def task(number: int) -> None:
        for f, args in tasks(number):
            f(*args)

    return task


def _fixed(shape: Shape, axis: int) -> list[bool]:
    """For each axis up to ``axis``: whether the leaf is broadcast along it."""
    return [n == 1 for n in shape[: axis + 1]]
