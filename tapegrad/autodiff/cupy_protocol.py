"""CuPy's protocol on tensors: ``cupy.sin(t)`` and ``cupy.sum(t)`` call ours of that name; a user's kernel runs as is.

CuPy asks an argument that is no array of its own before it launches an elementwise or reduction kernel.  Functions of
CuPy that are neither (``matmul``, ``concatenate``, ``einsum``) do not ask; call ours, or NumPy's, which dispatch.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from tapegrad.autodiff.own_primitive import OwnPrimitive
from tapegrad.core.rule import with_parameters
from tapegrad.errors import ImmutableError
from tapegrad.ops.interop.numpy_protocols import public
from tapegrad.tensor import bind_method
from tapegrad.variable import Variable

if TYPE_CHECKING:
    from tapegrad.device.types import Array

_NAMES = {"amax": "max", "amin": "min", "true_divide": "divide", "cupy_abs": "abs"}


def _ours(kernel: object) -> Callable[..., Any] | None:
    """Our function for one of CuPy's own kernels; None for a user's."""
    name = str(getattr(kernel, "name", ""))
    if not name.startswith("cupy_"):
        return None
    name = name.removeprefix("cupy_")
    return public(_NAMES.get(name, name)) or public(_NAMES.get(name, name), "scipy.special")


def _override_elementwise(self: Any, kernel: Any, *args: object, **kwargs: object) -> Any:
    """A ufunc of CuPy's, or a user's ``ElementwiseKernel``, called with tensors.

    The result of a user's kernel has no derivative: asking for one raises NoGradientError naming the kernel.  Raises
    ImmutableError for outputs given as arguments.
    """
    given = len(args) - int(getattr(kernel, "nin", len(args)))
    if given > 0 or kwargs.get("out") is not None:
        raise ImmutableError(f"{kernel.name}: a tensor's kernel gets no arrays to write into; leave out the outputs")
    f = _ours(kernel)
    if f is not None and not any(v is not None for v in kwargs.values()):
        return f(*args)
    return _run(kernel, args, kwargs)


def _override_reduction(
    self: Any, kernel: Any, axis: object = None, dtype: object = None, out: object = None, keepdims: bool = False
) -> Any:
    """A reduction of CuPy's, or a user's ``ReductionKernel`` of one operand, called with a tensor; as for ufuncs."""
    if out is not None:
        raise ImmutableError(f"{kernel.name}: a tensor's kernel gets no array to write into; leave out the output")
    f = _ours(kernel)
    if f is None:
        return _run(kernel, (self,), {"axis": axis, "keepdims": keepdims})
    options = {} if dtype is None else {"dtype": dtype}
    return f(self, axis=axis, keepdims=keepdims, **options)


def _run(kernel: Any, args: tuple[object, ...], kwargs: dict[str, Any]) -> Any:
    """A kernel on the arrays of tensors, as an operation without a derivative."""

    def run(*arrays: Array) -> Any:
        return kernel(*arrays, **kwargs)

    kinds = inspect.Parameter.POSITIONAL_ONLY
    with_parameters(run, [inspect.Parameter(f"x{i}", kinds) for i in range(len(args))])
    run.__name__ = str(kernel.name)
    return OwnPrimitive(run, None, False)(*(x._content() if isinstance(x, Variable) else x for x in args))


def bind() -> None:
    """Give tensors the protocol; called once, when the public names are loaded."""
    bind_method("__cupy_override_elementwise_kernel__", _override_elementwise)
    bind_method("__cupy_override_reduction_kernel__", _override_reduction)
