"""What holds of the figures of any program: parts add up, nothing is left, however it is run, measured or ended."""

from __future__ import annotations

import itertools
import os
import signal
import threading

import numpy as np
import pytest
from budget_cases import in_a_thread
from programs import decisions, laws
from programs.draw import draw
from programs.interrupts import PACKAGE
from programs.laws import PlantedError, Subject

import tapegrad as tg

pytestmark = pytest.mark.usefixtures("no_collection")

SEEDS = range(60)


@pytest.fixture(scope="module", autouse=True)
def warm() -> None:
    """What is imported at its first use need not be looked at by the collector again and again."""
    decisions.ready()


@pytest.fixture(scope="module")
def subjects() -> list[Subject]:
    return laws.subjects(SEEDS)


@pytest.mark.parametrize("part", range(4))
def test_figures_are_the_same_however_a_run_is_measured(part: int, subjects: list[Subject]) -> None:
    for subject in subjects[part::4]:
        laws.check_measured_ways(subject)


def test_figures_of_threads_are_added(subjects: list[Subject]) -> None:
    for several in zip(subjects[::3], subjects[1::3], subjects[2::3], strict=False):
        laws.check_added([*several])


@pytest.mark.parametrize("part", range(3))
def test_live_bytes_are_those_that_numpy_has_allocated(part: int) -> None:
    """Counted by the interpreter, at every line; where arrays have gaps, are empty or exported it counts others."""
    excluded = {"export", "reversible", "host draw", "draw"}
    programs = (p for p in map(draw, SEEDS) if 1 < min(p.shape) and p.lies == "rows" and not p.lazy
                and not p.kinds() & excluded and p.shape[0] * p.shape[1] < 1000)  # fmt: skip
    checked = 0
    for program in itertools.islice(programs, part, 9, 3):
        laws.check_recount(program)
        checked += 1
    assert checked == 3


@pytest.mark.sampled(1 / 2)
@pytest.mark.parametrize(
    ("files", "error"), [("<program", PlantedError), (PACKAGE, KeyboardInterrupt)], ids=["error", "interrupt"]
)
@pytest.mark.parametrize("part", range(3))
def test_after_an_error_anywhere_the_next_run_is_as_if_there_had_been_none(
    part: int, files: str, error: type[BaseException], subjects: list[Subject]
) -> None:
    """Of the program's own functions, and of rules and checkpoints that run again; or Ctrl-C in any call of ours."""
    for subject in subjects[part::6]:
        laws.check_failed(subject, 3, files, error)


def test_nothing_is_retained_over_200_runs(subjects: list[Subject]) -> None:
    for subject in sorted(subjects, key=lambda s: s.figures["kernel_runs"])[:4]:
        laws.check_repeated(subject)


def test_blocks_of_threads_that_come_and_go_leave_no_trace(subjects: list[Subject]) -> None:
    """Measurements and budgets that begin and end at any time, also in another order: each sees all that goes on."""
    before, (first, second) = laws.settled(), subjects[:2]
    inside, over = threading.Barrier(2, timeout=60), threading.Barrier(2, timeout=60)

    def work() -> int:
        with tg.measure(timeline=True):
            inside.wait()
            with tg.memory_budget("1GiB") as m:
                for _ in range(5):
                    second.run()
            over.wait()
            return m.allocated_bytes

    with tg.memory_budget("2GiB"):
        allocated: list[int] = []
        other = threading.Thread(target=lambda: allocated.append(work()), daemon=True)
        other.start()
        inside.wait()
        for _ in range(5):
            first.run()
    over.wait()
    other.join(60)
    assert allocated[0] >= 5 * second.figures["allocated_bytes"]
    laws.check_left(before)
    first.check(), second.check()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_child_forked_at_any_time_counts_and_computes_on(subjects: list[Subject]) -> None:
    """While other threads count, keep a budget and compute; the child's thread sees what it has done alone."""
    over, failed = threading.Event(), list[BaseException]()

    def work(subject: Subject) -> None:
        try:
            while not over.wait(0.01):
                with tg.measure(timeline=True):
                    laws.check_bits(subject.run(), subject.expected)
        except BaseException as e:
            failed.append(e)

    small = [s for s in subjects if s.program.shape[0] * s.program.shape[1] < 1000]
    threads = [threading.Thread(target=work, args=(s,), daemon=True) for s in small[:2]]
    statuses = []
    with tg.memory_budget("1GiB") as m:
        for t in threads:
            t.start()
        for subject in small[2:8]:
            subject.run()
            child = os.fork()
            if not child:
                status = 1
                try:
                    with tg.measure():
                        before = laws.snapshot().live_bytes
                        laws.check_bits(subject.run(), subject.expected)
                        laws.check_bits(in_a_thread(subject.run)[0], subject.expected)
                        status = 0 if laws.snapshot().live_bytes == before <= m.peak_bytes else 2
                finally:
                    os._exit(status)
            statuses.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        over.set()
        for t in threads:
            t.join(60)
    assert statuses == [0] * 6 and not failed


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_child_forked_in_the_middle_of_a_kernel_of_another_thread_computes_on() -> None:
    """NumPy calls a function of the user's while a lazy value is evaluated."""
    x, inside, over = tg.asarray(np.linspace(-1.0, 1.0, 20_000)), threading.Event(), threading.Event()
    expected = tg.tanh(x).numpy(copy=True)

    def invalid(kind: str, flag: int) -> None:
        inside.set()
        over.wait(60)

    def work() -> None:
        with tg.measure(timeline=True), tg.memory_budget("1GiB"), np.errstate(invalid="call", call=invalid):
            tg.log(x).numpy()

    count = tg.get_num_threads()
    tg.set_num_threads(1)  # whose helpers have error states of their own
    other = threading.Thread(target=work, daemon=True)
    other.start()
    try:
        assert inside.wait(60)
        child = os.fork()
        if not child:
            signal.alarm(20)
            with tg.measure(), tg.memory_budget("1GiB"):
                os._exit(0 if np.array_equal(tg.tanh(x).numpy(), expected) else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    finally:
        over.set()
        other.join(60)
        tg.set_num_threads(count)
