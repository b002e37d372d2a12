"""Buffers: the cache slots of values.  Device bytes live here and nowhere else.

A buffer is *pending* (lazy: ``array`` is None and ``keeps`` names the buffers its recipe reads), or *filled*.  Its
bytes live as long as someone refers to the buffer: a tensor (held), a tape's record (wanted), a pending buffer (about
to be read).  There are no counts to keep right and no cycles, so bytes are freed at their last use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, TypeVar
from weakref import ref

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tapegrad.aval import ShapedArray
    from tapegrad.node import Node

NOTHING: tuple[Buffer, ...] = ()
T = TypeVar("T")


class Buffer:
    """The cache slot of ``node``'s value.

    ``keeps``: the inputs of a pending buffer, or the base of a view; ``span``: upper bounds on the pending nodes and
    the filled arrays that its evaluation takes in (None when filled); ``loop``: of a pending reduction, and of what is
    to be computed from its results in the same kernel, the shape it loops over and the axes it reduces.
    """

    __slots__ = ("__weakref__", "array", "keeps", "loop", "node", "span")
    postponed: bool = False
    """Whether the node waits as a whole (see :class:`Postponed`): no kernel takes it in before it has been applied."""

    def __init__(
        self,
        array: Any,
        node: Node,
        keeps: tuple[Buffer, ...] = NOTHING,
        span: tuple[int, int] | None = None,
        loop: tuple[tuple[int, ...], tuple[int, ...]] | None = None,
    ) -> None:
        self.array = array
        self.node = node
        self.keeps = keeps
        self.span = span
        self.loop = loop
        if array is not None and not keeps:
            if accountant is None:
                _uncounted_add(ref(self, _uncounted_discard))
            else:
                accountant.allocated(self)

    def fill(self, array: Any) -> None:
        """Evaluation gives a pending buffer its bytes; it lets go of what it was to be made from."""
        keeps, span, loop = before = self.keeps, self.span, self.loop
        self.keeps, self.span, self.loop, self.array = NOTHING, None, None, array
        if accountant is None:
            _uncounted_add(ref(self, _uncounted_discard))
        else:
            try:
                accountant.allocated(self)
            except BaseException:  # bytes that nobody counts must not stay
                self.array = None
                self.keeps, self.span, self.loop = before
                raise
        if keeper is not None:
            keeper.filled(self, keeps)

    def root(self) -> Buffer:
        """The buffer that owns the bytes of a filled buffer: itself, or a view's base."""
        found = self
        while found.array is not None and found.keeps:
            found = found.keeps[0]
        return found


class Postponed(Buffer):
    """A buffer whose node, of any kind, waits to be applied: until then it is pending, and ``keeps`` its inputs.

    ``errors``: how floating-point errors are treated where the node was asked for.
    """

    __slots__ = ("errors", "postponed")

    def __init__(self, node: Node, inputs: tuple[Buffer, ...], errors: Any) -> None:
        super().__init__(None, node, inputs)
        self.errors, self.postponed = errors, True


uncounted: set[ref[Buffer]] = set()
"""The buffers that got bytes of their own while nobody counted (also those of host scalars, which have none).

The interpreter takes out those that go.  So whoever begins to count knows what is alive without a search.
"""
_uncounted_add, _uncounted_discard = uncounted.add, uncounted.discard


class Accountant(Protocol):
    """Who counts bytes and work.  Without one (the default) counting costs one comparison."""

    detailed: bool
    """Whether it wants to hear of work (:meth:`ran`), or of bytes alone."""

    def allocated(self, buffer: Buffer) -> None:
        """``buffer`` has got bytes of its own; it is asked for a weak reference to learn when they go."""

    def applied(self, node: Node, inputs: tuple[Buffer, ...]) -> None:
        """``node`` is applied to ``inputs``, now or when its value is needed."""

    def deferred(self, buffer: Buffer) -> None:
        """``buffer`` was made pending: its bytes, if it ever gets any, are due to this place."""

    def place(self) -> Any:
        """Where the user's program is, if that is to be remembered."""

    def wanted(self, buffer: Buffer, by: str) -> None:
        """A tape keeps ``buffer`` for a rule, or a call, of the name ``by``."""

    def labelled(self, buffer: Buffer, category: str, name: str = "") -> None:
        """``buffer``'s bytes serve as ``category`` from now on; ``name``: what the user calls what holds them."""

    def read(self, buffers: Sequence[Buffer]) -> None:
        """A kernel reads ``buffers``; the nodes it computes may have been applied long before."""

    def called(self, node: Node) -> None:
        """``node`` is a result of a call that has a derivative of its own."""

    def walk_began(self) -> Any:
        """A gradient walk begins in this thread; :meth:`walk_ended` is to get what this returns."""

    def differentiating(self, index: int) -> None:
        """The walk has come to the node of that index."""

    def walk_ended(self, token: Any) -> None:
        """The walk is over."""

    def ran(self, names: tuple[str, ...], read: int, written: int) -> None:
        """One kernel or barrier evaluated nodes of these primitives, reading and writing so many bytes."""

    def restoring(self, change: int) -> None:
        """This thread begins (1) or ends (-1) to make values again whose buffers were dropped."""

    def restored(self) -> None:
        """One value was made again."""

    def evicted(self) -> None:
        """One value was dropped under pressure."""

    def rerun_began(self, shift: int) -> Any:
        """This thread reruns a checkpointed function; what is made until :meth:`rerun_ended` was there before.

        ``shift``: to be added to a node's index for that of the node that it repeats (0: not known).  What this returns
        is for :meth:`rerun_ended`.
        """

    def rerun_ended(self, token: Any) -> None:
        """The rerun is over."""

    def scratch(self, nbytes: int) -> None:
        """A kernel took so many bytes of workspace, the CPU's stand-in for registers, and gave them back."""


class Residuals(Protocol):
    """What a tape's record holds instead of a tuple of buffers where buffers may be dropped and made again."""

    def there(self) -> tuple[Buffer, ...]:
        """The buffers that have not been dropped."""

    def restored(self) -> tuple[Buffer, ...]:
        """The buffers, made again if need be."""


class Recipes(Protocol):
    """How the values of a recording can be made again."""

    def held(self, node: Node, mine: bool) -> bool | None:
        """Whether somebody may still ask for the node's value; ``mine``: a rule of the asking recording wants it.

        None: it has no recipe; references to the node tell.
        """


class Keeper(Protocol):
    """Who keeps memory within a budget: it makes room before bytes are taken, by dropping what only tapes want.

    Without one (the default) values are what they are until nobody refers to them.
    """

    def graph(self) -> Recipes:
        """What a recording holds on to while it records: it may want dropped values again."""

    def made(self, node: Node, inputs: tuple[Buffer, ...], out: Buffer) -> None:
        """``node`` was applied to ``inputs``; its value is, or will be, in ``out``."""

    def renamed(self, out: Buffer, source: Buffer) -> None:
        """``out`` has the bytes of ``source`` under another node."""

    def named(self, buffer: Buffer, name: str) -> None:
        """The user calls the value of ``buffer`` ``name``."""

    def filled(self, buffer: Buffer, keeps: tuple[Buffer, ...]) -> None:
        """A pending buffer, which was to be made from ``keeps``, has got its bytes."""

    def admit(self, buffer: Buffer, count: Callable[[Buffer], None]) -> None:
        """Bytes are to be counted, by ``count``: those that :meth:`reserve` made room for, or others (a user's array).

        Nobody else gets room between the two.
        """

    def keep(self, buffers: tuple[Buffer, ...]) -> Any:
        """What a tape's record is to hold instead of ``buffers``: themselves, or :class:`Residuals`."""

    def accompanied(self, buffer: Buffer) -> None:
        """``buffer`` has got a companion (see ``transforms/pushing.py``), which is to come back with its value."""

    def promised(self) -> int:
        """Bytes that this thread has room for and has not taken yet."""

    def reserve(self, avals: Sequence[ShapedArray], names: Sequence[str]) -> None:
        """Room is needed for values like these, of primitives of these names.  Raises BudgetError if there is none.

        For :func:`in_room` alone.
        """

    def settled(self, promised: int) -> None:
        """This thread has room for no more than ``promised`` bytes; a second call does nothing."""

    def replaced(self, buffer: Buffer) -> None:
        """The value of the buffer's node is here now: a copy of a view."""

    def relieve(self, nbytes: int) -> bool:
        """The device has refused so many bytes: drop something; False if nothing is left to drop."""


accountant: Accountant | None = None
keeper: Keeper | None = None


def in_room(avals: Sequence[ShapedArray], names: Sequence[str], make: Callable[..., T], *args: Any) -> T:
    """What ``make(*args)`` returns, which makes buffers of values like ``avals``, by primitives of these ``names``.

    Room is reserved in no other way: what ``make`` has not taken when it returns, or raises, is free for other threads.
    Raises BudgetError.
    """
    who = keeper
    if who is None:
        return make(*args)
    before = who.promised()
    try:
        try:
            who.reserve(avals, names)
            return make(*args)
        finally:
            who.settled(before)
    except BaseException:
        who.settled(before)  # once more, for an interrupt in the line above
        raise


def set_keeper(who: Keeper | None) -> None:
    """Let ``who`` keep memory within its budget from now on; None: nobody."""
    global keeper
    keeper = who


def set_accountant(who: Accountant | None) -> None:
    """Let ``who`` count from now on; None stops counting."""
    global accountant
    accountant = who
