"""recompute_grad: keep only a call and its inputs; rerun the function when its gradient is asked for.

``checkpoint`` tells how a first run and a rerun see the same.  The rerun gets the same argument objects, too.

The behaviour is that of TensorFlow's ``tf.recompute_grad`` and of the older ``tf.contrib.layers.recompute_grad``, less
their silent errors.  Where forward mode runs *inside* an outer tape (reverse over forward), the call is not
checkpointed: its results are right, its memory is that of the plain function.
"""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar, overload

from tapegrad import nest
from tapegrad.autodiff.guards import Bindings
from tapegrad.autodiff.wrapping import Wrapper
from tapegrad.core.buffer import Buffer
from tapegrad.core.cell import Seen
from tapegrad.core.protocols import Recorder
from tapegrad.core.state import nested, thread
from tapegrad.device.dtypes import is_inexact
from tapegrad.device.numerics import bits
from tapegrad.engine.realize import array_of, realize
from tapegrad.errors import RecomputeError
from tapegrad.remat.checkpoint.checkpoint import Checkpoint, record_escaped, recorders_of_a_call, renamed
from tapegrad.remat.checkpoint.policy_rerun import Noting, Taking
from tapegrad.remat.checkpoint.rerun_tape import (
    Argument,
    Cotangents,
    Key,
    Lookout,
    Postponing,
    RerunTrace,
    Sums,
    alone,
    kept_by_tapes,
    results_of,
    snapshots,
)
from tapegrad.remat.policies import Policy, checked
from tapegrad.tensor import Tensor, identity_of
from tapegrad.tracing.frames import CHECKPOINT, Description, code_of, counts_as_call
from tapegrad.variable import Variable

if TYPE_CHECKING:
    from types import FrameType

    from tapegrad.core.aval import ShapedArray
    from tapegrad.core.primitive import Primitive
    from tapegrad.device.types import Array

T = TypeVar("T")
P = ParamSpec("P")
R = TypeVar("R")


class Recompute(Wrapper):
    """What :func:`recompute_grad` makes of a function, method or layer: called like it, with its attributes."""

    def __init__(self, f: Callable[..., Any], check: str | None, policy: Policy | None = None) -> None:
        super().__init__(f)
        self._policy = policy
        self._says = _names(f, "is_recomputing")
        self._check = check

    @property
    def guarded(self) -> Sequence[Callable[..., Any]]:
        """The user's functions, whose names must be bound in a rerun to what they were bound to in the first run."""
        return (self.__wrapped__,)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        hidden, pushers = recorders_of_a_call()
        if not hidden:
            return _apart(self._run(args, kwargs, False), args, kwargs)
        call = self._new_call(args, kwargs, hidden)
        y, results, watch = nested(10, call.first_run, args, kwargs, hidden, pushers)
        within = any(isinstance(r, Lookout) for r in hidden)  # another call, which may follow what it makes itself
        if not call.inputs and not call.effects and not within:
            return _apart(y, args, kwargs)
        outputs = renamed(results, pushers)
        call.expect(y, results)
        handles = {id(r._buffer): weakref.ref(r) for r in results if isinstance(r, Tensor)}
        y = nest.rebuild(y, iter(outputs))
        del results
        watch.dropped = {i for i, handle in handles.items() if handle() is None}  # results that nobody stored, too
        buffers = [o._buffer for o in outputs if isinstance(o, Tensor)]
        escaped = call.add_escaped(watch, buffers)
        record_escaped(hidden, call, call.inputs, escaped)
        for recorder in hidden:
            recorder.record_call(call, call.inputs, tuple(buffers))
        call.forget_buffers()
        call.tell_kept()
        return y

    def _new_call(self, args: tuple[Any, ...], kwargs: dict[str, Any], hidden: list[Recorder]) -> CheckpointedCall:
        name = f"recompute_grad({getattr(self, '__name__', type(self.__wrapped__).__name__)})"
        return CheckpointedCall(self, name, args, kwargs, hidden)

    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any], again: bool) -> Any:
        if self._says:
            kwargs = {**kwargs, "is_recomputing": again}
        return self.__wrapped__(*args, **kwargs)

    def _as_run(self, f: Callable[..., T], *args: object) -> T:
        """What ``f(*args)`` returns, which does what a run of the function would do."""
        return f(*args)


def _described(frame: FrameType) -> Description:
    f = frame.f_locals["self"].__wrapped__
    name = getattr(f, "__qualname__", type(f).__qualname__)
    return CHECKPOINT, f"recompute_grad({name})", code_of(f) or code_of(getattr(f, "call", None))


counts_as_call(Recompute._run, _described)
counts_as_call(Recompute._as_run, _described)


def _apart(y: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``y``, in which an argument that was returned as it is is a value of its own, as any result of the call."""
    given = {id(x) for x in nest.leaves((args, kwargs)) if isinstance(x, Tensor)}
    if not any(id(x) in given for x in nest.leaves(y)):
        return y
    return nest.map_leaves(lambda x: identity_of(x) if isinstance(x, Tensor) and id(x) in given else x, y)


@overload
def recompute_grad(
    f: Callable[P, R], *, use_data_dep: bool | None = ..., tupleize_grads: bool = ..., check: str | None = ...,
    policy: Policy | None = ...,
) -> Callable[P, R]: ...  # fmt: skip


@overload
def recompute_grad(
    f: None = None, *, use_data_dep: bool | None = ..., tupleize_grads: bool = ..., check: str | None = ...,
    policy: Policy | None = ...,
) -> Callable[[Callable[P, R]], Callable[P, R]]: ...  # fmt: skip


def recompute_grad(
    f: Callable[..., Any] | None = None,
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
    ``check="values"`` compares a checksum of each rerun's outputs with the first run's.  The rerun runs ``f`` to its
    end, but computes only values that a derivative rule, or ``f`` itself, reads.

    ``policy`` (see ``tg.memory.policies``): values of the first run to be saved, or moved to another memory; the rerun
    takes them instead of computing them.  It computes elementwise values only where a derivative rule, or an operation
    that is not saved, reads them; other operations run again.  What is saved is held until the call is forgotten, also
    under a budget.  Checkpoints inside ``f`` have policies of their own.

    ``use_data_dep`` and ``tupleize_grads`` (of the old form) concern order only, and here hold always: a rerun starts
    when the upstream gradient exists, and all of a call's gradients exist before one is used.

    Random numbers of ``tg.random`` repeat whatever other threads do.  NumPy's global generator and Python's ``random``
    belong to all threads: they are set back for a rerun, and if another thread draws from them while ``f`` runs (which
    draws from them, too), the numbers cannot be repeated: an error.  A generator object that lives outside ``f``, such
    as a ``np.random.Generator``, is not set back: make it inside from a seed.

    Raises, when differentiated, RecomputeError (ValueError) if the rerun has another structure, other shapes or
    dtypes, other variables or captured tensors, other draws from the generators of NumPy and Python, (with a policy)
    other operations, or (checked) other values.
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


def _names(f: Callable[..., Any], parameter: str) -> bool:
    try:
        argument = inspect.signature(f).parameters.get(parameter)
    except (TypeError, ValueError):
        return False
    return argument is not None and argument.kind in (argument.KEYWORD_ONLY, argument.POSITIONAL_OR_KEYWORD)


class CheckpointedCall(Checkpoint):
    """One checkpointed call of a function: what its rerun needs, and what the rerun must repeat."""

    def __init__(
        self, owner: Recompute, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], hidden: list[Recorder]
    ) -> None:
        super().__init__(name, hidden)
        self.times = 0
        self._owner = owner
        self._args, self._kwargs = snapshots(args, kwargs)
        self._noted: Noting | None = None
        self._captures: list[weakref.ref[Buffer]] = []
        self._escaped: dict[Key, tuple[ShapedArray, Primitive]] = {}
        self._operations = 0
        self.output_keys: Sequence[Key] = ()
        self.returned = 0
        self._bindings = [Bindings(f) for f in owner.guarded]

    def first_run(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], hidden: list[Recorder], pushers: tuple[Any, ...]
    ) -> tuple[Any, list[object], Lookout]:
        """Run behind the barrier; sets ``inputs`` to the watched values that the results may depend on."""

        def run(watch: Lookout, seen: Seen) -> tuple[Any, list[object]]:
            y = self._run_first(args, kwargs, watch, seen)
            results = results_of(y, watch)
            realize([r._buffer for r in results if isinstance(r, Tensor)])
            return y, results

        (y, results), watch, seen = self.setting.noting(hidden, pushers, run)
        self.note_uses(watch, seen, self._given())
        return y, [alone(r, self.setting.start) for r in results], watch

    def add_escaped(self, watch: Lookout, outputs: list[Buffer]) -> list[Buffer]:
        """Add to ``outputs`` the values made in the first run that the user still holds: the rerun has them, too.

        So they have their gradients.  Those that the call itself holds are returned: of these a rerun computes none.
        """
        own, contents = set(map(id, self.kept_buffers())), {id(cell.get()) for cell in self.setting.cells}
        escaped = {key: b for key, b in watch.alive().items() if is_inexact(b.node.aval.dtype)}
        others = {key: b for key, b in escaped.items() if id(b) not in own | contents}
        self.returned = len(outputs)
        self.output_keys = [*(("result", i) for i in range(len(outputs))), *others]
        self._escaped = {key: (b.node.aval, b.node.prim) for key, b in others.items()}
        self._operations = watch.operations
        outputs += others.values()
        return [b for b in escaped.values() if id(b) in own]

    def _given(self) -> Iterator[Buffer]:
        """The values of the arguments."""
        for leaf in nest.flatten((self._args, self._kwargs)):
            if isinstance(leaf, Tensor):
                yield leaf._buffer
            elif isinstance(leaf, Variable):
                yield self.setting.cells.get(leaf._cell) or leaf._cell.get()

    def _run_first(self, args: tuple[Any, ...], kwargs: dict[str, Any], watch: Lookout, seen: Seen) -> Any:
        if self._owner._policy is None:
            return self._owner._run(args, kwargs, False)
        self._noted = Noting(self._owner._policy, watch)
        y = self._noted.during(self._owner._run, args, kwargs, False)
        self._noted.settle()
        return y

    def expect(self, y: Any, results: list[object]) -> None:
        """Note the form of the first run's results, their checksum if asked, and what names are bound to."""
        for bindings in self._bindings:
            bindings.settle()
        self._structure = nest.structure(y)
        self._avals = [r._buffer.node.aval if isinstance(r, Tensor) else None for r in results]
        self._sum = self._checksum(results)

    def forget_buffers(self) -> None:
        """Keep nodes instead of buffers: bytes of inputs are kept by the arguments, captures and cells alone.

        Under a budget the arguments may be dropped, too, if nobody else has them.
        """
        self._captures = [weakref.ref(b) for b in self.inputs]
        self.inputs = ()
        self._args = nest.map_leaves(kept_by_tapes, self._args)
        self._kwargs = nest.map_leaves(kept_by_tapes, self._kwargs)

    def kept(self) -> Iterator[object]:
        """Arguments, watched values from outside (the function has them), and what a policy has saved."""
        for leaf in nest.flatten((self._args, self._kwargs)):
            if isinstance(leaf, (Tensor, Argument)):
                yield leaf._buffer if isinstance(leaf, Tensor) else leaf.residuals
        yield from (b for ref in self._captures if (b := ref()) is not None)
        if self._noted is not None:
            yield from (value for _, value in self._noted.saved.values())

    def pullback(self, cts: Cotangents, needed: frozenset[int], lead: int | None, come: Sums) -> Cotangents:
        """Rerun, and pull the cotangents through the rerun's record.  Raises RecomputeError."""
        self.refuse_other_bindings()
        return nested(20, self._pulled, cts, needed, lead, come)

    def refuse_other_bindings(self) -> None:
        """Raise RecomputeError if a name that the function reads was bound to something else after the first run."""
        for bindings in self._bindings:
            change = bindings.change()
            if change is not None:
                raise RecomputeError(
                    f"{self.name}: {change} now, so a rerun would compute something else than the first run: bind the "
                    "value when the function is made (lambda x, k=k: ...), or pass it as an argument"
                )

    def _pulled(self, cts: Cotangents, needed: frozenset[int], lead: int | None, come: Sums) -> Cotangents:
        trace = self.trace()
        watch = Lookout((), self._escaped, trace)
        try:
            indices = self._rerun(trace, watch)
            indices += self._escaped_in(watch, cts[len(indices) :])
            watch.release()
            return self.pull(trace, zip(indices, cts, strict=True), needed, lead, come)
        finally:
            self.refuse_survivors(watch.derived)

    def _rerun(self, trace: RerunTrace, watch: Lookout) -> list[int]:
        """Rerun the function; the indices of the nodes of its results.  Raises RecomputeError."""
        self.times += 1
        args, kwargs = snapshots(self._args, self._kwargs)

        def run(watch: Lookout) -> tuple[Any, list[object]]:
            runner = Postponing(watch) if self._noted is None else Taking(self.name, self._noted, watch)
            y = runner.during(self._owner._run, args, kwargs, True)
            results = results_of(y, watch)
            trace.compute([*(r._buffer for r in results if isinstance(r, Tensor)), *watch.held.values()])
            return y, results

        (y, results), seen = self.setting.repeated(trace, watch, run)
        self._compare(y, results, seen, watch.used)
        return [r._buffer.node.index for r in results if isinstance(r, Tensor)]

    @property
    def _described(self) -> str:
        code = code_of(self._owner.__wrapped__)
        return self.name if code is None else f"{self.name}, defined at {code.co_filename}:{code.co_firstlineno}"

    def _escaped_in(self, watch: Lookout, cts: Cotangents) -> Iterator[int]:
        """Yield the index in a rerun of each value that left the first run by a side door.  Raises RecomputeError."""
        for (key, (aval, prim)), ct in zip(self._escaped.items(), cts, strict=True):
            value = watch.held.get(key)
            same = value is not None and value.node.aval == aval and value.node.prim is prim
            if ct is not None and not (same and watch.operations == self._operations):
                raise RecomputeError(
                    f"{self._described}: the gradient passes through {aval!r}, the result of {prim.name}, which "
                    "left the first run by a side door (a list, an attribute, a global, an object that is no "
                    "structure), and the rerun does not do the same operations: return it from the function, as part "
                    "of its result"
                )
            yield -1 if value is None else value.node.index

    def _compare(self, y: Any, results: list[object], seen: Seen, used: dict[int, Buffer]) -> None:
        """Raise RecomputeError unless the rerun repeated the first run."""
        if nest.structure(y) != self._structure:
            raise RecomputeError(
                f"{self.name}: the rerun returned the structure {nest.structure(y)}, the first run {self._structure}"
            )
        avals = [r._buffer.node.aval if isinstance(r, Tensor) else None for r in results]
        if avals != self._avals:
            raise RecomputeError(f"{self.name}: the rerun returned {avals}, the first run {self._avals}")
        self.compare_uses(self._numbers(seen), used)
        if self._sum is not None and self._checksum(results) != self._sum:
            raise RecomputeError(
                f"{self.name}: the rerun computed other values than the first run (check='values'): it depends on "
                "something outside that changed, such as an array changed in place or a generator of its own"
            )

    def _checksum(self, results: list[object]) -> tuple[Any, ...] | None:
        if self._owner._check is None:
            return None
        tensors = [r for r in results if isinstance(r, Tensor)]
        realize([t._buffer for t in tensors])
        nothing: tuple[bytes, ...] = ()
        return thread.executor.in_earnest(lambda: tuple(bits.checksum(_whole(t)) for t in tensors), nothing)


def _whole(x: Tensor) -> Array:
    """The value of ``x`` as an array; under ``vmap`` that of all examples."""
    buffer = x._buffer
    for batch in reversed(thread.batches):
        buffer = batch.whole(buffer)
    return x.device.numpy(array_of(buffer))
