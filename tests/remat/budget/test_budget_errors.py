"""BudgetError: it names the operation, the bytes that suffice, what is alive, and the lines that hold it."""

from __future__ import annotations

import gc
import re
import sys
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
from budget_cases import SIDE, UNIT, check_sound, gradient, layers, live

import tapegrad as tg
from tapegrad.errors import BudgetError, DeviceMemoryError

MIB = np.zeros((256, 1024), "float32")


def test_it_names_the_operation_and_who_holds_the_bytes(x: tg.Tensor) -> None:
    limit = live() + 5 * UNIT
    held = []
    line = sys._getframe().f_lineno + 3
    with pytest.raises(BudgetError) as caught, tg.memory_budget(limit):
        for _ in range(9):
            held.append(tg.softmax(x))
    message, needed = str(caught.value), caught.value.needed_bytes
    assert needed == limit + UNIT and f"{needed} bytes" in message and "softmax" in message
    assert "Live:" in message and re.search(r"user \d", message) and f"{__file__}:{line}" in message
    assert isinstance(caught.value, DeviceMemoryError) and isinstance(caught.value, MemoryError)


def test_what_has_no_room_is_named(x: tg.Tensor) -> None:
    with tg.memory_budget(limit := live() + UNIT):
        with pytest.raises(BudgetError, match=f"a new array needs {2 * UNIT} bytes more, but .* budget of {limit}"):
            tg.asarray(np.ones(2 * SIDE * SIDE))
        with pytest.raises(BudgetError, match="softmax needs"):
            tg.softmax(tg.softmax(tg.softmax(x)) @ tg.softmax(x))


def test_it_tells_what_tapes_save_of_what_the_user_holds(x: tg.Tensor) -> None:
    def refused() -> str:
        held, other = [], tg.stop_gradient(x)
        try:
            with tg.memory_budget(live() + 4 * UNIT), tg.GradientTape() as tape:
                tape.watch(x)
                held += tg.memory.keep([tg.softmax(x), tg.softmax(x)])
                for _ in range(100):
                    held.append(tg.memory.keep(tg.softmax(other)))
        except BudgetError as e:
            return str(e)

    assert "activation 4.00 KiB" in refused()


@pytest.mark.parametrize("units", range(4))
def test_sizes_in_the_message_never_contradict_the_limit(units: int, x: tg.Tensor) -> None:
    limit = live() + units * UNIT
    with pytest.raises(BudgetError) as caught, tg.memory_budget(limit):
        held = [tg.softmax(x) for _ in range(9)]  # noqa: F841
    (needed,) = re.findall(r"can run with (\d+) bytes", str(caught.value))
    assert int(needed) == caught.value.needed_bytes > limit


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize(("less", "named"), [(0, True), (512, False)])
def test_lines_are_named_of_values_from_a_256th_of_the_limit_on(less: int, named: bool, where: str) -> None:
    gc.collect()
    nbytes = 512 * (8 + live() // (64 * 512))  # what is alive already is no more than a quarter of the limit
    x, c = (tg.asarray(np.ones((nbytes - less) // 8)) for _ in range(2))
    with tg.GradientTape(persistent=True) as tape:
        tape.watch(x)
        y = tg.sum(x * c)
    held = []
    line = sys._getframe().f_lineno + 3
    with pytest.raises(BudgetError) as caught, tg.memory_budget(256 * nbytes):
        while True:
            held.append(tg.sin(x) if where == "forward" else tape.gradient(y, x))
    assert (f"{__file__}:{line}" in str(caught.value)) == named


@pytest.mark.parametrize("measured", [False, True])
def test_lines_are_named_of_what_was_made_before_if_somebody_measures(measured: bool) -> None:
    gc.collect()
    with tg.measure() if measured else nullcontext():
        x = tg.exp(tg.asarray(MIB))
        line = sys._getframe().f_lineno - 1
        x.numpy()
        with pytest.raises(BudgetError) as caught, tg.memory_budget(live()):
            tg.asarray(MIB)
        text = str(caught.value)
    assert "1.00 MiB" in text and x.size
    assert (f"{__file__}:{line}" in text) == measured and ("with tg.measure()" in text) == (not measured)


def test_a_failed_gradient_can_be_asked_again(x: tg.Tensor) -> None:
    required = gradient(x)
    gc.collect()
    base = live()
    with tg.memory_budget(base + 9 * UNIT), tg.GradientTape(persistent=True) as tape:
        tape.watch(x)
        y = tg.sum(layers(x, 20))
        for _ in range(2):
            with pytest.raises(BudgetError), tg.memory_budget(base + 3 * UNIT):
                tape.gradient(y, x)
        assert np.array_equal(tape.gradient(y, x).numpy(), required)


@pytest.mark.parametrize("lacks", [1, 512, UNIT])
def test_what_has_no_room_to_come_back_is_named(lacks: int, tmp_path: Any, x: tg.Tensor) -> None:
    policy = tg.policies.offload_names("h", tier=tg.memory.tiers.Disk(tmp_path))
    with tg.memory_budget("1GiB", policy=policy) as m, tg.GradientTape(persistent=True) as tape:
        tape.watch(x)
        h = tg.name(tg.softmax(x), "h")
        y = tg.sum(h)
        required = tape.gradient(y, x).numpy()
        del h
        with tg.memory_budget(live() - UNIT):
            assert m.offloads == 1
        with (
            tg.memory_budget(live() + UNIT - lacks),
            pytest.raises(BudgetError, match="needs") as caught,
        ):
            tape.gradient(y, x)
        assert caught.value.needed_bytes > live() + UNIT - lacks
        assert np.array_equal(tape.gradient(y, x).numpy(), required)
        del tape, y, caught
    check_sound()
