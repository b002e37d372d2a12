"""Realization: the only way to the bytes of a buffer.  :func:`realize` evaluates each pending node once.

A rerun of a checkpointed function may postpone nodes of any kind (:func:`postponed`): they are applied in program order
when bytes are requested that depend on them, else never.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from tapegrad.core import locks, tracking
from tapegrad.core.aval import ShapedArray
from tapegrad.core.buffer import EVICTED, POSTPONED, Buffer
from tapegrad.core.node import Node
from tapegrad.core.primitive import Primitive
from tapegrad.core.state import during, thread
from tapegrad.device import abstract_array
from tapegrad.device.float_errors import errors_now, treating_errors
from tapegrad.device.host_scalar import HostScalar
from tapegrad.engine import region

_lock = locks.lock()


def announce(node: Node, inputs: tuple[Buffer, ...], out: Buffer) -> None:
    """Report a node to the tracker, which may have to recompute its value, then to the recorders of this thread."""
    recorders = thread.recorders
    if recorders:
        tracking.current.made(node, inputs, out)
        for recorder in recorders:
            recorder.record(node, inputs, out)


def recompute(node: Node, inputs: tuple[Buffer, ...], into: Buffer | None) -> Buffer:
    """Apply a node again, without recording it; return the buffer of its value: ``into``, or a new one."""
    return during(thread.executor.run, node, inputs, into, recorders=(), deferring=None)


def postponed(node: Node, inputs: tuple[Buffer, ...], into: Buffer | None = None) -> Buffer:
    """Return a buffer for a node of any kind, which is applied when bytes that depend on it are requested, or never."""
    out = Buffer(None, node, inputs) if into is None else into
    out.inputs, out.errors, out.state = inputs, errors_now(), POSTPONED
    tracking.current.called(node)
    return out


def by_product(node: Node, inputs: tuple[Buffer, ...]) -> Buffer:
    """Return a buffer for a by-product (``Primitive.beside``), filled by the operation whose last operand it is.

    It is a constant of differentiation: only the tracker and batches are notified of it, not tapes.
    """
    out = postponed(node, inputs)
    if thread.recorders:
        tracking.current.made(node, inputs, out)
        for recorder in thread.recorders:
            if recorder in thread.batches:
                recorder.record(node, inputs, out)
    return out


def apart(prim: Primitive, inputs: tuple[Buffer, ...]) -> tuple[tuple[Buffer, ...], Buffer | None]:
    """Return the operands, and the by-product to be written: None if it is filled already."""
    operands, beside = prim.apart(inputs)
    return operands, beside if beside is not None and beside.array is None else None


def catch_up(targets: Iterable[Buffer]) -> None:
    """Recompute the evicted ones among ``targets``, and apply the nodes of the postponed ones, in program order.

    So are postponed nodes on which they depend.  Elementwise values are pending afterwards.
    """
    with _lock:
        stack: list[Any] = [b for b in targets if b.state and b.array is None]
        todo: dict[int, Any] = {}
        evicted: dict[int, Buffer] = {}
        while stack:
            b = stack.pop()
            if b.state == EVICTED:
                evicted[id(b)] = b
            elif b.node.index not in todo:
                todo[b.node.index] = b
                stack += [k for k in b.inputs if k.state == POSTPONED and k.array is None]
        for b in list(todo.values()):
            beside = b.node.prim.apart(b.inputs)[1]
            if beside is not None:
                todo.pop(beside.node.index, None)  # the same task fills it
        if evicted:
            targets = list(evicted.values())
            targets[0].recipe.restore(targets)
        during(_apply_all, todo, recorders=(), deferring=None)


def _apply_all(todo: dict[int, Buffer]) -> None:
    for index in sorted(todo):
        _apply_postponed(todo.pop(index))


def _apply_postponed(b: Buffer) -> None:
    """Apply the node of a postponed buffer under the floating-point error state in which it was recorded."""
    with treating_errors(b.errors):
        thread.executor.run(b.node, b.inputs, b)


def stored(buffer: Buffer) -> Any:
    """Return the array of ``buffer`` as stored, realized if necessary; while the caller holds it, it is not evicted."""
    while (array := buffer.array) is None:  # another thread may evict it anew
        realize((buffer,))
    return array


def array_of(buffer: Buffer) -> Any:
    """Return the device array of ``buffer``, realized if necessary."""
    array = buffer.array
    if array is None:
        array = stored(buffer)
    return _special(array, buffer) if type(array) in SPECIAL else array


def arrays_of(buffers: Iterable[Buffer]) -> list[Any]:
    """Return the device arrays of ``buffers``, realized if necessary."""
    arrays = []
    for b in buffers:
        array = b.array
        arrays.append(array_of(b) if array is None or type(array) in SPECIAL else array)
    return arrays


SPECIAL = {HostScalar, abstract_array.AbstractArray}
"""Types of stored arrays that kernels cannot read as they are."""


def _special(array: Any, buffer: Buffer) -> Any:
    return array.on_device() if type(array) is HostScalar else thread.executor.concrete(array, buffer.node)


def waiting(aval: ShapedArray, f: Callable[[], Any]) -> Any:
    """Return the tensor ``f()``, realized; reductions of arrays like ``aval`` in ``f`` share a kernel with its result.

    On the CPU, and in a backward pass, it is simply ``f()``.
    """
    if not aval.device.lazy or thread.deferring is not None:
        return f()
    deferring: list[Buffer] = []
    return during(_finished, f, deferring, deferring=deferring)


def _finished(f: Callable[[], Any], deferring: list[Buffer]) -> Any:
    t = f()
    deferring.clear()
    realize((t._buffer,))
    return t


def waiting_below(node: Node, inputs: tuple[Buffer, ...]) -> Buffer | None:
    """Return the deferred reduction of which a node is a view, if any: the view is deferred, too."""
    while node.prim.view and inputs and inputs[0].array is None:
        below = inputs[0]
        if not below.state:
            return below if below.loop is not None else None
        node, inputs = below.node, below.inputs
    return None


def gather(targets: list[Buffer]) -> tuple[list[Buffer], region.Region]:
    """Return pending ``targets`` and the region that they need, with the arrays of all its leaves.

    Leaves that are evicted are recomputed; an elementwise one is computed in the same kernel, if that stays short.
    """
    area = region.collect(targets)
    if not area.evicted:
        return targets, area
    stays: dict[int, tuple[Buffer, Any]] = {}  # leaves and their arrays, which are not evicted meanwhile
    while True:
        stays.update((id(b), (b, x)) for b, x in zip(area.leaves, area.arrays, strict=True) if x is not None)
        missing = [b for b in area.evicted if id(b) not in stays]
        if not missing:
            break
        catch_up(missing)
        targets = [b for b in targets if b.array is None and not b.state]  # one may be filled, or evicted, along
        area = region.collect(targets)
        if len(area.order) > region.MAX_NODES or len(area.leaves) > region.MAX_LEAVES:
            stays.update((id(b), (b, stored(b))) for b in missing)
            targets = [b for b in targets if b.array is None and not b.state]
            area = region.collect(targets)
    area.arrays = [stays[id(b)][1] for b in area.leaves]
    return targets, area


def realize(targets: Iterable[Buffer]) -> None:
    """Give every target its bytes; targets that share work share kernels.

    Reductions deferred by a backward pass are realized along, so one kernel serves all cotangents of a region.
    """
    with _lock:
        pending: list[Buffer] = []
        postponed: list[Buffer] = []
        waiting: list[Buffer] = []
        for b in targets:
            if b.array is None and not b.state:
                pending.append(b)
            elif b.array is None:
                below = waiting_below(b.node, b.inputs)
                (postponed if below is None else waiting).append(b)
                if below is not None:
                    pending.append(below)
        if postponed:
            catch_up(postponed)
        todo: dict[int, Buffer] = {}
        views: dict[int, Buffer] = {}
        for b in (*pending, *postponed, *(thread.deferring or ())):
            if b.node.prim.view and b.array is None and not b.state:
                views[id(b)] = b
                b = region.viewed(b)
            if b.array is None and not b.state:  # what was recomputed first may have been evicted since
                todo[id(b)] = b
        if thread.deferring:
            thread.deferring.clear()
        if todo:
            pending = list(todo.values())
            groups = region.kernels(pending) if len(pending) > 1 else [pending]
            thread.executor.kernel(groups[0])
            for group in groups[1:]:
                left = [b for b in group if not b.state]  # a kernel before may have evicted one with what it reads
                if left:
                    thread.executor.kernel(left)
        for b in views.values():
            source = region.viewed(b)
            b.show(stored(source), source.root())
            tracking.current.filled(b)
        if waiting:
            catch_up(waiting)
