"""Tensor: what the handle shows, what it shares with NumPy, and what it refuses."""

from __future__ import annotations

import copy
import sys
from typing import Any

import numpy as np
import pytest
from checks import c64, same
from inside import is_lazy, weak

import tapegrad as tg
from tapegrad import errors

BIG = 20_000


@pytest.mark.parametrize("shape", [(), (3,), (2, 0), (2, 3, 4)])
def test_attributes_need_no_evaluation(shape: tuple[int, ...]) -> None:
    x = tg.asarray(np.ones(shape, np.float32))
    size = int(np.prod(shape))
    assert (x.shape, x.ndim, x.size, x.nbytes, x.dtype, str(x.device)) == (
        shape, len(shape), size, 4 * size, np.float32, "cpu",
    )  # fmt: skip
    lazy = tg.exp(c64(np.zeros(BIG)))
    assert (lazy.shape, lazy.size, lazy.nbytes) == ((BIG,), BIG, 8 * BIG) and is_lazy(lazy)


def test_python_numbers_and_sequences() -> None:
    x = c64([[1.5, 2.0], [3.0, 4.0]])
    assert x.tolist() == [[1.5, 2.0], [3.0, 4.0]] and len(x) == 2 and x[0, 0].item() == 1.5
    assert [float(q) for q in x[0]] == [1.5, 2.0] and complex(x[0, 1]) == 2 + 0j and int(x[1, 1]) == 4
    assert bool(c64(0.0)) is False and bool(c64([[2.0]])) is True
    assert [10, 20, 30][tg.asarray(1)] == 20 and f"{c64(2.5):.3f}" == "2.500" and "1.5" in f"{x}" and "1.5" in repr(x)


@pytest.mark.parametrize(
    ("call", "error", "says"),
    [
        (lambda x: x.item(), ValueError, r"item: a tensor of shape \(2,\) has 2 elements"),
        (lambda x: float(x), ValueError, "2 elements"),
        (lambda x: bool(x), ValueError, r"truth of a tensor of shape \(2,\) is ambiguous; use tg.any or tg.all"),
        (lambda x: len(x[0]), ValueError, "no dimensions has no length"),
        (lambda x: len(x[0]), TypeError, "no dimensions has no length"),
        (lambda x: list(x[0]), ValueError, "iteration over a tensor of no dimensions"),
        (lambda x: list(x[0]), TypeError, "iteration over a tensor of no dimensions"),
        (lambda x: x.__setitem__(0, 1.0), TypeError, r"x.at\[index\].set\(value\)"),
        (lambda x: x.to_device("moon"), ValueError, "device 'moon' is not available"),
        (lambda x: tg.asarray("text"), TypeError, "cannot make a tensor of str"),
        (lambda x: tg.asarray(object()), TypeError, "object"),
        (lambda x: tg.asarray([[1.0], [1.0, 2.0]]), TypeError, "list"),
        (lambda x: tg.exp(None), TypeError, "exp: .*NoneType"),
    ],
)
def test_misuse(call: Any, error: type, says: str) -> None:
    with pytest.raises(error, match=says) as e:
        call(c64([1.0, 2.0]))
    assert isinstance(e.value, errors.TapegradError)


def test_it_is_no_key_and_no_copy_is_needed() -> None:
    x = c64([1.0, 2.0])
    with pytest.raises(TypeError):
        hash(x)
    assert x.ref() == x.ref() and x.ref() != (x * 1.0).ref() and {x.ref(): 1}[x.ref()] == 1 and x.ref().deref() is x
    assert copy.deepcopy(x) is x
    assert x.to_device("cpu").device is x.device and x.to_device("cpu") is not x


def test_numpy_takes_a_tensor_in_few_calls() -> None:
    """Of Python, and two more for attributes that NumPy asks for first."""
    x, calls = tg.asarray(np.ones(3)), list[str]()
    np.asarray(x)
    before = sys.getprofile()
    sys.setprofile(lambda frame, event, _: calls.append(frame.f_code.co_name) if event == "call" else None)
    try:
        np.asarray(x)
    finally:
        sys.setprofile(before)
    assert calls.count("__getattr__") == 2 and calls.count("look") == 1 and len(calls) <= 17, calls


def test_numpy_reads_but_does_not_write() -> None:
    a = np.array([1.0, 2.0])
    x = tg.asarray(a)
    a[0] = 99.0
    same(x, [1.0, 2.0])
    seen = np.asarray(x)
    with pytest.raises(ValueError, match="read-only"):
        seen[0] = 99.0
    for mine in (x.numpy(copy=True), np.array(x), np.asarray(x, dtype=np.float32), x.__array__(copy=True)):
        mine[0] = 99.0
    same(x, [1.0, 2.0])
    shared = tg.asarray(a, copy=False)
    assert np.shares_memory(np.asarray(shared), a)
    assert isinstance(a * x, tg.Tensor) and isinstance(np.float64(2.0) * x, tg.Tensor)
    same(np.from_dlpack(x), [1.0, 2.0])


@pytest.mark.parametrize(
    ("value", "dtype"),
    [
        (1.0, "float32"), (1, "int64"), (True, "bool"), (1j, "complex64"), ([1.0, 2], "float32"), ([[1, 2]], "int64"),
        (np.float64(1), "float64"), (np.array(1, np.int8), "int8"), ([np.float64(1)], "float64"), ([], "float32"),
        (np.array([1.0], ">f8"), "float64"),
    ],
    ids=str,
)  # fmt: skip
def test_dtypes_of_what_comes_in(value: Any, dtype: str) -> None:
    x = tg.asarray(value)
    assert x.dtype == np.dtype(dtype) and x.dtype.isnative
    same(x, np.asarray(value))
    assert tg.asarray(value, dtype="complex128").dtype == np.complex128


@pytest.mark.parametrize("size", [4, BIG])
def test_an_alias_is_another_value_on_the_same_bytes(size: int) -> None:
    x = tg.exp(c64(np.zeros(size)))
    same = x[...]
    again = same[...]
    assert len({t.ref() for t in (x, same, again)}) == 3
    assert all(np.shares_memory(t.numpy(), x.numpy()) for t in (same, again))
    base = weak(x)
    del x, same
    assert base() is not None
    del again
    assert base() is None
