"""`tapegrad demo` from end to end, on a model small enough for a test; and its parts."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

import tapegrad as tg
from tapegrad.profile import demo_model, demo_text, demo_train
from tapegrad.profile.cli import main
from tapegrad.profile.demo_train import Settings, Training, compare, windows

SMALL = Settings(steps=8, compared=6, batch=16, context=16, width=8, heads=2, blocks=3)
WAYS = [
    "plain", "tg.recompute_grad(block)", "tg.memory_budget(half)", "tg.function", "tg.function(budget=half)",
]  # fmt: skip


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo_train, "QUICK", SMALL)


@pytest.fixture(scope="module")
def text() -> demo_text.Text:
    return demo_text.load()


def invoke() -> Result:
    return CliRunner().invoke(main, ["demo", "--quick"])


def table(output: str) -> dict[str, list[str]]:
    """The cells of each way."""
    lines = {way: line for line in output.splitlines() for way in WAYS if line.startswith(f"{way} ")}
    return {way: line.removeprefix(way).split() for way, line in lines.items()}


@pytest.mark.usefixtures("small")
def test_one_table_whose_columns_add_up() -> None:
    result = invoke()
    assert result.exit_code == 0 and result.stderr == "", result.output
    lines = result.stdout.splitlines()
    assert lines[1].split() == ["a", "step", "model", "+", "step", "=", "peak", "time", "of", "plain", "bits"]
    rows = table(result.stdout)
    assert list(rows) == WAYS
    for model, _, step, _, peak, *_ in rows.values():
        assert math.isclose(float(model) + float(step), float(peak), abs_tol=1e-9)
    assert {row[-1] for row in rows.values()} == {"same"} and rows["plain"][-2] == "1.00"
    assert lines[7].startswith("  model: ") and lines[8].startswith("  step: ") and lines[10].startswith("  bits: ")
    assert max(map(len, lines[1:7])) <= 80 and "\x1b" not in result.stdout
    assert "on text held out: " in lines[-2] and lines[-3].startswith("step 8: loss ")


@pytest.mark.usefixtures("small")
def test_different_bits_are_said_and_exit_with_1(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = demo_train.loss_and_gradients

    def slightly_wrong(model: Any, *batch: Any) -> Any:
        loss, gradients, variables = honest(model, *batch)
        if model.recompute_blocks:
            gradients[-1] = gradients[-1] * (1 + 2.0**-23)
        return loss, gradients, variables

    monkeypatch.setattr(demo_train, "loss_and_gradients", slightly_wrong)
    result = invoke()
    assert result.exit_code == 1
    assert {way: row[-1] for way, row in table(result.stdout).items() if row[-1] != "same"} == {WAYS[1]: "DIFFER"}


@pytest.mark.usefixtures("small")
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
    tokens, labels = windows(text.train, "3", SMALL)
    assert tokens.shape == labels.shape == (16, 16)
    assert tokens.numpy()[:, 1:].tolist() == labels.numpy()[:, :-1].tolist()
    assert windows(text.train, "3", SMALL)[0].tolist() == tokens.tolist() != windows(text.train, "4", SMALL)[0].tolist()


def test_the_ways_differ_in_bytes_only(text: demo_text.Text) -> None:
    plain, recomputed, budgeted, captured, fitted = trainings = compare(text, SMALL)
    assert [training.title for training in trainings] == WAYS
    assert all(training.state() == plain.state() for training in trainings)
    assert all(len(t.losses) == 6 and len(t.seconds) == 2 for t in trainings)
    step = {t.title: t.peak_bytes - t.model_bytes for t in trainings}
    assert step[recomputed.title] < 0.9 * step[plain.title]
    assert step[budgeted.title] < 0.6 * step[plain.title] and step[fitted.title] < 0.9 * step[captured.title]
    assert 0.8 < step[captured.title] / step[plain.title] < 1.5


def test_bytes_of_other_trainings_do_not_count(text: demo_text.Text) -> None:
    Training("plain", text, SMALL).warm_up()  # constants are made once
    alone = Training("plain", text, SMALL).warm_up()
    beside = Training("plain", text, SMALL).warm_up()
    assert beside.peak_bytes == alone.peak_bytes and beside.model_bytes == alone.model_bytes


def test_the_state_is_every_bit_of_the_variables_and_all_losses(text: demo_text.Text) -> None:
    one, other = (Training("plain", text, SMALL) for _ in range(2))
    assert one.state() == other.state()
    one.advance()
    assert one.state() != other.state()
    other.advance()
    assert one.state() == other.state()


def test_the_model_is_causal(text: demo_text.Text) -> None:
    tg.random.seed(0)
    model = demo_model.CharTransformer(len(text.vocabulary), 8, 16, 2, 2)
    tokens = tg.asarray([[1, 2, 3, 4, 5, 6]])
    changed = tg.asarray([[1, 2, 3, 9, 9, 9]])
    assert model(tokens)[:, :3].tolist() == model(changed)[:, :3].tolist()
    assert model(tokens)[:, 3:].tolist() != model(changed)[:, 3:].tolist()


def test_the_loss_falls(text: demo_text.Text) -> None:
    training = Training("plain", text, dataclasses.replace(SMALL, steps=40, width=16))
    for _ in range(40):
        training.advance()
    assert training.losses[0] == pytest.approx(math.log(len(text.vocabulary)), abs=0.8)
    assert sum(training.losses[-5:]) / 5 < training.losses[0] - 0.7
