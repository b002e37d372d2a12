"""SciPy's own ``@`` with tensors: ``A @ t`` and ``t @ A`` are :func:`matmul`, with gradients.

SciPy asks NumPy to convert what it does not know, which would drop the gradient silently, unless the result is an array
of an object: then it leaves the operator to the other operand (``_spbase._matmul_dispatch``).  So a tensor gives that
result there, and only there.  Anywhere else in scipy.sparse, a tensor that a tape follows is an error.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

from tapegrad.core.state import thread
from tapegrad.device import CPU
from tapegrad.device.types import Array
from tapegrad.errors import NotATensorError
from tapegrad.sparse.array import SparseLike, is_foreign, matmul
from tapegrad.tensor import DTypeLike, Tensor, TensorLike, bind_method
from tapegrad.variable import Variable

_plain_matmul: Callable[..., Tensor] = Tensor.__matmul__
_plain_rmatmul: Callable[..., Tensor] = Tensor.__rmatmul__


def _matmul(self: Tensor, other: TensorLike | SparseLike) -> Tensor:
    return matmul(self, other) if is_foreign(other) else _plain_matmul(self, other)


def _rmatmul(self: Tensor, other: TensorLike | SparseLike) -> Tensor:
    return matmul(other, self) if is_foreign(other) else _plain_rmatmul(self, other)


def _declining(plain: Callable[..., Array]) -> Callable[..., Array]:
    """``__array__``: for SciPy's ``@`` an object, for a watched tensor elsewhere in scipy.sparse an error."""

    def __array__(self: Tensor | Variable, dtype: DTypeLike | None = None, copy: bool | None = None) -> Array:
        code = sys._getframe(1).f_code
        if "sparse" in code.co_filename and "scipy" in code.co_filename:
            if code.co_name == "_matmul_dispatch":
                return CPU.xp.array(None, dtype=object)
            value = self if isinstance(self, Tensor) else self.read()
            if any(r.follows(value._buffer) for r in thread.recorders):
                raise NotATensorError(
                    f"scipy.sparse would take the value of a watched tensor {value.shape} and drop its gradient; use "
                    "tg.sparse.csr and @, or stop_gradient(t) if it is meant to be a constant"
                )
        return plain(self, dtype, copy)

    return __array__


def bind() -> None:
    """Called once, when the package is imported."""
    bind_method("__matmul__", _matmul)
    bind_method("__rmatmul__", _rmatmul)
    for handle in (Tensor, Variable):
        handle.__array__ = _declining(handle.__array__)  # type: ignore[method-assign]
