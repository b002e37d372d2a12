"""``tg.function``: a function whose calls are captured, one program for each signature, and replayed."""

from __future__ import annotations

import functools
import os
import sys
import weakref
from collections.abc import Callable, Collection, Sequence
from contextlib import nullcontext
from math import inf
from typing import Any, Generic, ParamSpec, TypeVar, overload

from tapegrad import nest
from tapegrad.autodiff.forward_transform import Pusher
from tapegrad.autodiff.guards import Guards
from tapegrad.autodiff.recording import Recording
from tapegrad.capture import arena
from tapegrad.capture.body import Each, Extras
from tapegrad.capture.eager import difference, eager
from tapegrad.capture.entry import Entry, Stats
from tapegrad.capture.graphs import replay_of
from tapegrad.capture.memory import alignment
from tapegrad.capture.plan_report import Plan, table
from tapegrad.capture.planner.fit import Planner, bound_bytes
from tapegrad.capture.predicted import as_tensor, predicted
from tapegrad.capture.replay import MislaidError, RelaidError, first_difference
from tapegrad.capture.signatures import advice, are_tensors, signature
from tapegrad.capture.taped import TapedCall, TapedEntry
from tapegrad.core import locks
from tapegrad.core.state import thread, unrecorded
from tapegrad.core.storage import METER
from tapegrad.engine.abstract_evaluation import AbstractExecutor
from tapegrad.engine.delegating_executor import lowest
from tapegrad.errors import BudgetError, FunctionError, warn
from tapegrad.remat.budget.budget import yielding
from tapegrad.remat.predict import Captured
from tapegrad.sizes import parse_bytes
from tapegrad.tensor import Tensor
from tapegrad.variable import everyone

P = ParamSpec("P")
R = TypeVar("R")


class Surroundings:
    """The programs of a function in one state of what it reads from around it."""

    def __init__(self) -> None:
        self.guards: Guards | None = None
        """None before the first run has ended."""
        self.entries: dict[Any, Entry] = {}
        self.taped: dict[Any, TapedEntry] = {}
        self.reason: str | None = None
        """Why nothing is captured in it."""

    def holds(self) -> bool:
        """Whether what the function reads is as it was."""
        return self.guards is None or self.guards.hold()


class Function(Generic[P, R]):
    """A captured function; see :func:`function`."""

    takes_live_index = True
    """Loops give it the number of the step as a tensor."""

    def __init__(self, f: Callable[P, R], max_signatures: int, budget: int | str | None = None) -> None:
        functools.update_wrapper(self, f)
        self._f = f
        self._most = max_signatures
        self._budget = inf if budget is None else parse_bytes(budget)
        self._owner: weakref.ref[Any] | None = None
        self._guarded: Callable[..., Any] = f
        self._now = Surroundings()
        self._known_around = [self._now]
        self._lock = locks.lock()
        self._methods: dict[int, tuple[weakref.ref[Any], Function[..., R]]] = {}  # by identity, not by equality
        self.stats = Stats()

    def __get__(self, owner: Any, kind: Any = None) -> Any:
        """As a method: each object has programs of its own."""
        if owner is None:
            return self
        known = self._methods.get(id(owner))
        if known is None or known[0]() is not owner:
            methods, key = self._methods, id(owner)
            try:
                weak = weakref.ref(owner, lambda _: methods.pop(key, None))
            except TypeError:  # an object that cannot be followed is an argument like others
                return functools.partial(self, owner)

            @functools.wraps(self._f)
            def method(*args: Any, **named: Any) -> R:
                return self._f(weak(), *args, **named)  # type: ignore[arg-type]

            known = self._methods[key] = weak, Function(method, self._most, self._given_budget)
            known[1]._owner, known[1]._guarded = weak, self._f
        return Method(owner, known[1])

    def __reduce__(self) -> Any:
        name: str = getattr(self, "__qualname__", "")
        known: Any = sys.modules.get(self.__module__)
        for part in name.split("."):
            known = getattr(known, part, None)
        return name if known is self else (Function, (self._f, self._most, self._given_budget))

    @property
    def _entries(self) -> dict[Any, Entry]:
        return self._now.entries

    @property
    def _taped(self) -> dict[Any, TapedEntry]:
        return self._now.taped

    def _look_around(self) -> Guards | None:
        """Take up the programs captured in the present surroundings; return guards to be settled after a first run."""
        if self._now.holds():
            return None if self._now.guards else Guards(self._guarded, self._owner)
        same = next((s for s in self._known_around if s.holds()), None)
        if same is None:
            self.changed = self._now.guards.failure() if self._now.guards else None
            same = Surroundings()
            if len(self._known_around) < self._most:
                self._known_around.append(same)
            else:
                same.reason = f"more than {self._most} surroundings (max_signatures), the last change: {self.changed}"
                if not any(reason.startswith("more than") for reason in self.stats.fallbacks):
                    warn(f"{self!r}: {same.reason}; others run eagerly; pass what changes as an argument")
        self._now = same
        return None if same.guards else Guards(self._guarded, self._owner)

    @property
    def _given_budget(self) -> int | None:
        return None if self._budget == inf else int(self._budget)

    @property
    def _limit(self) -> float:
        """Bytes that a program may take now: the budget, or that of an enclosing ``memory_budget``."""
        return min(self._budget, METER.limit)

    def __repr__(self) -> str:
        return f"<tg.function of {getattr(self._f, '__qualname__', self._f)!s}, {len(self._entries)} signatures>"

    def __call__(self, /, *args: P.args, **named: P.kwargs) -> R:
        if (
            thread.batches
            or isinstance(lowest(), AbstractExecutor)
            or (thread.recorders and not _by_tapes(thread.recorders))
        ):
            self.stats.fell_back("called inside a transformation or another captured function: inlined")
            return self._f(*args, **named)
        with self._lock:
            plain = are_tensors(args, named)
            given: Any = args if plain else nest.map_leaves(as_tensor, args)
            by_name = nest.map_leaves(as_tensor, named) if named else named
            guards = self._look_around()
            if self._now.reason is not None:
                self.stats.fell_back(self._now.reason)
                return self._not_captured(given, by_name)
            result = (self._on_a_tape if thread.recorders else self._called)(given, by_name, plain)
            if guards is not None:
                guards.settle()
                self._now.guards = guards
            return result

    def _called(self, args: tuple[Any, ...], named: dict[str, Any], plain: bool = False) -> R:
        if os.environ.get("TAPEGRAD_FUNCTION") == "0":
            return eager(self._f, args, named)
        key, held, tensors = signature(args, named, plain)
        entry = self._entries.get(key)
        if entry is None:
            return self._first(Entry(key, held), args, named)
        if entry.reason is not None:
            self.stats.fell_back(entry.reason)
            return self._not_captured(args, named)
        try:
            return self._replayed(entry, args, named, tensors)
        except MislaidError as e:
            return self._captured_again(entry, e, args, named)
        except RelaidError as e:
            reason = str(e)
        except BudgetError as e:  # there may be room without the arena
            entry.replay = entry.program = None
            reason = entry.reason = f"no room for the program: {e}"
        self.stats.fell_back(reason)
        return eager(self._f, args, named, room=self._room(_bytes_of_variables()))

    def _replayed(self, entry: Entry, args: tuple[Any, ...], named: dict[str, Any], tensors: list[Tensor]) -> R:
        """A call of a known signature.  Raises RelaidError before anything is done."""
        if METER.limit < entry.limit or self._budget < entry.limit:
            entry.replay = None
            entry.fit(self._limit, self._budget)
        if entry.replay is None:
            entry.prepare(bound=self._budget != inf)
            if entry.replay is None:
                return self._called(args, named)
        if not entry.verified and not entry.program.communicates:  # type: ignore[union-attr]
            return self._compared(entry, args, named, tensors)
        entry.replay.run(tensors)
        leaves = entry.replay.results(tensors)
        entry.verified = True
        entry.replay.commit()
        self.stats.replays += 1
        result: Any = entry.program.result  # type: ignore[union-attr]
        return leaves[0] if type(result) is Tensor else nest.rebuild(result, iter(leaves))

    def _first(self, entry: Entry, args: tuple[Any, ...], named: dict[str, Any]) -> R:
        """The first call of a signature runs eagerly; then the program is made."""
        if self._is_full(self._entries, entry.key):
            return self._not_captured(args, named)
        room = self._room(_bytes_of_variables())
        result = eager(self._f, args, named, functools.partial(self._capture, entry, args, named), room)
        self._note_excess(room, entry)
        self._entries[entry.key] = entry
        return result

    def _not_captured(self, args: tuple[Any, ...], named: dict[str, Any]) -> R:
        room = self._room(_bytes_of_variables())
        with nullcontext() if room is None else room:
            return self._f(*args, **named)

    def _room(self, own: int) -> yielding | None:
        """The budget for an eager call, to which ``own`` of the bytes alive count; None: there is none.

        If they exceed it, most are of others: then those of what the call reads count, as soon as it does.
        """
        if self._budget == inf:
            return None
        return yielding(int(self._budget), own if own < self._budget else 0)

    def _note_excess(self, room: yielding | None, entry: Entry) -> None:
        if room is not None and entry.plain is not None:
            over = room.taken + bound_bytes(entry.plain) - int(self._budget)
            self.stats.over_budget = max(self.stats.over_budget, over)

    def _capture(self, entry: Entry, args: tuple[Any, ...], named: dict[str, Any], result: Any) -> None:
        entry.capture(self._f, args, named, result)
        if entry.reason is None:
            entry.fit(self._limit, self._budget)
            self.stats.traces += 1

    def _captured_again(self, entry: Entry, e: MislaidError, args: tuple[Any, ...], named: dict[str, Any]) -> R:
        """A call that runs eagerly, and whose program is made anew, for how results lie."""
        entry.program = entry.plain = entry.replay = None
        entry.verified = False
        if e.layouts.items() <= entry.layouts.items():
            entry.reason = str(e)
        entry.layouts.update(e.layouts)
        self.stats.fell_back(str(e))
        then = None if entry.reason else functools.partial(self._capture, entry, args, named)
        return eager(self._f, args, named, then, self._room(_bytes_of_variables()))

    def _is_full(self, entries: dict[Any, Any], key: Any) -> bool:
        """Whether there is no place for one more signature; the first time it warns."""
        if len(entries) < self._most:
            return False
        reason = f"more than {self._most} signatures (max_signatures)"
        if reason not in self.stats.fallbacks:
            warn(f"{self!r}: {reason}; further ones run eagerly; {advice(entries, key)}")
        self.stats.fell_back(reason)
        return True

    def _compared(self, entry: Entry, args: Any, named: Any, tensors: list[Tensor]) -> R:
        """The second call: a replay, and an eager run whose results count, must agree in every bit."""
        replay: Any = entry.replay
        failure: Exception | None = None
        try:
            replay.run(tensors)
            leaves, writes = replay.told(tensors)
        except (RelaidError, MislaidError):
            raise
        except Exception as e:
            leaves, writes, failure = [], [], e
        if self._limit != inf:  # the arena goes before the eager run takes its bytes; the next call makes another
            entry.replay = replay = None
        room = self._room(bound_bytes(entry.program))  # type: ignore[arg-type]
        result = eager(self._f, args, named, room=room)
        self._note_excess(room, entry)
        if failure is not None:
            entry.reason = f"a replay raised {type(failure).__name__} where an eager run did not: {failure}"
        else:
            wrong = difference(leaves, nest.flatten(result), writes)
            if wrong is not None:
                entry.reason = f"a replay differs from an eager run in {wrong}"
        if entry.reason is not None:
            warn(f"{self!r} runs eagerly: {entry.reason}")
            entry.replay = entry.program = entry.plain = None
        elif replay is not None:
            replay.forget()
        entry.verified = True
        return result

    def _on_a_tape(self, args: tuple[Any, ...], named: dict[str, Any], plain: bool) -> R:
        """A call that tapes record: one record, whose forward and backward are replayed."""
        if os.environ.get("TAPEGRAD_FUNCTION") == "0":
            return self._f(*args, **named)
        key, held, tensors = signature(args, named, plain)
        entry = self._taped.get(key)
        if entry is not None and self._limit < entry.limit:
            entry = None
        if entry is None:
            if key not in self._taped and self._is_full(self._taped, key):
                return self._f(*args, **named)
            entry = TapedEntry(held, self._limit)
            prepare = lambda _: unrecorded(entry.prepare, self._f, args, named, tensors)
            result = eager(self._f, args, named, prepare)
            self._taped[key] = entry
            if entry.reason is None:
                self.stats.traces += 1
            return result
        if entry.call is None:
            self.stats.fell_back(f"on a tape: {entry.reason}")
            return self._f(*args, **named)
        lost = entry.call.loses(thread.recorders)
        if lost is not None:
            self.stats.fell_back(f"on a tape: {lost}")
            return self._f(*args, **named)
        try:
            result = entry.call(self._f, args, named, tensors)
        except (RelaidError, MislaidError) as e:
            self.stats.fell_back(f"on a tape: {e}")
            return self._f(*args, **named)
        self.stats.replays += 1
        return result

    def _known_on_a_tape(self, args: tuple[Any, ...]) -> tuple[Any, list[Tensor], TapedCall | None]:
        """The signature of a call, its tensors, and what replays it on a tape, if that is known, outside of budgets."""
        key, _, tensors = signature(args, {})
        entry = self._taped.get(key)
        limited = METER.limit != inf or self._budget != inf
        if entry is None or limited or thread.batches or isinstance(lowest(), AbstractExecutor):
            return key, tensors, None
        return key, tensors, entry.call

    def in_a_row(self, state: Any, count: int, each: Each, beside: Extras) -> tuple[int, Any]:
        """Up to ``count`` calls, each of what the one before it returned, and of ``beside(number)``.

        How many were made, and what the last returned: 0 unless it is known that all are replays of one program, which
        reads and writes nothing else, and of which no tape keeps a record.  Recorders are told of them as of one call.
        ``each(call, tensors)`` makes a call.
        """
        recorders = thread.recorders
        if not _by_tapes(recorders) or any(isinstance(r, Recording) for r in recorders):
            return 0, state
        with self._lock:
            self._look_around()
            key, tensors, call = self._known_on_a_tape((state, *beside(0)))
            if call is None or call.loses(recorders) is not None:
                return 0, state
            done, state = call.in_a_row(self._f, state, count, each, beside, key, tensors)
            self.stats.replays += done
            return done, state

    def gradients(
        self, args: tuple[Any, ...], cts: Sequence[Tensor | None], each: Each, followed: Collection[int]
    ) -> list[Tensor | None] | None:
        """Gradients in the tensors among ``args``, for the cotangents ``cts`` of the leaves of what a call returns.

        The call is made once more for it, by ``each(call, tensors)``.  None unless it is known to be a replay of a
        program that reads and writes nothing else, which nobody records, and which uses none of the values ``followed``
        (by index) but as arguments: then it is to be made, recorded and pulled by itself.
        """
        if thread.recorders:
            return None
        with self._lock:
            self._look_around()
            _, tensors, call = self._known_on_a_tape(args)
            found = None if call is None else call.gradients(tensors, cts, each, followed)
            self.stats.replays += found is not None
            return found

    def explain(self, *args: P.args, **named: P.kwargs) -> str:
        """Whether a call with these arguments has a program, and if not, what differs from the nearest signature."""
        with self._lock:
            given, by_name = nest.map_leaves(as_tensor, (args, named))
            key, _, _ = signature(given, by_name)
            if not any(s.holds() and s.guards is not None for s in self._known_around):
                failure = self._now.guards.failure() if self._now.guards is not None else None
                if failure is not None:
                    return f"miss: the surroundings have changed: {failure}"
            self._look_around()
            if self._now.reason is not None:
                return f"runs eagerly: {self._now.reason}"
            entry = self._entries.get(key)
            if entry is None:
                return "miss: " + (advice(self._entries, key) if self._entries else "nothing has been captured yet")
            if entry.reason is not None:
                return f"runs eagerly: {entry.reason}"
            steps = 0 if entry.program is None else len(entry.program.steps)
            how = " " + entry.replay.how if entry.replay is not None and entry.replay.how else ""
            return f"hit: a program of {steps} tasks, " + (f"replayed{how}" if entry.verified else "not yet replayed")

    def verify(self, *args: P.args, **named: P.kwargs) -> str | None:
        """Compare replays with an eager run, bit by bit: None if they agree, else the first difference.

        On a CPU replays run as kernels, as single calls of NumPy's loops, and as calls of NumPy.

        The call counts as an eager one: variables are written once.  Raises FunctionError if there is no program.
        """
        with self._lock:
            given, by_name = nest.map_leaves(as_tensor, (args, named))
            entry, tensors = self._known(given, by_name)
            wrong = first_difference(entry.program, tensors)
            replay = entry.replay or replay_of(entry.program)
            replay.run(tensors)
            replays = [replay.told(tensors)]
            if not entry.program.device.lazy:
                replay.run(tensors, single=True)
                replays.append(replay.told(tensors))
            result = nest.flatten(eager(self._f, given, by_name))
            return wrong or next(filter(None, (difference(leaves, result, writes) for leaves, writes in replays)), None)

    def _known(self, args: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, list[Tensor]]:
        """The signature of these arguments, which has a program, and the tensors.  Raises FunctionError."""
        self._look_around()
        key, _, tensors = signature(args, named)
        entry = self._entries.get(key)
        if entry is None or entry.program is None:
            raise FunctionError(f"{self!r}: {self.explain(*args, **named)}; call it first")
        return entry, tensors

    def plan(self, *args: P.args, **named: P.kwargs) -> Plan:
        """What a replay with these arguments takes: bytes, tasks, and what is done again to stay within a budget.

        Raises FunctionError if there is no program.
        """
        with self._lock:
            entry, _ = self._known(*nest.map_leaves(as_tensor, (args, named)))
            return table(entry.program, entry.plain, arena.plan(entry.program, alignment(entry.program.device)))

    def pareto(self, *args: P.args, **named: P.kwargs) -> list[tuple[int, float]]:
        """What less memory costs: (bytes of the arena, extra work as a part of the plain call's), least bytes first.

        Raises FunctionError if there is no program.
        """
        with self._lock:
            entry, _ = self._known(*nest.map_leaves(as_tensor, (args, named)))
            return Planner(entry.plain, alignment(entry.plain.device)).pareto()

    def _predicted(self, args: tuple[Any, ...], least: bool) -> Captured | None:
        """What replays with these arguments would take (see ``predict_peak``); None: it cannot be captured."""
        return predicted(self._f, args, least)

    def release(self) -> None:
        """Free the arenas of all programs; the next calls begin anew."""
        with self._lock:
            self._now = Surroundings()
            self._known_around = [self._now]


class Method:
    """A captured function of one object, which it keeps alive; it has all that the function has."""

    def __init__(self, owner: Any, f: Function[..., Any]) -> None:
        functools.update_wrapper(self, f)
        self.__self__, self.__func__ = owner, f

    def __call__(self, /, *args: Any, **named: Any) -> Any:
        return self.__func__(*args, **named)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__func__, name)

    def __reduce__(self) -> Any:
        return getattr, (self.__self__, self.__name__)


@overload
def function(f: Callable[P, R], *, budget: int | str | None = ..., max_signatures: int = ...) -> Function[P, R]: ...


@overload
def function(
    f: None = ..., *, budget: int | str | None = ..., max_signatures: int = ...
) -> Callable[[Callable[P, R]], Function[P, R]]: ...


def function(f: Any = None, *, budget: int | str | None = None, max_signatures: int = 8) -> Any:
    """``f``, whose tasks are captured at its first call and replayed, without Python's overhead, from the third on.

    ``f`` is a function or method, say a whole training step: tape, gradients, ``optimizer.apply_gradients``.  For each
    signature (structure, shapes, dtypes, values of Python numbers, which arguments are the same tensor) the first call
    runs eagerly, and once more without computing, to write down its tasks; the second call runs both ways, and the
    bits must agree; further calls replay.  Where other ranks take part (``tg.distributed``) the second call replays,
    too.  Arrays among the arguments become tensors.

    Variables are read and written as ever, their values are live; so are learning rates, step counts and the streams
    of ``tg.random``.  What else ``f`` reads from its surroundings (closure variables, globals, defaults, attributes and
    elements) is guarded: where it has changed, ``f`` is captured anew, at most ``max_signatures`` times.  Effects of
    Python (``print``, ``append``) happen while it runs eagerly and while it is captured, not in a replay; a function
    that keeps tensors which it computes (in a list, an attribute) runs eagerly on tapes.  Values
    written to variables come last, all or none.

    ``budget``: bytes, or a size such as ``"512MiB"``, for the arena of a program with the variables and constants that
    it reads; so is that of an enclosing ``tg.memory_budget``.  Where the plain program takes more, values are made
    again in place of being kept, bit for bit; ``.plan(*args)`` shows which, ``.pareto(*args)`` what less memory would
    cost.  Eager runs, that is the first call and half of the second, evict values and recompute them as under
    ``tg.memory_budget``, so as to take no more than ``budget`` with the variables and constants that they read.  A
    program can keep some budgets that no eager run can; by how many bytes these runs have exceeded it then, or since
    other threads needed them, is in ``.stats.over_budget``.  (Inside a ``memory_budget`` that block's limit is never
    exceeded.)  On a tape, ``budget`` is for the two arenas of forward and backward together, and not for the first,
    eager call.

    ``max_signatures``: for more, calls run eagerly, with one warning.  ``.stats`` tells what calls did, and the reason
    of each that ran eagerly.  ``TAPEGRAD_FUNCTION=0`` in the environment runs everything eagerly, with the same errors;
    with ``2`` a GPU replays tasks one by one instead of CUDA graphs.

    Inside ``tg.measure()`` and a profile a replay counts the kernels, bytes moved and steps of an eager run; what it
    takes is its arena, one value (``measure().arena_by_category`` tells what it holds), and its results.

    Raises BudgetError at the first call if no plan keeps the budget; then no variable is written.
    Raises FunctionError where ``f`` looks at a value (``if t:``, ``float(t)``, ``.numpy()``).  TensorFlow's
    ``tf.function`` rewrites such code (AutoGraph); this does not.
    """
    make = lambda f: Function(f, max_signatures, budget)
    return make if f is None else make(f)


def _by_tapes(recorders: Sequence[Any]) -> bool:
    for r in recorders:
        if isinstance(r, Pusher):
            return False
    return True


def _bytes_of_variables() -> int:
    return sum(v.nbytes for v in list(everyone.values()))
