"""Matrices made of a few vectors: plain functions."""

from __future__ import annotations

from tapegrad.device import Device
from tapegrad.errors import ShapeError
from tapegrad.linalg._common import floating
from tapegrad.ops.create.creation import arange, eye, zeros
from tapegrad.ops.dispatch import promote, tensor
from tapegrad.ops.elementwise.arithmetic import abs
from tapegrad.ops.elementwise.complex import conj
from tapegrad.ops.index.indexing import take
from tapegrad.ops.shape.join import concat, flip, stack
from tapegrad.ops.shape.padding import pad
from tapegrad.ops.shape.shape import broadcast_to, expand_dims, reshape
from tapegrad.tensor import Tensor, TensorLike

__all__ = [
    "block_diag", "circulant", "companion", "convolution_matrix", "fiedler", "fiedler_companion", "hankel",
    "khatri_rao", "toeplitz",
]  # fmt: skip


def _vector(op: str, x: TensorLike) -> Tensor:
    x = tensor(op, x)
    if not x.ndim:
        raise ShapeError(f"{op}: needs a vector, got a scalar")
    return x


def _grid(rows: int, columns: int, device: Device) -> tuple[Tensor, Tensor]:
    """The indices of rows, as a column, and those of columns."""
    return reshape(arange(rows, device=device), (rows, 1)), arange(columns, device=device)


def toeplitz(c: TensorLike, r: TensorLike | None = None) -> Tensor:
    """Matrices with first column ``c`` and first row ``r``, constant along diagonals (SciPy's ``linalg.toeplitz``).

    c: ``(..., m)``; r: ``(..., n)``, whose first element is not read; None: the conjugate of ``c``.
    """
    c = _vector("toeplitz", c)
    c, r = promote("toeplitz", (c, conj(c) if r is None else _vector("toeplitz", r)))
    m, n = c.shape[-1], r.shape[-1]
    line = concat([flip(c, axis=-1), r[..., 1:]], axis=-1)
    i, j = _grid(m, n, c.device)
    return take(line, (m - 1) + j - i, axis=-1)


def circulant(c: TensorLike) -> Tensor:
    """Square matrices with first column ``c``, each other one shifted down once more (SciPy's ``linalg.circulant``)."""
    c = _vector("circulant", c)
    n = c.shape[-1]
    i, j = _grid(n, n, c.device)
    return take(c, (i - j) % max(n, 1), axis=-1)


def hankel(c: TensorLike, r: TensorLike | None = None) -> Tensor:
    """Matrices with first column ``c`` and last row ``r``, constant along antidiagonals (SciPy's ``linalg.hankel``).

    c: ``(..., m)``; r: ``(..., n)``, whose first element is not read; None: zeros.
    """
    c = _vector("hankel", c)
    c, r = promote("hankel", (c, c * 0 if r is None else _vector("hankel", r)))
    i, j = _grid(c.shape[-1], r.shape[-1], c.device)
    return take(concat([c, r[..., 1:]], axis=-1), i + j, axis=-1)


def companion(a: TensorLike) -> Tensor:
    """The companion matrix of a polynomial with coefficients ``a``, highest first (SciPy's ``linalg.companion``).

    a: ``(..., n)`` with ``n >= 2`` and a first element that is not 0.  Raises ShapeError.
    """
    (a,) = promote("companion", (_vector("companion", a),), to=floating)
    n = a.shape[-1]
    if n < 2:
        raise ShapeError(f"companion: needs two coefficients or more, got shape {a.shape}")
    first = expand_dims(-a[..., 1:] / a[..., :1], -2)
    below = eye(n - 2, n - 1, dtype=a.dtype, device=a.device)
    return concat([first, broadcast_to(below, (*a.shape[:-1], *below.shape))], axis=-2)


def convolution_matrix(a: TensorLike, n: int, mode: str = "full") -> Tensor:
    """The matrix whose product with a vector of ``n`` elements is its convolution with ``a``.

    a: ``(..., m)``; mode: as of ``convolve``, "full", "same" or "valid" (SciPy's ``linalg.convolution_matrix``).
    Raises ShapeError.
    """
    a = _vector("convolution_matrix", a)
    m = a.shape[-1]
    if n <= 0 or not m:
        raise ShapeError(f"convolution_matrix: a vector of {m} elements and n={n}; both are 1 or more")
    if mode not in ("full", "same", "valid"):
        raise ShapeError(f"convolution_matrix: mode={mode!r}; give 'full', 'same' or 'valid'")
    count = {"full": m + n - 1, "same": max(m, n), "valid": max(m, n) - min(m, n) + 1}[mode]
    first = {"full": 0, "same": (min(m, n) - 1) // 2, "valid": min(m, n) - 1}[mode]
    i, j = _grid(count, n, a.device)
    widths = [(0, 0)] * (a.ndim - 1) + [(n - 1, n - 1)]
    return take(pad(a, widths), (first + n - 1) + i - j, axis=-1)


def fiedler(a: TensorLike) -> Tensor:
    """The symmetric matrices of ``|a_i - a_j|`` (SciPy's ``linalg.fiedler``); gradient 0 at ties.

    a: ``(..., n)``.
    """
    a = _vector("fiedler", a)
    return abs(expand_dims(a, -1) - expand_dims(a, -2))


def fiedler_companion(a: TensorLike) -> Tensor:
    """A pentadiagonal companion matrix of a polynomial, highest coefficient first (SciPy's ``fiedler_companion``).

    a: a vector whose first element is not 0.  Raises ShapeError.
    """
    (a,) = promote("fiedler_companion", (a,), to=floating)
    if a.ndim != 1:
        raise ShapeError(f"fiedler_companion: needs a vector, got shape {a.shape}")
    n = a.shape[0] - 1
    if n <= 1:
        return -reshape(a[1:] / a[:1], (1, 1)) if n == 1 else zeros((0,), dtype=a.dtype, device=a.device)
    a = a / a[0]
    at: dict[tuple[int, int], Tensor | int] = {(0, 0): -a[1], (1, 0): 1}
    for i in range(0, n - 1, 2):
        at[i, i + 1] = -a[i + 2]
    for i in range(2, n, 2):
        at[i, i - 1] = -a[i + 1]
    for i in range(0, n - 2, 2):
        at[i, i + 2] = 1
    for i in range(3, n, 2):
        at[i, i - 2] = 1
    blank = a[0] * 0
    return stack([stack([at.get((i, j), blank) + blank for j in range(n)]) for i in range(n)])


def block_diag(*arrs: TensorLike) -> Tensor:
    """The matrices ``arrs`` along the diagonal, zeros around (SciPy's ``linalg.block_diag``).

    Vectors are rows, scalars 1 by 1; more dimensions are stacks of one length.  Raises ShapeError.
    """
    blocks = promote("block_diag", arrs) if arrs else (zeros((1, 0)),)
    blocks = tuple(reshape(b, (1,) * (2 - b.ndim) + b.shape) if b.ndim < 2 else b for b in blocks)
    if any(b.shape[:-2] != blocks[0].shape[:-2] for b in blocks):
        raise ShapeError(f"block_diag: stacks of different shapes: {[b.shape for b in blocks]}")
    total, left, rows = sum(b.shape[-1] for b in blocks), 0, []
    for b in blocks:
        widths = [(0, 0)] * (b.ndim - 1) + [(left, total - left - b.shape[-1])]
        rows.append(pad(b, widths))
        left += b.shape[-1]
    return concat(rows, axis=-2)


def khatri_rao(a: TensorLike, b: TensorLike) -> Tensor:
    """The Kronecker product of each column of ``a`` with that of ``b`` (SciPy's ``linalg.khatri_rao``).

    a: ``(..., n, k)``, b: ``(..., m, k)``; the result: ``(..., n * m, k)``.  Raises ShapeError.
    """
    a, b = promote("khatri_rao", (a, b))
    if a.ndim < 2 or b.ndim < 2 or a.shape[-1] != b.shape[-1]:
        raise ShapeError(f"khatri_rao: needs matrices of as many columns, got {a.shape} and {b.shape}")
    blocks = expand_dims(a, -2) * expand_dims(b, -3)
    return reshape(blocks, (*blocks.shape[:-3], a.shape[-2] * b.shape[-2], a.shape[-1]))
