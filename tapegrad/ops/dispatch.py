"""From what a user passes to primitives: conversion, promotion, and the short path of elementwise operations.

Operands of an elementwise primitive have one dtype: promotion (NumPy 2's; Python scalars are weak) becomes cast nodes.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ParamSpec, TypeVar

from tapegrad import nest
from tapegrad.core.aval import ShapedArray, normalize_axis, shaped
from tapegrad.core.buffer import Buffer
from tapegrad.core.node import NO_PARAMS, Node, leaf, next_index
from tapegrad.core.primitive import Elementwise, Primitive, elementwise
from tapegrad.core.state import during, thread
from tapegrad.device import CPU, Device, asdevice, cuda_index, current_device, dtypes
from tapegrad.device.types import DType
from tapegrad.errors import DTypeError, NotATensorError, ShapeError
from tapegrad.ops.apply import barrier, elementwise_on, infer_same, on_one_device, resolve
from tapegrad.ops.apply import bind as bind  # for files that declare primitives
from tapegrad.ops.apply import infer_bool as infer_bool
from tapegrad.ops.apply import infer_real as infer_real
from tapegrad.ops.casting import by_policy, cast, in_float32_by_policy
from tapegrad.ops.casting import cast_p as cast_p
from tapegrad.ops.precision import NAMED
from tapegrad.ops.shape.blocks import concat_p, reshaped
from tapegrad.tensor import DTypeLike, Tensor, TensorLike, convert, device_of, identity_of, is_handle, operand, upload
from tapegrad.variable import Variable

P = ParamSpec("P")
R = TypeVar("R")
Unary = Callable[[TensorLike], Tensor]
"""The public function of a primitive of one operand."""
Binary = Callable[[TensorLike, TensorLike], Tensor]
"""That of two."""
ToDType = Callable[[DType], DType]
"""From the dtype to which operands promote to the dtype to compute in."""
Strong = Tensor | complex
"""An operand whose dtype counts in a promotion, or a Python number, whose dtype does not."""
SCALARS = (bool, int, float, complex)
_LONG = (dtypes.float64, dtypes.complex128)
_MOST_CONSTANTS = 256
_new = object.__new__


def constant(value: complex, dtype: DType, device: Device) -> Buffer:
    """The shared 0-d buffer of a Python number."""
    key = (value, "" if value else repr(value), type(value), dtype, device)  # 0.0 and -0.0 are equal but not the same
    known = thread.executor.constants
    buffer = known.get(key)
    if buffer is None:
        if len(known) >= _MOST_CONSTANTS:
            known.clear()
        dtypes.scalar_fits(value, dtype)
        buffer = known[key] = Buffer(device.constant(value, dtype), leaf(shaped((), dtype, device)))
    return buffer


def tensor(op: str, x: TensorLike | Sequence[TensorLike], beside: Tensor | None = None) -> Tensor:
    """``x`` as a tensor, on the device of ``beside`` if it has none.  Raises NotATensorError naming ``op``."""
    if thread.autocasts and op in NAMED:
        return by_policy(op, (x if type(x) is Tensor else _converted(op, x, beside),))[0]
    return x if type(x) is Tensor else _converted(op, x, beside)


def _converted(op: str, x: TensorLike | Sequence[TensorLike], beside: Tensor | None = None) -> Tensor:
    try:
        if isinstance(x, (list, tuple)):
            return _sequence(x, beside)
        if beside is not None and not is_handle(x) and cuda_index(x) is None:
            return operand(x, beside.device)
        return convert(x)
    except NotATensorError as e:
        raise NotATensorError(f"{op}: {e}") from None


def ordered(op: str, x: TensorLike) -> Tensor:
    """``x`` as a tensor whose elements have an order.  Raises DTypeError for complex numbers."""
    t = tensor(op, x)
    if t.dtype.kind == "c":
        raise DTypeError(f"{op}: complex numbers have no order; take abs, real or imag first")
    return t


def sortable(x: Tensor) -> Tensor:
    """Return ``x``, in float32 where it has a dtype of which NumPy's sorts do not put NaN last (bfloat16)."""
    return cast(x, dtypes.float32) if dtypes.is_extended(x.dtype) else x


def _sequence(x: Sequence[TensorLike], beside: Tensor | None) -> Tensor:
    """A list or tuple: stacked, with gradients, if it holds tensors; its floats are as precise as ``beside``."""
    if _holds_tensor(x):
        return asarray(x)
    if beside is None:
        return convert(x)
    values = upload(x, beside.device)
    return _in_full(x, values) if beside.dtype in _LONG else values


def own(result: Tensor, *operands: object) -> Tensor:
    """``result``; if it is one of the ``operands`` (there was nothing to do), a new tensor of its value."""
    for x in operands:
        if x is result:
            return identity_of(result)
    return result


def promote(
    op: str, xs: tuple[TensorLike, ...], to: ToDType | None = None, beside: Tensor | None = None
) -> tuple[Tensor, ...]:
    """``xs`` as tensors of one dtype, which ``to`` may raise further (integers to floats, say).

    If all are numbers, they go to the device of ``beside``.

    Raises NotATensorError, DTypeError and DeviceError, naming ``op``.
    """
    if thread.autocasts and op in NAMED:
        xs = by_policy(op, [x if isinstance(x, SCALARS) else _converted(op, x) for x in xs])
    strong: list[Strong] = []
    tensors: list[Tensor] = []
    alike = True
    for x in xs:
        if type(x) is Tensor:
            t = x
        elif isinstance(x, SCALARS) and not hasattr(x, "dtype"):
            strong.append(x)
            alike = False
            continue
        else:
            t = x._content() if type(x) is Variable else _converted(op, x)
        aval = t._buffer.node.aval
        if tensors:
            first = tensors[0]._buffer.node.aval
            alike = alike and aval.dtype is first.dtype and aval.device is first.device
        strong.append(t)
        tensors.append(t)
    if alike:
        dtype = tensors[0]._buffer.node.aval.dtype
        fits = to is None or to(dtype) is dtype
        if fits and not (dtype in _LONG and any(isinstance(x, (list, tuple)) for x in xs)):
            return tuple(tensors)
    if len(tensors) > 1 and any(t.device is not tensors[0].device for t in tensors):
        tensors = _beside(xs, strong)
    if not tensors:  # Python numbers only: the dtype that the widest kind of them becomes
        widest = max(range(len(xs)), key=lambda k: SCALARS.index(type(xs[k])))
        number = strong[widest] = tensor(op, xs[widest], beside)
        tensors = [number]
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
        strong = [_in_full(x, t) if isinstance(t, Tensor) else t for x, t in zip(xs, strong, strict=True)]
    return tuple(cast(x, dtype) if isinstance(x, Tensor) else Tensor(constant(x, dtype, device)) for x in strong)


def _in_full(x: TensorLike | Sequence[TensorLike], t: Tensor) -> Tensor:
    """``t``, made of ``x``: of a list of Python floats, in float64 from the start, not rounded to float32 before."""
    short = isinstance(x, (list, tuple)) and t.dtype in (dtypes.float32, dtypes.complex64)
    if not short or _holds_tensor(x):
        return t
    return upload(x, t.device, _LONG[t.dtype.kind == "c"])


def _beside(xs: tuple[TensorLike, ...], strong: list[Strong]) -> list[Tensor]:
    """The tensors of ``strong``; NumPy numbers among them move to the device of the others."""
    home = next((t.device for x, t in zip(xs, strong) if isinstance(t, Tensor) and is_handle(x)), None)
    if home is not None:
        for i, (x, t) in enumerate(zip(xs, strong)):
            if isinstance(t, Tensor) and not is_handle(x) and not t.ndim:
                strong[i] = upload(x, home)
    return [t for t in strong if isinstance(t, Tensor)]


def _holds_tensor(x: object) -> bool:
    """Whether a tensor or a variable is among the leaves of ``x``."""
    return any(is_handle(item) for item in nest.leaves(x))


def several(op: str, xs: Iterable[TensorLike], dtype: DTypeLike | None = None) -> tuple[Tensor, ...]:
    """The operands of an operation that joins arrays, as tensors of one dtype: ``dtype``, or what they promote to."""
    operands = tuple(xs)
    if not operands:
        raise ShapeError(f"{op}: needs at least one tensor")
    if dtype is not None:
        operands = tuple(asarray(x, dtype) for x in operands)
    return promote(op, operands)


def stack(arrays: Sequence[TensorLike], axis: int = 0, *, dtype: DTypeLike | None = None) -> Tensor:
    """Tensors of one shape along a new ``axis``, in ``dtype`` if it is given.  Raises ShapeError, AxisError."""
    parts = several("stack", arrays, dtype)
    shape = parts[0].shape
    for x in parts:
        if x.shape != shape:
            raise ShapeError(f"stack: {x.shape} and {shape} differ; all tensors must have one shape")
    a = normalize_axis("stack", axis, len(shape) + 1)
    return barrier(concat_p, *(reshaped(x, (*shape[:a], 1, *shape[a:])) for x in parts), axis=a)


def asarray(
    a: TensorLike | Sequence[TensorLike], dtype: DTypeLike | None = None, *, device: Device | str | None = None,
    copy: bool | None = None,
) -> Tensor:  # fmt: skip
    """``a`` (tensor, variable, array, number, nested sequence) as a tensor.

    Arrays are copied unless ``copy=False``, and keep their dtype; Python floats become float32, integers int64.  A
    tensor that has this dtype and device is returned as it is, unless ``copy=True``; of a variable each reading
    is a value of its own.  A sequence that holds tensors is stacked, with gradients.  Raises NotATensorError,
    DTypeError, DeviceError, and ValueError where ``copy=False`` cannot be kept (another dtype or device, numbers).

    An array that is shared (``copy=False``) must not change while the tensor is in use.  A budget that recomputes
    values from it compares its checksum, and raises RecomputeError if it has changed.
    """
    requested = None if dtype is None else dtypes.asdtype(dtype)
    if copy is False:
        _check_shareable(a, requested, device)
    if is_handle(a):
        source = out = convert(a)
        if device is not None and asdevice(device) is not out.device:
            out = out.to_device(device)
        if requested is not None:
            out = cast(out, requested)
        return own(out, source) if copy or source is not a else out
    if isinstance(a, (list, tuple)) and _holds_tensor(a):
        out = stack([asarray(item, dtype=dtype, device=device) for item in a])
        return out if requested is None else cast(out, requested)
    where = device_of(a) if device is None else asdevice(device)
    if copy is None:
        return operand(a, where, requested, alone=True)
    return upload(a, where, requested, copy=copy, shared=not copy)


def precise(op: str, x: TensorLike, beside: Tensor | None = None) -> Tensor:
    """``x`` as a tensor; of Python floats, which elsewhere become float32, one of float64 (complex: complex128)."""
    if not isinstance(x, (list, tuple, *SCALARS)):
        return tensor(op, x, beside)
    t = asarray(x, device=None if beside is None else beside.device)
    if t.dtype == dtypes.float32 or t.dtype == dtypes.complex64:
        wide = dtypes.float64 if t.dtype == dtypes.float32 else dtypes.complex128
        t = asarray(x, dtype=wide, device=t.device)
    return t


def _check_shareable(x: TensorLike | Sequence[TensorLike], dtype: DType | None, device: Device | str | None) -> None:
    """Raises ValueError where ``x`` cannot become a tensor of ``dtype`` on ``device`` without a copy."""
    has = None if isinstance(x, SCALARS) else getattr(x, "dtype", None)
    if has is None:
        why = f"{type(x).__name__} is no array"
    elif dtype is not None and has != dtype:
        why = f"it is of dtype {has}, not {dtype}"
    else:
        ours = is_handle(x)
        lies = convert(x).device if ours else _home(x)
        target = asdevice(device) if device is not None else lies if ours else current_device()
        why = "" if target is lies or (device is None and lies is not CPU) else f"it lies on {lies}, not on {target}"
    if why:
        raise ValueError(f"asarray: this takes a copy ({why}); leave out copy=False")


def _home(x: object) -> Device:
    """The device of an array that is no tensor."""
    index = cuda_index(x)
    return CPU if index is None else asdevice(f"cuda:{index}")


def unary(
    prim: Elementwise,
    to: ToDType | None = None,
    *,
    narrow: Elementwise | None = None,
    module: str = "tapegrad",
) -> Unary:
    """The public function of a one-operand elementwise primitive; ``to`` maps the dtype to compute in.

    ``narrow``: the primitive for half types, whose rules do not read the rounded result.  ``module``: where
    the function is public.
    """
    memo, name = prim.memo, prim.name
    named_by_policy = name in NAMED

    def op(x: TensorLike) -> Tensor:
        if named_by_policy and thread.autocasts:
            x = tensor(name, x)
        if type(x) is Tensor:
            buffer = x._buffer
            site = memo.get(buffer.node.aval)
            if site is not None:
                node, out = _new(Node), _new(Tensor)  # as in `barrier`
                node.prim, node.params, node.aval, node.site = prim, NO_PARAMS, site.aval, site
                node.index = next_index()
                out._buffer = thread.executor.apply(node, (buffer,))
                return out
        (t,) = promote(name, (x,), to)
        aval = t._buffer.node.aval
        chosen = narrow if narrow is not None and aval.narrow else prim
        return Tensor(elementwise_on(chosen, (t._buffer,), resolve(chosen, aval)))

    return named(op, prim, "x", module)


def curve(
    name: str, slope: Callable[..., Tensor] | float, *, doc: str, cxx: str = "", run: Callable[..., None] | None = None,
    ufunc: str | None = None, domain: tuple[float, float] = (-2.0, 2.0), to: ToDType = dtypes.in_float,
    infer: Callable[[ShapedArray], ShapedArray] = infer_same, exact: bool = False, costly: bool = False,
    widens: bool = True, narrow: Unary | None = None, module: str = "tapegrad",
    formula: Callable[..., Any] | None = None,
) -> Unary:  # fmt: skip
    """Declare a smooth function of each number, for half types computed in float32; its public function.

    ``slope``: the derivative; ``cxx``: by default the function of that name; ``run`` or ``formula``: by default the
    ufunc; else as of ``elementwise`` and :func:`unary`; ``narrow``: a function made by this one.
    """
    prim = elementwise(
        name, infer=infer, impl=run, formula=formula, ufunc=ufunc, exact=exact, costly=costly, widens=widens,
        partials=[slope], cxx=cxx or f"{name}({{x}})", domain=domain, doc=doc,
    )  # fmt: skip
    return unary(prim, to, narrow=getattr(narrow, "primitive", None), module=module)


def binary(prim: Elementwise, to: ToDType | None = None) -> Binary:
    """The public function of a two-operand elementwise primitive; ``to`` maps the promoted dtype to compute in.

    Its attribute ``operator`` is the same for operators: it returns NotImplemented for a foreign operand.
    """
    op: Any = named(_binary(prim, to, False), prim, "x, y")
    op.operator = named(_binary(prim, to, True), prim, "x, y")
    return op


def _binary(prim: Elementwise, to: ToDType | None, polite: bool) -> Callable[[Any, Any], Any]:
    memo, name = prim.memo, prim.name
    named_by_policy = name in NAMED

    def op(x: TensorLike, y: TensorLike) -> Any:
        if named_by_policy and thread.autocasts:
            x, y = by_policy(name, (x, y))
        if type(x) is Variable:
            x = x._content()
        if type(y) is Variable:
            y = y._content()
        site = None
        if type(x) is Tensor:
            bx = x._buffer
            if type(y) is Tensor:
                by = y._buffer
                site = memo.get((bx.node.aval, by.node.aval))
            elif (type(y) is float or type(y) is int) and bx.node.aval.smooth:
                by = constant(y, bx.node.aval.dtype, bx.node.aval.device)
                site = memo.get((bx.node.aval, by.node.aval))
        elif type(y) is Tensor and (type(x) is float or type(x) is int) and y._buffer.node.aval.smooth:
            by = y._buffer
            bx = constant(x, by.node.aval.dtype, by.node.aval.device)
            site = memo.get((bx.node.aval, by.node.aval))
        if site is not None:
            node, out = _new(Node), _new(Tensor)  # as in `barrier`
            node.prim, node.params, node.aval, node.site, node.index = prim, NO_PARAMS, site.aval, site, next_index()
            out._buffer = thread.executor.apply(node, (bx, by))
            return out
        try:
            tx, ty = promote(name, (x, y), to)
        except NotATensorError:
            if polite:
                return NotImplemented
            raise
        bx, by = tx._buffer, ty._buffer
        return Tensor(elementwise_on(prim, (bx, by), resolve(prim, (bx.node.aval, by.node.aval))))

    return op


def of_two(
    name: str, partials: Sequence[Callable[..., Tensor] | float], *, cxx: str, doc: str, to: ToDType | None = None,
    ufunc: str | None = None, exact: bool = True, costly: bool = False, widens: bool = True,
    domain: tuple[float, float] = (-2.0, 2.0),
) -> Binary:  # fmt: skip
    """Declare a function of two numbers ``x`` and ``y``: see ``elementwise``, :func:`binary`; its public function."""
    prim = elementwise(
        name, infer=infer_same, ufunc=ufunc, exact=exact, costly=costly, widens=widens, partials=partials, cxx=cxx,
        domain=domain, doc=doc,
    )  # fmt: skip
    return binary(prim, to)


def no_bool(name: str, ordered: bool = False) -> ToDType:
    """For ``unary`` and ``binary``: the dtype itself, if it is not bool (and, ``ordered``, not complex)."""

    def check(dtype: DType) -> DType:
        if dtype.kind == "b":
            raise DTypeError(f"{name}: not defined for bool; use logical_xor or astype")
        if ordered and dtype.kind == "c":
            raise DTypeError(f"{name}: not defined for complex numbers; take real or imag first")
        return dtype

    return check


def real_float(name: str) -> ToDType:
    """For ``unary``: the float dtype in which to compute; complex numbers are refused."""

    def check(dtype: DType) -> DType:
        if dtype.kind == "c":
            raise DTypeError(f"{name}: not defined for complex numbers; take real or imag first")
        return dtypes.in_float(dtype)

    return check


def real_only(f: Callable[P, R]) -> Callable[P, R]:
    """``f``, which raises DTypeError where one of its operands, or one in a list of them, is complex."""

    @functools.wraps(f)
    def op(*args: P.args, **kwargs: P.kwargs) -> R:
        for item in nest.leaves((args, kwargs)):
            if isinstance(item, complex) or getattr(getattr(item, "dtype", None), "kind", "") == "c":
                raise DTypeError(f"{f.__name__}: not defined for complex numbers; take abs, real or imag first")
        return f(*args, **kwargs)

    return op


def of_floats(*unchanged: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Return a decorator for functions that are defined for floats: operands of integers and bools are promoted.

    They take the dtype that they have in common with the floats among the operands, or float64 where there are none, so
    that no difference of unsigned integers wraps around.  Operands are the parameters annotated with ``TensorLike`` but
    ``unchanged``: labels, masks and the like.
    """

    def decorate(f: Callable[P, R]) -> Callable[P, R]:
        signature = inspect.signature(f)
        names = {p.name for p in signature.parameters.values() if "TensorLike" in str(p.annotation)} - set(unchanged)

        @functools.wraps(f)
        def op(*args: P.args, **kwargs: P.kwargs) -> R:
            if not any(map(_is_whole, nest.leaves((args, kwargs)))):
                return f(*args, **kwargs)
            bound = signature.bind(*args, **kwargs)
            operands = {name: x for name, x in bound.arguments.items() if name in names}
            kinds = {x.dtype for x in nest.leaves(operands) if hasattr(x, "dtype") and dtypes.is_inexact(x.dtype)}

            def promoted(x: Any) -> Any:
                if not _is_whole(x):
                    return x
                return cast(tensor(f.__name__, x), dtypes.result_type(x.dtype, *kinds) if kinds else dtypes.float64)

            bound.arguments.update({name: nest.map_leaves(promoted, x) for name, x in operands.items()})
            return f(*bound.args, **bound.kwargs)

        return op

    return decorate


def _is_whole(x: object) -> bool:
    """Whether ``x`` is an array, or a number of NumPy's, of integers or bools."""
    return getattr(getattr(x, "dtype", None), "kind", "?") in "biu"


def whole_in_float64(dtype: DType) -> DType:
    """For ``unary``, ``binary`` and ``promote``: integers and bools are computed in float64."""
    return dtype if dtypes.is_inexact(dtype) else dtypes.float64


def named(op: Callable[..., object], prim: Primitive, arguments: str, module: str = "tapegrad") -> Callable[..., Any]:
    """Give a made function its name, documentation and the public module by which users and pickle know it."""
    op.__module__, op.__name__, op.__qualname__ = module, prim.name, prim.name
    op.__doc__ = f"{prim.doc}\n\n{arguments}: tensors, arrays or numbers, broadcast against each other."
    op.primitive = prim  # type: ignore[attr-defined]
    return op


def in_float32(f: Callable[..., Tensor], beside: tuple[str, ...] = ()) -> Callable[..., Tensor]:
    """``f``, a function known by one name that is made of several operations; of half types it computes in float32.

    Its result is rounded once, and so is each derivative, since rules of float32 apply inside; where an autocast says
    that it gives float32 (see ``precision.py``), it is not rounded.  ``beside``: names of arguments that are passed
    unchanged and do not affect the result's dtype.
    """
    signature = inspect.signature(f) if beside else None

    @functools.wraps(f)
    def op(*args: Any, **kwargs: Any) -> Tensor:
        apart = {}
        if signature is not None:
            kwargs = signature.bind(*args, **kwargs).arguments
            args, apart = (), {name: kwargs.pop(name) for name in beside if name in kwargs}
        typed = [x for x in (*args, *kwargs.values()) if hasattr(x, "dtype")]
        kinds = {x.dtype for x in typed if dtypes.is_inexact(x.dtype)}
        wide_result = bool(thread.autocasts) and in_float32_by_policy(f.__name__)
        if not wide_result and not any(dtypes.accumulator(kind) != kind for kind in kinds):
            return f(*args, **kwargs, **apart)

        def wide(x: TensorLike) -> TensorLike:
            kind = getattr(x, "dtype", None)
            if kind is None or dtypes.accumulator(kind) == kind:
                return x
            return cast(tensor(f.__name__, x), dtypes.float32)

        wider = functools.partial(f, *map(wide, args), **{name: wide(x) for name, x in kwargs.items()}, **apart)
        if wide_result:
            return during(wider, autocasts=())
        result = wider()
        return cast(result, kinds.pop()) if len(kinds) == 1 else result

    return op
