"""Casts: the one that a user asks for, and those that promotion or an autocast makes of operands.

Here, and nowhere else, is it asked whether an autocast is in force (``tg.autocast``), and how float32 products are
made (``tg.set_float32_matmul_precision``): an operation names itself and passes its operands, and gets them in the
dtype that ``precision.py`` says.  What is cast is an ordinary node, so that derivatives, fusion, budgets and captured
steps see it like any other; the backward walk has the dtypes of the forward pass, and no autocast of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tapegrad.core import state
from tapegrad.core.aval import ShapedArray
from tapegrad.core.primitive import Elementwise, Site, elementwise
from tapegrad.core.state import thread
from tapegrad.device import dtypes
from tapegrad.device.numerics import elements
from tapegrad.device.types import DType
from tapegrad.engine.region import runs_at_once
from tapegrad.errors import DTypeError
from tapegrad.ops import precision
from tapegrad.ops.apply import bind, elementwise_on, infer_same
from tapegrad.tensor import Tensor, convert
from tapegrad.variable import Variable


def _cast_rule(ct: Tensor, x_aval: ShapedArray) -> Tensor:
    if ct.dtype.kind == "c" and x_aval.dtype.kind != "c":
        ct = bind(real_p, ct)
    return cast(ct, x_aval.dtype)


cast_p = elementwise(
    "cast",
    widens=False,
    infer=infer_same,  # of the shape; the front end gives the dtype
    impl=elements.convert,
    partials=[_cast_rule],
    jvp=[lambda t, out_aval: cast(t, out_aval.dtype)],
    converts=True,
    cxx="tg_cast<{out_type}>({x})",
    doc="The value in another dtype.",
)


real_p: Elementwise = elementwise(
    "real",
    widens=False,
    infer=lambda x: x.with_dtype(dtypes.real_of(x.dtype)),
    impl=lambda xp, out, x: xp.copyto(out, x.real),
    partials=[lambda ct, x_aval: cast(ct, x_aval.dtype)],
    jvp=[lambda t: bind(real_p, t)],
    operands=("x",),
    cxx="tg_real({x})",
    doc="Real part.",
)


def cast(x: Tensor, dtype: DType) -> Tensor:
    """Return ``x`` in ``dtype`` (the tensor itself if it has it); the cotangent is cast back.

    Complex numbers become bool (True where not 0), but never real numbers.  Raises DTypeError.
    """
    aval = x._buffer.node.aval
    if aval.dtype == dtype:
        return x
    if aval.dtype.kind == "c" and dtype.kind not in "cb":
        raise DTypeError(f"astype: a cast from {aval.dtype} to {dtype} drops the imaginary part; use tg.real first")
    site = cast_p.memo.get((aval, dtype))
    if site is None:
        wanted = aval.with_dtype(dtype)
        site = cast_p.memo[aval, dtype] = Site(cast_p, (aval,), wanted, runs_at_once(wanted))
    return Tensor(elementwise_on(cast_p, (x._buffer,), site))


def by_policy(op: str, xs: Sequence[Any]) -> tuple[Any, ...]:
    """Operands of ``op``, tensors and variables among them in the dtype that the autocast in force gives them.

    Without one, and for an operation that the policy does not name, they are as they came.
    """
    autocasts = thread.autocasts
    if not autocasts or autocasts[-1] is None or op not in precision.NAMED:
        return tuple(xs)
    tensors = [convert(x) if isinstance(x, Variable) else x for x in xs]
    wanted = precision.wanted(op, autocasts[-1], [x.dtype for x in tensors if isinstance(x, Tensor)])
    if wanted is None:
        return tuple(tensors)
    return tuple(cast(x, wanted) if isinstance(x, Tensor) and x.dtype in precision.NARROW else x for x in tensors)


def rounds_products(dtype: DType) -> bool:
    """Whether products of ``dtype`` round their operands (see ``set_float32_matmul_precision``)."""
    return (thread.precision or state.chosen[0]) == "high" and dtype == dtypes.float32


def in_float32_by_policy(op: str) -> bool:
    """Whether an autocast is in force, and says that ``op`` is computed in float32 and gives it."""
    autocasts = thread.autocasts
    return bool(autocasts) and autocasts[-1] is not None and op in precision.FLOAT32
