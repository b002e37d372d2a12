"""Captured steps that change some rows of a table: programs write them over the old ones, when all works are done."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from captured import alike
from checks import bits_equal
from rows_cases import training

import tapegrad as tg
from tapegrad import optim
from tapegrad.capture.capture import capture

SHAPE = (1000, 16)
AT = np.array([3, 999, 3])


def table(dtype: str = "float32", shape: tuple[int, ...] = SHAPE) -> tg.Variable:
    return tg.Variable(tg.astype(np.random.default_rng(3).normal(size=shape).astype("f4"), dtype))


def plain(v: tg.Variable, w: tg.Variable, train: Callable[[Any], Any], at: Any) -> Any:
    return train(at)


def read_afterwards(v: tg.Variable, w: tg.Variable, train: Callable[[Any], Any], at: Any) -> Any:
    return train(at), tg.sum(v * 2.0)


def twice(v: tg.Variable, w: tg.Variable, train: Callable[[Any], Any], at: Any) -> Any:
    return train(at), train((at + 1) % 1000)


def returned(v: tg.Variable, w: tg.Variable, train: Callable[[Any], Any], at: Any) -> Any:
    old = v.value()
    return train(at), v.value(), old


def old_value_elsewhere(v: tg.Variable, w: tg.Variable, train: Callable[[Any], Any], at: Any) -> Any:
    w.assign(v)
    return train(at)


def new_value_elsewhere(v: tg.Variable, w: tg.Variable, train: Callable[[Any], Any], at: Any) -> Any:
    loss = train(at)
    w.assign(v)
    return loss


STEPS = (plain, read_afterwards, twice, returned, old_value_elsewhere, new_value_elsewhere)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.__name__)
def test_bits_are_those_of_an_eager_run(step: Callable[..., Any], dtype: str) -> None:
    def program(function: Callable[..., Any]) -> Any:
        v, w, optimizer = table(dtype), table(dtype), optim.LazyAdam(0.1)
        train = training(v, optimizer)
        f = function(lambda at: step(v, w, train, at))
        given = [f(tg.asarray((AT + k) % 1000)) for k in range(5)]
        return given, v, w, optimizer.variables

    alike(program, (1, 3))


@pytest.mark.parametrize("shape", [(1000, 16), (10, 3)], ids=["large", "small"])
def test_large_tables_alone_are_written_in_place(shape: tuple[int, ...]) -> None:
    """A small one is copied for each replay anyway."""
    v = table(shape=shape)
    train = training(v, optim.SGD(0.1))
    train(AT % shape[0])
    program = capture(train, (tg.asarray(AT % shape[0]),), {})
    over = [write.over for write in program.writes if write.over is not None]
    large = v.nbytes > 32 * 1024
    assert len(over) == large and any("rows_update" in step.names for step in program.steps) != large


def test_an_error_changes_nothing() -> None:
    v, optimizer = table(), optim.LazyAdam(0.1)
    f = tg.function(training(v, optimizer))
    for _ in range(4):
        f(tg.asarray(AT))
    before = [x.numpy(copy=True) for x in (v, *optimizer.variables)]
    with pytest.raises(IndexError):
        f(tg.asarray(AT + 1000))
    assert f.stats.replays == 2 and not f.stats.fallbacks
    for x, old in zip((v, *optimizer.variables), before, strict=True):
        np.testing.assert_array_equal(x.numpy(), old)


def test_a_value_that_is_held_does_not_change() -> None:
    v, w = table(), table()
    f, eager = tg.function(training(v, optim.LazySGD(0.1, 0.9))), training(w, optim.LazySGD(0.1, 0.9))
    for _ in range(4):
        held, array = v.value(), v.numpy()
        before = array.copy()
        f(tg.asarray(AT))
        eager(tg.asarray(AT))
        np.testing.assert_array_equal(held, before)
        np.testing.assert_array_equal(array, before)
        assert bits_equal(v.value(), w.value())
        del held, array


def test_a_budget_is_kept_and_bits_are_the_same() -> None:
    v, w = table(shape=(20_000, 16)), table(shape=(20_000, 16))
    one, other = optim.LazyAdam(0.1), optim.LazyAdam(0.1)
    f, eager = tg.function(training(v, one), budget=4 * v.nbytes), training(w, other)
    for k in range(5):
        f(tg.asarray(AT + k))
        eager(tg.asarray(AT + k))
    assert f.stats.replays >= 3
    for x, y in zip((v, *one.variables), (w, *other.variables), strict=True):
        assert bits_equal(x.value(), y.value())
    with tg.measure() as m:
        before = m.live_bytes
        f(tg.asarray(AT))
    assert m.peak_bytes - before < v.nbytes / 10
