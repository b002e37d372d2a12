"""check_grads finds what is wrong and passes what is right."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import tapegrad as tg
from tapegrad.testing import DerivativeError, check_grads

X = np.array([0.3, 0.7, 1.1])


@pytest.mark.parametrize(
    ("f", "args"),
    [
        (lambda x: tg.sin(x) * x, (X,)),
        (lambda x, y: (x * y, [tg.sum(tg.exp(x))]), (X, X + 1)),
        (lambda x: {"a": x**3.0, "b": 2.0 * x[0]}, (X,)),
        (lambda x: tg.matmul(tg.reshape(x, (1, 3)), tg.reshape(x, (3, 1))), (X,)),
    ],
)
def test_right_derivatives_pass(f: Any, args: tuple) -> None:
    check_grads(f, args, order=2)
    check_grads(f, [tg.asarray(a) for a in args], order=1, modes=["rev"])


def rule(of: Any, grad: Any) -> Any:
    return tg.custom_gradient(lambda x: (of(x), lambda ct: grad(ct, x)))


def test_wrong_derivatives_are_found_with_order_and_mode() -> None:
    wrong = rule(tg.sin, lambda ct, x: ct * tg.sin(x))
    with pytest.raises(DerivativeError, match="order 1, forward mode"):
        check_grads(wrong, (X,), order=1)
    with pytest.raises(AssertionError, match="order 1, reverse mode"):
        check_grads(wrong, (X,), order=1, modes=("rev",))
    nearly = rule(tg.sin, lambda ct, x: ct * tg.cos(x) * (1 + 1e-3))
    with pytest.raises(DerivativeError):
        check_grads(nearly, (X,), order=1)
    # right to first order, constant to second
    flat = rule(tg.sin, lambda ct, x: ct * tg.stop_gradient(tg.cos(x)))
    check_grads(flat, (X,), order=1)
    with pytest.raises(DerivativeError, match="order 2, reverse mode"):
        check_grads(flat, (X,), order=2, modes=("rev",))
    with pytest.raises(DerivativeError, match="order 2"):
        check_grads(flat, (X,), order=2)


def test_a_rule_that_gives_nan_is_found() -> None:
    broken = rule(tg.sin, lambda ct, x: ct * np.nan)
    with pytest.raises(DerivativeError):
        check_grads(broken, (X,), order=1, modes=("rev",))


def test_directions_repeat() -> None:
    seen = []

    def f(x: Any) -> Any:
        seen.append(tg.stop_gradient(x).numpy())
        return x * x

    check_grads(f, (X,), order=1)
    first, seen[:] = list(seen), []
    state = tg.random.default_generator.state
    check_grads(f, (X,), order=1)
    assert all(np.array_equal(a, b) for a, b in zip(first, seen, strict=True))
    assert tg.random.default_generator.state == state
