"""Room is reserved, used and given back in one place: after a failure nothing of it stays promised."""

from __future__ import annotations

import ast
import gc
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from budget_cases import SIDE, UNIT, live
from checks import c64, var64

import tapegrad as tg
from tapegrad.core import account
from tapegrad.device.pool import HostPool
from tapegrad.engine import region
from tapegrad.engine.cpu.tiles import Tiling
from tapegrad.engine.evaluate import fill
from tapegrad.engine.executor import Executor
from tapegrad.engine.make import Application, Function
from tapegrad.errors import BudgetError
from tapegrad.memory.budget.budget import MANAGER
from tapegrad.memory.ledger.ledger import LEDGER

PACKAGE = Path(tg.__file__).parent


@pytest.fixture(params=[1, 10**9], ids=["lazy", "eager"])
def small(request: pytest.FixtureRequest) -> Iterator[None]:
    gc.collect()
    before = region.SMALL
    region.set_small(request.param)
    yield
    region.set_small(before)


class Own:
    """A primitive of the user's that fails when told to."""

    def __init__(self) -> None:
        self.fails = False

        @tg.primitive
        def own(x: Any) -> Any:
            if self.fails:
                raise ArithmeticError("own")
            return np.sin(x)

        own.defvjp(lambda ct, x: ct * tg.cos(x))
        self.call = own


def paths() -> dict[str, Callable[[Any], Any]]:
    return {
        "region": lambda x: np.asarray(tg.exp(x * 1e3) * 2.0),
        "reduction": lambda x: tg.sum(tg.exp(x * 1e3)),
        "barrier": lambda x: tg.matmul(x * 1e200, x * 1e200),
        "softmax": lambda x: np.asarray(tg.softmax(x * 1e200, axis=0) / 0.0),
        "copy of a view": lambda x: np.asarray(tg.reshape(tg.permute_dims(x, (1, 0)), (SIDE * SIDE,)) * 1e300 * 1e300),
        "optimizer": lambda x: tg.optim.Adam(1e300).apply([x * 1e300 * 1e300], [var64(np.ones((SIDE, SIDE)))]),
    }


def in_a_thread(work: Callable[[], Any]) -> list[Any]:
    """What it returns, or the error."""
    found: list[Any] = []

    def run() -> None:
        try:
            found.append(work())
        except BaseException as e:
            found.append(e.with_traceback(None))

    thread = threading.Thread(target=run)
    thread.start(), thread.join(60)
    return found


def two_threads(fail: Callable[[], None], base: int) -> None:
    """``fail`` fails in this thread, which goes on; another one has all the room then, and to the byte."""
    limit = base + 40 * UNIT
    with tg.memory_budget(limit) as m:
        fail()
        gc.collect()
        assert LEDGER.promised_bytes == 0
        room = (limit - m.live_bytes) // UNIT
        kept = in_a_thread(lambda: [tg.softmax(c64(np.zeros((SIDE, SIDE)))) for _ in range(1)])
        assert not isinstance(kept[0], BaseException), kept
        del kept
        held = in_a_thread(lambda: [c64(np.zeros((SIDE, SIDE))) for _ in range(room)])
        assert not isinstance(held[0], BaseException), held[0]
        more = in_a_thread(lambda: c64(np.zeros((SIDE, SIDE))))
        assert isinstance(more[0], BudgetError) and m.peak_bytes <= limit
        del held, more


@pytest.mark.parametrize("path", list(paths()))
def test_after_a_floating_point_error_another_thread_has_all_the_room(path: str, small: None) -> None:
    x = c64(np.full((SIDE, SIDE), 2.0))
    work = paths()[path]

    def fail() -> None:
        with np.errstate(all="raise"), pytest.raises(FloatingPointError):
            work(x)

    with np.errstate(all="ignore"):
        work(x)  # whatever is made once
    two_threads(fail, live())


def test_after_an_own_primitive_has_failed_another_thread_has_all_the_room(small: None) -> None:
    own, x = Own(), c64(np.ones((SIDE, SIDE)))
    own.call(x)
    own.fails = True

    def fail() -> None:
        with pytest.raises(ArithmeticError):
            own.call(x)

    two_threads(fail, live())


class Faults:
    """Raises at the k-th launch of anything."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count, self.at, self.error = 0, -1, ZeroDivisionError
        self._wrap(monkeypatch, HostPool, "empty")
        for work in (Tiling, Application, Function):
            self._wrap(monkeypatch, work, "run")
        self._wrap(monkeypatch, Executor, "small")

    def _wrap(self, monkeypatch: pytest.MonkeyPatch, where: Any, name: str) -> None:
        function = getattr(where, name)

        def counted(*args: Any, **kwargs: Any) -> Any:
            self.count += 1
            if self.count == self.at:
                raise self.error("fault")
            return function(*args, **kwargs)

        monkeypatch.setattr(where, name, counted)


@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt])
def test_a_fault_at_any_launch_leaves_no_promise(
    error: type[BaseException], small: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, w = c64(np.random.default_rng(0).normal(size=(SIDE, SIDE))), var64(np.ones((SIDE, SIDE)))
    own = Own()

    def step() -> Any:
        tg.random.seed(3)
        with tg.GradientTape() as tape:
            h = own.call(tg.softmax(tg.matmul(x, w)) * 1.5)
            h = tg.reshape(tg.permute_dims(h, (1, 0)), (SIDE * SIDE,))
            h = h + tg.random.normal((SIDE * SIDE,), dtype="float64")
            y = tg.sum(tg.exp(h[:5])) + tg.sum(tg.zeros((SIDE,), dtype="float64"))
        g = tape.gradient(y, w)
        tg.optim.SGD(0.0).apply([g], [w])
        return np.array(g)

    wanted, base = step(), live()
    faults = Faults(monkeypatch)
    faults.error = error
    limit = base + 200 * UNIT
    raised = 0
    with tg.memory_budget(limit) as m:
        for k in range(1, 1000):
            faults.count, faults.at = 0, k
            try:
                step()
            except error:
                raised += 1
            reached = faults.count >= k
            faults.at = -1
            gc.collect()  # the failed step's tape, which else would share its recipes with the next one
            free = limit - m.live_bytes  # what has gone is noted when somebody asks
            assert LEDGER.promised_bytes == 0 and LEDGER.room == free, k
            if not reached:
                break
            found = in_a_thread(step)
            assert np.array_equal(found[0], wanted), (k, found)
        assert m.peak_bytes <= limit and raised > 10
    gc.collect()
    assert live() == base


def test_room_is_given_back_though_an_interrupt_comes_just_then(monkeypatch: pytest.MonkeyPatch) -> None:
    x, settle = c64(np.ones((SIDE, SIDE))), LEDGER.settle_promise
    left: list[int] = []

    def interrupted(promised: int) -> None:
        if not left:
            left.append(LEDGER.promised())
            raise KeyboardInterrupt
        settle(promised)

    def refused() -> None:
        raise ArithmeticError

    with tg.memory_budget("1MiB"):
        with pytest.raises(ArithmeticError):
            account.current.in_room([x._buffer.node.aval], ["f"], refused)
        assert not LEDGER.promised_bytes
        monkeypatch.setattr(LEDGER, "settle_promise", interrupted)
        with pytest.raises(KeyboardInterrupt):
            account.current.in_room([x._buffer.node.aval], ["f"], lambda: None)
        assert left == [UNIT] and not LEDGER.promised_bytes


def test_no_room_is_lost_where_an_interrupt_comes_before_the_promise_is_noted() -> None:
    class Promises(dict[int, int]):
        def __setitem__(self, thread_id: int, nbytes: int) -> None:
            raise KeyboardInterrupt

    x = c64(np.ones((SIDE, SIDE)))
    gc.collect()
    with tg.memory_budget("1MiB"):
        y = tg.sin(x)
        LEDGER.settle()
        room, before = LEDGER.room, LEDGER.promises_apart(Promises())
        with pytest.raises(KeyboardInterrupt):
            account.current.in_room([x._buffer.node.aval], ["f"], lambda: None)
        assert LEDGER.promises_apart(before) == {} and LEDGER.room == room
        del y


def test_as_much_is_promised_as_is_asked_for_whoever_makes_the_room() -> None:
    """The ledger, while there is some; else the manager, who drops values for it."""
    x = c64(np.ones((SIDE, SIDE)))
    found = []
    with tg.measure() as m:
        base = m.live_bytes
    with tg.memory_budget(base + 6 * UNIT) as m, tg.GradientTape() as tape:
        tape.watch(x)
        h = x
        for _ in range(4):
            h = tg.softmax(h)
        for values in (1, 4):
            evictions = m.evictions
            account.current.in_room([x._buffer.node.aval] * values, ["f"], lambda: found.append(LEDGER.promised()))
            assert (m.evictions > evictions) == (values == 4)
    assert found == [UNIT, 4 * UNIT]


def test_room_for_all_that_a_kernel_writes_is_promised_before_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else it would have the memory before others have given theirs; an error names what it computes."""
    kernel, found = Executor._kernel, list[int]()

    def noted(executor: Executor, work: Any) -> None:
        found.append(LEDGER.promised())
        kernel(executor, work)

    monkeypatch.setattr(Executor, "_kernel", noted)
    x = c64(np.linspace(0.0, 1.0, 20_480))
    base = live()
    with tg.memory_budget(base + 2 * x.nbytes) as m:
        y, z = tg.exp(x), tg.sin(x)
        fill([y._buffer, z._buffer])
        assert sum(found) == 2 * x.nbytes and m.peak_bytes == base + 2 * x.nbytes
    with pytest.raises(BudgetError, match="memory_budget: exp needs"), tg.memory_budget(base + 2 * x.nbytes):
        tg.exp(x + x).numpy()


def test_what_is_larger_than_was_promised_needs_the_rest_alone() -> None:
    gc.collect()
    with tg.measure() as m:
        base = m.live_bytes
    aval = c64(np.ones((SIDE, SIDE)))._buffer.node.aval

    def larger(units: int) -> Any:
        return MANAGER.in_room((aval,), ("mine",), lambda: c64(np.ones((units, SIDE, SIDE))))

    with tg.memory_budget(base + 3 * UNIT) as m:
        for units in (1, 2, 3):
            made = larger(units)
            assert m.live_bytes == base + units * UNIT
            del made
        with pytest.raises(BudgetError, match=f"a new array needs {3 * UNIT} bytes more, but {base + UNIT} of"):
            larger(4)


def test_room_is_reserved_in_one_place_alone() -> None:
    found = []
    for path in PACKAGE.rglob("*.py"):
        for n in ast.walk(ast.parse(path.read_text("utf-8"))):
            called = n.func if isinstance(n, ast.Call) else None
            if isinstance(called, ast.Attribute) and called.attr in ("promise", "settle_promise"):
                found.append(path.name)
    assert set(found) == {"manager.py"}


def test_a_kernel_within_a_kernel_has_room_of_its_own() -> None:
    """What it reserves does not void what was reserved for the outer one's result."""
    x = c64(np.random.default_rng(0).normal(size=(SIDE, SIDE)))
    aval = x._buffer.node.aval
    before: list[int] = []

    def outer() -> tg.Tensor:
        inner = tg.softmax(x)
        before.append(LEDGER.promised_bytes)
        found = c64(np.array(inner))
        before.append(LEDGER.promised_bytes)
        return found

    gc.collect()
    base = live()
    with tg.memory_budget(base + 2 * UNIT) as m:
        y = account.current.in_room((aval,), ("outer",), outer)
        assert before == [UNIT, 0] and LEDGER.promised_bytes == 0 and m.peak_bytes == base + 2 * UNIT
        del y
    with pytest.raises(BudgetError, match="softmax"), tg.memory_budget(base + UNIT):
        account.current.in_room((aval,), ("outer",), outer)
    assert account.current is account.NOBODY and LEDGER.promised_bytes == 0


# What a budget that never binds costs --------------------------------------------------------------------------------
