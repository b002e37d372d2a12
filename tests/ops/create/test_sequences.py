"""Sequences of unequal lengths."""

from __future__ import annotations

import numpy as np
import pytest

import tapegrad as tg
from tapegrad.errors import ShapeError
from tapegrad.testing import check_grads


def test_pad(rng):
    xs = [rng.normal(size=(n, 2)) for n in (2, 3, 0)]
    got = tg.pad_sequence(xs, padding=-1).numpy()
    assert got.shape == (3, 3, 2)
    np.testing.assert_array_equal(got[0, :2], xs[0])
    assert (got[0, 2:] == -1).all() and (got[2] == -1).all()
    assert tg.pad_sequence(xs, 5).shape == (3, 5, 2)
    check_grads(lambda x, y: tg.pad_sequence([x, y]) ** 2, xs[:2])
    with pytest.raises(ShapeError, match="longer than length=2"):
        tg.pad_sequence(xs, 2)
    with pytest.raises(ShapeError, match="first length only"):
        tg.pad_sequence([xs[0], xs[1].T])


def test_transpose(rng):
    xs = [rng.normal(size=(n, 2)) for n in (3, 3, 1)]
    got = tg.transpose_sequence(xs)
    assert [t.shape for t in got] == [(3, 2), (2, 2), (2, 2)]
    np.testing.assert_array_equal(got[0], [x[0] for x in xs])
    check_grads(lambda x, y: [t**2 for t in tg.transpose_sequence([x, y])], xs[1:])
    with pytest.raises(ShapeError, match="rise"):
        tg.transpose_sequence(xs[::-1])
