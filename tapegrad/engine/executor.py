"""The executor applies primitives, now or later, and does their works.

:class:`Executor` reserves bytes with the tracker in force (``core/tracking.py``), whichever it is, and reports all
work to it.  A thread may have an executor of its own: a dry run (``dry_run.py``), a rerun (``above.py``).

Only elementwise nodes are lazy.  Barriers run when they are recorded; views are made at once and own no bytes.
"""

from __future__ import annotations

from collections.abc import Callable, MutableMapping, Sequence
from typing import Any, TypeVar

from tapegrad.core import state, tracking
from tapegrad.core.aval import ShapedArray, shaped
from tapegrad.core.buffer import PLAIN, Buffer
from tapegrad.core.node import NO_PARAMS, Node, leaf
from tapegrad.core.primitive import Drawn, Reduction, View
from tapegrad.core.protocols import Steps
from tapegrad.core.state import during, thread
from tapegrad.device import Device, dtypes, phantom, tally
from tapegrad.device.pressure import retried
from tapegrad.device.types import Array
from tapegrad.engine import make, region
from tapegrad.engine.evaluate import announce, apart, array_of, arrays_of, fill, gather, postponed, waiting_below
from tapegrad.engine.operands import Operands
from tapegrad.engine.work import Work

T = TypeVar("T")
CONSTANTS: dict[Any, Buffer] = {}
OPERANDS = Operands()
_LEAST_CREATED = 2**20
"""Bytes of a new array for which room is made before it is made; for less it is made when the bytes are counted."""


class Executor:
    """Does works, and reports them to the tracker in force."""

    keeps_arrays = False

    # Applications, recorded ------------------------------------------------------------------------------------

    def apply(self, node: Node, inputs: tuple[Buffer, ...]) -> Buffer:
        """One application of a primitive, recorded."""
        out = self.run_barrier(node, inputs) if node.site is None else self.run_elementwise(node, inputs)
        announce(node, inputs, out)
        return out

    def named(self, buffer: Buffer, name: str) -> None:
        """The user calls a value ``name``."""

    def device(self, device: Device) -> Device:
        """What stands for ``device``: itself."""
        return device

    def pull(self, steps: Steps, ct: Any, residuals: Sequence[Buffer]) -> Sequence[Any] | None:
        """Cotangents of what a node read, by the listed steps of its rules: arrays, or buffers where somebody counts.

        ``ct``: an array or a buffer.  None: some value is not there, so the rules themselves must run.
        """
        tracker = tracking.current
        if not tracker.counts:
            return steps.pull(ct.array if isinstance(ct, Buffer) else ct, residuals)
        counted = None if tracker.follows_each else steps.count(ct, residuals, _wrap)
        return counted or steps.run(ct, residuals)

    def in_earnest(self, f: Callable[[], T], otherwise: T) -> T:
        """What ``f()`` returns, which depends on values; ``otherwise`` in a dry run, which has no values."""
        return f()

    def happened(self, f: Callable[[], object]) -> None:
        """Call ``f``, which tells of something that has happened."""
        f()

    def decided(self, f: Callable[[], T], otherwise: T) -> T:
        """What ``f()`` returns, which depends on values, and on which later works depend."""
        return self.in_earnest(f, otherwise)

    def index(self, t: Any) -> Any:
        """The value of an integer: what it selects is a view."""
        return t.item()

    def number(self, f: Callable[[], Any]) -> Any:
        """What ``f()`` returns: a number that may differ at each call."""
        return during(f, batches=()) if thread.batches else f()

    def on_values(self, f: Callable[..., object], *arrays: Array) -> bool:
        """Call ``f``, which raises an error, on arrays.  True: they have values."""
        f(*arrays)
        return True

    def differentiable(self, node: Node) -> None:
        """A walk begins at ``node``.  Raises DryRunError where a dry run may not ask for that."""

    @property
    def constants(self) -> MutableMapping[Any, Buffer]:
        """Shared constants made so far."""
        return CONSTANTS

    @property
    def operands(self) -> Operands:
        """Copies of the arrays that users have passed as operands."""
        return OPERANDS

    def phantom(self, array: Array, node: Node) -> Array:
        """``array``, the value of ``node``, which a dry run did not compute.  Raises DryRunError."""
        raise phantom.unread(repr(node))

    # Applications, not recorded ------------------------------------------------------------------------------

    def run(self, node: Node, inputs: tuple[Buffer, ...], into: Buffer | None = None) -> Buffer:
        """A buffer for the value of a node: a new one, or ``into``."""
        f = self.run_barrier if node.site is None else self.run_elementwise
        return f(node, inputs, into)

    def run_elementwise(self, node: Node, inputs: tuple[Buffer, ...], into: Buffer | None = None) -> Buffer:
        """A buffer for the value of an elementwise node: filled if it is small, else pending."""
        site: Any = node.site
        if not site.small:
            return self.deferred(node, inputs, into)
        tracker = tracking.current
        tracker.applied(node, inputs)
        arrays = arrays_of(inputs)
        out = _filled(self.small(site, arrays), node, into)  # memory is freed there, if need be
        tracker.ran_small(node, arrays)
        return out

    def deferred(self, node: Node, inputs: tuple[Buffer, ...], into: Buffer | None = None) -> Buffer:
        """A pending buffer for the value of an elementwise node; a view of a filled one shows its bytes at once."""
        prim: Any = node.prim
        if prim.view and (array := inputs[0].array) is not None:
            tracking.current.applied(node, inputs)
            root = inputs[0].root()
            return Buffer(array, node, base=root) if into is None else into.show(array, root)
        must, span, loop = region.admit(inputs, node.aval)
        if must:
            fill(must)
        tracking.current.applied(node, inputs)
        return _pending(node, inputs, span, loop, into)

    def small(self, site: Any, arrays: list[Array]) -> Array:
        """The value of a small elementwise node, which ``site`` has prepared, from arrays."""
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
        """A buffer for the value of a barrier or view."""
        prim, aval, tracker = node.prim, node.aval, tracking.current
        if into is None and thread.deferring and waiting_below(node, inputs) is not None:
            return postponed(node, inputs)
        inputs, beside = (inputs, None) if prim.beside is None else apart(prim, inputs)
        tracker.applied(node, inputs if beside is None else (*inputs, beside))
        if isinstance(prim, View) and aval.size:
            array = array_of(inputs[0])
            if not prim.copies or array.flags.c_contiguous:  # it takes no memory and no time
                return self._view(node, inputs[0], self.viewed(node, array), into)
        elif isinstance(prim, Drawn) and aval.device.lazy:
            return _pending(node, (), (1, 0), None, into)  # redrawn by every kernel that needs it, never stored
        elif isinstance(prim, Reduction) and not region.runs_at_once(inputs[0].node.aval):
            return self._reduction(node, inputs, into)
        arrays = arrays_of(inputs)
        if beside is None:
            return tracker.reserve((aval,), (prim.name,), self._barrier, node, inputs, arrays, into)
        avals, names = (aval, beside.node.aval), (prim.name, beside.node.prim.name)
        return tracker.reserve(avals, names, self._barrier, node, inputs, arrays, into, beside)

    def viewed(self, node: Node, array: Array) -> Array:
        """The array of a view that takes no copy: nothing is asked of the device, so nothing waits."""
        prim: Any = node.prim
        view: Array = prim.impl(node.aval.device.xp, array, **node.params)
        return view

    def _view(self, node: Node, source: Buffer, array: Array, into: Buffer | None) -> Buffer:
        """A buffer for ``array``, a view of ``source``; if it should not keep the rest of that, for a copy of it."""
        aval, root, tracker = node.aval, source.root(), tracking.current
        if tracker.copies_slivers and region.is_sliver(array, aval, root):
            work = make.Application(node.prim, [source.array], node.params, aval)
            copy = lambda: self._reported(work, self.do(make.copy_of(array, aval)), node, into)
            return tracker.reserve((aval,), work.names, copy)
        return Buffer(array, node, base=root) if into is None else into.show(array, root)

    def _reduction(self, node: Node, inputs: tuple[Buffer, ...], into: Buffer | None) -> Buffer:
        """A buffer for a reduction that takes a region as its prologue; it may wait to share a kernel."""
        source = inputs[0]
        if source.loop is not None or source.state:  # it is computed from results itself
            fill(inputs)
        out = _pending(node, inputs, (1, 1), (source.node.aval.shape, node.params["axis"]), into)
        if thread.deferring is None:
            fill((out,))
        else:
            thread.deferring.append(out)
        return out

    def _barrier(
        self, node: Node, inputs: tuple[Buffer, ...], arrays: list[Array], into: Buffer | None,
        beside: Buffer | None = None,
    ) -> Buffer:  # fmt: skip
        """A buffer for the value of a barrier that runs now, or of a view that may have to copy."""
        prim, aval = node.prim, node.aval
        work = make.Application(prim, arrays, node.params, aval, None if beside is None else beside.node.aval)
        do = self._do_reserving if work.scratch_bytes else self.do
        try:
            outputs = do(work)
        except MemoryError as e:
            tally.taken()
            outputs = retried(e, aval.device, prim.name, aval.nbytes, lambda: do(work))
        if beside is not None:
            _filled(outputs[1], beside.node, beside)
        if prim.view and aval.device.is_view(outputs[0], arrays[0]):
            return self._view(node, inputs[0], outputs[0], into)
        return self._reported(work, outputs, node, into)

    def _do_reserving(self, work: make.Application) -> list[Array]:
        """The arrays that ``work`` writes; the budget and the counts include its scratch."""
        if work.category is not None:
            avals = [shaped(shape, dtype, work.device) for shape, dtype in work.temporaries]
            return tracking.current.reserve(avals, work.names, self._do_counted, work, avals)
        scratch = shaped((work.scratch_bytes,), dtypes.uint8, work.device)
        return tracking.current.reserve((scratch,), ("scratch",), self.do, work)

    def _do_counted(self, work: make.Application, avals: list[ShapedArray]) -> list[Array]:
        """The arrays that ``work`` writes; its temporaries, like ``avals``, are counted until the result is, too."""
        temporaries = self._temporaries(work)
        nodes = [Node(work.prim, NO_PARAMS, aval) for aval in avals]
        work.counted = [Buffer(*pair) for pair in zip(temporaries, nodes, strict=True)]
        for buffer in work.counted:
            tracking.current.label(buffer, work.category or "", work.names[0])
        return self.do(work, temporaries)

    def _reported(self, work: Work, outputs: list[Array], node: Node, into: Buffer | None) -> Buffer:
        """A buffer for the first of the ``outputs`` of ``work``, which is reported to the tracker."""
        passes = tally.taken()
        out = _filled(outputs[0], node, into)
        by_work = work.temporaries or getattr(node.prim, "gathers", False)
        moves = work.moves(outputs, []) if by_work else [(work.reads, outputs)]
        tracking.current.ran(work.names, moves, passes, 0 if work.category else work.scratch_bytes)
        return out

    def values(self, work: make.Function) -> list[Buffer]:
        """Values without a recipe, which ``work`` yields."""
        if not work.is_kernel and sum(a.nbytes for a in work.avals) < _LEAST_CREATED:
            return self._values(work)  # there is room, or it is made when the bytes are counted
        return tracking.current.reserve(work.avals, work.names, self._values, work)

    @property
    def changes(self) -> bool:
        """Whether arrays may be changed in place (:meth:`change`)."""
        return True

    def change(self, work: make.Change) -> None:
        """Do ``work``, which writes into arrays that there are."""
        self.do(work)
        tracking.current.ran(work.names, work.moves([], []), tally.taken())

    def _values(self, work: make.Function) -> list[Buffer]:
        arrays, passes = self.do(work), tally.taken()
        results = [Buffer(array, leaf(aval)) for array, aval in zip(arrays, work.avals, strict=True)]
        if work.is_kernel:
            tracking.current.ran(work.names, [(work.reads, arrays)], passes)
        return results

    # Works -----------------------------------------------------------------------------------------------------

    def kernel(self, targets: list[Buffer]) -> None:
        """Evaluate pending buffers of one loop shape in one kernel."""
        targets, needed = gather(targets)
        if not targets:
            return
        kernel = make.of_region(targets, needed=needed)
        tracker = tracking.current
        tracker.read(kernel.region.leaves)
        avals = [b.node.aval for b in kernel.targets]
        names = [b.node.prim.name for b in kernel.targets]
        tracker.reserve(avals, names, self._kernel, kernel)

    def _kernel(self, kernel: make.Kernel) -> None:
        work, tracker = kernel.work, tracking.current
        temporaries, outputs = self._evaluated(kernel)
        for b, out in zip(kernel.targets, outputs, strict=True):
            inputs = b.inputs
            b.fill(out.reshape(b.node.aval.shape))
            tracker.filled(b, inputs)
        tracker.ran(work.names, work.moves(outputs, temporaries), scratch=work.scratch_bytes)

    def _evaluated(self, kernel: make.Kernel) -> tuple[list[Array], list[Array]]:
        """The temporaries that were lent, and the arrays written."""
        work = kernel.work
        temporaries = self._temporaries(work) if work.temporaries else []
        return temporaries, self.do(work, temporaries)

    def _temporaries(self, work: Work) -> list[Array]:
        return work.device.arrays(work.temporaries)

    def do(self, work: Work, temporaries: list[Array] | None = None) -> list[Array]:
        """The arrays that ``work`` writes."""
        outputs = work.device.arrays(work.writes) if work.writes else []
        if temporaries is None:
            temporaries = self._temporaries(work) if work.temporaries else []
        return work.run(outputs, temporaries)


def _wrap(step: Any, array: Array, *operands: Array) -> Buffer:
    """Return a buffer for ``array``, the result of a small ``step`` of a rule on ``operands``."""
    node = Node(step.prim, step.params, step.aval, step.site)
    out = Buffer(array, node)
    tracking.current.ran_small(node, operands)
    return out


def _filled(array: Array, node: Node, into: Buffer | None) -> Buffer:
    if into is None:
        return Buffer(array, node)
    inputs = into.inputs
    into.fill(array)
    tracking.current.filled(into, inputs)
    return into


def _pending(node: Node, inputs: tuple[Buffer, ...], span: Any, loop: Any, into: Buffer | None) -> Buffer:
    if into is None:
        into = Buffer(None, node, inputs, span, loop)
    else:
        into.inputs, into.span, into.loop, into.state = inputs, span, loop, PLAIN
    tracking.current.deferred(into)
    return into


EXECUTOR = Executor()
state.install(EXECUTOR)
