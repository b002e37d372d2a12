"""From a journal to a run: names become numbers of strings, steps get their bounds, calls their ends."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from typing import TYPE_CHECKING, Any

from tapegrad.memory.ledger.journal import STEP, End, Journal, Row
from tapegrad.memory.ledger.phase import FORWARD
from tapegrad.profile.runs.model import CATEGORIES, COST_GRAINS, SLOT_KINDS, Run
from tapegrad.profile.runs.timeline import peak, peaks

if TYPE_CHECKING:
    from tapegrad.memory.ledger.contents import Contents
    from tapegrad.profile.recorder.collectives import Event
    from tapegrad.profile.recorder.session import Sample, StepMark

_CATEGORY = {name: i for i, name in enumerate(CATEGORIES)}
_ALIVE: End = (-1, -1, "", -1, -1)


def assemble(
    journal: Journal, marks: list[StepMark], samples: list[Sample], alive: dict[int, End], began_cpu_ns: int,
    events: list[Event], meta: dict[str, Any],
) -> Run:  # fmt: skip
    """The run that ``journal`` has recorded so far; ``alive``: what is known of allocations that have not ended."""
    return _Assembly(journal, Run(meta), alive).run(marks, samples, began_cpu_ns, events)


class _Assembly:
    def __init__(self, journal: Journal, run: Run, alive: dict[int, End]) -> None:
        self._journal, self._run, self._alive = journal, run, alive
        self._strings: dict[str, int] = {}
        self._steps: list[tuple[int, int]] = []
        self._starts: list[int] = []
        self._call_numbers: dict[int, int] = {}

    def run(self, marks: list[StepMark], samples: list[Sample], began_cpu_ns: int, events: list[Event]) -> Run:
        """The whole run."""
        run, journal = self._run, self._journal
        counting = _of_highest_kind(marks)
        self._find_steps(counting)
        self._places()
        self._add_calls()
        numbers = self._allocations()
        self._changes_and_ops(numbers)
        self._programs(numbers)
        self._marks({m.seq for m in counting}, {m.seq for m in marks})
        for s in samples:
            self._row("samples", seq=s.seq, used_bytes=s.used, reserved_bytes=s.reserved, outside_bytes=s.outside)
        for seq, name, digest in journal.gradients or ():
            self._row("gradients", step=self._step_of(seq), name=self._text(name), digest=self._text(digest))
        self._step_rows(counting, marks, began_cpu_ns)
        self._communication(events)
        best, at = peak(run)
        reserved = max((s.reserved for s in samples), default=-1)
        run.peak = {"bytes": best, "seq": at, "step": self._step_of(at), "reserved_bytes": max(best, reserved)}
        parts = journal.parts
        run.checks = {"events": parts.events + len(parts.now), "dropped": parts.dropped, "checked": 0, "drift_bytes": 0}
        return run

    # Steps -----------------------------------------------------------------------------------------------------

    def _find_steps(self, marks: list[StepMark]) -> None:
        """Each step follows the one before; the first begins with what a tape records first, or the call it is in."""
        recorded = [op[0] for part in self._journal.parts.all for op in part.ops if op[3] == FORWARD]
        recorded += [c.begin_seq for c in self._journal.frames.calls if c is not None and c.phase == FORWARD]
        recorded.sort()
        after = 0
        for m in marks:
            at = bisect_left(recorded, after)
            begin = recorded[at] if not self._steps and at < len(recorded) else after
            self._steps.append((min(begin, m.seq), m.seq))
            after = m.seq + 1
        if (at := bisect_left(recorded, after)) < len(recorded):
            self._steps.append((recorded[at] if not self._steps else after, self._last_seq()))
        self._starts = [begin for begin, _ in self._steps]

    def _last_seq(self) -> int:
        part = self._journal.parts.now
        seqs = [row[0] for row in part.rows.values()] + [end[0] for end in part.ends.values()]
        return max([*seqs, *(op[0] for op in part.ops[-1:]), *(c[0] for c in part.changes[-1:]), 0])

    def _step_of(self, seq: int) -> int:
        at = bisect_left(self._starts, seq + 1) - 1
        return at if at >= 0 and seq <= self._steps[at][1] else -1

    def _step_rows(self, marks: list[StepMark], all_marks: list[StepMark], began_cpu_ns: int) -> None:
        run = self._run
        highest = peaks(run, self._steps)
        cpu = began_cpu_ns
        counts: tuple[int, ...] = (0,) * 4
        for i, (begin, end) in enumerate(self._steps):
            m = marks[i] if i < len(marks) else None
            now = counts if m is None else m.counts
            reruns, restored, evictions, offloads = [b - a for a, b in zip(counts, now)]
            begin_ns = self._ns_at(begin) if i == 0 or m is None else marks[i - 1].ns - self._journal.began_ns
            end_ns = self._ns_at(end) if m is None else m.ns - self._journal.began_ns
            peak_bytes, peak_seq = highest[i]
            if m is not None and i:  # more than is left of the events, where some were dropped
                peak_bytes = max([peak_bytes, *(o.peak_bytes for o in all_marks if begin <= o.seq <= end)])
            self._row(
                "steps", begin_seq=begin, end_seq=end, begin_ns=begin_ns, end_ns=max(begin_ns, end_ns),
                cpu_ns=0 if m is None else m.cpu_ns - cpu, peak_bytes=peak_bytes, peak_seq=max(0, peak_seq),
                reruns=reruns, restored=restored, evictions=evictions, offloads=offloads,
            )  # fmt: skip
            if m is not None:
                cpu, counts = m.cpu_ns, m.counts

    def _ns_at(self, seq: int) -> int:
        """About when the event ``seq`` was: the time of the last operation up to then."""
        ops = self._run.ops
        at = bisect_left(ops["seq"], seq + 1) - 1
        return ops["ns"][at] if at >= 0 else 0

    # Tables ----------------------------------------------------------------------------------------------------

    def _places(self) -> None:
        for p in self._journal.named_places():
            frame = self._row(
                "frames", file=self._text(p.file), line=p.line, function=self._text(p.function), end_line=p.end_line,
                column=p.column, end_column=p.end_column,
            )  # fmt: skip
            self._row("stacks", frame=frame, parent=p.parent)

    def _add_calls(self) -> None:
        calls = self._journal.frames.calls
        ends: dict[int, tuple[int, int]] = {}
        for i in range(len(calls) - 1, -1, -1):
            call = calls[i]
            if call is not None:
                mine = max(ends.get(i, (0, 0)), (call.end_seq, call.end_ns))
                ends[i] = mine
                if call.parent >= 0:
                    ends[call.parent] = max(ends.get(call.parent, (0, 0)), mine)
        began = self._journal.began_ns
        for i, call in enumerate(calls):
            if call is None:
                continue
            end_seq, end_ns = ends[i]
            self._call_numbers[i] = self._row(
                "calls", kind=call.kind, name=self._text(call.name), file=self._text(call.file), line=call.line,
                parent=self._call(call.parent), step=self._step_of(call.begin_seq), ordinal=call.ordinal,
                phase=call.phase, begin_seq=call.begin_seq, end_seq=end_seq, begin_ns=call.begin_ns - began,
                end_ns=end_ns - began, first=self._call(call.first), site=call.site,
            )  # fmt: skip

    def _call(self, number: int) -> int:
        return self._call_numbers.get(number, -1)

    def _allocations(self) -> dict[int, int]:
        rows: dict[int, Row] = {}
        ends: dict[int, End] = {}
        for part in self._journal.parts.all:
            rows.update(part.rows)
            ends.update(part.ends)
        numbers: dict[int, int] = {}
        began, alive = self._journal.began_ns, self._alive
        values = self._journal.values()
        texts = [(self._text(v.shape), self._text(v.dtype)) for v in values]
        for number in sorted(rows):
            seq, ns, nbytes, category, op, phase, stack, call, which, again = rows[number]
            value, (shape, dtype) = values[which], texts[which]
            end = ends.get(number) or alive.get(number, _ALIVE)
            numbers[number] = self._row(
                "allocs", begin_seq=seq, end_seq=end[0], begin_ns=max(0, ns - began),
                end_ns=end[1] - began if end[0] >= 0 else -1, bytes=nbytes, requested=value.nbytes,
                category=_CATEGORY[category], op=self._text(op), phase=phase, stack=stack, call=self._call(call),
                shape=shape, dtype=dtype, step=self._step_of(seq), holder=self._text(end[2]),
                remat_of=numbers.get(again, -1), last_forward_seq=end[3], next_backward_seq=end[4],
                device=self._text(value.device),
            )  # fmt: skip
        return numbers

    def _changes_and_ops(self, numbers: dict[int, int]) -> None:
        began = self._journal.began_ns
        for part in self._journal.parts.all:
            for seq, number, category in part.changes:
                if number in numbers:
                    self._row("changes", seq=seq, alloc=numbers[number], category=_CATEGORY[category])
            for seq, ns, name, phase, call, stack in part.ops:
                op = {"seq": seq, "ns": ns - began, "name": self._text(name), "phase": phase}
                self._row("ops", **op, call=self._call(call), stack=stack)

    def _programs(self, numbers: dict[int, int]) -> None:
        rows = [self._program(contents) for contents in self._journal.programs]
        for part in self._journal.parts.all:
            for seq, ns, program, alloc in part.replays:
                self._row(
                    "replays", seq=seq, ns=ns - self._journal.began_ns, program=rows[program],
                    alloc=numbers.get(alloc, -1), step=self._step_of(seq),
                )  # fmt: skip

    def _program(self, contents: Contents) -> int:
        """The row of a program, and those of what it consists of."""
        plain = -1 if contents.plain is None else self._program(contents.plain)
        program = self._row(
            "programs", name=self._text(contents.name), plain=plain, bytes=contents.nbytes,
            alignment=contents.alignment, device=self._text(contents.device),
        )  # fmt: skip
        first_work, first_slot = self._run.count("works"), self._run.count("slots")
        for slot in contents.slots:
            self._row(
                "slots", program=program, bytes=slot.nbytes, kind=SLOT_KINDS.index(slot.kind),
                category=_CATEGORY[slot.category], begin=slot.begin, end=slot.end,
                maker=-1 if slot.maker < 0 else first_work + slot.maker, outside=int(slot.outside),
            )  # fmt: skip
        for work in contents.works:
            file, line = (-1, 0) if work.place is None else (self._text(work.place[0]), work.place[1])
            row = self._row(
                "works", program=program, op=self._text(", ".join(work.names)), again=int(work.again), phase=work.phase,
                cost=round(work.cost * COST_GRAINS), file=file, line=line,
                rules=work.shares + 2 * work.effect + 4 * work.once,
            )  # fmt: skip
            for how, parts in enumerate((work.reads, work.writes, work.temporaries)):
                for number, view in parts:
                    self._row("uses", work=row, slot=first_slot + number, how=how, view=view)
        for number, view in contents.results:
            self._row("uses", work=-1, slot=first_slot + number, how=3, view=view)
        return program

    def _marks(self, counting: set[int], steps: set[int]) -> None:
        for seq, ns, kind, text in self._journal.marks:
            if kind != STEP or seq in counting or seq not in steps:
                self._row("marks", seq=seq, ns=ns - self._journal.began_ns, kind=kind, text=self._text(text))

    def _communication(self, events: list[Event]) -> None:
        rank, since = self._run.meta.get("rank", 0), self._since
        walks = self._run.walks
        for begin, end in sorted(self._journal.walks):
            self._row("walks", rank=rank, begin_ns=since(begin), end_ns=since(end))
        for e in events:
            entered = since(e.entered)
            walk = bisect_right(walks["begin_ns"], entered) - 1
            walk = walk if walk >= 0 and entered <= walks["end_ns"][walk] else -1
            what = e.what
            file, line = (-1, 0) if what.line is None else (self._text(what.line[0]), what.line[1])
            self._row(
                "communication", rank=rank, group=self._text(what.group), ranks=len(what.ranks),
                number=what.number, kind=self._text(what.kind), detail=self._text(what.detail), bytes=what.nbytes,
                file=file, line=line, entered_ns=entered, begun_ns=since(e.begun), done_ns=since(e.done),
                needed_ns=since(e.needed), waited_ns=e.waited, under_way=int(e.under_way), walk=walk,
            )  # fmt: skip

    def _since(self, ns: int) -> int:
        """In ns since the run's start; -1: never."""
        return max(0, ns - self._journal.began_ns) if ns >= 0 else -1

    def _text(self, text: str) -> int:
        number = self._strings.get(text)
        if number is None:
            number = self._strings[text] = len(self._run.strings)
            self._run.strings.append(text)
        return number

    def _row(self, table: str, **values: int) -> int:
        columns = self._run.tables[table]
        number = len(columns["seq" if "seq" in columns else next(iter(columns))])
        for name, value in values.items():
            columns[name].append(value)
        return number


def _of_highest_kind(marks: list[StepMark]) -> list[StepMark]:
    """Marks of the highest kind: see ``memory/steps``."""
    highest = max((m.kind for m in marks), default=0)
    return [m for m in marks if m.kind == highest]
