"""Layer normalization over the last axis.

The result and each derivative are one kernel that walks over rows; nothing else of full size is made, and the rows'
means and variances are computed again in backward rather than stored.  The derivatives' own derivatives are composites.
"""

from __future__ import annotations

from functools import partial
from math import prod

from tapegrad.core.aval import ShapedArray
from tapegrad.core.primitive import Bad, Primitive, Sample, general, linear
from tapegrad.device.dtypes import accumulator
from tapegrad.device.types import Array, Namespace, Params
from tapegrad.engine.task import Call
from tapegrad.errors import ShapeError
from tapegrad.ops._batched import Companions, all_but, for_all
from tapegrad.ops.apply import remembered, same_params
from tapegrad.ops.create.creation import full, zeros_like
from tapegrad.ops.dispatch import barrier, promote, real_float
from tapegrad.ops.elementwise.arithmetic import reciprocal, sqrt, square
from tapegrad.ops.reduce.reductions import mean
from tapegrad.ops.rows import _cuda_rows
from tapegrad.ops.rows._layer_norm import block_of, bound_block_of
from tapegrad.ops.rows._rows import by_blocks, matrices, matrix, rows_per_block
from tapegrad.ops.shape.blocks import reshaped, slice_p, whole
from tapegrad.ops.shape.join import concat
from tapegrad.ops.shape.shape import broadcast_to, reshape, sum_to
from tapegrad.tensor import Tensor, TensorLike


def _check(op: str, x: ShapedArray, scale: ShapedArray) -> None:
    if not x.ndim or scale.shape != x.shape[-1:]:
        wanted = x.shape[-1:] if x.ndim else "(k,)"
        raise ShapeError(f"{op}: x of shape {x.shape} wants gamma and beta of shape {wanted}, got {scale.shape}")


@remembered
def _infer_layer_norm(x: ShapedArray, gamma: ShapedArray, beta: ShapedArray, *, eps: float) -> ShapedArray:
    _check("layer_norm", x, gamma)
    _check("layer_norm", x, beta)
    return x


def _infer_in_x(x: ShapedArray, gamma: ShapedArray, g: ShapedArray, *, eps: float) -> ShapedArray:
    _check("layer_norm", x, gamma)
    return g


def _run_layer_norm(xp: Namespace, x: Array, gamma: Array, beta: Array, *, out: Array, eps: float) -> None:
    x, result = matrix(xp, x), matrix(xp, out)
    block = block_of(xp, x, eps)

    def body(number: int, rows: slice, *scratch: Array) -> None:
        block.forward(x[rows], gamma, beta, result[rows], scratch)

    by_blocks(xp, x, block.dtypes, body)


def _bound_layer_norm(x: Array, gamma: Array, beta: Array, *, out: Array, eps: float) -> Call | None:
    block = bound_block_of(x, eps, gamma, beta, out)
    return None if block is None else (block.bound_forward(_rows(x), gamma, beta, _rows(out)), ())


def _rows(x: Array) -> Array:
    """A contiguous array as rows of its last axis."""
    return x.reshape(-1, x.shape[-1])


def _pull_layer_norm(
    ct: Tensor, x: Tensor, gamma: Tensor, beta_aval: ShapedArray, wanted: tuple[int, ...], *, eps: float
) -> list[Tensor]:
    """All cotangents in one pass over the rows; that of x alone has the same bits without the others."""
    if wanted == (0,):
        return [barrier(layer_norm_vjp_x_p, x, gamma, ct, eps=eps)]
    if 0 not in wanted:
        of = {1: lambda: barrier(layer_norm_vjp_gamma_p, x, ct, eps=eps), 2: lambda: _sum_rows(ct, beta_aval)}
        return [of[i]() for i in wanted]
    parts = _parts(barrier(layer_norm_vjp_p, x, gamma, ct, eps=eps), x)
    return [parts[i] for i in wanted]


layer_norm_p = general(
    "layer_norm",
    impl=_run_layer_norm,
    bound=_bound_layer_norm,
    cuda=_cuda_rows.layer_norm,
    infer=_infer_layer_norm,
    vjp=_pull_layer_norm,
    jvp=[
        lambda t, x, gamma, *, eps: gamma * _derivative(x, t, eps),
        lambda t, x, *, eps: _scaled(x, t, eps),
        lambda t, x_aval: broadcast_to(t, x_aval.shape),
    ],
    into=True,
    lift=same_params,
    batch=all_but("layer_norm", 1, 2),
    samples=[
        Sample((3, 4), (4,), (4,), eps=1e-5), Sample((2, 3, 5), (5,), (5,), eps=0.1), Sample((4,), (4,), (4,), eps=0.1),
        Sample((0, 3), (3,), (3,), eps=0.1), Bad((3, 4), (3,), (4,), error=ShapeError, eps=1e-5),
        Bad((3, 4), (4,), (3, 4), error=ShapeError, eps=1e-5),
    ],
    doc="``(x - mean) / sqrt(variance + eps) * gamma + beta`` over the last axis.",
)  # fmt: skip


def layer_norm(x: TensorLike, gamma: TensorLike, beta: TensorLike, *, eps: float = 1e-5) -> Tensor:
    """``(x - mean) / sqrt(variance + eps) * gamma + beta`` over the last axis (Ba, Kiros and Hinton, 2016).

    x: ``(..., k)``; gamma and beta: ``(k,)``.  Raises ShapeError.
    """
    return barrier(layer_norm_p, *promote("layer_norm", (x, gamma, beta), real_float("layer_norm")), eps=eps)


def _sum_rows(x: Tensor, aval: ShapedArray) -> Tensor:
    """``x`` summed down to a vector, or with rows of a Jacobian to one for each."""
    return sum_to(x, aval.shape, aval.ndim - 1)


def _scaled(x: Tensor, scale: Tensor, eps: float) -> Tensor:
    """Normalized rows times ``scale``."""
    return barrier(layer_norm_p, x, scale, zeros_like(scale), eps=eps)


def _run_in_x(xp: Namespace, x: Array, gamma: Array, g: Array, *, out: Array, eps: float) -> None:
    gs, results, x = matrices(xp, g, x.ndim), matrices(xp, out, x.ndim), matrix(xp, x)
    block = block_of(xp, x, eps)

    def body(number: int, rows: slice, *scratch: Array) -> None:
        block.backward(x[rows], gamma, gs[:, rows], results[:, rows], None, scratch)

    by_blocks(xp, x, block.dtypes, body)


def _bound_backward(packed: bool, x: Array, gamma: Array, g: Array, *, out: Array, eps: float) -> Call | None:
    """``packed``: the cotangents of gamma and beta are wanted, too, and come behind that of x."""
    block = bound_block_of(x, eps, gamma, g, out) if g.ndim == x.ndim else None
    if block is None:
        return None
    result, sums = out, None
    if packed:
        result, sums = out[: x.size].reshape(x.shape), out[x.size :].reshape(2, -1)
    return block.bound_backward(_rows(x), gamma, _rows(g), _rows(result), sums), ()


def _second(x: Tensor, d: Tensor, other: Tensor, eps: float) -> Tensor:
    """The gradient in ``x`` of ``<other, J(x) d>`` with J the derivative of normalizing rows, which is symmetric.

    With h the normalized rows, r the reciprocal deviation, and means over the row: ``J d = r (d - mean(d) -
    h mean(h d))``, and the gradient is ``r**2 (h (3 mean(h d) mean(h o) - mean(d o)) - o mean(h d) - d mean(h o))`` for
    centred d and o.  It is symmetric in d and o and, as J is itself a gradient's, also the tangent along ``other``.
    """
    c = x - mean(x, axis=-1, keepdims=True)
    r = reciprocal(sqrt(mean(square(c), axis=-1, keepdims=True) + eps))
    h = c * r
    d = d - mean(d, axis=-1, keepdims=True)
    o = other - mean(other, axis=-1, keepdims=True)
    hd, ho, do = (mean(p, axis=-1, keepdims=True) for p in (h * d, h * o, d * o))
    return square(r) * (h * (3 * hd * ho - do) - o * hd - d * ho)


def _batch_in_x(operands: list[Tensor], companions: Companions, n: int, params: Params) -> Tensor | None:
    x, gamma, g = companions
    if x is None and gamma is None and g is not None and operands[0].ndim == operands[2].ndim:
        return barrier(layer_norm_vjp_x_p, operands[0], operands[1], g, **params)  # rows of a Jacobian share x
    return all_but("layer_norm_vjp_x", 1)(operands, companions, n, params)


layer_norm_vjp_x_p: Primitive = general(
    "layer_norm_vjp_x",
    impl=_run_in_x,
    bound=partial(_bound_backward, False),
    cuda=_cuda_rows.layer_norm_vjp_x,
    infer=_infer_in_x,
    vjp=[
        lambda ct, x, gamma, g, *, eps: _second(x, gamma * g, ct, eps),
        lambda ct, x, gamma_aval, g, *, eps: _sum_rows(g * _derivative(x, ct, eps), gamma_aval),
        lambda ct, x, gamma, *, eps: gamma * _derivative(x, ct, eps),
    ],
    jvp=[
        lambda t, x, gamma, g, *, eps: _second(x, gamma * g, t, eps),
        lambda t, x, g, *, eps: barrier(layer_norm_vjp_x_p, x, t, g, eps=eps),
        lambda t, x, gamma, *, eps: barrier(layer_norm_vjp_x_p, x, gamma, t, eps=eps),
    ],
    into=True,
    lift=same_params,
    batch=_batch_in_x,
    samples=[
        Sample((3, 4), (4,), (3, 4), eps=1e-5), Sample((2, 3, 5), (5,), (2, 3, 5), eps=0.1),
        Sample((0, 3), (3,), (0, 3), eps=0.1), Sample((3, 4), (4,), (2, 3, 4), eps=0.1),
    ],
    doc="The cotangent of layer_norm's ``x`` for the result's cotangent ``g``.",
)  # fmt: skip


def _derivative(x: Tensor, d: Tensor, eps: float) -> Tensor:
    """The derivative of normalizing the rows of ``x``, applied to ``d``."""
    return barrier(layer_norm_vjp_x_p, x, _ones(x), d, eps=eps)


def _ones(x: Tensor) -> Tensor:
    return full(x.shape[-1:], 1, dtype=x.dtype, device=x.device)


def _run_in_gamma(xp: Namespace, x: Array, g: Array, *, out: Array, eps: float) -> None:
    gs, x = matrices(xp, g, x.ndim), matrix(xp, x)
    block, sums = block_of(xp, x, eps), _sums_of_blocks(xp, x, len(gs))
    ones = xp.ones(x.shape[-1:], x.dtype)

    def body(number: int, rows: slice, *scratch: Array) -> None:
        block.backward(x[rows], ones, gs[:, rows], None, sums[number], scratch)

    by_blocks(xp, x, block.dtypes, body)
    xp.copyto(out, xp.reshape(xp.add.reduce(sums, axis=0)[:, 0], out.shape), casting="unsafe")


def _sums_of_blocks(xp: Namespace, x: Array, n: int) -> Array:
    """Where each block of rows of ``x`` leaves its sums over rows for gamma and beta, for each of ``n`` cotangents."""
    rows, width = x.shape
    return xp.zeros((-(-rows // rows_per_block(width)), n, 2, width), accumulator(x.dtype))


def _as_rows(v: Tensor, x: Tensor) -> Tensor:
    """A vector, or several, with axes of length 1 for the rows of ``x``."""
    return reshape(v, (*v.shape[:-1], *(1,) * (x.ndim - 1), v.shape[-1]))


def _in_gamma_pull_x(ct: Tensor, x: Tensor, g: Tensor, *, eps: float) -> Tensor:
    if ct.ndim == 1:
        return barrier(layer_norm_vjp_x_p, x, ct, g, eps=eps)
    return _derivative(x, _as_rows(ct, x) * g, eps)


def _in_gamma_pull_g(ct: Tensor, x: Tensor, *, eps: float) -> Tensor:
    return _scaled(x, ct, eps) if ct.ndim == 1 else _as_rows(ct, x) * _scaled(x, _ones(x), eps)


layer_norm_vjp_gamma_p: Primitive = general(
    "layer_norm_vjp_gamma",
    impl=_run_in_gamma,
    cuda=_cuda_rows.layer_norm_vjp_gamma,
    infer=lambda x, g, *, eps: x.with_shape((*g.shape[: g.ndim - x.ndim], x.shape[-1])),
    vjp=[_in_gamma_pull_x, _in_gamma_pull_g],
    jvp=[
        lambda t, x, g, out_aval, *, eps: _sum_rows(g * _derivative(x, t, eps), out_aval),
        lambda t, x, *, eps: barrier(layer_norm_vjp_gamma_p, x, t, eps=eps),
    ],
    into=True,
    lift=same_params,
    batch=all_but("layer_norm_vjp_gamma", 0),
    samples=[
        Sample((3, 4), (3, 4), eps=1e-5), Sample((2, 3, 5), (2, 3, 5), eps=0.1), Sample((0, 3), (0, 3), eps=0.1),
        Sample((3, 4), (2, 3, 4), eps=0.1),
    ],
    doc="The cotangent of layer_norm's ``gamma`` for the result's cotangent ``g``: summed over rows.",
)  # fmt: skip


# The three cotangents in one pass over the rows, one after the other in one array.


def _parts(packed: Tensor, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """What belongs to x, gamma and beta of a packed array, or of each of several."""
    leads, aval = packed._buffer.node.aval.shape[:-1], x._buffer.node.aval
    lead, size, width = whole(leads), aval.size, aval.shape[-1]
    vectors = barrier(copied_p, packed, start=size)
    return (
        reshaped(barrier(slice_p, packed, index=(*lead, (0, size, 1))), (*leads, *aval.shape)),
        barrier(slice_p, vectors, index=(*lead, (0, width, 1))),
        barrier(slice_p, vectors, index=(*lead, (width, width, 1))),
    )


def _run_copied(xp: Namespace, x: Array, *, start: int, out: Array) -> None:
    xp.copyto(out, x[..., start:])


def _place_copied(ct: Tensor, *, start: int) -> Tensor:
    return concat([full((*ct.shape[:-1], start), 0, dtype=ct.dtype, device=ct.device), ct], axis=-1)


copied_p: Primitive = linear(
    "copied",
    impl=_run_copied,
    infer=remembered(lambda x, *, start: x.with_shape((*x.shape[:-1], x.shape[-1] - start))),
    transpose=_place_copied,
    into=True,
    gathers=True,
    lift=same_params,
    samples=[Sample((5,), start=3), Sample((2, 3), start=0), Sample((0, 4), start=4)],
    doc="The elements from ``start`` on, of the last axis, in memory of their own: a view would keep the others, too.",
)


def _packed(of_x: Tensor, of_gamma: Tensor, of_beta: Tensor) -> Tensor:
    """The inverse of ``_parts``."""
    leads = of_gamma.shape[:-1]
    return concat([reshape(of_x, (*leads, prod(of_x.shape[len(leads) :]))), of_gamma, of_beta], axis=-1)


def _run_vjp(xp: Namespace, x: Array, gamma: Array, g: Array, *, out: Array, eps: float) -> None:
    gs, size = matrices(xp, g, x.ndim), x.size
    packed, x = xp.reshape(out, (len(gs), out.shape[-1])), matrix(xp, x)
    results = xp.reshape(packed[:, :size], gs.shape)
    block, sums = block_of(xp, x, eps), _sums_of_blocks(xp, x, len(gs))

    def body(number: int, rows: slice, *scratch: Array) -> None:
        block.backward(x[rows], gamma, gs[:, rows], results[:, rows], sums[number], scratch)

    by_blocks(xp, x, block.dtypes, body)
    xp.copyto(packed[:, size:], xp.reshape(xp.add.reduce(sums, axis=0), (len(gs), 2 * x.shape[-1])), casting="unsafe")


@remembered
def _infer_vjp(x: ShapedArray, gamma: ShapedArray, g: ShapedArray, *, eps: float) -> ShapedArray:
    _check("layer_norm", x, gamma)
    return x.with_shape((*g.shape[: g.ndim - x.ndim], x.size + 2 * x.shape[-1]))


def _vjp_pull_x(ct: Tensor, x: Tensor, gamma: Tensor, g: Tensor, *, eps: float) -> Tensor:
    of_x, of_gamma, _ = _parts(ct, x)
    return _second(x, gamma * g, of_x, eps) + _in_gamma_pull_x(of_gamma, x, g, eps=eps)


def _vjp_pull_gamma(ct: Tensor, x: Tensor, gamma_aval: ShapedArray, g: Tensor, *, eps: float) -> Tensor:
    return _sum_rows(g * _derivative(x, _parts(ct, x)[0], eps), gamma_aval)


def _vjp_pull_g(ct: Tensor, x: Tensor, gamma: Tensor, *, eps: float) -> Tensor:
    of_x, of_gamma, of_beta = _parts(ct, x)
    of_beta = of_beta if of_beta.ndim == 1 else _as_rows(of_beta, x)
    return gamma * _derivative(x, of_x, eps) + _in_gamma_pull_g(of_gamma, x, eps=eps) + of_beta


def _vjp_push_x(t: Tensor, x: Tensor, gamma: Tensor, g: Tensor, *, eps: float) -> Tensor:
    along = g * _derivative(x, t, eps)
    leads = along.shape[: along.ndim - x.ndim]
    of_gamma = sum_to(along, (*leads, x.shape[-1]), len(leads))
    return _packed(_second(x, gamma * g, t, eps), of_gamma, zeros_like(of_gamma))


def _vjp_push_gamma(t: Tensor, x: Tensor, g: Tensor, *, eps: float) -> Tensor:
    nothing = full((*g.shape[: g.ndim - x.ndim], x.shape[-1]), 0, dtype=x.dtype, device=x.device)
    return _packed(barrier(layer_norm_vjp_x_p, x, t, g, eps=eps), nothing, nothing)


def _batch_vjp(operands: list[Tensor], companions: Companions, n: int, params: Params) -> Tensor | None:
    """For all examples at once: the packed array of each, of which the sums are made one by one."""
    if companions[1] is not None or operands[0].ndim != operands[2].ndim:
        return None
    gamma, eps = operands[1], params["eps"]
    x, g = (for_all(operands[i], companions[i], n) for i in (0, 2))
    along = g * _scaled(x, _ones(x), eps)
    of_gamma, of_beta = (
        reshape(sum_to(v, (n, *(1,) * (v.ndim - 2), v.shape[-1])), (n, v.shape[-1])) for v in (along, g)
    )
    return _packed(barrier(layer_norm_vjp_x_p, x, gamma, g, eps=eps), of_gamma, of_beta)


layer_norm_vjp_p: Primitive = general(
    "layer_norm_vjp",
    impl=_run_vjp,
    bound=partial(_bound_backward, True),
    cuda=_cuda_rows.layer_norm_vjp,
    temporaries=_cuda_rows.layer_norm_vjp_temporaries,
    parts=True,
    infer=_infer_vjp,
    vjp=[_vjp_pull_x, _vjp_pull_gamma, _vjp_pull_g],
    jvp=[_vjp_push_x, _vjp_push_gamma, lambda t, x, gamma, *, eps: barrier(layer_norm_vjp_p, x, gamma, t, eps=eps)],
    into=True,
    lift=same_params,
    batch=_batch_vjp,
    samples=[
        Sample((3, 4), (4,), (3, 4), eps=1e-5), Sample((2, 3, 5), (5,), (2, 3, 5), eps=0.1),
        Sample((0, 3), (3,), (0, 3), eps=0.1), Sample((3, 4), (4,), (2, 3, 4), eps=0.1),
        Sample((4,), (4,), (4,), eps=0.1),
    ],
    doc="The cotangents of layer_norm's ``x``, ``gamma`` and ``beta`` for the result's cotangent ``g``, packed.",
)  # fmt: skip
