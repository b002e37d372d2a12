"""Offloading from a CUDA device: no order of events is a race, and without any one of its waits there would be one."""

from __future__ import annotations

import random
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from inside import array_of
from shim import standin, waits
from shim.happens import races, taken

import tapegrad as tg
from tapegrad.core.aval import shaped
from tapegrad.core.buffer import Buffer
from tapegrad.core.node import leaf
from tapegrad.device import copying, pinned
from tapegrad.device import cuda as cuda_module
from tapegrad.remat.offload import tiers
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


def test_each_wait_is_needed(cuda, cupy, few_slabs):
    """Without any one of them the checker finds a race in the program that has none."""

    def program() -> None:
        play(tiers.Host(cuda), cuda, cupy, random.Random(1).randrange, 500)

    with waits.of(copying) as lines:
        program()
    assert taken() == [] and len(lines) > 5
    for line in lines:
        with waits.of(copying, lambda other, line=line: other == line):
            program()
        assert taken(), f"the wait of line {line} is not needed"


def test_memory_of_copies_under_way_is_lent_to_nobody(cuda, few_slabs):
    """That of an array which was let go of, and that of one which was on its way back, and is not wanted any more."""
    tier = tiers.Host(cuda)
    used = lambda: cuda.usage()[0]
    before, x = used(), cuda.array(np.ones(1000, "float32"))
    there = used() - before
    standin.configure(stream_done=False)
    slot = tier.put(filled(x, cuda))
    del x
    assert used() - before == there
    standin.configure(stream_done=True)
    tier.reclaim()
    assert used() == before
    standin.configure(stream_done=False)
    slot.prefetch()
    slot.drop()
    assert used() - before == there
    standin.configure(stream_done=True)
    tier.reclaim()
    assert used() == before


def engine_beside_offloading(cuda: Any, cupy: ModuleType) -> None:
    """Fused kernels, products and gradients on changing streams."""
    draw = random.Random(0)
    tier = tiers.Host(cuda)
    streams = [cupy.cuda.Stream.null, *(cupy.cuda.Stream(non_blocking=True) for _ in range(2))]
    values = [tg.asarray(np.ones((40, 40), "float32"), device=cuda) for _ in range(4)]
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


@pytest.mark.parametrize("ordered", [True, False])
def test_the_engine_beside_offloading(cuda, cupy, few_slabs, ordered):
    """Where streams do not wait for each other, the checker says so."""
    with waits.of(cuda_module, lambda line: not ordered):
        engine_beside_offloading(cuda, cupy)
    assert (taken() == []) == ordered
