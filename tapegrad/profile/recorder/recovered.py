"""From a journal on disk to a run: what a program had done when it was killed, or has done so far."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Callable, Iterator, Sequence
from struct import error as StructError
from typing import Any

from tapegrad.distributed.watching import Entered
from tapegrad.memory.ledger import spool as s
from tapegrad.memory.ledger.contents import Contents, Slot, Work
from tapegrad.memory.ledger.frames import Call, NamedPlace
from tapegrad.memory.ledger.journal import STEP, End, Journal, Value
from tapegrad.memory.ledger.phase import FORWARD
from tapegrad.profile.recorder.assemble import assemble
from tapegrad.profile.recorder.collectives import Event
from tapegrad.profile.recorder.session import Sample, StepMark, sources_of
from tapegrad.profile.runs.file import RunFileError, checked, to_json
from tapegrad.profile.runs.model import Run
from tapegrad.profile.top.processes import runs

_ALL = 1 << 62
_KILLED = "killed: it ended without writing its run file; this is what its journal holds"
_RUNNING = "it is still running; this is what its journal holds so far"


def recover(data: bytes, name: str) -> Run:
    """The run in the bytes of a journal called ``name``.  Raises RunFileError, with one line of what is wrong."""
    try:
        recovered = _Recovery(data)
        recovered.read()
        return checked(json.loads(json.dumps(to_json(recovered.run()))))
    except RunFileError as error:
        raise RunFileError(f"{name}: {error}") from None
    except (ValueError, LookupError, TypeError, StructError, OverflowError, RecursionError, AttributeError) as error:
        raise RunFileError(f"{name}: a damaged journal ({type(error).__name__}: {error})"[:200]) from None


class _Journal(Journal):
    """A journal whose values and places are known by their texts alone."""

    def __init__(self, stacks: str, gradients: bool) -> None:
        super().__init__(stacks, _ALL, gradients)
        self.known_values: list[Value] = []
        self.known_places: list[NamedPlace] = []

    def values(self, first: int = 0) -> list[Value]:
        return self.known_values

    def named_places(self, first: int = 0) -> list[NamedPlace]:
        return self.known_places


class _Recovery:
    def __init__(self, data: bytes) -> None:
        self._data = data
        self._texts: list[str] = []
        self._began_cpu_ns = 0
        self._began = False
        self._marks: list[StepMark] = []
        self._samples: list[Sample] = []
        self._events: list[Event] = []
        self._alive: dict[int, list[Any]] = {}  # by number: holder, last and next reading
        self._counted: tuple[int, int] | None = None
        self._checks = 0, 0

    def read(self) -> None:
        """Every record, up to the first that is not whole."""
        if not self._data.startswith(s.MAGIC):
            raise RunFileError("a journal of another version; use the tapegrad that wrote it")
        records = self._records()
        tag, numbers, _ = next(records, (s.OVER, (), ()))
        if tag != s.TEXT:
            raise RunFileError("a journal without a beginning")
        self._head = json.loads(self._texts[0])
        if not isinstance(self._head, dict) or not isinstance(self._head.get("meta"), dict):
            raise RunFileError("a journal without a head")
        self._journal = _Journal("line", self._head.get("gradients") is True)
        readers: dict[int, Callable[..., None]] = {
            s.VALUE: self._value, s.PLACE: self._place, s.CALL: self._call, s.REPEATS: self._repeats,
            s.ENDED: self._touch, s.ROW: self._row, s.END: self._end, s.CHANGE: self._change, s.HELD: self._held,
            s.OP: self._op, s.REPLAY: self._replay, s.PROGRAM: self._program, s.MARK: self._mark,
            s.GRADIENT: self._gradient, s.WALK: self._walk, s.READING: self._reading, s.COUNTED: self._count,
            s.BEGAN: self._begin, s.STEP: self._step, s.SAMPLE: self._sample, s.COLLECTIVE: self._collective,
            s.TIMES: self._times, s.TEXT: lambda *_: None,
        }  # fmt: skip
        for tag, numbers, listed in records:
            if tag == s.USED:
                self._used(numbers[0], numbers[1], listed)
            else:
                readers[tag](*numbers)

    def _records(self) -> Iterator[tuple[int, tuple[int, ...], Sequence[int]]]:
        """Tag, numbers, and those that follow them."""
        data, at = self._data, len(s.MAGIC)
        while at < len(data) and (tag := data[at]) != s.OVER:
            if tag == s.TURN:
                at = (at // s.WINDOW + 1) * s.WINDOW
                continue
            layout = s.LAYOUTS.get(tag)
            if layout is None:
                raise RunFileError(f"a damaged journal: byte {at} begins no record")
            end = at + layout.size
            if end > len(data):
                return
            numbers = layout.unpack_from(data, at)[1:-1]
            listed: Sequence[int] = ()
            if tag in (s.TEXT, s.USED):
                first, end = end - 1, end + (numbers[0] if tag == s.TEXT else 8 * numbers[2])
                if not first < end <= len(data):
                    return
                if data[end - 1] == s.WHOLE and tag == s.TEXT:
                    self._texts.append(data[first : end - 1].decode("utf-8", "surrogatepass"))
                elif tag == s.USED:
                    listed = memoryview(data[first : end - 1]).cast("q")
            if data[end - 1] != s.WHOLE:  # the program was killed while it wrote this
                return
            yield tag, numbers, listed
            at = end

    def run(self) -> Run:
        """The run.  Raises RunFileError."""
        if not self._began:
            raise RunFileError("a journal in which nothing was recorded yet")
        journal = self._journal
        if self._counted is not None:
            events, dropped = self._counted
            journal.parts.events += events
            journal.parts.dropped = dropped
        alive: dict[int, End] = {n: (-1, -1, held, read, then) for n, (held, read, then) in self._alive.items()}
        meta = {**self._head["meta"], "stacks": self._head.get("stacks", "line"), "outcome": _outcome(self._head)}
        run = assemble(journal, self._marks, self._samples, alive, self._began_cpu_ns, self._events, meta)
        run.checks["checked"], run.checks["drift_bytes"] = self._checks
        if self._head.get("source"):
            run.sources = sources_of(run)
        return run

    # Records ---------------------------------------------------------------------------------------------------

    def _begin(self, ns: int, cpu_ns: int) -> None:
        self._journal.began_ns, self._began_cpu_ns, self._began = ns, cpu_ns, True

    def _text(self, number: int) -> str:
        if number < 0:
            raise RunFileError("a damaged journal: a text without a number")
        return self._texts[number]

    def _value(self, shape: int, dtype: int, nbytes: int, device: int) -> None:
        self._journal.known_values.append(Value(self._text(shape), self._text(dtype), nbytes, self._text(device)))

    def _place(self, file: int, line: int, function: int, *rest: int) -> None:
        self._journal.known_places.append(NamedPlace(self._text(file), line, self._text(function), *rest))

    def _call(self, number: int, kind: int, name: int, file: int, line: int, parent: int, *numbers: int) -> None:
        call = Call(kind, self._text(name), self._text(file), line, parent, None)
        call.ordinal, call.phase, call.begin_seq, call.begin_ns, call.site = numbers
        call.end_seq, call.end_ns = call.begin_seq, call.begin_ns
        calls = self._journal.frames.calls
        if not len(calls) <= number < len(calls) + len(self._data):
            raise RunFileError("a damaged journal: calls out of order")
        calls += [None] * (number - len(calls))
        calls.append(call)

    def _known_call(self, number: int) -> Call | None:
        return self._journal.frames.calls[number] if number >= 0 else None

    def _repeats(self, number: int, first: int) -> None:
        if (call := self._known_call(number)) is not None:
            call.first = first

    def _touch(self, number: int, seq: int, ns: int) -> None:
        if (call := self._known_call(number)) is not None:
            call.end_seq, call.end_ns = seq, ns

    def _row(self, number: int, *rest: int) -> None:
        seq, ns, nbytes, category, op, phase, place, call, value, again, touches = rest
        row = seq, ns, nbytes, self._text(category), self._text(op), phase, place, call, value, again
        self._journal.parts.now.rows[number] = row
        self._alive[number] = ["", -1, -1]
        if touches:
            self._touch(call, seq, ns)

    def _end(self, number: int, seq: int, ns: int, holder: int, read: int, following: int) -> None:
        self._journal.parts.now.ends[number] = seq, ns, self._text(holder), read, following
        self._alive.pop(number, None)

    def _change(self, seq: int, number: int, category: int) -> None:
        self._journal.parts.now.changes.append((seq, number, self._text(category)))

    def _held(self, number: int, holder: int) -> None:
        self._alive[number][0] = self._text(holder)

    def _op(self, seq: int, ns: int, name: int, phase: int, call: int, place: int, touches: int) -> None:
        self._journal.parts.now.ops.append((seq, ns, self._text(name), phase, call, place))
        if touches:
            self._touch(call, seq, ns)

    def _used(self, seq: int, phase: int, numbers: Sequence[int]) -> None:
        for number in numbers:
            reading = self._alive[number]
            reading[1:] = (seq, -1) if phase == FORWARD else (reading[1], seq)

    def _replay(self, *row: int) -> None:
        seq, ns, program, alloc = row
        self._journal.parts.now.replays.append((seq, ns, program, alloc))

    def _program(self, text: int) -> None:
        self._journal.programs.append(_contents(json.loads(self._text(text))))

    def _mark(self, seq: int, ns: int, kind: int, text: int, peak: int) -> None:
        self._journal.marks.append((seq, ns, kind, self._text(text)))
        if kind == STEP:
            self._journal.parts.close(peak, 0)

    def _gradient(self, seq: int, name: int, digest: int) -> None:
        if self._journal.gradients is not None:
            self._journal.gradients.append((seq, self._text(name), self._text(digest)))

    def _walk(self, began: int, ended: int) -> None:
        self._journal.walks.append((began, ended))

    def _reading(self, number: int, holder: int, read: int, following: int) -> None:
        self._alive[number] = [self._text(holder), read, following]

    def _count(self, events: int, dropped: int) -> None:
        parts = self._journal.parts
        self._counted = events - parts.events - len(parts.now), dropped

    def _step(self, seq: int, ns: int, kind: int, cpu_ns: int, *rest: int) -> None:
        *counts, peak = rest
        self._marks.append(StepMark(seq, ns, kind, cpu_ns, tuple(counts), peak))

    def _sample(self, seq: int, used: int, reserved: int, outside: int, compared: int, drift: int) -> None:
        self._samples.append(Sample(seq, used, reserved, outside))
        self._checks = compared, drift

    def _collective(self, text: int, under_way: int, entered: int) -> None:
        group, kind, detail, number, ranks, nbytes, line = json.loads(self._text(text))
        what = Entered(group, kind, detail, number, range(ranks), nbytes, None if line is None else (line[0], line[1]))
        self._events.append(Event(what, bool(under_way), entered))

    def _times(self, number: int, *times: int) -> None:
        event = self._events[number]
        event.begun, event.done, event.needed, event.waited = times


def _contents(told: dict[str, Any]) -> Contents:
    works = [Work(*work) for work in told["works"]]
    slots = [Slot(*slot) for slot in told["slots"]]
    plain = None if told["plain"] is None else _contents(told["plain"])
    return Contents(
        told["name"], told["device"], told["nbytes"], told["alignment"], works, slots, told["results"], plain
    )


def _outcome(head: dict[str, Any]) -> dict[str, object]:
    pid = head["meta"].get("pid")
    here = head.get("host") == platform.node() and type(pid) is int and pid > 0 and os.name == "posix"
    running = here and runs(pid, head.get("created"))
    kind, code, message = ("running", 0, _RUNNING) if running else ("killed", 137, _KILLED)
    return {"kind": kind, "code": code, "message": message}
