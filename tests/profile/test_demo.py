"""`tapegrad demo` from end to end, on a model small enough for a test; and its parts."""

from __future__ import annotations

import ast
import dataclasses
import io
import math
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from rich.console import Console

import tapegrad as tg
from tapegrad.device.threads import get_num_threads, set_num_threads
from tapegrad.profile import demo as demo_command
from tapegrad.profile import demo_capture, demo_model, demo_plot, demo_script, demo_text, demo_train
from tapegrad.profile.cli import main
from tapegrad.profile.demo_train import Demo, Run, Settings, identical

SMALL = Settings(steps=6, compared=4, rounds=2, batch=8, context=16, width=16, heads=2, blocks=2)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo_train, "QUICK", SMALL)


@pytest.fixture
def same_threads_afterwards() -> Iterator[None]:
    before = get_num_threads()
    yield
    set_num_threads(before)


@pytest.fixture(scope="module")
def text() -> demo_text.Text:
    return demo_text.load()


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["demo", "--quick", *arguments])


@pytest.mark.usefixtures("small")
def test_the_demo_shows_all_it_promises(tmp_path: Path) -> None:
    png = tmp_path / "memory.png"
    result = invoke("--png", str(png))
    assert result.exit_code == 0, result.output
    assert result.stderr == ""
    for wanted in (
        "parameters: 2 blocks, width 16, 2 heads, context 16; batches of 8",
        "plain: 6/6, loss ",
        "blocks under recompute_grad: 4/4, loss ",
        "attention under recompute_grad: 4/4, loss ",
        "nats per character",
        "timing all three in turns: 2/2",
        "under recompute_grad  ",
        "  activations  ",
        "gradients bit-identical: yes",
        "eager and captured in turns: 6/6",
        "tg.function  ",
        "  extra work  ",
        "captured steps bit-identical: yes",
        "(the losses of 6 steps, and every variable after them)",
        f"memory over one step: {png}",
    ):
        assert wanted in result.stdout
    assert png.read_bytes().startswith(b"\x89PNG")
    assert "\x1b" not in result.stdout


@pytest.mark.usefixtures("small")
def test_different_gradients_are_said_and_exit_with_1(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = demo_train.loss_and_gradients

    def slightly_wrong(model: Any, *batch: Any) -> Any:
        loss, gradients, variables = honest(model, *batch)
        if model.checkpoint == "attention":
            gradients[-1] = gradients[-1] * (1 + 2.0**-23)
        return loss, gradients, variables

    monkeypatch.setattr(demo_train, "loss_and_gradients", slightly_wrong)
    result = invoke()
    assert result.exit_code == 1
    assert "gradients bit-identical: NO" in result.stdout


@pytest.mark.usefixtures("small")
def test_captured_steps_that_differ_are_said_and_exit_with_1(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = demo_capture.Training.state

    def slightly_wrong(training: demo_capture.Training) -> list[bytes]:
        first, *others = honest(training)
        return [first[:-1] + bytes([first[-1] ^ (training.title == "captured")]), *others]

    monkeypatch.setattr(demo_capture.Training, "state", slightly_wrong)
    result = invoke()
    assert result.exit_code == 1
    assert "gradients bit-identical: yes" in result.stdout and "captured steps bit-identical: NO" in result.stdout


@pytest.mark.usefixtures("small")
def test_a_step_that_cannot_be_captured_is_said_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = demo_capture.loss_and_gradients

    def prying(model: Any, *batch: Any) -> Any:
        loss, gradients, variables = honest(model, *batch)
        float(loss)
        return loss, gradients, variables

    monkeypatch.setattr(demo_capture, "loss_and_gradients", prying)
    result = invoke()
    assert result.exit_code == 1 and "Error: " in result.stderr and "Traceback" not in result.output


@pytest.mark.usefixtures("small")
def test_nothing_is_captured_where_that_is_turned_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TAPEGRAD_FUNCTION", "0")
    result = invoke()
    assert result.exit_code == 0, result.output
    assert "captured steps: turned off by TAPEGRAD_FUNCTION=0" in result.stdout and "arena" not in result.stdout


@pytest.mark.usefixtures("small")
def test_a_script_to_profile_and_what_to_type(tmp_path: Path) -> None:
    folder = tmp_path / "a trial"
    for _ in range(2):  # its own file may be there
        result = invoke(str(folder))
        assert result.exit_code == 0 and result.stderr == "", result.output
    lines = result.stdout.splitlines()
    assert lines[-6] == f"wrote {folder / 'train.py'}; where do its bytes go, and what would help?"
    assert lines[-5] == f"  cd '{folder}'"
    commands = ("profile", "report", "plan", "profile")
    assert [line.split()[:2] for line in lines[-4:]] == [["tapegrad", c] for c in commands]
    assert lines[-3].endswith("--html") and "--budget" in lines[-2] and lines[-1].endswith("train.py --captured")
    assert (folder / "train.py").read_text() == Path(demo_script.__file__).read_text()
    (folder / "train.py").write_text("mine")
    result = invoke(str(folder))
    assert result.exit_code == 1 and result.stdout == "" and "is another file; move it away" in result.stderr
    assert (folder / "train.py").read_text() == "mine"
    assert invoke(str(folder / "train.py")).exit_code == 2


def test_the_script_runs_by_itself_and_captured_alike(tmp_path: Path) -> None:
    script = demo_command.write_script(tmp_path)
    printed = []
    for how in ((), ("--captured",)):
        result = subprocess.run(
            [sys.executable, "-W", "error", script.name, "--steps", "3", "--batch", "2", *how],
            cwd=tmp_path, capture_output=True, text=True, timeout=120,
        )  # fmt: skip
        assert result.returncode == 0, result.stderr
        printed.append(result.stdout)
    assert printed[0] == printed[1]
    lines = printed[0].splitlines()
    assert [line.rpartition(" ")[0] for line in lines] == [f"step {i}: loss" for i in (1, 2, 3)]
    losses = [float(line.rpartition(" ")[2]) for line in lines]
    assert 2 < losses[1] < losses[0] < 7


def test_the_activations_of_the_script_dominate(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else there would be little to plan."""
    monkeypatch.setattr(sys, "argv", ["train.py", "--steps", "1"])
    with tg.measure() as m:
        demo_script.main()
    assert m.peak_by_category["activation"] > 0.8 * m.peak_bytes


def test_the_script_is_plain_python_with_public_names() -> None:
    text = Path(demo_script.__file__).read_text()
    tree = ast.parse(text)
    assert len(text.splitlines()) < 80
    found = [ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
    assert {line for line in found if "tapegrad" in line} == {
        "import tapegrad as tg", "from tapegrad import nn, optim",
    }  # fmt: skip


@pytest.mark.usefixtures("small", "same_threads_afterwards")
def test_the_same_seed_gives_the_same_losses() -> None:
    def lines(*arguments: str) -> list[str]:
        found = invoke("--steps", "3", *arguments).stdout.splitlines()
        return [line.partition(" nats")[0] for line in found if line.startswith("loss")]

    assert len(lines()) == 1 and lines() == lines() == lines("--threads", "1")
    assert lines() != lines("--seed", "1")


@pytest.mark.usefixtures("small")
def test_the_losses_agree_with_each_other() -> None:
    lines = invoke("--steps", "30").stdout.splitlines()
    [outcome] = [line.split() for line in lines if line.startswith("loss")]
    plain = [line.rpartition(" ")[2] for line in lines if line.startswith("plain: ")]
    assert outcome[1] == plain[0] and outcome[3] == plain[-1]


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("steps", ["1", "2"])
def test_very_few_steps(steps: str) -> None:
    result = invoke("--steps", steps, "--batch", "1")
    assert result.exit_code == 0, result.output


@pytest.mark.parametrize("arguments", [["--steps", "0"], ["--batch", "-1"], ["--threads", "0"], ["--seed", "x"]])
def test_bad_options_are_refused_on_stderr(arguments: list[str]) -> None:
    result = invoke(*arguments)
    assert result.exit_code == 2
    assert "Invalid value" in result.stderr and result.stdout == ""


def test_png_fails_before_training_if_it_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = invoke("--png", str(tmp_path / "nowhere" / "x.png"))
    assert result.exit_code == 1
    assert "does not exist" in result.stderr and result.stdout == ""
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    result = invoke("--png", str(tmp_path / "x.png"))
    assert result.exit_code == 1
    assert "pip install 'tapegrad[plot]'" in result.stderr


def test_a_python_without_its_source_is_explained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo_text.sysconfig, "get_path", lambda name: str(tmp_path))
    result = invoke()
    assert result.exit_code == 1
    assert f"found 0 characters of standard library source in {tmp_path}" in result.stderr
    assert "Traceback" not in result.output


def characters(text: demo_text.Text, numbers: list[int]) -> str:
    return "".join(text.vocabulary[n] for n in numbers)


def test_the_text_is_ascii_and_numbers_are_its_places(text: demo_text.Text) -> None:
    assert text.vocabulary.isascii() and list(text.vocabulary) == sorted(set(text.vocabulary))
    assert set("def self\n()") <= set(text.vocabulary)
    assert "def " in characters(text, text.train.tolist())
    assert text.train.size + text.held_out.size == demo_text.LIMIT
    assert 0.9 < text.train.size / demo_text.LIMIT < 1


def test_other_characters_and_missing_modules_are_left_out(tmp_path: Path) -> None:
    (tmp_path / "ast.py").write_text("x = 'ä→b'\n" * 20_000, encoding="utf-8")
    text = demo_text.load(tmp_path)
    assert text.vocabulary == "\n '=bx"
    assert characters(text, text.train[:10].tolist()) == "x = 'b'\nx "


def test_labels_are_the_next_characters(text: demo_text.Text) -> None:
    demo = Demo(text, SMALL)
    tokens, labels = demo.batch(3)
    assert tokens.shape == labels.shape == (8, 16)
    assert tokens.numpy()[:, 1:].tolist() == labels.numpy()[:, :-1].tolist()
    again, _ = Demo(text, SMALL).batch(3)
    assert again.tolist() == tokens.tolist() != demo.batch(4)[0].tolist()


def test_the_ways_to_train_differ_in_memory_and_reruns_only(text: demo_text.Text) -> None:
    settings = dataclasses.replace(SMALL, steps=2, compared=2, batch=8, context=64, width=32, blocks=4)
    demo = Demo(text, settings)
    plain, blocks, attention = (demo.train(way, 2, lambda *_: None) for way in demo_model.CHECKPOINTS)
    assert identical([plain, blocks, attention], 2)
    assert len(plain.gradients) == 2 * len(demo.model.trainable_variables)
    assert (plain.reruns, blocks.reruns, attention.reruns) == (0, 4, 4)
    assert blocks.peak_bytes < attention.peak_bytes < plain.peak_bytes
    assert blocks.activation_bytes < attention.activation_bytes < plain.activation_bytes
    for run in (plain, blocks, attention):
        assert max(live for _, live, _ in run.samples) == run.peak_bytes
        assert all(0 <= activations <= live for _, live, activations in run.samples)
        assert [s for s, _, _ in run.samples] == sorted(s for s, _, _ in run.samples)


def test_the_race_takes_turns(text: demo_text.Text) -> None:
    demo = Demo(text, SMALL)
    runs = [Run(way) for way in demo_model.CHECKPOINTS]
    rounds: list[int] = []
    demo.race(runs, rounds.append)
    assert rounds == [1, 2]
    assert all(len(run.seconds) == 2 for run in runs)


def test_a_ratio_is_that_of_the_times_beside_it() -> None:
    plain, slow = Run("plain", seconds=[0.2, 0.4, 0.6]), Run("blocks", seconds=[0.3, 0.9, 0.8])
    assert demo_command._step_time(slow, plain) == "800 ms (2.00x)"  # the median of the ratios is 1.5
    assert demo_command._step_time(Run("plain", seconds=[0.0044]), Run("plain", seconds=[0.0036])) == "4.4 ms (1.22x)"


def test_captured_steps_replay_and_take_half_of_the_arena(text: demo_text.Text) -> None:
    done: list[int] = []
    eager, captured, fitted = trainings = demo_capture.compare(text, SMALL, done.append)
    assert done == [1, 2, 3, 4, 5, 6]
    assert demo_capture.identical(trainings)
    assert [len(t.run.losses) for t in trainings] == [6, 6, 6] and [len(t.run.seconds) for t in trainings] == [4, 4, 4]
    assert [t.function.stats.replays for t in trainings] == [0, 4, 4]
    assert not any(t.function.stats.fallbacks for t in trainings)
    plain, half = captured.plan(), fitted.plan()
    reads = plain.peak_bytes - plain.arena_bytes
    assert half.arena_bytes <= plain.arena_bytes // 2 and half.peak_bytes == half.arena_bytes + reads
    assert half.extra > plain.extra == 0 and half.recomputed and not plain.recomputed
    assert 0.8 < eager.run.peak_bytes / plain.arena_bytes < 1.2


def test_where_half_of_the_arena_is_too_little_the_least_is_taken(text: demo_text.Text) -> None:
    _, captured, fitted = demo_capture.compare(text, dataclasses.replace(SMALL, batch=1), lambda _: None)
    assert captured.plan().arena_bytes // 2 < fitted.plan().arena_bytes <= captured.plan().arena_bytes


def test_identical_captured_steps_have_the_same_losses_and_variables(text: demo_text.Text) -> None:
    one, other = (demo_capture.Training("eager", text, SMALL, captured=False) for _ in range(2))
    assert demo_capture.identical([one, other])
    one.advance()
    assert not demo_capture.identical([one, other])
    other.run.losses.append(one.run.losses[0])
    assert not demo_capture.identical([one, other])


def test_identical_looks_at_every_bit() -> None:
    def run(gradients: list[bytes], losses: list[float]) -> Run:
        return Run("plain", losses=losses, gradients=gradients)

    one = run([b"a", b"b"], [1.0, 2.0, 3.0])
    assert identical([one, run([b"a", b"b"], [1.0, 2.0])], 2)
    assert not identical([one, run([b"a", b"c"], [1.0, 2.0])], 2)
    assert not identical([one, run([b"a"], [1.0, 2.0])], 2)
    assert not identical([one, run([b"a", b"b"], [1.0, 2.5])], 2)
    assert not identical([run([], []), run([], [])], 0)


def test_the_model_is_causal(text: demo_text.Text) -> None:
    tg.random.seed(0)
    model = demo_model.CharTransformer(len(text.vocabulary), 8, 16, 2, 2)
    tokens = tg.asarray([[1, 2, 3, 4, 5, 6]])
    changed = tg.asarray([[1, 2, 3, 9, 9, 9]])
    assert model(tokens)[:, :3].tolist() == model(changed)[:, :3].tolist()
    assert model(tokens)[:, 3:].tolist() != model(changed)[:, 3:].tolist()


def test_the_loss_falls(text: demo_text.Text) -> None:
    settings = dataclasses.replace(SMALL, steps=40, batch=8)
    losses = Demo(text, settings).train("plain", 40, lambda *_: None).losses
    assert losses[0] == pytest.approx(math.log(len(text.vocabulary)), abs=0.8)
    assert sum(losses[-5:]) / 5 < losses[0] - 0.7


def test_a_bar_on_a_terminal() -> None:
    out = Console(file=io.StringIO(), force_terminal=True, width=100)
    with demo_command._reporter(out, "plain", 3) as report:
        for step in range(3):
            report(step + 1, 3.0 - step)
    shown = out.file.getvalue()  # type: ignore[attr-defined]
    assert "plain" in shown and "3/3" in shown and "loss 2.000" in shown


def test_about_ten_lines_elsewhere() -> None:
    out = Console(file=io.StringIO(), width=100)
    with demo_command._reporter(out, "plain", 95) as report:
        for step in range(95):
            report(step + 1, 1.0)
    lines = out.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert 10 <= len(lines) <= 12
    assert lines[0] == "plain: 1/95, loss 1.000" and lines[-1] == "plain: 95/95, loss 1.000"


def test_the_plot_draws_steps_for_every_run(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    runs = [Run(way, samples=[(0.0, 10 << 20, 0), (0.1, 30 << 20, 5 << 20), (0.2, 0, 0)]) for way in "abc"]
    demo_plot.plot(runs, ["one", "two", "three"], tmp_path / "x.png")
    assert (tmp_path / "x.png").stat().st_size > 10_000
