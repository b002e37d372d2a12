"""Every function of the table: derivatives to second order, single precision."""

from __future__ import annotations

import numpy as np
import pytest
from nn_cases import CASES, Case

import tapegrad as tg
from tapegrad.nn import functional as F
from tapegrad.testing import check_grads

KINKED = {"rtol": 1e-3, "atol": 1e-5}


def total(case: Case, *operands: tg.Tensor) -> tg.Tensor:
    """All results of floats in one vector, through a curve, so that second derivatives are not trivial."""
    found = [y for y in case.call(F, operands) if y.dtype.kind == "f"]
    return tg.concat([tg.reshape(tg.sin(y), (-1,)) for y in found])


TRUE = [case for case in CASES if not case.options.get("scale_grad_by_freq")]  # what that gives is no derivative


@pytest.mark.sampled(1 / 3)
@pytest.mark.parametrize("case", TRUE, ids=str)
def test_derivatives_to_second_order(case: Case) -> None:
    check_grads(lambda *xs: total(case, *xs), case.operands(), order=2, eps=1e-6, **KINKED)


@pytest.mark.sampled(1 / 3)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_single_precision(case: Case) -> None:
    double = case.call(F)
    single = case.call(F, convert=lambda a: a.astype("float32") if a.dtype == np.float64 else a)
    for a, b in zip(single, double, strict=True):
        assert a.dtype == (np.float32 if b.dtype == np.float64 else b.dtype)
        np.testing.assert_allclose(a.numpy(), b.numpy(), rtol=2e-4, atol=2e-5)


def test_every_function_of_the_table_is_public() -> None:
    names = {case.name for case in CASES}
    assert names <= set(F.__all__)
    assert len(F.__all__) == len(set(F.__all__))
