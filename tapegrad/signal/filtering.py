"""Recursive filters (scipy.signal's functions), differentiable in signal, coefficients and initial state."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tapegrad.core.aval import ShapedArray, normalize_axis
from tapegrad.core.primitive import Bad, Primitive, Sample, general
from tapegrad.device import dtypes
from tapegrad.device.numerics import scipy
from tapegrad.device.types import Array, Namespace
from tapegrad.errors import ShapeError
from tapegrad.ops import broadcast_to, concat, flip, moveaxis, reshape, stack, sum, zeros
from tapegrad.ops.apply import same_params
from tapegrad.ops.dispatch import barrier, promote, whole_in_float64
from tapegrad.tensor import Tensor, TensorLike


def _run(xp: Namespace, x: Array, a: Array) -> Array:
    kind = dtypes.accumulator(x.dtype)
    if not x.size:
        return xp.zeros(x.shape, dtype=kind)
    one = xp.ones(1, dtype=kind)
    below = xp.concatenate((one, a.astype(kind, copy=False)))
    return scipy.signal(xp).lfilter(one, below, x.astype(kind, copy=False), axis=-1)


def _infer(x: ShapedArray, a: ShapedArray) -> ShapedArray:
    if not x.ndim or a.ndim != 1:
        raise ShapeError(f"all_pole: a signal {x.shape} and coefficients {a.shape}; need (..., n) and (k,)")
    return x


def _filtered(x: Tensor, a: Tensor) -> Tensor:
    return barrier(all_pole_p, x, a)


def _back(ct: Tensor, a: Tensor) -> Tensor:
    """The filter run backwards in time: its transpose."""
    return flip(_filtered(flip(ct, axis=-1), a), axis=-1)


def _delayed(y: Tensor, k: int) -> Tensor:
    """``y`` ``k`` steps later, zeros first."""
    n = y.shape[-1]
    if k >= n:
        return zeros(y.shape, dtype=y.dtype, device=y.device)
    return concat([zeros((*y.shape[:-1], k), dtype=y.dtype, device=y.device), y[..., : n - k]], axis=-1)


def _pull_a(ct: Tensor, out: Tensor, a: Tensor) -> Tensor:
    back, axes = _back(ct, a), tuple(range(-out.ndim, 0))  # a Jacobian's rows give ct one more axis
    parts = [-sum(back * _delayed(out, k), axis=axes) for k in range(1, a.shape[0] + 1)]
    return stack(parts, axis=-1) if parts else zeros((*ct.shape[: ct.ndim - out.ndim], 0), dtype=a.dtype)


def _push_a(t: Tensor, out: Tensor, a: Tensor) -> Tensor:
    moved = zeros(out.shape, dtype=out.dtype, device=out.device)
    for k in range(1, a.shape[0] + 1):
        moved = moved - t[k - 1] * _delayed(out, k)
    return _filtered(moved, a)


all_pole_p: Primitive = general(
    "all_pole",
    impl=_run,
    infer=_infer,
    vjp=[lambda ct, a: _back(ct, a), _pull_a],
    jvp=[lambda t, a: _filtered(t, a), _push_a],
    lift=same_params,
    domain=(-0.4, 0.4),
    samples=[
        Sample((6,), (2,)), Sample((2, 5), (3,)), Sample((2, 5), (0,)), Sample((2, 0), (1,)), Sample((2,), (3,)),
        Bad((), (1,), error=ShapeError), Bad((3,), (1, 1), error=ShapeError),
    ],
    doc="``y[n] = x[n] - a[0] y[n - 1] - a[1] y[n - 2] - ...`` along the last axis.",
)  # fmt: skip


def _weighted(x: Tensor, b: Tensor) -> Tensor:
    """``sum(b[k] * x[n - k])`` along the last axis."""
    total = b[0] * x
    for k in range(1, b.shape[0]):
        total = total + b[k] * _delayed(x, k)
    return total


def _coefficients(op: str, b: TensorLike, a: TensorLike, x: TensorLike) -> tuple[Tensor, Tensor, Tensor]:
    top, bottom, signal = promote(op, (b, a, x), whole_in_float64)
    top, bottom = (reshape(c, (1,)) if not c.ndim else c for c in (top, bottom))
    if top.ndim != 1 or bottom.ndim != 1 or not top.size or not bottom.size:
        raise ShapeError(f"{op}: coefficients b {top.shape} and a {bottom.shape}; need one dimension, not empty")
    if not signal.ndim:
        raise ShapeError(f"{op}: the signal is a scalar")
    return top / bottom[0], bottom[1:] / bottom[0], signal


def _state(op: str, zi: TensorLike, beside: Tensor, order: int, shape: tuple[int, ...]) -> Tensor:
    (state,) = promote(op, (zi,), beside=beside)
    if state.ndim != len(shape) + 1 or state.shape[-1] != order:
        raise ShapeError(f"{op}: zi {state.shape}; need {(*shape, order)}, or axes of length 1")
    return broadcast_to(state, (*shape, order))


def lfilter(b: TensorLike, a: TensorLike, x: TensorLike, axis: int = -1, zi: TensorLike | None = None) -> Any:
    """The signal ``x`` filtered along ``axis`` by the rational transfer function ``b / a`` (scipy.signal.lfilter).

    zi: the initial state, shaped as ``x`` but for ``max(len(a), len(b)) - 1`` along ``axis``; with it the result is
    the pair of the filtered signal and the final state.  Gradients in all of them.  Raises ShapeError, AxisError.
    """
    top, rest, signal = _coefficients("lfilter", b, a, x)
    at = normalize_axis("lfilter", axis, signal.ndim)
    signal = moveaxis(signal, at, -1)
    driven, n = _weighted(signal, top), signal.shape[-1]
    if zi is None:
        return moveaxis(_filtered(driven, rest), -1, at)
    order = max(top.shape[0] - 1, rest.shape[0])
    (state,) = promote("lfilter", (zi,), beside=signal)
    state = _state("lfilter", moveaxis(state, at, -1), signal, order, signal.shape[:-1])
    early = state[..., :n]
    if early.shape[-1] < n:
        gap = zeros((*early.shape[:-1], n - early.shape[-1]), dtype=early.dtype, device=early.device)
        early = concat([early, gap], axis=-1)
    y = _filtered(driven + early, rest)
    final = _final_state(top, rest, signal, y, state, order)
    return moveaxis(y, -1, at), moveaxis(final, -1, at)


def _final_state(top: Tensor, rest: Tensor, x: Tensor, y: Tensor, state: Tensor, order: int) -> Tensor:
    """What is left when the signal ends: ``z[i] = sum over k > i of b[k] x[n + i - k] - a[k] y[n + i - k]``.

    It adds the part of the initial state that is left then.
    """
    n = x.shape[-1]
    parts = []
    for i in range(order):
        part = state[..., n + i] if n + i < order else zeros(x.shape[:-1], dtype=y.dtype, device=y.device)
        for k in range(i + 1, order + 1):
            if n + i - k >= 0:
                if k < top.shape[0]:
                    part = part + top[k] * x[..., n + i - k]
                if k <= rest.shape[0]:
                    part = part - rest[k - 1] * y[..., n + i - k]
        parts.append(part)
    return stack(parts, axis=-1) if parts else state


def sosfilt(sos: TensorLike, x: TensorLike, axis: int = -1, zi: Sequence[TensorLike] | None = None) -> Any:
    """The signal ``x`` filtered along ``axis`` by second-order sections, one after the other (scipy.signal.sosfilt).

    sos: ``(sections, 6)``, each ``b0 b1 b2 a0 a1 a2``; zi: ``(sections, ..., 2, ...)`` with 2 along ``axis``: then the
    result is the pair of the filtered signal and the final state.  Raises ShapeError, AxisError.
    """
    sections, signal = promote("sosfilt", (sos, x), whole_in_float64)
    if sections.ndim != 2 or sections.shape[1] != 6:
        raise ShapeError(f"sosfilt: sections {sections.shape}; need (sections, 6)")
    at = normalize_axis("sosfilt", axis, signal.ndim)
    final = []
    for i in range(sections.shape[0]):
        top, bottom = sections[i, :3], sections[i, 3:]
        if zi is None:
            signal = lfilter(top, bottom, signal, at)
        else:
            signal, left = lfilter(top, bottom, signal, at, zi[i])
            final.append(left)
    return signal if zi is None else (signal, stack(final))
