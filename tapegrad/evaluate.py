"""Evaluation: apply a primitive now or defer it, and fill pending buffers.

Only elementwise nodes are lazy.  Barriers run when they are recorded; views are made at once and own no bytes.  Every
value is computed in exactly one of three places: :func:`compute` (one primitive, now), ``_launch`` (a region, tile by
tile), or a view.  ``fill`` asks for bytes; it evaluates each pending node once, however many readers it has.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from tapegrad import buffer as _buffer
from tapegrad.aval import ShapedArray
from tapegrad.buffer import Buffer
from tapegrad.compute import compute, compute_elementwise, copied
from tapegrad.device import phantom, tally
from tapegrad.device.host_scalar import HostScalar
from tapegrad.device.pressure import retried
from tapegrad.fusion import cuda_launch, emit, launch, region
from tapegrad.node import NO_PARAMS, Node, thread
from tapegrad.primitive import Primitive, Site

_lock = threading.RLock()


def apply(prim: Primitive, inputs: tuple[Buffer, ...], params: dict[str, Any], aval: ShapedArray) -> Buffer:
    """One application of a barrier or view primitive, recorded; its value exists on return (but see ``deferring``)."""
    node = Node(prim, params, aval)
    if not thread.recorders:
        return run(node, inputs)
    out = run(node, inputs) if thread.runner is None else thread.runner.run(node, inputs, run)
    announce(node, inputs, out)
    return out


def apply_elementwise(prim: Primitive, inputs: tuple[Buffer, ...], site: Site) -> Buffer:
    """One application of an elementwise primitive, recorded: run at once if small, else deferred."""
    node = Node(prim, NO_PARAMS, site.aval, site)
    if not thread.recorders:
        return run_elementwise(node, inputs)
    if thread.runner is None:
        out = run_elementwise(node, inputs)
    else:
        out = thread.runner.run(node, inputs, run_elementwise)
    announce(node, inputs, out)
    return out


def announce(node: Node, inputs: tuple[Buffer, ...], out: Buffer) -> None:
    """Tell of a node: first whoever may have to make its value again, then the recorders of this thread."""
    if _buffer.keeper is not None:
        _buffer.keeper.made(node, inputs, out)
    for recorder in thread.recorders:
        recorder.record(node, inputs, out)


def again(node: Node, inputs: tuple[Buffer, ...]) -> Buffer:
    """The value of a node whose buffer was dropped, in a new buffer; nobody is told."""
    before = thread.recorders, thread.deferring
    thread.recorders, thread.deferring = (), None
    try:
        return run(node, inputs) if node.site is None else run_elementwise(node, inputs)
    finally:
        thread.recorders, thread.deferring = before


def run(node: Node, inputs: tuple[Buffer, ...]) -> Buffer:
    """A buffer for the value of a barrier or view."""
    prim: Any = node.prim
    aval, params = node.aval, node.params
    if _buffer.accountant is not None:
        _buffer.accountant.applied(node, inputs)
    if prim.cxx_drawn is not None and aval.device.lazy:
        return _deferred(Buffer(None, node, (), (1, 0)))  # redrawn by every kernel that needs it, never stored
    if prim.reduce is not None and not region.runs_at_once(inputs[0].node.aval):
        if inputs[0].loop is not None:  # it is computed from results itself
            fill(inputs)
        out = _deferred(Buffer(None, node, inputs, (1, 1), (inputs[0].node.aval.shape, params["axis"])))
        if thread.deferring is None:
            fill((out,))
        else:
            thread.deferring.append(out)
        return out
    arrays = [array_of(b) for b in inputs]
    if _buffer.keeper is not None and (not prim.view or (prim.copies and not arrays[0].flags.c_contiguous)):
        _buffer.keeper.reserve((aval,), (prim.name,))
    try:
        array = compute(prim, arrays, params, aval)
    except MemoryError as e:
        tally.taken()
        array = retried(e, aval.device, prim.name, aval.nbytes, lambda: compute(prim, arrays, params, aval))
    except BaseException:
        if _buffer.keeper is not None:
            _buffer.keeper.settled()
        raise
    passes = tally.taken()
    if prim.view and aval.device.is_view(array, arrays[0]):
        root = inputs[0].root()
        if _buffer.keeper is not None:
            _buffer.keeper.settled()  # it might have been a copy
        if _buffer.keeper is None or not _is_sliver(array, aval, root):
            return Buffer(array, node, (root,))
        _buffer.keeper.reserve((aval,), (prim.name,))
        array = copied(array, aval)
    out = Buffer(array, node)
    if (accountant := _buffer.accountant) is not None and accountant.detailed:
        accountant.ran((prim.name,), *cuda_launch.moved_by(arrays, [array]))
        for read, written in passes:
            accountant.ran((), read, written)
    return out


_SLIVER = 16


def _is_sliver(array: Any, aval: ShapedArray, root: Buffer) -> bool:
    """Whether a view is so small a piece that it shall not keep the rest alive; it must lie as its copy would."""
    return array.flags.c_contiguous and _SLIVER * aval.nbytes <= root.node.aval.nbytes


def _deferred(out: Buffer) -> Buffer:
    if _buffer.accountant is not None:
        _buffer.accountant.deferred(out)
    return out


def run_elementwise(node: Node, inputs: tuple[Buffer, ...]) -> Buffer:
    """A buffer for the value of an elementwise node: filled if it is small, else pending."""
    site: Any = node.site
    aval, ufunc = site.aval, site.ufunc
    if not site.small:
        must, span, loop = region.admit(inputs, aval)
        if must:
            fill(must)
        if _buffer.accountant is not None:
            _buffer.accountant.applied(node, inputs)
        return _deferred(Buffer(None, node, inputs, span, loop))
    accountant = _buffer.accountant
    if accountant is not None:
        if accountant.detailed or _buffer.keeper is not None or phantom.mode.dry:
            return _run_counted(node, inputs)
        accountant.applied(node, inputs)
    if ufunc is None:
        array = compute_elementwise(site.prim, [array_of(b) for b in inputs], aval)
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
    return Buffer(array, node)


def _run_counted(node: Node, inputs: tuple[Buffer, ...]) -> Buffer:
    """The same for a small node while somebody counts, and perhaps keeps a budget, or nothing is computed at all."""
    site: Any = node.site
    accountant: Any = _buffer.accountant
    aval = site.aval
    accountant.applied(node, inputs)
    if _buffer.keeper is not None:
        fill(inputs)
        _buffer.keeper.reserve((aval,), (site.prim.name,))
    arrays = [array_of(b) for b in inputs]
    if site.ufunc is None or site.pooled:
        array = compute_elementwise(site.prim, arrays, aval)
    elif phantom.mode.dry:
        array = phantom.of_ufunc(arrays, aval)
    else:
        array = aval.device.xp.asarray(site.ufunc(*arrays))
    out = Buffer(array, node)
    if accountant.detailed:
        accountant.ran((site.prim.name,), *cuda_launch.moved_by(arrays, [array]))
    return out


def array_of(buffer: Buffer) -> Any:
    """The device's array of ``buffer``, evaluated if need be."""
    if buffer.array is None:
        fill((buffer,))
    array = buffer.array
    return _special(array, buffer) if type(array) in _SPECIAL else array


_SPECIAL = {HostScalar, phantom.Phantom}


def _special(array: Any, buffer: Buffer) -> Any:
    if type(array) is HostScalar:
        return array.on_device()
    if phantom.mode.dry:
        return array
    raise phantom.unread(repr(buffer.node))


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
    accountant = _buffer.accountant
    if accountant is not None:
        accountant.read(work.leaves)
    if _buffer.keeper is not None:
        _buffer.keeper.reserve([b.node.aval for b in targets], [b.node.prim.name for b in targets])  # type: ignore[union-attr]
    if device.lazy:
        done = cuda_launch.run(work, targets, shape, axes, device)
        outputs, moved, names, scratch = done.outputs, done.moved, done.names, done.scratch
    else:
        outputs, names, scratch = _run_on_cpu(work, targets, loops, leaves, axes or (), device)
        moved = [cuda_launch.moved_by(leaves, outputs)] if accountant is not None and accountant.detailed else []
    if phantom.mode.dry:
        outputs = [_really(b) if b.node.index < phantom.mode.since else out for b, out in zip(targets, outputs)]
    for b, out in zip(targets, outputs, strict=True):
        b.fill(out.reshape(b.node.aval.shape))
    if accountant is not None and accountant.detailed:
        for number, (read, written) in enumerate(moved):
            accountant.ran(names if number == 0 else (), read, written)
        accountant.scratch(scratch)


def _really(b: Buffer) -> Any:
    """The value of a buffer that was pending before the dry run: it will be looked at afterwards."""
    work, (shape, axes), device = region.collect([b]), region.loop_of(b), b.node.aval.device
    phantom.mode.dry = False
    try:
        if device.lazy:
            return cuda_launch.run(work, [b], shape, axes, device).outputs[0]
        leaves = [leaf.array for leaf in work.leaves]
        return _run_on_cpu(work, [b], [(shape, axes)], leaves, axes or (), device)[0][0]
    finally:
        phantom.mode.dry = True


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
