"""Outputs of checkpointed loops: those of ``scan``, bit for bit, and no more bytes than they have."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tapegrad as tg
from tapegrad.errors import RecomputeError, StructureError
from tapegrad.testing import check_grads

N = 7
W = tg.Variable(0.7, dtype="float64")


def start() -> tuple[Any, Any]:
    x = tg.asarray(np.linspace(0.1, 1, 4))
    return x, x * 0


def step(state: Any, i: int = 0) -> tuple[Any, Any]:
    a, b = state
    new = tg.sin(a * W + b), a * 0.5
    return new, {"y": new[0] * a, "nothing": None, "sum": tg.sum(new[1]), "number": 2.0, "same": new[0]}


def outcome(loop: Callable[[Any], Any], persistent: bool = True) -> list[Any]:
    """Values, and gradients of several targets, as bytes."""
    state = start()
    with tg.GradientTape(persistent=True) as tape:
        tape.watch(state[0])
        (a, _), ys = loop(state)
        rows = tg.sum(ys["y"] * np.arange(float(N))[:, None])
        targets = [rows + tg.sum(ys["sum"] ** 2) + tg.sum(ys["same"][3]) + tg.sum(a), tg.sum(ys["y"] ** 2), tg.sum(a)]
    assert ys["nothing"] is None and ys["y"].shape == (N, 4)
    assert ys["number"].numpy().tolist() == [2.0] * N
    grads = [g for t in targets for g in tape.gradient(t, [state[0], W])]
    return [t.numpy().tobytes() for t in (*targets, ys["y"], ys["sum"], *grads)]


def plain(state: Any) -> Any:
    return tg.scan(lambda s, _: step(s), state, length=N)


@pytest.mark.parametrize(
    "options",
    [
        {}, {"snapshots": 1}, {"snapshots": 3}, {"schedule": "sqrt"}, {"schedule": "mixed"}, {"bytes": "1MB"},
        {"snapshots": 1, "disk": 2}, {"schedule": "hierarchical", "disk": 2, "snapshots": 1},
    ],
    ids=str,
)  # fmt: skip
def test_values_and_gradients_are_those_of_scan(options: dict[str, Any], tmp_path: Path) -> None:
    where = {"directory": tmp_path} if "disk" in options else {}
    wanted = outcome(plain)
    assert outcome(lambda state: tg.checkpointed_loop(step, state, N, outputs=True, **options, **where)) == wanted
    assert outcome(lambda state: tg.recompute_grad(plain)(state)) == wanted


def test_a_loop_of_unknown_length() -> None:
    def loop(state: Any) -> Any:
        left = iter(range(N))
        return tg.checkpointed_loop(
            step, state, while_=lambda _: next(left, None) is not None, snapshots=2, outputs=True
        )

    assert outcome(loop) == outcome(plain)


def test_a_captured_step_and_a_budget() -> None:
    captured = tg.function(lambda state, i: step(state, i))
    wanted = outcome(plain)
    for _ in range(3):
        assert outcome(lambda state: tg.checkpointed_loop(captured, state, N, outputs=True, snapshots=2)) == wanted
    assert captured.stats.replays > 3 * N
    with tg.memory_budget("1MiB"):
        assert outcome(lambda state: tg.checkpointed_loop(step, state, N, outputs=True)) == wanted


def test_both_modes_to_second_order_and_rows() -> None:
    def f(x: Any) -> Any:
        (a, _), ys = tg.checkpointed_loop(step, (x, x * 0), 5, snapshots=2, outputs=True)
        return a, ys["y"], ys["sum"]

    check_grads(f, [np.linspace(0.1, 1, 4)], order=2)
    g = lambda x: tg.scan(lambda s, _: step(s), (x, x * 0), length=5)[1]["y"]
    x = start()[0]
    assert tg.jacobian(lambda x: f(x)[1])(x).numpy().tobytes() == tg.jacobian(g)(x).numpy().tobytes()


def test_no_steps_and_no_tape() -> None:
    state, ys = tg.checkpointed_loop(step, start(), 0, outputs=True)
    assert ys is None and state[0].shape == (4,)
    _, ys = tg.checkpointed_loop(step, start(), 3, outputs=True)
    assert ys["y"].shape == (3, 4)


def test_outputs_take_their_bytes_and_no_more() -> None:
    n, width = 40, 4096

    def peak(outputs: bool) -> int:
        x = tg.ones((width,))
        body = lambda s: (tg.sin(s), s[:256] * 1) if outputs else tg.sin(s)
        with tg.measure() as m, tg.GradientTape() as tape:
            tape.watch(x)
            y = tg.checkpointed_loop(body, x, n, snapshots=3, outputs=outputs)
            total = tg.sum(y[0]) + tg.sum(y[1]) if outputs else tg.sum(y)
        tape.gradient(total, x)
        return m.peak_bytes

    stacked = n * 256 * 4
    assert peak(True) <= peak(False) + 2 * stacked + 3 * width * 4


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (lambda s: s, r"with outputs=True each step returns \(state, output\), step 0 returned \*"),
        (lambda s, i: (s, tg.ones(i + 1)), r"the output float32\[2\], the steps before it float32\[1\]"),
        (lambda s, i: (s, {"a": 1.0} if i else 1.0), r"changed the structure of the output from \* to \{'a': \*\}"),
    ],
)  # fmt: skip
def test_outputs_that_do_not_fit(body: Callable[..., Any], message: str) -> None:
    for watched in (False, True):
        x = tg.ones(2)
        with tg.GradientTape() as tape, pytest.raises(StructureError, match=message):
            if watched:
                tape.watch(x)
            tg.checkpointed_loop(body, x, 3, outputs=True)


def test_a_rerun_with_another_output_is_told() -> None:
    calls: list[int] = []

    def body(s: Any) -> Any:
        calls.append(1)
        return tg.sin(s), tg.sum(s) if len(calls) <= 4 else s * 1

    x = tg.ones(2)
    with tg.GradientTape() as tape:
        tape.watch(x)
        y = tg.sum(tg.checkpointed_loop(body, x, 4, snapshots=1, outputs=True)[1])
    with pytest.raises(RecomputeError, match="the rerun of step 2 returned an output of"):
        tape.gradient(y, x)
