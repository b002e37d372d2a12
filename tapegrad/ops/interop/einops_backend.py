"""einops on tensors: ``rearrange``, ``reduce``, ``repeat``, ``pack``, ``einsum``, with gradients.

einops finds the library of an array among the subclasses of its ``AbstractBackend``.  Ours is made when both packages
are there, whichever is imported first: nothing here imports einops.
"""

from __future__ import annotations

import importlib.util
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from tapegrad.device import dtypes
from tapegrad.device.types import Array
from tapegrad.ops.create.creation import arange, asarray
from tapegrad.ops.products.einsum import einsum
from tapegrad.ops.shape.join import concat, stack, tile
from tapegrad.ops.shape.shape import expand_dims
from tapegrad.tensor import Tensor, TensorLike
from tapegrad.variable import Variable

_MODULE = "einops._backends"
_made: list[type] = []
"""Keeps the backend alive: a class knows its subclasses by weak references."""


def offer_backend() -> None:
    """Make the backend now if einops has been imported, else when it is.  Called once, when the ops are imported."""
    if _MODULE in sys.modules:
        _make(sys.modules[_MODULE])
    else:
        sys.meta_path.insert(0, _Watch())


class _Watch:
    """Waits in ``sys.meta_path`` for einops to be imported; it finds no module, and removes itself afterwards."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        if name != _MODULE:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                load(module)
                if module.__name__ == _MODULE:
                    _make(module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _make(einops: Any) -> None:
    if not hasattr(einops, "AbstractBackend"):
        return  # an einops with another design must still import

    class TapegradBackend(einops.AbstractBackend):
        """How einops calls our functions."""

        framework_name = "tapegrad"

        def is_appropriate_type(self, tensor: object) -> bool:
            return isinstance(tensor, (Tensor, Variable))

        def from_numpy(self, x: TensorLike) -> Tensor:
            return asarray(x)

        def to_numpy(self, x: Tensor) -> Array:
            return x.numpy()

        def arange(self, start: int, stop: int) -> Tensor:
            return arange(start, stop)

        def stack_on_zeroth_dimension(self, tensors: list[Tensor]) -> Tensor:
            return stack(tensors)

        def tile(self, x: Tensor, repeats: tuple[int, ...]) -> Tensor:
            return tile(x, repeats)

        def concat(self, tensors: list[Tensor], axis: int) -> Tensor:
            return concat(tensors, axis=axis)

        def is_float_type(self, x: Tensor) -> bool:
            return dtypes.is_inexact(x.dtype)

        def add_axis(self, x: Tensor, new_position: int) -> Tensor:
            return expand_dims(x, new_position)

        def einsum(self, pattern: str, *x: Tensor) -> Tensor:
            return einsum(pattern, *x)

    _made.append(TapegradBackend)
