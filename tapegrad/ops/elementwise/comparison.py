"""Comparison, logic, bits, rounding: functions that are not smooth.

Comparisons, logic and bits have no derivative (a tape does not follow them); rounding has derivative 0.
"""

from __future__ import annotations

from tapegrad.core.primitive import elementwise
from tapegrad.device import dtypes
from tapegrad.device.types import DType
from tapegrad.errors import DTypeError
from tapegrad.ops.dispatch import Binary, ToDType, Unary, binary, infer_bool, infer_same, named, no_bool, tensor, unary
from tapegrad.tensor import Tensor, TensorLike, identity_of


def _comparison(name: str, symbol: str, doc: str) -> Binary:
    return binary(elementwise(name, infer=infer_bool, operands=("x", "y"), cxx=f"{{x}} {symbol} {{y}}", doc=doc))


equal = _comparison("equal", "==", "Whether elements are equal (NaN equals nothing).")
not_equal = _comparison("not_equal", "!=", "Whether elements differ.")
less = _comparison("less", "<", "``x < y``.")
less_equal = _comparison("less_equal", "<=", "``x <= y``.")
greater = _comparison("greater", ">", "``x > y``.")
greater_equal = _comparison("greater_equal", ">=", "``x >= y``.")


def _to_bool(dtype: DType) -> DType:
    return dtypes.bool_


logical_and = binary(
    elementwise("logical_and", infer=infer_bool, operands=("x", "y"), cxx="{x} && {y}", doc="Both hold."), _to_bool
)
logical_or = binary(
    elementwise("logical_or", infer=infer_bool, operands=("x", "y"), cxx="{x} || {y}", doc="One holds."), _to_bool
)
logical_xor = binary(
    elementwise("logical_xor", infer=infer_bool, operands=("x", "y"), cxx="!{x} != !{y}", doc="One of the two holds."),
    _to_bool,
)
logical_not = unary(
    elementwise("logical_not", infer=infer_bool, operands=("x",), cxx="!{x}", doc="It does not hold."), _to_bool
)


def _bits(name: str, kinds: str = "biu") -> ToDType:
    def check(dtype: DType) -> DType:
        if dtype.kind not in kinds:
            raise DTypeError(f"{name}: needs integers{' or bools' if 'b' in kinds else ''}, got {dtype}")
        return dtype

    return check


def _bitwise(name: str, cxx: str, doc: str, ufunc: str | None = None) -> Binary:
    prim = elementwise(name, infer=infer_same, operands=("x", "y"), ufunc=ufunc, cxx=cxx, doc=doc)
    return binary(prim, _bits(name, "biu" if ufunc is None else "iu"))


bitwise_and = _bitwise("bitwise_and", "{x} & {y}", "Bits set in both.")
bitwise_or = _bitwise("bitwise_or", "{x} | {y}", "Bits set in either.")
bitwise_xor = _bitwise("bitwise_xor", "{x} ^ {y}", "Bits set in one of the two.")
bitwise_left_shift = _bitwise("bitwise_left_shift", "tg_shl({x}, {y})", "Bits moved left.", "left_shift")
bitwise_right_shift = _bitwise("bitwise_right_shift", "tg_shr({x}, {y})", "Bits moved right.", "right_shift")
bitwise_invert = unary(
    elementwise(
        "bitwise_invert", infer=infer_same, operands=("x",), ufunc="invert", cxx="tg_invert({x})", doc="Bits flipped."
    ),
    _bits("bitwise_invert"),
)


def _test(name: str, cxx: str, doc: str) -> Unary:
    return unary(elementwise(name, infer=infer_bool, operands=("x",), cxx=cxx, doc=doc))


isnan = _test("isnan", "tg_isnan({x})", "Whether elements are NaN.")
isinf = _test("isinf", "tg_isinf({x})", "Whether elements are infinite.")
isfinite = _test("isfinite", "tg_isfinite({x})", "Whether elements are neither NaN nor infinite.")
signbit = _test("signbit", "tg_signbit({x})", "Whether the sign bit is set (-0.0 has it).")


def _rounding(name: str, cxx: str, doc: str, ufunc: str | None = None) -> Unary:
    prim = elementwise(name, infer=lambda x: x, partials=[0], ufunc=ufunc, cxx=cxx, doc=doc)
    rounded = unary(prim, no_bool(name, ordered=name != "round"))

    def op(x: TensorLike) -> Tensor:
        t = tensor(name, x)
        # Integers are whole already, and NumPy's ufunc would make floats of them.
        return identity_of(t) if t.dtype.kind in "iu" else rounded(t)

    return named(op, prim, "x")


floor = _rounding("floor", "tg_floor({x})", "The next integer below; gradient 0.")
ceil = _rounding("ceil", "tg_ceil({x})", "The next integer above; gradient 0.")
trunc = _rounding("trunc", "tg_trunc({x})", "The next integer towards 0; gradient 0.")
round = _rounding("round", "tg_round({x})", "The nearest integer, halves to even; gradient 0.", "rint")
round.__name__ = round.__qualname__ = "rint"  # its public name; tapegrad.round takes decimals, too
