"""Bytes that leave a device's memory and come back with the same bits."""

from __future__ import annotations

import errno
import gc
import os
import re
import tempfile
import threading
import time
import warnings

import ml_dtypes
import numpy as np
import pytest

from tapegrad.core.aval import shaped
from tapegrad.core.buffer import Buffer
from tapegrad.core.node import leaf
from tapegrad.device import CPU
from tapegrad.errors import OffloadError
from tapegrad.remat.offload import tiers
from tapegrad.remat.offload.offload import default_tier

PAGE = 4096


def filled(array: np.ndarray) -> Buffer:
    return Buffer(array, leaf(shaped(array.shape, array.dtype, CPU)))


def random(shape: tuple[int, ...], dtype: object, seed: int = 0) -> np.ndarray:
    """Any bits at all, NaNs among them."""
    dtype = np.dtype(dtype)
    raw = np.random.default_rng(seed).integers(0, 2 if dtype.kind == "b" else 256, shape + (dtype.itemsize,), np.uint8)
    return raw.view(dtype)[..., 0]


def same_bits(got: np.ndarray, wanted: np.ndarray) -> None:
    assert (got.shape, got.dtype) == (wanted.shape, wanted.dtype)
    assert got.tobytes() == wanted.tobytes()


@pytest.fixture
def disk(tmp_path):
    return tiers.Disk(tmp_path)


@pytest.mark.parametrize("prefetch", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bool", "complex128", "float16", "int8", ml_dtypes.bfloat16])
@pytest.mark.parametrize("shape", [(), (0, 3), (1,), (33, 65), (2, 3, 4, 5)])
def test_bits_come_back(disk, shape, dtype, prefetch):
    x = random(shape, dtype)
    slot = disk.put(filled(x))
    assert slot.nbytes == x.nbytes == disk.bytes_held == disk.bytes_written
    for _ in range(2):
        if prefetch:
            slot.prefetch()
        y = slot.get()
        same_bits(y, x)
        assert y.flags.c_contiguous and y.flags.writeable and not np.shares_memory(x, y)
    assert disk.bytes_read == 2 * x.nbytes


@pytest.mark.parametrize(
    "view", [lambda x: x.T, lambda x: x[::-1, 1::3], lambda x: np.broadcast_to(x[:1], x.shape), lambda x: x[3:4, 5]]
)
def test_arrays_that_are_not_contiguous(disk, view):
    x = view(random((40, 50), "float32"))
    same_bits(disk.put(filled(x)).get(), x)


def test_what_was_put_is_not_what_the_array_becomes(disk):
    x = np.ones(1000)
    slot = disk.put(filled(x))
    x[:] = 2
    assert (slot.get() == 1).all()
    slot.get()[:] = 3
    assert (slot.get() == 1).all()


def test_each_get_gives_memory_of_its_own(disk):
    x = random((100,), "float64")
    slot = disk.put(filled(x))
    slot.prefetch()
    slot.prefetch()
    a, b = slot.get(), slot.get()
    assert not np.shares_memory(a, b)
    a[:] = 0.0
    same_bits(b, x)


def file_bytes(where) -> int:
    """Return the size of the files that this process has open in a directory, which have no names."""
    fds = [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")]
    return sum(os.stat(fd).st_size for fd in fds if os.path.islink(fd) and os.readlink(fd).startswith(str(where)))


def held_in_the_end(disk) -> int:
    """Return the bytes that are held once the reader has let go of what it had in hand."""
    for _ in range(200):
        gc.collect()
        if not disk.bytes_held:
            break
        time.sleep(0.01)
    return disk.bytes_held


def test_places_are_reused_after_drop(disk, tmp_path):
    for i in range(20):
        slots = [disk.put(filled(random((n,), "uint8", i))) for n in (10 * PAGE, 10 * PAGE - 7, 3 * PAGE)]
        for slot in slots:
            slot.drop()
            slot.drop()
    assert disk.bytes_held == 0
    if os.path.isdir("/proc/self/fd"):
        assert file_bytes(tmp_path) <= 2 << 20


def test_places_do_not_overlap(disk, tmp_path):
    sizes = [1, PAGE, PAGE + 1, 300, 5 * PAGE, 3 << 20] * 5
    slots = [(disk.put(filled(random((n,), "uint8", i))), n, i) for i, n in enumerate(sizes)]
    for slot, n, i in slots:
        same_bits(slot.get(), random((n,), "uint8", i))
    if os.path.isdir("/proc/self/fd"):
        assert file_bytes(tmp_path) <= 5 * (3 << 20) + (5 << 20), "a large value takes its own bytes only"


def test_slots_that_are_garbage_are_dropped(disk):
    def fail():
        slot = disk.put(filled(np.ones(5000)))
        slot.prefetch()
        raise KeyError

    for _ in range(5):
        with pytest.raises(KeyError):
            fail()
        slot = disk.put(filled(np.ones(5000)))
        slot.prefetch()
        slot.get()
        del slot
        gc.collect()
    assert held_in_the_end(disk) == 0


def test_a_dropped_slot_says_so(disk):
    slot = disk.put(filled(np.ones(5)))
    slot.prefetch()
    slot.drop()
    for use in (slot.get, slot.prefetch):
        with pytest.raises(OffloadError, match=r"slot of float64\[5\] was dropped"):
            use()


def test_nothing_is_left_behind(tmp_path):
    disk = tiers.Disk(tmp_path)
    slot = disk.put(filled(np.ones(50_000)))
    if os.name == "posix":
        assert list(tmp_path.iterdir()) == [], "the files have no names: not even a crash leaves one"
    before = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else None
    slot.prefetch()
    slot.get()
    del slot, disk
    gc.collect()
    if before is not None:
        assert len(os.listdir("/proc/self/fd")) < before, "the file is closed, and with that gone"


def test_a_disk_in_a_cycle_of_garbage_closes_its_files(tmp_path):
    disk = tiers.Disk(tmp_path)
    disk.put(filled(np.ones(5)))
    disk.itself = disk
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        del disk
        gc.collect()
    assert said == []


@pytest.mark.skipif(not os.path.exists("/proc/self/smaps_rollup"), reason="needs Linux's account of mapped pages")
def test_what_was_written_does_not_count_as_our_memory(disk):
    def resident() -> int:
        with open("/proc/self/status") as file:
            return sum(int(line.split()[1]) << 10 for line in file if line.startswith(("RssFile", "RssShmem")))

    x = np.ones(2 << 20)
    before = resident()
    slot = disk.put(filled(x))
    assert resident() - before < x.nbytes // 4
    slot.get()
    assert resident() - before < x.nbytes // 4


def test_a_full_disk(disk, tmp_path):
    """A limit on the size of files is what a test can have of a full disk; writing through a mapping would be fatal."""
    resource = pytest.importorskip("resource", reason="has no limits of files")
    kept = disk.put(filled(np.arange(500.0)))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
    try:
        with pytest.raises(
            OffloadError, match=r"no room for float64\[1000, 1000\], 8000000 bytes, in '.*with more room"
        ):
            disk.put(filled(np.ones((1000, 1000))))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert disk.bytes_held == disk.bytes_written == 4000
    assert (kept.get() == np.arange(500)).all()
    assert disk.put(filled(np.ones((1000, 1000)))).get().sum() == 1e6, "it is taken up once there is room"


@pytest.mark.parametrize("given", [False, True])
def test_the_error_of_a_full_disk_names_it(given, tmp_path, monkeypatch):
    def full(*args, **options):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    where = str(tmp_path) if given else tempfile.gettempdir()
    disk = tiers.Disk(tmp_path if given else None)
    monkeypatch.setattr(os, "posix_fallocate", full, raising=False)
    text = re.escape(f"in {where!r}: No space left on device; 0 bytes are taken there")
    with pytest.raises(OffloadError, match=text):
        disk.put(filled(np.ones(10)))
    monkeypatch.setattr(tempfile, "TemporaryFile", full)
    with pytest.raises(OffloadError, match=re.escape(f"in {where!r} to offload to: No space")):
        disk.put(filled(np.ones(10_000)))


def test_without_fallocate(disk, monkeypatch):
    monkeypatch.delattr(os, "posix_fallocate", raising=False)
    x = random((3 << 20,), "uint8")
    slots = [disk.put(filled(x)), disk.put(filled(x[::-1]))]
    same_bits(slots[0].get(), x)
    same_bits(slots[1].get(), x[::-1])


def test_directories_that_do_not_serve(tmp_path):
    (tmp_path / "file").write_text("")
    for where in (tmp_path / "nowhere", tmp_path / "file"):
        with pytest.raises(OffloadError, match="cannot make a file in '.*(nowhere|file)' to offload to"):
            tiers.Disk(where)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_another_process_is_refused(disk, monkeypatch):
    slot = disk.put(filled(np.ones(5)))
    monkeypatch.setattr(os, "getpid", lambda: -1)
    for use in (slot.get, slot.prefetch, lambda: disk.put(filled(np.ones(5)))):
        with pytest.raises(OffloadError, match="belongs to the process that forked this one"):
            use()


def test_many_threads(disk):
    failures = []

    def work(seed):
        try:
            for i in range(30):
                x = random((100 + seed * 900 + i,), "float32", seed)
                slot = disk.put(filled(x))
                if i % 2:
                    slot.prefetch()
                same_bits(slot.get(), x)
                if i % 3:
                    slot.drop()
        except BaseException as e:
            failures.append(e)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not failures
    assert held_in_the_end(disk) == 0


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_a_forked_child_has_tiers_of_its_own():
    x = filled(np.arange(9.0))
    default_tier(CPU).put(x)
    child = os.fork()
    if not child:
        try:
            os._exit(int(default_tier(CPU).put(x).get().sum() != 36))
        finally:
            os._exit(1)
    assert os.waitpid(child, 0)[1] == 0


def test_the_cpu_offloads_to_disk():
    for tier in (tiers.host(CPU), tiers.default(CPU)):
        assert type(tier) is tiers.Disk
        assert tier.reclaim() == tier.reclaim(1000) == 0
