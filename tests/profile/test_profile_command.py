"""`tapegrad profile` from outside: output, exit codes, and the run file however the program ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tapegrad.tracing.file import load
from tapegrad.tracing.run import Run

pytestmark = pytest.mark.sampled(1 / 2)

TRAIN = """
import os, signal, sys, time
import numpy as np
import tapegrad as tg

rng = np.random.default_rng(0)
ws = [tg.Variable(rng.normal(size=(64, 64)).astype("f4") / 8, name=f"w{i}") for i in range(4)]
x = tg.asarray(rng.normal(size=(128, 64)).astype("f4"))

def block(x, w):
    h = tg.tanh(x @ w)
    return x + h * tg.sigmoid(h)

def forward(x):
    for w in ws:
        x = block(x, w)
    return tg.mean(x * x)

what = sys.argv[1] if len(sys.argv) > 1 else ""
for i in range(3):
    with tg.GradientTape() as tape:
        loss = forward(x)
    for w, g in zip(ws, tape.gradient(loss, ws)):
        w.assign_sub(0.1 * g)
    print("loss", float(loss), flush=True)
    if i == 1:
        if what == "exception": raise ValueError("broken on purpose")
        if what == "exit": sys.exit(7)
        if what == "oom":
            with tg.memory_budget("150KiB"), tg.GradientTape() as tape:
                forward(x)
        if what == "wait":
            if len(sys.argv) > 2: os.kill(os.getpid(), signal.SIGUSR2)
            print("ready", flush=True)
            time.sleep(60)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "train.py").write_text(TRAIN)
    return tmp_path


def environment() -> dict[str, str]:
    return {k: v for k, v in os.environ.items() if k != "COLUMNS"} | {"NO_COLOR": "1", "XDG_RUNTIME_DIR": ""}


def profile(folder: Path, *args: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "error", "-m", "tapegrad", "profile", *args]
    return subprocess.run(command, cwd=folder, env=environment(), capture_output=True, text=True, timeout=60)


def the_run(folder: Path) -> Run:
    [path] = folder.glob("tapegrad-train.*.sqlite")
    return load(path)


def test_a_run_is_recorded_saved_and_told(folder: Path) -> None:
    plain = subprocess.run([sys.executable, "train.py"], cwd=folder, capture_output=True, text=True, timeout=60)
    found = profile(folder, "train.py")
    assert found.returncode == 0, found.stderr
    run = the_run(folder)
    assert found.stdout.startswith(plain.stdout)
    assert str(run.peak["bytes"]) in found.stdout
    for word in ("activation", "parameter", "total", "train.py:", "tapegrad report tapegrad-train.", "--html"):
        assert word in found.stdout
    assert "step 0" in found.stderr and "\x1b" not in found.stdout + found.stderr
    assert max(map(len, found.stdout.splitlines())) <= 80
    assert run.count("steps") == 3 and run.meta["argv"] == ["train.py"] and run.meta["outcome"]["kind"] == "finished"


@pytest.mark.slow
def test_quiet_is_quiet_and_the_file_is_where_it_is_wanted(folder: Path) -> None:
    plain = subprocess.run([sys.executable, "train.py"], cwd=folder, capture_output=True, text=True, timeout=60)
    found = profile(folder, "-q", "-o", "mine.sqlite", "--steps", "1", "--warmup", "1", "--", "train.py")
    assert (found.returncode, found.stdout, found.stderr) == (0, plain.stdout, "")
    assert load(folder / "mine.sqlite").count("steps") == 1
    again = profile(folder, "-o", "mine.sqlite", "train.py")
    assert again.returncode == 2 and "exists" in again.stderr and "-f" in again.stderr and again.stdout == ""
    assert (
        profile(folder, "-q", "-f", "-o", "mine.sqlite", "--stacks", "full", "--gradients", "train.py").returncode == 0
    )
    run = load(folder / "mine.sqlite")
    assert run.meta["stacks"] == "full" and run.count("gradients") == 12 and max(run.stacks["parent"]) >= 0


def test_exceptions_keep_their_traceback_without_ours(folder: Path) -> None:
    plain = subprocess.run(
        [sys.executable, "train.py", "exception"], cwd=folder, capture_output=True, text=True, timeout=60
    )
    found = profile(folder, "train.py", "exception")
    assert (found.returncode, plain.returncode) == (1, 1)
    trace = found.stderr[found.stderr.index("Traceback") :]
    assert trace == plain.stderr
    message = "ValueError: broken on purpose"
    assert the_run(folder).meta["outcome"] == {"kind": "exception", "code": 1, "message": message}


def test_the_exit_code_is_the_programs(folder: Path) -> None:
    found = profile(folder, "train.py", "exit")
    assert found.returncode == 7 and "Traceback" not in found.stderr
    assert the_run(folder).meta["outcome"]["code"] == 7


def test_out_of_memory_is_explained_before_the_traceback(folder: Path) -> None:
    found = profile(folder, "train.py", "oom")
    assert found.returncode == 1
    assert 0 < found.stderr.index("Out of memory") < found.stderr.index("Traceback")
    run = the_run(folder)
    assert run.meta["outcome"]["kind"] == "oom" and 1 in run.marks["kind"]


@pytest.mark.skipif(os.name != "posix", reason="signals of POSIX systems")
def test_interrupted_and_asked_for_on_the_way(folder: Path) -> None:
    command = [sys.executable, "-m", "tapegrad", "profile", "-o", "run.sqlite", "train.py", "wait", "dump"]
    process = subprocess.Popen(
        command,
        cwd=folder,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # A shell's background job, which a test run may be, hands on that it ignores the signal.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    assert process.stdout is not None
    for line in process.stdout:
        if line == "ready\n":
            break
    until = time.monotonic() + 20
    while not (folder / "run.sqlite").exists() and time.monotonic() < until:
        time.sleep(0.05)
    assert load(folder / "run.sqlite").meta["outcome"]["kind"] == "running"
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=30)
    assert process.returncode == 130 and "KeyboardInterrupt" in err
    run = load(folder / "run.sqlite")
    assert run.meta["outcome"]["kind"] == "interrupted" and run.count("steps") == 2 and str(run.peak["bytes"]) in out


def test_modules_budgets_checks_and_sources(folder: Path) -> None:
    found = profile(folder, "--budget", "1MiB", "--check", "--no-source", "-m", "train")
    assert found.returncode == 0, found.stderr
    run = the_run(folder)
    assert run.meta["module"] == "train" and run.peak["bytes"] <= 1 << 20 and run.sources == {}
    assert run.checks["checked"] >= 3 and run.checks["drift_bytes"] == 0
    text = json.dumps(run.tables)
    assert "sigmoid(h)" not in text


@pytest.mark.sampled(1 / 4)
@pytest.mark.parametrize(
    ("args", "said"),
    [
        ((), "Missing argument"), (("none.py",), "no such file"), (("-m", "no_such_module_x"), "no such module"),
        (("--budget", "much", "train.py"), "much"), (("--steps", "0", "train.py"), "0"),
        (("--plan", "none.json", "train.py"), "none.json"), (("-o", "no/where.sqlite", "train.py"), "does not exist"),
        (("--limit", "1GiB", "train.py"), "--budget"), (("--stepps", "3", "train.py"), "--stepps"),
    ],
)  # fmt: skip
def test_wrong_usage_is_one_message_on_stderr_and_runs_nothing(folder: Path, args: tuple[str, ...], said: str) -> None:
    found = profile(folder, *args)
    assert found.returncode in (1, 2) and found.stdout == "" and said in found.stderr
    assert "Traceback" not in found.stderr and not list(folder.glob("*.sqlite"))


ODD = {
    "forks": ("pid = os.fork()\nif pid == 0: sys.exit(3)\nos.waitpid(pid, 0)", 0, ""),
    "moves": ("os.chdir('/')", 0, ""),
    "cannot say why": ("class E(Exception):\n    def __str__(self): raise KeyError\nraise E", 1, "E"),
    "closes stdout": ("sys.stdout.close()", 0, ""),
    "catches stderr": ("import io; sys.stderr = io.StringIO()", 0, ""),
    "loses the folder": (
        "import shutil; os.chdir('/'); shutil.rmtree(sys.argv[1])\nraise ValueError('its own')",
        1,
        "its own",
    ),
}


@pytest.mark.sampled(1 / 4)
@pytest.mark.skipif(os.name != "posix", reason="fork, and removing a folder in use")
@pytest.mark.parametrize("what", ODD)
def test_whatever_a_program_does_the_run_is_its_own(what: str, tmp_path: Path) -> None:
    text, code, said = ODD[what]
    folder = tmp_path / "folder"
    folder.mkdir()
    work = "import os, sys\nimport tapegrad as tg\nx = tg.ones((100, 100)) @ tg.ones((100, 100))\n"
    (folder / "train.py").write_text(work + text + "\n")
    found = profile(folder, "-o", "run.sqlite", "train.py", str(folder))
    assert found.returncode == code and said in found.stderr, found.stderr
    assert found.stdout.count("Peak ") == (0 if what == "closes stdout" else 1)
    if what == "loses the folder":
        assert "cannot be written" in found.stderr
        rescued = Path(found.stderr.split("the run is in ")[1].split("\n")[0])
        assert load(rescued).meta["outcome"]["code"] == code
        rescued.unlink()
        rescued.parent.rmdir()
    else:
        run = load(folder / "run.sqlite")
        assert run.peak["bytes"] >= 3 * 40_000 and run.meta["outcome"]["code"] == code


@pytest.mark.skipif(os.name != "posix", reason="a pipe that is closed early")
def test_a_reader_who_has_had_enough_is_no_failure(folder: Path) -> None:
    command = f"{sys.executable} -m tapegrad profile train.py | head -4; exit ${{PIPESTATUS[0]}}"
    found = subprocess.run(
        ["bash", "-c", command], cwd=folder, env=environment(), capture_output=True, text=True, timeout=60
    )
    assert found.returncode == 0 and "Traceback" not in found.stderr and "BrokenPipe" not in found.stderr
    assert the_run(folder).count("steps") == 3


def test_steps_are_told_with_their_peaks_also_where_recording_begins(folder: Path) -> None:
    found = profile(folder, "--warmup", "1", "train.py")
    run = the_run(folder)
    peaks = [line.split("peak ")[1] for line in found.stderr.splitlines() if "peak " in line]
    assert len(peaks) == 2 and run.count("steps") == 2 and float(peaks[0].split()[0]) > 500


@pytest.mark.slow
def test_a_higher_peak_after_the_recording_is_told(folder: Path) -> None:
    (folder / "train.py").write_text(TRAIN + "big = tg.ones((512, 512)) + tg.ones((512, 512)); big.numpy()\n")
    assert "a higher peak of " in profile(folder, "--steps", "1", "train.py").stderr
    assert "a higher peak of " not in profile(folder, "-f", "-o", "all.sqlite", "train.py").stderr
