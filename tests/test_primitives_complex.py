"""The table in complex128: TensorFlow's convention, checked as real functions of real and imaginary parts.

Functions of real numbers only (special functions, random numbers) are not here; nor are decompositions whose vectors
have a phase that nothing fixes (their own tests take what does not depend on it).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from test_primitives import call, differentiable, good_samples, operands, smooth_operands

import tapegrad as tg
from tapegrad.core.primitive import REGISTRY, Elementwise, Primitive, Reduction, Sample
from tapegrad.errors import TapegradError
from tapegrad.tensor import Tensor, from_array
from tapegrad.testing import check_grads

FREE_PHASE = {"svd", "eigh", "eig"}
REAL = {"sign"}  # of complex numbers it is complex_sign
PUBLIC = {f.primitive.name: f for f in vars(tg).values() if isinstance(getattr(f, "primitive", None), Primitive)}


def complex_operands(prim: Primitive, sample: Sample) -> tuple[list[np.ndarray], list[int]]:
    xs = operands(prim, sample, "float64")
    where, rng = smooth_operands(prim, xs), np.random.default_rng(0)
    return [x + 1j * rng.uniform(0.1, 0.5, x.shape) if i in where else x for i, x in enumerate(xs)], where


def takes_complex(prim: Primitive, sample: Sample) -> bool:
    where = "" if isinstance(prim, Reduction) else prim.impl.__module__
    if any(part in where for part in ("special", "random")) or prim.name in FREE_PHASE | REAL:
        return False
    xs, _ = complex_operands(prim, sample)
    try:
        with np.errstate(all="ignore"):
            if prim.name in PUBLIC and isinstance(prim, Elementwise):
                PUBLIC[prim.name](*xs)
            return call(prim, [from_array(x) for x in xs], sample.params).numpy() is not None
    except (TypeError, TapegradError):
        return False


TABLE = [
    pytest.param(prim, sample, id=f"{prim.name}-{number}")
    for prim in REGISTRY.values()
    for number, sample in enumerate(good_samples(prim))
    if differentiable(prim, sample) and takes_complex(prim, sample)
]


def test_the_table_is_not_thinned_out():
    assert len(TABLE) > 300
    names = {p.values[0].name for p in TABLE}
    assert names >= {"add", "multiply", "divide", "exp", "sqrt", "abs", "conj", "real", "imag", "matmul", "sum", "prod"}


@pytest.mark.sampled(1 / 4)
@pytest.mark.parametrize(("prim", "sample"), TABLE)
def test_derivatives_to_second_order(prim, sample):
    xs, where = complex_operands(prim, sample)

    def f(*smooth: Tensor) -> Any:
        full = [from_array(x) for x in xs]
        for i, x in zip(where, smooth, strict=True):
            full[i] = x
        return call(prim, full, sample.params)

    check_grads(f, [xs[i] for i in where], order=2)


def test_the_gradient_of_a_real_loss_is_the_conjugate_of_the_holomorphic_derivative():
    z = np.array([0.3 + 0.4j, -1.0 + 2j])
    found = tg.grad(lambda z: tg.sum(tg.real(z * z)))(z)
    np.testing.assert_allclose(found.numpy(), np.conj(2 * z))
    step = z - 1e-3 * found.numpy()  # against the gradient the loss falls
    assert np.sum((step * step).real) < np.sum((z * z).real)
