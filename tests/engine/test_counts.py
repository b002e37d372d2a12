"""Kernels run and bytes moved by a transformer block, against the bound of ``bench/fusion.py``; a chain's arrays."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from shim.host import why_no_compiler

import tapegrad as tg
from tapegrad.engine import region

BENCH = Path(__file__).resolve().parents[2] / "bench"
LINKS = (1, 10, 30)
SIZES = (4, 64, 128, 4)
FIGURES = {"cpu": (42, 1.03), "cuda": (41, 1.04), "device": (41, 1.04)}
"""Kernels, and bytes as a multiple of the bound, of the block of ``SIZES``."""


pytestmark = [pytest.mark.skipif(why_no_compiler() is not None, reason=str(why_no_compiler())), pytest.mark.slow]


@pytest.fixture(scope="module")
def fusion() -> Iterator[Any]:
    """``bench/fusion.py`` as a module."""
    sys.path.insert(0, str(BENCH))
    try:
        yield importlib.import_module("fusion")
    finally:
        sys.path.remove(str(BENCH))


@pytest.fixture(scope="module")
def counts(fusion: Any) -> Iterator[dict[str, Any]]:
    """Of the CPU and of CUDA (without a GPU: the engine for it on the stand-in for CuPy, by ledger and by its log)."""
    sizes = fusion.Sizes(*SIZES)
    results = {"bound": fusion.lower_bound(sizes), "cpu": fusion.count(sizes, "cpu")}
    with fusion.cuda_or_standin() as standin:
        results["cuda"] = fusion.count(sizes, "cuda")
        if standin:
            results["device"] = fusion.on_device(sizes, standin)
        results["chains"] = [fusion.arrays_saved(k, "cuda") for k in LINKS]
    yield results


def test_the_bound_by_hand(fusion):
    """Sums of the table: arrays of x's size, of the hidden layer's, of the weights', and vectors."""
    sizes = fusion.Sizes(2, 3, 8, 4)
    n = sizes.elements()
    wanted = {"x": 80, "wide": 11, "W": 12, "4W": 6, "w": 20, "4w": 3}
    counted = dict.fromkeys(wanted, 0)
    for _, _, reads, writes in fusion.STRETCHES:
        for name in (reads + " " + writes).split():
            counted[name] += 1
    assert counted == wanted
    assert fusion.lower_bound(sizes).bytes == 4 * sum(times * n[name] for name, times in wanted.items())


@pytest.mark.parametrize("where", ["cpu", "cuda", "device"])
def test_bytes_are_near_the_bound(where, counts, fusion):
    if where not in counts:
        pytest.skip("what reaches a real device is not logged")
    assert counts["bound"].bytes < counts[where].bytes <= fusion.GOAL * counts["bound"].bytes


@pytest.mark.parametrize("where", FIGURES)
def test_the_figures_of_today(where, counts):
    """Better than the goal: a change that runs more kernels or moves more bytes has to say so here."""
    if where not in counts:
        pytest.skip("what reaches a real device is not logged")
    kernels, times = FIGURES[where]
    assert counts[where].kernels <= kernels
    assert counts[where].bytes <= times * counts["bound"].bytes


def test_the_ledger_sees_what_the_device_sees(counts):
    """Copies and further passes inside a barrier included; numbers that are arguments are too few bytes to matter."""
    if "device" not in counts:
        pytest.skip("what reaches a real device is not logged")
    assert counts["cuda"].kernels == counts["device"].kernels
    assert abs(counts["cuda"].bytes - counts["device"].bytes) < 1000


def test_the_ledger_adds_up(counts):
    for where in ("cpu", "cuda"):
        c = counts[where]
        assert c.kernels == len(c.detail)
        assert c.bytes == sum(read + written for _, read, written in c.detail)


def test_a_chain_saves_one_array(counts, fusion):
    assert [fusion.arrays_saved(k) for k in LINKS] == counts["chains"] == [1] * len(LINKS)


def test_a_chain_longer_than_a_region_saves_one_array_a_cut(fusion):
    """The cost rule's third case: it bounds registers, compile time and how often an interior is computed again."""
    links = 100
    cuts = -(-3 * links // region.MAX_NODES)
    assert 1 < fusion.arrays_saved(links) <= cuts


def test_what_is_counted_is_right(fusion):
    """CPU and CUDA agree, with the same dropout masks."""
    block = sys.modules["fusion_block"]
    with fusion.cuda_or_standin():
        on_cuda = block.results(tg, fusion.Sizes(*SIZES), "cuda", 0.1)
    on_cpu = block.results(tg, fusion.Sizes(*SIZES), "cpu", 0.1)
    assert block.agree("tapegrad, cuda", on_cuda, on_cpu) < block.TOLERANCE
