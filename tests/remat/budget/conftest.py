"""Of each test of budgets: no budget is left in force, and nothing is recorded."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
from budget_cases import EAGER, LAZY, X, limited, recorded, small_from
from checks import c64

import tapegrad as tg


@pytest.fixture
def x() -> tg.Tensor:
    return c64(X)


@pytest.fixture
def lazy() -> Iterator[None]:
    """Small values wait for their readers, too."""
    with small_from(LAZY):
        yield


@pytest.fixture(params=[LAZY, EAGER], ids=["lazy", "eager"])
def small(request: pytest.FixtureRequest) -> Iterator[None]:
    """Once where all elementwise values wait for their readers, once where none does."""
    with small_from(request.param):
        yield


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    gc.collect()  # what an earlier test's traceback holds would count
    yield
    assert not limited() and not recorded()
