"""Dtypes: promotion, casting, kinds, limits."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import ml_dtypes
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
    found, wanted = tg.finfo(ml_dtypes.bfloat16), ml_dtypes.finfo(ml_dtypes.bfloat16)
    for name in ("bits", "eps", "max", "min", "smallest_normal", "smallest_subnormal"):
        assert getattr(found, name) == float(getattr(wanted, name))
    assert tg.bfloat16 == ml_dtypes.bfloat16 and tg.finfo("bfloat16") == found
    assert tg.isdtype("bfloat16", "real floating") and tg.isdtype(tg.bfloat16, tg.bfloat16)
    assert not tg.isdtype("bfloat16", ("integral", "bool", "complex floating"))
    assert tg.result_type("bfloat16", 1.0) == tg.bfloat16
    assert tg.can_cast("bfloat16", "float32") and not tg.can_cast("float32", "bfloat16")


@pytest.mark.parametrize(
    ("beside", "wanted"),
    [
        ("bool", "bfloat16"), ("uint8", "bfloat16"), ("int8", "bfloat16"), ("int16", "float32"), ("uint16", "float32"),
        ("int32", "float64"), ("int64", "float64"), ("float16", "float32"), ("float32", "float32"),
        ("float64", "float64"), ("complex64", "complex64"), ("complex128", "complex128"),
    ],
)  # fmt: skip
def test_bfloat16_promotes_as_float16_does(beside: str, wanted: str) -> None:
    assert tg.result_type("bfloat16", beside) == tg.result_type(beside, tg.bfloat16) == wanted
    assert (tg.ones(2, dtype="bfloat16") * tg.ones(2, dtype=beside)).dtype == wanted
    if beside != "float16":  # the two have no order
        assert tg.result_type("float16", beside) == ("float16" if wanted == "bfloat16" else wanted)


_BY_NAME = """
import sys, tapegrad as tg
assert not any(name in sys.modules for name in ("numpy", "ml_dtypes")), "importing loads them"
{use}
"""


@pytest.mark.sampled(1 / 4)
@pytest.mark.parametrize(
    "use",
    [
        "assert tg.ones(2, dtype='bfloat16').dtype == tg.bfloat16",
        "assert tg.asarray([1.0], dtype='bfloat16').dtype == 'bfloat16'",
        "assert tg.Variable([1.0], dtype='bfloat16').dtype.name == 'bfloat16'",
        "assert tg.random.normal((3,), dtype='bfloat16').dtype.name == 'bfloat16'",
        "assert tg.astype(tg.ones(2), 'bfloat16').dtype.name == 'bfloat16'",
        "assert tg.nn.Dense(2, dtype='bfloat16')(tg.ones((1, 3), dtype='bfloat16')).dtype.name == 'bfloat16'",
        "assert tg.finfo('bfloat16').bits == 16",
        "assert tg.result_type('bfloat16', 1.0) == 'bfloat16'",
    ],
)
def test_bfloat16_by_name_in_a_fresh_process(use: str) -> None:
    code = _BY_NAME.format(use=use)
    result = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr


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


def test_the_parts_of_long_complex_numbers_are_long_doubles():
    z = tg.asarray(np.array([3 + 4j, 0 - 2j], np.clongdouble))
    for f, wanted in (
        (tg.real, [3, 0]),
        (tg.imag, [4, -2]),
        (tg.abs, [5, 2]),
        (tg.linalg.vector_norm, np.sqrt(np.longdouble(29))),
    ):
        found = f(z)
        assert found.dtype == np.longdouble
        np.testing.assert_allclose(found.numpy(), wanted, rtol=1e-18)
    assert tg.var(z).dtype == np.longdouble and tg.finfo(z.dtype).dtype == np.longdouble
    slope = tg.grad(lambda z: tg.sum(tg.abs(z)))(z)
    assert slope.dtype == np.clongdouble
    np.testing.assert_allclose(slope.numpy(), [np.clongdouble(3 + 4j) / 5, -1j], rtol=1e-18)
