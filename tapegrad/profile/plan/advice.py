"""Cards: what would help, each with the lines of the program to change, what to write there, and what that gives."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import NamedTuple

from tapegrad.profile.plan.captured import CapturedStep, Choice, replayed
from tapegrad.profile.plan.edits import Body, Edit, Sites
from tapegrad.profile.plan.lives import Life, peak
from tapegrad.profile.plan.loops import Loop, loops_of
from tapegrad.profile.plan.problem import CallKey, Problem, held_bytes, key_of
from tapegrad.profile.plan.step import Change, Site, changed_lives, lives_with
from tapegrad.profile.plan.text import calls_of
from tapegrad.remat.schedules.online import ideal_states
from tapegrad.sizes import format_bytes
from tapegrad.tracing.run import Run

_MOST_CANDIDATES = 4000
_MOST_WORKS = 2000
_CARDS = 3
_WORTH = 0.9
"""A change is worth reading about if it leaves at most this share of the peak."""
_CHAIN = 16
"""Iterations from which on ``checkpointed_loop`` is worth its reruns."""
_SHORTEST = 3
"""Iterations from which on repeated lines are a loop."""


@dataclass(frozen=True)
class Card:
    """One change: the peak of a step before and after it, and its extra work, as a share of the step's.

    Work is the cost of operations by their shapes (``tracing/costs.py``), the optimizer's left out; where arrays are
    small, a checkpointed call takes time besides.
    ``bound``: "" (to the byte, which ``tapegrad profile --plan`` keeps), "about" (that; the code may free some values
    sooner or later) or "at most".
    """

    what: str
    before_bytes: int
    after_bytes: int
    work: float = 0.0
    edits: tuple[Edit, ...] = ()
    bound: str = ""

    @property
    def effect(self) -> str:
        """``109.60 MiB -> 31.80 MiB, work +27 %``."""
        bound = f"{self.bound} " if self.bound else ""
        after = f"{bound}{format_bytes(self.after_bytes)}"
        return f"{format_bytes(self.before_bytes)} -> {after}, work {100 * self.work:+.0f} %"

    def to_json(self) -> dict[str, object]:
        """All of it; bytes are integers."""
        return {**asdict(self), "effect": self.effect}


@dataclass(frozen=True)
class Advice:
    """What would help: changes of the program, the lowest peak first, and commands that tell more."""

    cards: tuple[Card, ...] = ()
    commands: tuple[tuple[str, str], ...] = ()

    def to_json(self) -> dict[str, object]:
        """All of it: ``cards`` and ``commands``."""
        return {"cards": [card.to_json() for card in self.cards], "commands": [list(pair) for pair in self.commands]}

    def without_source(self) -> Advice:
        """Without the text of the program."""
        hidden = (replace(c, edits=tuple(replace(e, old="", new="") for e in c.edits)) for c in self.cards)
        return replace(self, cards=tuple(hidden))


def advice(run: Run, path: str | os.PathLike[str] | None = None) -> Advice:
    """What would help; only what takes a tenth of the peak away.  ``path``: the file of the run, if there is one."""
    name = "RUN" if path is None else shlex.quote(os.fspath(path))
    more = f"tapegrad plan {name} --pareto"
    if (program := replayed(run)) >= 0:
        step = CapturedStep(run, run.count("steps") - 1, program)
        return Advice(tuple(_of_function(step)), ((f"less memory for {step.name}", more),))
    problem = Problem(run)
    if problem.step is None or len(problem.candidates) > _MOST_CANDIDATES:
        return Advice()
    before = problem.outcome(()).peak_bytes
    worth = [c for c in _changes(problem) if c.after_bytes <= _WORTH * before]
    cards: list[Card] = []
    for card in sorted(worth, key=lambda c: (c.after_bytes, c.work)):
        # what takes more bytes is worth reading about if it takes less work
        if not any(c.after_bytes <= card.after_bytes and c.work <= card.work for c in cards):
            cards.append(card)
    if cards:
        return Advice(tuple(cards[:_CARDS]), (("other mixes", more),))
    if held_bytes(run) > before // 2:
        return Advice()
    return Advice((), (("no call or loop helps; try a budget", f"tapegrad profile --budget {before // 2} PROGRAM"),))


class _Calls(NamedTuple):
    """Calls, or iterations of a loop, that a card takes together."""

    sites: list[Site]
    name: str
    wrapped: Callable[[str, str], list[Edit]]
    """The edits that put a text before and after what is called."""
    loop: Edit | None


def _changes(problem: Problem) -> Iterable[Card]:
    """Recompute the calls of a kind, or the iterations of a loop: all, all but the products, or as one loop."""
    assert (step := problem.step) is not None
    loops, products = loops_of(step, _SHORTEST), _products()
    for calls, loop in _groups(problem, loops):
        changes = [step.checkpoint_of(site) for site in calls.sites if site.back_begin >= 0]
        lives = changed_lives(step.lives, changes)
        nbytes, _ = peak(life for those in lives.values() for life in those)
        before, what = problem.outcome(()).peak_bytes, f"recompute {calls.name}"
        work = step.work_of(row for site in calls.sites for row in step.flow.rerun(site.rows))
        card = Card(what, before, max(nbytes, problem.floor[0]), work, bound="about")
        if edits := calls.wrapped("tg.recompute_grad(", ")"):
            yield replace(card, edits=tuple(edits))
            yield from _saving(problem, card, calls, changes, products)
        if loop is not None and calls.loop is not None and loop.repeats and len(loop.sites) >= _CHAIN:
            yield _looped(problem, card, calls.loop, loop, lives)


def _groups(problem: Problem, loops: list[Loop]) -> Iterable[tuple[_Calls, Loop | None]]:
    """The kinds of calls that keep most, each with the loop that consists of such calls; then the other loops."""
    assert (step := problem.step) is not None
    for key in _largest(problem):
        chosen = [i for i, c in enumerate(problem.candidates) if c.key == key and not _within(problem, i, key)]
        sites = Sites(problem.run, step, key, {problem.candidates[i].ordinal for i in chosen})
        loop = next((loop for loop in loops if len(loop.places) == 1 and set(loop.calls) <= set(sites.calls)), None)
        if loop is not None and len(loop.sites) != problem.calls_of(key):
            loop = None
        edit = None if loop is None else sites.loop(len(loop.sites))
        name = calls_of(problem, key, len(chosen))
        yield _Calls([step.sites[i] for i in sites.calls], name, sites.wrapped, edit), loop
    calls = {c.key for c in problem.candidates}
    for loop in loops:
        if len(loop.places) > 1 or not calls & {key_of(problem.run, call) for call in loop.calls}:
            body = Body(problem.run, step, loop)
            yield _Calls(loop.sites, body.name, body.wrapped, body.loop()), loop


def _saving(
    problem: Problem, card: Card, calls: _Calls, changes: list[Change], products: frozenset[str]
) -> Iterable[Card]:
    """The same calls, of which the results of products stay."""
    edits = calls.wrapped("tg.recompute_grad(", ", policy=tg.policies.save_matmuls)")
    run, step = problem.run, problem.step
    if step is None or not edits or not edits[0].old:
        return
    op, those = run.allocs["op"], []
    for site, change in zip((site for site in calls.sites if site.back_begin >= 0), changes, strict=True):
        saved = {a for a in change.changed if run.text(op[a]) in products}
        if not saved:
            return
        # also what no rule reads is saved until the call is differentiated
        end = max(step.flow.differentiated.get(row, site.back_begin) for row in site.rows), 1, 0
        kept = {
            a: [lives[0]._replace(end=max(lives[-1].end, end))] for a, lives in change.changed.items() if a in saved
        }
        those.append(change._replace(changed={**change.changed, **kept}))
    name = run.ops["name"]
    rows = [row for site in calls.sites for row in step.flow.rerun(site.rows)]
    work = step.work_of(row for row in rows if run.text(name[row]) not in products)
    nbytes = peak(lives_with(step.lives, those))[0]
    yield replace(
        card, what=f"{card.what}, but for its products", after_bytes=max(nbytes, problem.floor[0]),
        work=work, edits=tuple(edits),
    )  # fmt: skip


def _looped(problem: Problem, card: Card, edit: Edit, loop: Loop, lives: Mapping[int, list[Life]]) -> Card:
    """Run the iterations by ``checkpointed_loop``, which keeps some states and runs most iterations twice more.

    ``lives``: with every iteration recomputed.
    """
    assert (step := problem.step) is not None
    n, rows = len(loop.sites), [row for site in loop.sites for row in site.rows]
    return replace(
        card, what=f"{n} iterations as one loop, which keeps {ideal_states(n)} states",
        after_bytes=max(loop.peak(lives, step.flow), problem.floor[0]), work=step.work_of(rows) * loop.reruns / n,
        edits=(edit,),
    )  # fmt: skip


def _of_function(step: CapturedStep) -> Iterable[Card]:
    """The captured step with less room, by its planner: the least work for half of its peak, and the least peak."""
    if len(step.program.steps) > _MOST_WORKS:
        return
    found: list[Choice] = []
    for choice in (step.within(step.measured // 2), step.least()):
        if choice is not None and choice.peak_bytes <= _WORTH * step.measured and choice not in found:
            found.append(choice)
    for choice in found:
        yield Card(
            f"{step.name} within {format_bytes(choice.budget)}: {choice.again} of {len(step.program.steps)} tasks done "
            "again",
            step.measured, choice.peak_bytes, choice.extra, (_budget_edit(step, choice.budget),), "at most",
        )  # fmt: skip


def _budget_edit(step: CapturedStep, budget: int) -> Edit:
    """Where the program makes the function, if that is among the lines that are known; else where it calls it."""
    run, name = step.run, re.escape(step.name.rpartition(".")[2])
    decorated, called = re.compile(r"@[\w.]*\bfunction\b(\(.*\))?\s*$"), re.compile(rf"\bfunction\(\s*{name}\b[^()]*\)")
    for file, lines in run.sources.items():
        for number, text in lines.items():
            below = lines.get(str(int(number) + 1), "")
            if decorated.search(text) and re.search(rf"def {name}\b", below):
                new = re.sub(r"function\b.*", f"function(budget={budget})", text)
                return Edit(file, int(number), text.strip(), new.strip())
            if found := called.search(text):
                new = text.replace(found[0], f"{found[0][:-1]}, budget={budget})")
                return Edit(file, int(number), text.strip(), new.strip())
    allocs = [a for a, p in zip(run.replays["alloc"], run.replays["step"]) if a >= 0 and p == step.step]
    file, line, _ = run.frame_of(run.allocs["stack"][allocs[0]]) if allocs else ("", 0, "")
    return Edit(file, line, "", f"{step.name} = tg.function({step.name}, budget={budget})")


def _products() -> frozenset[str]:
    import tapegrad.ops  # noqa: F401  # declares them
    from tapegrad.core.primitive import REGISTRY, Barrier

    return frozenset(name for name, p in REGISTRY.items() if isinstance(p, Barrier) and p.flops is not None)


def _largest(problem: Problem) -> list[CallKey]:
    """The kinds of calls that keep most."""
    total: dict[CallKey, int] = {}
    for c in problem.candidates:
        total[c.key] = total.get(c.key, 0) + c.kept_bytes
    return sorted(total, key=lambda key: -total[key])[:8]


def _within(problem: Problem, candidate: int, key: CallKey) -> bool:
    """Whether a call lies in another one of the same thing."""
    return any(problem.candidates[j].key == key for j in problem.candidates[candidate].within)
