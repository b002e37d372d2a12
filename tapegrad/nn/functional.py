"""Activations, losses and attention under torch.nn.functional's names, arguments and defaults.

Losses return a scalar by default (``reduction="mean"``); ``"sum"`` and ``"none"`` are the others.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from tapegrad import ops, random
from tapegrad.errors import ShapeError, TapegradError
from tapegrad.nn import checks
from tapegrad.nn.functional_conv import (
    avg_pool2d,
    batch_norm,
    conv1d,
    conv2d,
    conv3d,
    conv_transpose2d,
    max_pool2d,
)
from tapegrad.nn.losses import (
    binary_cross_entropy_with_logits,
    cross_entropy,
    huber_loss,
    l1_loss,
    mse_loss,
    nll_loss,
    smooth_l1_loss,
)
from tapegrad.tensor import Tensor

__all__ = [
    "avg_pool2d",
    "batch_norm",
    "binary_cross_entropy_with_logits",
    "conv1d",
    "conv2d",
    "conv3d",
    "conv_transpose2d",
    "cross_entropy",
    "dropout",
    "elu",
    "embedding",
    "gelu",
    "hardsigmoid",
    "hardtanh",
    "huber_loss",
    "l1_loss",
    "layer_norm",
    "leaky_relu",
    "linear",
    "log_softmax",
    "logsigmoid",
    "max_pool2d",
    "mish",
    "mse_loss",
    "nll_loss",
    "normalize",
    "one_hot",
    "relu",
    "relu6",
    "scaled_dot_product_attention",
    "selu",
    "sigmoid",
    "silu",
    "smooth_l1_loss",
    "softmax",
    "softplus",
    "softsign",
    "tanh",
]

relu, silu, sigmoid, tanh = ops.relu, ops.silu, ops.sigmoid, ops.tanh


def gelu(input: Any, approximate: str = "none") -> Tensor:
    """``x * Phi(x)`` with the normal distribution's Phi, or its tanh approximation (Hendrycks and Gimpel, 2016).

    Raises TapegradError unless ``approximate`` is "none" or "tanh".
    """
    if approximate == "none":
        return ops.gelu(input)
    if approximate != "tanh":
        raise TapegradError(f'gelu: wanted approximate "none" or "tanh", got {approximate!r}')
    x = ops.asarray(input)
    return 0.5 * x * (1.0 + ops.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * x * x * x)))


def softplus(input: Any, beta: float = 1.0) -> Tensor:
    """``log(1 + exp(beta * x)) / beta``, exact for large arguments too."""
    return ops.softplus(input) if beta == 1 else ops.softplus(beta * ops.asarray(input)) / beta


def logsigmoid(input: Any) -> Tensor:
    """``log(sigmoid(x))`` without overflow."""
    return -ops.softplus(-ops.asarray(input))


def elu(input: Any, alpha: float = 1.0) -> Tensor:
    """``x`` where positive, else ``alpha * (exp(x) - 1)``."""
    x = ops.asarray(input)
    return ops.where(x > 0, x, alpha * ops.expm1(ops.minimum(x, 0)))


def selu(input: Any) -> Tensor:
    """The self-normalizing scaled ``elu`` (Klambauer et al., 2017)."""
    return 1.0507009873554805 * elu(input, 1.6732632423543772)


def leaky_relu(input: Any, negative_slope: float = 0.01) -> Tensor:
    """``x`` where positive, else ``negative_slope * x``."""
    x = ops.asarray(input)
    return ops.where(x > 0, x, negative_slope * x)


def hardtanh(input: Any, min_val: float = -1.0, max_val: float = 1.0) -> Tensor:
    """``x`` limited to [min_val, max_val]."""
    return ops.clip(input, min_val, max_val)


def relu6(input: Any) -> Tensor:
    """``x`` limited to [0, 6]."""
    return ops.clip(input, 0.0, 6.0)


def hardsigmoid(input: Any) -> Tensor:
    """``x / 6 + 1 / 2`` limited to [0, 1]."""
    return ops.clip(ops.asarray(input) / 6.0 + 0.5, 0.0, 1.0)


def softsign(input: Any) -> Tensor:
    """``x / (1 + |x|)``."""
    x = ops.asarray(input)
    return x / (1.0 + ops.abs(x))


def mish(input: Any) -> Tensor:
    """``x * tanh(softplus(x))`` (Misra, 2019)."""
    x = ops.asarray(input)
    return x * ops.tanh(ops.softplus(x))


def softmax(input: Any, dim: int = -1) -> Tensor:
    """``exp(x) / sum(exp(x))`` along ``dim``.  Raises AxisError."""
    return ops.softmax(input, axis=dim)


def log_softmax(input: Any, dim: int = -1) -> Tensor:
    """``log(softmax(x))`` along ``dim`` without overflow.  Raises AxisError."""
    return ops.log_softmax(input, axis=dim)


def linear(input: Any, weight: Any, bias: Any = None) -> Tensor:
    """``x @ weight.T + bias``; input: (..., k), weight: (units, k), bias: (units,).  Raises ShapeError."""
    weight = ops.asarray(weight)
    if weight.ndim != 2:
        raise ShapeError(f"linear: wanted a weight (units, k), got {weight.shape}")
    y = ops.matmul(input, weight.mT)
    return y if bias is None else y + bias


def embedding(input: Any, weight: Any) -> Tensor:
    """Rows of ``weight``; input: integers (...), weight: (n, k), result: (..., k).  Raises IndexingError."""
    return ops.take(weight, input, axis=0)


def one_hot(tensor: Any, num_classes: int = -1) -> Tensor:
    """1 at the position of the label, else 0, as int64; (...) -> (..., num_classes), by default the largest plus one.

    Raises DTypeError for labels that are not integers, IndexingError for one outside the classes.
    """
    labels = ops.asarray(tensor)
    checks.integers("one_hot", "labels", labels)
    if num_classes == -1:
        if not labels.size:
            raise ShapeError(f"one_hot: labels {labels.shape} are empty; give num_classes")
        num_classes = int(ops.max(labels).item()) + 1
    checks.within("one_hot", "labels", labels, num_classes)
    return ops.astype(ops.one_hot(labels, num_classes), "int64")


def layer_norm(
    input: Any, normalized_shape: Sequence[int], weight: Any = None, bias: Any = None, eps: float = 1e-5
) -> Tensor:
    """Normalized over the trailing axes, whose sizes are ``normalized_shape``.  Raises ShapeError if they are not."""
    x, shape = ops.asarray(input), tuple(normalized_shape)
    if not shape or tuple(x.shape[-len(shape) :]) != shape:
        raise ShapeError(f"layer_norm: wanted input (..., {', '.join(map(str, shape))}), got {x.shape}")
    size = math.prod(shape)
    gamma = ops.ones((size,), dtype=x.dtype, device=x.device) if weight is None else ops.reshape(weight, (size,))
    beta = ops.zeros((size,), dtype=x.dtype, device=x.device) if bias is None else ops.reshape(bias, (size,))
    flat = ops.reshape(x, (*x.shape[: -len(shape)], size))
    return ops.reshape(ops.layer_norm(flat, gamma, beta, eps=eps), x.shape)


def normalize(input: Any, p: float = 2.0, dim: int = 1, eps: float = 1e-12) -> Tensor:
    """``x / max(norm, eps)`` with the p-norm along ``dim``.  Raises AxisError."""
    x = ops.asarray(input)
    if p == 2:
        norm = ops.sqrt(ops.sum(x * x, axis=dim, keepdims=True))
    else:
        norm = ops.sum(ops.abs(x) ** p, axis=dim, keepdims=True) ** (1.0 / p)
    return x / ops.maximum(norm, eps)


def dropout(input: Any, p: float = 0.5, training: bool = True) -> Tensor:
    """A share ``p`` of the entries becomes 0, the rest is divided by ``1 - p``; without ``training`` nothing changes.

    ``p`` is rounded to a multiple of 2**-16 (16 random bits decide on an entry).  On a GPU the mask is never stored:
    the backward kernel draws it again.

    Raises TapegradError for ``p`` outside [0, 1].
    """
    checks.rate("dropout", p)
    x = ops.asarray(input)
    if not training or p == 0:
        return x
    if p == 1:
        return ops.where(False, x, 0)
    # On the CPU the mask is one byte per entry; `where` keeps it off infinities, of which multiplying would make NaN.
    kept = random.bernoulli(x.shape, 1.0 - p, dtype="bool", bits=16, device=x.device)
    return ops.where(kept, x * (1.0 / (1.0 - p)), 0)


def attention_weights(
    query: Tensor, key: Tensor, mask: Tensor | None = None, *, is_causal: bool = False, scale: float | None = None
) -> Tensor:
    """Softmax over s of ``query @ key.mT * scale``; query: (..., t, k), key: (..., s, k), result: (..., t, s).

    ``mask``: true where a query may look; a number instead of a boolean is added.  A query that may look nowhere
    gets equal weights, not NaN.
    """
    # Scaling the query instead of the scores: t * k elements, not t * s.
    scores = ops.matmul(query * (1.0 / math.sqrt(query.shape[-1]) if scale is None else scale), key.mT)
    nothing = -3e4 if str(scores.dtype) == "float16" else -1e9
    if is_causal:
        t, s = scores.shape[-2:]
        places = ops.arange(max(t, s), device=scores.device)
        scores = ops.where(ops.expand_dims(places[:t], axis=1) >= places[:s], scores, nothing)
    if mask is not None:
        scores = ops.where(mask, scores, nothing) if str(mask.dtype) == "bool" else scores + mask
    return ops.softmax(scores, axis=-1)


def scaled_dot_product_attention(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
) -> Tensor:
    """``softmax(query @ key.mT * scale) @ value``; (..., t, k), (..., s, k), (..., s, v) -> (..., t, v).

    ``dropout_p`` applies whenever it is not 0, as in PyTorch.

    Raises ShapeError where the three do not fit together.
    """
    q, k, v = ops.asarray(query), ops.asarray(key), ops.asarray(value)
    if min(q.ndim, k.ndim, v.ndim) < 2 or q.shape[-1] != k.shape[-1] or k.shape[-2] != v.shape[-2]:
        raise ShapeError(
            "scaled_dot_product_attention: wanted (..., t, k), (..., s, k), (..., s, v); "
            f"got {q.shape}, {k.shape}, {v.shape}"
        )
    mask = None if attn_mask is None else ops.asarray(attn_mask)
    weights = attention_weights(q, k, mask, is_causal=is_causal, scale=scale)
    return ops.matmul(dropout(weights, dropout_p), v)


_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "linear": lambda x: x,
    "exponential": ops.exp,
    "swish": silu,
    "hard_sigmoid": hardsigmoid,
    "log_sigmoid": logsigmoid,
    **{f.__name__: f for f in (elu, gelu, leaky_relu, log_softmax, mish, relu6, selu, softmax, softplus, softsign)},
    "relu": relu,
    "silu": silu,
    "sigmoid": sigmoid,
    "tanh": tanh,
}


def activation(spec: str | Callable[[Tensor], Tensor] | None) -> Callable[[Tensor], Tensor]:
    """The activation of that name; None means none; a function is itself.  Raises TapegradError."""
    if spec is None:
        return _ACTIVATIONS["linear"]
    if callable(spec):
        return spec
    found = _ACTIVATIONS.get(spec)
    if found is None:
        raise TapegradError(f"activation: wanted None, a function or one of {', '.join(_ACTIVATIONS)}; got {spec!r}")
    return found
