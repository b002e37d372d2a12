"""Captured programs are tested as kernels run them, where there is machine code."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def kernels(kernels_at_once: None) -> None:
    """Captured functions wait for their kernels."""
