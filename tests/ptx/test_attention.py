"""Attention's kernels over several tiles of queries and keys, as PTX: on tensor cores in half types and TF32."""

from __future__ import annotations

import pytest
from kernels.conftest import HostDevice
from shim import host, nvrtc

from kernels import test_attention as attention

from . import bounds
from .twin import Record, Watch, watching

pytestmark = pytest.mark.slow

IN_TF32 = bounds.Bound(1024, None)
"""A weight that exp gives one unit more on the device may be rounded to the next of TF32's numbers, 8192 units away."""
KERNELS = {"tg_attention", "tg_attention_vjp_q", "tg_attention_vjp_kv", "tg_attention_jvp"}


@pytest.fixture(scope="module")
def emulated():
    nvrtc.library()
    device = HostDevice()
    yield device
    host.unregister(device.checks.argument(0, 0, 0)["at"].item())


@pytest.mark.parametrize(
    ("kind", "arch", "rule"), [("float16", 90, 3), ("bfloat16", 80, 5), ("tf32", 80, 3), ("float32", 90, 5)]
)
def test_several_tiles(kind, arch, rule, emulated):
    """70 queries, 72 keys: the last tile is cut, causal ones are left out; lanes share what drops weights."""
    record, bound = Record(), IN_TF32 if kind == "tf32" else bounds.ROWS
    with watching(Watch((arch,), lambda name: bound, record)):
        attention.compared(emulated, kind, 0, ((), 70, 2, 72, 1, 8, 16), attention.RULES[rule])
    assert record.names == KERNELS | ({"tg_attention_vjp_mask"} if rule == 5 else set()) and not record.left_out


def test_warps_that_share_rows(emulated):
    """Of wide heads each has a part of the sums' columns."""
    record = Record()
    with watching(Watch((80,), lambda name: bounds.ROWS, record)):
        attention.compared(emulated, "float16", 0, ((), 40, 1, 20, 1, 200, 256), attention.RULES[0], forward_mode=False)
    assert record.names == KERNELS - {"tg_attention_jvp"}
