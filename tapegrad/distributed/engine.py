"""Engines: who moves bytes between ranks.  This one serves a process alone; ``mpi.py`` and ``nccl.py`` several.

An engine knows arrays that are contiguous and of one dimension, and nothing of shapes, dtypes or derivatives.  What it
starts goes on while the program does; who needs the result waits (``waiting.py``), so that every wait has a deadline.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from tapegrad.device import Device
from tapegrad.device.types import Array
from tapegrad.errors import DistributedError

Piece = tuple[int, Array]
"""A rank, and the bytes that go to it or come from it."""
BETWEEN_TWO = 0
"""The ticket of messages, from the CPU to the CPU, in which two ranks alone take part."""


class WrongSizeError(DistributedError):
    """What has come is not as long as what was expected."""


class Transfer(Protocol):
    """Bytes on their way."""

    def done(self) -> bool:
        """Whether they have arrived, and those sent may be overwritten; it helps them on their way.

        Raises WrongSizeError.
        """


class Engine(Protocol):
    """It moves bytes between ``size`` processes, of which this one has the number ``rank``."""

    name: str
    rank: int
    size: int
    local_rank: int
    """The number of this process among those of its machine."""

    def moves(self, device: Device) -> bool:
        """Whether it takes arrays on this device; others pass through the host's memory."""

    def ticket(self) -> int:
        """A name for two exchanges that every rank does, the second once its first is done.

        All ranks ask for as many, in the same order of what they are for; other exchanges may come in between.
        """

    def exchange(
        self, send: Sequence[Piece], receive: Sequence[Piece], ticket: int | None = None, second: bool = False
    ) -> Transfer:
        """Send arrays to ranks and receive others; both sides know how many bytes go.

        ``ticket``: the name of this exchange, or (``second``) of the one before it; None: one of its own; BETWEEN_TWO:
        other ranks do not take part, and messages come in the order in which they were sent.
        """

    def all_gather(
        self, send: Array, receive: Sequence[Array], ticket: int | None = None, second: bool = False
    ) -> Transfer:
        """Send an array to every rank; receive one from each, also from this one."""

    def follow(self, transfer: Transfer, step: Callable[[], None], array: Array) -> Transfer | None:
        """Do ``step``, which changes ``array``, after the transfer; None: it has to wait, try again.

        Raises WrongSizeError.
        """

    def queues(self, array: Array) -> bool:
        """Whether what follows a transfer of ``array`` is asked for at once, and done in that order: nothing waits."""

    def broadcast(self, array: Array, root: int) -> Transfer:
        """Send the array of ``root`` to all others, into theirs."""

    def all_reduce(self, array: Array, op: str) -> Transfer:
        """Reduce in place, in an order of the engine's choice."""

    def notice(self, data: bytes) -> Notice:
        """Tell all ranks ``data``, of one length everywhere."""

    def post(self, rank: int, kind: int, data: bytes) -> None:
        """Leave a message that :meth:`pick_up` finds, without waiting for it."""

    def pick_up(self, kind: int) -> tuple[int, bytes] | None:
        """A message that was left here, and who sent it; None: there is none."""

    def split(self, color: int, key: int) -> Engine:
        """An engine of the ranks that gave the same color, in the order of their keys."""

    def give_up(self) -> None:
        """What is under way will not be done: other ranks do not come."""

    def close(self) -> None:
        """Give back what all ranks share; all of them are at their ends."""

    def abort(self, code: int) -> None:
        """End all processes at once."""


class Notice(Transfer, Protocol):
    """What every rank tells."""

    def told(self) -> list[bytes]:
        """By rank, once it is done."""


class Done:
    """Nothing is on its way."""

    def __init__(self, told: list[bytes] | None = None) -> None:
        self._told = told or []

    def done(self) -> bool:
        """True."""
        return True

    def told(self) -> list[bytes]:
        """What this rank told."""
        return self._told


class Alone:
    """The engine of one process: it needs nothing installed."""

    name = "none"
    rank, size, local_rank = 0, 1, 0

    def __init__(self) -> None:
        self._sent: list[Array] = []

    def moves(self, device: Device) -> bool:
        """Any."""
        return True

    def ticket(self) -> int:
        """Nobody needs it."""
        return 0

    def exchange(
        self, send: Sequence[Piece], receive: Sequence[Piece], ticket: int | None = None, second: bool = False
    ) -> Transfer:
        """From this rank to itself."""
        self._sent += [array for _, array in send]
        for _, here in receive:
            here[...] = self._sent.pop(0)
        return Done()

    def all_gather(
        self, send: Array, receive: Sequence[Array], ticket: int | None = None, second: bool = False
    ) -> Transfer:
        """A copy."""
        receive[0][...] = send
        return Done()

    def follow(self, transfer: Transfer, step: Callable[[], None], array: Array) -> Transfer | None:
        """At once."""
        step()
        return Done()

    def queues(self, array: Array) -> bool:
        """Nothing has to wait."""
        return True

    def broadcast(self, array: Array, root: int) -> Transfer:
        """Nothing to do."""
        return Done()

    def all_reduce(self, array: Array, op: str) -> Transfer:
        """Nothing to do."""
        return Done()

    def notice(self, data: bytes) -> Notice:
        """To itself."""
        return Done([data])

    def post(self, rank: int, kind: int, data: bytes) -> None:
        """Nobody else would read it."""

    def pick_up(self, kind: int) -> tuple[int, bytes] | None:
        """None."""
        return None

    def split(self, color: int, key: int) -> Engine:
        """Itself."""
        return self

    def give_up(self) -> None:
        """Nothing is under way."""

    def close(self) -> None:
        """Nothing is shared."""

    def abort(self, code: int) -> Any:
        """Nobody else runs: the exception that brought us here ends the process."""
