"""predict_peak: run the engine itself, without computing or allocating, and read the figures it would have had.

A *dry run* is the program's own run on abstract arrays (``device/abstract_array.py``): the code that decides in a
concrete run what is fused, kept, evicted, recomputed and counted decides it here, so predicted bytes are measured
bytes.
What the function writes to variables and random generators is dropped, and so are all figures of it but its own.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from tapegrad import nest
from tapegrad.core.aval import GRAIN, ShapedArray, shaped
from tapegrad.core.buffer import Buffer
from tapegrad.core.cell import Cell, shadowed
from tapegrad.core.node import next_index
from tapegrad.core.state import during, holding
from tapegrad.device import abstract_array, asdevice, current_device, dtypes, is_array
from tapegrad.device.numerics import bits
from tapegrad.engine.abstract_evaluation import AbstractExecutor
from tapegrad.errors import BudgetError, DryRunError
from tapegrad.remat.budget.manager import MANAGER
from tapegrad.sizes import format_bytes, parse_bytes
from tapegrad.tensor import Tensor, from_array
from tapegrad.tracing import html
from tapegrad.tracing.ledger import LEDGER
from tapegrad.tracing.metrics import Measure
from tapegrad.variable import Variable, everyone, last_number

if TYPE_CHECKING:
    from numpy.typing import DTypeLike

    from tapegrad.device import Device

T = TypeVar("T")
_SHARES = (0.8, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1)


@dataclass(frozen=True)
class ShapeDtype:
    """Stands for an array that need not exist: shape, dtype and device (None: the current one)."""

    shape: Sequence[int]
    dtype: DTypeLike = "float32"
    device: Device | str | None = None


@dataclass(frozen=True)
class Point:
    """One budget, and what a run within it does."""

    budget_bytes: int
    feasible: bool
    peak_bytes: int
    """The most bytes alive at once; of a budget that cannot be kept, until then."""
    evictions: int
    restored: int
    """Recomputed values."""
    kernel_runs: int
    extra_cost: float
    """What recomputing values costs, in bytes moved (``tracing/costs.py``)."""
    extra_ratio: float
    """``extra_cost`` as a part of what the run costs without a budget."""
    needed_bytes: int = 0
    """Of a budget that cannot be kept: the least with which the operation that failed could have run."""


class Programmed(Protocol):
    """A captured program that can be planned."""

    def plan(self, budget: int | None) -> Any:
        """The plan within ``budget`` bytes."""

    def pareto(self) -> list[tuple[int, float]]:
        """What other budgets would cost."""


@dataclass(frozen=True)
class Captured:
    """What replays of a captured function (``tg.function``) take; it holds the program, and what that reads."""

    peak_bytes: int
    """The arena of the plain program, and the variables and constants that it reads."""
    least_bytes: int | None
    """The least ``budget=`` found that can be kept, by recomputing values as planned (None: not looked for)."""
    least_ratio: float = 0.0
    """What recomputing values costs then, as a part of the plain program's work."""
    arena_bytes: int = field(default=0, compare=False)
    """The arena of the plain program."""
    programmed: Programmed | None = field(default=None, repr=False, compare=False)

    def plan(self, budget: int | str | None = None) -> Any:
        """What ``.plan()`` of a ``tg.function`` with this ``budget`` would show.  Raises BudgetError, SizeError."""
        return self._program.plan(None if budget is None else parse_bytes(budget))

    def pareto(self) -> list[tuple[int, float]]:
        """(Bytes of the arena, extra work as a part of the plain program's) of several plans, least bytes first."""
        return self._program.pareto()

    @property
    def _program(self) -> Programmed:
        assert self.programmed is not None, "made by predict_peak alone"
        return self.programmed


Capturing = Callable[[Callable[..., Any], tuple[Any, ...], bool], "Captured | None"]
_capturing: list[Capturing] = [lambda f, args, least: None]


def capture_with(capturing: Capturing) -> None:
    """Let ``capturing`` tell what replays of a function with arguments take, and the least of it."""
    _capturing.append(capturing)


@dataclass(frozen=True)
class Prediction:
    """What :func:`predict_peak` has found; ``print`` it for a table."""

    live_bytes: int
    """Alive before: variables, data, stand-ins."""
    peak_bytes: int
    """The most bytes alive at once, without a budget."""
    kernel_runs: int
    bytes_moved: int
    cost: float
    """Work without a budget, in bytes moved (``tracing/costs.py``)."""
    curve: tuple[Point, ...]
    least_bytes: int | None
    """The least budget found that can be kept (None: not looked for)."""
    captured: Captured | None = None
    """Replays of a ``tg.function`` (None: of another function, or of what cannot be captured)."""
    as_function: Captured | None = None
    """Of another function: what replays of it as a ``tg.function`` would take (None: it cannot be captured)."""

    def __str__(self) -> str:
        lines = [
            f"without a budget: peak {format_bytes(self.peak_bytes)}, of which {format_bytes(self.live_bytes)} before; "
            f"{self.kernel_runs} kernels"
        ]
        if self.least_bytes is not None:
            lines.append(f"least budget: {format_bytes(self.least_bytes)} ({self.least_bytes} bytes)")
        if self.captured is not None:
            lines.append(f"captured: {format_bytes(self.captured.peak_bytes)}{_least_of(self.captured)}")
        if self.curve:
            lines.append(f"{'budget':>12} {'peak':>12} {'evictions':>10} {'recomputed':>11} {'extra work':>11}")
        for p in self.curve:
            start = f"{format_bytes(p.budget_bytes):>12} "
            if p.feasible:
                row = f"{format_bytes(p.peak_bytes):>12} {p.evictions:>10} {p.restored:>11} {p.extra_ratio:>10.1%}"
            else:
                row = f"too small: some operation needs {format_bytes(p.needed_bytes)}"
            lines.append(start + row)
        if self.as_function is not None:
            lines.append(f"as a tg.function: {format_bytes(self.as_function.peak_bytes)}{_least_of(self.as_function)}")
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        """The table, for notebooks."""
        first, *lines = str(self).split("\n")
        said = [first, *(line for line in lines if line.startswith(("least", "captured", "as a")))]
        rows = [
            (format_bytes(p.budget_bytes), format_bytes(p.peak_bytes), str(p.evictions), str(p.restored),
             f"{p.extra_ratio:.1%}") if p.feasible
            else (format_bytes(p.budget_bytes), f"too small: some operation needs {format_bytes(p.needed_bytes)}")
            for p in self.curve
        ]  # fmt: skip
        heads = ("budget", "peak", "evictions", "recomputed", "extra work")
        return "".join(map(html.paragraph, said)) + html.table(heads, rows)


def _least_of(c: Captured) -> str:
    if c.least_bytes is None:
        return ""
    return f", least budget {format_bytes(c.least_bytes)} ({c.least_bytes} bytes, {c.least_ratio:.1%} more work)"


def predict_peak(
    f: Callable[..., Any], *args: Any, budgets: Sequence[int | str] | None = None, least: bool = True
) -> Prediction:
    """What ``f(*args)``, say a training step with its tape, would take in memory and in work, without running it.

    ``args``: what ``f`` takes; in place of any array a :class:`ShapeDtype`, or another object with a ``shape`` and a
    ``dtype`` that is no array, stands for a tensor that need not fit.  ``budgets``: bytes or sizes such as
    ``"2GiB"``; None: some between the bytes alive before and the peak.  ``least``: look for the least budget that can
    be kept, by some tens of dry runs.

    ``f`` runs once for each budget, on arrays that have no contents.  So it must not look at values, and it must not
    keep what it makes: variables of layers and optimizers have to be there before (``build``).  What it writes to
    variables and generators is dropped.  Its predicted bytes are those that ``tg.measure()`` and ``tg.memory_budget``
    would show, to the byte, for what depends on shapes alone: indices given as stand-ins are taken to be in range and
    not negative.  Within a budget that leaves next to no room, CuPy's pool, held to the same limit, may be too
    fragmented for an array that would fit: then the run drops more than predicted.  Other threads should rest
    meanwhile.  Of a ``tg.function``, ``captured`` tells what its replays would take, and ``budget=`` at least; of
    another function that can be captured, ``as_function`` tells the same of ``tg.function(f)``, by one more dry run.
    ``.plan(budget)`` and ``.pareto()`` of either are those of the program.

    Raises DryRunError (RuntimeError) where ``f`` looks at a value or leaves variables behind, SizeError, and whatever
    ``f`` raises.
    """
    limits = None if budgets is None else [parse_bytes(b) for b in budgets]
    runs = Runs(f, args)
    with runs:
        plain, _ = runs.once(None)
        live = runs.live_bytes
        if limits is None:
            room = plain.peak_bytes - live
            limits = [live + int(share * room) // GRAIN * GRAIN for share in _SHARES]
        curve = tuple(_point(limit, *runs.once(limit), plain) for limit in limits if limit)
        lowest = _least(runs, live, plain.peak_bytes + plain.scratch_bytes) if least else None
        captured = runs.captured(least)
    both = (captured, None) if hasattr(f, "_predicted") else (None, captured)
    return Prediction(live, plain.peak_bytes, plain.kernel_runs, plain.bytes_moved, plain.cost, curve, lowest, *both)


def _point(limit: int, m: Measure, needed: int | None, plain: Measure) -> Point:
    return Point(
        limit, needed is None, m.peak_bytes, m.evictions, m.restored, m.kernel_runs, m.restored_cost,
        m.restored_cost / max(1.0, plain.cost), needed or 0,
    )  # fmt: skip


def _least(runs: Runs, low: int, high: int) -> int:
    """The least limit that can be kept: below ``low`` none can, ``high`` can; by bisection, and by what errors say."""
    low = max(low, 1)
    while low < high:
        for limit in (low, (low + high) // 2 // GRAIN * GRAIN):
            if low <= limit < high:
                m, needed = runs.once(limit)
                if needed is None:
                    high = m.peak_bytes
                else:
                    low = max(limit + GRAIN - limit % GRAIN, needed)
    return high


class Runs:
    """Dry runs of ``f(*args)``, between entering and leaving."""

    def __init__(self, f: Callable[..., Any], args: tuple[Any, ...]) -> None:
        self._f, self._args = f, args
        self._outer = Measure()
        self.live_bytes = 0

    def __enter__(self) -> Runs:
        LEDGER.open(self._outer)
        return self

    def __exit__(self, *exc: object) -> None:
        LEDGER.close(self._outer)

    def once(self, limit: int | None) -> tuple[Measure, int | None]:
        """The figures of a run within ``limit``, and what it would have needed (None: it was enough)."""
        first, m = last_number(), Measure()
        with LEDGER.apart(self._outer), MANAGER.apart():
            needed = _dry(partial(self._measured, m, limit))
        _refuse_variables(first)
        return m, needed

    def captured(self, least: bool) -> Captured | None:
        """What replays of ``f`` would take, if it can be captured."""
        by_capture = getattr(self._f, "_predicted", None) or partial(_capturing[-1], self._f)
        with LEDGER.apart(self._outer), MANAGER.apart():
            return _dry(lambda since: self._left_nothing(since, by_capture, least))

    def _left_nothing(self, since: int, by_capture: Callable[..., Captured | None], least: bool) -> Captured | None:
        try:
            return by_capture(nest.map_leaves(_stand_in, self._args), least)
        finally:
            _forget(since)

    def _measured(self, m: Measure, limit: int | None, since: int) -> int | None:
        inputs = nest.map_leaves(_stand_in, self._args)
        self.live_bytes = LEDGER.live_bytes
        LEDGER.open(m)
        try:
            return self._within(limit, inputs)
        finally:
            LEDGER.close(m)
            del inputs
            _forget(since)

    def _within(self, limit: int | None, inputs: tuple[Any, ...]) -> int | None:
        if limit is None:
            self._f(*inputs)
            return None
        try:
            try:
                MANAGER.enter(limit, None, self)
                self._f(*inputs)
            finally:
                MANAGER.leave(self)
        except BudgetError as e:
            return e.needed_bytes
        return None


def _forget(since: int) -> None:
    for b in LEDGER.forget(since):  # what is left of the run has no value
        b.array = abstract_array.empty(b.node.aval.shape, b.node.aval.dtype)


def _dry(f: Callable[[int], T]) -> T:
    """What ``f`` returns, in a dry run; it gets the node index at which that begins."""
    since, state, writes = next_index(), bits.host_state(), _Writes()
    try:
        with shadowed(writes):
            run = partial(during, f, since, executor=AbstractExecutor(since), recorders=(), deferring=None)
            return holding(abstract_array.here, run, counted=True)
    finally:
        bits.set_host_state(state)
        writes.undo()


class _Writes(dict[Cell, Any]):
    """What a dry run has written to cells.

    In earnest the former content goes when nobody else holds it, and its bytes with it.  So the cell gets another
    buffer on the same array, which nobody counts, and the former buffer goes as it would.
    """

    def __init__(self) -> None:
        self._aside: dict[Cell, tuple[weakref.ref[Buffer], weakref.ref[Buffer]]] = {}

    def __setitem__(self, cell: Cell, content: Any) -> None:
        former = cell._content
        if cell not in self._aside and isinstance(former, Buffer):
            self._aside[cell] = weakref.ref(former), weakref.ref(former.root())
            cell._content = _uncounted(former)
        super().__setitem__(cell, content)

    def undo(self) -> None:
        """Give the cells what they had, as it was or as a buffer that is counted."""
        for cell, (former, root) in self._aside.items():
            content, buffer = cell._content, former()
            if buffer is None and content.base is not None:
                under = root() or Buffer(content.base.array, content.base.node)
                buffer = Buffer(content.array, content.node, base=under)
            elif buffer is None:
                buffer = Buffer(content.array, content.node)
            cell._content = buffer
        self.clear()
        for v in list(everyone.values()):
            if v._cell in self._aside:
                LEDGER.label(v._cell._content, v.category)


def _uncounted(buffer: Buffer) -> Buffer:
    base = None if buffer.base is None else _uncounted(buffer.base)
    double = Buffer(None, buffer.node, buffer.inputs, base=base)
    double.array = buffer.array  # only now: nobody is told
    return double


def _stand_in(x: Any) -> Any:
    """An abstract array tensor for what stands for one; anything else is itself."""
    if isinstance(x, (Tensor, Variable)) or is_array(x) or hasattr(x, "__array__") or hasattr(x, "__dlpack__"):
        return x
    if isinstance(x, ShapedArray):
        aval = x
    elif hasattr(x, "shape") and hasattr(x, "dtype"):
        device = getattr(x, "device", None)
        where = current_device() if device is None else asdevice(device)
        aval = shaped(tuple(x.shape), dtypes.asdtype(x.dtype), where)
    else:
        return x
    return from_array(abstract_array.empty(aval.shape, aval.dtype), aval.device)


def _refuse_variables(first: int) -> None:
    """Raise DryRunError if variables made since number ``first`` have outlived the run."""
    if not any(number > first for number in list(everyone.keys())):
        return
    gc.collect()
    names = [v.name for number, v in sorted(everyone.items()) if number > first]
    if names:
        raise DryRunError(
            f"predict_peak: f has made variables that outlive it: {', '.join(names[:5])}{' ...' * (len(names) > 5)}; "
            "they have no values now.  Make the layer or optimizer that owns them anew, and build it before predicting "
            "(call the layer once on a small input, optimizer.build(variables))"
        )
