"""Masters: the values of half variables with all the digits in which they are updated.

A small update of a half value would be rounded away each time.  So a variable of a half dtype is updated in float32:
its state is of float32, and one slot more, ``master``, holds its value.  The variable tells what it is, the master the
digits beyond: where the two do not round to the same (somebody has assigned to the variable) the master is that value
anew.
"""

from __future__ import annotations

from tapegrad.ops import updates
from tapegrad.variable import Variable


def narrow(variable: Variable) -> bool:
    """Whether a variable is of a half dtype, and so has a master."""
    return updates.wide(variable.dtype) != variable.dtype
