"""A device whose kernels run twice: by the host's compiler, and as PTX."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from shim import host

from tapegrad.device import traffic


@pytest.fixture(autouse=True)
def notes() -> Iterator[None]:
    """Nobody counts the passes over memory of kernels that tests launch themselves."""
    if (why := host.why_no_compiler()) is not None:
        pytest.skip(why)
    yield
    traffic.taken()
