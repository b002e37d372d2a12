"""What the engine asks of collectives: who takes part, and what the ranks tell each other before they walk back."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

from tapegrad.core.node import Node
from tapegrad.core.state import thread
from tapegrad.distributed.group import Group

_SAME_EVERYWHERE = frozenset({"all_reduce", "all_reduce_finish", "all_reduce_extreme", "all_gather", "broadcast"})
_PAIRS = frozenset({"send", "recv"})


class Peers:
    """The effect of a collective: the ranks of its group take part (see ``tapegrad.core.protocols.Effect``)."""

    category = "communication"

    def group(self, node: Node) -> Group:
        """The collective's."""
        found: Group = node.params["group"]
        return found

    def common(self, groups: Sequence[Group]) -> Group:
        """The group itself, or the nearest one of which all of them are parts."""
        lines = [_ancestors(g) for g in dict.fromkeys(groups)]
        return next(g for g in lines[0] if all(g in line for line in lines))

    def name(self, group: Group) -> str:
        """One that no other group of the job has which a rank is in, too."""
        return group.name

    def members(self, group: Group, part: Group) -> list[int]:
        """The ranks in ``group`` of those of ``part``."""
        return [group.ranks.index(r) for r in part.ranks]

    def pair(self, node: Node) -> Hashable:
        """Of a message between two ranks, what both call it."""
        return node.params["key"] if node.prim.name in _PAIRS else None

    def replicated(self, node: Node) -> Group | None:
        """The group, if all of its ranks get the same."""
        return self.group(node) if node.prim.name in _SAME_EVERYWHERE else None

    def first(self, group: Group) -> bool:
        """Whether this is rank 0."""
        return group.rank == 0

    def told(self, group: Group, mine: Any) -> list[Any]:
        """What each rank says; in a dry run what they said the last time, or the same as this one."""
        key = repr(mine[:5])

        def ask() -> list[Any]:
            entered = group.line.enter("gradient", "a walk", 0)
            group.told_before[key] = group.line.told(mine, entered)
            return group.told_before[key]

        if group.size == 1:
            return [mine]
        return thread.executor.in_earnest(ask, group.told_before.get(key) or [mine] * group.size)


def _ancestors(group: Group) -> list[Group]:
    line = [group]
    while line[-1].parent is not None:
        line.append(line[-1].parent)
    return line


PEERS = Peers()
