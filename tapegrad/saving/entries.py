"""Values of the program by name: arrays, and texts (numbers, strings, states of random streams); and what does not fit.

A name is a path: of attributes in a layer, between dots; in a tree, between slashes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from tapegrad import ops
from tapegrad.device import CPU
from tapegrad.device.types import Array, DType
from tapegrad.errors import SaveError
from tapegrad.random import Generator
from tapegrad.tensor import Tensor
from tapegrad.variable import Variable


@dataclass(frozen=True)
class ArrayEntry:
    """An array of the program, or this rank's slice of it."""

    shape: tuple[int, ...]
    dtype: DType
    slice: tuple[int, int]
    """The elements that this rank has, of all in C order."""
    get: Callable[[], Any]
    """They, in any shape and memory."""
    put: Callable[[Array], object]
    """Set them from a NumPy array of one dimension."""

    @property
    def nbytes(self) -> int:
        """Bytes of the slice."""
        return (self.slice[1] - self.slice[0]) * self.dtype.itemsize

    def read(self) -> Array:
        """The slice as a contiguous NumPy array of one dimension.  Raises SaveError."""
        x = self.get()
        x = CPU.array(x.numpy() if isinstance(x, Tensor | Variable) else x, copy=False)
        start, stop = self.slice
        if x.dtype.name != self.dtype.name or x.size != stop - start:
            raise SaveError(f"a slice of {stop - start} elements of {self.dtype} has {x.size} of {x.dtype}")
        return CPU.xp.ascontiguousarray(x).reshape(-1)


def whole(x: Any, put: Callable[[Array], object]) -> ArrayEntry:
    """The entry of an array, tensor or variable that each rank has all of."""
    dtype = x.dtype if x.dtype.isnative else x.dtype.newbyteorder("=")
    return ArrayEntry(tuple(x.shape), dtype, (0, math.prod(x.shape)), lambda: x, put)


def of_variable(v: Variable) -> ArrayEntry:
    """The entry of a variable that each rank has all of."""
    return whole(v, lambda x: v.assign(ops.asarray(x.reshape(v.shape), device=v.device)))


@dataclass(frozen=True)
class TextEntry:
    """A number, a string or the state of a random stream."""

    value: object
    """As JSON has it; see :func:`as_json`."""
    put: Callable[[Any], object]
    stream: bool | None = False
    """Whether a random stream is required; None: anything goes."""
    fixed: bool = False
    """Whether the saved value must be the same."""


Entry = ArrayEntry | TextEntry


def require_fit(where: str, what: str, problems: Iterable[str]) -> None:
    """Raise SaveError if there are ``problems`` in setting ``what`` from ``where``; it lists ten of them."""
    listed = list(problems)
    if listed:
        more = f"\n  and {len(listed) - 10} more" if len(listed) > 10 else ""
        lines = "".join(f"\n  {problem}" for problem in listed[:10])
        raise SaveError(f"{where} does not fit {what}; nothing was changed:{lines}{more}")


def problems(
    required: Mapping[str, Any],
    saved: Mapping[str, Any],
    source: str,
    needed: Callable[[str], bool] = lambda name: True,
) -> Iterator[str]:
    """Where ``saved`` values do not fit the ``required`` ones of their names, one line each.

    What has a shape is an array, what has none is a text.  needed: the names that must be on both sides.
    """
    for name, x in required.items():
        if name not in saved:
            if needed(name):
                yield f"{name}: missing in {source}"
            continue
        y = saved[name]
        kinds = ["an array" if hasattr(value, "shape") else "a value without shape" for value in (x, y)]
        if kinds[0] != kinds[1]:
            yield f"{name}: wanted {kinds[0]}, {source} has {kinds[1]}"
        elif hasattr(x, "shape"):
            if x.shape != y.shape:
                yield f"{name}: wanted shape {x.shape}, {source} has {y.shape}"
            elif str(x.dtype) != str(y.dtype):
                yield f"{name}: wanted dtype {x.dtype}, {source} has {y.dtype}"
    for name in saved:
        if name not in required and needed(name):
            yield f"{name}: in {source} only"


def as_json(value: Any) -> object:
    """A number, a string, None or a random stream, as JSON can hold it to the last bit; :func:`of_json` reads it."""
    if isinstance(value, Generator):
        key, position = value.state
        return {"stream": [f"{key:032x}", position]}
    if type(value) is complex:
        return {"complex": [repr(value.real), repr(value.imag)]}
    if type(value) is float and not math.isfinite(value):
        return {"float": repr(value)}
    return value


def of_json(value: Any) -> Any:
    """The inverse of :func:`as_json`.  Raises SaveError for anything else."""
    try:
        match value:
            case None | bool() | int() | float() | str():
                return value
            case {"stream": [str(key), int(position)]}:
                stream = Generator(0)
                stream.state = int(key, 16), position
                return stream
            case {"complex": [str(real), str(imag)]}:
                return complex(float(real), float(imag))
            case {"float": str(text)}:
                return float(text)
    except ValueError:
        pass
    raise SaveError(f"load: {value!r} is no value that save writes")
