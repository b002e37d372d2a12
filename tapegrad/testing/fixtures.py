"""Fixtures for pytest: in a ``conftest.py``, ``from tapegrad.testing.fixtures import max_bytes``."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator

import pytest

from tapegrad.sizes import parse_bytes
from tapegrad.testing.peaks import check
from tapegrad.tracing.contexts import measure


@pytest.fixture
def max_bytes(request: pytest.FixtureRequest) -> Iterator[Callable[[int | str], None]]:
    """``max_bytes("50MiB")`` in a test: tensors take at most so much, beyond what was alive before, while it runs.

    Otherwise it ends in an error, PeakError.
    """
    limits: list[int] = []
    gc.collect()
    with measure() as m:
        before = m.live_bytes
        yield lambda limit: limits.append(parse_bytes(limit))
    if limits:
        check(request.node.name, m, before, min(limits))
