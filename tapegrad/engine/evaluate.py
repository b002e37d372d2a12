"""Evaluation: apply a primitive now or defer it, and fill pending buffers.

Only elementwise nodes are lazy.  Barriers run when they are recorded; views are made at once and own no bytes.  Every
value is computed in exactly one of three places: :func:`compute` (one primitive, now), ``_launch`` (a region, tile by
tile), or a view.  ``fill`` asks for bytes; it evaluates each pending node once, however many readers it has.

A rerun of a checkpointed function may postpone nodes of any kind (:func:`postponed`): they are applied, in the order of
the program, when somebody asks for bytes that need them, and never if nobody does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from tapegrad.core import buffer as _buffer
from tapegrad.core import locks
from tapegrad.core.aval import Shape, ShapedArray, shaped
from tapegrad.core.buffer import NOTHING, Buffer, Postponed, in_room
from tapegrad.core.node import NO_PARAMS, Node
from tapegrad.core.primitive import Primitive, Site
from tapegrad.core.protocols import Accountant
from tapegrad.core.state import during, thread
from tapegrad.device import CPU, dtypes, phantom, tally
from tapegrad.device.float_errors import errors_now, treating_errors
from tapegrad.device.host_scalar import HostScalar
from tapegrad.device.pressure import retried, scratch_keeper
from tapegrad.engine import region
from tapegrad.engine.compute import compute, compute_elementwise, copied
from tapegrad.engine.cpu import emit, tiles
from tapegrad.engine.cuda import launch as cuda_launch

_lock = locks.lock()


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
    recorders = thread.recorders
    if not recorders:
        return run_elementwise(node, inputs)
    if thread.runner is None:
        out = run_elementwise(node, inputs)
    else:
        out = thread.runner.run(node, inputs, run_elementwise)
    if _buffer.accountant is None:  # as announce does, without the call: this is the path of every small operation
        for recorder in recorders:
            recorder.record(node, inputs, out)
    else:
        announce(node, inputs, out)
    return out


def announce(node: Node, inputs: tuple[Buffer, ...], out: Buffer) -> None:
    """Tell of a node: first whoever may have to make its value again, then the recorders of this thread."""
    if (keeper := _buffer.keeper) is not None:
        keeper.made(node, inputs, out)
    for recorder in thread.recorders:
        recorder.record(node, inputs, out)


def again(node: Node, inputs: tuple[Buffer, ...]) -> Buffer:
    """The value of a node whose buffer was dropped, in a new buffer; nobody is told."""
    return during(run if node.site is None else run_elementwise, node, inputs, recorders=(), deferring=None)


def run(node: Node, inputs: tuple[Buffer, ...], into: Buffer | None = None) -> Buffer:
    """A buffer for the value of a barrier or view: a new one, or ``into``."""
    prim = node.prim
    aval, params = node.aval, node.params
    if (accountant := _buffer.accountant) is not None:
        accountant.applied(node, inputs)
    if prim.cxx_drawn is not None and aval.device.lazy:
        return _deferred(_pending(node, (), (1, 0), None, into))  # redrawn by every kernel that needs it, never stored
    if prim.reduce is not None and not region.runs_at_once(inputs[0].node.aval):
        if inputs[0].loop is not None or inputs[0].postponed:  # it is computed from results itself
            fill(inputs)
        out = _deferred(_pending(node, inputs, (1, 1), (inputs[0].node.aval.shape, params["axis"]), into))
        if thread.deferring is None:
            fill((out,))
        else:
            thread.deferring.append(out)
        return out
    arrays = [array_of(b) for b in inputs]
    if _buffer.keeper is None or (prim.view and not _may_copy(prim, arrays[0])):
        return _run_on(node, inputs, arrays, into)
    return in_room((aval,), (prim.name,), _run_on, node, inputs, arrays, into)


def _may_copy(prim: Primitive, array: Any) -> bool:
    """Whether a view primitive may have to copy ``array``."""
    return prim.copies and not array.flags.c_contiguous


def _run_on(node: Node, inputs: tuple[Buffer, ...], arrays: list[Any], into: Buffer | None) -> Buffer:
    """The same from the arrays of its inputs."""
    prim = node.prim
    aval, params = node.aval, node.params
    try:
        array = compute(prim, arrays, params, aval)
    except MemoryError as e:
        tally.taken()
        array = retried(e, aval.device, prim.name, aval.nbytes, lambda: compute(prim, arrays, params, aval))
    passes = tally.taken()
    if prim.view and aval.device.is_view(array, arrays[0]):
        root = inputs[0].root()
        if _buffer.keeper is None or not _is_sliver(array, aval, root):
            return Buffer(array, node, (root,)) if into is None else _into(array, (root,), into)
        make = lambda: _counted((prim.name,), arrays, copied(array, aval), node, passes, into)
        return make() if _may_copy(prim, arrays[0]) else in_room((aval,), (prim.name,), make)
    return _counted((prim.name,), arrays, array, node, passes, into)


def _counted(
    names: tuple[str, ...],
    arrays: list[Any],
    array: Any,
    node: Node,
    passes: Iterable[Any] = (),
    into: Buffer | None = None,
) -> Buffer:
    """A buffer for what was made of ``arrays``; who counts work is told of it."""
    out = Buffer(array, node) if into is None else _into(array, NOTHING, into)
    if (accountant := _buffer.accountant) is not None and accountant.detailed:
        accountant.ran(names, *cuda_launch.moved_by(arrays, [array]))
        for read, written in passes:
            accountant.ran((), read, written)
    return out


def _within(nbytes: int, work: Callable[[], None]) -> None:
    """Scratch has its place in the budget, and in what is counted."""
    if (accountant := _buffer.accountant) is not None and accountant.detailed:
        accountant.scratch(nbytes)
    in_room((shaped((nbytes,), dtypes.asdtype("uint8"), CPU),), ("scratch",), work)


scratch_keeper(_within)


def _into(array: Any, keeps: tuple[Buffer, ...], into: Buffer) -> Buffer:
    """``into``, filled; a view ``keeps`` the buffer that owns its bytes."""
    if keeps:
        into.array, into.keeps, into.span, into.loop = array, keeps, None, None
    else:
        into.fill(array)
    return into


def _pending(node: Node, inputs: tuple[Buffer, ...], span: Any, loop: Any, into: Buffer | None) -> Buffer:
    if into is None:
        return Buffer(None, node, inputs, span, loop)
    into.span, into.loop = span, loop
    return into


_SLIVER = 16
_LEAST_ROOT = 4096
"""Bytes.  A copy takes 512 at least, so copies of the rows of a smaller array would soon take more than it does."""


def _is_sliver(array: Any, aval: ShapedArray, root: Buffer) -> bool:
    """Whether a view is so small a piece that it shall not keep the rest alive; it must lie as its copy would."""
    return array.flags.c_contiguous and max(_SLIVER * aval.nbytes, _LEAST_ROOT) <= root.node.aval.nbytes


def _deferred(out: Buffer) -> Buffer:
    if (accountant := _buffer.accountant) is not None:
        accountant.deferred(out)
    return out


def run_elementwise(node: Node, inputs: tuple[Buffer, ...]) -> Buffer:
    """A buffer for the value of an elementwise node: filled if it is small, else pending."""
    site: Any = node.site
    aval, ufunc = site.aval, site.ufunc
    if not site.small:
        if site.prim.view and inputs[0].array is not None:
            if (accountant := _buffer.accountant) is not None:
                accountant.applied(node, inputs)
            return _same(Buffer(None, node, inputs), inputs[0])
        must, span, loop = region.admit(inputs, aval)
        if must:
            fill(must)
        if (accountant := _buffer.accountant) is not None:
            accountant.applied(node, inputs)
        return _deferred(Buffer(None, node, inputs, span, loop))
    accountant = _buffer.accountant
    if accountant is not None:
        if accountant.detailed or _buffer.keeper is not None or phantom.mode.dry:
            return _run_counted(node, inputs, accountant)
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


def _same(out: Buffer, source: Buffer) -> Buffer:
    """``out`` has the value of ``source``, which is filled: a view of all of it."""
    out.array, out.keeps, out.span, out.loop = source.array, (source.root(),), None, None
    return out


def _run_counted(node: Node, inputs: tuple[Buffer, ...], accountant: Accountant) -> Buffer:
    """The same for a small node while somebody counts, and perhaps keeps a budget, or nothing is computed at all."""
    site: Any = node.site
    aval = site.aval
    accountant.applied(node, inputs)
    if _buffer.keeper is not None:
        for b in inputs:
            if b.array is None:
                fill(inputs)
                break
    return in_room((aval,), (site.prim.name,), _run_small, node, inputs)


def _run_small(node: Node, inputs: tuple[Buffer, ...], into: Buffer | None = None) -> Buffer:
    site: Any = node.site
    aval = site.aval
    arrays = []
    for b in inputs:
        array = b.array
        arrays.append(array_of(b) if array is None or type(array) in _SPECIAL else array)
    if site.ufunc is None or site.pooled:
        array = compute_elementwise(site.prim, arrays, aval)
    elif phantom.mode.dry:
        array = phantom.of_ufunc(arrays, aval)
    else:
        array = aval.device.xp.asarray(site.ufunc(*arrays))
    accountant = _buffer.accountant
    if accountant is not None and accountant.detailed:
        return _counted((site.prim.name,), arrays, array, node, (), into)
    return Buffer(array, node) if into is None else _into(array, NOTHING, into)


def postponed(node: Node, inputs: tuple[Buffer, ...]) -> Buffer:
    """A buffer for a node of any kind that is applied when somebody asks for bytes that need it, or never."""
    return _deferred(Postponed(node, inputs, errors_now()))


@locks.section
def catch_up(targets: Iterable[Buffer]) -> None:
    """Apply the postponed nodes among ``targets``, and those that they need, in order; elementwise ones then pend."""
    try:
        with _lock:
            stack: list[Any] = [b for b in targets if b.postponed]
            todo: dict[int, Any] = {}
            while stack:
                b = stack.pop()
                if b.node.index not in todo:
                    todo[b.node.index] = b
                    stack += [k for k in b.keeps if k.postponed]
            during(_apply_all, todo, recorders=(), deferring=None)
    except BaseException:
        locks.let_go(_lock)
        raise


def _apply_all(todo: dict[int, Postponed]) -> None:
    for index in sorted(todo):
        _apply_postponed(todo.pop(index))


def _apply_postponed(b: Postponed) -> None:
    """Do for a postponed buffer what would have been done at once, where floating-point errors count as they did."""
    node, inputs = b.node, b.keeps
    site: Any = node.site
    b.postponed = False
    try:
        with treating_errors(b.errors):
            if site is None:
                run(node, inputs, b)
                return
            if site.prim.view and inputs[0].array is not None:
                _same(b, inputs[0])
                return
            if site.small:
                fill(inputs)
            else:
                must, span, loop = region.admit(inputs, site.aval)
                fill(must)
            if (accountant := _buffer.accountant) is not None:
                accountant.applied(node, inputs)
            if site.small:
                in_room((site.aval,), (site.prim.name,), _run_small, node, inputs, b)
            else:
                b.span, b.loop = span, loop
    except BaseException:
        b.postponed = True
        raise


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


def waiting(aval: ShapedArray, f: Callable[[], Any]) -> Any:
    """The tensor that ``f()`` returns; reductions of arrays like ``aval`` wait for what ``f`` computes from them.

    It is evaluated then.  On the CPU, and in a gradient walk, nothing changes.
    """
    if not aval.device.lazy or thread.deferring is not None:
        return f()
    deferring: list[Buffer] = []
    return during(_finished, f, deferring, deferring=deferring)


def _finished(f: Callable[[], Any], deferring: list[Buffer]) -> Any:
    t = f()
    deferring.clear()
    fill((t._buffer,))
    return t


@locks.section
def fill(targets: Iterable[Buffer]) -> None:
    """Give every target its bytes; targets that share work share kernels.

    Reductions that a gradient walk has deferred run along, so that one kernel serves all cotangents of a region.
    """
    try:
        with _lock:
            todo = {id(b): b for b in targets if b.array is None}
            if any(b.postponed for b in todo.values()):
                catch_up(todo.values())
                todo = {i: b for i, b in todo.items() if b.array is None}
            views = [b for b in todo.values() if b.node.prim.view]
            for b in views:
                del todo[id(b)]
                source = region.viewed(b)
                if source.array is None:
                    todo[id(source)] = source
            if thread.deferring:
                todo.update((id(b), b) for b in thread.deferring if b.array is None)
                thread.deferring.clear()
            if todo:
                for group in region.kernels(list(todo.values())):
                    _launch(group)
            for b in views:
                _same(b, region.viewed(b))
    except BaseException:
        locks.let_go(_lock)
        raise


class Work(NamedTuple):
    """What one kernel does: all that decides its text, whether it runs or is explained."""

    region: region.Region
    targets: list[Buffer]
    loops: list[tuple[Shape, tuple[int, ...] | None]]
    shape: Shape
    axes: tuple[int, ...] | None


def work_of(targets: list[Buffer], lazy: bool) -> Work:
    """The kernel that gives the targets, of one loop shape, their bytes (and others that are worth theirs).

    lazy: on a device that is (see ``Device.lazy``).
    """
    work = region.collect(targets)
    targets = (region.with_results if lazy else region.with_costly)(work, targets)
    loops = [region.loop_of(b) for b in targets]
    return Work(work, targets, loops, loops[0][0], next((a for _, a in loops if a is not None), None))


def _launch(targets: list[Buffer]) -> None:
    """Evaluate targets of one loop shape in one kernel."""
    device = targets[0].node.aval.device
    work, targets, loops, shape, axes = work_of(targets, device.lazy)
    leaves = [b.array for b in work.leaves]
    accountant = _buffer.accountant
    if accountant is not None:
        accountant.read(work.leaves)
    if _buffer.keeper is None:
        _run_kernel(work, targets, loops, shape, axes, leaves, device)
        return
    names = [b.node.prim.name for b in targets]
    in_room([b.node.aval for b in targets], names, _run_kernel, work, targets, loops, shape, axes, leaves, device)


def _run_kernel(
    work: region.Region,
    targets: list[Buffer],
    loops: list[Any],
    shape: tuple[int, ...],
    axes: tuple[int, ...] | None,
    leaves: list[Any],
    device: Any,
) -> None:
    """Fill the targets by one kernel, whose memory is to be had."""
    accountant = _buffer.accountant
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


def program_of(
    work: region.Region, targets: list[Buffer], shape: Shape, leaves: list[Any], xp: Any
) -> tuple[emit.Program, list[str]]:
    """The CPU's program for the targets, and how the leaves lie under it."""
    layouts = [tiles.layout(x, shape) for x in leaves]
    return emit.program(work, layouts, targets, xp), layouts


def _run_on_cpu(
    work: region.Region, targets: list[Buffer], loops: list, leaves: list[Any], axes: tuple[int, ...], device: Any
) -> tuple[list[Any], tuple[str, ...], int]:
    """The outputs, the names of the primitives run, and bytes of scratch."""
    shape = loops[0][0]
    program, layouts = program_of(work, targets, shape, leaves, device.xp)
    outputs = []
    for b, (_, reduced) in zip(targets, loops, strict=True):
        kept = shape if reduced is None else tuple(1 if i in reduced else n for i, n in enumerate(shape))
        outputs.append(device.empty(kept, b.node.aval.dtype))
    return outputs, program.names, tiles.run(program, shape, leaves, layouts, outputs, axes, device)
