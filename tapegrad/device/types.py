"""Names of types: what a device's library gives, for annotations.

NumPy's and CuPy's arrays have one interface, so one name stands for both.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any, TypeAlias

import numpy as np

from tapegrad.core.rule import Params as Params

Array: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"
"""An array of the device's library: NumPy's, or CuPy's."""
DType: TypeAlias = "np.dtype[Any]"
"""A dtype: NumPy's object, of ``ml_dtypes``, too."""
Namespace: TypeAlias = ModuleType
"""``numpy`` or ``cupy``."""
