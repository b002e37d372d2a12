"""Names of values, by which memory policies know them."""

from __future__ import annotations

from tapegrad.core import tracking
from tapegrad.core.state import thread
from tapegrad.errors import NotATensorError
from tapegrad.ops.dispatch import tensor
from tapegrad.tensor import Tensor, TensorLike


def name(x: TensorLike, name: str) -> Tensor:
    """``x`` itself, from now on known to memory policies as ``name`` (JAX's ``checkpoint_name``).

    A tensor of any shape and dtype is returned as it is: nothing is computed or recorded, so neither kernels nor bits
    change where no policy asks for the name.  Of a view, the bytes it looks at get the name.  A value may have several
    names, and several values one name.  Raises NotATensorError (TypeError).
    """
    if not isinstance(name, str):
        raise NotATensorError(f'name: a name is a string, not {name!r:.60}; write name(x, "h")')
    t = tensor("name", x)
    thread.executor.named(t._buffer, name)
    tracking.current.named(t._buffer, name)
    return t
