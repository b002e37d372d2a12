"""How large the tiles of attention's CUDA kernels are: what a thread keeps in registers, a block in shared memory."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

THREADS = 128
STATS = 3
"""Statistics of a query in the derivative: its largest score, 1 over its sum, the mean of its weights' cotangents."""
_MOST_SHARED = 99 * 1024
"""Bytes of shared memory that a block may ask for on every device from compute capability 8.0 on."""
_MOST_SUMS = 32
"""Registers of sums that a thread has where it multiplies number by number ..."""
_MOST_HELD = {1: 160, 2: 96}
"""... and of sums and scores where tensor cores do, by the bands of 16 rows of its warp."""
_MOST_UNROLLED = 8192
"""Sums times bytes of columns: the product of a tile with rows is written out, instruction by instruction."""
MANY = 256
"""Blocks of which there must be as many before they get more rows: two for each multiprocessor, about."""

_MOST_CUTS = 256
"""Of which it is known whether they fit, and what they take: each step of a training asks for the same."""

# Rows of scores, columns, warps that share rows; the best first.
_ON_TENSOR_CORES = ((64, 64, 1), (64, 32, 1), (64, 16, 1), (32, 32, 2), (32, 16, 2), (16, 16, 4))
_BY_NUMBERS = ((64, 32, 1), (32, 32, 1), (32, 16, 1), (16, 16, 1), (8, 16, 1))


class Plan(NamedTuple):
    """What a block holds: widths of the matrices of its own rows, of those of the others, and of its sums of products
    with rows; registers beside sums, in tiles of scores; whose row statistics it has, ``"own"`` or ``"other"``.
    """

    own: tuple[int, ...]
    other: tuple[int, ...]
    sums: tuple[int, ...]
    scores: int
    stats: str = ""


class Numbers(NamedTuple):
    """How a kernel computes: on tensor cores or not; bytes of a number in a tile, of a sum; weights dropped or not."""

    tensor: bool
    element: int
    sum: int
    drop: bool


class Tile(NamedTuple):
    """A block's own rows, its columns, the warps that share rows, and its bytes of shared memory."""

    rows: int
    cols: int
    split: int
    shared: int


def padded(n: int, widest: int) -> int:
    """A width in whole fragments; where a matrix is so wide that several warps share rows, of each of them."""
    step = 16 if widest <= 128 else 64
    return max(step, -(-n // step) * step)


def tile(plan: Plan, numbers: Numbers, blocks: Callable[[int], int]) -> Tile:
    """The largest tile that fits; ``blocks``: how many there are, by rows.

    The number of columns, by which sums are taken, does not depend on how many blocks there are.
    """
    for rows, cols, split in _ON_TENSOR_CORES if numbers.tensor else _BY_NUMBERS:
        if _fits(plan, numbers, rows, cols, split):
            break
    if numbers.tensor and split == 1 and _fits(plan, numbers, 2 * rows, cols, 1) and blocks(2 * rows) >= MANY:
        rows *= 2
    return Tile(rows, cols, split, _shared(plan, numbers, rows, cols))


@lru_cache(_MOST_CUTS)
def _fits(plan: Plan, numbers: Numbers, rows: int, cols: int, split: int) -> bool:
    sums = rows * sum(plan.sums) // THREADS
    if numbers.tensor:
        held = sums + plan.scores * rows * split * cols // THREADS
        in_registers = held <= _MOST_HELD[rows * split // 64] and sums * cols * numbers.element <= _MOST_UNROLLED
    else:
        most = 16 if numbers.sum == 8 and numbers.drop else 64 if numbers.sum == 4 and plan.scores == 1 else 32
        in_registers = sums * numbers.sum <= 4 * _MOST_SUMS and rows <= most
    return in_registers and _shared(plan, numbers, rows, cols) <= _MOST_SHARED


@lru_cache(_MOST_CUTS)
def _shared(plan: Plan, numbers: Numbers, rows: int, cols: int) -> int:
    """Bytes of shared memory of a block: parts that begin at multiples of 16."""
    pad = 16 // numbers.element
    parts = [numbers.element * rows * (width + pad) for width in plan.own]
    parts += [numbers.element * cols * (width + pad) for width in plan.other]
    if not numbers.tensor or not plan.sums:  # weights on their way from thread to thread, or sums of scores
        parts.append(numbers.sum * rows * (cols + 1))
    parts.append(numbers.sum * STATS * {"own": rows, "other": cols, "": 0}[plan.stats])
    return sum(-(-part // 16) * 16 for part in parts)
