"""CUDA without a GPU: CuPy is the stand-in for the length of one test, and the default device stays the CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from cuda_cases import installed
from shim import standin

from tapegrad.device import Device, asdevice
from tapegrad.tensor import Tensor, from_array


@pytest.fixture
def cupy() -> Iterator[ModuleType]:
    """The stand-in, installed and not yet looked at; skips the test where kernels cannot be compiled."""
    with installed() as module:
        yield module


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
