"""Rules compiled to functions of arrays give the same bits as rules run on tensors."""

import numpy as np
import pytest

import tapegrad as tg
from tapegrad.core.primitive import REGISTRY, Elementwise


def both_ways(f, *xs):
    """Gradients by compiled rules, and by rules on tensors (which a recording outer tape enforces)."""
    with tg.GradientTape() as t:
        t.watch(list(xs))
        y = f(*xs)
    quick = t.gradient(y, list(xs))
    with tg.GradientTape():
        with tg.GradientTape() as t:
            t.watch(list(xs))
            y = f(*xs)
        general = t.gradient(y, list(xs))
    return quick, general


NAMES = [
    name
    for name, prim in sorted(REGISTRY.items())
    if isinstance(prim, Elementwise) and prim.differentiable and hasattr(getattr(tg, name, None), "primitive")
]


@pytest.mark.sampled(1 / 3)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("shapes", [[(3, 4), (4,)], [(), ()], [(5,), ()], [(1, 3), (2, 1)], [(0, 2), (2,)]])
@pytest.mark.parametrize("name", NAMES)
def test_bits_are_the_same(name, shapes, dtype, rng):
    prim = REGISTRY[name]
    f = getattr(tg, name)
    low, high = prim.domain
    xs = [tg.asarray(rng.uniform(low, high, s).astype(dtype)) for s in shapes[: len(prim.operands)]]
    quick, general = both_ways(f, *xs)
    for a, b in zip(quick, general, strict=True):
        assert a.shape == b.shape and a.dtype == b.dtype
        assert np.array_equal(a.numpy(), b.numpy(), equal_nan=True)


def test_fan_out_and_broadcasting_accumulate(rng):
    x, w = tg.asarray(rng.normal(size=(3, 4))), tg.asarray(rng.normal(size=4))
    quick, general = both_ways(lambda x, w: tg.tanh(x * w) * x + tg.exp(w) * tg.sin(x) / (1 + w * w), x, w)
    assert all(np.array_equal(a.numpy(), b.numpy()) for a, b in zip(quick, general, strict=True))
    assert [g.shape for g in quick] == [(3, 4), (4,)]


def test_zero_dimensional_gradients_are_arrays():
    x = tg.constant(0.5)
    (g,), _ = both_ways(lambda x: tg.tanh(x) * x + x, x)
    assert isinstance(g, tg.Tensor) and g.shape == () and isinstance(g.numpy(), np.ndarray)


def test_a_path_through_some_operands_only():
    x, y = tg.constant([1.0, 2.0]), tg.constant([3.0, 4.0])
    with tg.GradientTape(persistent=True) as t:
        t.watch([x, y])
        z = x * y + y
    assert np.array_equal(t.gradient(z, x).numpy(), y.numpy())
    assert np.array_equal(t.gradient(z, y).numpy(), x.numpy() + 1)
