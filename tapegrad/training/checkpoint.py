"""``Checkpoint``: a training that was interrupted goes on with the same bits."""

from __future__ import annotations

import json
import os
from numbers import Integral
from typing import Any

import tapegrad.random as random
from tapegrad.distributed.saving import exists, load_needed, require_writable, save
from tapegrad.errors import TapegradError
from tapegrad.training.fit import Callback, Run


class Checkpoint(Callback):
    """Save everything that the training needs to go on into one folder, and go on from it where there is one.

    tree: what changes: ``{"model": model, "optimizer": optimizer, "ema": ema}``, say (see
    ``tg.distributed.save``).  Saved besides: the global random stream, where the loader is, the means of the epoch so
    far, the history, and the state of the other callbacks, by the names of their classes: one that is new starts
    afresh.  The folder is replaced after every ``every_epochs`` epochs,
    and after every ``every_steps`` steps; it appears whole or not at all.  ``fit`` begins from it if it is there,
    unless ``resume`` is false; a model must have its variables by then.  On several ranks each calls ``fit`` alike.

    Give it as the last callback, so that it saves what the others have done.  Raises TapegradError for two of them, and
    what ``tg.distributed.save`` and ``load`` raise: of a folder that cannot be written before the first step.
    """

    def __init__(
        self, dir: str | os.PathLike[str], tree: dict[str, Any], *, every_epochs: int | None = 1,
        every_steps: int | None = None, resume: bool = True,
    ) -> None:  # fmt: skip
        for name, value in (("every_epochs", every_epochs), ("every_steps", every_steps)):
            if value is not None and (not isinstance(value, (int, Integral)) or value < 1):
                raise TapegradError(f"Checkpoint: wanted a positive integer or None for {name}, got {value!r}")
        self.dir, self.tree = os.fspath(dir), tree
        self.every_epochs, self.every_steps, self.resume = every_epochs, every_steps, resume

    def on_begin(self, run: Run) -> None:
        if sum(isinstance(callback, Checkpoint) for callback in run.callbacks) > 1:
            raise TapegradError("Checkpoint: a training has one alone; save to other places in a callback of your own")
        if run.callbacks[-1] is not self:
            raise TapegradError("Checkpoint: give it as the last callback, so that it saves what the others have done")
        if self.resume and exists(self.dir):
            contents = load_needed(self.dir, self._whole(run, ""), lambda name: name.partition("/")[0] != "callbacks")
            run.load_state_dict(json.loads(contents["run"]))
        require_writable(self.dir)  # not after the first epoch

    def on_step_end(self, run: Run) -> None:
        if self.every_steps is not None and run.step % self.every_steps == 0:
            self._save(run)

    def on_epoch_end(self, run: Run, logs: dict[str, float]) -> None:
        if self.every_epochs is not None and run.epoch % self.every_epochs == 0:
            self._save(run)

    def _save(self, run: Run) -> None:
        save(self.dir, self._whole(run, json.dumps(run.state_dict())), overwrite=True)

    def _whole(self, run: Run, text: str) -> dict[str, Any]:
        kept = {name: list(c.variables) for name, c in run.callbacks_by_name().items() if c.variables}
        return {"tree": self.tree, "random": random.default_generator, "run": text, "callbacks": kept}
