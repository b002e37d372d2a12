"""The loop, its callbacks, and trainings that go on with the same bits."""

from __future__ import annotations

import csv
import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tapegrad as tg
from tapegrad import nn, optim, training
from tapegrad.errors import SaveError, SaveExistsError, SaveMissingError, TapegradError

rng = np.random.default_rng(0)
X = rng.normal(size=(22, 3)).astype(np.float32)
Y = (X[:, :1] * 2 - 1).astype(np.float32)


class Crash(Exception):
    pass


class Made:
    """A model with dropout, whose training draws random numbers, and all that changes with it."""

    def __init__(self, captured: bool = False) -> None:
        tg.random.seed(0)
        self.model = nn.Sequential([nn.Dense(8, activation="tanh"), nn.Dropout(0.2), nn.Dense(1)])
        self.model(X[:1])
        self.optimizer = optim.Adam(optim.schedules.CosineDecay(0.1, 200))
        self.average = optim.EMA(self.model, 0.9)
        self.data = training.DataLoader((X, Y), 4, shuffle=True, seed=7)
        self.tree = {"model": self.model, "optimizer": self.optimizer, "average": self.average.variables}
        if captured:
            self.step = tg.function(self.step)  # type: ignore[method-assign]

    def step(self, batch: Any) -> Any:
        x, y = batch
        with tg.GradientTape() as tape:
            loss = tg.mean((self.model(x, training=True) - y) ** 2)
        vs = self.model.trainable_variables
        self.optimizer.apply(tape.gradient(loss, vs), vs)
        self.average.update()
        return {"loss": loss, "largest": tg.max(x)}

    def validate(self) -> Any:
        return tg.mean((self.model(X) - Y) ** 2)

    def bits(self) -> list[bytes]:
        held = [*self.model.variables, *self.optimizer.variables, *self.average.variables]
        return [v.numpy().tobytes() for v in held]


class After(training.Callback):
    """Ends the process, as it were, after a number of steps of this process."""

    def __init__(self, steps: int) -> None:
        self.left = steps

    def on_step_end(self, run: Any) -> None:
        self.left -= 1
        if not self.left:
            raise Crash


def test_the_means_of_epochs() -> None:
    figures = iter(range(100))
    seen: list[Any] = []

    def step(batch: Any) -> Any:
        seen.append(batch)
        return next(figures)

    history = training.fit(step, ["a", "b", "c"], 2, validate=lambda: {"acc": [0.5, 1.0]})
    assert history == [{"loss": 1.0, "val_acc": 0.75}, {"loss": 4.0, "val_acc": 0.75}]
    assert seen == ["a", "b", "c"] * 2
    assert training.fit(lambda batch: None, [1], 1) == [{}]
    made = Made()
    losses = [h["val_loss"] for h in training.fit(made.step, made.data, 20, validate=made.validate)]
    assert losses[-1] < 0.3 * losses[0] and int(made.optimizer.iterations) == 20 * 6


@pytest.mark.parametrize(("crash", "captured"), [(1, False), (4, True), (6, False), (7, False)])
def test_a_training_that_ended_goes_on_with_the_same_bits(crash: int, captured: bool, tmp_path: Path) -> None:
    """At the first step, in the middle, at the end and the beginning of an epoch of 6 steps."""

    def run(folder: Path, made: Made, *others: Any) -> Any:
        keep = training.Checkpoint(folder, made.tree, every_steps=1)
        stop = training.EarlyStopping("val_loss", patience=1, restore=made.model)
        return training.fit(made.step, made.data, 3, validate=made.validate, callbacks=[*others, stop, keep])

    whole = Made(captured)
    wanted = run(tmp_path / "whole", whole, training.Callback())
    first = Made(captured)
    with pytest.raises(Crash):
        run(tmp_path / "run", first, Late(crash + 1))
    tg.random.seed(99)
    second = Made(captured)
    assert run(tmp_path / "run", second, training.Callback()) == wanted
    assert second.bits() == whole.bits()
    third = Made(captured)  # there is nothing left to do
    assert run(tmp_path / "run", third, training.Callback()) == wanted
    assert third.optimizer.iterations.numpy() == whole.optimizer.iterations.numpy()


class Counting(training.Callback):
    """Counts epochs, also across checkpoints."""

    def __init__(self) -> None:
        self.count = 0

    def on_epoch_end(self, run: Any, logs: Any) -> None:
        self.count += 1

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"]


def test_callbacks_may_come_and_go_between_runs(tmp_path: Path) -> None:
    def run(epochs: int, *callbacks: training.Callback) -> list[dict[str, float]]:
        made = Made()
        keep = training.Checkpoint(tmp_path / "c", made.tree)
        stops = [c(made) if callable(c) else c for c in callbacks]
        return training.fit(made.step, made.data, epochs, validate=made.validate, callbacks=[*stops, keep])

    def stop(made: Made) -> training.EarlyStopping:
        return training.EarlyStopping("val_loss", patience=9, restore=made.model)

    first, second, third = Counting(), Counting(), Counting()
    run(2, first)
    assert first.count == 2
    # One more before it, of another class and with variables of its own; and one more of its class behind it.
    assert len(run(3, training.ProgressBar(), stop, second, third)) == 3
    assert (second.count, third.count) == (3, 1)
    last = [Counting(), Counting(), Counting()]
    assert len(run(4, *last)) == 4  # the bar and what stops are not there any more
    assert [c.count for c in last] == [4, 2, 1]
    again = Counting()
    run(5, stop, again)  # what stops starts afresh
    assert again.count == 5


def test_a_process_killed_while_the_folder_is_replaced_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between two renames the old folder steps aside: the next run goes on from it, as ``load`` would."""
    rename = os.rename

    def renamed(old: str, new: str) -> None:
        if not (tmp_path / "runs" / "c").exists():
            shutil.copytree(tmp_path / "runs", tmp_path / "killed")
        rename(old, new)

    made = Made()
    (tmp_path / "runs").mkdir()
    keep = training.Checkpoint(tmp_path / "runs" / "c", made.tree)
    training.fit(made.step, made.data, 1, callbacks=[keep])
    monkeypatch.setattr(os, "rename", renamed)
    training.fit(made.step, made.data, 2, callbacks=[keep])
    monkeypatch.undo()
    assert not (tmp_path / "killed" / "c").exists()
    epochs: list[int] = []

    class Begin(training.Callback):
        def on_begin(self, run: Any) -> None:
            epochs.append(run.epoch)

    other = Made()
    keep = training.Checkpoint(tmp_path / "killed" / "c", other.tree)
    history = training.fit(other.step, other.data, 2, callbacks=[Begin(), keep])
    assert epochs == [1] and len(history) == 2 and other.bits() == made.bits()


class Late(After):
    """Ends it at the beginning of the next step's callbacks: what was saved is the step before."""


def test_checkpoints_of_epochs_and_of_another_training(tmp_path: Path) -> None:
    made = Made()
    saved: list[int] = []

    class Watch(training.Callback):
        def on_step_end(self, run: Any) -> None:
            if (tmp_path / "c").exists():
                saved.append(json.loads(tg.distributed.load(tmp_path / "c")["run"])["step"])

    keep = training.Checkpoint(tmp_path / "c", made.tree, every_epochs=2)
    training.fit(made.step, made.data, 5, callbacks=[Watch(), keep])
    assert saved == [12] * 12 + [24] * 6
    other = Made()
    with pytest.raises(SaveError):
        training.fit(other.step, other.data, callbacks=[training.Checkpoint(tmp_path / "c", {"x": tg.Variable(1.0)})])
    fresh = Made()
    history = training.fit(fresh.step, fresh.data, 1, callbacks=[
        training.Checkpoint(tmp_path / "c", fresh.tree, resume=False)])  # fmt: skip
    assert len(history) == 1
    with pytest.raises(TapegradError, match="give it as the last callback"):
        training.fit(made.step, made.data, callbacks=[training.Checkpoint(tmp_path / "d", made.tree),
                                                      training.Callback()])  # fmt: skip
    with pytest.raises(TapegradError, match="a training has one alone"):
        training.fit(made.step, made.data, callbacks=[training.Checkpoint(tmp_path / "d", made.tree)] * 2)
    with pytest.raises(TapegradError, match="positive integer or None for every_steps, got 0"):
        training.Checkpoint(tmp_path, {}, every_steps=0)
    lists = [(X, Y)] * 3
    with pytest.raises(Crash):
        training.fit(made.step, lists, 2, callbacks=[
            After(2), training.Checkpoint(tmp_path / "e", made.tree, every_steps=1)])  # fmt: skip
    with pytest.raises(TapegradError, match="cannot go on in the middle of an epoch; use DataLoader"):
        training.fit(made.step, lists, 2, callbacks=[
            training.Callback(), training.Checkpoint(tmp_path / "e", made.tree, every_steps=1)])  # fmt: skip


def stopped(values: list[float], **options: Any) -> int:
    """After how many epochs of these figures a training ends."""
    figures = iter(values)
    stop = training.EarlyStopping("loss", **options)
    return len(training.fit(lambda batch: next(figures), [0], len(values), callbacks=[stop]))


def test_early_stopping() -> None:
    assert stopped([3, 2, 1, 2, 0]) == 4
    assert stopped([3, 2, 1, 2, 2, 0], patience=2) == 6
    assert stopped([3, 2, 1, 2, 2, 2, 0], patience=2) == 6
    assert stopped([3, 2.95, 2.9], min_delta=0.1) == 2
    assert stopped([1, 2, 3, 2, 9], mode="max") == 4
    assert stopped([1, np.nan, 0.5]) == 2 and stopped([np.nan, 1, 0.5, 2, 0]) == 1
    figures = iter([0.5, 0.9, 0.8, 0.7])
    stop = training.EarlyStopping("val_accuracy")
    validate = lambda: {"accuracy": next(figures)}
    assert len(training.fit(lambda b: None, [0], 4, validate=validate, callbacks=[stop])) == 3
    with pytest.raises(TapegradError, match="there is no 'val_loss' to watch; there is loss"):
        training.fit(lambda b: 1.0, [0], callbacks=[training.EarlyStopping()])
    with pytest.raises(TapegradError, match='wanted mode "auto", "min" or "max"'):
        training.EarlyStopping(mode="up")
    with pytest.raises(TapegradError, match="no negative patience"):
        training.EarlyStopping(patience=-1)


def test_the_best_epoch_s_values_come_back() -> None:
    v = tg.Variable([0.0])
    losses = iter([3.0, 1.0, 2.0, 5.0])
    stop = training.EarlyStopping("loss", patience=1, restore=[v])
    training.fit(lambda b: (v.assign_add([1.0]), next(losses))[1], [0], 9, callbacks=[stop])
    assert v.numpy().tolist() == [2.0]
    with pytest.raises(ZeroDivisionError):  # also after an error
        training.fit(lambda b: (v.assign_add([1.0]), 1 / 0)[1], [0], callbacks=[stop])
    assert v.numpy().tolist() == [2.0]


def test_a_log_as_csv_that_goes_on(tmp_path: Path) -> None:
    def run(epochs: int, *others: Any) -> None:
        made = Made()
        keep, log = training.Checkpoint(tmp_path / "c", made.tree), training.CSVLogger(tmp_path / "log.csv")
        training.fit(made.step, made.data, epochs, callbacks=[*others, log, keep])

    with pytest.raises(Crash):
        run(4, After(15))
    run(4, training.Callback())
    with open(tmp_path / "log.csv", newline="") as file:
        table = list(csv.reader(file))
    assert table[0] == ["epoch", "largest", "loss"] and [row[0] for row in table[1:]] == ["0", "1", "2", "3"]
    whole = Made()
    history = training.fit(whole.step, whole.data, 4)
    assert [float(row[2]) for row in table[1:]] == [logs["loss"] for logs in history]
    with pytest.raises(OSError):
        training.fit(lambda b: 1.0, [0], callbacks=[training.CSVLogger(tmp_path / "no" / "log.csv")])


def test_progress(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    training.fit(lambda b: b, [1.0, 2.0], 2, callbacks=[training.ProgressBar()])
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2 and lines[1].startswith("epoch 2/2: ") and lines[1].endswith(" s  loss 1.5")
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    with pytest.raises(ZeroDivisionError):
        training.fit(lambda b: 1 / b, [1.0, 2.0, 0.0], 1, callbacks=[training.ProgressBar(1e-9)])
    text = capsys.readouterr().err
    assert "epoch 1/1" in text and "2/3" in text and "loss 0.75" in text
    with pytest.raises(TapegradError, match="wanted positive seconds"):
        training.ProgressBar(0)


def test_callbacks_may_end_it_and_hear_of_the_end() -> None:
    class Stop(training.Callback):
        told: list[str] = []

        def on_step_end(self, run: Any) -> None:
            run.stop_training = run.step == 5
            self.told.append(f"{run.epoch} {run.batch} {run.step}")

        def on_end(self, run: Any) -> None:
            self.told.append("end")

    history = training.fit(lambda b: 1.0, [0, 1, 2], 9, callbacks=[Stop()])
    assert len(history) == 1 and Stop.told == ["0 1 1", "0 2 2", "0 3 3", "1 1 4", "1 2 5", "end"]


def test_wrong_use() -> None:
    for step, data, message in (
        (lambda b: 1.0, [], "the data gave no batch"),
        (lambda b: (1.0, 2.0), [0], "wanted a loss or a dict of figures by name from a step, got a tuple"),
    ):
        with pytest.raises(TapegradError, match=message):
            training.fit(step, data)
    once = iter([1, 2])
    with pytest.raises(TapegradError, match="an iterator can be gone through once only"):
        training.fit(lambda b: 1.0, once, 2)
    with pytest.raises(TapegradError, match="positive integer for epochs"):
        training.fit(lambda b: 1.0, [0], 0)


@pytest.mark.parametrize(
    ("inside", "kind"), [("missing/c", SaveMissingError), ("a file/c", OSError), ("full", SaveExistsError)]
)
def test_a_folder_that_cannot_be_written_is_known_before_the_first_step(
    tmp_path: Path, inside: str, kind: type
) -> None:
    (tmp_path / "a file").write_text("")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "diary").write_text("")
    done: list[Any] = []
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(kind):
        training.fit(done.append, [0], callbacks=[training.Checkpoint(tmp_path / inside, {"x": 1}, resume=False)])
    assert not done and sorted(tmp_path.rglob("*")) == before
