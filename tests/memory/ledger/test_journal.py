"""Parts of a journal: which steps stay whole, and what is left of the others."""

from __future__ import annotations

import pytest

from tapegrad.memory.ledger.journal import Parts


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
