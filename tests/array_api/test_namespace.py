"""The array API standard: every name, each with a signature that the standard's calls fit; and its public suite.

The suite is no package: with ``ARRAY_API_TESTS_DIR`` naming a checkout it runs here, else it is skipped (README.md).
"""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import tapegrad as tg

HERE = Path(__file__).parent

# A name stands for all functions of its kind; "/" and "*" as in a Python signature.
ONE, TWO = "x, /", "x1, x2, /"
REDUCTION = "x, /, *, axis, keepdims"
FUNCTIONS = {
    ONE: "abs acos acosh asin asinh atan atanh bitwise_invert ceil conj cos cosh exp expm1 floor imag isfinite isinf"
    " isnan log log10 log1p log2 logical_not negative positive real reciprocal round sign signbit sin sinh sqrt square"
    " tan tanh trunc nonzero unique_all unique_counts unique_inverse unique_values matrix_transpose",
    TWO: "add atan2 bitwise_and bitwise_left_shift bitwise_or bitwise_right_shift bitwise_xor copysign divide equal"
    " floor_divide greater greater_equal hypot less less_equal logaddexp logical_and logical_or logical_xor matmul"
    " maximum minimum multiply nextafter not_equal pow remainder subtract",
    REDUCTION: "all any argmax argmin count_nonzero max mean min",
    "x, /, *, axis, dtype, keepdims": "prod sum",
    "x, /, *, axis, correction, keepdims": "std var",
    "x, /, *, axis, dtype, include_initial": "cumulative_prod cumulative_sum",
    "x, /, *, axis, descending, stable": "argsort sort",
    "x, /, min, max": "clip",
    "x, /, *, axis, n, prepend, append": "diff",
    "start, /, stop, step, *, dtype, device": "arange",
    "obj, /, *, dtype, device, copy": "asarray",
    "shape, *, dtype, device": "empty ones zeros",
    "x, /, *, dtype, device": "empty_like ones_like zeros_like",
    "n_rows, n_cols, /, *, k, dtype, device": "eye",
    "x, /, *, device, copy": "from_dlpack",
    "shape, fill_value, *, dtype, device": "full",
    "x, /, fill_value, *, dtype, device": "full_like",
    "start, stop, /, num, *, dtype, device, endpoint": "linspace",
    "*arrays, indexing": "meshgrid",
    "x, /, *, k": "tril triu",
    "x, dtype, /, *, copy, device": "astype",
    "from_, to, /": "can_cast",
    "type, /": "finfo iinfo",
    "dtype, kind": "isdtype",
    "*arrays_and_dtypes": "result_type",
    "x, indices, /, *, axis": "take take_along_axis",
    "*arrays": "broadcast_arrays",
    "*shapes": "broadcast_shapes",
    "x1, x2, /, *, invert": "isin",
    "x, /, shape": "broadcast_to",
    "arrays, /, *, axis": "concat stack",
    "x, /, *, axis": "expand_dims flip unstack",
    "x, source, destination, /": "moveaxis",
    "x, /, axes": "permute_dims",
    "x, repeats, /, *, axis": "repeat",
    "x, /, shape, *, copy": "reshape",
    "x, /, shift, *, axis": "roll",
    "x, /, axis": "squeeze",
    "x, repetitions, /": "tile",
    "x1, x2, /, *, side, sorter": "searchsorted",
    "condition, x1, x2, /": "where",
    "x1, x2, /, *, axes": "tensordot",
    "x1, x2, /, *, axis": "vecdot",
    "": "__array_namespace_info__",
}
LINALG = {
    ONE: "det eig eigh eigvals eigvalsh inv matrix_transpose slogdet svdvals",
    TWO: "matmul outer solve",
    "x, /, *, upper": "cholesky",
    "x1, x2, /, *, axis": "cross vecdot",
    "x, /, *, offset": "diagonal",
    "x, /, *, keepdims, ord": "matrix_norm",
    "x, n, /": "matrix_power",
    "x, /, *, rtol": "matrix_rank pinv",
    "x, /, *, mode": "qr",
    "x, /, *, full_matrices": "svd",
    "x1, x2, /, *, axes": "tensordot",
    "x, /, *, offset, dtype": "trace",
    "x, /, *, axis, keepdims, ord": "vector_norm",
}
FFT = {
    "x, /, *, n, axis, norm": "fft hfft ifft ihfft irfft rfft",
    "x, /, *, s, axes, norm": "fftn ifftn irfftn rfftn",
    "n, /, *, d, dtype, device": "fftfreq rfftfreq",
    "x, /, *, axes": "fftshift ifftshift",
}
METHODS = {
    "": "__abs__ __bool__ __complex__ __dlpack_device__ __float__ __index__ __int__ __invert__ __neg__ __pos__",
    "other, /": "__add__ __and__ __eq__ __floordiv__ __ge__ __gt__ __le__ __lshift__ __lt__ __matmul__ __mod__ __mul__"
    " __ne__ __or__ __pow__ __rshift__ __sub__ __truediv__ __xor__ __radd__ __rand__ __rfloordiv__ __rlshift__"
    " __rmatmul__ __rmod__ __rmul__ __ror__ __rpow__ __rrshift__ __rsub__ __rtruediv__ __rxor__",
    "key, /": "__getitem__",
    "*, api_version": "__array_namespace__",
    "*, stream, max_version, dl_device, copy": "__dlpack__",
    "device, /, *, stream": "to_device",
}
DTYPES = (
    "bool int8 int16 int32 int64 uint8 uint16 uint32 uint64 float32 float64 complex64 complex128".split()
)  # fmt: skip


def _spread(table: dict[str, str]) -> list[tuple[str, str]]:
    return [(name, wanted) for wanted, names in table.items() for name in names.split()]


def _calls(wanted: str) -> list[tuple[list[str], list[str]]]:
    """The calls that the standard allows: names given by position, names given by keyword."""
    positional: list[str] = []
    free: list[str] = []
    keywords: list[str] = []
    place = free
    for part in filter(None, wanted.split(", ")):
        if part == "/":
            positional, free[:] = list(free), []
        elif part.startswith("*"):
            place = keywords
            positional += ["many", "of them"] if part != "*" else []
        else:
            place.append(part)
    return [(positional + free, keywords), (positional, free + keywords)]


def unfit(function: Callable[..., Any], wanted: str) -> str:
    """Why a call of the standard does not fit the function's signature ("": all do)."""
    signature = inspect.signature(function)
    for by_place, by_name in _calls(wanted):
        try:
            signature.bind(*by_place, **dict.fromkeys(by_name))
        except TypeError as e:
            return f"{signature} does not take {by_place} and {by_name}: {e}"
    return ""


@pytest.mark.parametrize(("name", "wanted"), _spread(FUNCTIONS))
def test_functions(name: str, wanted: str) -> None:
    assert not unfit(getattr(tg, name), wanted)


@pytest.mark.parametrize(("name", "wanted"), _spread(LINALG))
def test_linalg(name: str, wanted: str) -> None:
    assert not unfit(getattr(tg.linalg, name), wanted)


@pytest.mark.parametrize(("name", "wanted"), _spread(FFT))
def test_fft(name: str, wanted: str) -> None:
    assert not unfit(getattr(tg.fft, name), wanted)


@pytest.mark.parametrize(("name", "wanted"), _spread(METHODS))
@pytest.mark.parametrize("make", [tg.ones, lambda shape: tg.Variable(tg.ones(shape))], ids=["tensor", "variable"])
def test_methods(name: str, wanted: str, make: Callable[[Any], Any]) -> None:
    method = getattr(make((3, 3)), name)
    if wanted or list(inspect.signature(method).parameters) != ["args", "kwargs"]:  # a variable's pass all on
        assert not unfit(method, wanted)


def test_a_signature_that_does_not_fit_is_found() -> None:
    for function, wanted, why in (
        (lambda x, /: x, REDUCTION, "axis"),
        (lambda a, /, dims: a, "x, /, shape", "shape"),
        (lambda x, /, *, axis: x, "x, /, axis", "positional"),
        (lambda x, /, *, axis, must: x, "x, /, *, axis", "must"),
    ):
        assert why in unfit(function, wanted), wanted
    assert not unfit(lambda x, axis=None, keepdims=False, extra=1: x, REDUCTION)


def test_constants_and_dtypes() -> None:
    assert tg.newaxis is None and tg.nan != tg.nan
    assert (tg.e, tg.pi, tg.inf) == pytest.approx((2.718281828, 3.141592654, float("inf")))
    for name in DTYPES:
        dtype = getattr(tg, name)
        assert tg.ones(2, dtype=dtype).dtype == dtype
        assert tg.asarray(tg.ones(2, dtype=dtype)).dtype == dtype
    assert [tg.asarray(v).dtype for v in (True, 1, 1.0, 1j)] == [tg.bool, tg.int64, tg.float32, tg.complex64]


def test_array_attributes() -> None:
    x = tg.ones((2, 3))
    assert (x.ndim, x.shape, x.size, x.dtype) == (2, (2, 3), 6, tg.float32)
    assert x.device in tg.__array_namespace_info__().devices()
    assert x.T.shape == x.mT.shape == (3, 2)


def test_several_arrays_and_devices_are_tuples() -> None:
    x = tg.ones(2)
    for found in (tg.meshgrid(x, x), tg.broadcast_arrays(x, x), tg.nonzero(x), tg.unstack(x)):
        assert type(found) is tuple
    assert type(tg.__array_namespace_info__().devices()) is tuple


def test_what_the_version_of_2025_added() -> None:
    assert tg.broadcast_shapes() == () and tg.broadcast_shapes((2, 1), (3,)) == (2, 3)
    with pytest.raises(ValueError, match="do not broadcast"):
        tg.broadcast_shapes((2,), (3,))
    x = tg.asarray([1, 3, 5])
    assert tg.isin(x, 3, invert=True).tolist() == [True, False, True] and tg.isin(3, x).shape == ()
    assert tg.expand_dims(tg.ones((2, 3)), (0, -1)).shape == (1, 2, 3, 1)
    with pytest.raises(IndexError, match="twice"):
        tg.expand_dims(x, (0, 0))
    assert tg.permute_dims(tg.ones((2, 3, 4)), (-1, 0, 1)).shape == (4, 2, 3)
    assert tg.searchsorted(x, 3, side="right").shape == () and int(tg.searchsorted(x, 4)) == 2
    values, vectors = tg.linalg.eig(tg.ones((2, 2, 2)))
    assert values.dtype == vectors.dtype == tg.complex64 and tg.linalg.eigvals(tg.ones((2, 2))).dtype == tg.complex64


def test_operators_in_place_make_a_new_tensor() -> None:
    """There is no ``__iadd__``: ``x += y`` rebinds ``x``, as Python does for numbers."""
    x = before = tg.ones(3)
    x += 1
    assert x.tolist() == [2, 2, 2] and before.tolist() == [1, 1, 1]
    with pytest.raises(TypeError, match=r"use x = x.at\[index\].set"):
        x[0] = 1
    assert x.at[0].set(1).tolist() == [1, 2, 2]


def test_the_public_suite() -> None:
    checkout = os.environ.get("ARRAY_API_TESTS_DIR")
    if not checkout:
        pytest.skip("ARRAY_API_TESTS_DIR names no checkout of data-apis/array-api-tests")
    command = [
        sys.executable, "-m", "pytest", "array_api_tests", "-q", "-p", "no:cacheprovider", "--disable-deadline",
        "--max-examples=20", "--derandomize", "--xfails-file", str(HERE / "xfails.txt"),
    ]  # fmt: skip
    environment = {**os.environ, "ARRAY_API_TESTS_MODULE": "tapegrad", "ARRAY_API_TESTS_VERSION": "2025.12"}
    done = subprocess.run(command, cwd=checkout, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:]
