"""Linear algebra and Fourier transforms."""

from __future__ import annotations

from typing import Any

import numpy as np
from table.coverage_case import Case, case, uniform

import tapegrad as tg

A = uniform(2, 3, 3) + 2 * np.eye(3)
M, N = A[0], uniform(3, 3, seed=5) + np.diag([3.0, 4.0, 5.0])
TALL = uniform(4, 3, seed=6)
B, V, W = uniform(3, 2, seed=7), uniform(3, seed=8), uniform(3, seed=9)
S = A + np.swapaxes(A, -1, -2) + 3 * np.eye(3)
LOWER = np.tril(M)
BANDS = np.array([[0.0, 0.3, 0.2, 0.4], [3.0, 2.5, 2.8, 3.1], [0.5, 0.1, 0.3, 0.0]])


def symmetric(f: Any) -> Any:
    """``f`` of the symmetric part, as a function of any matrix."""
    return lambda x, *args, **kwargs: f((x + tg.matrix_transpose(x)) / 2, *args, **kwargs)


def gauge_free(vectors: tg.Tensor, other: tg.Tensor | None = None) -> tg.Tensor:
    """Of vectors whose sign is free, what does not depend on it."""
    return tg.abs(vectors) if other is None else vectors @ other


def _svd(x: Any) -> Any:
    u, s, vh = tg.linalg.svd(x, full_matrices=False)
    return s, gauge_free(u, vh)


def _eig(x: Any) -> Any:
    values, vectors = tg.linalg.eig(x)
    return values, tg.abs(vectors)


def _eigh(x: Any) -> Any:
    values, vectors = tg.linalg.eigh(x)
    return values, vectors @ tg.matrix_transpose(tg.tanh(values)[..., None, :] * vectors)


CASES: dict[str, Case] = {
    "linalg.cholesky": case("linalg.cholesky", S, call=symmetric(tg.linalg.cholesky)),
    "linalg.det": case("linalg.det", A),
    "linalg.diagonal": case("linalg.diagonal", A, offset=1),
    "linalg.inv": case("linalg.inv", A),
    "linalg.cross": case("linalg.cross", TALL, V),
    "linalg.eigh": case(
        "linalg.eigh", S, call=symmetric(_eigh), note="vectors through what their sign does not change"
    ),
    "linalg.outer": case("linalg.outer", V, W),
    "linalg.pinv": case("linalg.pinv", TALL),
    "linalg.slogdet": case("linalg.slogdet", A, call=lambda x: tg.linalg.slogdet(x).logabsdet),
    "linalg.solve": case("linalg.solve", A, B),
    "linalg.svd": case("linalg.svd", TALL, call=_svd, note="vectors through what their sign does not change"),
    "linalg.trace": case("linalg.trace", A),
    "linalg.eigvalsh": case("linalg.eigvalsh", S, call=symmetric(tg.linalg.eigvalsh)),
    "linalg.matrix_norm": case("linalg.matrix_norm", A, ord="nuc"),
    "linalg.matrix_power": case("linalg.matrix_power", A, -2),
    "linalg.qr": case("linalg.qr", TALL),
    "linalg.svdvals": case("linalg.svdvals", TALL),
    "linalg.vector_norm": case("linalg.vector_norm", TALL, axis=1, ord=3),
    "linalg.norm": case("linalg.norm", TALL, axis=0),
    "linalg.eigvals": case("linalg.eigvals", A),
    "linalg.lstsq": case("linalg.lstsq", TALL, uniform(4, 2), call=lambda a, b: tg.linalg.lstsq(a, b)[0]),
    "linalg.multi_dot": case("linalg.multi_dot", [TALL, M, B]),
    "linalg.cond": case("linalg.cond", A),
    "linalg.eig": case("linalg.eig", N, call=_eig, note="vectors through what their phase does not change"),
    "linalg.tensorinv": case("linalg.tensorinv", (uniform(4, 4) + 2 * np.eye(4)).reshape(4, 2, 2), ind=1),
    "linalg.tensorsolve": case("linalg.tensorsolve", (uniform(4, 4) + 2 * np.eye(4)).reshape(2, 2, 4), uniform(2, 2)),
    "linalg.lu_solve": case("linalg.lu_solve", M, B, call=lambda a, b: tg.linalg.lu_solve(tg.linalg.lu_factor(a), b)),
    "logdet": case("linalg.logdet", S),
    "matvec": case("matvec", A, V),
    "vecmat": case("vecmat", V, A),
    "scipy.linalg.solve_triangular": case("linalg.solve_triangular", LOWER, B, lower=True),
    "scipy.linalg.block_diag": case("linalg.block_diag", M, B),
    "scipy.linalg.expm": case("linalg.expm", A / 4),
    "scipy.linalg.lu": case("linalg.lu", N, call=lambda x: tg.linalg.lu(x)[1:]),
    "scipy.linalg.cho_solve": case(
        "linalg.cho_solve", S[0], B, call=symmetric(lambda a, b: tg.linalg.cho_solve(tg.linalg.cho_factor(a), b))
    ),
    "scipy.linalg.circulant": case("linalg.circulant", V),
    "scipy.linalg.companion": case("linalg.companion", V),
    "scipy.linalg.convolution_matrix": case("linalg.convolution_matrix", V, 4),
    "scipy.linalg.expm_frechet": case("linalg.expm_frechet", M / 4, N / 4),
    "scipy.linalg.fiedler": case("linalg.fiedler", V),
    "scipy.linalg.fiedler_companion": case("linalg.fiedler_companion", uniform(4)),
    "scipy.linalg.hankel": case("linalg.hankel", V, W),
    "scipy.linalg.lu_solve": case(
        "linalg.lu_solve", M, B, call=lambda a, b: tg.linalg.lu_solve(tg.linalg.lu_factor(a), b, trans=1)
    ),
    "scipy.linalg.solve_banded": case("linalg.solve_banded", (1, 1), BANDS, uniform(4)),
    "scipy.linalg.solve_sylvester": case("linalg.solve_sylvester", M, N, uniform(3, 3)),
    "scipy.linalg.sqrtm": case("linalg.sqrtm", S[0]),
    "scipy.linalg.toeplitz": case("linalg.toeplitz", V, W),
    "fft.fftshift": case("fft.fftshift", TALL, axes=0),
    "fft.ifftshift": case("fft.ifftshift", TALL),
}
Z = uniform(4, 6) + 1j * uniform(4, 6, seed=1)
for name in ("fft", "ifft", "fft2", "ifft2", "fftn", "ifftn", "irfft", "irfft2", "irfftn", "hfft", "hfft2", "hfftn"):
    CASES[f"fft.{name}"] = case(f"fft.{name}", Z)
for name in ("rfft", "rfft2", "rfftn", "ihfft", "ihfft2", "ihfftn"):
    CASES[f"fft.{name}"] = case(f"fft.{name}", Z.real.copy())

LEFT_OUT = {
    "scipy.linalg.rsf2csf": "turns one Schur form into another; no Schur decomposition is offered to begin with",
}
