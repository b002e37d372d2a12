"""Products with logarithms, and divergences made of them."""

from __future__ import annotations

from tapegrad.ops import hypot, log, log1p, where
from tapegrad.special._declare import pointwise
from tapegrad.tensor import Tensor

__all__ = ["entr", "huber", "kl_div", "pseudo_huber", "rel_entr", "xlog1py", "xlogy"]


def _over(x: Tensor, y: Tensor) -> Tensor:
    """``x / y``, but 0 / 0 is 0: the derivative of what is 0 for every ``y``."""
    return x / where((x == 0) & (y == 0), 1.0, y)


xlogy = pointwise(
    "xlogy", [lambda y: log(y), _over], operands=("x", "y"), cxx="tg_xlogy({x}, {y})", domain=(0.3, 2.0),
    doc="``x * log(y)``, 0 where ``x`` is 0 (the gradient in ``x`` is ``log(y)`` there, too; in ``y``: 0).",
)  # fmt: skip
xlog1py = pointwise(
    "xlog1py", [lambda y: log1p(y), lambda x, y: _over(x, 1 + y)], operands=("x", "y"),
    cxx="tg_xlog1py({x}, {y})", domain=(-0.5, 2.0),
    doc="``x * log(1 + y)``, 0 where ``x`` is 0 (the gradient in ``x`` is ``log(1 + y)`` there, too; in ``y``: 0).",
)  # fmt: skip
entr = pointwise(
    "entr", [lambda x: -log(x) - 1], cxx="tg_entr({x})", domain=(0.3, 2.0),
    doc="``-x * log(x)``: 0 at 0, where the gradient is inf; -inf for negative ``x``.",
)  # fmt: skip


def _both(x: Tensor, y: Tensor) -> Tensor:
    return (x >= 0) & (y >= 0)


def _log_ratio(x: Tensor, y: Tensor, more: float = 0.0) -> Tensor:
    """``log(x / y) + more`` where the divergences vary with ``x``, else 0."""
    inside = _both(x, y) & ~((x == 0) & (y == 0))
    return where(inside, log(where(inside, x, 1.0)) - log(where(inside, y, 1.0)) + more, 0.0)


rel_entr = pointwise(
    "rel_entr",
    [lambda x, y: _log_ratio(x, y, 1.0), lambda x, y: where(_both(x, y), -_over(x, y), 0.0)],
    operands=("x", "y"), domain=(0.3, 2.0),
    doc="``x * log(x / y)``; 0 where ``x`` is 0 (the gradient in ``x`` is -inf there), inf for negative operands.",
)  # fmt: skip
kl_div = pointwise(
    "kl_div",
    [lambda x, y: _log_ratio(x, y), lambda x, y: where(_both(x, y), 1 - _over(x, y), 0.0)],
    operands=("x", "y"), domain=(0.3, 2.0),
    doc="``x * log(x / y) - x + y``; ``y`` where ``x`` is 0, inf for negative operands.",
)  # fmt: skip


def _slope_of_huber(delta: Tensor, r: Tensor) -> Tensor:
    near = (r <= delta) & (r >= -delta)
    return where(near, r, where(r > 0, delta, -delta))


huber = pointwise(
    "huber",
    [
        lambda delta, r: where((r <= delta) & (r >= -delta), 0.0, where(r > 0, r, -r) - delta),
        _slope_of_huber,
    ],
    operands=("delta", "r"), domain=(0.3, 2.0),
    doc="``r * r / 2`` up to ``|r| = delta``, then ``delta * (|r| - delta / 2)``; inf for negative ``delta``.",
)  # fmt: skip


def _pseudo_huber_in_delta(delta: Tensor, r: Tensor) -> Tensor:
    """``(size - delta)**2 / size``, where ``size`` is ``hypot(delta, r)``."""
    size = hypot(delta, r)
    gap = r * (r / (size + delta))
    return gap * (gap / size)


pseudo_huber = pointwise(
    "pseudo_huber",
    [
        lambda delta, r: _pseudo_huber_in_delta(delta, r),
        lambda delta, r: r * (delta / hypot(delta, r)),
    ],
    operands=("delta", "r"), domain=(0.3, 2.0),
    doc="``delta**2 * (sqrt(1 + (r / delta)**2) - 1)``: smooth, and much as ``huber``.",
)  # fmt: skip
