"""Joining, splitting, padding: NumPy's values and exact gradients."""

from __future__ import annotations

import numpy as np
import pytest

import tapegrad as tg
from tapegrad.errors import AxisError, IndexingError, ShapeError, TapegradError
from tapegrad.testing import check_grads


def same(got, wanted):
    assert got.dtype == wanted.dtype
    np.testing.assert_array_equal(got.numpy(), wanted)


@pytest.fixture(params=[(2, 3, 4), (20, 30, 40)])
def x(request, rng):
    return rng.standard_normal(request.param)


def test_concat_and_stack(x):
    for axis in (0, 1, -1):
        same(tg.concat([x, x * 2, x[:, :, :]], axis=axis), np.concatenate([x, x * 2, x], axis=axis))
        same(tg.stack([x, x + 1], axis=axis), np.stack([x, x + 1], axis=axis))
    same(tg.concat([x, x[0, 0]], axis=None), np.concatenate([x, x[0, 0]], axis=None))
    same(tg.concat([x.astype("f4"), np.ones(x.shape, "i8")]), np.concatenate([x.astype("f4"), np.ones(x.shape)]))
    a, b = tg.asarray(x[0]), tg.asarray(x[1, :2])
    check_grads(lambda a, b: tg.concat([a, b, a * b[0]]), [a[:3, :4], b[:2, :4]])
    check_grads(lambda a: tg.stack([a, a * a], axis=1), [x[0, :2, :2]])


def test_concat_of_lazy_operands_and_unused_ones(rng):
    x = tg.asarray(rng.standard_normal((200, 100)))
    y = tg.concat([x * 2, tg.zeros((0, 100), dtype="float64"), x + 1])
    same(y, np.concatenate([x.numpy() * 2, x.numpy() + 1]))
    g = tg.grad(lambda x: tg.sum(tg.concat([x * 2, tg.ones((1, 100), dtype="float64"), x])))(x)
    assert (g.numpy() == 3).all()


def test_unstack_and_split(x):
    assert all((a.numpy() == b).all() for a, b in zip(tg.unstack(x, axis=-1), np.moveaxis(x, -1, 0), strict=True))
    for how, axis in ((2, 0), ([1, 2], 1), ([2, 1, 9, -1], 2), ([], 0)):
        for a, b in zip(tg.split(x, how, axis=axis), np.split(x, how, axis=axis), strict=True):
            same(a, b)
    for a, b in zip(tg.array_split(x, 3, axis=2), np.array_split(x, 3, axis=2), strict=True):
        same(a, b)
    check_grads(lambda x: [p * p for p in tg.split(x, [1], axis=1)], [x[:2, :3, 0]])
    check_grads(lambda x: [p * p for p in tg.unstack(x)], [x[:2, :3, 0]])
    with pytest.raises(ShapeError, match="split: axis 1 of .* use array_split"):
        tg.split(np.ones((2, 5)), 2, axis=1)


@pytest.mark.parametrize(
    "bounds", [23, range(0, 30, 2), [5] * 9 + [7, 40], [9, 3, 12, 1, -2, 8, 8, 2, 11, 30]], ids=str
)
@pytest.mark.parametrize("axis", [0, 1])
def test_many_sections(bounds, axis):
    x = np.random.default_rng(0).standard_normal((30, 30))
    expected = np.array_split(x, bounds, axis)
    sections = tg.array_split(x, bounds, axis)
    for a, b in zip(sections, expected, strict=True):
        np.testing.assert_array_equal(a, b)
    weigh = lambda parts: sum((i + 1.0) * part.sum() for i, part in enumerate(parts))
    gradient = tg.grad(lambda x: weigh(tg.array_split(x, bounds, axis)))(x)
    weights = np.zeros((30, 30))
    for i, part in enumerate(np.array_split(weights, bounds, axis)):
        part += i + 1.0
    np.testing.assert_array_equal(gradient, weights)


def test_pieces_are_views(x):
    t = tg.asarray(x)
    parts = (*tg.split(t, 2, axis=0), *tg.unstack(t), tg.flip(t, axis=1))
    assert all(np.shares_memory(p.numpy(), t.numpy()) for p in parts)


def test_flip_roll_tile_repeat(x):
    for axis in (None, 0, (0, -1)):
        same(tg.flip(x, axis=axis), np.flip(x, axis))
    for shift, axis in ((1, 0), (-7, 2), (5, None), ((1, -2), (0, 1)), (100, 1), (0, 0), (2, (0, 1))):
        same(tg.roll(x, shift, axis=axis), np.roll(x, shift, axis))
    for times in (2, (2, 1, 3), (2, 1, 1, 1), (1, 0, 1)):
        same(tg.tile(x, times), np.tile(x, times))
    for times, axis in ((2, None), (3, 1), (0, 2), (np.arange(x.shape[1]), 1), ([2], 0)):
        same(tg.repeat(x, times, axis=axis), np.repeat(x, times, axis))
    small = x[:2, :2, :3]
    check_grads(lambda x: tg.flip(x, axis=1) * x, [small])
    check_grads(lambda x: tg.roll(x, (1, 2), axis=(0, 2)) * x, [small])
    check_grads(lambda x: tg.tile(x, (2, 1, 2)) ** 2, [small])
    check_grads(lambda x: tg.repeat(x, [0, 2, 3], axis=2) ** 2, [small])


@pytest.mark.parametrize("mode", ["edge", "reflect", "symmetric", "wrap"])
def test_pad_modes(mode, x):
    for widths in (1, (1, 2), ((0, 3), (2, 0), (1, 1)), 5):
        same(tg.pad(x, widths, mode), np.pad(x, widths, mode))
    check_grads(lambda x: tg.pad(x, ((1, 2), (0, 3)), mode) ** 2, [x[:2, :3, 0]])
    same(tg.pad(x[:1, :1, :1], 2, mode), np.pad(x[:1, :1, :1], 2, mode))


def test_pad_constant(x):
    for widths in (1, (1, 2), ((0, 3), (2, 0), (1, 1)), 0, ((1, 0),)):
        same(tg.pad(x, widths), np.pad(x, widths))
        same(tg.pad(x, widths, constant_values=2.5), np.pad(x, widths, constant_values=2.5))
    check_grads(lambda x, c: tg.pad(x, 1, constant_values=c) ** 2, [x[:2, :2, 0], 1.5 * np.ones(())])
    assert tg.pad(tg.asarray(3.0), []).item() == 3
    same(tg.pad(np.ones((0, 2)), 1), np.pad(np.ones((0, 2)), 1))


def test_jacobians_run_on_all_rows(rng):
    x = tg.asarray(rng.standard_normal((2, 3)))
    for f in (lambda x: tg.concat([x, x * x], axis=1), lambda x: tg.pad(x, 1), lambda x: tg.flip(x, axis=1)):
        j = tg.jacobian(f)(x)
        for row in np.ndindex(f(x).shape):
            np.testing.assert_allclose(j[row].numpy(), tg.grad(lambda x, row=row, f=f: f(x)[row])(x).numpy())


def test_errors():
    for call, error, words in (
        (lambda: tg.concat([]), ShapeError, "concat: needs at least one"),
        (lambda: tg.concat([np.ones((2, 3)), np.ones((2, 2))]), ShapeError, r"\(2, 2\) does not continue \(2, 3\)"),
        (lambda: tg.concat([1.0, 2.0]), AxisError, "axis 0"),
        (lambda: tg.stack([np.ones(2), np.ones(3)]), ShapeError, r"stack: \(3,\) and \(2,\)"),
        (lambda: tg.pad(np.ones(3), -1), ShapeError, "pad_width"),
        (lambda: tg.pad(np.ones(3), ((1, 1), (1, 1))), ShapeError, "pad_width"),
        (lambda: tg.pad(np.ones(3), 1, "mirror"), TapegradError, "not one of"),
        (lambda: tg.pad(np.ones(0), 1, "edge"), ShapeError, "empty"),
        (lambda: tg.repeat(np.ones(3), [1, 2]), ShapeError, "repeats of shape"),
        (lambda: tg.repeat(np.ones(3), [1, 2.0, 3]), IndexingError, "integers"),
        (lambda: tg.roll(np.ones((3, 3)), (1, 2, 3), axis=(0, 1)), ShapeError, "3 shifts for 2 axes"),
    ):
        with pytest.raises(error, match=words):
            call()


@pytest.mark.parametrize("walk", ["unstack", "iter", "scan", "scan backwards"])
def test_gradients_of_all_slices_take_few_passes(walk: str) -> None:
    """A slice of the whole each: every gradient would be as long as the whole."""

    def moved(n: int) -> int:
        def f(x: tg.Tensor) -> tg.Tensor:
            if walk.startswith("scan"):
                step = lambda h, row: (tg.sin(h + row), None)
                return tg.sum(tg.scan(step, tg.zeros(3, dtype="float64"), x, reverse="back" in walk)[0])
            rows = tg.unstack(x) if walk == "unstack" else x
            return tg.sum(sum(tg.sin(i * row) for i, row in enumerate(rows)))

        x = tg.asarray(np.random.default_rng(0).normal(size=(n, 3)))
        with tg.measure() as m:
            g = tg.grad(f)(x)
        if not walk.startswith("scan"):
            i = np.arange(n)[:, None]
            np.testing.assert_allclose(g.numpy(), i * np.cos(i * x.numpy()), rtol=1e-12)
        return m.bytes_moved

    assert moved(600) < 16 * moved(60)
