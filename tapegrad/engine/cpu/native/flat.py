"""Regions without reductions on arrays without gaps: all steps of a tile in one call of machine code.

Steps are grouped into kernels as the entries of a table are; a ufunc that is not exact stays NumPy's loop.  All of them
run over a few elements at a time, so that what lies between them stays in a core's first cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from tapegrad.device import CPU, cxx
from tapegrad.device.float_errors import reported
from tapegrad.device.types import Array, DType
from tapegrad.engine.cpu.native import kernels, machine
from tapegrad.engine.cpu.native.group import Entry, Group, Lifetime, groups
from tapegrad.engine.cpu.native.loops import Loop, function_at, loop_of
from tapegrad.engine.cpu.native.ops import is_exact
from tapegrad.engine.work import Silenced

_XP = CPU.xp
_CHUNK = 2048
"""Elements at a time."""
_interpreted: ContextVar[bool] = ContextVar("interpreted", default=False)
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


class Flat:
    """Steps on numbered values, each of as many elements as the loop has, or (``single``) of one."""

    def __init__(
        self, steps: Sequence[Step], labels: Sequence[str], dtypes: Sequence[DType], single: Sequence[bool],
        scratch: int, outputs: Sequence[int],
    ) -> None:  # fmt: skip
        """Take the ``outputs`` for needed behind the loop, and what is numbered from ``scratch`` on for not."""
        self._steps, self._labels, self._dtypes, self._single = steps, labels, dtypes, single
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
        name = "where" if label == "where" else getattr(f, "__name__", "")
        exact = is_exact(name, dtypes)
        loop = loop_of(f, dtypes) if type(f) is _XP.ufunc else None
        if loop is None and not (exact and name == "where"):
            return None
        arrays = tuple(_XP.empty((), dtype) for dtype in dtypes)
        strides = tuple((0 if self._single[k] else dtype.itemsize,) for k, dtype in zip(values, dtypes, strict=True))
        spans = tuple((16 * k, 16 * k + 1) for k in values)
        return Entry(name, exact, loop or Loop(0, 0, 0, True), arrays, (_CHUNK,), strides, spans, silenced)

    @property
    def ready(self) -> bool:
        """Whether there is machine code.  It is asked for at the second time, and may take a while."""
        if self._record is None:
            self._meetings += 1
            if self._meetings == 2:
                self._compile()
            if self._compiling is not None and self._compiling[0].ready:
                self._bind(*self._compiling)
                self._compiling = None
        return self._record is not None

    def _compile(self) -> None:
        """Have kernels compiled, if all steps can be done by machine code."""
        entries = [self._entry(*pair) for pair in zip(self._steps, self._labels, strict=True)]
        if machine.why_not() or None in entries:
            return
        end = len(entries)
        needed = dict.fromkeys(self._outputs, end)
        lifetimes = []
        for i in range(end - 1, -1, -1):
            _, operands, result = self._steps[i]
            lifetimes.append(Lifetime(i, needed.get(result, i)))
            if result >= self._scratch:
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
        size = [0 if one else dtype.itemsize for one, dtype in zip(self._single, self._dtypes, strict=True)]
        words = [len(rows), _CHUNK, len(size), *(s if k < self._scratch else 0 for k, s in enumerate(size))]
        counted = sum(machine.flag_bits().values())
        for loop, operands, silenced in rows:
            flags = 0 if silenced else loop.flags * counted
            words += [*loop[:3], flags, len(operands), *operands, *(size[k] for k in operands)]
        self._record = _XP.array(words, _XP.int64)

    def task(
        self, arrays: Sequence[Array], chunk: int, length: int, fallback: Callable[[int], None]
    ) -> Callable[[int], None]:
        """Return a function that does a tile of ``chunk`` elements, by its number.

        ``fallback`` does it once more by NumPy's calls, which report floating-point errors.
        """
        record: Any = self._record
        count = len(arrays)
        first = _XP.array([*(cxx.address(x) for x in arrays), 0], _XP.int64)
        ways = _XP.array([*record[3 : 3 + count], 0])
        run, at, bits = function_at(machine.sequence()), cxx.address(record), machine.flag_bits()

        def task(number: int) -> None:
            start = number * chunk
            words = first + start * ways
            words[count] = min(chunk, length - start)
            pointers = cxx.address(words)
            flags = run(at, pointers, pointers + 8 * count, None, None)
            if flags and flags & sum(bits[kind] for kind in reported()):
                fallback(number)

        return task
