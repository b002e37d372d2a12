"""Arrays in other hands: while one lives, its value is held, counts, and is not dropped."""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from checks import c64, same

import tapegrad as tg
from tapegrad import errors, memory

MIB = 2**20
SIDE = 256
ONE = SIDE * SIDE * 4
"""Bytes of one value."""
SLACK = 2**16
"""A block of the pool has 64 bytes more, to be aligned, and numbers have some."""

EXPORTS: dict[str, Callable[[Any], Any]] = {
    "numpy()": lambda t: t.numpy(),
    "asarray": np.asarray,
    "asarray(copy=False)": lambda t: t.__array__(copy=False),
    "a view": lambda t: t.numpy()[::2, 1:].T,
    "a view of another dtype": lambda t: np.asarray(t).view(np.int32)[:1],
    "memoryview": lambda t: memoryview(t.numpy()),
    "DLPack": lambda t: np.from_dlpack(t, copy=False),
    "a DLPack capsule": lambda t: t.__dlpack__(copy=False, max_version=(1, 0)),
    "DLPack before 1.0": lambda t: t.__dlpack__(copy=False),
    "a view of the tensor": lambda t: tg.reshape(t, (-1,)).numpy(),
}


def weights() -> tuple[tg.Tensor, tg.Tensor]:
    rng = np.random.default_rng(0)
    return tuple(tg.asarray(rng.standard_normal((SIDE, SIDE), np.float32) / 32) for _ in range(2))  # type: ignore


@pytest.mark.parametrize("export", EXPORTS.values(), ids=EXPORTS)
def test_an_exported_array_is_held_and_counts_until_it_goes(export: Callable[[Any], Any]) -> None:
    with memory.measure() as m:
        before = m.live_bytes
        x = tg.ones((SIDE, SIDE)) @ tg.ones((SIDE, SIDE))
        out = export(x)
        assert m.live_bytes == before + ONE
        del x
        gc.collect()
        assert m.live_bytes == before + ONE
        del out
        assert m.live_bytes == before


def test_a_copy_is_the_callers_and_does_not_count() -> None:
    with memory.measure() as m:
        before = m.live_bytes
        x = tg.ones((SIDE, SIDE)) @ tg.ones((SIDE, SIDE))
        mine = [x.numpy(copy=True), np.array(x), np.asarray(x, dtype=np.float64), x.__array__(copy=True)]
        mine.append(np.from_dlpack(x, copy=None))
        del x
        assert m.live_bytes == before
    for a in mine[:4]:
        a[0, 0] = 7


def real_bytes() -> int:
    """What NumPy has allocated, as the interpreter counts it."""
    domain = tracemalloc.DomainFilter(inclusive=True, domain=np.lib.tracemalloc_domain)
    return sum(t.size for t in tracemalloc.take_snapshot().filter_traces([domain]).traces)


def test_the_limit_is_physical_while_arrays_are_in_the_users_hands() -> None:
    """Every step keeps some of its values as arrays and lets go of those of the step before."""
    limit, kept = 22 * MIB // 4, []
    gc.collect()
    tracemalloc.start()
    try:
        x, w = weights()
        before = real_bytes() - 2 * ONE
        want = got = None
        with memory.memory_budget(limit), memory.measure() as m:
            for _ in range(2):
                kept = []
                with tg.GradientTape() as tape:
                    tape.watch(w)
                    h = x
                    for layer in range(20):
                        h = tg.tanh(h @ w)
                        if layer % 8 == 0:
                            kept.append(np.asarray(h)[::2])
                            assert real_bytes() - before <= limit + SLACK
                    loss = h.sum()
                got = tape.gradient(loss, w).numpy()
                assert real_bytes() - before <= limit + SLACK
                want = got if want is None else want
                np.testing.assert_array_equal(got, want)
        assert m.evictions and real_bytes() - before <= limit + SLACK
    finally:
        tracemalloc.stop()


def test_held_arrays_are_not_dropped_and_released_ones_are() -> None:
    x, w = weights()
    with memory.memory_budget(4 * MIB), memory.measure() as m:
        out: list[Any] = []
        with tg.GradientTape() as tape:
            tape.watch(w)
            h = x
            with pytest.raises(errors.BudgetError):
                for _ in range(40):
                    h = tg.softmax(h @ w)
                    out.append(h.numpy())
            assert 8 < len(out) <= 16  # of a quarter of a MiB each
            first = out[0].copy()
            np.testing.assert_array_equal(out[0], first)
            out.clear()
            before = m.evictions
            for _ in range(40):
                h = tg.softmax(h @ w)
            assert m.evictions > before
            loss = h.sum()
        assert tape.gradient(loss, w).shape == w.shape


def test_small_values_are_read_without_holding_them() -> None:
    """A history of losses must not keep the records of what led to them."""
    x = c64([1.0, 2.0])
    a = x.numpy()
    assert np.shares_memory(a, np.asarray(x)) and not a.flags.writeable
    with pytest.raises(ValueError, match="read-only"):
        a[0] = 3.0
    del x
    same(tg.asarray(a), [1.0, 2.0])


def test_a_variables_array_keeps_the_value_it_was_read_from() -> None:
    v = tg.Variable(np.ones((SIDE, SIDE), np.float32))
    a, same_again = v.numpy(), np.asarray(v)
    assert np.shares_memory(a, same_again) and not a.flags.writeable
    optimizer = tg.optim.SGD(0.5)
    for _ in range(3):
        optimizer.apply_gradients([(tg.ones(v.shape), v)])
    v.assign_add(tg.ones(v.shape))
    v.assign(tg.zeros(v.shape))
    assert (a == 1).all() and (v.numpy() == 0).all()
    mine = v.numpy(copy=True)
    mine[:] = 5
    assert (v.numpy() == 0).all()


@pytest.mark.parametrize("dtype", ["bool", "float16", "complex64", "longdouble", "bfloat16"])
def test_every_dtype_and_layout_is_exported_as_it_lies(dtype: str) -> None:
    values = (
        np.arange(600)
        .reshape(20, 30)
        .astype(pytest.importorskip("ml_dtypes").bfloat16 if dtype == "bfloat16" else dtype)
    )
    x = tg.asarray(values)
    for cut in (lambda t: t, lambda t: t[::-1, ::2], lambda t: t.T, lambda t: t[:0], lambda t: t[1:2, 0]):
        a, b = cut(x).numpy(), cut(values)
        assert a.dtype == b.dtype and a.shape == b.shape
        np.testing.assert_array_equal(a, b)
    scalar = tg.asarray(values)[3, 4].numpy()
    assert scalar.shape == () and scalar == values[3, 4]
    wide = tg.broadcast_to(tg.asarray(values[0]), (5, 30)).numpy()
    assert wide.shape == (5, 30) and not wide.flags.writeable


def test_reading_the_result_of_a_step_copies_nothing() -> None:
    """The step of bench/chain.py: only its four results are allocated (and tiles, which are small)."""
    n = 2**22
    x, w, b = (tg.asarray(np.full(n, v, np.float32)) for v in (0.5, 0.25, 0.125))

    def step() -> list[Any]:
        with tg.GradientTape() as tape:
            tape.watch([x, w, b])
            y = tg.tanh(x * w + b) * tg.sigmoid(x)
        gradients = tape.gradient(y, [x, w, b])
        return [y.numpy(), *(g.numpy() for g in gradients)]

    step()
    tracemalloc.start()
    try:
        out = step()
        assert tracemalloc.get_traced_memory()[1] < 4 * 4 * n + 8 * MIB
    finally:
        tracemalloc.stop()
    assert all(not a.flags.writeable for a in out)
