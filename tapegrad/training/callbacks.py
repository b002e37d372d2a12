"""Callbacks of ``fit`` under Keras' names: early stopping, a log as CSV, a progress bar."""

from __future__ import annotations

import csv
import math
import os
import sys
import time
from collections.abc import Sequence
from numbers import Integral
from typing import Any

from tapegrad.errors import TapegradError
from tapegrad.training.fit import Callback, Logs, Run, better, watched
from tapegrad.variable import Variable


class EarlyStopping(Callback):
    """End the training when a figure has not become better for ``patience`` epochs.

    monitor: a name of the logs; mode: whether it is to become small ("min") or large ("max"), by default as its name
    says (accuracies, AUC, precision and recall: large); min_delta: changes up to this do not count.  ``restore``: a
    model or variables, which at the end get the values of the best epoch back (Keras' ``restore_best_weights``).

    Raises TapegradError where the logs have no such figure.
    """

    def __init__(
        self, monitor: str = "val_loss", patience: int = 0, min_delta: float = 0.0, mode: str = "auto",
        restore: Any = None,
    ) -> None:  # fmt: skip
        if not isinstance(patience, (int, Integral)) or patience < 0 or not min_delta >= 0:
            raise TapegradError(f"EarlyStopping: wanted no negative patience, min_delta: got {patience}, {min_delta}")
        self.monitor, self.patience, self.min_delta, self.restore = monitor, patience, min_delta, restore
        self._better = better(mode, monitor)
        self.best: float | None = None
        self.waited = 0
        self._kept: list[Variable] | None = None

    @property
    def variables(self) -> Sequence[Variable]:  # type: ignore[override]
        """The values of the best epoch."""
        if self._kept is None:
            self._kept = [Variable(v, trainable=False, name=f"best/{v.name}") for v in self._own()]
        return self._kept

    def on_epoch_end(self, run: Run, logs: Logs) -> None:
        now = watched(logs, self.monitor)
        if not math.isnan(now) and (self.best is None or self._better(now, self.best, self.min_delta)):
            self.best, self.waited = now, 0
            for kept, v in zip(self.variables, self._own()):
                kept.assign(v.read())
            return
        self.waited += 1
        run.stop_training = run.stop_training or self.waited > self.patience

    def on_end(self, run: Run) -> None:
        if self.best is not None:
            for kept, v in zip(self.variables, self._own()):
                v.assign(kept.read())

    def _own(self) -> list[Variable]:
        of = () if self.restore is None else getattr(self.restore, "variables", self.restore)
        return [of] if isinstance(of, Variable) else list(of)

    def state_dict(self) -> dict[str, Any]:
        return {"best": self.best, "waited": self.waited}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.best, self.waited = state["best"], state["waited"]


class CSVLogger(Callback):
    """A row for each epoch in a file: its number from 0, as in Keras, then the logs.

    A training that goes on from a checkpoint goes on with the file: rows of epochs that are done again are left out.
    Figures that the first epoch did not have are left out.  Raises OSError where the file cannot be written.
    """

    def __init__(self, filename: str | os.PathLike[str], separator: str = ",") -> None:
        self.filename, self.separator = os.fspath(filename), separator
        self._columns: list[str] = []

    def on_begin(self, run: Run) -> None:
        """Write the rows of epochs that were completed before; an unwritable file is noticed here."""
        with open(self.filename, "w", newline="", encoding="utf-8"):
            self._columns = []
        for epoch, logs in enumerate(run.history):
            self._write(epoch, logs)

    def on_epoch_end(self, run: Run, logs: Logs) -> None:
        self._write(run.epoch - 1, logs)

    def _write(self, epoch: int, logs: Logs) -> None:
        with open(self.filename, "a", newline="", encoding="utf-8") as file:
            writer = csv.writer(file, delimiter=self.separator)
            if not self._columns:
                self._columns = sorted(logs)
                writer.writerow(["epoch", *self._columns])
            writer.writerow([epoch, *(repr(logs[name]) if name in logs else "" for name in self._columns)])


class ProgressBar(Callback):
    """A bar of the steps of each epoch with the means so far; where stderr is no terminal, a line for each epoch.

    ``seconds``: how often figures are read, which waits for the device.  Raises TapegradError unless it is positive.
    """

    def __init__(self, seconds: float = 0.5) -> None:
        if not seconds > 0:
            raise TapegradError(f"ProgressBar: wanted positive seconds, got {seconds!r}")
        self.seconds = seconds
        self._bar: Any = None
        self._task: Any = None
        self._read = self._began = 0.0

    def on_begin(self, run: Run) -> None:
        self._began = time.monotonic()
        if not sys.stderr.isatty():
            return
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(),
                   TextColumn("{task.fields[logs]}"))  # fmt: skip
        self._bar = Progress(*columns, console=Console(stderr=True))
        self._bar.start()

    def on_step_end(self, run: Run) -> None:
        if self._bar is None:
            return
        if self._task is None:
            steps = len(run.data) if hasattr(run.data, "__len__") else None
            told = f"epoch {run.epoch + 1}/{run.epochs}"
            self._task = self._bar.add_task(told, total=steps, completed=run.batch - 1, logs="")
        fields = {}
        if time.monotonic() - self._read > self.seconds:
            fields["logs"], self._read = _text(run.logs()), time.monotonic()
        self._bar.update(self._task, completed=run.batch, **fields)

    def on_epoch_end(self, run: Run, logs: Logs) -> None:
        if self._bar is not None:
            self._bar.update(self._task, logs=_text(logs))
            self._task = None
            return
        took, self._began = time.monotonic() - self._began, time.monotonic()
        print(f"epoch {run.epoch}/{run.epochs}: {took:.1f} s  {_text(logs)}", file=sys.stderr, flush=True)

    def on_end(self, run: Run) -> None:
        if self._bar is not None:
            self._bar.stop()
        self._bar = self._task = None


def _text(logs: Logs) -> str:
    return "  ".join(f"{name} {value:.4g}" for name, value in logs.items())
