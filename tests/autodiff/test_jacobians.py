"""jacfwd and hessian: against reverse mode, central differences, structures, empty shapes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from checks import Counted, bits_equal, c64, same, values, var64

import tapegrad as tg

FUNCTIONS = [
    lambda x: tg.tanh(x) * tg.sum(x * x),
    lambda x: {"a": tg.sum(x), "b": (x * x, tg.cumulative_sum(tg.reshape(x, (-1,))))},
    lambda x: tg.prod(x, axis=0) + tg.max(x, axis=0),
    lambda x: tg.recompute_grad(lambda q: tg.exp(tg.matmul(q, tg.matrix_transpose(q))))(x),
    lambda x: tg.take(tg.sin(x), [1, 0, 0], axis=0),
    lambda x: x,
    lambda x: tg.asarray(np.ones((2,))),
    lambda x: tg.sum(x) if tg.sum(x) > 100 else tg.exp(x),  # its control flow may depend on values
]


@pytest.mark.parametrize("f", FUNCTIONS)
@pytest.mark.parametrize("shape", [(2, 3), (2, 1), (3, 2)])
def test_forward_mode_equals_reverse_mode(f: Any, shape: tuple, rng: np.random.Generator) -> None:
    x = c64(rng.uniform(0.5, 1.5, shape))
    same(tg.jacfwd(f)(x), tg.jacobian(f)(x), rtol=1e-10, atol=1e-12)
    same(tg.jacfwd(tg.jacobian(f))(x), tg.hessian(f)(x), rtol=1e-10, atol=1e-12)


def test_several_arguments_and_structures(rng: np.random.Generator) -> None:
    def f(x: Any, tree: Any, k: float = 1.0) -> Any:
        return tg.matmul(x, tree["w"]) * k, {"s": tg.sum(x) * tree["b"]}

    x, tree = rng.normal(size=(2, 3)), {"w": rng.normal(size=(3,)), "b": rng.normal(size=())}
    for argnums in (0, 1, -1, (1, 0), [0]):
        same(tg.jacfwd(f, argnums)(x, tree, k=2.0), tg.jacobian(f, argnums)(x, tree, k=2.0), rtol=1e-10)
    same(tg.jacfwd(lambda v: v * v)(var64([1.0, 2.0])), np.diag([2.0, 4.0]))


@pytest.mark.parametrize("shape", [(0,), (0, 3), (2, 0)])
def test_empty_arguments(shape: tuple) -> None:
    x = np.zeros(shape)
    for f, of in ((lambda q: q * q, shape), (lambda q: tg.sum(q, axis=0), shape[1:]), (lambda q: tg.ones((2,)), (2,))):
        assert tg.jacfwd(f)(x).shape == tg.jacobian(f)(x).shape == (*of, *shape)
        assert tg.hessian(f)(x).shape == (*of, *shape, *shape)


def test_numbers_and_dtypes() -> None:
    same([tg.jacfwd(lambda q: q**3)(2.0), tg.jacfwd(tg.jacfwd(lambda q: q**3))(2.0)], [12.0, 12.0])
    found = tg.jacfwd(lambda a, b: a * b, (0, 1))(np.ones(2, np.float32), np.ones(2))
    assert [str(block.dtype) for block in found] == ["float64", "float64"]
    z = np.array([1.0 + 2.0j, 0.5 - 1.0j])
    same(tg.jacfwd(lambda q: q * q)(z), np.diag(2 * z))
    same(tg.jacobian(lambda q: q * q)(z), np.diag(2 * z).conj())


def test_forward_mode_runs_the_function_once() -> None:
    f = Counted(lambda q: tg.tanh(q) * tg.sum(q))
    x = c64(np.linspace(0.0, 1.0, 7))
    tg.jacfwd(f)(x)
    assert f.take() == 1


@pytest.mark.parametrize("shape", [(), (3,), (2, 2)])
def test_the_hessian_of_vectors_by_central_differences(shape: tuple, rng: np.random.Generator) -> None:
    weights, h = rng.normal(size=(2, int(np.prod(shape)))), 1e-4

    def f(x: Any) -> Any:
        return tg.sin(tg.matmul(weights, tg.reshape(x, (-1,)) ** 2))

    x = rng.normal(size=shape)
    found = values(tg.hessian(f)(x))
    assert found.shape == (2, *shape, *shape)
    found = found.reshape(2, x.size, x.size)
    for k in range(x.size):
        step = np.zeros(x.size)
        step[k] = h
        up, down = (values(tg.jacobian(f)(x + s * step.reshape(shape))).reshape(2, -1) for s in (1, -1))
        same(found[:, :, k], (up - down) / (2 * h), rtol=1e-5, atol=1e-6)


def test_the_hessian_of_one_float_has_the_bits_of_the_gradients_jacobian(rng: np.random.Generator) -> None:
    f = lambda q: tg.sum(tg.tanh(tg.matmul(q, q)) * q)
    x = c64(rng.normal(size=(3, 3)))
    assert bits_equal(tg.hessian(f)(x), tg.jacobian(tg.grad(f))(x))
    assert tg.hessian(lambda q: tg.sum(q * q, keepdims=True))(x).shape == (1, 1, 3, 3, 3, 3)


def test_captured() -> None:
    f = tg.function(tg.jacfwd(lambda q: tg.tanh(q) * tg.sum(q)))
    x = c64([0.5, 1.0, 2.0])
    found = [values(f(x)) for _ in range(3)]
    same(found[2], tg.jacobian(lambda q: tg.tanh(q) * tg.sum(q))(x), rtol=1e-11)
    assert bits_equal(found[2], found[0]) and f.stats.replays >= 1
