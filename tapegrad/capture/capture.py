"""Capturing: a dry run of a function whose tasks are written down with the memory that they use.

Arguments and variables have no contents in the run, so a look at a value is an error, and no value can be frozen.  What
a task reads and writes is known by its address: abstract arrays have addresses of their own.
"""

from __future__ import annotations

import traceback
import weakref
from bisect import bisect_right
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any, TypeVar

from tapegrad import nest
from tapegrad.capture import costs
from tapegrad.capture.program import Kind, Layouts, Output, Program, Slot, Step, View, Write, in_place, pruned
from tapegrad.core import tracking
from tapegrad.core.aval import ShapedArray, shaped
from tapegrad.core.buffer import Buffer
from tapegrad.core.cell import Cell, Seen, lookout, shadowed
from tapegrad.core.live_numbers import LiveInt, LiveNumber, live_int
from tapegrad.core.node import Node, leaf, next_index
from tapegrad.core.primitive import Opaque
from tapegrad.core.state import during, thread
from tapegrad.device import CPU, Device, abstract_array, dtypes, traffic
from tapegrad.device.abstract_array import AbstractArray
from tapegrad.device.abstract_device import AbstractDevice
from tapegrad.device.float_errors import errors_now
from tapegrad.device.host_scalar import HostScalar
from tapegrad.device.types import Array, DType, Params
from tapegrad.engine import lowering
from tapegrad.engine.abstract_evaluation import AbstractExecutor
from tapegrad.engine.cpu.native import machine
from tapegrad.engine.realize import realize
from tapegrad.engine.task import Call as Made
from tapegrad.engine.task import Task, into
from tapegrad.errors import DryRunError, users_line
from tapegrad.tensor import Tensor
from tapegrad.tracing.costs import moved_by
from tapegrad.tracing.ledger import LEDGER
from tapegrad.tracing.phase import BACKWARD, FORWARD, HERE, OPTIMIZER

T = TypeVar("T")
PACKAGE = __name__.partition(".")[0]


class UncapturableError(DryRunError):
    """Something that no program can repeat; the message is the reason, for ``.stats.fallbacks``."""


class Stream:
    """A random stream: its key and position when a replay begins."""

    def __init__(self, cell: Cell, content: tuple[int, int]) -> None:
        self.cell = cell
        self.now = now = list(content)
        self.content = tuple([live_int(content[i], partial(now.__getitem__, i)) for i in (0, 1)])


class _Device(AbstractDevice):
    """Lends abstract arrays; arrays that the function makes of host data are constants, with their values."""

    __slots__ = ("_capture",)

    def __init__(self, device: Device, capture: Capture) -> None:
        super().__init__(device)
        self._capture = weakref.proxy(capture)  # no cycle: what a run has made goes with it

    def array(self, x: Any, dtype: DType | None = None, copy: bool = True) -> Any:
        """A constant of the program, or a live number."""
        if isinstance(x, LiveNumber):
            return self._capture.filled(x, dtypes.float32 if dtype is None else dtype, self._device)
        if type(x) is AbstractArray:
            return self._capture.do(
                lowering.copy_of(x, shaped(x.shape, x.dtype if dtype is None else dtype, self._device))
            )[0]
        return self._device.array(x, dtype, copy)


class _Cells(dict[Cell, Any]):
    """What the function sees in cells, and what it writes there."""

    def __init__(self, recorder: Capture) -> None:
        super().__init__()
        self._recorder = weakref.proxy(recorder)
        self.made: set[Cell] = set()
        """The cells that the function has made: they are its own, what they hold is a value like others."""
        self.variables: dict[Cell, Buffer] = {}
        self.views: dict[Cell, View] = {}
        """How the variables lie."""
        self.streams: dict[Cell, Stream] = {}

    def get(self, cell: Cell, content: Any = None) -> Any:
        """What a cell holds: of a variable nothing but shape and dtype."""
        if cell in self:
            return self[cell]
        if cell in self.made:
            return content
        if isinstance(content, Buffer):
            aval = content.node.aval
            if aval.shape or aval.device is not CPU:
                self._recorder.at(aval.device)
            array = _without_contents(aval, content.array)
            self._recorder.slot(array, Kind.VARIABLE, cell).device = aval.device
            self.views[cell] = self._recorder.view(array, ("a variable",))
            buffer = self.variables[cell] = self[cell] = Buffer(array, leaf(aval))
            return buffer
        stream = self.streams[cell] = Stream(cell, content)
        self[cell] = stream.content
        return stream.content

    def written(self) -> list[tuple[Cell, Any]]:
        """The cells that the function has written, with what it has left there."""
        unchanged = {**self.variables, **{cell: s.content for cell, s in self.streams.items()}}
        return [(c, content) for c, content in self.items() if c not in self.made and content is not unchanged.get(c)]


class Capture(AbstractExecutor):
    """Writes down the tasks of a dry run."""

    keeps_arrays = True

    def __init__(self, since: int, layouts: Layouts) -> None:
        super().__init__(since)
        self._layouts, self._number = layouts, 0
        self.steps: list[Step] = []
        self._starts: list[int] = []
        self._slots: list[Slot] = []
        self._constants_by_id: dict[int, Slot] = {}
        self._in_walks: set[int] = set()
        """Nodes that walks have made; their kernels may run later."""
        self._of_walks = False
        self.afterwards: list[Callable[[], object]] = []
        self.home: Device | None = None
        """Where all of the program lies."""
        self._devices: dict[str, _Device] = {}
        self._live: dict[Any, Array] = {}
        self.asked: list[Any] = []
        self.outside: dict[int, Buffer] = {}
        """Values made before that the function uses, by their node's index."""
        self._kernel_cost: float | None = None
        self.cells = _Cells(self)
        self._errors = errors_now()

    # What the engine asks ------------------------------------------------------------------------------------------

    def device(self, device: Device) -> Device:
        """One that lends abstract arrays, and makes constants."""
        return self._devices.setdefault(device.name, _Device(device, self))

    def at(self, device: Device) -> None:
        """Work is done on ``device``.  Raises UncapturableError if some is done elsewhere."""
        if self.home is None:
            self.home = device
        elif self.home is not device:
            raise UncapturableError(f"tasks on {self.home} and on {device} in one function")

    def run_elementwise(self, node: Node, inputs: tuple[Buffer, ...], into: Buffer | None = None) -> Buffer:
        """As in any dry run, but machine code takes the steps of a formula; noted is what comes from outside."""
        self.uses(inputs)
        if thread.walks:
            self._in_walks.add(node.index)
        site: Any = node.site
        is_formula = site.small and site.prim.formula is not None and site.aval.size
        limited = tracking.current.copies_slivers  # then its steps take bytes
        if is_formula and machine.runner() is not None and not limited:
            return self.deferred(node, inputs, into)
        return super().run_elementwise(node, inputs, into)

    def run_barrier(self, node: Node, inputs: tuple[Buffer, ...], into: Buffer | None = None) -> Buffer:
        """As in any dry run; noted is what comes from outside."""
        self.uses(inputs)
        return super().run_barrier(node, inputs, into)

    def uses(self, inputs: Sequence[Buffer]) -> None:
        """The function uses values: those made before are constants of the program."""
        for b in inputs:
            if b.node.index < self._since:
                self.outside[b.node.index] = b

    def small(self, site: Any, arrays: list[Array]) -> Array:
        """Note a ufunc on small arrays."""
        out = super().small(site, arrays)
        prim, ufunc, xp = site.prim, site.ufunc, site.aval.device.xp

        def calls(reads: Sequence[Array], outputs: list[Array], _: list[Array]) -> list[Made]:
            return [(prim.impl, (xp, *outputs, *reads)) if ufunc is None else into(ufunc, reads, outputs[0])]

        # NumPy multiplies complex numbers otherwise, and single halves, where the result overwrites an operand.
        shares = ufunc is not None and out.size > 1 and out.dtype.kind != "c"
        cost = costs.of_ufunc(prim.name, arrays, out)
        self._note((prim.name,), arrays, [out], [], calls, cost, shares=shares)
        self.steps[-1].moves = [moved_by(arrays, [out])]
        return out

    def _evaluated(self, kernel: lowering.Kernel) -> tuple[list[Array], list[Array]]:
        self._kernel_cost = costs.of_kernel(kernel)
        self._of_walks = not self._in_walks.isdisjoint([b.node.index for b in kernel.region.order])
        try:
            return super()._evaluated(kernel)
        finally:
            self._kernel_cost, self._of_walks = None, False

    def do(self, task: Task, temporaries: list[Array] | None = None) -> list[Array]:
        """Note a task."""
        self.at(task.device)
        number = self._number = self._number + 1
        outputs = task.abstract_outputs()
        for i, strides in self._layouts.get(number, {}).items():
            outputs[i] = abstract_array.strided(outputs[i].shape, outputs[i].dtype, strides)
        if not (len(outputs) == 1 and self._lies_in_a_slot(outputs[0])):  # a view takes no work
            if temporaries is None:
                temporaries = self._temporaries(task)
            kept = task.kept()
            made = None if task.writes else (number, kept)
            reads = [*task.reads, *[self._key(params) for params in kept.keys]]
            once = isinstance(task, lowering.Application) and isinstance(task.prim, Opaque) and task.prim.at_once
            cost = costs.of_task(task, outputs) if self._kernel_cost is None else self._kernel_cost
            joint = isinstance(task, lowering.Application) and task.prim.effect is not None
            self._note(task.names, reads, outputs, temporaries, kept.calls, cost, effect=joint, made=made, once=once)
            self.steps[-1].moves = self._moves(task, outputs, temporaries)
            self.steps[-1].over = task.over if isinstance(task, lowering.Function) else None
            if once or (not kept.keys and _has_live_numbers(task)):
                self.steps[-1].outside = "it asks the host at each call"
            elif isinstance(task, lowering.Application) and isinstance(task.prim, Opaque) and task.prim.planned:
                self.steps[-1].outside = "CuPy may free its plan before the graph"
        return outputs

    def _moves(self, task: Task, outputs: list[Array], temporaries: list[Array]) -> list[tuple[int, int]]:
        """What the ledger counts of a task: creation is no kernel."""
        if isinstance(task, lowering.Function) and not task.is_kernel:
            return []
        return [*(moved_by(*move) for move in task.moves(outputs, temporaries)), *traffic.said.passes]

    def happened(self, f: Callable[[], object]) -> None:
        """Each replay tells of it."""
        self.afterwards.append(f)

    @property
    def changes(self) -> bool:
        """A program's tasks write values of their own, since each may be done again."""
        return False

    def decided(self, f: Callable[[], T], otherwise: T) -> T:
        """No program can repeat it."""
        raise UncapturableError(f"what is done in {_told(users_line())} depends on values")

    def index(self, t: Any) -> Any:
        """It may be another one at each call, so what it selects is gathered."""
        return t

    def number(self, f: Callable[[], Any]) -> Any:
        """A live number, which each replay asks for once; as an array it is a slot that each replay fills."""
        asked = cache(f)
        self.asked.append(asked)
        return LiveNumber(asked)

    def on_values(self, f: Callable[..., object], *arrays: Array) -> bool:
        """Note a check of values: each replay makes it."""
        calls = lambda reads, outputs, temporaries: [(f, tuple(reads))]
        self._note(("check",), arrays, [], [], calls, costs.of_call(arrays, []), effect=True)
        return True

    # Slots ---------------------------------------------------------------------------------------------------------

    def slot(self, array: Array, kind: Kind, source: Any = None) -> Slot:
        """A new slot: the memory of ``array``."""
        if self._lies_in_a_slot(array):
            raise UncapturableError("the step takes more address space than there is to follow it")
        low, high = _bounds(array)
        position = bisect_right(self._starts, low)
        slot = Slot(kind, high - low, source)
        self._starts.insert(position, low)
        self._slots.insert(position, slot)
        return slot

    def filled(self, live: LiveNumber, dtype: DType, device: Device) -> Array:
        """A 0-d array that each replay fills with a live number."""
        key = live.now, dtype, device
        if key not in self._live:
            array = self._live[key] = abstract_array.empty((), dtype)
            self.slot(array, Kind.NUMBER, (live.now, dtype)).device = device
        return self._live[key]

    def _key(self, params: Params) -> Array:
        """Memory of the key and the position of a stream, which each replay fills."""
        key, counter = params["key"], params["counter"]
        origin = counter.origin if isinstance(counter, LiveInt) else counter
        known = id(key), id(origin)  # numbers of two streams may be equal
        if known not in self._live:

            def now() -> list[int]:
                present = key.now() if isinstance(key, LiveInt) else key
                return [present % 2**64, present >> 64, origin.now() if isinstance(origin, LiveInt) else origin]

            array = self._live[known] = abstract_array.empty((3,), dtypes.asdtype("uint64"))
            self.slot(array, Kind.NUMBER, (now, array.dtype))
        return self._live[known]

    def view(self, array: Array, who: Sequence[str]) -> View:
        """Which part of which slot ``array`` is."""
        if type(array) is not AbstractArray:
            slot = self._constants_by_id.get(id(array))
            if slot is None:
                slot = self._constants_by_id[id(array)] = Slot(Kind.CONSTANT, array.nbytes, array)
            return View(slot, 0, array.shape, array.strides, array.dtype)
        low, high = _bounds(array)
        lies = _address(array)
        position = bisect_right(self._starts, low) - 1
        if position < 0 or high - self._starts[position] > self._slots[position].nbytes:
            raise UncapturableError(f"{', '.join(who)} reads an array that no task of the function has made")
        return View(self._slots[position], lies - self._starts[position], array.shape, array.strides, array.dtype)

    def _lies_in_a_slot(self, array: Array) -> bool:
        if type(array) is not AbstractArray:
            return True
        low, _ = _bounds(array)
        position = bisect_right(self._starts, low) - 1
        return position >= 0 and low < self._starts[position] + max(1, self._slots[position].nbytes)

    def _note(
        self, names: Sequence[str], reads: Sequence[Array], writes: Sequence[Array], temporaries: Sequence[Array],
        calls: Callable[..., list[Made]], cost: float, shares: bool = False, effect: bool = False,
        made: tuple[int, Task] | None = None, once: bool = False,
    ) -> None:  # fmt: skip
        read = [self.view(x, names) for x in reads]
        for x in (*writes, *temporaries):
            self.slot(x, Kind.MADE)
        written, own = ([self.view(x, names) for x in xs] for xs in (writes, temporaries))
        errors = errors_now()
        as_around = None if errors == self._errors else errors
        line, number = users_line(), len(self.steps)
        step = Step(tuple(names), read, written, own, calls, shares, effect, line, made, as_around, once, cost, number)
        step.phase = OPTIMIZER if HERE.optimizing else BACKWARD if thread.walks or self._of_walks else FORWARD
        self.steps.append(step)


def _has_live_numbers(task: Task) -> bool:
    return isinstance(task, lowering.Application) and any(isinstance(x, LiveInt) for x in task.params.values())


def _without_contents(aval: ShapedArray, given: Any) -> Array:
    if given is None or type(given) is HostScalar or given.flags.c_contiguous:
        return abstract_array.empty(aval.shape, aval.dtype)
    return abstract_array.like(given)


def _address(array: Array) -> int:
    """Where the first element lies."""
    return int(array.__array_interface__["data"][0])


def _bounds(array: Array) -> tuple[int, int]:
    """The bytes of memory from the lowest to the end of the highest element."""
    low = high = _address(array)
    if array.size:
        reach = [(n - 1) * s for n, s in zip(array.shape, array.strides, strict=True)]
        low, high = low + sum(s for s in reach if s < 0), high + sum(s for s in reach if s > 0) + array.itemsize
    return low, high


def why_not(e: Exception) -> str:
    """Why no program was made, where the dry run has raised ``e``."""
    if isinstance(e, UncapturableError):
        return str(e)
    if isinstance(e, DryRunError):
        lines = [(f, n) for f, n in traceback.walk_tb(e.__traceback__) if not _is_ours(f)]
        return f"what is done in {_told(lines and (lines[-1][0].f_code.co_filename, lines[-1][1]))} depends on values"
    return f"{type(e).__name__}: {e}"


def _told(line: Any) -> str:
    return f"{line[0]}:{line[1]}" if line else "the function"


def _is_ours(frame: Any) -> bool:
    return frame.f_globals.get("__name__", "").partition(".")[0] == PACKAGE


def capture(
    f: Callable[..., Any], args: Sequence[Any], named: dict[str, Any], layouts: Layouts | None = None
) -> Program:
    """The program of ``f(*args, **named)``, whose tensors are its arguments, in the order of ``nest``.

    Raises UncapturableError, and whatever ``f`` raises.
    """
    return pruned(in_place(in_a_dry_run(lambda call: call.program(call.result(f, args, named), name_of(f)), layouts)))


def name_of(f: Callable[..., Any]) -> str:
    """What a function is called."""
    return getattr(f, "__qualname__", type(f).__qualname__).rpartition("<locals>.")[2]


def in_a_dry_run(f: Callable[[Call], T], layouts: Layouts | None = None) -> T:
    """What ``f`` makes of a call that is written down; what it writes to cells is dropped, and nobody counts it."""
    return LEDGER.aside(_written_down, f, layouts)


def _written_down(f: Callable[[Call], T], layouts: Layouts | None) -> T:
    recorder = Capture(next_index(), layouts or {})
    with shadowed(recorder.cells), lookout() as seen:
        recorder.cells.made = seen.made
        call = Call(recorder, seen)
        return during(f, call, executor=recorder, recorders=(), deferring=None, batches=())


class Call:
    """A call of a function that is being written down."""

    def __init__(self, recorder: Capture, seen: Seen) -> None:
        self.recorder = recorder
        self._seen = seen
        self.tensors: list[Tensor] = []
        self.arguments: list[View] = []
        self._known: dict[int, int] = {}

    def result(self, f: Callable[..., Any], args: Sequence[Any], named: dict[str, Any]) -> Any:
        """What ``f`` returns where all tensors among its arguments are stand-ins."""
        inputs, by_name = (nest.map_leaves(self._stand_in, tree) for tree in (tuple(args), named))
        return f(*inputs, **by_name)

    def _stand_in(self, x: Any) -> Any:
        if type(x) is not Tensor:
            return x
        known = self._known.setdefault(id(x._buffer), len(self.tensors))
        if known == len(self.tensors):
            return self.stand_in(x._buffer.node.aval, x._buffer.array)
        self.arguments.append(self.arguments[known])
        self.tensors.append(self.tensors[known])
        return self.tensors[known]

    def stand_in(self, aval: ShapedArray, given: Any = None) -> Tensor:
        """One more argument: a tensor without contents, which lies as ``given`` does (None: C-contiguous)."""
        self.recorder.at(aval.device)
        array = _without_contents(aval, given)
        self.recorder.slot(array, Kind.ARGUMENT, len(self.tensors))
        self.arguments.append(self.recorder.view(array, ("an argument",)))
        self.tensors.append(Tensor(Buffer(array, leaf(aval))))
        return self.tensors[-1]

    def program(self, result: Any, name: str) -> Program:
        """The program so far, with what it returns and writes."""
        leaves = nest.flatten(result)
        written = self.recorder.cells.written()
        realize([x._buffer for x in leaves if type(x) is Tensor])
        realize([content for _, content in written if isinstance(content, Buffer)])
        owners = {cell: owner for cell, (_, owner) in self._seen.items()}
        writes = [self._write(cell, owners.get(cell), content) for cell, content in written]
        reads = [(cell, owners.get(cell), view) for cell, view in self.recorder.cells.views.items()]
        streams = list(self.recorder.cells.streams.values())
        outputs = [self.output(x) for x in leaves]
        home = self.recorder.home or CPU
        return Program(list(self.recorder.steps), result, outputs, writes, list(self.arguments), reads, streams,
                       self.recorder.asked, home, list(self.recorder.afterwards), name)  # fmt: skip

    def output(self, x: Any) -> Output:
        """A leaf of a result."""
        if type(x) is not Tensor:
            return Output(None, None, x)
        for i, tensor in enumerate(self.tensors):
            if x._buffer is tensor._buffer:
                return Output(None, None, None, i)
        array = x._buffer.array
        if type(array) is not AbstractArray:
            self.recorder.uses((x._buffer,))
            return Output(None, None, x)
        return Output(self.recorder.view(array, ("the result",)), x._buffer.node.aval)

    def _write(self, cell: Cell, owner: Any, content: Any) -> Write:
        if isinstance(content, Buffer):
            return Write(cell, owner, self.recorder.view(content.array, ("assign",)), content.node.aval)
        return Write(cell, owner, None, None, content)
