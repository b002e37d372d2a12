"""Layer normalization of a block of rows on a CPU: by oneDNN where it is installed (float32), else by NumPy's passes.

Both compute each row by itself, and sums over the rows of a block, of which the caller adds those of all blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from functools import lru_cache
from typing import Protocol

import numpy as np

from tapegrad.device import onednn
from tapegrad.device.dtypes import accumulator
from tapegrad.device.numerics.conv_products import address
from tapegrad.device.onednn import OneDNN, Primitive
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
    library, (rows, width) = onednn.library(), x.shape
    if library is not None and x.dtype == np.float32 and x.size:
        with suppress(onednn.UnsupportedError):
            _codes(library, min(rows, rows_per_block(width)), width, eps)
            return _ByOneDNN(library, eps)
    return _Passes(xp, accumulator(x.dtype), eps)


class _Passes:
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


class _ByOneDNN:
    """Its machine code, in a quarter of the time; the derivative takes the rows' means and variances from forward."""

    dtypes = (np.dtype(np.float32),)

    def __init__(self, library: OneDNN, eps: float) -> None:
        self._library, self._eps = library, eps

    def forward(self, x: Array, gamma: Array, beta: Array, out: Array, scratch: Sequence[Array]) -> None:
        gamma, beta = np.ascontiguousarray(gamma), np.ascontiguousarray(beta)
        self._forward(x, gamma, beta, out)

    def _forward(self, x: Array, gamma: Array, beta: Array, out: Array) -> tuple[Array, Array]:
        """Returns the rows' means and variances."""
        stats = np.empty((2, len(x)), np.float32)
        self._run(self._codes(x)[0], x, gamma, beta, out, *stats)
        return stats[0], stats[1]

    def backward(
        self, x: Array, gamma: Array, gs: Array, results: Array | None, sums: Array | None, scratch: Sequence[Array]
    ) -> None:
        (spare,), gamma = scratch, np.ascontiguousarray(gamma)
        stats = self._forward(x, gamma, gamma, spare if results is None else results[0])  # written over below
        unasked = np.empty((2, x.shape[-1]), np.float32)
        for i, g in enumerate(gs):
            result, total = spare if results is None else results[i], unasked if sums is None else sums[i]
            self._run(self._codes(x)[1], x, g, *stats, gamma, gamma, result, *total)

    def _codes(self, x: Array) -> tuple[Primitive, Primitive]:
        return _codes(self._library, *x.shape, self._eps)

    def _run(self, code: Primitive, *arrays: Array) -> None:
        pad = np.empty(code.scratch, np.uint8)
        with self._library.one_thread():
            code.run(*map(address, arrays), scratch=address(pad) if code.scratch else 0)


@lru_cache(maxsize=256)
def _codes(library: OneDNN, rows: int, width: int, eps: float) -> tuple[Primitive, Primitive]:
    return library.layer_norm(rows, width, eps)
