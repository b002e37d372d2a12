"""Recurrent layers against their formulas in NumPy and against torch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import tapegrad as tg
from tapegrad import nn
from tapegrad.errors import DTypeError, NotATensorError, ShapeError, TapegradError

KINDS: dict[str, Any] = {"rnn": nn.SimpleRNN, "lstm": nn.LSTM, "gru": nn.GRU}
by_kind = pytest.mark.parametrize("kind", KINDS)
rng = np.random.default_rng(0)
X = rng.normal(size=(3, 7, 5))


def made(kind: str, **options: Any) -> Any:
    tg.random.seed(1)
    return KINDS[kind](4, bias_initializer="uniform", dtype="float64", **options)


def sigmoid(x: Any) -> Any:
    return 1 / (1 + np.exp(-x))


def numpy_steps(kind: str, layer: Any, x: Any, state: list[Any] | None = None, mask: Any = None) -> Any:
    """All outputs (n, t, units) and the last states, by the formulas of the docstrings."""
    w, u = layer.kernel.numpy(), layer.recurrent_kernel.numpy()
    b = np.zeros((2, w.shape[1])) if layer.bias is None else layer.bias.numpy()
    state = state or [np.zeros((len(x), layer.units))] * layer.states
    outputs = []
    for t in range(x.shape[1]):
        h = state[0]
        if kind == "rnn":
            new = [np.tanh(x[:, t] @ w + h @ u + (b if b.ndim == 1 else 0))]
        elif kind == "lstm":
            i, f, a, o = np.split(x[:, t] @ w + h @ u + (b if b.ndim == 1 else 0), 4, axis=1)
            c = sigmoid(f) * state[1] + sigmoid(i) * np.tanh(a)
            new = [sigmoid(o) * np.tanh(c), c]
        else:
            (xz, xr, xh), (hz, hr, hh) = np.split(x[:, t] @ w + b[0], 3, axis=1), np.split(h @ u + b[1], 3, axis=1)
            z, r = sigmoid(xz + hz), sigmoid(xr + hr)
            new = [z * h + (1 - z) * np.tanh(xh + r * hh)]
        keep = np.ones(len(x), bool) if mask is None else mask[:, t]
        state = [np.where(keep[:, None], a, b) for a, b in zip(new, state, strict=True)]
        outputs.append(state[0])
    return np.stack(outputs, axis=1), state


@by_kind
@pytest.mark.parametrize("use_bias", [True, False])
def test_the_formulas(kind: str, use_bias: bool) -> None:
    layer = made(kind, return_sequences=True, return_state=True, use_bias=use_bias)
    first = [rng.normal(size=(3, 4)) for _ in range(layer.states)]
    mask = rng.random((3, 7)) < 0.6
    for given, masked in ((None, None), (first, None), (first, mask)):
        y, *states = layer(X, initial_state=given, mask=masked)
        wanted, last = numpy_steps(kind, layer, X, given, masked)
        np.testing.assert_allclose(y.numpy(), wanted, rtol=1e-10, atol=1e-12)
        for s, t in zip(states, last, strict=True):
            np.testing.assert_allclose(s.numpy(), t, rtol=1e-10, atol=1e-12)
    layer.return_sequences = layer.return_state = False
    np.testing.assert_array_equal(layer(X, initial_state=given, mask=masked).numpy(), y[:, -1].numpy())
    layer.return_sequences, layer.go_backwards = True, True
    backwards, _ = numpy_steps(kind, layer, X[:, ::-1])
    np.testing.assert_allclose(layer(X).numpy(), backwards, rtol=1e-10, atol=1e-12)


@by_kind
def test_like_torch(kind: str) -> None:
    """Values and all gradients; PyTorch's gates of a GRU are in another order."""
    torch = pytest.importorskip("torch")
    theirs = {"rnn": torch.nn.RNN, "lstm": torch.nn.LSTM, "gru": torch.nn.GRU}[kind](5, 4, batch_first=True).double()
    layer = made(kind, return_sequences=True)
    layer(X)
    order = {"rnn": [0], "lstm": [0, 1, 2, 3], "gru": [1, 0, 2]}[kind]
    rows = np.concatenate([np.arange(4) + 4 * k for k in order])
    to_ours = lambda p: p.detach().numpy()[rows].T
    biases = [to_ours(theirs.bias_ih_l0), to_ours(theirs.bias_hh_l0)]
    state = {"kernel": to_ours(theirs.weight_ih_l0), "recurrent_kernel": to_ours(theirs.weight_hh_l0)}
    layer.load_state_dict({**state, "bias": np.stack(biases) if kind == "gru" else sum(biases)})
    x, t = tg.Variable(X), torch.tensor(X, requires_grad=True)
    with tg.GradientTape() as tape:
        y = layer(x)
        loss = tg.sum(y**2)
    other = theirs(t)[0]
    np.testing.assert_allclose(y.numpy(), other.detach().numpy(), rtol=1e-9, atol=1e-12)
    (other**2).sum().backward()
    dx, dw, du = tape.gradient(loss, [x, layer.kernel, layer.recurrent_kernel])
    np.testing.assert_allclose(dx.numpy(), t.grad.numpy(), rtol=1e-8, atol=1e-11)
    np.testing.assert_allclose(dw.numpy(), to_ours_of(theirs.weight_ih_l0.grad, rows), rtol=1e-8, atol=1e-11)
    np.testing.assert_allclose(du.numpy(), to_ours_of(theirs.weight_hh_l0.grad, rows), rtol=1e-8, atol=1e-11)


def to_ours_of(gradient: Any, rows: Any) -> Any:
    return gradient.numpy()[rows].T


@by_kind
def test_derivatives_recomputation_and_captured_steps(kind: str) -> None:
    layer = made(kind)
    layer(X)
    tg.testing.check_grads(lambda x: layer(x), (X[:2, :3],), order=2)
    plain, again = (lambda x: tg.sum(layer(x) ** 2)), tg.recompute_grad(lambda x: tg.sum(layer(x) ** 2))
    np.testing.assert_array_equal(tg.grad(plain)(X).numpy(), tg.grad(again)(X).numpy())
    f = tg.function(lambda x: layer(x))
    for i in range(3):
        np.testing.assert_array_equal(f(tg.asarray(X + i)).numpy(), layer(X + i).numpy())
    assert f.stats.replays == 1


def test_a_gradient_takes_few_passes_over_a_long_sequence() -> None:
    """Of the inputs of t steps it would take t, if each step's were put among zeros by itself."""
    moved = []
    for t in (64, 128):
        layer = nn.SimpleRNN(64)
        x = tg.asarray(np.ones((8, t, 64), np.float32))
        layer(x)
        with tg.measure() as m:
            with tg.GradientTape() as tape:
                y = tg.sum(layer(x))
            tape.gradient(y, layer.kernel)
        moved.append(m.bytes_moved)
    assert moved[1] < 2.3 * moved[0]


@by_kind
def test_edges(kind: str) -> None:
    layer = made(kind, return_sequences=True, return_state=True)
    layer(X)
    y, *states = layer(X[:, :0])
    assert y.shape == (3, 0, 4) and all(s.shape == (3, 4) and not s.numpy().any() for s in states)
    assert layer(X[:0])[0].shape == (0, 7, 4) and layer(X[:, :1])[0].shape == (3, 1, 4)
    assert layer(X.astype(np.float32))[0].dtype == np.float64
    with pytest.raises(ShapeError, match=r"wanted inputs \(n, steps, 5\), got \(3, 7, 6\)"):
        layer(np.ones((3, 7, 6)))
    with pytest.raises(ShapeError, match=r"wanted inputs \(n, steps, features\), got \(3, 5\)"):
        made(kind)(X[:, 0])
    with pytest.raises(ShapeError, match=r"wanted a mask \(3, 7\), got \(7,\)"):
        layer(X, mask=np.ones(7, bool))
    with pytest.raises(ShapeError, match=r"initial states? \(3, 4\), got"):
        layer(X, initial_state=[np.ones((3, 5))] * layer.states)
    with pytest.raises(TapegradError, match="positive integer for units"):
        KINDS[kind](0)
    with pytest.raises(DTypeError, match="wanted real input"):
        layer(X + 1j)


def test_weights_as_keras_begins_them() -> None:
    layer = nn.LSTM(16, dtype="float64")
    layer(np.ones((1, 2, 8)))
    assert layer.bias.numpy().tolist() == [0.0] * 16 + [1.0] * 16 + [0.0] * 32
    u = layer.recurrent_kernel.numpy()
    np.testing.assert_allclose(u @ u.T, np.eye(16), atol=1e-12)
    plain = nn.LSTM(3, unit_forget_bias=False)
    plain(np.ones((1, 2, 8), np.float32))
    assert not plain.bias.numpy().any() and plain.kernel.shape == (8, 12)
    gru = nn.GRU(3)
    gru(np.ones((1, 2, 8), np.float32))
    assert gru.bias.shape == (2, 9)


def test_orthogonal_weights() -> None:
    for shape in ((5, 3), (3, 5), (2, 3, 4), (4, 4)):
        w = nn.initializers.orthogonal(shape, "float64", tg.random.Generator(0)).numpy().reshape(-1, shape[-1])
        product = w.T @ w if w.shape[0] >= w.shape[1] else w @ w.T
        np.testing.assert_allclose(product, np.eye(min(w.shape)), atol=1e-12)
    draws = [nn.initializers.orthogonal((1, 1), "float64", tg.random.Generator(i)).item() for i in range(40)]
    assert 10 < sum(x > 0 for x in draws) < 30  # QR alone has signs of its own
    with pytest.raises(ShapeError, match="orthogonal: wanted at least two axes"):
        nn.initializers.orthogonal((3,), "float32", tg.random.Generator(0))


@by_kind
@pytest.mark.parametrize("mode", ["concat", "sum", "mul", "ave", None])
def test_both_directions(kind: str, mode: str | None) -> None:
    layer = nn.Bidirectional(made(kind, return_sequences=True, return_state=True), mode)
    first = [rng.normal(size=(3, 4)) for _ in range(2 * layer.forward_layer.states)]
    found = layer(X, initial_state=first)
    one, other = layer.forward_layer, layer.backward_layer
    assert (one.kernel.numpy() != other.kernel.numpy()).any() and len(layer.trainable_variables) == 6
    a, sa = numpy_steps(kind, one, X, first[: one.states])
    b, sb = numpy_steps(kind, other, X[:, ::-1], first[one.states :])
    b = b[:, ::-1]
    wanted = {
        "concat": [np.concatenate([a, b], -1)],
        "sum": [a + b],
        "mul": [a * b],
        "ave": [(a + b) / 2],
        None: [a, b],
    }
    for x, y in zip(found, [*wanted[mode], *sa, *sb], strict=True):
        np.testing.assert_allclose(x.numpy(), y, rtol=1e-10, atol=1e-12)
    one.return_sequences = one.return_state = other.return_sequences = other.return_state = False
    last = layer(X, initial_state=first)
    lasts = last if mode is None else [last]
    wanted_last = {"concat": [np.concatenate([a[:, -1], b[:, 0]], -1)], None: [a[:, -1], b[:, 0]]}
    if mode in wanted_last:
        for x, y in zip(lasts, wanted_last[mode], strict=True):
            np.testing.assert_allclose(x.numpy(), y, rtol=1e-10, atol=1e-12)


def test_wrong_use_of_both_directions() -> None:
    with pytest.raises(NotATensorError, match="wanted a recurrent layer, got Dense"):
        nn.Bidirectional(nn.Dense(3))  # type: ignore[arg-type]
    with pytest.raises(TapegradError, match="\"ave\" or None, got 'max'"):
        nn.Bidirectional(nn.LSTM(3), "max")
    built = nn.LSTM(3)
    built(np.ones((1, 2, 8), np.float32))
    with pytest.raises(TapegradError, match="has weights already"):
        nn.Bidirectional(built)
