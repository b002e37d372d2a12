"""Every operation that HIPS autograd, PyTorch, JAX or Chainer differentiates: ours is checked, or named as left out."""

from __future__ import annotations

from pathlib import Path

import pytest
from table.coverage_table import text
from table.registry import CASES, LEFT_OUT, PEERS

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


@pytest.mark.parametrize("op", CASES)
def test_derivatives(op):
    found = CASES[op]
    leaves = found.leaves
    assert leaves, f"{op}: nothing to differentiate in"
    assert found.function(*leaves), f"{op}: no result to differentiate"
    check_grads(found.function, leaves, order=found.order, rtol=found.tol, atol=found.tol / 100)


def test_the_table_is_what_is_measured():
    written = TABLE.read_text(encoding="utf-8") if TABLE.exists() else ""
    assert written == text(CASES, LEFT_OUT, PEERS), (
        "bench/OPS.md is old: PYTHONPATH=tests python -m table.coverage_table"
    )
