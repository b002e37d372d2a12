"""Locks: free in a forked child, and free after an interrupt at any line."""

from __future__ import annotations

import ast
import dis
import gc
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import numpy as np
import pytest
from checks import c64

import tapegrad as tg
from tapegrad.core import account, locks, threads
from tapegrad.core.state import thread
from tapegrad.memory.budget import guard as guard_module
from tapegrad.memory.budget.budget import MANAGER
from tapegrad.memory.budget.guard import Guard
from tapegrad.memory.ledger.ledger import LEDGER

PACKAGE = Path(tg.__file__).parent
SIDE = 16
UNIT = SIDE * SIDE * 8


def made_elsewhere(folder: Path) -> list[str]:
    """The files that make locks of their own."""
    found = []
    for path in folder.rglob("*.py"):
        for n in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(n, ast.Call) and ast.unparse(n.func).split(".")[-1] in ("Lock", "RLock"):
                found.append(path.relative_to(folder).as_posix())
    return found


def test_every_lock_of_the_package_is_made_in_one_place(tmp_path: Path) -> None:
    assert made_elsewhere(PACKAGE) == ["core/locks.py"]
    (tmp_path / "a.py").write_text("import threading\nx = threading.Lock()\n")
    assert made_elsewhere(tmp_path) == ["a.py"]


# Interrupts -------------------------------------------------------------------------------------------------------


@cache
def instructions(code: CodeType) -> dict[int, str]:
    return {i.offset: i.opname for i in dis.get_instructions(code)}


def instruction(frame: FrameType, before: int = 0) -> str:
    """What the frame does now, or did ``before`` so many bytes of its code."""
    return instructions(frame.f_code).get(frame.f_lasti - before, "")


class Interrupts:
    """Raises KeyboardInterrupt at one passing of one line (or instruction) of the given files, as Ctrl-C may."""

    install, installed = staticmethod(sys.settrace), staticmethod(sys.gettrace)

    def __init__(self, files: list[str], opcodes: bool = False) -> None:
        self.files = set(files)
        self.opcodes = opcodes
        self.passed: dict[tuple[Any, Any], int] = {}
        self.target: tuple[Any, Any] | None = None
        self.turn = 0
        self.hit = False

    def __call__(self, frame: FrameType, event: str, arg: Any) -> Any:
        if frame.f_code.co_filename not in self.files or in_finalizer(frame):
            return None
        if self.opcodes:
            frame.f_trace_opcodes = True
        # No handler covers NOT_TAKEN, where Python 3.14 does nothing, and looks for no signal.
        if event == ("opcode" if self.opcodes else "line") and not (self.opcodes and instruction(frame) == "NOT_TAKEN"):
            self.pass_by(frame, frame.f_lasti if self.opcodes else frame.f_lineno)
        return self

    def pass_by(self, frame: FrameType, place: Any) -> None:
        """The program comes to a place."""
        key = frame.f_code, place
        n = self.passed[key] = self.passed.get(key, 0) + 1
        if key == self.target and n == self.turn and not self.hit:
            self.hit = True
            raise KeyboardInterrupt

    def during(self, work: Callable[[], Any]) -> bool:
        """Whether ``work`` was interrupted."""
        self.passed, self.hit = {}, False
        before = self.installed()
        self.install(self)
        try:
            work()
        except KeyboardInterrupt:
            return True
        finally:
            self.install(before)
        return False

    def everywhere(self, work: Callable[[], Any], turns: int = 2) -> Any:
        """Interrupt ``work`` at each line in turn, the first times it is passed and the last; yields after each."""
        self.target = None
        self.during(work)
        for key, passed in dict(self.passed).items():
            for turn in sorted({*range(1, min(turns, passed) + 1), passed}):
                self.target, self.turn = key, turn
                self.during(work)
                yield f"{Path(key[0].co_filename).name}:{key[0].co_qualname}:{key[1]} passing {turn} of {passed}"


def in_finalizer(frame: FrameType | None) -> bool:
    """Whether the interpreter would swallow an exception."""
    while frame is not None:
        if frame.f_code.co_name in ("__del__", "_left", "_gone"):
            return True
        frame = frame.f_back
    return False


def is_free(lock: Any, patience: float = 5) -> bool:
    """Whether another thread gets it."""
    found: list[bool] = []

    def look() -> None:
        found.append(lock.acquire(timeout=patience))
        if found[0]:
            lock.release()

    other = threading.Thread(target=look)
    other.start(), other.join(20)
    return found == [True]


class Section:
    """A little thing with a lock, of each kind."""

    def __init__(self) -> None:
        self._lock = locks.lock()
        self.total = 0
        self.handled = 0
        self.guard = Guard[int](self.handle)

    def mend(self) -> None:
        locks.let_go(self._lock, self)

    @locks.whole
    def add(self) -> None:
        self.total += 1

    @locks.whole
    def twice(self) -> None:
        self.add()
        self.add()

    def handle(self, n: int) -> None:
        self.handled += n

    @guard_module.guarded
    def say(self) -> None:
        self.nested()

    @guard_module.guarded
    def nested(self) -> None:
        self.guard.tell(1)


FILES = [locks.__file__, guard_module.__file__, __file__]


@pytest.mark.parametrize("opcodes", [False, True], ids=["lines", "instructions"])
@pytest.mark.parametrize("work", [Section.twice, Section.say], ids=["section", "guard"])
def test_an_interrupt_anywhere_leaves_a_lock_free(work: Callable[[Section], None], opcodes: bool) -> None:
    thing, count = Section(), 0
    for where in Interrupts(FILES, opcodes).everywhere(lambda: work(thing), turns=9):
        assert is_free(thing._lock) and is_free(thing.guard._lock), where
        count += 1
    assert count > 10
    before = thing.handled
    thing.say()
    assert thing.handled > before and not thing.guard._waiting


def test_an_interrupt_while_a_value_is_overwritten_lets_new_threads_begin() -> None:
    done: list[int] = []
    for where in Interrupts([threads.__file__], opcodes=True).everywhere(
        lambda: threads.unshared(lambda: True, lambda: done.append(1)), turns=9
    ):
        assert is_free(threads._gate), where
    assert len(done) > 5


def test_a_lock_written_in_python_would_not_be_free() -> None:
    """The twin: this test's search finds a lock that an interrupt leaves held."""

    class Naive:
        def __init__(self) -> None:
            self.lock, self.depth = threading.RLock(), 0

        def __enter__(self) -> None:
            self.lock.acquire()
            self.depth += 1

        def __exit__(self, *exc: object) -> None:
            self.depth -= 1
            self.lock.release()

    naive = Naive()

    def work() -> None:
        with naive:
            pass

    found = []
    for where in Interrupts([__file__]).everywhere(work):
        if not is_free(naive.lock, 0.2):
            found.append(where)
            naive.lock.release()
    assert any("__enter__" in where for where in found)


def test_an_error_inside_leaves_the_sections_around_it_their_lock() -> None:
    lock = locks.lock()

    @locks.section
    def section(work: Callable[[], bool]) -> bool:
        try:
            with lock:
                return work()
        except BaseException:
            locks.let_go(lock)
            raise

    def fails_inside() -> bool:
        with pytest.raises(ZeroDivisionError):
            section(lambda: 1 // 0 == 0)
        return lock._is_owned()

    assert section(fails_inside) and not lock._is_owned()


def gradient(x: Any, count: int = 4) -> np.ndarray:
    with tg.GradientTape() as tape:
        tape.watch(x)
        h = x
        for _ in range(count):
            h = tg.softmax(h) * 1.5
        y = tg.sum(h)
        del h
    return np.array(tape.gradient(y, x))


def within(x: Any, limit: int) -> tuple[np.ndarray, int]:
    with tg.memory_budget(limit) as m:
        found = gradient(x)
    return found, m.peak_bytes


def live() -> int:
    with tg.measure() as m:
        return m.live_bytes


@pytest.fixture
def quiet() -> Iterator[None]:
    """Nothing of another test may be freed while bytes are counted."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


MODULES = [
    "core.locks",
    "memory.budget.guard",
    "memory.ledger.ledger",
    "memory.budget.manager",
    "memory.budget.budget",
    "core.account",
    "core.buffer",
    "engine.evaluate",
    "engine.executor",
    "memory.budget.storages",
]


@pytest.mark.parametrize("module", MODULES)
def test_an_interrupt_anywhere_leaves_the_next_step_as_it_would_be(module: str, quiet: None) -> None:
    """At each line of what counts, limits and drops: no lock stays held, no budget in force, no byte miscounted."""
    gc.collect()
    x = c64(np.random.default_rng(1).normal(size=(SIDE, SIDE)))
    wanted, base = gradient(x), live()
    limit = base + 6 * UNIT  # one value is dropped
    assert within(x, limit)[1] <= limit
    path = sys.modules[f"tapegrad.{module}"].__file__
    locked = [MANAGER._lock, MANAGER._storages.guard._lock, LEDGER._lock]
    count = 0
    for where in Interrupts([str(path)]).everywhere(lambda: within(x, limit)):
        count += 1
        assert all(map(is_free, locked)), where
        assert account.current is account.NOBODY, where
        assert thread.recorders == () and thread.deferring is None, where
        assert live() == base and not LEDGER.promised_bytes and LEDGER.room == float("inf"), where
        if count % 8 == 0:
            others: list[Any] = []
            other = threading.Thread(target=lambda into=others: into.append(within(x, limit)))
            other.start(), other.join(20)
            for found, peak in (within(x, limit), *others):
                assert np.array_equal(found, wanted) and peak <= limit, where
            assert others, where
    assert count > 10


# Forks ------------------------------------------------------------------------------------------------------------

FORKED = """
import os, sys, threading, time, warnings
import numpy as np
import tapegrad as tg
warnings.filterwarnings("error")
warnings.filterwarnings("ignore", message=".*fork.*", category=DeprecationWarning)  # Python 3.12 on: threads are here

def gradient(x):
    with tg.GradientTape() as tape:
        tape.watch(x)
        h = x
        for _ in range(10):
            h = tg.tanh(tg.softmax(h) @ x) * 1.5 + tg.random.normal((64, 64), dtype="float64") * 0
        y = tg.sum(h)
        del h
    return np.array(tape.gradient(y, x))

xs = [tg.asarray(np.random.default_rng(i).normal(size=(64, 64))) for i in range(3)]
wanted = [gradient(x) for x in xs]
over = threading.Event()
failed = []

def work(i):
    try:
        while not over.is_set():
            assert np.array_equal(gradient(xs[i]), wanted[i])
    except BaseException as e:
        failed.append(e)

sys.setswitchinterval(1e-5)
unit = 64 * 64 * 8
with tg.memory_budget(300 * unit) as m:
    live = m.live_bytes
with tg.memory_budget(limit := live + 60 * unit) as m:
    threads = [threading.Thread(target=work, args=(i,), daemon=True) for i in range(2)]
    for t in threads:
        t.start()
    good = 0
    for n in range(16):
        time.sleep(0.01 + 0.003 * n)
        child = os.fork()
        if child == 0:
            code = 1
            try:
                for t in (0, 2):
                    assert np.array_equal(gradient(xs[t]), wanted[t])
                inner = []
                other = threading.Thread(target=lambda: inner.append(np.array_equal(gradient(xs[1]), wanted[1])))
                other.start(); other.join(30)
                with tg.memory_budget(limit) as mine:
                    assert np.array_equal(gradient(xs[2]), wanted[2]) and mine.peak_bytes <= limit
                code = 0 if inner == [True] and m.peak_bytes <= limit else 2
            finally:
                os._exit(code)
        end = time.monotonic() + 60
        while time.monotonic() < end:
            pid, status = os.waitpid(child, os.WNOHANG)
            if pid:
                good += os.waitstatus_to_exitcode(status) == 0
                break
            time.sleep(0.01)
        else:
            os.kill(child, 9)
    over.set()
    for t in threads:
        t.join(60)
    assert not failed, failed
print(good, "of 16", m.peak_bytes <= limit)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
def test_children_forked_while_threads_work_under_a_budget_finish() -> None:
    ran = subprocess.run([sys.executable, "-c", FORKED], capture_output=True, text=True, timeout=300)
    assert ran.stdout.split("\n")[0] == "16 of 16 True", ran.stdout + ran.stderr


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
def test_all_locks_are_free_in_a_child_but_those_of_the_thread_that_forked() -> None:
    code = """
import os, threading
from tapegrad.core import locks
mine, others, told = locks.lock(), locks.lock(), []
locks.in_child(lambda: told.append(os.getpid()))
held, over = threading.Event(), threading.Event()
def hold():
    with others:
        held.set(); over.wait(20)
t = threading.Thread(target=hold, daemon=True); t.start(); held.wait(20)
with mine:
    child = os.fork()
    if child == 0:
        free = others.acquire(timeout=5)
        os._exit(0 if free and mine._is_owned() and told == [os.getpid()] else 1)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
over.set()
os._exit(code)
"""
    ran = subprocess.run([sys.executable, "-W", "ignore::DeprecationWarning", "-c", code], timeout=60)
    assert ran.returncode == 0
