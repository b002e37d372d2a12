"""The journal on disk: what is read from it equals what the session knows, at any moment and however it was cut."""

from __future__ import annotations

import errno
import json
import mmap
import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

import tapegrad as tg
from tapegrad.memory.ledger import spool as spools
from tapegrad.profile.cli import main
from tapegrad.profile.recorder import Session, session
from tapegrad.profile.recorder.recovered import recover
from tapegrad.profile.runs import Run, load
from tapegrad.profile.runs.file import RunFileError, to_json

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


def watched(program: Callable[..., None], path: Path, **options: Any) -> tuple[Session, list[tuple[Run, bytes]]]:
    """The session, and at each look the run as the session has it, with the bytes on disk."""
    seen: list[tuple[Run, bytes]] = []
    s = Session(gradients=True, **options)
    s.write_to(path, {"meta": META, "host": "elsewhere"})
    s.start()
    try:
        program(lambda: seen.append((s.run(LIVE, source=False), path.read_bytes())))
    finally:
        s.stop()
        seen.append((s.run(LIVE, source=False), path.read_bytes()))
    return s, seen


def same(found: Run, expected: Run) -> None:
    one, other = to_json(found), to_json(expected)
    assert one["meta"].pop("outcome")["kind"] == "killed"
    other["meta"].pop("outcome")
    for key in other:
        assert one[key] == other[key], key


@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("stacks", ["line", "full", "none"])
def test_what_is_on_disk_is_what_was_recorded(program: Callable[..., None], stacks: str, tmp_path: Path) -> None:
    _, seen = watched(program, tmp_path / "j", stacks=stacks)
    assert len(seen) > 2 and len({len(run.ops["seq"]) for run, _ in seen}) > 1
    for run, data in seen:
        same(recover(data, "j"), run)


def test_a_change_that_is_not_written_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spools.Spool, "used", lambda *_: None)
    run, data = watched(plain, tmp_path / "j")[1][0]
    with pytest.raises(AssertionError, match="allocs"):
        same(recover(data, "j"), run)


@pytest.mark.parametrize("amid", [False, True])
def test_a_long_journal_is_shortened(amid: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the program's steps, or amid a forward pass, where values and calls are under way."""
    monkeypatch.setattr(session, "LEAST_TO_SHORTEN", 0)
    monkeypatch.setattr(spools, "WINDOW", 1 << 14)
    ws, path = weights(), tmp_path / "j"

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

    s, seen = watched(program, path, keep=500)
    assert s.journal.parts.dropped > 1000
    whole = path.stat().st_size
    assert whole < 200_000
    for run, data in seen:
        found = recover(data, "j")
        assert (found.count("steps") - amid) % 20 == 0  # one is under way
        for table in ("steps", "marks", "samples"):  # of steps that are dropped it may know more
            for column in found.tables[table].keys() - {"peak_seq"}:
                assert found.tables[table][column] == run.tables[table][column], (table, column)
        kept = set(zip(run.allocs["begin_seq"], run.allocs["end_seq"], run.allocs["bytes"]))
        assert kept <= set(zip(found.allocs["begin_seq"], found.allocs["end_seq"], found.allocs["bytes"]))
        assert found.peak == run.peak
    assert sorted(os.listdir(tmp_path)) == ["j"]


def test_a_journal_that_was_cut_or_damaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spools, "WINDOW", 1 << 14)
    _, seen = watched(captured, tmp_path / "j")
    run, data = seen[-1]
    used = len(data.rstrip(b"\0"))
    chance = random.Random(0)
    least = 0
    for at in sorted(chance.randrange(used) for _ in range(60)):
        try:  # what came before the cut is there
            found = recover(data[:at], "j")
        except RunFileError:
            assert at < 4000
            continue
        assert len(found.ops["seq"]) >= least and found.ops["seq"] == run.ops["seq"][: len(found.ops["seq"])]
        least = len(found.ops["seq"])
    assert least > 100
    for _ in range(300):
        bad = bytearray(data)
        bad[chance.randrange(used)] ^= 1 << chance.randrange(8)
        try:
            recover(bytes(bad), "j")
        except RunFileError as error:
            assert "\n" not in str(error) and str(error).startswith("j: ")


def test_a_full_disk_does_not_stop_the_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spools, "WINDOW", 1 << 14)
    told: list[str] = []
    room = [1]

    def allocate(fd: int, at: int, nbytes: int) -> None:
        room[0] -= 1
        if room[0] < 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        os.ftruncate(fd, at + nbytes)

    monkeypatch.setattr(os, "posix_fallocate", allocate)
    _, seen = watched(plain, tmp_path / "j", warn=told.append)
    assert len(told) == 1 and "No space left on device" in told[0]
    run, data = seen[-1]
    assert len(data) == 1 << 14
    found = recover(data, "j")
    known, all_of_them = found.ops["seq"], run.ops["seq"]
    assert known == all_of_them[: len(known)] and 0 < len(known) < len(all_of_them)


def test_windows_are_there_before_they_are_used_where_none_can_be_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on macOS and Windows; windows so small that Python would write them later."""
    monkeypatch.delattr(os, "posix_fallocate", raising=False)
    monkeypatch.setattr(spools, "WINDOW", mmap.ALLOCATIONGRANULARITY)
    s, seen = watched(plain, tmp_path / "j")
    assert s.spool is not None and not s.spool.problem and s.spool.size > mmap.ALLOCATIONGRANULARITY
    run, data = seen[-1]
    same(recover(data, "j"), run)


@pytest.mark.parametrize("lacks", [0, 1])
def test_a_record_may_take_a_whole_window(lacks: int, tmp_path: Path) -> None:
    """Behind it there must be room for the tag that leads to the next window."""
    name = "n" * (spools.WINDOW - spools.LAYOUTS[spools.TEXT].size - lacks)

    def program(look: Callable[[], None]) -> None:
        with tg.memory.scope(name):
            tg.ones(2) + 1
        look()
        loss_and_gradients(weights())

    s, seen = watched(program, tmp_path / "j")
    assert s.spool is not None and s.spool.size == 3 * spools.WINDOW
    for run, data in seen:
        same(recover(data, "j"), run)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_child_leaves_the_journal_alone(tmp_path: Path) -> None:
    def program(look: Callable[[], None]) -> None:
        ws = weights()
        loss_and_gradients(ws)
        child = os.fork()
        if not child:
            try:
                loss_and_gradients(ws)
            finally:
                os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        look()
        loss_and_gradients(ws)

    for run, data in watched(program, tmp_path / "j")[1]:
        same(recover(data, "j"), run)


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
big = tg.zeros((1000, 1000)) + 1
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
    assert profiled("-o", "whole.json", "train.py", "whole") == 0
    assert profiled("-o", "killed.json", "train.py", "killed") == -signal.SIGKILL
    assert sorted(os.listdir()) == ["killed.json.journal", "train.py", "whole.json"]
    whole, killed = load("whole.json"), load("killed.json")
    for table in ("allocs", "ops", "steps"):
        for column in whole.tables[table]:
            if not column.endswith("_ns") and column not in ("ns", "end_seq"):
                assert killed.tables[table][column] == whole.tables[table][column], (table, column)
    assert killed.sources == whole.sources and set(killed.sources) == {str(folder / "train.py")}
    for figure in ("bytes", "seq", "step"):  # the pool was last asked at the end of a step
        assert killed.peak[figure] == whole.peak[figure]
    assert killed.meta["outcome"] == {
        "kind": "killed", "code": 137,
        "message": "killed: it ended without writing its run file; this is what its journal holds",
    }  # fmt: skip
    found = CliRunner().invoke(main, ["report", "killed.json"])
    assert found.exit_code == 0 and found.output.startswith("killed: it ended without")
    assert "train.py:12" in found.output
    page = CliRunner().invoke(main, ["report", "killed.json", "--html", "killed.html"])
    assert page.exit_code == 0 and Path("killed.html").stat().st_size > 10_000


@needs_signals
def test_a_journal_of_another_run_is_not_overwritten(folder: Path) -> None:
    assert profiled("-o", "run.json", "train.py", "killed") == -signal.SIGKILL
    found = CliRunner().invoke(main, ["profile", "-o", "run.json", "train.py", "whole"])
    assert found.exit_code == 2 and "run.json.journal exists" in found.output
    assert profiled("-f", "-o", "run.json", "train.py", "whole") == 0
    assert sorted(os.listdir()) == ["run.json", "train.py"] and load("run.json").finished


@needs_signals
def test_without_source_nothing_of_it_is_shown(folder: Path) -> None:
    assert profiled("--no-source", "-o", "run.json", "train.py", "killed") == -signal.SIGKILL
    assert load("run.json").sources == {}


def test_a_running_program_can_be_looked_at(folder: Path) -> None:
    text = PROGRAM.replace("os.kill(", "print('there', flush=True); sys.stdin.read(); os.kill(")
    Path("train.py").write_text(text)
    command = [sys.executable, "-m", "tapegrad", "profile", "-o", "run.json", "train.py", "whole"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as program:
        assert program.stdout is not None and program.stdout.readline() == "there\n"
        run = load("run.json")
        program.communicate("", timeout=60)
    assert run.meta["outcome"]["kind"] == "running" and run.peak["bytes"] == load("run.json").peak["bytes"]
    assert json.dumps(run.meta["outcome"]["message"]).startswith('"it is still running')
