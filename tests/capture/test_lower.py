"""Lowered programs: what is there is not recomputed, and no arena grows but a small one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

import tapegrad as tg
from tapegrad.capture import arena, lower
from tapegrad.capture.capture import capture
from tapegrad.capture.lower import lowered
from tapegrad.capture.memory import ALIGNMENT
from tapegrad.capture.program import Program


def _programs(f: Callable[..., Any], *xs: tg.Tensor) -> tuple[Program, Program]:
    program = capture(f, xs, {})
    return program, lowered(program, ALIGNMENT, lambda p: ())


def _names(program: Program) -> list[str]:
    return [getattr(step.same, "__name__", None) or ", ".join(step.names) for step in program.steps]


def _data(*shape: int) -> tg.Tensor:
    return tg.asarray(np.random.default_rng(0).normal(size=shape).astype("float32"))


def _compared(f: Callable[..., Any], *xs: tg.Tensor) -> None:
    captured = tg.function(f)
    wanted: Sequence[tg.Tensor] = f(*xs)
    for _ in range(3):
        for a, b in zip(captured(*xs), wanted, strict=True):
            assert np.array_equal(a.numpy(), b.numpy())
    assert captured.stats.replays == 1 and captured.verify(*xs) is None


def test_a_value_that_two_regions_need_is_computed_once() -> None:
    def energy(x: tg.Tensor, y: tg.Tensor) -> tuple[tg.Tensor, tg.Tensor]:
        w = tg.exp(x) * y
        return w, tg.sum(w * w)

    plain, once = _programs(energy, _data(300, 300), _data(300, 300))
    assert len(plain.steps) == 2 and len(once.steps) == 4
    assert _names(once)[:3] == ["exp", "multiply", "multiply"]
    _compared(energy, _data(300, 300), _data(300, 300))


def test_numbers_of_equal_value_are_one() -> None:
    f = lambda x: (tg.sum(2.0 * x, axis=0), tg.sum(tg.asarray(np.float32(2)) * x, axis=1))
    _, once = _programs(f, _data(300, 300))
    assert _names(once).count("multiply") == 1
    _compared(f, _data(300, 300))


def test_what_differs_is_computed_twice() -> None:
    def f(x: tg.Tensor) -> tuple[tg.Tensor, ...]:
        return tg.sum(x[1:] * 2.0, axis=0), tg.sum(x[:-1] * 2.0, axis=0), tg.sum(x.T[:, 1:] * 2.0, axis=1)

    _, once = _programs(f, _data(300, 300))
    assert _names(once).count("multiply") == 3
    _compared(f, _data(300, 300))


def test_recomputation_that_saves_memory_stays() -> None:
    """A checkpoint in the function is there for its bytes: no arena becomes larger."""

    def step(x: tg.Tensor) -> tuple[tg.Tensor, tg.Tensor]:
        def block(h: tg.Tensor) -> tg.Tensor:
            for k in range(6):
                h = tg.cumulative_sum(tg.tanh(h + float(k)) * 0.1, axis=0)
            return h

        with tg.GradientTape() as tape:
            tape.watch(x)
            h = x
            for _ in range(4):
                h = tg.recompute_grad(block)(h)
            loss = tg.sum(h * h)
        return loss, tape.gradient(loss, x)

    plain, once = _programs(step, _data(300, 300))
    assert arena.plan(once, ALIGNMENT).nbytes <= arena.plan(plain, ALIGNMENT).nbytes
    assert 24 < _names(once).count("tanh") <= sum(step.names.count("tanh") for step in plain.steps)
    _compared(step, _data(300, 300))


def test_a_small_arena_grows_so_that_nothing_is_made_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """The exponential is kept beside all else, if that takes little."""

    def f(x: tg.Tensor) -> tuple[tg.Tensor, ...]:
        curve = lambda: tg.exp(x * 0.5)
        h = tg.cumulative_sum(curve() + 1.0, axis=0)
        first, *rest = [tg.cumulative_sum(h, axis=k % 2) for k in range(6)]
        for other in rest:
            first = tg.cumulative_sum(tg.maximum(first, other), axis=0)
        return (tg.sum(first * curve() * x),)

    plain, once = _programs(f, _data(300, 300))
    assert _names(once).count("exp") == 1
    assert arena.plan(once, ALIGNMENT).nbytes > arena.plan(plain, ALIGNMENT).nbytes
    _compared(f, _data(300, 300))
    monkeypatch.setattr(lower, "FREE", 2**20)
    plain, once = _programs(f, _data(300, 300))
    assert _names(once).count("exp") == 2
    assert arena.plan(once, ALIGNMENT).nbytes <= arena.plan(plain, ALIGNMENT).nbytes


def test_complex_numbers_and_single_elements_stay_as_they_are() -> None:
    """NumPy may round these otherwise where a result overwrites an operand."""
    z = tg.asarray((np.arange(9000.0) + 1j).astype("complex64"))
    f = lambda z: (z * z * z + z, tg.sum(z * z))
    plain, once = _programs(f, z)
    assert [step.names for step in once.steps] == [step.names for step in plain.steps]
    _compared(f, z)
