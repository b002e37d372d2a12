"""Accounts: what the engine tells of bytes and work, and whom it asks for room.

One :class:`Account` is in force in the process: one that counts nothing and refuses nothing, the ledger, or the manager
of a budget, who counts as well.  It is chosen when a block is entered and when one is left (:func:`count_with`,
:func:`keep_with`).  No code asks which one it is.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

from tapegrad.core import locks

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tapegrad.core.aval import ShapedArray
    from tapegrad.core.buffer import Buffer
    from tapegrad.core.node import Node
    from tapegrad.core.protocols import Recipes, Recorder, Recording, Retained

T = TypeVar("T")


class Account:
    """Counts nothing and refuses nothing; each docstring says what a subclass is told."""

    # Operations ------------------------------------------------------------------------------------------------

    def applied(self, node: Node, inputs: tuple[Buffer, ...]) -> None:
        """``node`` is applied to ``inputs``, now or when its value is needed; a by-product that it fills comes last."""

    def made(self, node: Node, inputs: tuple[Buffer, ...], out: Buffer) -> None:
        """``node`` was applied where somebody records; its value is, or will be, in ``out``."""

    def renamed(self, out: Buffer, source: Buffer) -> None:
        """``out`` has the bytes of ``source`` under another node."""

    def named(self, buffer: Buffer, name: str) -> None:
        """The user calls the value of ``buffer`` ``name``."""

    def called(self, node: Node) -> None:
        """``node`` is a result of a call, which has a derivative of its own and which a tape has recorded."""

    # Bytes -----------------------------------------------------------------------------------------------------

    def in_room(self, avals: Sequence[ShapedArray], names: Sequence[str], make: Callable[..., T], *args: object) -> T:
        """What ``make(*args)`` returns, which makes buffers of values like ``avals``, by primitives of these ``names``.

        Within a budget room is made first.  What ``make`` has not taken when it returns, or raises, is free for other
        threads.  Raises BudgetError.
        """
        return make(*args)

    def filled(self, buffer: Buffer, inputs: tuple[Buffer, ...]) -> None:
        """A pending buffer, which was to be made from ``inputs``, has got its bytes."""

    def deferred(self, buffer: Buffer) -> None:
        """``buffer`` was made pending: its bytes, if it ever gets any, are due to this source line."""

    def replaced(self, buffer: Buffer) -> None:
        """``buffer`` now holds a copy of its view."""

    def accompanied(self, buffer: Buffer) -> None:
        """``buffer`` has got a companion (see ``autodiff/companions.py``), which must be recomputed with its value."""

    def labelled(self, buffer: Buffer, category: str, name: str = "") -> None:
        """The bytes that ``buffer`` shows serve as ``category`` from now on; ``name``: of what holds them."""

    def wanted(self, buffer: Buffer, by: str) -> None:
        """A call of the name ``by`` keeps ``buffer``."""

    # Recordings ------------------------------------------------------------------------------------------------

    def graph(self) -> Recipes | None:
        """What a recording refers to while it records, since it may need dropped values again."""
        return None

    def keep(self, buffers: tuple[Buffer, ...]) -> Retained:
        """What a tape's record is to hold instead of ``buffers``: themselves, or :class:`Residuals`."""
        return buffers

    def recorded(self, recording: Recording, node: Node, residuals: tuple[Buffer, ...]) -> Retained:
        """What ``recording`` is to hold instead of ``residuals``, which the rules of ``node`` read."""
        return residuals

    def told(self, recorders: tuple[Recorder, ...], listener: Recorder) -> tuple[Recorder, ...]:
        """The recorders to be told of companions: ``recorders``, or, if there are none, perhaps the ``listener``."""
        return recorders

    # Work ------------------------------------------------------------------------------------------------------

    def read(self, buffers: Sequence[Buffer]) -> None:
        """A kernel reads ``buffers``; the nodes it computes may have been applied long before."""

    def ran(
        self,
        names: tuple[str, ...],
        moves: Sequence[tuple[Sequence[Any], Sequence[Any]]],
        passes: Sequence[tuple[int, int]] = (),
        scratch: int = 0,
    ) -> None:
        """Kernels or a barrier have evaluated nodes of these primitives; ``moves``: what each kernel read and wrote.

        ``passes``: further passes over memory, each with the bytes read and written; ``scratch``: bytes of workspace,
        the CPU's stand-in for registers, which were taken and given back.
        """

    counts = False
    """Whether the values that a gradient walk makes and drops must be buffers, whose bytes are counted."""
    follows_each = False
    """Whether it must be told of every small operation of a gradient walk when it is applied."""
    copies_slivers = False
    """Whether a view that is a small piece of an array is copied, so that it does not keep the rest."""

    def ran_small(self, node: Node, arrays: Sequence[Any]) -> None:
        """A small elementwise ``node`` was evaluated from ``arrays``."""

    def replayed(self, report: Any) -> None:
        """A captured program was replayed; ``report``: what that is counted as (``memory/ledger/figures.py``)."""

    def walk(self, f: Callable[..., T], *args: object) -> T:
        """What ``f(*args)``, a gradient walk of this thread, returns."""
        return f(*args)

    def differentiating(self, index: int) -> None:
        """The gradient walk of this thread has come to the node of this ``index``."""

    def rerun(self, f: Callable[..., T], *args: object, shift: int = 0) -> T:
        """What ``f(*args)``, the rerun of a checkpointed function, returns: its values existed before.

        ``shift``: from the indices of its nodes to those of the nodes they repeat, if that is known.
        """
        return f(*args)


NOBODY = Account()
current: Account = NOBODY
"""The account in force."""
_lock = locks.lock()
_counting: Account | None = None
_keeping: Account | None = None


def count_with(who: Account | None) -> None:
    """Let ``who`` count from now on; None stops counting."""
    global _counting
    _counting = who
    _choose()


def keep_with(who: Account | None) -> None:
    """Let ``who``, who counts as well, keep memory within a budget from now on; None: nobody."""
    global _keeping
    _keeping = who
    _choose()


def _choose() -> None:
    global current
    with _lock:  # another thread may enter a block, or leave one, at the same time
        current = _keeping or _counting or NOBODY
