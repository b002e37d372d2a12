"""report and saved: rows by hand, bytes that add up to the ledger's, states, lines, tables."""

from __future__ import annotations

import gc
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import tapegrad as tg
from tapegrad.memory.ledger import LEDGER
from tapegrad.memory.report import UNKNOWN, Row, report, saved


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Nothing of another test may be freed while bytes are counted."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def tensor(*shape: int) -> tg.Tensor:
    return tg.asarray(np.random.default_rng(0).normal(size=shape).astype(np.float32))


def line_before() -> str:
    frame: Any = inspect.currentframe().f_back  # type: ignore[union-attr]
    return f"{frame.f_code.co_filename}:{frame.f_lineno - 1}"


def rows_by_op(rows: tuple[Row, ...]) -> dict[str, Row]:
    return {r.op: r for r in rows}


def test_rows_by_hand() -> None:
    x = tensor(300, 100)
    w = tg.Variable(tensor(100, 80), name="weights")
    with tg.GradientTape() as tape:
        tape.watch(x)
        y = tg.sum(tg.softmax(x @ w))
    found = saved(tape)
    assert [(r.op, r.value, r.nbytes, r.kept_bytes, r.state) for r in found.rows] == [
        ("input", "float32[300,100]", 120_000, 120_320, "saved"),
        ("variable weights", "float32[100,80]", 32_000, 0, "held"),
        ("softmax", "float32[300,80]", 96_000, 96_256, "saved"),
    ]
    assert found.kept_bytes == 120_320 + 96_256
    assert all(r.line == UNKNOWN and r.times == 0 for r in found.rows)
    tape.gradient(y, x)
    assert report(tape).rows == () and saved(tape).kept_bytes == 0  # used up


def test_the_bytes_are_the_ledgers_and_lines_are_known_in_a_measurement() -> None:
    x, w = tensor(512, 256), tg.Variable(tensor(256, 256))
    with tg.measure(), tg.GradientTape() as tape:
        tape.watch(x)
        h = tg.softmax(x @ w)
        softmax = line_before()
        k = tg.tanh(h * 2.0)
        lazy = line_before()
        y = tg.sum(tg.exp(k[1:].T) @ h[1:])
        last = line_before()
        found = report(tape)
        assert found.kept_bytes == LEDGER.by("category")["activation"]
    by = rows_by_op(found.rows)
    assert {op: by[op].line for op in ("softmax", "tanh", "exp")} == {"softmax": softmax, "tanh": lazy, "exp": last}
    del y


def test_pending_values_and_views_name_what_they_are_made_from() -> None:
    x, v = tensor(256, 256), tensor(256, 256)
    with tg.GradientTape() as tape:
        tape.watch(x)
        h = tg.exp(x * v)
        y = tg.sin(h)
        z = (x + 0.0)[5:, ::2].T @ v[:251]
    by = {(r.op, r.state): r for r in saved(tape).rows}
    inputs = sorted(r.index for r in saved(tape).rows if r.op == "input" and r.nbytes == 2**18)
    exp = by["exp", "pending"]
    assert exp.kept_bytes == 0 and exp.nbytes == 2**18 and exp.made_from == tuple(inputs)
    view = by["slice", "view"]
    assert view.value == "float32[251,256]" and view.kept_bytes == 0 and view.made_from == (v._buffer.node.index,)
    assert sum(r.kept_bytes for r in saved(tape).rows if r.op == "input" and r.nbytes > 4) == 2 * 2**18
    text = str(saved(tape))
    assert f"from %{inputs[0]} %{inputs[1]}" in text and f"in %{v._buffer.node.index}" in text
    del y, z


def test_checkpoints_and_custom_gradients() -> None:
    x = tensor(64, 64)

    @tg.custom_gradient
    def mine(x: Any) -> Any:
        return x * 2.0, lambda dy: dy

    block = tg.recompute_grad(lambda x: tg.tanh(tg.exp(x)))
    with tg.GradientTape(persistent=True) as tape:
        tape.watch(x)
        y = tg.sum(mine(block(x)))
    for times in (0, 1, 2):
        found = [r for r in report(tape).rows if r.state in ("recomputed", "custom")]
        assert [(r.op.split("(")[0], r.state, r.kept_bytes, r.nbytes) for r in found] == [
            ("recompute_grad", "recomputed", 0, 16384), ("mine", "custom", 0, 16384),
        ]  # fmt: skip
        assert [r.times for r in found] == [times, 0]
        assert not any(r.state in ("recomputed", "custom") for r in saved(tape).rows)
        tape.gradient(y, x)


def test_evicted_values_and_how_often_they_were_made_again() -> None:
    x, w = tensor(512, 256), tg.Variable(tensor(256, 256))

    def f(x: Any) -> Any:
        for _ in range(8):
            x = tg.softmax(x @ w)
        return tg.sum(x * x)

    with tg.measure() as m, tg.GradientTape() as tape:
        tape.watch(x)
        f(x)
        live = m.live_bytes
    del tape
    limit = live - 3 * 2**19
    with tg.memory_budget(limit), tg.GradientTape(persistent=True) as tape:
        tape.watch(x)
        y = f(x)
        evicted = [r for r in report(tape).rows if r.state == "evicted"]
        assert evicted and all(r.kept_bytes == 0 and r.times == 0 and r.op == "softmax" for r in evicted)
        tape.gradient(y, x)
        found = report(tape)
        again = [r for r in found.rows if r.times]
        assert {r.index for r in evicted} <= {r.index for r in again}
        assert sum(r.kept_bytes for r in found.rows) <= limit
        assert "evicted" not in {r.state for r in saved(tape).rows}
        text = str(found)
    assert " evicted" in text.splitlines()[0] and all(len(line) <= 100 for line in text.splitlines())


def test_tables() -> None:
    x = tensor(64, 64)
    with tg.GradientTape() as tape:
        tape.watch(x)
        y = tg.exp(x)
    assert str(saved(tape)).splitlines() == [
        "saved: 16.0 KiB (lines are known of what is recorded inside tg.measure())",
        f"   bytes  {' ' * len(str(y._buffer.node.index))}   value           made by  line",
        f"16.0 KiB  %{y._buffer.node.index}  float32[64,64]  exp      ?",
    ]
    assert str(report(tape)).splitlines()[0].startswith("the tape keeps 16.0 KiB: 1 saved")
    with tg.measure(), tg.GradientTape() as tape:
        assert str(report(tape)).splitlines()[0] == "the tape keeps 0 B: nothing"
        tape.watch(x)
        z = tg.exp(x)
        assert "test_report.py:" in str(saved(tape)) and "lines" not in str(saved(tape))
    del z


@pytest.mark.parametrize("ask", [report, saved])
def test_only_a_tape_has_one(ask: Callable) -> None:
    with pytest.raises(tg.errors.NotATensorError, match="GradientTape"):
        ask(tensor(2))


def test_places_of_dead_branches_are_forgotten() -> None:
    x = tensor(4)
    with tg.measure(), tg.GradientTape() as tape:
        tape.watch(x)
        for _ in range(1000):
            tg.exp(x)
        assert len(tape._lines) < 300
