"""The table of every primitive, batched: what ``vmap`` and ``jacobian`` do at once equals what is done one by one."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from test_primitives import call, differentiable, good_samples, operands, smooth_operands, takes

import tapegrad as tg
from tapegrad.core.primitive import REGISTRY, Elementwise, Primitive, Sample
from tapegrad.tensor import Tensor, from_array

N = 3
TABLE = [
    pytest.param(p, s, id=f"{p.name}-{k}")
    for p in REGISTRY.values()
    for k, s in enumerate(good_samples(p))
    if s.operands or isinstance(p, Elementwise)
]


def examples(prim: Primitive, sample: Sample) -> list[np.ndarray]:
    """For each operand ``N`` examples: its numbers, a little larger and smaller (so a matrix keeps its properties)."""
    dtype = next(d for d in ("float64", "int64", "bool") if takes(prim, d))
    found = []
    for x in operands(prim, sample, dtype):
        whole = x.dtype.kind != "f" or np.array_equal(x, np.round(x))  # an order, an index
        factors = np.ones(N) if whole else np.array([1.0, 0.95, 1.03])
        found.append(x * factors.reshape(N, *(1,) * x.ndim).astype(x.dtype))
    return found


def close(got: Any, wanted: Any, what: str) -> None:
    got, wanted = np.asarray(got), np.asarray(wanted)
    assert (got.shape, got.dtype) == (wanted.shape, wanted.dtype), what
    if wanted.dtype.kind in "fc":
        np.testing.assert_allclose(got, wanted, rtol=1e-11, atol=1e-12, err_msg=what)
    else:
        assert np.array_equal(got, wanted), what


@pytest.mark.sampled(1 / 3)
@pytest.mark.parametrize(("prim", "sample"), TABLE)
def test_batched_equals_one_by_one(prim, sample):
    many = examples(prim, sample)
    for mask in itertools.product((False, True), repeat=len(many)):
        if not any(mask):
            continue

        def f(*xs: Tensor) -> Tensor:
            return call(prim, xs, sample.params)

        given = [xs if batch else from_array(xs[0]) for xs, batch in zip(many, mask, strict=True)]
        got = tg.vmap(f, in_axes=[0 if batch else None for batch in mask])(*given)
        wanted = [
            f(*(from_array(xs[i] if batch else xs[0]) for xs, batch in zip(many, mask, strict=True))).numpy()
            for i in range(N)
        ]
        close(got.numpy(), np.stack(wanted), f"{prim.name}, batched operands {mask}")


@pytest.mark.parametrize("name", ["pool_take", "pool_put"])
def test_an_operation_linear_in_its_first_operand_takes_all_examples_of_that_at_once(name):
    """The other operand, which is not linear, is the same for all; else the examples run one by one."""
    prim = REGISTRY[name]
    sample = good_samples(prim)[0]
    first, second = map(from_array, examples(prim, sample))
    for xs, mask, times in (((first, second[0]), (0, None), 1), ((first[0], second), (None, 0), N)):
        with tg.measure() as measured:
            tg.vmap(lambda *xs: call(prim, xs, sample.params), in_axes=mask)(*xs)
        assert measured.nodes_run[name] == 1 + times  # once to see what is done


@pytest.mark.sampled(1 / 3)
@pytest.mark.parametrize(
    ("prim", "sample"), [p for p in TABLE if differentiable(*p.values)]
)  # what `jacobian` does with many cotangents at once
def test_rows_of_a_jacobian_equal_single_cotangents(prim, sample):
    xs = operands(prim, sample, "float64")
    where = smooth_operands(prim, xs)

    def f(*smooth: Tensor) -> Tensor:
        full = [from_array(x) for x in xs]
        for i, x in zip(where, smooth, strict=True):
            full[i] = x
        return call(prim, full, sample.params)

    smooth = [xs[i] for i in where]
    found = tg.jacobian(f, argnums=tuple(range(len(where))))(*smooth)
    y, pull = tg.vjp(f, *smooth)
    basis = np.eye(y.size, dtype=y.dtype).reshape(y.size, *y.shape)
    rows = [pull(tg.asarray(ct)) for ct in basis[:: max(1, y.size // 4)]]
    for k, jacobian in enumerate(found):
        got = jacobian.numpy().reshape(y.size, *smooth[k].shape)[:: max(1, y.size // 4)]
        for a, b in zip(got, rows, strict=True):
            close(a, b[k].numpy(), f"{prim.name}, cotangent of operand {where[k]}")
