"""Steps that must not wait for the device, on a real one and on the stand-in."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

SPIN = """
extern "C" __global__ void spin(long long cycles) {
    for (long long start = clock64(); clock64() - start < cycles;) {}
}
"""
CYCLES = 3 * 10**9
"""More than a second on any GPU of today."""


@contextmanager
def no_waits() -> Iterator[None]:
    """The host waits for nothing inside: a kernel that takes a second, queued before, is still running at the end.

    ``cupyx.allow_synchronize`` sees waits for a device or an array alone; that of the stand-in, which runs kernels at
    once, sees all.
    """
    cupy, cupyx = pytest.importorskip("cupy"), pytest.importorskip("cupyx")
    if getattr(cupy, "__file__", None) is None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # that it is experimental
            forbidden: Any = cupyx.allow_synchronize(False)
        with forbidden:
            yield
        return
    spinning = cupy.cuda.Event()
    cupy.RawModule(code=SPIN).get_function("spin")((1,), (1,), (CYCLES,))
    spinning.record()
    yield
    assert not spinning.done, "the host has waited for the device"
    spinning.synchronize()
