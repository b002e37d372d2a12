"""Layer normalization of a block of rows on a CPU: by oneDNN where it is installed (float32), else by NumPy's passes.

Both compute each row by itself, and sums over the rows of a block, of which the caller adds those of all blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Protocol

from tapegrad.device.dtypes import accumulator
from tapegrad.device.numerics import layer_norm_onednn
from tapegrad.device.numerics.layer_norm_onednn import ByOneDNN
from tapegrad.device.types import Array, DType, Namespace
from tapegrad.ops.rows._rows import row_dots, row_sums, rows_per_block


class Block(Protocol):
    """What computes a block; ``scratch`` are arrays of its shape, of so many ``dtypes``."""

    @property
    def dtypes(self) -> Sequence[DType]: ...

    def forward(self, x: Array, gamma: Array, beta: Array, out: Array, scratch: Sequence[Array]) -> None:
        """``(x - mean) / sqrt(variance + eps) * gamma + beta`` of each row."""

    def backward(
        self, x: Array, gamma: Array, gs: Array, results: Array | None, sums: Array | None, scratch: Sequence[Array]
    ) -> None:
        """For each cotangent of ``gs`` (n, rows, width): that of x, into ``results`` (n, rows, width), and those of
        gamma and beta, into ``sums`` (n, 2, width)."""


def block_of(xp: Namespace, x: Array, eps: float) -> Block:
    """What computes blocks of rows of ``x``."""
    most = min(len(x), rows_per_block(x.shape[-1]))
    return layer_norm_onednn.block_of(x, most, eps) or Passes(xp, accumulator(x.dtype), eps)


def bound_block_of(x: Array, eps: float, *others: Array) -> ByOneDNN | None:
    """What computes all rows of ``x`` by calls whose arguments are known; None: they are several, or NumPy's.

    ``others``: what else is read or written.
    """
    rows = prod(x.shape[:-1])
    if not (x.size and rows <= rows_per_block(x.shape[-1]) and all(a.flags.c_contiguous for a in (x, *others))):
        return None
    return layer_norm_onednn.block_of(x.reshape(rows, x.shape[-1]), rows, eps)


class Passes:
    """NumPy's operations, one after the other.

    The variance is that of the centred values: one more pass, but no cancellation.
    """

    def __init__(self, xp: Namespace, wide: DType, eps: float) -> None:
        self._xp, self._eps = xp, wide.type(eps)
        self.dtypes = (wide,) * 3

    def forward(self, x: Array, gamma: Array, beta: Array, out: Array, scratch: Sequence[Array]) -> None:
        xp, (centred, spare, _) = self._xp, scratch
        self._normalize(x, centred, spare)
        xp.multiply(centred, gamma, out=centred)
        xp.add(centred, beta, out=out, casting="same_kind")

    def _normalize(self, x: Array, centred: Array, spare: Array) -> Array:
        """Rows less their mean, times the reciprocal deviation, into ``centred``; returns the latter."""
        xp, width = self._xp, x.shape[-1]
        xp.subtract(x, row_sums(xp, x, centred.dtype) / width, out=centred)
        rstd = 1 / xp.sqrt(row_dots(xp, centred, centred, spare) / width + self._eps)
        xp.multiply(centred, rstd, out=centred)
        return rstd

    def backward(
        self, x: Array, gamma: Array, gs: Array, results: Array | None, sums: Array | None, scratch: Sequence[Array]
    ) -> None:
        xp, (h, d, spare) = self._xp, scratch
        rstd = self._normalize(x, h, spare)
        for i, g in enumerate(gs):
            if sums is not None:
                xp.multiply(h, g, out=spare)
                xp.add.reduce(spare, axis=0, out=sums[i, 0])
                xp.add.reduce(g, axis=0, out=sums[i, 1], dtype=h.dtype)
            if results is not None:
                self._pull(h, g, gamma, rstd, d, spare, results[i])

    def _pull(self, h: Array, g: Array, gamma: Array, rstd: Array, d: Array, spare: Array, result: Array) -> None:
        """The cotangent of some rows, of which ``h`` are the normalized ones; d and spare: scratch."""
        xp, width = self._xp, h.shape[-1]
        xp.multiply(g, gamma, out=d, dtype=d.dtype)
        along = row_dots(xp, d, h, spare) / width
        xp.subtract(d, row_sums(xp, d, d.dtype) / width, out=d)
        xp.multiply(h, along, out=spare)
        xp.subtract(d, spare, out=d)
        xp.multiply(d, rstd, out=result, casting="same_kind")
