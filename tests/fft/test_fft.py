"""Fourier transforms: NumPy's bits, and transposes."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.fft as sf
from complex_grads import check_parts

import tapegrad as tg
from tapegrad.errors import AxisError, DTypeError, ShapeError

ft = tg.fft
ALL = ["float16", "float32", "float64", "complex64", "complex128", "int32", "bool"]
REAL = ["float16", "float32", "float64", "int32", "bool"]
NORMS = [None, "backward", "ortho", "forward"]


def make(rng, *shape, dtype="float64"):
    x = rng.normal(size=shape)
    if np.dtype(dtype).kind == "c":
        x = x + 1j * rng.normal(size=shape)
    return x.astype(dtype)


def same(got, wanted):
    got, wanted = np.asarray(got), np.asarray(wanted)
    assert (got.shape, got.dtype) == (wanted.shape, wanted.dtype)
    assert got.tobytes() == np.ascontiguousarray(wanted).tobytes()


@pytest.mark.parametrize("dtype", ALL)
@pytest.mark.parametrize("name", ["fft", "ifft", "rfft", "irfft", "hfft", "ihfft"])
def test_values_along_one_axis_are_numpys(rng, name, dtype):
    if name in ("rfft", "ihfft") and np.dtype(dtype).kind == "c":
        with pytest.raises(DTypeError, match=name):
            getattr(ft, name)(np.zeros(3, dtype))
        return
    ours, theirs = getattr(ft, name), getattr(np.fft, name)
    for shape in [(5,), (4, 6), (2, 3, 7)]:
        x = make(rng, *shape, dtype=dtype)
        for norm in NORMS:
            same(ours(x, norm=norm), theirs(x, norm=norm))
        for n in (1, 2, 4, 5, 9):
            same(ours(x, n, 0), theirs(x, n, 0))
            same(ours(x, n=n, axis=-1, norm="ortho"), theirs(x, n=n, axis=-1, norm="ortho"))
    empty = np.zeros((0, 4), dtype)
    assert ours(empty).shape == theirs(empty).shape


@pytest.mark.parametrize("dtype", ["float32", "float64", "complex64", "complex128", "int32"])
@pytest.mark.parametrize("name", ["fftn", "ifftn", "rfftn", "irfftn"])
def test_values_along_several_axes_are_numpys(rng, name, dtype):
    if name == "rfftn" and np.dtype(dtype).kind == "c":
        return
    ours, theirs = getattr(ft, name), getattr(np.fft, name)
    x = make(rng, 3, 4, 6, dtype=dtype)
    for s, axes in [(None, None), (None, (0, 2)), (None, (-1, 0)), ((4, 3), (0, 1)), ((5, -1), (2, 0)), ((3,), (1,))]:
        for norm in NORMS:
            same(ours(x, s, axes, norm), theirs(x, s, axes, norm))
    same(ours(x, axes=(1, 1)), theirs(x, axes=(1, 1)))
    flat, theirs = getattr(ft, name[:-1] + "2"), getattr(np.fft, name[:-1] + "2")
    same(flat(x), theirs(x))
    same(flat(x, (2, 5), (0, 1), "ortho"), theirs(x, (2, 5), (0, 1), "ortho"))


@pytest.mark.parametrize("name", ["hfftn", "ihfftn", "hfft2", "ihfft2"])
def test_scipys_hermitian_transforms(rng, name):
    x = make(rng, 3, 4, 5, dtype="float64" if name[0] == "i" else "complex128")
    for norm in NORMS:
        np.testing.assert_allclose(getattr(ft, name)(x, norm=norm), getattr(sf, name)(x, norm=norm), atol=1e-12)
    got, wanted = (getattr(m, name)(x, (4, 6), (0, 2)) for m in (ft, sf))
    np.testing.assert_allclose(got, wanted, atol=1e-12)


@pytest.mark.parametrize("norm", NORMS[1:])
@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 8])
@pytest.mark.parametrize("name", ["fft", "ifft", "rfft", "irfft", "hfft", "ihfft"])
def test_derivatives_along_one_axis(rng, name, n, norm):
    f = getattr(ft, name)
    for dtype in ("float64",) if name in ("rfft", "ihfft") else ("float64", "complex128"):
        check_parts(lambda x: f(x, n, 0, norm), make(rng, 4, 2, dtype=dtype))


@pytest.mark.parametrize("name", ["fftn", "ifftn", "rfftn", "irfftn", "hfftn", "ihfftn", "fft2", "irfft2", "hfft2"])
def test_derivatives_along_several_axes(rng, name):
    f = getattr(ft, name)
    for dtype in ("float64",) if name in ("rfftn", "ihfftn") else ("float64", "complex128"):
        for s, axes in [(None, (0, 1)), ((3, 5), (2, 0)), ((2, 2), (0, 1))]:
            check_parts(lambda x, s=s, axes=axes: f(x, s, axes), make(rng, 2, 3, 4, dtype=dtype))


def test_the_ends_of_half_a_spectrum_have_no_imaginary_part(rng):
    x = tg.asarray(make(rng, 4, dtype="complex128"))
    with tg.GradientTape() as tape:
        tape.watch(x)
        y = tg.sum(ft.irfft(x) * make(rng, 6))
    g = tape.gradient(y, x).numpy()
    assert g[0].imag == g[3].imag == 0 and g[1].imag and g[2].imag


def test_gradient_of_energy_is_that_of_parseval(rng):
    x = tg.asarray(make(rng, 5))
    g = tg.grad(lambda x: tg.sum(tg.abs(ft.fft(x)) ** 2))(x)
    np.testing.assert_allclose(g, 10 * x.numpy(), rtol=1e-12)


def test_single_precision_gradients_stay_single(rng):
    for name in ("fft", "rfft", "irfft", "hfft", "ihfft"):
        x = tg.asarray(make(rng, 5, dtype="float32"))
        assert tg.grad(lambda x, name=name: tg.sum(tg.abs(getattr(ft, name)(x))))(x).dtype == np.float32


def test_a_jacobian_in_one_walk_is_that_of_its_rows(rng):
    for f in (lambda x: tg.imag(ft.fft(x, axis=0)), lambda x: tg.real(ft.rfft(x, 4)), lambda x: ft.irfft(x, 5, 0)):
        x = tg.asarray(make(rng, 3, 4))
        whole = tg.jacobian(f)(x).numpy()
        y = f(x)
        for index in np.ndindex(*y.shape):
            row = tg.grad(lambda x, index=index, f=f: f(x)[index])(x).numpy()
            np.testing.assert_allclose(whole[index], row, atol=1e-12)


@pytest.mark.parametrize("n", [1, 2, 5, 8])
def test_frequencies(n):
    for name in ("fftfreq", "rfftfreq"):
        ours, theirs = getattr(ft, name), getattr(np.fft, name)
        same(ours(n, dtype="float64"), theirs(n))
        same(ours(n, d=0.3), theirs(n, 0.3).astype("float32"))
        with pytest.raises(ShapeError, match=name):
            ours(0)


@pytest.mark.parametrize("axes", [None, 0, -1, (0, 2), [1], ()])
def test_shifts(rng, axes):
    x = make(rng, 3, 4, 5)
    same(ft.fftshift(x, axes), np.fft.fftshift(x, axes))
    same(ft.ifftshift(x, axes), np.fft.ifftshift(x, axes))
    check_parts(lambda x: (ft.fftshift(x, axes), ft.ifftshift(x, axes)), x)


def test_bad_operands_raise():
    x = np.ones((2, 3))
    for call in (
        lambda: ft.fft(x, 0),
        lambda: ft.fft(np.zeros(0)),
        lambda: ft.irfft(np.ones(1)),
        lambda: ft.fft(x, norm="both"),
        lambda: ft.hfft(x, norm="both"),
        lambda: ft.fftn(x, (2,), (0, 1)),
    ):
        with pytest.raises(ShapeError):
            call()
    for call in (
        lambda: ft.fft(x, axis=2),
        lambda: ft.fft(1.0),
        lambda: ft.fftn(x, axes=(0, 2)),
        lambda: ft.rfftn(1.0),
        lambda: ft.fftshift(x, 2),
    ):
        with pytest.raises(AxisError):
            call()
