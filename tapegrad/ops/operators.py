"""Binds operators, methods and NumPy's protocols to tensors and variables."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from typing import Any

from tapegrad import nest
from tapegrad.errors import NotATensorError
from tapegrad.ops import (
    arithmetic,
    comparison,
    complex,
    creation,
    cumulative,
    getitem,
    indexing,
    joining,
    products,
    reductions,
    shape,
    sorting,
    transfer,
)
from tapegrad.ops.dispatch import SCALARS
from tapegrad.tensor import Tensor, bind_method


def _operator(f: Callable[[Any, Any], Tensor]) -> Callable[[Any, Any], Any]:
    """``f`` as an operator: foreign objects get their turn."""
    if hasattr(f, "operator"):
        return f.operator

    def operator(self: Any, other: Any) -> Any:
        if type(other) is Tensor or isinstance(other, SCALARS):
            return f(self, other)
        try:
            return f(self, other)
        except NotATensorError:
            return NotImplemented

    operator.__name__ = f.__name__
    return operator


def _reflected(f: Callable[[Any, Any], Tensor]) -> Callable[[Any, Any], Any]:
    def operator(self: Any, other: Any) -> Any:
        try:
            return f(other, self)
        except NotATensorError:
            return NotImplemented

    operator.__name__ = f.__name__
    return operator


_BOTH = {
    "add": arithmetic.add, "sub": arithmetic.subtract, "mul": arithmetic.multiply, "truediv": arithmetic.divide,
    "floordiv": arithmetic.floor_divide, "mod": arithmetic.remainder, "matmul": products.matmul,
    "and": comparison.bitwise_and, "or": comparison.bitwise_or, "xor": comparison.bitwise_xor,
    "lshift": comparison.bitwise_left_shift, "rshift": comparison.bitwise_right_shift,
}  # fmt: skip
_COMPARE = {
    "eq": comparison.equal, "ne": comparison.not_equal, "lt": comparison.less, "le": comparison.less_equal,
    "gt": comparison.greater, "ge": comparison.greater_equal,
}  # fmt: skip
_PLAIN: dict[str, Callable[..., Any]] = {
    "__neg__": arithmetic.negative, "__pos__": arithmetic.positive, "__abs__": arithmetic.abs,
    "__invert__": comparison.bitwise_invert, "__getitem__": getitem.getitem, "astype": creation.astype,
    "clip": arithmetic.clip, "conj": complex.conj, "cumsum": cumulative.cumsum, "nonzero": indexing.nonzero,
    "repeat": joining.repeat, "round": comparison.round, "squeeze": shape.squeeze, "swapaxes": shape.swapaxes,
    "to_device": transfer.to_device,
}  # fmt: skip
"""Methods that are the functions themselves (made ordinary functions, so that they bind)."""


def bind_operators() -> None:
    """Called once, when the ops are imported."""
    for name, f in _BOTH.items():
        bind_method(f"__{name}__", _operator(f))
        bind_method(f"__r{name}__", _reflected(f))
    for name, f in _COMPARE.items():
        bind_method(f"__{name}__", _operator(f))
    bind_method("__pow__", _operator(arithmetic.pow_operator))
    bind_method("__rpow__", _reflected(arithmetic.power))
    for name, f in _PLAIN.items():
        bind_method(name, f)
    for f in (reductions.sum, reductions.prod):
        bind_method(f.__name__, _method(f, "axis", "dtype", "keepdims"))
    for f in (
        reductions.mean, reductions.max, reductions.min, reductions.any, reductions.all,
        sorting.argmax, sorting.argmin, reductions.var, reductions.std,
    ):  # fmt: skip
        bind_method(f.__name__, _method(f, "axis", "keepdims"))
    bind_method("take", _method(indexing.take, "indices", "axis"))
    for f in (_reshape, _transpose, _flatten, _ravel):
        bind_method(f.__name__[1:], f)
    bind_method("T", property(lambda self: shape.transpose(self), doc="The dimensions in reverse order."))
    bind_method("mT", property(lambda self: shape.matrix_transpose(self), doc="The last two dimensions exchanged."))
    bind_method("real", property(lambda self: complex.real(self), doc=complex.real.__doc__))
    bind_method("imag", property(lambda self: complex.imag(self), doc=complex.imag.__doc__))
    bind_method("at", property(lambda self: getitem.At(self), doc=getitem.At.__doc__))
    bind_method("__array_ufunc__", _array_ufunc)
    bind_method("__array_function__", _array_function)
    bind_method("__array_namespace__", _array_namespace)


def _method(f: Callable[..., Tensor], *names: str) -> Callable[..., Tensor]:
    """``f`` as a method whose arguments ``names`` may be given by position, as in NumPy."""
    positional = [n for n, p in inspect.signature(f).parameters.items() if p.kind is inspect.Parameter.POSITIONAL_ONLY]

    def method(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if len(args) > len(names):
            raise TypeError(f"{f.__name__}: takes at most {len(names)} positional arguments, got {len(args)}")
        given = dict(zip(names, args, strict=False))
        if twice := given.keys() & kwargs.keys():
            raise TypeError(f"{f.__name__}: {', '.join(twice)} given twice")
        given.update(kwargs)
        return f(self, *[given.pop(n) for n in positional[1:] if n in given], **given)

    method.__name__, method.__doc__ = f.__name__, f.__doc__
    return method


def _reshape(self: Tensor, *lengths: Any) -> Tensor:
    """The elements in another shape, given as one tuple or as several lengths."""
    return shape.reshape(self, lengths[0] if len(lengths) == 1 else lengths)


def _transpose(self: Tensor, *axes: Any) -> Tensor:
    """The dimensions in reverse order, or in that of ``axes``: one tuple or several numbers."""
    if len(axes) == 1 and (axes[0] is None or isinstance(axes[0], (tuple, list))):
        return shape.transpose(self, axes[0])
    return shape.transpose(self, axes or None)


def _flatten(self: Tensor) -> Tensor:
    """The elements in one dimension, in C order."""
    return shape.reshape(self, (self.size,))


def _ravel(self: Tensor) -> Tensor:
    """The elements in one dimension, in C order."""
    return shape.reshape(self, (self.size,))


def _public(self: Any, name: str, module: str = "numpy") -> Callable[..., Any] | None:
    """Our function of NumPy's name, looked up in the module of ours that corresponds to ``module``."""
    place: Any = _array_namespace(self)
    for part in module.split(".")[1:]:
        place = getattr(place, part, None)
    found = getattr(place, name, None) if name in getattr(place, "__all__", ()) else None
    return found if callable(found) else None


def _array_ufunc(self: Any, ufunc: Any, method: str, *inputs: Any, **kwargs: Any) -> Any:
    """NumPy's ufuncs on tensors: the function of the same name.  Raises TypeError if there is none."""
    f = _public(self, ufunc.__name__)
    if method != "__call__" or f is None or kwargs:
        how = f"{ufunc.__name__}" + ("" if method == "__call__" else f".{method}")
        raise TypeError(
            f"numpy.{how}{' with ' + ', '.join(kwargs) if kwargs else ''} does not take tensors: use a function of "
            "tapegrad, or convert with t.numpy() (which has no gradient)"
        )
    try:
        return f(*inputs)
    except NotATensorError:
        return NotImplemented


_ANSWERS = {
    "allclose", "array2string", "array_equal", "array_equiv", "array_repr", "array_str", "iscomplexobj", "isrealobj",
    "may_share_memory", "ndim", "save", "savetxt", "savez", "savez_compressed", "shape", "shares_memory", "size",
}  # fmt: skip
"""NumPy's functions that answer about values, or write them, and return no array: they read a tensor's value."""


def _value(x: Any) -> Any:
    return x.__array__() if hasattr(x, "ref") else x


def _array_function(self: Any, func: Any, types: Any, args: tuple, kwargs: dict) -> Any:
    """NumPy's functions on tensors: the function of the same name.  Raises TypeError if there is none."""
    if func.__name__ in _ANSWERS:
        return func(*nest.map_leaves(_value, args), **nest.map_leaves(_value, kwargs))
    f = _public(self, func.__name__, func.__module__ or "numpy")
    if f is None:
        raise TypeError(
            f"{func.__module__}.{func.__name__} does not take tensors: use a function of tapegrad, or convert with "
            "t.numpy() (which has no gradient)"
        )
    positional = [p for p in inspect.signature(f).parameters.values() if p.kind is not inspect.Parameter.KEYWORD_ONLY]
    if len(args) > len(positional):  # sum(t, 0): tapegrad takes axis by name only
        names = list(inspect.signature(func).parameters)
        kwargs = {**dict(zip(names[len(positional) :], args[len(positional) :], strict=False)), **kwargs}
        args = args[: len(positional)]
    return f(*args, **kwargs)


def _array_namespace(self: Any, /, *, api_version: str | None = None) -> Any:
    """The module with the array API's functions: tapegrad."""
    return sys.modules["tapegrad"]
