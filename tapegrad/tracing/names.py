"""Names that numbers in a run file stand for."""

from __future__ import annotations

CATEGORIES = (
    "parameter", "optimizer", "gradient", "activation", "rematerialized", "communication", "temporary", "input", "user",
    "unattributed",
)  # fmt: skip
"""Categories of bytes, in the order of reports.  *unattributed*: taken from the pool by other code."""
PHASES = ("forward", "backward", "recompute", "optimizer", "other")
"""When a value was computed: while a tape records, in a backward pass, in a recomputation, in an optimizer, else."""
KINDS = ("function", "layer", "checkpoint", "scope")
"""Kinds of calls: a function of the program, a layer, a checkpointed call, a ``tg.memory.scope`` block."""
SLOT_KINDS = ("argument", "variable", "constant", "number", "made")
"""Where the bytes of a slot of a captured program come from."""
COST_GRAINS = 20
"""The cost of a task is a whole number of these parts of a byte moved."""
MARKS = ("step", "oom", "user", "recording stopped")

NAMES = {"categories": CATEGORIES, "phases": PHASES, "kinds": KINDS, "slot_kinds": SLOT_KINDS, "mark_kinds": MARKS}
"""Tables of names, whose rows are the same in every run."""
