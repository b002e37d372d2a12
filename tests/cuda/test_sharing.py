"""DLPack and the standard's questions on CUDA."""

from __future__ import annotations

import numpy as np
import pytest
from inside import array_of

import tapegrad as tg
from tapegrad.device import CPU

pytestmark = pytest.mark.sampled(1 / 2)

X = np.arange(6, dtype=np.float32).reshape(2, 3)


def test_there_and_back(cuda, cupy):
    t = tg.asarray(X, device=cuda)
    assert t.__dlpack_device__() == (2, 0)
    shared, copied = cupy.from_dlpack(t), tg.from_dlpack(t)
    assert shared.data.ptr == array_of(t).data.ptr and copied is t
    back = tg.from_dlpack(shared)
    assert back.device is cuda and array_of(back).data.ptr == shared.data.ptr
    own = tg.from_dlpack(shared, copy=True)
    assert array_of(own).data.ptr != shared.data.ptr
    for found in (back, own, tg.from_dlpack(t * 2) / 2, tg.from_dlpack(cupy.asarray(X).T).T):
        np.testing.assert_array_equal(found.numpy(), X)


def test_a_number_that_stays_on_the_host(cuda, cupy):
    t = tg.asarray(2.0, device=cuda)
    assert cupy.from_dlpack(t).get() == 2


def test_to_the_host_only_as_a_copy(cuda, cupy):
    t = tg.asarray(X, device=cuda)
    np.testing.assert_array_equal(np.from_dlpack(t, device="cpu"), X)
    found = tg.from_dlpack(cupy.asarray(X), device="cpu")
    assert found.device is CPU
    np.testing.assert_array_equal(found.numpy(), X)
    with pytest.raises(BufferError, match="as a copy; leave out copy=False"):
        t.__dlpack__(dl_device=(1, 0), copy=False)
    with pytest.raises(BufferError, match="move it with to_device"):
        t.__dlpack__(dl_device=(2, 1))
    with pytest.raises(ValueError, match="takes a copy"):
        tg.from_dlpack(cupy.asarray(X), device="cpu", copy=False)
    with pytest.raises(ValueError, match="takes a copy"):
        tg.from_dlpack(X, device=cuda, copy=False)
    up = tg.from_dlpack(X, device=cuda)
    assert up.device is cuda
    np.testing.assert_array_equal(up.numpy(), X)


def test_asarray_without_a_copy(cuda, cupy):
    a = cupy.asarray(X)
    assert array_of(tg.asarray(a, copy=False)).data.ptr == a.data.ptr
    for call in (
        lambda: tg.asarray(X, device=cuda, copy=False),
        lambda: tg.asarray(a, device="cpu", copy=False),
        lambda: tg.asarray(a, dtype="float64", copy=False),
        lambda: tg.asarray(tg.asarray(a), device="cpu", copy=False),
    ):
        with pytest.raises(ValueError, match="takes a copy"):
            call()


def test_devices(cuda):
    info = tg.__array_namespace_info__()
    found = info.devices()
    assert found[0] is CPU and found[1] is cuda and len({d.name for d in found}) == len(found)
    assert info.capabilities()["max dimensions"] == 64
    with tg.device(cuda):
        assert info.default_device() is cuda and info.capabilities()["max dimensions"] == 32
    assert tg.empty_like(tg.asarray(X, device=cuda)).device is cuda
    assert tg.astype(tg.asarray(X), "int8", device=cuda).device is cuda


def test_membership_and_neighbours(cuda):
    t = tg.asarray(X, device=cuda)
    np.testing.assert_array_equal(tg.isin(t, [1, 4]).numpy(), np.isin(X, [1, 4]))
    assert tg.isin([1.0], t).device is cuda
    np.testing.assert_array_equal(tg.nextafter(t, 9).numpy(), np.nextafter(X, np.float32(9)))
    np.testing.assert_array_equal(tg.copysign(t, -1).numpy(), np.copysign(X, np.float32(-1)))
