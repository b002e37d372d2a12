"""Signals, differential equations, sparse matrices."""

from __future__ import annotations

import numpy as np
import scipy.sparse
from table.coverage_case import Case, case, uniform

import tapegrad as tg

V, W = uniform(7), uniform(4, seed=1)
A, K = uniform(4, 5, seed=2), uniform(3, 2, seed=3)
LONG, OTHER = uniform(40, seed=4), uniform(40, seed=5)
SPEC = uniform(5, 11, seed=6) + 1j * uniform(5, 11, seed=7)
SPARSE = scipy.sparse.csr_array(np.array([[1.0, 0, 2, 0], [0, 0, 3, 0], [4, 5, 0, 6]]))

CASES: dict[str, Case] = {
    "scipy.signal.convolve": case("signal.convolve", A, K, mode="same"),
    "scipy.signal.correlate": case("signal.correlate", V, W),
    "scipy.signal.convolve2d": case("signal.convolve2d", A, K, mode="valid"),
    "scipy.signal.correlate2d": case("signal.correlate2d", A, K, boundary="symm"),
    "scipy.signal.fftconvolve": case("signal.fftconvolve", V, W),
    "scipy.signal.detrend": case("signal.detrend", LONG),
    "scipy.signal.stft": case("signal.stft", LONG, nperseg=8),
    "scipy.signal.istft": case("signal.istft", SPEC, nperseg=8),
    "scipy.signal.welch": case("signal.welch", LONG, nperseg=16),
    "scipy.signal.csd": case("signal.csd", LONG, OTHER, nperseg=16),
    "stft": case("signal.stft", LONG, nperseg=8),
    "istft": case("signal.istft", SPEC, nperseg=8),
    "scipy.integrate.odeint": case(
        "integrate.odeint", np.array([0.5, -0.3]), np.array([0.7, 0.4]),
        call=lambda y0, k: tg.integrate.odeint(
            lambda y, t, k: tg.stack([y[1], -k[0] * y[0] - k[1] * y[1]]), y0, np.array([0.0, 0.3, 0.7]), (k,)
        ),
        tol=1e-3,
    ),
    "sparse_matmul": case(
        "sparse.matmul", SPARSE.data, uniform(4, 2),
        call=lambda data, x: tg.sparse.csr(data, SPARSE.indices, SPARSE.indptr, SPARSE.shape) @ x,
    ),
}  # fmt: skip
LEFT_OUT: dict[str, str] = {}
