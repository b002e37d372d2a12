"""A journal on disk, while its program runs: what is left of it if the program is killed.

The file is mapped into memory, so an event costs one store and no call of the system, and yet belongs to the file as
soon as it is stored: the kernel keeps the pages of a process that is killed.  The file holds records, each one a tag,
numbers, and a last byte that is only right if the record is whole.  Texts, values, places and calls are records of
their own, which others name by number, in the order of their coming.  Nothing in it is executed when it is read
(``profile/recorder/recovered.py``).
"""

from __future__ import annotations

import json
import mmap
import os
from collections.abc import Mapping, Sequence
from struct import Struct
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tapegrad.memory.ledger.journal import Call, Contents, End, Journal, Row

MAGIC = b"tapegrad journal 1\n"
WINDOW = 1 << 20
"""The file grows, and is mapped, by so many bytes, or a multiple of them."""
WHOLE = 0xA5
"""The last byte of a record."""

(
    OVER, TEXT, VALUE, PLACE, CALL, REPEATS, ENDED, ROW, END, CHANGE, HELD, OP, USED, REPLAY, PROGRAM, MARK, GRADIENT,
    WALK, READING, COUNTED, BEGAN, STEP, SAMPLE, COLLECTIVE, TIMES,
) = range(25)  # fmt: skip
"""Tags.  OVER: nothing follows yet."""
TURN = 255
"""Tag: the next record begins a window."""

_LAYOUTS = {
    TEXT: "q",  # length; then its bytes
    VALUE: "qqqq",  # shape, dtype, bytes, device
    PLACE: "qqqqqqq",  # NamedPlace
    CALL: "qqqqqqqqqqq",  # number, kind, name, file, line, parent, ordinal, phase, seq, ns, site
    REPEATS: "qq",  # call, call of the first run
    ENDED: "qqq",  # call, seq, ns
    ROW: "qqqqqqqqqqqB",  # number, Row, touches its call
    END: "qqqqqq",  # number, End
    CHANGE: "qqq",  # seq, number, category
    HELD: "qq",  # number, holder
    OP: "qqqqqqB",  # seq, ns, name, phase, call, place, touches its call
    USED: "qqq",  # seq, phase, count; then numbers
    REPLAY: "qqqq",  # seq, ns, program, allocation
    PROGRAM: "q",  # text
    MARK: "qqqqq",  # seq, ns, kind, text, peak
    GRADIENT: "qqq",  # seq, name, digest
    WALK: "qq",  # begin, end
    READING: "qqqq",  # number, holder, last in the forward pass, first in the backward pass
    COUNTED: "qq",  # events, of which dropped
    BEGAN: "qq",  # ns, CPU ns
    STEP: "qqqqqqqqq",  # seq, ns, kind, CPU ns, four counts, peak
    SAMPLE: "qqqqqq",  # seq, used, reserved, outside, comparisons, drift
    COLLECTIVE: "qqq",  # text, under way, entered
    TIMES: "qqqqq",  # number, begun, done, needed, waited
}
LAYOUTS = {tag: Struct(f"<B{layout}B") for tag, layout in _LAYOUTS.items()}
"""Of each tag the tag, the numbers, and ``WHOLE``; of TEXT and USED what follows lies before that last byte."""
_NUMBER = Struct("<q")


class Spool:
    """Writes the file at ``path``, beginning with ``head`` (JSON).  Raises OSError.

    Later errors are kept in :attr:`problem`, and the program goes on.  Whoever calls holds the ledger's lock.
    """

    def __init__(self, path: str | os.PathLike[str], head: Mapping[str, object]) -> None:
        self.path = os.fspath(path)
        self.problem = ""
        """Why nothing is written any more, if so."""
        self.size = 0
        """Bytes of the file."""
        self._texts: dict[str, int] = {}
        self._text_count = self._values = self._places = self._programs = 0
        self._pid = os.getpid()
        self._at = len(MAGIC)
        with open(self.path, "wb") as file:
            self._inode = os.fstat(file.fileno()).st_ino
        self._window = self._next_window(WINDOW)
        self._window[: len(MAGIC)] = MAGIC
        self.text(json.dumps(head))

    # The file --------------------------------------------------------------------------------------------------

    def put(self, tag: int, *numbers: int) -> None:
        """Write one record of fixed length."""
        layout = LAYOUTS[tag]
        at = self._at
        if at + layout.size >= len(self._window):
            at = self._turn(layout.size)
        layout.pack_into(self._window, at, tag, *numbers, WHOLE)
        self._at = at + layout.size

    def _turn(self, needed: int) -> int:
        """Begin a window that holds so many bytes, and a tag after them."""
        nbytes = -(-(needed + 1) // WINDOW) * WINDOW
        try:
            window = self._next_window(nbytes)
        except (OSError, ValueError) as error:
            self.problem = self.problem or getattr(error, "strerror", None) or str(error)
            window = mmap.mmap(-1, nbytes)  # leads nowhere
        self._window[self._at] = TURN
        self._window = window
        return 0

    def _next_window(self, nbytes: int) -> mmap.mmap:
        if self.problem or self._pid != os.getpid():  # a forked child's events are not the program's
            return mmap.mmap(-1, nbytes)
        # by its name, since the program may have closed all files and opened its own under their numbers
        with open(self.path, "r+b") as file:
            if os.fstat(file.fileno()).st_ino != self._inode:
                raise OSError(None, "it was replaced")
            if hasattr(os, "posix_fallocate"):  # a page for which the disk has no room would kill the program
                os.posix_fallocate(file.fileno(), self.size, nbytes)
            else:
                file.seek(self.size)
                file.write(bytes(nbytes))
                file.flush()
            window = mmap.mmap(file.fileno(), nbytes, offset=self.size)
        self.size += nbytes
        return window

    def detach(self) -> None:
        """In a forked child: the file is the parent's."""
        if self._pid != os.getpid():
            self._window, self._at = mmap.mmap(-1, WINDOW), 0

    def remove(self) -> None:
        """Remove the file, if it is this process's.  Raises OSError."""
        if self._pid == os.getpid():
            os.unlink(self.path)

    # What others name by number --------------------------------------------------------------------------------

    def text(self, text: str) -> int:
        """The number of a text."""
        number = self._texts.get(text)
        if number is None:
            number = self._texts[text] = self._new_text(text)
        return number

    def _new_text(self, text: str) -> int:
        data = text.encode("utf-8", "surrogatepass")
        self._put_long(TEXT, (len(data),), data)
        self._text_count += 1
        return self._text_count - 1

    def _put_long(self, tag: int, numbers: Sequence[int], data: bytes) -> None:
        layout = LAYOUTS[tag]
        at, size = self._at, layout.size + len(data)
        if at + size >= len(self._window):
            at = self._turn(size)
        end = at + size
        self._window[end - 1] = WHOLE
        self._window[at + layout.size - 1 : end - 1] = data
        # the head comes last: until then nothing is there
        self._window[at : at + layout.size - 1] = layout.pack(tag, *numbers, WHOLE)[:-1]
        self._at = end

    def _see_places(self, journal: Journal) -> None:
        for file, line, function, *rest in journal.named_places(self._places):
            self.put(PLACE, self.text(file), line, self.text(function), *rest)
            self._places += 1

    def _see_values(self, journal: Journal) -> None:
        for value in journal.values(self._values):
            self.put(VALUE, self.text(value.shape), self.text(value.dtype), value.nbytes, self.text(value.device))
            self._values += 1

    # Events ----------------------------------------------------------------------------------------------------

    def call(self, journal: Journal, number: int, call: Call) -> None:
        """A call begins."""
        if call.site >= self._places:
            self._see_places(journal)
        self.put(CALL, number, call.kind, self.text(call.name), self.text(call.file), call.line, call.parent,
                 call.ordinal, call.phase, call.begin_seq, call.begin_ns, call.site)  # fmt: skip

    def row(self, journal: Journal, number: int, row: Row, touches: bool) -> None:
        """An allocation."""
        seq, ns, nbytes, category, op, phase, place, call, value, again = row
        if len(journal.frames.places) > self._places:
            self._see_places(journal)
        if value >= self._values:
            self._see_values(journal)
        self.put(ROW, number, seq, ns, nbytes, self.text(category), self.text(op), phase, place, call, value, again,
                 touches)  # fmt: skip

    def end(self, number: int, end: End) -> None:
        """The end of one."""
        seq, ns, holder, read, following = end
        self.put(END, number, seq, ns, self.text(holder), read, following)

    def op(self, journal: Journal, row: tuple[int, int, str, int, int, int], touches: bool) -> None:
        """An operation."""
        seq, ns, name, phase, call, place = row
        if len(journal.frames.places) > self._places:
            self._see_places(journal)
        self.put(OP, seq, ns, self.text(name), phase, call, place, touches)

    def used(self, seq: int, phase: int, numbers: Sequence[int]) -> None:
        """Allocations are read."""
        if len(numbers) == 1:
            self._put_long(USED, (seq, phase, 1), _NUMBER.pack(numbers[0]))
        elif numbers:
            self._put_long(USED, (seq, phase, len(numbers)), b"".join(map(_NUMBER.pack, numbers)))

    def replay(self, journal: Journal, row: tuple[int, int, int, int]) -> None:
        """A replay."""
        for contents in journal.programs[self._programs :]:
            self._programs += 1
            self.put(PROGRAM, self._new_text(json.dumps(_plain(contents))))
        self.put(REPLAY, *row)

    def mark(self, row: tuple[int, int, int, str], peak: int) -> None:
        """A mark."""
        seq, ns, kind, text = row
        self.put(MARK, seq, ns, kind, self.text(text), peak)

    def collective(self, told: object, under_way: bool, entered: int) -> None:
        """A collective is entered."""
        self.put(COLLECTIVE, self._new_text(json.dumps(told)), under_way, entered)

    # The whole journal -----------------------------------------------------------------------------------------

    def copy(self, journal: Journal, alive: Mapping[int, End]) -> None:
        """All that ``journal`` knows; ``alive``: what is known of allocations that have not ended."""
        parts = journal.parts
        for mark in journal.marks:
            self.mark(mark, 0)
        for number, call in enumerate(journal.frames.calls):
            if call is not None:
                self.call(journal, number, call)
                self.put(ENDED, number, call.end_seq, call.end_ns)
        for number, call in enumerate(journal.frames.calls):
            if call is not None and call.first >= 0:
                self.put(REPEATS, number, call.first)
        for part in parts.all:
            for number, row in part.rows.items():
                self.row(journal, number, row, False)
            for number, end in part.ends.items():
                self.end(number, end)
            for seq, number, category in part.changes:
                self.put(CHANGE, seq, number, self.text(category))
            for op in part.ops:
                self.op(journal, op, False)
            for replay in part.replays:
                self.replay(journal, replay)
        for number, (_, _, holder, read, following) in alive.items():
            self.put(READING, number, self.text(holder), read, following)
        for seq, name, digest in journal.gradients or ():
            self.put(GRADIENT, seq, self.text(name), self.text(digest))
        for walk in journal.walks:
            self.put(WALK, *walk)
        self.put(COUNTED, parts.events + len(parts.now), parts.dropped)


def _plain(contents: Contents) -> dict[str, Any]:
    return {
        "name": contents.name, "device": contents.device, "nbytes": contents.nbytes, "alignment": contents.alignment,
        "works": contents.works, "slots": contents.slots, "results": contents.results,
        "plain": None if contents.plain is None else _plain(contents.plain),
    }  # fmt: skip
