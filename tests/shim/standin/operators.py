"""What Python's operators, indices and NumPy's dispatch do to an array of the stand-in."""

from __future__ import annotations

import functools
import operator
from typing import Any

import numpy as np

from . import capturing, state

SCALARS = bool | int | float | complex | np.generic
BINARY = {
    "add": "add", "sub": "subtract", "mul": "multiply", "truediv": "true_divide", "floordiv": "floor_divide",
    "mod": "remainder", "pow": "power", "and": "bitwise_and", "or": "bitwise_or", "xor": "bitwise_xor",
    "lshift": "left_shift", "rshift": "right_shift", "divmod": "divmod", "matmul": "matmul",
}  # fmt: skip
COMPARISONS = {"lt": "less", "le": "less_equal", "gt": "greater", "ge": "greater_equal",
               "eq": "equal", "ne": "not_equal"}  # fmt: skip
UNARY = {"neg": "negative", "pos": "positive", "abs": "absolute", "invert": "invert"}


def function(name: str) -> Any:
    """The stand-in's function of this name."""
    from . import namespace

    return getattr(namespace.module, name)


def _defers(one: Any, other: Any) -> bool:
    """Whether the other operand's reflected method has the say."""
    try:
        return other.__array_ufunc__ is None
    except AttributeError:
        return getattr(one, "__array_priority__", 0) < getattr(other, "__array_priority__", 0)


def _binary(name: str, reflected: bool) -> Any:
    def method(self: Any, other: Any) -> Any:
        if isinstance(other, Operators | SCALARS):
            left, right = (other, self) if reflected else (self, other)
            return function(name)(left, right)
        if not reflected and _defers(self, other):
            return NotImplemented
        # NumPy's own function asks every operand that has a say, us first.
        left, right = (other, self) if reflected else (self, other)
        return getattr(np, name)(left, right)

    return method


def _in_place(name: str) -> Any:
    def method(self: Any, other: Any) -> Any:
        if not isinstance(other, Operators | SCALARS) and _defers(self, other):
            return NotImplemented
        return function(name)(self, other, out=self)

    return method


class Operators:
    """Operators, indexing and NumPy's protocols."""

    __slots__ = ()

    @capturing.recorded
    def __getitem__(self: Any, index: Any) -> Any:
        from .array import fresh

        index, advanced, used = self._index(index)
        if not advanced:
            return self._seen_as(self._host[index if Ellipsis in index else (*index, Ellipsis)])
        return fresh(self._host[index], (self, *used), "getitem")

    def __setitem__(self: Any, index: Any, value: Any) -> None:
        from .array import ndarray, span, unwrap

        given = index
        index, advanced, used = self._index(index)
        if not advanced and not isinstance(value, ndarray):
            self[index].fill(value)
            return
        if not isinstance(value, ndarray):
            # Only with an index array is a list, or a NumPy array, carried to the device.
            value = function("array")(value, dtype=self.dtype)
        if capturing.written(Operators.__setitem__, self, given, value):
            return
        with np.errstate(all="ignore"):
            host = unwrap(value, used)
            while host.ndim and host.shape[0] == 1:
                host = host[0]
            self._host[index] = host.astype(self.dtype)
        state.log("op", name="setitem", reads=tuple(map(span, used)), writes=(span(self),))

    def _index(self: Any, index: Any) -> tuple[tuple, bool, list]:
        """NumPy's index, whether arrays take part in it, and which; out of bounds wraps around, as on a device."""
        from .array import ndarray

        given, used = list(index) if isinstance(index, tuple) else [index], []
        for place, one in enumerate(given):
            if one is None or one is Ellipsis or isinstance(one, slice):
                continue
            if not isinstance(one, ndarray):
                if isinstance(one, SCALARS) and not isinstance(one, bool | np.bool_):
                    given[place] = operator.index(one)
                    continue
                empty = isinstance(one, list | tuple) and not np.size(one)
                one = function("array")(one, dtype=np.int32 if empty else None)
            if one.dtype.kind not in "biu":
                raise IndexError("arrays used as indices must be of integer or boolean type. "
                                 f"(actual: {one.dtype.type})")  # fmt: skip
            if one.dtype.kind == "b":
                capturing.refuse(None, "counting what a mask selects", RuntimeError)
            used.append(one)
            given[place] = one._host
        if used:
            taken = [one.ndim if _mask(one) else 1 for one in given if one is not None and one is not Ellipsis]
            axis, rest = 0, self.ndim - sum(taken)
            for place, one in enumerate(given):
                if one is None:
                    continue
                if isinstance(one, np.ndarray) and not _mask(one) and axis < self.ndim and self.shape[axis]:
                    given[place] = one.astype(np.int64) % self.shape[axis]
                axis += rest if one is Ellipsis else one.ndim if _mask(one) else 1
        return tuple(given), bool(used), used

    def _scatter(self: Any, name: str, index: Any, value: Any) -> None:
        from .array import ndarray, span, unwrap

        if isinstance(value, np.ndarray):
            raise TypeError(f"Unsupported type {type(value)}")
        given = index
        index, _, used = self._index(index)
        if name in ("add", "subtract") and self.dtype.name not in SUMMED:
            raise TypeError(f"scatter_add only supports {', '.join(sorted(SUMMED))}, as data type")
        if capturing.written(Operators._scatter, self, name, given, value):
            return
        host = unwrap(value, used) if isinstance(value, ndarray) else np.asarray(value, self.dtype)
        with np.errstate(all="ignore"):
            getattr(np, name).at(self._host, index, host.astype(self.dtype))
        state.log("op", name=f"{name}.at", reads=tuple(map(span, [self, *used])), writes=(span(self),))

    def scatter_add(self, slices: Any, value: Any) -> None:
        self._scatter("add", slices, value)

    def scatter_max(self, slices: Any, value: Any) -> None:
        self._scatter("maximum", slices, value)

    def scatter_min(self, slices: Any, value: Any) -> None:
        self._scatter("minimum", slices, value)

    def __array_ufunc__(self: Any, ufunc: Any, method: str, *inputs: Any, **kwargs: Any) -> Any:
        if "out" in kwargs:
            if len(kwargs["out"]) != 1:
                raise ValueError("The 'out' parameter must have exactly one array value")
            kwargs["out"] = kwargs["out"][0]
        try:
            found = function(ufunc.__name__)
        except AttributeError:
            return NotImplemented
        operands = (*inputs, *([kwargs["out"]] if "out" in kwargs else []))
        for one in operands:
            if not (hasattr(one, "__cuda_array_interface__") or isinstance(one, SCALARS | np.ndarray)):
                return NotImplemented
        if method != "__call__":
            return NotImplemented
        if ufunc.__name__ in COMPARISONS.values():
            inputs = tuple(x.item() if isinstance(x, np.ndarray) and not x.ndim else x for x in inputs)
        return found(*inputs, **kwargs)

    def __array_function__(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        if any(not issubclass(one, Operators | np.ndarray) for one in types):
            return NotImplemented
        try:
            found = functools.reduce(getattr, func.__module__.split(".")[1:], function("add").module)
            found = getattr(found, func.__name__)
        except AttributeError:
            return NotImplemented
        return NotImplemented if found is func else found(*args, **kwargs)


#: What atomic addition knows.
SUMMED = {"int32", "uint32", "uint64", "float16", "float32", "float64", "complex64", "complex128"}


def _mask(one: Any) -> bool:
    return isinstance(one, np.ndarray) and one.dtype.kind == "b"


for _short, _name in BINARY.items():
    setattr(Operators, f"__{_short}__", _binary(_name, False))
    setattr(Operators, f"__r{_short}__", _binary(_name, True))
    if _short not in ("divmod", "matmul"):
        setattr(Operators, f"__i{_short}__", _in_place(_name))
for _short, _name in COMPARISONS.items():
    setattr(Operators, f"__{_short}__", _binary(_name, False))
for _short, _name in UNARY.items():
    setattr(Operators, f"__{_short}__", lambda self, _name=_name: function(_name)(self))
Operators.__hash__ = None  # type: ignore[assignment]
