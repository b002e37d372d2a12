"""``tg.training`` on several ranks: each takes its part of every batch, and all go on from one checkpoint."""

from __future__ import annotations

import tempfile
from typing import Any

import numpy as np

import tapegrad as tg
from tapegrad import distributed as dist
from tapegrad import training
from tapegrad.distributed import Group

X = np.random.default_rng(0).normal(size=(20, 3))


class Crash(Exception):
    pass


def trained(group: Group, folder: str, crash: int | None = None) -> tuple[list[dict[str, float]], bytes]:
    w = tg.Variable(np.ones((3, 1)))
    optimizer = dist.shard([w], tg.optim.Adam(0.1), stage=1)

    def step(x: Any) -> Any:
        tg.random.uniform((2,))  # a stream that goes on
        with dist.GradientTape() as tape:
            loss = dist.mean((x[dist.part(len(x))] @ w - 1) ** 2)
        optimizer.apply([tape.gradient(loss, w)], [w])
        return loss * (1 + group.rank)  # figures are each rank's own

    class Stop(training.Callback):
        def on_step_end(self, run: Any) -> None:
            if run.step == crash:
                raise Crash

    keep = training.Checkpoint(folder, {"w": w, "optimizer": optimizer}, every_steps=2)
    data = training.DataLoader(X, 6, shuffle=True, seed=3)
    history = training.fit(step, data, 3, callbacks=[Stop(), keep])
    return history, w.numpy().tobytes()


def case_a_training_goes_on(group: Group) -> None:
    folder = group.exchange_objects(tempfile.mkdtemp())[0]
    state = tg.random.default_generator.state
    wanted = trained(group, f"{folder}/whole")
    after = tg.random.default_generator.state
    tg.random.default_generator.state = state
    try:
        trained(group, f"{folder}/run", 7)
        raise AssertionError("it did not end")
    except Crash:
        pass
    tg.random.seed(99)
    assert trained(group, f"{folder}/run") == wanted
    assert tg.random.default_generator.state == after
