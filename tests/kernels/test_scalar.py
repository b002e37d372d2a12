"""The C++ of every elementwise primitive against its NumPy implementation, for every dtype that this accepts."""

from functools import cache

import ml_dtypes
import numpy as np
import pytest

import tapegrad as tg
from tapegrad.core.aval import shaped
from tapegrad.core.primitive import REGISTRY, Elementwise
from tapegrad.device import CPU, cuda_types
from tapegrad.device.kernel import options
from tapegrad.ops.dispatch import infer_bool

pytestmark = pytest.mark.sampled(1 / 6)

assert tg.__all__  # loads all that declares
PRIMITIVES = [
    p for p in REGISTRY.values() if isinstance(p, Elementwise) and p.cxx is not None and p.name not in ("cast", "where")
]
INTS = ["int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"]
HALVES = {"float16": 2.0**-10, "bfloat16": 2.0**-7}
FLOATS = ["float32", "float64"]
COMPLEX = {"complex64": 2e-6, "complex128": 4e-15}
SPECIAL = [p.name for p in PRIMITIVES if p.impl.__module__.startswith("tapegrad.special")]
"""SciPy's functions: it and the libraries of C++ err by a few units in the last place, each in its way."""
ONLY = {
    **dict.fromkeys(["logical_and", "logical_or", "logical_xor", "logical_not"], ("bool",)),
    **dict.fromkeys(
        ["erf", "erfc", "gelu", "gelu_slope", "gelu_tanh", "silu", "mish", "sigmoid_slope", "softplus", "softsign"],
        (*HALVES, *FLOATS),
    ),
    **dict.fromkeys(SPECIAL, (*HALVES, *FLOATS)),
    "reciprocal": (*HALVES, *FLOATS, *COMPLEX),
    **dict.fromkeys(["conj", "real", "imag"], tuple(COMPLEX)),
}
"""What the public functions cast to, where the implementation would take more."""
ZERO_SIGNS_VARY = {"maximum", "minimum", "relu"}
"""Which of 0.0 and -0.0 these take differs between NumPy's own loops."""


def _dtype(name):
    return np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name)


def _values(name):
    dtype = _dtype(name)
    rng = np.random.default_rng(0)
    if name == "bool":
        return np.array([False, True])
    if name in INTS:
        info = np.iinfo(dtype)
        near = np.arange(-9 if info.min else 0, 10, dtype=dtype)
        edge = np.array([info.min, info.min + 1, info.max - 1, info.max, 31, 32, 63, 64], dtype=dtype)
        return np.concatenate([near, edge])
    if name in COMPLEX:
        z = (rng.normal(size=40) + 1j * rng.normal(size=40)) * np.repeat([0.01, 0.5, 1, 4], 10)
        axes = [0.5, -0.5, 2, -2, 1j, -1j, 0.5j, 2j, -2j, 1 + 1j, -1 + 1e-3j, 0.999 + 0.01j]
        return np.concatenate([z, axes]).astype(dtype)
    edge = [0.0, -0.0, 1, -1, 0.5, 1.5, -2.5, 3, np.inf, -np.inf, np.nan, 1e-3, 100, -100, 1e4, -1e4]
    return np.concatenate([edge, rng.normal(size=20) * 3]).astype(dtype)


def _operands(prim, name):
    """All pairs of values; an exponent of integers is small, as NumPy refuses negative ones."""
    x = _values(name)
    if len(prim.operands) == 1:
        return [x]
    y = x
    if prim.name == "power" and name in INTS:
        y = np.arange(0, 12, dtype=x.dtype)
    x, y = np.broadcast_arrays(x[:, None], y)
    return [np.ascontiguousarray(v).reshape(-1) for v in (x, y)]


def _infer(prim, operands):
    avals = [shaped(x.shape, x.dtype, CPU) for x in operands]
    return prim.infer(*avals).dtype


def _expected(prim, name):
    """What NumPy gives (halves in float32, rounded once), or None for a dtype it refuses."""
    if name not in ONLY.get(prim.name, (name,)):
        return None
    operands = _operands(prim, name)
    narrow = _infer(prim, operands)
    if name in HALVES:
        operands = [x.astype(np.float32) for x in operands]
    out = np.empty(operands[0].shape, np.float32 if narrow.name in HALVES else narrow)
    try:
        with np.errstate(all="ignore"):
            prim.impl(np, out, *operands)
            return out.astype(narrow)
    except (TypeError, ValueError):
        return None


def _kernel(prim, dtypes, out):
    """One thread for each element, storing what the declared expression gives."""
    names = {p: f"v_{p}" for p in prim.operands}
    code = prim.cxx.format(**names, type=cuda_types.compute(dtypes[0]), out_type=cuda_types.compute(out))
    params = "".join(f"const {cuda_types.storage(d)}* {p}, " for p, d in zip(prim.operands, dtypes, strict=True))
    loads = "".join(
        f"    const {cuda_types.compute(d)} v_{p} = tg_load({p}[i]);\n"
        for p, d in zip(prim.operands, dtypes, strict=True)
    )
    return (
        f'extern "C" __global__ void k_{prim.name}({params}{cuda_types.storage(out)}* out, long long n) {{\n'
        "    const long long i = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x;\n"
        f"    if (i >= n) return;\n{loads}    const {cuda_types.compute(out)} result = {code};\n"
        f"    out[i] = tg_store<{cuda_types.storage(out)}>(result);\n}}\n"
    )


@cache
def _text(name):
    """Every primitive that takes the dtype, as one file."""
    found = ['#include "scalar.cuh"\n']
    for prim in PRIMITIVES:
        if _expected(prim, name) is not None:
            operands = _operands(prim, name)
            found.append(_kernel(prim, [x.dtype for x in operands], _infer(prim, operands)))
    return "".join(found)


def _run(device, text, name, operands, dtype):
    out = device.empty(operands[0].shape, dtype)
    function = device.compile(text, name, options())
    device.launch(function, (-(-out.size // 128),), (128,), (*operands, out, np.int64(out.size)))
    return out


def _check(prim, name, found, expected):
    label = f"{prim.name} of {name}"
    if found.dtype.kind not in "fcV" or (found.dtype.kind == "c" and name not in COMPLEX):  # made of two real numbers
        np.testing.assert_array_equal(found, expected, err_msg=label)
        return
    if name in COMPLEX:
        tolerance = COMPLEX[name] * (20 if prim.name == "power" else 1)
        size = np.maximum(np.abs(expected), 1)
        with np.errstate(invalid="ignore"):
            good = np.abs(found - expected) <= tolerance * size
        assert (good | (np.isnan(found) & np.isnan(expected)) | (found == expected)).all(), (
            label, [(x, found[i], expected[i]) for i, x in enumerate(_operands(prim, name)[0]) if not good[i]],
        )  # fmt: skip
        return
    found, expected = (x.astype(np.float32) if name in HALVES else x for x in (found, expected))
    if prim.exact:
        np.testing.assert_array_equal(found, expected, err_msg=label)
        if prim.name not in ZERO_SIGNS_VARY:
            there = ~np.isnan(expected)
            np.testing.assert_array_equal(np.signbit(found[there]), np.signbit(expected[there]), err_msg=label)
        return
    tolerance = HALVES.get(name) or (5e-7 if name == "float32" else 1e-15)
    special = prim.name in SPECIAL
    if special:  # of infinity they say different things: SciPy's i0 and j0 know no limit
        there = np.all([np.isfinite(x.astype(float)) for x in _operands(prim, name)], axis=0)
        found, expected = found[there], expected[there]
    near_zero = special or prim.name == "logaddexp2"  # whose scaled operands are rounded: digits are lost near 0
    sums = special or prim.name == "gelu_slope"  # near the zero of a difference both lose digits
    tolerance *= 20 if sums and name not in HALVES else 1
    np.testing.assert_allclose(
        found, expected, rtol=tolerance, atol=tolerance * (1 if near_zero else 1e-3), err_msg=label
    )


@pytest.mark.sampled(1 / 6)
@pytest.mark.parametrize("name", ["bool", *INTS, *HALVES, *FLOATS, *COMPLEX])
def test_expressions(emulated, name):
    checked = 0
    for prim in PRIMITIVES:
        expected = _expected(prim, name)
        if expected is not None:
            checked += 1
            found = _run(emulated, _text(name), f"k_{prim.name}", _operands(prim, name), expected.dtype)
            _check(prim, name, found, expected)
    assert checked >= (10 if name == "bool" else 25)


def test_every_expression_is_used_by_some_dtype():
    for prim in PRIMITIVES:
        assert any(_expected(prim, name) is not None for name in ("bool", "int32", "float32", "complex64")), prim


def _fits(x, dtype):
    """Values that a cast to ``dtype`` defines."""
    if dtype.kind in "iu" and x.dtype.kind not in "b":
        info = np.iinfo(dtype)
        low, high = max(info.min, -(2**31)), min(info.max, 2**31 - 1)
        wide = x.astype(np.float64)
        if x.dtype.kind in "iu":
            return x  # wraps
        return x[(wide > low - 1) & (wide < high + 1)]
    return x


@pytest.mark.parametrize("source", ["bool", "int8", "uint8", "int64", "uint64", "float16", "bfloat16", *FLOATS])
def test_cast(emulated, source):
    cast = REGISTRY["cast"]
    targets = ["bool", "int8", "uint16", "int64", "uint64", *HALVES, *FLOATS, *COMPLEX]
    text = '#include "scalar.cuh"\n' + "".join(
        _kernel(cast, [_dtype(source)], _dtype(t)).replace("k_cast", f"k_{t}") for t in targets
    )
    for target in targets:
        x = _fits(_values(source), _dtype(target))
        with np.errstate(all="ignore"):
            expected = x.astype(_dtype(target))
        found = _run(emulated, text, f"k_{target}", [x], _dtype(target))
        found, expected = (v.astype(np.float32) if target in HALVES else v for v in (found, expected))
        np.testing.assert_array_equal(found, expected, err_msg=f"{source} to {target}")


def test_cast_between_complex(emulated):
    x = _values("complex128")
    text = '#include "scalar.cuh"\n' + _kernel(REGISTRY["cast"], [x.dtype], np.dtype("complex64"))
    found = _run(emulated, text, "k_cast", [x], np.complex64)
    np.testing.assert_array_equal(found, x.astype(np.complex64))


@pytest.mark.parametrize("name", ["bool", "int16", "bfloat16", "float64", "complex64"])
def test_where(emulated, name):
    x = _values(name)
    condition, y = np.arange(x.size) % 3 == 0, x[::-1].copy()
    text = '#include "scalar.cuh"\n' + _kernel(REGISTRY["where"], [condition.dtype, x.dtype, y.dtype], x.dtype)
    found, expected = _run(emulated, text, "k_where", [condition, x, y], x.dtype), np.where(condition, x, y)
    if name in HALVES:
        expected.view(np.uint16)[np.isnan(expected.astype(np.float32))] = 0x7FFF  # the NaN of every conversion
    np.testing.assert_array_equal(found.view(np.uint8), expected.view(np.uint8))


@pytest.mark.parametrize("name", HALVES)
def test_rounding_is_to_nearest_even(emulated, name):
    """Every half float, and float32 half way between two of them and right beside that."""
    every = np.arange(2**16, dtype=np.uint16).view(_dtype(name)).astype(np.float32)
    with np.errstate(invalid="ignore"):
        every = np.sort(every[np.isfinite(every)])
        middle = every[:-1] / 2 + every[1:] / 2
    beside = [np.nextafter(middle, np.float32(side)) for side in (-np.inf, np.inf)]
    edge = [65519, 65520, 3.4e38, np.nan, -np.nan, np.inf, -np.inf]
    x = np.concatenate([every, middle, *beside, edge]).astype(np.float32)
    text = '#include "scalar.cuh"\n' + _kernel(REGISTRY["cast"], [x.dtype], _dtype(name))
    body = f"const float rounded = tg_round_to<{cuda_types.storage(_dtype(name))}>(v_x); out[i] ="
    for source in (text, text.replace("out[i] =", body).replace("(result)", "(rounded)")):
        found = _run(emulated, source, "k_cast", [x], _dtype(name)).view(np.uint16)
        with np.errstate(over="ignore"):
            expected = x.astype(_dtype(name)).view(np.uint16)
        expected[np.isnan(x)] = 0x7FFF
        np.testing.assert_array_equal(found, expected)


def test_comparisons_give_bools():
    assert {p.name for p in PRIMITIVES if p.infer is infer_bool} >= {"equal", "less", "isnan", "logical_not"}
