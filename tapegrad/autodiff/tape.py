"""GradientTape: records what is computed from watched values, and differentiates it.

Names and behaviour are TensorFlow's, except where that is silently wrong: missing, misshapen or mistyped output
gradients are errors, and work that no requested source needs is not done.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import AbstractContextManager, ContextDecorator, ExitStack
from functools import partial
from types import MappingProxyType
from typing import Any, TypeVar, overload

from tapegrad import nest
from tapegrad.autodiff import jacobian_rows
from tapegrad.autodiff.backward import backward
from tapegrad.autodiff.collective_walk import agreed
from tapegrad.autodiff.cotangent_seeds import apart, handles, wants_zeros, weights_of
from tapegrad.autodiff.recording import Recording
from tapegrad.autodiff.records import Called, Record, reachable
from tapegrad.autodiff.zeros import zeros_of
from tapegrad.core import tracking
from tapegrad.core.buffer import Buffer
from tapegrad.core.node import LEAF, Node, next_index
from tapegrad.core.state import tell, tell_no_more, thread
from tapegrad.device import dtypes
from tapegrad.errors import (
    IntegerWatchWarning,
    LateTargetWarning,
    NotATensorError,
    RecomputeError,
    ShapeError,
    TapeError,
    TapeStateError,
    warn,
)
from tapegrad.ops.create.creation import zeros
from tapegrad.ops.index.slices import IndexedSlices
from tapegrad.tensor import Tensor
from tapegrad.variable import Variable, held

H = TypeVar("H", bound=Tensor | Variable)
K = TypeVar("K")


class GradientTape(Recording):
    """Records operations on watched tensors, to differentiate them (TensorFlow's ``tf.GradientTape``).

    ``persistent``: :meth:`gradient` may be called more than once.  ``watch_accessed_variables``: trainable variables
    are watched when they are read.  Recording belongs to the thread that entered the tape.
    """

    _slices = True
    """Whether a gradient may come as IndexedSlices."""

    def __init__(self, persistent: bool = False, watch_accessed_variables: bool = True) -> None:
        super().__init__()
        self._persistent, self._watch_accessed = persistent, watch_accessed_variables
        self._watched: set[int] = set()
        self._variables: dict[int, Variable] = {}
        self._values: dict[int, set[int]] = {}
        self._recording = self._entered = self._used = False
        self._left_at = 0

    # Life cycle ------------------------------------------------------------------------------------------------

    def __enter__(self) -> GradientTape:
        if self._recording:
            raise TapeStateError("this tape is recording already; use a second tape for a nested derivative")
        if self._used:
            self._forget()
            self._variables, self._used = {}, False
        self._begin()
        with ExitStack() as undo:  # a block that is not entered is not left
            undo.callback(self._stop)
            self._recording = self._entered = True
            tell(self)
            undo.pop_all()
        return self

    def __exit__(self, *exc: object) -> None:
        try:
            self._stop()  # even if a gradient, perhaps in another thread, has ended the recording before
        finally:
            self._stop()  # an interrupt may have come

    def _stop(self) -> None:
        tell_no_more(self)
        self._recording, self.graph = False, None
        self._left_at = next_index()

    def _forget(self) -> None:
        self._records, self._tracked, self._watched, self._values, self._peers = [], set(), set(), {}, None

    def _need_recording(self, what: str) -> None:
        if not self._recording or self not in thread.recorders:  # perhaps another thread's, or hidden
            raise TapeStateError(f"{what}: the tape is not recording here; call it inside the tape's with block")

    def stop_recording(self) -> AbstractContextManager[None]:
        """Pause this tape (other tapes go on recording) inside the block.

        Raises TapeStateError (a RuntimeError and ValueError) if the tape is not recording.
        """
        return _Pause(self)

    def _go_on(self, position: int) -> None:
        """The block of :meth:`stop_recording` is left; ``position`` others were told before this tape."""
        if self._used:  # a gradient was taken in the block: a new recording begins, as in TensorFlow
            self._forget()
            self._variables, self._used = {}, False
        self._begin()
        self._recording = True
        tell(self, position)

    def reset(self) -> None:
        """Drop all records and watched values, and continue to record.  Raises TapeStateError outside the block."""
        self._need_recording("reset")
        self._forget()
        self._variables = {}

    def watched_variables(self) -> tuple[Variable, ...]:
        """The variables this tape watches, in the order of their construction."""
        return tuple(self._variables[n] for n in sorted(self._variables))

    # Recording -------------------------------------------------------------------------------------------------

    def watch(self, tensor: object) -> None:
        """Follow a tensor, a variable, or every leaf of a nested structure of them, from now on.

        Integers have no gradient and raise an IntegerWatchWarning.  Raises NotATensorError for other things, and
        TapeStateError if the tape was never entered.
        """
        leaves = handles("watch", tensor)
        if not self._entered:
            raise TapeStateError("watch: the tape was never entered; call it inside the tape's with block")
        for x in leaves:
            node = (x._cell.get() if isinstance(x, Variable) else x._buffer).node
            if not node.aval.smooth:
                warnings.warn(
                    f"watch: values of dtype {x.dtype} have no gradient (it will be None); cast to a float first",
                    IntegerWatchWarning,
                    stacklevel=2,
                )
            elif isinstance(x, Variable):
                self._watch_variable(x, x._cell.get())
            else:
                thread.executor.operands.watch(x._buffer)
                self._watched.add(node.index)
                self._tracked.add(node.index)

    def _watch_variable(self, variable: Variable, value: Buffer) -> None:
        number, node = variable._number, value.node
        self._variables[number] = variable
        if node.aval.smooth:
            self._values.setdefault(number, set()).add(node.index)
            self._tracked.add(node.index)

    def read(self, variable: Variable, value: Buffer) -> None:
        """A variable was read (told by the variable)."""
        if (self._watch_accessed and variable._trainable) or variable._number in self._variables:
            self._watch_variable(variable, value)

    # Differentiation -------------------------------------------------------------------------------------------

    @overload
    def gradient(
        self, target: object, sources: Tensor | Variable, output_gradients: object = ...,
        unconnected_gradients: object = ...,
    ) -> Tensor: ...  # fmt: skip

    @overload
    def gradient(
        self, target: object, sources: list[H], output_gradients: object = ..., unconnected_gradients: object = ...
    ) -> list[Tensor]: ...

    @overload
    def gradient(
        self, target: object, sources: tuple[H, ...], output_gradients: object = ...,
        unconnected_gradients: object = ...,
    ) -> tuple[Tensor, ...]: ...  # fmt: skip

    @overload
    def gradient(
        self, target: object, sources: dict[K, H], output_gradients: object = ..., unconnected_gradients: object = ...
    ) -> dict[K, Tensor]: ...

    @overload
    def gradient(
        self, target: object, sources: object, output_gradients: object = ..., unconnected_gradients: object = ...
    ) -> Any: ...

    def gradient(
        self, target: object, sources: object, output_gradients: object = None, unconnected_gradients: object = "none"
    ) -> Any:
        """The gradient of ``target`` (an array's elements, and several targets, are summed) in each source.

        ``target``, ``sources``: tensors and variables, nested at will; the result has the structure of ``sources``.
        ``output_gradients``: weights in the structure of ``target``, or listed, of their targets' shapes and dtypes
        (None or a missing argument: ones; a number or 0-d tensor weighs all elements).  What is differentiated is the
        sum over all processes that take part: weights are each process's own, and a target without one that all have
        the same way is a single target.

        A source that no target depends on, or that was not watched, gets None, or zeros with
        ``unconnected_gradients="zero"``, an integer one also an IntegerWatchWarning; one of which rows alone were read,
        with ``sparse=True`` (see ``tg.take``), an ``IndexedSlices``.  To type checkers each is a tensor, as that of a
        connected source is.

        Raises TapeError (RuntimeError) on a used tape, GradientError (ValueError), ShapeError, DTypeError and
        NotATensorError for arguments that do not fit.
        """
        zero = wants_zeros(unconnected_gradients)
        targets = handles("target", target)
        sought = self._sources(sources)
        weights, given = weights_of(target, targets, output_gradients)
        self._warn_of_late(targets)
        records, consume = self._take()
        cts, own = dict[int, Tensor](), dict[int, Tensor]()
        for node, weight, is_given in zip(map(self._node, targets), weights, given, strict=True):
            if dtypes.is_inexact(node.aval.dtype):
                for sums in (cts, own) if is_given else (cts,):
                    have = sums.get(node.index)
                    sums[node.index] = weight if have is None else have + weight
        # A pending target would keep its inputs; on the CPU only big targets are pending, and they cost a pass.
        also = [t._buffer for t in targets if isinstance(t, Tensor) and t.device.lazy]
        seeded = [None if is_given else t for t, is_given in zip(targets, given, strict=True)]
        grads = self._walk(records, cts, sought, consume, None, also, seeded, own)
        return nest.rebuild(sources, map(apart(weights), self._results(grads, sought, zero)))

    def jacobian(
        self, target: object, sources: object, unconnected_gradients: object = "none",
        parallel_iterations: object = None, experimental_use_pfor: bool = True,
    ) -> Any:  # fmt: skip
        """The derivative of each element of ``target`` in each element of each source: shape ``target + source``.

        One backward walk serves many rows at once; operations that cannot take rows together run row by row (the two
        last arguments, TensorFlow's, change nothing).  Raises as :meth:`gradient` does.
        """
        zero = wants_zeros(unconnected_gradients)
        (node,) = self._nodes_of("target", target)
        sought = self._sources(sources)
        records, consume = self._take()
        size, shape = node.aval.size, node.aval.shape
        parts: list[dict[int, Tensor]] = []
        for start, stop in jacobian_rows.chunks(size, [s.size for s in sought] + [size]):
            seed = jacobian_rows.basis(node.aval, start, stop)
            last = consume and stop == size
            parts.append(self._walk(records, {node.index: seed}, sought, last, lead=stop - start))
        blocks = jacobian_rows.joined(parts, shape)
        return nest.rebuild(sources, iter(self._results(blocks, sought, zero, shape)))

    def batch_jacobian(
        self, target: object, source: Any, unconnected_gradients: object = "none", parallel_iterations: object = None,
        experimental_use_pfor: bool = True,
    ) -> Tensor:  # fmt: skip
        """For each example ``b`` (first axis of both) the derivative of ``target[b]`` in ``source[b]``.

        Shape ``(batch, *target.shape[1:], *source.shape[1:])``; zeros if not connected, as in TensorFlow.  Raises
        ShapeError for ranks below 2 and for unequal batch sizes.
        """
        wants_zeros(unconnected_gradients)
        (node,), (inner,) = self._nodes_of("target", target), self._nodes_of("source", source)
        if min(node.aval.ndim, inner.aval.ndim) < 2 or node.aval.shape[0] != inner.aval.shape[0]:
            raise ShapeError(
                f"batch_jacobian: target {node.aval.shape} and source {inner.aval.shape} must have rank 2 or more and "
                "the same first dimension"
            )
        records, consume = self._take()
        seed, columns = jacobian_rows.batch_basis(node.aval)
        grads = self._walk(records, {node.index: seed}, [source], consume, lead=columns)
        return jacobian_rows.batch_result(self._sums(grads, [source])[0], node.aval, inner.aval, columns)

    def _sources(self, sources: object) -> list[Tensor | Variable]:
        """The leaves of ``sources``, with a warning for integers, which have no gradient."""
        leaves = handles("source", sources)
        for x in leaves:
            if not (x._aval if isinstance(x, Variable) else x._buffer.node.aval).smooth:
                name = f'variable "{x.name}"' if isinstance(x, Variable) else "a source"
                warn(
                    f"gradient: {name} is {x.dtype} and has no gradient (None); cast it to a float before the tape "
                    "uses it, or leave it out",
                    IntegerWatchWarning,
                )
        return leaves

    def _take(self) -> tuple[list[Record], bool]:
        """The records to walk, and whether the walk may drop them."""
        if not self._entered:
            raise TapeError("the tape was never entered, so it has recorded nothing")
        if self._used:
            raise TapeError("a tape serves one gradient or jacobian call; persistent=True allows more")
        self._refuse_dry_run()
        if self._persistent:
            return list(self._records), False
        if self._recording:
            self._stop()
        self._used = True
        records, self._records = self._records, []
        return records, True

    def _walk(
        self, records: list[Record], cts: dict[int, Tensor], sought: list[Tensor | Variable], consume: bool,
        lead: int | None = None, also: Sequence[Buffer] = (), seeded: Sequence[Tensor | Variable | None] = (),
        own: Mapping[int, Tensor] = MappingProxyType({}),
    ) -> dict[int, Tensor]:  # fmt: skip
        """Return the cotangents of the values that stand for ``sought``.

        ``seeded``: the targets that have got ones; None for each that has a cotangent of its own, which is in ``own``.
        """
        variables = [s for s in sought if isinstance(s, Variable)]
        keep = {s._buffer.node.index for s in sought if isinstance(s, Tensor)}
        keep.update(*[self._values.get(v._number, ()) for v in variables])
        keep.update([b.node.index for b in held(variables)])
        if not keep and self._peers is None:
            return {}
        self._refuse_unseen(records, cts, {s._buffer.node.index for s in sought if isinstance(s, Tensor)})
        path, forced, behind = self._followed(records, cts, keep, seeded, own)
        slices = self._slices and lead is None
        walk = partial(backward, path=path, lead=lead, also=also, forced=forced, slices=slices)
        grads = self._pulled(walk, records, cts, keep, sought, consume)
        for indices in self._indices(sought) if behind else ():
            if grads.keys().isdisjoint(indices):
                grads.update({i: zeros_of(behind[i].aval, lead) for i in indices & behind.keys()})
        if consume:
            self._tracked, self._watched = set(), set()
        return grads

    def _refuse_unseen(self, records: list[Record], cts: dict[int, Tensor], sources: set[int]) -> None:
        """Raise RecomputeError for a source inside a checkpoint if a target depends on other results of the call.

        How these depend on it is known to the rerun alone.
        """
        if sources <= self._watched:  # most often
            return
        calls = [record for record in records if type(record) is Called]
        for record in calls:
            returned = getattr(record.call, "returned", None)
            if returned is None or sources.isdisjoint(n.index for n in record.results[returned:]):
                continue
            origin = getattr(record.call, "origin", record.call)
            parts = [r for r in calls if r is record or r.call is origin]
            others = {n.index for r in parts for n in r.results} - sources
            if not cts.keys().isdisjoint(reachable(records, others)):
                raise RecomputeError(
                    f"gradient: a source was made inside {record.call.name}, which did not return it, and the target "
                    "depends on what it did return: return the source, too, or compute it outside"
                )

    def _pulled(
        self, walk: Callable[..., dict[int, Tensor]], records: list[Record], cts: dict[int, Tensor], keep: set[int],
        sought: list[Tensor | Variable], consume: bool,
    ) -> dict[int, Tensor]:  # fmt: skip
        """The cotangents of the values in ``keep``, which stand for ``sought``, by ``walk`` over all records."""
        return walk(records, cts, keep, consume=consume)

    def _followed(
        self,
        records: list[Record],
        cts: dict[int, Tensor],
        keep: set[int],
        seeded: Sequence[Tensor | Variable | None],
        own: Mapping[int, Tensor],
    ) -> tuple[set[int] | None, AbstractSet[int], dict[int, Node]]:
        """The values to follow (None: all), what is pulled in any case, and what gets zeros at least."""
        if self._peers is None:
            everything = set(self._watched).union(*self._values.values())
            return None if everything <= keep else reachable(records, keep), frozenset(), {}
        buffers = [t if t is None else t._cell.get() if isinstance(t, Variable) else t._buffer for t in seeded]
        joint = agreed(self._peers, records, cts, keep, [b for b in buffers if b is None or b.node.index in cts])
        for index in joint.unseeded:
            cts.pop(index, None)
            if index in own:
                cts[index] = own[index]
        return joint.path, joint.forced, joint.behind

    def _indices(self, sources: Sequence[Tensor | Variable]) -> list[set[int]]:
        """The values that stand for each source: a tensor's own; of a variable, all that was read, and the present."""
        now = iter(held([s for s in sources if isinstance(s, Variable)]))
        found: list[set[int]] = []
        for source in sources:
            if isinstance(source, Tensor):
                found.append({source._buffer.node.index})
            else:
                found.append({next(now).node.index}.union(self._values.get(source._number, ())))
        return found

    def _sums(self, grads: dict[int, Tensor], sources: Sequence[Tensor | Variable]) -> list[Tensor | None]:
        """The cotangent of each source: of a variable, the sum over all its readings."""
        totals: list[Tensor | None] = []
        for source, indices in zip(sources, self._indices(sources), strict=True):
            aval = source._aval if isinstance(source, Variable) else source._buffer.node.aval
            total = None
            for index in sorted(indices) if aval.smooth else ():
                if index in grads:
                    total = grads[index] if total is None else total + grads[index]
            totals.append(total)
        return totals

    def _results(
        self, grads: dict[int, Tensor], sought: Sequence[Tensor | Variable], zero: bool, lead: tuple[int, ...] = ()
    ) -> list[Any]:
        """The gradient of each source; of one that nothing depends on None, or if ``zero`` zeros."""
        totals: list[Any] = self._sums(grads, sought)
        for i, (total, source) in enumerate(zip(totals, sought, strict=True)):
            if isinstance(total, Tensor | IndexedSlices):
                t = total.values if isinstance(total, IndexedSlices) else total
                name = source._name if isinstance(source, Variable) else "a tensor"
                tracking.current.label(t._buffer, "gradient", f"gradient of {name}")
            elif total is None and zero:
                totals[i] = zeros((*lead, *source.shape), dtype=source.dtype, device=source.device)
        return totals

    def _node(self, x: Any) -> Node:
        return (x._cell.get() if isinstance(x, Variable) else x._buffer).node

    def _nodes_of(self, role: str, x: object) -> list[Node]:
        if not isinstance(x, (Tensor, Variable)):
            raise NotATensorError(f"{role}: one tensor is needed, got {type(x).__name__}; stack several, or call again")
        return [self._node(x)]

    def _warn_of_late(self, targets: list[Tensor | Variable]) -> None:
        if len(targets) < 2 or self._recording or not self._entered:
            return
        for i, t in enumerate(targets):
            node = self._node(t)
            if node.index > self._left_at and node.index not in self._tracked and node.prim is not LEAF:
                warnings.warn(
                    f"target {i} was computed after the tape stopped recording and contributes nothing; compute it "
                    "inside the tape's with block",
                    LateTargetWarning,
                    stacklevel=3,
                )


class _Pause(ContextDecorator):
    """The block of :meth:`GradientTape.stop_recording`."""

    def __init__(self, tape: GradientTape) -> None:
        self._tape = tape

    def __enter__(self) -> None:
        self._tape._need_recording("stop_recording")
        self._place = thread.recorders.index(self._tape)
        self._tape._stop()

    def __exit__(self, *exc: object) -> None:
        self._tape._go_on(self._place)
