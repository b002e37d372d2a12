"""Row by row on the CPU: a 2-d array is cut into blocks of whole rows that fit a core's cache, spread over threads.

The cut depends on the shape alone, so no result depends on the number of threads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod

from tapegrad.device import threads
from tapegrad.device.dtypes import accumulator
from tapegrad.device.types import Array, DType, Namespace

BLOCK = 65536
"""Elements per block: see ``engine.cpu.tiles``."""


def rows_per_block(width: int) -> int:
    """How many rows of ``width`` elements make a block."""
    return max(1, BLOCK // max(1, width))


def matrix(xp: Namespace, x: Array) -> Array:
    """``x`` as rows of its last axis: a view if it is contiguous, else a copy."""
    return xp.reshape(xp.ascontiguousarray(x), (prod(x.shape[:-1]), x.shape[-1]))


def matrices(xp: Namespace, x: Array, ndim: int) -> Array:
    """``x`` as a stack of such matrices of its last ``ndim`` axes: one for each cotangent of a Jacobian's rows."""
    lead = x.ndim - ndim
    return xp.reshape(xp.ascontiguousarray(x), (prod(x.shape[:lead]), prod(x.shape[lead:-1]), x.shape[-1]))


def by_blocks(xp: Namespace, x: Array, scratch: Sequence[DType], body: Callable[..., None]) -> None:
    """Call ``body(block number, slice of rows, *scratch)`` for each block of ``x``; ``scratch``: dtypes of arrays."""
    rows, width = x.shape
    step = rows_per_block(width)
    tasks = -(-rows // step)

    def worker() -> Callable[[int], None]:
        arrays = [xp.empty((min(step, rows), width), dtype) for dtype in scratch]

        def run(number: int) -> None:
            block = slice(number * step, min((number + 1) * step, rows))
            count = block.stop - block.start
            body(number, block, *(a if len(a) == count else a[:count] for a in arrays))

        return run

    if x.size:
        threads.run([worker() for _ in range(min(threads.get_num_threads(), tasks))], tasks)


def wide(out: Array) -> tuple[DType]:
    """The dtype in which rows of the result are computed, as the ``scratch`` of :func:`by_blocks`."""
    return (accumulator(out.dtype),)


def target(out: Array, spare: Array) -> Array:
    """Where a block is computed: in the result itself, or in scratch of a wider dtype."""
    return out if out.dtype == spare.dtype else spare


def deliver(xp: Namespace, work: Array, out: Array) -> None:
    """Put a block computed in :func:`target` into the result."""
    if work is not out:
        xp.copyto(out, work, casting="unsafe")


_SHORT = 4096
"""Rows up to this width are summed by einsum, which takes a third of the time of ``add.reduce`` on rows of 128; longer
ones by the latter, whose pairwise sums lose less."""


def row_sums(xp: Namespace, x: Array, dtype: DType) -> Array:
    """The sum of each row, as a column."""
    if x.shape[-1] <= _SHORT and x.dtype == dtype:
        return xp.einsum("ij->i", x)[:, None]
    return xp.add.reduce(x, axis=-1, keepdims=True, dtype=dtype)


def row_dots(xp: Namespace, x: Array, y: Array, spare: Array) -> Array:
    """The inner product of each row of ``x`` with that of ``y``, as a column; ``spare`` may be written over."""
    if x.shape[-1] <= _SHORT:
        return xp.einsum("ij,ij->i", x, y)[:, None]
    xp.multiply(x, y, out=spare)
    return xp.add.reduce(spare, axis=-1, keepdims=True)


def row_maxima(xp: Namespace, x: Array) -> Array:
    """The largest element of each row (NaN if there is one), as a column.

    On rows of 128 looking it up where ``argmax`` says takes 0.6 of the time of ``maximum.reduce``.
    """
    if x.shape[-1] > 512:
        return xp.maximum.reduce(x, axis=-1, keepdims=True)
    return x[xp.arange(len(x)), xp.argmax(x, axis=-1)][:, None]


def shifted_exp(xp: Namespace, x: Array, work: Array) -> Array:
    """``exp(x - max)`` of each row into ``work``; returns the maxima.  A row of infinities gives NaN."""
    most = row_maxima(xp, x)
    with xp.errstate(invalid="ignore"):
        xp.subtract(x, most, out=work, dtype=work.dtype)
    xp.exp(work, out=work)
    return most
