"""``fit``: epochs of steps over batches, with the means of what steps give, and callbacks.

It is made of public parts: a step is a function of the user's, which changes the model; means add up on the device and
are read once an epoch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from tapegrad.errors import TapegradError
from tapegrad.nn import checks
from tapegrad.training.metrics import Mean

Logs = dict[str, float]


class Callback:
    """What ``fit`` asks at its turning points; each method does nothing by default.

    ``state_dict`` and ``load_state_dict`` are what a checkpoint keeps: numbers and strings by name, as JSON has them;
    ``variables``: tensors that it keeps, too, from the beginning.
    """

    variables: Sequence[Any] = ()

    def on_begin(self, run: Run) -> None:
        """Before the first step; the last callback is asked first: it may be a checkpoint that sets the run back."""

    def on_step_end(self, run: Run) -> None:
        """After a step; ``run.step`` counts it already."""

    def on_epoch_end(self, run: Run, logs: Logs) -> None:
        """After an epoch with its means; ``run.epoch`` counts it already, and ``run.history`` has them."""

    def on_end(self, run: Run) -> None:
        """At the end, also after an error or Ctrl-C."""

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps of the callback."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from what a checkpoint has kept."""


class Run:
    """A training that goes on: what callbacks see.

    ``epoch``, ``step``: how many were completed; ``epochs``: how many there are to be; ``batch``: how many steps of the
    present epoch; ``history``: the logs of each epoch; ``stop_training``: set it to end after the present step.
    """

    def __init__(self, data: Any, epochs: int, callbacks: Sequence[Callback]) -> None:
        self.data, self.epochs, self.callbacks = data, epochs, callbacks
        self.epoch = self.step = self.batch = 0
        self.history: list[Logs] = []
        self.stop_training = False
        self.means: dict[str, Mean] = {}

    def logs(self) -> Logs:
        """The means of the present epoch so far; reading them waits for the device."""
        return {name: float(mean.result()) for name, mean in self.means.items()}

    def take(self, given: Any) -> None:
        """Take what a step gives into the means."""
        for name, value in _named(given).items():
            if name not in self.means:
                self.means[name] = Mean(name)
            self.means[name].update_state(value)

    def callbacks_by_name(self) -> dict[str, Callback]:
        """The callbacks by the names of their classes, those of one class numbered from 2, by which states are kept."""
        named: dict[str, Callback] = {}
        for callback in self.callbacks:
            name = type(callback).__name__
            count = sum(type(c).__name__ == name for c in named.values())
            named[f"{name}_{count + 1}" if count else name] = callback
        return named

    def state_dict(self) -> dict[str, Any]:
        """Numbers and strings from which a run goes on; see :class:`tapegrad.training.Checkpoint`."""
        means = {name: [float(v).hex() for v in mean.variables] for name, mean in self.means.items()}
        return {
            "epoch": self.epoch, "step": self.step, "batch": self.batch, "history": self.history, "means": means,
            "stop_training": self.stop_training,
            "data": self.data.state_dict() if hasattr(self.data, "state_dict") else None,
            "callbacks": {name: callback.state_dict() for name, callback in self.callbacks_by_name().items()},
        }  # fmt: skip

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where a run of the same data was.  Raises TapegradError for another one's state.

        Each callback takes the state of its name (:meth:`callbacks_by_name`); one that has none starts afresh, and
        states of callbacks that are not there any more are dropped.
        """
        if state["data"] is not None:
            self.data.load_state_dict(state["data"])
        elif state["batch"]:
            raise TapegradError("fit: data without state_dict() cannot go on in the middle of an epoch; use DataLoader")
        self.epoch, self.step, self.batch = state["epoch"], state["step"], state["batch"]
        self.history, self.stop_training = list(state["history"]), state["stop_training"]
        for name, numbers in state["means"].items():
            self.means[name] = Mean(name)
            for v, number in zip(self.means[name].variables, numbers):
                v.assign(float.fromhex(number))
        for name, callback in self.callbacks_by_name().items():
            if name in state["callbacks"]:
                callback.load_state_dict(state["callbacks"][name])


def fit(
    step: Callable[[Any], Any],
    data: Iterable[Any],
    epochs: int = 1,
    *,
    validate: Callable[[], Any] | None = None,
    callbacks: Sequence[Callback] = (),
) -> list[Logs]:
    """Call ``step(batch)`` for each batch of ``data``, ``epochs`` times; the history: for each epoch means by name.

    step: changes the model (it may be a ``tg.function``) and gives a loss, or a dict of figures by name, or None;
    tensors of any shape or numbers.  Their means over the steps of an epoch are its logs, a lone figure's under
    ``"loss"``.  validate: called after each epoch; what it gives is in the logs, each name behind ``val_``.  data: a
    :class:`DataLoader`, or anything that can be gone through again and again.  Reading figures waits for the device
    once an epoch, and where callbacks ask for them.

    Raises what ``step`` raises, after the callbacks' ``on_end``; TapegradError for no data or wrong figures.
    """
    checks.positive("fit", "epochs", epochs)
    run = Run(data, epochs, list(callbacks))
    try:
        for callback in reversed(run.callbacks):
            callback.on_begin(run)
        while run.epoch < epochs and not run.stop_training:
            _epoch(run, step, validate)
    finally:
        for callback in run.callbacks:
            callback.on_end(run)
    return run.history


def _epoch(run: Run, step: Callable[[Any], Any], validate: Callable[[], Any] | None) -> None:
    for batch in run.data:
        run.take(step(batch))
        run.step, run.batch = run.step + 1, run.batch + 1
        for callback in run.callbacks:
            callback.on_step_end(run)
        if run.stop_training:
            return
    if not run.batch:
        raise TapegradError("fit: the data gave no batch; an iterator can be gone through once only: give a list")
    logs = run.logs()
    if validate is not None:
        for name, value in _named(validate()).items():
            figure = Mean(name)
            figure.update_state(value)
            logs[f"val_{name}"] = float(figure.result())
    run.means, run.batch, run.epoch = {}, 0, run.epoch + 1
    run.history.append(logs)
    for callback in run.callbacks:
        callback.on_epoch_end(run, logs)


def _named(given: Any) -> dict[str, Any]:
    """Figures by name."""
    if given is None:
        return {}
    if isinstance(given, dict):
        return given
    if isinstance(given, (tuple, list)):
        raise TapegradError("fit: wanted a loss or a dict of figures by name from a step, got a tuple; name them")
    return {"loss": given}


def watched(logs: Logs, monitor: str) -> float:
    """A figure of an epoch.  Raises TapegradError, which names those that there are."""
    if monitor not in logs:
        raise TapegradError(f"fit: there is no {monitor!r} to watch; there is {', '.join(sorted(logs)) or 'nothing'}")
    return logs[monitor]


def better(mode: str, monitor: str) -> Callable[[float, float, float], bool]:
    """Whether a figure is better than another one, by more than ``least``.  Raises TapegradError for another mode."""
    if mode not in ("auto", "min", "max"):
        raise TapegradError(f'fit: wanted mode "auto", "min" or "max", got {mode!r}')
    is_share = any(part in monitor.lower() for part in ("acc", "auc", "precision", "recall"))
    up = mode == "max" or (mode == "auto" and is_share)
    return lambda new, old, least: not math.isnan(new) and (new > old + least if up else new < old - least)
