"""Products on tensor cores: PTX and host agree to the bit, and neither takes an element from a wrong place."""

from __future__ import annotations

import shutil

import numpy as np
import pytest
from kernels.conftest import HostDevice
from shim import host

from kernels import test_mma as mma
from tapegrad.device.kernel import folder, options

from .twin import Disagreement, Record, Watch, watching

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def emulated():
    device = HostDevice()
    yield device
    host.unregister(device.checks.argument(0, 0, 0)["at"].item())


@pytest.mark.parametrize("kind", mma.KINDS)
def test_products_as_ptx(kind, emulated):
    record = Record()
    with watching(Watch((80, 90), record=record)):
        for found, wanted in zip(*mma.products(emulated, kind), strict=True):
            np.testing.assert_array_equal(found, wanted)
        mma.roundings(emulated, kind)
    assert record.names == {"products", "roundings"} and not any(record.worst.values())


PLANTED = {
    "a's rows": ("return lane / 4 + 8 * (r % 2);", "return lane / 4 + 8 * (r / 2);"),
    "a's columns": ("return PACK * (lane % 4 + 4 * (r / 2));", "return PACK * (lane % 4 + 4 * (r % 2));"),
    "b's rows": ("return PACK * (lane % 4 + 4 * r);", "return PACK * (lane % 4) + 4 * r;"),
    "b's columns": ("b_column(int lane) { return lane / 4; }", "b_column(int lane) { return lane % 8; }"),
    "rows of sums": ("return lane / 4 + 8 * (r / 2);", "return lane / 4 + 8 * (r % 2);"),
    "columns of sums": ("return 2 * (lane % 4) + r % 2;", "return lane % 4 + 4 * (r % 2);"),
    "what ldmatrix gives a": ("lane / 16 * (16 / sizeof(E))", "lane / 8 % 2 * (16 / sizeof(E))"),
    "what ldmatrix gives b": ("lane % 8 + lane / 16 * 8", "lane % 16"),
    "what turned rows give b": ("lane % 16 * pitch + lane / 16 * 8)", "(lane % 8 + lane / 16 * 8) * pitch)"),
    "sums as a": ("a[0] = tg_pair<E>(sums[0][0], sums[0][1])", "a[0] = tg_pair<E>(sums[0][1], sums[0][0])"),
}


@pytest.mark.parametrize("planted", PLANTED)
def test_an_element_from_a_wrong_place_is_found(planted, emulated, tmp_path):
    shutil.copytree(folder(), tmp_path, dirs_exist_ok=True)
    text = (tmp_path / "mma.cuh").read_text()
    old, new = PLANTED[planted]
    assert text.count(old) == 1
    (tmp_path / "mma.cuh").write_text(text.replace(old, new))
    flags = [one for one in options() if not one.startswith("-I")]
    try:
        with watching(Watch((80,))):
            results = zip(*mma.products(emulated, "bfloat16", (*flags, f"-I{tmp_path}")), strict=True)
    except Disagreement:
        return
    assert any((found != wanted).any() for found, wanted in results)
