"""Tests of machine code, where there is any."""

from __future__ import annotations

import pytest


@pytest.fixture
def machine_code(kernels_at_once: None) -> None:
    """Kernels are waited for; skips the test where there is no machine code."""
    from tapegrad.engine.cpu.native import machine

    if why := machine.why_not():
        pytest.skip(f"no machine code: {why}")
