"""Formulas as the steps they take: which ufuncs, of which values, in order."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

from tapegrad.device import CPU
from tapegrad.device.types import Array, DType

_XP = CPU.xp


class Line(NamedTuple):
    """A ufunc of values by their numbers, and its result's dtype."""

    ufunc: Any
    reads: tuple[int, ...]
    dtype: DType


@lru_cache(4096)
def trace(formula: Callable[..., Any], dtypes: tuple[DType, ...]) -> tuple[Line | Array, ...]:
    """Return what ``formula`` does to operands of ``dtypes``, step by step; empty if it is more than ufuncs.

    Values are numbered: operands, then what is returned here, lines and constants (arrays without axes) in order.  The
    last line is the result.
    """
    lines: list[Line | Array] = []
    values = [_Value(lines, len(dtypes), i, dtype) for i, dtype in enumerate(dtypes)]
    try:
        formula(_XP, *values)
    except AttributeError:  # a method of arrays
        return ()
    return tuple(lines)


class _Value(_XP.lib.mixins.NDArrayOperatorsMixin):  # type: ignore[name-defined]
    """An operand or a result while a formula is traced."""

    def __init__(self, lines: list[Line | Array], operands: int, number: int, dtype: DType) -> None:
        self._lines, self._operands, self._number, self.dtype = lines, operands, number, dtype

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **keywords: Any) -> Any:
        """Add a line; a number takes the dtype that the ufunc wants of it."""
        if method != "__call__" or keywords:
            return NotImplemented
        *reads, result = ufunc.resolve_dtypes((*(getattr(x, "dtype", type(x)) for x in inputs), None))
        numbers = tuple(map(self._number_of, inputs, reads))
        return self._added(Line(ufunc, numbers, result), result)

    def _number_of(self, x: Any, dtype: DType) -> int:
        if isinstance(x, _Value):
            return x._number
        constant = _XP.asarray(x, dtype)
        constant.setflags(write=False)
        return self._added(constant, dtype)._number

    def _added(self, line: Line | Array, dtype: DType) -> _Value:
        self._lines.append(line)
        return _Value(self._lines, self._operands, self._operands + len(self._lines) - 1, dtype)
