"""Attention under torch.nn.functional's names (Vaswani et al., "Attention is all you need", 2017)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import tapegrad.random as random
from tapegrad import ops
from tapegrad.errors import ShapeError
from tapegrad.nn import checks
from tapegrad.nn.functional.dropouts import dropout
from tapegrad.nn.functional.linear_maps import linear
from tapegrad.ops.dispatch import of_floats, real_only
from tapegrad.ops.products.attention import attention
from tapegrad.tensor import Tensor, TensorLike

__all__ = ["multi_head_attention_forward", "scaled_dot_product_attention"]


@real_only
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


def attended(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None, *, is_causal: bool = False,
    scale: float | None = None, p: float = 0.0, blind: str = "mean",
) -> Tensor:  # fmt: skip
    """Values in the weights of :func:`attention_weights`, of which a share ``p`` is dropped, without storing them.

    (..., h, t, k), (..., g, s, k), (..., g, s, w) -> (..., h, t, w).  ``blind``: what a query gets that may look
    nowhere, ``"zero"`` or the ``"mean"`` of all values.
    """
    checks.rate("dropout", p)
    stream = (0, 0)
    if p:
        lead = [x.shape[:-3] for x in (query, key, value)] + ([] if mask is None else [mask.shape[:-3]])
        shape = (*ops.broadcast_shapes(*lead), query.shape[-3], query.shape[-2], key.shape[-2])
        stream = random.default_generator.draw16(math.prod(shape))
    return attention(query, key, value, mask, scale=scale, causal=is_causal, blind=blind, p=p, stream=stream)


@real_only
def scaled_dot_product_attention(
    query: TensorLike, key: TensorLike, value: TensorLike, attn_mask: TensorLike | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    """``softmax(query @ key.mT * scale) @ value``; (..., t, k), (..., s, k), (..., s, v) -> (..., t, v).

    Nothing of size t x s is stored, not for the derivative either (Dao et al., arXiv 2205.14135), except for complex
    numbers and in derivatives of second order.  ``attn_mask``: true where a query may look, or numbers to add to the
    scores; a query that may look nowhere gets 0.  ``dropout_p`` applies whenever it is not 0, as in PyTorch.
    ``enable_gqa``: each of key's and value's heads, the axis before the last two, serves as many of the query's as it
    has more.

    Raises ShapeError where the three do not fit together, TapegradError for ``dropout_p`` outside [0, 1].
    """
    q, k, v = ops.asarray(query), ops.asarray(key), ops.asarray(value)
    if min(q.ndim, k.ndim, v.ndim) < 2 or q.shape[-1] != k.shape[-1] or k.shape[-2] != v.shape[-2]:
        raise ShapeError(
            "scaled_dot_product_attention: wanted (..., t, k), (..., s, k), (..., s, v); "
            f"got {q.shape}, {k.shape}, {v.shape}"
        )
    grouped = min(q.ndim, k.ndim, v.ndim) > 2 and all(a.shape[-3] and not q.shape[-3] % a.shape[-3] for a in (k, v))
    if enable_gqa and not grouped:
        raise ShapeError(f"scaled_dot_product_attention: heads do not divide: {q.shape}, {k.shape}, {v.shape}")
    mask = None if attn_mask is None else ops.asarray(attn_mask)
    if any(a.dtype.kind == "c" for a in (q, k, v)):
        return _composite(q, k, v, mask, dropout_p, is_causal, scale, enable_gqa)
    return _with_heads(q, k, v, mask, enable_gqa, is_causal=is_causal, scale=scale, p=dropout_p, blind="zero")


def _with_heads(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, gqa: bool, **how: Any) -> Tensor:
    """:func:`attended` of operands that may lack an axis of heads, or share one of length 1."""
    parts = [q, k, v] if mask is None else [q, k, v, mask]
    lead = ops.broadcast_shapes(*(a.shape[:-3] if gqa else a.shape[:-2] for a in parts))
    if gqa or len(lead) == 0:
        q, k, v = (a if gqa else ops.expand_dims(a, axis=0) for a in (q, k, v))
        y = attended(q, k, v, mask, **how)
        return y if gqa else y[0]
    q, k, v = (a if a.ndim > 2 else ops.expand_dims(a, axis=0) for a in (q, k, v))
    heads = lead[-1]
    if q.shape[-3] != heads:
        q = ops.broadcast_to(q, (*q.shape[:-3], heads, *q.shape[-2:]))
    return attended(q, k, v, mask, **how)


def _composite(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, p: float, is_causal: bool, scale: float | None, gqa: bool
) -> Tensor:
    """Of complex numbers: with all weights stored."""
    if gqa:
        k, v = (ops.repeat(a, q.shape[-3] // a.shape[-3], axis=-3) for a in (k, v))
    weights = attention_weights(q, k, mask, is_causal=is_causal, scale=scale)
    if mask is not None and str(mask.dtype) == "bool":
        weights = ops.where(ops.any(mask, axis=-1, keepdims=True), weights, 0.0)
    return ops.matmul(dropout(weights, p), v)


@real_only
@of_floats("key_padding_mask", "attn_mask")
def multi_head_attention_forward(
    query: TensorLike, key: TensorLike, value: TensorLike, embed_dim_to_check: int, num_heads: int,
    in_proj_weight: TensorLike, in_proj_bias: TensorLike, bias_k: TensorLike, bias_v: TensorLike, add_zero_attn: bool,
    dropout_p: float, out_proj_weight: TensorLike, out_proj_bias: TensorLike, training: bool = True,
    key_padding_mask: TensorLike | None = None, need_weights: bool = True, attn_mask: TensorLike | None = None,
    use_separate_proj_weight: bool = False, q_proj_weight: TensorLike | None = None,
    k_proj_weight: TensorLike | None = None, v_proj_weight: TensorLike | None = None, *,
    average_attn_weights: bool = True, is_causal: bool = False,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Attention of several heads, with its projections: the result, and the weights if needed.

    query: (t, n, e), key and value: (s, n, ...), or all without n; in_proj_weight: (3 e, e), or one each if separate;
    out_proj_weight: (e, e).  Masks are PyTorch's: **true where a query must not look**, or numbers to add; attn_mask:
    (t, s) or (n * heads, t, s), key_padding_mask: (n, s).  ``bias_k``, ``bias_v`` (1, 1, e): one more key and value;
    ``add_zero_attn``: one more of zeros.  Result: (t, n, e), weights: (n, t, s), or (n, heads, t, s) not averaged.  A
    query that may look nowhere gets equal weights.  Raises ShapeError.
    """
    op = "multi_head_attention_forward"
    q, k, v = ops.asarray(query), ops.asarray(key), ops.asarray(value)
    alone = q.ndim == 2
    if alone:
        q, k, v = (ops.expand_dims(a, axis=1) for a in (q, k, v))
    if q.ndim != 3 or q.shape[-1] != embed_dim_to_check or embed_dim_to_check % num_heads or k.shape[:2] != v.shape[:2]:
        raise ShapeError(
            f"{op}: wanted query (t, n, {embed_dim_to_check}), of {num_heads} heads, key and value (s, n, ...); "
            f"got {q.shape}, {k.shape}, {v.shape}"
        )
    weights: Sequence[Any] = (q_proj_weight, k_proj_weight, v_proj_weight)
    if not use_separate_proj_weight:
        weights = ops.split(ops.asarray(in_proj_weight), 3, axis=0)
    biases = (None,) * 3 if in_proj_bias is None else ops.split(ops.asarray(in_proj_bias), 3, axis=0)
    q, k, v = (linear(a, w, b) for a, w, b in zip((q, k, v), weights, biases))
    (t, n, e), (s, _, _), more = q.shape, k.shape, 0
    if bias_k is not None and bias_v is not None:
        k, v = (ops.concat([a, ops.broadcast_to(b, (1, n, e))], axis=0) for a, b in ((k, bias_k), (v, bias_v)))
        more += 1
    heads = lambda a: ops.permute_dims(ops.reshape(a, (a.shape[0], n, num_heads, e // num_heads)), (1, 2, 0, 3))
    q, k, v = heads(q), heads(k), heads(v)
    if add_zero_attn:
        k, v = (ops.pad(a, ((0, 0), (0, 0), (0, 1), (0, 0))) for a in (k, v))
        more += 1
    mask = _added(op, attn_mask, key_padding_mask, is_causal, (n, num_heads, t, s), more, q)
    shown, p = None, dropout_p if training else 0.0
    if need_weights:
        shares = attention_weights(q, k, mask)
        y = ops.matmul(dropout(shares, p), v)
        shown = ops.mean(shares, axis=1) if average_attn_weights else shares
    else:
        y = attended(q, k, v, mask, p=p)
    y = linear(ops.reshape(ops.permute_dims(y, (2, 0, 1, 3)), (t, n, e)), out_proj_weight, out_proj_bias)
    if alone:
        y, shown = y[:, 0], None if shown is None else shown[0]
    return y, shown


def _added(
    op: str, mask: TensorLike | None, padding: TensorLike | None, is_causal: bool, shape: tuple[int, ...],
    more: int, beside: Tensor,
) -> Tensor | None:  # fmt: skip
    """PyTorch's masks as one of numbers to add, for ``more`` keys that are always there."""
    n, heads, t, s = shape
    parts = []
    if mask is not None:
        m = ops.asarray(mask)
        if m.shape not in ((t, s), (n * heads, t, s)):
            raise ShapeError(f"{op}: wanted attn_mask ({t}, {s}) or ({n * heads}, {t}, {s}), got {m.shape}")
        parts.append(m if m.ndim == 2 else ops.reshape(m, shape))
    elif is_causal:
        places = ops.arange(max(t, s), device=beside.device)
        parts.append(ops.expand_dims(places[:t], axis=1) < places[:s])
    if padding is not None:
        m = ops.asarray(padding)
        if m.shape not in ((n, s), (s,)):
            raise ShapeError(f"{op}: wanted key_padding_mask ({n}, {s}), got {m.shape}")
        parts.append(ops.reshape(m, (n, 1, 1, s)))
    total = None
    for m in parts:
        m = ops.where(m, -1e9 if str(beside.dtype) != "float16" else -3e4, 0.0) if str(m.dtype) == "bool" else m
        total = m if total is None else total + m
    if total is None:
        return None
    return ops.pad(ops.astype(total, beside.dtype), ((0, 0),) * (total.ndim - 1) + ((0, more),))
