"""erf, erfc, GELU and its derivative in array operations: accuracy, special values, bits that no tiling changes."""

import math
import threading

import numpy as np
import pytest

import tapegrad as tg
from tapegrad.core.primitive import REGISTRY
from tapegrad.errors import DTypeError
from tapegrad.ops.dispatch import bind
from tapegrad.tensor import from_array

erf, erfc, gelu, gelu_slope = (REGISTRY[name].impl for name in ("erf", "erfc", "gelu", "gelu_slope"))
ORACLE = {erf: np.vectorize(math.erf, otypes=[np.float64]), erfc: np.vectorize(math.erfc, otypes=[np.float64])}
# The docstrings' bounds; the oracle is rounded too, which can cost another ulp in float64.
BOUND = {
    (erf, np.float32): 3.5,
    (erf, np.float64): 2.5 + 1,
    (erfc, np.float32): 9.0,
    (erfc, np.float64): 12.0 + 1,
}

both = pytest.mark.parametrize("function", [erf, erfc])
all_four = pytest.mark.parametrize("function", [erf, erfc, gelu, gelu_slope])
every_dtype = pytest.mark.parametrize("dtype", [np.float32, np.float64])  # what they are given: half types as float32


def apply(function, x):
    out = np.empty_like(x)
    function(np, out, x)
    return out


def bits(x):
    return x.view(f"u{x.itemsize}")


def samples(dtype, rng, n=40_000):
    """Values of every exponent, densest where the functions bend, of both signs."""
    finfo = np.finfo(dtype)
    exponents = rng.uniform(math.log(finfo.smallest_normal), math.log(finfo.max) - 1e-3, n // 4)
    x = np.concatenate([rng.uniform(-6, 6, n // 2), np.exp(exponents), rng.uniform(0, 28, n // 4)])
    return (x * rng.choice([-1, 1], x.size)).astype(dtype)


def error_in_ulp(got, want, dtype):
    """Distance to ``want`` (float64), in units of the last place that ``dtype`` has at ``want``."""
    finfo = np.finfo(dtype)
    exponent = np.frexp(want)[1] - 1 - finfo.nmant
    unit = np.ldexp(1.0, np.maximum(exponent, finfo.minexp - finfo.nmant))
    return np.abs(got.astype(np.float64) - want) / unit


@both
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_accuracy_is_within_the_stated_bound(function, dtype, rng):
    x = samples(dtype, rng)
    want = ORACLE[function](x.astype(np.float64))
    error = error_in_ulp(apply(function, x), want, dtype)
    worst = error.argmax()
    assert error[worst] <= BOUND[function, dtype], f"{error[worst]} ulp at {x[worst]!r}"


def phi(x):
    """The normal distribution's cumulative function."""
    return ORACLE[erfc](x / -math.sqrt(2)) / 2


def slope(x):
    return phi(x) + x * np.exp(-x * x / 2) / math.sqrt(2 * math.pi)


@every_dtype
def test_gelu_and_its_slope_keep_the_precision_of_the_tail(dtype, rng):
    """Where the slope is not near its root, at -0.75."""
    x = np.concatenate([rng.uniform(-13, 13, 20_000), rng.uniform(-2, 2, 20_000)]).astype(dtype)
    wide = x.astype(np.float64)
    for function, wanted, bound in ((gelu, wide * phi(wide), 8), (gelu_slope, slope(wide), 12)):
        error = error_in_ulp(apply(function, x), wanted, dtype) / (1 + wide * wide / 4)
        far = np.abs(wide + 0.7518) > (0.2 if function is gelu_slope else 0)
        worst = np.where(far, error, 0).argmax()
        assert error[worst] <= bound, f"{function.__name__}: {error[worst]} ulp at {x[worst]!r}"


@every_dtype
def test_special_values_of_gelu(dtype):
    x = np.array([np.inf, -np.inf, np.nan, 0.0, -0.0, 40.0, -40.0], dtype)
    np.testing.assert_array_equal(apply(gelu, x), np.array([np.inf, 0, np.nan, 0, 0, 40, 0], dtype))
    np.testing.assert_array_equal(apply(gelu_slope, x), np.array([1, 0, np.nan, 0.5, 0.5, 1, 0], dtype))


def test_float32_accuracy_at_every_exponent():
    """All signs and exponents, significands at a stride: 65 thousand of the 4 thousand million values."""
    x = np.arange(0, 2**32, 65_537, dtype=np.uint32).view(np.float32)
    x = x[np.isfinite(x)]
    error = error_in_ulp(apply(erf, x), ORACLE[erf](x.astype(np.float64)), np.float32)
    assert error.max() <= BOUND[erf, np.float32]


@pytest.mark.parametrize("name", ["erf", "erfc"])
def test_float16_is_rounded_from_float32(name):
    x = np.arange(2**16, dtype=np.uint16).view(np.float16)
    x = x[~np.isnan(x)]
    f = getattr(tg, name)
    np.testing.assert_array_equal(bits(f(x).numpy()), bits(f(x.astype(np.float32)).numpy().astype(np.float16)))


@every_dtype
def test_special_values_of_erf(dtype):
    info = np.finfo(dtype)
    x = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, info.max, info.min, 7.0, -7.0], dtype)
    want = np.array([0.0, -0.0, 1.0, -1.0, np.nan, 1.0, -1.0, 1.0, -1.0], dtype)
    got = apply(erf, x)
    np.testing.assert_array_equal(got, want)
    np.testing.assert_array_equal(np.signbit(got[:4]), np.signbit(want[:4]))


@every_dtype
def test_special_values_of_erfc(dtype):
    info = np.finfo(dtype)
    x = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, info.max, info.min, 30.0, -30.0], dtype)
    want = np.array([1.0, 1.0, 0.0, 2.0, np.nan, 0.0, 2.0, 0.0, 2.0], dtype)
    np.testing.assert_array_equal(apply(erfc, x), want)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_subnormal_numbers(dtype):
    tiny = np.finfo(dtype).smallest_subnormal
    x = tiny * np.array([1, -1, 2, 5, -1000, 123_456], dtype)
    np.testing.assert_allclose(apply(erf, x) / tiny, ORACLE[erf](x.astype(np.float64)) / tiny, rtol=0, atol=1)
    np.testing.assert_array_equal(apply(erfc, x), np.ones_like(x))


@every_dtype
def test_symmetry_and_range(dtype, rng):
    x = samples(dtype, rng)
    y = apply(erf, x)
    np.testing.assert_array_equal(apply(erf, -x), -y)
    assert np.abs(y).max() == 1
    y = apply(erfc, x)
    assert y.min() == 0 and y.max() == 2


@all_four
@every_dtype
@pytest.mark.parametrize("errors", ["raise", "ignore"])
def test_no_floating_point_error_escapes(function, dtype, errors, rng):
    x = np.concatenate([samples(dtype, rng), np.array([np.inf, -np.inf, np.nan, 0], dtype)])
    with np.errstate(all="ignore"):
        want = apply(function, x)
    with np.errstate(all=errors):
        np.testing.assert_array_equal(bits(apply(function, x)), bits(want))


@all_four
@every_dtype
def test_bits_do_not_depend_on_position_or_length(function, dtype, rng):
    x = samples(dtype, rng, n=4 * 70_001)
    whole = bits(apply(function, x))
    for length in (1, 2, 3, 5, 7, 13, 31, 33, 63, 127, 1001, 4097, 65_535, 65_537):
        for start in (0, 1, 3, 6, 17, 70_001, 131_071):
            part = slice(start, start + length)
            # From where it lies, and copied to an address of another alignment.
            np.testing.assert_array_equal(bits(apply(function, x[part])), whole[part])
            room = np.empty(length + start % 8, dtype)[start % 8 :]
            room[:] = x[part]
            np.testing.assert_array_equal(bits(apply(function, room)), whole[part])


@all_four
@every_dtype
def test_every_element_alone_has_the_bits_of_the_whole(function, dtype, rng):
    x = samples(dtype, rng, n=2000)
    alone = np.array([apply(function, x[i : i + 1])[0] for i in range(x.size)], dtype)
    np.testing.assert_array_equal(bits(alone), bits(apply(function, x)))


@both
@every_dtype
def test_in_place(function, dtype, rng):
    x = samples(dtype, rng, n=200_000)
    want = apply(function, x)
    function(np, x, x)
    np.testing.assert_array_equal(bits(x), bits(want))


@all_four
@every_dtype
@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (2, 3, 4)])
def test_shapes(function, dtype, shape):
    x = np.full(shape, 0.75, dtype)
    out = np.full(shape, -1, dtype)
    function(np, out, x)
    np.testing.assert_array_equal(out, apply(function, np.full(1, 0.75, dtype))[0])


@all_four
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_threads_do_not_share_scratch(function, dtype, rng):
    x = [samples(dtype, rng, n=100_000) for _ in range(4)]
    want = [apply(function, part) for part in x]
    got = [np.empty_like(part) for part in x]

    def work(i):
        for _ in range(5):
            function(np, got[i], x[i])

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for a, b in zip(got, want):
        np.testing.assert_array_equal(bits(a), bits(b))


@pytest.mark.parametrize("f", [tg.erf, tg.erfc, tg.special.erfc, tg.gelu])
def test_long_doubles_have_the_accuracy_of_float64(f):
    x = np.linspace(-4, 4, 33)
    found = f(x.astype(np.longdouble))
    assert found.dtype == np.longdouble
    np.testing.assert_allclose(found.numpy(), f(x).numpy(), rtol=1e-14)
    slope = tg.grad(lambda x: tg.sum(f(x)))
    np.testing.assert_allclose(slope(x.astype(np.longdouble)).numpy(), slope(x).numpy(), rtol=1e-14, atol=1e-16)


@pytest.mark.parametrize("name", ["erf", "erfc", "gelu", "gelu_slope", "gelu_tanh", "silu", "mish"])
def test_complex_numbers_are_refused(name):
    with pytest.raises(DTypeError, match="complex128"):
        bind(REGISTRY[name], from_array(np.ones(3, complex)))
