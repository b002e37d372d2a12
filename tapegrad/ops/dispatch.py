"""From what a user passes to primitives: conversion, promotion, and the short path of elementwise operations.

Operands of an elementwise primitive have one dtype: promotion (NumPy 2's; Python scalars are weak) becomes cast nodes.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from tapegrad import nest
from tapegrad.core.aval import ShapedArray, broadcast_shapes, shaped
from tapegrad.core.buffer import Buffer
from tapegrad.core.node import leaf
from tapegrad.core.primitive import Primitive, Site, elementwise
from tapegrad.device import Device, cuda_index, dtypes, phantom
from tapegrad.engine.evaluate import apply, apply_elementwise
from tapegrad.engine.region import runs_at_once
from tapegrad.errors import DeviceError, DTypeError, NotATensorError
from tapegrad.tensor import Tensor, convert, from_array, identity_of

SCALARS = (bool, int, float, complex)
_LONG = (dtypes.float64, dtypes.complex128)
_constants: dict[Any, Buffer] = {}
_MOST = 4096
_MOST_CONSTANTS = 256


def constant(value: Any, dtype: Any, device: Device) -> Buffer:
    """The shared 0-d buffer of a Python number."""
    key = (value if value else repr(value), type(value), dtype, device)  # 0.0 and -0.0 are equal but not the same
    found = _constants.get(key)
    if found is None:
        known = phantom.mode.constants if phantom.mode.dry else _constants
        found = known.get(key)
        if found is not None:
            return found
        if len(known) >= _MOST_CONSTANTS:
            known.clear()
        dtypes.scalar_fits(value, dtype)
        found = Buffer(device.constant(value, dtype), leaf(shaped((), dtype, device)))
        known[key] = found
    return found


def tensor(op: str, x: Any, beside: Tensor | None = None) -> Tensor:
    """``x`` as a tensor, on the device of ``beside`` if it has none.  Raises NotATensorError naming ``op``."""
    if type(x) is Tensor:
        return x
    try:
        if isinstance(x, (list, tuple)):
            return _sequence(x, beside)
        if beside is not None and not _is_lasting(x) and cuda_index(x) is None:
            return from_array(beside.device.array(x), beside.device)
        return convert(x)
    except NotATensorError as e:
        raise NotATensorError(f"{op}: {e}") from None


def _sequence(x: Any, beside: Tensor | None) -> Tensor:
    """A list or tuple: stacked, with gradients, if it holds tensors; its floats are as precise as ``beside``."""
    if any(_is_lasting(leaf) for leaf in nest.leaves(x)):
        from tapegrad.ops.create.creation import asarray  # built on this file

        return asarray(x)
    found = convert(x) if beside is None else from_array(beside.device.array(x), beside.device)
    return found if beside is None or beside.dtype not in _LONG else _in_full(x, found)


def infer_same(*avals: ShapedArray, name: str = "elementwise") -> ShapedArray:
    """Broadcast shapes; the dtype of the operands."""
    return shaped(broadcast_shapes(name, *(a.shape for a in avals)), avals[-1].dtype, avals[-1].device)


def infer_real(name: str) -> Callable[[ShapedArray], ShapedArray]:
    """The operand's, which must be real: ``name`` raises DTypeError for complex numbers."""

    def infer(x: ShapedArray) -> ShapedArray:
        if x.dtype.kind == "c":
            raise DTypeError(f"{name}: not defined for complex numbers, got {x.dtype}; take real or imag first")
        return x

    return infer


def infer_bool(*avals: ShapedArray, name: str = "comparison") -> ShapedArray:
    """Broadcast shapes; bool."""
    return infer_same(*avals, name=name).with_dtype(dtypes.bool_)


def _cast_rule(ct: Tensor, x_aval: ShapedArray) -> Tensor:
    if ct.dtype.kind == "c" and x_aval.dtype.kind != "c":
        from tapegrad.ops.elementwise.complex import real  # built on this file

        ct = real(ct)
    return cast(ct, x_aval.dtype)


def _cast_push(t: Tensor, out_aval: ShapedArray) -> Tensor:
    return cast(t, out_aval.dtype)


cast_p = elementwise(
    "cast",
    widens=False,
    infer=infer_same,  # of the shape; the front end gives the dtype
    impl=lambda xp, out, x: xp.copyto(out, x, casting="unsafe"),
    partials=[_cast_rule],
    jvp=[_cast_push],
    converts=True,
    cxx="tg_cast<{out_type}>({x})",
    doc="The value in another dtype.",
)


def cast(x: Tensor, dtype: Any) -> Tensor:
    """``x`` in ``dtype`` (the tensor itself if it has it); the cotangent is cast back."""
    aval = x._buffer.node.aval
    if aval.dtype == dtype:
        return x
    if aval.dtype.kind == "c" and dtype.kind != "c":
        raise DTypeError(f"astype: a cast from {aval.dtype} to {dtype} drops the imaginary part; use tg.real first")
    site = cast_p.memo.get((aval, dtype))
    if site is None:
        found = aval.with_dtype(dtype)
        site = cast_p.memo[aval, dtype] = Site(cast_p, (aval,), found, runs_at_once(found))
    return Tensor(apply_elementwise(cast_p, (x._buffer,), site))


def own(found: Tensor, *given: Any) -> Tensor:
    """``found``, a result; if it is one of the tensors ``given`` (nothing was to be done), a value of its own."""
    for x in given:
        if x is found:
            return identity_of(found)
    return found


def promote(
    op: str, xs: tuple[Any, ...], to: Callable[[Any], Any] | None = None, beside: Tensor | None = None
) -> tuple[Tensor, ...]:
    """``xs`` as tensors of one dtype, which ``to`` may raise further (integers to floats, say).

    Numbers alone come to the device of ``beside``.

    Raises NotATensorError, DTypeError and DeviceError, naming ``op``.
    """
    strong = [x if isinstance(x, SCALARS) and not hasattr(x, "dtype") else tensor(op, x) for x in xs]
    tensors = [x for x in strong if isinstance(x, Tensor)]
    if len(tensors) > 1 and any(t.device is not tensors[0].device for t in tensors):
        tensors = _beside(xs, strong)
    if not tensors:  # Python numbers only: the dtype that the widest kind of them becomes
        widest = max(range(len(xs)), key=lambda k: SCALARS.index(type(xs[k])))
        strong[widest] = tensor(op, xs[widest], beside)
        tensors = [strong[widest]]  # type: ignore[list-item]
    device = tensors[0].device
    on_one_device(op, tuple(t._buffer for t in tensors))
    dtype = tensors[0].dtype
    if len(xs) > 1:
        kinds = [x.dtype if isinstance(x, Tensor) else x for x in strong]
        if any(k is not dtype for k in kinds):
            try:
                dtype = dtypes.result_type(*kinds)
            except DTypeError as e:
                raise DTypeError(f"{op}: {e}") from None
    dtype = dtype if to is None else to(dtype)
    if dtype in _LONG and any(isinstance(x, (list, tuple)) for x in xs):
        strong = [_in_full(x, t) for x, t in zip(xs, strong, strict=True)]
    return tuple(cast(x, dtype) if isinstance(x, Tensor) else Tensor(constant(x, dtype, device)) for x in strong)


def _in_full(x: Any, t: Any) -> Any:
    """``t``, made of ``x``: of a list of Python floats, in float64 from the start, not rounded to float32 before."""
    short = isinstance(x, (list, tuple)) and t.dtype in (dtypes.float32, dtypes.complex64)
    if not short or any(_is_lasting(leaf) for leaf in nest.leaves(x)):
        return t
    return from_array(t.device.array(x, _LONG[t.dtype.kind == "c"]), t.device)


def on_one_device(op: str, buffers: tuple[Buffer, ...]) -> None:
    """Raises DeviceError naming ``op`` where operands lie on several devices."""
    device = buffers[0].node.aval.device
    for b in buffers:
        if b.node.aval.device is not device:
            raise DeviceError(f"{op}: operands on {device} and {b.node.aval.device}; move one with to_device")


def _beside(xs: tuple[Any, ...], strong: list[Any]) -> list[Tensor]:
    """The tensors of ``strong``, in which numbers of NumPy's move to the device of the others."""
    home = next((t.device for x, t in zip(xs, strong) if isinstance(t, Tensor) and _is_lasting(x)), None)
    if home is not None:
        for i, x in enumerate(xs):
            if isinstance(strong[i], Tensor) and not _is_lasting(x) and not strong[i].ndim:
                strong[i] = from_array(home.array(x), home)
    return [t for t in strong if isinstance(t, Tensor)]


def _is_lasting(x: Any) -> bool:
    """Whether ``x`` lies on a device of its own: a tensor or a variable."""
    return isinstance(x, Tensor) or hasattr(x, "ref")


def resolve(prim: Primitive, avals: Any) -> Site:
    """The site of ``prim`` for operands of ``avals`` (one aval, or a tuple of several): inferred once, then known."""
    found = prim.memo.get(avals)
    if found is None:
        if len(prim.memo) >= _MOST:
            prim.memo.clear()
        operands = avals if isinstance(avals, tuple) else (avals,)
        named = {"name": prim.name} if prim.infer in (infer_same, infer_bool) else {}
        aval = prim.infer(*operands, **named)
        found = prim.memo[avals] = Site(prim, operands, aval, runs_at_once(aval))
    return found


def bind(prim: Primitive, *xs: Tensor) -> Tensor:
    """Apply an elementwise primitive to tensors of one dtype (by its own rule of shapes)."""
    buffers = tuple(x._buffer for x in xs)
    on_one_device(prim.name, buffers)
    return Tensor(apply_elementwise(prim, buffers, resolve(prim, tuple(b.node.aval for b in buffers))))


def barrier(prim: Primitive, *xs: Tensor, **params: Any) -> Tensor:
    """Apply any other primitive to tensors."""
    buffers = tuple(x._buffer for x in xs)
    if len(buffers) > 1:
        on_one_device(prim.name, buffers)
    aval = prim.infer(*(b.node.aval for b in buffers), **params)
    return Tensor(apply(prim, buffers, params, aval))


def unary(
    prim: Primitive,
    to: Callable[[Any], Any] | None = None,
    *,
    narrow: Primitive | None = None,
    module: str = "tapegrad",
) -> Callable[[Any], Tensor]:
    """The public function of a one-operand elementwise primitive; ``to`` maps the dtype to compute in.

    ``narrow``: what does the same for half types, with rules that do not read the rounded result.  ``module``: where
    the function is public.
    """
    memo, name = prim.memo, prim.name

    def op(x: Any, /) -> Tensor:
        if type(x) is Tensor:
            buffer = x._buffer
            found = memo.get(buffer.node.aval)
            if found is not None:
                return Tensor(apply_elementwise(prim, (buffer,), found))
        (t,) = promote(name, (x,), to)
        aval = t._buffer.node.aval
        chosen = narrow if narrow is not None and aval.narrow else prim
        return Tensor(apply_elementwise(chosen, (t._buffer,), resolve(chosen, aval)))

    return named(op, prim, "x", module)


def binary(prim: Primitive, to: Callable[[Any], Any] | None = None) -> Callable[[Any, Any], Tensor]:
    """The public function of a two-operand elementwise primitive; ``to`` maps the promoted dtype to compute in.

    Its attribute ``operator`` does the same as an operator's method: it answers a foreign operand NotImplemented.
    """
    op: Any = named(_binary(prim, to, False), prim, "x, y")
    op.operator = named(_binary(prim, to, True), prim, "x, y")
    return op


def _binary(prim: Primitive, to: Callable[[Any], Any] | None, polite: bool) -> Callable[[Any, Any], Any]:
    memo, name = prim.memo, prim.name

    def op(x: Any, y: Any, /) -> Any:
        if type(x) is Tensor:
            bx = x._buffer
            if type(y) is Tensor:
                by = y._buffer
                found = memo.get((bx.node.aval, by.node.aval))
                if found is not None:
                    return Tensor(apply_elementwise(prim, (bx, by), found))
            elif (type(y) is float or type(y) is int) and bx.node.aval.smooth:
                by = constant(y, bx.node.aval.dtype, bx.node.aval.device)
                found = memo.get((bx.node.aval, by.node.aval))
                if found is not None:
                    return Tensor(apply_elementwise(prim, (bx, by), found))
        elif type(y) is Tensor and (type(x) is float or type(x) is int) and y._buffer.node.aval.smooth:
            by = y._buffer
            bx = constant(x, by.node.aval.dtype, by.node.aval.device)
            found = memo.get((bx.node.aval, by.node.aval))
            if found is not None:
                return Tensor(apply_elementwise(prim, (bx, by), found))
        try:
            tx, ty = promote(name, (x, y), to)
        except NotATensorError:
            if polite:
                return NotImplemented
            raise
        bx, by = tx._buffer, ty._buffer
        return Tensor(apply_elementwise(prim, (bx, by), resolve(prim, (bx.node.aval, by.node.aval))))

    return op


def no_bool(name: str, ordered: bool = False) -> Callable[[Any], Any]:
    """For ``unary`` and ``binary``: the dtype itself, if it is not bool (and, ``ordered``, not complex)."""

    def check(dtype: Any) -> Any:
        if dtype.kind == "b":
            raise DTypeError(f"{name}: not defined for bool; use logical_xor or astype")
        if ordered and dtype.kind == "c":
            raise DTypeError(f"{name}: not defined for complex numbers; take real or imag first")
        return dtype

    return check


def real_float(name: str) -> Callable[[Any], Any]:
    """For ``unary``: the float dtype in which to compute; complex numbers are refused."""

    def check(dtype: Any) -> Any:
        if dtype.kind == "c":
            raise DTypeError(f"{name}: not defined for complex numbers; take real or imag first")
        return dtypes.in_float(dtype)

    return check


def named(op: Callable, prim: Primitive, arguments: str, module: str = "tapegrad") -> Callable:
    """Give a made function its name, documentation and the public module in which it is found (by pickle, too)."""
    op.__module__, op.__name__, op.__qualname__ = module, prim.name, prim.name
    op.__doc__ = f"{prim.doc}\n\n{arguments}: tensors, arrays or numbers, broadcast against each other."
    op.primitive = prim  # type: ignore[attr-defined]
    return op


def in_float32(f: Callable[..., Tensor], beside: tuple[str, ...] = ()) -> Callable[..., Tensor]:
    """``f``, a function known by one name that is made of several operations; of half types it computes in float32.

    Its result is rounded once, and so is each derivative, since rules of float32 apply inside.  ``beside``: names of
    arguments that are left alone and have no say in the result's dtype.
    """
    signature = inspect.signature(f) if beside else None

    @functools.wraps(f)
    def op(*args: Any, **kwargs: Any) -> Tensor:
        apart = {}
        if signature is not None:
            kwargs = signature.bind(*args, **kwargs).arguments
            args, apart = (), {name: kwargs.pop(name) for name in beside if name in kwargs}
        given = [x for x in (*args, *kwargs.values()) if hasattr(x, "dtype")]
        kinds = {x.dtype for x in given if dtypes.is_inexact(x.dtype)}
        if not any(dtypes.accumulator(kind) != kind for kind in kinds):
            return f(*args, **kwargs, **apart)

        def wide(x: Any) -> Any:
            kind = getattr(x, "dtype", None)
            if kind is None or dtypes.accumulator(kind) == kind:
                return x
            return cast(tensor(f.__name__, x), dtypes.float32)

        found = f(*map(wide, args), **{name: wide(x) for name, x in kwargs.items()}, **apart)
        return cast(found, kinds.pop()) if len(kinds) == 1 else found

    return op
