"""Limits: the peak never exceeds one, bits stay the same, and BudgetError asks for what suffices."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from budget_cases import SIDE, UNIT, X, check_sound, evict, gradient, layers, limited, live, objects, small_from
from checks import c64, no_garbage

import tapegrad as tg
from tapegrad.errors import BudgetError


def test_the_peak_stays_within_the_limit_and_bits_are_the_same(x: tg.Tensor) -> None:
    required, base = gradient(x), live()
    with tg.memory_budget(limit := base + 8 * UNIT) as m:
        assert np.array_equal(gradient(x), required)
        assert m.peak_bytes <= limit and m.evictions > 0 and m.restored == m.evictions
    assert m.live_bytes == base


@pytest.mark.parametrize("limit", [2**20, "1MiB", "1 MiB"])
def test_limits_are_numbers_or_sizes(limit: Any) -> None:
    gc.collect()
    with tg.memory_budget(limit):
        c64(np.ones((2**20 - live()) // 8)).numpy()
        with pytest.raises(BudgetError, match="budget of 1048576"):
            c64(np.ones((2**20 - live()) // 8 + 1))


@pytest.mark.parametrize("share", [2.5, "many", None, -1])
def test_what_is_no_size_is_refused(share: Any) -> None:
    with pytest.raises((TypeError, ValueError)):
        tg.memory_budget(share)


def test_the_smallest_of_nested_limits_counts(x: tg.Tensor) -> None:
    required, base = gradient(x), live()
    with tg.memory_budget(base + 8 * UNIT) as outer:
        with tg.memory_budget(base + 100 * UNIT) as inner:
            assert np.array_equal(gradient(x), required)
        assert inner.peak_bytes == outer.peak_bytes <= base + 8 * UNIT
        with tg.memory_budget(base + 6 * UNIT) as inner:
            assert np.array_equal(gradient(x), required)
        assert inner.peak_bytes <= base + 6 * UNIT
        held = [c64(X) for _ in range(8)]
        with pytest.raises(BudgetError):
            held.append(c64(X))
        held.clear()


def test_entering_a_smaller_budget_drops_what_is_saved_already(x: tg.Tensor) -> None:
    required, base = gradient(x), live()
    with tg.memory_budget(base + 40 * UNIT) as outer, tg.GradientTape() as tape:
        tape.watch(x)
        y = tg.sum(layers(x, 20))
        assert outer.evictions == 0 and outer.live_bytes >= base + 20 * UNIT
        with tg.memory_budget(base + 6 * UNIT) as inner:
            assert inner.live_bytes <= base + 6 * UNIT
            assert np.array_equal(tape.gradient(y, x).numpy(), required)
        assert inner.peak_bytes <= base + 6 * UNIT


def test_a_budget_that_what_is_alive_exceeds_is_not_entered(x: tg.Tensor) -> None:
    base = live()
    with pytest.raises(BudgetError, match="memory_budget") as caught, tg.memory_budget(base - 1):
        pytest.fail("entered")
    assert caught.value.needed_bytes == base
    with tg.memory_budget(base + UNIT):
        with pytest.raises(BudgetError), tg.memory_budget(base - 1):
            pytest.fail("entered")
        assert c64(X).shape == X.shape
    check_sound()


def test_what_a_budget_drops_depends_on_nothing_that_ran_before(x: tg.Tensor) -> None:
    def counts() -> tuple[int, ...]:
        with tg.memory_budget(live() + 8 * UNIT) as m:
            gradient(x, 40)
        return m.evictions, m.restored, m.kernel_runs, m.peak_bytes - live()

    first = counts()
    gradient(c64(np.ones((7, 9))), 33)
    with tg.memory_budget(live() + 3000 * 512):
        gradient(c64(np.ones(3)), 2000)
    assert counts() == first


@pytest.mark.parametrize("later", [None, 6, 100])
def test_tapes_outlive_the_block(x: tg.Tensor, later: int | None) -> None:
    required, base = gradient(x), live()
    with tg.GradientTape(persistent=True) as tape:
        tape.watch(x)
        with tg.memory_budget(base + 8 * UNIT):
            y = tg.sum(layers(x, 20))
    if later is None:
        result = tape.gradient(y, x).numpy()
    else:
        with tg.memory_budget(base + later * UNIT) as m:
            result = tape.gradient(y, x).numpy()
        assert m.peak_bytes <= base + later * UNIT
    assert np.array_equal(result, required) and np.array_equal(tape.gradient(y, x).numpy(), required)


def test_what_was_recomputed_between_two_blocks_can_be_dropped() -> None:
    rng = np.random.default_rng(0)
    x, c = c64(rng.standard_normal((200, 200))), c64(rng.standard_normal((200, 200)) / 14)
    base = live()
    with tg.GradientTape(persistent=True) as tape, tg.memory_budget(base + 6 * x.nbytes):
        tape.watch(x)
        h = x
        for _ in range(20):
            h = tg.tanh(h @ c)
        loss = tg.sum(h)
        del h
    required = tape.gradient(loss, x).numpy()
    assert live() > base + 19 * x.nbytes
    with tg.memory_budget(limit := base + 6 * x.nbytes) as m:
        assert np.array_equal(tape.gradient(loss, x).numpy(), required)
    assert m.evictions > 0 and m.peak_bytes <= limit


def test_a_users_array_needs_room_too(x: tg.Tensor) -> None:
    required = gradient(x, 8)
    with tg.memory_budget(live() + 10 * UNIT) as m, tg.GradientTape() as tape:
        tape.watch(x)
        y = tg.sum(layers(x, 8))
        evicted = m.evictions
        data = [tg.asarray(X + i) for i in range(5)]
        assert m.evictions > evicted and len(data) == 5
        del data
        assert np.array_equal(tape.gradient(y, x).numpy(), required)


def test_several_results_of_a_kernel_have_room_before_any_is_written() -> None:
    x = c64(np.linspace(0.0, 1.0, 20_480))
    base = live()
    with tg.memory_budget(base + 2 * x.nbytes) as m:
        y, z = tg.exp(x), tg.sin(x)
        assert y.numpy().sum() + z.numpy().sum() > 0 and m.peak_bytes == base + 2 * x.nbytes
    with pytest.raises(BudgetError, match="memory_budget: exp needs"), tg.memory_budget(base + 2 * x.nbytes):
        tg.exp(x + x).numpy()


def test_exactly_what_is_needed_is_enough(x: tg.Tensor) -> None:
    with tg.memory_budget(limit := live() + UNIT) as m:
        tg.softmax(x)
        c64(X)
        with pytest.raises(BudgetError):
            c64(np.ones(SIDE * SIDE + 1))
        assert m.peak_bytes == limit


def test_a_computation_within_a_users_primitive_has_room_of_its_own(x: tg.Tensor) -> None:
    @tg.primitive
    def outer(a: Any) -> Any:
        return np.asarray(tg.softmax(c64(a))) * 2.0

    required = outer(x).numpy()
    gc.collect()
    base = live()
    for units in range(6):
        try:
            with tg.memory_budget(limit := base + units * UNIT) as m:
                assert np.array_equal(outer(x).numpy(), required)
            break
        except BudgetError as e:
            assert e.needed_bytes > limit
    assert units in (1, 2, 3, 4) and m.peak_bytes <= limit
    check_sound()


# What suffices ------------------------------------------------------------------------------------------------------


def needs(work: Callable[[], Any], limit: int) -> int:
    """Return the bytes that a limit's error asks for; 0: the limit suffices."""
    try:
        with tg.memory_budget(limit):
            work()
    except BudgetError as e:
        return e.needed_bytes
    return 0


@pytest.mark.parametrize("count", [1, 2, 7, 20, 45])
def test_needed_bytes_are_enough_and_not_one_less(count: int, x: tg.Tensor) -> None:
    required, limit, tries = gradient(x, count), live() + UNIT, 0
    while needed := needs(lambda: gradient(x, count), limit):
        assert needed > limit
        limit, tries = needed, tries + 1
    with tg.memory_budget(limit):
        assert np.array_equal(gradient(x, count), required)
    assert tries > 0 and needs(lambda: gradient(x, count), limit - 1) > limit - 1


@pytest.mark.parametrize("units", [1, 2, 5])
def test_of_one_operation_needed_bytes_are_the_least(units: int, x: tg.Tensor) -> None:
    big, base = c64(np.ones((units, SIDE, SIDE))), live()
    for work in (lambda: tg.softmax(big), lambda: tg.concat([big, big]), lambda: c64(np.ones((units, SIDE, SIDE)))):
        with tg.measure() as m:
            work()
        needed = needs(work, base)
        assert needed == m.peak_bytes and not needs(work, needed)
        assert all(needs(work, less) == needed for less in (needed - 1, needed - 512, base + 1))


def test_larger_limits_never_fail_where_a_smaller_one_suffices(x: tg.Tensor) -> None:
    base = live()
    needed = [needs(lambda: gradient(x, 12), base + k * UNIT // 2) for k in range(32)]
    assert needed[0] and not needed[-1] and sorted(needed, key=lambda n: n == 0) == needed


# Sizes --------------------------------------------------------------------------------------------------------------


def test_empty_and_0d_arrays() -> None:
    def numbers(h: Any) -> Any:
        for _ in range(40):
            h = tg.sum(tg.tanh(h) * 1.5)
        return h

    def step() -> list[np.ndarray]:
        with tg.GradientTape() as tape:
            tape.watch([a, s])
            y = tg.sum(tg.softmax(tg.exp(a))) + numbers(s)
        return [g.numpy() for g in tape.gradient(y, [a, s])]

    a, s = c64(np.zeros((0, 3))), c64(0.7)
    required, base = step(), live()
    with tg.memory_budget(limit := base + 12 * 512) as m:
        result = step()
    assert all(np.array_equal(f, w) for f, w in zip(result, required, strict=True))
    assert m.peak_bytes <= limit and m.evictions > 0


def test_many_tiny_values() -> None:
    s = c64(np.linspace(0, 1, 3))
    required, base = gradient(s, 1000), live()
    with tg.memory_budget(limit := base + 200 * 512) as m, no_garbage():
        assert np.array_equal(gradient(s, 1000), required)
    assert m.peak_bytes <= limit and m.evictions > 600


def test_rows_of_a_small_array_take_no_more_in_a_budget() -> None:
    """A copy takes 512 bytes at least, so copies of 16 small rows take more than the array that they would free."""
    x = c64(X[:, :3])

    def step() -> None:
        with tg.GradientTape() as tape:
            tape.watch(x)
            y = tg.sum(tg.scan(lambda s, q: (tg.tanh(s + q), s * q), x[-1], x)[1])
        tape.gradient(y, x)

    with small_from(1):
        step()
        with tg.measure() as plain:
            step()
        with tg.memory_budget("1GiB"), tg.measure() as m:
            step()
    assert (m.peak_bytes, m.kernel_runs) == (plain.peak_bytes, plain.kernel_runs)


# Nothing is retained ------------------------------------------------------------------------------------------------


def grown(work: Callable[[int], Any], count: int = 200) -> tuple[int, int]:
    """Return how many bytes, and objects of tapegrad's, ``count`` runs have added after ten."""
    for i in range(10):
        work(i)
    before = objects(), live()
    for i in range(count):
        work(i)
    return live() - before[1], objects() - before[0]


@pytest.mark.parametrize("units", [6, 1000])
def test_200_steps_retain_nothing(units: int, x: tg.Tensor) -> None:
    weight = tg.Variable(X)
    base = live()

    def step(_: int) -> None:
        with tg.memory_budget(base + units * UNIT), tg.GradientTape() as tape:
            y = tg.sum(layers(x @ weight, 6))
        weight.assign_sub(tape.gradient(y, weight) * 0.01)

    nbytes, count = grown(step)
    assert nbytes == 0 and count < 20
    with tg.memory_budget(base + (units + 10) * UNIT):
        nbytes, count = grown(step)
    assert nbytes == 0 and count < 20


def test_dead_branches_of_a_tape_leave_no_bytes(x: tg.Tensor) -> None:
    with tg.memory_budget(live() + 30 * UNIT) as m, tg.GradientTape() as tape:
        tape.watch(x)
        base = m.live_bytes
        for _ in range(1000):
            tg.tanh(tg.softmax(x))
        assert m.peak_bytes <= base + 30 * UNIT


def test_what_nobody_can_ask_for_is_forgotten_while_a_tape_records() -> None:
    s = c64(0.5)
    with tg.memory_budget("64MiB"), tg.GradientTape() as tape:
        tape.watch(s)
        y = tg.sin(s)
        assert grown(lambda _: [c64(1.0) + 1.0 for _ in range(50)])[1] < 5_000  # of 10,000 values
        assert tape.gradient(y, s).numpy() == np.cos(0.5)


def test_tapes_leave_nothing_beside_one_that_lives_on() -> None:
    s = c64(0.5)

    def record(_: int) -> None:
        with tg.GradientTape() as tape:
            tape.watch(s)
            h = s
            for _ in range(50):
                h = tg.sin(h)

    with tg.memory_budget("64MiB"):
        with tg.GradientTape() as lasting:
            lasting.watch(s)
            y = tg.sin(tg.sin(s))
        nbytes, count = grown(record)
        assert nbytes <= 512 and count < 1_000  # of 10,000 values
        assert lasting.gradient(y, s).numpy() == np.cos(np.sin(0.5)) * np.cos(0.5)


def test_cycles_of_garbage_are_collected_before_an_error() -> None:
    base = live()
    gc.disable()
    try:
        with tg.memory_budget(base + 10 * UNIT):
            for _ in range(30):
                box: list[Any] = [tg.softmax(c64(X))]
                box.append(box)
                del box
    finally:
        gc.enable()


RESIDENT = """
import os
import numpy as np
import tapegrad as tg

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

held = [tg.exp(tg.ones((1 << 20,), dtype="float64")) for _ in range(12)]
tg.sum(tg.stack(held)).numpy()
before = resident()
with tg.measure() as m:
    pass
held.clear()
with tg.memory_budget(m.live_bytes + (1 << 20)):
    tg.asarray(np.ones(1 << 16)).numpy()
    print(before - resident())
"""


@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="needs Linux's count of resident pages")
def test_memory_that_was_freed_does_not_stay_with_the_process_beyond_the_limit() -> None:
    result = subprocess.run([sys.executable, "-c", RESIDENT], capture_output=True, text=True, check=True)
    assert int(result.stdout) > 60 << 20


# Blocks -------------------------------------------------------------------------------------------------------------


def test_one_budget_object_may_be_entered_twice() -> None:
    budget = tg.memory_budget(live() + 40 * UNIT)
    with budget as outer:
        with budget as inner:
            pass
        assert inner is not outer
        with pytest.raises(BudgetError):
            [c64(X) for _ in range(60)]


def test_a_budget_that_was_not_left_ends_with_its_object() -> None:
    budget = tg.memory_budget("1GiB")
    budget.__enter__()
    assert limited()
    del budget
    assert not limited()


def test_evictions_on_demand_free_as_much_as_is_asked_for(x: tg.Tensor) -> None:
    required = gradient(x)
    with tg.memory_budget("1MiB") as m, tg.GradientTape() as tape:
        tape.watch(x)
        y = tg.sum(layers(x, 20))
        for nbytes, values in ((UNIT, 1), (UNIT + 1, 2), (5 * UNIT, 5)):
            before = m.live_bytes
            evict(nbytes)
            assert before - m.live_bytes == values * UNIT
        assert np.array_equal(tape.gradient(y, x).numpy(), required)
