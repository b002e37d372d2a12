"""What an error about memory tells: who holds the bytes, by category and by line of the user's program."""

from __future__ import annotations

from tapegrad.memory.figures import Measure
from tapegrad.memory.ledger import LEDGER
from tapegrad.memory.sizes import format_bytes

_LINES = 5


def live_set() -> str:
    """The bytes alive, by category, and the lines (or else the primitives) that made most of them.

    Where nobody measures, a census is taken: lines are not known then.
    """
    census = Measure(detailed=False)
    LEDGER.open(census)
    try:
        parts = [f"{name} {format_bytes(n)}" for name, n in LEDGER.by("category").items()]
        what = "line" if any(":" in line for line in LEDGER.by("line")) else "primitive"
        most = [f"  {format_bytes(n):>12}  {made}" for made, n in list(LEDGER.by(what).items())[:_LINES]]
    finally:
        LEDGER.close(census)
    hint = [] if what == "line" else ["  (inside `with tg.measure():` the lines of the program are named)"]
    return "\n".join([f"Live: {', '.join(parts) or 'nothing'}.", *most, *hint])
