"""Every operation of the table, fed every dtype, gives a right value or raises DTypeError.

Right is the value of float64 (complex128) arithmetic on the same numbers, or NumPy's or SciPy's for the dtype: integers
wrap around in sums and differences, and bools add up to bools.
"""

from __future__ import annotations

import pkgutil
import warnings
from collections.abc import Callable, Iterator

import ml_dtypes
import numpy as np
import pytest
from table.coverage_case import Case
from table.registry import CASES

import tapegrad as tg
from tapegrad import nest
from tapegrad.errors import DTypeError

DTYPES = {
    **{name: np.dtype(name) for name in ("bool", "float16", "float32", "float64", "complex64", "complex128")},
    **{f"{sign}int{bits}": np.dtype(f"{sign}int{bits}") for sign in ("", "u") for bits in (8, 16, 32, 64)},
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
}
TOLERANCES = {"bool": 0.02, "int8": 0.02, "uint8": 0.02, "float16": 0.02, "bfloat16": 0.1}
"""Relative, and absolute, for input of these dtypes; integers of 8 bits are computed in float16, as by NumPy."""
OTHER_VALUES = {
    "nn.gumbel_softmax": "its draws depend on the dtype",
    "scipy.integrate.odeint": "the case's right-hand side negates an unsigned integer",
    "fill_diagonal": "its number takes the array's dtype, as in NumPy's, which changes its argument",
    **dict.fromkeys(["linalg.eigh", "linalg.eigvalsh", "scipy.linalg.cho_solve"], "the case adds up bools"),
}
"""Operations whose values cannot be compared, with the reason."""


def operands(case: Case, dtype: np.dtype) -> list[np.ndarray]:
    """The case's arrays in a dtype; unsigned integers are near both ends of uint8."""
    if dtype.kind == "b":
        return [x > 0.5 for x in case.leaves]
    if dtype.kind in "iu":
        whole = [np.rint(x * 3.3).astype("int64") for x in case.leaves]
        return [(x & 255 if dtype.kind == "u" else x).astype(dtype) for x in whole]
    return [x.astype(dtype) for x in case.leaves]


def values(case: Case, function: Callable, arrays: list[np.ndarray], wrap: Callable = tg.asarray) -> list[np.ndarray]:
    """The results of ``function`` for the case's arguments, with ``arrays`` in the places of its arrays."""
    given = iter(arrays)
    floats = {id(x) for x in case.leaves}
    args = nest.map_leaves(lambda x: wrap(next(given)) if id(x) in floats else x, case.args)
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        return [np.asarray(leaf) for leaf in nest.leaves(function(*args, **case.kwargs))]


def references(op: str, case: Case, arrays: list[np.ndarray]) -> Iterator[list[np.ndarray]]:
    """Results that are right, as far as there are any."""
    wide = [x.astype("complex128" if x.dtype.kind == "c" else "float64") for x in arrays]
    try:
        exact = values(case, case.call or case.target(), wide)
    except Exception:  # numbers outside of its domain
        return
    yield exact
    yield [x.astype(bool) for x in exact]
    if case.call is None and wide[0].dtype == "float64":
        try:
            peer = pkgutil.resolve_name(op if op.startswith("scipy.") else f"numpy.{op}")
            yield values(case, peer, arrays, lambda x: x)
        except Exception:  # there is no such function, or not of these dtypes
            return


def agree(ours: list[np.ndarray], right: list[np.ndarray], tolerance: float) -> bool:
    """Whether all values agree where the right one is finite."""

    def same(a: np.ndarray, b: np.ndarray) -> bool:
        a, b = (x.astype("complex128") for x in (a, b))
        finite = np.isfinite(b)
        return a.shape == b.shape and np.allclose(a[finite], b[finite], rtol=tolerance, atol=tolerance)

    return len(ours) == len(right) and all(map(same, ours, right))


@pytest.mark.sampled(1 / 4)
@pytest.mark.parametrize("op", [op for op in CASES if op not in OTHER_VALUES])
def test_an_operation_is_right_for_a_dtype_or_refuses_it(op: str) -> None:
    case, wrong = CASES[op], {}
    for name, dtype in DTYPES.items():
        if dtype.kind != "c" and any(x.dtype.kind == "c" for x in case.leaves):
            continue
        arrays = operands(case, dtype)
        right = list(references(op, case, arrays))
        try:
            ours = values(case, case.call or case.target(), arrays)
        except DTypeError:
            continue
        except Exception as error:
            if right:
                wrong[name] = error
            continue
        if not any(agree(ours, one, TOLERANCES.get(name, 1e-4)) for one in right):
            wrong[name] = (ours, right)
    assert not wrong
