"""Trackers: the interface through which the engine reserves bytes and reports work.

One :class:`Tracker` is in force in the process: one that counts nothing and refuses nothing, the ledger, or the manager
of a budget, which counts as well.  Blocks choose it when they are entered and left (:func:`install_ledger`,
:func:`install_budget`).  No code asks which one it is.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, TypeVar

from tapegrad.core import locks

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractContextManager

    from tapegrad.core.aval import ShapedArray
    from tapegrad.core.buffer import Buffer
    from tapegrad.core.node import Node
    from tapegrad.core.protocols import Recipes, Retained

T = TypeVar("T")


class Tracker:
    """Counts nothing and refuses nothing; each docstring says what the engine reports by the call."""

    # Operations ------------------------------------------------------------------------------------------------

    def applied(self, node: Node, inputs: tuple[Buffer, ...]) -> None:
        """``node`` is applied to ``inputs``, now or when its value is needed; a by-product that it fills comes last."""

    def made(self, node: Node, inputs: tuple[Buffer, ...], out: Buffer) -> None:
        """``node`` was applied while a recorder records; its value is, or will be, in ``out``."""

    def named(self, buffer: Buffer, name: str) -> None:
        """The user calls the value of ``buffer`` ``name``."""

    def called(self, node: Node) -> None:
        """``node`` is a result of a call that a tape has recorded, or is to be applied later, by another line."""

    # Bytes -----------------------------------------------------------------------------------------------------

    def reserved(self, avals: Sequence[ShapedArray], names: Sequence[str]) -> AbstractContextManager[None]:
        """Reserve bytes for a block that allocates values like ``avals``, by primitives of these ``names``.

        What the block has not allocated when it ends is available to other threads.  Raises BudgetError.
        """
        return _NOTHING

    def filled(self, buffer: Buffer) -> None:
        """A pending or evicted buffer has got its bytes, or a new one takes the place of its node's."""

    def label(self, buffer: Buffer, category: str, name: str = "") -> None:
        """The bytes that ``buffer`` shows serve as ``category`` from now on; ``name``: of what holds them."""

    def require(self, buffer: Buffer, by: str) -> None:
        """A call of the name ``by`` keeps ``buffer``."""

    # Recordings ------------------------------------------------------------------------------------------------

    def graph(self) -> Recipes | None:
        """Return what a recording refers to while it records, since it may need evicted values again."""
        return None

    def save(self, buffers: tuple[Buffer, ...], by: str = "") -> Retained:
        """Return what is to be held of ``buffers``, themselves or :class:`Residuals`; ``by``: of a record, its name."""
        return buffers

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
        """A captured program was replayed; ``report``: what that is counted as (``tracing/metrics.py``)."""

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


_NOTHING = nullcontext()
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
