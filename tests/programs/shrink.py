"""A failing program made small: whatever can go, goes, as long as it fails in the same way."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from programs.program import Program, Step


def shrunk(program: Program, fails: Callable[[Program], bool], seconds: float = 20.0) -> Program:
    """The smallest program found in so much time for which ``fails`` is true, as it is for ``program``."""
    until = time.monotonic() + seconds
    again = True
    while again and time.monotonic() < until:
        again = False
        for candidate in _smaller(program):
            if any(len(set(s.results)) < len(s.results) for s in candidate.all_steps()):
                continue  # two results of a block are two values
            if time.monotonic() > until:
                break
            if fails(candidate):
                program, again = candidate, True
                break
    return program


def _smaller(program: Program) -> Iterator[Program]:
    """Programs with less in them, the boldest cuts first."""
    count = len(program.steps)
    for size in (count // 2, count // 4, 2, 1):
        if size:
            for start in range(0, count, size):
                yield from _without(program, set(range(start, min(count, start + size))))
    if program.handles:
        for i in range(len(program.handles)):
            yield program.with_(handles=program.handles[:i] + program.handles[i + 1 :])
    for i in range(len(program.targets) if len(program.targets) > 1 else 0):
        yield program.with_(targets=program.targets[:i] + program.targets[i + 1 :])
    for i, step in enumerate(program.steps):
        for changed in _smaller_step(step):
            yield program.with_(steps=(*program.steps[:i], *changed, *program.steps[i + 1 :]))
    if program.way != "tape":
        yield program.with_(way="tape", options=(*dict.fromkeys(program.options),))
    for name, value in program.options:
        if value is True:
            yield program.with_(options=tuple((n, False if n == name else v) for n, v in program.options))
    if program.lazy:
        yield program.with_(lazy=False)
    if program.lies != "rows":
        yield program.with_(lies="rows")
    for shape in ((2, 2), (4, 3)):
        if program.shape != shape and program.shape[0] * program.shape[1] > shape[0] * shape[1]:
            yield program.with_(shape=shape)
    if program.dtype != "float64":
        yield program.with_(dtype="float64")


def _without(program: Program, places: set[int]) -> Iterator[Program]:
    """Without these steps; who reads what they made reads something else."""
    gone = {name: step for i, step in enumerate(program.steps) if i in places for name in step.out}
    rest = tuple(step for i, step in enumerate(program.steps) if i not in places)
    if not rest:
        return
    for choice in (0, 1):
        names = {n: _instead(n, gone, choice) for n in gone}
        targets = tuple(dict.fromkeys(names.get(t, t) for t in program.targets))
        handles = tuple(dict.fromkeys(names.get(h, h) for h in program.handles))
        yield program.with_(
            steps=tuple(_renamed(step, names) for step in rest),
            targets=targets,
            handles=tuple(h for h in handles if h != "x"),
        )


def _instead(name: str, gone: dict[str, Step], choice: int) -> str:
    """What a name that has gone was made from."""
    while name in gone:
        args = [a for a in gone[name].args if not a.startswith("v")]
        if choice == 1 or not args:
            return "x"
        name = args[0]
    return name


def _renamed(step: Step, names: dict[str, str]) -> Step:
    if step.kind == "block":
        # A parameter binds its name in the body, so it keeps it there, whatever is passed.
        args = tuple(dict.fromkeys(names.get(a, a) for a in step.args))
        body = tuple(_renamed(s, names) for s in step.body)
        return Step("block", step.text, args, step.out, body, tuple(names.get(r, r) for r in step.results))
    body = tuple(_renamed(s, names) for s in step.body)
    return Step(step.kind, step.text, tuple(names.get(a, a) for a in step.args), step.out, body, step.results)


def _smaller_step(step: Step) -> Iterator[tuple[Step, ...]]:
    if step.kind == "block":
        if len(step.out) == len(step.results):
            renames = dict(zip(step.results, step.out, strict=True))
            if set(step.results) <= {n for s in step.body for n in s.all_out()}:
                yield tuple(_bound(s, renames) for s in step.body)
        for i in range(len(step.body)):
            gone = dict.fromkeys(step.body[i].out, step.body[i])
            for choice in (0, 1):
                names = {n: _instead(n, gone, choice) for n in gone}
                if any(r in gone for r in step.results) and len(step.body) == 1:
                    continue
                body = tuple(_renamed(s, names) for j, s in enumerate(step.body) if j != i)
                results = tuple(names.get(r, r) for r in step.results)
                if body and set(results) <= {n for s in body for n in s.all_out()}:
                    yield (Step("block", step.text, step.args, step.out, body, results),)
    for i, inner in enumerate(step.body):
        for changed in _smaller_step(inner):
            body = (*step.body[:i], *changed, *step.body[i + 1 :])
            yield (Step(step.kind, step.text, step.args, step.out, body, step.results),)
    if step.kind == "pause":
        yield step.body
    if step.kind == "target" and len(step.args) > 1:
        for i in range(len(step.args)):
            rest = step.args[:i] + step.args[i + 1 :]
            text = " + ".join(f"tg.sum(tg.sin({{{k}}}) * {{{k}}})" for k in range(len(rest)))
            yield (Step("target", text, rest, step.out),)
    if step.kind not in ("block", "pause", "target") and step.out and len(step.out) == 1 and step.args:
        simple = Step("elementwise", "tg.tanh({0})", tuple(a for a in step.args if not a.startswith("v"))[:1], step.out)
        if step.text != simple.text and simple.args:
            yield (simple,)


def _bound(step: Step, names: dict[str, str]) -> Step:
    """With other names for what it binds, too."""
    changed = _renamed(step, names)
    return Step(
        changed.kind, changed.text, changed.args, tuple(names.get(n, n) for n in changed.out),
        tuple(_bound(s, names) for s in step.body) if step.kind == "pause" else changed.body, changed.results,
    )  # fmt: skip
