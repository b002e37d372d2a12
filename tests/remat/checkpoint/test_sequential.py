"""checkpoint_sequential: budgets that are kept, bits of gradients, runs, plans, even segments, errors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from checks import Counted, bits_equal, c64, no_garbage, same, values, var64

import tapegrad as tg
from tapegrad.errors import RecomputeError
from tapegrad.remat.checkpoint.sequential import CheckpointedSequence, checkpoint_sequential

ROWS, WIDTH = 300, 48


def chain(length: int) -> tuple[list[Counted], list[tg.Variable]]:
    """Stages of several barriers each, and their variables."""
    rng = np.random.default_rng(0)
    weights = [var64(rng.normal(size=(WIDTH, WIDTH)) / 8) for _ in range(length)]

    def stage(w: tg.Variable) -> Callable:
        return lambda h: tg.sin(tg.matmul(tg.tanh(tg.matmul(h, w)), w))

    return [Counted(stage(w)) for w in weights], weights


def plain(functions: list) -> Callable:
    def run(h: Any) -> Any:
        for f in functions:
            h = f(h)
        return h

    return run


def gradients(f: Callable, x: tg.Tensor, sources: list) -> tuple[Any, int]:
    """The gradients of the chain's output, and the most bytes taken above those alive before."""
    with tg.measure() as m, tg.GradientTape() as tape:
        live = m.live_bytes
        tape.watch(x)
        found = tape.gradient(f(x), sources)
    return values(found), m.peak_bytes - live


@pytest.fixture(scope="module")
def x() -> tg.Tensor:
    return c64(np.random.default_rng(1).normal(size=(ROWS, WIDTH)))


@pytest.mark.parametrize("share", [1.2, 0.8, 0.6, 0.5, 0.4, 0.3, 0.28])
def test_the_budget_is_kept_and_the_bits_too(x: tg.Tensor, share: float) -> None:
    functions, weights = chain(10)
    wanted, peak = gradients(plain(functions), x, [x, *weights])
    budget = int(share * peak)
    sequence = checkpoint_sequential(functions, budget=budget)
    gradients(sequence, x, [x, *weights])  # profiles
    for f in functions:
        f.take()
    found, used = gradients(sequence, x, [x, *weights])
    assert bits_equal(found, wanted) and used <= budget
    assert [f.take() for f in functions] == sequence.plan.runs
    slower = sequence.plan.rotor.cost / sequence.plan.rotor.plain_cost
    assert slower == 1 if share > 1 else 1 < slower < 2.5


def test_costs_grow_as_the_budget_shrinks(x: tg.Tensor) -> None:
    functions, weights = chain(8)
    _, peak = gradients(plain(functions), x, [x, *weights])
    costs = []
    for share in (1.2, 0.9, 0.7, 0.5, 0.35):
        sequence = checkpoint_sequential(functions, budget=int(share * peak))
        gradients(sequence, x, [x])
        costs.append(sequence.plan.rotor.cost)
    assert costs == sorted(costs) and costs[0] < costs[-1]


def test_an_impossible_budget_names_the_function_and_the_least_that_works(x: tg.Tensor) -> None:
    functions, weights = chain(6)
    functions[3].name = "the middle"  # type: ignore[attr-defined]
    functions[3].f = lambda h: plain(chain(4)[0])(h)
    with tg.GradientTape(), pytest.raises(RecomputeError, match=r"stage 3 \(the middle\)") as e:
        checkpoint_sequential(functions, x, budget="16 KiB")
    least = int(str(e.value).rsplit("least budget is ", 1)[1].split()[0])
    sequence = checkpoint_sequential(functions, budget=least)
    sources = [x, *(w for i, w in enumerate(weights) if i != 3)]
    gradients(sequence, x, sources)
    assert gradients(sequence, x, sources)[1] <= least
    with tg.GradientTape(), pytest.raises(RecomputeError, match=f"least budget is {least} "):
        checkpoint_sequential(functions, x, budget=least - 1)


def test_stages_of_many_shapes_views_and_captures() -> None:
    rng = np.random.default_rng(2)
    x, w, c = c64(rng.normal(size=(40, 64))), var64(rng.normal(size=(64, 8))), c64(rng.normal(size=8))
    functions = [
        lambda h: tg.concat([h, tg.sin(h)], axis=0), lambda h: h[::2], lambda h: tg.reshape(h, (-1, 64)),
        lambda h: tg.matmul(h, w), tg.tanh, lambda h: {"a": h * c, "b": h}, lambda s: s["a"] + tg.exp(s["b"]),
        tg.stop_gradient, lambda h: h * c, lambda h: h * tg.random.uniform(h.shape, dtype="float64"), tg.sum,
    ]  # fmt: skip
    seeded = lambda f: lambda q: (tg.random.seed(4), f(q))[1]
    wanted, _ = gradients(seeded(plain(functions)), x, [c])
    for options in ({}, {"segments": 1}, {"segments": 4}, {"segments": 50}, {"budget": "10MB"}, {"budget": 200_000}):
        sequence = CheckpointedSequence(functions, **options)
        for _ in range(2):
            found, _ = gradients(seeded(sequence), x, [c])
            assert bits_equal(found, wanted), options


def test_even_segments_by_default(x: tg.Tensor) -> None:
    functions, weights = chain(10)
    wanted, _ = gradients(plain(functions), x, [x, *weights])
    for segments, runs in ((None, [2] * 6 + [1] * 4), (4, [2] * 7 + [1] * 3), (1, [1] * 10), (10, [2] * 9 + [1])):
        for f in functions:
            f.take()
        found, _ = gradients(lambda q, k=segments: checkpoint_sequential(functions, q, segments=k), x, [x, *weights])
        assert bits_equal(found, wanted) and [f.take() for f in functions] == runs


def test_a_profile_changes_nothing_and_is_made_once_per_shape(x: tg.Tensor) -> None:
    state = tg.Variable(0, trainable=False)

    def counting(h: tg.Tensor) -> tg.Tensor:
        state.assign_add(1)
        return h * tg.random.uniform((), dtype="float64") * float(np.random.rand())

    f = Counted(counting)
    sequence = checkpoint_sequential([f, tg.sin, f], budget="1MiB")
    small = c64(np.ones(100))

    def run(g: Callable, q: tg.Tensor) -> Any:
        tg.random.seed(3), np.random.seed(3), state.assign(0)
        return gradients(g, q, [q])[0], state.numpy()

    wanted = run(plain([f, tg.sin, f]), small)
    assert f.take() == 2
    first, second = run(sequence, small), run(sequence, small)
    assert bits_equal(first, wanted) and bits_equal(second, wanted) and f.take() == 2 + 2 + 2
    run(sequence, c64(np.ones(50)))
    assert f.take() == 4
    same(sequence(small).shape, small.shape)
    assert f.take() == 2  # no tape: no profile, no plan


def test_second_order_and_nothing_left_behind() -> None:
    x, w = c64([0.3, 0.6]), var64([0.5, 1.1])
    functions = [lambda h: tg.sin(h * w), tg.exp, lambda h: h * h * w, tg.sum]
    f = checkpoint_sequential(functions, budget="1MB")
    same(tg.hessian(f)(x), values(tg.hessian(plain(functions))(x)), rtol=1e-11)
    tg.testing.check_grads(f, (x.numpy(),), order=2)
    with no_garbage():
        gradients(checkpoint_sequential(functions, budget="1MB"), x, [x, w])


def test_plans_can_be_printed(x: tg.Tensor) -> None:
    functions, weights = chain(3)
    sequence = checkpoint_sequential(functions, budget="10 MB")
    gradients(sequence, x, [x, *weights])
    said = str(sequence.plan).splitlines()
    assert len(said) == 5 and "112.50 KiB" in said[1] and "1.000 times the work" in said[-1]
    assert [len(line.split()) for line in said[:4]] == [4, 7, 7, 7], "every function's bytes are in its own line"
    sequence = checkpoint_sequential([tg.sin, tg.cos, tg.exp])
    gradients(sequence, x, [x])
    assert [line.split() for line in str(sequence.plan).splitlines()[1:]] == [
        ["0", "sin", "2"], ["1", "cos", "1"], ["2", "exp", "1"],
    ]  # fmt: skip


def test_no_functions_and_bad_arguments() -> None:
    x = c64([1.0, 2.0])
    with tg.GradientTape() as tape:
        tape.watch(x)
        y = checkpoint_sequential([], x)
    same(tape.gradient(y, x), [1.0, 1.0])
    sequence = checkpoint_sequential([tg.sin], budget="1MiB")
    same(sequence(x), np.sin(x.numpy()))
    assert sequence.plan is None  # no tape asks for one
    with pytest.raises(RecomputeError, match="not both"):
        checkpoint_sequential([tg.sin], x, budget=10, segments=2)
    with pytest.raises(RecomputeError, match="at least one segment"):
        checkpoint_sequential([tg.sin], x, segments=0)
    with pytest.raises(ValueError, match="size"):
        checkpoint_sequential([tg.sin], x, budget="much")
