"""Cards: what would help, each with the lines of the program to change, what to write there, and what that gives."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace

from tapegrad.profile.plan.captured import CapturedStep, Choice, replayed
from tapegrad.profile.plan.edits import Edit, Sites
from tapegrad.profile.plan.lives import peak
from tapegrad.profile.plan.problem import CallKey, Problem, held_bytes
from tapegrad.profile.plan.step import changed_lives, lives_with
from tapegrad.profile.plan.text import calls_of, change_in_time, name_of
from tapegrad.remat.schedules.online import ideal_states
from tapegrad.sizes import format_bytes
from tapegrad.tracing.run import Run

_MOST_CANDIDATES = 4000
_MOST_WORKS = 2000
_CARDS = 3
_WORTH = 0.9
"""A change is worth reading about if it leaves at most this share of the peak."""
_CHAIN = 16
"""Calls of one function in a step, from which on they may be a loop."""


@dataclass(frozen=True)
class Card:
    """One change: the peak of a step before and after it, and its time (-1: not known).

    ``bound``: "" (to the byte, which ``tapegrad profile --plan`` keeps), "about" (that; the code may free some values
    sooner or later) or "at most".
    """

    what: str
    before_bytes: int
    after_bytes: int
    before_ns: int = -1
    after_ns: int = -1
    edits: tuple[Edit, ...] = ()
    bound: str = ""

    @property
    def effect(self) -> str:
        """``109.60 MiB -> 31.80 MiB, step +27 %``."""
        bound = f"{self.bound} " if self.bound else ""
        text = f"{format_bytes(self.before_bytes)} -> {bound}{format_bytes(self.after_bytes)}"
        return text if self.after_ns < 0 else f"{text}, step {change_in_time(self.after_ns, self.before_ns)}"

    def to_json(self) -> dict[str, object]:
        """All of it; bytes and nanoseconds are integers."""
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
    for card in sorted(worth, key=lambda c: (c.after_bytes, c.after_ns)):
        # what takes more bytes is worth reading about if it takes less time
        if not any(c.after_bytes <= card.after_bytes and c.after_ns <= card.after_ns for c in cards):
            cards.append(card)
    if cards:
        return Advice(tuple(cards[:_CARDS]), (("other mixes", more),))
    least = held_bytes(run)
    budget = f"no call helps; a budget down to {format_bytes(least)}", "tapegrad profile --budget SIZE PROGRAM"
    return Advice((), (budget,) if least <= _WORTH * before else ())


def _changes(problem: Problem) -> Iterable[Card]:
    """Every kind of call that keeps much, recomputed; with its products saved; and as a loop."""
    assert problem.step is not None
    before, products = problem.outcome(()).peak_bytes, _products()
    for key in _largest(problem):
        chosen = tuple(i for i, c in enumerate(problem.candidates) if c.key == key and not _within(problem, i, key))
        sites = Sites(problem.run, problem.step, key, {problem.candidates[i].ordinal for i in chosen})
        outcome = problem.outcome(chosen)
        what = f"run {calls_of(problem, key, len(chosen))} again when differentiated"
        card = Card(what, before, outcome.peak_bytes, problem.step_ns, outcome.step_ns, bound="about")
        if edits := sites.wrapped("tg.recompute_grad(", ")"):
            yield replace(card, edits=tuple(edits))
            yield from _saving(problem, card, chosen, sites, products)
        if (loop := _loop(problem, card, chosen, sites)) is not None:
            yield loop


def _saving(
    problem: Problem, card: Card, chosen: tuple[int, ...], sites: Sites, products: frozenset[str]
) -> Iterable[Card]:
    """The same calls, of which the results of products stay."""
    edits = sites.wrapped("tg.recompute_grad(", ", policy=tg.policies.save_matmuls)")
    run, step = problem.run, problem.step
    if step is None or not edits or not edits[0].old:
        return
    op, ns, changes = run.allocs["op"], 0, []
    for i in chosen:
        c = problem.candidates[i]
        saved = [{a for a in change.changed if run.text(op[a]) in products} for change in c.changes]
        if not any(saved):
            return
        for change, stay in zip(c.changes, saved):
            # even what no rule reads is saved until the rerun
            kept = {a: [lives[0]._replace(end=lives[-1].end)] for a, lives in change.changed.items() if a in stay}
            changes.append(change._replace(changed={**change.changed, **kept}))
        ns += c.ns
    ns = round(ns * (1 - step.share_of(products, sites.calls)))
    nbytes = peak(lives_with(step.lives, changes))[0]
    yield replace(
        card, what=f"{card.what}, but for its products", after_bytes=max(nbytes, problem.floor[0]),
        after_ns=problem.step_ns + ns, edits=tuple(edits),
    )  # fmt: skip


def _loop(problem: Problem, card: Card, chosen: tuple[int, ...], sites: Sites) -> Card | None:
    """The same calls, if they are the steps of a loop; None if they are not.

    Of the states that stay when every step runs again, about 2 sqrt(n) do (Griewank and Walther, 2000), and each is
    whole: what a step hands on as it is, such as the value before, is held by two states.  Beside them there are the
    values that a step begins with and ends with.  Steps run twice more.
    """
    calls = problem.calls_of(sites.key)
    loop = sites.loop(calls) if calls >= _CHAIN and len(chosen) == calls else None
    if loop is None or problem.step is None:
        return None
    edit, values = loop
    outcome = problem.outcome(chosen)
    made = {a for i in sites.calls for a in problem.step.sites[i].made}
    lives = changed_lives(problem.step.lives, [change for i in chosen for change in problem.candidates[i].changes])
    alive = [lives[a][0].bytes for a in made if lives[a][0].begin <= outcome.at < lives[a][0].end]
    states = sum(alive)
    kept = max(alive, default=0) * (values * ideal_states(calls) + 2)
    what = (
        f"{calls} calls of {name_of(*sites.key[:2])} as one loop that keeps {ideal_states(calls)} states, for the loop"
    )
    return replace(card, what=what, after_bytes=outcome.peak_bytes - states + kept,
                   after_ns=2 * outcome.step_ns - problem.step_ns, edits=(edit,))  # fmt: skip


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
            step.measured, choice.peak_bytes, step.step_ns, round(step.step_ns * (1 + choice.extra)),
            (_budget_edit(step, choice.budget),), "at most",
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
