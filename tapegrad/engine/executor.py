"""Executors apply primitives, now or later, and do their works.

:class:`Executor` asks the account in force for room and tells it of all that is done (``core/account.py``);
:class:`Plain` is the same with nobody to tell, and so the short path of small operations; :class:`Budgeted` copies
small pieces so that they do not keep the rest.  The account brings its executor along when a block is entered.  A
thread may have one of its own: a dry run (``dry_run.py``), a rerun (``above.py``).

Only elementwise nodes are lazy.  Barriers run when they are recorded; views are made at once and own no bytes.
"""

from __future__ import annotations

from collections.abc import Callable, MutableMapping, Sequence
from operator import attrgetter
from typing import Any, TypeVar

from tapegrad.core import account, state
from tapegrad.core.account import Account
from tapegrad.core.aval import ShapedArray, shaped
from tapegrad.core.buffer import NOTHING, Buffer, Postponed
from tapegrad.core.node import NO_PARAMS, Node, leaf
from tapegrad.core.primitive import Drawn, Reduction, View
from tapegrad.core.protocols import Retained, Steps
from tapegrad.core.state import during, thread
from tapegrad.device import Device, dtypes, phantom, tally
from tapegrad.device.pressure import retried
from tapegrad.device.types import Array
from tapegrad.engine import make, region
from tapegrad.engine.evaluate import SPECIAL, announce, apart, array_of, arrays_of, fill, postponed, same, waiting_below
from tapegrad.engine.operands import Operands
from tapegrad.engine.work import Work

T = TypeVar("T")
_array = attrgetter("array")
_NOT_THERE = {*SPECIAL, type(None)}
CONSTANTS: dict[Any, Buffer] = {}
OPERANDS = Operands()
_LEAST_CREATED = 2**20
"""Bytes of a new array for which room is made before it is made; for less it is made when the bytes are counted."""


class Executor:
    """Does works, and tells the account in force of them."""

    @property
    def copies_slivers(self) -> bool:
        """Whether a view that is a small piece of an array is copied, so that it does not keep the rest."""
        return False

    # Applications, recorded ------------------------------------------------------------------------------------

    def elementwise(self, node: Node, inputs: tuple[Buffer, ...]) -> Buffer:
        """One application of an elementwise primitive, recorded: run at once if small, else deferred."""
        out = self.run_elementwise(node, inputs)
        if thread.recorders:
            announce(node, inputs, out)
        return out

    def apply(self, node: Node, inputs: tuple[Buffer, ...]) -> Buffer:
        """One application of a barrier or view primitive, recorded."""
        out = self.run_barrier(node, inputs)
        if thread.recorders:
            announce(node, inputs, out)
        return out

    def named(self, buffer: Buffer, name: str) -> None:
        """The user calls a value ``name``."""

    def device(self, device: Device) -> Device:
        """What stands for ``device``: itself."""
        return device

    def pull(self, steps: Steps, node: Node, ct: Any, residuals: Retained) -> Sequence[Any] | None:
        """Cotangents of what ``node`` read, by the listed steps of its rules (``autodiff/compiled.py``), as buffers.

        ``ct``: an array or a buffer.  None: some value is not there, so the rules themselves must run.
        """
        told = account.current.differentiating
        if told is not None:
            told(node.index)
        if not isinstance(ct, Buffer):
            ct = Buffer(ct, leaf(node.aval))
        return steps.run(ct, residuals if isinstance(residuals, tuple) else residuals.restored())

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

    # Applications, of which nobody is told ---------------------------------------------------------------------

    def run(self, node: Node, inputs: tuple[Buffer, ...], into: Buffer | None = None) -> Buffer:
        """A buffer for the value of a node: a new one, or ``into``."""
        f = self.run_barrier if node.site is None else self.run_elementwise
        return f(node, inputs, into)

    def run_elementwise(self, node: Node, inputs: tuple[Buffer, ...], into: Buffer | None = None) -> Buffer:
        """A buffer for the value of an elementwise node: filled if it is small, else pending."""
        site: Any = node.site
        who = account.current
        if not site.small:
            return self._deferred_elementwise(node, inputs, into, who)
        who.applied(node, inputs)
        arrays = arrays_of(inputs)
        array = self.small(site, arrays)
        out = Buffer(array, node) if into is None else _filled(array, node, into)  # memory is freed there, if need be
        who.ran_small(node, arrays)
        return out

    def _deferred_elementwise(
        self, node: Node, inputs: tuple[Buffer, ...], into: Buffer | None, who: Account | None
    ) -> Buffer:
        site: Any = node.site
        if site.prim.view and inputs[0].array is not None:
            if who is not None:
                who.applied(node, inputs)
            return same(Buffer(None, node, inputs) if into is None else into, inputs[0])
        must, span, loop = region.admit(inputs, site.aval)
        if must:
            fill(must)
        if who is not None:
            who.applied(node, inputs)
        if into is not None:
            into.span, into.loop = span, loop
            return into
        out = Buffer(None, node, inputs, span, loop)
        if who is not None:
            who.deferred(out)
        return out

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
        prim, aval = node.prim, node.aval
        if into is None and thread.deferring and waiting_below(node, inputs) is not None:
            return postponed(node, inputs)
        inputs, beside = (inputs, None) if prim.beside is None else apart(prim, inputs)
        who = account.current
        who.applied(node, inputs if beside is None else (*inputs, beside))
        if isinstance(prim, Drawn) and aval.device.lazy:
            return _pending(node, (), (1, 0), None, into)  # redrawn by every kernel that needs it, never stored
        if isinstance(prim, Reduction) and not region.runs_at_once(inputs[0].node.aval):
            if inputs[0].loop is not None or inputs[0].postponed:  # it is computed from results itself
                fill(inputs)
            out = _pending(node, inputs, (1, 1), (inputs[0].node.aval.shape, node.params["axis"]), into)
            if thread.deferring is None:
                fill((out,))
            else:
                thread.deferring.append(out)
            return out
        arrays = arrays_of(inputs)
        if isinstance(prim, View) and not (prim.copies and not arrays[0].flags.c_contiguous):
            return self._barrier(node, inputs, arrays, into)
        if beside is None:
            return who.in_room((aval,), (prim.name,), self._barrier, node, inputs, arrays, into)
        avals, names = (aval, beside.node.aval), (prim.name, beside.node.prim.name)
        return who.in_room(avals, names, self._barrier, node, inputs, arrays, into, beside)

    def _barrier(
        self, node: Node, inputs: tuple[Buffer, ...], arrays: list[Array], into: Buffer | None,
        beside: Postponed | None = None,
    ) -> Buffer:  # fmt: skip
        prim, aval = node.prim, node.aval
        work = make.Application(prim, arrays, node.params, aval, None if beside is None else beside.node.aval)
        if isinstance(prim, View) and aval.size and (not prim.copies or arrays[0].flags.c_contiguous):
            outputs = [self.viewed(work)]
        else:
            do = self.do if not work.scratch_bytes else self._do_in_room
            try:
                outputs = do(work)
            except MemoryError as e:
                tally.taken()
                outputs = retried(e, aval.device, prim.name, aval.nbytes, lambda: do(work))
        array = outputs[0]
        if beside is not None:
            _filled(outputs[1], beside.node, beside)
            beside.postponed = False
        if prim.view and aval.device.is_view(array, arrays[0]):
            source = inputs[0]
            root = source.root()
            if not (self.copies_slivers and region.is_sliver(array, aval, root)):
                if into is None:
                    return Buffer(array, node, base=root)
                into.array, into.base, into.inputs, into.span, into.loop = array, root, NOTHING, None, None
                return into
            copy = lambda: self._told(work, arrays, self.do(make.copy_of(array, aval)), node, into)
            return account.current.in_room((aval,), (prim.name,), copy)
        return self._told(work, arrays, outputs, node, into)

    def viewed(self, work: make.Application) -> Array:
        """The array of a view that takes no copy: nothing is asked of the device, so nothing waits."""
        prim: Any = work.prim
        array: Array = prim.impl(work.device.xp, work.reads[0], **work.params)
        return array

    def _do_in_room(self, work: make.Application) -> list[Array]:
        """The arrays that ``work`` writes; the budget and the counts include its scratch."""
        if work.category is not None:
            avals = [shaped(shape, dtype, work.device) for shape, dtype in work.temporaries]
            return account.current.in_room(avals, work.names, self._do_counted, work, avals)
        who, scratch = account.current, shaped((work.scratch_bytes,), dtypes.uint8, work.device)
        who.scratch(work.scratch_bytes)
        return who.in_room((scratch,), ("scratch",), self.do, work)

    def _do_counted(self, work: make.Application, avals: list[ShapedArray]) -> list[Array]:
        """The arrays that ``work`` writes; its temporaries, like ``avals``, are counted until the result is, too."""
        temporaries = self._temporaries(work)
        nodes = [Node(work.prim, NO_PARAMS, aval) for aval in avals]
        work.counted = [Buffer(*pair) for pair in zip(temporaries, nodes, strict=True)]
        for buffer in work.counted:
            account.current.labelled(buffer, work.category or "", work.names[0])
        return self.do(work, temporaries)

    def _told(self, work: Work, arrays: list[Array], outputs: list[Array], node: Node, into: Buffer | None) -> Buffer:
        """A buffer for the first of the ``outputs`` made of ``arrays``; the account is told of the work."""
        who = account.current
        passes = tally.taken() if tally.said.passes else ()
        out = _filled(outputs[0], node, into)
        told = work.temporaries or getattr(node.prim, "gathers", False)
        who.ran(work.names, work.moves(outputs, []) if told else [(arrays, outputs)])
        if passes:
            who.passed(passes)
        return out

    def values(self, work: make.Function) -> list[Buffer]:
        """Values without a recipe, which ``work`` yields."""
        if not work.is_kernel and sum(a.nbytes for a in work.avals) < _LEAST_CREATED:
            return self._values(work)  # there is room, or it is made when the bytes are counted
        return account.current.in_room(work.avals, work.names, self._values, work)

    @property
    def changes(self) -> bool:
        """Whether arrays may be changed in place (:meth:`change`)."""
        return True

    def change(self, work: make.Change) -> None:
        """Do ``work``, which writes into arrays that there are."""
        self.do(work)
        account.current.ran(work.names, work.moves([], []))
        account.current.passed(tally.taken())

    def _values(self, work: make.Function) -> list[Buffer]:
        arrays, passes = self.do(work), tally.taken()
        results = [Buffer(array, leaf(aval)) for array, aval in zip(arrays, work.avals, strict=True)]
        if work.is_kernel:
            account.current.ran(work.names, [(work.reads, arrays)])
            account.current.passed(passes)
        return results

    # Works -----------------------------------------------------------------------------------------------------

    def kernel(self, targets: list[Buffer]) -> None:
        """Evaluate pending buffers of one loop shape in one kernel."""
        kernel = make.of_region(targets)
        who = account.current
        who.read(kernel.region.leaves)
        avals, names = [], []
        for b in kernel.targets:
            avals.append(b.node.aval)
            names.append(b.node.prim.name)
        who.in_room(avals, names, self._kernel, kernel)

    def _kernel(self, kernel: make.Kernel) -> None:
        work, who = kernel.work, account.current
        temporaries, outputs = self._evaluated(kernel)
        for b, out in zip(kernel.targets, outputs, strict=True):
            inputs = b.inputs
            b.fill(out.reshape(b.node.aval.shape))
            who.filled(b, inputs)
        who.ran(work.names, work.moves(outputs, temporaries))
        if work.scratch_bytes:
            who.scratch(work.scratch_bytes)

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


class Counted(Executor):
    """For accounts that count."""

    def pull(self, steps: Steps, node: Node, ct: Any, residuals: Retained) -> Sequence[Any] | None:
        """Cotangents as buffers; small steps are not applied one by one unless the account follows each."""
        who = account.current
        if who.follows_each:
            return super().pull(steps, node, ct, residuals)
        if not isinstance(ct, Buffer):
            ct = Buffer(ct, leaf(node.aval))
        if not isinstance(residuals, tuple):
            residuals = residuals.restored()
        return steps.count(ct, residuals, _wrap) or steps.run(ct, residuals)


def _wrap(step: Any, array: Array, *operands: Array) -> Buffer:
    """Return a buffer for ``array``, the result of a small ``step`` of a rule on ``operands``."""
    node = Node(step.prim, step.params, step.aval, step.site)
    out = Buffer(array, node)
    account.current.ran_small(node, operands)
    return out


class Plain(Executor):
    """For the account that counts nothing and refuses nothing."""

    def apply(self, node: Node, inputs: tuple[Buffer, ...]) -> Buffer:
        """One application of a barrier or view primitive, recorded."""
        prim = node.prim
        if thread.deferring and prim.view and waiting_below(node, inputs) is not None:  # as in :meth:`run_barrier`
            out = postponed(node, inputs)
        elif isinstance(prim, View) and node.aval.size:
            source = inputs[0]
            array = source.array
            if array is None or type(array) in SPECIAL:
                array = array_of(source)
            if not prim.copies or array.flags.c_contiguous:  # as :meth:`viewed` does it
                if prim.method:
                    array = getattr(array, prim.method)(*node.params.values())
                else:
                    array = prim.impl(node.aval.device.xp, array, **node.params)
                out = Buffer(array, node, base=source.root())
            else:
                out = self._barrier(node, inputs, [array], None)
        elif prim.beside is not None or isinstance(prim, (Reduction, Drawn)):
            out = self.run_barrier(node, inputs)
        else:
            arrays = list(map(_array, inputs))
            if not _NOT_THERE.isdisjoint(map(type, arrays)):
                arrays = arrays_of(inputs)
            out = self._barrier(node, inputs, arrays, None)
        for recorder in thread.recorders:
            recorder.record(node, inputs, out)
        return out

    def run_barrier(self, node: Node, inputs: tuple[Buffer, ...], into: Buffer | None = None) -> Buffer:
        """A buffer for the value of a barrier or view."""
        if into is None and thread.deferring and node.prim.view and waiting_below(node, inputs) is not None:
            return postponed(node, inputs)
        if isinstance(node.prim, (Reduction, Drawn)):
            return super().run_barrier(node, inputs, into)
        inputs, beside = (inputs, None) if node.prim.beside is None else apart(node.prim, inputs)
        return self._barrier(node, inputs, arrays_of(inputs), into, beside)

    def kernel(self, targets: list[Buffer]) -> None:
        """Evaluate pending buffers of one loop shape in one kernel."""
        kernel = make.of_region(targets)
        for b, out in zip(kernel.targets, self.do(kernel.work), strict=True):
            b.fill(out.reshape(b.node.aval.shape))

    def _told(self, work: Work, arrays: list[Array], outputs: list[Array], node: Node, into: Buffer | None) -> Buffer:
        if tally.said.passes:
            tally.taken()
        return Buffer(outputs[0], node) if into is None else _filled(outputs[0], node, into)

    def elementwise(self, node: Node, inputs: tuple[Buffer, ...]) -> Buffer:
        """One application of an elementwise primitive, recorded: this is the path of every small operation."""
        if node.site.small:  # type: ignore[union-attr]
            out = self.run_elementwise(node, inputs)
        else:
            out = self._deferred_elementwise(node, inputs, None, None)
        for recorder in thread.recorders:
            recorder.record(node, inputs, out)
        return out

    def run_elementwise(self, node: Node, inputs: tuple[Buffer, ...], into: Buffer | None = None) -> Buffer:
        """A buffer for the value of an elementwise node: filled if it is small, else pending."""
        site: Any = node.site
        if not site.small:
            return self._deferred_elementwise(node, inputs, into, None)
        if into is not None:
            return super().run_elementwise(node, inputs, into)
        ufunc = site.direct
        if ufunc is None:
            return Buffer(self.small(site, [array_of(b) for b in inputs]), node)
        a = inputs[0].array
        if a is None:
            a = array_of(inputs[0])
        if len(inputs) == 1:
            return Buffer(ufunc(a), node)
        b = inputs[1].array
        if b is None:
            b = array_of(inputs[1])
        return Buffer(ufunc(a, b), node)

    def pull(self, steps: Steps, node: Node, ct: Any, residuals: Retained) -> Sequence[Any] | None:
        """Cotangents as arrays."""
        if not isinstance(residuals, tuple):  # of a budget that has ended
            return None
        return steps.pull(getattr(ct, "array", ct), residuals)


class Budgeted(Counted):
    """Within a budget."""

    @property
    def copies_slivers(self) -> bool:
        """True: an array cannot be dropped while a piece of it is held."""
        return True


def _filled(array: Array, node: Node, into: Buffer | None) -> Buffer:
    if into is None:
        return Buffer(array, node)
    inputs = into.inputs
    into.fill(array)
    account.current.filled(into, inputs)
    return into


def _pending(node: Node, inputs: tuple[Buffer, ...], span: Any, loop: Any, into: Buffer | None) -> Buffer:
    if into is None:
        into = Buffer(None, node, inputs, span, loop)
    else:
        into.span, into.loop = span, loop
    account.current.deferred(into)
    return into


COUNTED, BUDGETED, PLAIN = Counted(), Budgeted(), Plain()
Account.executor = PLAIN
state.install(PLAIN)
