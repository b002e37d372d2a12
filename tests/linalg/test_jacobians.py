"""Jacobians in one walk, and batches of examples in one run: every function that takes stacks."""

from __future__ import annotations

import numpy as np
import pytest

import tapegrad as tg

la, ft = tg.linalg, tg.fft
_B = np.array([[1.0, 0.5], [-2.0, 1.5], [0.25, 1.0]])

FUNCTIONS = {
    "solve": lambda x: la.solve(x, _B),
    "solve_b": lambda x: la.solve(_B @ _B.T + np.eye(3), x),
    "solve_triangular": lambda x: la.solve_triangular(x, _B, lower=True),
    "inv": la.inv,
    "det": la.det,
    "logabsdet": lambda x: la.slogdet(x)[1],
    "cholesky": lambda x: la.cholesky(x @ x.mT),
    "eigvalsh": lambda x: la.eigvalsh(x + x.mT),
    "eigenvectors": lambda x: la.eigh(x + x.mT)[1],
    "eigvals": lambda x: tg.real(la.eigvals(x @ x.mT)),
    "eig": lambda x: tg.abs(la.eig(x)[1]),
    "svdvals": la.svdvals,
    "u": lambda x: la.svd(x[:, :2], full_matrices=False)[0],
    "vh": lambda x: la.svd(x[:2], full_matrices=False)[2],
    "full svd": lambda x: la.svd(x[:2])[1],
    "pinv": lambda x: la.pinv(x[:2]),
    "lstsq": lambda x: la.lstsq(x[:2], _B[:2]).x,
    "lstsq_b": lambda x: la.lstsq(_B.T, x[:2]).x,
    "q": lambda x: la.qr(x)[0],
    "wide r": lambda x: la.qr(x[:2])[1],
    "lu": lambda x: la.lu_factor(x)[0],
    "tall l": lambda x: la.lu(x[:, :2])[1],
    "lu_solve": lambda x: la.lu_solve(la.lu_factor(x), _B),
    "expm": la.expm,
    "solve_sylvester": lambda x: la.solve_sylvester(x, _B[:2], _B),
    "solve_banded": lambda x: la.solve_banded((1, 1), x, _B),
    "nuclear norm": lambda x: la.norm(x, "nuc"),
    "matrix_power": lambda x: la.matrix_power(x, -2),
    "cond": la.cond,
    "toeplitz": lambda x: la.toeplitz(x[0], x[1]),
    "fft": lambda x: tg.imag(ft.fft(x, 4, axis=0)),
    "irfftn": lambda x: ft.irfftn(x),
    "rfft2": lambda x: tg.real(ft.rfft2(x)),
}


def make(rng, *batch):
    return rng.normal(size=(*batch, 3, 3)) + np.diag([3.0, 4.0, 5.0])


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_jacobian_in_one_walk_is_that_of_its_rows(rng, name):
    f, x = FUNCTIONS[name], tg.asarray(make(rng))
    whole, y = tg.jacobian(f)(x).numpy(), f(x)
    for index in np.ndindex(*y.shape):
        row = tg.grad(lambda x, index=index: f(x)[index])(x).numpy()
        np.testing.assert_allclose(whole[index], row, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("name", [n for n in FUNCTIONS if n != "lstsq_b"])
def test_a_batch_in_one_run_is_its_examples(rng, name):
    f, xs = FUNCTIONS[name], make(rng, 4)
    if name == "eig":
        f = lambda x: tg.abs(la.eig(x)[0])
    for g in (f, tg.grad(lambda x: tg.sum(f(x) ** 2))):
        found = tg.vmap(g)(tg.asarray(xs)).numpy()
        for x, y in zip(xs, found, strict=True):
            np.testing.assert_allclose(y, g(tg.asarray(x)), rtol=1e-9, atol=1e-11)
