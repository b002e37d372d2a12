"""Plain values outside of a differentiation, tensors inside; convention of complex gradients: HIPS's and JAX's.

HIPS computes in float64, so numbers become float64 here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

import tapegrad as tg
from tapegrad import nest

_depth = 0


def tensor(x: Any) -> Any:
    """A number or array as a tensor; integers as floats, since they are to be differentiated in."""
    if isinstance(x, tg.Tensor):
        return x
    found = np.asarray(x)
    return tg.asarray(found.astype(float) if found.dtype.kind in "biu" else found)


def result(x: Any) -> Any:
    """What a function returned, as a tensor."""
    return x if isinstance(x, tg.Tensor) else tg.asarray(np.asarray(x))


def holds_tensor(tree: Any) -> bool:
    """Whether there is a tensor among the leaves."""
    return any(isinstance(x, tg.Tensor) for x in nest.leaves(tree))


def plain(tree: Any) -> Any:
    """Outside of every differentiation: arrays and scalars of NumPy's."""
    return tree if _depth else nest.map_leaves(lambda x: x.numpy()[()] if isinstance(x, tg.Tensor) else x, tree)


def _conjugate(x: Any) -> Any:
    return tg.conj(x) if x.dtype.kind == "c" else x


class _Inside:
    """A block in which values stay tensors."""

    def __enter__(self) -> None:
        global _depth
        _depth += 1

    def __exit__(self, *exc: object) -> None:
        global _depth
        _depth -= 1


def make_vjp(f: Callable, x: Any) -> tuple[Callable, Any]:
    """``f(x)``'s pullback and value, as HIPS's: the pullback multiplies by the plain transpose."""
    with _Inside():
        y, pull = tg.vjp(lambda t: nest.map_leaves(result, f(t)), nest.map_leaves(tensor, x))

    def vjp(ct: Any) -> Any:
        with _Inside():
            values = zip(nest.leaves(y), nest.leaves(ct), strict=True)
            cts = [tg.conj(tensor(c)) if v.dtype.kind == "c" else tg.real(tensor(c)) for v, c in values]
            (found,) = pull(nest.rebuild(y, iter(cts)))
            found = nest.map_leaves(_conjugate, found)
        return plain(found)

    return vjp, plain(y)


def make_jvp(f: Callable, x: Any) -> Callable:
    """A function from a tangent to ``f(x)`` and its tangent."""

    def jvp(v: Any) -> tuple[Any, Any]:
        with _Inside():
            given = nest.map_leaves(tensor, x), nest.map_leaves(tensor, v)
            found = tg.jvp(lambda t: nest.map_leaves(result, f(t)), *((one,) for one in given))
        return plain(found)

    return jvp


def nary(operator: Callable) -> Callable:
    """``operator(fun, x)`` made ``operator(fun, argnum=0)(*args, **kwargs)``."""

    def of(fun: Callable, argnum: Any = 0, *others: Any, **named: Any) -> Callable:
        def derived(*args: Any, **kwargs: Any) -> Any:
            many = isinstance(argnum, (tuple, list))
            x = tuple(args[i] for i in argnum) if many else args[argnum]

            def unary(x: Any) -> Any:
                full = list(args)
                for i, value in zip(argnum, x, strict=True) if many else [(argnum, x)]:
                    full[i] = value
                return fun(*full, **kwargs)

            return operator(unary, x, *others, **named)

        return derived

    return of
