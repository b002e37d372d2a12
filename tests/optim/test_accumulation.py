"""Gradients of several calls, added up and applied as one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tapegrad as tg
from tapegrad import optim

MAKERS: dict[str, Callable[..., optim.Optimizer]] = {
    "sgd": lambda **o: optim.SGD(0.1, **o),
    "momentum": lambda **o: optim.SGD(0.1, 0.9, **o),
    "adamw, schedule": lambda **o: optim.AdamW(lambda n: 0.1 / (1 + n), **o),
    "rmsprop, clipped": lambda **o: optim.RMSprop(0.1, clipnorm=0.7, **o),
    "lamb": lambda **o: optim.LAMB(0.1, **o),
}
by_name = pytest.mark.parametrize("name", MAKERS)
SHAPES: list[tuple[tuple[int, ...], str]] = [((3, 4), "float32"), ((), "float64"), ((300, 300), "float32")]


def made() -> list[tg.Variable]:
    return [tg.Variable(np.random.default_rng(i).normal(size=s).astype(d)) for i, (s, d) in enumerate(SHAPES)]


def gradients(call: int) -> list[Any]:
    rng = np.random.default_rng(100 + call)
    return [rng.normal(size=s).astype(d) for s, d in SHAPES]


@by_name
@pytest.mark.parametrize("k", [2, 4])
def test_k_calls_are_one_step_with_the_mean(name: str, k: int) -> None:
    """A power of two: the quotients are exact."""
    vs, ws = made(), made()
    one, many = MAKERS[name](), MAKERS[name](gradient_accumulation_steps=k)
    for step in range(3):
        before = [w.numpy(copy=True) for w in ws]
        for i in range(k):
            for w, x in zip(ws, before, strict=True):
                np.testing.assert_array_equal(w.numpy(), x)
            assert int(many.iterations) == step and int(many.counters["calls"]) == i
            many.apply(gradients(k * step + i), ws)
        sums = gradients(k * step)
        for i in range(1, k):
            sums = [s + g for s, g in zip(sums, gradients(k * step + i), strict=True)]
        one.apply([np.asarray(s / k, s.dtype) for s in sums], vs)
        for v, w in zip(vs, ws, strict=True):
            np.testing.assert_array_equal(v.numpy(), w.numpy())
    assert int(many.iterations) == 3


@by_name
@pytest.mark.parametrize("k", [2, 3])
def test_captured_steps(name: str, k: int) -> None:
    def run(captured: bool) -> list[list[bytes]]:
        vs, optimizer = made(), MAKERS[name](gradient_accumulation_steps=k)

        def step(*gs: Any) -> None:
            optimizer.apply(gs, vs)

        f = tg.function(step) if captured else step
        found = []
        for i in range(10):
            f(*map(tg.asarray, gradients(i)))
            found.append([v.numpy().tobytes() for v in (*vs, *optimizer.variables)])
        if captured:
            assert f.stats.traces == 1 and f.stats.replays == 8 and not f.stats.fallbacks
        return found

    assert run(False) == run(True)


def test_a_gradient_that_is_skipped_counts_as_zeros() -> None:
    v, w = tg.Variable([0.0]), tg.Variable([0.0])
    optimizer = optim.SGD(1.0, gradient_accumulation_steps=2)
    optimizer.apply([[2.0], [4.0]], [v, w])
    optimizer.apply([[2.0], None], [v, w], skip_none=True)
    assert v.item() == -2 and w.item() == -2
    optimizer.apply([[2.0], None], [v, w], skip_none=True)  # what was added up before is forgotten
    optimizer.apply([[2.0], None], [v, w], skip_none=True)
    assert v.item() == -4 and w.item() == -2


def test_a_sum_goes_on_after_it_was_saved(tmp_path: Path) -> None:
    x = np.ones((1, 2), np.float32)

    def begun() -> tuple[Any, Any]:
        layer = tg.nn.Dense(1, kernel_initializer="ones")
        layer(x)
        return layer, optim.SGD(0.1, gradient_accumulation_steps=3)

    def step(layer: Any, optimizer: Any, i: int) -> None:
        vs = layer.trainable_variables
        optimizer.apply([tg.full(v.shape, i + 0.5) for v in vs], vs)

    layer, optimizer = begun()
    for i in range(5):
        step(layer, optimizer, i)
    layer.save(tmp_path / "m", optimizer)
    again, resumed = begun()
    again.load(tmp_path / "m", resumed)
    tree = {"layer": layer, "optimizer": optimizer}
    tg.distributed.save(tmp_path / "folder", tree)
    third = dict(zip(tree, begun(), strict=True))
    tg.distributed.load(tmp_path / "folder", third)
    step(layer, optimizer, 5)
    for other in ((again, resumed), tuple(third.values())):
        step(*other, 5)
        assert other[0].kernel.numpy().tobytes() == layer.kernel.numpy().tobytes()
        assert int(other[1].iterations) == 2
