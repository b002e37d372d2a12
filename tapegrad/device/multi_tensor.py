"""Kernels over many tensors at once: their addresses travel by value in a table, so nothing is uploaded.

The table is ``tg_table`` of ``kernels/optim.cu``; its lengths go to the compiler with every kernel.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np

from tapegrad.device import cuda_types
from tapegrad.device.kernel import Kernel
from tapegrad.device.types import DType

MANY, MANY_OF_HALVES = 48, 40
"""Tensors in one launch: as many as fit, with nine arrays each (two more of half variables), into the 4096 bytes that
a kernel may be given."""

CHUNK = 8192
"""Elements of one block: 32 or so for each thread, and still enough blocks where tensors are small."""

_THREADS = 256


def launch(kernel: Kernel, device: object, arrays: Sequence[Any], count: int, numbers: Sequence[object]) -> None:
    """Run ``kernel`` once, on ``count`` tensors, up to ``MANY``, or ``MANY_OF_HALVES``.

    ``arrays``: C-contiguous; the first of each tensor, then the second of each, ...  Those of a tensor have one size,
    and all have one dtype; but the gradients, the second, may be of another, and so may what comes last, the new values
    of half variables with masters.
    ``numbers``: what follows the table, first a float; an int or bool is a flag, a float is rounded as an array of that
    dtype would hold it.  Or, in place of every float, an array of one element (``TG_LIVE``).
    """
    dtype, types = arrays[0].dtype, macros(*(arrays[i].dtype for i in (0, count, -1)))
    table, blocks = filled(cuda_types.addresses(arrays), [x.size for x in arrays[:count]], types["TG_MANY"])
    live = {} if isinstance(numbers[0], float) else {"TG_LIVE": 1}
    if blocks:
        kernel(device, blocks, _THREADS, (table, *scalars(numbers, dtype)), **types, **live)


def macros(dtype: DType, gradient: DType, value: DType) -> dict[str, Any]:
    """What the kernels are compiled with."""
    given = {name: other for name, other in (("GRADIENT", gradient), ("VALUE", value)) if other != dtype}
    return {"T": dtype, **given, "TG_MANY": MANY_OF_HALVES if "VALUE" in given else MANY, "TG_CHUNK": CHUNK}


def filled(addresses: Sequence[int], sizes: Sequence[int], most: int) -> tuple[Any, int]:
    """The table of tensors of these ``sizes``, ``most`` at most, and how many blocks it takes.

    ``addresses``: as many for each array of a tensor.
    """
    at, lengths = np.array(addresses, np.uint64).reshape(-1, len(sizes)), np.array(sizes, np.int64)
    if not lengths.all():  # a tensor without elements has no block and no row of the table
        at, lengths = at[:, lengths > 0], lengths[lengths > 0]
    count, ends = len(lengths), np.cumsum(-(-lengths // CHUNK))
    table = np.zeros((), table_of(len(at), most))
    table["at"][:count], table["size"][:count], table["count"] = at.T, lengths, count
    table["first"][1:count] = ends[:-1]
    return table, int(ends[-1]) if count else 0


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
def table_of(arrays: int, most: int) -> DType:
    fields = [
        ("at", np.uint64, (most, arrays)),
        ("size", np.int64, most),
        ("first", np.int32, most),
        ("count", np.int32),
    ]
    return np.dtype(fields, align=True)
