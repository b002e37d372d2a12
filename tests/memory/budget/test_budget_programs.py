"""Laws of budgets on random programs: right bits within the limit, or a BudgetError that tells the truth; no leak.

``TAPEGRAD_BUDGET_EXAMPLES`` (a number, 60 if not set) and ``TAPEGRAD_BUDGET_SEED`` (for other examples than the usual
ones) are for long runs.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator

import pytest
from budget_programs import Program, Spans, outcome, programs, spans, ways
from checks import bits_equal, no_garbage
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

import tapegrad as tg
from tapegrad.core import account
from tapegrad.core.state import thread
from tapegrad.engine import region
from tapegrad.memory.budget.budget import MANAGER
from tapegrad.memory.ledger.ledger import LEDGER

LAZY, EAGER = 1, 10**9
EXAMPLES = int(os.environ.get("TAPEGRAD_BUDGET_EXAMPLES", "60"))
SEED = os.environ.get("TAPEGRAD_BUDGET_SEED")


@pytest.fixture(scope="module", autouse=True)
def defaults() -> Iterator[None]:
    small = region.SMALL
    yield
    region.set_small(small)


def check_nothing_is_left() -> None:
    """No budget in force, nothing recorded, nothing remembered."""
    assert account.current is account.NOBODY and thread.recorders == () and thread.deferring is None
    assert MANAGER._present() is None and len(MANAGER._storages.candidates) == 0 and not LEDGER.promised_bytes


def check(program: Program, when: tuple, fractions: tuple[float, ...]) -> None:
    """The laws: the first budgets may be infeasible, those that the errors ask for, at last, are not."""
    wanted = program.run()
    with tg.measure() as m:
        base = m.live_bytes
        program.run()
    room = m.peak_bytes - base
    limits = tuple(base + int(room * fraction) for fraction in fractions[: len(when)])
    for errors in itertools.count():
        budgets = Spans(when, limits)
        with no_garbage(), tg.measure() as m:
            found, needed = outcome(program, budgets)
        assert all(peak <= limit for peak, limit in budgets.peaks), budgets.peaks
        assert m.live_bytes == base
        check_nothing_is_left()
        if found is not None:
            break
        assert min(limits) < needed <= base + 2 * room + 8192, (needed, limits, base, room)
        least = base + 2 * room + 8192 if errors > 1 else needed
        limits = tuple(max(limit, least) for limit in limits)
    assert bits_equal(found, wanted)
    if errors:
        assert bits_equal(program.run(), wanted)


fractions = st.tuples(*[st.floats(0.0, 1.1)] * 2)


LONG: dict = {"derandomize": False, "phases": [Phase.generate], "database": None} if SEED else {}


@settings(max_examples=EXAMPLES, suppress_health_check=list(HealthCheck), **LONG)
@(seed(int(SEED)) if SEED else lambda f: f)
@given(programs, st.sampled_from([(4, 3), (8, 16), (6, 64)]), ways, spans, fractions, st.sampled_from([LAZY, EAGER]))
def test_budgets_change_no_bit_and_leave_nothing(
    blocks: list, shape: tuple[int, int], way: str, when: tuple, parts: tuple[float, float], small: int
) -> None:
    region.set_small(small)
    check(Program(blocks, shape, way), when, parts)
