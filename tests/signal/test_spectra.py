"""Convolution by transforms, and spectra of segments: SciPy's values, derivatives in the signals and the window."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.fft
import scipy.signal

import tapegrad as tg
from tapegrad.errors import DTypeError, ShapeError, TapegradError
from tapegrad.signal.by_fft import fast_length
from tapegrad.testing import check_grads


def test_fast_lengths():
    for n in (*range(1, 300), 1000, 1025, 4097, 100003):
        assert fast_length(n) == scipy.fft.next_fast_len(n, real=True)


@pytest.mark.parametrize("mode", ["full", "same", "valid"])
@pytest.mark.parametrize(
    ("x", "y", "axes"),
    [((7,), (3,), None), ((3,), (7,), None), ((4, 5), (2, 3), None), ((4, 5), (4, 3), 1), ((4, 1), (1, 6), (1,)),
     ((2, 6, 3), (1, 4, 3), [1]), ((4, 5), (1, 3), [0, 1])],
)  # fmt: skip
def test_fftconvolve_is_scipys(rng, x, y, axes, mode):
    for dtype in ("float64", "complex128", "float32", "int64"):
        a, b = ((rng.normal(size=s) * 9).astype(dtype) for s in (x, y))
        try:
            wanted = scipy.signal.fftconvolve(a, b, mode, axes)
        except ValueError:
            with pytest.raises(ShapeError):
                tg.signal.fftconvolve(a, b, mode, axes)
            return
        got = tg.signal.fftconvolve(a, b, mode, axes)
        tolerance = 1e-3 if dtype == "float32" else 1e-10
        np.testing.assert_allclose(got.numpy(), wanted, atol=tolerance, rtol=tolerance)
    a, b = rng.normal(size=x), rng.normal(size=y)
    check_grads(lambda a, b: tg.signal.fftconvolve(tg.sin(a), b, mode, axes), [a, b], order=2)


def test_methods_agree(rng):
    x, y = rng.normal(size=(30, 40)), rng.normal(size=(31, 29))
    results = [tg.signal.convolve(x, y, "same", method).numpy() for method in ("auto", "direct", "fft")]
    for found in results[1:]:
        np.testing.assert_allclose(found, results[0], atol=1e-10)
    long = rng.normal(size=5000), rng.normal(size=4000)
    np.testing.assert_allclose(tg.signal.convolve(*long).numpy(), scipy.signal.convolve(*long), atol=1e-9)
    np.testing.assert_allclose(
        tg.signal.correlate(*long, method="fft").numpy(), scipy.signal.correlate(*long), atol=1e-9
    )


@pytest.mark.parametrize(("n", "length"), [(8, None), (9, None), (8, 12), (9, 5), (1, None)])
def test_hilbert(rng, n, length):
    x = rng.normal(size=(3, n))
    np.testing.assert_allclose(tg.signal.hilbert(x, length).numpy(), scipy.signal.hilbert(x, length), atol=1e-12)
    envelope = lambda x: tg.abs(tg.signal.hilbert(x, length, axis=0))
    check_grads(envelope, [rng.normal(size=(5, 2))], order=2)


STFT = [
    {}, {"nperseg": 16}, {"nperseg": 15, "noverlap": 10}, {"window": "boxcar", "nperseg": 8, "boundary": None},
    {"window": ("kaiser", 3.0), "nperseg": 12, "nfft": 20, "boundary": "even"},
    {"nperseg": 10, "boundary": "odd", "padded": False}, {"nperseg": 10, "boundary": "constant", "fs": 3.0},
    {"nperseg": 8, "scaling": "psd", "fs": 2.0, "detrend": "linear"}, {"nperseg": 8, "return_onesided": False},
]  # fmt: skip


@pytest.mark.parametrize("options", STFT)
def test_stft_is_scipys(rng, options):
    x = rng.normal(size=(3, 50))
    wanted = scipy.signal.stft(x, **options | ({} if options else {"nperseg": 50}))
    for got, want in zip(tg.signal.stft(x, **options), wanted, strict=True):
        np.testing.assert_allclose(got.numpy(), want, atol=1e-12)
    for got, want in zip(tg.signal.stft(x.T, axis=0, **options), tg.signal.stft(x, **options), strict=True):
        moved = want.numpy() if want.ndim == 1 else np.moveaxis(want.numpy(), 1, 0)
        np.testing.assert_allclose(got.numpy(), moved, atol=1e-12)


@pytest.mark.parametrize(
    "options",
    [{}, {"nperseg": 16}, {"nperseg": 15, "noverlap": 10}, {"nperseg": 12, "nfft": 20, "fs": 3.0}, {"scaling": "psd"},
     {"nperseg": 16, "window": "boxcar"}],
)  # fmt: skip
@pytest.mark.filterwarnings("ignore:NOLA")
def test_istft_is_scipys_and_inverts(rng, options):
    x = rng.normal(size=(2, 60))
    z = scipy.signal.stft(x, **{"nperseg": 20} | options)[2]
    for given in ({}, {"boundary": False}):
        wanted = scipy.signal.istft(z, **options, **given)[1]
        times, got = tg.signal.istft(z, **options, **given)
        np.testing.assert_allclose(got.numpy(), wanted, atol=1e-11)
        # SciPy counts the times of several signals along the wrong axis
        one = scipy.signal.istft(z[0], **options, **given)[0]
        np.testing.assert_allclose(times.numpy(), one)
    back = tg.signal.istft(tg.signal.stft(x, **{"nperseg": 20} | options)[2], **options)[1]
    np.testing.assert_allclose(back.numpy()[:, :60], x, atol=1e-11)
    both = scipy.signal.stft(x + 1j, return_onesided=False, nperseg=16)[2]
    wanted = scipy.signal.istft(both, input_onesided=False, time_axis=-1, freq_axis=-2)[1]
    got = tg.signal.istft(np.moveaxis(both, 1, 0), input_onesided=False, freq_axis=0)[1]
    np.testing.assert_allclose(got.numpy(), wanted, atol=1e-11)


SPECTRA = [
    {}, {"nperseg": 16, "fs": 2.0}, {"nperseg": 15, "scaling": "spectrum", "detrend": False},
    {"nperseg": 16, "noverlap": 4, "nfft": 32, "window": "blackman", "detrend": "linear"},
    {"nperseg": 16, "return_onesided": False}, {"window": np.hamming(20)},
]  # fmt: skip


@pytest.mark.parametrize("options", SPECTRA)
@pytest.mark.filterwarnings("ignore:nperseg")
def test_densities_are_scipys(rng, options):
    x, y = rng.normal(size=(2, 70)), rng.normal(size=(2, 60))
    for got, want in zip(tg.signal.welch(x, **options), scipy.signal.welch(x, **options), strict=True):
        np.testing.assert_allclose(got.numpy(), want, atol=1e-13)
    for got, want in zip(tg.signal.csd(x, y, **options), scipy.signal.csd(x, y, **options), strict=True):
        np.testing.assert_allclose(got.numpy(), want, atol=1e-13)
    got, want = (m.welch(x.T, axis=0, **options)[1] for m in (tg.signal, scipy.signal))
    np.testing.assert_allclose(got.numpy(), want, atol=1e-13)
    z = x + 1j * rng.normal(size=x.shape)
    np.testing.assert_allclose(tg.signal.welch(z, **options)[1].numpy(), _quietly(z, options), atol=1e-13)


def _quietly(z, options):
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return scipy.signal.welch(z, **options)[1]


@pytest.mark.parametrize("options", [{}, {"nfft": 20}, {"nfft": 50, "window": "hann"}, {"scaling": "spectrum"}])
def test_periodogram_is_scipys(rng, options):
    x = rng.normal(size=(3, 31))
    for got, want in zip(tg.signal.periodogram(x, **options), scipy.signal.periodogram(x, **options), strict=True):
        np.testing.assert_allclose(got.numpy(), want, atol=1e-13)


def test_derivatives(rng):
    x, y, window = rng.normal(size=22), rng.normal(size=22), rng.uniform(0.5, 1, 6)
    magnitude = lambda z: tg.real(z) ** 2 + tg.imag(z) * tg.real(z)
    check_grads(lambda x, w: magnitude(tg.signal.stft(x, window=w, nperseg=6)[2]), [x, window], order=2)
    check_grads(lambda x, w: tg.signal.welch(x, window=w)[1], [x, window], order=2)
    check_grads(lambda x, y: magnitude(tg.signal.csd(x, y, nperseg=8, detrend="linear")[1]), [x, y], order=2)
    check_grads(lambda x: tg.signal.istft(tg.signal.stft(x, nperseg=8)[2] ** 2, nperseg=8)[1], [x], order=2)


@pytest.mark.parametrize(
    ("f", "error", "words"),
    [
        (lambda x: tg.signal.stft(x, nperseg=8, noverlap=8), ShapeError, "noverlap"),
        (lambda x: tg.signal.stft(x, nperseg=0), ShapeError, "at least 1"),
        (lambda x: tg.signal.stft(x, window="nonsense"), TapegradError, "nonsense"),
        (lambda x: tg.signal.stft(x, window=np.ones((2, 2))), ShapeError, "window"),
        (lambda x: tg.signal.stft(x, boundary="round"), TapegradError, "'round'"),
        (lambda x: tg.signal.stft(x, scaling="big"), TapegradError, "'big'"),
        (lambda x: tg.signal.stft(x[:5], nperseg=5, boundary="even", nfft=3), ShapeError, "nfft"),
        (lambda x: tg.signal.istft(x), ShapeError, "spectra"),
        (lambda x: tg.signal.istft(x[None], time_axis=0, freq_axis=0), ShapeError, "both"),
        (lambda x: tg.signal.welch(x, average="median"), TapegradError, "'median'"),
        (lambda x: tg.signal.hilbert(x * 1j), DTypeError, "real"),
        (lambda x: tg.signal.hilbert(x, 0), ShapeError, "length 0"),
    ],
)
def test_bad_input(rng, f, error, words):
    with pytest.raises(error, match=words):
        f(rng.normal(size=30))
