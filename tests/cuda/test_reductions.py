"""Reductions as generated kernels: every form, with and without parts; and an order that only shape decides."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from cuda_cases import DTYPES, numbers, same_bits
from inside import aval_of, buffer_of
from shim import standin

import tapegrad as tg
from tapegrad.device import CPU
from tapegrad.engine import region
from tapegrad.engine.realize import realize, waiting

pytestmark = pytest.mark.sampled(1 / 2)

AXES = [(0, 1, 2), (0,), (2,), (1,), (0, 2), (1, 2), (0, 1)]
SHAPES = [(5, 6, 8), (1, 7, 1), (2, 3, 600), (1, 2, 5000)]
WHOLE = [((7, 9), (1,)), ((7, 9), (0,)), ((8, 2000), (1,)), ((64, 12), (0,)), ((5, 8, 12), (0, 2)), ((4, 6, 8), (1,))]
SPLIT = [((3, 20001), (1,)), ((20004,), (0,)), ((1000, 40), (0,)), ((1003, 3), (0,)), ((3, 400, 24), (1,))]

REDUCTIONS = {
    "sum": (tg.sum, DTYPES), "max": (tg.max, ("float32", "int16", "float16")), "min": (tg.min, ("float64", "int16")),
    "any": (tg.any, ("bool",)), "all": (tg.all, ("bool",)), "prod": (tg.prod, ("float64", "int16")),
}  # fmt: skip


@pytest.mark.sampled(1 / 6)
@pytest.mark.parametrize(
    ("name", "axes"), [(name, axes) for name in REDUCTIONS for axes in AXES if name == "sum" or axes in AXES[:5:2]]
)
def test_reductions(name, axes, cuda, on):
    reduce, dtypes = REDUCTIONS[name]
    for dtype, shape in itertools.product(dtypes, SHAPES):
        if dtype != dtypes[0] and shape in SHAPES[1::2]:
            continue
        base = numbers(shape, dtype)
        base = np.where(base > 7, -1, 1).astype(dtype) if name == "prod" else base
        base = base > 0 if dtype == "bool" else base
        found = []
        for d in (cuda, CPU):
            x = on(d, base)
            x = ~~x if dtype == "bool" else x + 1 - 1
            found.append([reduce(x, axis=axes), reduce(x, axis=axes, keepdims=True)])
        for got, wanted in zip(*found):
            same_bits(got, wanted)


@pytest.mark.slow
def test_reductions_of_nothing_and_of_one(cuda, on):
    for shape, axes in itertools.product([(0, 4), (4, 0), (1, 4), (1, 1), (4, 1)], [(0,), (1,), (0, 1)]):
        functions = tg.sum, tg.prod, tg.any, tg.all, tg.mean
        base = numbers(shape, "float32")
        found = [[f(on(d, base) * 2, axis=axes) for f in functions] for d in (cuda, CPU)]
        for got, wanted in zip(*found):
            same_bits(got, wanted)
    with pytest.raises(tg.errors.ShapeError, match="no max of nothing"):
        tg.max(on(cuda, numbers((0, 4), "float32")), axis=0)


@pytest.mark.parametrize("axes", [(0, 2, 4), (1, 3)])
def test_reductions_of_every_second_axis(axes, cuda, on):
    """Three that are reduced, or that stay, and cannot be taken for fewer."""
    base = numbers((2, 3, 4, 5, 6), "float32")
    same_bits(tg.sum(on(cuda, base) * 1, axis=axes), base.sum(axes))


@pytest.mark.sampled(1 / 6)
@pytest.mark.parametrize(("shape", "axes"), SPLIT, ids=str)
@pytest.mark.parametrize("dtype", ["float32", "float16", "int64", "complex64"])
def test_long_rows_and_columns_are_split(shape, axes, dtype, cuda, on):
    base = numbers(shape, dtype) // 8 if dtype == "float16" else numbers(shape, dtype)
    got = tg.sum(on(cuda, base) * 1, axis=axes)
    assert [one.name for one in standin.launches] == ["tg_fused"]
    assert standin.launches[0].grid[1] > 1
    wide = {"float16": "float32"}.get(dtype, dtype)
    same_bits(got, base.sum(axis=axes, dtype=wide).astype(dtype))
    if dtype == "float32":
        same_bits(tg.max(on(cuda, base) - 3, axis=axes), (base - 3).max(axis=axes))


@pytest.mark.parametrize(("columns", "parts", "blocks"), [(127, 128, 8), (128, 64, 1)])
def test_a_thread_joins_no_more_than_64_parts_of_a_column(columns, parts, blocks, cuda, on):
    x = on(cuda, numbers((4096, columns), "float32"))
    with tg.measure() as m:
        tg.sum(x, axis=0).numpy()
    assert m.scratch_bytes == 4 * parts * columns + 8 * blocks  # and a count for each block of columns


@pytest.mark.slow
def test_nans_and_infinities_get_through_reductions(cuda, on):
    for shape, place in (((3, 40), (1, 7)), ((40, 3), (7, 1)), ((2, 20000), (1, 19999)), ((5000, 3), (4999, 2))):
        base = numbers(shape, "float32")
        base[place] = np.nan
        x = on(cuda, base) * 1
        for axis in (0, 1):
            for f, g in ((tg.max, np.max), (tg.min, np.min), (tg.sum, np.sum)):
                same_bits(f(x, axis=axis), g(base, axis=axis))
        same_bits(tg.any(on(cuda, base * 0), axis=1), np.any(base * 0, axis=1))
        low = np.full(shape, -np.inf, "float32")
        same_bits(tg.max(on(cuda, low) * 1, axis=0), low.max(axis=0))
        same_bits(tg.min(-on(cuda, low), axis=1), -low.max(axis=1))
    for dtype in ("int8", "int64", "uint8"):
        edge = np.array([[np.iinfo(dtype).min] * 3, [np.iinfo(dtype).max] * 3], dtype)
        same_bits(tg.max(on(cuda, edge), axis=1), edge.max(axis=1))
        same_bits(tg.min(on(cuda, edge), axis=1), edge.min(axis=1))


def test_half_precision_is_summed_in_single(cuda, on):
    base = np.full((3, 5000), 0.1, "float16")
    for axis in (0, 1):
        wanted = base.astype("float64").sum(axis=axis)
        np.testing.assert_allclose(tg.sum(on(cuda, base) * 1, axis=axis).numpy(), wanted, rtol=2**-10)
    ones = np.ones((4100, 2), "float16")
    same_bits(tg.sum(on(cuda, ones) * 1, axis=0), np.full(2, 4100, "float16"))
    same_bits(tg.sum(on(cuda, np.full(70000, 30000, "int16"))), np.int64(2100000000))


@pytest.mark.sampled(1 / 6)
@pytest.mark.parametrize(("shape", "axes"), [*SPLIT, *WHOLE], ids=str)
def test_the_order_of_additions_is_fixed_by_shape(shape, axes, rng, cuda, on):
    dtype = "float16" if axes == (0,) else "float32"
    base = rng.uniform(-1, 1, shape).astype(dtype)
    grown = np.concatenate([base.reshape(-1)[:1], base.reshape(-1)])
    odd = on(cuda, grown, lambda x: x[1:].reshape(shape))
    step = on(cuda, np.repeat(base, 2, axis=-1), lambda x: x[..., ::2])
    turned = on(cuda, np.ascontiguousarray(base.T), lambda x: x.T)
    plain = on(cuda, base)
    f = lambda x: tg.sum(x * 1.5, axis=axes)
    wanted = f(plain)
    close = (base * base.dtype.type(1.5)).astype("float64").sum(axes)
    np.testing.assert_allclose(wanted.numpy(), close, rtol=1e-3, atol=base.size * 2e-7)
    stored = plain * 1.5
    realize([buffer_of(stored)])
    for got in (f(odd), f(step), f(turned), tg.sum(stored, axis=axes), tg.sum(plain * 1.5, axis=axes, keepdims=True)):
        same_bits(got.reshape(wanted.shape), wanted)
    with tg.GradientTape() as tape:  # a bias beside its input: the cotangent of the one is an output of the kernel
        b = on(cuda, np.zeros([1 if i in axes else n for i, n in enumerate(shape)], dtype))
        tape.watch([plain, b])
        y = plain * 1.5 + b
    both = tape.gradient(y, [plain, b], output_gradients=plain)
    alone = tg.sum(plain, axis=axes)
    same_bits(both[1].reshape(alone.shape), alone)
    same_bits(both[0], plain * 1.5)


def test_reductions_in_bounds(cuda, on):
    standin.configure(check=True)
    for shape, axes in [*SPLIT[:3], ((1, 1030), (1,)), ((7, 9), (0,)), ((130, 4), (0,))]:
        base = numbers(shape, "float32")
        same_bits(tg.sum(on(cuda, base) * 1, axis=axes), base.sum(axes))


def _gradients_alike(f, cuda, on, *bases):
    found = []
    for d in (cuda, CPU):
        xs = [on(d, base) for base in bases]
        found.append(f(*xs))
    for got, wanted in zip(*found, strict=True):
        np.testing.assert_allclose(got.numpy(), wanted.numpy(), rtol=1e-5, atol=1e-5)


def test_results_evaluated_meanwhile_are_no_results_any_more(cuda, on, rng):
    """Sums that a gradient walk defers, filled by a product on the way, with something waiting on them."""

    def some(x, w2, v, d, q, k):
        with tg.GradientTape() as tape:
            tape.watch([w2, d, q])
            u, m, w = v * d, q @ k, w2 * v
            loss = tg.sum(x * w) + tg.sum(m * m) + tg.sum(u * u)
        return tape.gradient(loss, [w2, d, q])

    def one(x, w, c):
        with tg.GradientTape() as tape:
            tape.watch(c)
            y = tg.sum(x * (w * c))
        return [tape.gradient(y, c)]

    draw = lambda *shape: rng.standard_normal(shape).astype("f4")
    _gradients_alike(some, cuda, on, draw(6, 5), draw(6, 1), draw(6, 1), draw(1, 1), draw(3, 4), draw(4, 2))
    _gradients_alike(one, cuda, on, draw(6, 5), draw(6, 1), draw(1, 1))


def test_a_reduction_of_what_waits_for_a_reduction(cuda, on, rng):
    def nested(x, w):
        kept = []

        def inner():
            kept.append(tg.sum(x, axis=1, keepdims=True) * w)
            return tg.sum(kept[0] * 2.0) + 1.0

        return [waiting(aval_of(x), inner), *kept]

    _gradients_alike(nested, cuda, on, rng.standard_normal((6, 5)), rng.standard_normal((6, 1)))


@pytest.mark.parametrize("first", [0, 1])
def test_sums_over_other_axes_have_a_kernel_of_their_own(first, cuda, on, rng):
    """A value that is stored fits any loop order, and joins the sum that comes first."""
    x, found = on(cuda, rng.uniform(size=(30, 2000))), []

    def together():
        stored = x + 1.0
        found.extend([stored, *(tg.sum(stored * stored, axis=axis) for axis in (first, 1 - first))])
        realize([buffer_of(t) for t in found])
        return stored

    with tg.measure() as m:
        waiting(aval_of(x), together)
    assert m.kernel_runs == 2
    for axis, total in zip((first, 1 - first), found[1:], strict=True):
        np.testing.assert_allclose(total.numpy(), ((x.numpy() + 1) ** 2).sum(axis))


def test_what_waits_within_another_waits_for_it(cuda, on):
    """Two means and their product are one kernel."""
    base = numbers((6, 40), "float32")
    f = lambda x: waiting(aval_of(x), lambda: tg.mean(x, axis=1) * tg.mean(x * x, axis=1))
    x = on(cuda, base)
    with tg.measure() as m:
        got = f(x)
    assert m.kernel_runs == 1
    same_bits(got, f(on(CPU, base)))


@pytest.mark.parametrize("shape", [(), (2,)], ids=str)
def test_what_waits_for_two_results_reads_one_element_for_each_or_one_for_both(shape, cuda, on):
    base, late = numbers((2, 600), "float32"), numbers(shape, "float32") + np.float32(0.5)
    x, y = on(cuda, base), on(cuda, late)
    with tg.measure() as m:
        got = waiting(aval_of(x), lambda: tg.sum(x, axis=1) * y)
    assert m.kernel_runs == 1
    same_bits(got, base.sum(axis=1) * late)


def test_bytes_of_a_reduction_that_waits_are_due_to_the_line_that_made_it(cuda, on):
    x = on(cuda, numbers((6, 4096), "float32"))

    def late():
        total = tg.sum(x, axis=0)
        realize((buffer_of(total),))
        return total

    with tg.measure() as m:
        waiting(aval_of(x), late)
    line = late.__code__.co_firstlineno + 1
    assert [n for place, n in m.peak_by_line.items() if place.endswith(f"{__file__}:{line}")] == [16384]


def test_a_reduction_that_waits_counts_as_one_node_and_one_array(cuda, on):
    """However much it reads that nobody else holds: so what is computed from it is not cut before it has to be."""
    rows = lambda: tg.sum(on(cuda, numbers((6, 40), "float32")), axis=1)

    def longest():
        y = rows()
        for _ in range(region.MAX_NODES - 1):
            y = -y
        return y

    for f in (lambda: rows() * rows(), longest):
        with tg.measure() as m:
            waiting(aval_of(on(cuda, numbers((6, 40), "float32"))), f)
        assert m.kernel_runs == 1
