"""NumPy's protocols on tensors: ``np.sin(t)``, ``np.add.reduce(t)``, ``scipy.special.erf(t)`` call ours by name."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Mapping
from typing import Any

from tapegrad import nest
from tapegrad.core import aval
from tapegrad.device import CPU, is_array
from tapegrad.errors import ImmutableError, NotATensorError
from tapegrad.ops.create import creation
from tapegrad.ops.dispatch import tensor
from tapegrad.ops.interop import info
from tapegrad.ops.shape import shape
from tapegrad.tensor import Tensor, TensorLike, convert, is_handle

_REDUCED = {
    "add": "sum", "multiply": "prod", "maximum": "max", "minimum": "min", "logical_and": "all", "logical_or": "any",
    "fmax": "nanmax", "fmin": "nanmin", "logaddexp": "logsumexp",
}  # fmt: skip
_ACCUMULATED = {"add": "cumsum", "multiply": "cumprod", "maximum": "cummax", "minimum": "cummin"}
_HARMLESS: dict[str, tuple[Any, ...]] = {
    "out": (None,), "where": (True,), "casting": ("same_kind",), "order": ("K",), "subok": (True,),
}  # fmt: skip
"""Values of NumPy's keyword arguments that change nothing."""


def array_namespace(self: Any, /, *, api_version: str | None = None) -> Any:
    """The module with the array API's functions: tapegrad.  Raises ValueError for a version that it does not serve."""
    info.check_version(api_version)
    return sys.modules["tapegrad"]


def public(name: str, module: str = "numpy") -> Callable[..., Any] | None:
    """Our function of NumPy's name, looked up in the module of ours that corresponds to ``module``."""
    owner: object = sys.modules["tapegrad"]
    for part in module.split(".")[1:]:
        owner = getattr(owner, part, None)
    function = getattr(owner, name, None) if name in getattr(owner, "__all__", ()) else None
    return function if callable(function) else None


def array_ufunc(self: Any, ufunc: Any, method: str, *inputs: TensorLike, **kwargs: Any) -> Any:
    """NumPy's and SciPy's ufuncs on tensors, and their ``reduce``, ``accumulate`` and ``outer``.

    Raises TypeError if there is no function of ours, ImmutableError for a tensor as ``out``.
    """
    name = ufunc.__name__
    options = {k: v for k, v in kwargs.items() if not _is_harmless(k, v)}
    if "out" in options:
        raise ImmutableError(f"numpy.{name}: a tensor is not written into an array; use x = x + t, not x += t")
    dtype = options.pop("dtype", None)
    f = _method_of(name, method)
    if f is None or (options and method not in ("reduce", "accumulate")) or options.keys() - {"axis", "keepdims"}:
        how = name + ("" if method == "__call__" else f".{method}")
        given = f" with {', '.join(options)}" if options else ""
        raise TypeError(
            f"numpy.{how}{given} does not take tensors: use a function of tapegrad, or convert with t.numpy() (which "
            "has no gradient)"
        )
    if method in ("reduce", "accumulate"):
        options["axis"] = kwargs.get("axis", 0)
    if method in ("reduce", "accumulate") and dtype is not None and "dtype" in _parameters(f):
        options["dtype"], dtype = dtype, None
    if all(loop[-1] in "?O" for loop in ufunc.types):  # the dtype is that of the results, not of the operands
        dtype = None
    try:
        if dtype is not None:
            inputs = tuple(creation.astype(tensor(name, x), dtype) for x in inputs)
        return f(*inputs, **options)
    except NotATensorError:
        return NotImplemented


def _is_harmless(name: str, value: TensorLike) -> bool:
    if isinstance(value, tuple):
        return all(v is None for v in value)
    return any(value is h for h in _HARMLESS.get(name, (None,))) or (
        isinstance(value, str) and value in _HARMLESS.get(name, ())
    )


def _method_of(name: str, method: str) -> Callable[..., Any] | None:
    if method == "reduce":
        return public(_REDUCED.get(name, ""))
    if method == "accumulate":
        running = public(_ACCUMULATED.get(name, ""))
        if running is None or name not in ("maximum", "minimum"):
            return running
        return lambda x, axis: running(x, axis)[0]
    f = public(name) or public(name, "scipy.special")
    if method == "outer" and f is not None:
        return lambda x, y: _outer(f, tensor(name, x), tensor(name, y))
    return f if method == "__call__" else None


def _outer(f: Callable[[Tensor, Tensor], Tensor], x: Tensor, y: Tensor) -> Tensor:
    return f(shape.reshape(x, (*x.shape, *(1,) * y.ndim)), y)


_ANSWERS = {
    "allclose", "array2string", "array_equal", "array_equiv", "array_repr", "array_str", "iscomplexobj", "isrealobj",
    "may_share_memory", "ndim", "save", "savetxt", "savez", "savez_compressed", "shape", "shares_memory", "size",
}  # fmt: skip
"""NumPy's functions that test or print values and return no array: they read a tensor's value."""


_WRITES = {"copyto", "fill_diagonal", "place", "put", "put_along_axis", "putmask"}
"""NumPy's functions that return nothing, but change an array."""


def _value(x: Any) -> Any:
    return convert(x)._read() if is_handle(x) else x


def array_function(self: Any, func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """NumPy's functions on tensors: the function of the same name.

    Raises TypeError if there is none, ImmutableError for one that writes into its argument.
    """
    if func.__name__ in _ANSWERS:
        return func(*nest.map_leaves(_value, args), **nest.map_leaves(_value, kwargs))
    f = _broadcast_arrays if func.__name__ == "broadcast_arrays" else public(func.__name__, func.__module__ or "numpy")
    if func.__name__ in _WRITES:
        other = f"what tapegrad.{func.__name__}(...) returns" if f is not None else "x.at[i].set(v) or tapegrad.where"
        raise ImmutableError(
            f"numpy.{func.__name__} writes into its first argument, which no gradient follows: use {other}"
        )
    if f is None:
        raise TypeError(
            f"{func.__module__}.{func.__name__} does not take tensors: use a function of tapegrad, or convert with "
            "t.numpy() (which has no gradient)"
        )
    ours = _parameters(f)
    variadic = any(p.kind is p.VAR_POSITIONAL for p in ours.values())
    positional = [p for p in ours.values() if p.kind is not p.KEYWORD_ONLY]
    args, kwargs = _placed(func, positional, args, kwargs)
    if len(args) > len(positional) and not variadic:  # sum(t, 0): tapegrad takes axis by name only
        names, more = list(_defaults(func))[len(positional) :], args[len(positional) :]
        if len(more) > len(names):
            raise TypeError(f"{func.__name__}: tapegrad takes {len(positional)} positional arguments, got {len(args)}")
        kwargs = {**dict(zip(names, more, strict=False)), **kwargs}
        args = args[: len(positional)]
    return f(*args, **_asked(func, ours, kwargs))


def _broadcast_arrays(*xs: TensorLike, subok: bool = False) -> tuple[Any, ...]:
    """Tensors by our function; what no tensor can hold (Matplotlib gives None and strings) by NumPy's."""
    arrays: list[Any] = [_tensor_or_object("broadcast_arrays", x) for x in xs]
    to = aval.broadcast_shapes("broadcast_arrays", *(x.shape for x in arrays))
    return tuple(CPU.xp.broadcast_to(x, to) if is_array(x) else shape.broadcast_to(x, to) for x in arrays)


def _tensor_or_object(op: str, x: TensorLike) -> Any:
    try:
        return tensor(op, x)
    except NotATensorError:
        return CPU.xp.asarray(x)


def _placed(
    func: object, positional: list[Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments under NumPy's names, moved to the positions of those that have another name, or none, with us."""
    left = dict(kwargs)
    for name, p in list(zip(_defaults(func), positional, strict=False))[len(args) :]:
        if name not in left or (p.name == name and p.kind is not p.POSITIONAL_ONLY):
            break
        args = (*args, left.pop(name))
    return args, left


@functools.cache
def _parameters(f: Callable[..., object]) -> Mapping[str, inspect.Parameter]:
    """Of a function of ours; to ask takes longer than to call it, so each is asked once."""
    return inspect.signature(f).parameters


@functools.cache
def _defaults(func: Any) -> dict[str, Any]:
    """NumPy's parameters and their defaults; none for a function without a signature."""
    try:
        return {n: p.default for n, p in inspect.signature(func).parameters.items()}
    except (TypeError, ValueError):
        return {}


def _asked(func: Any, ours: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
    """The keyword arguments without those that we do not have and that only repeat NumPy's default."""
    if any(p.kind is p.VAR_KEYWORD for p in ours.values()):
        return kwargs
    defaults = _defaults(func)
    idle = {n for n, v in kwargs.items() if n not in ours and (v is None or v is defaults.get(n, ...))}
    strange = kwargs.keys() - ours.keys() - idle
    if strange:
        raise TypeError(f"{func.__name__}: tapegrad has no argument {', '.join(sorted(strange))}")
    return {n: v for n, v in kwargs.items() if n not in idle}
