"""Abstract arrays lie as arrays do, take no memory, and cannot be computed with."""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from tapegrad.core.aval import shaped
from tapegrad.device import CPU, abstract_array
from tapegrad.device.abstract_array import AbstractArray
from tapegrad.device.abstract_device import dry
from tapegrad.errors import DryRunError

F32 = np.dtype(np.float32)
SLICES = [slice(None), slice(None, None, -1), slice(1, None), slice(None, None, 2), slice(0, 1), slice(0, 0)]


@st.composite
def arrays(draw: st.DrawFn, dtype: Any = np.float32) -> np.ndarray:
    """A view of an array: axes in any order, cut, stepped, reversed, broadcast."""
    shape = draw(st.lists(st.integers(1, 4), max_size=4))
    x = np.zeros(shape, dtype).transpose(draw(st.permutations(range(len(shape)))))
    x = x[(..., *(draw(st.sampled_from(SLICES)) for _ in shape))]
    if draw(st.booleans()):
        x = np.broadcast_to(x, (draw(st.integers(1, 3)), *x.shape))
    return x


def lies(x: Any) -> tuple:
    return x.shape, x.dtype, x.strides, x.flags.c_contiguous, x.flags.f_contiguous, x.ctypes.data % 256


@given(arrays())
def test_a_phantom_lies_as_the_array_does(x: np.ndarray) -> None:
    found = abstract_array.like(x)
    assert type(found) is AbstractArray and lies(found) == lies(x)
    assert abstract_array.like(found) is found


@given(arrays(), st.data())
def test_a_reshape_is_a_view_exactly_where_numpys_is(x: np.ndarray, data: st.DataObject) -> None:
    sizes = [n for n in range(1, x.size + 1) if x.size % n == 0] or [0]
    first = data.draw(st.sampled_from(sizes))
    shape = (first, x.size // first if first else 3)
    near = abstract_array.like(x)
    found, wanted = abstract_array.reshaped(near, shape), x.reshape(shape)
    if not x.size:
        assert found is None or found.shape == shape
    elif np.may_share_memory(wanted, x):
        assert type(found) is AbstractArray and found.strides == wanted.strides and np.may_share_memory(found, near)
    else:
        assert found is None


@given(arrays(), st.data())
def test_layouts_of_ufuncs_are_numpys(x: np.ndarray, data: st.DataObject) -> None:
    y = np.zeros(x.shape, F32).transpose(data.draw(st.permutations(range(x.ndim))))
    y = y if y.shape == x.shape else np.zeros(x.shape[-1:], F32)
    for operands, ufunc in (((x,), np.negative), ((x, y), np.add), ((y, x), np.add)):
        wanted = np.asarray(ufunc(*operands))
        found = abstract_array.of_ufunc([abstract_array.like(a) for a in operands], shaped(wanted.shape, F32, CPU))
        assert found.shape == wanted.shape
        assert wanted.size <= 1 or found.strides == wanted.strides


@settings(max_examples=30)
@given(st.lists(st.lists(st.integers(0, 5), max_size=3), min_size=2, max_size=8))
def test_phantoms_do_not_overlap(shapes: list[list[int]]) -> None:
    found = [abstract_array.empty(tuple(shape), F32) for shape in shapes]
    assert all(x.flags.c_contiguous and x.ctypes.data % 512 == 0 for x in found)
    assert not any(np.may_share_memory(x, y) for i, x in enumerate(found) for y in found[:i])


def test_the_region_is_used_again_but_not_under_a_copys_nose(monkeypatch: pytest.MonkeyPatch) -> None:
    x = abstract_array.empty((1000, 10), F32).T
    monkeypatch.setattr(abstract_array.here, "at", len(abstract_array.region()) - 512)
    y = abstract_array.empty((10,), F32)
    assert abstract_array.here.at < 10_000  # from the beginning
    x = abstract_array.like(y.reshape(5, 2)).T
    monkeypatch.setattr(abstract_array.here, "at", 0)

    class reshape:
        copies = True

    copy = abstract_array.viewed(reshape, x, {}, shaped((10,), F32, CPU))
    assert copy.shape == (10,) and not np.may_share_memory(copy, x)


def test_there_is_no_memory_and_nothing_can_be_written() -> None:
    x = abstract_array.empty((1 << 36,), F32)
    assert x.nbytes == 1 << 38
    assert not x.flags.writeable
    with pytest.raises(ValueError, match="read-only"):
        x[5] = 1.0
    x.fill(7.0)
    assert not np.asarray(x)[:3].any()
    with pytest.raises(DryRunError, match="address space"):
        abstract_array.empty((1 << 50,), F32)


@pytest.mark.parametrize(
    "use", [lambda x: x + 1, lambda x: np.add.reduce(x), lambda x: x.sum(), lambda x: x > 0, lambda x: np.sort(x),
            lambda x: np.concatenate([x, np.ones(3)]), lambda x: np.matmul(np.ones(3), x), lambda x: np.where(x, 1, 2)],
)  # fmt: skip
def test_it_cannot_be_computed_with(use: Any) -> None:
    with pytest.raises(DryRunError, match="dry run"):
        use(abstract_array.empty((3,), F32))
    assert repr(abstract_array.empty((3,), F32)) == "AbstractArray(float32[3])"


def test_what_a_device_makes_in_a_dry_run() -> None:
    mine, there = np.ones((3, 4)), dry(CPU)
    assert type(there.empty((2, 2), F32)) is AbstractArray
    assert there.array(mine) is mine  # not even copied
    assert type(there.array(mine, F32)) is type(there.array(mine.T)) is AbstractArray
    assert there.array([1.0, 2.0]).tolist() == [1.0, 2.0]
    assert type(CPU.empty((2, 2), F32)) is np.ndarray and CPU.array(mine) is not mine
