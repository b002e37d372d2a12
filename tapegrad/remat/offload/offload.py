"""Values whose bytes are in a tier: how they go, how they come back, and which come back before they are asked for.

What a policy offloads under a budget leaves when room is needed, in place of being dropped; without a limit (see
``tg.memory.policy``) as soon as only tapes want it.  The backward walk reads values in the reverse order of their
making, so when it asks for one at node ``q``, the next ones are those with the largest indices below ``q``: these
start coming back while there is room.  Nothing is ever evicted for that, and what is on its way is the first to give
way.

The ledger counts a value that is on its way back by a buffer that stands for it until it is there.
"""

from __future__ import annotations

import weakref
from bisect import bisect_left, insort
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from tapegrad.core import locks, tracking
from tapegrad.core.buffer import Buffer
from tapegrad.core.node import LEAF, Node
from tapegrad.core.state import thread
from tapegrad.core.storage import METER
from tapegrad.device import Device, abstract_array
from tapegrad.device.host_scalar import HostScalar
from tapegrad.errors import OffloadError
from tapegrad.remat.offload import tiers
from tapegrad.remat.offload.tiers import Slot, Tier
from tapegrad.remat.policies import Offload
from tapegrad.tracing.ledger import LEDGER
from tapegrad.tracing.phase import HERE

if TYPE_CHECKING:
    from tapegrad.device.types import Array
    from tapegrad.remat.policies import Answer

AHEAD = 2
"""Values on their way back at once: one may arrive while the one before it is used."""

_FIRST_CLEARED = 64
_ON_ITS_WAY = object()

_lock = locks.lock()
default_tiers: dict[Device, Tier] = {}
_used: weakref.WeakSet[Tier] = weakref.WeakSet()


locks.in_child(default_tiers.clear)  # a child's slots would lie where its parent's lie


def default_tier(device: Device) -> Tier:
    """The tier of a device that serves unless a policy names one; made when first needed."""
    with _lock:
        tier = default_tiers.get(device)
        if tier is None:
            tier = default_tiers[device] = tiers.default(device)
        return tier


class _DrySlot:
    """A slot of a dry run: nothing is copied, and copies are done at once."""

    def __init__(self, buffer: Buffer) -> None:
        self._aval = buffer.node.aval
        self.nbytes = self._aval.nbytes

    def prefetch(self) -> None:
        """Nothing starts."""

    def get(self) -> Array:
        """An abstract array."""
        return abstract_array.empty(self._aval.shape, self._aval.dtype)

    def drop(self) -> None:
        """There is nothing to give back."""


class Moved:
    """The bytes of one value in a tier."""

    __slots__ = ("__weakref__", "_coming", "_slot", "_turn", "node")

    def __init__(self, node: Node, slot: Slot) -> None:
        self.node = node
        self._slot = slot
        self._coming: Buffer | None = None  # who takes this, fetches or cancels
        self._turn = locks.lock()

    @property
    def coming(self) -> bool:
        """Whether the bytes are on their way back."""
        return self._coming is not None

    def prefetch(self) -> bool:
        """Start bringing the bytes back (the caller has found room); False where the device has none after all."""
        try:
            self._slot.prefetch()
        except Exception:  # a tier that fails says so again when the value is fetched
            return False
        self._coming = Buffer(_ON_ITS_WAY, self.node)
        LEDGER.moved("prefetches")
        return True

    def cancel(self) -> bool:
        """The bytes are not wanted yet after all; False if none are on their way any more."""
        with self._turn:
            coming, self._coming = self._coming, None
            if coming is not None:
                with suppress(Exception):  # see `prefetch`
                    self._slot.get()
        return coming is not None

    def forget(self) -> None:
        """The bytes will not come."""
        self._coming = None

    def fetch(self, node: Node, into: Buffer | None = None) -> Buffer:
        """The value, as that of ``node``, in ``into`` or a new buffer.  Raises BudgetError, and what the tier raises.

        May be called again: the tier keeps the bytes.
        """
        with self._turn:  # after a `cancel` under way
            coming, self._coming = self._coming, None
        if coming is None:
            name = "bringing back " + ("a value" if node.prim is LEAF else node.prim.name)
            with tracking.current.reserved((node.aval,), (name,)):
                return self._fetched(node, into)
        coming.array, coming.node = self._slot.get(), node  # the bytes that it has stood for
        if into is not None:
            METER.free(coming.storage)
            into.fill(coming.array)
            coming = into
        LEDGER.label(coming, "rematerialized" if HERE.reruns else "temporary")
        LEDGER.moved("fetches")
        return coming

    def _fetched(self, node: Node, into: Buffer | None) -> Buffer:
        array = self._slot.get()
        LEDGER.moved("fetches")
        if into is None:
            return Buffer(array, node)
        into.fill(array)
        return into


def move(buffer: Buffer, answer: Answer) -> Moved | None:
    """Copy the bytes of a filled buffer to the tier of ``answer``; None if they could not come back as they lie.

    Those of an array that is not C-contiguous would come back contiguous, and what reads them might round otherwise.
    Raises OffloadError, whatever the tier raises: the value can be recomputed.
    """
    array: Any = buffer.array
    if type(array) is HostScalar or not array.nbytes or not array.flags.c_contiguous:
        return None
    slot = thread.executor.in_earnest(lambda: _put(buffer, answer), None)
    LEDGER.moved("offloads")
    return Moved(buffer.node, slot or _DrySlot(buffer))


def _put(buffer: Buffer, answer: Answer) -> Slot | None:
    tier = answer.tier if isinstance(answer, Offload) else default_tier(buffer.node.aval.device)
    try:
        slot = tier.put(buffer)
    except Exception as e:
        raise OffloadError(f"{type(tier).__name__} has not taken {buffer.node!r}: {e}") from e
    _used.add(tier)
    return slot


def keeps_memory() -> bool:
    """Whether there may be such bytes as :func:`kept_bytes` tells of."""
    return any(hasattr(tier, "kept_bytes") for tier in list(_used))


def kept_bytes() -> int:
    """Bytes of device memory that nobody has any more, but copies still use."""
    return sum([getattr(tier, "kept_bytes", 0) for tier in _tiers_in_use()]) if _used else 0


def _tiers_in_use() -> list[Tier]:
    """Those that have been used; a dry run uses none."""
    return thread.executor.in_earnest(lambda: list(_used), [])


def reclaim(nbytes: int | None) -> int:
    """Let go of device memory that copies have used; see :meth:`tapegrad.remat.offload.tiers.Tier.reclaim`."""
    freed = 0
    for tier in _tiers_in_use():
        freed += tier.reclaim(None if nbytes is None else max(0, nbytes - freed))
    return freed


class Offloads:
    """What tapes want and tiers have, by node index; and all that is on its way back."""

    def __init__(self) -> None:
        self._away: dict[int, weakref.ref[Moved]] = {}
        self._order: list[int] = []
        self._coming: list[weakref.ref[Moved]] = []
        self._clear_at = _FIRST_CLEARED

    @property
    def any(self) -> bool:
        """Whether there are any."""
        return bool(self._order)

    def went(self, moved: Moved) -> None:
        """A value has no buffer any more, only bytes in a tier."""
        index = moved.node.index
        if index not in self._away:
            insort(self._order, index)
        self._away[index] = weakref.ref(moved)
        if len(self._away) >= self._clear_at:
            self._away = {i: weak for i, weak in self._away.items() if weak() is not None}
            self._order = sorted(self._away)
            self._clear_at = max(_FIRST_CLEARED, 2 * len(self._away))

    def returned(self, index: int) -> None:
        """A value has its bytes again."""
        if self._away.pop(index, None) is not None:
            del self._order[bisect_left(self._order, index)]

    def prefetch(self, here: int, fits: Callable[[int], bool]) -> None:
        """The walk is at node ``here``: start bringing back what it will read next, while ``fits(nbytes)``."""
        end = bisect_left(self._order, here)
        for index in reversed(self._order[max(0, end - AHEAD) : end]):
            weak = self._away.get(index)  # another thread may have brought it back
            moved = None if weak is None else weak()
            if moved is not None and not moved.coming and not self.bring(moved, fits):
                return

    def bring(self, moved: Moved, fits: Callable[[int], bool]) -> bool:
        """Start bringing a value back if there is room."""
        if not fits(moved.node.aval.nbytes) or not moved.prefetch():
            return False
        self._coming = [ref for ref in self._coming if (m := ref()) is not None and m.coming]
        self._coming.append(weakref.ref(moved))
        return True

    def in_child(self) -> None:
        """What is on its way back comes to the parent of a forked child, not to the child."""
        for ref in self._coming:
            if (moved := ref()) is not None:
                moved.forget()
        self._coming = []

    def free_memory(self, nbytes: int) -> bool:
        """Make room for so many bytes without evicting anything; False if none was made.

        What is on its way back turns round, the last needed first.  Then device memory is let go of whose copy is
        done, or, if that of copies under way suffices, waited for (by kernels, not by the caller).
        """
        while self._coming:
            moved = self._coming.pop()()
            if moved is not None and moved.cancel():
                return True
        kept = kept_bytes()
        if not kept:
            return False
        reclaim(nbytes if kept >= nbytes else None)
        return kept_bytes() < kept
