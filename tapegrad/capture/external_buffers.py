"""Outside of the arena: arguments that are read where they lie, results that are written where the caller gets them.

Such a slot has other memory in each call.  When a task's calls are made, abstract arrays stand for its arrays
(``device/abstract_array.py``); the code of a replay has arrays on the memory of the present call in their place.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from types import BuiltinMethodType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

from tapegrad.capture.program import SMALL, Kind, Program, Slot, Step, View, results
from tapegrad.core.aval import ShapedArray
from tapegrad.core.primitive import Primitive
from tapegrad.device import CPU, Device, abstract_array, dtypes
from tapegrad.device.abstract_array import AbstractArray
from tapegrad.device.types import Array
from tapegrad.engine.task import Call
from tapegrad.errors import DryRunError

_FREE = (Primitive, ShapedArray, Device, ModuleType, type, CPU.xp.ufunc, type(CPU.xp.copyto))
"""Classes of what has no arrays inside."""


class Place(NamedTuple):
    """What lies outside of the arena: an argument by its position, or a result by its number."""

    view: View
    argument: int | None = None
    output: int = -1


def places(program: Program) -> list[Place]:
    """The arguments and results that lie outside: large ones, of which nothing else is given out."""
    given = Counter(id(view.slot) for view in results(program))
    read = {id(v.slot) for step in program.steps for v in step.reads}
    found = {id(v.slot): Place(v, argument=i) for i, v in enumerate(program.arguments) if id(v.slot) in read}
    there = [place for key, place in found.items() if not given[key]]
    for i, output in enumerate(program.outputs):
        view = output.view
        if view is not None and view.slot.kind is Kind.MADE and given[id(view.slot)] == 1:
            there.append(Place(view, output=i))
    return [p for p in there if p.view.slot.nbytes > SMALL and p.view.is_whole]


class Outside:
    """Slots that lie outside of the arena, by numbers, and the abstract arrays that stand for them."""

    def __init__(self, slots: Sequence[Slot]) -> None:
        self.numbers = {id(slot): i for i, slot in enumerate(slots)}
        self._whole = [abstract_array.empty((slot.nbytes,), dtypes.asdtype("uint8")) for slot in slots]
        places = sorted((x.ctypes.data, i) for i, x in enumerate(self._whole))
        self._starts, self._order = [start for start, _ in places], [i for _, i in places]

    def stand_in(self, view: View) -> AbstractArray:
        """What stands for a view of such a slot."""
        whole = self._whole[self.numbers[id(view.slot)]].view(CPU.xp.ndarray)
        return CPU.placed(whole, view.offset, view.shape, view.dtype, view.strides).view(AbstractArray)

    def place(self, x: AbstractArray) -> tuple[int, int]:
        """Of which slot an abstract array is a part, and how many bytes after its beginning the first element lies."""
        address = x.ctypes.data
        k = bisect_right(self._starts, address) - 1
        return self._order[k], address - self._starts[k]

    def calls(self, step: Step, array: Callable[[View], Array]) -> list[Call]:
        """The calls of a step that uses such slots; ``array``: of a view of any other slot."""
        reads, writes, temporaries = (
            [self.stand_in(v) if id(v.slot) in self.numbers else array(v) for v in views]
            for views in (step.reads, step.writes, step.temporaries)
        )
        try:
            calls = step.calls(reads, writes, temporaries)
            if all(map(is_open, calls)):
                return calls
        except DryRunError:  # it looks into the arrays when the calls are made
            pass
        return [(_do, (step.calls, reads, writes, temporaries))]

    def uses(self, step: Step) -> bool:
        """Whether a step reads or writes such slots."""
        return any(id(v.slot) in self.numbers for v in (*step.reads, *step.writes))


def _do(calls: Callable[..., list[Call]], reads: list[Array], writes: list[Array], temporaries: list[Array]) -> None:
    """Make the calls of a step and call them: what they hide cannot be changed."""
    for f, args in calls(reads, writes, temporaries):
        f(*args)


def is_open(call: Call) -> bool:
    """Whether code can replace all abstract arrays of a call: they are arguments, or items of these."""
    f: Any
    f, args = call
    if isinstance(f, partial):
        f, args = f.func, (*args, *f.args, *f.keywords.values())
    return is_free(f) and all(
        type(x) is AbstractArray
        or all(type(y) is AbstractArray or is_free(y) for y in (x if type(x) in (list, tuple) else (x,)))
        for x in args
    )


def is_free(x: Any) -> bool:
    """Whether no abstract array is inside."""
    if isinstance(x, CPU.xp.ndarray):
        return type(x) is not AbstractArray
    if isinstance(x, (list, tuple)):
        return all(map(is_free, x))
    if isinstance(x, dict):
        return all(map(is_free, x.values()))
    if isinstance(x, partial):
        return all(map(is_free, (x.func, x.args, x.keywords)))
    if isinstance(x, FunctionType):
        return all(map(is_free, (*(cell.cell_contents for cell in x.__closure__ or ()), *(x.__defaults__ or ()))))
    if isinstance(x, (MethodType, BuiltinMethodType)):
        return is_free(x.__self__)
    return isinstance(x, _FREE) or not hasattr(x, "__dict__")
