"""The stand-in for CuPy: as strict as CuPy, with CuPy's accounting, and nothing that CuPy lacks."""

from __future__ import annotations

import copy
import sys
import types

import ml_dtypes
import numpy as np
import pytest
from waiting import never_waits

from shim import standin

ABSENT = "errstate einsum_path insert block vecdot matvec vecmat unstack geomspace nanquantile nditer seterr test"


@pytest.fixture
def cupy():
    """The stand-in, installed for one test."""
    yield standin.install()
    standin.uninstall()


@pytest.fixture
def pool(cupy):
    """A pool of the test's own, in use."""
    pool = cupy.cuda.MemoryPool()
    with cupy.cuda.using_allocator(pool.malloc):
        yield pool


def arange(cupy, *shape, dtype="float32"):
    return cupy.arange(np.prod(shape, dtype=int), dtype=dtype).reshape(shape)


def test_import_finds_the_stand_in_and_then_what_was_there():
    before = sys.modules.get("cupy")
    module = standin.install()
    import cupy
    import cupy.cuda.runtime
    from cupy.cuda import cublas

    assert cupy is module and cublas is cupy.cuda.cublas
    with pytest.raises(ImportError):
        import cupy.cuda.cublas
    standin.uninstall()
    assert sys.modules.get("cupy") is before


@pytest.mark.parametrize("convert", [np.asarray, np.array, lambda a: np.ones(4) @ np.asarray(a)])
def test_implicit_conversion_is_refused(cupy, convert):
    with pytest.raises(TypeError, match="Implicit conversion to a NumPy array is not allowed"):
        convert(cupy.ones(4))


@pytest.mark.parametrize("mix", [
    lambda cp, a, h: a + h, lambda cp, a, h: h + a, lambda cp, a, h: a < h, lambda cp, a, h: np.add(h, a),
    lambda cp, a, h: cp.add(a, h), lambda cp, a, h: cp.concatenate([a, h]), lambda cp, a, h: cp.where(a, h, a),
    lambda cp, a, h: a.__iadd__(h), lambda cp, a, h: h.__iadd__(a), lambda cp, a, h: cp.exp(h),
    lambda cp, a, h: cp.sum(h), lambda cp, a, h: cp.add(a, [1.0] * 4), lambda cp, a, h: cp.sum([1.0]),
    lambda cp, a, h: np.concatenate([a, h]), lambda cp, a, h: cp.add.at(a, 0, h), lambda cp, a, h: cp.copyto(a, h),
])  # fmt: skip
def test_mixing_with_numpy_arrays_and_lists_is_refused(cupy, mix):
    with pytest.raises(TypeError):
        mix(cupy, cupy.ones(4), np.ones(4))


def test_python_and_numpy_scalars_mix(cupy):
    a = cupy.ones(4, "float32")
    assert (2 * a).dtype == (a + 1.5).dtype == (np.float32(2) * a).dtype == np.float32
    assert (np.float64(2) * a).dtype == np.float64 and type(np.float64(2) * a) is cupy.ndarray


def test_results_without_axes_are_arrays(cupy):
    a = arange(cupy, 3, 4)
    for one in (a.sum(), cupy.max(a), a[1, 2], a[1][2], cupy.add(a[0, 0], 1), cupy.dot(a[0], a[0]), a.argmax(),
                cupy.allclose(a, a), cupy.count_nonzero(a), a[0, 0] * 2):  # fmt: skip
        assert type(one) is cupy.ndarray and one.shape == ()
    assert a.sum().item() == 66 and float(a[1, 2]) == 6 and bool(a[0, 1]) and int(a[2, 3]) == 11


def test_views_share_memory_and_copies_do_not(cupy):
    a = arange(cupy, 3, 4)
    for view in (a[1:], a.T, a.reshape(4, 3), a.ravel(), a[:, ::-1], cupy.swapaxes(a, 0, 1), cupy.diagonal(a)):
        assert view.base is not None and a.data.ptr <= view.data.ptr < a.data.ptr + a.nbytes
    a[:, ::-1][0, 0] = 50
    assert a[0, 3].item() == 50 and a[:, ::-1].data.ptr == a.data.ptr + 12 and not a.T.flags.c_contiguous
    for new in (a.copy(), a[[0, 1]], a[a > 3], a + 0, a.flatten(), copy.deepcopy(a)):
        assert new.flags.owndata and not a.data.ptr <= new.data.ptr < a.data.ptr + a.nbytes


def test_what_is_computed_is_c_ordered_and_fresh_memory_is_poisoned(cupy):
    a = cupy.asfortranarray(arange(cupy, 3, 4))
    assert a.flags.f_contiguous and (a + a).flags.c_contiguous and a.copy("K").flags.f_contiguous
    assert np.isnan(cupy.empty(5, "float32").get()).all()


def test_indices(cupy):
    a = arange(cupy, 3, 4)
    host = a.get()
    assert (a[cupy.array([2, 0])].get() == host[[2, 0]]).all()
    assert (a[:, np.array([1, 3])].get() == host[:, [1, 3]]).all()
    assert (a[None, ..., cupy.array([[5, -1]])].get() == host[None, ..., [[1, 3]]]).all()  # 5 wraps around
    a[cupy.array([0, 1])] = [1.0, 2.0, 3.0, 4.0]
    a[2] = 9
    assert a[:2].tolist() == [[1, 2, 3, 4]] * 2 and a[2].tolist() == [9] * 4
    for wrong, error in ((5, IndexError), (1.0, TypeError), (cupy.ones(2), IndexError), ((0, 0, 0), IndexError)):
        with pytest.raises(error):
            a[wrong]
    for value, error in ((np.ones(4), ValueError), ([1.0] * 4, TypeError)):
        with pytest.raises(error):
            a[0] = value


def test_taking_wraps_around_and_sorting_is_stable(cupy):
    a = arange(cupy, 2, 3)
    assert a.take(cupy.array([4]), axis=1).tolist() == cupy.take_along_axis(a, cupy.array([[4], [4]]), 1).tolist()
    assert cupy.argsort(cupy.zeros(100)).tolist() == list(range(100))
    with pytest.raises(ValueError):
        cupy.sort(a, kind="mergesort")
    a.sort()


def test_scatter(cupy):
    a = cupy.zeros(3, "float32")
    cupy.add.at(a, cupy.array([0, 0, 2]), cupy.array([1, 2, 3], "float32"))
    assert a.tolist() == [3, 0, 3] and cupy.add.reduce(a).item() == 6 and cupy.multiply.accumulate(a).shape == (3,)
    with pytest.raises(TypeError):
        cupy.add.at(cupy.zeros(3, "int64"), cupy.array([0]), 1)
    for call in (lambda: cupy.multiply.at(a, 0, 1), lambda: cupy.maximum.reduce(a)):
        with pytest.raises(NotImplementedError):
            call()


def test_arguments_that_cupy_does_not_take(cupy):
    a = cupy.ones((2, 2))
    for call in (lambda: cupy.sum(a, where=a > 0), lambda: cupy.max(a, initial=0), lambda: cupy.add(a, a, where=a > 0),
                 lambda: cupy.take(a, cupy.array([0]), mode="clip"), lambda: cupy.RawModule(code="", options=[]),
                 lambda: cupy.logical_not(1j * a)):  # fmt: skip
        with pytest.raises(TypeError):
            call()


@pytest.mark.parametrize("name", ABSENT.split())
def test_absent_names(cupy, name):
    assert not hasattr(cupy, name)


def test_protocols(cupy):
    a = arange(cupy, 2, 3)
    assert type(np.sin(a)) is type(np.concatenate([a, a])) is cupy.ndarray and a.__array_priority__ == 100
    face = a.T.__cuda_array_interface__
    assert (face["version"], face["stream"], face["strides"], face["data"][0]) == (3, 1, (4, 12), a.data.ptr)
    assert a.__cuda_array_interface__["strides"] is None and a.__dlpack_device__() == (2, 0)
    seen = cupy.from_dlpack(a)
    seen[0, 0] = 5
    assert a[0, 0].item() == 5 and seen.data.ptr == a.data.ptr
    if tuple(map(int, np.__version__.split(".")[:2])) >= (2, 1):  # 2.0 takes no device
        assert (np.from_dlpack(a, device="cpu") == a.get()).all()
    with pytest.raises(TypeError, match="CPU arrays cannot be directly imported"):
        cupy.from_dlpack(np.ones(3))
    held = types.SimpleNamespace(__cupy_get_ndarray__=lambda: a)
    assert cupy.asarray(held) is a
    foreign = types.SimpleNamespace(__cuda_array_interface__=a.T.__cuda_array_interface__)
    assert (cupy.asarray(foreign).get() == a.get().T).all()


def test_a_capsule_keeps_its_memory(cupy, pool):
    seen = cupy.from_dlpack(cupy.ones(4, ml_dtypes.bfloat16))
    assert pool.used_bytes() == 512 and seen.dtype == ml_dtypes.bfloat16 and seen.tolist() == [1] * 4
    del seen
    assert pool.used_bytes() == 0


def test_host_copies(cupy):
    a, out = arange(cupy, 2, 3), np.empty((2, 3), "float32")
    assert a.get(out=out) is out and (cupy.asnumpy(a.T, order="F") == out.T).all()
    a.set(out + 1)
    assert a[0, 0].item() == 1
    for wrong, error in ((out.astype("d"), TypeError), (out[:1], ValueError), ([1], TypeError)):
        with pytest.raises(error):
            a.set(wrong)
    pinned = np.frombuffer(cupy.cuda.alloc_pinned_memory(24), "float32", 6)
    assert pinned.flags.writeable and cupy.cuda.alloc_pinned_memory(24).size() == 32


def _wait_on_another_stream(cupy):
    other = cupy.cuda.Stream(non_blocking=True)
    other.wait_event(cupy.cuda.get_current_stream().record())
    other.synchronize()


@pytest.mark.parametrize(
    "wait",
    [
        lambda cupy: cupy.ones(1).get(),
        lambda cupy: cupy.cuda.get_current_stream().synchronize(),
        lambda cupy: cupy.cuda.get_current_stream().record().synchronize(),
        lambda cupy: cupy.cuda.Device().synchronize(),
        lambda cupy: cupy.cuda.runtime.deviceSynchronize(),
        _wait_on_another_stream,
    ],
    ids=["copy", "stream", "event", "device", "runtime", "another stream"],
)
def test_a_wait_is_seen_by_an_event_behind_a_kernel_that_spins(cupy, wait):
    with never_waits(cupy):
        cupy.ones(5) + 1
    with pytest.raises(AssertionError, match="has waited"), never_waits(cupy):
        wait(cupy)


def test_pool_accounting(cupy, pool):
    a, b = cupy.empty(100, "uint8"), cupy.empty(1000, "uint8")
    assert (pool.used_bytes(), pool.total_bytes(), pool.n_free_blocks()) == (1536, 1536, 0)
    first = b.data.ptr
    del b
    assert (pool.used_bytes(), pool.free_bytes(), pool.n_free_blocks()) == (512, 1024, 1)
    c, d = cupy.empty(1, "uint8"), cupy.empty(1, "uint8")  # both from the freed block
    assert c.data.ptr == first and d.data.ptr == first + 512 and pool.total_bytes() == 1536
    del c
    pool.free_all_blocks()
    assert pool.total_bytes() == 1536  # half of the block is in use
    del d
    pool.free_all_blocks()
    assert pool.total_bytes() == pool.used_bytes() == a.data.mem.size == 512
    assert cupy.empty(0).data.ptr == 0 and cupy.get_default_memory_pool() is not pool


def test_memory_limits(cupy, pool):
    pool.set_limit(size=2048)
    kept = cupy.empty(1024, "uint8")
    with pytest.raises(cupy.cuda.memory.OutOfMemoryError, match="Out of memory allocating 1,536 bytes"):
        cupy.empty(1100, "uint8")
    assert issubclass(cupy.cuda.memory.OutOfMemoryError, MemoryError) and pool.get_limit() == 2048
    del kept
    assert cupy.empty(2048, "uint8").size == 2048
    standin.configure(allocation_fails_at=2)
    cupy.empty(1)
    with pytest.raises(MemoryError):
        cupy.empty(1)
    cupy.empty(1)


def test_memory_is_reused_on_its_own_stream_only(cupy, pool):
    with cupy.cuda.Stream(non_blocking=True):
        pointer = cupy.empty(4).data.ptr
    assert cupy.empty(4).data.ptr != pointer


def test_memory_hooks_pair(cupy, pool):
    seen = []

    class Hook(cupy.cuda.MemoryHook):
        def malloc_postprocess(self, device_id, size, mem_size, mem_ptr, pmem_id):
            seen.append((size, mem_size, pmem_id))

        def free_postprocess(self, device_id, mem_size, mem_ptr, pmem_id):
            seen.append((mem_size, pmem_id))

    with Hook():
        cupy.empty(10, "uint8")
    assert seen == [(10, 512, seen[0][2]), (512, seen[0][2])]


def test_streams_are_left_in_the_order_in_which_they_were_entered(cupy):
    first = cupy.cuda.Stream()
    with cupy.cuda.Device(1):
        second = cupy.cuda.Stream()
        second.__enter__()
    first.__enter__()
    first.__exit__()
    second.__exit__()
    for device in (0, 1):
        assert cupy.cuda.get_current_stream(device).ptr == 0
    with pytest.raises(TypeError):
        cupy.cuda.get_current_stream(None)
    with pytest.raises(ValueError, match="Timing"):
        cupy.cuda.Event(interprocess=True)


def test_streams_and_events_are_logged(cupy):
    standin.configure(stream_done=False)
    side, a = cupy.cuda.Stream(non_blocking=True), cupy.ones(4)
    standin.events.clear()
    event = cupy.cuda.get_current_stream().record()
    side.wait_event(event)
    with side:
        b = a + 1
    copied = side.record()
    assert not copied.done and cupy.cuda.get_current_stream() == cupy.cuda.Stream.null
    copied.synchronize()
    assert copied.done
    ours = [(one.kind, one.stream) for one in standin.events if one.kind != "malloc"]
    assert ours == [("record", 0), ("wait", side.ptr), ("op", side.ptr), ("record", side.ptr),
                    ("event synchronize", 0)]  # fmt: skip
    op = next(one for one in standin.events if one.kind == "op")
    assert op.reads == ((a.data.ptr, 32),) and op.writes == ((b.data.ptr, 32),)


def test_devices(cupy):
    assert cupy.cuda.runtime.getDeviceCount() == 2 and cupy.cuda.Device().id == 0
    with cupy.cuda.Device(1) as device:
        a = cupy.ones(3)
        assert device.compute_capability == "90" and device.attributes["MultiProcessorCount"] == 132
    assert a.device.id == 1 and cupy.asarray(a).device.id == 0
    with pytest.raises(ValueError, match="Array device must be same"):
        a + 1
    with pytest.raises(cupy.cuda.runtime.CUDARuntimeError):
        cupy.cuda.Device(2).use()


def test_no_device(cupy):
    standin.configure(devices=0)
    assert not cupy.is_available() and not cupy.cuda.is_available() and cupy.cuda.runtime.driverGetVersion() == 0
    for call in (cupy.cuda.runtime.getDeviceCount, lambda: cupy.empty(0), cupy.cuda.Stream, cupy.cuda.Event,
                 cupy.get_default_memory_pool().used_bytes):  # fmt: skip
        with pytest.raises(cupy.cuda.runtime.CUDARuntimeError, match="cudaErrorInsufficientDriver"):
            call()


@pytest.mark.parametrize("missing", ["nvrtc", "headers"])
def test_no_compiler(cupy, missing):
    standin.configure(**{missing: False})
    assert cupy.is_available()
    a = cupy.zeros(1)
    for call in (a.sum, lambda: a + 1, lambda: cupy.RawModule(code="").get_function("f")):
        with pytest.raises(RuntimeError, match=r"libnvrtc|CUDA headers"):
            call()
