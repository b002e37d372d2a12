"""Triangles by masks and by rows, products of which a triangle is kept, Cholesky factors and their cotangents."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import tapegrad as tg
from tapegrad.device.numerics import blas, triangles

SHAPES = [(100, 100), (3, 7, 5), (200, 130), (130, 200), (2, 129, 129), (1, 300), (300, 1), (0, 4), (4, 0)]


def normal(*shape: int, dtype: Any = "f8", seed: int = 0) -> Any:
    draw = np.random.default_rng(seed)
    x = draw.standard_normal(shape)
    return (x + 1j * draw.standard_normal(shape) if np.dtype(dtype).kind == "c" else x).astype(dtype)


def positive(n: int, dtype: Any = "f8", *stack: int) -> Any:
    x = normal(*stack, n, n, dtype=dtype) / n**0.5
    x = x @ x.swapaxes(-1, -2).conj() + np.eye(n, dtype=dtype)
    return (x + x.swapaxes(-1, -2).conj()) / 2


@pytest.mark.parametrize("dtype", ["f2", "f4", "f8", "c16"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_triangles_are_numpys(shape: tuple[int, ...], dtype: str) -> None:
    x = normal(*shape, dtype=dtype)
    for lower, numpys in ((True, np.tril), (False, np.triu)):
        for k in (-150, -70, -1, 0, 1, 64, 110):
            wanted, out = numpys(x, k), np.full_like(x, np.nan)
            triangles.put(np, x, out, lower, k)
            assert np.array_equal(out, wanted), (lower, k)
            over = np.where(wanted == x, x, np.nan)  # what is not kept may hold anything
            triangles.put(np, over, over, lower, k)
            assert np.array_equal(over, wanted), (lower, k)


def test_half_of_the_diagonal() -> None:
    x = normal(2, 150, 140)
    out = np.empty_like(x)
    triangles.put(np, x, out, half=True)
    assert np.array_equal(out, np.tril(x, -1) + np.tril(np.triu(x)) / 2)


@pytest.mark.sampled(1 / 4)
@pytest.mark.parametrize("k", [-1, 0, 1])
@pytest.mark.parametrize("lower", [True, False])
@pytest.mark.parametrize(("shape", "inner"), [((5, 5), 3), ((300, 300), 1), ((2, 260, 150), 7), ((150, 260), 2)])
def test_triangles_of_products(shape: tuple[int, ...], inner: int, lower: bool, k: int) -> None:
    x, y = normal(*shape[:-1], inner), normal(*shape[:-2], inner, shape[-1], seed=1)
    out = np.full(shape, np.nan)
    triangles.product(np, x, y, out, lower, k)
    wanted = (np.tril if lower else np.triu)(x @ y, k)
    assert np.allclose(out, wanted, rtol=0, atol=1e-13) and ((out == 0) == (wanted == 0)).all()


def test_half_of_a_large_product_is_not_made(monkeypatch: pytest.MonkeyPatch) -> None:
    made, run = list[int](), blas.matmul
    monkeypatch.setattr(blas, "matmul", lambda xp, x, y, out: made.append(out.size) or run(xp, x, y, out))
    x, y, out = normal(512, 8), normal(8, 512), np.empty((512, 512))
    triangles.product(np, x, y, out, True, 0)
    assert sum(made) <= 0.6 * out.size
    made.clear()
    triangles.product(np, x[:64], y[:, :64], out[:64, :64], True, 0)
    assert made == [64 * 64]


def test_a_solves_cotangent_keeps_a_triangle_of_a_product_and_signs_the_vector() -> None:
    a, b = tg.asarray(np.tril(normal(40, 40)) + 9 * np.eye(40)), tg.asarray(normal(40))
    loss = lambda a: tg.sum(tg.linalg.solve_triangular(a, b, lower=True) ** 3)
    names = works(tg.grad(loss), a)
    assert names.count("triangle_product") == 1
    assert not {"matmul", "triangle"} & set(names)
    tg.testing.check_grads(loss, (a,), order=2)


def works(f: Any, *args: Any) -> list[str]:
    """The names of what a captured call runs."""
    f = tg.function(f)
    for _ in range(3):
        f(*args)
    with tg.measure() as m:
        f(*args)
    return list(m.nodes_run.elements())


def test_outer_products_are_one_multiplication() -> None:
    for dtype in ("f2", "f4", "f8", "c16"):
        x, y = normal(3, 50, 1, dtype=dtype), normal(1, 60, dtype=dtype, seed=1)
        out = np.empty((3, 50, 60), dtype)
        blas.matmul(np, x, y, out)
        assert np.array_equal(out, x * y)


@pytest.mark.sampled(1 / 4)
@pytest.mark.parametrize("upper", [False, True])
@pytest.mark.parametrize("dtype", ["f4", "f8", "c8", "c16"])
@pytest.mark.parametrize("n", [1, 31, 32, 70, 200])
def test_factors(n: int, dtype: str, upper: bool) -> None:
    x = positive(n, dtype, 2)
    wanted, eps = np.linalg.cholesky(x, upper=upper), np.finfo(dtype).eps
    for given in (x, np.asfortranarray(x), x[0]):
        factor = tg.linalg.cholesky(given, upper=upper).numpy()
        assert np.allclose(factor, wanted if given.ndim > 2 else wanted[0], rtol=0, atol=50 * eps)
        assert np.array_equal(factor, (np.triu if upper else np.tril)(factor))
        again = tg.vmap(lambda x: tg.linalg.cholesky(x, upper=upper))(np.stack([given, given])).numpy()
        assert np.array_equal(again[1], factor)


@pytest.mark.parametrize("upper", [False, True])
@pytest.mark.parametrize("n", [5, 80])
def test_of_what_is_not_hermitian_one_triangle_is_read(n: int, upper: bool) -> None:
    x = positive(n)
    other = np.where(np.tri(n, k=-1) if upper else np.triu(np.ones((n, n)), 1), np.nan, x)
    assert np.array_equal(tg.linalg.cholesky(other, upper=upper), tg.linalg.cholesky(x, upper=upper))
    nearly = x + 1e-6 * np.tril(normal(n, n), -1)
    assert np.array_equal(tg.linalg.cholesky(nearly), tg.linalg.cholesky((nearly + nearly.T) / 2))


def test_large_matrices_that_are_not_positive_definite_are_named() -> None:
    x = np.stack([positive(40), -positive(40), positive(40)])
    with pytest.raises(tg.linalg.LinAlgError, match="not positive definite") as caught:
        tg.linalg.cholesky(x)
    assert caught.value.failed == ((1,),)


@pytest.mark.sampled(1 / 4)
@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("dtype", ["f8", "c16"])
@pytest.mark.parametrize("n", [0, 3, 64, 65, 150, 300])
def test_cotangents_of_factors(n: int, dtype: str, mixed: bool) -> None:
    factor = np.linalg.cholesky(positive(n, dtype)) if n else np.zeros((0, 0), dtype)
    g = np.tril(normal(n, n, dtype=dtype, seed=1))
    half = np.tril(factor.conj().T @ g, -1) + np.diag(np.diag(factor.conj().T @ g)) / 2
    inverse = np.linalg.inv(factor) if n else factor
    both = inverse.conj().T @ half @ inverse
    both = both + both.conj().T
    wanted = both / 2 if mixed else np.tril(both, -1) + np.diag(np.diag(both)) / 2
    garbage = np.where(np.tri(n, dtype=bool), g, np.nan)
    for given in (g, np.asfortranarray(g), garbage):
        out = np.empty_like(g)
        triangles.of_cholesky(np, given, factor, np.full((1, 1), mixed, "u1"), out)
        assert np.allclose(out, wanted, rtol=0, atol=1e-11)
        if mixed:
            assert np.array_equal(out, out.T.conj())


def test_a_captured_gradient_through_a_factor_has_few_works() -> None:
    x = tg.asarray(positive(70))
    names = works(tg.grad(lambda x: tg.sum(tg.linalg.cholesky(x) ** 2)), x)
    assert [name for name in names if name not in ("multiply", "full", "broadcast_to")] == [
        "is_nearly_hermitian",
        "cholesky",
        "cholesky_vjp",
    ]


def test_second_derivatives_through_blocks() -> None:
    x = tg.asarray(positive(70))
    tg.testing.check_grads(lambda x: tg.sum(tg.sin(tg.linalg.cholesky(x))), (x,), order=2)


def test_unit_matrices_are_written_in_place() -> None:
    for n, m, k in [(3, 3, 0), (3, 5, 2), (5, 3, -3), (2, 2, 7), (4, 4, -9), (0, 3, 0), (1, 4, 3)]:
        assert np.array_equal(tg.eye(n, m, k=k, dtype="float64"), np.eye(n, m, k))
