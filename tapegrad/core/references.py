"""References: does anything else refer to an object?  The only place that asks the interpreter for its counts of them.

Bytes are free as soon as nobody can ask for a value any more, and a recording drops what nobody can ask about.  Those
who can ask are handles: tensors in the user's variables and containers, and local names of operations under way.  No
handle tells of itself: a count kept by hand would cost a call wherever one is copied or goes, in every small operation,
and a handle that forgot to tell would cost truth, not time.  The interpreter keeps this very count anyway.  What is
known by other means (readers in a region, records that save a value) is subtracted from it by the caller.

A debugger that copies local names counts as a handle: then more is kept, and results are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from sys import getrefcount


def elsewhere(things: Iterable[object]) -> list[int]:
    """How often each thing is referred to besides by the collection ``things``, which names it once.

    A local name of the caller's counts.
    """
    return [getrefcount(thing) - _LISTED for thing in things]


def most(things: Iterable[object]) -> int:
    """The most that :func:`elsewhere` says of things, of which there are some: it takes no call of a function here."""
    return max(map(getrefcount, things)) - _MAPPED


count: Callable[[object], int] = getrefcount
"""How often the value of an attribute, or an item of a tuple, is referred to, which counts, and ``ASKED`` times more:
of single things it takes no call of a function here."""


class _Holder:
    def __init__(self) -> None:
        self.thing = object()


# Counted, not known: interpreters differ in what they count for a loop's variable or an argument.
_LISTED = _MAPPED = 0
(_LISTED,), _MAPPED = elsewhere([object()]), most([object()])
_holder = _Holder()
ASKED = count(_holder.thing) - 1
