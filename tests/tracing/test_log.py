"""The file that a program appends to: at any moment it holds what the session knows, however the program ends."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

import tapegrad as tg
from tapegrad.profile.cli import main
from tapegrad.profile.recorder import Session
from tapegrad.tracing import log as logs
from tapegrad.tracing.file import load, save
from tapegrad.tracing.log import Log
from tapegrad.tracing.run import COLUMNS, Run
from tests.profile import made_runs

pytestmark = pytest.mark.sampled(1 / 2)

META: dict[str, Any] = {"tapegrad": "0", "program": "test", "argv": [], "device": {"name": "cpu"}}
LIVE = {**META, "outcome": {"kind": "running", "code": 0, "message": ""}}


def weights() -> list[tg.Variable]:
    chance = np.random.default_rng(0)
    return [tg.Variable(chance.normal(size=(64, 64)).astype("f4") / 8, name=f"w{i}") for i in range(3)]


def block(x: tg.Tensor, w: tg.Variable) -> tg.Tensor:
    with tg.memory.scope("inner"):
        h = tg.tanh(x @ w)
    return x + h * tg.sigmoid(h)


def loss_and_gradients(ws: list[tg.Variable], wrap: Any = lambda f: f) -> list[tg.Tensor]:
    with tg.GradientTape() as tape:
        y = tg.ones((512, 64))
        for w in ws:
            y = wrap(block)(y, w)
        loss = tg.mean(y * y)
    return tape.gradient(loss, ws)


def plain(look: Callable[[], None]) -> None:
    ws, optimizer = weights(), tg.optim.Adam(1e-3)
    for _ in range(3):
        gradients = loss_and_gradients(ws)
        look()
        optimizer.apply(gradients, ws)
        look()


def recomputed(look: Callable[[], None]) -> None:
    ws = weights()
    for _ in range(2):
        loss_and_gradients(ws, tg.recompute_grad)
        look()


def within_a_budget(look: Callable[[], None]) -> None:
    ws = weights()
    with tg.memory_budget(1_200_000):
        for _ in range(2):
            loss_and_gradients(ws)
            look()


def captured(look: Callable[[], None]) -> None:
    ws = weights()
    steps = [tg.function(lambda x, n=n: loss_and_gradients(ws[:n]) + [x]) for n in (3, 2)]
    for step in steps * 3:
        held = step(tg.ones((512, 64)))
        look()
    del held


def in_the_middle(look: Callable[[], None]) -> None:
    with tg.GradientTape() as tape:
        x = tg.Variable(np.ones((512, 64), "f4"))
        y = tg.tanh(x @ tg.ones((64, 64)))
        look()
        loss = tg.sum(y * y)
        look()
    tape.gradient(loss, x)
    tg.memory.predict_peak(loss_and_gradients, weights())
    look()


PROGRAMS = [plain, recomputed, within_a_budget, captured, in_the_middle]


def session_to(path: Path, **options: Any) -> Session:
    session = Session(gradients=True, log=Log(path), **options)
    session.log.set("meta", {**META, "stacks": session.stacks})
    session.log.set("recording", {"host": "elsewhere"})
    return session


def watched(program: Callable[..., None], path: Path, **options: Any) -> tuple[Session, list[tuple[Run, Run]]]:
    """The session, and at each look the run as the session has it, with the one that the file holds."""
    seen: list[tuple[Run, Run]] = []
    s = session_to(path, **options)
    s.start()
    try:
        program(lambda: seen.append((s.run(LIVE, source=False), load(path))))
    finally:
        s.stop()
        seen.append((s.run(LIVE, source=False), load(path)))
    return s, seen


def assert_same(found: Run, expected: Run) -> None:
    assert found.meta.pop("outcome")["kind"] == "killed"
    assert expected.meta.pop("outcome")["kind"] == "running"
    for table in expected.tables:
        assert found.tables[table] == expected.tables[table], table
    assert found == expected


@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("stacks", ["line", "full", "none"])
def test_the_file_holds_what_was_recorded(program: Callable[..., None], stacks: str, tmp_path: Path) -> None:
    _, seen = watched(program, tmp_path / "j", stacks=stacks)
    assert len(seen) > 2 and len({len(run.ops["seq"]) for run, _ in seen}) > 1
    for run, found in seen:
        assert_same(found, run)
    assert os.listdir(tmp_path) == ["j"]


def test_rows_are_written_without_being_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After some time, and at a large allocation, at the next of which the system may kill the program."""
    ws = weights()
    monkeypatch.setattr(Log, "INTERVAL", 1 << 62)
    session = session_to(tmp_path / "j")
    session.start()
    loss_and_gradients(ws)
    before = load(tmp_path / "j").count("allocs")
    large = tg.zeros((4096, 4096)) + 1
    large.numpy()
    after = load(tmp_path / "j")
    assert after.count("allocs") > before + 10 and after.allocs["bytes"][-1] == 64 << 20
    monkeypatch.setattr(Log, "INTERVAL", 0)
    session.log.due = 0
    loss_and_gradients(ws)
    session.log.due = 0
    tg.exp(ws[0])
    assert load(tmp_path / "j").count("allocs") > after.count("allocs") + 10
    session.stop()


@pytest.mark.parametrize("amid", [False, True])
def test_the_file_of_a_long_program_does_not_grow(amid: bool, tmp_path: Path) -> None:
    """Between the program's steps, or amid a forward pass, where values and calls are under way."""
    ws, path = weights(), tmp_path / "j"
    sizes = []

    def marking(f: Callable[..., tg.Tensor]) -> Callable[..., tg.Tensor]:
        def marked(y: tg.Tensor, w: tg.Variable) -> tg.Tensor:
            if w is ws[1]:
                tg.memory.step()
            return f(y, w)

        return marked

    def program(look: Callable[[], None]) -> None:
        for i in range(60):
            if amid:
                loss_and_gradients(ws, marking)
            else:
                loss_and_gradients(ws, tg.recompute_grad if i % 2 else lambda f: f)
                tg.memory.step()
            if i % 20 == 19:
                look()
                sizes.append(path.stat().st_size)

    _, seen = watched(program, path, keep=500)
    assert seen[-1][0].checks["dropped"] > 1000 and sizes[2] < 1.3 * sizes[0]
    for run, found in seen:
        assert (found.count("steps") - amid) % 20 == 0  # one is under way
        assert_same(found, run)


def test_a_reader_does_not_stop_the_program_and_nothing_is_lost(tmp_path: Path) -> None:
    def program(look: Callable[[], None]) -> None:
        ws = weights()
        with closing(sqlite3.connect(tmp_path / "j")) as reader:
            reader.execute("BEGIN")
            reader.execute("SELECT count(*) FROM ops").fetchall()
            for _ in range(3):
                loss_and_gradients(ws)
                tg.memory.step()
                s.flush()
            assert not load(tmp_path / "j").count("ops")
        look()

    seen = []
    s = session_to(tmp_path / "j")
    s.start()
    program(lambda: seen.append((s.run(LIVE, source=False), load(tmp_path / "j"))))
    s.stop()
    assert s.log.problem == ""
    assert_same(*reversed(seen[0]))


def test_writes_that_take_long_are_tried_seldom(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a file that another process reads, or a slow disk, would have each event try again."""
    ws, tries = weights(), []

    def slow(*_: Any) -> None:
        tries.append(0)
        time.sleep(0.01)
        with (
            closing(sqlite3.connect(tmp_path / "locked")) as one,
            closing(sqlite3.connect(tmp_path / "locked", timeout=0)) as other,
        ):
            one.execute("BEGIN EXCLUSIVE")
            other.execute("BEGIN EXCLUSIVE")  # raises as where another process reads

    s = session_to(tmp_path / "j")
    monkeypatch.setattr(Log, "INTERVAL", 1)
    s.start()
    with monkeypatch.context() as patched:
        patched.setattr(logs, "write", slow)
        for _ in range(10):
            loss_and_gradients(ws)
    s.stop()
    run = s.run(LIVE, source=False)
    assert 0 < len(tries) < run.checks["events"] / 10


def test_a_reader_that_stays_lets_nothing_be_deleted_by_halves(tmp_path: Path) -> None:
    """Steps that need not be kept are deleted after it has gone."""
    ws, path = weights(), tmp_path / "j"
    s = session_to(path, keep=300)
    s.start()
    with closing(sqlite3.connect(path)) as reader:
        reader.execute("BEGIN")
        reader.execute("SELECT count(*) FROM ops").fetchall()
        for _ in range(8):
            loss_and_gradients(ws)
            tg.memory.step()
    assert s.run(LIVE, source=False).checks["dropped"] == 0
    for _ in range(8):
        loss_and_gradients(ws)
        tg.memory.step()
    s.stop()
    run = s.run(LIVE, source=False)
    assert run.checks["dropped"] > 300 and not s.log.problem
    assert_same(load(path), run)


def test_what_ends_while_nothing_is_recorded_has_an_end_also_beside_a_reader(tmp_path: Path) -> None:
    held = [tg.ones((40, 40)) + 1]
    held[0].numpy()
    s = session_to(tmp_path / "j")
    s.start()
    with closing(sqlite3.connect(tmp_path / "j")) as reader:
        reader.execute("BEGIN")
        reader.execute("SELECT count(*) FROM ops").fetchall()
        tg.memory.predict_peak(lambda x: held.clear() or tg.exp(x), tg.ones(3), least=False)
        (tg.ones(2) + 1).numpy()
    s.stop()
    a = s.run(LIVE, source=False).allocs
    ends = [end for end, n in zip(a["end_seq"], a["requested"]) if n == 6400]
    assert ends and min(ends) >= 0


def test_values_that_are_read_and_end_while_nothing_is_recorded_have_readings_and_ends(tmp_path: Path) -> None:
    """After their rows were written: neither update undoes the other, whichever kind came first."""
    held = [[tg.ones((40, 40)) + i] for i in (1, 2)]
    w = tg.ones((40, 2))
    for values in held:
        values[0].numpy()
    s = session_to(tmp_path / "j")
    s.start()
    s.flush()
    for values in held:
        if values is held[1]:
            with tg.GradientTape():
                (values[0] @ w).numpy()
        tg.memory.predict_peak(lambda x, values=values: values.clear() or tg.exp(x), w, least=False)
    s.stop()
    a = s.run(LIVE, source=False).allocs
    rows = [i for i, nbytes in enumerate(a["requested"]) if nbytes == 6400]
    assert len(rows) == 2 and all(a["end_seq"][i] >= 0 for i in rows)
    assert [a["last_forward_seq"][i] >= 0 for i in rows] == [False, True]


def test_a_full_disk_does_not_stop_the_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was written stays readable, and the session goes on in memory."""
    said: list[str] = []
    opened = logs.opened

    def small(path: Any, *args: Any, **kwargs: Any) -> sqlite3.Connection:
        database = opened(path, *args, **kwargs)
        if path is not None:
            database.execute("PRAGMA max_page_count = 33")
        return database

    monkeypatch.setattr(logs, "opened", small)
    s, seen = watched(plain, tmp_path / "j", warn=said.append)
    assert len(said) == 1 and "cannot be written any more (database or disk is full)" in said[0]
    monkeypatch.undo()
    assert s.run(LIVE, source=False).count("steps") == 3
    run, found = seen[-1]
    known, all_of_them = found.ops["seq"], run.ops["seq"]
    assert known == all_of_them[: len(known)] and len(known) < len(all_of_them)


@pytest.mark.parametrize("replaced", [False, True])
def test_a_file_that_the_program_removes_is_reported_and_not_written_again(replaced: bool, tmp_path: Path) -> None:
    said: list[str] = []
    path = tmp_path / "j"

    def program(look: Callable[[], None]) -> None:
        ws = weights()
        loss_and_gradients(ws)
        s.flush()
        path.unlink()
        if replaced:
            path.write_text("the program's own")
        loss_and_gradients(ws)
        tg.memory.step()

    s = session_to(path, warn=said.append)
    s.start()
    program(lambda: None)
    s.stop()
    assert len(said) == 1 and "what was recorded before is lost" in said[0]
    assert path.read_text() == "the program's own" if replaced else not path.exists()
    run = s.run(LIVE, source=False)
    assert run.count("ops") and all(run.text(name) for name in run.ops["name"])


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_child_leaves_the_file_alone(tmp_path: Path) -> None:
    def program(look: Callable[[], None]) -> None:
        ws = weights()
        loss_and_gradients(ws)
        child = os.fork()
        if not child:
            try:
                loss_and_gradients(ws)
                tg.memory.step()
            finally:
                os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        look()
        loss_and_gradients(ws)
        for _ in range(6):  # the child deletes no steps of its parent's file, either
            tg.memory.step()
            child = os.fork()
            if not child:
                for _ in range(9):
                    loss_and_gradients(ws)
                    tg.memory.step()
                os._exit(0)
            assert os.waitpid(child, 0)[1] == 0

    for run, found in watched(program, tmp_path / "j", keep=10_000)[1]:
        assert_same(found, run)
        assert run.checks["dropped"] == 0


@pytest.mark.skipif(os.name != "posix", reason="descriptors")
def test_a_program_may_close_all_files(tmp_path: Path) -> None:
    """In a process of its own, and open its own under their numbers: what is recorded does not end up in these."""
    text = """
import os, sys
import tapegrad as tg
x = tg.ones(1000) + 1
os.closerange(3, 100)
own = open("own", "w+b")
y = tg.ones(1000) * x
tg.memory.step()
os.fsync(own.fileno())
assert os.path.getsize("own") == 0
"""
    (tmp_path / "train.py").write_text(text)
    command = [sys.executable, "-m", "tapegrad", "profile", "-o", "run.sqlite", "train.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert load(tmp_path / "run.sqlite").finished


PROGRAM = """
import os, signal, sys
import tapegrad as tg
def layer(x):
    return tg.tanh(x) * x
x = tg.Variable(tg.ones((300, 300)))
for i in range(4):
    with tg.GradientTape() as tape:
        y = tg.sum(layer(x))
    g = tape.gradient(y, x)
    tg.memory.step()
big = tg.zeros((4096, 4096)) + 1
big.numpy()
os.kill(os.getpid(), signal.SIGKILL if sys.argv[1] == "killed" else 0)
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(PROGRAM)
    return tmp_path


needs_signals = pytest.mark.skipif(os.name != "posix", reason="signals of POSIX systems")


def profiled(*args: str) -> int:
    command = [sys.executable, "-m", "tapegrad", "profile", *args]
    return subprocess.run(command, capture_output=True, timeout=120).returncode


@needs_signals
def test_after_sigkill_report_shows_everything(folder: Path) -> None:
    """Up to the last large allocation, that is; smaller events are written ten times a second."""
    assert profiled("-o", "whole.sqlite", "train.py", "whole") == 0
    assert profiled("-o", "killed.sqlite", "train.py", "killed") == -signal.SIGKILL
    assert sorted(os.listdir()) == ["killed.sqlite", "train.py", "whole.sqlite"]
    whole, killed = load("whole.sqlite"), load("killed.sqlite")
    for table in ("allocs", "ops", "steps"):
        for column, target in COLUMNS[table].items():
            if not column.endswith("_ns") and column not in ("ns", "end_seq"):
                one, other = (
                    list(map(run.text, run.tables[table][column])) if target == "strings" else run.tables[table][column]
                    for run in (killed, whole)
                )
                assert one == other, (table, column)
    assert killed.sources == whole.sources and set(killed.sources) == {str(folder / "train.py")}
    for figure in ("bytes", "seq", "step"):  # the pool was last asked at the end of a step
        assert killed.peak[figure] == whole.peak[figure]
    assert killed.meta["outcome"] == {
        "kind": "killed", "code": 137,
        "message": "killed: it ended without completing its run file; this is what it had recorded",
    }  # fmt: skip
    found = CliRunner().invoke(main, ["report", "killed.sqlite"])
    assert found.exit_code == 0 and found.output.startswith("killed: it ended without")
    assert "train.py:12" in found.output
    page = CliRunner().invoke(main, ["report", "killed.sqlite", "--html", "killed.html"])
    assert page.exit_code == 0 and Path("killed.html").stat().st_size > 10_000


@needs_signals
def test_killed_in_the_middle_of_a_write_the_file_is_that_of_the_last_one(tmp_path: Path) -> None:
    """At each of the steps that SQLite takes to write, as its hook sees them."""
    text = """
import os, signal, sys
from tapegrad.tracing import log as logs
opened = logs.opened
steps = 0
def watched(path, *args, **kwargs):
    database = opened(path, *args, **kwargs)
    def count():
        global steps
        steps += 1
        if steps > int(sys.argv[1]):
            os.kill(os.getpid(), signal.SIGKILL)
    database.set_progress_handler(count, 20)
    return database
log = logs.Log("run.sqlite")
log.set("meta", {"tapegrad": "0", "program": "test", "argv": [], "device": {"name": "cpu"}})
log.set("recording", {"host": "elsewhere"})
log.flush()
logs.opened = watched
for chunk in range(5):
    for i in range(300):
        log.add("ops", 300 * chunk + i, 0, log.text(str(i)), 0, -1, -1, 512, 512, -1)
    log.flush()
"""
    (tmp_path / "write.py").write_text(text)
    counts = []
    for steps in (0, 40, 400, 1500, 2000, 2700):
        done = subprocess.run([sys.executable, "write.py", str(steps)], cwd=tmp_path, timeout=60)
        assert done.returncode == -signal.SIGKILL
        counts.append(load(tmp_path / "run.sqlite").count("ops"))
    assert all(n % 300 == 0 for n in counts) and counts == sorted(counts) and len(set(counts)) > 2, counts


@needs_signals
@pytest.mark.parametrize("again", ["log", "save"])
def test_what_a_killed_program_left_beside_its_file_is_not_applied_to_the_next_one(again: str, tmp_path: Path) -> None:
    text = """
import os, signal
from tapegrad.tracing import log as logs
from tapegrad.tracing.database import opened
log = logs.Log("run.sqlite")
for i in range(50_000):
    log.text("old " * 20 + str(i))
log.flush()
database = opened("run.sqlite")
database.execute("PRAGMA cache_size = 5")
database.execute("BEGIN EXCLUSIVE")
database.execute("UPDATE strings SET text = 'half'")
os.kill(os.getpid(), signal.SIGKILL)
"""
    (tmp_path / "killed.py").write_text(text)
    done = subprocess.run([sys.executable, "killed.py"], cwd=tmp_path, timeout=60)
    path = tmp_path / "run.sqlite"
    assert done.returncode == -signal.SIGKILL and (tmp_path / "run.sqlite-journal").exists()
    expected = made_runs.empty()
    if again == "save":
        save(expected, path)
    else:
        log = Log(path)
        log.set("meta", META)
        log.set("recording", {})
        log.flush()
    assert load(path).strings == expected.strings == []


@needs_signals
def test_a_signal_in_the_middle_of_a_flush_shifts_no_source_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The handler flushes, too, as that of ``tapegrad profile`` does."""
    s = session_to(tmp_path / "j")
    text, calls = s.log.text, [0]

    def interrupted(x: str) -> int:
        calls[0] += 1
        if calls[0] % 7 == 0:
            os.kill(os.getpid(), signal.SIGUSR2)
        return text(x)

    monkeypatch.setattr(s.log, "text", interrupted)
    before = signal.signal(signal.SIGUSR2, lambda *_: s.flush())
    s.start()
    try:
        x = tg.ones(3)
        for _ in range(2):
            first = tg.exp(x)
            second = tg.sin(first)
            third = tg.tanh(second)
        third.numpy()
    finally:
        s.stop()
        signal.signal(signal.SIGUSR2, before)
    run = s.run(LIVE)
    lines = {run.text(op): run.frame_of(stack)[1] for op, stack in zip(run.ops["name"], run.ops["stack"])}
    assert lines["sin"] == lines["exp"] + 1 == lines["tanh"] - 1
    frames = list(zip(*run.frames.values()))
    assert run.count("stacks") == len(frames) == len(set(frames))


@needs_signals
def test_a_file_of_another_run_is_not_overwritten(folder: Path) -> None:
    assert profiled("-o", "run.sqlite", "train.py", "killed") == -signal.SIGKILL
    found = CliRunner().invoke(main, ["profile", "-o", "run.sqlite", "train.py", "whole"])
    assert found.exit_code == 2 and "run.sqlite exists" in found.output
    assert profiled("-f", "-o", "run.sqlite", "train.py", "whole") == 0
    assert sorted(os.listdir()) == ["run.sqlite", "train.py"] and load("run.sqlite").finished


@needs_signals
def test_without_source_nothing_of_it_is_shown(folder: Path) -> None:
    assert profiled("--no-source", "-o", "run.sqlite", "train.py", "killed") == -signal.SIGKILL
    assert load("run.sqlite").sources == {}


def test_a_running_program_can_be_looked_at(folder: Path) -> None:
    text = PROGRAM.replace("os.kill(", "print('there', flush=True); sys.stdin.read(); os.kill(")
    Path("train.py").write_text(text)
    command = [sys.executable, "-m", "tapegrad", "profile", "-o", "run.sqlite", "train.py", "whole"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as program:
        assert program.stdout is not None and program.stdout.readline() == "there\n"
        run = load("run.sqlite")
        program.communicate("", timeout=60)
    assert run.meta["outcome"]["kind"] == "running" and run.peak["bytes"] == load("run.sqlite").peak["bytes"]
    assert json.dumps(run.meta["outcome"]["message"]).startswith('"it is still running')
