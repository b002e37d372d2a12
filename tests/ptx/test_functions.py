"""The expression of every elementwise primitive and every cast, in every dtype: NVRTC's PTX against the host, number by
number.  What has neither fused nor approximate instructions is the same to the bit, the rest within ``bounds.py``.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from kernels.conftest import HostDevice
from shim import host, nvrtc

from kernels import test_scalar as scalar

from . import bounds
from .twin import Record, Watch, watching

pytestmark = pytest.mark.slow

DTYPES = ["bool", *scalar.INTS, *scalar.HALVES, *scalar.FLOATS, *scalar.COMPLEX]
NEWER = ("bfloat16", "float32")
"""The dtypes that are also compiled for compute_90."""


@pytest.fixture(scope="module")
def emulated() -> Iterator[HostDevice]:
    nvrtc.library()
    device = HostDevice()
    yield device
    host.unregister(device.checks.argument(0, 0, 0)["at"].item())


@pytest.mark.parametrize("name", DTYPES)
def test_expressions(name, emulated):
    record, wanted = Record(), set()
    arches = (80, 90) if name in NEWER else (80,)
    text = scalar._text(name)
    with watching(Watch(arches, bounds.of, record)):
        for prim in scalar.PRIMITIVES:
            if (expected := scalar._expected(prim, name)) is not None:
                scalar._run(emulated, text, f"k_{prim.name}", scalar._operands(prim, name), expected.dtype)
                wanted.add(f"k_{prim.name}")
    assert record.names == wanted and not record.left_out
    assert len(record.runs) == len(wanted) * len(arches)


@pytest.mark.parametrize("source", ["bool", "int8", "uint8", "int64", "uint64", *scalar.HALVES, *scalar.FLOATS])
def test_casts(source, emulated):
    cast, record = scalar.REGISTRY["cast"], Record()
    targets = ["bool", "int8", "uint16", "int64", "uint64", *scalar.HALVES, *scalar.FLOATS, *scalar.COMPLEX]
    text = '#include "scalar.cuh"\n' + "".join(
        scalar._kernel(cast, [scalar._dtype(source)], scalar._dtype(t)).replace("k_cast", f"k_{t}") for t in targets
    )
    with watching(Watch((80, 90), bounds.of, record)):
        for target in targets:
            x = scalar._fits(scalar._values(source), scalar._dtype(target))
            found = scalar._run(emulated, text, f"k_{target}", [x], scalar._dtype(target))
            assert found.size
    assert record.names == {f"k_{t}" for t in targets}


@pytest.mark.parametrize("half", scalar.HALVES)
def test_every_pattern_of_bits_is_read_and_written(half, emulated):
    """All 65,536 numbers of a half type to float32 and back, and ties between them to nearest even."""
    dtype, record = scalar._dtype(half), Record()
    every = np.arange(65536, dtype=np.uint16).view(dtype)
    with np.errstate(all="ignore"):
        exact = every.astype(np.float32)
        between = (exact[:-1].astype(np.float64) + exact[1:]) / 2
        near = np.concatenate([between.astype(np.float32), np.nextafter(between.astype(np.float32), np.float32(1e30))])
    cast = scalar.REGISTRY["cast"]
    kinds = [dtype, np.dtype(np.float32)]
    text = '#include "scalar.cuh"\n' + "".join(
        scalar._kernel(cast, [one], other).replace("k_cast", f"k_{other}") for one, other in (kinds, kinds[::-1])
    )
    with watching(Watch((80, 90), bounds.of, record)):
        for start in range(0, 65536, 16384):
            scalar._run(emulated, text, "k_float32", [every[start : start + 16384].copy()], kinds[1])
            found = scalar._run(emulated, text, f"k_{half}", [near[start : start + 16384].copy()], dtype)
            with np.errstate(all="ignore"):
                wanted = near[start : start + 16384].astype(dtype)
            np.testing.assert_array_equal(found.astype(np.float32), wanted.astype(np.float32))
    assert sum(record.runs.values()) == 16
