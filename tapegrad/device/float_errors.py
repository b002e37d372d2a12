"""NumPy's error state (``errstate``): taken at one time, and set again at another."""

from __future__ import annotations

from typing import Any

import numpy as np


def errors_now() -> Any:
    """The error state of this thread."""
    return np.geterr()


def treating_errors(errors: Any) -> Any:
    """A block with the error state ``errors``."""
    return np.errstate(**errors)
