"""Trackers: the interface through which the engine reserves bytes and reports work.

One :class:`Tracker` is in force in the process: one that counts nothing and refuses nothing, the ledger, or the manager
of a budget, which counts as well.  Blocks choose it when they are entered and left (:func:`install_ledger`,
:func:`install_budget`).  No code asks which one it is.
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


class Tracker:
    """Counts nothing and refuses nothing; each docstring says what is reported to a subclass."""

    # Operations ------------------------------------------------------------------------------------------------

    def applied(self, node: Node, inputs: tuple[Buffer, ...]) -> None:
        """``node`` is applied to ``inputs``, now or when its value is needed; a by-product that it fills comes last."""

    def made(self, node: Node, inputs: tuple[Buffer, ...], out: Buffer) -> None:
        """``node`` was applied while a recorder records; its value is, or will be, in ``out``."""

    def renamed(self, out: Buffer, source: Buffer) -> None:
        """``out`` has the bytes of ``source`` under another node."""

    def named(self, buffer: Buffer, name: str) -> None:
        """The user calls the value of ``buffer`` ``name``."""

    def called(self, node: Node) -> None:
        """``node`` is a result of a call, which has a derivative of its own and which a tape has recorded."""

    # Bytes -----------------------------------------------------------------------------------------------------

    def reserve(self, avals: Sequence[ShapedArray], names: Sequence[str], make: Callable[..., T], *args: object) -> T:
        """Return ``make(*args)``, which allocates values like ``avals``, by primitives of these ``names``.

        Within a budget the bytes are reserved first.  What ``make`` has not allocated when it returns, or raises, is
        available to other threads.  Raises BudgetError.
        """
        return make(*args)

    def filled(self, buffer: Buffer, inputs: tuple[Buffer, ...]) -> None:
        """A pending buffer, which was to be made from ``inputs``, has got its bytes."""

    def deferred(self, buffer: Buffer) -> None:
        """``buffer`` was made pending: its bytes, if it ever gets any, are due to this source line."""

    def replaced(self, buffer: Buffer) -> None:
        """``buffer`` now holds a copy of its view."""

    def label(self, buffer: Buffer, category: str, name: str = "") -> None:
        """The bytes that ``buffer`` shows serve as ``category`` from now on; ``name``: of what holds them."""

    def require(self, buffer: Buffer, by: str) -> None:
        """A call of the name ``by`` keeps ``buffer``."""

    # Recordings ------------------------------------------------------------------------------------------------

    def graph(self) -> Recipes | None:
        """Return what a recording refers to while it records, since it may need evicted values again."""
        return None

    def save(self, buffers: tuple[Buffer, ...]) -> Retained:
        """Return what a tape's record is to hold instead of ``buffers``: themselves, or :class:`Residuals`."""
        return buffers

    def recorded(self, recording: Recording, node: Node, residuals: tuple[Buffer, ...]) -> Retained:
        """Return what ``recording`` is to hold instead of ``residuals``, which the rules of ``node`` read."""
        return residuals

    def told(self, recorders: tuple[Recorder, ...], listener: Recorder) -> tuple[Recorder, ...]:
        """Return the recorders of companions: ``recorders``, or, if there are none, perhaps the ``listener``."""
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
    """Whether intermediate values of a backward pass must be buffers, whose bytes are counted."""
    follows_each = False
    """Whether every small operation of a backward pass must be reported when it is applied."""
    copies_slivers = False
    """Whether a view that is a small piece of an array is copied, so that it does not keep the rest."""

    def ran_small(self, node: Node, arrays: Sequence[Any]) -> None:
        """A small elementwise ``node`` was evaluated from ``arrays``."""

    def replayed(self, report: Any) -> None:
        """A captured program was replayed; ``report``: what that is counted as (``memory/ledger/figures.py``)."""

    def walk(self, f: Callable[..., T], *args: object) -> T:
        """Return ``f(*args)``, a backward pass of this thread."""
        return f(*args)

    def differentiating(self, index: int) -> None:
        """The backward pass of this thread has come to the node of this ``index``."""

    def rerun(self, f: Callable[..., T], *args: object, shift: int = 0) -> T:
        """Return ``f(*args)``, the rerun of a checkpointed function, whose values existed before.

        ``shift``: from the indices of its nodes to those of the nodes they repeat, if that is known.
        """
        return f(*args)


NO_TRACKER = Tracker()
current: Tracker = NO_TRACKER
"""The tracker in force."""
_lock = locks.lock()
_ledger: Tracker | None = None
_budget: Tracker | None = None


def install_ledger(tracker: Tracker | None) -> None:
    """Let ``tracker`` count from now on; None stops counting."""
    global _ledger
    _ledger = tracker
    _choose()


def install_budget(tracker: Tracker | None) -> None:
    """Let ``tracker``, which counts as well, keep memory within a budget from now on; None ends that."""
    global _budget
    _budget = tracker
    _choose()


def _choose() -> None:
    global current
    with _lock:  # another thread may enter a block, or leave one, at the same time
        current = _budget or _ledger or NO_TRACKER
