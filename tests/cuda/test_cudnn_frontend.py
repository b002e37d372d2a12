"""NVIDIA's own frontend of cuDNN, where it is installed: it takes the calls that we make, and the stand-in is like it.

No GPU is needed.  Where cuDNN itself can be loaded, too (it wants libcuda, libcublasLt and libnvrtc), it chooses
engines for an H100 that it only knows by its properties.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import sys
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from shim.standin import libcudnn

from tapegrad.device import cudnn as binding
from tapegrad.device.numerics.windows import Moves

pytestmark = pytest.mark.sampled(1 / 2)

if importlib.util.find_spec("cudnn") is None:
    pytest.skip(f"{binding.PACKAGE} is not installed", allow_module_level=True)

H100 = {
    "deviceVer": 900, "driverVer": 13000, "maxGridSize": [2147483647, 65535, 65535], "maxBlockSize": [1024, 1024, 64],
    "regsPerBlock": 65536, "multiProcessorCount": 132, "smClockRateKHz": 1980000, "memClockRateKHz": 2619000,
    "memoryBusWidth": 5120, "l2CacheSize": 52428800, "warpSize": 32, "maxSharedMemoryPerBlock": 49152,
    "maxSharedMemoryPerBlockOptin": 232448, "reservedSharedMemoryPerBlock": 1024, "maxRegistersPerSM": 65536,
    "maxSharedMemoryPerSM": 233472, "pciDeviceId": 8961, "maxCtasPerSM": 32, "maxThreadsPerBlock": 1024,
    "maxThreadsPerSM": 2048, "isTccDriver": 0, "supportCoopLaunch": 1, "cudaDeviceId": 0,
    "deviceName": "NVIDIA H100 80GB HBM3", "totalGlobalMem": 85000000000,
}  # fmt: skip
DTYPES = [np.dtype("float32"), np.dtype("float16"), np.dtype(ml_dtypes.bfloat16)]
CASES = {
    "3x3": ((32, 64, 56, 56), (64, 64, 3, 3), Moves((1, 1), ((1, 1), (1, 1)), (1, 1), 1)),
    "all at once": ((2, 8, 9, 8), (8, 4, 3, 2), Moves((2, 1), ((1, 2), (0, 1)), (1, 2), 2)),
    "depthwise": ((32, 64, 56, 56), (64, 1, 3, 3), Moves((1, 1), ((1, 1), (1, 1)), (1, 1), 64)),
    "line": ((32, 64, 4096), (64, 64, 5), Moves((1,), ((2, 2),), (1,), 1)),
    "solid": ((4, 16, 32, 32, 32), (16, 16, 3, 3, 3), Moves((1, 1, 1), ((1, 1), (1, 1), (1, 1)), (1, 1, 1), 1)),
}


@pytest.fixture
def real(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The package itself, not the stand-in."""
    if sys.modules.get("cudnn") is libcudnn.module:
        monkeypatch.delitem(sys.modules, "cudnn")
    try:
        return importlib.import_module("cudnn")
    except (ImportError, OSError) as e:  # old ones cannot be imported without cuDNN
        return pytest.skip(f"{binding.PACKAGE} cannot be imported: {e}")


def asked(kind: str, case: str, dtype: np.dtype, tf32: bool = False) -> tuple[Any, ...]:
    """The arguments of ``CuDNN.graph``."""
    x, w, moves = CASES[case]
    y = (x[0], w[0], *moves.over(x[2:], w[2:]).positions)
    shapes = {binding.FORWARD: (x, w, y), binding.IN_IMAGE: (y, w, x), binding.IN_KERNEL: (x, y, w)}[kind]
    return kind, *shapes, dtype, moves._replace(tf32=tf32)


def ours(library: Any, **target: Any) -> Any:
    """Our side of the library, without a device."""
    found = object.__new__(binding.CuDNN)
    found.library, found.target = library, target
    return found


class Stop(Exception):
    """The graph is complete, and would be handed to cuDNN."""


def stopping(real: Any) -> Any:
    """The package, whose graphs go no further than their description; and the last of these."""
    made: list[Any] = []

    class Graph(real.pygraph):  # type: ignore[misc]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            made.append(self)

        def validate(self) -> None:
            raise Stop

    names = {name: getattr(real, name) for name in libcudnn.PUBLIC}
    return SimpleNamespace(**{**names, "pygraph": Graph}), made


def test_the_names_of_the_stand_in_are_there(real: Any) -> None:
    for name in libcudnn.PUBLIC:
        assert hasattr(real, name), name
    for group in ("data_type", "heur_mode", "build_plan_policy", "numerical_note"):
        for name in vars(getattr(libcudnn, group)):
            assert hasattr(getattr(real, group), name), (group, name)
    for name in (n for n in vars(libcudnn.pygraph) if not n.startswith("_") and n not in ("roles", "nbytes")):
        assert callable(getattr(real.pygraph, name)), name
    assert {f"NOT {n}" for n in binding.REFUSED if not hasattr(real.numerical_note, n)} == set()
    assert not issubclass(real.cudnnGraphNotSupportedError, RuntimeError)
    assert not issubclass(libcudnn.cudnnGraphNotSupportedError, RuntimeError)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("kind", [binding.FORWARD, binding.IN_IMAGE, binding.IN_KERNEL])
def test_it_takes_our_graphs(real: Any, kind: str, case: str, dtype: np.dtype) -> None:
    library, made = stopping(real)
    with pytest.raises(Stop):
        ours(library).graph(*asked(kind, case, dtype))
    assert len(made) == 1


def test_it_would_not_take_others(real: Any) -> None:
    library, _ = stopping(real)

    class Wrong(library.pygraph):  # type: ignore[misc,name-defined]
        def conv_fprop(self, **kwargs: Any) -> Any:
            return super().conv_fprop(**kwargs, spacing=[1, 1])

    library.pygraph = Wrong
    with pytest.raises(TypeError):
        ours(library).graph(*asked(binding.FORWARD, "3x3", DTYPES[0]))


@pytest.fixture
def for_h100(real: Any) -> Any:
    """Our side of the library, that makes plans for a GPU which is not here."""
    try:
        version, properties = real.backend_version(), real.create_device_properties(json.dumps(H100))
    except (AttributeError, RuntimeError) as e:
        pytest.skip(f"cuDNN cannot be loaded, or makes no plans without a GPU: {e}")
    if version < 91100:
        pytest.skip("cuDNN makes no plans without a GPU before 9.11")
    return ours(real, device_property=properties, sm_version=900)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("kind", [binding.FORWARD, binding.IN_IMAGE, binding.IN_KERNEL])
def test_it_has_plans_for_an_h100(for_h100: Any, kind: str, case: str, dtype: np.dtype) -> None:
    one, other = (for_h100.graph(*asked(kind, case, dtype)) for _ in range(2))
    elements = sum(int(np.prod(shape)) for shape in asked(kind, case, dtype)[1:4])
    assert 0 <= one.get_workspace_size() <= binding.SPARE + 2 * dtype.itemsize * elements
    assert one.get_workspace_size() == other.get_workspace_size()


@pytest.mark.parametrize("kind", [binding.FORWARD, binding.IN_IMAGE, binding.IN_KERNEL])
def test_float32_proper_takes_another_engine_than_rounded(for_h100: Any, kind: str) -> None:
    plain, rounded = (for_h100.graph(*asked(kind, "3x3", DTYPES[0], tf32)) for tf32 in (False, True))
    if not hasattr(plain, "plans"):
        pytest.skip("this frontend does not say which plan it took")
    names = [graph.get_plan_name_at_index(graph._plan_index) for graph in (plain, rounded)]
    assert names[0] != names[1]
