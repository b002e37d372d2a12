"""What an error about memory tells: who holds the bytes, by category and by line of the user's program."""

from __future__ import annotations

import gc
from collections.abc import Sequence

from tapegrad.errors import BudgetError
from tapegrad.sizes import format_bytes
from tapegrad.tracing.journal import OOM
from tapegrad.tracing.ledger import LEDGER
from tapegrad.tracing.metrics import Measure

_LINES = 5


def live_set() -> str:
    """The bytes alive, by category, and the lines (or else the primitives) that made most of them.

    Where nobody measures, a census is taken: lines are not known then.
    """
    LEDGER.note(OOM, "")
    census = Measure(detailed=False)
    LEDGER.open(census)
    try:
        parts = [f"{name} {format_bytes(n)}" for name, n in LEDGER.by("category").items()]
        what = "line" if any(":" in line for line in LEDGER.by("line")) else "primitive"
        most = [f"  {format_bytes(n):>12}  {made}" for made, n in list(LEDGER.by(what).items())[:_LINES]]
    finally:
        LEDGER.close(census)
    hint = (
        []
        if what == "line" or LEDGER.journal is not None
        else ["  (inside `with tg.measure():` the lines of the program are named)"]
    )
    return "\n".join([f"Live: {', '.join(parts) or 'nothing'}.", *most, *hint])


def budget_error(nbytes: int, names: Sequence[str], held: int, limit: int) -> BudgetError:
    """The error where ``nbytes`` are needed (0: a block is entered) and ``held`` bytes cannot be evicted."""
    needed = held + nbytes
    if nbytes:
        text = (
            f"{'+'.join(names)} needs {nbytes} bytes more, but {held} of the budget of {limit} ({format_bytes(limit)}) "
            f"are held and cannot be evicted; this operation can run with {needed} bytes ({format_bytes(needed)})"
        )
    else:
        text = (
            f"{held} bytes ({format_bytes(held)}) are alive and held where the block begins, more than its {limit} "
            f"({format_bytes(limit)})"
        )
    return BudgetError(f"memory_budget: {text}.\n{live_set()}", needed)


def collected() -> bool:
    """Let the garbage collector look for cycles that hold values; False if it has freed nothing."""
    before = LEDGER.live_bytes
    gc.collect()
    return LEDGER.live_bytes < before
