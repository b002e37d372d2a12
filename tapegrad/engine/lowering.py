"""The makers of tasks: of a region, of a primitive applied to arrays, of a function of arrays.

Code that runs, explains, predicts or counts gets its tasks here, so that none of them can differ from what runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

from tapegrad.core.aval import Shape, ShapedArray
from tapegrad.core.buffer import Buffer
from tapegrad.core.live_numbers import LiveInt
from tapegrad.core.primitive import Elementwise, Opaque, Primitive, Reduction, View
from tapegrad.device import Device, abstract_array, dtypes, threads
from tapegrad.device.abstract_device import dry
from tapegrad.device.types import Array, Params
from tapegrad.engine import region
from tapegrad.engine.cpu import emit
from tapegrad.engine.cpu.emit import STRIDED
from tapegrad.engine.cpu.tiles import Tiling, is_long, layout
from tapegrad.engine.cuda.launch import Launch
from tapegrad.engine.task import Call, Lies, Task, into, nbytes_of


class Kernel(NamedTuple):
    """A region, what of it gets bytes, the loop, and the task that evaluates it."""

    region: region.Region
    targets: list[Buffer]
    shape: Shape
    task: Task


def of_region(targets: list[Buffer], kind: str | None = None, needed: region.Region | None = None) -> Kernel:
    """The kernel that gives the targets, of one loop shape, their bytes (and others that are worth theirs).

    ``kind``: of the device for which it is written, ``"cpu"`` or ``"cuda"``; None: where the targets are.  ``needed``:
    the region that they need, if it is known.
    """
    device = targets[0].node.aval.device
    on_cuda = device.lazy if kind is None else kind == "cuda"
    if needed is None:
        needed = region.collect(targets)
    targets = (region.with_results if on_cuda else region.with_costly)(needed, targets)
    loops: list[region.LoopOf] = []
    axes = None
    for b in targets:
        loops.append((b.node.aval.shape, None) if b.loop is None else needed.loop_of(b))
        axes = loops[-1][1] if axes is None else axes
    shape = loops[0][0]
    if on_cuda:
        return Kernel(needed, targets, shape, Launch(needed, targets, shape, axes, device))
    layouts = [layout(x, shape) for x in needed.arrays]
    single = _single_ufunc(needed, layouts)
    if single is not None:
        return Kernel(needed, targets, shape, single)
    writes: list[Lies] = []
    for b, (_, reduced) in zip(targets, loops, strict=True):
        kept = shape if reduced is None else tuple(1 if i in reduced else n for i, n in enumerate(shape))
        writes.append((kept, b.node.aval.dtype))
    program = emit.program(needed, layouts, targets, device.xp)
    return Kernel(needed, targets, shape, Tiling(program, shape, needed.arrays, layouts, writes, axes or (), device))


def _single_ufunc(needed: region.Region, layouts: list[str]) -> Application | None:
    """The call of NumPy's function that is all of a region, if neither tiles nor threads would make it faster."""
    b, *more = needed.order
    prim = b.node.prim
    if more or not isinstance(prim, Elementwise) or prim.ufunc is None:
        return None
    if is_long(b.node.aval.size) and threads.get_num_threads() > 1:
        return None
    if not prim.exact and STRIDED in layouts:  # a program copies such an operand
        return None
    arrays = dict(zip(map(id, needed.leaves), needed.arrays, strict=True))
    return Application(prim, [arrays[id(k)] for k in b.inputs], b.node.params, b.node.aval)


class Application(Task):
    """A barrier, a view or an elementwise primitive, applied to ``reads`` at once."""

    counted: Sequence[Buffer] = ()
    """Its temporaries, which the ledger counts as long as there is this task."""

    def __init__(
        self, prim: Primitive, reads: Sequence[Array], params: Params, aval: ShapedArray,
        beside: ShapedArray | None = None,
    ) -> None:  # fmt: skip
        """``beside``: of the by-product, which is the second of the arrays written."""
        self.prim, self.reads, self.params, self.aval, self.beside = prim, reads, params, aval, beside
        self.device, self.names = aval.device, (prim.name,)
        self.writes = ((aval.shape, aval.dtype),) if prim.given[self.device.lazy] else ()
        if beside is not None:
            self.writes = (*self.writes, (beside.shape, beside.dtype))
        if isinstance(prim, Opaque):
            if prim.temporaries is not None and (self.device.lazy or prim.effect is not None):
                self.temporaries = prim.temporaries(aval, *reads, **params)
                if self.temporaries:
                    self.scratch_bytes = nbytes_of(self.temporaries)
                    self.category = None if prim.effect is None else prim.effect.category
            elif prim.scratch is not None:
                self.scratch_bytes = prim.scratch(aval, *reads, **params)

    def run(self, outputs: list[Array], temporaries: list[Array]) -> list[Array]:
        """The primitive's own kernels if it declares any, else what the library offers."""
        prim, device = self.prim, self.device
        if not outputs:
            return [device.call(self._made)]
        params = self._given(self.params, outputs, temporaries) if temporaries or outputs[1:] else self.params
        if device.lazy and isinstance(prim, Opaque) and prim.cuda is not None:
            device.call(prim.cuda, device, *self.reads, out=outputs[0], **params)
        else:
            device.call(prim.compute, device.xp, self.reads, params, self.aval, outputs[0])
        return outputs

    @staticmethod
    def _given(params: Params, outputs: Sequence[Array], temporaries: Sequence[Array] = ()) -> Params:
        """The parameters, with the arrays beside the result that the primitive is given."""
        params = {**params, "temporaries": temporaries} if temporaries else params
        return params if len(outputs) == 1 else {**params, "beside": outputs[1]}

    def _made(self) -> Array:
        """A result in memory of the library's choice."""
        prim, device, aval = self.prim, self.device, self.aval
        if isinstance(prim, View):
            result = prim.impl(device.xp, *self.reads, **self.params)
        else:
            device.free_idle(aval.nbytes)
            result = prim.compute(device.xp, self.reads, self.params, aval, None)
        if type(result) is not device.xp.ndarray or result.dtype != aval.dtype:
            result = device.xp.asarray(result, dtype=aval.dtype)
        return result

    def moves(self, outputs: list[Array], temporaries: list[Array]) -> list[tuple[Sequence[Array], Sequence[Array]]]:
        """What it reads, of an operand of which it takes some elements as much as it writes.

        Parts are read again by the kernel that writes them, from the cache.
        """
        prim = self.prim
        if not isinstance(prim, Opaque):
            return [(self.reads, outputs)]
        some = prim.gathers and outputs[0].nbytes < self.reads[0].nbytes
        parts = [abstract_array.empty(*lies) for lies in self.temporaries] if prim.parts else []
        return [((outputs[0], *self.reads[1:]) if some else self.reads, [*outputs, *parts])]

    def calls(self, reads: Sequence[Array], outputs: list[Array], temporaries: list[Array]) -> list[Call]:
        """The primitive itself where it writes into an array; else a copy of what it returns."""
        prim, xp, out = self.prim, self.device.xp, outputs[0]
        params = self._given(self.params, outputs)
        live = {name: number for name, number in params.items() if isinstance(number, LiveInt)}
        if self.device.lazy:
            return self._on_device(live, reads, outputs, temporaries)
        if live and self.writes:
            now = lambda: self._given(self._present(live), outputs)
            return [(lambda: prim.compute(xp, reads, now(), self.aval, out), ())]
        if live:
            return [(lambda: xp.copyto(out, prim.compute(xp, reads, self._present(live), self.aval, None)), ())]
        if isinstance(prim, Opaque) and prim.calls is not None:
            return prim.calls(xp, *reads, out=out, **params)
        if isinstance(prim, Opaque) and prim.into:
            bound = None
            if prim.bound is not None and abstract_array.AbstractArray not in map(type, (*reads, *outputs)):
                bound = prim.bound(*reads, out=out, **params)
            return [bound or (partial(prim.impl, xp, out=out, **params), tuple(reads))]
        if isinstance(prim, Reduction) and dtypes.accumulator(self.aval.dtype) == self.aval.dtype:
            reduce = getattr(xp, prim.ufunc).reduce
            return [(reduce, (*reads, params["axis"], self.aval.dtype, out, params.get("keepdims", False)))]
        if isinstance(prim, Elementwise) and prim.ufunc is not None:
            return [into(getattr(xp, prim.ufunc), reads, out)]
        if self.writes:
            return [(prim.compute, (xp, reads, params, self.aval, out))]
        again = Application(prim, reads, params, self.aval)
        return [(lambda: self.copies(outputs, again.run([], [])), ())]

    def _on_device(
        self, live: dict[str, LiveInt], reads: Sequence[Array], outputs: list[Array], temporaries: list[Array]
    ) -> list[Call]:
        """The task itself on these arrays; with live numbers, one with their present values."""

        def run() -> None:
            task = Application(self.prim, reads, self._present(live), self.aval, self.beside) if live else again
            if self.writes:
                task.run(outputs, temporaries)
            else:
                self.device.call(self.copies, outputs, task.run([], []))

        again = Application(self.prim, reads, self.params, self.aval, self.beside)
        return [(run, ())]

    def _present(self, live: dict[str, LiveInt]) -> dict[str, Any]:
        """The parameters, with present values of live numbers."""
        return {**self.params, **{name: number.now() for name, number in live.items()}}

    def abstract_outputs(self) -> list[Array]:
        """As the primitive would lay it out; kernels of its own tell of their passes over memory."""
        prim, params, aval = self.prim, self.params, self.aval
        if isinstance(prim, Elementwise):
            return super().abstract_outputs()
        if isinstance(prim, View):
            return [abstract_array.viewed(prim, self.reads[0], params, aval)]
        arrays, device = [abstract_array.like(x) for x in self.reads], dry(self.device)
        if isinstance(prim, Reduction) and not device.lazy:
            return [
                abstract_array.reduced(lambda x: prim.compute(self.device.xp, [x], params, aval, None), arrays[0], aval)
            ]
        outputs: list[Array] = [abstract_array.empty(aval.shape, aval.dtype)]
        if self.beside is not None:
            outputs.append(abstract_array.empty(self.beside.shape, self.beside.dtype))
        if isinstance(prim, Opaque) and device.lazy:
            outputs[0] = prim.follow(device, arrays, self._given(params, outputs), outputs[0])
        return outputs


class Function(Task):
    """A function of arrays that yields values like ``avals``: creation, copies, an optimizer's update.

    ``call(*outputs, *reads)`` writes them; where ``given`` is False, ``call(*reads)`` returns them as a list.
    ``is_kernel``: whether it counts among the kernels run; creation does not.
    ``over``: where the one result is the first array read, but for some elements, ``over(*reads[1:])`` gives a function
    that writes these into an array; itself it takes no memory.
    """

    def __init__(
        self,
        name: str,
        avals: Sequence[ShapedArray],
        call: Callable[..., Any],
        reads: Sequence[Array] = (),
        given: bool = True,
        is_kernel: bool = True,
        over: Callable[..., Callable[[Array], object]] | None = None,
    ) -> None:
        self.device, self.names, self.reads, self.avals = avals[0].device, (name,), reads, avals
        self._call, self.is_kernel, self.over = call, is_kernel, over
        self.writes = [(a.shape, a.dtype) for a in avals] if given else ()

    def run(self, outputs: list[Array], temporaries: list[Array]) -> list[Array]:
        """Call the function, on its device."""
        results = self.device.call(self._call, *outputs, *self.reads)
        return outputs or results

    def calls(self, reads: Sequence[Array], outputs: list[Array], temporaries: list[Array]) -> list[Call]:
        """The function itself where it writes into arrays; else copies of what it returns."""
        call = partial(self.device.call, self._call) if self.device.lazy else self._call
        if self.writes:
            return [(call, (*outputs, *reads))]

        def copied() -> None:
            self.device.call(self.copies, outputs, call(*reads))

        return [(copied, ())]

    def abstract_outputs(self) -> list[Array]:
        """C-contiguous ones."""
        return [abstract_array.empty(a.shape, a.dtype) for a in self.avals]


def copy_of(array: Array, aval: ShapedArray) -> Task:
    """A copy of ``array``, whose aval is ``aval``, in memory of its own."""
    return Function("copy", [aval], lambda out, x: aval.device.xp.copyto(out, x), [array])


class Change(Task):
    """A function that writes into some elements of arrays that there are: ``call(*targets, *reads)``.

    ``moved``: arrays of as many bytes as it reads, and as it writes; nothing else may refer to the targets' values.
    """

    writes = ()

    def __init__(
        self, name: str, device: Device, call: Callable[..., Any], targets: Sequence[Array], reads: Sequence[Array],
        moved: tuple[Sequence[Array], Sequence[Array]],
    ) -> None:  # fmt: skip
        self.device, self.names, self.reads = device, (name,), reads
        self._call, self._targets, self._moved = call, targets, moved

    def run(self, outputs: list[Array], temporaries: list[Array]) -> list[Array]:
        """Call the function, on its device."""
        self.device.call(self._call, *self._targets, *self.reads)
        return []

    def moves(self, outputs: list[Array], temporaries: list[Array]) -> list[tuple[Sequence[Array], Sequence[Array]]]:
        """As much as it reads, and as it writes."""
        return [self._moved]

    def abstract_outputs(self) -> list[Array]:
        """None: nothing is made."""
        return []
