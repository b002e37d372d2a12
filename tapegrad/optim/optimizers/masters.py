"""Masters: the values of half variables with all the digits in which they are updated.

A small update of a half value would be rounded away each time.  So a variable of a half dtype is updated in float32:
its state is of float32, and one slot more, ``master``, holds its value.  The variable tells what it is, the master the
digits beyond: where the two do not round to the same (somebody has assigned to the variable) the master is that value
anew.
"""

from __future__ import annotations

from tapegrad import ops
from tapegrad.ops import updates
from tapegrad.tensor import Tensor
from tapegrad.variable import Variable


def narrow(variable: Variable) -> bool:
    """Whether a variable is of a half dtype, and so has a master."""
    return updates.wide(variable.dtype) != variable.dtype


def digits(variable: Variable, value: Tensor, master: Tensor) -> Tensor:
    """The ``value`` of a half variable, or some rows of it, with the digits that the master has beyond it."""
    return ops.where(rounded(variable, master) == value, master, ops.astype(value, master.dtype))


def rounded(variable: Variable, value: Tensor) -> Tensor:
    """``value`` in the dtype of ``variable``."""
    return ops.astype(value, variable.dtype) if value.dtype != variable.dtype else value
