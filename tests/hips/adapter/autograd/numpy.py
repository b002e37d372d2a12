"""``autograd.numpy``: NumPy's own functions, which hand tensors over to tapegrad."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from functools import wraps
from typing import Any

import numpy as onp

import tapegrad as tg

from ._values import holds_tensor

_SEQUENCES = {
    "block", "broadcast_arrays", "column_stack", "concatenate", "dstack", "einsum", "hstack", "meshgrid", "row_stack",
    "stack", "vstack",
}  # fmt: skip
"""What takes a list of arrays; for all others a list of tensors is an array, which NumPy does not know."""


def array(x: Any, *args: Any, **kwargs: Any) -> Any:
    """Of anything; lists of tensors, too."""
    if not holds_tensor(x):
        return onp.array(x, *args, **kwargs)
    if not isinstance(x, (list, tuple)):
        return x
    parts = [array(item) for item in x]
    kind = onp.result_type(*(part.dtype for part in parts))
    return tg.stack([tg.asarray(part, dtype=kind) for part in parts])


def _of(function: Callable) -> Callable:
    whole = function.__name__ not in _SEQUENCES

    @wraps(function, updated=())
    def run(*args: Any, **kwargs: Any) -> Any:
        if whole:
            args = tuple(array(x) if isinstance(x, (list, tuple)) and holds_tensor(x) else x for x in args)
        return function(*args, **kwargs)

    return run


class _Rows:
    """``r_`` and ``c_`` of arrays, numbers and ranges."""

    def __init__(self, columns: bool) -> None:
        self._columns = columns

    def __getitem__(self, items: Any) -> Any:
        items = items if isinstance(items, tuple) else (items,)
        if not holds_tensor(items):
            return (onp.c_ if self._columns else onp.r_)[items]
        parts = [onp.r_[x] if isinstance(x, slice) else array(x) for x in items]
        if self._columns:
            return onp.concatenate([onp.atleast_2d(x).T if x.ndim < 2 else x for x in parts], axis=-1)
        return onp.concatenate([onp.atleast_1d(x) for x in parts])


class _Names(types.ModuleType):
    def __init__(self, name: str, of: Any, own: dict[str, Any]) -> None:
        super().__init__(name)
        self._of = of
        self.__dict__.update(own)
        self.__path__ = []

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._of, name)
        if isinstance(found, type) or not callable(found) or isinstance(found, types.ModuleType):
            return found
        return _of(found)


def _where(*args: Any, **kwargs: Any) -> Any:
    names = ("condition", "x", "y")
    return onp.where(*args, *(kwargs[n] for n in names[len(args) :] if n in kwargs))


_own = {"array": array, "asarray": array, "where": _where, "r_": _Rows(False), "c_": _Rows(True)}
_own_linalg = {"_dot": lambda a, b: onp.einsum("...ij,...jk->...ik", a, b), "T": lambda x: onp.swapaxes(x, -1, -2)}
_here = _Names(__name__, onp, _own)
for _part in ("linalg", "fft", "random"):
    _module = _Names(f"{__name__}.{_part}", getattr(onp, _part), _own_linalg if _part == "linalg" else {})
    setattr(_here, _part, _module)
    sys.modules[_module.__name__] = _module
sys.modules[__name__] = _here
