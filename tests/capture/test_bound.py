"""What a replay calls with its arguments made ready: products, and layer norms by oneDNN."""

from __future__ import annotations

import gc

import numpy as np
import pytest
from captured import alike

import tapegrad as tg
from tapegrad.device import onednn, threads
from tapegrad.device.numerics import blas, layer_norm_onednn


def data(*shape: int, seed: int = 0, dtype: str = "float32") -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(dtype)


def trained(function, rows: int = 200, width: int = 128):
    """Steps of a layer norm and two products, the weights of which are assigned in between, too."""
    weights = [tg.Variable(data(width, 4 * width, seed=1)), tg.Variable(data(4 * width, width, seed=2))]
    scale = [tg.Variable(data(width, seed=3)), tg.Variable(data(width, seed=4))]
    optimizer = tg.optim.SGD(0.001)

    @function
    def step(x):
        with tg.GradientTape() as tape:
            h = tg.layer_norm(tg.sin(x), *scale)
            h = tg.tanh(h @ weights[0]) @ weights[1] + x
            loss = tg.mean(tg.layer_norm(h, *scale) ** 2)
        optimizer.apply(tape.gradient(loss, [*weights, *scale]), [*weights, *scale])
        return loss

    found = []
    for i in range(6):
        found.append(step(tg.asarray(data(rows, width, seed=10 + i))))
        if i == 3:  # other memory
            weights[0].assign(data(width, 4 * width, seed=20))
            scale[0].assign(data(width, seed=21))
    return found, [v.numpy(copy=True) for v in (*weights, *scale)]


@pytest.mark.parametrize("rows", [1, 16, 200, 600])
def test_replays_have_the_bits_of_eager_calls(rows):
    alike(lambda function: trained(function, rows), (1, 4))


@pytest.mark.parametrize("dtype", ["float16", "float64"])
def test_those_of_other_dtypes_too(dtype):
    x, w = tg.asarray(data(64, 128, dtype=dtype)), tg.asarray(data(128, 128, dtype=dtype))

    def program(function):
        f = function(lambda x: tg.layer_norm(x @ w, w[0], w[1]) @ w)
        return [f(x * i) for i in range(4)]

    alike(program, (1, 2))


def test_a_replay_that_multiplies_has_one_thread_of_the_library_and_gives_it_back(monkeypatch):
    if blas.controls is None:
        pytest.skip("NumPy's library is another")
    w, numbers, seen = tg.asarray(data(256, 256)), [4], []
    monkeypatch.setattr(blas, "controls", (lambda: numbers[-1], numbers.append))
    bound = blas.bound

    def noted(*args):
        f, arrays = bound(*args)
        return (lambda *a: (seen.append(numbers[-1]), f(*a))), arrays

    monkeypatch.setattr(blas, "bound", noted)
    monkeypatch.setattr(blas, "assumes_one_thread", lambda f: getattr(f, "__name__", "") == "<lambda>")
    f = tg.function(lambda x: tg.sum(tg.sin(x) @ w))
    x = tg.asarray(data(256, 256, seed=1))
    for _ in range(4):
        f(x)
    assert seen == [1] * 3 and numbers[-1] == 4
    add = tg.function(lambda x: x + 1)
    numbers.clear()
    numbers.append(4)
    for _ in range(4):
        add(x)
    assert numbers == [4]  # where nothing is multiplied nobody is asked


def test_an_error_in_a_replay_gives_the_library_s_threads_back(monkeypatch):
    numbers = [4]
    monkeypatch.setattr(blas, "controls", (lambda: numbers[-1], numbers.append))
    w = tg.asarray(data(256, 256))
    f = tg.function(lambda x: tg.log(tg.sin(x) @ w))
    x = tg.asarray(data(256, 256, seed=1))
    with np.errstate(invalid="ignore"):
        for _ in range(3):
            f(x)
    with np.errstate(invalid="raise"), pytest.raises(FloatingPointError):
        f(x)
    assert numbers[-1] == 4


@pytest.mark.parametrize("rows", [1, 7, 512])
def test_a_layer_norm_of_one_block_looks_at_no_array_again(rows, monkeypatch):
    if onednn.library() is None:
        pytest.skip("oneDNN is not installed")
    calls = []
    for name in ("forward", "backward"):
        real = getattr(layer_norm_onednn.ByOneDNN, name)
        monkeypatch.setattr(
            layer_norm_onednn.ByOneDNN,
            name,
            lambda self, *a, real=real, name=name: calls.append(name) or real(self, *a),
        )
    x, gamma, beta = tg.asarray(data(rows, 128)), tg.asarray(data(128, seed=1)), tg.asarray(data(128, seed=2))

    def value_and_gradients(x):
        with tg.GradientTape() as tape:
            tape.watch([x, gamma, beta])
            loss = tg.sum(tg.sin(tg.layer_norm(tg.cos(x), gamma, beta)))
        return loss, tape.gradient(loss, [x, gamma, beta])

    def gradient_in_x(x):
        return tg.grad(lambda x: tg.sum(tg.sin(tg.layer_norm(tg.cos(x), gamma, beta))))(x)

    for f in (value_and_gradients, gradient_in_x):
        eager, captured = f(x * 2), tg.function(f)
        captured(x)
        captured(x)  # is compared with eager
        calls.clear()
        gc.collect()  # what the calls use is theirs
        replayed = captured(x * 2)
        assert not calls
        for got, want in zip(tg.nest.flatten(replayed), tg.nest.flatten(eager), strict=True):
            np.testing.assert_array_equal(got.numpy(), want.numpy())


def test_several_blocks_and_rows_that_do_not_lie_in_order_are_looked_at():
    gamma = tg.asarray(data(128, seed=1))
    x, small = tg.asarray(data(1400, 128)), tg.asarray(data(300, 128))  # three blocks, and one

    def program(function):
        f = function(lambda x: (tg.layer_norm(tg.cos(x), gamma, gamma), tg.layer_norm(tg.cos(x)[::2, :], gamma, gamma)))
        g = function(tg.grad(lambda x: tg.sum(tg.sin(tg.layer_norm(tg.cos(x)[:, :64], gamma[::2], gamma[::2])))))
        return [(f(x * i), g(x * i), f(small * i), g(small * i)) for i in range(1, 5)]

    alike(program)


@pytest.mark.parametrize("size", [200, 256])
def test_arguments_and_results_that_lie_outside_are_found_in_each_call(size):
    """Of one product, and of one in pieces."""
    w, gamma = tg.asarray(data(size, size)), tg.asarray(data(size, seed=1))

    def program(function):
        product, norm = function(lambda x: x @ w), function(lambda x: tg.layer_norm(x, gamma, gamma))
        xs = [tg.asarray(data(size, size, seed=i)) for i in range(5)]
        return [(product(x), norm(x)) for x in xs]

    alike(program, (1, 3), (1, 3))


@pytest.mark.parametrize("axis", [0, 1, 2, (0, 1), (0, 2), (1, 2), (0, 1, 2)])
@pytest.mark.parametrize("count", [1, 2])
def test_tiles_of_sums_along_any_axes(axis, count):
    """Those that are walked in order, one after the other, too."""
    before, x = threads.get_num_threads(), tg.asarray(data(5, 300, 700))
    threads.set_num_threads(count)
    try:

        def program(function):
            f = function(lambda x: (tg.sin(x) + x, tg.sum(tg.sin(x) * x, axis=axis)))
            return [f(x * i) for i in range(1, 5)]

        alike(program, (1, 2))
    finally:
        threads.set_num_threads(before)
