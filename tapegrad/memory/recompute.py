"""recompute_grad: keep only a call and its inputs; rerun the function when its gradient is asked for.

The first run happens behind a barrier: tapes outside do not record (tapes opened inside do), while a look-out notes
which watched values and which cells (variables, random generators) the function uses.  The call then enters the tapes
as one record.  The rerun sees the same argument objects, the cells' contents of the first run (what it writes is
dropped), and the same random numbers; it is recorded by a fresh tape that follows the call's inputs, and by the tapes
that are recording at that moment: so derivatives of any order are right without a rule for them.

The behaviour is that of TensorFlow's ``tf.recompute_grad`` and of the older ``tf.contrib.layers.recompute_grad``, less
their silent errors.  Where forward mode runs *inside* an outer tape (reverse over forward), the call is not
checkpointed: its results are right, its memory is that of the plain function.
"""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

from tapegrad import buffer as _buffer
from tapegrad import nest
from tapegrad.buffer import Buffer
from tapegrad.cell import Seen, lookout, overlay
from tapegrad.device import bits, current_device, device, phantom
from tapegrad.errors import RecomputeError
from tapegrad.evaluate import fill
from tapegrad.memory.policies import Policy, checked
from tapegrad.memory.rerun import (
    Lookout,
    RerunTrace,
    alone,
    come_for,
    counted_rerun,
    kept_by_tapes,
    results_of,
    snapshots,
)
from tapegrad.memory.saving import Noting, Taking
from tapegrad.node import Node, next_index, thread
from tapegrad.tensor import Tensor, alias
from tapegrad.transforms.pushing import Pusher
from tapegrad.transforms.wrapping import Wrapper
from tapegrad.transforms.zeros import zeros_of
from tapegrad.variable import Variable, last_number, trainables


class Recompute(Wrapper):
    """What :func:`recompute_grad` makes of a function, method or layer: called like it, with its attributes."""

    def __init__(self, f: Callable, check: str | None, policy: Policy | None = None) -> None:
        super().__init__(f)
        self._policy = policy
        self._says = _names(f, "is_recomputing")
        self._check = check

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        hidden = [r for r in thread.recorders if not isinstance(r, Pusher)]
        pushers = [r for r in thread.recorders if isinstance(r, Pusher)]
        inside = hidden and pushers and thread.recorders.index(pushers[-1]) > thread.recorders.index(hidden[0])
        if not hidden or inside:
            return self._run(args, kwargs, False)
        call = self._new_call(args, kwargs, hidden)
        y, results = call.first_run(args, kwargs, tuple(pushers))
        if not call.inputs:
            return y
        outputs = [Tensor(alias(r._buffer)) if isinstance(r, Tensor) else r for r in results]
        for old, new in zip(results, outputs, strict=True):
            if isinstance(new, Tensor):
                for p in pushers:
                    p.carry(old._buffer, new._buffer)
        buffers = tuple(o._buffer for o in outputs if isinstance(o, Tensor))
        call.expect(y, results)
        for recorder in hidden:
            recorder.record_call(call, call.inputs, buffers)
        if _buffer.accountant is not None:
            for b in call.inputs:
                _buffer.accountant.wanted(b, call.name)
        call.forget_buffers()
        return nest.rebuild(y, iter(outputs))

    def _new_call(self, args: tuple, kwargs: dict, hidden: list[Any]) -> CheckpointedCall:
        name = f"recompute_grad({getattr(self, '__name__', type(self.__wrapped__).__name__)})"
        return CheckpointedCall(self, name, args, kwargs, hidden)

    def _run(self, args: tuple, kwargs: dict, again: bool) -> Any:
        if self._says:
            kwargs = {**kwargs, "is_recomputing": again}
        return self.__wrapped__(*args, **kwargs)


def recompute_grad(
    f: Callable | None = None,
    *,
    use_data_dep: bool | None = None,
    tupleize_grads: bool = False,
    check: str | None = None,
    policy: Policy | None = None,
) -> Any:
    """Wrap ``f`` so that a tape keeps only the call and its inputs, and reruns ``f`` to differentiate it.

    ``f``: a function, method, partial, or callable object such as a layer, of any arguments, returning any structure.
    Tensors among positional and keyword arguments, captured tensors and variables all get their gradients; random
    numbers repeat; state changes happen once.  If ``f`` has a parameter ``is_recomputing``, it is told.
    ``check="values"`` compares a checksum of each rerun's outputs with the first run's.

    ``policy`` (see ``tg.memory.policies``): values of the first run to be saved, or moved to another memory; the rerun
    takes them instead of computing them.  It computes elementwise values only where a derivative rule, or an operation
    that is not saved, reads them; other operations run again.  What is saved is held until the call is forgotten, also
    under a budget.  Checkpoints inside ``f`` have policies of their own.

    ``use_data_dep`` and ``tupleize_grads`` (of the old form) concern order only, and here hold always: a rerun starts
    when the upstream gradient exists, and all of a call's gradients exist before one is used.

    Raises, when differentiated, RecomputeError (ValueError) if the rerun has another structure, other shapes or
    dtypes, other variables or captured tensors, (with a policy) other operations, or (checked) other values.
    """
    if check not in (None, "values"):
        raise RecomputeError(f"recompute_grad: check is None or 'values', not {check!r}")
    for name, value in (("use_data_dep", use_data_dep), ("tupleize_grads", tupleize_grads)):
        if value not in (None, True, False):
            raise RecomputeError(f"recompute_grad: {name} is a bool, not {value!r}")
    if policy is not None:
        checked("recompute_grad", policy)
    if f is None:
        return functools.partial(
            recompute_grad, use_data_dep=use_data_dep, tupleize_grads=tupleize_grads, check=check, policy=policy
        )
    if not callable(f):
        raise RecomputeError(f"recompute_grad: {f!r:.60} is not callable")
    return Recompute(f, check, policy)


def _names(f: Callable, parameter: str) -> bool:
    try:
        found = inspect.signature(f).parameters.get(parameter)
    except (TypeError, ValueError):
        return False
    return found is not None and found.kind in (found.KEYWORD_ONLY, found.POSITIONAL_OR_KEYWORD)


class CheckpointedCall:
    """One checkpointed call: what its rerun needs, and what the rerun must repeat."""

    again: Callable[[list[Any]], list[Any]] | None = None

    def __init__(self, owner: Recompute, name: str, args: tuple, kwargs: dict, hidden: list[Any]) -> None:
        self.name = name
        self.times = 0
        self._owner = owner
        self._args, self._kwargs = snapshots(args, kwargs)
        self._tapes = [weakref.ref(r) for r in hidden]
        self.inputs: tuple[Buffer, ...] = ()
        self._nodes: tuple[Node, ...] = ()
        self._places: dict[tuple[int, int], int] = {}
        self._cells: dict[Any, Any] = {}
        self._random: tuple | None = None
        self._noted: Noting | None = None
        self._device = current_device()

    def first_run(self, args: tuple, kwargs: dict, pushers: tuple) -> tuple[Any, list[Any]]:
        """Run behind the barrier; sets ``inputs`` to the watched values that the results may depend on."""
        before, state = thread.recorders, bits.host_state()
        watch = Lookout([r for ref in self._tapes if (r := ref()) is not None])
        self._start, self._first = watch.start, last_number()
        thread.recorders = (*pushers, watch)
        try:
            with lookout() as seen:
                self._began = next_index()
                y = self._run_first(args, kwargs, watch, seen)
                results = results_of(y, watch)
                fill([r._buffer for r in results if isinstance(r, Tensor)])
        finally:
            thread.recorders = before
        self._random = None if bits.same_host_state(state, bits.host_state()) else state
        self._cells = {cell: content for cell, (content, _) in seen.items()}
        self._variables = self._numbers(seen)
        own = {c.node.index for c in self._cells.values() if isinstance(c, Buffer)}
        self._used, self._captured = watch.used.keys() | own, watch.captured.keys() - own
        given = [leaf for leaf in nest.flatten((self._args, self._kwargs)) if isinstance(leaf, (Tensor, Variable))]
        found = {}
        for leaf in given:
            buffer = leaf._buffer if isinstance(leaf, Tensor) else self._cells.get(leaf._cell) or leaf._cell.get()
            if watch.follows(buffer):
                found[buffer.node.index] = buffer
        found.update(watch.captured)
        self._places = watch.watched_contents(found)
        self.inputs = tuple(found.values())
        return y, [alone(r, self._start) for r in results]

    def _run_first(self, args: tuple, kwargs: dict, watch: Lookout, seen: Seen) -> Any:
        if self._owner._policy is None:
            return self._owner._run(args, kwargs, False)
        self._noted = Noting(self._owner._policy, watch)
        with self._noted:
            y = self._owner._run(args, kwargs, False)
        self._noted.settle()
        return y

    def _numbers(self, seen: Seen) -> dict[int, str]:
        """Names of the trainable variables used that are older than the first run; a run may make others of its own."""
        return {v.construction_number: v.name for v in trainables(seen) if v.construction_number < self._first}

    def expect(self, y: Any, results: list[Any]) -> None:
        """Note the form of the first run's results, and their checksum if asked."""
        self._structure = nest.structure(y)
        self._avals = [r._buffer.node.aval if isinstance(r, Tensor) else None for r in results]
        self._sum = self._checksum(results)

    def forget_buffers(self) -> None:
        """Keep nodes instead of buffers: bytes of inputs are kept by the arguments, captures and cells alone.

        Under a budget the arguments may be dropped, too, if nobody else has them.
        """
        self._nodes = tuple(b.node for b in self.inputs)
        self.inputs = ()
        if _buffer.keeper is not None:
            self._args = nest.map_leaves(kept_by_tapes, self._args)
            self._kwargs = nest.map_leaves(kept_by_tapes, self._kwargs)

    def pullback(self, cts: list[Any], needed: frozenset[int], lead: int | None, come: dict[int, Any]) -> list[Any]:
        """Rerun, and pull the cotangents through the rerun's record.

        The walk adds to what has come for the inputs: so sums have the order, and the bits, of the plain function's.
        """
        trace, results = self._rerun()
        seeds: dict[int, Any] = {trace.source(i): g for i, g in come_for(self._nodes, needed, come).items()}
        for leaf, ct in zip((r for r in results if isinstance(r, Tensor)), cts, strict=True):
            if ct is not None:
                index = leaf._buffer.node.index
                seeds[index] = seeds[index] + ct if index in seeds else ct
        del results, leaf
        found = trace.pull(seeds, lead, needed)
        return [
            zeros_of(n.aval, lead) if g is None and i in needed else g
            for i, (g, n) in enumerate(zip(found, self._nodes, strict=True))
        ]

    def _rerun(self) -> tuple[RerunTrace, list[Any]]:
        now = bits.host_state() if self._random is not None else None
        self.times += 1
        watch = Lookout(())
        trace = RerunTrace(self._nodes, self._places, self._start)
        args, kwargs = snapshots(self._args, self._kwargs)
        try:
            if self._random is not None:
                bits.set_host_state(self._random)
            shift = self._began - next_index()
            with device(self._device), overlay(self._cells), lookout() as seen, trace, counted_rerun(shift):
                thread.recorders = (*thread.recorders, watch)
                with nullcontext() if self._noted is None else Taking(self.name, self._noted, watch):
                    y = self._owner._run(args, kwargs, True)
                results = results_of(y, watch)
        finally:
            if now is not None:
                bits.set_host_state(now)
        self._compare(y, results, seen, watch.used)
        return trace, results

    def _compare(self, y: Any, results: list[Any], seen: Seen, used: dict[int, Buffer]) -> None:
        """Raise RecomputeError unless the rerun repeated the first run."""
        if nest.structure(y) != self._structure:
            raise RecomputeError(
                f"{self.name}: the rerun returned the structure {nest.structure(y)}, the first run {self._structure}"
            )
        avals = [r._buffer.node.aval if isinstance(r, Tensor) else None for r in results]
        if avals != self._avals:
            raise RecomputeError(f"{self.name}: the rerun returned {avals}, the first run {self._avals}")
        self._compare_uses(self._numbers(seen), used)
        if self._sum is not None and self._checksum(results) != self._sum:
            raise RecomputeError(
                f"{self.name}: the rerun computed other values than the first run (check='values'): it depends on "
                "something outside that changed, such as an array changed in place or a generator of its own"
            )

    def _compare_uses(self, variables: dict[int, str], used: dict[int, Buffer]) -> None:
        if set(variables) != set(self._variables):
            raise RecomputeError(
                f"{self.name}: the rerun used the variables {sorted(variables.values())}, the first run "
                f"{sorted(self._variables.values())}; a checkpointed function must use the same ones each time"
            )
        tapes = [r for ref in self._tapes if (r := ref()) is not None]
        others = [b for i, b in used.items() if i not in self._used]
        if not self._captured <= used.keys() or any(r.follows(b) for b in others for r in tapes):
            raise RecomputeError(
                f"{self.name}: the rerun used other watched tensors from outside than the first run; a captured name "
                "was bound to something else in between: pass it as an argument"
            )

    def _checksum(self, results: list[Any]) -> tuple | None:
        if self._owner._check is None:
            return None
        if phantom.mode.dry:
            fill([r._buffer for r in results if isinstance(r, Tensor)])
            return ()
        return tuple(bits.checksum(Tensor(alias(r._buffer)).__array__()) for r in results if isinstance(r, Tensor))
