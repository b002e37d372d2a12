"""The function behind one's own primitive: arrays in, arrays out."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable
from typing import Any

from tapegrad.device import dtypes
from tapegrad.errors import NotATensorError
from tapegrad.ops.dispatch import SCALARS
from tapegrad.tensor import Tensor
from tapegrad.variable import Variable


class _Ready(threading.local):
    """Values made to learn their layout, on their way to being used: each thread's own."""

    def __init__(self) -> None:
        self.values: list[Any] = []

    def __reduce__(self) -> tuple:
        return _Ready, ()


class Body:
    """The function of arrays: what an implementation needs, and nothing that refers to the implementation."""

    def __init__(self, f: Callable, name: str, signature: inspect.Signature, names: tuple[str, ...]) -> None:
        self.f, self.name, self.signature, self.names = f, name, signature, names
        self._ready = _Ready()

    @property
    def ready(self) -> list[Any]:
        """A value that has been made already."""
        return self._ready.values

    def run(self, device: Any, arrays: list[Any], operands: tuple[str, ...], static: dict[str, Any]) -> Any:
        """The function's result as an array, or a list of several, in the memory of ``device``."""
        given = dict(zip(operands, (_guarded(a) for a in arrays), strict=True))
        bound = self.signature.bind_partial()
        bound.arguments.update({n: given[n] if n in given else static[n] for n in self.names})
        with device.active():
            found = self.f(*bound.args, **bound.kwargs)
            if isinstance(found, (tuple, list)):
                return [self.result(x, arrays, device) for x in found]
            return self.result(found, arrays, device)

    def result(self, x: Any, arrays: list[Any], device: Any) -> Any:
        if isinstance(x, (Tensor, Variable)) or x is None:
            raise NotATensorError(
                f"{self.name}: returned {type(x).__name__}; a primitive computes with raw arrays and returns them"
            )
        dtype = None
        if isinstance(x, SCALARS) and not hasattr(x, "dtype") and arrays:
            dtype = dtypes.result_type(*(a.dtype for a in arrays), x)
        found = device.array(x, dtype, copy=False)
        if any(device.is_view(found, a) for a in arrays):
            found = found.copy()
        return found


def _guarded(array: Any) -> Any:
    """A view that cannot be written to, where the library knows such a thing."""
    if hasattr(array, "setflags"):
        array = array.view()
        array.setflags(write=False)
    return array
