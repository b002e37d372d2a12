"""What tests of budgets share: a square array, the bytes that it takes, those that are alive, and a tape."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from checks import c64

import tapegrad as tg

SIDE = 16
UNIT = SIDE * SIDE * 8
X = np.random.default_rng(1).normal(size=(SIDE, SIDE))


def live() -> int:
    """Bytes that are alive."""
    with tg.measure() as m:
        return m.live_bytes


def wanting(h: Any) -> Callable[[], float]:
    """A tape that wants ``h`` alone; called, it gives a gradient, which is the sum of ``h``."""
    s = c64(1.0)
    with tg.GradientTape(persistent=True) as tape:
        tape.watch(s)
        y = tg.sum(h * s)
    return lambda: tape.gradient(y, s).item()
