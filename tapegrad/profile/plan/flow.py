"""The data flow of a step: which operation of its forward pass reads the result of which, and which rule does."""

from __future__ import annotations

from collections.abc import Collection

import tapegrad.ops  # noqa: F401  # declares primitives
from tapegrad.core.primitive import REGISTRY, Elementwise
from tapegrad.engine.region import SMALL
from tapegrad.tracing.phase import BACKWARD
from tapegrad.tracing.run import Run


class Flow:
    """Operations of a step by their rows in ``run.ops``.

    ``alloc``: the first allocation that holds a result, if any; ``differentiated``: when the last operation of the
    backward pass was that differentiates one.
    What a step reads of earlier ones, such as variables, is no part of it.
    """

    def __init__(self, run: Run, rows: range) -> None:
        self._run = run
        self.bytes = run.ops["bytes"]
        self.inputs: dict[int, list[int]] = {}
        self.readers: dict[int, list[int]] = {}
        self._rules: dict[int, set[int]] = {}  # by operation: those whose derivative rules read its result
        phase, derivative_of = run.ops["phase"], run.ops["derivative_of"]
        for op, read in zip(run.reads["op"], run.reads["input"]):
            if op in rows and phase[op] == BACKWARD:
                self._rules.setdefault(read, set()).add(derivative_of[op])
            elif op in rows:
                self.inputs.setdefault(op, []).append(read)
                self.readers.setdefault(read, []).append(op)
        self.differentiated = {derivative_of[row]: run.ops["seq"][row] for row in rows if phase[row] == BACKWARD}
        self.alloc: dict[int, int] = {}
        for i, source in enumerate(run.allocs["source"]):
            if source in rows:
                self.alloc.setdefault(source, i)

    def into(self, rows: Collection[int]) -> list[int]:
        """Return the operations outside ``rows`` whose results operations in ``rows`` read."""
        inside = set(rows)
        return list(dict.fromkeys(i for row in rows for i in self.inputs.get(row, ()) if i not in inside))

    def rerun(self, rows: Collection[int]) -> list[int]:
        """Return the operations in ``rows``, which are in order, that a rerun computes.

        A rule of theirs reads the result, or what it is computed from; a result that only others read is not computed
        again, unless it is elementwise and small, so that it is computed as soon as its operands are.
        """
        inside = set(rows)
        pending = [row for row in rows if not inside.isdisjoint(self._rules.get(row, ()))]
        required = set(pending)
        while pending:
            new = [i for i in self.inputs.get(pending.pop(), ()) if i in inside and i not in required]
            required.update(new)
            pending += new
        for row in rows:
            if self._is_at_once(row) and all(i in required for i in self.inputs.get(row, ()) if i in inside):
                required.add(row)
        return [row for row in rows if row in required]

    def _is_at_once(self, row: int) -> bool:
        elementwise = isinstance(REGISTRY.get(self._run.text(self._run.ops["name"][row])), Elementwise)
        return elementwise and self.bytes[row] < 8 * SMALL

    def out_of(self, rows: Collection[int]) -> list[int]:
        """Return the operations in ``rows`` whose results operations outside read."""
        inside = set(rows)
        return [row for row in rows if any(reader not in inside for reader in self.readers.get(row, ()))]
