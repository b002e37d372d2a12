"""``cupy.linalg``, ``cupy.fft`` and ``cupyx.scipy.linalg``: NumPy's and SciPy's results with CuPy 14.2's manners.

CuPy does not say that a matrix is singular or not positive definite (its results are then infinite, NaN or garbage),
asks for stacks of one shape, and reads the lower triangle in ``cholesky``.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable
from typing import Any

import numpy as np

from . import capturing, memory, namespace, state
from .array import adopt, ndarray, unwrap

LINALG = """
cholesky(a)
det(a)
eig(a)
eigh(a, UPLO='L')
eigvals(a)
eigvalsh(a, UPLO='L')
inv(a)
lstsq(a, b, rcond=None)
pinv(a, rcond=1e-15)
qr(a, mode='reduced')
slogdet(a)
solve(a, b)
svd(a, full_matrices=True, compute_uv=True)
"""
FFT = """
fft(a, n=None, axis=-1, norm=None)
ifft(a, n=None, axis=-1, norm=None)
irfft(a, n=None, axis=-1, norm=None)
rfft(a, n=None, axis=-1, norm=None)
"""
SCIPY = """
expm(a)
lu_factor(a, overwrite_a=False, check_finite=True)
solve_triangular(a, b, trans=0, lower=False, unit_diagonal=False, overwrite_b=False, check_finite=False)
"""
OF_ONE_MATRIX = {"expm", "lu_factor", "lstsq"}
#: Plans of cuFFT that a thread keeps.
MOST_PLANS = 16
SILENT = {"cholesky", "inv", "solve", "solve_triangular"}


def signatures(table: str) -> dict[str, inspect.Signature]:
    """The functions of a table."""
    found = {}
    for line in table.split("\n"):
        if line:
            scope: dict[str, Any] = {}
            exec(f"def {line}: pass", scope)  # our own table
            name = line.partition("(")[0]
            found[name] = inspect.signature(scope[name])
    return found


def _check(name: str, found: list[ndarray]) -> None:
    if any(x.dtype.char not in "?bhilqBHILQfdFD" for x in found):
        raise TypeError(f"{found[0].dtype} is unsupported in linalg")
    if name in OF_ONE_MATRIX and any(x.ndim > 2 for x in found):
        raise np.linalg.LinAlgError(f"{found[0].ndim}-dimensional array given. Array must be two-dimensional")
    if name == "solve" and found[1].ndim > 1 and found[0].shape[:-1] != found[1].shape[:-1]:
        raise ValueError("a must have (..., M, M) shape and b must have (..., M, K) for multidimensional b")
    if name == "solve_triangular" and found[0].shape[:-2] != found[1].shape[: found[0].ndim - 2]:
        raise ValueError("incompatible batch count")


def _function(name: str, signature: inspect.Signature, target: Callable, strict: bool) -> Callable:
    def call(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs).arguments
        found: list[ndarray] = []
        options = {key: unwrap(value, found) for key, value in given.items()}
        positional = [options.pop(key) for key in list(options) if isinstance(options[key], np.ndarray)]
        state.require_compiler()
        if strict:
            capturing.refuse(None, "calling cuSOLVER API", NotImplementedError)
            _check(name, found)
        with namespace.quiet():
            try:
                result = target(*positional, **options)
            except np.linalg.LinAlgError:
                if name not in SILENT:
                    raise
                result = np.full(positional[-1].shape, np.nan, positional[-1].dtype)
        return adopt(result, tuple(found), name)

    call.__name__ = name
    call.__signature__ = signature  # type: ignore[attr-defined]
    return call


def _planned(transform: Callable) -> Callable:
    """A transform as by cuFFT, whose plan has memory of its own; CuPy keeps the plans that were used last."""
    run = capturing.recorded(lambda plan, args, kwargs: transform(*args, **kwargs))

    @functools.wraps(transform)
    def call(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs).arguments
        a, plans = given.pop("a"), state.thread.plans
        key = (transform.__name__, state.thread.device, a.shape, a.dtype, *given.items())
        plan = plans[key] = plans.pop(key, None) or memory.MemoryPointer(memory.Memory(512), 0)
        if len(plans) > MOST_PLANS:
            del plans[next(iter(plans))]
        return run(plan, args, kwargs)

    signature = inspect.signature(transform)
    return call


def _filled(table: str, module: Any, strict: bool = True) -> dict[str, Callable]:
    return {
        name: _function(name, signature, getattr(module, name), strict) for name, signature in signatures(table).items()
    }


@functools.cache
def _scipy() -> Any:
    import scipy.linalg

    return scipy.linalg


class _Late:
    """``scipy.linalg``, imported when a function is called."""

    def __getattr__(self, name: str) -> Callable:
        return lambda *args, **kwargs: getattr(_scipy(), name)(*args, **kwargs)


def build(module: Callable[..., types.ModuleType], modules: dict[str, types.ModuleType]) -> None:
    """Add the three modules to those there are."""
    cupy = modules["cupy"]
    linalg = module("cupy.linalg", LinAlgError=np.linalg.LinAlgError, **_filled(LINALG, np.linalg))
    transforms = _filled(FFT, np.fft, strict=False)
    fft = module("cupy.fft", **{name: _planned(transform) for name, transform in transforms.items()})
    top = module("cupyx.scipy.linalg", **_filled(SCIPY, _Late()))
    cupy.linalg, cupy.fft = linalg, fft  # type: ignore[attr-defined]
    scipy = modules.setdefault("cupyx.scipy", module("cupyx.scipy", __path__=[]))
    modules["cupyx"].scipy, scipy.linalg = scipy, top  # type: ignore[attr-defined]
    modules.update({one.__name__: one for one in (linalg, fft, top)})
