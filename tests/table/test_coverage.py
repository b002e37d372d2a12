"""Every operation that HIPS autograd, PyTorch, JAX or Chainer differentiates: ours is checked, or named as left out."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from table.coverage_table import VERSIONS, text
from table.registry import CASES, LEFT_OUT, PEERS

import tapegrad as tg
from tapegrad.errors import DryRunError
from tapegrad.testing import check_grads

TABLE = Path(__file__).parent.parent.parent / "bench" / "OPS.md"


def test_every_operation_of_the_peers_is_here_or_left_out_with_a_reason():
    missing = PEERS.keys() - CASES.keys() - LEFT_OUT.keys()
    assert not missing, f"{len(missing)} operations: {sorted(missing)}"
    assert not CASES.keys() & LEFT_OUT.keys()
    assert not (CASES.keys() | LEFT_OUT.keys()) - PEERS.keys()
    assert all(len(reason) > 10 for reason in LEFT_OUT.values())


def test_tiers_one_and_two_are_whole():
    assert not [op for op in LEFT_OUT if PEERS[op]["tier"] in "12"]


@pytest.mark.sampled(1 / 3)
@pytest.mark.parametrize("op", CASES)
def test_derivatives(op):
    found = CASES[op]
    leaves = found.leaves
    assert leaves, f"{op}: nothing to differentiate in"
    assert found.function(*leaves), f"{op}: no result to differentiate"
    check_grads(found.function, leaves, order=found.order, rtol=found.tol, atol=found.tol / 100)


LOOK_AT_VALUES = {
    "scipy.linalg.sqrtm",
    "polymul",
    "polydiv",
    "roots",
    "scipy.integrate.odeint",
}
"""Ranks, leading zeros, step sizes: what they do depends on values."""


@pytest.mark.sampled(1 / 3)
@pytest.mark.parametrize("op", CASES)
def test_batched_equals_one_by_one(op):
    found = CASES[op]
    many = [np.stack([x, x * 0.97]) for x in found.leaves]

    def f(*xs):
        return tuple(found.function(*xs))

    if op in LOOK_AT_VALUES:
        with pytest.raises(DryRunError, match="differs from example to example"):
            tg.vmap(f)(*many)
        return
    rows = [f(*(tg.asarray(x[i]) for x in many)) for i in range(2)]
    for got, *wanted in zip(tg.vmap(f)(*many), *rows, strict=True):
        np.testing.assert_allclose(got.numpy(), np.stack([w.numpy() for w in wanted]), rtol=1e-9, atol=1e-10)


def test_the_table_is_what_is_measured():
    written = TABLE.read_text(encoding="utf-8").splitlines() if TABLE.exists() else []
    found = text(CASES, LEFT_OUT, PEERS).splitlines()
    if f"  {VERSIONS}." not in written:  # other libraries may take other dtypes: that column is not compared
        written, found = ([line.split("|")[:8] + line.split("|")[9:] for line in lines] for lines in (written, found))
        written, found = ([line for line in lines if len(line) > 2] for lines in (written, found))
    assert written == found, "bench/OPS.md is old: PYTHONPATH=tests python -m table.coverage_table"
