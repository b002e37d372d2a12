"""Parts of a journal: which steps stay whole, and what is left of the others."""

from __future__ import annotations

import pytest

from tapegrad.memory.ledger.journal import Part, Parts


def steps(keep: int, count: int, events: int = 10) -> Parts:
    """So many steps with so many events each, one higher than the one before."""
    parts = Parts(keep, lambda calls: None)
    for step in range(count):
        parts.now.ops += [(i, i, "add", 0, -1, -1) for i in range(events)]
        parts.close(count - step, 0)
    return parts


@pytest.mark.parametrize(("keep", "whole"), [(80, 8), (79, 7), (71, 7), (70, 7), (69, 6), (60, 6), (0, 4)])
def test_as_many_events_are_kept_as_are_wanted_but_never_less_than_the_first_and_the_last_steps(
    keep: int, whole: int
) -> None:
    """The part that is open is one of the last two; dropped ones beside each other become one."""
    parts = steps(keep, 8)
    assert sum(part.whole for part in parts.all[:-1]) == whole
    assert parts.events == 80 and parts.dropped == 80 - 10 * whole == 80 - sum(map(len, parts.all))
    assert len(parts.all) == whole + 1 + (whole < 8)
    assert [part.whole for part in parts.all[:3]] == [True] * 3 and all(part.whole for part in parts.all[-2:])


def test_of_a_dropped_part_stays_what_came_before_it_or_is_there_after_it() -> None:
    part = Part()
    part.rows = {2: (0,) * 10, 3: (1,) * 10}  # type: ignore[dict-item]
    part.ends = {1: (5, 5, "", -1, -1), 2: (6, 6, "", -1, -1)}
    part.changes = [(3, 1, "gradient"), (4, 2, "gradient"), (5, 3, "gradient")]
    part.ops, part.replays = [(0, 0, "add", 0, -1, -1)], [(0, 0, 0, 0)]
    assert len(part) == 2 + 2 + 3 + 1 + 1 and part.whole
    part.reduce()
    assert list(part.rows) == [3] and list(part.ends) == [1] and [c[1] for c in part.changes] == [1, 3]
    assert len(part) == 4 and not part.ops and not part.replays and not part.whole


def test_a_row_is_known_for_three_parts() -> None:
    parts = Parts(100, lambda calls: None)
    row = (0, 0, 512, "user", "exp", 0, -1, -1, 0, -1)
    parts.now.rows[7] = row
    for after in range(4):
        assert parts.row(7) == (row if after < 3 else None) and parts.row(8) is None
        parts.close(0, 0)
