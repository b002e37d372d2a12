"""report and saved: rows by hand, bytes that add up to the ledger's, states, lines, tables."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import tapegrad as tg
from tapegrad.remat.report import UNKNOWN, Report, Row, Saved, report, saved
from tapegrad.tracing.ledger import LEDGER

pytestmark = pytest.mark.usefixtures("no_collection")


def tensor(*shape: int) -> tg.Tensor:
    return tg.asarray(np.random.default_rng(0).normal(size=shape).astype(np.float32))


def line_before() -> str:
    frame: Any = inspect.currentframe().f_back  # type: ignore[union-attr]
    return f"{frame.f_code.co_filename}:{frame.f_lineno - 1}"


def rows_by_op(rows: tuple[Row, ...]) -> dict[str, Row]:
    return {r.op: r for r in rows}


def test_a_content_of_a_variable_that_was_evicted_is_told_as_such() -> None:
    x, v = tensor(40, 40), tg.Variable(tensor(40, 40))
    with tg.memory_budget("1GiB"), tg.GradientTape() as tape:
        tape.watch(x)
        v.assign(tg.softmax(x))
        y = tg.sum(tg.recompute_grad(lambda u: u * v)(x))
        with tg.memory_budget(LEDGER.live_bytes - x.nbytes) as m:
            pass
        assert m.evictions == 1
        assert "evicted" in [r.state for r in report(tape).rows]
        assert all(r.state != "evicted" for r in saved(tape).rows)
    del y


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


def test_what_a_variable_held_before_it_was_assigned_has_its_name() -> None:
    x, w = tensor(300, 100), tg.Variable(tensor(100, 80), name="weights")
    with tg.GradientTape() as tape:
        tape.watch(x)
        y = tg.sum(x @ w)
        w.assign_add(w)
    assert [r.op for r in saved(tape).rows] == ["input", "variable weights"]
    del y


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


def test_within_a_budget_the_lines_of_large_values_are_known() -> None:
    x = tensor(256, 256)
    with tg.memory_budget("64MiB"), tg.GradientTape() as tape:
        tape.watch(x)
        large = tg.softmax(x)
        line = line_before()
        small = tg.softmax(large[:1])
        found = saved(tape)
    assert [(r.op, r.nbytes, r.line) for r in found.rows if r.state == "saved"] == [
        ("softmax", 2**18, line), ("softmax", 1024, "(small values)"),
    ]  # fmt: skip
    assert "(" not in str(found)
    del small


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
    (index,) = view.made_from
    assert index in inputs
    assert view.value == "float32[251,256]" and view.kept_bytes == 0
    assert sum(r.kept_bytes for r in saved(tape).rows if r.op == "input" and r.nbytes > 4) == 2 * 2**18
    text = str(saved(tape))
    assert all(r.times == 0 for r in by.values())
    assert f"from %{inputs[0]} %{inputs[1]}" in text and f"in %{index}" in text
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
        y = tg.exp(x)  # noqa: F841
    (row,) = saved(tape).rows
    assert str(saved(tape)).splitlines() == [
        "saved: 16.00 KiB (lines are known of what is recorded inside tg.measure())",
        f"    bytes  {' ' * len(str(row.index))}   value           made by  line",
        f"16.00 KiB  %{row.index}  float32[64,64]  exp      ?",
    ]
    assert str(report(tape)).splitlines()[0].startswith("the tape keeps 16.00 KiB: 1 saved")
    with tg.measure(), tg.GradientTape() as tape:
        assert str(report(tape)).splitlines()[0] == "the tape keeps 0 B: nothing"
        tape.watch(x)
        z = tg.exp(x)
        assert "test_report.py:" in str(saved(tape)) and "lines" not in str(saved(tape))
    del z


def test_tables_of_rows_made_by_hand() -> None:
    """Numbers to the right, the rest to the left; a note in brackets is no line; lines have at most 100 characters."""
    rows = (
        Row(7, "input", (64, 64), "float32", 16384, 16384, "saved", "/src/a.py:3"),
        Row(12, "tanh", (2, 64), "float32", 512, 0, "pending", "(noted)", times=2, made_from=(7, 9)),
        Row(13, "slice", (), "float32", 4, 0, "view", "/src/a.py:14", made_from=(7,)),
    )
    assert str(Report(rows)).splitlines() == [
        "the tape keeps 16.00 KiB: 1 saved, 1 pending, 1 view",
        "     kept       value           made by  state    again  line",
        "16.00 KiB  %7   float32[64,64]  input    saved           a.py:3",
        "      0 B  %12  float32[2,64]   tanh     pending  2      ?        from %7 %9",
        "      0 B  %13  float32[]       slice    view            a.py:14  in %7",
    ]
    one = Row(7, "", (64, 64), "float32", 16384, 16384, "saved", "/src/a.py:3")
    others = len(str(Saved((one,))).splitlines()[2]) - len("made by")
    for length in (100, 101, 120):
        text = str(Saved((replace(one, op="n" * (length - others)),))).splitlines()[2]
        assert len(text) == 100 and text.endswith("a.py:3" if length == 100 else "...")
        assert text[:97] == f"16.00 KiB  %7  float32[64,64]  {'n' * (length - others)}  a.py:3"[:97]


@pytest.mark.parametrize("ask", [report, saved])
def test_only_a_tape_has_one(ask: Callable) -> None:
    with pytest.raises(tg.errors.NotATensorError, match="GradientTape"):
        ask(tensor(2))


# What checkpoints keep


@pytest.fixture(autouse=True, scope="module")
def captures() -> None:
    """Values that the ledger knows: it has forgotten those that were made before this module's tests began."""
    for make in (w, captured, count):
        make.cache_clear()
        make()


@functools.cache
def w() -> tg.Variable:
    return tg.Variable(tensor(64, 64), name="w")


@functools.cache
def captured() -> tg.Tensor:
    return tensor(64, 64)


@functools.cache
def count() -> tg.Variable:
    return tg.Variable(tensor(64, 64), trainable=False)


def block(x: tg.Tensor) -> tg.Tensor:
    return tg.tanh(tg.softmax(x @ w() * 0.1) @ captured())


def counting(x: tg.Tensor) -> tg.Tensor:
    count().assign_add(tg.ones((64, 64)))
    return block(x) * count()


def named(x: tg.Tensor) -> tg.Tensor:
    return tg.tanh(tg.name(x @ w(), "z")) @ captured()


def views(x: tg.Tensor) -> tg.Tensor:
    h = block(x)
    f = tg.recompute_grad(lambda a, b, c: tg.softmax(a) @ tg.softmax(b) + tg.sum(c))
    return f(h[1:], h.T, h[1:]) * f(h[1:], h.T, h)


def chain(x: tg.Tensor) -> tg.Tensor:
    y = (x, x * 2.0)
    for _ in range(3):
        y = tg.reversible(lambda x: tg.tanh(x @ w()), lambda x: x * 0.5)(*y)
    return y[0] + y[1]


def looped(x: tg.Tensor, f: Callable = block, **options: Any) -> tg.Tensor:
    return tg.checkpointed_loop(f, x, 9, **({"snapshots": 3} | options))


def open_loop(x: tg.Tensor) -> tg.Tensor:
    left = iter(range(9))
    return tg.checkpointed_loop(block, x, while_=lambda s: next(left, None) is not None, snapshots=3)


def several_arguments(x: tg.Tensor) -> tg.Tensor:
    f = tg.recompute_grad(lambda x, n, k: tg.softmax(x) * n + k["z"] * k["a"])
    return f(x, 3.0, {"z": tensor(64, 64), "a": np.ones((64, 64), np.float32)})


PROGRAMS: dict[str, Callable] = {
    "checkpoints": lambda x: tg.recompute_grad(block)(tg.recompute_grad(block)(x)),
    "nested": lambda x: tg.recompute_grad(lambda x: tg.recompute_grad(block)(x) * 2.0)(x),
    "arguments": several_arguments,
    "state": lambda x: tg.recompute_grad(counting)(tg.recompute_grad(counting)(x)),
    "saving": lambda x: tg.recompute_grad(block, policy=tg.policies.save_matmuls)(x),
    "offloading": lambda x: tg.recompute_grad(named, policy=tg.policies.offload_names("z"))(x),
    "views": views,
    "loop": looped,
    "mixed": lambda x: looped(x, schedule="mixed"),
    "sqrt": lambda x: looped(x, schedule="sqrt"),
    "disk": lambda x: looped(x, snapshots=1, disk=2),
    "loop with state": lambda x: looped(x, counting),
    "open loop": open_loop,
    "bytes": lambda x: looped(x, snapshots=None, bytes="400KiB"),
    "scan": lambda x: tg.scan(lambda s, _: (tg.recompute_grad(block)(s), None), x, length=4)[0],
    "sequential": lambda x: tg.checkpoint_sequential([block] * 6, x, segments=2),
    "reversible": chain,
    "all": lambda x: looped(chain(tg.recompute_grad(block)(views(x).T @ tensor(63, 64)))),
}


@pytest.mark.parametrize("budget", [None, "64MiB", 16])
@pytest.mark.parametrize("program", PROGRAMS)
def test_what_is_listed_is_what_the_ledger_counts_as_activations(program: str, budget: Any) -> None:
    with tg.measure() as before:
        limit = before.live_bytes + 16 * 16384 + 8192 if budget == 16 else budget
    with nullcontext() if limit is None else tg.memory_budget(limit), tg.measure(), tg.GradientTape() as tape:
        x = tensor(64, 64)
        tape.watch(x)
        y = PROGRAMS[program](x * 1.5)
        found = saved(tape)
        assert found.kept_bytes == LEDGER.by("category")["activation"] == report(tape).kept_bytes
        assert found.kept_bytes >= 16384
        assert len({row.index for row in found.rows}) == len(found.rows)
    tape.gradient(y, x)
    assert report(tape).rows == ()


def test_what_a_checkpoint_keeps_is_listed_by_name() -> None:
    x, h = tensor(64, 64), tensor(64, 64)
    with tg.GradientTape() as tape:
        tape.watch([x, h])
        y = tg.recompute_grad(lambda a, b: tg.softmax(a) * b * h)(x * 1.0, np.ones((64, 64), np.float32))
        z = tg.recompute_grad(named, policy=tg.policies.offload_names("z"))(y)
    found = {(r.op, r.state): r.kept_bytes for r in report(tape).rows if r.nbytes > 4}
    assert found == {
        ("multiply", "saved"): 16384, ("input", "saved"): 16384, ("variable w", "held"): 0, ("matmul", "offloaded"): 0,
        ("recompute_grad(<lambda>)", "recomputed"): 0, ("recompute_grad(named)", "recomputed"): 0,
    }  # fmt: skip
    assert saved(tape).kept_bytes == 3 * 16384 + 512  # and a number
    del z


def test_what_variables_held_when_a_checkpoint_was_called_is_listed() -> None:
    """Its function changes them: the rerun will see what was there before."""
    x = tensor(64, 64)
    with tg.GradientTape() as tape:
        tape.watch(x)
        y = tg.recompute_grad(counting)(x)
    assert ("variable (a former content)", "held", 0) in [(r.op, r.state, r.kept_bytes) for r in saved(tape).rows]
    del y
