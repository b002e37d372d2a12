"""Formulas of primitives as ufuncs in order."""

import numpy as np
import pytest

import tapegrad as tg
from tapegrad.core.primitive import REGISTRY, Elementwise
from tapegrad.engine.cpu.trace import Line, trace
from tapegrad.nn import functional as F

USED = (tg.sigmoid, tg.relu, tg.erf, tg.erfc, F.gelu, F.silu, F.mish, F.softplus, F.softsign)
FORMULAS = [p for p in REGISTRY.values() if isinstance(p, Elementwise) and p.formula is not None]


@pytest.mark.parametrize("char", "fd")
@pytest.mark.parametrize("prim", FORMULAS, ids=lambda p: p.name)
def test_lines_have_the_bits_of_the_formula(prim: Elementwise, char: str) -> None:
    dtype = np.dtype(char)
    lines = trace(prim.formula, (dtype,) * len(prim.operands))
    assert bool(lines) == ((prim.name, char) != ("erf", "d")), "regions cannot take it in"
    special = [0.0, -0.0, np.inf, -np.inf, np.nan, 1e30, -1e30, 1e-30, 1e-44]
    x = np.concatenate([np.linspace(-120, 120, 4001), np.linspace(-3, 3, 4001), special]).astype(dtype)
    values = [x] * len(prim.operands)
    with np.errstate(all="ignore"):
        for line in lines:
            values.append(line.ufunc(*(values[k] for k in line.reads)) if isinstance(line, Line) else line)
        expected = prim.formula(np, *values[: len(prim.operands)])
    if lines:
        assert values[-1].dtype == dtype
        assert values[-1].tobytes() == expected.tobytes()


def test_there_are_formulas() -> None:
    assert len(FORMULAS) >= 13


def test_what_is_more_than_ufuncs_has_no_lines() -> None:
    assert trace(lambda xp, x: x.cumsum(), (np.dtype("f4"),)) == ()
