"""Checks of derivatives against central differences, as close as HIPS asks for (1e-6, absolute or relative)."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np

import tapegrad as tg
from tapegrad import nest

from ._values import make_jvp, make_vjp, nary

_NEAR = 1e-6
_STEP = 1e-6


def _array(x: Any) -> np.ndarray:
    return x.numpy() if isinstance(x, tg.Tensor) else np.asarray(x)


def _leaves(tree: Any) -> list[np.ndarray]:
    return [_array(x) for x in nest.leaves(tree)]


def _random(tree: Any) -> Any:
    def like(x: Any) -> Any:
        x = _array(x)
        found = np.random.randn(*x.shape)
        if x.dtype.kind == "c":
            found = found + 1j * np.random.randn(*x.shape)
        return np.asarray(found)[()]

    return nest.map_leaves(like, tree)


def _inner(a: Any, b: Any) -> float:
    """The real part of the inner product, which conjugates the first."""
    return float(sum(np.real(np.vdot(x, y)) for x, y in zip(_leaves(a), _leaves(b), strict=True)))


def scalar_close(a: Any, b: Any) -> bool:
    return abs(a - b) < _NEAR or abs(a - b) / abs(a + b) < _NEAR


def _moved(x: Any, v: Any, step: float) -> Any:
    pairs = zip(nest.leaves(x), nest.leaves(v), strict=True)
    return nest.rebuild(x, iter([(_array(a) + step * b)[()] for a, b in pairs]))


def _differences(f: Callable, x: Any, v: Any) -> Any:
    ahead, behind = f(_moved(x, v, _STEP / 2)), f(_moved(x, v, -_STEP / 2))
    pairs = zip(_leaves(ahead), _leaves(behind), strict=True)
    return nest.rebuild(ahead, iter([(a - b) / _STEP for a, b in pairs]))


def _conjugate(tree: Any) -> Any:
    return nest.map_leaves(lambda x: np.conj(_array(x)), tree)


def _form(tree: Any) -> str:
    """How it is nested; NumPy splits into lists, tapegrad into tuples."""
    return repr(nest.structure(tree)).replace("'tuple'", "'list'")


def _same_form(a: Any, b: Any) -> None:
    assert _form(a) == _form(b), f"{a!r} and {b!r} are built differently"
    for x, y in zip(_leaves(a), _leaves(b), strict=True):
        assert x.shape == y.shape, f"shapes {x.shape} and {y.shape}"
        assert (x.dtype.kind == "c") == (y.dtype.kind == "c"), f"dtypes {x.dtype} and {y.dtype}"


def check_equivalent(a: Any, b: Any) -> None:
    _same_form(a, b)
    v = _random(a)
    assert scalar_close(_inner(a, v), _inner(b, v)), f"{a!r} is not {b!r}"


def _check_vjp(f: Callable, x: Any) -> None:
    pull, y = make_vjp(f, x)
    v, u = _random(x), _random(y)
    pulled = _conjugate(pull(_conjugate(u)))
    _same_form(pulled, x)
    exact, numeric = _inner(v, pulled), _inner(u, _differences(f, x, v))
    assert scalar_close(numeric, exact), f"VJP at {x!r}: {exact}, by differences {numeric}"


def _check_jvp(f: Callable, x: Any) -> None:
    v = _random(x)
    check_equivalent(make_jvp(f, x)(v)[1], _differences(f, x, v))


def _check(f: Callable, x: Any, modes: Any = ("fwd", "rev"), order: int = 2) -> None:
    if "fwd" in modes:
        _check_jvp(f, x)
        if order > 1:
            v = _random(x)
            check_grads(lambda x, v: make_jvp(f, x)(v)[1], (0, 1), modes, order=order - 1)(x, v)
    if "rev" in modes:
        _check_vjp(f, x)
        if order > 1:
            u = _random(f(x))
            check_grads(lambda x, u: make_vjp(f, x)[0](u), (0, 1), modes, order=order - 1)(x, u)


check_grads = nary(_check)


def combo_check(fun: Callable, *args: Any, **kwargs: Any) -> Callable:
    """Every combination of arguments from lists."""
    checked = check_grads(fun, *args, **kwargs)

    def run(*lists: Any, **named: Any) -> None:
        for given in itertools.product(*lists):
            for values in itertools.product(*named.values()):
                checked(*given, **dict(zip(named, values, strict=True)))

    return run
