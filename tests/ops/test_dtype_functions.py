"""Dtypes: promotion, casting, kinds, limits."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import tapegrad as tg
from tapegrad import errors

NUMPYS = ["bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float16", "float32",
          "float64", "complex64", "complex128"]  # fmt: skip


@pytest.mark.parametrize("a", NUMPYS)
def test_promotion_and_casting_are_numpys(a: str) -> None:
    x = tg.asarray(np.ones(2, a))
    for b in NUMPYS:
        wanted = np.result_type(a, b)
        assert tg.result_type(x, b) == tg.result_type(np.dtype(b), a) == wanted
        for casting in ("no", "equiv", "safe", "same_kind", "unsafe"):
            assert tg.can_cast(x, b, casting) is bool(np.can_cast(a, b, casting))
        assert tg.can_cast(a, b) is bool(np.can_cast(a, b))
    for number in (True, 1, 1.0, 1j):
        assert tg.result_type(x, number) == tg.result_type(number, x) == np.result_type(np.dtype(a), number)


def test_numbers_alone_become_what_tensors_of_them_are() -> None:
    found = [tg.result_type(*n) for n in ((True,), (1, True), (1, 2.0), (1j, 2.0))]
    assert found == [tg.bool, tg.int64, tg.float32, tg.complex64]
    assert tg.result_type(tg.Variable(1.0), np.float64(2.0), "int8") == tg.float64


@pytest.mark.parametrize("dtype", NUMPYS)
def test_kinds_are_numpys(dtype: str) -> None:
    d = np.dtype(dtype)
    kinds = ["bool", "signed integer", "unsigned integer", "integral", "real floating", "complex floating", "numeric"]
    for kind in [*kinds, ("bool", "integral"), (np.dtype("int8"), "real floating"), np.dtype("float32")]:
        assert tg.isdtype(d, kind) is np.isdtype(d, kind)
    assert tg.isdtype(d, ()) is False


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "complex64", "complex128"])
def test_limits_of_floats(dtype: str) -> None:
    found, wanted = tg.finfo(dtype), np.finfo(dtype)
    for name in ("bits", "eps", "max", "min", "smallest_normal", "smallest_subnormal", "tiny"):
        got = getattr(found, name)
        assert got == getattr(wanted, name) and type(got) is (int if name == "bits" else float)
    assert found.dtype == wanted.dtype and tg.finfo(tg.zeros(2, dtype=dtype)) == found


@pytest.mark.parametrize("dtype", NUMPYS[1:9])
def test_limits_of_integers(dtype: str) -> None:
    found, wanted = tg.iinfo(dtype), np.iinfo(dtype)
    assert (found.bits, found.max, found.min, found.dtype) == (wanted.bits, wanted.max, wanted.min, wanted.dtype)
    assert tg.iinfo(tg.zeros(2, dtype=dtype)) == found


def test_bfloat16() -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    found, wanted = tg.finfo(ml_dtypes.bfloat16), ml_dtypes.finfo(ml_dtypes.bfloat16)
    for name in ("bits", "eps", "max", "min", "smallest_normal", "smallest_subnormal"):
        assert getattr(found, name) == float(getattr(wanted, name))
    assert tg.isdtype(np.dtype(ml_dtypes.bfloat16), "real floating")
    assert not tg.isdtype(np.dtype(ml_dtypes.bfloat16), ("integral", "bool"))
    assert tg.result_type(np.dtype(ml_dtypes.bfloat16), 1.0) == ml_dtypes.bfloat16


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: tg.result_type(), "at least one"),
        (lambda: tg.result_type("text"), "not a dtype"),
        (lambda: tg.can_cast(1, "int8"), "Python number"),
        (lambda: tg.isdtype(tg.float32, "floating"), "kinds are 'bool'"),
        (lambda: tg.isdtype("text", "bool"), "not a dtype"),
        (lambda: tg.finfo(tg.int32), "iinfo has"),
        (lambda: tg.iinfo(tg.float32), "finfo has"),
    ],
)
def test_bad(call: Any, says: str) -> None:
    with pytest.raises(errors.DTypeError, match=says):
        call()
