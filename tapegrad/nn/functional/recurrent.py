"""Recurrent networks as Chainer's functions: single cells, and whole sequences of several lengths.

The loops over steps are plain loops on the tape.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Concatenate

from tapegrad import ops
from tapegrad.errors import ShapeError, TapegradError
from tapegrad.nn.functional._variants import P, R, variant
from tapegrad.nn.functional.dropouts import dropout
from tapegrad.nn.functional.linear_maps import linear
from tapegrad.tensor import Tensor, TensorLike

__all__ = [
    "lstm", "n_step_bigru", "n_step_bilstm", "n_step_birnn", "n_step_gru", "n_step_lstm", "n_step_rnn", "slstm",
    "tree_lstm",
]  # fmt: skip


def _gates(op: str, x: Tensor, c: Tensor) -> list[Tensor]:
    """The four gates that lie interleaved along the second axis."""
    if x.ndim != c.ndim or x.ndim < 2 or x.shape[1] != 4 * c.shape[1] or x.shape[2:] != c.shape[2:]:
        raise ShapeError(f"{op}: wanted c (n, k, ...) and x (n, 4 k, ...), got {c.shape}, {x.shape}")
    apart = ops.reshape(x, (x.shape[0], c.shape[1], 4, *x.shape[2:]))
    return [apart[:, :, i] for i in range(4)]


def lstm(c_prev: TensorLike, x: TensorLike) -> tuple[Tensor, Tensor]:
    """``c = tanh(a) * sigmoid(i) + c_prev * sigmoid(f)`` and ``h = tanh(c) * sigmoid(o)`` (Hochreiter, 1997).

    c_prev: (n, k, ...), x: (m, 4 k, ...) with a, i, f, o interleaved along the second axis, m <= n: the cells after the
    first m stay as they are.  Returns c (n, k, ...) and h (m, k, ...).  Raises ShapeError.
    """
    c, x = ops.asarray(c_prev), ops.asarray(x)
    a, i, f, o = _gates("lstm", x, c)
    if x.shape[0] > c.shape[0]:
        raise ShapeError(f"lstm: x {x.shape} has more rows than c_prev {c.shape}")
    new = ops.tanh(a) * ops.sigmoid(i) + ops.sigmoid(f) * c[: x.shape[0]]
    h = ops.sigmoid(o) * ops.tanh(new)
    return (ops.concat([new, c[x.shape[0] :]], axis=0) if x.shape[0] < c.shape[0] else new), h


def slstm(c_prev1: TensorLike, c_prev2: TensorLike, x1: TensorLike, x2: TensorLike) -> tuple[Tensor, Tensor]:
    """The S-LSTM unit of two children (Zhu et al., arXiv 1503.04881): the sum of both, and one output gate.

    c_prev1 and c_prev2: (n, k, ...), x1 and x2: (n, 4 k, ...) as of :func:`lstm`.  Returns c and h.  Raises ShapeError.
    """
    cs = [ops.asarray(c_prev1), ops.asarray(c_prev2)]
    total: Any = 0
    gate: Any = 0
    for c, x in zip(cs, (x1, x2)):
        a, i, f, o = _gates("slstm", ops.asarray(x), c)
        total = total + ops.tanh(a) * ops.sigmoid(i) + ops.sigmoid(f) * c
        gate = gate + o
    return total, ops.sigmoid(gate) * ops.tanh(total)


def tree_lstm(*inputs: TensorLike) -> tuple[Tensor, Tensor]:
    """``c = tanh(a) * sigmoid(i) + sum of c_j * sigmoid(f_j)`` and ``h = tanh(c) * sigmoid(o)`` (Tai et al., 2015).

    inputs: the cells c_1, ..., c_N of the children, (n, k, ...), then x: (n, (3 + N) k, ...), a, i, o, f_1, ..., f_N
    one after the other along the second axis.  Returns c and h.  Raises ShapeError.
    """
    *cells, x = (ops.asarray(a) for a in inputs)
    if not cells or x.ndim < 2 or any(c.ndim < 2 or x.shape[1] != (3 + len(cells)) * c.shape[1] for c in cells):
        raise ShapeError(f"tree_lstm: wanted N cells (n, k, ...) and x (n, (3 + N) k, ...), got {x.shape}")
    a, i, o, *forget = ops.split(x, 3 + len(cells), axis=1)
    total = ops.tanh(a) * ops.sigmoid(i)
    for f, c in zip(forget, cells):
        total = total + ops.sigmoid(f) * c
    return total, ops.sigmoid(o) * ops.tanh(total)


State = tuple[Tensor, ...]
Cell = Callable[[Tensor, State, Sequence[TensorLike], Sequence[TensorLike]], State]
Weights = Sequence[Sequence[TensorLike]]
"""For each layer and direction the matrices, or the vectors, of its gates."""


def _rnn_cell(activation: str) -> Cell:
    if activation not in ("tanh", "relu"):
        raise TapegradError(f'n_step_rnn: wanted activation "tanh" or "relu", got {activation!r}')
    function = getattr(ops, activation)

    def cell(x: Tensor, state: State, w: Sequence[TensorLike], b: Sequence[TensorLike]) -> State:
        return (function(linear(x, w[0], b[0]) + linear(state[0], w[1], b[1])),)

    return cell


def _gru_cell(x: Tensor, state: State, w: Sequence[TensorLike], b: Sequence[TensorLike]) -> State:
    (h,) = state
    r = ops.sigmoid(linear(x, w[0], b[0]) + linear(h, w[3], b[3]))
    z = ops.sigmoid(linear(x, w[1], b[1]) + linear(h, w[4], b[4]))
    new = ops.tanh(linear(x, w[2], b[2]) + r * linear(h, w[5], b[5]))
    return ((1 - z) * new + z * h,)


def _lstm_cell(x: Tensor, state: State, w: Sequence[TensorLike], b: Sequence[TensorLike]) -> State:
    h, c = state
    i, f, o, a = (linear(x, w[k], b[k]) + linear(h, w[k + 4], b[k + 4]) for k in range(4))
    c = ops.sigmoid(f) * c + ops.sigmoid(i) * ops.tanh(a)
    return ops.sigmoid(o) * ops.tanh(c), c


def _pass(
    xs: list[Tensor], state: State, w: Sequence[TensorLike], b: Sequence[TensorLike], cell: Cell
) -> tuple[list[Tensor], State]:
    """One layer in one direction; the states of sequences that have ended (or not begun) stay as they are."""
    ys = []
    for x in xs:
        n = x.shape[0]
        new = cell(x, tuple(s[:n] for s in state), w, b)
        whole = n == state[0].shape[0]
        state = new if whole else tuple(ops.concat([s, old[n:]], axis=0) for s, old in zip(new, state))
        ys.append(new[0])
    return ys, state


def _n_step(
    op: str, layers: int, ratio: float, states: Sequence[TensorLike], ws: Weights, bs: Weights,
    xs: Sequence[TensorLike], cell: Cell, both: bool, training: bool, matrices: int,
) -> tuple[list[Tensor], list[Tensor]]:  # fmt: skip
    """The final states, each stacked, and the last layer's results of each step."""
    steps, first = [ops.asarray(x) for x in xs], [ops.asarray(s) for s in states]
    ways = 2 if both else 1
    shapes = [x.shape for x in steps]
    if not steps or any(len(s) != 2 for s in shapes) or any(a[0] < b[0] for a, b in zip(shapes, shapes[1:])):
        raise ShapeError(f"{op}: wanted xs of (batch, k), longest sequences first, got {shapes}")
    wanted = (layers * ways, shapes[0][0])
    if any(s.ndim != 3 or s.shape[:2] != wanted for s in first):
        raise ShapeError(f"{op}: wanted states {(*wanted, 'units')}, got {[s.shape for s in first]}")
    if len(ws) != layers * ways or len(bs) != layers * ways or any(len(w) != matrices for w in (*ws, *bs)):
        raise ShapeError(f"{op}: wanted {layers * ways} lists of {matrices} weights, and as many of biases")
    finals: list[State] = []
    for layer in range(layers):
        if layer:
            steps = [dropout(x, ratio, training=training) for x in steps]
        results = []
        for way in range(ways):
            k = layer * ways + way
            ys, final = _pass(steps[:: -1 if way else 1], tuple(s[k] for s in first), ws[k], bs[k], cell)
            finals.append(final)
            results.append(ys[:: -1 if way else 1])
        steps = [ops.concat(several, axis=1) for several in zip(*results)] if both else results[0]
    return [ops.stack(several, axis=0) for several in zip(*finals)], steps


def _both_ways(kind: str, body: Callable[Concatenate[bool, P], R]) -> tuple[Callable[P, R], Callable[P, R]]:
    """The public functions of one cell: in the forward direction, and in both."""
    twice = f"As :func:`n_step_{kind}` forwards and backwards: two entries of states, ws and bs a layer, ys of both."
    return variant(f"n_step_{kind}", body, False, body.__doc__ or ""), variant(f"n_step_bi{kind}", body, True, twice)


def _rnn(
    both: bool, n_layers: int, dropout_ratio: float, hx: TensorLike, ws: Weights, bs: Weights,
    xs: Sequence[TensorLike], activation: str = "tanh", *, training: bool = True,
) -> tuple[Tensor, list[Tensor]]:  # fmt: skip
    """``h = f(W0 x + b0 + W1 h + b1)`` over sequences, in ``n_layers`` layers: (hy, ys).

    hx: (layers, n, units); ws and bs: for each layer a list of matrices (units, k) and of vectors (units,); xs: for
    each step (batch, k), batches never growing: sequences that end drop out, longest first.  hy: as hx, ys: for each
    step (batch, units).  ``dropout_ratio``: between layers, unless ``training`` is false.  Raises ShapeError.
    """
    op = "n_step_birnn" if both else "n_step_rnn"
    (hy,), ys = _n_step(op, n_layers, dropout_ratio, [hx], ws, bs, xs, _rnn_cell(activation), both, training, 2)
    return hy, ys


n_step_rnn, n_step_birnn = _both_ways("rnn", _rnn)


def _gru(
    both: bool, n_layers: int, dropout_ratio: float, hx: TensorLike, ws: Weights, bs: Weights,
    xs: Sequence[TensorLike], *, training: bool = True,
) -> tuple[Tensor, list[Tensor]]:  # fmt: skip
    """As :func:`n_step_rnn` with gated units (Cho et al., arXiv 1406.1078) and six matrices for each layer.

    ``r = s(W0 x + W3 h)``, ``z = s(W1 x + W4 h)``, ``h = (1 - z) * tanh(W2 x + r * (W5 h)) + z * h``, with biases.
    """
    op = "n_step_bigru" if both else "n_step_gru"
    (hy,), ys = _n_step(op, n_layers, dropout_ratio, [hx], ws, bs, xs, _gru_cell, both, training, 6)
    return hy, ys


n_step_gru, n_step_bigru = _both_ways("gru", _gru)


def _lstm(
    both: bool, n_layers: int, dropout_ratio: float, hx: TensorLike, cx: TensorLike, ws: Weights, bs: Weights,
    xs: Sequence[TensorLike], *, training: bool = True,
) -> tuple[Tensor, Tensor, list[Tensor]]:  # fmt: skip
    """As :func:`n_step_rnn` with long short-term memory and eight matrices for each layer: (hy, cy, ys).

    ``i, f, o = s(W_k x + W_k+4 h)`` for k 0 to 2, ``c = f * c + i * tanh(W3 x + W7 h)``, ``h = o * tanh(c)``, with
    biases; cx: as hx.
    """
    op = "n_step_bilstm" if both else "n_step_lstm"
    (hy, cy), ys = _n_step(op, n_layers, dropout_ratio, [hx, cx], ws, bs, xs, _lstm_cell, both, training, 8)
    return hy, cy, ys


n_step_lstm, n_step_bilstm = _both_ways("lstm", _lstm)
