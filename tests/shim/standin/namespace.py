"""The functions of ``cupy``: NumPy's, on the device's arrays, with the signatures of CuPy 14.2.

A line of ``signatures.txt`` is a function with its parameters, or the bare name of a ufunc; a name that is not there
does not exist, and a test holds the table against the real CuPy.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import types
import warnings
from pathlib import Path
from typing import Any

import numpy as np

from . import capturing, state
from .array import adopt, fresh, ndarray, span, unwrap
from .operators import SCALARS

module = types.ModuleType("cupy")
#: What CuPy takes over from NumPy as it is.
SAME = (
    "bool bool_ byte cdouble complex128 complex64 complexfloating csingle double dtype e euler_gamma finfo float16 "
    "float32 float64 floating generic half iinfo index_exp inexact inf int16 int32 int64 int8 int_ intc integer intp "
    "isdtype issubdtype iterable long longlong mintypecode nan ndindex newaxis number pi promote_types s_ short "
    "signedinteger single typename ubyte uint uint16 uint32 uint64 uint8 uintc uintp ulong ulonglong unsignedinteger "
    "ushort broadcast_shapes"
).split()
PRODUCTS = {"matmul", "dot", "vdot", "inner", "outer", "tensordot", "einsum"}
#: How CuPy goes about what NumPy leaves open or does otherwise: sorting is stable, out of bounds wraps around.
WAYS = {"take": {"mode": "wrap"}, "sort": {"kind": "stable"}, "argsort": {"kind": "stable"}}
#: No loop of these takes complex numbers.
LOGICAL = {"logical_and", "logical_or", "logical_not", "logical_xor"}
#: NumPy answers these with a Python number, CuPy with a 0-d array.
ZERO_D = {"allclose", "array_equal", "array_equiv", "count_nonzero"}
#: These answer with facts about arrays, not with arrays.
FACTS = {"ndim", "shape", "size", "result_type", "can_cast", "common_type", "isscalar", "iscomplexobj", "isrealobj",
         "may_share_memory", "shares_memory", "isfortran", "min_scalar_type"}  # fmt: skip
VIEWS = {"transpose": 0, "broadcast_to": 0, "reshape": 0, "einsum": 1}
"""What looks at an array of any device, whichever is current, and which argument that is."""
TABLE = Path(__file__).with_name("signatures.txt")
#: CuPy reads something back to find the result's size, or checks values on the host.
READING = set(
    "argwhere bincount compress delete digitize extract flatnonzero histogram histogram2d histogramdd mask_indices "
    "nonzero piecewise place polyfit ravel_multi_index roots tril_indices tril_indices_from trim_zeros triu_indices "
    "triu_indices_from".split()
)
#: These sort by Thrust, which waits for its stream.
SORTING = set(
    "argpartition argsort intersect1d isin lexsort median nanmedian partition percentile quantile setdiff1d setxor1d "
    "sort sort_complex union1d unique unique_all unique_counts unique_inverse unique_values".split()
)
ARRAY_FIRST = {"a", "x", "m", "arr", "ary", "array"}


def ranges(arrays: Any) -> tuple:
    """What the arrays cover, for the log."""
    return tuple(map(span, arrays))


class ufunc:
    """An elementwise function."""

    def __init__(self, name: str):
        self.__name__, self.name, self.module = name, f"cupy_{name}", module
        self._np = getattr(np, name)
        isu = isinstance(self._np, np.ufunc)
        self.nin, self.nout = (self._np.nin, self._np.nout) if isu else (1, 1)
        self.nargs = self.nin + self.nout

    def __repr__(self) -> str:
        return f"<ufunc '{self.name}'>"

    @capturing.recorded
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        for one in args:
            if hasattr(one, "__cupy_override_elementwise_kernel__"):
                return one.__cupy_override_elementwise_kernel__(self, *args, **kwargs)
        if unknown := kwargs.keys() - {"out", "dtype", "casting"}:
            raise TypeError(f"Wrong arguments {dict.fromkeys(unknown)}")
        if not self.nin <= len(args) <= self.nargs:
            raise TypeError(f"Wrong number of arguments for {self.name}")
        out = kwargs.get("out")
        found: list[ndarray] = []
        for one in (*args, *(out if isinstance(out, tuple) else (out,))):
            if not isinstance(one, ndarray | SCALARS | None) and not hasattr(one, "__cupy_get_ndarray__"):
                raise TypeError(f"Unsupported type {type(one)}")
        hosts = [unwrap(one, found) for one in args]
        options = {key: unwrap(value, found) for key, value in kwargs.items() if value is not None}
        if self.__name__ in LOGICAL and any(one.dtype.kind == "c" for one in found):
            raise TypeError(f"Wrong type of arguments for {self.name}: complex")
        state.require_compiler()
        if isinstance(out, ndarray) and capturing.written(self, *args, **kwargs):
            return out
        with quiet():
            result = self._np(*hosts, **options)
        return finish(result, found, self.name, out)

    def reduce(self, array: Any, axis: Any = 0, dtype: Any = None, out: Any = None, keepdims: bool = False) -> Any:
        if self.__name__ not in ("add", "multiply"):
            raise NotImplementedError(f"`{self.name}.reduce` is not supported yet")
        return getattr(array, "sum" if self.__name__ == "add" else "prod")(axis, dtype, out, keepdims)

    def accumulate(self, array: Any, axis: int = 0, dtype: Any = None, out: Any = None) -> Any:
        if self.__name__ not in ("add", "multiply"):
            raise NotImplementedError(f"`{self.name}.accumulate` is not supported yet")
        return getattr(array, "cumsum" if self.__name__ == "add" else "cumprod")(axis, dtype, out)

    @capturing.recorded
    def reduceat(self, array: Any, indices: Any, axis: int = 0, dtype: Any = None, out: Any = None) -> Any:
        if self.__name__ != "add":
            raise NotImplementedError(f"`{self.name}.reduceat` is not supported yet")
        return fresh(np.add.reduceat(array._host, [int(i) for i in indices], axis, dtype), (array,), self.name)

    def outer(self, A: Any, B: Any, **kwargs: Any) -> Any:
        return self(A.reshape(A.shape + (1,) * B.ndim), B, **kwargs)

    def at(self, a: Any, indices: Any, b: Any = None) -> None:
        if self.__name__ not in ("add", "subtract", "maximum", "minimum", "bitwise_and", "bitwise_or", "bitwise_xor"):
            raise NotImplementedError(f"`{self.name}.at` is not supported yet")
        a._scatter(self.__name__, indices, b)


@contextlib.contextmanager
def quiet() -> Any:
    """No warnings of arithmetic: a device has none."""
    with np.errstate(all="ignore"), warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=RuntimeWarning)
        yield


def finish(result: Any, found: list, name: str, out: Any = None) -> Any:
    """The result as the caller sees it; written into ``out`` where one was given."""
    if isinstance(out, ndarray):
        state.log("op", name=name, reads=ranges(found), writes=ranges([out]))
        return out
    return adopt(result, tuple(found), name)


def _function(name: str, signature: str) -> Any:
    scope: dict[str, Any] = {}
    exec(f"def {name}{signature}: pass", scope)  # our own table of signatures
    accepts, target = inspect.signature(scope[name]), getattr(np, name)
    first = next(iter(accepts.parameters), "")

    @capturing.recorded
    @functools.wraps(scope[name])
    def call(*args: Any, **kwargs: Any) -> Any:
        accepts.bind(*args, **kwargs)
        if name in FACTS:
            return target(*(one._host if isinstance(one, ndarray) else one for one in args), **kwargs)
        if first in ARRAY_FIRST and args and isinstance(args[0], (list, tuple, SCALARS)):
            raise TypeError(f"{name} of a {type(args[0]).__name__}: CuPy takes its own arrays only")
        product = name == "einsum" and len(args) > 2
        looks = name in VIEWS and len(args) > VIEWS[name] and not product
        if looks and isinstance(array := args[VIEWS[name]], ndarray):
            view = target(*(one._host if isinstance(one, ndarray) else one for one in args), **kwargs)
            if np.may_share_memory(view, array._host):
                return adopt(view, (array,), name)
        if name in SORTING:
            capturing.refuse(None, f"{name} waits for its stream")
        if name in READING or (name == "where" and len(args) == 1):
            capturing.refuse(None, f"{name} reads from the device, which", RuntimeError)
        out = args[0] if name == "copyto" else kwargs.get("out")
        if isinstance(out, ndarray) and name not in PRODUCTS and capturing.written(call, *args, **kwargs):
            return None if name == "copyto" else out
        if name in PRODUCTS:
            capturing.refuse(None, "calling cuBLAS API", NotImplementedError)
        found: list[ndarray] = []
        hosts = unwrap(args, found)
        options = {key: unwrap(value, found) for key, value in kwargs.items() if key not in ("out", "where") or
                   value is not None}  # fmt: skip
        if name == "matmul" and any(x.dtype.name == "bfloat16" and x.ndim > 2 for x in found):
            raise TypeError("matmul of bfloat16 arrays of more than two axes fails in CuPy")
        if options.get("kind") not in (None, "stable") and name in ("sort", "argsort"):
            raise ValueError("kind can only be None or 'stable'")
        if name == "take_along_axis":
            axis = accepts.bind(*args, **kwargs).arguments["axis"]
            hosts = (hosts[0], hosts[1] % hosts[0].shape[axis], *hosts[2:])
        narrow = {x.dtype for x in found} if name in PRODUCTS and "out" not in kwargs else set()
        narrow = narrow if len(narrow) == 1 and next(iter(narrow)).name in ("float16", "bfloat16") else set()
        if narrow:  # summed in float32, as by cuBLAS
            hosts = tuple(one.astype(np.float32) if isinstance(one, np.ndarray) else one for one in hosts)
        with quiet():
            result = target(*hosts, **(options | WAYS.get(name, {})))
            result = result.astype(narrow.pop()) if narrow else result
        if name in ZERO_D:
            result = np.asarray(result)
        if result is None:  # such as copyto: they write into the first array
            state.log("op", name=name, reads=ranges(found[1:]), writes=ranges(found[:1]))
            return None
        return finish(result, found, name, kwargs.get("out"))

    call.module = module  # type: ignore[attr-defined]
    return call


def _method(name: str) -> Any:
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        return getattr(module, name)(self, *args, **kwargs)

    return call


def _in_place(name: str) -> Any:
    def call(self: Any, *args: Any, **kwargs: Any) -> None:
        capturing.refuse(None, f"{name} waits for its stream")
        getattr(self._host, name)(*args, **kwargs)
        state.log("op", name=name, reads=ranges([self]), writes=ranges([self]))

    return call


METHODS = (
    "all any argmax argmin argpartition argsort choose clip compress conj conjugate cumprod cumsum diagonal dot max "
    "mean min nonzero prod ptp put repeat searchsorted squeeze std sum swapaxes take trace var"
).split()


def build() -> None:
    """Fill the module from NumPy, the table of signatures and our own functions, and give arrays their methods."""
    for name in SAME:
        setattr(module, name, getattr(np, name))
    for line in TABLE.read_text().splitlines():
        name, bracket, rest = line.partition("(")
        if not hasattr(np, name):  # NumPy's versions differ: 2.0 lacks some, later ones have dropped others
            continue
        setattr(module, name, _function(name, bracket + rest) if bracket else ufunc(name))
    ndarray.__module__ = "cupy"
    module.ndarray, module.ufunc = ndarray, ufunc  # type: ignore[attr-defined]
    for name in METHODS:
        setattr(ndarray, name, _method(name))
    ndarray.round = _method("around")  # type: ignore[attr-defined]
    for name in ("sort", "partition"):
        setattr(ndarray, name, _in_place(name))
