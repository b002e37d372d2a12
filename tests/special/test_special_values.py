"""Special functions: SciPy's values to the bit, dtypes, domains, broadcasting, bad input."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
import scipy.special

import tapegrad as tg
from tapegrad import errors

EDGES = [0.0, -0.0, 1.0, -1.0, 0.5, 1.5, -2.5, -3.0, 2.0, 40.0, -40.0, 1e-8, np.inf, -np.inf, np.nan]
UNARY = (
    "cosm1 dawsn digamma entr erfcinv erfcx erfi erfinv exp1 exp10 expi exprel gamma gammaln gammasgn i0 i0e i1 i1e j0 "
    "j1 k0 k0e k1 k1e log_ndtr loggamma logit ndtr ndtri psi rgamma spence y0 y1 zetac"
).split()
BINARY = (
    "beta betaln binom boxcox boxcox1p gammainc gammaincc gammainccinv gammaincinv huber inv_boxcox inv_boxcox1p iv "
    "ive jv kl_div kv kve owens_t poch pseudo_huber rel_entr stdtr xlog1py xlogy yv"
).split()
TERNARY = ("betainc", "betaincc", "betainccinv", "betaincinv", "hyp1f1")
PAIRS = ("fresnel", "shichi", "sici")
OWN = {"erf", "erfc", "expit", "log_expit"}  # the package's own values, tested where they are made
ELSEWHERE = {
    "cbrt", "comb", "exp2", "expm1", "expn", "factorial", "jn", "kn", "lgamma", "log1mexp", "log1p", "log_softmax",
    "logsumexp", "multigammaln", "mvlgamma", "polygamma", "round", "sinc", "softmax", "wofz", "yn", "zeta",
}  # fmt: skip
"""Aliases, and functions that have a test of their own below."""


def numbers(dtype: Any = "float64") -> np.ndarray:
    return np.concatenate([EDGES, np.random.default_rng(0).normal(size=60) * 3]).astype(dtype)


def same_bits(got: tg.Tensor, wanted: np.ndarray) -> None:
    found = got.numpy()
    assert (found.shape, found.dtype) == (wanted.shape, wanted.dtype)
    np.testing.assert_array_equal(found, wanted)
    there = ~np.isnan(wanted)
    np.testing.assert_array_equal(np.signbit(found[there]), np.signbit(wanted[there]))


def test_every_name_is_tested_here() -> None:
    known = {*UNARY, *BINARY, *TERNARY, *PAIRS, *OWN, *ELSEWHERE}
    assert sorted(set(tg.special.__all__) - known) == []
    assert all(callable(getattr(tg.special, name)) for name in known)


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("name", UNARY)
def test_functions_of_one_number(name: str, dtype: str) -> None:
    x = numbers(dtype)
    same_bits(getattr(tg.special, name)(x), getattr(scipy.special, name)(x))


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("name", BINARY)
def test_functions_of_two_numbers(name: str, dtype: str) -> None:
    x, y = np.broadcast_arrays(numbers(dtype)[:, None], numbers(dtype)[::3])
    with np.errstate(all="ignore"):
        same_bits(getattr(tg.special, name)(x, y), getattr(scipy.special, name)(x, y))


@pytest.mark.parametrize("name", TERNARY)
def test_functions_of_three_numbers(name: str) -> None:
    rng = np.random.default_rng(1)
    a, b, x = rng.uniform(0.2, 4, 200), rng.uniform(0.2, 4, 200), rng.uniform(size=200)
    same_bits(getattr(tg.special, name)(a, b, x), getattr(scipy.special, name)(a, b, x))


@pytest.mark.parametrize("name", PAIRS)
def test_pairs_of_integrals(name: str) -> None:
    x = numbers()
    found = getattr(tg.special, name)(x)
    for got, wanted in zip(found, getattr(scipy.special, name)(x), strict=True):
        same_bits(got, wanted)
    assert (found.sine, found.cosine) == tuple(found)


def test_functions_of_an_order() -> None:
    x = np.abs(numbers())[:12]
    for n in (0, 1, 2, 5):
        same_bits(tg.special.polygamma(n, x), scipy.special.polygamma(n, x))
        same_bits(tg.special.expn(n, x), scipy.special.expn(float(n), x))
        same_bits(tg.special.yn(n, x), scipy.special.yn(float(n), x))
        same_bits(tg.special.jn(n, x), scipy.special.jv(n, x))
        same_bits(tg.special.kn(n, x), scipy.special.kv(n, x))
    orders = np.arange(1, 4)
    same_bits(tg.special.polygamma(orders[:, None], x), scipy.special.polygamma(orders[:, None], x))
    narrow = x.astype("float32")
    assert tg.special.polygamma(orders[:, None], narrow).dtype == tg.special.jv(2, narrow).dtype == np.float32


def test_zeta_of_one_and_of_two_numbers() -> None:
    s, q = np.linspace(1.1, 9, 12), np.linspace(0.2, 5, 12)
    same_bits(tg.special.zeta(s), scipy.special.zeta(s))
    same_bits(tg.special.zeta(s, q), scipy.special.zeta(s, q))
    assert tg.special.zeta(2.0, np.float64(1.0)).dtype == np.float64


def test_combinations() -> None:
    n, k = np.meshgrid(np.arange(-2.0, 7), np.arange(-2.0, 7))
    same_bits(tg.special.comb(n, k), scipy.special.comb(n, k))
    np.testing.assert_allclose(tg.special.comb(7.5, np.float64(2.5)).item(), scipy.special.comb(7.5, 2.5))
    np.testing.assert_allclose(tg.special.factorial(np.arange(-2, 9)), scipy.special.factorial(np.arange(-2, 9)))


def test_multivariate_gamma() -> None:
    a = np.linspace(2.1, 7, 5)
    for d in (1, 2, 4):
        wanted = scipy.special.multigammaln(a, d)
        np.testing.assert_allclose(tg.special.multigammaln(a, d).numpy(), wanted, rtol=1e-14)
    assert tg.special.mvlgamma is tg.special.multigammaln
    for d in (0, -1, 1.5):
        with pytest.raises(errors.ShapeError, match="multigammaln"):
            tg.special.multigammaln(a, d)


def test_log1mexp() -> None:
    x = np.array([1e-300, 1e-12, 0.1, 0.6, 0.7, 5.0, 700.0])
    wanted = [np.log(x[0]), np.log(x[1]), *np.log(-np.expm1(-x[2:4])), *np.log1p(-np.exp(-x[4:]))]
    np.testing.assert_allclose(tg.special.log1mexp(x).numpy(), wanted, rtol=1e-12)


def test_the_faddeeva_function_is_complex() -> None:
    z = np.array([0.3 + 0.4j, -1.2 + 0.1j, 2.0 - 1.0j, 0.0])
    same = tg.special.wofz(z)
    np.testing.assert_array_equal(same.numpy(), scipy.special.wofz(z))
    assert tg.special.wofz(z.astype("complex64")).dtype == np.complex64
    assert tg.special.wofz(0.5).dtype == np.complex64 and tg.special.wofz(np.float64(0.5)).dtype == np.complex128


@pytest.mark.parametrize("name", ["gammaln", "digamma", "ndtri", "i0e", "xlogy", "betainc", "jv", "polygamma"])
def test_short_floats_are_computed_in_float32(name: str) -> None:
    count = {"xlogy": 2, "betainc": 3, "jv": 2, "polygamma": 2}.get(name, 1)
    x = np.linspace(0.25, 0.75, 7)
    for dtype in (np.float16, ml_dtypes.bfloat16):
        xs = [(np.full(7, 1.0) if name == "polygamma" and i == 0 else x).astype(dtype) for i in range(count)]
        found = getattr(tg.special, name)(*(tg.asarray(v) for v in xs))
        assert found.dtype == dtype
        wanted = getattr(scipy.special, name)(*(v.astype(np.float32) for v in xs))
        np.testing.assert_array_equal(found.numpy(), wanted.astype(np.float32).astype(dtype))


def test_numbers_and_integers_become_floats() -> None:
    assert tg.special.gammaln(3).dtype == np.float64 and tg.special.gammaln(3.0).dtype == np.float32
    assert tg.special.digamma(np.arange(1, 4, dtype=np.int8)).dtype == np.float64  # as SciPy's
    assert tg.special.xlogy(2, np.float64(3)).dtype == np.float64
    assert tg.special.betainc(1, 2, np.float32(0.5)).dtype == np.float32


@pytest.mark.parametrize("shapes", [((), (3,)), ((2, 1), (3,)), ((0, 3), (3,)), ((4, 1, 2), (3, 1))])
def test_operands_broadcast(shapes: tuple) -> None:
    rng = np.random.default_rng(2)
    a, x = (rng.uniform(0.3, 0.9, s) for s in shapes)
    for name in ("xlogy", "gammainc", "zeta", "iv", "beta"):
        np.testing.assert_array_equal(getattr(tg.special, name)(a, x).numpy(), getattr(scipy.special, name)(a, x))


def test_strided_operands() -> None:
    x = np.random.default_rng(3).uniform(0.2, 3, (40, 6))
    for view in (x.T, x[::2, ::-1], x[:, 1:3]):
        for name in ("gammaln", "i0e", "exp1"):
            same_bits(getattr(tg.special, name)(view), getattr(scipy.special, name)(view))


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda s: s.gammaln(1j), TypeError),
        (lambda s: s.gammaln("one"), TypeError),
        (lambda s: s.gammaln(1.0, 2.0), TypeError),
        (lambda s: s.betainc(1.0, 2.0), TypeError),
        (lambda s: s.jv(1, 1j), TypeError),
        (lambda s: s.beta(np.ones(2), np.ones(3)), ValueError),
        (lambda s: s.zeta(np.ones(2), np.ones(3)), ValueError),
        (lambda s: s.logsumexp(np.ones(3), axis=1), ValueError),
        (lambda s: s.softmax(np.ones(3), axis=(0, 0)), ValueError),
    ],
)
def test_bad_input(call: Any, error: type) -> None:
    with pytest.raises(error):
        call(tg.special)


SETTINGS = [{}, {"axis": 0}, {"axis": -1, "keepdims": True}, {"axis": (0, 2)}, {"axis": (0, 2), "keepdims": True}]


@pytest.mark.parametrize("options", SETTINGS)
def test_logsumexp(options: dict) -> None:
    rng = np.random.default_rng(4)
    x, b = rng.normal(size=(2, 3, 4)) * 50, rng.normal(size=(3, 4))
    wanted = scipy.special.logsumexp(x, **options)
    np.testing.assert_allclose(tg.special.logsumexp(x, **options).numpy(), wanted, rtol=1e-13)
    wanted = scipy.special.logsumexp(x, b=np.abs(b), **options)
    np.testing.assert_allclose(tg.special.logsumexp(x, b=np.abs(b), **options).numpy(), wanted, rtol=1e-13)
    size, sign = tg.special.logsumexp(x, b=b, return_sign=True, **options)
    wanted_size, wanted_sign = scipy.special.logsumexp(x, b=b, return_sign=True, **options)
    np.testing.assert_allclose(size.numpy(), wanted_size, rtol=1e-12)
    np.testing.assert_array_equal(sign.numpy(), wanted_sign)


@pytest.mark.parametrize("axis", [None, 0, -1, (0, 2)])
def test_softmax_over_any_axes(axis: Any) -> None:
    x = np.random.default_rng(5).normal(size=(2, 3, 4)) * 30
    for name in ("softmax", "log_softmax"):
        wanted = getattr(scipy.special, name)(x, axis=axis)
        np.testing.assert_allclose(getattr(tg.special, name)(x, axis=axis).numpy(), wanted, rtol=1e-12, atol=1e-300)
