"""QR factors.

Derivatives: S. F. Walter, L. Lehmann and R. Lamour (2012); for wide matrices J. and D. Roberts, *QR and LQ
decomposition matrix backpropagation algorithms* (2020).
"""

from __future__ import annotations

from typing import NamedTuple

from tapegrad.core.aval import ShapedArray
from tapegrad.core.primitive import Primitive, Sample
from tapegrad.device.types import Array, Namespace
from tapegrad.errors import ShapeError
from tapegrad.linalg._common import TALL, WIDE, H, declare, floating, half_upper, matrix, upper_part
from tapegrad.linalg.solving import triangular
from tapegrad.ops import concat
from tapegrad.ops.dispatch import barrier
from tapegrad.tensor import Tensor, TensorLike

__all__ = ["QRResult", "qr"]

_STACK = [[[2.0, 1.0], [-1.0, 3.0]], [[0.5, 1.5], [1.25, -2.5]]]


class QRResult(NamedTuple):
    """``x = Q @ R``: orthonormal columns, an upper triangle."""

    Q: Tensor
    R: Tensor


def _infer_qr(x: ShapedArray) -> ShapedArray:
    *batch, m, n = x.shape
    return x.with_shape((*batch, m + n, n) if m >= n else (*batch, m, m + n)).with_dtype(floating(x.dtype))


def _run_qr(xp: Namespace, x: Array) -> Array:
    q, r = xp.linalg.qr(x)
    return xp.concatenate([q, r], axis=-2 if x.shape[-2] >= x.shape[-1] else -1)


def _qr_parts(packed: Tensor, m: int, n: int) -> tuple[Tensor, Tensor]:
    if m >= n:
        return packed[..., :m, :], packed[..., m:, :]
    return packed[..., :m], packed[..., m:]


def _over_right(x: Tensor, r: Tensor) -> Tensor:
    """``x @ inv(r)``."""
    return H(triangular(H(r), H(x), lower=True))


def _pull_tall(gq: Tensor, gr: Tensor, q: Tensor, r: Tensor) -> Tensor:
    middle = half_upper(upper_part(gr) @ H(r) - H(q) @ gq)
    return H(triangular(r, H(gq + q @ (middle + H(middle))), lower=False))


def _push_tall(t: Tensor, q: Tensor, r: Tensor) -> tuple[Tensor, Tensor]:
    moved = _over_right(t, r)
    inner = H(q) @ moved
    middle = half_upper(inner + H(inner))
    return moved - q @ middle, middle @ r


def _pull_qr(ct: Tensor, x: Tensor, out: Tensor, x_aval: ShapedArray) -> Tensor:
    m, n = x_aval.shape[-2:]
    (q, r), (gq, gr) = _qr_parts(out, m, n), _qr_parts(ct, m, n)
    if m >= n:
        return _pull_tall(gq, gr, q, r)
    rest, grest = x[..., m:], gr[..., m:]
    first = _pull_tall(gq + rest @ H(grest), gr[..., :m], q, r[..., :m])
    return concat([first, q @ grest], axis=-1)


def _push_qr(t: Tensor, x: Tensor, out: Tensor) -> Tensor:
    m, n = t.shape[-2:]
    q, r = _qr_parts(out, m, n)
    if m >= n:
        return concat(_push_tall(t, q, r), axis=-2)
    dq, dr = _push_tall(t[..., :m], q, r[..., :m])
    return concat([dq, dr, H(dq) @ x[..., m:] + H(q) @ t[..., m:]], axis=-1)


qr_p: Primitive = declare(
    "qr",
    _run_qr,
    _infer_qr,
    vjp=[_pull_qr],
    jvp=[_push_qr],
    flops=4.0,
    samples=[Sample(TALL), Sample(WIDE), Sample(_STACK), Sample((0, 2)), Sample((3, 0)), Sample((0, 2, 2))],
    doc="Q above R (or, for wide matrices, beside it).",
)


def _run_complete(xp: Namespace, x: Array) -> Array:
    q, r = xp.linalg.qr(x, mode="complete")
    return xp.concatenate([q, r], axis=-1)


qr_complete_p: Primitive = declare(
    "qr_complete",
    _run_complete,
    lambda x: x.with_shape((*x.shape[:-1], x.shape[-2] + x.shape[-1])).with_dtype(floating(x.dtype)),
    flops=6.0,
    samples=[Sample(TALL)],
    doc="Q of all rows, and R; no derivative.",
)


def qr(a: TensorLike, mode: str = "reduced") -> Tensor | QRResult:
    """Orthonormal columns times an upper triangle, ``a = Q @ R`` (NumPy's ``linalg.qr``).

    x: ``(..., m, n)``; Q: ``(..., m, k)``, R: ``(..., k, n)`` with ``k = min(m, n)``; mode "complete": ``k = m``, which
    has a gradient if ``m <= n`` only; mode "r": R alone.  The gradient needs the first ``k`` columns to be
    independent.  Raises ShapeError, LinAlgError.
    """
    a = matrix("qr", a)
    m, n = a.shape[-2:]
    if mode not in ("reduced", "complete", "r"):
        raise ShapeError(f"qr: mode={mode!r}; give 'reduced', 'complete' or 'r'")
    if mode == "complete" and m > n:
        packed = barrier(qr_complete_p, a)
        return QRResult(packed[..., :m], packed[..., m:])
    q, r = _qr_parts(barrier(qr_p, a), m, n)
    return r if mode == "r" else QRResult(q, r)
