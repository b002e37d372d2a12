"""Cotangents of one value that come from several operations are added, however they come."""

from __future__ import annotations

from contextlib import nullcontext

import numpy as np
import pytest

import tapegrad as tg


@pytest.mark.parametrize("within", [nullcontext, tg.measure, lambda: tg.memory_budget("1GiB")],
                         ids=["plain", "measure", "budget"])  # fmt: skip
@pytest.mark.parametrize("size", [3, 100_000])
def test_those_of_a_large_value_come_from_operations_without_elements(size, within):
    """The operations are small enough to be run at once; the sums of their cotangents are not."""
    x, none = tg.asarray(np.ones((size, 1))), tg.asarray(np.ones((size, 0)))
    with within(), tg.GradientTape() as tape:
        tape.watch(x)
        y = tg.sum(x)
        for _ in range(4):
            y = y + tg.sum(tg.sin(none * x))
        g = tape.gradient(y, x)
    np.testing.assert_array_equal(g.numpy(), np.ones((size, 1)))


SLICES = [
    1,
    slice(None),
    slice(2, 5),
    slice(None, None, -2),
    slice(5, 5),
    (Ellipsis, 0),
    (slice(1, 4), 2),
    (0, slice(3)),
]


def reads(seed: int):
    """Random reads of an array of 7 x 4: slices, all of it, and rows by index; each with a weight."""
    random = np.random.default_rng(seed)
    indices = [SLICES[k] for k in random.integers(0, len(SLICES), 12)] + [np.array([3, 0, 3]), None]
    random.shuffle(indices)
    return [(index, float(weight)) for index, weight in zip(indices, random.normal(size=len(indices)), strict=True)]


def total(x, pairs):
    parts = (
        x if index is None else tg.take(x, index, axis=0) if type(index) is np.ndarray else x[index]
        for index, _ in pairs
    )
    return sum(tg.sum(part * part * weight) for part, (_, weight) in zip(parts, pairs, strict=True))


@pytest.mark.parametrize("seed", range(12))
def test_those_of_slices_are_added_where_they_belong(seed):
    pairs = reads(seed)
    start = np.random.default_rng(seed + 100).normal(size=(7, 4))
    weights = np.zeros_like(start)
    for index, weight in pairs:
        np.add.at(weights, slice(None) if index is None else index, weight)
    x = tg.asarray(start)
    gradient = tg.grad(lambda x: total(x, pairs))
    np.testing.assert_allclose(gradient(x).numpy(), 2 * weights * start, rtol=1e-12)
    hessian = tg.jacobian(gradient)(x).numpy().reshape(28, 28)
    np.testing.assert_allclose(hessian, np.diag(2 * weights.ravel()), rtol=1e-12, atol=1e-12)
    both = tg.vmap(gradient)(tg.stack([x, 2 * x])).numpy()
    np.testing.assert_allclose(both, np.stack([2 * weights * start, 4 * weights * start]), rtol=1e-12)
    captured = tg.function(gradient)
    for _ in range(3):
        assert captured(x).numpy().tobytes() == gradient(x).numpy().tobytes()


def test_those_of_slices_of_a_source_are_kept_by_a_persistent_tape():
    x = tg.asarray(np.arange(6.0))
    with tg.GradientTape(persistent=True) as tape:
        tape.watch(x)
        h = x * 2.0
        y = sum(h[i] * h[i + 1] for i in range(5))
    inner, outer = tape.gradient(y, [h, x])
    assert tape.gradient(y, h).numpy().tobytes() == inner.numpy().tobytes()
    np.testing.assert_array_equal(outer.numpy(), 2 * inner.numpy())
    np.testing.assert_array_equal(inner.numpy(), [2, 4, 8, 12, 16, 8])
