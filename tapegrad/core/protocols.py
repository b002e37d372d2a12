"""Protocols by which the engine calls up: what it asks of tapes, transformations, checkpoints, the ledger, budgets.

The engine knows nobody who keeps to them, and works with nobody there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tapegrad.core.aval import ShapedArray
    from tapegrad.core.buffer import Buffer
    from tapegrad.core.node import Node

    Run = Callable[[Node, tuple[Buffer, ...]], Buffer]

T = TypeVar("T")


class Recorder(Protocol):
    """Whoever is told of every node made in its thread: a tape, a forward-mode walk, a checkpoint's look-out."""

    def record(self, node: Node, inputs: tuple[Buffer, ...], out: Buffer) -> None:
        """``node`` was applied to ``inputs``; its value is, or will be, in ``out``."""

    def read(self, variable: Any, value: Buffer) -> None:
        """``variable`` was read; ``value`` is its present value."""

    def follows(self, buffer: Buffer) -> bool:
        """Whether what happens to ``buffer``'s value matters to it."""

    def record_call(self, call: Call, inputs: tuple[Buffer, ...], outputs: tuple[Buffer, ...]) -> None:
        """A function with a derivative of its own was called; what it did inside was recorded apart, or not at all."""


class Call(Protocol):
    """A function call that enters a tape as one record: a custom gradient, a checkpoint.

    This protocol is how a checkpoint is entered without the tape knowing what a checkpoint is.
    """

    name: str
    again: Callable[[list[Any]], list[Any]] | None
    """While the call is recorded: the same function called on other inputs, recorded; None: it cannot be."""

    def pullback(self, cts: list[Any], needed: frozenset[int], lead: int | None, come: dict[int, Any]) -> list[Any]:
        """Cotangents of the inputs at the ``needed`` positions (None: not connected) from those of the outputs.

        None among ``cts`` stands for zeros; ``lead``: the length of one more leading axis of every cotangent.
        ``come``: what has come so far for other values, by node index; a call may take out what has come for its
        inputs and return sums with it.
        """

    @property
    def pushforward(self) -> Callable[[list[Any]], list[Any]] | None:
        """Tangents of the outputs from those of the inputs (None: zeros).

        None instead of a function: forward mode sees what the call does inside, and is not told of the call.
        """


class Guard(Recorder, Protocol):
    """A recorder for which a value is one example of many (see ``autodiff/batching.py``)."""

    def looked_at(self, buffer: Buffer) -> None:
        """The program looks at the value.  Raises DryRunError if it differs from example to example."""

    def whole(self, buffer: Buffer) -> Buffer:
        """The values of all examples; ``buffer`` itself if it is the same for all."""

    def aliased(self, old: Buffer, new: Buffer) -> None:
        """``new`` is the value of ``old``, of which no tape shall know."""


class Runner(Protocol):
    """Who gives nodes their values in a checkpointed run: one that notes values, or one that has noted them."""

    def run(self, node: Node, inputs: tuple[Buffer, ...], run: Run) -> Buffer:
        """The value of ``node``: of ``run``, the engine's way, or one that was there before."""

    def named(self, buffer: Buffer, name: str) -> None:
        """The user calls a value ``name``."""


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

    def walk(self, f: Callable[..., T], *args: Any) -> T:
        """What ``f(*args)``, a gradient walk of this thread, returns."""

    def differentiating(self, index: int) -> None:
        """The walk has come to the node of that index."""

    def ran(self, names: tuple[str, ...], read: int, written: int) -> None:
        """One kernel or barrier evaluated nodes of these primitives, reading and writing so many bytes."""

    def restored(self) -> None:
        """One value was made again."""

    def evicted(self) -> None:
        """One value was dropped under pressure."""

    def reran(self) -> None:
        """This thread reruns a checkpointed function."""

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
        """``buffer`` has got a companion (see ``autodiff/companions.py``), which is to come back with its value."""

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
