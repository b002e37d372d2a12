"""A budget that gives way: what was alive before it leaves room as far as it may be read."""

from __future__ import annotations

import gc

import pytest

from tapegrad.memory.budget.budget import MANAGER, yielding
from tapegrad.memory.ledger.ledger import LEDGER

UNIT = 4096


@pytest.mark.parametrize("read", [0, 2, 3])
def test_what_is_read_of_before_counts_beyond_what_may_be_read(read: int) -> None:
    """Once each: the part that may be read is used up."""
    gc.collect()
    room = yielding(20 * UNIT, read * UNIT)
    assert room.taken == 0
    with room:
        limit, taken = MANAGER.limit, 0
        assert limit == LEDGER.live_bytes + (20 - read) * UNIT
        for nbytes in (1, 3, 2, 1):
            room.has_read(nbytes * UNIT)
            taken += nbytes
            assert MANAGER.limit == limit - UNIT * max(0, taken - read)
            assert room.taken == 0
        room.has_read(1 << 40)
        assert MANAGER.limit == 0
