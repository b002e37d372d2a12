"""Whether CUDA can be used here: by trying, not by looking for files."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from typing import Any

from tapegrad.errors import KernelError

_PROBE = 'extern "C" __global__ void tg_probe(int* x) { *x = 42; }'


class Probe:
    """Whether CUDA is available, and if not, why and what mends it."""

    def __init__(self, cupy: Any, count: int, why: str = "", fix: str = "") -> None:
        self.cupy = cupy
        self.count = count
        self.why = why
        self.fix = fix


def look() -> Probe:
    """Import CuPy, ask the driver, compile a kernel and launch it."""
    if "cupy" not in sys.modules and importlib.util.find_spec("cupy") is None:
        return Probe(None, 0, "CuPy is not installed", "pip install 'tapegrad[cuda12]' (or [cuda13])")
    try:
        cupy = importlib.import_module("cupy")
    except Exception as e:  # ImportError, OSError, a missing library: each means the same here
        return Probe(None, 0, f"CuPy does not import: {e}", "reinstall it: pip install 'tapegrad[cuda12]'")
    try:
        count = cupy.cuda.runtime.getDeviceCount()
    except Exception as e:
        if "InitializationError" in str(e):  # the parent used CUDA before a fork
            return Probe(cupy, 0, f"CUDA cannot be initialised: {e}", "if this process was forked, start it by 'spawn'")
        version = cupy.cuda.runtime.driverGetVersion()
        fix = "install an NVIDIA driver"
        if version:
            fix = f"update the driver (it offers CUDA {version // 1000})"
            if version // 1000 == 12:  # under CuPy for CUDA 13
                fix += ", or install CuPy for it: pip install 'tapegrad[cuda12]'"
        return Probe(cupy, 0, f"no CUDA device: {e}", fix)
    if not count:
        return Probe(cupy, 0, "the driver sees no CUDA device", "check CUDA_VISIBLE_DEVICES and nvidia-smi")
    try:
        x = cupy.zeros(1, dtype="int32")
        cupy.RawModule(code=_PROBE).get_function("tg_probe")((1,), (1,), (x,))
        if int(x[0]) != 42:
            raise KernelError("the kernel ran and did nothing")
    except Exception as e:
        fix = "install the CUDA libraries beside CuPy: pip install 'cupy-cuda12x[ctk]' (or cupy-cuda13x[ctk])"
        return Probe(cupy, 0, f"a kernel cannot be run: {type(e).__name__}: {e}", fix)
    return Probe(cupy, count)


def is_array(x: object) -> bool:
    """Whether ``x`` is a CuPy array."""
    cupy = sys.modules.get("cupy")  # such an array exists only where CuPy has been imported
    return cupy is not None and isinstance(x, cupy.ndarray)
