"""Arguments at the edge of what a function takes: the limit's value, or an error that names the argument."""

from __future__ import annotations

import numpy as np
import pytest

import tapegrad as tg
from tapegrad.errors import TapegradError
from tapegrad.testing import check_grads

X = np.array([[1.0, 0.0, -2.0, 4.0], [0.5, 3.0, 0.0, 0.0]])


def test_normalize_by_the_number_of_nonzero_elements() -> None:
    f = tg.nn.functional.normalize
    np.testing.assert_array_equal(f(X, p=0.0), X / [[3], [2]])
    np.testing.assert_array_equal(f(np.zeros((2, 3)), p=0.0), np.zeros((2, 3)))
    check_grads(lambda x: f(x, p=0.0), [X[:, :1] + 1.5], order=1)


@pytest.mark.parametrize("delta", [0.0, -1.0, float("nan")])
def test_huber_loss_refuses_delta(delta: float) -> None:
    with pytest.raises(TapegradError, match="delta"):
        tg.nn.functional.huber_loss(X, X, delta=delta)


def test_smooth_l1_loss_refuses_a_negative_beta() -> None:
    with pytest.raises(TapegradError, match="beta"):
        tg.nn.functional.smooth_l1_loss(X, X, beta=-0.5)
    assert tg.nn.functional.smooth_l1_loss(X, X + 0.25, beta=0.0) == 0.25
