"""What every test can ask for (a device, a seeded generator), and why a test that needs a GPU is skipped."""

from __future__ import annotations

import functools
import gc
import os
import time
from collections.abc import Iterator

import numpy as np
import pytest

pytest_plugins = ["tiers"]


@functools.cache
def why_no_cuda() -> str | None:
    """The reason why no CUDA kernel runs here, or None where one does."""
    try:
        import cupy
    except Exception as error:  # a broken installation raises more than ImportError
        return f"CuPy cannot be imported: {error}"
    try:
        cupy.zeros(1).sum().item()
    except Exception as error:
        return f"no CUDA kernel can be launched: {error}"
    return None


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """A process for each processor, up to eight, where the whole suite is run; else this one alone.

    One more in the slow tier, whose tests of ranks wait for deadlines.
    """
    if config.args != config.getini("testpaths"):
        return 0
    present = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(8, present) + (config.option.markexpr == "slow")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    gpu_items = [item for item in items if item.get_closest_marker("gpu")]
    if gpu_items and (why := why_no_cuda()):
        for item in gpu_items:
            item.add_marker(pytest.mark.skip(reason=why))


@pytest.fixture
def kernels_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Captured functions and regions wait for their kernels, where there is machine code."""
    monkeypatch.setenv("TAPEGRAD_NATIVE", "2")


@pytest.fixture(autouse=True, scope="module")
def old_objects() -> None:
    """What earlier modules have left, and what was made while modules were imported, is no part of what is alive:
    constants are made anew, and the ledger forgets all else.  The collector need not look at it each time.
    """
    from inside import forget_constants

    from tapegrad.core.storage import METER
    from tapegrad.tracing.phase import STEPS

    STEPS.restart()
    forget_constants()
    gc.collect()
    gc.freeze()
    METER.forget(METER.storages)


@pytest.fixture(autouse=True, scope="session")
def threshold() -> None:
    """Arrays of 128 KiB are lazy in tests, so that regions are tested on arrays that are quick to compute."""
    from tapegrad.engine import region

    region.set_small(16384)


@pytest.fixture(autouse=True, scope="module")
def no_threads() -> Iterator[None]:
    """No module leaves threads that have used tensors: later tests ask whether they are alone."""
    from tapegrad.core.threads import unshared

    yield
    for _ in range(50):  # of a thread that ends
        if unshared(lambda: True, lambda: None):
            return
        gc.collect()
        time.sleep(0.1)
    raise AssertionError("threads that have used tensors go on after these tests")


@pytest.fixture
def no_collection() -> Iterator[None]:
    """The test's counts of bytes do not change by what the collector frees meanwhile, of other tests, say."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.fixture(autouse=True)
def no_notes() -> Iterator[None]:
    """No test leaves notes of passes over memory, which a later test would count as its own."""
    from tapegrad.device import traffic

    yield
    assert not traffic.taken(), "passes over memory were noted, and nobody has counted or dropped them"


@pytest.fixture(autouse=True)
def no_wrong_values() -> Iterator[None]:
    """No test leaves a wrong value in a device's record, which a later test that reads a value would raise."""
    from tapegrad.device import cuda
    from tapegrad.errors import DeviceError

    yield
    for device in cuda.known():
        try:
            device.wait()
        except DeviceError:  # a kernel has failed: xdist replaces this process, in which no other can run
            if "PYTEST_XDIST_WORKER" in os.environ:
                os._exit(1)
            raise
        device.checks.clear()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "device" in metafunc.fixturenames:
        present = ["cpu"] if why_no_cuda() else ["cpu", "cuda"]
        metafunc.parametrize("device", present, indirect=True)


@pytest.fixture
def device(request: pytest.FixtureRequest) -> Iterator[str]:
    """Runs the test once per device that is present, with that device as the default; yields its name."""
    import tapegrad as tg

    with tg.device(request.param):
        yield request.param


@pytest.fixture
def rng() -> np.random.Generator:
    """A generator with a fixed seed, fresh for every test."""
    return np.random.default_rng(20260101)


@pytest.fixture(autouse=True)
def default_dtype() -> Iterator[None]:
    """Python floats are float32 again after a test that has set another default."""
    yield
    import tapegrad as tg

    tg.set_default_dtype("float32")
