"""Of each test of budgets: nothing is left of what it has kept, and no limit."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
from budget_cases import X
from checks import c64

import tapegrad as tg
from tapegrad.core import account
from tapegrad.engine import region
from tapegrad.memory.budget.budget import MANAGER
from tapegrad.memory.ledger.ledger import LEDGER


@pytest.fixture
def x() -> tg.Tensor:
    return c64(X)


@pytest.fixture
def lazy() -> Iterator[None]:
    """Small values wait for their readers, too."""
    small = region.SMALL
    region.set_small(1)
    yield
    region.set_small(small)


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    gc.collect()  # what an earlier test's traceback holds would count
    yield
    if MANAGER._present() is not None:  # this one's
        gc.collect()
    assert account.current is account.NOBODY
    assert MANAGER._present() is None and len(MANAGER._storages.candidates) == 0 and not LEDGER.promised_bytes
