"""Offloading from a CUDA device: no order of events is a race, and without any one of its waits there would be one."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from inside import array_of
from shim import standin
from shim.happens import races, taken

import tapegrad as tg
from tapegrad.core.aval import shaped
from tapegrad.core.buffer import Buffer
from tapegrad.core.node import leaf
from tapegrad.device import copying, pinned
from tapegrad.memory.offload import tiers
from tapegrad.tensor import from_array

pytestmark = pytest.mark.sampled(1 / 2)


def filled(array: Any, device: Any) -> Buffer:
    return Buffer(array, leaf(shaped(array.shape, array.dtype, device)))


SIZES = (100, 128, 1000, 1024)


@pytest.fixture
def few_slabs(monkeypatch):
    """A slab is pinned only when there is none to lend again."""
    monkeypatch.setattr(pinned, "CHUNK", 1)


def play(tier: Any, device: Any, cupy: ModuleType, choose: Callable[[int], int], steps: int) -> None:
    """A program of random steps that an engine might take; each value is checked when it comes back.

    ``choose(n)`` gives a number below n.
    """
    streams = [cupy.cuda.Stream.null, *(cupy.cuda.Stream(non_blocking=True) for _ in range(2))]
    arrays: list[tuple[Any, float]] = []
    slots: list[tuple[Any, float]] = []
    standin.configure(stream_done=lambda mark: choose(3) == 0)

    def take(some: list) -> Any:
        return some.pop(choose(len(some)))

    def make() -> None:
        value = float(choose(1000))
        x = device.empty((SIZES[choose(len(SIZES))],), np.dtype("float32"))
        with device.active():
            x.fill(value)
        arrays.append((x, value))

    def compute() -> None:
        x, value = arrays[choose(len(arrays))]
        y = device.empty(x.shape, x.dtype)
        with device.active():
            cupy.add(x, 1, out=y)
        arrays.append((y, value + 1))

    def put(keep: bool) -> None:
        x, value = arrays[choose(len(arrays))] if keep else take(arrays)
        slots.append((tier.put(filled(x, device)), value))

    def get() -> None:
        slot, value = slots[choose(len(slots))]
        x = slot.get()
        assert (x._host == value).all()
        arrays.append((x, value))

    def abandon() -> None:
        slot, _ = take(slots)
        slot.prefetch()
        slot.drop()

    moves: list[tuple[Callable[[], Any], list | None]] = [
        (make, None), (compute, arrays), (compute, arrays), (lambda: put(keep=True), arrays),
        (lambda: put(keep=False), arrays), (lambda: put(keep=False), arrays), (lambda: take(arrays), arrays),
        (lambda: slots[choose(len(slots))][0].prefetch(), slots), (get, slots), (get, slots),
        (lambda: take(slots)[0].drop(), slots), (lambda: take(slots), slots), (abandon, slots), (tier.reclaim, None),
        (lambda: tier.reclaim(1 + choose(10_000)), None), (lambda: streams[choose(3)].use(), None),
    ]  # fmt: skip
    try:
        for _ in range(steps):
            move, needs = moves[choose(len(moves))]
            if needs is None or needs:
                move()
        for x, value in arrays:
            assert (x._host == value).all()
    finally:
        cupy.cuda.Stream.null.use()
        standin.configure(stream_done=True)


@given(st.data())
@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
def test_no_order_of_events_is_a_race(cuda, cupy, few_slabs, data):
    standin.events.clear()
    tier = tiers.Host(cuda)
    steps = data.draw(st.integers(1, 60))
    play(tier, cuda, cupy, lambda n: data.draw(st.integers(0, n - 1)), steps)
    assert races() == []


@pytest.mark.parametrize("seed", range(4))
def test_no_race_in_a_long_program(cuda, cupy, few_slabs, seed):
    play(tiers.Host(cuda), cuda, cupy, random.Random(seed).randrange, 500)
    assert races() == []


def test_no_race_beside_a_disk(cuda, cupy, tmp_path):
    disk = tiers.Disk(tmp_path)
    play(disk, cuda, cupy, random.Random(0).randrange, 300)
    assert races() == []


BROKEN = {
    "put does not wait for the last writer": "self._out.stream.wait_event(self._mark(self._cuda.get_current_stream()))",
    "put does not wait for the slab": "self._out.stream.wait_event(slab.last)",
    "put does not keep the array": "self._out.kept.append((written, x))",
    "prefetch does not wait for who had the memory": "into.wait_event(self._mark(self._cuda.get_current_stream()))",
    "prefetch does not wait until the slab is filled": "into.wait_event(slot._written)",
    "get does not wait for the copy": "self._copier._wait(done)",
    "drop does not keep what was prefetched": "self._copier._in.kept.append((coming[1], coming[0]))",
    "kernels do not wait for what is reclaimed": "stream.wait_event(event)",
    "the end does not wait for copies": "lane.stream.synchronize()",
}


@pytest.mark.parametrize("fault", BROKEN)
def test_each_wait_is_needed(cuda, cupy, few_slabs, fault, monkeypatch):
    """Without it the checker finds a race in the program that has none."""
    source, line = Path(copying.__file__).read_text(encoding="utf-8"), BROKEN[fault]
    assert source.count(f" {line}\n") == 1, "the test breaks a line that is there"
    broken = ModuleType("broken")
    exec(compile(source.replace(line, "pass"), copying.__file__, "exec"), vars(broken))
    monkeypatch.setattr(tiers, "Copier", broken.Copier)
    play(tiers.Host(cuda), cuda, cupy, random.Random(1).randrange, 500)
    assert taken()


@pytest.mark.parametrize("ordered", [True, False])
def test_the_engine_beside_offloading(cuda, cupy, few_slabs, ordered, monkeypatch):
    """Fused kernels, products and gradients on changing streams; where streams do not wait, the checker says so."""
    draw = random.Random(0)
    tier = tiers.Host(cuda)
    streams = [cupy.cuda.Stream.null, *(cupy.cuda.Stream(non_blocking=True) for _ in range(2))]
    values = [tg.asarray(np.ones((40, 40), "float32"), device=cuda) for _ in range(4)]
    if not ordered:
        monkeypatch.setattr(type(cuda), "_order", lambda self, stream: None)
    standin.events.clear()
    standin.configure(stream_done=False)
    for step in range(120):
        streams[draw.randrange(3)].use()
        a, b = draw.choice(values), draw.choice(values)
        if step % 4 == 0:
            values.append(tg.tanh(a * b) + 1)
        elif step % 4 == 1:
            values.append(tg.matmul(a, b.T) * 0.01)
        elif step % 4 == 2:
            with tg.GradientTape() as tape:
                tape.watch(a)
                y = tg.sum(tg.sin(a * b) * a)
            values.append(tape.gradient(y, a))
        else:
            slot = tier.put(filled(array_of(a), cuda))
            values.append(from_array(slot.get(), cuda))
        del a, b, values[: max(0, len(values) - 6)]
    cupy.cuda.Stream.null.use()
    assert (taken() == []) == ordered
