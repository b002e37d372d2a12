"""Layer normalization of rows by oneDNN (Intel), where it is installed: float32.

Each row is computed by itself, so its bits are the same among any others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache

import numpy as np

from tapegrad.device import onednn
from tapegrad.device.numerics.conv_products import address
from tapegrad.device.onednn import OneDNN, Primitive
from tapegrad.device.types import Array


def block_of(x: Array, most: int, eps: float) -> ByOneDNN | None:
    """What computes blocks of up to ``most`` rows of ``x``; None: the library is not there, or has no fast code."""
    library = onednn.library()
    if library is None or x.dtype != np.float32 or not x.size:
        return None
    try:
        _codes(library, most, x.shape[-1], eps)
    except onednn.UnsupportedError:
        return None
    return ByOneDNN(library, eps)


class ByOneDNN:
    """Its machine code; the derivative takes the rows' means and variances from forward."""

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

    def bound_forward(self, x: Array, gamma: Array, beta: Array, out: Array) -> Callable[[], None]:
        """:meth:`forward` of these very arrays, which are contiguous."""
        stats = np.empty((2, len(x)), np.float32)
        return self._bound((self._codes(x)[0], (x, gamma, beta, out, *stats)))

    def bound_backward(self, x: Array, gamma: Array, g: Array, result: Array, sums: Array | None) -> Callable[[], None]:
        """:meth:`backward` of these very arrays, of one cotangent, which are contiguous."""
        stats, (there, back) = np.empty((2, len(x)), np.float32), self._codes(x)
        sums = np.empty((2, x.shape[-1]), np.float32) if sums is None else sums
        return self._bound(
            (there, (x, gamma, gamma, result, *stats)), (back, (x, g, *stats, gamma, gamma, result, *sums))
        )

    def _bound(self, *calls: tuple[Primitive, Sequence[Array]]) -> Callable[[], None]:
        pads = [np.empty(code.scratch, np.uint8) for code, _ in calls]
        bound = [
            code.bound(*map(address, arrays), scratch=address(pad) if code.scratch else 0)
            for (code, arrays), pad in zip(calls, pads, strict=True)
        ]
        one_thread = self._library.one_thread

        def run(keep: object = (calls, pads)) -> None:
            with one_thread():
                for call in bound:
                    call()

        return run

    def backward(
        self, x: Array, gamma: Array, gs: Array, results: Array | None, sums: Array | None, scratch: Sequence[Array]
    ) -> None:
        if not len(gs):  # of no rows of a Jacobian, or no examples
            return
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
    with library.one_thread():  # for as many threads as it will run on
        return library.layer_norm(rows, width, eps)
