"""Kernels over many tensors at once: their addresses travel by value in a table, so nothing is uploaded.

The table is ``tg_table`` of ``kernels/optim.cu``; its lengths go to the compiler with every kernel.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np

from tapegrad.device import cxx
from tapegrad.device.kernel import Kernel
from tapegrad.device.types import DType

MANY = 48
"""Tensors in one launch: as many as fit, with seven arrays each, into the 4096 bytes that a kernel may be given."""

CHUNK = 8192
"""Elements of one block: 32 or so for each thread, and still enough blocks where tensors are small."""

_THREADS = 256


def launch(kernel: Kernel, device: object, rows: list[tuple[Any, ...]], numbers: Sequence[object]) -> None:
    """Run ``kernel`` once, on up to ``MANY`` tensors.

    ``rows``: for each tensor its C-contiguous arrays, of one size and, throughout, of one dtype.  ``numbers``: what
    follows the table, first a float; an int or bool is a flag, a float is rounded as an array of that dtype would hold
    it.  Or, in place of every float, an array of one element (``TG_LIVE``).
    """
    dtype = rows[0][0].dtype
    args, blocks = arguments([([cxx.address(a) for a in row], row[0].size) for row in rows], dtype, numbers)
    live = {} if isinstance(numbers[0], float) else {"TG_LIVE": 1}
    if blocks:
        kernel(device, blocks, _THREADS, args, T=dtype, TG_MANY=MANY, TG_CHUNK=CHUNK, **live)


def arguments(
    rows: list[tuple[list[int], int]], dtype: DType, numbers: Sequence[object]
) -> tuple[tuple[object, ...], int]:
    """The kernel's arguments for rows of addresses and sizes, and how many blocks it takes."""
    rows = [row for row in rows if row[1]]  # a tensor without elements has no block and no row of the table
    table = np.zeros((), _table(len(rows[0][0]) if rows else 0))
    blocks = 0
    for i, (addresses, size) in enumerate(rows):
        table["at"][i] = addresses
        table["size"][i] = size
        table["first"][i] = blocks
        blocks += -(-size // CHUNK)
    table["count"] = len(rows)
    return (table, *scalars(numbers, dtype)), blocks


def scalars(numbers: Sequence[object], dtype: DType) -> list[object]:
    """Numbers as a kernel's arguments: floats as an array of ``dtype`` would hold them, flags; an array is itself."""
    wide = np.float64 if dtype == np.float64 else np.float32
    found: list[object] = []
    for number in numbers:
        if isinstance(number, float):
            found.append(np.asarray(number, dtype).astype(wide)[()])
        else:
            found.append(np.int32(number) if isinstance(number, int) else number)
    return found


@cache
def _table(arrays: int) -> DType:
    fields = [
        ("at", np.uint64, (MANY, arrays)),
        ("size", np.int64, MANY),
        ("first", np.int32, MANY),
        ("count", np.int32),
    ]
    return np.dtype(fields, align=True)
