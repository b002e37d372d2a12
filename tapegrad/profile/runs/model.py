"""A recorded run: tables of integers, and the strings they point into.

Every table is a dict of columns of equal length; a row has a number, its index in them.  Bytes and nanoseconds (since
the recording began) are integers; -1 stands for "none".  ``seq`` numbers the events of the run: every allocation, free,
change of category, operation and mark takes the next one, so each instant of the run has a number, and what is alive
*at* ``seq`` is what was alive right after that event.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

Table = dict[str, list[int]]

CATEGORIES = (
    "parameter", "optimizer", "gradient", "activation", "rematerialized", "communication", "temporary", "input", "user",
    "unattributed",
)  # fmt: skip
"""What bytes serve as, in the order in which they are shown.  *unattributed*: taken from the pool by other code."""
PHASES = ("forward", "backward", "recompute", "optimizer", "other")
"""When something was made: while a tape records, in its walk back, in a rerun or restoration, in an optimizer, else."""
KINDS = ("function", "layer", "checkpoint", "scope")
"""Kinds of calls: a function of the program's, a layer, a checkpointed call, a ``tg.memory.scope`` block."""
SLOT_KINDS = ("argument", "variable", "constant", "number", "made")
"""Where the bytes of a slot of a captured program come from."""
COST_GRAINS = 20
"""The cost of a work is a whole number of these parts of a byte moved."""
MARKS = ("step", "oom", "user", "recording stopped")

# Columns that point somewhere: to strings ("strings"), to a table's rows, or into one of the tuples above.
COLUMNS: dict[str, dict[str, str | None]] = {
    # what a line of the program says: from a column, in bytes of UTF-8, to another one, of a later line, perhaps (-1:
    # not known)
    "frames": {
        "file": "strings", "line": None, "function": "strings", "end_line": None, "column": None, "end_column": None,
    },
    # where something was made: the innermost frame, and the stack that called it (-1: not recorded)
    "stacks": {"frame": "frames", "parent": "stacks"},
    # a call during which operations ran.  line: of its definition; step: -1 outside steps; ordinal: number among
    # calls of one kind, name, file and line in its step and phase; first: the call that a rerun repeats (-1: no rerun);
    # site: what of the program makes it (-1: the library, or it is not known)
    "calls": {
        "kind": "kinds", "name": "strings", "file": "strings", "line": None, "parent": "calls", "step": "steps",
        "ordinal": None, "phase": "phases", "begin_seq": None, "end_seq": None, "begin_ns": None, "end_ns": None,
        "first": "calls", "site": "stacks",
    },
    # a training step: up to and with the event end_seq
    "steps": {
        "begin_seq": None, "end_seq": None, "begin_ns": None, "end_ns": None, "cpu_ns": None, "peak_bytes": None,
        "peak_seq": None, "reruns": None, "restored": None, "evictions": None, "offloads": None,
    },
    # bytes of one value, from begin to end (-1: alive at the end of the run).  bytes: as the pool counts them, in units
    # of 512; requested: of the array; category: at the beginning (see "changes"); holder: what kept it alive longest;
    # remat_of: the allocation that held the same value before; last_forward_seq, next_backward_seq: the last operation
    # of the forward pass that read it, and the first of the backward pass after that
    "allocs": {
        "begin_seq": None, "end_seq": None, "begin_ns": None, "end_ns": None, "bytes": None, "requested": None,
        "category": "categories", "op": "strings", "phase": "phases", "stack": "stacks", "call": "calls",
        "shape": "strings", "dtype": "strings", "step": "steps", "holder": "strings", "remat_of": "allocs",
        "last_forward_seq": None, "next_backward_seq": None, "device": "strings",
    },
    # an allocation serves as something else from here on
    "changes": {"seq": None, "alloc": "allocs", "category": "categories"},
    # an operation was applied (a lazy one is computed later, with others); those of optimizers are left out
    "ops": {"seq": None, "ns": None, "name": "strings", "phase": "phases", "call": "calls", "stack": "stacks"},
    # a captured program (tg.function), of which a replay was recorded, or of which one was planned (then bytes is 0).
    # bytes: of its arena, whose offsets are multiples of alignment; plain: the program without a budget (-1: itself)
    "programs": {"name": "strings", "plain": "programs", "bytes": None, "alignment": None, "device": "strings"},
    # the works of a call, in order.  again: 1: it was done before; cost: in twentieths of a byte moved; rules: 1: what
    # it writes may take the place of what it reads, 2: done though nobody reads what it writes, 4: done once and no
    # more (sums of these)
    "works": {
        "program": "programs", "op": "strings", "again": None, "phase": "phases", "cost": None, "file": "strings",
        "line": None, "rules": None,
    },
    # the allocations of a call.  begin, end: it is there from this work of the program to before that one; maker: the
    # work that writes it first; outside: 1: in memory of its own in each call, not in the arena
    "slots": {
        "program": "programs", "bytes": None, "kind": "slot_kinds", "category": "categories", "begin": None,
        "end": None, "maker": "works", "outside": None,
    },
    # works read (how: 0) and write (1) slots, take them for themselves (2), or a call gives them out (3, no work).
    # view: parts of slots that lie alike in them have the same
    "uses": {"work": "works", "slot": "slots", "how": None, "view": None},
    # a replay has ended.  alloc: of the arena
    "replays": {"seq": None, "ns": None, "program": "programs", "alloc": "allocs", "step": "steps"},
    # something worth a mark: the end of a step, the failure of an allocation, a note of the user's
    "marks": {"seq": None, "ns": None, "kind": "marks", "text": "strings"},
    # what the pool says: bytes in use and reserved, and of those in use what the ledger does not know of
    "samples": {"seq": None, "used_bytes": None, "reserved_bytes": None, "outside_bytes": None},
    # this rank, or another one, took part in a collective, or in a message between two; times as in "calls", -1 where
    # that did not happen.  group, number: all ranks that have these two the same took part in one; ranks: how many do;
    # bytes: of this rank's part; needed: the program last began to wait for it, and waited: how long it stood still
    # for it; under_way: 1: it went on while bytes moved
    "communication": {
        "rank": None, "group": "strings", "ranks": None, "number": None, "kind": "strings", "detail": "strings",
        "bytes": None, "file": "strings", "line": None, "entered_ns": None, "begun_ns": None, "done_ns": None,
        "needed_ns": None, "waited_ns": None, "under_way": None, "walk": "walks",
    },
    # a gradient walk that lies in no other
    "walks": {"rank": None, "begin_ns": None, "end_ns": None},
    # each rank of a job of several (none of a program alone): when it was recorded, and what it sent to others
    "ranks": {"rank": None, "peak_bytes": None, "begin_ns": None, "end_ns": None, "sent_bytes": None},
    # digests of gradients, if asked for
    "gradients": {"step": "steps", "name": "strings", "digest": "strings"},
}  # fmt: skip


def _empty() -> dict[str, Table]:
    return {name: {column: [] for column in columns} for name, columns in COLUMNS.items()}


@dataclass
class Run:
    """One recorded run.

    ``meta``: versions, program, arguments, device, outcome (see ``schema.json``).  ``peak``: ``bytes`` (the most alive
    at once), ``seq`` (the first event at which they were), ``step``, ``reserved_bytes`` (-1: not known).  ``checks``:
    ``events``, ``dropped`` (events of steps that were not kept), ``checked`` (comparisons with the pool),
    ``drift_bytes`` (the largest difference).  ``sources``: by file and line number the text of lines that appear.
    """

    meta: dict[str, Any]
    strings: list[str] = field(default_factory=list)
    tables: dict[str, Table] = field(default_factory=_empty)
    peak: dict[str, int] = field(default_factory=lambda: {"bytes": 0, "seq": -1, "step": -1, "reserved_bytes": -1})
    checks: dict[str, int] = field(default_factory=lambda: {"events": 0, "dropped": 0, "checked": 0, "drift_bytes": 0})
    sources: dict[str, dict[str, str]] = field(default_factory=dict)

    def __getattr__(self, name: str) -> Table:
        if name in COLUMNS:
            return self.__dict__["tables"][name]
        raise AttributeError(name)

    @property
    def finished(self) -> bool:
        """Whether the program came to its end, and well."""
        return self.meta["outcome"]["kind"] in ("finished", "exit") and self.meta["outcome"]["code"] == 0

    def count(self, table: str) -> int:
        """The number of rows of a table."""
        return len(next(iter(self.tables[table].values())))

    def text(self, index: int) -> str:
        """A string by its number; nothing for -1."""
        return "" if index < 0 else self.strings[index]

    def frame_of(self, stack: int) -> tuple[str, int, str]:
        """File, line and function of a stack's innermost frame; ("", 0, "") for -1."""
        if stack < 0:
            return "", 0, ""
        frame = self.stacks["frame"][stack]
        return (
            self.text(self.frames["file"][frame]),
            self.frames["line"][frame],
            self.text(self.frames["function"][frame]),
        )
