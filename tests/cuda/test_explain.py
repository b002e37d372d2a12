"""explain prints the CUDA C++ of the kernel that is then launched: random regions and reductions, results held."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
from explain_programs import explained, grown, indented, leaves_of
from inside import aval_of
from shim import standin

import tapegrad as tg
from tapegrad.core.state import thread
from tapegrad.engine.realize import waiting

pytestmark = pytest.mark.sampled(1 / 2)


@pytest.mark.parametrize("seed", range(12))
def test_regions(seed: int, cuda: Any) -> None:
    random = Random(seed)
    y, held = grown(random, leaves_of(random, lambda x: tg.asarray(x, device=cuda), (5, 12)))
    standin.launches.clear()  # what is read by broadcasting has been stored
    told = explained(y)
    assert not standin.launches
    y.numpy()
    [launch] = standin.launches
    assert told.endswith(indented(launch.code)), told
    del held


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("axis", [0, 1, None])
def test_reductions_and_what_is_computed_from_them(axis: int | None, seed: int, cuda: Any) -> None:
    random = Random(seed)
    y, held = grown(random, leaves_of(random, lambda x: tg.asarray(x, device=cuda), (6, 12)))
    standin.launches.clear()
    kept, told = [], ""

    def computed() -> tg.Tensor:
        nonlocal told
        total, most = tg.sum(y, axis=axis), tg.max(y * 2, axis=axis)
        z = tg.exp(total * 0.1) + (total if seed % 2 else most)
        if not seed % 2:
            kept.append(most)
        if not seed % 3:
            kept.append(total)  # its value, which is held, is a result of the kernel, too
        del total, most
        thread.deferring.clear()  # as `waiting` does: the list refers to the reductions
        told = explained(z)
        assert not standin.launches
        return z

    waiting(aval_of(y), computed)
    [launch] = standin.launches
    assert told.endswith(indented(launch.code)), told
    assert told.count("kept on the way") == (seed % 3 == 0) + (seed % 2 == 0)
    del held


def test_nothing_is_launched_for_nothing(cuda: Any) -> None:
    y = tg.ones((0, 3), device=cuda) * 2
    told = explained(y)
    y.numpy()
    assert not standin.launches and told.startswith("kernel 1: 1 nodes over (0, 3)") and "tg_fused" not in told


def test_the_text_of_another_device_is_that_which_it_would_run(cuda: Any) -> None:
    make = lambda device: tg.sin(tg.reshape(tg.arange(40000.0, device=device), (200, 200))) * 2
    told = explained(make("cpu"), device="cuda")
    make(cuda).numpy()
    assert told.endswith(indented(standin.launches[-1].code))
