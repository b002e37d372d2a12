"""Ordinary differential equations.

A solution is made of steps on the tape, each a handful of operations, so derivatives of any order and mode are those of
the computed numbers.  The length of the steps depends on values, and the derivative takes it for constant.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

from tapegrad.device import dtypes
from tapegrad.errors import DTypeError, ShapeError, TapegradError
from tapegrad.integrate.steps import Rate, Stepper
from tapegrad.memory import recompute_grad
from tapegrad.ops import moveaxis, stack
from tapegrad.ops.dispatch import cast, promote, tensor
from tapegrad.tensor import Tensor, TensorLike


def _rate(op: str, func: Callable[..., TensorLike], args: tuple[object, ...], tfirst: bool, like: Tensor) -> Rate:
    def rate(y: Tensor, t: Tensor) -> Tensor:
        slope = tensor(op, func(*((t, y) if tfirst else (y, t)), *args), like)
        if slope.shape != like.shape:
            raise ShapeError(
                f"{op}: the function made {slope.shape} of y with shape {like.shape}; they must be the same"
            )
        if slope.dtype.kind == "c" and like.dtype.kind != "c":
            raise DTypeError(f"{op}: the function made {slope.dtype} of {like.dtype}; give y0 that dtype")
        return cast(slope, like.dtype)

    return rate


def _prepared(
    op: str, y0: TensorLike, t: TensorLike, rtol: float | None, atol: float | None
) -> tuple[Tensor, Tensor, float, float]:
    """The state, the times in its precision, and the tolerances.  Raises ShapeError, TapegradError."""
    (y,) = promote(op, (y0,), dtypes.in_float)
    kind = dtypes.real_of(y.dtype)
    times = cast(tensor(op, t, y), kind)
    if times.ndim != 1 or not times.size:
        raise ShapeError(f"{op}: times {times.shape}; need one dimension, not empty")
    usual = math.sqrt(float(dtypes.finfo(kind).eps))
    rtol, atol = usual if rtol is None else rtol, usual if atol is None else atol
    if not rtol >= 0 or not atol >= 0 or not rtol + atol:
        raise TapegradError(f"{op}: rtol={rtol}, atol={atol}; need positive tolerances")
    return y, times, rtol, atol


def odeint(
    func: Callable[..., TensorLike],
    y0: TensorLike,
    t: TensorLike,
    args: tuple[object, ...] = (),
    *,
    tfirst: bool = False,
    rtol: float | None = None,
    atol: float | None = None,
    hmax: float = 0.0,
    mxstep: int = 0,
    recompute: bool = False,
) -> Tensor:
    """The solution of ``dy/dt = func(y, t, *args)``, ``y(t[0]) = y0``, at the times ``t`` (scipy.integrate.odeint).

    Dormand and Prince's method of order 5, every time of ``t`` the end of a step.  y0: an array of any shape, real or
    complex; t: ``(n,)``, in either direction; the result has shape ``(n, *y0.shape)``.  rtol, atol: the error allowed
    in a step, ``atol + rtol * |y|`` (default: the root of the dtype's precision, as in SciPy); hmax: the longest step
    (0: any); mxstep: the most steps between two times (0: 100000).  Gradients for ``y0``, ``t``, ``args`` and whatever
    ``func`` captures; ``recompute``: the steps between two times are run again to differentiate them, so that only the
    solution is kept.  Raises ShapeError, DTypeError, and TapegradError where the steps become too many or short.
    """
    y, times, rtol, atol = _prepared("odeint", y0, t, rtol, atol)
    rate = _rate("odeint", func, args, tfirst, y)
    stepper = Stepper("odeint", rate, rtol, atol, hmax or math.inf, mxstep or 100_000)

    def between(y: Tensor, slope: Tensor, start: Tensor, end: Tensor, length: float) -> tuple[Tensor, Tensor]:
        own = replace(stepper, length=length)  # a rerun takes the steps of the first run
        state = own.through(y, slope, start, end)
        stepper.length = own.length
        return state

    advance = recompute_grad(between) if recompute else between
    values, slope = [y], rate(y, times[0])
    for i in range(1, times.size):
        y, slope = advance(y, slope, times[i - 1], times[i], stepper.length)
        values.append(y)
    return stack(values)


class OdeResult(NamedTuple):
    """The result of :func:`solve_ivp`: times ``(n,)`` and values ``(*y0.shape, n)``."""

    t: Tensor
    y: Tensor
    success: bool = True


def solve_ivp(
    fun: Callable[..., TensorLike],
    t_span: TensorLike,
    y0: TensorLike,
    method: str = "RK45",
    t_eval: TensorLike | None = None,
    *,
    args: tuple[object, ...] = (),
    max_step: float = math.inf,
    rtol: float = 1e-3,
    atol: float = 1e-6,
) -> OdeResult:
    """The solution of ``dy/dt = fun(t, y, *args)`` from ``t_span[0]`` to ``t_span[1]`` (scipy.integrate.solve_ivp).

    method: ``RK45``, Dormand and Prince's; t_eval: the times to report (default: the end of every step).  Gradients as
    in :func:`odeint`.  Raises ShapeError, DTypeError, and TapegradError for another method, for times outside of the
    span, or where the steps become too short.
    """
    if method != "RK45":
        raise TapegradError(f"solve_ivp: method {method!r}; take 'RK45'")
    y, span, rtol, atol = _prepared("solve_ivp", y0, _pair(t_span), rtol, atol)
    rate = _rate("solve_ivp", fun, args, True, y)
    stepper = Stepper("solve_ivp", rate, rtol, atol, max_step, 10_000_000)
    if t_eval is None:
        times, values = _every_step(stepper, y, span[0], span[1])
    else:
        times = cast(tensor("solve_ivp", t_eval, y), span.dtype)
        values = _at_times(stepper, y, span, times)
    return OdeResult(times, moveaxis(values, 0, -1))


def _pair(t_span: TensorLike) -> TensorLike:
    if isinstance(t_span, (tuple, list)) and len(t_span) == 2:
        return stack([cast(tensor("solve_ivp", t), dtypes.float64) for t in t_span])
    return t_span


def _every_step(stepper: Stepper, y: Tensor, start: Tensor, end: Tensor) -> tuple[Tensor, Tensor]:
    times, values = [start], [y]
    for share, new, _ in stepper.advance(y, stepper.rate(y, start), start, end):
        times.append(end if share == 1.0 else start + (end - start) * share)
        values.append(new)
    return stack(times), stack(values)


def _at_times(stepper: Stepper, y: Tensor, span: Tensor, times: Tensor) -> Tensor:
    first, last = span._read().tolist()
    points = times._read().tolist()
    low, high = min(first, last), max(first, last)
    if times.ndim != 1 or not points or sorted(points, reverse=last < first) != points:
        raise TapegradError(f"solve_ivp: t_eval {times.shape} must be one row of times in the order of t_span")
    if not low <= points[0] <= high or not low <= points[-1] <= high:
        raise TapegradError(f"solve_ivp: t_eval from {points[0]} to {points[-1]} lies outside of {(first, last)}")
    at, slope, values = span[0], stepper.rate(y, span[0]), []
    for i in range(times.size):
        y, slope = stepper.through(y, slope, at, times[i])
        at = times[i]
        values.append(y)
    return stack(values)
