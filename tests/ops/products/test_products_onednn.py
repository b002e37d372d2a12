"""Products of float32 by oneDNN: values, however the matrices lie, and bits that depend on shapes alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import tapegrad as tg
from tapegrad.device import onednn
from tapegrad.device.numerics import blas

pytestmark = pytest.mark.skipif(
    onednn.library() is None or blas._controls is None, reason="oneDNN is not installed, or NumPy has another library"
)

LAID = {
    "by rows": lambda a: a,
    "by columns": np.asfortranarray,
    "part of more rows": lambda a: np.repeat(a, 2, axis=0)[::2],
    "part of more columns": lambda a: np.concatenate([a, a], axis=1)[:, : a.shape[1]],
    "every second column": lambda a: np.repeat(a, 2, axis=1)[:, ::2],
    "backwards": lambda a: a[::-1].copy()[::-1],
}


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """How the operands of each product of oneDNN's were turned."""
    called: list[bytes] = []
    library = onednn.library()
    assert library is not None
    multiply = library.multiply

    def noted(*args: Any) -> None:
        called.append(args[-1])
        multiply(*args)

    monkeypatch.setattr(library, "multiply", noted)
    return called


@pytest.mark.parametrize("first", LAID)
@pytest.mark.parametrize("second", LAID)
def test_however_the_matrices_lie(first: str, second: str, products: list[bytes], rng: np.random.Generator) -> None:
    x, y = (rng.normal(size=s).astype("float32") for s in ((150, 70), (70, 90)))
    found = np.full((150, 90), np.nan, "float32")
    blas.matmul(np, LAID[first](x), LAID[second](y), found)
    np.testing.assert_allclose(found, x.astype("float64") @ y, atol=1e-4)
    odd = {"every second column", "backwards"}
    assert len(products) == (0 if {first, second} & odd else 1)


def test_which_products(products: list[bytes], rng: np.random.Generator) -> None:
    """Large ones of float32; half types multiply in float32; rows that lie apart are no hindrance to a result."""
    for dtype, n, count in (("float64", 128, 0), ("float32", 8, 0), ("float32", 128, 1), ("bfloat16", 128, 1)):
        products.clear()
        x = tg.asarray(rng.normal(size=(n, n)).astype("float32")).astype(dtype)
        (x @ x).numpy()
        assert len(products) == count
    out = np.full((100, 220), np.nan, "float32")
    x, y = (rng.normal(size=s).astype("float32") for s in ((100, 90), (90, 110)))
    blas.matmul(np, x, y, out[:, :110])
    np.testing.assert_allclose(out[:, :110], x @ y, atol=1e-4)
    assert np.isnan(out[:, 110:]).all()


@pytest.mark.parametrize("shape", [(2000, 130, 400), (60, 3000, 700), (1, 1024, 1024), (1024, 1024, 1)])
def test_no_bit_depends_on_threads(shape: tuple[int, int, int], rng: np.random.Generator) -> None:
    m, k, n = shape
    x, y = rng.normal(size=(m, k)).astype("float32"), rng.normal(size=(k, n)).astype("float32")
    before, found = tg.get_num_threads(), []
    try:
        for count in (1, 2, 5):
            tg.set_num_threads(count)
            found.append((tg.asarray(x) @ tg.asarray(y)).numpy(copy=True))
    finally:
        tg.set_num_threads(before)
    np.testing.assert_allclose(found[0], x.astype("float64") @ y, atol=1e-3)
    for other in found[1:]:
        np.testing.assert_array_equal(found[0], other)


def test_special_numbers(rng: np.random.Generator) -> None:
    """A row or a column of them stays one; what the result's memory holds does not matter."""
    x, y = rng.normal(size=(128, 96)).astype("float32"), rng.normal(size=(96, 112)).astype("float32")
    x[3, 5], y[7, 11] = np.inf, np.nan
    found = np.full((128, 112), np.nan, "float32")
    blas.matmul(np, x, y, found)
    with np.errstate(invalid="ignore"):
        wanted = x.astype("float64") @ y
    np.testing.assert_array_equal(np.isfinite(found), np.isfinite(wanted))
    np.testing.assert_array_equal(np.isnan(found), np.isnan(wanted))
