"""Declarations: what a rule may keep, and which are refused."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

import tapegrad as tg
from tapegrad.core import primitive
from tapegrad.core.aval import ShapedArray, shaped
from tapegrad.core.primitive import REGISTRY, Linearity, elementwise, general, linear
from tapegrad.device import CPU

F32 = np.dtype("float32")


@pytest.fixture(autouse=True)
def registry(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    tg.zeros(1)  # every operation is declared
    monkeypatch.setattr(primitive, "REGISTRY", dict(REGISTRY))
    yield


def same(*avals: ShapedArray) -> ShapedArray:
    return avals[0]


def test_no_linear_rule_keeps_what_the_operation_is_linear_in() -> None:
    found = [prim for prim in REGISTRY.values() if prim.is_linear]
    assert len(found) > 10
    for prim in found:
        rule = prim.rule(0)
        assert rule is not None
        assert 0 not in rule.slots_of(1) and (prim.linearity is not Linearity.ALL or rule.slots_of(3) == ()), prim


def test_a_linear_rule_reads_the_operands_behind_the_first_and_has_the_aval_of_that() -> None:
    prim = linear("scaled", impl=lambda xp, x, by: x * by, infer=same, transpose=lambda ct, x, by: (ct, x, by))
    rule = prim.rule(0)
    assert rule is not None and rule.slots == (1,) and prim.rule(1) is None
    aval = shaped((2,), F32, CPU)
    assert rule("ct", {1: "by"}, [aval, aval, aval], {}, 0) == ("ct", aval, "by")


def test_a_name_is_declared_once() -> None:
    elementwise("frobnicate", infer=same, partials=(1,))
    with pytest.raises(ValueError, match="'frobnicate' is declared twice"):
        elementwise("frobnicate", infer=same, partials=(1,))


def test_only_a_reduction_needs_no_function() -> None:
    with pytest.raises(KeyError, match="reduce"):
        general("frobnicate", infer=same)
    with pytest.raises(TypeError, match="reduce"):
        general("frobnicate", infer=same, impl=lambda xp, x: x, reduce="add")
    with pytest.raises(TypeError, match="copies"):
        general("frobnicate", infer=same, impl=lambda xp, x: x, copies=True)
