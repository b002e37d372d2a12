"""What the tests of CUDA share: ways for an array to lie, exact numbers, and a comparison of bits."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from inside import default_as
from shim import happens, standin
from shim.host import why_no_compiler

from tapegrad.device import cuda as cuda_module


def _repeated(x: Any, shape: tuple[int, ...]) -> Any:
    from cupy import broadcast_to  # the stand-in

    return np.broadcast_to(x, shape) if isinstance(x, np.ndarray) else broadcast_to(x, shape)


DTYPES = ("float32", "float16", "float64", "complex64", "int16")
VIEWS = {
    "contiguous": lambda x: x,
    "misaligned": lambda x: x.reshape(-1)[1:],
    "misaligned rows": lambda x: x.reshape(-1)[1:97].reshape(12, 8),
    "step": lambda x: x[:, ::2],
    "inner rows": lambda x: x[:, 1:5],
    "aligned inner rows": lambda x: x[:, 4:12],
    "reversed": lambda x: x[::-1],
    "both reversed": lambda x: x[::-1, ::-1],
    "transposed": lambda x: x.T,
    "column": lambda x: x[:, 3:4],
    "five dimensions": lambda x: x.reshape(2, 3, 2, 4, 4).transpose(3, 0, 4, 2, 1),
    "six, two swapped": lambda x: x.reshape(2, 3, 2, 2, 2, 4).swapaxes(1, 3)[:, ::-1],
    "scalar": lambda x: x[2, 3, ...],
    "repeated rows": lambda x: _repeated(x[:1], (5, 16)),
    "repeated columns": lambda x: _repeated(x[:, :1], (12, 8)),
    "one place": lambda x: _repeated(x[1, 2, ...], (3, 7)),
    "empty": lambda x: x[:0],
}


def numbers(shape: tuple[int, ...] | int, dtype: str, seed: int = 0) -> np.ndarray:
    """Small numbers that are exact in every dtype."""
    drawn = np.random.default_rng(seed).integers(-8, 9, shape)
    return (drawn + 1j * drawn[::-1] if "complex" in dtype else drawn).astype(dtype)


def arithmetic(x: Any) -> Any:
    """Operations that IEEE arithmetic rounds in one way only."""
    return (x * x + 3) * x - x


def same_bits(got: Any, wanted: Any) -> None:
    """Equal shapes, dtypes and values, NaN where NaN is; two zeros may differ in sign."""
    got, wanted = (np.asarray(t.numpy() if hasattr(t, "numpy") else t) for t in (got, wanted))
    assert (got.shape, got.dtype) == (wanted.shape, wanted.dtype)
    np.testing.assert_array_equal(got, wanted)


@contextmanager
def installed() -> Iterator[ModuleType]:
    """The stand-in is CuPy and the CPU the default device; skips the test where kernels cannot be compiled.

    A race among what was put on streams inside is an error in the end.
    """
    if why := why_no_compiler():
        pytest.fail(why) if os.environ.get("TAPEGRAD_REQUIRE_SHIM") == "1" else pytest.skip(why)
    with default_as("cpu"):
        module = standin.install()
        cuda_module.forget()
        try:
            yield module
            happens.check()
        finally:
            standin.uninstall()
            cuda_module.forget()


LIBRARIES = "install the CUDA libraries beside CuPy: pip install 'cupy-cuda12x[ctk]'"


def broken(monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    """Make one thing of an installation go wrong."""
    find, load = importlib.util.find_spec, importlib.import_module
    if fault == "no cupy":
        monkeypatch.delitem(sys.modules, "cupy")
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "cupy" else find(name))
    elif fault == "import error":
        monkeypatch.delitem(sys.modules, "cupy")
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: object() if name == "cupy" else find(name))

        def fail(name: str) -> ModuleType:
            if name != "cupy":
                return load(name)
            raise OSError("libcublas.so.12: cannot open shared object file")

        monkeypatch.setattr(importlib, "import_module", fail)
    elif fault == "no driver":
        standin.configure(devices=0)
    elif fault == "old driver":
        standin.configure(devices=0)
        monkeypatch.setattr(sys.modules["cupy"].cuda.runtime, "driverGetVersion", lambda: 11040)
    elif fault == "driver 12":
        standin.configure(devices=0)
        monkeypatch.setattr(sys.modules["cupy"].cuda.runtime, "driverGetVersion", lambda: 12080)
    elif fault == "no device":
        monkeypatch.setattr(sys.modules["cupy"].cuda.runtime, "getDeviceCount", lambda: 0)
    elif fault == "idle kernel":
        monkeypatch.setattr(sys.modules["cupy"], "RawModule", lambda **options: SimpleNamespace(
            get_function=lambda name: lambda *args: None))  # fmt: skip
    else:
        standin.configure(**{fault: False})


FAULTS = {
    "no cupy": ("CuPy is not installed", "pip install 'tapegrad[cuda12]'"),
    "import error": ("CuPy does not import: libcublas.so.12", "reinstall it"),
    "no driver": ("no CUDA device: cudaErrorInsufficientDriver", "install an NVIDIA driver"),
    "old driver": ("no CUDA device: cudaErrorInsufficientDriver", "update the driver (it offers CUDA 11)"),
    "driver 12": (
        "no CUDA device: cudaErrorInsufficientDriver",
        "update the driver (it offers CUDA 12), or install CuPy for it: pip install 'tapegrad[cuda12]'",
    ),
    "no device": ("the driver sees no CUDA device", "check CUDA_VISIBLE_DEVICES and nvidia-smi"),
    "nvrtc": ('a kernel cannot be run: RuntimeError: Failure finding "libnvrtc.so"', LIBRARIES),
    "headers": ("a kernel cannot be run: RuntimeError: Failed to find CUDA headers", LIBRARIES),
    "idle kernel": ("a kernel cannot be run: KernelError: the kernel ran and did nothing", LIBRARIES),
}
