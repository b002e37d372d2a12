"""Laws of budgets on random programs: right bits within the limit, or a BudgetError that tells the truth; no leak.

``TAPEGRAD_BUDGET_EXAMPLES`` (a number, 40 if not set) and ``TAPEGRAD_BUDGET_SEED`` (for other examples than the usual
ones) are for long runs.
"""

from __future__ import annotations

import itertools
import os

from budget_cases import EAGER, LAZY, limited, recorded, small_from
from budget_programs import Program, Spans, outcome, programs, spans, ways
from checks import bits_equal, no_garbage
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

import tapegrad as tg

EXAMPLES = int(os.environ.get("TAPEGRAD_BUDGET_EXAMPLES", "40"))
SEED = os.environ.get("TAPEGRAD_BUDGET_SEED")


def check(program: Program, when: tuple, fractions: tuple[float, ...]) -> None:
    """The laws: the first budgets may be infeasible, those that the errors ask for, at last, are not."""
    required = program.run()
    with tg.measure() as m:
        base = m.live_bytes
        program.run()
    room = m.peak_bytes - base
    assert all(sum(parts.values()) == m.peak_bytes for parts in (m.peak_by_category, m.peak_by_primitive))
    limits = tuple(base + int(room * fraction) for fraction in fractions[: len(when)])
    for errors in itertools.count():
        budgets = Spans(when, limits)
        with no_garbage(), tg.measure() as m:
            result, needed = outcome(program, budgets)
        assert all(peak <= limit for peak, limit in budgets.peaks), budgets.peaks
        assert m.live_bytes == base and not limited() and not recorded()
        assert sum(m.peak_by_category.values()) == m.peak_bytes
        if result is not None:
            break
        assert min(limits) < needed <= base + 2 * room + 8192, (needed, limits, base, room)
        least = base + 2 * room + 8192 if errors > 1 else needed
        limits = tuple(max(limit, least) for limit in limits)
    assert bits_equal(result, required)
    if errors:
        assert bits_equal(program.run(), required)


fractions = st.tuples(*[st.floats(0.0, 1.1)] * 2)


LONG: dict = {"derandomize": False, "phases": [Phase.generate], "database": None} if SEED else {}


@settings(max_examples=EXAMPLES, suppress_health_check=list(HealthCheck), **LONG)
@(seed(int(SEED)) if SEED else lambda f: f)
@given(programs, st.sampled_from([(4, 3), (8, 16), (6, 64)]), ways, spans, fractions, st.sampled_from([LAZY, EAGER]))
def test_budgets_change_no_bit_and_leave_nothing(
    blocks: list, shape: tuple[int, int], way: str, when: tuple, parts: tuple[float, float], small: int
) -> None:
    with small_from(small):
        check(Program(blocks, shape, way), when, parts)
