"""The updates of optimizers, for many tensors in one go.

On the CPU each tensor's update is one region.  On CUDA, where launching costs more than most tensors take, all tensors
of one dtype are updated by few launches (``kernels/optim.cu``), whose results have the bits of the formulas here.
Nothing is recorded on CUDA: an update is no place to take derivatives.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from tapegrad import buffer as _buffer
from tapegrad.device import many, tally
from tapegrad.device.kernel import Kernel
from tapegrad.errors import ShapeError, TapegradError
from tapegrad.evaluate import array_of
from tapegrad.ops.arithmetic import maximum, sqrt
from tapegrad.ops.comparison import isfinite
from tapegrad.ops.creation import asarray, astype
from tapegrad.ops.dispatch import promote
from tapegrad.ops.joining import stack
from tapegrad.ops.reductions import sum as sum_all
from tapegrad.ops.selection import where
from tapegrad.tensor import Tensor, from_array, materialize

AT_ONCE = 32 * 2**20
"""Bytes of variables in one group, unless one alone has more: their new values exist beside the old ones for a while,
and for large tensors fewer launches gain nothing."""

_ADAM = Kernel("optim.cu", "tg_adam")
_SGD = Kernel("optim.cu", "tg_sgd")
_MOMENTUM = Kernel("optim.cu", "tg_momentum")


def adam(
    xs: Sequence[Tensor],
    gs: Sequence[Tensor],
    ms: Sequence[Tensor],
    vs: Sequence[Tensor],
    *,
    factor: float,
    beta_1: float,
    beta_2: float,
    epsilon: float,
    shrink: float | None = None,
) -> list[tuple[Tensor, ...]]:
    """For each ``x`` with gradient ``g``: the new ``x``, ``m`` and ``v``; ``x`` is first multiplied by ``shrink``.

    ``m = beta_1 m + (1 - beta_1) g``, ``v = beta_2 v + (1 - beta_2) g^2``, ``x -= factor m / (sqrt(v) + epsilon)``.
    Raises DeviceError.
    """
    numbers = (float(factor), float(beta_1), 1.0 - beta_1, float(beta_2), 1.0 - beta_2, float(epsilon))

    def formula(x: Tensor, g: Tensor, m: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        scale, keep_m, add_m, keep_v, add_v, more = (_scalar(number, x) for number in numbers)
        m = keep_m * m + add_m * g
        v = keep_v * v + add_v * (g * g)
        return x - scale * m / (sqrt(v) + more), m, v

    return _update("adam_update", _ADAM, (xs, gs, ms, vs), (0, 2, 3), formula, shrink, numbers)


def sgd(
    xs: Sequence[Tensor], gs: Sequence[Tensor], *, rate: float, shrink: float | None = None
) -> list[tuple[Tensor, ...]]:
    """For each ``x`` with gradient ``g``: the new one, ``x shrink - rate g``.  Raises DeviceError."""
    formula = lambda x, g: (x - _scalar(rate, x) * g,)
    return _update("sgd_update", _SGD, (xs, gs), (0,), formula, shrink, (float(rate),))


def momentum(
    xs: Sequence[Tensor],
    gs: Sequence[Tensor],
    vs: Sequence[Tensor],
    *,
    rate: float,
    momentum: float,
    nesterov: bool = False,
    shrink: float | None = None,
) -> list[tuple[Tensor, ...]]:
    """For each ``x`` with gradient ``g`` and velocity ``v``: the new ``x`` and ``v``.

    ``v = momentum v - rate g``; ``x = x shrink + v``, or with ``nesterov`` ``x shrink + momentum v - rate g``.
    Raises DeviceError.
    """

    def formula(x: Tensor, g: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        down, keep = _scalar(rate, x) * g, _scalar(momentum, x)
        v = keep * v - down
        return (x + keep * v - down if nesterov else x + v), v

    numbers = (float(rate), float(momentum), int(bool(nesterov)))
    return _update("momentum_update", _MOMENTUM, (xs, gs, vs), (0, 2), formula, shrink, numbers)


def clip_by_global_norm(grads: Sequence[Any], clip_norm: float) -> tuple[list[Any], Tensor]:
    """All gradients times ``clip_norm / max(norm, clip_norm)``, and ``norm``, the root of the sum of all squares.

    None among the gradients stays None (Pascanu et al., "On the difficulty of training recurrent neural networks",
    ICML 2013).  A norm that is infinite or not a number makes every gradient not a number.

    Raises ShapeError if there is no gradient, TapegradError unless ``clip_norm`` is positive.
    """
    if not clip_norm > 0:
        raise TapegradError(f"clip_by_global_norm: wanted a positive clip_norm, got {clip_norm!r}")
    tensors = [None if g is None else asarray(g) for g in grads]
    squares = [sum_all(t * t) for t in tensors if t is not None]
    if not squares:
        raise ShapeError("clip_by_global_norm: there is no gradient")
    norm = sqrt(sum_all(stack(squares)))
    # Not clip_norm / inf: a step of zeros would hide that the gradients overflowed.
    scale = where(isfinite(norm), clip_norm / maximum(norm, clip_norm), math.nan)
    return [None if t is None else t * astype(scale, t.dtype) for t in tensors], norm


def groups(xs: Sequence[Any]) -> list[list[int]]:
    """Positions in ``xs`` (tensors or variables) of what is best updated together."""
    found: list[list[int]] = []
    filling: dict[Any, tuple[list[int], int]] = {}
    for i, x in enumerate(xs):
        if x.device.kind != "cuda":
            found.append([i])
            continue
        group, held = filling.get((x.device, x.dtype), ([], 0))
        if not group or len(group) == many.MANY or held + x.nbytes > AT_ONCE:
            group, held = [], 0
            found.append(group)
        group.append(i)
        filling[x.device, x.dtype] = group, held + x.nbytes
    return found


def decayed(x: Tensor, shrink: float | None) -> Tensor:
    """``x`` times ``shrink``, a number that changes from step to step; None: as it is."""
    return x if shrink is None else x * _scalar(shrink, x)


def _scalar(value: float, like: Tensor) -> Tensor:
    # As a Python number each one would stay among the shared constants, and make a float64 of a bfloat16.
    return asarray(value, dtype=like.dtype, device=like.device)


def _update(
    name: str,
    kernel: Kernel,
    operands: tuple[Sequence[Tensor], ...],
    renewed: tuple[int, ...],
    formula: Callable[..., tuple[Tensor, ...]],
    shrink: float | None,
    numbers: tuple[float, ...],
) -> list[tuple[Tensor, ...]]:
    """New values of the operands at positions ``renewed``, for each tensor."""
    rows = [promote(name, row) for row in zip(*operands, strict=True)]
    new: list[tuple[Tensor, ...]] = [()] * len(rows)
    for group in groups([row[0] for row in rows]):
        if rows[group[0]][0].device.kind == "cuda":
            decay = (1.0, 0) if shrink is None else (float(shrink), 1)
            made = _by_kernel(name, kernel, [rows[i] for i in group], renewed, (*decay, *numbers))
            for i, values in zip(group, made, strict=True):
                new[i] = values
        else:
            (i,) = group
            x, *others = rows[i]
            new[i] = formula(decayed(x, shrink), *others)
            materialize(*new[i])  # in one kernel
    return new


def _by_kernel(
    name: str, kernel: Kernel, rows: list[tuple[Tensor, ...]], renewed: tuple[int, ...], numbers: tuple[float, ...]
) -> list[tuple[Tensor, ...]]:
    """The same of tensors on one CUDA device, of one dtype, in one launch."""
    device = rows[0][0].device
    materialize(*(t for row in rows for t in row))  # gradients that are still pending share kernels
    with device.active():
        read = [tuple(tally.contiguous(device.xp, array_of(t._buffer)) for t in row) for row in rows]
    written = [tuple(device.empty(row[i].shape, row[i].dtype) for i in renewed) for row in rows]
    many.launch(kernel, device, [r + w for r, w in zip(read, written, strict=True)], numbers)
    passes = tally.taken()
    if _buffer.accountant is not None:
        moved = tuple(sum(a.nbytes for row in arrays for a in row) for arrays in (read, written))
        for more in (moved, *passes):
            _buffer.accountant.ran((name,) if more is moved else (), *more)
    return [tuple(from_array(a, device) for a in row) for row in written]
