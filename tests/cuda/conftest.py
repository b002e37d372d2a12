"""CUDA without a GPU: CuPy is the stand-in for the length of one test, and the default device stays the CPU."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from shim import standin
from shim.host import why_no_compiler

from tapegrad.device import CPU, Device, _default, asdevice
from tapegrad.device import cuda as cuda_module
from tapegrad.tensor import Tensor, from_array


@pytest.fixture
def cupy() -> Iterator[ModuleType]:
    """The stand-in, installed and not yet looked at; skips the test where kernels cannot be compiled."""
    if why := why_no_compiler():
        pytest.fail(why) if os.environ.get("TAPEGRAD_REQUIRE_SHIM") == "1" else pytest.skip(why)
    default = list(_default)
    _default[:] = [CPU]
    module = standin.install()
    cuda_module.forget()
    try:
        yield module
    finally:
        standin.uninstall()
        cuda_module.forget()
        _default[:] = default


@pytest.fixture
def cuda(cupy: ModuleType) -> Device:
    """The first CUDA device, with empty logs."""
    device = asdevice("cuda")
    standin.events.clear()
    standin.launches.clear()
    return device


@pytest.fixture
def on(cuda: Device) -> Callable[..., Tensor]:
    """``on(device, values, view)``: a tensor on a view of a fresh copy of ``values``, wherever the device is."""

    def make(device: Device, values: Any, view: Callable = lambda x: x) -> Tensor:
        return from_array(view(device.array(np.asarray(values))), device)

    return make
