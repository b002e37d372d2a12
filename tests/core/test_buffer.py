"""Buffers: who hears of bytes, and what an error leaves."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tapegrad.core import buffer as _buffer
from tapegrad.core.aval import shaped
from tapegrad.core.buffer import Buffer
from tapegrad.core.node import leaf
from tapegrad.device import CPU

F32 = np.dtype("float32")


def node() -> Any:
    return leaf(shaped((4,), F32, CPU))


def test_bytes_that_were_there_before_anybody_counted_are_known() -> None:
    """Made at once, or by evaluation; a view has none, and what is gone is gone."""
    base, pending = Buffer(np.zeros(4), node()), Buffer(None, node(), (Buffer(np.zeros(4), node()),), (1, 1))

    def known() -> set[int]:
        return {id(b) for ref in list(_buffer.uncounted) if (b := ref()) is not None}

    view = Buffer(base.array[1:], node(), (base,))
    assert id(base) in known() and not {id(view), id(pending)} & known()
    pending.fill(np.zeros(4))
    assert id(pending) in known()
    count = len(_buffer.uncounted)
    del pending
    assert len(_buffer.uncounted) == count - 1


def test_bytes_that_came_after_the_buffer_was_made_are_told() -> None:
    later = Buffer(None, node())
    later.array = np.zeros(4)
    told: list[Buffer | None] = []
    try:
        _buffer.tell_of_bytes(lambda weak: told.append(weak()))
        later.told()
    finally:
        _buffer.tell_of_bytes(None)
    assert len(told) == 1 and told[0] is later


def test_bytes_that_nobody_counts_do_not_stay() -> None:
    base = Buffer(np.zeros(4), node())
    pending = Buffer(None, node(), (base,), (1, 1), ((4,), (0,)))

    def refuse(buffer: Buffer) -> None:
        raise MemoryError

    try:
        _buffer.tell_of_bytes(refuse)
        with pytest.raises(MemoryError):
            pending.fill(np.zeros(4))
    finally:
        _buffer.tell_of_bytes(None)
    assert pending.array is None
    assert (pending.keeps, pending.span, pending.loop) == ((base,), (1, 1), ((4,), (0,)))


def test_the_root_of_a_view_of_a_view_owns_the_bytes() -> None:
    base = Buffer(np.zeros(4), node())
    view = Buffer(base.array[1:], node(), (base,))
    assert Buffer(view.array[1:], node(), (view,)).root() is base and base.root() is base
