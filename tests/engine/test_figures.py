"""What a measure says of one operation, for each way in which it runs: counted together, one by one, in a budget.

Kernels, bytes moved and cost are worked out by hand: what is read and written, each array once, 8 bytes an element.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import numpy as np
import pytest
from checks import c64

import tapegrad as tg
from tapegrad.core import primitive
from tapegrad.core.buffer import Buffer
from tapegrad.core.state import thread
from tapegrad.device import tally
from tapegrad.engine import make
from tapegrad.engine.evaluate import array_of, fill
from tapegrad.errors import BudgetError, DeviceMemoryError
from tapegrad.memory.ledger.ledger import LEDGER
from tapegrad.ops.apply import barrier
from tapegrad.tensor import Tensor

SMALL, LARGE = 100, 40_000
BUDGET = "a budget"


def _general(monkeypatch: pytest.MonkeyPatch, impl: Callable[..., Any], **of: Any) -> Any:
    """A primitive of one operand, for one test."""
    tg.zeros(1)  # every operation is declared
    monkeypatch.setattr(primitive, "REGISTRY", dict(primitive.REGISTRY))
    return primitive.general("twice", impl=impl, infer=lambda x: x, vjp=[None], dry=lambda x, out: out, **of)


def _doubled(x: Tensor) -> make.Function:
    """A work that primitives have no part in, as the updates of optimizers are."""

    def doubled(out: Any, a: Any) -> None:
        tally.passed(8, 16)
        np.multiply(a, 2, out)

    return make.Function("doubled", [x._buffer.node.aval], doubled, [array_of(x._buffer)])


class Figures(NamedTuple):
    """Of an operation on ``n`` elements."""

    nodes: dict[str, int]
    kernels: int
    moved: int
    cost: int


CASES: dict[str, tuple[Callable[[Any, Any], Any], Callable[[int], Figures]]] = {
    "a ufunc": (lambda x, m: tg.exp(x), lambda n: Figures({"exp": 1}, 1, 16 * n, 8 * n + 1)),
    "an array twice": (lambda x, m: x * x, lambda n: Figures({"multiply": 1}, 1, 16 * n, 8 * n + 1)),
    "no ufunc": (lambda x, m: tg.nn.functional.relu(x), lambda n: Figures({"relu": 1}, 1, 16 * n, 8 * n + 1)),
    "three operands": (
        lambda x, m: tg.where(x > 0.5, x, x),
        # Together the truth values are not stored.
        lambda n: (
            Figures({"greater": 1, "where": 1}, 2, 9 * n + 8 + 17 * n, 9 * n + 2)
            if n == SMALL
            else Figures({"greater": 1, "where": 1}, 1, 16 * n + 8, 9 * n + 2)
        ),
    ),
    "a view": (lambda x, m: x[1:], lambda n: Figures({}, 0, 0, 1)),
    "another name": (lambda x, m: tg.real(x), lambda n: Figures({}, 0, 0, 1)),
    "a reduction": (
        lambda x, m: tg.sum(m, axis=0),
        lambda n: Figures({"sum": 1}, 1, 8 * n + 8 * n // 10, 8 * n + 8 * n // 10 + 1),
    ),
    "a copy": (
        lambda x, m: tg.concat([x, x]),
        lambda n: Figures({"concat": 1}, 1, 8 * n + 16 * n, 2 * 8 * n + 16 * n + 1),
    ),
    "values without a recipe": (
        lambda x, m: Tensor(thread.executor.values(_doubled(x))[0]),
        lambda n: Figures({"doubled": 1}, 2, 16 * n + 24, 0),
    ),
    "creation": (lambda x, m: tg.zeros((x.size,)), lambda n: Figures({}, 0, 0, 0)),
}
WAYS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "together": nullcontext,
    "one by one": lambda: tg.measure(timeline=True),
    BUDGET: lambda: tg.memory_budget("1GiB"),
}


@pytest.mark.parametrize("n", [SMALL, LARGE])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("what", CASES)
def test_each_way_of_running_is_counted_alike(what: str, way: str, n: int) -> None:
    operation, figures = CASES[what]
    x, m = c64(np.linspace(0.1, 1.0, n)), c64(np.ones((10, n // 10)))
    with WAYS[way](), tg.measure() as measured:
        y = operation(x, m)
        fill((y._buffer,))
    got = Figures(measured.nodes_run, measured.kernel_runs, measured.bytes_moved, measured.cost)
    assert got == figures(n)._replace(nodes=Counter(figures(n).nodes))
    assert n == LARGE or not measured.scratch_bytes


@pytest.mark.parametrize("way", WAYS)
def test_passes_of_an_attempt_without_memory_are_not_counted(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    attempts: list[int] = []

    def passing(xp: Any, x: Any) -> Any:
        tally.passed(x.nbytes, 8)
        attempts.append(1)
        if len(attempts) == 1:
            raise MemoryError
        return x * 2.0

    twice, x = _general(monkeypatch, passing), c64(np.ones(SMALL))
    with WAYS[way](), tg.measure() as m:
        with pytest.raises(DeviceMemoryError, match="no room for twice"):
            barrier(twice, x)
        barrier(twice, x)
    assert m.bytes_moved == (8 * SMALL + 8) + 16 * SMALL


@pytest.mark.parametrize("way", WAYS)
def test_a_change_in_place_and_its_passes_are_counted(way: str) -> None:
    x = c64(np.ones(SMALL))
    target, number = array_of(x._buffer), np.full(1, 3.0)

    def scaled(target: Any, number: Any) -> None:
        tally.passed(24, 40)
        target *= number

    with WAYS[way](), tg.measure() as m:
        change = make.Change("scaled", x.device, scaled, [target], [number], ([target, number], [target]))
        thread.executor.change(change)
    assert target.tolist() == [3.0] * SMALL
    assert (m.kernel_runs, m.bytes_moved, m.nodes_run) == (2, 16 * SMALL + 8 + 24 + 40, {"scaled": 1})


@pytest.mark.parametrize("way", WAYS)
def test_the_most_that_a_kernel_takes_for_itself_is_told(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    taking = _general(monkeypatch, lambda xp, x: x * 2.0, scratch=lambda aval, x: 7 * aval.nbytes)
    small, large = c64(np.ones(SMALL)), c64(np.ones(2 * SMALL))
    with WAYS[way](), tg.measure() as m:
        for x in (small, large, small):
            barrier(taking, x)
    assert m.scratch_bytes == 7 * large.nbytes


@pytest.mark.parametrize("way", WAYS)
def test_what_a_region_takes_for_itself_is_told(way: str) -> None:
    y = tg.tanh(c64(np.linspace(-1, 1, LARGE))) * 2.0 + 1.0
    with WAYS[way](), tg.measure() as m:
        taken = make.of_region([y._buffer]).work.scratch_bytes
        fill((y._buffer,))
    assert m.scratch_bytes == taken > 0


def test_a_budget_has_room_for_what_a_kernel_takes_for_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    taking = _general(monkeypatch, lambda xp, x: x * 2.0, scratch=lambda aval, x: 64 * 512)
    x = c64(np.ones(64))
    with tg.measure() as m:
        room = m.live_bytes + 64 * 512 + 512
        with tg.memory_budget(room):
            barrier(taking, x)
        with tg.memory_budget(room - 1), pytest.raises(BudgetError):
            barrier(taking, x)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("n", [SMALL, LARGE])
def test_a_value_can_be_made_again_in_the_buffer_that_had_it(n: int, way: str) -> None:
    x = c64(np.linspace(0, 1, n))
    for y in (tg.exp(x), x[1:], tg.sum(x), tg.concat([x, x]), tg.nn.functional.relu(x)):
        node = y._buffer.node
        inputs = (x._buffer, x._buffer) if node.prim.name == "concat" else (x._buffer,)
        again = Buffer(None, node, inputs)
        with WAYS[way](), tg.measure():
            assert thread.executor.run(node, inputs, again) is again
            fill((again,))
        assert np.array_equal(again.array, y.numpy())


@pytest.mark.parametrize("way", WAYS)
def test_bytes_are_due_to_the_line_of_the_operation_that_needs_them(way: str) -> None:
    """Not to the line that asks for a value that waits."""
    x = c64(np.ones(LARGE))

    def later() -> tg.Tensor:
        y = tg.exp(x)
        z = y[::2]
        fill((z._buffer,))
        return z

    with WAYS[way](), tg.measure() as m:
        z = later()
    line = later.__code__.co_firstlineno + 1
    lines = {place: n for place, n in m.peak_by_line.items() if "before" not in place}
    assert [place.endswith(f"{__file__}:{line}") for place in lines] == [True] and z.shape == (LARGE // 2,)


def test_who_notes_the_time_is_told_to_which_node_a_walk_has_come(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is computed then is told as that node's part of the backward pass."""
    told: list[int] = []
    monkeypatch.setattr(type(LEDGER), "differentiating", lambda self, index: told.append(index))
    x = c64(np.ones(SMALL))
    with tg.measure(timeline=True), tg.GradientTape() as tape:
        tape.watch(x)
        steps = [tg.tanh(x)]
        steps.append(steps[0] * x)
        steps.append(tg.sum(steps[1]))
        tape.gradient(steps[2], x)
    assert list(dict.fromkeys(told)) == [t._buffer.node.index for t in reversed(steps)]
