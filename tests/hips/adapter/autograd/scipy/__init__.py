"""``autograd.scipy``: SciPy's functions on arrays, tapegrad's of the same names on tensors."""

from __future__ import annotations

import importlib
import sys
import types
from collections.abc import Callable
from functools import wraps
from typing import Any

import tapegrad as tg

from .._values import holds_tensor, plain


def _chosen(theirs: Callable, ours: Callable[[], Any]) -> Callable:
    @wraps(theirs, updated=())
    def run(*args: Any, **kwargs: Any) -> Any:
        return (ours() if holds_tensor([args, kwargs]) else theirs)(*args, **kwargs)

    return run


class _Names(types.ModuleType):
    def __init__(self, name: str, theirs: Any, ours: Callable[[], Any]) -> None:
        super().__init__(name)
        self._theirs, self._ours = theirs, ours
        self.__path__: list[str] = []
        sys.modules[name] = self

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _chosen(getattr(self._theirs, name), lambda: getattr(self._ours(), name))


special, linalg, stats = (
    _Names(f"{__name__}.{name}", importlib.import_module(f"scipy.{name}"), lambda name=name: getattr(tg, name))
    for name in ("special", "linalg", "stats")
)
for _name in ("beta", "chi2", "dirichlet", "gamma", "multivariate_normal", "norm", "poisson", "t"):
    _inside = _Names(
        f"{stats.__name__}.{_name}", getattr(stats._theirs, _name), lambda name=_name: getattr(tg.stats, name)
    )
    setattr(stats, _name, _inside)

integrate = types.ModuleType(f"{__name__}.integrate")
sys.modules[integrate.__name__] = integrate


def odeint(func: Callable, y0: Any, t: Any, args: tuple = ()) -> Any:
    return plain(tg.integrate.odeint(func, y0, t, tuple(args)))


integrate.odeint = odeint  # type: ignore[attr-defined]
