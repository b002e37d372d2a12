"""Evaluation: apply a primitive now or defer it, and fill pending buffers.

Only elementwise nodes are lazy.  Barriers run when they are recorded; views are made at once and own no bytes.  Every
value is computed in exactly one of three places: :func:`compute` (one primitive, now), ``_launch`` (a region, tile by
tile), or a view.  ``fill`` asks for bytes; it evaluates each pending node once, however many readers it has.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from tapegrad import buffer as _buffer
from tapegrad.aval import ShapedArray
from tapegrad.buffer import Buffer
from tapegrad.device import tally
from tapegrad.device.host_scalar import HostScalar
from tapegrad.fusion import cuda_launch, emit, launch, region
from tapegrad.node import NO_PARAMS, Node, thread
from tapegrad.primitive import Primitive, Site

_lock = threading.RLock()


def apply(prim: Primitive, inputs: tuple[Buffer, ...], params: dict[str, Any], aval: ShapedArray) -> Buffer:
    """One application of a barrier or view primitive, recorded; its value exists on return (but see ``deferring``)."""
    node = Node(prim, params, aval)
    if prim.cxx_drawn is not None and aval.device.lazy:
        out = Buffer(None, node, (), (1, 0))  # redrawn by every kernel that needs it, never stored for its own sake
        if _buffer.accountant is not None:
            _buffer.accountant.deferred(out)
    elif prim.reduce is not None and not region.runs_at_once(inputs[0].node.aval):
        if inputs[0].loop is not None:  # it is computed from results itself
            fill(inputs)
        out = Buffer(None, node, inputs, (1, 1), (inputs[0].node.aval.shape, params["axis"]))
        if _buffer.accountant is not None:
            _buffer.accountant.deferred(out)
        if thread.deferring is None:
            fill((out,))
        else:
            thread.deferring.append(out)
    else:
        arrays = [array_of(b) for b in inputs]
        array = compute(prim, arrays, params, aval)
        passes = tally.taken()
        if prim.view and aval.device.is_view(array, arrays[0]):
            out = Buffer(array, node, (inputs[0].root(),))
        else:
            out = Buffer(array, node)
            if _buffer.accountant is not None:
                _count((prim.name,), arrays, [array])
                for read, written in passes:
                    _buffer.accountant.ran((), read, written)
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
        must, span, loop = region.admit(inputs, aval)
        if must:
            fill(must)
        out = Buffer(None, node, inputs, span, loop)
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
    if device.lazy:
        return _compute_on_gpu(prim, arrays, params, aval)
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


def _compute_on_gpu(prim: Primitive, arrays: Sequence[Any], params: dict[str, Any], aval: ShapedArray) -> Any:
    """A barrier or view there: its own kernels if it declares any, else what the library offers."""
    device = aval.device
    with device.active():
        if prim.cuda is not None:
            out = device.empty(aval.shape, aval.dtype)
            prim.cuda(device, *arrays, out=out, **params)
            return out
        if prim.into:
            out = device.empty(aval.shape, aval.dtype)
            prim.impl(device.xp, *arrays, out=out, **params)
            return out
        found = prim.impl(device.xp, *arrays, **params)
        return found if found.dtype == aval.dtype else found.astype(aval.dtype)


def array_of(buffer: Buffer) -> Any:
    """The device's array of ``buffer``, evaluated if need be."""
    if buffer.array is None:
        fill((buffer,))
    array = buffer.array
    return array.on_device() if type(array) is HostScalar else array


@contextmanager
def waiting(aval: ShapedArray) -> Iterator[Callable[[Any], Any]]:
    """Reductions of arrays like ``aval`` made inside wait for what is computed from them; the block calls what it is
    given with the tensor it returns, which is evaluated then.  On the CPU, and in a gradient walk, nothing changes.
    """
    if not aval.device.lazy or thread.deferring is not None:
        yield lambda t: t
        return
    thread.deferring = []

    def finish(t: Any) -> Any:
        thread.deferring.clear()
        fill((t._buffer,))
        return t

    try:
        yield finish
    finally:
        thread.deferring = None


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
    device = targets[0].node.aval.device
    targets = (region.with_results if device.lazy else region.with_costly)(work, targets)
    loops = [region.loop_of(b) for b in targets]
    shape = loops[0][0]
    axes = next((a for _, a in loops if a is not None), None)
    leaves = [b.array for b in work.leaves]
    if device.lazy:
        done = cuda_launch.run(work, targets, shape, axes, device)
        outputs, moved, names, scratch = done.outputs, done.moved, done.names, done.scratch
    else:
        outputs, names, scratch = _run_on_cpu(work, targets, loops, leaves, axes or (), device)
        moved = [cuda_launch.moved_by(leaves, outputs)]
    for b, out in zip(targets, outputs, strict=True):
        b.fill(out.reshape(b.node.aval.shape))
    if _buffer.accountant is not None:
        for number, (read, written) in enumerate(moved):
            _buffer.accountant.ran(names if number == 0 else (), read, written)
        _buffer.accountant.scratch(scratch)


def _run_on_cpu(
    work: region.Region, targets: list[Buffer], loops: list, leaves: list[Any], axes: tuple[int, ...], device: Any
) -> tuple[list[Any], tuple[str, ...], int]:
    """The outputs, the names of the primitives run, and bytes of scratch."""
    shape = loops[0][0]
    layouts = [launch.layout(x, shape) for x in leaves]
    program = emit.program(work, layouts, targets, device.xp)
    outputs = []
    for b, (_, reduced) in zip(targets, loops, strict=True):
        kept = shape if reduced is None else tuple(1 if i in reduced else n for i, n in enumerate(shape))
        outputs.append(device.empty(kept, b.node.aval.dtype))
    return outputs, program.names, launch.run(program, shape, leaves, layouts, outputs, axes, device)


def _count(names: tuple[str, ...], read: Sequence[Any], written: Sequence[Any]) -> None:
    """Tell the accountant of one kernel; what a kernel reads twice moves once."""
    _buffer.accountant.ran(names, *cuda_launch.moved_by(read, written))  # type: ignore[union-attr]
