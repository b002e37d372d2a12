"""Buffers: the cache slots of values.  Device bytes live here and nowhere else.

A buffer is *pending* (lazy: ``array`` is None and ``keeps`` names the buffers its recipe reads), or *filled*.  Its
bytes live as long as someone refers to the buffer: a tensor (held), a tape's record (wanted), a pending buffer (about
to be read).  There are no counts to keep right and no cycles, so bytes are freed at their last use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
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
        self.array = array
        self.keeps = NOTHING
        self.span = self.loop = None
        if accountant is not None:
            accountant.allocated(self)

    def root(self) -> Buffer:
        """The buffer that owns the bytes of a filled buffer: itself, or a view's base."""
        found = self
        while found.array is not None and found.keeps:
            found = found.keeps[0]
        return found


class Accountant(Protocol):
    """Who counts bytes and work.  Without one (the default) counting costs one comparison."""

    def allocated(self, buffer: Buffer) -> None:
        """``buffer`` has got bytes of its own; it is asked for a weak reference to learn when they go."""

    def deferred(self, buffer: Buffer) -> None:
        """``buffer`` was made pending: its bytes, if it ever gets any, are due to this place."""

    def wanted(self, buffer: Buffer) -> None:
        """A tape keeps ``buffer`` for a rule."""

    def labelled(self, buffer: Buffer, category: str) -> None:
        """``buffer``'s bytes serve as ``category`` from now on."""

    def ran(self, names: tuple[str, ...], read: int, written: int) -> None:
        """One kernel or barrier evaluated nodes of these primitives, reading and writing so many bytes."""

    def rerun_began(self) -> None:
        """This thread reruns a checkpointed function; what is made until :meth:`rerun_ended` was there before."""

    def rerun_ended(self) -> None:
        """The rerun is over."""

    def scratch(self, nbytes: int) -> None:
        """A kernel took so many bytes of workspace, the CPU's stand-in for registers, and gave them back."""


accountant: Accountant | None = None


def set_accountant(who: Accountant | None) -> None:
    """Let ``who`` count from now on; None stops counting."""
    global accountant
    accountant = who
