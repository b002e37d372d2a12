"""Offloading activations of plain tapes and under budgets: bytes that leave, and are back before they are read."""

from __future__ import annotations

import gc
import threading
import weakref
from typing import Any

import numpy as np
import pytest
from checks import bits_equal, no_garbage, values

import tapegrad as tg
from tapegrad.memory import policies
from tapegrad.memory.ledger.phase import during
from tapegrad.memory.offload import offload, tiers
from tapegrad.memory.policies import offload_names
from tapegrad.ops.interop.names import name

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
        self._tier, self._slot, self._number = tier, slot, number
        self.nbytes = slot.nbytes

    def prefetch(self) -> None:
        self._tier.log.append(("prefetch", self._number))
        self._slot.prefetch()

    def get(self) -> Any:
        self._tier.log.append(("get", self._number))
        return self._slot.get()

    def drop(self) -> None:
        self._slot.drop()


# Without a limit -----------------------------------------------------------------------------------------------------


def test_a_tier_is_asked_for_what_others_have_not_let_go_of(monkeypatch: pytest.MonkeyPatch) -> None:
    class Tier:
        def __init__(self, kept: int) -> None:
            self.kept, self.asked = kept, []

        def reclaim(self, nbytes: int | None = None) -> int:
            self.asked.append(nbytes)
            return self.kept

    first, second, third = those = Tier(60), Tier(50), Tier(0)
    monkeypatch.setattr(offload, "_used", those)
    assert offload.reclaim(100) == 110 and offload.reclaim(None) == 110
    assert (first.asked, second.asked, third.asked) == ([100, None], [40, None], [0, None])


def test_a_plain_tape_keeps_none_of_what_is_offloaded(weights, x, disk) -> None:
    plain = gradients(weights, x)
    with tg.measure() as m:
        with tg.memory.policy(offload_names("h", tier=disk)), tg.GradientTape() as tape:
            y = model(weights, x)
            kept = tg.memory.LEDGER.by("category")["activation"]
        away = disk.bytes_held
        got = values(tape.gradient(y, weights))
    assert away == (LAYERS - 1) * BYTES  # the last one is not read by a product, and still at hand
    assert kept <= 2 * BYTES
    assert bits_equal(got, plain)
    assert m.offloads == m.fetches == LAYERS - 1 and m.evictions == m.restored == 0
    assert m.nodes_run["tanh"] == LAYERS
    gc.collect()
    assert disk.bytes_held == 0 and disk.bytes_read == away
    assert offload.kept_bytes() == 0, "a disk keeps no device memory"


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
    """The walk asks for the last one; each other one has been started before the one after it was used up."""
    log = Logged(disk)
    with tg.memory.policy(offload_names("h", tier=log)) as m:
        gradients(weights, x)
    away = LAYERS - 1
    order = [n for what, n in log.log if what == "get"]
    assert order == list(range(away, 0, -1))
    for n in range(1, away):
        started, asked = log.log.index(("prefetch", n)), log.log.index(("get", n))
        assert started < log.log.index(("get", n + 1)) + (n == away - 1) * 2 and started < asked
    assert m.prefetches >= away - 1
    coming: set[int] = set()
    for what, n in log.log:
        (coming.add if what == "prefetch" else coming.discard)(n)
        assert len(coming) <= 2, "each takes memory before it is read"


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
    """Values come back from their tier; tangents, which are in none, are made again."""

    def run() -> Any:
        return values(list(tg.jvp(tg.grad(lambda x: model(weights, x)), (x,), (tg.ones_like(x),))))

    plain = run()
    with tg.memory.policy(offload_names("h", tier=disk)) as m:
        assert bits_equal(run(), plain)
    assert m.offloads and m.restored and m.fetches


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

    monkeypatch.setattr(tiers, "_extend", full)
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
    assert [n for what, n in log.log if what == "get"] == list(range(1, LAYERS + 1))
    for n in range(3, LAYERS + 1):
        assert log.log.index(("prefetch", n)) < log.log.index(("get", n - 1))
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
    with tg.memory_budget(tg.memory.LEDGER.live_bytes + (1 << 40)) as m:
        live = m.live_bytes
    with tg.memory_budget(live + 10 * BYTES + BYTES // 2) as m:
        assert bits_equal(run(), plain)
    assert [what for what, _ in log.log] == ["prefetch", "get", "get"] and m.fetches == 1


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


class Slow:
    """A slot whose ``get`` waits until it is let go on; it serves one thread at a time, as a slot does."""

    def __init__(self) -> None:
        self.began, self.go_on = threading.Semaphore(0), threading.Semaphore(0)
        self.inside = self.most = self.gets = 0
        self.nbytes = BYTES

    def prefetch(self) -> None:
        pass

    def get(self) -> Any:
        self.inside += 1
        self.gets += 1
        self.most = max(self.most, self.inside)
        self.began.release()
        assert self.go_on.acquire(timeout=20)
        self.inside -= 1
        return np.full((ROWS, N), 3.0, np.float32)

    def drop(self) -> None:
        pass


def coming(slot: Slow) -> offload.Moved:
    moved = offload.Moved(tg.asarray(array(ROWS, N))._buffer.node, slot)
    assert moved.prefetch() and moved.coming
    return moved


def test_what_is_being_fetched_gives_no_way() -> None:
    slot, found = Slow(), []
    with tg.memory_budget("1GiB") as m:
        base = m.live_bytes
        moved = coming(slot)
        assert m.live_bytes == base + BYTES
        fetching = threading.Thread(target=lambda: found.append(moved.fetch(moved.node)))
        fetching.start()
        assert slot.began.acquire(timeout=20)
        assert moved.cancel() is False and not moved.coming
        assert m.live_bytes == base + BYTES, "counted while it is on its way into the hands of who asked"
        slot.go_on.release()
        fetching.join(20)
        assert slot.gets == slot.most == 1 and m.live_bytes == base + BYTES
        assert np.all(found[0].array == 3.0)
        found.clear()
        assert m.live_bytes == base


@pytest.mark.parametrize("reruns", [0, 1])
def test_what_was_on_its_way_is_counted_as_what_asks_for_it_makes(reruns: int) -> None:
    slot = Slow()
    slot.go_on.release()
    with tg.memory_budget("1GiB"):
        moved = coming(slot)
        buffer = during(moved.fetch, moved.node, reruns=reruns)
        found = tg.memory.LEDGER.by("category")
        assert found.get("rematerialized", 0) == reruns * BYTES and buffer.array is not None


@pytest.mark.parametrize(("kept", "freed", "made"), [(0, 0, False), (100, 0, False), (100, 1, True), (100, 100, True)])
@pytest.mark.parametrize("nbytes", [99, 100, 101])
def test_room_is_made_by_what_copies_let_go_of(
    kept: int, freed: int, made: bool, nbytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without waiting for more than is needed; all is let go of that is done where that is not enough."""

    class Tier:
        kept_bytes, asked = kept, list[Any]()

        def reclaim(self, nbytes: int | None = None) -> int:
            self.asked.append(nbytes)
            self.kept_bytes -= freed
            return freed

    tier = Tier()
    monkeypatch.setattr(offload, "_used", [tier])
    assert offload.Offloads().give_way(nbytes) == made
    assert tier.asked == ([] if not kept else [nbytes if nbytes <= kept else None])


def test_what_gives_way_is_fetched_anew() -> None:
    slot, found, gave = Slow(), [], []
    with tg.memory_budget("1GiB") as m:
        base = m.live_bytes
        moved = coming(slot)
        giving = threading.Thread(target=lambda: gave.append(moved.cancel()))
        giving.start()
        assert slot.began.acquire(timeout=20)
        fetching = threading.Thread(target=lambda: found.append(moved.fetch(moved.node)))
        fetching.start()
        assert not slot.began.acquire(timeout=0.2), "the slot serves one thread at a time"
        slot.go_on.release()
        giving.join(20)
        slot.go_on.release()
        fetching.join(20)
        assert gave == [True] and slot.gets == 2 and slot.most == 1
        assert m.live_bytes == base + BYTES == m.peak_bytes
        found.clear()
        assert m.live_bytes == base and not moved.coming


def test_what_is_on_its_way_back_does_not_come_to_a_forked_child() -> None:
    class Coming:
        forgotten = 0

        def forget(self) -> None:
            self.forgotten += 1

    offloads, coming, gone = offload.Offloads(), Coming(), Coming()
    offloads._coming = [weakref.ref(coming), weakref.ref(gone)]  # type: ignore[list-item]
    del gone
    offloads.in_child()
    assert coming.forgotten == 1
    offloads.in_child()
    assert coming.forgotten == 1 and not offloads.give_way(1)
