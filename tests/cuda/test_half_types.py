"""Half types on CUDA: every bit pattern, values and derivatives, against float64 rounded once."""

from __future__ import annotations

import pytest
from half_cases import CASES, HALVES, check_every_number

from tapegrad.device import Device

pytestmark = pytest.mark.sampled(1 / 2)


@pytest.mark.sampled(1 / 6)
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("name", CASES)
def test_every_number_is_rounded_once(name: str, dtype: str, cuda: Device) -> None:
    check_every_number(name, dtype, cuda)
