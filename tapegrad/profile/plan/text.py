"""Plans as text: one plan, what it has predicted beside what a run with it has measured, and their words for calls."""

from __future__ import annotations

import shlex
from pathlib import PurePath
from statistics import median

from rich.console import Console

from tapegrad.profile.compare import steady_steps
from tapegrad.profile.plan.file import Plan, Point
from tapegrad.profile.plan.problem import CallKey, Outcome, Problem
from tapegrad.profile.report.rows import step_of
from tapegrad.profile.report.table import Column, Output
from tapegrad.profile.report.units import counted, ms
from tapegrad.remat.plan import Action
from tapegrad.sizes import format_bytes
from tapegrad.tracing.names import PHASES
from tapegrad.tracing.run import Run


class _Out(Output):
    """Output with marks for lists."""

    def __init__(self, console: Console) -> None:
        super().__init__(console)
        self.star, self.circle = ("*", "-") if self.plain else ("★", "○")


def print_plan(plan: Plan, problem: Problem, chosen: Outcome, console: Console, path: str | None) -> None:
    """Print what to do, what it gives, what else there is, and what to type next; ``path``: where the plan was put."""
    out = _Out(console)
    out.line(_headline(plan), "bold")
    out.line()
    if plan.memory_budget is not None:
        _budget(plan, problem, out)
    elif plan.actions:
        _actions(plan, problem, chosen, out)
    elif _chosen(plan):
        fits = plan.asked.get("budget_bytes") is not None
        out.line(f"{out.star} {'it fits as it is' if fits else 'nothing helps within that time'}: nothing to do")
    if plan.pareto:
        if _chosen(plan):
            out.line()
        _pareto(plan, out)
    if path is not None and (plan.actions or plan.memory_budget):
        out.line()
        _next(plan, out, path)
    out.line("As a tg.function it would take: print(tg.memory.predict_peak(step, ...))", "dim")


def _chosen(plan: Plan) -> bool:
    """Whether one of the plans was asked for, not only their list."""
    return any(value is not None for value in plan.asked.values())


def _headline(plan: Plan) -> str:
    budget, slowdown = plan.asked.get("budget_bytes"), plan.asked.get("max_slowdown_permille")
    parts = [f"Budget {format_bytes(budget)}"] if budget is not None else []
    if slowdown is not None:
        parts.append(f"At most {slowdown / 10:g} % slower")
    parts.append(f"measured now {format_bytes(plan.measured_bytes)}, {ms(plan.measured_ns)} a step")
    if plan.memory_budget is None:
        parts.append(f"smallest reachable {format_bytes(plan.smallest_bytes)}")
    text = " · ".join(parts)
    return text[0].upper() + text[1:]


def _actions(plan: Plan, problem: Problem, chosen: Outcome, out: _Out) -> None:
    for a in plan.actions:
        key = a.kind, a.name, a.file, a.line
        of = "" if len(a.ordinals) == problem.calls_of(key) else f" ({numbers(a.ordinals)})"
        out.line(f"{out.star} {a.do} {calls_of(problem, key, len(a.ordinals))}{of}   {file_line(a.file, a.line)}")
    p = plan.predicted
    before = problem.outcome(())
    out.line(f"  predicted peak  {format_bytes(p.peak_bytes)}   {change_in_bytes(p.peak_bytes - before.peak_bytes)}")
    if p.step_ns is not None:
        more = ms(p.step_ns - problem.step_ns)
        out.line(f"  predicted step  {ms(p.step_ns)}   {change_in_time(p.step_ns, problem.step_ns)} (+{more}: "
                 f"{_done(plan.actions)})")  # fmt: skip
    where, was = moment(problem, chosen), moment(problem, before)
    if where:
        out.line(f"  the peak {'stays at' if where == was else 'moves to'}  {where}")


def _done(actions: list[Action]) -> str:
    """``2 calls run again, 7 calls offloaded``."""
    parts = []
    for do, done in (("checkpoint", "run again"), ("offload", "offloaded")):
        count = sum(len(a.ordinals) for a in actions if a.do == do)
        parts += [f"{counted(count, 'call')} {done}"] if count else []
    return ", ".join(parts)


def _budget(plan: Plan, problem: Problem, out: _Out) -> None:
    out.line(f"{out.star} run the whole program under tg.memory_budget({plan.memory_budget})")
    out.line(f"  predicted peak  at most {format_bytes(plan.predicted.peak_bytes)}")
    out.line("  predicted step  not known: values are dropped and recomputed as memory asks for it")
    out.line("  Whether so little suffices, a run tells: if not, its BudgetError names the least that does.")
    out.line("  Checkpointing calls does not reach it." if problem.candidates else
             "  No calls of functions or layers keep values for a gradient: none to choose from.")  # fmt: skip


def _pareto(plan: Plan, out: _Out) -> None:
    rows = []
    for p in plan.pareto:
        mark = out.star if _chosen(plan) and _same(p, plan) else out.circle
        time = "-" if p.step_ns is None else ms(p.step_ns)
        more = "" if p.step_ns is None else change_in_time(p.step_ns, plan.measured_ns)
        rows.append([mark, format_bytes(p.peak_bytes), time, more, short(list(p.actions))])
    columns = [
        Column(""), Column("Peak", right=True), Column("Step", right=True), Column("", right=True),
        Column("Calls", flexible=True),
    ]  # fmt: skip
    out.table(columns, rows)


def _same(point: Point, plan: Plan) -> bool:
    return (point.peak_bytes, point.step_ns) == (plan.predicted.peak_bytes, plan.predicted.step_ns)


def _next(plan: Plan, out: _Out, path: str) -> None:
    module, argv = plan.run.get("module"), plan.run["argv"]
    program = ["-m", module, *argv[1:]] if isinstance(module, str) else argv
    out.line(f"Wrote {path}. Try it, and see what it gives:")
    out.line(f"  tapegrad profile --plan {shlex.join([path, *program])}", "bold")
    out.line(f'or in the program: with tg.memory.use_plan("{path}"):')


def verified(run: Run, plan: Plan) -> list[str]:
    """Lines that compare peak, and step time where it was predicted; both of steps but the first.

    None for a run that did not finish, for which the plan predicts nothing.
    """
    if not run.finished:
        return []
    predicted = plan.predicted
    lines = [
        f"plan: peak predicted {format_bytes(predicted.peak_bytes)}, measured {format_bytes(run.peak['bytes'])}"
        f" ({_change(run.peak['bytes'], predicted.peak_bytes)})"
    ]
    steps = steady_steps(run)
    if predicted.step_ns and steps:
        took = int(median(max(0, run.steps["end_ns"][i] - run.steps["begin_ns"][i]) for i in steps))
        lines.append(
            f"plan: step predicted {ms(predicted.step_ns)}, measured {ms(took)} ({_change(took, predicted.step_ns)}); "
            f"without it {ms(plan.measured_ns)} when it was made"
        )
    return lines


def _change(measured: int, predicted: int) -> str:
    if measured == predicted:
        return "equal"
    return f"{(measured - predicted) / max(1, predicted):+.1%}"


def name_of(kind: str, name: str) -> str:
    """A function as ``f()``, a layer as ``Block``."""
    return f"{name}()" if kind == "function" else name


def calls_of(problem: Problem, key: CallKey, count: int) -> str:
    """``Block, 3 of 6 calls``."""
    of = problem.calls_of(key)
    return f"{name_of(key[0], key[1])}, " + (
        f"all {of} calls" if 1 < count == of else f"{count} of {counted(of, 'call')}"
    )


def numbers(ordinals: tuple[int, ...]) -> str:
    """``0-3, 7``."""
    parts: list[list[int]] = []
    for n in ordinals:
        if parts and n == parts[-1][-1] + 1:
            parts[-1][1:] = [n]
        else:
            parts.append([n])
    return ", ".join("-".join(map(str, part)) for part in parts)


def file_line(file: str, line: int) -> str:
    """``model.py:36``."""
    return f"{PurePath(file.replace(chr(92), '/')).name}:{line}"


def change_in_bytes(nbytes: int) -> str:
    """``-1.42 GiB``."""
    return f"{'-' if nbytes < 0 else '+'}{format_bytes(abs(nbytes))}"


def change_in_time(after: int, before: int) -> str:
    """``+4.1 %``; in ms where there is nothing to compare with."""
    return f"{100 * (after - before) / before:+.1f} %" if before else f"+{ms(after)}"


def short(actions: list[Action]) -> str:
    """``Block x3, attend() x2 offloaded``; ``-`` for nothing."""
    marks = {"offload": " offloaded"}
    return ", ".join(f"{name_of(a.kind, a.name)} x{len(a.ordinals)}{marks.get(a.do, '')}" for a in actions) or "-"


def moment(problem: Problem, outcome: Outcome) -> str:
    """Where the peak is: ``step 2, backward, mlp() model.py:58``."""
    run, (seq, side, inner) = problem.run, outcome.at
    a = run.allocs
    wanted = inner if side else seq
    alloc = next((i for i, begin in enumerate(a["begin_seq"]) if begin == wanted), -1)
    parts = []
    step = step_of(run, seq)
    if step >= 0:
        parts.append(f"step {step}")
    if alloc >= 0:
        file, line, function = run.frame_of(a["stack"][alloc])
        parts.append("rerun" if side == -1 else PHASES[a["phase"][alloc]])
        if file:
            parts.append(f"{function}() {file_line(file, line)}")
    return ", ".join(parts)
