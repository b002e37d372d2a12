"""The ledger: every byte the engine's buffers hold, by category, primitive and source line; and the work done.

It counts only while a :func:`measure` block or a budget is open.  Before, a new buffer costs one weak reference in a
set (``buffer.uncounted``): opening enters what is alive there, and live bytes are right from the start without a
search.  What has been entered stays known when the block is closed, so each buffer is entered once.  Sizes are rounded
up to 512 bytes, as CuPy's pool rounds them.

Kernels under a budget ask for room and count what they make here, in one short section each (:meth:`Ledger.promise`,
:meth:`Ledger.allocated`): ``room`` is one number, what the limit leaves beside live and promised bytes.  Only where it
does not suffice the manager is asked (``budget/manager.py``).

What happens (bytes that come, change their category or go, kernels that run) is put into a queue, each in one step that
nothing can interrupt, and added to the sums later, in order: when somebody reads a figure, when room seems short, or
when many wait.  So to be counted costs an operation little.  Only a journal and a timeline, which note the time, have
everything added at once.

Categories are facts, because the tape knows: *parameter* and *optimizer* (values of variables), *gradient* (results of
``tape.gradient``), *activation* (kept by a tape for a rule), *rematerialized* (made by the rerun of a checkpointed
function), *communication* (what collectives take for themselves), *input* (arrays and numbers given by the user),
*temporary* (made while something records or differentiates, and neither kept nor asked for), *user* (made by the user's
own operations, with nothing recording).
"""

from __future__ import annotations

import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from math import inf
from operator import attrgetter
from sys import _getframe, is_finalizing
from threading import get_ident
from typing import Any, TypeVar
from weakref import getweakrefs

from tapegrad.core import account, locks
from tapegrad.core import buffer as _buffer
from tapegrad.core.account import Account
from tapegrad.core.buffer import Buffer
from tapegrad.core.locks import section, whole
from tapegrad.core.node import ARENA, LEAF, Leaf, Node
from tapegrad.core.protocols import Recording
from tapegrad.core.run import Run
from tapegrad.core.state import thread
from tapegrad.device.host_scalar import HostScalar
from tapegrad.device.phantom import Phantom
from tapegrad.device.types import Array
from tapegrad.engine.executor import COUNTED
from tapegrad.memory.ledger.costs import cost_of, moved_by, units
from tapegrad.memory.ledger.entries import (
    NEW,
    NO_MORE,
    RANK,
    Call,
    Entries,
    Entry,
    Handed,
    Label,
    Peak,
    Several,
    Sums,
    Wanted,
    not_added,
)
from tapegrad.memory.ledger.figures import (
    GRAIN,
    Change,
    Costs,
    Done,
    Measure,
    Parts,
    Ran,
    Replayed,
    new_of_run,
    of_bytes,
    rounded,
)
from tapegrad.memory.ledger.frames import NONE_SEEN, Place, forget_places, known, user_place
from tapegrad.memory.ledger.journal import Journal, digest_of
from tapegrad.memory.ledger.phase import BY_GRADIENT, HERE, SPECIAL, STEPS, during, set_differentiated
from tapegrad.variable import everyone

T = TypeVar("T")
_ASIDE = locks.lock()
_new, _top = object.__new__, attrgetter("top")
_BEFORE, _JOURNAL_KNOWS, _SMALL = "(before the measurement)", "(in the journal)", "(small values)"
_ADDING = object()
"""Stands before the events that are being added: it goes with them, and so tells whether they have been."""
_MOST_EVENTS = 4096
"""So many wait at most, and what one operation adds."""
_LARGE, _SHARE = 2**20, 256
"""Where only the message of a BudgetError will ask, lines are noted of values of so many bytes, beside which a look at
the stack costs nothing, or of such a share of the limit."""


class Ledger(Account):
    """The account that counts: live entries, and the open measures to tell."""

    executor = COUNTED

    def __init__(self) -> None:
        self._lock = locks.lock()
        self._events: list[Any] = []
        """What has happened and is not in the sums yet, in order: an entry, for a buffer that comes, and once more, put
        here by the interpreter, when it goes; several that come at once; an entry and its new category; one that hands
        on its bytes; or what to call.  No event refers to a node: tapes count who does."""
        self._gone: Callable[[Entry], None] = self._events.append
        """Told when the buffer of an entry goes."""
        self._adding: list[Any] | None = None
        """The events that are being added to the sums."""
        self._added: Sums | None = None
        """What they say, once the sums of bytes and work have it."""
        self._work: list[Done] = []
        """Work that is in no figure yet: it is added when somebody reads a figure of work, since bytes are asked for
        more often."""
        self._at_once = self._watched = False
        """Whether events are added as they happen: where they are written down with the time."""
        self._labels = False
        """Whether events tell that a tape keeps a value: where categories are counted, and not at once."""
        self._open: list[Measure] = []
        self.journal: Journal | None = None
        """Written while a program is profiled."""
        self._entries = Entries()
        self._wanted = Wanted()
        self._places: weakref.WeakKeyDictionary[Buffer, Place] = weakref.WeakKeyDictionary()
        self._placed = False
        """Whether a place was noted since counting began."""
        self._of_code = NONE_SEEN
        """The instructions of the code that made the last small value: most often it makes the next one, too."""
        self._peaked: list[Measure] = []
        self._epoch = 0
        """How often all measures were closed; categories are facts of one epoch."""
        self._labelled = -1
        """The last epoch whose old entries have categories."""
        self.detailed = False
        self._held = 0  # blocks of `held`
        self._limit = inf
        self._large: float = _LARGE
        self._promises: dict[int, int] = {}  # by thread: bytes it has room for and has not taken yet
        self.room = inf
        """Bytes that may be promised or counted at once; minus infinity while the manager has to be asked."""
        self._rooms = 0
        """How often that was worked out anew."""

    # Room ------------------------------------------------------------------------------------------------------

    @section
    def promise(self, nbytes: int) -> bool:
        """Keep room of ``nbytes`` for this thread; False if it is not certain that there is so much."""
        try:
            with self._lock:
                if nbytes > self.room:
                    self._drain()
                    if nbytes > self.room:
                        return False
                me = get_ident()
                self.room -= nbytes
                self._promises[me] = self._promises.get(me, 0) + nbytes
                return True
        except BaseException:
            self.mend()
            raise

    def promised(self) -> int:
        """Bytes kept for this thread that it has not taken yet."""
        return self._promises.get(get_ident(), 0)

    @section
    def settle_promise(self, promised: int) -> None:
        """No more than ``promised`` bytes are kept for this thread."""
        me = get_ident()
        if self._promises.get(me, 0) <= promised:
            return
        try:
            with self._lock:
                free = self._promises.get(me, 0) - promised
                self.room += free
                self._keep_promised(me, promised)
        except BaseException:
            self.mend()
            self._keep_promised(me, promised)
            self._find_room()
            raise

    def _keep_promised(self, thread_id: int, nbytes: int) -> None:
        if nbytes:
            self._promises[thread_id] = nbytes
        else:
            self._promises.pop(thread_id, None)

    @property
    def promised_bytes(self) -> int:
        """Bytes kept for all threads."""
        return sum(list(self._promises.values()))

    @whole
    def taken(self) -> int:
        """Live and promised bytes, of one moment: bytes that another thread was promised and takes now are in one."""
        return self.live_bytes + self.promised_bytes

    @whole
    def promise_made(self, nbytes: int) -> None:
        """Keep room of ``nbytes`` for this thread, which the manager has made."""
        me = get_ident()
        self._promises[me] = self._promises.get(me, 0) + nbytes

    @whole
    def promises_apart(self, promises: dict[int, int]) -> dict[int, int]:
        """Let threads have these promises, and return those that they had."""
        before, self._promises = self._promises, promises
        return before

    @whole
    def limit(self, limit: float) -> None:
        """Live and promised bytes shall stay within ``limit``; minus infinity: the manager is to be asked each time."""
        self._limit = limit
        if limit > 0:
            self._large = min(_LARGE, limit / _SHARE)
        self._find_room()

    def _find_room(self) -> None:
        with self._lock:
            for _ in range(2):
                self._drain()
                promised = self.promised_bytes
                self._rooms += 1
                self.room = self._limit - self._entries.live_bytes - promised
                if not self._events:  # else some may have come before the room was known
                    break

    def mend(self, *made: Any) -> None:
        """An exception came in the middle of a section: make sums right again, and the lock free.

        ``made``: what the section was to count, buffers or arrays: it does not count if it has not come to that.
        """
        if locks.let_go(self._lock, self, self._held if self._lock._is_owned() else 0) <= 0:
            with self._lock:
                batch, self._adding = self._adding, None
                sums, self._added = self._added, None
                if batch is None or not self._events or self._events[0] is not _ADDING:
                    pass  # nothing of it has been done yet, or all
                elif sums is not None:
                    del self._events[: len(batch) + 1]
                    for handed in sums.handed:
                        self._entries.hand_on(handed.old, handed.new)
                    for entry in sums.new():
                        self._entries.add(entry, self._epoch)
                else:
                    del self._events[0]
                    not_added(batch)
                self._entries.recount()
                self._find_room()
        events = self._events[:]
        told = {id(e) for event in events for e in (event.entries if type(event) is Several else (event,))}
        for entry in [e for thing in made for e in getweakrefs(thing) if type(e) is Entry]:
            if id(entry) not in told and entry not in self._entries:
                entry.state = NO_MORE

    def in_child(self) -> None:
        """In a forked child only the forking thread has promises."""
        me = get_ident()
        self._promises = {t: n for t, n in self._promises.items() if t == me}
        if self.journal is not None and self.journal.spool is not None:
            self.journal.spool.detach()
        self.mend()

    # Measures --------------------------------------------------------------------------------------------------

    @whole
    def open(self, measure: Measure) -> None:
        """Start telling ``measure``; before the first one, what is alive is entered."""
        account.count_with(self)
        self._note_changes()
        self._add_work()
        if not self._open:  # an interrupt in a finalizer may have hidden that a value has gone
            self._entries.recount()
            self._find_room()
        live = self._entries.live_bytes
        self._open = [*self._open, measure]
        if measure.detailed and not self.detailed:
            self._label_old()
            self._entries.sum_up(True)
            self.detailed = True
        self._update_at_once()
        measure.settle, measure.now = self.settle, self._now
        measure.peak_bytes = live
        if measure.detailed:
            self._peaked.append(measure)

    @whole
    def close(self, measure: Measure) -> None:
        """Stop telling ``measure``; after the last one the ledger rests."""
        self._settle()
        self._add_work()
        if measure.detailed:
            measure.live_by_category = self.by("category")
            if callable(measure.peak_parts):  # lets go of the events from which they are
                measure.peak_parts = measure.peak_parts()
        measure.live_bytes, measure.settle, measure.now = self._entries.live_bytes, None, None
        self._open = [m for m in self._open if m is not measure]
        if self.detailed and not any(m.detailed for m in self._open):
            self._entries.sum_up(False)
            self.detailed = False
        self._update_at_once()
        if not self._open:
            account.count_with(None)
            self._epoch += 1
            self.journal = None
            self._wanted.clear()
            self._places.clear()
            self._placed = False
            self._of_code = NONE_SEEN
            forget_places()

    @whole
    def write(self, journal: Journal | None) -> None:
        """Keep ``journal`` from now on, from what is alive; None: no longer.  A measure must be open."""
        self._drain()
        self._label_old()
        if journal is not None:
            journal.census(self._entries)
        self.journal = journal
        self._update_at_once()
        self._label_variables()

    def _update_at_once(self) -> None:
        """Events are added as they happen where a journal is written, or a timeline."""
        self._at_once = self._watched or self.journal is not None or any(m.timeline for m in self._open)
        account.tell_one_by_one(self._at_once)
        self._labels = self.detailed and not self._at_once
        self._gone = self._events.append
        if self._at_once:
            self._gone = self._left
            self._entries.tell(self._left)

    @whole
    def tell_at_once(self, wanted: bool) -> None:
        """Whether the account in force is told of every node at the time, for the sake of somebody else."""
        self._watched = wanted
        self._update_at_once()

    @whole
    def note(self, kind: int, text: str, peak: int = 0) -> int:
        """Put a mark into the journal, if there is one, and return its seq (-1: there is none)."""
        return -1 if self.journal is None else self.journal.mark(kind, text, peak)

    @contextmanager
    def held(self) -> Iterator[Entries]:
        """In the block nothing is counted by other threads."""
        with self._lock:
            self._held += 1
            try:
                self._note_changes()
                if self._open:  # else there is no epoch yet, and variables that are made before it begins are missed
                    self._label_old()
                yield self._entries
            finally:
                self._held -= 1

    @whole
    def by(self, what: str) -> dict[str, int]:
        """Live bytes by ``"category"``, ``"primitive"`` or ``"line"``, the largest first."""
        if not self._open:
            return {}
        self._drain()
        self._label_old()
        return self._entries.by(what)

    def _enter_uncounted(self) -> None:
        """Enter what got bytes while nobody counted."""
        for weak in list(_buffer.uncounted):
            b = weak()
            if b is not None and b.array is not None and b.base is None and type(b.array) not in (HostScalar, Phantom):
                try:
                    if self._enter(b, *_old(b)):
                        self.room -= rounded(b.node.aval.nbytes)
                except BaseException:  # an interrupt: it is entered again, unless its event waits
                    entry = getattr(b, "entry", None)
                    if entry is not None and all(event is not entry for event in self._events):
                        entry.state = NO_MORE
                    raise
            _buffer.uncounted.discard(weak)

    def _label_old(self) -> None:
        """Once an epoch, when somebody asks: the categories of what was entered before it."""
        if self._labelled < self._epoch:
            self._labelled = self._epoch
            for entry in self._entries:
                if entry.epoch < self._epoch:
                    self._renew(entry)
            self._label_variables()

    def _renew(self, entry: Entry) -> None:
        entry.epoch = self._epoch
        entry.category, entry.place = _old(entry.buffer())

    def _label_variables(self) -> None:
        for variable in list(everyone.values()):
            self._relabel(variable._cell._content.root(), variable.category, variable.name)

    # What the engine tells -------------------------------------------------------------------------------------

    @section
    def allocated(self, weak: weakref.ref[Buffer]) -> None:
        """A buffer got bytes, and there is no limit."""
        buffer: Any = weak()
        if type(buffer.array) is HostScalar:  # a kernel's argument: nothing lies on the device
            return
        try:
            if self._at_once:
                self.count(buffer, True)
                return
            place = self._places.pop(buffer, None) if self._placed else None
            self._enter(buffer, self._category_of(buffer), place or (user_place() if self.detailed else _SMALL))
            if self._limit != inf:  # another thread has entered a budget meanwhile
                self._find_room()
        except BaseException:
            self.mend(buffer)
            raise

    @section
    def count(self, buffer: Buffer, admitted: bool) -> bool:
        """Count a buffer's bytes if there is room (``admitted``: there is); whether that was done."""
        if type(buffer.array) is HostScalar:
            return True
        nbytes = -(-buffer.node.aval.nbytes // GRAIN) * GRAIN
        try:
            with self._lock:
                if _buffer.uncounted:  # made by another thread while this one opened the ledger
                    self._enter_uncounted()
                promises, promised = self._promises, 0
                if promises:
                    me = get_ident()
                    promised = min(nbytes, promises.get(me, 0))
                if not admitted and nbytes > promised and nbytes - promised > self.room:
                    self._drain()
                    if nbytes - promised > self.room:
                        return False
                if promised:
                    left = promises[me] - promised
                    if left:
                        promises[me] = left
                    else:
                        del promises[me]
                self.room -= nbytes - promised
                place: Place
                if self.detailed:
                    place = self._places.pop(buffer, None) or user_place()
                elif self.journal is not None:
                    place = _JOURNAL_KNOWS
                else:
                    place = user_place() if nbytes >= self._large else _SMALL
                self._enter(buffer, self._category_of(buffer), place)
                if self._at_once:
                    self._drain()
                return True
        except BaseException:
            self.mend(buffer)
            raise

    @section
    def evaluated(self, run: Run, buffer: Buffer, recorded: object) -> bool:
        """A small node was evaluated."""
        try:
            change: Change = run.change or new_of_run(run)
            events, rooms = self._events, self._rooms
            category = "temporary"
            if not recorded or len(events) >= _MOST_EVENTS or (SPECIAL and HERE.special):
                now = self._category_now()
                if now is None:
                    return False
                category = now
            if self._limit != inf:
                left = self.room - change.top  # no other thread runs before the room is taken: see `_admit`
                if left >= 0 and change.top < self._large and not self._promises and not _buffer.uncounted:
                    self.room = left
                elif not self._admit(change):
                    return False
            place: Place = _SMALL
            if self.detailed:
                frame, of_code = _getframe(3), self._of_code
                if frame.f_code is not of_code.code:
                    of_code = self._of_code = known.get(id(frame.f_code)) or NONE_SEEN
                place = buffer.node.place = of_code.seen.get(frame.f_lasti) or user_place(3)
            entry = buffer.entry = Entry(buffer, self._gone)
            entry.wanted = -1
            entry.change = change
            entry.came_as = category
            entry.place = place
            entry.state = NEW
            events.append(entry)
            if rooms != self._rooms:
                self._find_room()
            return True
        except BaseException:
            self.mend(buffer)
            raise

    @section
    def pulled(self, run: Run, array: Array, *more: Array) -> bool:
        """A walk has evaluated small nodes, where the program asked for it."""
        try:
            change: Change = run.change or new_of_run(run)
            events, rooms = self._events, self._rooms
            if len(events) >= _MOST_EVENTS:
                self._note_changes()
            category, place = HERE.pulls
            if category is None:
                return False
            if self._limit != inf:
                left = self.room - change.top
                if left >= 0 and change.top < self._large and not self._promises and not _buffer.uncounted:
                    self.room = left
                elif not self._admit(change):
                    return False
            if place is None:
                place = user_place() if self.detailed else _SMALL
            if not more:  # most often
                entry = Entry(array, self._gone)
                entry.change = change
                entry.came_as = category
                entry.place = place
                entry.state = NEW
                events.append(entry)
            else:
                entries = [Entry(a, self._gone) for a in (array, *more)]
                for entry, stays in zip(entries, change.stays, strict=True):
                    entry.change, entry.came_as, entry.place, entry.state = of_bytes(*stays), category, place, NEW
                events.append(Several(change, entries))
            if rooms != self._rooms:
                self._find_room()
            return True
        except BaseException:
            self.mend(array, *more)
            raise

    def owned(self, buffer: Buffer) -> None:
        """A buffer was made for an array of a walk: it has the bytes of the array's entry, if there is one."""
        for old in getweakrefs(buffer.array):
            if type(old) is Entry and old.counts:
                own = buffer.entry = Entry(buffer, self._gone)
                own.wanted = -1
                own.change, own.came_as, own.place = old.change, old.came_as, old.place
                self._events.append(Handed(old, own))
                if self._at_once:
                    self.locked(self._drain)
                return
        buffer.told()

    def _category_now(self) -> str | None:
        """Of what a small node makes in this thread; None: it has to be told by itself."""
        if len(self._events) >= _MOST_EVENTS or HERE.differentiated:
            self._before_op()
        if HERE.reruns:
            return None if HERE.restoring else "rematerialized"
        return "temporary" if thread.recorders or thread.deferring is not None or HERE.optimizing else "user"

    def _admit(self, change: Change) -> bool:
        """Take the room for a change; False if it is not certain that there is so much.  Most often its caller does.

        The lock would cost more than all the rest.  Between the look at the room and the statement that takes it no
        other thread runs, since there is neither a call nor a jump backwards.  Whoever works the room out meanwhile,
        without the event that is about to be told, counts in ``_rooms``: then it is worked out again.
        """
        if self._promises or change.top >= self._large:  # taken, or noted, for each buffer by itself
            return False
        self._note_changes()
        left = self.room - change.top
        if left < 0:
            return False
        self.room = left
        return True

    def _before_op(self) -> None:
        if len(self._events) >= _MOST_EVENTS:  # whatever is queued, an operation comes before it
            self._note_changes()
        if HERE.differentiated and thread.recorders:
            STEPS.mark(BY_GRADIENT)

    def applied(self, node: Node, inputs: tuple[Buffer, ...]) -> None:
        """A node was applied."""
        if len(self._events) >= _MOST_EVENTS or HERE.differentiated:
            self._before_op()
        journal = self.journal
        if journal is not None and not (HERE.optimizing and journal.before_op is None):
            self.locked(journal.applied, node, inputs, self._entries.of)
        if self.detailed:
            if not HERE.restoring:
                node.place = user_place()
            if node.prim.view:
                cost = 1.0
            elif node.site is not None:
                cost = 1.0 + node.aval.nbytes
            else:
                cost = cost_of(node, [b.node.aval for b in node.prim.apart(inputs)[0]])
            if len(self._work) >= _MOST_EVENTS:
                self.locked(self._add_work)
            self._work.append(Costs(units(cost), HERE.restoring))

    @whole
    def locked(self, tell: Callable[..., Any], *args: Any) -> Any:
        """What ``tell(*args)`` returns; nobody else counts meanwhile."""
        return tell(*args)

    def deferred(self, buffer: Buffer) -> None:
        """A buffer was made pending here."""
        if self.detailed:
            self.locked(self._places.__setitem__, buffer, user_place())
            self._placed = True
        if buffer.postponed and self.journal is not None:  # it will be applied elsewhere
            self.locked(self.journal.called, buffer.node)

    def recorded(self, recording: Recording, node: Node, residuals: tuple[Buffer, ...]) -> tuple[Buffer, ...]:
        """A tape keeps buffers, filled or pending, for the rules of ``node``."""
        if self._labels:
            for b in residuals:
                try:
                    entry = b.entry
                    if entry.wanted != self._epoch:
                        entry.wanted = self._epoch
                        label = _new(Label)
                        label.entry, label.category = entry, "activation"
                        self._events.append(label)
                except AttributeError:  # a view, or pending
                    self.wanted(b, node.prim.name)
        elif self.detailed or self.journal is not None:
            for b in residuals:
                self.wanted(b, node.prim.name)
        return residuals

    @whole
    def place_of(self, buffer: Buffer) -> Place | None:
        """Where a buffer, filled or pending, was made (None: not known)."""
        self._drain()
        entry = self._entries.of(buffer)
        return self._places.get(buffer) if entry is None else entry.place

    def wanted(self, buffer: Buffer, by: str) -> None:
        """A tape keeps a buffer, filled or pending."""
        if self.detailed or self.journal is not None:
            root = buffer.root()
            if root.array is not None and not self._at_once:
                entry = getattr(root, "entry", None)
                if entry is not None and entry.wanted != self._epoch:
                    entry.wanted = self._epoch
                    self._events.append(Label(entry, "activation"))
            else:
                self._note_wanted(buffer, f"vjp of {by}")

    @whole
    def _note_wanted(self, buffer: Buffer, holder: str) -> None:
        waiting = [buffer]
        while waiting:
            b = waiting.pop()
            if b.array is not None:
                self._relabel(b.root(), "activation", holder)
            elif self._wanted.add(b):
                waiting += b.inputs  # what a pending buffer is to be made from is kept for the rule's sake, too

    def labelled(self, buffer: Buffer, category: str, name: str = "") -> None:
        """A buffer's bytes serve as ``category``; a more telling category stays."""
        if self._at_once or len(self._events) >= _MOST_EVENTS:
            self.locked(self._relabel, buffer, category, name)
        elif (entry := getattr(buffer, "entry", None)) is not None:
            self._events.append(Label(entry, category))
        if category == "gradient" and self.journal is not None:
            if self.journal.gradients is not None:
                self.locked(self.journal.gradient, name, digest_of(buffer))

    def labelled_each(self, labels: Iterable[tuple[Buffer, str, str]]) -> None:
        """The bytes of many buffers serve as categories."""
        for buffer, category, name in labels:
            self.labelled(buffer.root(), category, name)

    def read(self, buffers: Sequence[Buffer]) -> None:
        """A kernel reads buffers."""
        if self.journal is not None:
            self.locked(self.journal.read, [self._entries.of(b.root()) for b in buffers])

    def called(self, recording: Recording, node: Node) -> None:
        """A call with a derivative of its own was made."""
        if self.detailed:
            node.place = user_place()
        if self.journal is not None:
            self.locked(self.journal.called, node)

    @property
    def live_bytes(self) -> int:
        """Bytes alive now (0: nobody counts)."""
        return self._now() if self._open else 0

    def _now(self) -> int:
        if self._events or _buffer.uncounted:
            self._note_changes()
        return self._entries.live_bytes

    @whole
    def _note_changes(self) -> None:
        self._enter_uncounted()
        self._drain()

    @contextmanager
    def apart(self, measure: Measure) -> Iterator[None]:
        """Only ``measure`` is told of what happens in the block."""
        self.settle(True)
        before, self._open = self._open, [measure]
        self._update_at_once()
        journal, self.journal = self.journal, None
        try:
            yield
        finally:
            with self._lock:
                self._drain()
                self._add_work()
                self._open, self.journal = before, journal
                self._update_at_once()
                if journal is not None:
                    journal.catch_up(self._entries)

    def aside(self, f: Callable[..., T], *args: Any) -> T:
        """What ``f(*args)`` returns; who counts now is not told of what it does."""
        if not self._open:
            return f(*args)
        with _ASIDE, self.apart(Measure(detailed=False)):  # who comes first must leave last
            return f(*args)

    @whole
    def forget(self, since: int) -> list[Buffer]:
        """The live buffers of nodes from index ``since`` on have no bytes after all."""
        self._drain()
        found = self._entries.forget(since)
        self._find_room()
        return found

    # Entries ---------------------------------------------------------------------------------------------------

    def _category_of(self, buffer: Buffer) -> str:
        prim = buffer.node.prim
        if type(prim) is Leaf:
            return "activation" if prim is ARENA else "temporary" if HERE.optimizing else "input"
        if HERE.reruns:
            return "rematerialized"
        if self._wanted.found and self._wanted.take(buffer):
            return "activation"
        return "temporary" if thread.recorders or thread.deferring is not None or HERE.optimizing else "user"

    def _enter(self, buffer: Buffer, category: str, place: Place) -> bool:
        """Whether the buffer is new here."""
        before = getattr(buffer, "entry", None)
        if before is not None and before.counts:  # an interrupt came between its entry and its array
            return False
        node = buffer.node
        nbytes = -(-node.aval.nbytes // GRAIN) * GRAIN
        entry = buffer.entry = Entry(buffer, self._gone)
        entry.wanted = -1
        entry.change, entry.came_as, entry.place = of_bytes(nbytes, node.prim.name), category, place
        entry.state = NEW
        self._events.append(entry)
        return True

    @section
    def _left(self, entry: Entry, at_exit: Callable[[], bool] = is_finalizing) -> None:
        """A buffer is gone (told by the interpreter, at any time, under any lock), and the time matters."""
        self._events.append(entry)
        if at_exit():  # names of modules may be None by now, and nobody asks any more
            return
        try:
            if self._lock.acquire(blocking=False):  # else whoever has it, or comes next, sees to it
                self._drain()
                self._lock.release()
        except BaseException:
            self.mend()
            raise

    def _drain(self) -> None:
        """Add what has happened to the sums; the lock is held."""
        if self._adding is not None:  # a finalizer came in between
            return
        events = self._events
        while events:
            batch = self._adding = events[:1] if self._at_once else events[:]
            events.insert(0, _ADDING)
            self._add(batch)
            del events[: len(batch) + 1]
            self._adding = self._added = None

    def _add(self, batch: list[Any]) -> None:
        """Add these events: first what they say of sums, then who has come and gone.

        What comes and goes in between matters to a peak alone (see ``Peak``).
        """
        entries = self._entries
        start = entries.live_bytes
        sums = Sums(batch, start)
        top = sums.top
        higher = [m for m in self._open if top > m.__dict__["peak_bytes"]] if top > start else []
        if not all(any(m is known for known in higher) for m in self._peaked):
            self._note_peak()
        self._added = sums
        self._work += sums.changes()
        if len(self._work) >= _MOST_EVENTS:
            self._add_work()
        for m in higher:
            m.__dict__["peak_bytes"] = top
        entries.live_bytes = sums.live
        if self._limit != inf:
            self.room += sum(map(_top, sums.changes())) + start - sums.live
        self._peaked = [m for m in higher if m.detailed]
        if self._peaked and not sums.at_end(batch):
            self._note_peak(partial(self.locked, Peak(entries.totals, sums, batch).parts))
        self._follow(sums)

    def _add_work(self) -> None:
        """Add the work of what is in the sums of bytes to the figures."""
        work = self._work[:]
        del self._work[: len(work)]  # others may add to it at any time
        for done, n in Counter(work).items():
            for m in self._open:
                done.add_to(m, n)

    def _follow(self, sums: Sums) -> None:
        """Who comes, goes or changes its category in some events."""
        entries, journal = self._entries, self.journal
        for handed in sums.handed:
            entries.hand_on(handed.old, handed.new)
        for entry in sums.left:
            entries.remove(entry)
            if journal is not None and entry.number >= 0:
                journal.left(entry)
        for entry in sums.new():
            entries.add(entry, self._epoch)
            if journal is not None and (buffer := entry.buffer()) is not None:
                journal.allocated(entry, buffer.node)
        for call in sums.calls:
            call.f(call.what)
        sums.calls.clear()  # what waits to tell of a peak must not keep what they refer to
        for label in entries.present(sums.labels):
            entry, before = label.entry, label.entry.category
            self._relabel_entry(entry, label.category)
            if entry.category is not before:
                label.before = before
        if sums.come or sums.left:
            for m in self._open:
                if m.timeline:
                    self._note_sample(m)

    def _relabel(self, buffer: Buffer, category: str, holder: str) -> None:
        self._drain()
        entry = self._entries.of(buffer)
        if entry is not None:
            if self._peaked and RANK[category] > RANK[entry.category]:
                self._note_peak()
            self._relabel_entry(entry, category, holder)

    def _relabel_entry(self, entry: Entry, category: str, holder: str = "") -> None:
        if entry.epoch < self._epoch:
            self._renew(entry)
        if RANK[category] > RANK[entry.category]:
            self._entries.relabel(entry, category)
            if self.journal is not None:
                self.journal.changed(entry)
        elif category != entry.category:
            return
        if self.journal is not None:
            self.journal.held(entry, holder)

    def _note_sample(self, m: Measure) -> None:
        by = self._entries.totals["category"]
        kept = by["activation"] + by["rematerialized"]
        m.samples.append((time.perf_counter() - m.started, self._entries.live_bytes, kept))

    def settle(self, work: bool = False) -> None:
        """Let all figures of bytes be those of now; ``work``: and those of work."""
        if self._events or self._peaked:
            self._settle()
        if work and self._work:
            self.locked(self._add_work)

    @whole
    def _settle(self) -> None:
        self._drain()
        if self._peaked:
            self._note_peak()

    def _note_peak(self, parts: Parts | Callable[[], Parts] | None = None) -> None:
        """Note the parts that make up a new peak (None: it is at the end of what was added).

        While memory only grows, that need not be done.
        """
        if parts is None:
            parts = {what: dict(total) for what, total in self._entries.totals.items()}
        for m in self._peaked:
            m.peak_parts = parts
        self._peaked = []

    # Work, and what threads do ----------------------------------------------------------------------------------

    def ran(self, names: tuple[str, ...], moves: Sequence[tuple[Sequence[Array], Sequence[Array]]]) -> None:
        """Kernels ran."""
        if self.detailed:
            for read, written in moves:
                self._work.append(Ran(names, sum(moved_by(read, written))))
                names = ()

    def replayed(self, report: Replayed) -> None:
        """A captured program was replayed."""
        if self.detailed:
            self._events.append(Call(self._add_replay, report))
        if self.journal is not None:
            arena = report.memory()
            self.locked(self.journal.replayed, report, None if arena is None else self._entries.of(arena))

    def _add_replay(self, report: Replayed) -> None:
        for m in self._open:
            figures = m.__dict__
            figures["kernel_runs"] += report.kernels
            figures["bytes_moved"] += report.nbytes
            figures["nodes_run"].update(report.nodes)
            figures["restored"] += report.restored
            if sum(report.arena.values()) >= sum(figures["arena_by_category"].values()):
                figures["arena_by_category"] = report.arena

    def passed(self, passes: Sequence[tuple[int, int]]) -> None:
        """A kernel passed over memory."""
        if self.detailed:
            self._work += [Ran((), read + written) for read, written in passes]

    @whole
    def restored(self) -> None:
        """One value was made again."""
        for m in self._open:
            m.restored += 1

    @whole
    def evicted(self) -> None:
        """One value was dropped."""
        for m in self._open:
            m.evictions += 1

    @whole
    def moved(self, figure: str) -> None:
        """One value went to a tier (``figure``: "offloads"), came back, or started to ("fetches", "prefetches")."""
        for m in self._open:
            setattr(m, figure, getattr(m, figure) + 1)

    @whole
    def _reran(self) -> None:
        for m in self._open:
            m.reruns += 1

    def rerun(self, f: Callable[..., T], *args: Any, shift: int = 0) -> T:
        """A checkpointed function, ``f(*args)``, runs again in this thread."""
        self._reran()
        return during(f, *args, reruns=True, shift=shift, special=True)

    def scratch(self, nbytes: int) -> None:
        """A kernel took workspace."""
        if self.detailed:
            self._events.append(Call(self._add_scratch, nbytes))

    def _add_scratch(self, nbytes: int) -> None:
        for m in self._open:
            figures = m.__dict__
            figures["scratch_bytes"] = max(figures["scratch_bytes"], nbytes)

    def walk(self, f: Callable[..., T], *args: Any) -> T:
        """A gradient walk, ``f(*args)``."""
        began_ns = time.perf_counter_ns()
        try:
            place = user_place() if self.detailed else None
            category = "rematerialized" if HERE.reruns else "temporary"
            pulls = None if HERE.restoring else category, place
            return during(f, *args, walking=True, source=HERE.source, pulls=pulls)
        finally:
            if self.journal is not None and not HERE.walking:
                thread.executor.happened(partial(self.locked, self.journal.walked, began_ns))
            if not (HERE.walking or HERE.reruns or thread.recorders):
                set_differentiated(thread.executor.in_earnest(lambda: True, HERE.differentiated))

    def differentiating(self, index: int) -> None:
        """The walk has come to a node."""
        if self.journal is not None:
            self.journal.differentiating(index)


def _old(buffer: Buffer | None) -> tuple[str, Place]:
    """Category and place of what was there before anybody counted."""
    prim = None if buffer is None else buffer.node.prim
    return "input" if prim is LEAF else "activation" if prim is ARENA else "user", _BEFORE


LEDGER = Ledger()
locks.in_child(LEDGER.in_child)
