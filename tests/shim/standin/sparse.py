"""``cupyx.scipy.sparse``: CSR matrices of device arrays, solved with on the host by SciPy's own functions."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import numpy as np

from . import namespace
from .array import ndarray


def _host(x: Any) -> np.ndarray:
    if not isinstance(x, ndarray):
        raise TypeError(f"a device array is required, not {type(x).__name__}")
    return x.get()


def _device(x: np.ndarray) -> ndarray:
    return namespace.module.asarray(np.ascontiguousarray(x))


class csr_matrix:
    """A sparse matrix in one of two formats; floats and complex numbers of two widths, and bools, as cupyx has them."""

    format = "csr"

    def __init__(self, arg: Any, shape: Any = None, *, _matrix: Any = None) -> None:
        import scipy.sparse

        if _matrix is None:
            data, indices, indptr = map(_host, arg)
            if data.dtype.char not in "?fdFD":
                raise ValueError("Only bool, float32, float64, complex64 and complex128 are supported")
            _matrix = scipy.sparse.csr_matrix((data, indices, indptr), shape=shape)
        self._matrix = _matrix
        self.shape, self.dtype, self.nnz = _matrix.shape, _matrix.dtype, _matrix.nnz

    data = property(lambda self: _device(self._matrix.data))
    indices = property(lambda self: _device(self._matrix.indices))
    indptr = property(lambda self: _device(self._matrix.indptr))
    T = property(lambda self: _wrapped(self._matrix.T))

    def tocsr(self) -> Any:
        """In compressed rows."""
        return _wrapped(self._matrix.tocsr())

    def tocsc(self) -> Any:
        """In compressed columns."""
        return _wrapped(self._matrix.tocsc())

    def copy(self) -> Any:
        """Another one."""
        return _wrapped(self._matrix.copy())

    def sum_duplicates(self) -> None:
        """In place."""
        self._matrix.sum_duplicates()

    def get(self) -> Any:
        """SciPy's."""
        return self._matrix.copy()

    def __matmul__(self, other: Any) -> Any:
        if not isinstance(other, ndarray):
            return NotImplemented
        return _device(self._matrix @ other.get())


class csc_matrix(csr_matrix):
    """The other format."""

    format = "csc"


for _class in (csr_matrix, csc_matrix):
    _class.__module__ = "cupyx.scipy.sparse"


def _wrapped(matrix: Any) -> Any:
    return (csc_matrix if matrix.format == "csc" else csr_matrix)(None, _matrix=matrix)


class SuperLU:
    """Factors, found by SciPy."""

    def __init__(self, factors: Any, dtype: Any) -> None:
        self._factors, self._dtype = factors, dtype

    def solve(self, rhs: Any, trans: str = "N") -> Any:
        """Triangular solves; those of float32 come as float64, as cupyx gives them."""
        found = self._factors.solve(_host(rhs).astype(self._dtype), trans)
        return _device(found.astype(np.promote_types(found.dtype, "float64")))


def _splu(a: Any) -> SuperLU:
    import scipy.sparse.linalg

    return SuperLU(scipy.sparse.linalg.splu(a.get().tocsc()), a.dtype)


class LinearOperator:
    """A function of device vectors as a matrix."""

    def __init__(self, shape: Any, matvec: Callable, dtype: Any = None) -> None:
        self.shape, self.matvec, self.dtype = shape, matvec, np.dtype(dtype)


def _iterative(name: str) -> Callable:
    def run(A: Any, b: Any, x0: Any = None, *, M: Any = None, **options: Any) -> tuple[Any, int]:
        import scipy.sparse.linalg as linalg

        def onto_host(f: Any) -> Any:
            run = lambda v: _host(f.matvec(_device(v)))
            return None if f is None else linalg.LinearOperator(f.shape, matvec=run, dtype=f.dtype)

        start = None if x0 is None else _host(x0)
        x, info = getattr(linalg, name)(onto_host(A), _host(b), start, M=onto_host(M), **options)
        return _device(x), info

    run.__name__ = name
    return run


def build(module: Callable[..., types.ModuleType], modules: dict[str, types.ModuleType]) -> None:
    """Add ``cupyx.scipy.sparse`` to the modules there are."""
    linalg = module(
        "cupyx.scipy.sparse.linalg", splu=_splu, SuperLU=SuperLU, LinearOperator=LinearOperator,
        cg=_iterative("cg"), gmres=_iterative("gmres"),
    )  # fmt: skip
    top = module("cupyx.scipy.sparse", csr_matrix=csr_matrix, csc_matrix=csc_matrix, linalg=linalg, __path__=[])
    scipy = modules.setdefault("cupyx.scipy", module("cupyx.scipy", __path__=[]))
    modules["cupyx"].scipy, scipy.sparse = scipy, top  # type: ignore[attr-defined]
    modules.update({top.__name__: top, linalg.__name__: linalg})
