"""Buffers: the cache slots of values.  Device bytes live here and nowhere else.

A buffer is *pending* (lazy: ``array`` is None and ``keeps`` names the buffers its recipe reads), or *filled*.  Its
bytes live as long as someone refers to the buffer: a tensor (held), a tape's record (wanted), a pending buffer (about
to be read).  There are no counts to keep right and no cycles, so bytes are freed at their last use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tapegrad.aval import ShapedArray
    from tapegrad.node import Node

NOTHING: tuple[Buffer, ...] = ()


class Buffer:
    """The cache slot of ``node``'s value.

    ``keeps``: the inputs of a pending buffer, or the base of a view; ``span``: upper bounds on the pending nodes and
    the filled arrays that its evaluation takes in (None when filled); ``loop``: of a pending reduction, and of what is
    to be computed from its results in the same kernel, the shape it loops over and the axes it reduces.
    """

    __slots__ = ("__weakref__", "array", "keeps", "loop", "node", "span")

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
        if accountant is not None and array is not None and not keeps:
            accountant.allocated(self)

    def fill(self, array: Any) -> None:
        """Evaluation gives a pending buffer its bytes; it lets go of what it was to be made from."""
        keeps, self.keeps = self.keeps, NOTHING
        self.array = array
        self.span = self.loop = None
        if accountant is not None:
            accountant.allocated(self)
        if keeper is not None:
            keeper.filled(self, keeps)

    def root(self) -> Buffer:
        """The buffer that owns the bytes of a filled buffer: itself, or a view's base."""
        found = self
        while found.array is not None and found.keeps:
            found = found.keeps[0]
        return found


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

    def restored(self) -> tuple[Buffer, ...]:
        """The buffers, made again if need be."""


class Recipes(Protocol):
    """How the values of a recording can be made again."""

    def held(self, node: Node, mine: bool) -> bool:
        """Whether somebody may still ask for the node's value; ``mine``: a rule of the asking recording wants it."""


class Keeper(Protocol):
    """Who keeps memory within a budget: it makes room before bytes are taken, by dropping what only tapes want.

    Without one (the default) values are what they are until nobody refers to them.
    """

    def graph(self) -> Recipes:
        """What a recording holds on to as long as it may want dropped values again."""

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

    def reserve(self, avals: Sequence[ShapedArray], names: Sequence[str]) -> None:
        """Room is needed for values like these, of primitives of these names.  Raises BudgetError if there is none."""

    def settled(self) -> None:
        """What room was reserved for is made, or will not be."""

    def replaced(self, buffer: Buffer) -> None:
        """The value of the buffer's node is here now: a copy of a view."""

    def relieve(self, nbytes: int) -> bool:
        """The device has refused so many bytes: drop something; False if nothing is left to drop."""


accountant: Accountant | None = None
keeper: Keeper | None = None


def set_keeper(who: Keeper | None) -> None:
    """Let ``who`` keep memory within its budget from now on; None: nobody."""
    global keeper
    keeper = who


def set_accountant(who: Accountant | None) -> None:
    """Let ``who`` count from now on; None stops counting."""
    global accountant
    accountant = who
