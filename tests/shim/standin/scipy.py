"""``cupyx.scipy.special``: SciPy's functions on device arrays, those that CuPy 14.2 has, and as strict."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import numpy as np

from . import namespace, state
from .array import ndarray

NAMES = (
    "bdtr bdtrc bdtri beta betainc betaincinv betaln binom boxcox boxcox1p cbrt chdtr chdtrc chdtri cosdg cosm1 cotdg "
    "digamma ellipk ellipkinc ellipkm1 entr erf erfc erfcinv erfcx erfinv exp1 exp10 exp2 expi expit expm1 expn exprel "
    "fdtr fdtrc fdtri gamma gammainc gammaincc gammainccinv gammaincinv gammaln gammasgn gdtr gdtrc huber i0 i0e i1 "
    "i1e inv_boxcox inv_boxcox1p j0 j1 k0 k0e k1 k1e kl_div log1p log_expit log_ndtr loggamma logit logsumexp "
    "multigammaln nbdtr nbdtrc nbdtri ndtr ndtri pdtr pdtrc pdtri poch polygamma pseudo_huber psi radian rel_entr "
    "rgamma shichi sici sindg softmax tandg xlog1py xlogy y0 y1 yn zeta zetac"
).split()
TWO = {"zeta"}
"""What takes two arguments there, and one or two in SciPy."""


def _function(name: str) -> Callable:
    def call(*args: Any) -> Any:
        import scipy.special

        for one in args:
            if not isinstance(one, ndarray):
                raise TypeError(f"Unsupported type {type(one)}")
        if name in TWO and len(args) != 2:
            raise TypeError(f"Wrong number of arguments for cupyx_scipy_special_{name}")
        if any(one.dtype.char not in "?bhilqBHILQefd" for one in args):
            raise TypeError(f"Wrong type of arguments for cupyx_scipy_special_{name}")
        state.require_compiler()
        with np.errstate(all="ignore"):
            found = getattr(scipy.special, name)(*(one.get() for one in args))
        wrap = namespace.module.asarray
        return tuple(map(wrap, found)) if isinstance(found, tuple) else wrap(found)

    call.__name__ = name
    return call


def build(module: Callable[..., types.ModuleType], modules: dict[str, types.ModuleType]) -> None:
    """Add ``cupyx.scipy.special`` to the modules there are."""
    top = module("cupyx.scipy.special", **{name: _function(name) for name in NAMES})
    scipy = modules.setdefault("cupyx.scipy", module("cupyx.scipy", __path__=[]))
    modules["cupyx"].scipy, scipy.special = scipy, top  # type: ignore[attr-defined]
    modules[top.__name__] = top
