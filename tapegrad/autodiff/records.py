"""Records: what a recording keeps of each operation whose result depends on a value that it follows.

An operation is the application of a primitive (:class:`Applied`) or a call of a function that has a derivative of its
own (:class:`Called`).  A record names values by their nodes, and keeps the buffers that rules read.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeAlias, final

from tapegrad.core.buffer import Buffer
from tapegrad.core.node import Node
from tapegrad.core.protocols import Call, Retained
from tapegrad.core.references import ASKED, count, elsewhere
from tapegrad.core.rule import Plan

Known: TypeAlias = Sequence[bool | None]
"""For each value of a record: may somebody ask for it?  None: the number of references decides."""


@final
class Applied:
    """A primitive was applied to ``inputs``; ``residuals``: what the rules of ``plan`` read, slot by slot.

    Made without ``__init__``, whose call would take longer than all the rest (see ``Recording.record``).
    """

    __slots__ = ("inputs", "node", "plan", "residuals")
    node: Node
    inputs: tuple[Node, ...]
    plan: Plan
    residuals: Retained

    @property
    def results(self) -> tuple[Node, ...]:
        """The node of the one value made."""
        return (self.node,)

    @property
    def followed(self) -> tuple[Node, ...]:
        """Nodes of all inputs."""
        return self.inputs

    @property
    def keeps_result(self) -> bool:
        """Whether a rule reads the value itself."""
        return self.plan.kept_result is not None

    def there(self) -> tuple[Buffer, ...]:
        """The residuals that have not been dropped."""
        return self.residuals if isinstance(self.residuals, tuple) else self.residuals.there()

    def held(self, known: Known | None = None) -> bool:
        """Whether anything else refers to the value: a tensor, another record, a pending buffer."""
        position, residuals = self.plan.kept_result, self.residuals
        if position is None:
            return count(self.node) - ASKED > 1  # the record does
        if not isinstance(residuals, tuple):  # kept within a budget
            return True
        # The record refers to both, and the buffer to the node.
        return count(self.node) + count(residuals[position]) - 2 * ASKED > 3


@final
class Called:
    """A function with a derivative of its own was called; ``inputs``: None for those that are not followed."""

    __slots__ = ("call", "inputs", "results")
    keeps_result = False

    def __init__(self, call: Call, inputs: tuple[Node | None, ...], results: tuple[Node, ...]) -> None:
        self.call = call
        self.inputs = inputs
        self.results = results

    @property
    def followed(self) -> tuple[Node, ...]:
        """Nodes of the inputs that are followed."""
        return tuple([n for n in self.inputs if n is not None])

    def held(self, known: Known | None = None) -> bool:
        """Whether anything else refers to one of the values for which ``known`` has None."""
        counts = elsewhere(self.results)
        return any(counts if known is None else [n for n, k in zip(counts, known, strict=True) if k is None])


Record: TypeAlias = Applied | Called


def reachable(records: Sequence[Record], sources: Iterable[int]) -> set[int]:
    """Indices of the sources and of all values that depend on them."""
    found = set(sources)
    for record in records:
        if any(n.index in found for n in record.followed):
            found.update(n.index for n in record.results)
    return found
