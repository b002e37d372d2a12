"""Machine code gives NumPy's bits, warnings and errors."""

import io
import subprocess
import sys
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import tapegrad as tg
from tapegrad.device.numerics.elements import convert, select
from tapegrad.engine.cpu.native.entries import entry_of
from tapegrad.engine.cpu.native.group import Lifetime, groups
from tapegrad.engine.cpu.native.table import Table
from tapegrad.engine.task import into

pytestmark = pytest.mark.usefixtures("machine_code")

UFUNCS = sorted(
    name
    for name, f in vars(np).items()
    if type(f) is np.ufunc and f.nout == 1 and f.signature is None and name == f.__name__
)
NUMPY = tuple(map(int, np.__version__.split(".")[:2]))
CHARS = "?bBhHiIlLefdFD"
N = 203


def operands(ufunc: np.ufunc, char: str) -> list[Any]:
    random = np.random.default_rng(ord(char))
    arrays = []
    for _ in range(ufunc.nin):
        if char in "efdFD":
            x = random.normal(size=N) * 10.0 ** random.integers(-5, 6, N)
            x[random.permutation(N)[:8]] = 0.0, -0.0, np.inf, -np.inf, np.nan, 1.0, 1e-320, 1e300
            with np.errstate(all="ignore"):
                arrays.append((x + 1j * x[::-1] if char in "FD" else x).astype(char))
        else:
            arrays.append(random.integers(0, 2**62, N).astype(char))
    return arrays


def ran(calls: list[Any], fused: bool = False) -> bool:
    """Whether all calls are entries; then they have been run as a table, of which every result is needed."""
    entries = list(map(entry_of, calls))
    if None in entries:
        return False
    table = Table(lambda _: None)
    table.add(entries, [Lifetime(i, len(calls)) for i in range(len(calls))], len(calls))  # type: ignore[arg-type]
    table.close(fused)
    table.bind(())
    table.run(0)
    return True


def spread(x: Any) -> Any:
    """The same elements with gaps between them."""
    return np.repeat(x, 3)[::3]


LAYOUTS: dict[str, Callable[[list[Any], Any], tuple[list[Any], Any]]] = {
    "contiguous": lambda xs, out: (xs, out),
    "gaps": lambda xs, out: ([spread(x) for x in xs], spread(out)),
    "two dimensions": lambda xs, out: ([x[:200].reshape(10, 20) for x in xs], out[:200].reshape(10, 20)),
    "last operand 0-d": lambda xs, out: ([*xs[:-1], xs[-1][3]], out) if len(xs) > 1 else (xs, out),
    "all 0-d": lambda xs, out: ([x[0] for x in xs], np.array(out[0])),
    "in place": lambda xs, out: (xs, xs[0] if xs[0].dtype == out.dtype else out),
    "transposed": lambda xs, out: ([x[:200].reshape(20, 10).T for x in xs], out[:200].reshape(10, 20)),
    "rows of a larger array": lambda xs, out: (
        [x[:200].reshape(10, 20)[1:, 2:] for x in (*xs, out)][:-1],
        out[20:200].reshape(9, 20)[:, 2:],
    ),
    "one row for all": lambda xs, out: (
        [x[:20] if i else x[:200].reshape(10, 20) for i, x in enumerate(xs)],
        out[:200].reshape(10, 20),
    ),
    "in place, last operand": lambda xs, out: (xs, xs[-1] if xs[-1].dtype == out.dtype else out),
}


@pytest.mark.sampled(1 / 6)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("char", CHARS)
def test_entries_have_the_bits_of_the_ufunc(char: str, layout: str) -> None:
    entries = 0
    for name in UFUNCS:
        ufunc = getattr(np, name)
        with np.errstate(all="ignore"):
            try:
                out = np.zeros_like(ufunc(*operands(ufunc, char)))
            except (TypeError, ValueError):
                continue
            (reads, expected), (again, target) = (LAYOUTS[layout](operands(ufunc, char), out.copy()) for _ in range(2))
            f, args = into(ufunc, list(map(np.asarray, reads)), expected)
            f(*args)
            if ran([into(ufunc, list(map(np.asarray, again)), target)]):
                entries += 1
                assert target.tobytes() == expected.tobytes(), name
    nested = layout in ("transposed", "rows of a larger array", "one row for all")
    assert entries >= ((9 if char in "fd" else 3 if char == "?" else 0) if nested else 20 if char in "efdFD" else 9)


def report(mode: str, run: Callable[[], object]) -> Any:
    """What floating-point errors do: the texts of warnings, the exception, or what was called, logged and printed."""
    seen: list[Any] = []
    log = io.StringIO()
    with np.errstate(all=mode, call=(lambda *args: seen.append(args)) if mode == "call" else log):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                run()
            except FloatingPointError as e:
                seen.append(str(e))
    return seen, log.getvalue(), [(w.category, str(w.message)) for w in caught]


@pytest.mark.parametrize("mode", ["ignore", "warn", "raise", "call", "log"])
@pytest.mark.parametrize("char", "fd")
def test_floating_point_errors_are_reported_as_numpy_reports_them(mode: str, char: str) -> None:
    info = np.finfo(char)
    values = {
        "fine": [1.0, 2.0], "over": [info.max, 2.0], "under": [info.tiny, info.tiny], "divide": [1.0, 0.0],
        "invalid": [np.inf, 0.0], "nan": [np.nan, 1.0], "several": [info.max, np.inf],
    }  # fmt: skip
    for ufunc in (
        np.add,
        np.multiply,
        np.divide,
        np.exp,
        np.log,
        np.sqrt,
        np.tanh,
        np.maximum,
        np.less,
        np.power,
        np.absolute,
    ):
        for name, pair in values.items():
            x = np.repeat(np.array(pair, char), 8)
            reads = [x, x[::-1].copy()][: ufunc.nin]
            out = np.zeros(16, ufunc(*(np.ones(1, char),) * ufunc.nin).dtype)
            then = np.ones(16, char)
            calls = [into(ufunc, reads, out), into(np.multiply, [then, then], np.ones(16, char))]

            def plain(calls: Any = calls) -> None:
                for f, args in calls:
                    f(*args)

            assert report(mode, lambda calls=calls: ran(calls)) == report(mode, plain), (ufunc, name)


def test_a_run_goes_on_after_a_reported_error() -> None:
    x, y, z = np.zeros(8), np.zeros(8), np.zeros(8)
    with np.errstate(all="warn"), pytest.warns(RuntimeWarning, match="divide by zero encountered in log") as caught:
        assert ran([into(np.log, [x], y), into(np.exp, [y], z), into(np.log, [z], y)])
    assert len(caught) == 2 and (y == -np.inf).all()


SHARED = np.ones((1, 7))


@pytest.mark.parametrize(
    "call",
    [
        into(np.exp, [np.zeros((3, 4)).T], np.zeros((4, 3))),
        into(np.add, [np.zeros(4, "f4"), np.zeros(4)], np.zeros(4)),
        into(np.add, [np.zeros(4, ">f8"), np.zeros(4, ">f8")], np.zeros(4, ">f8")),
        into(np.add, [np.frombuffer(bytes(41), np.uint8)[1:].view("f8"), np.zeros(5)], np.zeros(5)),
        into(np.power, [np.ones(4, int), np.ones(4, int)], np.ones(4, int)),
        into(np.add, [np.zeros(0), np.zeros(0)], np.zeros(0)),
        (np.copyto, (np.zeros(4), np.zeros(4, "f4"))),
        (np.add.reduce, (SHARED, (0,), np.dtype("f8"), SHARED, True)),
        (np.add.reduce, (np.zeros((2, 3, 4)), (1,), np.dtype("f8"), np.zeros((2, 4)), False)),
        (np.add.reduce, (np.zeros((2, 3, 4)), (0, 2), np.dtype("f8"), np.zeros(3), False)),
        (np.add.reduce, (np.zeros((3, 4)), (), np.dtype("f8"), np.zeros((3, 4)), True)),
        (np.add.reduce, (np.zeros((4, 3)).T, (1,), np.dtype("f8"), np.zeros(3), False)),
        (np.add.reduce, (np.zeros(4, "f4"), (0,), np.dtype("f8"), np.zeros(1), True)),
    ],
)
def test_calls_that_numpy_makes_otherwise_stay_numpys(call: Any) -> None:
    assert entry_of(call) is None


@pytest.mark.parametrize("dtype", ["?", "i2", "f4", "f8", "c16"])
@pytest.mark.parametrize("fused", [False, True])
def test_copies_fill_places_of_every_layout(dtype: str, fused: bool) -> None:
    x = np.arange(20).reshape(4, 5).astype(dtype)
    whole, expected = np.ones((6, 9), dtype), np.ones((6, 9), dtype)
    pairs = [
        (x, np.s_[1:5, 2:7]),
        (x.T[:4, :4], np.s_[:4, 5:]),
        (x[:, ::-2], np.s_[2:, ::-3]),
        (x[0, 3], np.s_[5:, ::2]),
    ]
    calls = []
    for source, place in pairs:
        expected[place] = source
        calls.append((np.copyto, (whole[place], np.asarray(source))))
    assert ran(calls, fused)
    assert whole.tobytes() == expected.tobytes()


@pytest.mark.parametrize("dtype", ["?", "i2", "i8", "f2", "f4", "f8", "c8", "c16"])
@pytest.mark.parametrize("fused", [False, True])
def test_selections_take_elements_of_every_layout_as_they_are(dtype: str, fused: bool) -> None:
    rng = np.random.default_rng(0)
    x, y = (rng.integers(0, 256, (4, 5 * np.dtype(dtype).itemsize), "u1") for _ in range(2))
    x, y = (x & 1, y & 1) if dtype == "?" else (x, y)  # else NaNs of all kinds are among them
    x, y = x.view(dtype), y.view(dtype)
    held = rng.integers(0, 2, (4, 5)).astype(bool)
    operands = [
        (held, x, y),
        (held[0], x, y[:, :1]),
        (held, x[0, 0], y),
        (held, np.zeros((), dtype), y),
        (held.T, x.T, y.T),
    ]
    results = [np.empty(np.broadcast_shapes(*(a.shape for a in one)), dtype) for one in operands]
    assert ran([(select, (np, out, *map(np.asarray, one))) for out, one in zip(results, operands, strict=True)], fused)
    for out, (condition, one, other) in zip(results, operands, strict=True):
        assert out.tobytes() == np.where(condition, one, other).tobytes()


@pytest.mark.parametrize("dtypes", ["fd", "df", "?f", "?d", "f?", "d?"])
@pytest.mark.parametrize("layout", ["plain", "gaps", "two dimensions", "0-d"])
@pytest.mark.parametrize("fused", [False, True])
def test_conversions_have_numpys_bits(dtypes: str, layout: str, fused: bool) -> None:
    source, target = dtypes
    x = np.random.default_rng(0).normal(size=210) * 10.0 ** np.arange(-50, 55, 0.5)
    x[::10], x[5], x[6], x[7] = 0.0, -0.0, np.inf, np.nan
    with np.errstate(all="ignore"):
        x = x.astype(source)
        x = {"plain": x, "gaps": spread(x), "two dimensions": x.reshape(30, 7).T, "0-d": x[3:4].reshape(())}[layout]
        out, expected = np.zeros(x.shape, target), x.astype(target)
        assert ran([(convert, (np, out, x))], fused)
    assert out.tobytes() == np.ascontiguousarray(expected).tobytes()


def test_conversions_report_errors_as_numpy_does() -> None:
    x, out = np.array([1e300, 1e-300]), np.zeros(2, "f4")
    for errors, text in [
        ({"over": "raise"}, "overflow encountered in cast"),
        ({"under": "raise"}, "underflow enc.* in cast"),
    ]:
        with np.errstate(all="ignore", **errors), pytest.raises(FloatingPointError, match=text):  # type: ignore[arg-type]
            np.copyto(out, x, casting="unsafe")
        with np.errstate(all="ignore", **errors), pytest.raises(FloatingPointError, match=text):  # type: ignore[arg-type]
            ran([(convert, (np, out, x))])


@pytest.mark.parametrize("dtype", ["f4", "f8"])
@pytest.mark.parametrize("keepdims", [False, True])
@pytest.mark.parametrize(
    ("shape", "axes"),
    [
        ((), ()), ((1,), (0,)), ((5,), (0,)), ((3, 43), (0, 1)), ((203, 100), (0, 1)), ((2, 3, 4), (0, 1, 2)),
        ((3, 43), (1,)), ((203, 100), (1,)), ((5, 1), (1,)), ((1, 7), (1,)), ((2, 3, 4), (2,)), ((2, 3, 4), (2, 1)),
        ((3, 20_011), (1,)), ((4001, 3), (1,)), ((3, 43), (0,)), ((203, 100), (0,)), ((9, 1), (0,)), ((1, 7), (0,)),
        ((9, 2), (0,)), ((2, 3, 4), (0,)), ((2, 3, 4), (1, 0)), ((7, 1, 5), (0, 1)), ((7, 1, 5), (1, 2)),
        ((3, 20_011), (0,)), ((4001, 3), (0,)), ((4, 1, 1), (0,)),
    ],
)  # fmt: skip
def test_sums_have_numpys_bits(dtype: str, shape: tuple[int, ...], axes: tuple[int, ...], keepdims: bool) -> None:
    for x in (np.random.default_rng(0).normal(size=shape).astype(dtype), np.full(shape, -0.0, dtype)):
        expected = np.add.reduce(np.asarray(x), axes, keepdims=keepdims)
        out = np.ones(expected.shape, dtype)
        done = ran([(np.add.reduce, (np.asarray(x), axes, np.dtype(dtype), out, keepdims))])
        if not done and NUMPY < (2, 3):
            pytest.skip("this NumPy adds long arrays by parts: its own call stays")
        assert done
        assert out.tobytes() == expected.tobytes()


@pytest.mark.parametrize("dtype", ["f4", "f8", "c8", "c16"])
def test_products_have_numpys_bits(dtype: str) -> None:
    rng = np.random.default_rng(0)

    def matrix(n: int, m: int) -> Any:
        x = rng.normal(size=(n, m))
        return (x + 1j * rng.normal(size=(n, m)) if dtype[0] == "c" else x).astype(dtype)

    for n, k, m in [(1, 1, 1), (1, 5, 1), (4, 4, 4), (5, 1, 3), (1, 7, 9), (9, 7, 1), (33, 20, 17), (64, 130, 70)]:
        for x, y in [
            (matrix(n, k), matrix(k, m)), (matrix(k, n).T, matrix(k, m)), (matrix(n, k), matrix(m, k).T),
            (matrix(n, 2 * k)[:, ::2], matrix(2 * k, m)[::2]), (matrix(n + 1, k + 1)[1:, 1:], matrix(k, m)[:, ::-1]),
        ]:  # fmt: skip
            expected, out = np.matmul(x, y, out=np.empty((n, m), dtype)), np.empty((n, m), dtype)
            assert ran([(np.matmul, (x, y, out))])
            assert out.tobytes() == expected.tobytes(), (n, k, m, x.strides, y.strides)
    square = matrix(4, 4)
    for call in [
        (square, square, square),
        (square, np.ones((4, 4), "f2"), matrix(4, 4)),
        (square[0], square, square[0]),
    ]:
        assert entry_of((np.matmul, call)) is None


def test_a_result_over_a_part_of_an_operand_stays_numpys() -> None:
    x = np.arange(9.0)
    assert entry_of(into(np.add, [x[:-1], x[1:]], x[:-1])) is None
    assert entry_of(into(np.add, [x[:-1], x[:-1]], x[:-1])) is not None


EXACT = {
    "f": [
        np.add,
        np.subtract,
        np.multiply,
        np.divide,
        np.negative,
        np.square,
        np.sqrt,
        np.absolute,
        np.maximum,
        np.minimum,
        np.floor,
    ],
    "?": [np.logical_and, np.logical_or, np.logical_not],
}
COMPARE = [np.less, np.greater_equal, np.equal]
SHAPES: list[tuple[int, ...]] = [(203,), (7, 29), (3, 4, 5), (1,), (12, 12)]
LARGE: list[tuple[int, ...]] = [(129, 130), (20000,), (15, 16, 71)]
"""Of arrays whose pads are cut into boxes."""


class Arena:
    """Bytes that are lent to values while they live, as a planner lends them: the first gap that is free."""

    def __init__(self, nbytes: int) -> None:
        self.bytes = np.zeros(nbytes, np.uint8)
        self.lent: list[tuple[int, int]] = []

    def lend(self, shape: tuple[int, ...], dtype: Any, gap: int) -> Any:
        """An array, each of whose rows has a ``gap`` of elements behind it."""
        dtype = np.dtype(dtype)
        rows = (*shape[:-1], shape[-1] + gap)
        n = int(np.prod(rows)) * dtype.itemsize
        start = 0
        for first, last in sorted(self.lent):
            if start + n <= first:
                break
            start = max(start, -(-last // 16) * 16)
        self.lent.append((start, start + n))
        array = self.bytes[start : start + n].view(dtype).reshape(rows)[..., : shape[-1]]
        return array, (start, start + n)


def random_window(random: np.random.Generator, shape: tuple[int, ...], size: tuple[int, ...]) -> tuple[slice, ...]:
    starts = [int(random.integers(0, n - m + 1)) for n, m in zip(shape, size, strict=True)]
    return tuple(slice(a, a + m) for a, m in zip(starts, size, strict=True))


def random_calls(
    seed: int, shapes: list[tuple[int, ...]] = SHAPES
) -> tuple[Arena, list[Any], list[Lifetime], list[tuple[Any, int]]]:
    """Ufuncs over values in an arena, each with the step that reads it last; and results that are needed at the end.

    Of ``LARGE`` shapes, pads, and ufuncs of windows, too.
    """
    random = np.random.default_rng(seed)
    arena, shape = Arena(1 << (16 if shapes is SHAPES else 22)), shapes[seed % len(shapes)]
    float_ = "fd"[seed % 2]
    live: list[Any] = []  # array, span, number of its step
    outside = [np.array(random.normal(), float_), random.normal(size=shape[-1]).astype(float_)]
    for _ in range(3):
        array, span = arena.lend(shape, float_, 0)
        array[...] = random.normal(size=shape)
        live.append((array, span, -1))
    calls: list[Any] = []
    last: list[int] = []
    fills, windows = [], []
    while (step := len(calls)) < 40:
        if shapes is LARGE and random.random() < 0.5:
            size = tuple(n - int(random.integers(0, 4)) for n in shape)
            given = [x for x in live if x[0].dtype != bool]
            x, y = (given[i] for i in random.integers(0, len(given), 2))
            for _, _, k in (x, y):
                if k >= 0:
                    last[k] = step + 1
            if random.random() < 0.3:
                array, span = arena.lend(size, float_, 0)
                calls.append(into(np.add, [v[0][random_window(random, shape, size)] for v in (x, y)], array))
                windows.append((array, step))
                last.append(100)
                continue
            array, span = arena.lend(shape, float_, 0)
            calls.append((np.copyto, (array, np.array(0.0, float_))))
            source = x[0][random_window(random, shape, size)]
            calls.append((np.copyto, (array[random_window(random, shape, size)], source)))
            fills.append(step)
            last += [step + 1] * 2
            live.append((array, span, step + 1))
            continue
        kind = "?" if random.random() < 0.15 and any(x[0].dtype == bool for x in live) else "f"
        same = [x for x in live if (x[0].dtype == bool) == (kind == "?")]
        f = random.choice(EXACT[kind]) if kind == "?" or random.random() < 0.8 else random.choice(COMPARE)
        picked = [same[i] for i in random.integers(0, len(same), f.nin)]
        reads = [x[0] for x in picked]
        if shape == (1,):
            reads = [x.reshape(()) if random.random() < 0.5 else x for x in reads]
        if kind == "f" and f.nin == 2 and random.random() < 0.3:
            reads[int(random.integers(2))] = outside[int(random.integers(2))]
        for _, _, k in picked:
            if k >= 0:
                last[k] = step
        dead = [x for x in live if random.random() < 0.3]
        if sum(x[0].dtype != bool for x in live) - len(dead) < 2:
            dead = []
        live = [x for x in live if all(x is not y for y in dead)]
        mine = [x for x in dead if any(x is y for y in picked)]  # operands whose bytes may go to the result
        arena.lent = [span for span in arena.lent if all(span != x[1] or any(x is y for y in mine) for x in dead)]
        dtype = bool if f in COMPARE or kind == "?" else float_
        place = next((x for x in mine if x[0].dtype == dtype), None)
        array, span = place[:2] if place else arena.lend(shape, dtype, int(random.integers(0, 2)))
        arena.lent = [s for s in arena.lent if s == span or all(s != x[1] for x in mine)]
        if shape == (12, 12):
            reads = [x.T if x is not array and random.random() < 0.3 else x for x in reads]
        calls.append(into(f, reads, array))
        last.append(step)
        live.append((array, span, step))
    for _, _, k in live:
        if k >= 0:
            last[k] = 100
    for k in fills:
        last[k] = last[k + 1]
    needed = [*((x, k) for x, _, k in live), *windows]
    return arena, calls, [Lifetime(i, until) for i, until in enumerate(last)], needed


@pytest.mark.parametrize(
    ("seed", "shapes"), [*((n, SHAPES) for n in (*range(60), 239, 299, 469)), *((n, LARGE) for n in range(30))]
)
def test_kernels_have_the_bits_of_single_ufuncs(seed: int, shapes: list[tuple[int, ...]]) -> None:
    arena, calls, lifetimes, needed = random_calls(seed, shapes)
    start = arena.bytes.copy()
    with np.errstate(all="ignore"):
        for f, args in calls:
            f(*args)
        expected = [x.copy() for x, _ in needed]
        arena.bytes[:] = start
        entries = list(map(entry_of, calls))
        table = Table(lambda _: None)
        table.add(entries, lifetimes, len(calls))  # type: ignore[arg-type]
        table.close(True)
        table.bind(())
        table.run(0)
    assert shapes is LARGE or sum(g.last - g.first for g in groups(entries, lifetimes, 0, len(calls), len(calls))) > 10  # type: ignore[arg-type]
    for (x, _), y in zip(needed, expected, strict=True):
        np.testing.assert_array_equal(x, y)
        if x.dtype != bool:
            assert (np.signbit(x) == np.signbit(y))[~np.isnan(x)].all()


def many(x: Any, y: Any) -> Any:
    for _ in range(4):
        x = tg.sin(x) * y + x / (y + 2.0)
    return x


def test_captured_functions_report_errors_as_eager_ones() -> None:
    f = tg.function(many)
    x, y = tg.asarray(np.linspace(1, 2, 5)), tg.asarray(np.linspace(1, 2, 5))
    bad = tg.asarray(np.array([np.inf, 1.0, 2.0, 3.0, 4.0]))
    for _ in range(3):
        f(x, y)
    for mode in ("warn", "raise", "call", "log"):
        assert report(mode, lambda: f(bad, y)) == report(mode, lambda: many(bad, y))
    assert f(x, y).numpy().tobytes() == many(x, y).numpy().tobytes()


def test_errors_in_calls_of_every_kind_are_reported_once() -> None:
    def f(x: Any) -> Any:
        a = tg.sort(tg.log(x))  # a single call of NumPy's
        b = tg.tanh(a) * 2.0 + tg.log(a - a) + tg.exp(x) * 3.0  # calls of loops and kernels
        return (b * b + 1.0) * (b - b) / (x + 1.0)

    captured = tg.function(f)
    good, bad = (tg.asarray(np.array([first, 1.0, 2.0])) for first in (0.5, 0.0))
    with np.errstate(all="ignore"):
        for _ in range(3):
            captured(good)
    for mode in ("warn", "raise", "call", "log"):
        assert report(mode, lambda: captured(bad)) == report(mode, lambda: f(bad))


def test_arguments_that_are_not_aligned_are_copied() -> None:
    f = tg.function(many)
    n = 5000
    plain = np.linspace(1, 2, n)
    crooked = np.frombuffer(bytes(1) + plain.tobytes() + bytes(7), np.uint8)[1 : 1 + 8 * n].view("f8")
    assert not crooked.flags.aligned
    for x in (plain, plain, plain, crooked, plain):
        assert f(tg.asarray(x), 2.0).numpy().tobytes() == many(tg.asarray(x), 2.0).numpy().tobytes()


def test_variables_that_move_are_read_where_they_lie() -> None:
    w = tg.Variable(np.linspace(1, 2, 5000))
    f = tg.function(lambda x: many(x, w))
    x = tg.asarray(np.linspace(0, 1, 5000))
    for i in range(5):
        w.assign(np.linspace(1, 2 + i, 5000))
        assert f(x).numpy().tobytes() == many(x, w).numpy().tobytes()


def test_explain_counts_kernels_loops_and_calls() -> None:
    f = tg.function(lambda x: tg.sum(tg.sin(x * 2 + 1) * (x - 3)) + tg.sum(tg.sort(x)))
    x = tg.asarray(np.linspace(0, 1, 50))
    for _ in range(4):
        f(x)
    # x * 2 + 1 and x - 3 are a kernel, as is what follows the sine; a sort is NumPy's.
    assert "replayed by" in f.explain(x) and "kernels" in f.explain(x)


SCRIPT = """
import sys
if "blocked" in sys.argv: sys.modules["llvmlite"] = None
if "old" in sys.argv:
    import llvmlite.binding
    llvmlite.binding.llvm_version_info = (15, 0, 7)
import numpy as np, tapegrad as tg
from tapegrad.engine.cpu.native import machine
@tg.function
def f(x):
    for _ in range(9): x = tg.sin(x) * 0.5 + tg.exp(-x * x)
    return tg.grad(lambda x: tg.sum(x * x))(x)
for i in range(4): y = f(tg.asarray(np.linspace(0, 1 + i, 100)))
print(y.numpy().tobytes().hex()[-64:], machine.why_not(), "llvmlite.binding" in sys.modules, sep="|")
"""


def run(*args: str, **env: str) -> list[str]:
    import os

    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, *args], capture_output=True, text=True, check=True, env={**os.environ, **env}
    )
    return done.stdout.strip().split("|")


def test_without_the_extra_or_switched_off_the_bits_are_the_same() -> None:
    native, behind, blocked, off = run(), run(TAPEGRAD_NATIVE="1"), run("blocked"), run(TAPEGRAD_NATIVE="0")
    old = run("old")
    assert native[0] == behind[0] == blocked[0] == off[0] == old[0]
    assert "LLVM 15, which is too old: pip install" in old[1]
    assert native[1] == "" and "tapegrad[native]" in blocked[1] and "TAPEGRAD_NATIVE=0" in off[1]
    assert native[2] == "True" and off[2] == "False"
