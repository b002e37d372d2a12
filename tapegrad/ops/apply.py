"""Primitives applied to tensors: the shape rules that many of them share, and the two ways to make a node."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from operator import attrgetter

from tapegrad.core.aval import ShapedArray, broadcast_shapes, shaped
from tapegrad.core.buffer import Buffer
from tapegrad.core.node import NO_PARAMS, Node, next_index
from tapegrad.core.primitive import Elementwise, Primitive, Site
from tapegrad.core.state import thread
from tapegrad.device import dtypes
from tapegrad.device.types import Params
from tapegrad.engine import realize
from tapegrad.engine.region import runs_at_once
from tapegrad.errors import DeviceError, DTypeError
from tapegrad.tensor import Tensor

_MOST = 4096


def infer_same(*avals: ShapedArray, name: str = "elementwise") -> ShapedArray:
    """Broadcast shapes; the dtype of the operands."""
    return shaped(broadcast_shapes(name, *(a.shape for a in avals)), avals[-1].dtype, avals[-1].device)


def infer_real(name: str) -> Callable[[ShapedArray], ShapedArray]:
    """The operand's aval.  Raises DTypeError naming ``name`` for complex numbers."""

    def infer(x: ShapedArray) -> ShapedArray:
        if x.dtype.kind == "c":
            raise DTypeError(f"{name}: not defined for complex numbers, got {x.dtype}; take real or imag first")
        return x

    return infer


def infer_bool(*avals: ShapedArray, name: str = "comparison") -> ShapedArray:
    """Broadcast shapes; bool."""
    return infer_same(*avals, name=name).with_dtype(dtypes.bool_)


def same_params(params: Params, n: int) -> Params:
    """``lift`` of what counts axes from the last, or works element by element."""
    return params


def remembered(infer: Callable[..., ShapedArray]) -> Callable[..., ShapedArray]:
    """``infer``, not called again for what it has been called with: a shape costs as much as the rest of a view.

    For primitives whose parameters are hashable, and few at any one place of a program.
    """
    return lru_cache(_MOST)(infer)


def lift_axis(params: Params, n: int) -> Params:
    """``lift`` of what has one ``axis``, counted from the first."""
    return {**params, "axis": params["axis"] + 1}


def lift_shape(params: Params, n: int) -> Params:
    """``lift`` of what has the ``shape`` of its result."""
    return {**params, "shape": (n, *params["shape"])}


def on_one_device(op: str, buffers: tuple[Buffer, ...]) -> None:
    """Raises DeviceError naming ``op`` where operands lie on several devices."""
    device = buffers[0].node.aval.device
    for b in buffers:
        if b.node.aval.device is not device:
            raise DeviceError(f"{op}: operands on {device} and {b.node.aval.device}; move one with to_device")


def resolve(prim: Elementwise, avals: ShapedArray | tuple[ShapedArray, ...]) -> Site:
    """The site of ``prim`` for operands of ``avals`` (one aval, or a tuple of several): inferred once, then kept."""
    site = prim.memo.get(avals)
    if site is None:
        if len(prim.memo) >= _MOST:
            prim.memo.clear()
        operands = avals if isinstance(avals, tuple) else (avals,)
        named = {"name": prim.name} if prim.infer in (infer_same, infer_bool) else {}
        aval = prim.infer(*operands, **named)
        site = prim.memo[avals] = Site(prim, operands, aval, runs_at_once(aval))
    return site


def elementwise_on(prim: Elementwise, inputs: tuple[Buffer, ...], site: Site) -> Buffer:
    """Apply an elementwise primitive to operands of the avals of ``site``."""
    return thread.executor.apply(Node(prim, NO_PARAMS, site.aval, site), inputs)


_buffer_of: Callable[[Tensor], Buffer] = attrgetter("_buffer")
_aval_of: Callable[[Tensor], ShapedArray] = attrgetter("_buffer.node.aval")
_device_of = attrgetter("device")
_new = object.__new__


def bind(prim: Elementwise, *xs: Tensor) -> Tensor:
    """Apply an elementwise primitive to tensors of one dtype."""
    buffers = tuple(x._buffer for x in xs)
    on_one_device(prim.name, buffers)
    return Tensor(elementwise_on(prim, buffers, resolve(prim, tuple(b.node.aval for b in buffers))))


def retained(*xs: Tensor) -> bool:
    """Whether a tape keeps what the rules of an operation on these operands read."""
    for recorder in thread.recorders:
        if getattr(recorder, "retains", False):
            for x in xs:
                if recorder.follows(x._buffer):
                    return True
    return False


def by_product(prim: Primitive, *xs: Tensor, **params: object) -> Tensor:
    """The value of ``prim``, which the operation computes along that it is given to as its last operand.

    So a rule can read what a kernel has at hand, in a dtype of its own.  It has a recipe of its own, too: where it is
    dropped, or read before that operation, ``prim`` is applied.
    """
    node = Node(prim, params, prim.infer(*map(_aval_of, xs), **params))
    return Tensor(realize.by_product(node, tuple(map(_buffer_of, xs))))


def barrier(prim: Primitive, *xs: Tensor, **params: object) -> Tensor:
    """Apply any other primitive to tensors."""
    buffers = tuple(map(_buffer_of, xs))
    node = _new(Node)  # without `__init__`, whose call takes longer; so below, where many nodes are made
    node.prim, node.params, node.site, node.index = prim, params, None, next_index()
    if len(xs) == 1:
        node.aval = prim.infer(buffers[0].node.aval, **params)
    else:
        avals = list(map(_aval_of, xs))
        if len(set(map(_device_of, avals))) > 1:
            on_one_device(prim.name, buffers)
        node.aval = prim.infer(*avals, **params)
    out = _new(Tensor)
    out._buffer = thread.executor.apply(node, buffers)
    return out
