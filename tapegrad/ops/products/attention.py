"""Attention as one primitive: ``softmax(q k' scale) v`` of each head (Vaswani et al., 2017).

Neither it nor its derivatives of first order store anything of size queries x keys (Dao et al., arXiv 2205.14135): the
derivatives compute the scores of a block again.  Where a tape keeps what they read, attention writes the statistics of
rows beside its result, so that the VJP need not take the softmax again (Dao, arXiv 2307.08691).  Derivatives of second
order are composites, which do store scores.

Heads are the axis before the last: q (..., t, h, k), k (..., s, g, k), v (..., s, g, w), result (..., t, h, w), where
g divides h and each of k's and v's heads serves h / g of q's.  The mask is (..., h or 1, t or 1, s or 1); without one
it is anything.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from math import prod
from typing import Any, TypeAlias

from tapegrad.core.aval import Shape, ShapedArray, broadcast_shapes, shaped
from tapegrad.core.primitive import Bad, Primitive, Sample, general
from tapegrad.device.dtypes import accumulator, bool_
from tapegrad.device.numerics import attention as blocks
from tapegrad.device.numerics.attention_cut import Weighting
from tapegrad.device.types import Array, Namespace, Params
from tapegrad.errors import ShapeError
from tapegrad.ops.apply import by_product, retained
from tapegrad.ops.casting import rounds_products
from tapegrad.ops.dispatch import barrier, cast, promote, whole_in_float64
from tapegrad.ops.dispatch import tensor as ops_tensor
from tapegrad.ops.products import _cuda_attention
from tapegrad.ops.products import attention_curvature as curvature
from tapegrad.ops.shape.join import concat
from tapegrad.ops.shape.shape import broadcast_to, expand_dims, moveaxis, reshape
from tapegrad.tensor import Tensor, TensorLike

Q, K, V, MASK, _CT = range(5)
Companions: TypeAlias = list[Tensor | None]
Batch: TypeAlias = Callable[[list[Tensor], Companions, int, Params], Tensor | None]


def _infer(
    q: ShapedArray, k: ShapedArray, v: ShapedArray, mask: ShapedArray, *stats: ShapedArray, how: Weighting, **of: object
) -> ShapedArray:
    told = (
        f"attention: wanted q (..., t, h, k), k (..., s, g, k), v (..., s, g, w), got {q.shape}, {k.shape}, {v.shape}"
    )
    lead = q.shape[:-3]
    if not q.ndim == k.ndim == v.ndim >= 3 or not k.shape[:-3] == v.shape[:-3] == lead:
        raise ShapeError(told)
    (t, h, width), (s, g, features) = q.shape[-3:], k.shape[-3:]
    if v.shape[-3:-1] != (s, g) or width != features or (h % g if g else h):
        raise ShapeError(f"{told}; k must be as wide as q, and its heads must divide q's")
    if how.masked != "none":
        whole = (*lead, h, t, s)
        if mask.ndim != len(whole) or any(n not in (1, m) for n, m in zip(mask.shape, whole)):
            raise ShapeError(f"attention: a mask of shape {mask.shape} does not broadcast to {whole}")
    return q.with_shape((*lead, t, h, v.shape[-1]))


def _shapes(*operands: Any) -> list[Shape]:
    return [x.shape for x in operands]


def _scratch(work: str) -> Callable[..., int]:
    """The bytes of the blocks, of copies of half types in float32, and of what is not known."""

    def scratch(aval: ShapedArray, q: Array, k: Array, v: Array, *rest: Array, how: Weighting, **of: object) -> int:
        size = accumulator(q.dtype).itemsize
        copies = (k.size + v.size) * size * (2 if work == "backward" else 1) if size != q.dtype.itemsize else 0
        unknown = 0
        if work == "backward" and not rest[_KNOWN:]:
            unknown = prod(q.shape[:-1]) * (v.shape[-1] * q.dtype.itemsize + 2 * size)
        return unknown + copies + blocks.scratch_bytes(q.shape, k.shape, v.shape, size, how, work)

    return scratch


def _flops(work: str) -> Callable[..., int]:
    """Of matrix products of queries x keys x features."""

    def flops(q: ShapedArray, k: ShapedArray, v: ShapedArray, *rest: ShapedArray, **params: object) -> int:
        products = _PRODUCTS[work] + (_PRODUCTS["forward"] if work == "backward" and not rest[_KNOWN:] else 0)
        return 2 * products * prod(q.shape[:-1]) * k.shape[-3] * max(q.shape[-1], v.shape[-1])

    return flops


_PRODUCTS = {"statistics": 1, "forward": 2, "backward": 5, "tangent": 3}
_KNOWN = 2
"""How many operands the VJP has behind the values, the mask and the cotangent, before the result and the statistics."""


# ---- the declarations' functions


def _run(
    xp: Namespace, q: Array, k: Array, v: Array, mask: Array, *, out: Array, how: Weighting, key: int, counter: int,
    beside: Array | None = None,
) -> None:  # fmt: skip
    blocks.forward(q, k, v, mask, out, how, key, counter, beside)


def _run_statistics(
    xp: Namespace, q: Array, k: Array, mask: Array, *, out: Array, how: Weighting, features: int
) -> None:
    blocks.statistics(q, k, mask, out, how)


def _run_vjp(
    xp: Namespace, q: Array, k: Array, v: Array, mask: Array, g: Array, *known: Array, out: Array, how: Weighting,
    key: int, counter: int, pulled: tuple[int, ...],
) -> None:  # fmt: skip
    blocks.backward(q, k, v, mask, g, out, how, key, counter, pulled, (known[0], known[1]) if known else None)


def _run_jvp(
    xp: Namespace, q: Array, k: Array, v: Array, mask: Array, u: Array, *, out: Array, how: Weighting,
    key: int, counter: int, of: int,
) -> None:  # fmt: skip
    blocks.tangent(q, k, v, mask, u, out, how, key, counter, of)


def attended(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, *, how: Weighting, key: int, counter: int) -> Tensor:
    """Attention, with the statistics of its rows where a tape keeps them."""
    operands = [q, k, v, mask]
    if retained(*operands):
        own = q if how.masked == "none" else mask
        operands.append(by_product(attention_statistics_p, q, k, own, how=how, features=v.shape[-1]))
    return barrier(attention_p, *operands, how=how, key=key, counter=counter)


def _pull(
    ct: Tensor, out: Tensor, wanted: tuple[int, ...], q: Tensor, *rest: Tensor, how: Weighting, key: int, counter: int
) -> list[Tensor | None]:
    """The cotangents of the operands ``wanted``, from one run; None for a mask that adds nothing."""
    k, v, mask, *stats = rest
    known = (out, *stats) if stats else ()
    pulled = _of_operands(wanted, how)
    packed = barrier(attention_vjp_p, q, k, v, mask, ct, *known, how=how, key=key, counter=counter, pulled=pulled)
    found = dict(zip(pulled, _unpacked(packed, _shapes(q, k, v, mask), pulled), strict=True))
    return [found.get(i) for i in wanted]


def _unpacked(packed: Tensor, shapes: Sequence[Shape], which: tuple[int, ...]) -> list[Tensor]:
    places = blocks.slices(shapes, which)
    return [reshape(packed[where], shapes[i]) for i, where in places.items()]


def _packed(parts: Sequence[Tensor]) -> Tensor:
    return concat([reshape(x, (x.size,)) for x in parts], axis=0)


def _push(operands: Sequence[Tensor], tangents: dict[int, Tensor], how: Weighting, key: int, counter: int) -> Tensor:
    """The derivative along tangents of operands."""
    q, k, v, mask = operands
    same: dict[str, Any] = {"how": how, "key": key, "counter": counter}
    total = None
    for of, t in tangents.items():
        term = attended(q, k, t, mask, **same) if of == V else barrier(attention_jvp_p, q, k, v, mask, t, of=of, **same)
        total = term if total is None else total + term
    assert total is not None
    return total


def _pushed(of: int) -> Callable[..., Tensor | None]:
    """The JVP rule of operand ``of``; None for a mask that adds nothing."""

    def jvp(
        t: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, *, how: Weighting, key: int, counter: int
    ) -> Tensor | None:
        if of == MASK and how.masked != "add":
            return None
        return _push((q, k, v, mask), {of: t}, how, key, counter)

    return jvp


def _full(operands: list[Tensor], companions: Companions, n: int) -> list[Tensor]:
    pairs = zip(operands, companions, strict=True)
    return [broadcast_to(expand_dims(x, 0), (n, *x.shape)) if c is None else c for x, c in pairs]


def _batch(apply: Callable[..., Tensor]) -> Batch:
    """``batch`` by one more axis in front; of what draws, example by example, since all draw the same."""

    def batch(operands: list[Tensor], companions: Companions, n: int, params: Params) -> Tensor | None:
        return None if params["how"].p else apply(*_full(operands, companions, n), **params)

    return batch


def _batched(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, *stats: Tensor, **params: Any) -> Tensor:
    """Of all examples; with the statistics that a tape keeps of one of them."""
    return barrier(attention_p, q, k, v, mask, *stats, **params) if stats else attended(q, k, v, mask, **params)


def _batch_vjp(operands: list[Tensor], companions: Companions, n: int, params: Params) -> Tensor | None:
    if params["how"].p:
        return None
    full = _full(operands, companions, n)
    parts = _unpacked(barrier(attention_vjp_p, *full, **params), _shapes(*full), params["pulled"])
    return concat([reshape(x, (n, x.size // n)) for x in parts], axis=1) if n else None


# ---- second order


def _of_operands(wanted: tuple[int, ...], how: Weighting) -> tuple[int, ...]:
    """Those of the positions ``wanted`` that are operands of attention itself and that it depends on."""
    return tuple([i for i in wanted if i < MASK or i == MASK and how.masked == "add"])


def _pull_vjp(
    ct: Tensor, wanted: tuple[int, ...], q: Tensor, *rest: Tensor, how: Weighting, key: int, counter: int,
    pulled: tuple[int, ...],
) -> list[Tensor | None]:  # fmt: skip
    """The gradient of ``<ct, J' g>``, which is ``<g, J ct>``; none in what is known, a function of the operands."""
    k, v, mask, g, *_ = rest
    operands = (q, k, v, mask)
    tangents = dict(zip(pulled, _unpacked(ct, _shapes(*operands), pulled), strict=True))
    found = curvature.gradient(operands, g, tangents, _of_operands(wanted, how), how, key, counter)
    if _CT in wanted:
        found[_CT] = _push(operands, tangents, how, key, counter)
    return [found.get(i) for i in wanted]


def _along_ct(
    t: Tensor, q: Tensor, *rest: Tensor, how: Weighting, key: int, counter: int, pulled: tuple[int, ...]
) -> Tensor:
    """The VJP of another cotangent, in which it is linear."""
    k, v, mask, _, *known = rest
    return barrier(attention_vjp_p, q, k, v, mask, t, *known, how=how, key=key, counter=counter, pulled=pulled)


def _along_known(t: Tensor) -> None:
    """The result and the statistics are functions of the operands, whose rules tell all."""


def _pushed_vjp(of: int) -> Callable[..., Tensor | None]:
    """The JVP rule of operand ``of`` of the VJP: along t the gradient of ``<g, J t>``."""

    def jvp(
        t: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, g: Tensor, *, how: Weighting, key: int, counter: int,
        pulled: tuple[int, ...],
    ) -> Tensor | None:  # fmt: skip
        if of == MASK and how.masked != "add":
            return None
        found = curvature.gradient((q, k, v, mask), g, {of: t}, pulled, how, key, counter)
        return _packed([found[i] for i in pulled])

    return jvp


def _pull_jvp(
    ct: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, u: Tensor, wanted: tuple[int, ...], *, how: Weighting,
    key: int, counter: int, of: int,
) -> list[Tensor | None]:  # fmt: skip
    """The gradient of ``<ct, J u>``."""
    operands = (q, k, v, mask)
    found = curvature.gradient(operands, ct, {of: u}, _of_operands(wanted, how), how, key, counter)
    back = lambda: _pull(ct, ct, (of,), *operands, how=how, key=key, counter=counter)[0]
    return [found.get(i) if i <= MASK else back() for i in wanted]


def _pushed_jvp(i: int) -> Callable[..., Tensor | None]:
    """The JVP rule of operand ``i`` of the JVP."""

    def jvp(
        t: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, u: Tensor, *, how: Weighting, key: int, counter: int,
        of: int,
    ) -> Tensor | None:  # fmt: skip
        if i == MASK and how.masked != "add":
            return None
        return curvature.along((q, k, v, mask), {of: u}, {i: t}, how, key, counter)

    return jvp


# ---- the declarations

_PLAIN = Weighting(0.5, False, "none", "zero", 0.0)
_CAUSAL = Weighting(0.7, True, "none", "zero", 0.0)
_ADDED = Weighting(0.5, False, "add", "zero", 0.0)
_BOTH = Weighting(0.5, True, "add", "mean", 0.0)
_DROPPED: Params = {"how": Weighting(0.5, False, "none", "zero", 0.5), "key": 3, "counter": 1}
_FIXED: Params = {"key": 0, "counter": 0}
_QKV = ((2, 3, 2, 4), (2, 5, 2, 4), (2, 5, 2, 3))
_GROUPED = ((3, 4, 2), (3, 2, 2), (3, 2, 3))
_MASK, _MASKS = (1, 2, 1, 5), (2, 1, 3, 5)


def _declared(name: str, work: str, **of: Any) -> Primitive:
    """One of the three: it writes into its result, and draws which weights are dropped."""
    return general(name, into=True, draws=True, scratch=_scratch(work), flops=_flops(work), **of)


attention_statistics_p: Primitive = general(
    "attention_statistics",
    impl=_run_statistics,
    cuda=_cuda_attention.statistics,
    infer=lambda q, k, mask, **params: shaped(blocks.statistics_shape(q.shape), accumulator(q.dtype), q.device),
    into=True,
    scratch=lambda aval, q, k, mask, **params: _scratch("forward")(aval, q, k, k, **params),
    flops=lambda q, k, mask, **params: _flops("statistics")(q, k, k),
    batch=lambda operands, companions, n, params: by_product(
        attention_statistics_p, *_full(operands, companions, n), **params
    ),
    samples=[
        Sample(*_QKV[:2], False, how=_PLAIN, features=3), Sample(*_GROUPED[:2], False, how=_CAUSAL, features=3),
        Sample(*_QKV[:2], _MASKS, how=_BOTH, features=3), Sample((3, 2, 4), (0, 2, 4), False, how=_PLAIN, features=4),
        Sample((2, 0, 2, 4), _QKV[1], False, how=_PLAIN, features=3),
    ],
    doc="The largest score of each query of each head, and 1 over the sum of its exponentials.",
)  # fmt: skip

attention_p: Primitive = _declared(
    "attention", "forward",
    impl=_run,
    beside=attention_statistics_p,
    cuda=_cuda_attention.forward,
    infer=_infer,
    vjp=_pull,
    jvp=[_pushed(i) for i in range(4)],
    batch=_batch(_batched),
    samples=[
        Sample(*_QKV, False, how=_PLAIN, **_FIXED), Sample(*_GROUPED, False, how=_CAUSAL, **_FIXED),
        Sample(*_QKV, _MASK, how=_ADDED, **_FIXED), Sample(*_QKV, _MASKS, how=_BOTH, **_FIXED),
        Sample((2, 0, 2, 4), *_QKV[1:], False, how=_PLAIN, **_FIXED), Sample(*_QKV, False, **_DROPPED),
        Sample((0, 3, 2, 4), (0, 5, 2, 4), (0, 5, 2, 3), False, how=_PLAIN, **_FIXED),
        Sample((3, 2, 4), (0, 2, 4), (0, 2, 3), False, how=_PLAIN, **_FIXED),
        Bad((3, 4, 2), (3, 3, 2), (3, 3, 2), False, error=ShapeError, how=_PLAIN, **_FIXED),
        Bad((3, 4, 2), (3, 2, 3), (3, 2, 2), False, error=ShapeError, how=_PLAIN, **_FIXED),
        Bad((3, 4, 2), (3, 2, 2), (4, 2, 2), False, error=ShapeError, how=_PLAIN, **_FIXED),
        Bad(*_QKV, (1, 1, 3, 4), error=ShapeError, how=_ADDED, **_FIXED),
    ],
    doc="``softmax(q k' scale + mask) v`` of each head, some weights dropped.",
)  # fmt: skip

attention_vjp_p: Primitive = _declared(
    "attention_vjp", "backward",
    impl=_run_vjp,
    cuda=_cuda_attention.backward,
    temporaries=_cuda_attention.temporaries,
    infer=lambda q, k, v, mask, g, *known, pulled, **params: q.with_shape(
        (blocks.elements(_shapes(q, k, v, mask), pulled),)
    ),
    vjp=_pull_vjp,
    jvp=[
        *(_pushed_vjp(i) for i in range(4)), _along_ct, _along_known, _along_known
    ],
    batch=_batch_vjp,
    samples=[
        Sample(*_QKV, False, (2, 3, 2, 3), how=_PLAIN, **_FIXED, pulled=(0, 1, 2)),
        Sample(*_GROUPED, False, (3, 4, 3), how=_CAUSAL, **_FIXED, pulled=(0, 1, 2)),
        Sample(*_QKV, _MASK, (2, 3, 2, 3), how=_ADDED, **_FIXED, pulled=(1, 3)),
        Sample(*_QKV, _MASKS, (2, 3, 2, 3), how=_BOTH, **_FIXED, pulled=(0, 1, 2, 3)),
        Sample(*_QKV, False, (2, 3, 2, 3), **_DROPPED, pulled=(0, 1, 2)),
    ],
    doc="The cotangents of attention's operands for the result's ``g``, packed; ``known``: the result, the statistics.",
)  # fmt: skip

attention_jvp_p: Primitive = _declared(
    "attention_jvp", "tangent",
    impl=_run_jvp,
    cuda=_cuda_attention.tangent,
    infer=lambda q, k, v, mask, u, *, of, **params: _infer(q, k, v, mask, **params),
    vjp=_pull_jvp,
    jvp=[
        *(_pushed_jvp(i) for i in range(4)),
        lambda t, q, k, v, mask, *, how, key, counter, of: barrier(
            attention_jvp_p, q, k, v, mask, t, how=how, key=key, counter=counter, of=of
        ),
    ],
    batch=_batch(lambda *operands, **params: barrier(attention_jvp_p, *operands, **params)),
    samples=[
        Sample(*_QKV, False, _QKV[0], how=_PLAIN, **_FIXED, of=0),
        Sample(*_GROUPED, False, _GROUPED[1], how=_CAUSAL, **_FIXED, of=1),
        Sample(*_QKV, _MASKS, _MASKS, how=_BOTH, **_FIXED, of=3), Sample(*_QKV, False, _QKV[0], **_DROPPED, of=0),
    ],
    doc="The tangent of attention's result for the tangent ``u`` of its operand number ``of``.",
)  # fmt: skip


def attention(
    query: TensorLike, key: TensorLike, value: TensorLike, mask: TensorLike | None = None, *,
    scale: float | None = None, causal: bool = False, blind: str = "zero", p: float = 0.0,
    stream: tuple[int, int] = (0, 0),
) -> Tensor:  # fmt: skip
    """``softmax(query @ key.mT * scale) @ value``; (..., h, t, k), (..., g, s, k), (..., g, s, w) -> (..., h, t, w).

    Each of g heads of keys serves h / g of the queries'; the axes in front broadcast.  ``mask``: broadcasts to (..., h,
    t, s); booleans say where a query may look, other numbers are added.  ``scale``: by default 1 / sqrt(k).
    ``causal``, ``blind``, ``p``: see ``device.numerics.attention_cut.Weighting``; ``stream``: key and position of the
    16-bit numbers, one for each element of (..., h, t, s), that decide which weights are dropped.  On CUDA heads wider
    than 256 do not fit into a block's shared memory: then the weights are stored.  Raises ShapeError, DTypeError.
    """
    q, k, v = promote("attention", (query, key, value), whole_in_float64)
    m = None if mask is None else ops_tensor("attention", mask, q)
    if min(q.ndim, k.ndim, v.ndim) < 3:
        raise ShapeError(f"attention: wanted (..., h, t, k), (..., g, s, k), (..., g, s, w), got {_shapes(q, k, v)}")
    fronts = [x.shape[:-3] for x in (q, k, v)]
    (heads,) = broadcast_shapes("attention", k.shape[-3:-2], v.shape[-3:-2])
    if m is not None:
        m = reshape(m, ((1,) * (3 - m.ndim) + m.shape))
        fronts.append(m.shape[:-3])
    front = broadcast_shapes("attention", *fronts)
    q, k, v = [_in_front(x, (*front, n)) for x, n in ((q, q.shape[-3]), (k, heads), (v, heads))]
    masked = "none" if m is None else "see" if m.dtype == bool_ else "add"
    m = None if m is None else _mask(m, q, front)
    scale = float(1 / math.sqrt(q.shape[-1] or 1) if scale is None else scale)
    how = Weighting(scale, causal, masked, blind, float(p), rounds_products(q.dtype))
    q, k, v = [moveaxis(x, -3, -2) for x in (q, k, v)]
    m = v if m is None else m  # of values in its place nobody reads anything
    if q.device.lazy and max(q.shape[-1], v.shape[-1]) > _cuda_attention.WIDEST:
        return moveaxis(curvature.value((q, k, v, m), how, *stream), -2, -3)
    return moveaxis(attended(q, k, v, m, how=how, key=stream[0], counter=stream[1]), -2, -3)


def _mask(m: Tensor, q: Tensor, front: Shape) -> Tensor:
    """A mask with as many axes as ``q``: those in front all of length 1, or all as they are in ``front``."""
    own = (*(1,) * (q.ndim - m.ndim), *m.shape[:-3])
    m = reshape(m, (*own, *m.shape[-3:]))
    m = m if m.dtype == bool_ else cast(m, q.dtype)
    return m if own == front or all(n == 1 for n in own) else _in_front(m, (*front, m.shape[-3]))


def _in_front(x: Tensor, front: Shape) -> Tensor:
    shape = (*front, *x.shape[-2:])
    return x if x.shape == shape else broadcast_to(x, shape)
