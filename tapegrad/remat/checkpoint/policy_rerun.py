"""What a policy saves of a checkpointed run, and how the rerun takes it.

Both runs apply the same nodes in the same order, so a value is known by its place in that order.  Counted are nodes
applied under the run's own look-out: not what a checkpoint nested in it does behind its own barrier (that has a policy
of its own, or none), nor tangents pushed from outside.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from tapegrad.core import tracking
from tapegrad.core.buffer import Buffer
from tapegrad.core.node import Node
from tapegrad.core.state import thread
from tapegrad.engine.delegating_executor import DelegatingExecutor
from tapegrad.engine.realize import array_of, realize
from tapegrad.errors import OffloadError, RecomputeError
from tapegrad.remat.budget.manager import MANAGER
from tapegrad.remat.checkpoint.rerun_tape import Lookout, Postponing
from tapegrad.remat.offload.offload import AHEAD, Moved, move
from tapegrad.remat.policies import RECOMPUTE, SAVE, Policy, asked

if TYPE_CHECKING:
    from tapegrad.core.protocols import Recorder

T = TypeVar("T")


class Noting(DelegatingExecutor):
    """Notes, in a first run, the values that ``policy`` saves or offloads.

    ``saved``: by place, the primitive's node and the value: its buffer, or what was moved to a tier.  ``count``: of the
    nodes applied.
    """

    def __init__(self, policy: Policy, watch: Recorder | None) -> None:
        self.saved: dict[int, tuple[Node, Buffer | Moved]] = {}
        self.count = 0
        self._policy = policy
        self._watch = watch
        self._places: dict[int, int] = {}  # of the nodes applied, by index
        self._names: dict[int, tuple[str, ...]] = {}
        self._pending: set[int] = set()  # indices of values that have had no bytes so far

    def value(self, node: Node, inputs: tuple[Buffer, ...]) -> Buffer:
        """Run the node; then see what has got bytes: its value, or what it had to read."""
        if self._watch not in thread.recorders:
            return super().value(node, inputs)
        self._places[node.index] = self.count
        self.count += 1
        out = super().value(node, inputs)
        for b in inputs:
            if b.node.index in self._pending and b.array is not None:
                self._pending.discard(b.node.index)
                self._ask(b)
        if out.array is None:
            self._pending.add(node.index)
        elif out.base is None:
            self._ask(out)
        return out

    def named(self, buffer: Buffer, name: str) -> None:
        """The user calls a value ``name``."""
        if self._watch not in thread.recorders:
            return
        owner = buffer.root()
        index = owner.node.index
        if index in self._places:
            self._names[index] = (*self._names.get(index, ()), name)
            if asked(self._policy, owner.node, self._names[index]) is not RECOMPUTE:
                realize((owner,))
                self._pending.discard(index)
                self._ask(owner)

    def settle(self) -> None:
        """The run is over: only what was saved is kept."""
        self._places, self._names, self._pending, self._watch = {}, {}, set(), None
        for _, value in self.saved.values():
            if isinstance(value, Buffer):
                tracking.current.require(value, "policy")

    def _ask(self, buffer: Buffer) -> None:
        """A value of the run has bytes of its own: keep them, or move them, if the policy says so."""
        node = buffer.node
        answer = asked(self._policy, node, self._names.get(node.index, ()))
        if answer is RECOMPUTE or self._places[node.index] in self.saved:
            return
        try:
            moved = None if answer is SAVE else move(buffer, answer)
        except OffloadError:  # a full disk, say: the rerun makes the value again
            return
        self.saved[self._places[node.index]] = (node, buffer if moved is None else moved)


class Taking(Postponing):
    """Gives, in a rerun, the values that the first run has saved; the others are postponed."""

    def __init__(self, name: str, first: Noting, watch: Lookout) -> None:
        super().__init__(watch)
        self._name = name
        self._saved, self._expected = first.saved, first.count
        self._count = 0
        values = [first.saved[index][1] for index in sorted(first.saved)]
        self._away = deque([v for v in values if isinstance(v, Moved)])
        self._alone = self._alone and not self._away  # what comes back takes room, so all before it is done by then

    def value(self, node: Node, inputs: tuple[Buffer, ...]) -> Buffer:
        """The value of the node: the one saved at its index, or a new one.  Raises RecomputeError."""
        if self._watch not in thread.recorders:
            return super().value(node, inputs)
        index = self._count
        self._count += 1
        entry = self._saved.get(index)
        if entry is None:
            return super().value(node, inputs)
        was, value = entry
        if was.prim is not node.prim or was.aval != node.aval:
            raise RecomputeError(
                f"{self._name}: the rerun applies {node!r} where the first run applied {was!r}, whose value the policy "
                "has saved; a checkpointed function must do the same each time"
            )
        if isinstance(value, Moved):
            try:
                return self._fetch(value, node)
            except MemoryError:
                raise
            except Exception:  # the tier has lost it: the rerun has its inputs
                return super().value(node, inputs)
        return Buffer(array_of(value), node, base=value.root())

    def _fetch(self, value: Moved, node: Node) -> Buffer:
        out = value.fetch(node)
        if value in self._away:
            self._away.remove(value)
        self._start()
        return out

    def during(self, f: Callable[..., T], *args: Any) -> T:
        """What ``f(*args)`` returns, a rerun.  Raises RecomputeError."""
        try:
            self._start()
            result = super().during(f, *args)
        finally:
            for value in self._away:  # of a rerun that ended early
                value.cancel()
        if self._count != self._expected:
            raise RecomputeError(
                f"{self._name}: the rerun applied {self._count} operations, the first run {self._expected}; with a "
                "policy, a checkpointed function must apply the same ones each time"
            )
        return result

    def _start(self) -> None:
        """The next values start coming back, while there is room."""
        for value in list(self._away)[:AHEAD]:
            if not value.coming and not MANAGER.bring(value):
                return
