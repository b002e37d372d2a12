"""CTC, linear chains and recurrent networks: sums over all paths, loops in NumPy, and torch where it is installed."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

import tapegrad as tg
from tapegrad.errors import DTypeError, IndexingError, ShapeError, TapegradError
from tapegrad.nn import functional as F
from tapegrad.testing import check_grads

rng = np.random.default_rng(21)


def n(*shape: int) -> np.ndarray:
    return rng.normal(size=shape)


def log_softmax(x: np.ndarray) -> np.ndarray:
    return x - np.log(np.exp(x).sum(-1, keepdims=True))


def read(path: tuple[int, ...], blank: int) -> list[int]:
    """What an alignment reads as: repetitions merged, then blanks dropped."""
    return [k for i, k in enumerate(path) if k != blank and (i == 0 or k != path[i - 1])]


def ctc_by_paths(logp: np.ndarray, target: list[int], blank: int) -> float:
    steps, classes = logp.shape
    total = sum(
        np.exp(sum(logp[i, k] for i, k in enumerate(path)))
        for path in itertools.product(range(classes), repeat=steps)
        if read(path, blank) == target
    )
    return -np.log(total) if total else np.inf


LONG, SHORT = [5, 4, 3, 5], [2, 3, 0, 1]
TARGETS = np.array([[1, 1, 0], [2, 1, 2], [0, 0, 0], [2, 0, 0]])


@pytest.mark.parametrize("blank", [0, 2])
def test_ctc_is_the_sum_over_paths(blank: int) -> None:
    logp = log_softmax(n(5, 4, 3))
    targets = np.where(TARGETS == blank, 1 if blank == 2 else 0, TARGETS) if blank else TARGETS
    targets = np.where(targets == blank, (blank + 1) % 3, targets)
    want = [ctc_by_paths(logp[:t, i], list(targets[i, :s]), blank) for i, (t, s) in enumerate(zip(LONG, SHORT))]
    got = F.ctc_loss(logp, targets, LONG, SHORT, blank, "none")
    np.testing.assert_allclose(got.numpy(), want, rtol=1e-12)
    row = np.concatenate([targets[i, :s] for i, s in enumerate(SHORT)])
    np.testing.assert_array_equal(F.ctc_loss(logp, row, LONG, SHORT, blank, "none").numpy(), got.numpy())
    np.testing.assert_allclose(F.ctc_loss(logp, targets, LONG, SHORT, blank, "sum").item(), np.sum(want), rtol=1e-12)
    mean = np.mean(np.array(want) / np.maximum(SHORT, 1))
    np.testing.assert_allclose(F.ctc_loss(logp, targets, LONG, SHORT, blank).item(), mean, rtol=1e-12)
    alone = F.ctc_loss(logp[:, 0], targets[0, :2], 5, 2, blank, "none")
    np.testing.assert_allclose(alone.item(), want[0], rtol=1e-12)


def test_ctc_s_derivatives() -> None:
    f = lambda x: F.ctc_loss(tg.nn.functional.log_softmax(x, dim=-1), TARGETS, LONG, SHORT, 0, "none")
    check_grads(f, [n(5, 4, 3)], order=2)


def test_a_target_out_of_reach_costs_infinity_or_nothing() -> None:
    logp = log_softmax(n(2, 2, 3))
    args = (np.array([[1, 1], [1, 2]]), [2, 2], [2, 2])  # 1 1 needs a blank in between
    found = F.ctc_loss(logp, *args, reduction="none").numpy()
    assert found[0] == np.inf and np.isfinite(found[1])
    x = tg.asarray(logp)
    with tg.GradientTape() as tape:
        tape.watch(x)
        loss = F.ctc_loss(x, *args, reduction="sum", zero_infinity=True)
    np.testing.assert_allclose(loss.item(), found[1], rtol=1e-12)
    gradient = tape.gradient(loss, x).numpy()
    assert np.isfinite(gradient).all() and not gradient[:, 0].any()
    logp[:, 0, 0] = -np.inf  # a blank that is impossible does not spoil the rest
    x = tg.asarray(logp)
    with tg.GradientTape() as tape:
        tape.watch(x)
        loss = F.ctc_loss(x, np.array([[1, 2], [1, 2]]), [2, 2], [2, 2], reduction="sum")
    assert np.isfinite(loss.item()) and np.isfinite(tape.gradient(loss, x).numpy()).all()


@pytest.mark.parametrize(
    ("args", "error", "message"),
    [
        ((n(4), [1], [1], [1]), ShapeError, r"log_probs \(t, n, c\)"),
        ((n(4, 1, 3), [[1]], [5], [1]), ShapeError, r"input_lengths \[5\] exceed the 4 steps"),
        ((n(4, 1, 3), [[1]], [4], [2]), ShapeError, r"targets \(1, 1\) do not hold \[2\]"),
        ((n(4, 1, 3), [[3]], [4], [1]), IndexingError, r"labels in \[0, 3\)"),
        ((n(4, 1, 3), [[1.0]], [4], [1]), DTypeError, "integer targets"),
        ((n(4, 1, 3), [[1]], [4], [1], 3), ShapeError, "blank 3"),
        ((n(4, 1, 3), [[1]], [4, 4], [1]), ShapeError, "1 input_lengths"),
    ],
)
def test_what_ctc_refuses(args: Any, error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        F.ctc_loss(*args).item()


@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
def test_ctc_like_torch(reduction: str) -> None:
    torch = pytest.importorskip("torch")
    x = n(5, 4, 3)
    theirs = torch.tensor(x, requires_grad=True)
    z = torch.nn.functional.ctc_loss(
        theirs.log_softmax(-1), torch.tensor(TARGETS), torch.tensor(LONG), torch.tensor(SHORT), reduction=reduction
    )
    z.sum().backward()
    ours = tg.asarray(x)
    with tg.GradientTape() as tape:
        tape.watch(ours)
        y = F.ctc_loss(F.log_softmax(ours, dim=-1), TARGETS, LONG, SHORT, reduction=reduction)
    np.testing.assert_allclose(y.numpy(), z.detach().numpy(), rtol=1e-10)
    np.testing.assert_allclose(tape.gradient(y, ours).numpy(), theirs.grad.numpy(), rtol=1e-9, atol=1e-12)


COST = n(3, 3)
STEPS = [n(3, 3), n(3, 3), n(2, 3), n(1, 3)]
LABELS = [np.array([0, 2, 1]), np.array([1, 1, 2]), np.array([2, 0]), np.array([1])]


def chain(index: int) -> tuple[list[np.ndarray], list[int]]:
    """Scores and labels of one sequence."""
    return [x[index] for x in STEPS if len(x) > index], [int(y[index]) for y in LABELS if len(y) > index]


def score(xs: list[np.ndarray], path: Any) -> float:
    return sum(x[k] for x, k in zip(xs, path)) + sum(COST[a, b] for a, b in zip(path, path[1:]))


def test_crf1d_is_the_sum_over_paths() -> None:
    want, best = [], []
    for i in range(3):
        xs, labels = chain(i)
        scores = {path: score(xs, path) for path in itertools.product(range(3), repeat=len(xs))}
        want.append(np.log(sum(np.exp(s) for s in scores.values())) - score(xs, labels))
        best.append(max(scores, key=scores.__getitem__))
    np.testing.assert_allclose(F.crf1d(COST, STEPS, LABELS, reduce="no").numpy(), want, rtol=1e-12)
    np.testing.assert_allclose(F.crf1d(COST, STEPS, LABELS).item(), np.mean(want), rtol=1e-12)
    s, path = F.argmax_crf1d(COST, STEPS)
    np.testing.assert_allclose(s.numpy(), [score(chain(i)[0], best[i]) for i in range(3)], rtol=1e-12)
    assert [p.tolist() for p in path] == [[b[t] for b in best if len(b) > t] for t in range(4)]
    check_grads(lambda c, *xs: F.crf1d(c, xs, LABELS, reduce="no"), [COST, *STEPS], order=2)
    check_grads(lambda c, *xs: F.argmax_crf1d(c, xs)[0], [COST, *STEPS], order=2)


def test_what_chains_refuse() -> None:
    with pytest.raises(ShapeError, match=r"cost \(k, k\)"):
        F.crf1d(n(3, 2), STEPS, LABELS)
    with pytest.raises(ShapeError, match="must not grow"):
        F.argmax_crf1d(COST, STEPS[::-1])
    with pytest.raises(ShapeError, match="labels of shapes"):
        F.crf1d(COST, STEPS, LABELS[::-1])


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def rnn_by_loops(x: np.ndarray, state: list[np.ndarray], w: Any, b: Any) -> list[np.ndarray]:
    return [np.tanh(x @ w[0].T + b[0] + state[0] @ w[1].T + b[1])]


def gru_by_loops(x: np.ndarray, state: list[np.ndarray], w: Any, b: Any) -> list[np.ndarray]:
    (h,) = state
    r, z = (sigmoid(x @ w[k].T + b[k] + h @ w[k + 3].T + b[k + 3]) for k in range(2))
    return [(1 - z) * np.tanh(x @ w[2].T + b[2] + r * (h @ w[5].T + b[5])) + z * h]


def lstm_by_loops(x: np.ndarray, state: list[np.ndarray], w: Any, b: Any) -> list[np.ndarray]:
    h, c = state
    i, f, o, a = (x @ w[k].T + b[k] + h @ w[k + 4].T + b[k + 4] for k in range(4))
    c = sigmoid(f) * c + sigmoid(i) * np.tanh(a)
    return [sigmoid(o) * np.tanh(c), c]


KINDS = {"rnn": (rnn_by_loops, 2, 1), "gru": (gru_by_loops, 6, 1), "lstm": (lstm_by_loops, 8, 2)}
LENGTHS = [4, 2, 1]


@pytest.mark.parametrize("both", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_recurrent_networks(kind: str, both: bool) -> None:
    """Each sequence by itself, step by step."""
    cell, count, states = KINDS[kind]
    layers, ways, units, width = 2, 1 + both, 2, 3
    rows = [n(t, width) for t in LENGTHS]
    xs = [np.stack([r[t] for r in rows if len(r) > t]) for t in range(max(LENGTHS))]
    first = [n(layers * ways, 3, units) for _ in range(states)]
    half = count // 2
    wide = [width if layer == 0 else units * ways for layer in range(layers) for _ in range(ways)]
    ws = [[n(units, w if j < half else units) for j in range(count)] for w in wide]
    bs = [[n(units) for _ in range(count)] for _ in wide]
    f = getattr(F, f"n_step_{'bi' if both else ''}{kind}")
    *finals, ys = f(layers, 0.0, *first, ws, bs, xs)
    for i, row in enumerate(rows):
        steps: Any = list(row)
        for layer in range(layers):
            results = []
            for way in range(ways):
                k = layer * ways + way
                state, out = [s[k, i] for s in first], []
                for x in steps[:: -1 if way else 1]:
                    state = cell(x, state, ws[k], bs[k])
                    out.append(state[0])
                results.append(out[:: -1 if way else 1])
                for got, want in zip(finals, state, strict=True):
                    np.testing.assert_allclose(got.numpy()[k, i], want, rtol=1e-11)
            steps = [np.concatenate(each) for each in zip(*results)]
        for t, want in enumerate(steps):
            np.testing.assert_allclose(ys[t].numpy()[i], want, rtol=1e-11)


def test_recurrent_networks_have_derivatives() -> None:
    ws, bs = [[n(2, 3 if j < 4 else 2) for j in range(8)]], [[n(2) for _ in range(8)]]
    xs = [n(2, 3), n(2, 3), n(1, 3)]

    def f(hx: Any, cx: Any, w: Any, b: Any, *xs: Any) -> Any:
        hy, cy, ys = F.n_step_lstm(1, 0.5, hx, cx, [[w, *ws[0][1:]]], [[b, *bs[0][1:]]], xs, training=False)
        return hy, cy, ys[1]

    check_grads(f, [n(1, 2, 2), n(1, 2, 2), ws[0][0], bs[0][0], *xs], order=2)
    tg.random.seed(3)
    two = [[n(2, 3 if j < 1 and i < 1 else 2) for j in range(2)] for i in range(2)]
    hx = n(2, 2, 2)
    plain, dropped = (
        F.n_step_rnn(2, 0.9, hx, two, [bs[0][:2]] * 2, xs, training=training)[1][-1].numpy()
        for training in (False, True)
    )
    assert not np.array_equal(plain, dropped)


def test_what_recurrent_networks_refuse() -> None:
    ws, bs = [[n(2, 3), n(2, 2)]], [[n(2), n(2)]]
    with pytest.raises(ShapeError, match="longest sequences first"):
        F.n_step_rnn(1, 0.0, n(1, 2, 2), ws, bs, [n(1, 3), n(2, 3)])
    with pytest.raises(ShapeError, match=r"wanted states \(1, 2, 'units'\)"):
        F.n_step_rnn(1, 0.0, n(2, 2, 2), ws, bs, [n(2, 3)])
    with pytest.raises(ShapeError, match="1 lists of 6 weights"):
        F.n_step_gru(1, 0.0, n(1, 2, 2), ws, bs, [n(2, 3)])
    with pytest.raises(TapegradError, match='"tanh" or "relu"'):
        F.n_step_rnn(1, 0.0, n(1, 2, 2), ws, bs, [n(2, 3)], "gelu")


def test_single_cells() -> None:
    c, x = n(3, 2), n(2, 8)
    a, i, f, o = (x.reshape(2, 2, 4)[..., k] for k in range(4))
    new = np.tanh(a) * sigmoid(i) + sigmoid(f) * c[:2]
    got_c, got_h = F.lstm(c, x)
    np.testing.assert_allclose(got_c.numpy(), np.concatenate([new, c[2:]]), rtol=1e-12)
    np.testing.assert_allclose(got_h.numpy(), sigmoid(o) * np.tanh(new), rtol=1e-12)
    c2, x2 = n(2, 2), n(2, 8)
    a2, i2, f2, o2 = (x2.reshape(2, 2, 4)[..., k] for k in range(4))
    both = new + np.tanh(a2) * sigmoid(i2) + sigmoid(f2) * c2
    got_c, got_h = F.slstm(c[:2], c2, x, x2)
    np.testing.assert_allclose(got_c.numpy(), both, rtol=1e-12)
    np.testing.assert_allclose(got_h.numpy(), sigmoid(o + o2) * np.tanh(both), rtol=1e-12)
    x3 = n(2, 10)
    a, i, o, f, f2 = np.split(x3, 5, axis=1)
    tree = np.tanh(a) * sigmoid(i) + sigmoid(f) * c[:2] + sigmoid(f2) * c2
    got_c, got_h = F.tree_lstm(c[:2], c2, x3)
    np.testing.assert_allclose(got_c.numpy(), tree, rtol=1e-12)
    np.testing.assert_allclose(got_h.numpy(), sigmoid(o) * np.tanh(tree), rtol=1e-12)
    for f, args in ((F.lstm, [c, x]), (F.slstm, [c[:2], c2, x, x2]), (F.tree_lstm, [c[:2], c2, x3])):
        check_grads(f, args, order=2)
    for bad in (lambda: F.lstm(c, n(2, 7)), lambda: F.lstm(c[:1], x), lambda: F.tree_lstm(c2, n(2, 9))):
        with pytest.raises(ShapeError, match="lstm: "):
            bad()
