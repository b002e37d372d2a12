"""scipy.optimize on nested structures of tensors: values and gradients from tapegrad, the search from SciPy."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from tapegrad import nest, ops
from tapegrad.autodiff.functional import hvp, value_and_grad
from tapegrad.autodiff.jacobians import hessian, jacobian
from tapegrad.core.state import unrecorded
from tapegrad.errors import DTypeError, GradientError, TapegradError
from tapegrad.tensor import Tensor

if TYPE_CHECKING:
    from numpy import float64
    from numpy.typing import NDArray

    Vector = NDArray[float64]


class _Flat:
    """A nested structure as one vector of float64."""

    def __init__(self, name: str, x0: object) -> None:
        self._tree = x0
        self._leaves = [ops.asarray(x) for x in nest.flatten(x0)]
        if not self._leaves:
            raise GradientError(f"{name}: x0 holds no numbers")
        for x in self._leaves:
            if x.dtype.kind == "c":
                raise DTypeError(f"{name}: cannot minimize over {x.dtype}; pass real and imaginary parts apart")
        self.start = ops.concat([ops.astype(x.reshape(x.size), "float64") for x in self._leaves]).numpy(copy=True)

    def unflatten(self, flat: Vector) -> Any:
        """The structure with its numbers from ``flat``, in the dtypes and shapes of ``x0`` (integers: float64)."""
        vector, parts, first = ops.asarray(flat), [], 0
        if vector.shape != self.start.shape:
            raise GradientError(f"unflatten: a vector {vector.shape} for the {self.start.size} numbers of x0")
        for x in self._leaves:
            part = vector[first : first + x.size].reshape(x.shape)
            parts.append(part if x.dtype.kind in "biu" else ops.astype(part, x.dtype))
            first += x.size
        return nest.rebuild(self._tree, iter(parts))

    def of(self, f: Callable[..., object], args: tuple[object, ...] = ()) -> Callable[[Any], Any]:
        """``f`` as a function of the vector."""
        return lambda flat: f(self.unflatten(flat), *args)


def _numbers(vector: Vector) -> Tensor:
    return ops.asarray(vector, dtype="float64")


def _objective(f: Callable[[Tensor], object]) -> Callable[[Vector], tuple[float, Vector]]:
    both: Callable[[Tensor], Any] = value_and_grad(f)

    def fun(flat: Vector) -> tuple[float, Vector]:
        value, gradient = unrecorded(both, _numbers(flat))
        return float(value.item()), gradient.numpy(copy=True)

    return fun


def scipy_objective(
    f: Callable[..., object], x0: object, args: tuple[object, ...] = ()
) -> tuple[Callable[[Vector], tuple[float, Vector]], Vector, Callable[[Vector], Any]]:
    """What scipy.optimize wants of ``f(x, *args)``: ``(fun, flat_x0, unflatten)``.

    x0: a nested structure of tensors, arrays and numbers; ``fun(flat)`` gives the value, a float, and the gradient, a
    NumPy vector of float64 (``scipy.optimize.minimize(fun, flat_x0, jac=True)``); ``unflatten(flat)`` is the structure
    again.  Raises GradientError if ``x0`` holds no numbers, DTypeError for complex ones.
    """
    flat = _Flat("scipy_objective", x0)
    return _objective(flat.of(f, args)), flat.start, flat.unflatten


def minimize(
    f: Callable[..., object],
    x0: object,
    args: tuple[object, ...] = (),
    method: str | None = None,
    *,
    hess: bool = False,
    hessp: bool = False,
    bounds: object = None,
    constraints: object = (),
    tol: float | None = None,
    callback: Callable[[Any], object] | None = None,
    options: dict[str, object] | None = None,
) -> Any:
    """The least value of ``f(x, *args)`` near ``x0`` by scipy.optimize.minimize, with exact gradients.

    x0: a nested structure of tensors, arrays and numbers, of which ``f`` gets the like; it returns one float.  hess,
    hessp: give the method the Hessian, or its products with vectors; bounds: SciPy's, of the flat vector; constraints:
    SciPy's, where the functions of those given as dicts take the structure and get exact Jacobians; callback: called
    with the structure after each iteration.  Returns SciPy's result with ``x`` in the structure; its other vectors are
    flat.  Numbers of ``x0`` in float32 are searched in float64, but ``f`` sees float32: prefer float64.

    Raises GradientError if ``x0`` holds no numbers, DTypeError for complex ones, ShapeError if ``f`` returns no scalar,
    and what SciPy raises for its arguments.
    """
    import scipy.optimize

    flat = _Flat("minimize", x0)
    of_vector = flat.of(f, args)
    if hess and hessp:
        raise TapegradError("minimize: hess and hessp are both True; a method takes one of them")
    arguments: dict[str, object] = {}
    if hess:
        arguments["hess"] = lambda v: ops.reshape(hessian(of_vector)(_numbers(v)), (v.size, v.size)).numpy(copy=True)
    if hessp:
        arguments["hessp"] = lambda v, p: hvp(of_vector, _numbers(v), _numbers(p)).numpy(copy=True)
    if callback is not None:
        arguments["callback"] = lambda v: callback(flat.unflatten(v))
    if constraints:
        arguments["constraints"] = _constraints(flat, constraints)
    arguments.update(jac=True, method=method, bounds=bounds, tol=tol, options=options)
    result = unrecorded(functools.partial(scipy.optimize.minimize, _objective(of_vector), flat.start, **arguments))
    result.x = unrecorded(flat.unflatten, result.x)
    return result


def _constraints(flat: _Flat, constraints: object) -> object:
    if isinstance(constraints, dict):
        return _constraint(flat, constraints)
    if isinstance(constraints, (list, tuple)):
        return [_constraint(flat, c) if isinstance(c, dict) else c for c in constraints]
    return constraints


def _constraint(flat: _Flat, constraint: dict[str, Any]) -> dict[str, object]:
    """A constraint on the structure as one on the vector, with its Jacobian unless there is one."""
    of_vector = flat.of(constraint["fun"], tuple(constraint.get("args", ())))
    converted = {"type": constraint["type"], "fun": lambda v: ops.asarray(of_vector(_numbers(v))).numpy(copy=True)}
    converted["jac"] = constraint.get("jac") or (lambda v: jacobian(of_vector)(_numbers(v)).numpy(copy=True))
    return converted
