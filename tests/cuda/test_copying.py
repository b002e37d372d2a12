"""Offloading from a CUDA device: bits, and memory that is free when it is said to be."""

from __future__ import annotations

import gc
import warnings
from types import ModuleType
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from shim import standin
from shim.happens import races
from waiting import never_waits

from tapegrad.core.aval import shaped
from tapegrad.core.buffer import Buffer
from tapegrad.core.node import leaf
from tapegrad.device import CPU, asdevice
from tapegrad.device.host_scalar import HostScalar
from tapegrad.errors import DeviceError, DeviceMemoryError, OffloadError, PageableWarning
from tapegrad.remat.offload import tiers

pytestmark = pytest.mark.sampled(1 / 2)

DTYPES = ["float32", "bool", "complex128", "float16", "int8", ml_dtypes.bfloat16]


def filled(array: Any, device: Any) -> Buffer:
    return Buffer(array, leaf(shaped(array.shape, array.dtype, device)))


def same_bits(got: Any, wanted: np.ndarray) -> None:
    got = got.get()
    assert (got.shape, got.dtype) == (wanted.shape, wanted.dtype)
    assert got.tobytes() == wanted.tobytes()


@pytest.fixture(params=["host", "disk"])
def tier(request, cuda, tmp_path):
    return tiers.Host(cuda) if request.param == "host" else tiers.Disk(tmp_path)


@pytest.mark.parametrize("prefetch", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (0, 3), (1,), (33, 65), (2, 3, 4, 5)])
def test_bits_come_back(cuda, tier, shape, dtype, prefetch):
    host = np.asarray(np.random.default_rng(0).standard_normal(shape) * 50).astype(dtype)
    x = cuda.empty(host.shape, host.dtype)
    x.set(host)
    slot = tier.put(filled(x, cuda))
    assert slot.nbytes == host.nbytes
    for _ in range(2):
        if prefetch:
            slot.prefetch()
        y = slot.get()
        assert y is not x and y.flags.c_contiguous and y.device.id == 0
        same_bits(y, host)
    slot.drop()
    assert races() == []


@pytest.mark.parametrize("view", [lambda x: x.T, lambda x: x[::-1, 1::3], lambda x: x[3:4, 5], lambda x: x[3, 5, ...]])
def test_arrays_that_are_not_contiguous(cuda, cupy, tier, view):
    x = view(cupy.arange(2000, dtype="float32").reshape(40, 50))
    same_bits(tier.put(filled(x, cuda)).get(), x.get())
    assert races() == []


def test_a_number_that_lives_on_the_host(cuda, tier):
    buffer = filled(HostScalar(np.asarray(2.5, "float32"), cuda), cuda)
    y = tier.put(buffer).get()
    assert y.shape == () and y.dtype == "float32" and float(y) == 2.5


def test_a_second_device(cuda, cupy):
    second = asdevice("cuda:1")
    tier = tiers.host(second)
    x = second.array(np.arange(5.0))
    slot = tier.put(filled(x, second))
    slot.prefetch()
    y = slot.get()
    assert y.device.id == 1 and standin.state.thread.device == 0
    same_bits(y, np.arange(5.0))


def test_a_file_is_mapped_until_the_copy_is_done(cuda, tmp_path):
    slot = tiers.Disk(tmp_path).put(filled(cuda.array(np.ones(5)), cuda))
    standin.events.clear()
    slot.get()
    after = [e.kind for e in standin.events]
    assert "stream synchronize" in after[after.index("h2d") :]


def test_which_tier_serves_which_device(cuda):
    for choose in (tiers.host, tiers.default):
        assert type(choose(cuda)) is tiers.Host and type(choose(CPU)) is tiers.Disk
    with pytest.raises(DeviceError, match=r"device cpu has no memory but the host's to offload from; use tiers\.Disk"):
        tiers.Host(CPU)


# When memory is free -------------------------------------------------------------------------------------------------


def used(cupy: ModuleType) -> int:
    return cupy.get_default_memory_pool().used_bytes()


def test_device_memory_is_kept_until_the_copy_is_done(cuda, cupy):
    standin.configure(stream_done=False)
    tier, before = tiers.Host(cuda), used(cupy)
    slots = [tier.put(filled(cuda.array(np.full(1024, i, "float32")), cuda)) for i in range(3)]
    assert used(cupy) - before == tier.kept_bytes == 3 * 4096
    assert tier.reclaim() == 0 and tier.kept_bytes == 3 * 4096
    standin.configure(stream_done=True)
    assert tier.reclaim() == 3 * 4096
    assert used(cupy) == before and tier.kept_bytes == 0
    assert [int(slot.get()[0]) for slot in slots] == [0, 1, 2]


def test_memory_can_be_had_now(cuda, cupy):
    standin.configure(stream_done=False)
    tier, before = tiers.Host(cuda), used(cupy)
    slots = [tier.put(filled(cuda.array(np.full(1024, i, "float32")), cuda)) for i in range(4)]
    standin.events.clear()
    with never_waits(cupy):
        assert tier.reclaim(4097) == 2 * 4096, "no more than it takes: kernels wait for these copies"
    assert used(cupy) - before == tier.kept_bytes == 2 * 4096
    assert [e.kind for e in standin.events].count("wait") == 2
    assert tier.reclaim(10**9) == 2 * 4096 and tier.reclaim(10**9) == 0
    assert used(cupy) == before
    assert [int(slot.get()[0]) for slot in slots] == [0, 1, 2, 3]


def test_the_host_waits_for_nothing(cuda, cupy):
    standin.configure(stream_done=False)
    tier = tiers.Host(cuda)
    x = cuda.array(np.ones(1024, "float32"))
    with never_waits(cupy):
        slots = [tier.put(filled(x, cuda)) for _ in range(5)]
        for slot in slots:
            slot.prefetch()
            slot.get()
            slot.drop()
        tier.reclaim(10**9)


def test_copies_run_beside_kernels(cuda):
    """On streams that the legacy default stream does not wait for; one for each way."""
    tier = tiers.Host(cuda)
    standin.events.clear()
    slot = tier.put(filled(cuda.array(np.ones(1024, "float32")), cuda))
    slot.get()
    out, into = (
        {e.stream for e in standin.events if e.kind == kind and e.host and not e.name} for kind in ("d2h", "h2d")
    )
    assert len(out) == len(into) == 1 and not out & into
    assert out | into <= standin.state.non_blocking


def test_slabs_are_lent_again(cuda):
    tier = tiers.Host(cuda)
    x = cuda.array(np.ones(300_000, "float32"))
    for _ in range(10):
        slots = [tier.put(filled(x, cuda)) for _ in range(3)]
        for slot in slots:
            slot.prefetch()
        del slots, slot
    assert 3 * x.nbytes <= tier.pinned_bytes <= 2 * (4 << 20)


def test_a_dropped_slot_says_so(cuda):
    slot = tiers.Host(cuda).put(filled(cuda.array(np.ones(5)), cuda))
    slot.drop()
    slot.drop()
    for use in (slot.get, slot.prefetch):
        with pytest.raises(OffloadError, match=r"slot of float64\[5\] was dropped"):
            use()


def test_nothing_is_left_behind(cuda, cupy):
    before, pinned = used(cupy), standin.state.pinned.bytes

    def work():
        tier = tiers.Host(cuda)
        slots = [tier.put(filled(cuda.array(np.ones(1000)), cuda)) for _ in range(5)]
        for slot in slots[::2]:
            slot.prefetch()
        raise KeyError

    with pytest.raises(KeyError):
        work()
    gc.collect()
    assert used(cupy) == before and standin.state.pinned.bytes == pinned


def test_no_room_on_the_device(cuda, cupy):
    """Nothing is lost: the slot serves once there is room."""
    tier = tiers.Host(cuda)
    slot = tier.put(filled(cuda.array(np.ones(1000)), cuda))
    assert tier.reclaim() == 8000 and tier.kept_bytes == 0, "that would be let go of, and make room"
    for use in (slot.prefetch, slot.get):
        standin.configure(allocation_fails_at=1)
        with pytest.raises(DeviceMemoryError):
            use()
        standin.configure(allocation_fails_at=None)
    same_bits(slot.get(), np.ones(1000))


def test_arrays_that_copies_keep_make_room(cuda, cupy):
    standin.configure(stream_done=False)
    tier = tiers.Host(cuda)
    one = tier.put(filled(cuda.array(np.ones(1024)), cuda))
    two = tier.put(filled(cuda.array(np.ones(1024) * 2), cuda))
    cupy.get_default_memory_pool().set_limit(cupy.get_default_memory_pool().total_bytes())
    held = cuda.empty((cupy.get_default_memory_pool().free_bytes() // 8,), np.dtype("float64"))
    assert tier.kept_bytes == 2 * 8192
    a, b = one.get(), two.get()
    same_bits(a, np.ones(1024))
    same_bits(b, np.ones(1024) * 2)
    with pytest.raises(DeviceMemoryError):
        one.get()
    del a
    same_bits(one.get(), np.ones(1024))
    assert held.size >= 0 and races() == []


def test_what_cannot_be_pinned_goes_through_ordinary_memory(cuda):
    standin.configure(pinned=0)
    tier = tiers.Host(cuda)
    x = cuda.array(np.arange(1000.0))
    with pytest.warns(PageableWarning, match=r"no \d+ bytes of pinned host memory: 0 are pinned"):
        slots = [tier.put(filled(x, cuda))]
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # said once
        slots += [tier.put(filled(x + i, cuda)) for i in range(1, 4)]
    for i, slot in enumerate(slots):
        slot.prefetch()
        same_bits(slot.get(), np.arange(1000.0) + i)
    assert tier.pinned_bytes == 0 and races() == []


def test_a_limit_on_pinned_memory(cuda):
    tier = tiers.Host(cuda, limit=3 << 20)
    x = cuda.array(np.arange(1 << 18, dtype="float32"))
    slots = [tier.put(filled(x, cuda)) for _ in range(3)]
    with pytest.warns(PageableWarning, match="3145728 are pinned and the limit is 3145728"):
        slots.append(tier.put(filled(x, cuda)))
    for slot in slots:
        same_bits(slot.get(), np.arange(1 << 18, dtype="float32"))
    assert tier.pinned_bytes == 3 << 20
