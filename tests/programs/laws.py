"""Laws of what ``measure`` says of any program, by public figures alone.

* at every line of a program the parts of what is alive, and of the peak, add up;
* the figures of a run are the same however it is measured: read at every line, in blocks within blocks, with a
  timeline, in another thread, and beside other threads, whose figures are added;
* after a run as many bytes are alive as before, however often it is repeated, and however it has ended.
"""

from __future__ import annotations

import gc
import itertools
import sys
import tracemalloc
from collections import Counter
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any

import numpy as np
from budget_cases import in_a_thread

import tapegrad as tg
from programs.draw import draw
from programs.interrupts import interrupted
from programs.ops import OPS
from programs.program import Program
from programs.runs import Run
from programs.variants import GRAIN, WrongError, arrays, check_bits, compiled
from tapegrad.memory import CATEGORIES, Measure

RETAINED = 20_000
"""Blocks of memory that Python may take for what waits to be added up."""
PARTS = ("live_by_category", "peak_by_category", "peak_by_primitive", "peak_by_line")
FIGURES = ("peak_bytes", "allocated_bytes", "kernel_runs", "bytes_moved", "nodes_run", "cost", "scratch_bytes",
           "reruns", "evictions", "restored", *PARTS)  # fmt: skip
"""What two runs of one program have in common."""


def snapshot() -> Measure:
    """The account of this moment: what is alive is also the peak of an empty block."""
    with tg.measure() as m:
        pass
    check_parts(m)
    return m


def check_parts(m: Measure, names: Iterable[str] = PARTS) -> None:
    """Raise WrongError unless the parts of live bytes (known when a block is over) and of the peak add up."""
    for name in names:
        parts, total = getattr(m, name), m.live_bytes if name.startswith("live") else m.peak_bytes
        if sum(parts.values()) != total or any(n < 0 for n in parts.values()):
            raise WrongError(f"{name} of {total} bytes: {parts}")
    if not {*m.live_by_category, *m.peak_by_category} <= set(CATEGORIES):
        raise WrongError(f"categories {[*m.live_by_category, *m.peak_by_category]}")
    if m.live_bytes > m.peak_bytes:
        raise WrongError(f"{m.live_bytes} bytes are alive, {m.peak_bytes} at the peak")


def figures(m: Measure, before: Measure) -> dict[str, Any]:
    """All that is compared, without what was alive before."""
    values = {name: getattr(m, name) for name in FIGURES}
    for name in PARTS:
        parts = Counter(values[name])
        parts.subtract(getattr(before, name))
        values[name] = {key: n for key, n in parts.items() if n}
    return {**values, "peak_bytes": m.peak_bytes - before.peak_bytes, "live_bytes": m.live_bytes - before.live_bytes}


def check_figures(got: dict[str, Any], expected: dict[str, Any]) -> None:
    """Raise WrongError at the first figure that differs."""
    for name, value in expected.items():
        if got[name] != value:
            raise WrongError(f"{name} is {got[name]}, not {value}")


def at_every_line(note: Callable[[], object], f: Callable[[], Any]) -> Any:
    """``f()``, with ``note()`` before every line of drawn programs that it runs."""

    def trace(frame: FrameType, event: str, arg: Any) -> Any:
        if not frame.f_code.co_filename.startswith("<program"):
            return None
        if event == "line":
            note()
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        return f()
    finally:
        sys.settrace(before)


class Subject:
    """A drawn program, its plain results, and the figures of a measured run."""

    def __init__(self, program: Program) -> None:
        self.program, self.main = program, compiled(program)
        with tg.measure():
            self.run()  # constants are made once
        self.expected = self.run()
        self.figures = self.measured(self.run)

    def run(self) -> list[Any]:
        """The results."""
        with np.errstate(all="ignore"):
            return arrays(self.main(tg, Run()))

    def measured(self, f: Callable[[], Any], **options: Any) -> dict[str, Any]:
        """The figures of a call, of which nothing must be left."""
        before = settled()
        with tg.measure(**options) as m:
            results = f()
        check_parts(m)
        check_bits(results, self.expected)
        check_left(before)
        return figures(m, before)

    def check(self) -> None:
        """Run it once more: the same bits and figures, and nothing is left."""
        check_figures(self.measured(self.run), self.figures)


def settled() -> Measure:
    """The account of this moment, without what garbage holds."""
    gc.collect()
    return snapshot()


def check_left(before: Measure) -> None:
    """Raise WrongError unless the same bytes are alive as then."""
    if (live := settled().live_bytes) != before.live_bytes:
        raise WrongError(f"{live - before.live_bytes} bytes are left")


def subjects(seeds: Iterable[int], without: Iterable[str] = ()) -> list[Subject]:
    """The programs of seeds that can be repeated in one process and that do none of ``without``."""
    excluded, repeatable = {"host draw", *without}, []
    for seed in seeds:
        program = draw(seed)
        tags = {tag for step in program.all_steps() for op in OPS if op.text == step.text for tag in op.tags}
        if not program.lazy and not program.kinds() & excluded and "global" not in tags:
            repeatable.append(Subject(program))
    return repeatable


def check_measured_ways(subject: Subject) -> None:
    """However a run is measured its figures are the same, and at every line the parts add up."""
    lives, samples = list[int](), list[tuple[float, int, int]]()

    def read() -> list[Any]:
        with tg.measure() as m:
            return at_every_line(lambda: (check_parts(m, PARTS[1:]), lives.append(m.live_bytes)), subject.run)

    def nested() -> list[Any]:
        return at_every_line(lambda: lives.append(snapshot().live_bytes), subject.run)

    def sampled() -> list[Any]:
        with tg.measure(timeline=True) as m:
            results = in_a_thread(subject.run)[0]
        samples.extend(m.samples)
        return results

    for way in (read, nested, sampled):
        before = settled()
        check_figures(subject.measured(way), subject.figures)
        peak = before.live_bytes + subject.figures["peak_bytes"]
        if max(lives) > peak:
            raise WrongError(f"{max(lives)} bytes were alive, {peak} at the peak")
    if samples and max(live for _, live, _ in samples) != peak:
        raise WrongError(f"a timeline up to {max(live for _, live, _ in samples)}, a peak of {peak}")
    if any(not 0 <= kept <= live for _, live, kept in samples):
        raise WrongError("a timeline keeps more for rules than is alive")


def check_added(pair: list[Subject]) -> None:
    """Work and allocations of threads are added, and each has the bits it has alone."""
    before = settled()
    with tg.measure() as m:
        results = in_a_thread(*[subject.run for subject in pair])
    check_parts(m)
    for subject, result in zip(pair, results, strict=True):
        check_bits(result, subject.expected)
    for name in ("allocated_bytes", "kernel_runs", "bytes_moved", "cost", "reruns", "nodes_run"):
        first, *rest = (s.figures[name] for s in pair)
        total = sum(rest, first)
        if abs(getattr(m, name) - total) > 0.05 if name == "cost" else getattr(m, name) != total:
            raise WrongError(f"{name} is {getattr(m, name)}, of each {[first, *rest]}")
    check_left(before)


NUMPY = tracemalloc.DomainFilter(inclusive=True, domain=np.lib.tracemalloc_domain)


class Begun(Run):
    """Knows whether the program's data is there."""

    begun = False

    def reach(self, point: int) -> None:
        super().reach(point)
        self.begun = True


def allocated() -> int:
    """Bytes of all NumPy arrays as the interpreter counts them, each rounded up as ``measure`` does."""
    traces = tracemalloc.take_snapshot().filter_traces([NUMPY]).traces
    return sum(-(-trace.size // GRAIN) * GRAIN for trace in traces)


def check_recount(program: Program) -> None:
    """At every third line after its data a program's live bytes change as those do that NumPy has allocated."""
    differences, lines = list[int](), itertools.count()
    tracemalloc.start()
    try:
        subject, run = Subject(program), Begun()

        def note() -> None:
            if run.begun and next(lines) % 3 == 0:
                differences.append(m.live_bytes - allocated())

        with tg.measure() as m, np.errstate(all="ignore"):
            at_every_line(note, lambda: subject.main(tg, run))
    finally:
        tracemalloc.stop()
    if len({*differences}) != 1:
        raise WrongError(f"live bytes without those of NumPy arrays: {differences}")


def check_repeated(subject: Subject, times: int = 200) -> None:
    """Nothing is retained from run to run: no value, and no memory of Python's for a block that nobody reads."""
    before, blocks = settled(), list[int]()
    with tg.measure() as m:
        for number in range(times):
            subject.run()
            if number % (times // 4) == times // 4 - 1:
                gc.collect()
                blocks.append(sys.getallocatedblocks())
    check_left(before)
    for name in ("kernel_runs", "bytes_moved", "allocated_bytes"):
        if getattr(m, name) != times * subject.figures[name]:
            raise WrongError(f"{name} of {times} runs is {getattr(m, name)}, of one {subject.figures[name]}")
    if max(blocks) - blocks[0] > RETAINED:
        raise WrongError(f"blocks of Python's memory after each quarter of {times} runs: {blocks}")


class PlantedError(Exception):
    """What a call of a program is made to raise."""


def check_failed(subject: Subject, times: int, files: str, error: type[BaseException]) -> None:
    """After an error at any call of ``files`` the next run is as if there had been none, in another thread, too."""

    def run() -> None:
        with tg.measure():
            subject.run()

    before = settled()
    for where in interrupted(run, times, files=files, error=error):
        try:
            check_left(before)
            subject.check()
            check_bits(in_a_thread(subject.run)[0], subject.expected)
        except WrongError as e:
            raise WrongError(f"after an error at {where}: {e}") from None
