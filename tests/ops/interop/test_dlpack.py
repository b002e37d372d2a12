"""DLPack on the CPU: what is shared, what is copied, and that nobody can change a tensor through it."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from checks import c64, same

import tapegrad as tg

DTYPES = ["bool", "int8", "int32", "uint8", "uint64", "float16", "float32", "float64", "complex64", "complex128"]
VERSIONED = np.lib.NumpyVersion(np.__version__) >= "2.1.0"
new_numpy = pytest.mark.skipif(not VERSIONED, reason="NumPy 2.0 marks nothing read-only")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (3,), (2, 0), (2, 3, 4)])
def test_there_and_back(dtype: str, shape: tuple[int, ...]) -> None:
    values = np.arange(np.prod(shape)).reshape(shape).astype(dtype)
    x = tg.asarray(values)
    assert x.__dlpack_device__() == (1, 0)
    there = np.from_dlpack(x)
    back = tg.from_dlpack(there)
    assert there.dtype == back.dtype == values.dtype
    np.testing.assert_array_equal(there, values)
    np.testing.assert_array_equal(back.numpy(), values)


def test_views_and_lazy_values() -> None:
    big = np.arange(24.0).reshape(4, 6)
    x = tg.asarray(big, copy=False)
    for view in (x.T, x[::2, ::-1], x[1], tg.exp(x) * 2):
        np.testing.assert_array_equal(np.from_dlpack(view), view.numpy())
    np.testing.assert_array_equal(tg.from_dlpack(big[::-2, 1::2].T).numpy(), big[::-2, 1::2].T)


def test_who_takes_a_tensor_gets_a_copy() -> None:
    x = c64([1.0, 2.0, 3.0])
    for options in ({}, {"copy": None}, {"copy": True})[: None if VERSIONED else 1]:
        theirs = np.from_dlpack(x, **options)
        if theirs.flags.writeable:
            theirs[0] = 99.0
        assert not np.shares_memory(theirs, np.asarray(x))
    same(x, [1.0, 2.0, 3.0])


@new_numpy
def test_memory_is_shared_read_only_where_asked() -> None:
    x = c64([1.0, 2.0, 3.0])
    theirs = np.from_dlpack(x, copy=False)
    assert np.shares_memory(theirs, np.asarray(x)) and not theirs.flags.writeable
    a = np.ones(2)
    a.flags.writeable = False
    with pytest.raises(BufferError, match="read-only, which only DLPack 1.0 can say"):
        tg.asarray(a, copy=False).__dlpack__(copy=False)
    del x
    np.testing.assert_array_equal(theirs, [1.0, 2.0, 3.0])


def test_an_older_consumer_that_asks_for_no_copy_shares() -> None:
    x = c64([1.0, 2.0])
    held = SimpleNamespace(capsule=x.__dlpack__(copy=False))
    consumer = type("Old", (), {"__dlpack__": lambda self, **o: held.capsule, "__dlpack_device__": lambda self: (1, 0)})
    assert np.shares_memory(np.from_dlpack(consumer()), np.asarray(x))


def test_variables_and_tapes() -> None:
    v = tg.Variable(np.array([1.0, 2.0]))
    with tg.GradientTape() as tape:
        theirs = np.from_dlpack(v)
        y = tg.sum(tg.from_dlpack(theirs) ** 2)
    assert v.__dlpack_device__() == (1, 0) and y.item() == 5 and tape.gradient(y, v) is None
    with tg.GradientTape() as tape:
        y = tg.sum(tg.from_dlpack(v) ** 2)
    same(tape.gradient(y, v), [2.0, 4.0])


def test_what_is_imported_is_shared_unless_a_copy_is_wanted() -> None:
    a = np.array([1.0, 2.0])
    shared, copied = tg.from_dlpack(a), tg.from_dlpack(a, copy=True)
    assert np.shares_memory(np.asarray(shared), a) and not np.shares_memory(np.asarray(copied), a)
    assert np.shares_memory(np.asarray(tg.from_dlpack(a, copy=False, device="cpu")), a)
    a.flags.writeable = False
    same(tg.from_dlpack(a) + 1, [2.0, 3.0])
    assert tg.from_dlpack(shared) is shared


class _Elsewhere:
    """An array that says it lies on another kind of device."""

    def __init__(self, kind: int) -> None:
        self.kind = kind

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.kind, 0

    def __dlpack__(self, **options: Any) -> Any:
        raise RuntimeError("no such type")


class _Odd(_Elsewhere):
    dtype = "float3"


@pytest.mark.parametrize(
    ("call", "error", "says"),
    [
        (lambda x: tg.from_dlpack(3.0), TypeError, "from_dlpack: float offers no __dlpack__; tg.asarray"),
        (lambda x: tg.from_dlpack(_Elsewhere(8)), ValueError, "device type 8; move it"),
        (lambda x: tg.from_dlpack(_Odd(1)), TypeError, r"float3 cannot be imported \(no such type\)"),
        (lambda x: tg.from_dlpack(x, device="moon"), ValueError, "'moon' is not available"),
        (lambda x: x.__dlpack__(dl_device=(2, 0)), BufferError, "to_device"),
        (lambda x: x.__dlpack__(stream=1, max_version=(1, 0), copy=True, dl_device=(3, 0)), BufferError, "to_device"),
    ],
)
def test_what_cannot_be_had_is_said(call: Callable[[tg.Tensor], Any], error: type, says: str) -> None:
    with pytest.raises(error, match=says):
        call(c64([1.0]))


def test_bfloat16_says_what_to_do() -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    x = tg.asarray(np.ones(2, ml_dtypes.bfloat16))
    with pytest.raises(BufferError, match="exports no bfloat16; use astype"):
        np.from_dlpack(x)


def test_asarray_without_a_copy() -> None:
    a = np.arange(3.0)
    x = tg.asarray(a, copy=False)
    assert np.shares_memory(np.asarray(x), a) and tg.asarray(x, copy=False) is x
    assert np.shares_memory(np.asarray(tg.asarray(a, dtype="float64", device="cpu", copy=False)), a)
    for call, says in (
        (lambda: tg.asarray(3.0, copy=False), "float is no array"),
        (lambda: tg.asarray([1.0], copy=False), "list is no array"),
        (lambda: tg.asarray(a, dtype="float32", copy=False), "dtype float64, not float32"),
        (lambda: tg.asarray(x, dtype="float32", copy=False), "dtype float64, not float32"),
    ):
        with pytest.raises(ValueError, match=says):
            call()
    with pytest.raises(ValueError, match="without a copy"):
        np.asarray(x, dtype="float32", copy=False)
    foreign = SimpleNamespace(__array__=lambda dtype=None, copy=None: a)
    same(tg.asarray(foreign), a)
