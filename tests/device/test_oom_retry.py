"""Where a device has no room: something is dropped and the request repeated, or the error tells who holds what."""

from __future__ import annotations

import re
from collections.abc import Iterator
from math import inf
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from checks import c64, same

import tapegrad as tg
from tapegrad.core.storage import METER
from tapegrad.device.pool import POOL, HostPool
from tapegrad.errors import DeviceMemoryError

N = 160  # a square of float64 is 200 KiB: from the pool


class Refusing:
    """The host pool's ``empty``, which refuses the requests of these numbers, counted from 1."""

    def __init__(self, *numbers: int) -> None:
        self.numbers, self.asked, self._empty = numbers, 0, POOL.empty

    def __call__(self, shape: tuple[int, ...], dtype: Any) -> Any:
        self.asked += 1
        if self.asked in self.numbers or not self.numbers:
            raise MemoryError(f"refused number {self.asked}")
        return self._empty(shape, dtype)


@pytest.fixture
def refuse(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    def install(*numbers: int) -> Refusing:
        found = Refusing(*numbers)
        monkeypatch.setattr(POOL, "empty", found)
        return found

    yield install
    monkeypatch.undo()


def step(x: tg.Tensor) -> Any:
    with tg.GradientTape() as tape:
        tape.watch(x)
        h = x
        for _ in range(4):
            h = tg.softmax(h @ x)
        loss = tg.sum(h * h)
        del h
    return tape.gradient(loss, x)


def test_an_error_says_what_was_asked_and_who_holds_the_bytes(refuse: Any) -> None:
    x = c64(np.eye(N))
    with tg.measure():
        mine = x + x
        mine.numpy()
        refuse()
        with pytest.raises(DeviceMemoryError) as caught:
            tg.matmul(x, x)
    text = str(caught.value)
    assert text.startswith(f"cpu: no room for float64[{N}, {N}], {N * N * 8} bytes")
    assert (
        "Live: " in text
        and re.search(r"user \d+\.\d\d KiB", text)
        and "test_oom_retry.py:" in text
        and "memory_budget" in text
    )
    assert isinstance(caught.value, MemoryError)


def test_without_a_measurement_a_census_is_taken(refuse: Any) -> None:
    x = c64(np.eye(N))
    y = tg.matmul(x, x)
    refuse()
    with pytest.raises(DeviceMemoryError, match=r"matmul[\s\S]*inside `with tg.measure"):
        tg.matmul(y, x)
    assert tg.memory.LEDGER.by("category") == {}  # the census is over


def test_under_a_budget_something_is_dropped_and_the_request_repeated(refuse: Any) -> None:
    x = c64(np.random.default_rng(0).standard_normal((N, N)))
    wanted = step(x)
    count = refuse(10**9)
    step(x)
    requests = count.asked
    for k in range(1, requests + 1):
        refuse(k)
        with tg.memory_budget("1GiB") as m:
            try:
                found = step(x)
            except DeviceMemoryError as e:
                assert m.evictions == 0, e  # nothing could be dropped, and no request but the first was refused
                continue
        same(found, wanted)
        assert np.array_equal(found.numpy(), wanted.numpy())
    assert requests > 8


def test_what_is_dropped_first_is_given_back_to_the_system(refuse: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    x = c64(np.random.default_rng(0).standard_normal((N, N)))
    given: list[int] = []
    monkeypatch.setattr(POOL, "free_all_blocks", lambda: given.append(1))
    refuse(6)
    with tg.memory_budget("1GiB") as m:
        step(x)
    assert m.evictions == len(given) == 1


def test_idle_blocks_count_within_a_limit() -> None:
    size = 256 * 1024
    meter = SimpleNamespace(limit=inf, live_bytes=0)
    pool = HostPool(cast(Any, meter))
    blocks = [pool.empty((size,), np.dtype(np.uint8)) for _ in range(4)]
    meter.limit = 5 * size
    del blocks
    assert pool.idle_bytes == 4 * size
    other = pool.empty((2 * size,), np.dtype(np.uint8))
    assert pool.lent_bytes == 2 * size and pool.idle_bytes == 3 * size
    another = pool.empty((3 * size,), np.dtype(np.uint8))
    assert pool.idle_bytes == 0 and pool.lent_bytes == 5 * size
    del other, another
    assert pool.idle_bytes == 5 * size
    third = pool.empty((size,), np.dtype(np.uint8))
    assert third.nbytes == size


def test_a_budget_frees_idle_blocks_and_the_pool_keeps_blocks_again_after_it() -> None:
    def idle_after(mib: int) -> int:
        tg.ones(mib << 17, dtype="float64")
        return POOL.idle_bytes

    assert idle_after(64) >= 64 << 20
    with tg.memory_budget("1GiB"), tg.memory_budget(METER.live_bytes + (36 << 20)):
        assert POOL.idle_bytes <= 36 << 20
        assert idle_after(16) <= 36 << 20
    assert idle_after(64) >= 64 << 20
