"""HIPS autograd's names on top of tapegrad: what its own tests need, no more."""

from __future__ import annotations

import builtins as _builtins
from typing import Any

import numpy as _np

import tapegrad as _tg
from tapegrad import nest as _nest

from . import numpy
from ._values import make_jvp as _make_jvp
from ._values import make_vjp as _make_vjp
from ._values import nary as _nary
from .numpy import reshape as _reshape
from .numpy import stack as _stack

dict, list, tuple = dict, list, tuple


def isinstance(x: Any, kind: Any) -> bool:
    """Of a tensor: as if it were the array it stands for."""
    return _builtins.isinstance(x.numpy() if _builtins.isinstance(x, _tg.Tensor) else x, kind)


def _ones(y: Any) -> Any:
    return _np.ones(_np.shape(y), y.dtype if hasattr(y, "dtype") else None)


def _basis(y: Any) -> Any:
    size = _np.size(y)
    kind = y.dtype if hasattr(y, "dtype") else float
    return (_np.eye(size, dtype=kind)[k].reshape(_np.shape(y)) for k in range(size))


def _pulled(fun: Any, x: Any, real: bool, scalar: bool = True) -> Any:
    pull, y = _make_vjp(fun, x)
    if not hasattr(y, "dtype") or (scalar and _np.size(y) != 1):
        raise TypeError("grad wants a function of one number; use jacobian, elementwise_grad or holomorphic_grad")
    if real and y.dtype.kind != "f":
        raise TypeError("grad wants a function of one real number; use holomorphic_grad")
    return y, pull(_ones(y))


@_nary
def grad(fun: Any, x: Any) -> Any:
    return _pulled(fun, x, True)[1]


@_nary
def value_and_grad(fun: Any, x: Any) -> Any:
    return _pulled(fun, x, True)


@_nary
def elementwise_grad(fun: Any, x: Any) -> Any:
    return _pulled(fun, x, True, False)[1]


@_nary
def holomorphic_grad(fun: Any, x: Any) -> Any:
    return _pulled(fun, x, False)[1]


@_nary
def deriv(fun: Any, x: Any) -> Any:
    return _make_jvp(fun, x)(_ones(x))[1]


@_nary
def jacobian(fun: Any, x: Any) -> Any:
    pull, y = _make_vjp(fun, x)
    rows = [pull(e) for e in _basis(y)]
    return _reshape(_stack(rows), _np.shape(y) + _np.shape(x))


@_nary
def hessian(fun: Any, x: Any) -> Any:
    return jacobian(jacobian(fun))(x)


@_nary
def make_hvp(fun: Any, x: Any) -> Any:
    return _make_vjp(grad(fun), x)


@_nary
def make_jvp(fun: Any, x: Any) -> Any:
    return _make_jvp(fun, x)


@_nary
def make_vjp(fun: Any, x: Any) -> Any:
    return _make_vjp(fun, x)


@_nary
def grad_and_aux(fun: Any, x: Any) -> Any:
    pull, (y, aux) = _make_vjp(fun, x)
    return pull((_ones(y), _nest.map_leaves(lambda a: _np.zeros_like(a), aux))), aux


def tensor_jacobian_product(fun: Any, argnum: int = 0) -> Any:
    def product(*args: Any) -> Any:
        *given, vector = args
        dot = lambda *xs: numpy.tensordot(vector, fun(*xs), axes=_np.ndim(vector))
        return jacobian(dot, argnum)(*given)

    return product


def hessian_tensor_product(fun: Any, argnum: int = 0) -> Any:
    return tensor_jacobian_product(grad(fun, argnum), argnum)


def make_ggnvp(f: Any, g: Any = lambda y: 0.5 * numpy.sum(y**2, axis=-1), f_argnum: int = 0) -> Any:
    @_nary
    def make(f: Any, x: Any) -> Any:
        pull, y = _make_vjp(f, x)
        return lambda v: pull(_make_vjp(grad(g), y)[0](_make_jvp(f, x)(v)[1]))

    return make(f, f_argnum)


def multigrad_dict(fun: Any) -> Any:
    import inspect

    def of(*args: Any, **kwargs: Any) -> Any:
        bound = inspect.signature(fun).bind(*args, **kwargs)
        bound.apply_defaults()
        names = bound.arguments
        chosen = dict(names)
        return grad(lambda given: _called(fun, bound, given))(chosen)

    return of


def _called(fun: Any, bound: Any, given: dict) -> Any:
    full = type(bound)(bound.signature, given)
    return fun(*full.args, **full.kwargs)


def checkpoint(fun: Any) -> Any:
    return _tg.recompute_grad(fun)
