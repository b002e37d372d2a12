"""The executor applies primitives, at once or lazily, and runs the tasks that compute them.

:class:`Executor` reserves bytes with the tracker in force (``core/tracking.py``) and reports all work to it.  A thread
may have an executor of its own: abstract evaluation (``abstract_evaluation.py``), a rerun (``delegating_executor.py``).

Only elementwise nodes are lazy.  Barriers run when they are recorded; views are created at once and own no bytes.
"""

from __future__ import annotations

from collections.abc import Callable, MutableMapping, Sequence
from typing import Any, TypeVar

from tapegrad.core import state, tracking
from tapegrad.core.aval import shaped
from tapegrad.core.buffer import PLAIN, Buffer
from tapegrad.core.node import NO_PARAMS, Node, leaf
from tapegrad.core.primitive import Drawn, Reduction, View
from tapegrad.core.protocols import Steps
from tapegrad.core.state import during, thread
from tapegrad.device import Device, abstract_array, dtypes, traffic
from tapegrad.device.oom_retry import retried
from tapegrad.device.types import Array
from tapegrad.engine import lowering, region
from tapegrad.engine.operands import Operands
from tapegrad.engine.realize import announce, apart, array_of, arrays_of, gather, postponed, realize, waiting_below
from tapegrad.engine.task import Task

T = TypeVar("T")
CONSTANTS: dict[Any, Buffer] = {}
OPERANDS = Operands()
_LEAST_CREATED = 2**20
"""Memory for a new array of at least so many bytes is reserved before it is created; for less, when it is counted."""


class Executor:
    """Runs tasks, and reports them to the tracker in force."""

    keeps_arrays = False

    # Applications, recorded ------------------------------------------------------------------------------------

    def apply(self, node: Node, inputs: tuple[Buffer, ...]) -> Buffer:
        """Apply a primitive, and report the node to the recorders; return the buffer of its value."""
        out = self.run_barrier(node, inputs) if node.site is None else self.run_elementwise(node, inputs)
        announce(node, inputs, out)
        return out

    def named(self, buffer: Buffer, name: str) -> None:
        """Note that the user calls a value ``name``."""

    def device(self, device: Device) -> Device:
        """Return the device on which this executor allocates for ``device``: itself."""
        return device

    def pull(self, steps: Steps, ct: Any, residuals: Sequence[Buffer]) -> Sequence[Any] | None:
        """Return the cotangents of a node's operands by the listed steps of its rules: arrays, or buffers if counted.

        ``ct``: an array or a buffer.  None: some value is not there, so the rules themselves must run.
        """
        tracker = tracking.current
        if not tracker.counts:
            return steps.pull(ct.array if isinstance(ct, Buffer) else ct, residuals)
        counted = None if tracker.follows_each else steps.count(ct, residuals, _wrap)
        return counted or steps.run(ct, residuals)

    def in_earnest(self, f: Callable[[], T], otherwise: T) -> T:
        """Return ``f()``, which depends on values; in abstract evaluation, which has none, ``otherwise``."""
        return f()

    def happened(self, f: Callable[[], object]) -> None:
        """Call ``f``, which reports an event."""
        f()

    def decided(self, f: Callable[[], T], otherwise: T) -> T:
        """Return ``f()``, which depends on values and on which later tasks depend."""
        return self.in_earnest(f, otherwise)

    def index(self, t: Any) -> Any:
        """Return the value of an integer tensor, which selects a view."""
        return t.item()

    def number(self, f: Callable[[], Any]) -> Any:
        """Return ``f()``, a number that may differ at each call."""
        return during(f, batches=()) if thread.batches else f()

    def on_values(self, f: Callable[..., object], *arrays: Array) -> bool:
        """Call ``f``, which may raise, on arrays; return whether they have values."""
        f(*arrays)
        return True

    def differentiable(self, node: Node) -> None:
        """Check that a backward pass may begin at ``node``.  Raises DryRunError in abstract evaluation."""

    @property
    def constants(self) -> MutableMapping[Any, Buffer]:
        """The shared constants created so far."""
        return CONSTANTS

    @property
    def operands(self) -> Operands:
        """The copies of arrays that users have passed as operands."""
        return OPERANDS

    def concrete(self, array: Array, node: Node) -> Array:
        """Return ``array``, the abstract value of ``node``, if bytes may be read here.  Raises DryRunError."""
        raise abstract_array.unread(repr(node))

    # Applications, not recorded ------------------------------------------------------------------------------

    def run(self, node: Node, inputs: tuple[Buffer, ...], into: Buffer | None = None) -> Buffer:
        """Apply a node without recording it; return the buffer of its value: a new one, or ``into``."""
        f = self.run_barrier if node.site is None else self.run_elementwise
        return f(node, inputs, into)

    def run_elementwise(self, node: Node, inputs: tuple[Buffer, ...], into: Buffer | None = None) -> Buffer:
        """Return a buffer for the value of an elementwise node: filled if it is small, else pending."""
        site: Any = node.site
        if not site.small:
            return self.deferred(node, inputs, into)
        tracker = tracking.current
        tracker.applied(node, inputs)
        arrays = arrays_of(inputs)
        out = _filled(self.small(site, arrays), node, into)  # which frees memory if necessary
        tracker.ran_small(node, arrays)
        return out

    def deferred(self, node: Node, inputs: tuple[Buffer, ...], into: Buffer | None = None) -> Buffer:
        """Return a pending buffer for an elementwise node; of a view of a filled buffer, one that shows its bytes."""
        prim: Any = node.prim
        if prim.view and (array := inputs[0].array) is not None:
            tracking.current.applied(node, inputs)
            root = inputs[0].root()
            return Buffer(array, node, base=root) if into is None else into.show(array, root)
        must, span, loop = region.admit(inputs, node.aval)
        if must:
            realize(must)
        tracking.current.applied(node, inputs)
        return _pending(node, inputs, span, loop, into)

    def small(self, site: Any, arrays: list[Array]) -> Array:
        """Return the value of a small elementwise node, which ``site`` has prepared, from arrays."""
        aval = site.aval
        if site.ufunc is None:
            out = aval.device.empty(aval.shape, aval.dtype)
            site.prim.impl(aval.device.xp, out, *arrays)
            return out
        if site.pooled:
            return site.ufunc(*arrays, out=aval.device.empty(aval.shape, aval.dtype))
        array = site.ufunc(*arrays)
        return array if aval.ndim else aval.device.xp.asarray(array)  # ufuncs turn 0-d arrays into scalars

    def run_barrier(self, node: Node, inputs: tuple[Buffer, ...], into: Buffer | None = None) -> Buffer:
        """Return a buffer for the value of a barrier or view."""
        prim, aval, tracker = node.prim, node.aval, tracking.current
        if into is None and thread.deferring and waiting_below(node, inputs) is not None:
            return postponed(node, inputs)
        inputs, beside = (inputs, None) if prim.beside is None else apart(prim, inputs)
        tracker.applied(node, inputs if beside is None else (*inputs, beside))
        if isinstance(prim, View) and aval.size:
            array = array_of(inputs[0])
            if not prim.copies or array.flags.c_contiguous:  # it takes neither memory nor time
                return self._view(node, inputs[0], self.viewed(node, array), into)
        elif isinstance(prim, Drawn) and aval.device.lazy:
            return _pending(node, (), (1, 0), None, into)  # redrawn by every kernel that needs it, never stored
        elif isinstance(prim, Reduction) and not region.runs_at_once(inputs[0].node.aval):
            return self._reduction(node, inputs, into)
        arrays = arrays_of(inputs)
        written = (node,) if beside is None else (node, beside.node)
        with tracker.reserved([n.aval for n in written], [n.prim.name for n in written]):
            return self._barrier(node, inputs, arrays, into, beside)

    def viewed(self, node: Node, array: Array) -> Array:
        """Return the array of a view that needs no copy; nothing is asked of the device, so nothing waits."""
        prim: Any = node.prim
        view: Array = prim.impl(node.aval.device.xp, array, **node.params)
        return view

    def _view(self, node: Node, source: Buffer, array: Array, into: Buffer | None) -> Buffer:
        """Return a buffer for ``array``, a view of ``source``, or for a copy if it should not keep the rest alive."""
        aval, root, tracker = node.aval, source.root(), tracking.current
        if tracker.copies_slivers and region.is_sliver(array, aval, root):
            task = lowering.Application(node.prim, [source.array], node.params, aval)
            with tracker.reserved((aval,), task.names):
                return self._reported(task, self.do(lowering.copy_of(array, aval)), node, into)
        return Buffer(array, node, base=root) if into is None else into.show(array, root)

    def _reduction(self, node: Node, inputs: tuple[Buffer, ...], into: Buffer | None) -> Buffer:
        """Return a buffer for a reduction with a region as its prologue; it may be deferred to share a kernel."""
        source = inputs[0]
        if source.loop is not None or source.state:  # it is computed from results itself
            realize(inputs)
        out = _pending(node, inputs, (1, 1), (source.node.aval.shape, node.params["axis"]), into)
        if thread.deferring is None:
            realize((out,))
        else:
            thread.deferring.append(out)
        return out

    def _barrier(
        self, node: Node, inputs: tuple[Buffer, ...], arrays: list[Array], into: Buffer | None, beside: Buffer | None
    ) -> Buffer:
        """Return a buffer for the value of a barrier that runs now, or of a view that may have to copy."""
        prim, aval = node.prim, node.aval
        task = lowering.Application(prim, arrays, node.params, aval, None if beside is None else beside.node.aval)
        do = self._do_reserving if task.scratch_bytes else self.do
        try:
            outputs = do(task)
        except MemoryError as e:
            traffic.taken()
            outputs = retried(e, aval.device, prim.name, aval.nbytes, lambda: do(task))
        if beside is not None:
            _filled(outputs[1], beside.node, beside)
        if prim.view and aval.device.is_view(outputs[0], arrays[0]):
            return self._view(node, inputs[0], outputs[0], into)
        return self._reported(task, outputs, node, into)

    def _do_reserving(self, task: lowering.Application) -> list[Array]:
        """Run ``task`` with its scratch memory reserved and counted; return the arrays written."""
        tracker = tracking.current
        if task.category is None:
            scratch = shaped((task.scratch_bytes,), dtypes.uint8, task.device)
            with tracker.reserved((scratch,), ("scratch",)):
                return self.do(task)
        nodes = [Node(task.prim, NO_PARAMS, shaped(*like, task.device)) for like in task.temporaries]
        with tracker.reserved([n.aval for n in nodes], task.names):
            temporaries = self._temporaries(task)
            task.counted = [Buffer(*pair) for pair in zip(temporaries, nodes, strict=True)]  # as long as the task is
            for buffer in task.counted:
                tracker.label(buffer, task.category, task.names[0])
            return self.do(task, temporaries)

    def _reported(self, task: Task, outputs: list[Array], node: Node, into: Buffer | None) -> Buffer:
        """Return a buffer for the first of the ``outputs`` of ``task``; report the task to the tracker."""
        passes = traffic.taken()
        out = _filled(outputs[0], node, into)
        by_task = task.temporaries or getattr(node.prim, "gathers", False)
        moves = task.moves(outputs, []) if by_task else [(task.reads, outputs)]
        tracking.current.ran(task.names, moves, passes, 0 if task.category else task.scratch_bytes)
        return out

    def values(self, task: lowering.Function) -> list[Buffer]:
        """Run ``task``, which yields values without a recipe; return their buffers."""
        if not task.is_kernel and sum(a.nbytes for a in task.avals) < _LEAST_CREATED:
            return self._values(task)  # memory is freed when the bytes are counted
        with tracking.current.reserved(task.avals, task.names):
            return self._values(task)

    @property
    def changes(self) -> bool:
        """Whether arrays may be changed in place (:meth:`change`)."""
        return True

    def change(self, task: lowering.Change) -> None:
        """Run ``task``, which writes into existing arrays."""
        self.do(task)
        tracking.current.ran(task.names, task.moves([], []), traffic.taken())

    def _values(self, task: lowering.Function) -> list[Buffer]:
        arrays, passes = self.do(task), traffic.taken()
        results = [Buffer(array, leaf(aval)) for array, aval in zip(arrays, task.avals, strict=True)]
        if task.is_kernel:
            tracking.current.ran(task.names, [(task.reads, arrays)], passes)
        return results

    # Tasks -----------------------------------------------------------------------------------------------------

    def kernel(self, targets: list[Buffer]) -> None:
        """Evaluate pending buffers of one loop shape in one kernel."""
        targets, needed = gather(targets)
        if not targets:
            return
        kernel = lowering.of_region(targets, needed=needed)
        task, nodes, tracker = kernel.task, [b.node for b in kernel.targets], tracking.current
        tracker.read(kernel.region.leaves)
        with tracker.reserved([n.aval for n in nodes], [n.prim.name for n in nodes]):
            temporaries, outputs = self._evaluated(kernel)
            for b, out in zip(kernel.targets, outputs, strict=True):
                b.fill(out.reshape(b.node.aval.shape))
                tracker.filled(b)
        tracker.ran(task.names, task.moves(outputs, temporaries), scratch=task.scratch_bytes)

    def _evaluated(self, kernel: lowering.Kernel) -> tuple[list[Array], list[Array]]:
        """Run a kernel's task; return the temporaries lent to it and the arrays written."""
        task = kernel.task
        temporaries = self._temporaries(task) if task.temporaries else []
        return temporaries, self.do(task, temporaries)

    def _temporaries(self, task: Task) -> list[Array]:
        return task.device.arrays(task.temporaries)

    def do(self, task: Task, temporaries: list[Array] | None = None) -> list[Array]:
        """Run ``task``; return the arrays written."""
        outputs = task.device.arrays(task.writes) if task.writes else []
        if temporaries is None:
            temporaries = self._temporaries(task) if task.temporaries else []
        return task.run(outputs, temporaries)


def _wrap(step: Any, array: Array, *operands: Array) -> Buffer:
    """Return a buffer for ``array``, the result of a small ``step`` of a rule on ``operands``."""
    node = Node(step.prim, step.params, step.aval, step.site)
    out = Buffer(array, node)
    tracking.current.ran_small(node, operands)
    return out


def _filled(array: Array, node: Node, into: Buffer | None) -> Buffer:
    if into is None:
        return Buffer(array, node)
    into.fill(array)
    tracking.current.filled(into)
    return into


def _pending(node: Node, inputs: tuple[Buffer, ...], span: Any, loop: Any, into: Buffer | None) -> Buffer:
    if into is None:
        into = Buffer(None, node, inputs, span, loop)
    else:
        into.inputs, into.span, into.loop, into.state = inputs, span, loop, PLAIN
    return into


EXECUTOR = Executor()
state.install(EXECUTOR)
