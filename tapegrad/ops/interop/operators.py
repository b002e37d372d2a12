"""Binds operators, methods and NumPy's protocols to tensors and variables."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

from tapegrad.core.rule import with_parameters
from tapegrad.errors import ImmutableError, NotATensorError, UnsizedError
from tapegrad.ops.create import creation, mapping, transfer
from tapegrad.ops.dispatch import SCALARS
from tapegrad.ops.elementwise import arithmetic, comparison, complex, elementary, exponential, selection
from tapegrad.ops.index import assigning, choices, getitem, indexing, partial_sort, sort
from tapegrad.ops.interop import einops_backend, numpy_protocols, sharing
from tapegrad.ops.products import products
from tapegrad.ops.reduce import averages, cumulative, reductions
from tapegrad.ops.shape import diagonals, join, shape
from tapegrad.ops.shape.shape import reshape
from tapegrad.spellings import explained, has_other_names, refuse
from tapegrad.tensor import Tensor, TensorLike, bind_method


def _operator(f: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """``f`` as an operator: foreign objects get their turn."""
    if hasattr(f, "operator"):
        return f.operator

    def operator(self: Any, other: object) -> Any:
        if type(other) is Tensor or isinstance(other, SCALARS):
            return f(self, other)
        try:
            return f(self, other)
        except NotATensorError:
            return NotImplemented

    operator.__name__ = f.__name__
    return operator


def _round(self: Any, ndigits: int | None = None) -> Tensor:
    return arithmetic.round(self, ndigits or 0)


def _reflected(f: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    def operator(self: Any, other: object) -> Any:
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
    "clip": arithmetic.clip, "conj": complex.conj, "cumsum": cumulative.cumsum, "nonzero": selection.nonzero,
    "repeat": join.repeat, "round": arithmetic.round, "squeeze": shape.squeeze, "swapaxes": shape.swapaxes,
    "to_device": transfer.to_device, "argpartition": partial_sort.argpartition, "argsort": sort.argsort,
    "choose": choices.choose,
    "copy": mapping.copy, "cumprod": cumulative.cumprod, "diagonal": diagonals.diagonal, "dot": products.dot,
    "ptp": averages.ptp, "trace": diagonals.trace,
}  # fmt: skip
"""Methods that are the functions themselves (made ordinary functions, so that they bind)."""
_POSITIONAL: dict[str, tuple[Callable[..., Tensor], ...]] = {
    "axis dtype out keepdims": (reductions.sum, reductions.prod, reductions.mean),
    "axis dtype out ddof keepdims": (reductions.var, reductions.std),
    "axis out keepdims": (
        reductions.max, reductions.min, reductions.any, reductions.all, sort.argmax, sort.argmin,
    ),
    "indices axis out mode": (indexing.take,),
}  # fmt: skip
"""Methods some of whose arguments may be given by position, and the names of these."""


def bind_operators() -> None:
    """Called once, when the ops are imported."""
    for name, f in _BOTH.items():
        bind_method(f"__{name}__", _operator(f))
        bind_method(f"__r{name}__", _reflected(f))
    for name, f in _COMPARE.items():
        bind_method(f"__{name}__", _operator(f))
    bind_method("__pow__", _operator(exponential.pow_operator))
    bind_method("__rpow__", _reflected(exponential.power))
    for name, f in _PLAIN.items():
        bind_method(name, explained(f, name) if has_other_names(f) else f)
    for names, functions in _POSITIONAL.items():
        for f in functions:
            bind_method(f.__name__, _method(f, *names.split()))
    for name in ("flatten", "ravel"):
        bind_method(name, _flatten)
    bind_method("reshape", _reshape)
    bind_method("__divmod__", _operator(elementary.divmod))
    bind_method("__rdivmod__", _reflected(elementary.divmod))
    bind_method("__round__", _round)
    bind_method("__iter__", _iterate)
    bind_method("transpose", _transpose)
    bind_method("T", property(shape.transpose, doc="The dimensions in reverse order."))
    bind_method("mT", property(shape.matrix_transpose, doc="The last two dimensions exchanged."))
    bind_method("real", property(lambda self: complex.real(self), doc=complex.real.__doc__))
    bind_method("imag", property(lambda self: complex.imag(self), doc=complex.imag.__doc__))
    bind_method("at", property(lambda self: getitem.At(self), doc=getitem.At.__doc__))
    bind_method("__array_ufunc__", numpy_protocols.array_ufunc)
    bind_method("__array_function__", numpy_protocols.array_function)
    bind_method("__array_namespace__", numpy_protocols.array_namespace)
    sharing.bind_protocols()
    einops_backend.offer_backend()
    for method in (_compress, _searchsorted):
        bind_method(method.__name__[1:], method)
    assigning.bind_assignments()


def _iterate(self: Tensor) -> Iterator[Tensor]:
    if not self.ndim:
        raise UnsizedError("iteration over a tensor of no dimensions")
    return join.slices(self)


def _method(f: Callable[..., Tensor], *names: str) -> Callable[..., Tensor]:
    """``f`` as a method whose arguments ``names`` may be given by position, as in NumPy."""
    known = inspect.signature(f).parameters

    def method(self: Tensor, *args: object, **kwargs: object) -> Tensor:
        if len(args) > len(names):
            raise TypeError(f"{f.__name__}: takes at most {len(names)} positional arguments, got {len(args)}")
        given = dict(zip(names, args, strict=False))
        if twice := given.keys() & kwargs.keys():
            raise TypeError(f"{f.__name__}: {', '.join(twice)} given twice")
        given.update(kwargs)
        for name in ("out", "dtype"):  # NumPy and CuPy pass these, most often without a value
            if name not in known and name in given and given.pop(name) is not None:
                raise ImmutableError(f"{f.__name__}: has no argument {name}; its result is a new tensor")
        try:
            return f(self, **given)
        except TypeError:
            refuse(f.__name__, f, kwargs)
            raise

    method.__name__, method.__doc__ = f.__name__, f.__doc__
    kinds, optional = inspect.Parameter, [p for n, p in list(known.items())[1:] if n not in names]
    return with_parameters(
        method,
        [kinds("self", kinds.POSITIONAL_OR_KEYWORD)]
        + [
            known[n].replace(kind=kinds.POSITIONAL_OR_KEYWORD)
            if n in known
            else kinds(n, kinds.POSITIONAL_OR_KEYWORD, default=None)
            for n in names
        ]
        + [p.replace(kind=kinds.KEYWORD_ONLY) for p in optional],
    )


def _reshape(self: Tensor, *shape: Any, order: str = "C", copy: bool | None = None) -> Tensor:
    """The elements in another shape, given as one tuple or as several lengths; order, copy: see :func:`reshape`."""
    return reshape(self, shape[0] if len(shape) == 1 else shape, order, copy=copy)


def _transpose(self: Tensor, *axes: Any) -> Tensor:
    """The dimensions in reverse order, or in that of ``axes``: one tuple or several numbers."""
    if len(axes) == 1 and (axes[0] is None or isinstance(axes[0], (tuple, list))):
        return shape.transpose(self, axes[0])
    return shape.transpose(self, axes or None)


def _flatten(self: Tensor, order: str = "C") -> Tensor:
    """The elements in one dimension; order: see :func:`reshape`."""
    return reshape(self, (self.size,), order)


def _compress(self: Tensor, condition: TensorLike, axis: int | None = None) -> Tensor:
    """The slices along ``axis`` where ``condition`` holds: see ``tg.compress``."""
    return choices.compress(condition, self, axis)


def _searchsorted(self: Tensor, v: TensorLike, side: str = "left", sorter: TensorLike | None = None) -> Tensor:
    """Where to insert ``v`` so that the vector stays sorted: see ``tg.searchsorted``."""
    return sort.searchsorted(self, v, side=side, sorter=sorter)
