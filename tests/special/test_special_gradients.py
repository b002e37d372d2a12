"""Derivatives of special functions: at the ends of domains, in parameters, of third order, and where there is none.

That each is right inside its domain to second order, in both modes, is the business of the table test.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import scipy.special
from checks import c64

import tapegrad as tg
from tapegrad.errors import NoGradientError
from tapegrad.testing import check_grads

S = tg.special
inf, nan = np.inf, np.nan


def slope(f: Any, x: Any, *others: Any) -> Any:
    """The gradient of the sum of ``f(x, *others)`` in ``x``, without warnings of what happens at a pole."""
    with np.errstate(all="ignore"):
        return tg.grad(lambda v: tg.sum(f(v, *others)))(c64(x)).numpy()


def second(f: Any, x: Any) -> Any:
    with np.errstate(all="ignore"):
        first = tg.grad(lambda v: tg.sum(f(v)))
        return tg.grad(lambda v: tg.sum(first(v)))(c64(x)).numpy()


@pytest.mark.parametrize(
    ("name", "x", "wanted"),
    [
        ("i0", 0.0, 0.0), ("i1", 0.0, 0.5), ("i0e", 0.0, 0.0), ("i1e", 0.0, 0.5), ("j0", 0.0, 0.0), ("j1", 0.0, 0.5),
        ("entr", 0.0, inf), ("logit", 0.0, inf), ("logit", 1.0, inf), ("logit", 1.5, nan), ("erfinv", 1.0, inf),
        ("erfcinv", 0.0, -inf), ("ndtri", 0.0, inf), ("ndtri", 1.0, inf), ("gammaln", -1.0, nan),
        ("gammaln", 0.0, -inf),
        ("exprel", 0.0, 0.5), ("spence", 1.0, -1.0), ("log1mexp", 0.0, inf), ("gammasgn", -1.5, 0.0),
        ("dawsn", 0.0, 1.0), ("log_ndtr", -inf, inf), ("log_ndtr", inf, 0.0), ("erfcx", inf, 0.0), ("cosm1", 0.0, 0.0),
        ("rgamma", 0.0, 1.0), ("rgamma", -1.0, -1.0), ("rgamma", -2.0, 2.0), ("rgamma", -3.0, -6.0),
    ],
)  # fmt: skip
def test_at_ends_and_zeros(name: str, x: float, wanted: float) -> None:
    np.testing.assert_allclose(slope(getattr(S, name), x), wanted, rtol=1e-13, atol=1e-15)


def test_second_derivatives_at_zeros() -> None:
    for name, wanted in (("i0", 0.5), ("i1", 0.0), ("j0", -0.5), ("j1", 0.0), ("exprel", 1 / 3), ("dawsn", 0.0)):
        np.testing.assert_allclose(second(getattr(S, name), 0.0), wanted, atol=1e-15)
    np.testing.assert_allclose(second(S.spence, 1.0), 0.5, rtol=1e-12)
    np.testing.assert_allclose(second(S.rgamma, -1.0), 2 * scipy.special.digamma(2.0), rtol=1e-12)
    np.testing.assert_allclose(second(lambda x: S.sici(x).sine, 0.0), 0.0, atol=1e-15)


@pytest.mark.parametrize(
    ("name", "x", "y", "in_x", "in_y"),
    [
        ("xlogy", 0.0, 2.0, np.log(2), 0.0), ("xlogy", 0.0, 0.0, -inf, 0.0), ("xlogy", 3.0, 0.0, -inf, inf),
        ("xlog1py", 0.0, 1.0, np.log(2), 0.0), ("xlog1py", 0.0, -1.0, -inf, 0.0), ("rel_entr", 0.0, 0.0, 0.0, 0.0),
        ("rel_entr", 0.0, 2.0, -inf, 0.0), ("rel_entr", -1.0, 2.0, 0.0, 0.0), ("kl_div", 0.0, 2.0, -inf, 1.0),
        ("kl_div", 1.0, -2.0, 0.0, 0.0), ("huber", 1.0, 1.0, 0.0, 1.0), ("huber", 1.0, -3.0, 2.0, -1.0),
        ("boxcox", 2.0, 0.0, 0.5, np.log(2) ** 2 / 2), ("inv_boxcox", 0.5, 0.0, np.exp(0.5), -np.exp(0.5) / 8),
        ("gammainc", 1.0, 0.0, 0.0, 1.0), ("gammainc", 2.0, 0.0, 0.0, 0.0), ("gammainc", 0.5, 0.0, 0.0, inf),
        ("gammaincc", 2.0, inf, 0.0, 0.0), ("beta", 1.0, 1.0, -1.0, -1.0), ("comb", 4.0, 2.0, 3.5, 0.0),
        ("binom", 3.0, 5.0, -0.05, 0.05), ("stdtr", 3.0, 0.0, 0.0, 2 / np.pi / np.sqrt(3)),
    ],
)  # fmt: skip
def test_functions_of_two_numbers_at_ends(name: str, x: float, y: float, in_x: float, in_y: float) -> None:
    f = getattr(S, name)
    found = slope(lambda v: f(v, y), x), slope(lambda v: f(x, v), y)
    np.testing.assert_allclose(found, (in_x, in_y), rtol=1e-10, atol=1e-12)


def test_betainc_at_its_ends() -> None:
    for end in (0.0, 1.0):
        assert slope(S.betainc, 2.0, 3.0, end) == 0.0 and slope(lambda b, x: S.betainc(2.0, b, x), 3.0, end) == 0.0
        assert slope(lambda x: S.betainc(2.0, 3.0, x), end) == 0.0


GRID = np.array([0.02, 0.4, 1.0, 3.0, 30.0])


def test_parameters_of_incomplete_functions() -> None:
    """Against Richardson's differences of SciPy's values, over shapes from 0.02 to 30 and all along the support."""

    def difference(f: Any, a: np.ndarray) -> np.ndarray:
        h = 1e-3 * a
        rough = [(f(a + s * h) - f(a - s * h)) / (2 * s * h) for s in (1, 2, 4)]
        better = [(4 * p - q) / 3 for p, q in zip(rough, rough[1:])]
        return (16 * better[0] - better[1]) / 15

    a, p = (v.ravel() for v in np.meshgrid(GRID, np.linspace(0.02, 0.98, 9)))
    x = scipy.special.gammaincinv(a, p)
    got = slope(lambda v: S.gammainc(v, x), a)
    np.testing.assert_allclose(got, difference(lambda v: scipy.special.gammainc(v, x), a), rtol=1e-7, atol=1e-9)
    np.testing.assert_allclose(slope(lambda v: S.gammaincc(v, x), a), -got, rtol=1e-14)
    a, b, p = (v.ravel() for v in np.meshgrid(GRID, GRID, [0.05, 0.5, 0.9]))
    x = np.clip(scipy.special.betaincinv(a, b, p), 1e-12, 1 - 1e-12)
    for f, at in ((lambda v: S.betainc(v, b, x), a), (lambda v: S.betainc(a, v, x), b)):
        plain = (lambda v: scipy.special.betainc(v, b, x)) if at is a else (lambda v: scipy.special.betainc(a, v, x))
        np.testing.assert_allclose(slope(f, at), difference(plain, at), rtol=1e-6, atol=1e-8)


def test_tails_keep_their_relative_precision() -> None:
    """Far out the derivative in the parameter is the density's times a factor that varies slowly."""
    a, x = 3.0, 1e-8  # gammainc(a, x) is nearly x**a / gamma(a + 1)
    wanted = x**a / scipy.special.gamma(a + 1) * (np.log(x) - scipy.special.digamma(a + 1))
    np.testing.assert_allclose(slope(lambda v: S.gammainc(v, x), a), wanted, rtol=1e-7)
    q = scipy.special.gammaincc(a, 80.0)
    assert 0 < slope(lambda v: S.gammaincc(v, 80.0), a) / q < np.log(80.0)


def test_quantiles_undo_what_cumulative_functions_do() -> None:
    check_grads(lambda a, p: S.gammainc(a, S.gammaincinv(a, p)), [np.array([0.5, 2.0]), np.array([0.3, 0.6])], order=2)
    check_grads(lambda a, b, p: S.betaincinv(a, b, p), [np.array([0.7]), np.array([2.0]), np.array([0.3])], order=2)
    assert abs(slope(lambda a: S.gammainc(a, S.gammaincinv(a, 0.4)), 1.7)) < 1e-12


@pytest.mark.parametrize("name", ["gammaln", "i1", "i1e", "j1", "erfcx", "log_ndtr", "spence", "exprel", "rgamma"])
def test_third_order(name: str) -> None:
    check_grads(getattr(S, name), [np.array([0.2, 0.9, 1.6])], order=3, rtol=1e-3, atol=1e-5)


def test_third_order_in_a_parameter() -> None:
    check_grads(lambda a: S.gammainc(a, np.array([0.4, 3.0])), [np.array([0.8, 2.0])], order=3, rtol=1e-3)
    check_grads(lambda a: S.betainc(a, 1.5, np.array([0.4, 0.8])), [np.array([0.8, 2.0])], order=3, rtol=1e-3)


def test_asymptotic_series_meet_the_formulas() -> None:
    for f, plain in ((S.erfcx, scipy.special.erfcx), (S.dawsn, scipy.special.dawsn)):
        at = np.array([24.9, 25.1])
        h = 1e-2
        wanted = (8 * (plain(at + h) - plain(at - h)) - plain(at + 2 * h) + plain(at - 2 * h)) / (12 * h)
        np.testing.assert_allclose(slope(f, at), wanted, rtol=1e-9)
        np.testing.assert_allclose(slope(f, [1e8])[0] * -(1e16), plain(1.0) * 0 + plain(1e8) * 1e8, rtol=1e-12)


def test_the_faddeeva_function() -> None:
    z = np.array([0.5 + 0.2j, -0.3 + 1.5j])
    with tg.GradientTape() as tape:
        w = tg.asarray(z)
        tape.watch(w)
        loss = tg.sum(tg.real(S.wofz(w)))
    slope = -2 * z * scipy.special.wofz(z) + 2j / np.sqrt(np.pi)
    np.testing.assert_allclose(tape.gradient(loss, w).numpy(), slope.conj(), rtol=1e-13)
    _, pushed = tg.jvp(S.wofz, (tg.asarray(z),), (tg.asarray(np.array([1.0, 1j])),))
    np.testing.assert_allclose(pushed.numpy(), slope * [1.0, 1j], rtol=1e-13)


@pytest.mark.parametrize(
    ("f", "names"),
    [
        (lambda x: S.jv(x, 2.0), "jv"), (lambda x: S.kv(x, 2.0), "kv"), (lambda x: S.polygamma(x, 2.0), "polygamma"),
        (lambda x: S.expn(x, 2.0), "expn"), (lambda x: S.zeta(x, 2.0), "zeta"), (lambda x: S.zeta(x), "riemann_zeta"),
        (lambda x: S.zetac(x), "zetac"), (lambda x: S.hyp1f1(x, 2.0, 0.5), "hyp1f1"),
    ],
)  # fmt: skip
def test_where_there_is_no_gradient_the_function_is_named(f: Any, names: str) -> None:
    for ask in (lambda: slope(f, 2.0), lambda: tg.jvp(f, (c64(2.0),), (c64(1.0),))):
        with pytest.raises(NoGradientError, match=names):
            ask()


def test_jacobian_takes_all_rows_at_once() -> None:
    x = c64([0.5, 1.5, 2.5])
    rows = tg.jacobian(lambda v: S.iv(1, v) * S.gammainc(v, 1.0))(x).numpy()
    np.testing.assert_allclose(np.diag(rows), slope(lambda v: S.iv(1, v) * S.gammainc(v, 1.0), [0.5, 1.5, 2.5]))
    assert np.count_nonzero(rows) == 3


def test_logsumexp_and_softmax() -> None:
    x, b = np.random.default_rng(0).normal(size=(2, 3, 4)), np.random.default_rng(1).uniform(0.2, 2, (3, 4))
    for options in ({}, {"axis": (0, 2)}, {"axis": 1, "keepdims": True}):
        check_grads(lambda u, w: S.logsumexp(u, b=w, **options), [x, b])  # noqa: B023
        check_grads(lambda u: S.logsumexp(u, return_sign=True, **options)[0], [x])  # noqa: B023
    for axis in (None, 0, (0, 2)):
        check_grads(lambda u: S.softmax(u, axis=axis), [x])  # noqa: B023
        check_grads(lambda u: S.log_softmax(u, axis=axis), [x])  # noqa: B023
    zero = S.logsumexp(x, b=np.zeros(4), axis=-1).numpy()
    assert (zero == -inf).all()


def test_weighted_logsumexp_of_infinities() -> None:
    for x, b, shares in (
        ([1e8, inf], [1.0, 2.0], [0, 1]), ([inf, inf], [1.0, 3.0], [0.25, 0.75]), ([-inf, -inf], [1.0, 3.0], [0, 0]),
        ([0.0, 1e4], [1.0, 0.0], [1, 0]), ([0.0, inf], [1.0, 0.0], [1, 0]),
    ):  # fmt: skip
        np.testing.assert_array_equal(S.logsumexp(c64(x), b=c64(b)), scipy.special.logsumexp(x, b=b))
        np.testing.assert_allclose(slope(lambda v: S.logsumexp(v, b=c64(b)), x), shares)  # noqa: B023
    value, sign = S.logsumexp(c64([0.0, inf]), b=c64([1.0, -1.0]), return_sign=True)
    assert (value.item(), sign.item()) == (inf, -1.0)


def _hankel(name: str, v: float, x: float, order: int) -> float:
    """The derivative of ``order`` of ``ive`` or ``kve`` at large ``x``, by Hankel's expansion (DLMF 10.40)."""
    if x < 0:
        return (-1) ** (v + order) * _hankel(name, v, -x, order)
    term, total = 1.0, 0.0
    for k in range(20):
        total += term * math.prod(-k - 0.5 - i for i in range(order))
        term *= (4 * v * v - (2 * k + 1) ** 2) / (8 * (k + 1) * x) * (1 if name[0] == "k" else -1)
    return math.sqrt(math.pi / 2 if name[0] == "k" else 0.5 / math.pi) * total * x**-0.5 * x**-order


@pytest.mark.parametrize(
    ("name", "v"),
    [("i0e", 0), ("i1e", 1), ("k0e", 0), ("k1e", 1), ("ive", 2.5), ("ive", 9), ("kve", 2.5), ("kve", 9)],
)
def test_scaled_bessel_functions_far_out(name: str, v: float) -> None:
    """Their derivative is nearly ``-out / (2 x)``, a difference of terms as large as ``out``."""
    of_one = name[1] in "01"
    f = getattr(S, name) if of_one else lambda x: getattr(S, name)(v, x)
    far = [1e20] if of_one else []  # SciPy's functions of any order end before
    below = [-49.0, -51.0, -1e6] if name[0] == "i" and v != 2.5 else []
    for dtype, tolerance in ((np.float32, 1e-5), (np.float64, 1e-13)):
        x = tg.asarray(np.array([49.0, 51.0, 1e3, 1e6, 1e8, *far, *below], dtype))
        first = tg.grad(lambda x: tg.sum(f(x)))
        slopes, curvatures = ([_hankel(name, v, float(a), n) for a in x.numpy()] for n in (1, 2))
        np.testing.assert_allclose(first(x), slopes, tolerance)
        np.testing.assert_allclose(tg.jvp(f, (x,), (tg.ones_like(x),))[1], slopes, tolerance)
        tiny = float(np.finfo(dtype).tiny)
        np.testing.assert_allclose(tg.grad(lambda x: tg.sum(first(x)))(x), curvatures, 60 * tolerance, tiny)  # noqa: B023
    if of_one:
        assert slope(f, [inf]) == [0.0]
