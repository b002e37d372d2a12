"""Offloading activations of plain tapes and under budgets: bytes that leave, and are back before they are read."""

from __future__ import annotations

import gc
import os
import threading
from typing import Any

import numpy as np
import pytest
from checks import bits_equal, no_garbage, values

import tapegrad as tg
from tapegrad.ops.interop.names import name
from tapegrad.remat import policies
from tapegrad.remat.offload import offload, tiers
from tapegrad.remat.policies import offload_names

N = 64
ROWS = 1024
BYTES = ROWS * N * 4
LAYERS = 8


def array(*shape: int, seed: int = 0) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal(shape) * 0.2).astype(np.float32)


@pytest.fixture
def weights() -> list[tg.Variable]:
    return [tg.Variable(array(N, N, seed=i)) for i in range(LAYERS)]


@pytest.fixture
def x() -> tg.Tensor:
    return tg.asarray(array(ROWS, N, seed=99))


@pytest.fixture
def disk(tmp_path) -> tiers.Disk:
    return tiers.Disk(tmp_path)


def model(weights: list[tg.Variable], x: tg.Tensor) -> tg.Tensor:
    for w in weights:
        x = name(tg.tanh(x @ w), "h")
    return tg.sum(x * x)


def gradients(weights: list[tg.Variable], x: tg.Tensor) -> list[np.ndarray]:
    with tg.GradientTape() as tape:
        y = model(weights, x)
    return values(tape.gradient(y, weights))


class Logged:
    """A tier that notes what is asked of it."""

    def __init__(self, tier: Any) -> None:
        self.tier = tier
        self.log: list[tuple[str, int]] = []
        self.count = 0

    def put(self, buffer: Any) -> Any:
        self.count += 1
        return LoggedSlot(self, self.tier.put(buffer), self.count)

    def reclaim(self, nbytes: int | None = None) -> int:
        return self.tier.reclaim(nbytes)


class LoggedSlot:
    def __init__(self, tier: Logged, slot: Any, number: int) -> None:
        self.tier, self.slot, self.number = tier, slot, number
        self.nbytes = slot.nbytes

    def prefetch(self) -> None:
        self.tier.log.append(("prefetch", self.number))
        self.slot.prefetch()

    def get(self) -> Any:
        self.tier.log.append(("get", self.number))
        return self.slot.get()

    def drop(self) -> None:
        self.slot.drop()


# Without a limit -----------------------------------------------------------------------------------------------------


def test_a_plain_tape_keeps_none_of_what_is_offloaded(weights, x, disk) -> None:
    plain = gradients(weights, x)
    with tg.measure() as m:
        before = m.live_bytes
        with tg.memory.policy(offload_names("h", tier=disk)), tg.GradientTape() as tape:
            y = model(weights, x)
            kept = m.live_bytes - before
        away = disk.bytes_held
        got = values(tape.gradient(y, weights))
    assert away == (LAYERS - 1) * BYTES  # the last one is not read by a product, and still at hand
    assert kept <= 2 * BYTES + 2048
    assert bits_equal(got, plain)
    assert m.offloads == m.fetches == LAYERS - 1 and m.evictions == m.restored == 0
    assert m.nodes_run["tanh"] == LAYERS
    gc.collect()
    assert disk.bytes_held == 0 and disk.bytes_read == away


def test_the_peak_does_not_grow_with_depth(x, disk) -> None:
    weights = [tg.Variable(array(N, N, seed=i)) for i in range(3 * LAYERS)]
    peaks = []
    for depth in (LAYERS, 3 * LAYERS):
        with tg.measure() as plain:
            gradients(weights[:depth], x)
        with tg.memory.policy(offload_names("h", tier=disk)) as m:
            gradients(weights[:depth], x)
        peaks.append((plain.peak_bytes, m.peak_bytes))
    (shallow, offloaded), (deep, too) = peaks
    assert deep - shallow >= 2 * LAYERS * BYTES
    assert too - offloaded <= 2 * BYTES  # gradients, in the main


def test_values_are_on_their_way_before_they_are_read(weights, x, disk) -> None:
    """Each but the one that is read first; never more than two, for each takes memory before it is read."""
    log = Logged(disk)
    with tg.memory.policy(offload_names("h", tier=log)) as m:
        gradients(weights, x)
    gets = [n for what, n in log.log if what == "get"]
    assert sorted(gets) == list(range(1, LAYERS)) and m.prefetches >= LAYERS - 2
    coming: set[int] = set()
    for what, n in log.log:
        assert what == "prefetch" or n in coming or n == gets[0]
        (coming.add if what == "prefetch" else coming.discard)(n)
        assert len(coming) <= 2


def test_a_held_value_stays(weights, x, disk) -> None:
    with tg.memory.policy(offload_names("h", tier=disk)), tg.GradientTape() as tape:
        h = name(x @ weights[0], "h")
        y = tg.sum(tg.tanh(h) @ weights[1])
        assert disk.bytes_held == 0
        tape.gradient(y, weights[0])
    assert h.numpy().any()


def test_persistent_tapes(weights, x, disk) -> None:
    """Bytes go back to the tier after each walk's use without being written again."""
    plain = gradients(weights, x)
    with tg.memory.policy(offload_names("h", tier=disk)):
        with tg.GradientTape(persistent=True) as tape:
            y = model(weights, x)
        first = values(tape.gradient(y, weights))
        second = values(tape.gradient(y, weights))
    assert bits_equal(first, plain) and bits_equal(second, plain)
    assert disk.bytes_written == LAYERS * BYTES
    assert disk.bytes_read >= 2 * (LAYERS - 1) * BYTES
    del tape
    assert disk.bytes_held == 0


def test_forward_mode_over_offloaded_values(weights, x, disk) -> None:
    """Values come back from their tier, and have their tangents still."""

    def run() -> Any:
        return values(list(tg.jvp(tg.grad(lambda x: model(weights, x)), (x,), (tg.ones_like(x),))))

    plain = run()
    with tg.memory.policy(offload_names("h", tier=disk)) as m:
        assert bits_equal(run(), plain)
    assert m.offloads and m.fetches and not m.restored


def test_places_are_free_once_no_record_wants_them(weights, x, disk) -> None:
    """Not only when all recordings are gone."""
    with tg.memory.policy(offload_names("h", tier=disk)), tg.GradientTape(watch_accessed_variables=False):
        gradients(weights, x)
        assert disk.bytes_written and not disk.bytes_held


def test_no_cycles_and_the_default_tier(weights, x) -> None:
    """On the CPU bytes go to disk; one tier serves all policies that name none."""
    plain = gradients(weights, x)
    with no_garbage():
        with tg.memory.policy(offload_names("h")) as m:
            assert bits_equal(gradients(weights, x), plain)
        assert m.offloads
    tier = offload.default_tier(x.device)
    assert isinstance(tier, tiers.Disk) and tier.bytes_held == 0 and tier is offload.default_tier(x.device)


@pytest.mark.parametrize("strided", [False, True])
def test_strided_values_are_not_moved(disk, strided) -> None:
    """They would come back contiguous; what reads them might round otherwise."""
    w = tg.Variable(array(N, N))
    x = tg.asarray(array(N, 4, seed=3))

    def policy(value: policies.Value) -> policies.Answer:
        return policies.Offload(disk) if value.primitive == "tanh" else policies.RECOMPUTE

    def run() -> Any:
        with tg.GradientTape() as tape:
            tape.watch(x)
            y = tg.sum(tg.tanh(x.mT if strided else tg.reshape(x, (4, N))) @ w)
        return values(tape.gradient(y, [x, w]))

    plain = run()
    with tg.memory.policy(policy):
        assert bits_equal(run(), plain)
    assert (disk.bytes_written == 0) == strided


# Under a budget ------------------------------------------------------------------------------------------------------


def peak(weights: list[tg.Variable], x: tg.Tensor) -> int:
    with tg.measure() as m:
        gradients(weights, x)
    return m.peak_bytes


@pytest.mark.parametrize("share", [0.9, 0.75, 0.6])
def test_moved_instead_of_dropped(weights, x, disk, share) -> None:
    plain, limit = gradients(weights, x), int(peak(weights, x) * share)
    with tg.memory_budget(limit, policy=offload_names("h", tier=disk)) as m, tg.measure() as work:
        assert bits_equal(gradients(weights, x), plain)
    assert m.peak_bytes <= limit
    assert m.offloads and m.fetches and work.nodes_run["tanh"] == LAYERS and not m.restored
    assert disk.bytes_held == 0


def test_what_has_come_back_is_not_brought_again(weights, x, disk) -> None:
    """A second walk reads what the first one has brought back, where there is room for it to stay."""
    plain, limit = gradients(weights, x), int(peak(weights, x) * 0.6)
    with tg.memory_budget(limit, policy=offload_names("h", tier=disk)) as m:
        with tg.GradientTape(persistent=True) as tape:
            y = model(weights, x)
    with tg.memory_budget("1GiB", policy=offload_names("h", tier=disk)) as roomy:
        first, counts = values(tape.gradient(y, weights)), (roomy.fetches, roomy.prefetches)
        second = values(tape.gradient(y, weights))
    assert bits_equal(first, plain) and bits_equal(second, plain)
    assert counts[0] == m.offloads > 0 and counts[1] > 0
    assert (roomy.fetches, roomy.prefetches) == counts


def test_no_room_no_move(weights, x, disk) -> None:
    with tg.memory_budget("1GiB", policy=offload_names("h", tier=disk)) as m:
        gradients(weights, x)
    assert not m.offloads and not disk.bytes_written


def test_prefetching_evicts_nothing(weights, x, disk) -> None:
    """At the least budget that works nothing is fetched twice, and no more is moved than without prefetching."""

    def run(limit: int) -> tg.memory.Measure:
        with tg.memory_budget(limit, policy=offload_names("h", tier=disk)) as m:
            gradients(weights, x)
        return m

    with tg.measure() as m:
        others = m.live_bytes - sum(w.nbytes for w in weights) - x.nbytes  # of other tests
    limit = peak(weights, x)
    while limit > 0:
        try:
            m = run(limit)
        except tg.errors.BudgetError:
            break
        assert m.fetches == m.offloads and m.peak_bytes <= limit
        limit -= BYTES // 4
    assert limit - others < 6 * BYTES


def test_a_full_disk_is_an_error(weights, x, disk, monkeypatch) -> None:
    def full(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full, raising=False)
    with (
        pytest.raises(tg.errors.OffloadError, match="no room"),
        tg.memory.policy(offload_names("h", tier=disk)),
    ):
        gradients(weights, x)


def test_checkpoints_prefetch_too(weights, x, disk) -> None:
    log = Logged(disk)

    def f(x: tg.Tensor) -> tg.Tensor:
        return model(weights, x)

    plain = gradients(weights, x)
    with tg.GradientTape() as tape:
        y = tg.recompute_grad(f, policy=offload_names("h", tier=log))(x)
    got = values(tape.gradient(y, weights))
    assert bits_equal(got, plain)
    gets = [n for what, n in log.log if what == "get"]
    assert sorted(gets) == list(range(1, LAYERS + 1))
    for n in gets[2:]:
        assert log.log.index(("prefetch", n)) < log.log.index(("get", n))
    del tape, y
    assert disk.bytes_held == 0


def test_a_rerun_that_fails_leaves_nothing_on_its_way(weights, x, disk) -> None:
    def f(x: tg.Tensor, is_recomputing: bool) -> tg.Tensor:
        if is_recomputing:
            raise KeyError("mine")
        return model(weights, x)

    with tg.measure() as m:
        with tg.GradientTape(persistent=True) as tape:
            y = tg.recompute_grad(f, policy=offload_names("h", tier=disk))(x)
        before = m.live_bytes
        try:
            tape.gradient(y, weights)
        except KeyError:
            pass
        gc.collect()
        assert m.prefetches and m.live_bytes <= before


def test_what_is_on_its_way_turns_round(x, disk) -> None:
    """Where room is needed before it is."""
    w, log = tg.Variable(array(N, N)), Logged(disk)

    def f(x: tg.Tensor) -> tg.Tensor:
        big = tg.concat([x] * 10)
        total = tg.sum(big)
        del big
        h = name(x @ w, "h")
        return tg.sum(tg.tanh(h)) * total

    def run() -> list[np.ndarray]:
        with tg.GradientTape() as tape:
            y = tg.recompute_grad(f, policy=offload_names("h", tier=log))(x)
        return values([tape.gradient(y, w)])

    plain = run()
    log.log.clear()
    with tg.measure() as m:
        limit = m.live_bytes + 10 * BYTES + BYTES // 2
    with tg.memory_budget(limit) as m:
        assert bits_equal(run(), plain)
    assert log.log[0][0] == "prefetch" and m.fetches == 1 and m.peak_bytes <= limit


# Dry runs ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("limit", [None, 0.7])
def test_predictions(weights, x, disk, limit) -> None:
    """A dry run moves nothing, and predicts the bytes."""
    budget = limit and int(peak(weights, x) * limit)

    def step(x: tg.Tensor) -> None:
        policy = offload_names("h", tier=disk)
        with tg.memory.policy(policy) if budget is None else tg.memory_budget(budget, policy=policy):
            with tg.GradientTape() as tape:
                y = tg.recompute_grad(lambda x: model(weights, x), policy=policy)(x) + model(weights, x)
            tape.gradient(y, weights)

    found = tg.memory.predict_peak(step, x, budgets=[], least=False)
    assert not disk.bytes_written
    with tg.measure() as m:
        step(x)
    assert disk.bytes_written
    assert found.peak_bytes == m.peak_bytes


# Tiers that fail -----------------------------------------------------------------------------------------------------


class Broken(Logged):
    """A tier whose ``fails`` calls of one kind raise."""

    def __init__(self, tier: Any, what: str, error: type[Exception] = OSError) -> None:
        super().__init__(tier)
        self.what, self.error, self.failed = what, error, 0

    def fail(self, what: str) -> None:
        if what == self.what:
            self.failed += 1
            raise self.error(f"{what} fails")

    def put(self, buffer: Any) -> Any:
        self.fail("put")
        slot = super().put(buffer)
        for what in ("prefetch", "get"):
            setattr(slot, what, self.checked(what, getattr(slot, what)))
        return slot

    def checked(self, what: str, do: Any) -> Any:
        def call() -> Any:
            self.fail(what)
            return do()

        return call


def under(limit: int, policy: Any, weights: list[tg.Variable], x: tg.Tensor) -> tuple[list[np.ndarray], Any]:
    with tg.memory_budget(limit, policy=policy) as m:
        return gradients(weights, x), m


@pytest.mark.parametrize("error", [OSError, RuntimeError, ValueError])
@pytest.mark.parametrize("what", ["put", "prefetch", "get"])
def test_a_value_whose_tier_fails_under_a_limit_is_made_again(what: str, error: type, weights, x, disk) -> None:
    plain = [g.copy() for g in gradients(weights, x)]
    with tg.measure() as m:
        base = m.live_bytes
    limit = base + 6 * BYTES
    assert bits_equal(under(limit, offload_names("h", tier=disk), weights, x)[0], plain)
    broken = Broken(disk, what, error)
    found, m = under(limit, offload_names("h", tier=broken), weights, x)
    assert bits_equal(found, plain) and broken.failed > 0 and m.peak_bytes <= limit
    assert what == "prefetch" or m.restored > 0


@pytest.mark.parametrize("what", ["put", "get"])
def test_a_checkpoint_makes_again_what_its_tier_has_not(what: str, weights, x, disk) -> None:
    broken = Broken(disk, what)
    policy = offload_names("h", tier=broken)

    def run(f: Any) -> list[np.ndarray]:
        with tg.GradientTape() as tape:
            y = f(x)
        return [g.copy() for g in values(tape.gradient(y, weights))]

    plain = run(lambda x: model(weights, x))
    assert bits_equal(run(tg.recompute_grad(lambda x: model(weights, x), policy=policy)), plain) and broken.failed > 0


def test_memory_errors_of_a_tier_stay_memory_errors(weights, x, disk) -> None:
    broken = Broken(disk, "get", MemoryError)
    with pytest.raises(MemoryError), tg.memory.policy(offload_names("h", tier=broken)):
        gradients(weights, x)


def test_a_tier_that_fails_while_threads_share_it(weights, x, disk) -> None:
    """Every third request fails: each thread gets the plain bits all the same."""
    broken, plain = Broken(disk, "get"), gradients(weights, x)
    fail = broken.fail

    def sometimes(what: str) -> None:
        broken.count += 1
        if broken.count % 3 == 0:
            fail(what)

    broken.fail = sometimes  # type: ignore[method-assign]
    results = []
    with tg.measure() as m:
        limit = m.live_bytes + 14 * BYTES
    with tg.memory_budget(limit, policy=offload_names("h", tier=broken)) as m:
        threads = [threading.Thread(target=lambda: results.append(gradients(weights, x))) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert m.peak_bytes <= limit
    assert len(results) == 2 and all(bits_equal(found, plain) for found in results)
