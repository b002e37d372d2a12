"""Kernels on the CPU: the same bits for every tile size and number of threads; shapes, layouts, reductions."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

import tapegrad as tg
from tapegrad.device import threads
from tapegrad.engine import region
from tapegrad.engine.cpu import tiles
from tapegrad.tensor import from_array

TILES = (65536, 10000, 4096, 777)
THREADS = (1, 2, 3)
SHAPES = [(16384,), (100003,), (129, 131), (3, 7, 1000), (2, 100000), (100000, 2), (1, 20000), (20000, 1), (5, 1, 4099)]


@pytest.fixture(autouse=True)
def settings():
    count, small = threads.get_num_threads(), region.SMALL
    yield
    threads.set_num_threads(count)
    tiles.set_tile_size(tiles.TILE)
    region.set_small(small)


def every_way(make):
    """The bits of ``make()`` for every tile size and number of threads; they must be one."""
    found = set()
    for tile, count in itertools.product(TILES, THREADS):
        tiles.set_tile_size(tile)
        threads.set_num_threads(count)
        y = make()
        found.add(tuple(t.numpy().tobytes() for t in (y if isinstance(y, tuple) else (y,))))
    assert len(found) == 1


def unfused(make):
    """``make()`` with every operation run at once."""
    before = region.SMALL
    region.set_small(2**62)
    try:
        return make().numpy()
    finally:
        region.set_small(before)


def test_tiles_that_are_numbered_by_several_axes(rng):
    x = from_array(rng.normal(size=(4, 3, 7, 900))[:, :, ::-1])
    tiles.set_tile_size(500)
    make = lambda: tg.exp(x) * 2.0 + x
    np.testing.assert_array_equal(make().numpy(), unfused(make))


def test_sums_of_half_are_added_in_single_and_written_in_half():
    x = from_array(np.ones((200, 300), "float16"))
    rows, columns = tg.sum(x * 2, axis=1), tg.sum(x * 2, axis=0)
    assert rows.dtype == columns.dtype == np.float16
    assert set(rows.numpy()) == {600} and set(columns.numpy()) == {400}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_elementwise_kernels(shape, dtype, rng):
    x, y = (from_array(rng.uniform(0.1, 2, shape).astype(dtype)) for _ in range(2))

    def make():
        return tg.tanh(x * y + 0.5) * tg.sigmoid(x) - tg.log(y) / tg.exp(x)

    every_way(make)
    np.testing.assert_array_equal(make().numpy(), unfused(make))


@pytest.mark.parametrize(
    "shapes",
    [
        [(130, 140), (140,)], [(130, 140), (130, 1)], [(130, 1), (1, 140)], [(130, 140), ()], [(130, 140), (1, 1)],
        [(5, 60, 70), (60, 1), (5, 1, 1)], [(40, 1, 30), (1, 20, 30), (20, 1)], [(1,), (40000,)],
    ],
)  # fmt: skip
def test_broadcasting(shapes, rng):
    xs = [from_array(rng.uniform(0.5, 2, shape)) for shape in shapes]

    def make():
        y = xs[0]
        for x in xs[1:]:
            y = tg.exp(y * 0.5) + x
        return y * xs[-1]

    every_way(make)
    np.testing.assert_array_equal(make().numpy(), unfused(make))


@pytest.mark.parametrize("form", ["transposed", "step", "reversed", "column", "broadcast"])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_strided_leaves_give_the_bits_of_contiguous_ones(form, dtype, rng):
    base = rng.uniform(0.1, 2, (300, 300)).astype(dtype)
    x = {
        "transposed": base.T, "step": base[:, ::2], "reversed": base[::-1, ::-1], "column": base[:, 7:150],
        "broadcast": np.broadcast_to(base[0], (300, 300)),
    }[form]  # fmt: skip
    f = lambda t: tg.exp(t) + tg.log(t) * tg.tanh(t) ** 1.5
    every_way(lambda: f(from_array(x)))
    np.testing.assert_array_equal(f(from_array(x)).numpy(), f(from_array(np.ascontiguousarray(x))).numpy())


AXES = [(0,), (1,), (2,), (0, 1), (1, 2), (0, 2), (0, 1, 2)]


@pytest.mark.sampled(1 / 4)
@pytest.mark.parametrize("shape", [(30, 40, 50), (3, 5, 70001), (70001, 3, 5), (3, 70001, 5), (1, 300, 300)])
@pytest.mark.parametrize("axes", AXES)
def test_reductions_over_every_set_of_axes(shape, axes, rng):
    x = from_array(rng.uniform(-1, 1, shape))
    make = lambda: tg.sum(tg.sin(x) * x, axis=axes)
    every_way(make)
    np.testing.assert_allclose(make().numpy(), (np.sin(x.numpy()) * x.numpy()).sum(axis=axes), rtol=1e-9, atol=1e-9)
    stored = tg.sin(x) * x
    stored.numpy()
    np.testing.assert_array_equal(tg.sum(stored, axis=axes).numpy(), make().numpy())
    np.testing.assert_array_equal(tg.max(tg.sin(x), axis=axes).numpy(), np.sin(x.numpy()).max(axis=axes))


@pytest.mark.parametrize("axes", AXES)
def test_reductions_of_strided_operands(axes, rng):
    x = rng.uniform(-1, 1, (50, 40, 30)).T
    got = tg.sum(from_array(x), axis=axes).numpy()
    np.testing.assert_array_equal(got, tg.sum(from_array(np.ascontiguousarray(x)), axis=axes).numpy())


def test_half_precision_is_summed_in_single(rng):
    x = rng.uniform(0, 0.1, 200000).astype("float16")
    np.testing.assert_allclose(tg.sum(from_array(x)).item(), x.astype("float64").sum(), rtol=1e-3)


def test_one_kernel_with_several_outputs(rng):
    """Gradients of one shape, which share what they are made from."""
    x, w = (rng.uniform(0.5, 1, (200, 150)) for _ in range(2))
    f = tg.grad(lambda x, w: tg.sum(tg.exp(x) * w), argnums=(0, 1))
    every_way(lambda: f(x, w))
    for got, expected in zip(f(x, w), (np.exp(x) * w, np.exp(x)), strict=True):
        np.testing.assert_array_equal(got.numpy(), expected)


def test_an_output_that_another_output_reads(rng):
    """The gradient of one operand of a product is read by that of another."""
    a, b = (rng.uniform(0.5, 1, (200, 150)) for _ in range(2))
    f = tg.grad(lambda a, b: tg.sum(tg.exp(a) * tg.exp(a + b)), argnums=(0, 1))
    e = np.exp(a) * np.exp(a + b)
    for got, expected in zip(f(a, b), (e + e, e), strict=True):
        np.testing.assert_allclose(got.numpy(), expected, rtol=1e-14)


def test_outputs_and_reductions_in_one_kernel(rng):
    """As the gradient of a bias and of its input: the cotangent itself and its sum."""
    x, w, b = (rng.uniform(-1, 1, s) for s in ((300, 200), (300, 200), (200,)))
    f = lambda x, w, b: tg.sum(tg.tanh(x * w + b))
    every_way(lambda: tg.grad(f, argnums=(0, 1, 2))(x, w, b))
    d = 1 - np.tanh(x * w + b) ** 2
    for got, wanted in zip(tg.grad(f, argnums=(0, 1, 2))(x, w, b), (d * w, d * x, d.sum(0)), strict=True):
        np.testing.assert_allclose(got.numpy(), wanted, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("dtype", ["float32", "int32", "bool"])
def test_mixed_dtypes_in_one_kernel(dtype, rng):
    x = rng.integers(0, 2, (150, 160)).astype(dtype)
    y = rng.uniform(1, 2, (150, 160))
    make = lambda: tg.where(from_array(x) > 0, from_array(y), 1.0) + from_array(x)
    every_way(make)
    np.testing.assert_array_equal(make().numpy(), np.where(x > 0, y, 1.0) + x)


@pytest.mark.parametrize("shape", [(0, 20000), (20000, 0)])
def test_empty_arrays(shape):
    x = tg.zeros(shape)
    assert (tg.exp(x) + 1).numpy().shape == shape
    np.testing.assert_array_equal(tg.sum(tg.exp(x), axis=0).numpy(), np.zeros(shape[1:]))
    np.testing.assert_array_equal(tg.sum(tg.exp(x), axis=1).numpy(), np.zeros(shape[:1]))


@pytest.mark.parametrize("shape", [(), (1,), (3,), (2, 3), (1, 1, 5)])
def test_small_arrays_in_kernels(shape, rng):
    """What runs at once gives the bits a kernel gives."""
    x = rng.uniform(0.5, 1.5, shape)
    make = lambda: tg.exp(from_array(x)) * tg.sin(from_array(x))
    wanted = unfused(make)
    region.set_small(1)
    np.testing.assert_array_equal(make().numpy(), wanted)


def test_an_error_in_a_tile_reaches_the_caller(rng):
    x = from_array(rng.uniform(-1, 1, 300000))
    for count in THREADS:
        threads.set_num_threads(count)
        with pytest.raises(FloatingPointError), np.errstate(invalid="raise"):
            tg.sqrt(x).numpy()


def test_the_callers_error_state_holds_in_every_thread():
    x = from_array(np.full(300000, -1.0))
    for count in THREADS:
        threads.set_num_threads(count)
        with np.errstate(invalid="ignore"):
            assert np.isnan(tg.sqrt(x).numpy()).all()


SIMD = ["exp", "expm1", "exp2", "log", "log2", "log10", "log1p", "sin", "cos", "tan", "asin", "acos", "atan", "sinh",
        "cosh", "tanh", "asinh", "atanh", "sqrt", "sigmoid", "softplus", "erf", "erfc"]  # fmt: skip


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("name", SIMD)
def test_an_element_has_the_same_bits_in_every_split(name, dtype, rng):
    """NumPy's vector loops and their remainders: any length, any offset, any neighbours."""
    x = rng.uniform(0.01, 0.99, 1100).astype(dtype)
    f = getattr(tg, name)
    whole = f(from_array(x)).numpy()
    for start, length in itertools.product((0, 1, 5, 16, 31), (1, 2, 3, 7, 8, 15, 16, 17, 31, 33, 64, 1000)):
        part = f(from_array(x[start : start + length])).numpy()
        np.testing.assert_array_equal(part, whole[start : start + length], err_msg=f"{start} {length}")
    odd = np.empty(x.nbytes + 1, np.uint8)[1:].view(dtype)
    odd[:] = x
    np.testing.assert_array_equal(f(from_array(odd)).numpy(), whole)


def test_a_complex_number_alone_has_the_same_bits_stored_or_not(rng):
    """NumPy multiplies single ones otherwise where the product overwrites a factor."""
    region.set_small(1)
    for _ in range(50):
        z, w = (tg.asarray(rng.normal(size=1) + 1j * rng.normal(size=1)) for _ in range(2))
        stored = (tg.exp(z) * w).numpy(copy=True)
        product = tg.exp(z) * w
        assert tg.real(product).numpy().tobytes() == stored.real.tobytes()


@pytest.mark.parametrize("dtype", ["f4", "f8"])
@pytest.mark.parametrize("axis", [None, 0, 1])
def test_sums_of_long_formulas_have_the_bits_of_sums_of_stored_values(axis: int | None, dtype: str) -> None:
    """Their steps are done part by part within a tile, for the scratch of many values to stay in a cache."""
    x = tg.asarray(np.random.default_rng(0).normal(size=(3, 400_003)).astype(dtype))
    values = tg.asarray(tg.gelu(x * 2).numpy())
    for _ in range(3):
        assert tg.sum(tg.gelu(x * 2), axis).numpy().tobytes() == tg.sum(values, axis).numpy().tobytes()


@pytest.mark.parametrize("dtype", ["f4", "f8"])
@pytest.mark.parametrize("axis", [(), 0], ids=["stored", "summed"])
def test_scratch_of_long_formulas_is_bounded(axis: object, dtype: str) -> None:
    x = tg.asarray(np.ones((3, 400_003), dtype))
    tg.set_num_threads(1)
    f = tg.function(lambda: tg.sum(tg.gelu(x * 2) * tg.sigmoid(x), axis))
    nbytes = f().nbytes
    f()
    kept = tiles.REDUCTION_TILE * x.dtype.itemsize * (axis == 0)
    assert f.plan().arena_bytes <= nbytes + kept + 2**20 + 4096
