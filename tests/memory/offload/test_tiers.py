"""Bytes that leave a device's memory and come back with the same bits."""

from __future__ import annotations

import errno
import gc
import os
import re
import tempfile
import threading
import warnings

import ml_dtypes
import numpy as np
import pytest

from tapegrad.core.aval import shaped
from tapegrad.core.buffer import Buffer
from tapegrad.core.node import leaf
from tapegrad.device import CPU
from tapegrad.errors import OffloadError
from tapegrad.memory.offload import offload, tiers
from tapegrad.memory.offload.offload import default_tier

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


def test_prefetch_allocates_once_and_get_hands_it_over(disk, monkeypatch):
    made = []
    empty = type(CPU).empty
    monkeypatch.setattr(type(CPU), "empty", lambda *a: made.append(1) or empty(*a))
    slot = disk.put(filled(random((100,), "float64")))
    slot.prefetch()
    slot.prefetch()
    assert len(made) == 1, "the caller has reserved the bytes by then"
    a = slot.get()
    assert len(made) == 1
    b = slot.get()
    assert len(made) == 2 and not np.shares_memory(a, b)


def test_prefetch_reads_in_another_thread(disk, monkeypatch):
    reads, go = [], threading.Event()
    load = type(CPU).load

    def slow(*args):
        reads.append(threading.get_ident())
        assert go.wait(30)
        load(*args)

    monkeypatch.setattr(type(CPU), "load", slow)
    x = random((100,), "float64")
    slot = disk.put(filled(x))
    slot.prefetch()  # would wait for ever, were it read here
    go.set()
    same_bits(slot.get(), x)
    assert reads == [i for i in reads if i != threading.get_ident()] and len(reads) == 1


def test_places_are_reused_after_drop(disk):
    for i in range(20):
        slots = [disk.put(filled(random((n,), "uint8", i))) for n in (10 * PAGE, 10 * PAGE - 7, 3 * PAGE)]
        for slot in slots:
            slot.drop()
            slot.drop()
    assert disk.bytes_held == 0
    taken = [file.end - file.size * len(file.free) for file in disk._files.values()]
    assert taken == [0, 0] and sum(file.end for file in disk._files.values()) <= 2 << 20


def test_places_do_not_overlap(disk):
    sizes = [1, PAGE, PAGE + 1, 300, 5 * PAGE, 3 << 20] * 5
    slots = [(disk.put(filled(random((n,), "uint8", i))), n, i) for i, n in enumerate(sizes)]
    for slot, n, i in slots:
        same_bits(slot.get(), random((n,), "uint8", i))
    assert max(file.end for file in disk._files.values()) == 5 * (3 << 20), "a large value takes its own bytes only"


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
    disk._reader.shutdown()
    gc.collect()
    assert disk.bytes_held == 0
    [file] = disk._files.values()
    assert len(file.free) * file.size == file.end, "every place is free again"


def test_a_dropped_slot_says_so(disk):
    slot = disk.put(filled(np.ones(5)))
    slot.prefetch()
    slot.drop()
    for use in (slot.get, slot.prefetch):
        with pytest.raises(OffloadError, match=r"slot of float64\[5\] was dropped"):
            use()


def test_drop_waits_for_the_reader(disk, monkeypatch):
    """Or another slot's bytes would be read into the array."""
    began, go, load = threading.Event(), threading.Event(), type(CPU).load

    def slow(*args):
        began.set()
        assert go.wait(30)
        load(*args)

    monkeypatch.setattr(type(CPU), "load", slow)
    slot = disk.put(filled(np.ones(5)))
    slot.prefetch()
    assert began.wait(30)
    dropping = threading.Thread(target=slot.drop)
    dropping.start()
    dropping.join(0.05)
    [file] = disk._files.values()
    lent = len(file.free)
    assert dropping.is_alive()
    go.set()
    dropping.join(30)
    assert len(file.free) == lent + 1


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


def test_a_file_grows_from_where_it_ends_by_one_large_place_or_many_small_ones(disk, monkeypatch):
    slots = [disk.put(filled(np.zeros(n, "uint8"))) for n in (3 << 20, 1 << 20, 512 << 10, 1)]
    grown = {file.size: file.end // file.size for file in disk._files.values()}
    assert [grown[size] for size in sorted(grown)] == [(1 << 20) // min(grown), 2, 1, 1] and len(slots) == 4
    monkeypatch.delattr(os, "posix_fallocate", raising=False)
    with tempfile.TemporaryFile(buffering=0) as file:
        for start, size, end in ((0, 1, 1), (1, 99, 100), (100, 3 << 20, (3 << 20) + 100), (200, 100, (3 << 20) + 100)):
            file.seek(7)
            tiers._extend(file, start, size)
            assert os.fstat(file.fileno()).st_size == end


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
    disk._reader.shutdown()
    gc.collect()
    assert disk.bytes_held == 0


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


@pytest.mark.parametrize(("nbytes", "told"), [(1023, 1023), (1024, 1024), (1025, None)])
def test_copies_under_way_are_waited_for_if_what_they_hold_suffices(nbytes, told, monkeypatch):
    """Else what they are done with is let go of."""

    class Copying:
        kept_bytes = 1024

        def reclaim(self, wanted: int | None) -> int:
            self.wanted, self.kept_bytes = wanted, 0
            return 1024

    tier = Copying()
    monkeypatch.setattr(offload, "_used", {tier})
    assert offload.Offloads().give_way(nbytes) and tier.wanted == told
    assert not offload.Offloads().give_way(nbytes)
