"""Replay on a GPU: the tasks of a program are recorded into CUDA graphs, each of which is one request to the driver.

What a stream cannot capture (a function of the library that takes memory, a wait, code of the user's) is called between
two graphs.  Nothing is allocated for a graph: its tasks lie in the arena, variables are bound where they are, numbers
that change come from memory that each replay fills, and new values of variables are copied over the old ones by a graph
of its own, if nobody else holds those.  A variable that keeps moving is copied to a place of its own.

``TAPEGRAD_FUNCTION=2`` makes all calls one by one.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import starmap
from operator import is_
from typing import Any

from tapegrad.capture import arena
from tapegrad.capture.memory import Arena, Planning, fresh
from tapegrad.capture.program import Program, Write
from tapegrad.capture.replay import Replay, do_all
from tapegrad.core import threads, tracking
from tapegrad.core.aval import shaped
from tapegrad.core.cell import Cell, contents_now
from tapegrad.core.references import most
from tapegrad.device import cublas, dtypes, traffic
from tapegrad.engine.task import Call
from tapegrad.errors import GraphError
from tapegrad.tensor import Tensor

_MOVES = 4
"""How often a variable may get other memory before it is copied for each replay: a graph is made anew each time."""
_LEAST = 2
"""Calls of a graph: for less it costs as much as it saves."""
_HOLDERS = 2
"""Who holds what a variable holds beside the list that is looked at: its cell, and the replay by cells."""
_PRODUCTS = frozenset({"matmul", "matmul_tf32"})
_MOST_SCRATCH = 2**28
"""Bytes that one task may take for itself inside a graph."""


def replay_of(program: Program, inside: bool | None = None, shared: Arena | None = None) -> Replay:
    """What replays a program where it lies; ``inside``: see ``Replay``; ``shared``: an arena, for a CPU."""
    return GraphReplay(program, inside=inside) if program.device.lazy else Replay(program, inside=inside, shared=shared)


class GraphReplay(Replay):
    """A program on a GPU."""

    def __init__(self, program: Program, plan: Planning = arena.plan, inside: bool | None = None) -> None:
        self._pieces: list[Callable[[], object]] | None = None
        self._commits: Callable[[], object] | None = None
        self._graphs = 0
        self._reasons: Counter[str] = Counter()
        self._gpu: Any = program.device
        self._scratch: Any = None
        self._moves: Counter[Cell] = Counter()
        self._steady: list[tuple[Write, Any]] = []
        self._others: list[tuple[Write, Any]] = []
        self._cells: list[Cell] = []
        self._held: list[Any] = []
        self._kept: list[Any] = []
        super().__init__(program, plan, inside)

    @property
    def how(self) -> str:
        """How tasks are done: as graphs, or why not."""
        if os.environ.get("TAPEGRAD_FUNCTION") == "2":
            return "one by one (TAPEGRAD_FUNCTION=2)"
        text = f"as {self._graphs} CUDA graph{'s' * (self._graphs != 1)}"
        if self._reasons:
            text += f" and {sum(self._reasons.values())} tasks one by one: " + "; ".join(self._reasons)
        return text

    # Running -------------------------------------------------------------------------------------------------------

    def run(self, tensors: Sequence[Tensor], count: int | None = None) -> None:
        """Do all tasks; no variable is written yet.  ``count``: how many results will be asked for."""
        self._begin(tensors)
        if self._pieces is None:
            for block in self._code.blocks:  # kernels are compiled, libraries take what they need
                block()
            self._record()
            if self._graphs and not self.program.communicates:  # tasks may have overwritten what they were given
                self._begin(tensors)
                self._launch()
        else:
            for piece in self._pieces:
                piece()
        if traffic.said.passes:
            traffic.taken()
        if self._unsure:
            self._require_layouts()
        tracking.current.replayed(self._report)

    def _launch(self) -> None:
        for piece in self._pieces or ():
            piece()

    def _bind(self) -> None:
        """Variables are read where they lie now; where one has moved, graphs are made anew.  Raises RelaidError."""
        now = contents_now(self._cells)
        if now is not None and self._cells and all(map(is_, now, self._held)):
            return
        for cell, (owner, view) in list(self._large.items()):
            if cell.get(owner) is not self._contents.get(cell):
                self._moves[cell] += 1
                if self._moves[cell] > _MOVES:
                    self._settle(cell, owner, view)
        before = dict(self._contents)
        super()._bind_variables()
        if self._moved or before != self._contents:  # graphs hold addresses, also of what is written alone
            self._pieces = self._commits = None
        self._renew_calls()
        self._cells, self._held = list(self._contents), list(self._contents.values())

    def _settle(self, cell: Cell, owner: Any, view: Any) -> None:
        """A variable is copied to a place of its own for each replay."""
        del self._large[cell]
        self._contents.pop(cell, None)
        self._small.append((cell, owner, self._place(view)))
        self._moved.update(self._readers.get(id(view.slot), ()))

    # Recording -----------------------------------------------------------------------------------------------------

    def _record(self) -> None:
        """Make the graphs."""
        calls = [self._calls(i) for i in range(len(self.program.steps))]
        self._graphs, self._kept = 0, [calls]
        self._scratch = self._gpu.scratch()
        self._reasons.clear()
        pieces: list[Callable[[], object]] = []
        if os.environ.get("TAPEGRAD_FUNCTION") == "2" or self._gpu.at_once:
            self._pieces = list(self._code.blocks)
            return
        start = 0
        while start < len(calls):
            end = self._first_outside(start)
            graph, failed, reason = self._captured(calls, start, end)
            if graph is None and failed > start:
                end = failed
                graph, _, _ = self._captured(calls, start, end)
            if graph is None:
                end = max(failed, start) + 1
                for i in range(start, end):
                    self._reasons[self._named(i, reason)] += 1
                pieces.append(partial(_one_by_one, [call for part in calls[start:end] for call in part]))
            else:
                self._graphs += 1
                pieces.append(partial(self._device.call, graph.launch))
            start = end
        self._pieces = pieces
        self._commits = self._captured_commit()

    def _first_outside(self, start: int) -> int:
        """The first step from ``start`` on that is known not to be captured."""
        steps = self.program.steps
        return next((i for i in range(start, len(steps)) if steps[i].outside), len(steps))

    def _named(self, i: int, reason: str) -> str:
        step = self.program.steps[i]
        return f"{', '.join(step.names)}: {step.outside or reason}"

    def _captured(self, calls: list[list[Call]], start: int, end: int) -> tuple[Any, int, str]:
        """The graph of some steps; else None, the step that could not be captured, and why."""
        if sum(map(len, calls[start:end])) < _LEAST:
            return None, start, "one call alone is no graph"
        at, scratch = start, self._scratch

        def make() -> None:
            nonlocal at
            for at in range(start, end):
                scratch.restart()  # what a task takes for itself is free when it is done
                for f, args in calls[at]:
                    f(*args)

        multiplies = any(_PRODUCTS.intersection(step.names) for step in self.program.steps[start:end])
        while True:
            try:
                with self._with_workspace() if multiplies else nullcontext():
                    return self._gpu.graph(make, scratch), end, ""
            except GraphError as e:
                if not 0 < scratch.lacks <= _MOST_SCRATCH:
                    return None, at, str(e)
                reason = str(e)
            except MemoryError as e:
                return None, at, str(e)
            try:
                self._grow()
            except MemoryError:
                return None, at, reason

    def _grow(self) -> None:
        """More memory for what tasks take for themselves.  Raises MemoryError."""
        aval = shaped((2 * self._scratch.lacks,), dtypes.asdtype("uint8"), self._gpu)
        with tracking.current.reserved((aval,), ("function",)):
            buffer = fresh(aval)
        tracking.current.label(buffer, "temporary", "scratch memory of a captured function")
        self._kept.append(buffer)
        self._scratch.use(buffer.array)

    def _with_workspace(self) -> Any:
        """A block in which products use memory that is the graphs' own."""
        device = self._gpu
        memory = device.call(cublas.fresh_workspace, device.xp, device.xp.cuda.Device(device.index))
        self._kept.append(memory)
        return cublas.workspace(device.index, memory)

    def _captured_commit(self) -> Callable[[], object] | None:
        """One graph that writes new values over the old ones of all large variables."""
        calls: list[Callable[[], object]] = []
        self._others, self._steady = [], []
        for write, bound in zip(self.program.writes, self._written, strict=True):
            if bound is not None and self._is_steady(write):
                calls.append(self._overwriting(write, self._now(bound)))
                self._steady.append((write, bound))
            else:
                self._others.append((write, bound))
        if not calls:
            return None

        def make() -> None:
            for call in calls:
                call()

        try:
            for write in (write for write, _ in self._steady if write.over is not None):
                self._putting(write, self._contents[write.cell].array)  # compiles what no task has launched
            graph = self._gpu.graph(make)
        except (GraphError, MemoryError):
            return None
        return partial(self._device.call, graph.launch)

    # Writing -------------------------------------------------------------------------------------------------------

    def _is_steady(self, write: Any) -> bool:
        """Whether a variable's new value is copied over the old one, if nobody else holds that."""
        return write.cell in self._contents and self._may_overwrite(write)

    def commit(self) -> None:
        """Write to cells: all or none."""
        if self._commits is None:
            super().commit()
            return
        todo: list[Callable[[], object]] = list(starmap(self._putting, self.writes(self._others)))
        todo.append(self._put_steady)
        do_all(todo)
        for tell in self.program.afterwards:
            tell()

    def _put_steady(self) -> None:
        if not threads.unshared(self._all_ours, self._commits):  # type: ignore[arg-type]
            self._put(self.writes(self._steady))

    def _all_ours(self) -> bool:
        """Whether nobody but the cells and this replay holds what the variables held."""
        return most(self._held) <= _HOLDERS and all(b.base is None and b.array is not None for b in self._held)


def _one_by_one(calls: Sequence[Call]) -> None:
    for f, args in calls:
        f(*args)
