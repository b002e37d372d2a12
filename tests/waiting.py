"""Detect waits of the host for a device, on a real one and on the stand-in."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

_SPIN = """extern "C" __global__ void spin(long long cycles) {
#ifdef __CUDA_ARCH__
    long long start = clock64();
    while (clock64() - start < cycles) {}
#endif
}"""
_CYCLES = 3_000_000_000
"""More than a second on any GPU of today, so that what is launched meanwhile need not be quick."""


@contextmanager
def never_waits(cupy: Any) -> Iterator[None]:
    """Fail if the block waits for the current device: for its stream, an event, a copy or the whole device.

    A kernel that spins is launched before it, and must still be running at its end.  ``cupyx.allow_synchronize`` sees
    ``ndarray.get`` and ``Device.synchronize`` alone.
    """
    spin = cupy.RawModule(code=_SPIN).get_function("spin")
    spin((1,), (1,), (np.int64(0),))
    cupy.cuda.get_current_stream().synchronize()
    event = cupy.cuda.Event(disable_timing=True)
    spin((1,), (1,), (np.int64(_CYCLES),))
    event.record()
    yield
    assert not event.done, "the host has waited for the device (or took a second)"
    event.synchronize()
