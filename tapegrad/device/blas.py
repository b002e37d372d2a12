"""How many threads NumPy's BLAS library uses inside one product.

Where tapegrad spreads a batch of products over its own threads, each product must stay on one: OpenBLAS lets only one
product at a time use its threads, so the others would wait, spinning.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

_NAMES = ("scipy_openblas_{}64_", "scipy_openblas_{}", "openblas_{}64_", "openblas_{}")


def _find() -> tuple[Callable[[], int], Callable[[int], Any]] | None:
    """The functions that get and set the number, of the OpenBLAS that NumPy is linked with (None: another library)."""
    try:
        library = ctypes.CDLL(np._core._multiarray_umath.__file__)  # type: ignore[attr-defined]
    except (AttributeError, OSError):
        return None
    for name in _NAMES:
        try:
            return getattr(library, name.format("get_num_threads")), getattr(library, name.format("set_num_threads"))
        except AttributeError:
            continue
    return None


_controls = _find()
_lock = threading.Lock()
_users = 0
_before = 1


@contextmanager
def one_thread() -> Iterator[None]:
    """Each product made inside the block, in any thread, runs on one thread; afterwards all is as before."""
    global _users, _before
    if _controls is None:
        yield
        return
    get, set_to = _controls
    with _lock:
        _users += 1
        if _users == 1:
            _before = get()
            set_to(1)
    try:
        yield
    finally:
        with _lock:
            _users -= 1
            if _users == 0:
                set_to(_before)
