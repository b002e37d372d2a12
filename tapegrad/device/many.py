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

MANY, MANY_OF_HALVES = 48, 40
"""Tensors in one launch: as many as fit, with nine arrays each (two more of half variables), into the 4096 bytes that
a kernel may be given."""

CHUNK = 8192
"""Elements of one block: 32 or so for each thread, and still enough blocks where tensors are small."""

_THREADS = 256


def launch(kernel: Kernel, device: object, rows: list[tuple[Any, ...]], numbers: Sequence[object]) -> None:
    """Run ``kernel`` once, on up to ``MANY`` tensors, or ``MANY_OF_HALVES``.

    ``rows``: for each tensor its C-contiguous arrays, of one size and, throughout, of one dtype; but the gradient, the
    second, may be of another, and so may what comes last, the new value of a half variable with a master.
    ``numbers``: what follows the table, first a float; an int or bool is a flag, a float is rounded as an array of that
    dtype would hold it.  Or, in place of every float, an array of one element (``TG_LIVE``).
    """
    dtype, types = rows[0][0].dtype, macros(*(rows[0][i].dtype for i in (0, 1, -1)))
    addresses = [([cxx.address(a) for a in row], row[0].size) for row in rows]
    args, blocks = arguments(addresses, dtype, numbers, types["TG_MANY"])
    live = {} if isinstance(numbers[0], float) else {"TG_LIVE": 1}
    if blocks:
        kernel(device, blocks, _THREADS, args, **types, **live)


def macros(dtype: DType, gradient: DType, value: DType) -> dict[str, Any]:
    """What the kernels are compiled with."""
    given = {name: other for name, other in (("GRADIENT", gradient), ("VALUE", value)) if other != dtype}
    return {"T": dtype, **given, "TG_MANY": MANY_OF_HALVES if "VALUE" in given else MANY, "TG_CHUNK": CHUNK}


def arguments(
    rows: list[tuple[list[int], int]], dtype: DType, numbers: Sequence[object], most: int
) -> tuple[tuple[object, ...], int]:
    """The kernel's arguments for rows of addresses and sizes, ``most`` at most, and how many blocks it takes."""
    rows = [row for row in rows if row[1]]  # a tensor without elements has no block and no row of the table
    table = np.zeros((), _table(len(rows[0][0]) if rows else 0, most))
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
def _table(arrays: int, most: int) -> DType:
    fields = [
        ("at", np.uint64, (most, arrays)),
        ("size", np.int64, most),
        ("first", np.int32, most),
        ("count", np.int32),
    ]
    return np.dtype(fields, align=True)
