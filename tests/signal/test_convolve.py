"""Convolution and correlation: SciPy's values in every mode, derivatives in both operands."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.signal

import tapegrad as tg
from tapegrad.errors import AxisError, ShapeError, TapegradError
from tapegrad.testing import check_grads

PAIRS = [((5,), (3,)), ((3,), (5,)), ((4,), (4,)), ((1,), (3,)), ((4, 5), (2, 3)), ((2, 3), (4, 5)), ((3, 4, 2), (2, 2, 2))]  # fmt: skip  # noqa: E501
MODES = ["full", "valid", "same"]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("x", "y"), PAIRS)
@pytest.mark.parametrize("name", ["convolve", "correlate"])
def test_direct_values_are_scipys(rng, name, x, y, mode):
    for dtype in ("float64", "float32", "complex128", "int64"):
        a, b = ((rng.normal(size=s) * 5).astype(dtype) for s in (x, y))
        if dtype == "complex128":
            a, b = a + 1j * rng.normal(size=x), b + 1j * rng.normal(size=y)
        got = getattr(tg.signal, name)(a, b, mode, "direct")
        wanted = getattr(scipy.signal, name)(a, b, mode, "direct")
        assert got.dtype == wanted.dtype
        np.testing.assert_allclose(got.numpy(), wanted, rtol=1e-5 if dtype == "float32" else 1e-12, atol=1e-5)
        if name == "convolve" and mode != "same":
            np.testing.assert_array_equal(got.numpy(), wanted)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("x", "y"), PAIRS)
def test_derivatives(rng, x, y, mode):
    a, b = rng.normal(size=x), rng.normal(size=y)
    check_grads(lambda a, b: tg.signal.convolve(tg.sin(a), b, mode), [a, b], order=2)
    check_grads(lambda a, b: tg.signal.correlate(a, tg.sin(b), mode), [a, b], order=2)
    if a.ndim == 2:
        for boundary in ("fill", "wrap", "symm"):
            if mode == "valid" or all(m < n for m, n in zip(y, x, strict=True)):
                f = lambda a, b, boundary=boundary: tg.signal.correlate2d(a, b, mode, boundary)
                check_grads(f, [a, b], order=2)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("boundary", ["fill", "wrap", "symm"])
@pytest.mark.parametrize("name", ["convolve2d", "correlate2d"])
def test_two_dimensions_with_boundaries(rng, name, boundary, mode):
    for x, y in (((5, 6), (3, 2)), ((5, 6), (4, 3)), ((4, 4), (1, 1)), ((3, 2), (3, 4))):
        a, b = rng.normal(size=x), rng.normal(size=y)
        for fill in (0, 2.5):
            wanted = getattr(scipy.signal, name)(a, b, mode, boundary, fill)
            got = getattr(tg.signal, name)(a, b, mode, boundary, fill)
            np.testing.assert_allclose(got.numpy(), wanted, atol=1e-12)


def test_complex_gradients_are_the_conjugates(rng):
    a, b, ct = (rng.normal(size=n) + 1j * rng.normal(size=n) for n in (5, 3, 7))
    _, pull = tg.vjp(tg.signal.convolve, a, b)
    of_a, of_b = (g.numpy() for g in pull(ct))
    np.testing.assert_allclose(of_a, scipy.signal.correlate(ct, b, "valid"))
    np.testing.assert_allclose(of_b, scipy.signal.correlate(ct, a, "valid"))


def test_jacobian_and_vmap(rng):
    a, b = rng.normal(size=(4, 5)), rng.normal(size=3)
    f = lambda x, y: tg.signal.convolve(x, y)
    jacobian = tg.jacobian(f)(a[0], b).numpy()
    np.testing.assert_allclose(jacobian @ a[0], scipy.signal.convolve(a[0], b))
    np.testing.assert_allclose(tg.vmap(f, in_axes=(0, None))(a, b).numpy(), [np.convolve(row, b) for row in a])


def test_one_kernel_runs_direct_or_by_transforms(rng):
    x, y = rng.normal(size=300), rng.normal(size=4)
    np.testing.assert_array_equal(tg.signal.convolve(x, y).numpy(), np.convolve(x, y))
    assert tg.signal.convolve(3.0, 4.0).item() == 12


@pytest.mark.parametrize(
    ("f", "error", "words"),
    [
        (lambda: tg.signal.convolve(np.ones(3), np.ones((2, 2))), ShapeError, "rank"),
        (lambda: tg.signal.convolve(np.ones(3), np.ones(2), "most"), TapegradError, "mode 'most'"),
        (lambda: tg.signal.convolve(np.ones(3), np.ones(2), "full", "magic"), TapegradError, "method 'magic'"),
        (lambda: tg.signal.convolve(np.ones(0), np.ones(2)), ShapeError, "empty"),
        (lambda: tg.signal.correlate(np.ones((2, 3)), np.ones((3, 2)), "valid"), ShapeError, "every dimension"),
        (lambda: tg.signal.convolve2d(np.ones(3), np.ones(3)), ShapeError, "two dimensions"),
        (lambda: tg.signal.convolve2d(np.ones((3, 3)), np.ones((3, 3)), boundary="x"), TapegradError, "boundary 'x'"),
        (lambda: tg.signal.fftconvolve(np.ones((2, 3)), np.ones((3, 3)), axes=1), ShapeError, "broadcast"),
        (lambda: tg.signal.fftconvolve(np.ones(3), np.ones(3), axes=2), AxisError, "axis 2"),
    ],
)
def test_bad_input(f, error, words):
    with pytest.raises(error, match=words):
        f()
