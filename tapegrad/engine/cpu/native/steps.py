"""The steps of a region's tile in one call of machine code.

Steps are grouped into kernels as the entries of a table are; a ufunc that is not exact stays NumPy's loop.  All of them
run over a few elements at a time, so that what lies between them stays in a core's first cache.  Where leaves are
broadcast or have gaps, they run row by row.  Reductions follow by NumPy's calls.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache
from typing import Any, NamedTuple

from tapegrad.device import CPU, cuda_types
from tapegrad.device.types import Array, DType
from tapegrad.engine.cpu.native import kernels, machine
from tapegrad.engine.cpu.native.group import Entry, Group, Lifetime, groups
from tapegrad.engine.cpu.native.loops import OF_ELEMENTS, Loop, function_at, loop_of, merged
from tapegrad.engine.cpu.native.ops import is_exact
from tapegrad.engine.task import Silenced

_XP = CPU.xp
_CHUNK = 2048
"""Elements at a time."""
_LEAST_ROW = 64
"""Elements of a row that are worth a call for each step."""
_MOST_VALUES = 64
"""Operands that :func:`machine.nest` takes."""
CONTIGUOUS = "contiguous"
"""The label of a step that copies a leaf."""
_interpreted: ContextVar[bool] = ContextVar("interpreted", default=False)
_MOST_LOOPS = 4
Run = Callable[[Sequence[int], int], bool]
"""Runs the steps of one tile, given the position of its first element along some axes, and its number of rows.

Returns False for a floating-point error that must be reported: NumPy's calls then recompute the tile.
"""
Step = tuple[Any, tuple[int, ...], int]
"""A function, the numbers of its operands, and that of its result."""


def is_interpreted() -> bool:
    """Whether regions run by NumPy's calls alone, in this thread and here."""
    return _interpreted.get() or machine.is_off()


@contextmanager
def interpreted() -> Iterator[None]:
    """Run regions by NumPy's calls alone inside the block."""
    token = _interpreted.set(True)
    try:
        yield
    finally:
        _interpreted.reset(token)


class Nest(NamedTuple):
    """The loops of a tile, outermost first: sizes, and for each loop the strides of all values.

    ``rows``: the outermost loop's turns for each row of the tile.
    """

    rows: int
    sizes: tuple[int, ...]
    strides: tuple[tuple[int, ...], ...]


@lru_cache(4096)
def nest_of(sizes: tuple[int, ...], strides: tuple[tuple[int, ...], ...]) -> Nest | None:
    """Return the loops of a tile of ``sizes``, whose rows are along its first axis; None: a row is too short.

    ``strides``: those of each array.
    """
    every = [(n, s) for n, s in zip(sizes, zip(*strides, strict=True), strict=True)]
    merged_sizes, merged_strides = merged([every[0], *(loop for loop in every[1:] if loop[0] > 1)])
    if len(merged_sizes) > _MOST_LOOPS or (len(merged_sizes) > 1 and merged_sizes[-1] < _LEAST_ROW):
        return None
    return Nest(merged_sizes[0] // sizes[0], tuple(merged_sizes), tuple(map(tuple, merged_strides)))


class Steps:
    """Steps on numbered values; ``strides``: bytes from one element to the next, 0 where one serves all."""

    def __init__(
        self, steps: Sequence[Step], labels: Sequence[str], dtypes: Sequence[DType], strides: Sequence[int],
        scratch: int, outputs: Collection[int],
    ) -> None:  # fmt: skip
        """Take the ``outputs`` for needed behind the loop; others from ``scratch`` on need to hold a few elements."""
        self._steps, self._labels, self._dtypes, self._strides = steps, labels, dtypes, strides
        self._scratch, self._outputs = scratch, outputs
        self._record: Array | None = None
        self._compiling: tuple[kernels.Request, list[Group], list[Entry]] | None = None
        self._meetings = 0
        """How often it was asked for before; beyond the second time only what is needed to run is kept."""

    def _entry(self, step: Step, label: str) -> Entry | None:
        f, operands, result = step
        f, silenced = (f.ufunc, True) if type(f) is Silenced else (f, False)
        values = (*operands, result)
        dtypes = tuple(self._dtypes[k] for k in values)
        name: str = label if label in OF_ELEMENTS else "copyto" if label == CONTIGUOUS else getattr(f, "__name__", "")
        of_elements = OF_ELEMENTS.get(name)
        loop = of_elements(dtypes) if of_elements else loop_of(f, dtypes) if type(f) is _XP.ufunc else None
        if loop is None:
            return None
        arrays = tuple(_XP.empty((), dtype) for dtype in dtypes)
        strides = tuple((self._strides[k],) for k in values)
        spans = tuple((16 * k, 16 * k + 1) for k in values)
        return Entry(name, is_exact(name, dtypes), loop, arrays, (_CHUNK,), strides, spans, silenced)

    @property
    def ready(self) -> bool:
        """Whether there is machine code.  It is asked for at the second time, and may take a while."""
        if self._record is None:
            self._meetings += 1
            if self._meetings == 2:
                self._compile()
            if self._compiling is not None and (self._compiling[0].ready or not self._compiling[1]):
                self._bind(*self._compiling)
                self._compiling = None
        return self._record is not None

    def _compile(self) -> None:
        """Have kernels compiled, if all steps can be done by machine code."""
        entries = [self._entry(*pair) for pair in zip(self._steps, self._labels, strict=True)]
        if machine.why_not() or not entries or None in entries or len(self._dtypes) > _MOST_VALUES:
            return
        end = len(entries)
        needed = dict.fromkeys(self._outputs, end)
        lifetimes = []
        for i in range(end - 1, -1, -1):
            _, operands, result = self._steps[i]
            lifetimes.append(Lifetime(i, needed.get(result, i)))
            if result >= self._scratch and result not in self._outputs:
                needed.pop(result, None)
            for k in operands:
                needed.setdefault(k, i)
        done: list[Any] = entries
        fused = list(groups(done, lifetimes[::-1], 0, end, end))
        self._compiling = kernels.request(g.structure for g in fused), fused, done

    def _bind(self, request: kernels.Request, fused: list[Group], entries: list[Entry]) -> None:
        """Write down the rows of one turn, as :func:`machine.sequence` reads them."""
        values = [(*operands, result) for _, operands, result in self._steps]
        rows: list[tuple[Loop, list[int], bool]] = []
        of = {g.first: g for g in fused}
        at = 0
        while at < len(entries):
            g = of.get(at)
            if g is None:
                rows.append((entries[at].loop, list(values[at]), entries[at].silenced))
            else:
                address = request.address(g.structure)
                if not address:  # it has other bits: all stays as it is
                    return
                operands = [values[i][k] for i, k in g.operands]
                rows.append((Loop(address, 0, 0, True), operands, entries[g.first].silenced))
            at = at + 1 if g is None else g.last
        stride = self._strides
        ways = [s if k < self._scratch or k in self._outputs else 0 for k, s in enumerate(stride)]
        words = [len(rows), _CHUNK, len(stride), *ways]
        counted = sum(machine.flag_bits().values())
        for loop, operands, silenced in rows:
            flags = 0 if silenced else loop.flags * counted
            words += [*loop[:3], flags, len(operands), *operands, *(stride[k] for k in operands)]
        self._record = _XP.array(words, _XP.int64)

    def binder(self, nest: Nest, axes: Sequence[Sequence[int]]) -> Callable[[Sequence[int]], Run]:
        """Return a function from the values' addresses to a :data:`Run`; the caller keeps their arrays alive.

        ``axes``: the strides of leaves and outputs along each axis of a tile's position.
        """
        record: Any = self._record
        count, depth = len(self._dtypes), len(nest.sizes)
        # A loop's arguments: pointers, sizes (the innermost loop's first), strides, and the record of a nest.
        outermost = count + (depth > 1)
        sizes = (nest.sizes[-1], *nest.sizes[:-1])
        strides = [s for loop in (-1, *range(depth - 1)) for s in nest.strides[loop]]
        nested = [machine.sequence(), cuda_types.address(record), 0, count, depth]
        template = _XP.array([*[0] * count, *sizes, *strides, *nested], _XP.int64)
        ways = _XP.zeros((len(axes), len(template)), _XP.int64)
        ways[:, : self._scratch] = axes
        at = 8 * (len(template) - len(nested))
        call = function_at(machine.nest() if depth > 1 else machine.sequence())

        def bind(addresses: Sequence[int]) -> Run:
            first = template.copy()
            first[:count] = addresses
            words = template.copy()
            pointers = cuda_types.address(words)
            context = pointers + at if depth > 1 else cuda_types.address(record)

            def run(position: Sequence[int], rows: int, record: Any = record) -> bool:
                """``record``: referenced here, since the machine code has only its address."""
                words[:] = first
                for index, way in zip(position, ways, strict=True):
                    if index:
                        _XP.add(words, index * way, out=words)
                words[outermost] = rows * nest.rows
                flags = call(context, pointers, pointers + 8 * count, pointers + 8 * (count + depth), None)
                return not flags or not flags & machine.reported_mask()

            return run

        return bind
