"""Conv2D, pooling layers, BatchNormalization."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import tapegrad as tg
from tapegrad import nn
from tapegrad.errors import ShapeError, TapegradError
from tapegrad.nn import functional as F

rng = np.random.default_rng(0)


def test_conv2d_is_the_function_with_its_weights() -> None:
    layer = nn.Conv2D(6, (3, 2), 2, "same", groups=2, activation="relu", bias_initializer="uniform", dtype="float64")
    x = rng.normal(size=(2, 4, 7, 6))
    y = layer(x)
    assert y.shape == (2, 6, 4, 3) and layer.kernel.shape == (6, 2, 3, 2)
    wanted = F.conv2d(x, layer.kernel, layer.bias, 2, ((1, 1), (0, 0)), 1, 2).numpy()
    np.testing.assert_array_equal(y.numpy(), np.maximum(wanted, 0))
    assert nn.Conv2D(2, 1, use_bias=False)(np.ones((1, 3, 2, 2))).shape == (1, 2, 2, 2)


def test_initial_weights_have_keras_scale() -> None:
    layer = nn.Conv2D(64, 3)
    layer(np.zeros((1, 16, 3, 3), "float32"))
    limit = (6 / (9 * 16 + 9 * 64)) ** 0.5
    assert 0.95 * limit < np.abs(layer.kernel.numpy()).max() <= limit


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: nn.Conv2D(0, 3), "positive integer for filters, got 0"),
        (lambda: nn.Conv2D(3, 3, groups=2), "3 filters do not divide into 2 groups"),
        (lambda: nn.Conv2D(3, (3, 3, 3)), r"for kernel_size, got \(3, 3, 3\)"),
        (lambda: nn.Conv2D(4, 3, groups=2)(np.ones((1, 3, 4, 4))), r"divisible by groups=2, got \(1, 3, 4, 4\)"),
        (lambda: nn.Conv2D(4, 3)(np.ones((3, 4, 4))), r"wanted inputs \(n, channels, h, w\).*got \(3, 4, 4\)"),
        (lambda: nn.GlobalAveragePooling2D()(np.ones((3, 4))), r"got \(3, 4\)"),
        (lambda: nn.BatchNormalization()(np.ones(3)), r"got \(3,\)"),
        (lambda: nn.BatchNormalization()(np.ones((0, 3)), training=True), "no elements"),
        (lambda: F.batch_norm(np.ones((2, 3)), None, None), "pass both"),
        (lambda: F.batch_norm(np.ones((2, 3)), None, None, np.ones(2), training=True), r"wanted weight \(3,\)"),
    ],
)
def test_what_does_not_fit_is_named(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(TapegradError, match=message):
        make()


def test_other_channels_than_built_for_are_refused() -> None:
    for layer in (nn.Conv2D(2, 1, name="l"), nn.BatchNormalization(name="l")):
        layer(np.ones((1, 3, 2, 2)))
        with pytest.raises(ShapeError, match="3"):
            layer(np.ones((1, 4, 2, 2)))


def test_pooling_layers() -> None:
    x = rng.normal(size=(2, 3, 5, 4)).astype("float32")
    np.testing.assert_array_equal(nn.MaxPool2D()(x).numpy(), F.max_pool2d(x, 2).numpy())
    same = nn.AveragePooling2D(3, 1, "same")(np.ones((1, 1, 4, 4))).numpy()
    np.testing.assert_allclose(same, 1.0)  # padding does not count
    np.testing.assert_allclose(nn.GlobalAveragePooling2D()(x).numpy(), x.mean((2, 3)), rtol=1e-6)


def test_batch_normalization() -> None:
    layer = nn.BatchNormalization(momentum=0.9, epsilon=1e-3, dtype="float64", gamma_initializer="uniform")
    x = rng.normal(size=(4, 3, 5, 2)) * 3 + 1
    mean, var = x.mean((0, 2, 3)), x.var((0, 2, 3))
    column = lambda v: v[:, None, None]
    np.testing.assert_allclose(
        layer(x, training=True).numpy(),
        (x - column(mean)) / np.sqrt(column(var) + 1e-3) * column(layer.gamma.numpy()), rtol=1e-10, atol=1e-12,
    )  # fmt: skip
    np.testing.assert_allclose(layer.moving_mean.numpy(), 0.1 * mean)
    np.testing.assert_allclose(layer.moving_variance.numpy(), 0.9 + 0.1 * var)
    before = layer.moving_mean.numpy()
    y = layer(x).numpy()
    np.testing.assert_allclose(y, (x - column(0.1 * mean)) / np.sqrt(column(0.9 + 0.1 * var) + 1e-3)
                               * column(layer.gamma.numpy()), rtol=1e-10, atol=1e-12)  # fmt: skip
    np.testing.assert_array_equal(layer.moving_mean.numpy(), before)
    assert [v.name.split("/")[-1] for v in layer.trainable_variables] == ["gamma", "beta"]


@pytest.mark.parametrize("again", [False, True])
def test_statistics_move_once(again: bool) -> None:
    tg.random.seed(3)
    x = tg.asarray(rng.normal(size=(4, 3, 6, 6)).astype("float32"))
    found = []
    for wrap in (lambda f: f, tg.recompute_grad):
        tg.random.seed(3)
        block = nn.Sequential([nn.Conv2D(4, 3, padding="same"), nn.BatchNormalization(), nn.Lambda(tg.relu)])
        block(x)
        call = wrap(block)
        with tg.GradientTape(persistent=again) as tape:
            tape.watch(x)
            loss = tg.sum(tg.square(call(x, training=True)))
        sources = [x, *block.trainable_variables]
        for _ in range(1 + again):
            gradients = tape.gradient(loss, sources)
        found.append([a.numpy().tobytes() for a in (*gradients, *block.variables)])
    assert found[0] == found[1]


@pytest.mark.parametrize("training", [False, True])
def test_batch_norm_like_torch(training: bool) -> None:
    torch = pytest.importorskip("torch")
    arrays = [rng.normal(size=(4, 3, 5)), rng.normal(size=3), rng.normal(size=3)]
    stats = [rng.normal(size=3), rng.random(3) + 0.5]
    theirs = [torch.tensor(a, requires_grad=True) for a in arrays]
    running = [torch.tensor(s) for s in stats]
    z = torch.nn.functional.batch_norm(theirs[0], *running, *theirs[1:], training=training)
    ours = [tg.asarray(a) for a in arrays]
    moving = [tg.Variable(s, trainable=False) for s in stats]
    with tg.GradientTape() as tape:
        tape.watch(ours)
        y = F.batch_norm(ours[0], *moving, *ours[1:], training=training)
    ct = rng.normal(size=y.shape)
    z.backward(torch.tensor(ct))
    np.testing.assert_allclose(y.numpy(), z.detach().numpy(), rtol=1e-10, atol=1e-12)
    for g, t in zip(tape.gradient(y, ours, output_gradients=tg.asarray(ct)), theirs, strict=True):
        np.testing.assert_allclose(g.numpy(), t.grad.numpy(), rtol=1e-9, atol=1e-12)
    for m, t in zip(moving, running, strict=True):
        np.testing.assert_allclose(m.numpy(), t.numpy(), rtol=1e-12)


@pytest.mark.parametrize("dims", [1, 2, 3])
def test_layers_of_one_to_three_sizes(dims: int) -> None:
    x = rng.normal(size=(2, 4, *(6, 5, 4)[:dims]))
    layer = getattr(nn, f"Conv{dims}D")(6, 2, padding="same", groups=2, dtype="float64")
    y = layer(x)
    want = getattr(F, f"conv{dims}d")(x, layer.kernel, layer.bias, padding="same", groups=2)
    np.testing.assert_array_equal(y.numpy(), want.numpy())
    limit = (6 / (2**dims * 2 + 2**dims * 6)) ** 0.5
    assert np.abs(layer.kernel.numpy()).max() <= limit
    largest, mean = getattr(nn, f"MaxPool{dims}D")(2, 1), getattr(nn, f"AveragePooling{dims}D")(2, padding=1)
    np.testing.assert_array_equal(largest(x).numpy(), getattr(F, f"max_pool{dims}d")(x, 2, 1).numpy())
    want = getattr(F, f"avg_pool{dims}d")(x, 2, None, 1, count_include_pad=False)
    np.testing.assert_array_equal(mean(x).numpy(), want.numpy())
    for make in (layer, largest, mean):
        with pytest.raises(ShapeError, match="axes"):
            make(x[0])
