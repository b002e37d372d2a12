"""Declarations: what a rule may keep, and which rules may run on bare arrays."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

import tapegrad as tg
from tapegrad.core import primitive
from tapegrad.core.aval import ShapedArray, shaped
from tapegrad.core.primitive import (
    REGISTRY,
    Drawn,
    Elementwise,
    Identity,
    Linearity,
    Opaque,
    Primitive,
    Reduction,
    Site,
    View,
    elementwise,
    general,
    linear,
)
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


@pytest.mark.parametrize(("partial", "small", "quick"), [(1, True, True), (1, False, False), (None, True, False)])
def test_rules_of_small_values_alone_run_on_bare_arrays(partial: int | None, small: bool, quick: bool) -> None:
    """Those of large values share kernels, and where a rule is lacking the general way says so."""
    prim = elementwise("frobnicate", infer=same, partials=(partial,), ufunc="negative")
    aval = shaped((2,), F32, CPU)
    plans = Site(prim, (aval,), aval, small).plans
    assert plans is not None and [plan.quick for plan in plans[1:]] == [quick]


def test_the_least_block_of_the_pool_is_worth_one() -> None:
    prim = elementwise("frobnicate", infer=same, partials=(1,), ufunc="negative")
    least = CPU.least_pooled // F32.itemsize
    sites = [Site(prim, (aval,), aval, True) for aval in (shaped((n,), F32, CPU) for n in (least - 1, least))]
    assert [site.pooled for site in sites] == [False, True]
    assert [site.direct for site in sites] == [np.negative, None], "the ufunc alone would take memory of its own"
    number = shaped((), F32, CPU)
    assert Site(prim, (number,), number, True).direct is None, "it would give a scalar"
    assert type(CPU.empty((least,), F32).base) is not type(CPU.empty((least - 1,), F32).base)


@pytest.mark.parametrize(
    ("name", "kind", "linearity", "given"),
    [
        ("tanh", Elementwise, Linearity.NONE, (True, True)),
        ("identity", Identity, Linearity.NONE, (True, True)),
        ("reshape", View, Linearity.FIRST, (False, False)),
        ("sum", Reduction, Linearity.FIRST, (False, False)),
        ("prod", Reduction, Linearity.NONE, (False, False)),
        ("random_uniform", Drawn, Linearity.NONE, (False, False)),
        ("matmul", Opaque, Linearity.EACH, (True, True)),
        ("concat", Opaque, Linearity.ALL, (True, True)),
        ("last_place", Opaque, Linearity.NONE, (False, True)),
    ],
)
def test_a_declaration_is_of_the_class_that_its_fields_ask_for(
    name: str, kind: type[Primitive], linearity: Linearity, given: tuple[bool, bool]
) -> None:
    """``given``: arrays to write are made for what says that it takes them, and on CUDA for kernels of its own."""
    prim = REGISTRY[name]
    assert type(prim) is kind and prim.linearity is linearity and prim.given == given
    assert prim.view == (kind in (View, Identity)) and repr(prim) == f"<{kind.__name__.lower()} primitive {name}>"


def test_only_a_reduction_needs_no_function() -> None:
    with pytest.raises(KeyError, match="reduce"):
        general("frobnicate", infer=same)
    with pytest.raises(TypeError, match="reduce"):
        general("frobnicate", infer=same, impl=lambda xp, x: x, reduce="add")
    with pytest.raises(TypeError, match="copies"):
        general("frobnicate", infer=same, impl=lambda xp, x: x, copies=True)


def test_what_a_library_computes_lies_where_it_is_asked_for() -> None:
    x, aval = np.arange(6, dtype=F32).reshape(2, 3), shaped((2,), F32, CPU)
    assert REGISTRY["sum"].compute(np, [x], {"axis": (1,)}, aval, None).tolist() == [3.0, 12.0]
    kept = REGISTRY["sum"].compute(np, [x], {"axis": (1,), "keepdims": True}, aval, None)
    assert kept.tolist() == [[3.0], [12.0]]
    out = np.empty((2, 2), F32)
    assert REGISTRY["matmul"].compute(np, [x, x.T], {}, shaped((2, 2), F32, CPU), out) is out
    assert out.tolist() == (x @ x.T).tolist()
    small = np.empty((2, 3), F32)
    assert REGISTRY["negative"].compute(np, [x], {}, shaped((2, 3), F32, CPU), small) is small
    assert small.tolist() == (-x).tolist()


def test_a_dry_run_has_what_the_declaration_says_or_what_its_kernels_are_given() -> None:
    """Of the operation itself nothing runs."""
    done: list[str] = []
    impl = lambda xp, x: done.append("impl")
    cuda = lambda device, x, by, out: done.append(f"cuda {device} {x} {by} {out}")
    kernels = general("frobnicate", infer=same, impl=impl, cuda=cuda)
    assert kernels.follow("gpu", ["x"], {"by": 2}, "out") == "out" and done == ["cuda gpu x 2 out"]
    said = general("told", infer=same, impl=impl, cuda=cuda, dry=lambda x, by, out: (x, by, out))
    assert said.follow("gpu", ["x"], {"by": 2}, "out") == ("x", 2, "out") and len(done) == 1
