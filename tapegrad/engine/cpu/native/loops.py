"""NumPy's inner loops by pointer.

A ufunc resolved for given dtypes is a C function ``loop(context, data, dims, strides, auxdata)``, which NumPy hands out
to compilers in a capsule (numpy/numpy#22422).  A call of a ufunc on arrays that share one flat loop is one call of that
function; called by pointer with the same arguments it gives the same bits, NaN payloads included.  Loops are compared
with the ufunc itself before their first use, so that an unknown NumPy costs speed, never bits.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

from tapegrad.device import CPU
from tapegrad.device.types import Array, DType
from tapegrad.engine.cpu.native import machine

_XP = CPU.xp
_CAPSULE = b"numpy_1.24_ufunc_call_info"
_INTEGER = {
    "add", "subtract", "multiply", "negative", "positive", "square", "absolute", "sign", "maximum", "minimum", "equal",
    "not_equal", "less", "less_equal", "greater", "greater_equal", "logical_and", "logical_or", "logical_not",
    "bitwise_and", "bitwise_or", "bitwise_xor", "invert", "isnan", "isinf", "isfinite",
}  # fmt: skip
"""Loops on integers that cannot raise a Python error: others (a negative power) take the interpreter's lock inside."""
PROBED = 203
"""Elements of a probe: no multiple of a vector's length."""


class Loop(NamedTuple):
    """Addresses of an inner loop, its context and its auxiliary data; whether it reports errors by flags."""

    function: int
    context: int
    auxdata: int
    flags: bool


class _Info(ctypes.Structure):
    """The contents of NumPy's capsule."""

    _fields_ = (
        ("function", ctypes.c_void_p), ("context", ctypes.c_void_p), ("auxdata", ctypes.c_void_p),
        ("requires_pyapi", ctypes.c_bool), ("no_floatingpoint_errors", ctypes.c_bool),
    )  # fmt: skip


_Strided = ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_void_p] * 5)
_pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)
_owned: list[Any] = []
"""Own what loops point to."""


@cache
def loop_of(ufunc: Any, dtypes: tuple[DType, ...]) -> Loop | None:
    """Return the inner loop of ``ufunc`` on operands and a result of exactly ``dtypes``.

    None if the call must stay one of Python's.
    """
    if ufunc.nout != 1 or ufunc.signature is not None or len(dtypes) != ufunc.nin + 1:
        return None
    if any(d.kind not in "fc" for d in dtypes) and ufunc.__name__ not in _INTEGER and dtypes[-1].kind not in "fcb":
        return None
    loop = _resolved(ufunc, dtypes)
    return loop if loop is not None and _agrees(loop, ufunc, dtypes) else None


def _resolved(ufunc: Any, dtypes: tuple[DType, ...]) -> Loop | None:
    """The loop that NumPy would call, not compared with NumPy yet."""
    try:
        resolved, capsule = ufunc._resolve_dtypes_and_context((*dtypes[:-1], None))
        ufunc._get_strided_loop(capsule)
        info = ctypes.cast(_pointer(capsule, _CAPSULE), ctypes.POINTER(_Info)).contents
    except (AttributeError, TypeError, ValueError):
        return None
    if resolved != dtypes or info.requires_pyapi or not all(d.isnative for d in dtypes):
        return None
    _owned.append(capsule)
    return Loop(info.function, info.context or 0, info.auxdata or 0, not info.no_floatingpoint_errors)


@cache
def copy_of(dtypes: tuple[DType, DType]) -> Loop | None:
    """Return a loop that copies elements from the first dtype to the second; None unless these are the same."""
    source, target = dtypes
    function = 0 if source != target or source.hasobject else machine.copy(source.itemsize)
    return Loop(function, 0, 0, False) if function else None


@cache
def select_of(dtypes: tuple[DType, ...]) -> Loop | None:
    """Return a loop that selects by its first operand between two others; None unless these have the result's dtype."""
    condition, x, y, out = dtypes
    if condition.char != "?" or not x == y == out or out.hasobject or not machine.select(out.itemsize):
        return None
    return Loop(machine.select(out.itemsize), 0, 0, False)


@cache
def product_of(dtype: DType) -> Loop | None:
    """Return a loop that multiplies a pair of matrices as ``np.matmul`` does; None: it is unlike.

    Its core are rows, summands and columns, and the strides along both axes of the operands and the result.
    """
    loop = _resolved(_XP.matmul, (dtype, dtype, dtype)) if dtype.char in "fdFD" else None
    return loop if loop is not None and all(_multiplies(loop, dtype, n) for n in (1, 2, 3, 17, 64)) else None


def _multiplies(loop: Loop, dtype: DType, n: int) -> bool:
    """Whether the loop gives NumPy's product of matrices with ``n`` rows and columns and ``n + 1`` summands."""
    random = _XP.random.default_rng(n)
    x, y = random.normal(size=(n, n + 1)).astype(dtype), random.normal(size=(n, n + 1)).astype(dtype).T
    expected, result = _XP.matmul(x, y, out=_XP.empty((n, n), dtype)), _XP.empty((n, n), dtype)
    arrays = [x, y, result]
    call(loop, arrays, 1, [0, 0, 0], ((n, n + 1, n), [s for a in arrays for s in core_strides(a)]))
    return bool(result.tobytes() == expected.tobytes())


def core_strides(x: Array) -> list[int]:
    """Return the strides that NumPy gives a loop for the axes of a matrix: 0 along one of length 1."""
    return [0 if n == 1 else s for n, s in zip(x.shape, x.strides, strict=True)]


@cache
def cast_of(dtypes: tuple[DType, DType]) -> Loop | None:
    """Return a loop that converts elements from the first dtype to the second; None: there is none."""
    source, target = dtypes
    function = machine.cast(source.char, target.char) if source.isnative and target.isnative else 0
    return Loop(function, 0, 0, True) if function else None


OF_ELEMENTS = {"copyto": copy_of, "where": select_of, "cast": cast_of}
"""By name, what gives a loop that is no ufunc's, whose results do not depend on how arrays lie."""


@cache
def sum_of(dtype: DType) -> Loop | None:
    """Return a loop that sums an array without gaps, or its rows, as ``np.add.reduce`` does; None: it is unlike.

    See :func:`machine.reduction`: its core are the number of rows, and the bytes from one to the next.
    """
    loop = loop_of(_XP.add, (dtype, dtype, dtype)) if dtype.char in "fd" else None
    if loop is None:
        return None
    record = _XP.array([*loop[:3], dtype.itemsize], _XP.int64)
    _owned.append(record)
    total = Loop(machine.reduction(), record.ctypes.data, 0, True)
    return total if all(_sums(total, dtype, n) for n in (1, 2, 7, 8, 9, 127, 128, 129, 1000, 20_011)) else None


def _sums(loop: Loop, dtype: DType, n: int) -> bool:
    """Whether the loop gives NumPy's sums of ``n`` elements, and of three rows of so many."""
    x = _XP.random.default_rng(n).normal(size=(3, n)).astype(dtype)
    result, sums = _XP.zeros(1, dtype), _XP.zeros(n, dtype)
    call(loop, [x[0], result], n, [x.itemsize, 0])
    call(loop, [x, sums], n, [x.itemsize, x.itemsize], ((3,), (n * x.itemsize,)))
    total = result.tobytes() == _XP.add.reduce(x[0]).tobytes()
    return total and (n == 1 or sums.tobytes() == _XP.add.reduce(x, axis=0).tobytes())


Core = tuple[Sequence[int], Sequence[int]]
"""Sizes and strides that a loop reads behind its own."""


def call(loop: Loop, arrays: Sequence[Any], n: int, strides: Sequence[int], core: Core = ((), ())) -> None:
    """Call a loop once."""
    words = _XP.array([*(x.ctypes.data for x in arrays), n, *core[0], *strides, *core[1]], _XP.int64)
    data = words.ctypes.data
    sizes = data + 8 * len(arrays)
    function_at(loop.function)(loop.context, data, sizes, sizes + 8 + 8 * len(core[0]), loop.auxdata)


def function_at(address: int) -> Callable[..., int]:
    """Return an inner loop as a function of five addresses: its context, pointers, sizes, strides, auxiliary data."""
    return _Strided(address)


def _agrees(loop: Loop, ufunc: Any, dtypes: tuple[DType, ...]) -> bool:
    """Whether the loop gives the ufunc's bits, on arrays and with the last operand repeated."""
    reads = [samples(dtype, i) for i, dtype in enumerate(dtypes[:-1])]
    for last in (reads[-1], reads[-1][7]) if len(reads) > 1 else (reads[-1],):
        operands = [*reads[:-1], last]
        with _XP.errstate(all="ignore"):
            expected = ufunc(*operands)
        result = _XP.empty(PROBED, dtypes[-1])
        arrays = [*(x if x.ndim else x.reshape(1) for x in map(_XP.asarray, operands)), result]
        call(loop, arrays, PROBED, [x.itemsize if x.size > 1 else 0 for x in arrays])
        if result.tobytes() != expected.tobytes():
            return False
    return True


def merged(loops: Sequence[tuple[int, Sequence[int]]]) -> tuple[list[int], list[Sequence[int]]]:
    """Return the sizes and strides of the fewest nested loops that walk as ``loops`` do: a size, and strides of arrays.

    Both go from the outermost loop to the innermost.
    """
    sizes: list[int] = []
    strides: list[Sequence[int]] = []
    for n, here in loops:
        if sizes and all(before == s * n for before, s in zip(strides[-1], here, strict=True)):
            sizes[-1] *= n
            strides[-1] = here
        else:
            sizes.append(n)
            strides.append(here)
    return sizes, strides


def samples(dtype: DType, seed: int) -> Any:
    """Return ``PROBED`` elements of ``dtype``: special values, and others of many magnitudes."""
    random = _XP.random.default_rng(seed)
    if dtype.kind in "biu":
        return random.integers(0, 2**63, PROBED).astype(dtype)
    values = random.normal(size=PROBED) * 10.0 ** random.integers(-6, 7, PROBED)
    special = [0.0, -0.0, _XP.inf, -_XP.inf, _XP.nan, 1.0, -1.0, 2.0, 0.5, 1e-40, -1e-310, 6e-8, 1e300]
    values[random.permutation(PROBED)[: len(special)]] = special
    with _XP.errstate(all="ignore"):
        return (values + 1j * values[::-1] if dtype.kind == "c" else values).astype(dtype)
