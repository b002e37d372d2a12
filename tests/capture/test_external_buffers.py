"""Large arguments are read where they lie, large results are written where the caller gets them."""

from __future__ import annotations

import numpy as np
import pytest
from budget_cases import live

import tapegrad as tg
from tapegrad.capture import external_buffers

SIZES = [200, 600]
"""One tile, several tiles: the calls of these hide their arrays."""


def _data(n: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(n, n)).astype("float32")


def _step(x: tg.Tensor, y: tg.Tensor) -> tuple[tg.Tensor, tg.Tensor]:
    z = tg.tanh(x * y) + x[::-1, ::-1].T
    return z @ y, tg.sum(z * z)


@pytest.mark.parametrize("n", SIZES)
def test_no_large_argument_and_no_large_result_has_a_place_in_the_arena(n: int) -> None:
    """There a value is a copy of what the caller has.  Within a budget, which each byte counts in, all have places."""
    x, y = tg.asarray(_data(n)), tg.asarray(_data(n, 1))

    def arena() -> int:
        f, before = tg.function(_step), live()
        for _ in range(3):
            f(x, y)
        assert f.stats.replays == 1
        taken = live() - before
        assert taken <= f.plan(x, y).arena_bytes + 1024, "what was followed without values takes no memory"
        return taken

    with tg.memory_budget("1GiB"):
        whole = arena()
    assert whole - arena() >= 2 * x.nbytes, "the arguments; the result takes the place of one"


@pytest.mark.parametrize("n", SIZES)
def test_each_call_has_results_of_its_own_and_lets_go_of_its_arguments(n: int) -> None:
    f = tg.function(_step)
    results = [f(tg.asarray(_data(n, k)), tg.asarray(_data(n, 9)))[0] for k in range(5)]
    for k, result in enumerate(results):
        wanted = _step(tg.asarray(_data(n, k)), tg.asarray(_data(n, 9)))[0]
        assert np.array_equal(result.numpy(), wanted.numpy())
    with tg.measure() as m:
        before = m.live_bytes
        x = tg.asarray(_data(n))
        f(x, tg.asarray(_data(n)))
        del x
        assert m.live_bytes == before


@pytest.mark.parametrize("n", SIZES)
def test_within_a_budget_all_lies_in_the_arena(n: int) -> None:
    f, x, y = tg.function(_step), tg.asarray(_data(n)), tg.asarray(_data(n, 1))
    for _ in range(3):
        plain = f(x, y)
    with tg.memory_budget("1GiB"):
        kept = f(x, y)
    assert f.stats.replays == 2
    for a, b in zip(plain, kept, strict=True):
        assert np.array_equal(a.numpy(), b.numpy())


@pytest.mark.parametrize("n", SIZES)
def test_cotangents_may_have_gaps(n: int) -> None:
    f, x, y = tg.function(_step), tg.asarray(_data(n)), tg.asarray(_data(n, 1))
    for _ in range(3):
        found = []
        for g in (f, _step):
            with tg.GradientTape() as tape:
                tape.watch(x)
                z, _ = g(x, y)
                loss = tg.sum(z.T[::2] * y[::2])
            found.append(tape.gradient(loss, x).numpy())
        assert np.array_equal(*found)
    assert f.stats.replays == 2


def test_phantoms_are_found_in_closures_and_methods() -> None:
    """Where calls hide an array, code cannot put another in its place: they are made anew."""
    x = external_buffers.abstract_array.empty((3,), np.dtype("f4"))
    free = [np.add, len, np.copyto, np.add.reduce, lambda: 1, [1, (2.0, None)], {"a": np.ones(2)}, np.dtype("f4")]
    assert all(map(external_buffers.is_free, free))
    holder = type("Holder", (), {"method": lambda self: None})()
    holder.array = x
    hiding = [
        x,
        [x],
        {"a": (x,)},
        lambda: x,
        lambda y=x: y,
        holder.method,
        external_buffers.partial(np.add, x),
        x.fill,
        holder,
    ]
    assert not any(map(external_buffers.is_free, hiding))
    assert external_buffers.is_open((external_buffers.partial(np.add, out=x), ([x, 1], x)))
    assert not external_buffers.is_open((np.add, ([[x]],)))
