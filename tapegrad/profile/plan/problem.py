"""The question a plan answers: which calls to checkpoint, given what each saves at every moment and what it costs."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import median

from tapegrad.profile.plan.lives import Key, Life, Profile, peak, profile
from tapegrad.profile.plan.program_folder import relative_to_program
from tapegrad.profile.plan.step import BACKWARD, Change, Step, lives_with
from tapegrad.remat.plan import Action
from tapegrad.tracing import timeline
from tapegrad.tracing.names import CATEGORIES, KINDS
from tapegrad.tracing.run import Run

CallKey = tuple[str, str, str, int]
Numbered = tuple[CallKey, int]
"""A call: what it is a call of (kind, name, file, line), and its number in the step."""


@dataclass
class Candidate:
    """A numbered call that may be checkpointed, and what making its values again takes.

    A number means several calls where a step has several tapes, under each of which calls are counted anew.
    ``kept_bytes``: of its own values that are not kept then; ``within``: candidates that it lies in, by index.
    """

    key: CallKey
    ordinal: int
    changes: list[Change]
    kept_bytes: int
    works: int
    ns: int
    within: list[int]
    do: str = "checkpoint"


@dataclass(frozen=True)
class Outcome:
    """What a set of candidates is predicted to give; ``at``: when the peak is (see ``step``)."""

    chosen: tuple[int, ...]
    peak_bytes: int
    step_ns: int
    at: Key


class Problem:
    """Candidates of a representative step of ``run``; ``step`` is None if there is none.

    ``bandwidth``: bytes a second to another memory; calls whose values get there and back in less time than a rerun
    takes are offloaded.  Without it none is.
    """

    def __init__(self, run: Run, bandwidth: int | None = None) -> None:
        self.run = run
        self.step_ns = _step_ns(run)
        self.floor = _floor(run)
        number = representative(run)
        self.step = None if number is None else Step(run, number)
        self.candidates = [] if self.step is None else _candidates(run, self.step)
        _level(self.candidates, self.step_ns, _wall_ns(run, number))
        for c in self.candidates if bandwidth is not None else ():
            there_and_back = 2 * c.kept_bytes * 1_000_000_000 // bandwidth  # type: ignore[operator]
            if there_and_back < c.ns:
                c.do, c.ns = "offload", max(there_and_back, 1)
        self._known: dict[tuple[int, ...], Outcome] = {}
        self._names: dict[str, str] = {}

    def outcome(self, chosen: Iterable[int]) -> Outcome:
        """What checkpointing candidates, none within another, gives."""
        key = tuple(sorted(chosen))
        known = self._known.get(key)
        if known is None:
            nbytes, at = self._peak(key)
            known = self._known[key] = Outcome(key, nbytes, self.step_ns + sum(self.candidates[i].ns for i in key), at)
        return known

    def _peak(self, chosen: Iterable[int]) -> tuple[int, Key]:
        if self.step is None:
            return self.run.peak["bytes"], (self.run.peak["seq"], 0, 0)
        nbytes, at = peak(self._lives(chosen))
        return (nbytes, at) if nbytes >= self.floor[0] else (self.floor[0], (self.floor[1], 0, 0))

    def _lives(self, chosen: Iterable[int]) -> list[Life]:
        lives = {} if self.step is None else self.step.lives
        return lives_with(lives, [change for i in chosen for change in self.candidates[i].changes])

    def profile(self, chosen: Iterable[int]) -> Profile:
        """Bytes alive in the step when candidates, none within another, are checkpointed."""
        return profile(self._lives(chosen))

    def effect(self, candidate: int) -> Profile:
        """What one candidate adds to the bytes alive; several add the sum, but for what several of them read."""
        changes, lives = self.candidates[candidate].changes, {} if self.step is None else self.step.lives
        before = {i: lives[i] for change in changes for i in (*change.changed, *change.until)}
        gone = [life._replace(bytes=-life.bytes) for life in before.values()]
        return profile([*gone, *lives_with(before, changes)])

    def actions(self, chosen: Iterable[int]) -> list[Action]:
        """The chosen calls, by what they are calls of, in the order of the program."""
        groups: dict[tuple[str, CallKey], list[int]] = {}
        for i in sorted(chosen):
            c = self.candidates[i]
            groups.setdefault((c.do, c.key), []).append(c.ordinal)
        return [
            Action(do, *key, tuple(sorted(ordinals)), self._relative(key[2])) for (do, key), ordinals in groups.items()
        ]

    def _relative(self, file: str) -> str:
        if file not in self._names:
            self._names[file] = relative_to_program(self.run, file)
        return self._names[file]

    def calls_of(self, key: CallKey) -> int:
        """How many numbered calls of ``key`` the step has."""
        sites, ordinals = () if self.step is None else self.step.sites, self.run.calls["ordinal"]
        return len({ordinals[i] for i in sites if key_of(self.run, i) == key})


def key_of(run: Run, call: int) -> CallKey:
    """What a call is a call of."""
    c = run.calls
    return KINDS[c["kind"][call]], run.text(c["name"][call]), run.text(c["file"][call]), c["line"][call]


def representative(run: Run) -> int | None:
    """The step to plan for, that of the highest peak (the first only if it is alone); -1: the run is one step."""
    steps, o = run.steps, run.ops
    trained = []
    for i, (begin, end) in enumerate(zip(steps["begin_seq"], steps["end_seq"])):
        rows = range(bisect_left(o["seq"], begin), bisect_right(o["seq"], end))
        if any(o["phase"][row] == BACKWARD for row in rows):  # others are no training, or their events were not kept
            trained.append(i)
    if trained:
        return max(trained[1:] or trained, key=lambda i: (steps["peak_bytes"][i], i))
    return -1 if BACKWARD in o["phase"] else None


def held_bytes(run: Run) -> int:
    """The most alive at once of what no budget for the whole program can drop."""
    kept = CATEGORIES.index("activation")
    return max((total - by[kept] for _, _, total, by in timeline.totals(run)), default=0)


def _step_ns(run: Run) -> int:
    begin, end = run.steps["begin_ns"], run.steps["end_ns"]
    times = [e - b for b, e in zip(begin, end)]
    if times:
        return int(median(times[1:] or times))
    o = run.ops
    return o["ns"][-1] - o["ns"][0] if o["ns"] else 0


def _floor(run: Run) -> tuple[int, int]:
    """The most that is alive after the last step, where no plan acts, and when; (0, -1) if training goes on there."""
    if not run.count("steps"):
        return 0, -1
    begin = run.steps["end_seq"][-1] + 1
    o = run.ops
    after = range(bisect_left(o["seq"], begin), run.count("ops"))
    if not after or any(o["phase"][row] == BACKWARD for row in after):
        return 0, -1
    return timeline.peak(run, begin)


def _candidates(run: Run, step: Step) -> list[Candidate]:
    numbered: dict[Numbered, list[int]] = {}
    for call in step.sites:
        numbered.setdefault((key_of(run, call), run.calls["ordinal"][call]), []).append(call)
    candidates: list[Candidate] = []
    index: dict[int, int] = {}
    for (key, ordinal), calls in numbered.items():
        sites = [step.sites[call] for call in calls]
        nameless = key[1].endswith(">") and not key[1].endswith("<lambda>")
        if nameless or not all(site.pure for site in sites):
            continue
        changes = [step.change_of(site) for site in sites if site.back_begin >= 0]
        if kept_bytes := sum(change.kept_bytes for change in changes):
            within = sorted({index[j] for call in calls for j in step.above(call)[1:] if j in index}, reverse=True)
            index.update(dict.fromkeys(calls, len(candidates)))
            works, ns = sum(len(site.rows) for site in sites), sum(site.ns for site in sites)
            candidates.append(Candidate(key, ordinal, changes, kept_bytes, works, ns, within))
    return candidates


def _wall_ns(run: Run, number: int | None) -> int:
    """How long the representative step took."""
    if number is None or number < 0:
        return _step_ns(run)
    return run.steps["end_ns"][number] - run.steps["begin_ns"][number]


def _level(candidates: list[Candidate], step_ns: int, wall_ns: int) -> None:
    """Scale times to a median step, and give calls of one function that do the same work the same time.

    Differences come from what else the machine did, in the step that was examined and during each call.
    """
    alike: dict[tuple[CallKey, int, int], list[Candidate]] = {}
    for c in candidates:
        alike.setdefault((c.key, c.kept_bytes, c.works), []).append(c)
    for those in alike.values():
        ns = int(median(c.ns for c in those) * step_ns / max(wall_ns, 1))
        for c in those:
            c.ns = max(ns, 1)
