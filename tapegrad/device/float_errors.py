"""How floating-point errors are treated at a moment (NumPy's ``errstate``), to treat them alike later."""

from __future__ import annotations

from typing import Any

import numpy as np


def errors_now() -> Any:
    """How this thread treats them now."""
    return np.geterr()


def treating_errors(errors: Any) -> Any:
    """A block in which they are treated as ``errors`` says."""
    return np.errstate(**errors)
