"""Replay: a program bound to memory, as straight-line code over pre-made calls.

Nothing is decided in a replay: each line calls a function on arrays that lie where the plan has put them.  Small
arguments and variables are copied to places of their own, large ones are read where they lie; only when a variable has
got other memory, the calls that read it are made anew.  Large results are written where the caller gets them.  What the
program writes to variables comes last: over the old values where nobody else has them, of tables some rows alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext, suppress
from functools import partial
from math import inf
from typing import Any

from tapegrad.capture import arena
from tapegrad.capture.accounting import report_of
from tapegrad.capture.code import Code
from tapegrad.capture.external_buffers import Outside, Place, places
from tapegrad.capture.lower import lowered
from tapegrad.capture.memory import (
    ALIGNMENT,
    Arena,
    Memory,
    Numbers,
    Planning,
    alignment,
    bits,
    bits_of,
    fresh,
    laid_like,
    same_bits,
)
from tapegrad.capture.program import SMALL, Kind, Layouts, Output, Program, Slot, View, Write, results
from tapegrad.core import threads, tracking
from tapegrad.core.buffer import Buffer
from tapegrad.core.cell import Cell
from tapegrad.core.live_numbers import LiveInt
from tapegrad.core.node import leaf
from tapegrad.core.references import elsewhere
from tapegrad.core.storage import METER
from tapegrad.device import CPU, cuda_types, dtypes, is_array, traffic
from tapegrad.device.host_scalar import HostScalar
from tapegrad.device.numerics import blas
from tapegrad.device.types import Array, Namespace
from tapegrad.engine.cpu.native.steps import interpreted
from tapegrad.engine.realize import array_of
from tapegrad.tensor import Tensor

_NAMES = ("function",)
"""By which primitives a budget is told that results are made."""
_NOTHING = nullcontext()
_ALIGNED = 16
"""Bytes that one load of a kernel reads."""


class Replay:
    """A program with its memory and its code."""

    @property
    def how(self) -> str:
        """How its tasks are done, where there are several ways."""
        return self._code.how

    def __init__(
        self, program: Program, plan: Planning = arena.plan, inside: bool | None = None, shared: Arena | None = None
    ) -> None:
        self._given = program, plan, shared
        self._build(METER.limit != inf or program.device.lazy if inside is None else inside)

    def _build_inside(self) -> None:
        """Have everything in the arena from now on: within a budget what lies outside might have to go at any time."""
        given = self._given
        *_, shared = given
        if shared is not None:
            shared.release()
        self.__dict__.clear()  # the arena goes before there is another
        self._given, self._fails = given, True
        self._build(inside=True)

    def _build(self, inside: bool) -> None:
        """Plan, and make the calls; ``inside``: everything lies in the arena."""
        program, plan, shared = self._given
        if not program.device.lazy:
            outside = lambda p: () if inside else {id(place.view.slot) for place in places(p)}
            program = lowered(program, ALIGNMENT, outside)
        self.program = program
        self._places = [] if inside else places(program)
        self._outside = Outside([place.view.slot for place in self._places])
        self.memory = memory = Memory(program, plan, self._outside.numbers, shared)
        self._device = program.device
        align, apart = alignment(program.device), list(self._outside.numbers)
        self._report = report_of(self._given[0], program, memory.arena, apart, memory.layout.nbytes, align)
        self._numbers = Numbers(self._slots(Kind.NUMBER), program.asked, memory)
        used = {id(slot) for slot in self._slots(Kind.ARGUMENT)} - self._outside.numbers.keys()
        given = {id(v.slot): i for i, v in enumerate(program.arguments) if id(v.slot) in used}
        self._arguments = [(i, memory.array(program.arguments[i])) for i in given.values()]
        self._code = Code(self._outside)
        self._multiplies = False
        self._fresh: dict[int, Buffer] = {}
        self._fails = False
        read = {id(slot) for slot in self._slots(Kind.VARIABLE)}  # of others only numbers were asked
        self._small = [
            (cell, owner, self._place(view))
            for cell, owner, view in program.reads
            if not self._is_large(view) and id(view.slot) in read
        ]
        self._large = {cell: (owner, view) for cell, owner, view in program.reads if self._is_large(view)}
        self._contents: dict[Cell, Buffer] = {}
        self._moved: set[int] = set()
        self._readers = self._find_readers()
        self._bind_variables()
        moving = {i for readers in self._readers.values() for i in readers}
        for i, step in enumerate(program.steps):
            until = max((v.slot.last for v in (*step.writes, *step.temporaries)), default=i)
            self._code.add(self._calls_in_code(i), i, until, step.errors, i in moving)
        self._code.compile(fused=not any(step.once for step in program.steps))
        device = self._device
        self._copy = partial(device.call, _bring, device.xp) if device.lazy else device.xp.copyto
        several = partial(device.call, _bring_all) if device.lazy else _copy_all
        self._bring = partial(several, device.xp)
        self._unsure = [step.made for step in program.steps if step.made is not None]
        self._outputs, self._written = ([self._bound(x.view) for x in xs] for xs in (program.outputs, program.writes))
        self._answers = [self._answer(*pair) for pair in zip(program.outputs, self._outputs, strict=True)]

    def _is_large(self, view: View) -> bool:
        """Whether a variable is read where it lies: on a GPU all are but 0-d ones, which may be numbers on the host."""
        return bool(view.shape) if self._device.lazy else view.slot.nbytes > SMALL

    def _place(self, view: View) -> tuple[Array, Any]:
        """Memory of a small variable's own, and how it lies."""
        self.memory.own(view.slot, dtypes.asdtype("uint8"))
        array = self.memory.array(view)
        return array, view.order

    def _bound(self, view: View | None) -> Array | View | None:
        """The array of a result; the view of what moves: a large variable, or what lies outside of the arena."""
        if view is None or id(view.slot) in self._outside.numbers:
            return view
        if view.slot.kind is Kind.VARIABLE and self._is_large(view):
            return view
        return self.memory.array(view)

    def _now(self, bound: Array | View) -> Array:
        return self.memory.array(bound) if isinstance(bound, View) else bound

    # Binding -------------------------------------------------------------------------------------------------------

    def _slots(self, kind: Kind) -> list[Slot]:
        views = (v for s in self.program.steps for v in (*s.reads, *s.writes))
        return list({id(v.slot): v.slot for v in (*views, *results(self.program)) if v.slot.kind is kind}.values())

    def _find_readers(self) -> dict[int, list[int]]:
        """The steps that read each large variable's slot."""
        large = {id(view.slot) for _, view in self._large.values()}
        readers: dict[int, list[int]] = {}
        for i, step in enumerate(self.program.steps):
            for key in {id(v.slot) for v in step.reads} & large:
                readers.setdefault(key, []).append(i)
        return readers

    def _calls(self, i: int) -> list[Any]:
        step = self.program.steps[i]
        reads, writes, temporaries = (
            [self.memory.array(v) for v in views] for views in (step.reads, step.writes, step.temporaries)
        )
        calls = step.calls(reads, writes, temporaries)
        self._multiplies = self._multiplies or any(blas.assumes_one_thread(f) for f, _ in calls)
        return calls

    def _calls_in_code(self, i: int) -> list[Any]:
        """Those of ``_calls``; abstract arrays stand for what lies outside of the arena."""
        step = self.program.steps[i]
        return self._outside.calls(step, self.memory.array) if self._outside.uses(step) else self._calls(i)

    def _bind_variables(self) -> None:
        """Large variables are read where they lie now.  Raises RelaidError."""
        for cell, (owner, view) in self._large.items():
            content = cell.get(owner)
            if content is not self._contents.get(cell):
                array = array_of(content)
                _require_order(array, view.order, owner)
                if self._device.lazy and cuda_types.address(array) % _ALIGNED:
                    raise RelaidError(f"the elements of {owner.name} do not begin at a multiple of {_ALIGNED} bytes")
                self._moved.update(self._readers.get(id(view.slot), ()))  # first: an interrupt may come at any time
                self.memory.put(view.slot, array)
                self._contents[cell] = content

    def _bind(self) -> None:
        if self._large:
            self._bind_variables()
        if self._moved:
            self._renew_calls()

    def _renew_calls(self) -> None:
        for i in sorted(self._moved):
            if not self._code.change(self._calls_in_code(i), i):
                raise RelaidError("a variable does not begin at a multiple of its elements' bytes")
            self._moved.discard(i)

    # Running -------------------------------------------------------------------------------------------------------

    def run(self, tensors: Sequence[Tensor], single: bool = False) -> None:
        """Do all tasks; no variable is written yet.  ``single``: no kernel does several calls."""
        if self._fails or (self._places and METER.limit != inf):
            self._build_inside()
        self._begin(tensors)
        kept: dict[int, Buffer] = {}
        outside = [self._lent(place, tensors, kept) for place in self._places]
        with blas.one_thread() if self._multiplies else _NOTHING:
            if single:
                self._code.run_single(outside)
            else:
                self._code.run(outside, partial(self._begin, tensors))
        self._fresh = kept
        if traffic.said.passes:
            traffic.taken()  # the report has them
        if self._unsure:
            self._require_layouts()
        tracking.current.replayed(self._report)

    def _lent(self, place: Place, tensors: Sequence[Tensor], kept: dict[int, Buffer]) -> Array:
        """The memory that the call has for an argument or a result that lies outside of the arena, C-contiguous."""
        given = None
        if place.argument is None:
            aval: Any = self.program.outputs[place.output].aval
        else:
            tensor = tensors[place.argument]
            given = array_of(tensor._buffer)
            if given.flags.c_contiguous and (self._device.lazy or given.flags.aligned):
                return given
            aval = tensor._buffer.node.aval
        with tracking.current.reserved((aval,), _NAMES):
            buffer = fresh(aval)
        kept[place.output if place.argument is None else ~place.argument] = buffer
        if given is not None:
            self._copy(buffer.array, given)
        return buffer.array

    def _laid(self, tensor: Tensor, target: Array) -> Any:
        """The array of an argument, which is to be copied to ``target``: what is carried may be called mere bytes."""
        array = array_of(tensor._buffer)
        if array.shape == target.shape:
            return array
        return self._device.placed(array, 0, target.shape, target.dtype, target.strides)

    def _require_layouts(self) -> None:
        layouts = {number: dict(task.mislaid) for number, task in self._unsure if task.mislaid}
        for _, task in self._unsure:
            task.mislaid = None
        if layouts:
            raise MislaidError(layouts)

    def _begin(self, tensors: Sequence[Tensor]) -> None:
        """What comes from outside is where the tasks read it."""
        self._bind()
        arrays: list[Any] = []
        targets: list[Array] = []
        for cell, owner, (target, order) in self._small:
            array = array_of(cell.get(owner))
            if _order(array) != order:
                _require_order(array, order, owner)
            arrays.append(array)
            targets.append(target)
        for position, target in self._arguments:
            array = tensors[position]._buffer.array
            if array is None or array.shape != target.shape:
                array = self._laid(tensors[position], target)
            arrays.append(array)
            targets.append(target)
        if arrays:
            self._bring(targets, arrays)
        for stream in self.program.streams:
            stream.now[:] = stream.cell.get()
        self._numbers.fill()

    def results(self, tensors: Sequence[Tensor], count: int | None = None) -> list[Any]:
        """The leaves of the result, or the first ``count`` of them: the caller's own."""
        leaves: list[Any] = []
        written, self._fresh = self._fresh, {}
        tracker = tracking.current
        for i, (output, array, copy, avals) in enumerate(self._answers[:count]):
            if output.argument is not None:
                leaves.append(tensors[output.argument])
            elif i in written:
                leaves.append(Tensor(written[i]))
            elif array is None:
                leaves.append(output.value)
            else:
                if type(array) is View:
                    array = self.memory.array(array)
                with tracker.reserved(avals, _NAMES):
                    leaves.append(Tensor(copy(array, *avals)))
        return leaves

    def _answer(self, output: Output, array: Any) -> tuple[Output, Any, Callable[..., Buffer], tuple[Any, ...]]:
        """A result, what is bound for it, and how it is copied for the caller."""
        small = is_array(array) and not self._device.lazy and array.nbytes <= SMALL and array.flags.c_contiguous
        return output, array, _copy_of_small if small else _copy, (output.aval,)

    def told(self, tensors: Sequence[Tensor]) -> tuple[list[Any], list[tuple[Write, Any]]]:
        """The bits of the results, as ``bits_of`` tells, and of what is to be written to each cell."""
        fresh, self._fresh = self._fresh, {}
        leaves: list[Any] = []
        for i, (output, array) in enumerate(zip(self.program.outputs, self._outputs, strict=True)):
            if output.argument is not None:
                leaves.append(bits_of(tensors[output.argument]))
            elif i in fresh:
                leaves.append(bits_of(fresh[i]))
            else:
                leaves.append(bits_of(output.value) if array is None else bits(self._now(array), output.aval))
        return leaves, [(w, bits(self._renewed(w, x), w.aval) if is_array(x) else x) for w, x in self.writes()]

    def writes(self, some: Iterable[tuple[Write, Any]] | None = None) -> list[tuple[Write, Any]]:
        """What is to be written to each cell: an array, or a random stream's key and position.

        Of a variable of which some elements are new it is the old array (``Write.over``).

        ``some``: of these alone, each with what is bound for it.
        """
        pairs: list[tuple[Write, Any]] = []
        for write, array in zip(self.program.writes, self._written, strict=True) if some is None else some:
            if array is None:
                key, counter = write.content
                key = key.now() if isinstance(key, LiveInt) else key
                pairs.append((write, (key, counter.now() if isinstance(counter, LiveInt) else counter)))
            else:
                pairs.append((write, self.memory.array(array) if isinstance(array, View) else array))
        return pairs

    def commit(self) -> None:
        """Write to cells: all or none."""
        if self.program.writes:
            self._put(self.writes())
        for tell in self.program.afterwards:
            tell()
        self.forget()

    def forget(self) -> None:
        """Keep no old value of a large variable until the next call.  (On a GPU that would make graphs anew.)"""
        if self._large and not self._device.lazy:
            with suppress(RelaidError):  # the next call tells of it
                self._bind()

    def _put(self, pairs: list[tuple[Write, Any]]) -> None:
        over: list[tuple[Write, Any]] = []
        others: list[tuple[Write, Any]] = []
        for pair in pairs:
            (over if self._is_overwritten(pair[0]) else others).append(pair)
        todo = [self._putting(*pair) for pair in others]  # first what may fail for want of memory
        do_all([*todo, lambda: self._overwrite(over)] if over else todo)

    def _overwrite(self, over: list[tuple[Write, Any]]) -> None:
        """Copy new values over the old ones; if another thread might read those meanwhile, put new arrays there."""
        copies: list[Callable[[], object]] = [over.clear]
        copies += [self._overwriting(*pair) for pair in over]
        ours = lambda: all(self._is_overwritten(write) for write, _ in over)
        if over and not threads.unshared(ours, lambda: do_all(copies)):
            do_all([over.clear, *(self._putting(*pair) for pair in over)])

    def _overwriting(self, write: Write, value: Any) -> Callable[[], object]:
        """What makes the old value of a large variable the new one."""
        old = self._contents[write.cell].array
        return partial(self._copy, old, value) if write.over is None else self._elements(write, old)

    def _elements(self, write: Write, into: Array) -> Callable[[], object]:
        """What writes new elements into a value of a variable."""
        over: Any = write.over
        return partial(self._device.call, over.call(*map(self.memory.array, over.reads)), into)

    def _renewed(self, write: Write, value: Array) -> Array:
        """The new value: where some elements are new, a copy with these."""
        if write.over is None:
            return value
        aval: Any = write.aval
        with tracking.current.reserved((aval,), _NAMES):
            array: Array = _copy(value, aval).array
        self._elements(write, array)()
        return array

    def _putting(self, write: Write, value: Any) -> Callable[[], object]:
        """What puts a copy of the new value into the cell."""
        cell = write.cell
        if write.view is None:
            return partial(cell.set, value)
        aval: Any = write.aval
        owner = write.owner
        with tracking.current.reserved((aval,), _NAMES):
            fresh = _copy(value, aval)
        if write.over is not None:
            self._elements(write, fresh.array)()

        def put() -> None:
            cell.set(fresh, owner)
            if owner is not None:
                tracking.current.label(fresh, owner.category, owner.name)

        return put

    def _is_overwritten(self, write: Write) -> bool:
        """Whether a new value goes to a large variable whose old value nobody else has."""
        contents = self._contents
        return write.cell in contents and self._may_overwrite(write) and _is_ours(write.cell, contents)

    def _may_overwrite(self, write: Write) -> bool:
        """Whether a variable's new value lies as the old one does, and is not a variable's old value itself."""
        view, old = write.view, self._large[write.cell][1]
        if view is None or write.over is not None:
            return view is not None
        return view.slot.kind is not Kind.VARIABLE and view.order == old.order


def do_all(todo: list[Callable[[], object]]) -> None:
    """Do all of it, the last first, and what an interrupt comes upon as well."""
    try:
        while todo:
            todo[-1]()
            todo.pop()
    finally:
        while todo:
            todo[-1]()
            todo.pop()


class RelaidError(Exception):
    """A variable does not lie in memory as it did in the captured call: arithmetic may round otherwise."""


class MislaidError(Exception):
    """Results lie in memory otherwise than the dry run took for granted: what reads them may round otherwise."""

    def __init__(self, layouts: Layouts) -> None:
        super().__init__("results of the library lie otherwise in memory than a dry run can know")
        self.layouts = layouts


def _bring(xp: Namespace, target: Array, array: Any) -> None:
    """Copy an array, or a number on the host, to its place beside a GPU's memory or in it."""
    _bring_all(xp, (target,), (array,))


def _bring_all(xp: Namespace, targets: Sequence[Array], arrays: Sequence[Any]) -> None:
    """As :func:`_bring`, of several arrays."""
    host = CPU.xp.ndarray
    for target, array in zip(targets, arrays, strict=True):
        if type(array) is HostScalar:
            target.fill(array.value)
        else:
            (CPU.xp if isinstance(target, host) else xp).copyto(target, array)


def _copy_all(xp: Namespace, targets: Sequence[Array], arrays: Sequence[Any]) -> None:
    for _ in map(xp.copyto, targets, arrays):
        pass


def _order(array: Any) -> tuple[int, ...] | None:
    """How an array lies; None: C-contiguous."""
    return None if type(array) is HostScalar or array.flags.c_contiguous else array.strides


def _require_order(array: Array, order: tuple[int, ...] | None, owner: Any) -> None:
    if _order(array) != order:
        name = getattr(owner, "name", "a variable")
        raise RelaidError(f"the elements of {name} lie in another order than when the program was made")


def first_difference(program: Program, tensors: Sequence[Tensor]) -> str | None:
    """The first step that gives other bits in the arena than where no two slots share bytes, with the user's line."""
    planned, apart = Replay(program, inside=True), Replay(program, arena.apart, inside=True)
    device = program.device
    for replay in (planned, apart):
        replay._begin(tensors)
    with interpreted():
        for i, (step, other) in enumerate(zip(planned.program.steps, apart.program.steps, strict=True)):
            for replay in (planned, apart):
                for f, args in replay._calls(i):
                    f(*args)
            for v, w in zip(step.writes, other.writes, strict=True):
                x, y = device.numpy(planned.memory.array(v)), device.numpy(apart.memory.array(w))
                if not same_bits(x, y):
                    where = "" if step.place is None else f" of {step.place[0]}:{step.place[1]}"
                    return f"step {i}, {', '.join(step.names)}{where}"
    return None


def _is_ours(cell: Cell, contents: dict[Cell, Buffer]) -> bool:
    """Whether nobody but the cell and the replay has what the cell held: no handle, no view of it, no tape."""
    content = contents[cell]
    if content is not cell.get() or content.base is not None or content.array is None:
        return False
    del content
    return elsewhere([contents[cell]]) == [2]


def _copy_of_small(array: Array, aval: Any) -> Buffer:
    """As :func:`_copy`, of a small contiguous array on a CPU."""
    return Buffer(array.copy(), leaf(aval))


def _copy(array: Array, aval: Any) -> Buffer:
    """A buffer of its own with the value of ``array``."""
    if array.nbytes <= SMALL and not aval.device.lazy and array.flags.c_contiguous:
        return Buffer(array.copy(), leaf(aval))
    out = laid_like(array, aval.device)
    aval.device.call(aval.device.xp.copyto, out, array)
    return Buffer(out, leaf(aval))
