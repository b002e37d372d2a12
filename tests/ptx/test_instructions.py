"""The interpreter's instructions against Python's integers and fractions, NumPy, and what the PTX ISA says."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from .machine import computed, run

pytestmark = pytest.mark.slow

F32, F64 = np.float32, np.float64
TRICKY = [0.0, -0.0, 1.0, -1.0, 1.5, 3.0, 2.0**-126, -(2.0**-126), 2.0**-120, 2.0**127, 3.4e38, 1 + 2.0**-23,
          1 - 2.0**-24, float("inf"), -float("inf"), float("nan"), 16777217 / 3, 1e-30, 0.1, -0.3]  # fmt: skip


def rounded(exact: Fraction, mode: str, dtype: Any) -> float:
    """A fraction rounded to a dtype in a direction, by comparing with its neighbours."""
    if not exact:
        return 0.0
    with np.errstate(over="ignore"):
        near = dtype(float(exact)) if dtype is F64 else F32(1) * F32(_toward(exact))
    around = {float(near), float(np.nextafter(near, dtype(-np.inf))), float(np.nextafter(near, dtype(np.inf)))}
    finite = sorted(x for x in around if math.isfinite(x))
    below, above = [x for x in finite if Fraction(x) <= exact], [x for x in finite if Fraction(x) >= exact]
    low, high = max(below, default=-math.inf), min(above, default=math.inf)
    if mode in ("rm", "rp"):
        return low if mode == "rm" else high
    if mode == "rz":
        return low if exact > 0 else high
    if Fraction(low) == exact:
        return low
    apart = exact - Fraction(low) - (Fraction(high) - exact)
    even = low if int(np.array(low, dtype).view("u4" if dtype is F32 else "u8")) % 2 == 0 else high
    return low if apart < 0 else high if apart > 0 else even


def _toward(exact: Fraction) -> float:
    return exact.numerator / exact.denominator


def triples(dtype: Any, seed: int = 0) -> list[np.ndarray]:
    """Random numbers of many exponents, whose product and addend often nearly cancel, or meet between two floats."""
    rng = np.random.default_rng(seed)
    n, bits = 192, 24 if dtype is F32 else 53
    a, b = ((rng.integers(1, 1 << bits, n) * 2.0 ** -rng.integers(1, 40, n)).astype(dtype) for _ in range(2))
    c = -(a * b)
    c[::3] = (rng.normal(size=64) * 2.0 ** rng.integers(-60, 60, 64)).astype(dtype)
    c[1::3] *= dtype(1 + np.finfo(dtype).eps)
    tie = np.arange(0, n, 4)
    a[tie], b[tie] = 1 + np.finfo(dtype).eps, dtype(2.0 ** (bits - 1) + 1)
    c[tie] = (rng.integers(0, 2, len(tie)) * 2 - 1) * 2.0 ** -rng.integers(1, 90, len(tie)).astype(float)
    return [a, b, c]


@pytest.mark.parametrize("mode", ["rn", "rz", "rm", "rp"])
def test_fused_products_and_sums_are_rounded_once(mode):
    for dtype, name in ((F32, "f32"), (F64, "f64"))[: 2 if mode == "rn" else 1]:
        a, b, c = triples(dtype)
        got = computed(f"fma.{mode}.{name}", a, b, c, to=dtype)
        for x, y, z, found in zip(a, b, c, got):
            exact = Fraction(float(x)) * Fraction(float(y)) + Fraction(float(z))
            assert found == rounded(exact, mode, dtype), (x, y, z)


@pytest.mark.parametrize("mode", ["rn", "rz", "rm", "rp"])
@pytest.mark.parametrize("name", ["add", "sub", "mul"])
def test_sums_and_products_in_a_direction(name, mode):
    a, b, c = triples(F32, 1)
    b = c if name != "mul" else b
    act = {"add": lambda x, y: x + y, "sub": lambda x, y: x - y, "mul": lambda x, y: x * y}[name]
    for x, y, found in zip(a, b, computed(f"{name}.{mode}.f32", a, b, to=F32)):
        assert found == rounded(act(Fraction(float(x)), Fraction(float(y))), mode, F32), (x, y)


def test_fused_extremes():
    """Where the exact way through doubles overflows or underflows, fractions take over."""
    edge = np.array([5e-324, 1e-308, 1e-300, 1e-160, 1.0, 1e160, 1e300, 1.7e308, 0.0, np.inf, np.nan], F64)
    a, b, c = (np.array(x) for x in zip(*itertools.product(edge, edge[::2], edge[::3])))
    got = computed("fma.rn.f64", a, b, c, to=F64)
    with np.errstate(all="ignore"):
        plain = a * b + c
    for x, y, z, found, simple in zip(a, b, c, got, plain):
        if not np.isfinite([x, y, z]).all():
            assert found == simple or math.isnan(found)
            continue
        exact = Fraction(float(x)) * Fraction(float(y)) + Fraction(float(z))
        try:
            wanted = _toward(exact)
        except OverflowError:
            wanted = math.inf
        assert found == wanted, (x, y, z)


def test_subnormal_numbers_are_flushed_where_asked():
    x, y = np.array([1e-40, 2.0**-126, -1e-40, 3.0], F32), np.array([1, 0.5, 1, 1], F32)
    assert computed("mul.rn.ftz.f32", x, y, to=F32).tolist() == [0, 0, 0, 3]
    assert np.signbit(computed("mul.rn.ftz.f32", x, y, to=F32)).tolist() == [False, False, True, False]
    np.testing.assert_array_equal(computed("mul.rn.f32", x, y, to=F32), x * y)
    assert computed("ex2.approx.ftz.f32", np.array([-130, 1, -1], F32), to=F32).tolist() == [0, 2, 0.5]


def test_least_greatest_and_comparisons():
    a, b = (np.array(x, F32) for x in zip(*itertools.product(TRICKY, TRICKY)))
    for name, f, sign in (("min", np.fmin, True), ("max", np.fmax, False)):
        got = computed(f"{name}.f32", a, b, to=F32)
        np.testing.assert_array_equal(got, f(a, b))
        zeros = (a == 0) & (b == 0) & (np.signbit(a) != np.signbit(b))
        assert (np.signbit(got[zeros]) == sign).all() and zeros.any()
        assert np.isnan(computed(f"{name}.NaN.f32", a, b, to=F32)[np.isnan(a) | np.isnan(b)]).all()
    either = np.isnan(a) | np.isnan(b)
    for name, wanted in (
        ("lt", a < b), ("ltu", (a < b) | either), ("ne", (a != b) & ~either), ("neu", a != b), ("num", ~either),
        ("nan", either), ("geu", (a >= b) | either), ("equ", (a == b) | either), ("gt", a > b),
    ):  # fmt: skip
        np.testing.assert_array_equal(computed(f"setp.{name}.f32", a, b, to=bool), wanted, err_msg=name)


def test_approximate_functions_of_doubles_keep_half_of_the_bits():
    x = np.array([3.0, -0.7, 1e300, np.inf])
    got = computed("rcp.approx.ftz.f64", x, to=F64)
    assert (got.view("u8") & 0xFFFFFFFF == 0).all()
    np.testing.assert_allclose(got, 1 / x, rtol=2**-20)


# ---- integers

WHOLE = [0, 1, 2, 3, 7, 255, 2**15, 2**31 - 1, 2**31, 2**32 - 1, 2**40 + 3, 2**63 - 1, 2**63, 2**64 - 1, 2**64 - 5]


def numbers(kind: str) -> list[tuple[int, int]]:
    bits = int(kind[1:])
    values = sorted({n % (1 << bits) for n in WHOLE})
    signed = [n - (1 << bits) if kind[0] == "s" and n >> bits - 1 else n for n in values]
    return list(itertools.product(signed, signed))


def whole(f: Any, kind: str, pairs: list[tuple[int, int]], to: str | None = None) -> list[int]:
    """What a function of Python's integers gives, wrapped to the type."""
    bits = int((to or kind)[1:])
    out = [f(x, y) % (1 << bits) for x, y in pairs]
    return [n - (1 << bits) if (to or kind)[0] == "s" and n >> bits - 1 else n for n in out]


def cut(x: int, y: int) -> int:
    """The quotient cut towards zero."""
    return abs(x) // abs(y) * (1 if (x < 0) == (y < 0) else -1)


@pytest.mark.parametrize("kind", ["u32", "s32", "u64", "s64"])
def test_integers(kind):
    bits, dtype = int(kind[1:]), np.dtype(("i" if kind[0] == "s" else "u") + str(int(kind[1:]) // 8))
    pairs = numbers(kind)
    for name, f in (
        ("add", lambda x, y: x + y), ("sub", lambda x, y: x - y), ("mul.lo", lambda x, y: x * y),
        ("mul.hi", lambda x, y: x * y >> bits), ("min", min), ("max", max),
    ):  # fmt: skip
        a, b = (np.array(x, dtype) for x in zip(*pairs))
        assert computed(f"{name}.{kind}", a, b, to=dtype).tolist() == whole(f, kind, pairs), name
    some = [pair for pair in pairs if pair[1]]
    a, b = (np.array(x, dtype) for x in zip(*some))
    assert computed(f"div.{kind}", a, b, to=dtype).tolist() == whole(cut, kind, some)
    assert computed(f"rem.{kind}", a, b, to=dtype).tolist() == whole(lambda x, y: x - y * cut(x, y), kind, some)
    for places in (0, 1, bits - 1, bits, 200):
        n = np.full(len(a), places, "u4")
        moved = [int(x) << places for x in a], [int(x) >> places for x in a]
        for name, wanted in (("shl.b", moved[0]), (f"shr.{kind[0]}", moved[1])):
            got = computed(f"{name}{bits}", a, n, to=dtype)
            assert got.tolist() == whole(lambda x, y: x, kind, [(x, 0) for x in wanted]), (name, places)
    if bits == 32:
        to = kind[0] + "64"
        wide, more = np.dtype(dtype.str.replace("4", "8")), np.arange(len(a))
        got = computed(f"mad.wide.{kind}", a, b, more.astype(wide), to=wide)
        sums = [(x * y + z, 0) for (x, y), z in zip(some, more.tolist())]
        assert got.tolist() == whole(lambda x, y: x, to, sums)


def test_bits():
    rng = np.random.default_rng(0)
    a, b, c = (rng.integers(0, 2**32, 200, dtype="u4") for _ in range(3))
    for table in (0x96, 0xE8, 0xCA, 0x00, 0xFF, 0x1B):
        wanted = sum(((table >> (4 * (a >> i & 1) + 2 * (b >> i & 1) + (c >> i & 1))) & 1) << i for i in range(32))
        got = computed("lop3.b32", a, b, c, to="u4", last=f"{table:#x}")
        np.testing.assert_array_equal(got, wanted)
    place, length = (rng.integers(0, 40, 200, dtype="u4") for _ in range(2))
    field = [int(x) >> int(p) & (1 << int(n)) - 1 for x, p, n in zip(a, place, length)]
    assert computed("bfe.u32", a, place, length, to="u4").tolist() == field
    signed = [_signed_field(int(x), int(p), int(n)) for x, p, n in zip(a, place, length)]
    assert computed("bfe.s32", a.view("i4"), place, length, to="i4").tolist() == signed
    put = [(int(y) & ~(((1 << int(n)) - 1) << int(p)) | (int(x) & (1 << int(n)) - 1) << int(p)) & 0xFFFFFFFF
           for x, y, p, n in zip(a, b, place, length)]  # fmt: skip
    assert computed("bfi.b32", a, b, place, length, to="u4").tolist() == put
    both = [int(y) << 32 | int(x) for x, y in zip(a, b)]
    wanted = [(t << (n % 32)) >> 32 & 0xFFFFFFFF for t, n in zip(both, length.tolist())]
    assert computed("shf.l.wrap.b32", a, b, length, to="u4").tolist() == wanted
    wanted = [t >> min(n, 32) & 0xFFFFFFFF for t, n in zip(both, length.tolist())]
    assert computed("shf.r.clamp.b32", a, b, length, to="u4").tolist() == wanted
    for name, f in (("clz", lambda x: 32 - x.bit_length()), ("popc", int.bit_count),
                    ("brev", lambda x: int(f"{x:032b}"[::-1], 2))):  # fmt: skip
        assert computed(f"{name}.b32", a >> place, to="u4").tolist() == [f(x) for x in (a >> place).tolist()]
    selector = rng.integers(0, 2**16, 200, dtype="u4")
    wanted = [sum(_byte(t, s >> 4 * i & 15) << 8 * i for i in range(4)) for t, s in zip(both, selector.tolist())]
    assert computed("prmt.b32", a, b, selector, to="u4").tolist() == wanted


def _byte(both: int, pick: int) -> int:
    byte = both >> 8 * (pick & 7) & 255
    return (255 if byte & 128 else 0) if pick & 8 else byte


def _signed_field(x: int, place: int, length: int) -> int:
    """``bfe.s32`` as the ISA's program has it, bit by bit."""
    if not length:
        return 0
    sign = x >> min(place + length - 1, 31) & 1
    bits = sum((x >> place + i & 1 if i < length and place + i < 32 else sign) << i for i in range(32))
    return bits - (1 << 32) if bits >> 31 else bits


def test_carries():
    pairs = [(x, y) for x, y in itertools.product([0, 1, 2**32 - 1, 2**32, 2**63 + 9, 2**64 - 1], repeat=2)]
    a, b = (np.array(x, "u8") for x in zip(*pairs))
    for name, f in (("add", lambda x, y: x + y), ("sub", lambda x, y: x - y)):
        body = f"""
            mov.b64 {{%r1, %r2}}, %x0;  mov.b64 {{%r3, %r4}}, %x1;
            {name}.cc.u32 %r5, %r1, %r3;  {name}c.u32 %r6, %r2, %r4;
            mov.b64 %y, {{%r5, %r6}};"""
        assert computed(body, a, b, to="u8").tolist() == whole(f, "u64", pairs)
    body = """
        mov.b64 {%r1, %r2}, %x0;  mov.b64 {%r3, %r4}, %x1;
        mul.lo.u32 %r5, %r1, %r3;  mul.hi.u32 %r6, %r1, %r3;
        mad.lo.cc.u32 %r6, %r1, %r4, %r6;  madc.hi.u32 %r7, %r1, %r4, 0;
        mov.b64 %y, {%r6, %r7};"""
    wanted = [(x % 2**32 * y >> 32) % 2**64 for x, y in pairs]
    assert computed(body, a, b, to="u8").tolist() == wanted


# ---- conversions


def test_floats_to_integers_are_kept_within_the_type():
    for kind, dtype in itertools.product(("s32", "u32", "s64", "u64", "u16", "s8"), (F32, F64)):
        x = np.array([*TRICKY, 2.5, -2.5, 3e9, -3e9, 1e19, 1e20, -1e20, 2.0**31, 127.5, 70000], dtype)
        info = np.iinfo(("i" if kind[0] == "s" else "u") + str(int(kind[1:]) // 8))
        name = "f32" if dtype is F32 else "f64"
        for mode, f in (("rni", round), ("rzi", math.trunc), ("rmi", math.floor), ("rpi", math.ceil)):
            wide = np.dtype(("i" if kind[0] == "s" else "u") + str(max(4, info.bits // 8)))
            got = computed(f"cvt.{mode}.{kind}.{name}", x, to=wide)
            nan = (1 << info.bits - 1) if dtype is F64 or info.bits == 64 else 0
            nan = nan - (1 << info.bits) if kind[0] == "s" and nan else nan
            for one, found in zip(x.tolist(), got.tolist()):
                if math.isnan(one):
                    assert found == nan, (kind, name)
                elif math.isinf(one):
                    assert found == (info.max if one > 0 else info.min)
                else:
                    assert found == min(max(f(one), info.min), info.max), (kind, name, mode, one)


def test_narrow_floats():
    edge = [*TRICKY, 65504, 65519.99, 65520, 1e-8, 6e-8, 3e-8]
    many = np.random.default_rng(0).normal(size=300) * 2.0 ** np.arange(-150, 150)
    x = np.concatenate([edge, many[np.abs(many) < 3e38]]).astype(F32)
    with np.errstate(all="ignore"):
        half, brain = x.astype(np.float16).view("u2"), x.astype(ml_dtypes.bfloat16).view("u2")
    number = ~np.isnan(x)
    for name, wanted in (("f16", half), ("bf16", brain)):
        got = computed(f"cvt.rn.{name}.f32", x, to="u2")
        np.testing.assert_array_equal(got[number], wanted[number], err_msg=name)
        assert (got[~number] == 0x7FFF).all()
        pair = computed(f"cvt.rn.{name}x2.f32", x, x[::-1].copy(), to="u4")
        np.testing.assert_array_equal(pair, got.astype("u4") << 16 | got[::-1])
        dtype = np.float16 if name == "f16" else ml_dtypes.bfloat16
        np.testing.assert_array_equal(computed(f"cvt.f32.{name}", wanted, to=F32), wanted.view(dtype).astype(F32))
    near = computed("cvt.rna.tf32.f32", np.array([1 + 2.0**-11, -1 - 2.0**-11, 1 + 2.0**-12, np.inf], F32), to=F32)
    assert near.tolist() == [1 + 2.0**-10, -1 - 2.0**-10, 1, np.inf]
    wide = np.array([1 + 2.0**-11 + 2.0**-40, 65519.9999999, 1e-320, np.nan])
    got = computed("cvt.rn.f16.f64", wide, to="u2").view(np.float16)
    np.testing.assert_array_equal(got, np.array([1 + 2.0**-10, 65504, 0, np.nan], np.float16))


def test_floats_to_floats():
    x = np.array([*TRICKY, 2.5, -0.5, 1e-40], F32)
    np.testing.assert_array_equal(computed("cvt.rni.f32.f32", x, to=F32), np.rint(x))
    np.testing.assert_array_equal(computed("cvt.rmi.f32.f32", x, to=F32), np.floor(x))
    clamped = computed("cvt.sat.f32.f32", x, to=F32)
    np.testing.assert_array_equal(clamped, np.where(np.isnan(x), 0, np.clip(x, 0, 1)))
    down = computed("cvt.rm.f32.f64", np.array([0.1, -0.1, 1.0, 1e300]), to=F32)
    assert down.tolist() == [float(np.nextafter(F32(0.1), F32(0))), float(F32(-0.1)), 1.0, 3.4028234663852886e38]


def test_pieces_of_registers():
    x = np.array([0x0123456789ABCDEF, 0xFEDCBA9876543210], "u8")
    got = computed("mov.b64 {%r1, %r2}, %x0;  mov.b64 %y, {%r2, %r1};", x, to="u8")
    np.testing.assert_array_equal(got, x << np.uint64(32) | x >> np.uint64(32))
    got = computed("cvt.s64.s8 %y, %x0;", x.astype("u4"), to="i8")
    assert got.tolist() == [0xEF - 256, 0x10]


def test_ways_part_and_meet():
    """A loop of as many rounds as the thread's number, within it a branch, behind it a shuffle of all."""
    body = """
        mov.u32 %r1, 0;  mov.u32 %r2, 0;
    LOOP:
        setp.ge.u32 %p1, %r1, %x0;
        @%p1 bra DONE;
        and.b32 %r3, %r1, 1;  setp.eq.s32 %p2, %r3, 0;
        @%p2 add.s32 %r2, %r2, 10;
        @%p2 bra NEXT;
        add.s32 %r2, %r2, 1;
    NEXT:
        add.s32 %r1, %r1, 1;
        bra.uni LOOP;
    DONE:
        shfl.sync.bfly.b32 %y, %r2, 1, 31, -1;"""
    n = np.arange(64, dtype="u4") * 7 % 13
    each = (n + 1) // 2 * 10 + n // 2
    np.testing.assert_array_equal(computed(body, n, to="u4"), each[np.arange(64) ^ 1])


def test_tables_of_branches():
    body = """
        brx.idx %x0, TARGETS;
    TARGETS: .branchtargets A, B, C;
    A: mov.u32 %y, 5;  bra.uni END;
    B: mov.u32 %y, 6;  bra.uni END;
    C: mov.u32 %y, 7;
    END: add.u32 %y, %y, 1;"""
    n = np.arange(32, dtype="u4") % 3
    np.testing.assert_array_equal(computed(body, n, to="u4"), n + 6)


def test_atomics_add_up():
    out = run("""
        and.b32 %r1, %tid, 3;  mul.wide.u32 %d5, %r1, 4;  add.s64 %d5, %d5, %out;
        atom.global.add.u32 %r2, [%d5], %tid;
        red.global.max.u32 [%out+16], %tid;
        @%p0 atom.global.cas.b32 %r3, [%out+20], 0, 77;""", 96, out=np.zeros(6, "u4"))  # fmt: skip
    assert out.tolist() == [sum(range(i, 96, 4)) for i in range(4)] + [95, 77]
