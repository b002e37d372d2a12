"""The journal's file: whose it is, and that what is written late is what was written at once."""

from __future__ import annotations

import errno
import mmap
import os
from pathlib import Path
from typing import Any

import pytest

from tapegrad.memory.ledger import spool as spools
from tapegrad.memory.ledger.contents import Contents
from tapegrad.memory.ledger.frames import FUNCTION, Call
from tapegrad.memory.ledger.journal import Journal
from tapegrad.memory.ledger.phase import FORWARD
from tapegrad.memory.ledger.spool import COLLECTIVE, ENDED, LAYOUTS, PROGRAM, REPEATS, REPLAY, Spool


def records(spool: Spool, tag: int) -> list[tuple[int, ...]]:
    """The numbers of the records of one kind that have the layout's length."""
    data, layout = Path(spool.path).read_bytes(), LAYOUTS[tag]
    found = []
    for at in range(len(data) - layout.size):
        if data[at] == tag and data[at + layout.size - 1] == spools.WHOLE:
            first, *numbers, _ = layout.unpack_from(data, at)
            found.append((first, *numbers))
    return found


@pytest.fixture
def spool(tmp_path: Path) -> Spool:
    return Spool(tmp_path / "journal", {"program": "test"})


def test_the_file_is_removed_by_the_process_that_made_it_alone(spool: Spool, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as inside:
        inside.setattr(os, "getpid", lambda: -1)
        spool.remove()
        assert Path(spool.path).exists()
        spool.detach()
        size = Path(spool.path).stat().st_size
        spool.put(REPLAY, 12345, 1, 2, 3)
    assert Path(spool.path).stat().st_size == size and not records(spool, REPLAY)
    spool.remove()
    assert not Path(spool.path).exists()


def test_after_a_problem_nothing_more_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Though there is room again: what was lost in between would be missing."""
    monkeypatch.setattr(spools, "WINDOW", mmap.ALLOCATIONGRANULARITY)
    spool = Spool(tmp_path / "journal", {})
    window = spools.WINDOW

    def fill() -> None:
        for number in range(window // LAYOUTS[REPLAY].size + 1):
            spool.put(REPLAY, number, 1, 2, 3)

    with monkeypatch.context() as inside:  # as in a forked child
        inside.setattr(os, "getpid", lambda: -1)
        fill()
    assert (spool.problem, spool.size, Path(spool.path).stat().st_size) == ("", window, window)
    with monkeypatch.context() as inside:
        inside.setattr(Spool, "_next_window", full)
        fill()
    assert spool.problem == "No space left on device"
    fill()
    assert (spool.problem, spool.size, Path(spool.path).stat().st_size) == ("No space left on device", window, window)


def full(spool: Spool, nbytes: int) -> Any:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_collectives_are_texts_with_their_numbers(spool: Spool) -> None:
    before = spool._text_count
    spool.collective({"op": "all_reduce", "bytes": 8}, True, 77)
    assert records(spool, COLLECTIVE) == [(COLLECTIVE, before, 1, 77)]
    assert b'{"op": "all_reduce", "bytes": 8}' in Path(spool.path).read_bytes()


def test_a_copy_tells_which_calls_are_repeated(spool: Spool) -> None:
    journal = Journal()
    calls = [Call(FUNCTION, "f", "f.py", number, -1, None) for number in range(4)]
    for call in calls:
        call.phase = FORWARD
    for number, first in ((2, 0), (3, 1)):
        calls[number].first = first
    journal.frames.calls = [*calls[:1], None, *calls[2:]]
    spool.copy(journal, {})
    assert records(spool, REPEATS) == [(REPEATS, 2, 0), (REPEATS, 3, 1)]
    assert [number for _, number, *_ in records(spool, ENDED)] == [0, 2, 3]


def test_a_copy_has_the_replays_and_each_program_once(spool: Spool) -> None:
    journal = Journal()
    journal.programs.append(Contents("step", "cpu", 512, 64, [], [], []))
    journal.parts.now.replays += [(3, 30, 0, -1), (5, 50, 0, 7)]
    spool.copy(journal, {})
    assert records(spool, REPLAY) == [(REPLAY, 3, 30, 0, -1), (REPLAY, 5, 50, 0, 7)]
    assert len(records(spool, PROGRAM)) == 1
