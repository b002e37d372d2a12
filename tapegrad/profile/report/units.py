"""Times, shares, counts and errors as people read them."""

from __future__ import annotations


def ms(ns: int, plain: bool = True) -> str:
    """``ns`` nanoseconds in ms: ``0.31 ms``, ``189 ms``; from ten seconds on in s, below 5 us in us (or µs)."""
    if not ns:
        return "0 ms"
    value = ns / 1e6
    if abs(ns) < 5000:
        return f"{ns / 1e3:.1f} {'us' if plain else 'µs'}" if abs(ns) >= 50 else f"{ns} ns"
    if abs(value) >= 1e4:
        return f"{value / 1e3:.1f} s"
    return f"{value:.0f} ms" if abs(value) >= 100 else f"{value:.1f} ms" if abs(value) >= 10 else f"{value:.2f} ms"


def percent(part: int, whole: int) -> str:
    """``part`` of ``whole``, with one decimal; nothing of nothing is nothing."""
    if not whole:
        return "-"
    share = 100 * part / whole
    return "< 0.1 %" if 0 < share < 0.05 else f"{share:.1f} %"


def counted(n: int, one: str, many: str = "") -> str:
    """``1 step``, ``2 steps``."""
    return f"{n:,} {one if n == 1 else many or one + 's'}"


def first_line(error: BaseException) -> str:
    """The first line of an error's message, or the name of its type."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
