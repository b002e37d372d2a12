"""Profiles on CUDA: the ledger is CuPy's pool, to the byte, before every operation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import tapegrad as tg
from tapegrad.profile.recorder import Session
from tapegrad.profile.recorder.facts import device_facts
from tapegrad.tracing.ledger import LEDGER
from tapegrad.tracing.timeline import totals

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("no_collection")]
META: dict[str, Any] = {
    "tapegrad": "0", "program": "test", "argv": [], "device": {"name": "cuda"},
    "outcome": {"kind": "finished", "code": 0},
}  # fmt: skip


def network(width: int = 96, depth: int = 4) -> tuple[Callable[..., None], list[tg.Variable]]:
    chance = np.random.default_rng(0)
    with tg.device("cuda"):
        ws = [tg.Variable(chance.normal(size=(width, width)).astype("f4") / 10, name=f"w{i}") for i in range(depth)]
        x = tg.asarray(np.ones((64, width), "f4"))
        optimizer = tg.optim.Adam(1e-3)

    def block(h: tg.Tensor, w: tg.Variable) -> tg.Tensor:
        return h + tg.softmax(tg.tanh(h @ w) * 3.0)

    def step(wrap: Callable = lambda f: f) -> None:
        with tg.device("cuda"):
            with tg.GradientTape() as tape:
                h = x
                for w in ws:
                    h = wrap(block)(h, w)
                loss = tg.mean(h * h)
            optimizer.apply(tape.gradient(loss, ws), ws)

    return step, ws


@pytest.mark.parametrize("wrap", [lambda f: f, tg.recompute_grad], ids=["plain", "checkpointed"])
def test_the_ledger_is_the_pool_before_every_operation(wrap: Callable) -> None:
    step, ws = network()
    step(wrap)  # makes constants, slots, modules
    with tg.device("cuda"):
        session = Session(check=True)
        session.start()
        for _ in range(3):
            step(wrap)
        session.stop()
    run = session.run(META)
    assert run.checks["checked"] > 100 and run.checks["drift_bytes"] == 0
    assert run.count("steps") == 3 and set(run.samples["outside_bytes"]) == {run.samples["outside_bytes"][0]}
    assert run.peak["bytes"] == session.measure.peak_bytes == max(total for _, _, total, _ in totals(run))
    assert {run.text(d) for d in run.allocs["device"]} >= {ws[0].device.name}


def test_bytes_of_other_code_are_outside() -> None:
    import cupy

    step, _ = network()
    step()
    with tg.device("cuda"):
        session = Session(check=True)
        session.start()
        step()
        stray = cupy.ones(1 << 16, "f4")
        step()
        session.stop()
    run = session.run(META)
    outside = run.samples["outside_bytes"]
    assert outside[-1] - outside[0] == stray.nbytes == run.checks["drift_bytes"]
    assert LEDGER.live_bytes == 0


def test_facts_name_the_device_and_its_pool() -> None:
    with tg.device("cuda"):
        found = device_facts()
    assert found["name"].startswith("cuda") and found["total_bytes"] > 0 and found["pool"] and found["model"]
