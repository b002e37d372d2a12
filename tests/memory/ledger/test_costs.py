"""Estimates of work: bytes moved, and arithmetic where it takes longer."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import tapegrad as tg
from tapegrad.core.aval import ShapedArray, shaped
from tapegrad.core.node import Node, leaf
from tapegrad.core.primitive import REGISTRY
from tapegrad.device import CPU
from tapegrad.memory.ledger.costs import FLOPS_PER_BYTE, cost_of, transfer_of


def aval(*shape: int) -> ShapedArray:
    return shaped(shape, np.dtype("float32"), CPU)


def node(name: str, value: ShapedArray, **params: Any) -> Node:
    tg.zeros(1)  # every operation is declared
    return Node(REGISTRY[name], params, value)


def test_what_is_in_a_tier_has_one_way_to_go_and_the_rest_two() -> None:
    assert transfer_of(100, there=False) == 2 * transfer_of(100, there=True) == 12_000


@pytest.mark.parametrize("made", [leaf(aval(4)), lambda: node("reshape", aval(4), shape=(4,))])
def test_what_has_no_bytes_of_its_own_costs_next_to_nothing(made: Any) -> None:
    assert cost_of(made if isinstance(made, Node) else made(), [aval(2, 2)]) == 1


def test_an_elementwise_value_costs_its_writing_and_a_barrier_what_it_reads_too() -> None:
    assert cost_of(node("tanh", aval(5)), [aval(5)]) == 1 + 20
    assert cost_of(node("sum", aval(), axis=(0,), keepdims=False), [aval(5)]) == 1 + 4 + 20


def test_a_product_costs_its_arithmetic() -> None:
    moved = 4 * (2 * 3 + 3 * 5 + 2 * 5)
    assert cost_of(node("matmul", aval(2, 5)), [aval(2, 3), aval(3, 5)]) == 1 + moved + 2 * 2 * 3 * 5 / FLOPS_PER_BYTE
