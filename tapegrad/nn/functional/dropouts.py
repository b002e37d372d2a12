"""Functions that drop entries, channels or weights at random: dropout and its kin.

Masks come from tapegrad's global stream, so a recomputed function draws the same ones again.
"""

from __future__ import annotations

import tapegrad.random as random
from tapegrad import ops
from tapegrad.errors import ShapeError
from tapegrad.nn import checks
from tapegrad.nn.functional._variants import in_dims
from tapegrad.tensor import Tensor, TensorLike

__all__ = [
    "alpha_dropout", "dropout", "dropout1d", "dropout2d", "dropout3d", "feature_alpha_dropout",
    "simplified_dropconnect", "zoneout",
]  # fmt: skip

_ALPHA = -1.7580993408473766
"""What selu tends to for large negative numbers: minus its scale times its alpha."""


def _mask(x: Tensor, shape: tuple[int, ...], p: float) -> Tensor:
    """True with probability ``1 - p``.  On the CPU one byte per entry, on a GPU never stored: it is drawn again."""
    return random.bernoulli(shape, 1.0 - p, dtype="bool", bits=16, device=x.device)


def _dropped(x: Tensor, p: float, shape: tuple[int, ...]) -> Tensor:
    if p == 1:
        return ops.where(False, x, 0)
    # `where` keeps the mask off infinities, of which multiplying would make NaN.
    return ops.where(_mask(x, shape, p), x * (1.0 / (1.0 - p)), 0)


def dropout(input: TensorLike, p: float = 0.5, training: bool = True) -> Tensor:
    """A share ``p`` of the entries becomes 0, the rest is divided by ``1 - p``; without ``training`` nothing changes.

    ``p`` is rounded to a multiple of 2**-16 (16 random bits decide on an entry).  On a GPU the mask is never stored:
    the backward kernel draws it again.

    Raises TapegradError for ``p`` outside [0, 1].
    """
    checks.rate("dropout", p)
    x = ops.asarray(input)
    return ops.asarray(x, copy=True) if not training or p == 0 else _dropped(x, p, x.shape)


def _channel_dropout(dims: int, input: TensorLike, p: float = 0.5, training: bool = True) -> Tensor:
    """As :func:`dropout`, but of whole channels of (n, c, SIZES) (Tompson et al., arXiv 1411.4280).

    Raises TapegradError, ShapeError.
    """
    op = f"dropout{dims}d"
    checks.rate(op, p)
    x = ops.asarray(input)
    if x.ndim not in (dims + 1, dims + 2):
        raise ShapeError(f"{op}: wanted input (n, channels, sizes ...) or (channels, sizes ...), got {x.shape}")
    shape = (*x.shape[: x.ndim - dims], *(1,) * dims)
    return ops.asarray(x, copy=True) if not training or p == 0 else _dropped(x, p, shape)


dropout1d, dropout2d, dropout3d = in_dims("dropout{}d", _channel_dropout)


def _alpha(x: Tensor, p: float, shape: tuple[int, ...]) -> Tensor:
    """Dropped to where selu saturates, then scaled so that mean 0 and variance 1 stay."""
    if p == 1:
        return ops.where(False, x, 0)
    scale = ((1.0 - p) * (1.0 + p * _ALPHA**2)) ** -0.5
    return ops.where(_mask(x, shape, p), x, _ALPHA) * scale - scale * _ALPHA * p


def alpha_dropout(input: TensorLike, p: float = 0.5, training: bool = False) -> Tensor:
    """Dropout that keeps mean and variance of selu's results (Klambauer et al., arXiv 1706.02515).

    Raises TapegradError for ``p`` outside [0, 1].
    """
    checks.rate("alpha_dropout", p)
    x = ops.asarray(input)
    return ops.asarray(x, copy=True) if not training or p == 0 else _alpha(x, p, x.shape)


def feature_alpha_dropout(input: TensorLike, p: float = 0.5, training: bool = False) -> Tensor:
    """As :func:`alpha_dropout`, but of whole channels of (n, c, ...).  Raises TapegradError, ShapeError."""
    checks.rate("feature_alpha_dropout", p)
    x = ops.asarray(input)
    if x.ndim < 2:
        raise ShapeError(f"feature_alpha_dropout: wanted input (n, channels, ...), got {x.shape}")
    return ops.asarray(x, copy=True) if not training or p == 0 else _alpha(x, p, (*x.shape[:2], *(1,) * (x.ndim - 2)))


def zoneout(h: TensorLike, x: TensorLike, ratio: float = 0.5, training: bool = True) -> Tensor:
    """``h`` with probability ``ratio``, else ``x``; without ``training`` their mean (Krueger et al., arXiv 1606.01305).

    h and x: of one shape (Chainer's function).  Raises TapegradError, ShapeError.
    """
    checks.rate("zoneout", ratio)
    h, x = ops.asarray(h), ops.asarray(x)
    if h.shape != x.shape:
        raise ShapeError(f"zoneout: wanted h and x of one shape, got {h.shape} and {x.shape}")
    if not training:
        return h * ratio + x * (1.0 - ratio)
    return ops.where(_mask(x, x.shape, ratio), x, h)


def simplified_dropconnect(
    x: TensorLike, W: TensorLike, b: TensorLike | None = None, ratio: float = 0.5, training: bool = True,
    mask: TensorLike | None = None, use_batchwise_mask: bool = True,
) -> Tensor:  # fmt: skip
    """A linear layer whose weights are dropped, for each example anew unless ``use_batchwise_mask`` is false.

    x: (n, ...), W: (units, k), b: (units,), result: (n, units) (Wan et al., 2013; Chainer's function).  ``mask``: which
    weights count, (n, units, k) or (units, k).  Raises TapegradError, ShapeError.
    """
    checks.rate("simplified_dropconnect", ratio)
    w = ops.asarray(W)
    x = ops.asarray(x)
    x = ops.reshape(x, (x.shape[0], w.shape[1])) if x.ndim != 2 else x
    if w.ndim != 2 or x.shape[1] != w.shape[1]:
        raise ShapeError(f"simplified_dropconnect: wanted x (n, k), W (units, k), got {x.shape}, {w.shape}")
    if training or mask is not None:
        if mask is None:
            mask = _mask(x, (x.shape[0], *w.shape) if use_batchwise_mask else w.shape, ratio)
        kept = ops.astype(ops.asarray(mask), "bool")
        w = ops.where(kept, w * (1.0 / (1.0 - ratio)), 0)
    y = ops.matmul(w, ops.expand_dims(x, axis=-1))[..., 0] if w.ndim == 3 else ops.matmul(x, w.mT)
    return y if b is None else y + b
