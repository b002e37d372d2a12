"""Generated kernels as NVRTC's PTX against the host: every form of a loop in every dtype, every way an array may lie,
draws, functions of half types, and an index of 64 bits."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from cuda_cases import VIEWS, arithmetic, installed, numbers
from half_cases import CASES, HALVES, derivatives
from shim import nvrtc

import tapegrad as tg
from kernels import test_compiled as compiled
from tapegrad.core.state import during
from tapegrad.device import asdevice
from tapegrad.engine.cuda import launch, layout
from tapegrad.tensor import from_array

from .twin import Bound, Record, Watch, watching

pytestmark = pytest.mark.slow

LOOSE = Bound(32, None)
"""What regions of CUDA's functions may differ by, in units of the largest result: powers make errors larger."""
FEW = ("contiguous", "broadcast", "row of a block", "columns in parts", "drawn", "drawn, 16 bits")
"""The forms that are also compiled for compute_90."""


@pytest.fixture(scope="module", autouse=True)
def cuda() -> Iterator[Any]:
    """The stand-in's device."""
    nvrtc.library()
    with installed():
        yield asdevice("cuda")


def evaluated(makers: dict[str, Any], arches: tuple[int, ...] = (80,)) -> Record:
    """Each value on the stand-in, its launches compared."""
    record = Record()
    for name, make in makers.items():
        before = sum(record.runs.values())
        with watching(Watch(arches, lambda kernel: LOOSE, record)), np.errstate(all="ignore"):
            for y in make():
                y.numpy()
        assert sum(record.runs.values()) > before, f"{name} launched nothing"
    assert not record.left_out
    return record


@pytest.mark.parametrize("dtype", compiled.DTYPES)
def test_every_form(dtype):
    forms = {**compiled.FORMS, **(compiled.MATHS if dtype in compiled.REAL else {})}
    if dtype not in ("float32", "bfloat16"):  # the others differ in the arithmetic, not in the loop
        forms = {name: make for name, make in forms.items() if name not in ("misaligned", "middle axes", "stepping")}
    record = evaluated({name: lambda make=make: [make(dtype)] for name, make in forms.items()})
    assert "tg_fused" in record.names


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_forms_for_newer_devices(dtype):
    evaluated({name: lambda name=name: [compiled.FORMS[name](dtype)] for name in FEW}, (90,))


def test_draws():
    evaluated({name: lambda make=make: [make("float32")] for name, make in compiled.DRAWS.items()})


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_any_layout(dtype, cuda):
    make = lambda view: [arithmetic(from_array(view(cuda.array(numbers((12, 16), dtype))), cuda))]
    evaluated({name: lambda view=view: make(view) for name, view in VIEWS.items() if name != "empty"})


def test_index_of_64_bits(cuda, monkeypatch):
    monkeypatch.setattr(layout, "WIDE_INDEX", 1)
    monkeypatch.setattr(launch, "prepared", {})
    x = lambda name: from_array(VIEWS[name](cuda.array(numbers((10, 8), "float32"))), cuda)
    functions = {"each": arithmetic, "columns": lambda x: tg.sum(x * x, axis=0), "rows": lambda x: tg.max(x, axis=1)}
    ways = [(way, name) for way in ("contiguous", "transposed", "step") for name in functions]
    record = evaluated({f"{name}, {way}": lambda way=way, name=name: [functions[name](x(way))] for way, name in ways})
    assert any("typedef long long tg_index;" in text for text in record.programs.values())


@pytest.mark.parametrize("half", HALVES)
def test_functions_of_half_types(half, cuda):
    """Values and first derivatives of every function, all in few kernels, at each 37th number."""
    with np.errstate(all="ignore"):
        x = np.arange(0, 65536, 37, dtype=np.uint16).view(HALVES[half])
        size = np.abs(x.astype(np.float64))
        x = x[(size < 1e15) & ((size > 1e-37) | (size == 0))]  # on a device float32 has no subnormal numbers

    def all_of_them() -> list[Any]:
        leaf = tg.asarray(x, device=cuda)
        return [y for f, _ in CASES.values() for y in derivatives(f, leaf, 2)]

    evaluated({"functions": lambda: during(all_of_them, deferring=[])})
