"""Evaluation: apply a primitive now or defer it, and fill pending buffers.

Only elementwise nodes are lazy.  Barriers run when they are recorded; views are made at once and own no bytes.  Every
value is computed in exactly one of three places: :func:`compute` (one primitive, now), ``_launch`` (a region, tile by
tile), or a view.  ``fill`` asks for bytes; it evaluates each pending node once, however many readers it has.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from math import prod
from typing import Any

from tapegrad import buffer as _buffer
from tapegrad.aval import ShapedArray
from tapegrad.buffer import Buffer
from tapegrad.fusion import emit, launch, region
from tapegrad.node import NO_PARAMS, Node, thread
from tapegrad.primitive import Primitive, Site

_lock = threading.RLock()


def apply(prim: Primitive, inputs: tuple[Buffer, ...], params: dict[str, Any], aval: ShapedArray) -> Buffer:
    """One application of a barrier or view primitive, recorded; its value exists on return (but see ``deferring``)."""
    node = Node(prim, params, aval)
    if prim.reduce is not None and not region.runs_at_once(inputs[0].node.aval):
        out = Buffer(None, node, inputs, (1, 1))
        if _buffer.accountant is not None:
            _buffer.accountant.deferred(out)
        if thread.deferring is None:
            fill((out,))
        else:
            thread.deferring.append(out)
    else:
        arrays = [b.array if b.array is not None else array_of(b) for b in inputs]
        array = compute(prim, arrays, params, aval)
        if prim.view and aval.device.is_view(array, arrays[0]):
            out = Buffer(array, node, (inputs[0].root(),))
        else:
            out = Buffer(array, node)
            if _buffer.accountant is not None:
                _count((prim.name,), arrays, [array])
    for recorder in thread.recorders:
        recorder.record(node, inputs, out)
    return out


def apply_elementwise(prim: Primitive, inputs: tuple[Buffer, ...], site: Site) -> Buffer:
    """One application of an elementwise primitive, recorded: run at once if small, else deferred."""
    aval, ufunc = site.aval, site.ufunc
    node = Node(prim, NO_PARAMS, aval, site)
    if site.small:
        if ufunc is None:
            array = compute_elementwise(prim, [array_of(b) for b in inputs], aval)
        else:
            a = inputs[0].array
            if a is None:
                a = array_of(inputs[0])
            if len(inputs) == 1:
                array = ufunc(a, out=aval.device.empty(aval.shape, aval.dtype)) if site.pooled else ufunc(a)
            else:
                b = inputs[1].array
                if b is None:
                    b = array_of(inputs[1])
                array = ufunc(a, b, out=aval.device.empty(aval.shape, aval.dtype)) if site.pooled else ufunc(a, b)
            if not aval.ndim:
                array = aval.device.xp.asarray(array)  # ufuncs turn 0-d arrays into scalars
        out = Buffer(array, node)
        if _buffer.accountant is not None:
            _count((prim.name,), [b.array for b in inputs], [array])
    else:
        must, span = region.admit(inputs, aval)
        if must:
            fill(must)
        out = Buffer(None, node, inputs, span)
        if _buffer.accountant is not None:
            _buffer.accountant.deferred(out)
    for recorder in thread.recorders:
        recorder.record(node, inputs, out)
    return out


def compute_elementwise(prim: Primitive, arrays: Sequence[Any], aval: ShapedArray) -> Any:
    """The value of an elementwise primitive, from arrays, at once."""
    out = aval.device.empty(aval.shape, aval.dtype)
    prim.impl(aval.device.xp, out, *arrays)
    return out


def compute(prim: Primitive, arrays: Sequence[Any], params: dict[str, Any], aval: ShapedArray) -> Any:
    """The value of one application, from arrays."""
    device = aval.device
    if prim.into:
        out = device.empty(aval.shape, aval.dtype)
        prim.impl(device.xp, *arrays, out=out, **params)
        return out
    if prim.reduce is not None:
        ufunc = getattr(device.xp, prim.reduce)
        kept = params.get("keepdims", False)
        found = ufunc.reduce(arrays[0], axis=params["axis"], dtype=emit.accumulator(aval.dtype), keepdims=kept)
    else:
        found = prim.impl(device.xp, *arrays, **params)
    if type(found) is not device.xp.ndarray or found.dtype != aval.dtype:
        found = device.xp.asarray(found, dtype=aval.dtype)
    return found


def array_of(buffer: Buffer) -> Any:
    """The array of ``buffer``, evaluated if need be."""
    if buffer.array is None:
        fill((buffer,))
    return buffer.array


def fill(targets: Iterable[Buffer]) -> None:
    """Give every target its bytes; targets that share work share kernels.

    Reductions that a gradient walk has deferred run along, so that one kernel serves all cotangents of a region.
    """
    with _lock:
        todo = {id(b): b for b in targets if b.array is None}
        if thread.deferring:
            todo.update((id(b), b) for b in thread.deferring if b.array is None)
            thread.deferring.clear()
        if not todo:
            return
        for group in region.kernels(list(todo.values())):
            _launch(group)


def _launch(targets: list[Buffer]) -> None:
    """Evaluate targets of one loop shape in one kernel."""
    work = region.collect(targets)
    loops = [region.loop_of(b) for b in targets]
    shape = loops[0][0]
    axes = next((a for _, a in loops if a is not None), ())
    device = targets[0].node.aval.device
    leaves = [b.array for b in work.leaves]
    layouts = [launch.layout(x, shape) for x in leaves]
    program = emit.program(work, layouts, targets, device.xp)
    outputs = []
    for b, (_, reduced) in zip(targets, loops, strict=True):
        aval = b.node.aval
        kept = shape if reduced is None else tuple(1 if i in reduced else n for i, n in enumerate(shape))
        outputs.append(device.empty(kept, aval.dtype))
    scratch = launch.run(program, shape, leaves, layouts, outputs, axes, device)
    for b, out in zip(targets, outputs, strict=True):
        b.fill(out.reshape(b.node.aval.shape))
    if _buffer.accountant is not None:
        _count(program.names, leaves, outputs)
        _buffer.accountant.scratch(scratch)


def _count(names: tuple[str, ...], read: Sequence[Any], written: Sequence[Any]) -> None:
    """Tell the accountant of one kernel; what a kernel reads twice moves once."""
    distinct = {id(x): _extent(x) for x in read}
    _buffer.accountant.ran(names, sum(distinct.values()), sum(x.nbytes for x in written))  # type: ignore[union-attr]


def _extent(x: Any) -> int:
    """Bytes of an array, what broadcasting repeats counted once."""
    return prod(n for n, stride in zip(x.shape, x.strides, strict=True) if stride) * x.itemsize if x.size else 0
