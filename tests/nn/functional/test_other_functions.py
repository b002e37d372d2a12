"""Functions that jax.nn or Chainer have and PyTorch has not: against formulas in NumPy, and their derivatives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import tapegrad as tg
from tapegrad.errors import ShapeError, TapegradError
from tapegrad.nn import functional as F
from tapegrad.testing import check_grads

rng = np.random.default_rng(31)


def n(*shape: int) -> np.ndarray:
    return rng.normal(size=shape)


X = n(3, 4) * 2
LABELS = np.array([2, 0, 3])
softplus = lambda x: np.log1p(np.exp(x))
Y, Z = n(5, 3), n(5, 2)
centred = lambda a: a - a.mean(0)
covariance = centred(Y).T @ centred(Z) / 5
own = centred(Y).T @ centred(Y) / 5
own[np.diag_indices(3)] = 0
signs = np.where(np.arange(4) == LABELS[:, None], 1, -1)
distance = np.linalg.norm(X - X[::-1] * 0.3, axis=1)
similar = np.array([1, 0, 1])
W, DRAWN = n(6, 4), np.array([[1, 5], [0, 3], [2, 2]])
own_score = (W[LABELS] * X).sum(1, keepdims=True)
other_score = np.einsum("nmk,nk->nm", W[DRAWN], X)
shares = np.exp(np.concatenate([own_score, other_score], 1))
shares /= shares.sum(1, keepdims=True)
kept = np.array([2, -1, 3])

CASES: list[tuple[str, Callable[..., Any], list[np.ndarray], Any]] = [
    ("squareplus", F.squareplus, [X], (X + np.sqrt(X * X + 4)) / 2),
    ("sparse_plus", F.sparse_plus, [X], np.where(X <= -1, 0, np.where(X >= 1, X, (X + 1) ** 2 / 4))),
    ("sparse_sigmoid", F.sparse_sigmoid, [X], np.clip((X + 1) / 2, 0, 1)),
    ("log1mexp", F.log1mexp, [np.abs(X) + 0.01], np.log(1 - np.exp(-np.abs(X) - 0.01))),
    ("logmeanexp", lambda x: F.logmeanexp(x, axis=1), [X], np.log(np.exp(X).mean(1))),
    ("logmeanexp all", lambda x: F.logmeanexp(x, keepdims=True), [X], np.log(np.exp(X).mean(keepdims=True))),
    ("crelu", F.crelu, [X], np.concatenate([np.maximum(X, 0), np.maximum(-X, 0)], axis=1)),
    ("maxout", lambda x: F.maxout(x, 2), [X], X.reshape(3, 2, 2).max(2)),
    ("standardize", F.standardize, [X], (X - X.mean(1, keepdims=True)) / np.sqrt(X.var(1, keepdims=True) + 1e-5)),
    ("standardize by", lambda x: F.standardize(x, mean=1.0, variance=4.0, epsilon=0), [X], (X - 1) / 2),
    ("squared_difference", F.squared_difference, [X, X[::-1].copy()], (X - X[::-1]) ** 2),
    ("bernoulli_nll", lambda y: F.bernoulli_nll(X > 0, y), [X + 1], (softplus(X + 1) - (X > 0) * (X + 1)).sum()),
    ("gaussian_kl_divergence", lambda a, b: F.gaussian_kl_divergence(a, b, reduce="no"), [X, X / 2],
     (X**2 + np.exp(X / 2) - X / 2 - 1) / 2),
    ("cross_covariance", F.cross_covariance, [Y, Z], (covariance**2).sum() / 2),
    ("cross_covariance no", lambda y, z: F.cross_covariance(y, z, "no"), [Y, Z], covariance),
    ("decov", F.decov, [Y], (own**2).sum() / 2),
    ("decov no", lambda y: F.decov(y, "no"), [Y], own),
    ("hinge", lambda x: F.hinge(x, LABELS), [X], np.maximum(0, 1 - signs * X).sum() / 3),
    ("hinge L2", lambda x: F.hinge(x, LABELS, "L2", "no"), [X], np.maximum(0, 1 - signs * X) ** 2),
    ("contrastive", lambda x, y: F.contrastive(x, y, similar, 5.0, "no"), [X, X[::-1] * 0.3],
     (similar * distance**2 + (1 - similar) * np.maximum(0, 5 - distance) ** 2) / 2),
    ("black_out", lambda x, w: F.black_out(x, LABELS, w, DRAWN), [X / 4, W / 4], None),
    ("negative_sampling", lambda x, w: F.negative_sampling(x, LABELS, w, lambda shape: DRAWN, 2), [X, W],
     (softplus(-own_score).sum() + softplus(other_score).sum())),
    ("negative_sampling kept", lambda x, w: F.negative_sampling(x, kept, w, lambda shape: DRAWN, 2, "no"), [X, W],
     (softplus(-own_score[:, 0]) + softplus(other_score).sum(1)) * (kept >= 0)),
]  # fmt: skip


@pytest.mark.parametrize(("name", "f", "operands", "want"), CASES, ids=[c[0] for c in CASES])
def test_formulas_and_derivatives(name: str, f: Callable[..., Any], operands: list[np.ndarray], want: Any) -> None:
    if want is not None:
        np.testing.assert_allclose(f(*operands).numpy(), want, rtol=1e-11, atol=1e-13)
    check_grads(f, operands, order=2)


def test_black_out() -> None:
    want = -(np.log(shares[:, 0]) + np.log(1 - shares[:, 1:]).sum(1))
    np.testing.assert_allclose(F.black_out(X, LABELS, W, DRAWN, "no").numpy(), want, rtol=1e-9)


def test_log1mexp_is_precise_and_has_its_limits() -> None:
    x = np.array([1e-20, 1e-3, 50.0])
    np.testing.assert_allclose(
        F.log1mexp(x).numpy(), [np.log(1e-20), np.log(-np.expm1(-1e-3)), -np.exp(-50)], rtol=1e-14
    )
    with np.errstate(divide="ignore", invalid="ignore"):
        assert F.log1mexp(np.zeros(1)).item() == -np.inf
    gradient = tg.grad(lambda x: tg.sum(F.log1mexp(x)))(tg.asarray(np.array([800.0, 1.0]))).numpy()
    assert gradient[0] == 0 and np.isfinite(gradient[1])


def test_clustering_by_loops() -> None:
    x, labels = n(2, 3, 4, 4), rng.integers(0, 4, size=(2, 4, 4))
    near, far, small = F.discriminative_margin_based_clustering_loss(x, labels, 0.5, 1.5, 3, norm=2, gamma=1.0)
    means = np.zeros((3, 2, 3))
    for c in range(3):
        for b in range(2):
            chosen = x[b][:, labels[b] == c + 1]
            means[c, b] = chosen.mean(1) if chosen.size else 0
    norm = lambda a, axis: np.sqrt((a**2).sum(axis))
    np.testing.assert_allclose(small.item(), norm(means, (1, 2)).sum() / 6, rtol=1e-11)
    spread = [
        (np.maximum(norm(means[c][:, :, None, None] - x, 1) - 0.5, 0) ** 2)[labels == c + 1].sum()
        / (labels == c + 1).sum()
        for c in range(3)
    ]
    np.testing.assert_allclose(near.item(), sum(spread) / 3, rtol=1e-11)
    gaps = [np.maximum(3 - norm(means[a] - means[b], 1), 0) ** 2 for a in range(3) for b in range(a + 1, 3)]
    np.testing.assert_allclose(far.item(), np.sum(gaps) / 6, rtol=1e-11)
    check_grads(
        lambda x: F.discriminative_margin_based_clustering_loss(x, labels, 0.5, 1.5, 3, norm=2), [x], order=1
    )  # fmt: skip


def test_gumbel_softmax_draws_classes() -> None:
    tg.random.seed(5)
    logits = np.log(np.array([0.1, 0.2, 0.7])) * np.ones((20000, 1))
    hard = F.gumbel_softmax(logits, hard=True).numpy()
    assert set(np.unique(np.round(hard, 12))) == {0.0, 1.0}
    np.testing.assert_allclose(hard.mean(0), [0.1, 0.2, 0.7], atol=0.015)
    x = tg.asarray(logits[:2])
    found = []
    for flag in (True, False):
        tg.random.seed(6)
        with tg.GradientTape() as tape:
            tape.watch(x)
            y = tg.sum(F.gumbel_softmax(x, tau=0.7, hard=flag, dim=1)[:, 0])
        found.append(tape.gradient(y, x).numpy())
    np.testing.assert_array_equal(*found)


def test_renormalization() -> None:
    x, gamma, beta, mean, var = n(6, 3, 2), n(3), n(3), n(3) * 0.1, rng.random(3) + 0.5
    column = lambda v: v[:, None]
    got = F.fixed_batch_normalization(x, gamma, beta, mean, var, eps=0.1)
    want = (x - column(mean)) / np.sqrt(column(var) + 0.1) * column(gamma) + column(beta)
    np.testing.assert_allclose(got.numpy(), want, rtol=1e-11, atol=1e-12)
    assert np.array_equal(F.fixed_batch_renormalization(x, gamma, beta, mean, var, eps=0.1).numpy(), got.numpy())
    # without limits r and d undo the batch's statistics, for the values though not for the gradient
    running = tg.Variable(mean, trainable=False), tg.Variable(var, trainable=False)
    free = F.batch_renormalization(x, gamma, beta, 1e9, 1e9, 0.1, *running, decay=0.75)
    np.testing.assert_allclose(free.numpy(), want, rtol=1e-9, atol=1e-10)
    np.testing.assert_allclose(running[0].numpy(), 0.75 * mean + 0.25 * x.mean((0, 2)), rtol=1e-12)
    np.testing.assert_allclose(running[1].numpy(), 0.75 * var + 0.25 * x.var((0, 2), ddof=1), rtol=1e-12)
    tight = F.batch_renormalization(x, gamma, beta, 1.0, 0.0, 1e-5, mean, var)
    np.testing.assert_allclose(tight.numpy(), F.batch_norm(x, None, None, gamma, beta, True).numpy(), rtol=1e-9)
    with pytest.raises(ShapeError, match="fixed_batch_normalization: wanted"):
        F.fixed_batch_normalization(x, gamma[:2], beta, mean, var)


def test_decorrelation_whitens() -> None:
    x = n(20, 4, 3) @ n(3, 3)
    mean, projection = tg.Variable(np.zeros((2, 2)), trainable=False), tg.Variable(np.zeros((2, 2, 2)), trainable=False)
    y = F.decorrelated_batch_normalization(x, 2, 1e-12, mean, projection, decay=0.0)
    rows = y.numpy().swapaxes(0, 1).reshape(2, 2, 60)
    np.testing.assert_allclose(rows @ rows.swapaxes(1, 2) / 60, np.broadcast_to(np.eye(2), (2, 2, 2)), atol=1e-8)
    again = F.fixed_decorrelated_batch_normalization(x, mean, projection, 2)
    np.testing.assert_allclose(again.numpy(), y.numpy(), rtol=1e-9, atol=1e-10)
    check_grads(lambda x: F.decorrelated_batch_normalization(x, 2, 0.1), [x[:5]], order=2, rtol=1e-3)
    with pytest.raises(ShapeError, match="divisible by 3 groups"):
        F.decorrelated_batch_normalization(x, 3)


def test_depthwise_local_and_deformable_convolutions() -> None:
    x, w = n(2, 3, 5, 6), n(2, 3, 3, 2)
    y = F.depthwise_convolution_2d(x, w, n(6) * 0, 2, 1).numpy()
    for c in range(3):
        want = F.conv2d(x[:, c : c + 1], w[:, c : c + 1], None, 2, 1).numpy()
        np.testing.assert_allclose(y[:, 2 * c : 2 * c + 2], want, rtol=1e-12)
    kernel = n(4, 3, 3, 2)
    same = np.broadcast_to(kernel[:, None, None], (4, 3, 5, 3, 3, 2))
    local, plain = F.local_convolution_2d(x, same), F.conv2d(x, kernel)
    np.testing.assert_allclose(local.numpy(), plain.numpy(), rtol=1e-11)
    check_grads(lambda x, w: F.local_convolution_2d(x, w, stride=2), [x, n(2, 2, 3, 3, 3, 2)], order=2)
    still = F.deformable_convolution_2d_sampler(x, np.zeros((2, 12, 5, 7)), kernel, n(4) * 0, 1, (1, 1))
    np.testing.assert_allclose(still.numpy(), F.conv2d(x, kernel, None, 1, 1).numpy(), rtol=1e-11, atol=1e-12)
    moved = np.zeros((2, 12, 3, 5))
    moved[:, 6:] = 1.0  # one row down
    down = F.deformable_convolution_2d_sampler(x, moved, kernel).numpy()
    np.testing.assert_allclose(down[:, :, :2], plain.numpy()[:, :, 1:], rtol=1e-11, atol=1e-12)
    f = lambda x, o, w: F.deformable_convolution_2d_sampler(x, o, w, stride=2)
    check_grads(f, [x, rng.random((2, 12, 2, 3)) * 0.8 + 0.1, kernel], order=2)
    for bad in (
        lambda: F.depthwise_convolution_2d(x, w[0]),
        lambda: F.local_convolution_2d(x, same[:, 1:]),
        lambda: F.deformable_convolution_2d_sampler(x, moved[:, :10], kernel),
    ):
        with pytest.raises(ShapeError, match="convolution"):
            bad()


def test_shift_moves_groups_of_channels() -> None:
    x = n(1, 10, 4, 5)
    y = F.shift(x).numpy()
    np.testing.assert_array_equal(y[:, 8:], x[:, 8:])  # the centre is last, with what is left over
    np.testing.assert_array_equal(y[0, 0, :-1, :-1], x[0, 0, 1:, 1:])
    assert not y[0, 0, -1].any() and not y[0, 0, :, -1].any()
    np.testing.assert_array_equal(y[0, 4, 1:, 1:], x[0, 4, :-1, :-1])  # the last tap has the centre's place
    check_grads(lambda x: F.shift(x, (3, 1), 2), [n(1, 3, 4, 2)], order=2)
    with pytest.raises(ShapeError, match="c >= 9"):
        F.shift(x[:, :8])


def test_unpooling_is_a_transpose_and_a_pyramid_is_made_of_maxima() -> None:
    x = n(2, 3, 4)
    y = F.unpooling_1d(x, 2)
    np.testing.assert_array_equal(y.numpy(), np.repeat(x, 2, axis=2)[..., :-1])
    np.testing.assert_array_equal(F.unpooling_1d(x, 2, cover_all=False).numpy(), np.repeat(x, 2, axis=2))
    for dims, f in ((2, F.unpooling_2d), (3, F.unpooling_3d)):
        x = n(1, 2, *(3, 2, 2)[:dims])
        y = f(x, 3, 2, 1, cover_all=False)
        v = n(*y.shape)
        pooled = getattr(F, f"avg_pool{dims}d")(v, 3, 2, 1).numpy() * 3**dims
        np.testing.assert_allclose(np.sum(y.numpy() * v), np.sum(pooled * x), rtol=1e-11)
        assert f(x, 3, 2, 1, outsize=y.shape[2:]).shape == y.shape
    image = n(2, 3, 4, 8)
    levels = F.spatial_pyramid_pooling_2d(image, 3).numpy()
    assert levels.shape == (2, 3 * 21, 1, 1)
    np.testing.assert_array_equal(levels[:, :3, 0, 0], image.max((2, 3)))
    quarters = image.reshape(2, 3, 2, 2, 2, 4).max((3, 5)).reshape(2, 12)
    np.testing.assert_array_equal(levels[:, 3:15, 0, 0], quarters)


def test_what_does_not_fit_is_named() -> None:
    bad: list[tuple[Any, str]] = [
        (lambda: F.maxout(X, 3), "parts of 3"),
        (lambda: F.glu(n(3)), "even length"),
        (lambda: F.hinge(X, LABELS, "L3"), "L1"),
        (lambda: F.contrastive(X, X, LABELS[:2]), "contrastive: wanted"),
        (lambda: F.decov(X, "sum"), "half_squared_sum"),
        (lambda: F.cross_covariance(Y, X), "cross_covariance: wanted"),
        (lambda: F.black_out(X, LABELS, W, DRAWN[:2]), r"samples \(3, m\)"),
        (lambda: F.negative_sampling(X, LABELS, W[:, :2], lambda s: DRAWN, 2), "negative_sampling: wanted"),
        (lambda: F.unpooling_2d(n(3, 4), 2), "unpooling_2d"),
        (lambda: F.bernoulli_nll(X, X[0]), "bernoulli_nll: wanted input and target of one shape"),
        (lambda: F.spatial_pyramid_pooling_2d(X, 2), "spatial_pyramid_pooling_2d"),
    ]
    for call, message in bad:
        with pytest.raises(TapegradError, match=message):
            call()


NORMS: dict[str, tuple[tuple[int, ...], Any]] = {
    "batch_norm": ((4, 2), lambda x, p: F.batch_norm(x, p, p, p, p)),
    "batch_norm of training": ((4, 2), lambda x, p: F.batch_norm(x, p, p, p, p, training=True)),
    "instance_norm": ((4, 2, 3), lambda x, p: F.instance_norm(x, p, p, p, p, use_input_stats=False)),
    "group_norm": ((4, 2, 3), lambda x, p: F.group_norm(x, 2, p, p)),
    "batch_renormalization": ((4, 2), lambda x, p: F.batch_renormalization(x, p, p, 3.0, 5.0, 2e-5, p, p)),
    "fixed_batch_normalization": ((4, 2), lambda x, p: F.fixed_batch_normalization(x, p, p, p, p)),
    "fixed_batch_renormalization": ((4, 2), lambda x, p: F.fixed_batch_renormalization(x, p, p, p, p)),
}


@pytest.mark.parametrize("name", NORMS)
def test_norms_take_sequences_as_they_take_tensors(name: str) -> None:
    shape, norm = NORMS[name]
    x = tg.asarray(np.random.default_rng(3).normal(size=shape).astype(np.float32))
    np.testing.assert_array_equal(norm(x, [1.5, 0.5]).numpy(), norm(x, tg.asarray([1.5, 0.5])).numpy())
    with pytest.raises(ShapeError, match="wanted"):
        norm(x, [1.5, 0.5, 0.25])
