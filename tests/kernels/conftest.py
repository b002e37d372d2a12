"""A device whose arrays are NumPy's and whose kernels run on the CPU, through the host shim."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import numpy as np
import pytest
from shim import host

from tapegrad.device import traffic
from tapegrad.device.checks import RECORD, Checks


@pytest.fixture(autouse=True)
def notes() -> Iterator[None]:
    """Nobody counts the passes over memory of kernels that tests launch themselves."""
    yield
    traffic.taken()


@cache
def _module(text, options, check):
    return host.HostModule(text, options, check=check)


class HostDevice:
    """What launch code needs of a device; fresh memory is full of rubbish, and a launch raises what it finds wrong."""

    cudnn = None

    def __init__(self, check=False):
        self.xp = np
        self.check = check
        memory = np.zeros(RECORD.itemsize, np.uint8)
        host.register(memory.ctypes.data, memory.nbytes)
        self.checks = Checks(memory)

    def empty(self, shape, dtype):
        found = np.empty(shape, dtype)
        found.view(np.uint8).fill(0xA5) if found.ndim else found.fill(1)
        return found

    def compile(self, text, name, options):
        return _module(text, tuple(options), self.check).get_function(name)

    def launch(self, function, grid, block, args, shared=0):
        function(grid, block, args, shared_mem=shared)
        self.checks.look()


@pytest.fixture(scope="session")
def emulated():
    """The device."""
    if (why := host.why_no_compiler()) is not None:
        pytest.skip(why)
    return HostDevice()


@pytest.fixture(scope="session")
def watched():
    """The same with every access to memory checked, for small sizes."""
    if (why := host.why_no_compiler()) is not None:
        pytest.skip(why)
    return HostDevice(check=True)
