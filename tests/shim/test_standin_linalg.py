"""The stand-in's linear algebra: CuPy's signatures, and no more said about singular matrices than CuPy says."""

from __future__ import annotations

import ast
import importlib.util
import inspect
from pathlib import Path

import numpy as np
import pytest

from shim import standin
from shim.standin import linalg as ours


@pytest.fixture
def cupy():
    """The stand-in, installed for one test."""
    yield standin.install()
    standin.uninstall()


@pytest.mark.parametrize(
    ("table", "package", "folder"),
    [(ours.LINALG, "cupy", "linalg"), (ours.FFT, "cupy", "fft"), (ours.SCIPY, "cupyx", "scipy/linalg")],
)
def test_signatures_are_cupys(table, package, folder):
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("CuPy is not installed")
    found = {}
    for file in (Path(spec.submodule_search_locations[0]) / folder).glob("*.py"):
        for node in ast.parse(file.read_text()).body:
            if isinstance(node, ast.FunctionDef):
                found[node.name] = ast.unparse(node.args)
    for name, signature in ours.signatures(table).items():
        assert str(signature).replace(" ", "") == f"({found[name]})".replace(" ", ""), name


def test_a_singular_matrix_gives_nan(cupy):
    import cupyx.scipy.linalg

    x = cupy.asarray(np.array([[1.0, 2.0], [2.0, 4.0]]))
    for found in (cupy.linalg.inv(x), cupy.linalg.solve(x, x), cupy.linalg.cholesky(-x)):
        assert type(found) is cupy.ndarray and np.isnan(found.get()).all()
    assert np.isnan(cupyx.scipy.linalg.solve_triangular(x * 0, x).get()).all()
    with pytest.raises(cupy.linalg.LinAlgError):
        cupy.linalg.svd(x * np.nan)


def test_results_are_arrays_of_the_device(cupy):
    x = cupy.asarray(np.eye(2))
    w, v = cupy.linalg.eigh(x)
    assert type(w) is type(v) is cupy.ndarray
    assert type(cupy.linalg.slogdet(x)[0]) is type(cupy.fft.fft(x)) is cupy.ndarray
    assert isinstance(inspect.signature(cupy.linalg.qr), inspect.Signature)


def test_what_cupy_refuses(cupy):
    import cupyx.scipy.linalg

    x = cupy.asarray(np.ones((2, 3, 3)))
    for call in (
        lambda: cupy.linalg.inv(np.eye(2)),
        lambda: cupy.linalg.inv(x.astype("float16")),
        lambda: cupy.linalg.cholesky(x, upper=True),
        lambda: cupy.linalg.eigh(x, "L", 3),
    ):
        with pytest.raises(TypeError):
            call()
    with pytest.raises(ValueError):
        cupy.linalg.solve(x, x[0])
    with pytest.raises(ValueError):
        cupyx.scipy.linalg.solve_triangular(x, x[0])
    for call in (lambda: cupy.linalg.lstsq(x, x), lambda: cupyx.scipy.linalg.expm(x)):
        with pytest.raises(cupy.linalg.LinAlgError):
            call()
