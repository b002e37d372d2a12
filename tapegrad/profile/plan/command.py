"""``tapegrad plan``: what to recompute so that a program fits a budget of memory or of time, and what if it changed."""

from __future__ import annotations

import json
import re
import shlex
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tapegrad.profile.report.writable import try_output
from tapegrad.sizes import SizeError, parse_bytes

if TYPE_CHECKING:
    from tapegrad.profile.plan.batch import Scaled
    from tapegrad.profile.plan.captured import CapturedStep
    from tapegrad.profile.plan.file import Plan
    from tapegrad.profile.plan.problem import Outcome, Problem
    from tapegrad.profile.plan.search import Search
    from tapegrad.tracing.run import Run

DOES_NOT_FIT = 3
"""The exit code where no plan fits."""


@click.command(
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 80},
    epilog="""\b
Examples:
  tapegrad plan train.sqlite --budget 4GiB
  tapegrad plan train.sqlite --max-slowdown 10% -o fast.json
  tapegrad plan train.sqlite --pareto
  tapegrad plan small.sqlite --batch 512 --and large.sqlite --budget 80%
  tapegrad plan train.sqlite --ranks 64 --link 25GB/s,5us
  tapegrad profile --plan plan.json train.py

The exit code is 3 if nothing fits, 2 if a run cannot be read.""",
)
@click.argument("run", type=click.Path())
@click.option("--budget", metavar="SIZE", help="Peak bytes: a size such as 4GiB, or 80% of the device.")
@click.option("--max-slowdown", metavar="P%", help="The lowest peak for at most so much more time a step.")
@click.option("--pareto", is_flag=True, help="Only list plans, from the shortest step to the lowest peak.")
@click.option("--batch", type=click.IntRange(min=1), metavar="N", help="What if the batch were N?")
@click.option("--batch-now", type=click.IntRange(min=1), metavar="B", help="The batch of RUN.  [default: found]")
@click.option("--and", "other", type=click.Path(), metavar="RUN2", help="A run of another batch, for exactness.")
@click.option("--ranks", type=click.IntRange(min=1), metavar="N", help="Predict a step on N processes, with --link.")
@click.option("--link", metavar="LINK", help="Between ranks: bandwidth and latency, such as 25GB/s,5us.")
@click.option("--node-link", metavar="LINK", help="Between ranks of one node, if they have another.")
@click.option("--ranks-per-node", type=click.IntRange(min=1), metavar="M", help="How many, with --node-link.")
# There were two solvers; scripts may still name one.
@click.option("--solver", type=click.Choice(["auto", "milp", "greedy"]), hidden=True, expose_value=False)
@click.option("--bandwidth", metavar="SIZE", help="Also offload calls' values, at so many bytes a second.")
@click.option("-o", "--output", type=click.Path(dir_okay=False, path_type=Path), help="[default: plan.json]")
@click.option("-f", "--force", is_flag=True, help="Overwrite the plan.")
@click.option("--json", "as_json", is_flag=True, help="Print the plan as JSON; write no file unless -o is given.")
def plan(run: str, **options: Any) -> None:
    """Choose what to recompute for a budget of memory or time.

    RUN is a file of tapegrad profile.  The plan says of which calls of functions and layers to keep the results alone;
    what a gradient reads besides is recomputed by the engine, and no function runs twice.  Peak and step time are
    predicted from the run.  Of a step that tg.function replays, the plan is the budget= of that function: what its
    program does again.

    With --ranks: what a step of the run, of one process or several, would take on N, each of which computes as much,
    and how much of its communication would hide behind computation.  Nothing is planned then.
    """
    from tapegrad.tracing.file import load

    _check(options)
    recorded = load(run)
    _note_incomplete(recorded)
    if options["ranks"] is not None:
        _answer_ranks(recorded, options)
        return
    if options["batch"] is not None:
        raise click.exceptions.Exit(_answer_batch(recorded, options))
    from tapegrad.profile.plan.captured import captured_step

    step = captured_step(recorded)
    if step is not None:
        raise click.exceptions.Exit(_answer_captured(step, options))
    raise click.exceptions.Exit(_Planning(recorded, run, options).run())


def _check(o: dict[str, Any]) -> None:
    memory = o["budget"] is not None or o["batch"] is not None
    if sum([memory, o["max_slowdown"] is not None, o["pareto"], o["ranks"] is not None]) != 1:
        raise click.UsageError("say what to plan for: one of --budget, --max-slowdown, --batch, --ranks and --pareto")
    if (o["other"] is not None or o["batch_now"] is not None) and o["batch"] is None:
        raise click.UsageError("--and and --batch-now go with --batch")
    if (o["link"] is None) != (o["ranks"] is None):
        raise click.UsageError("--ranks and --link go together: --ranks 64 --link 25GB/s,5us")
    if (o["node_link"] is None) != (o["ranks_per_node"] is None) or (o["node_link"] is not None and o["ranks"] is None):
        raise click.UsageError("--node-link and --ranks-per-node go together, and with --ranks")


def _note_incomplete(run: Run) -> None:
    from tapegrad.profile.report.escape import shown

    if not run.finished:
        how = shown(run.meta["outcome"]["kind"])
        click.echo(f"tapegrad: the run is incomplete ({how}): what is predicted holds only for what it did", err=True)


class _Planning:
    """One answer."""

    def __init__(self, run: Run, path: str, options: dict[str, Any]) -> None:
        self.run_file, self.path, self.options = run, path, options
        self.target = options["output"] or Path("plan.json")
        writes = not options["pareto"] and (not options["as_json"] or options["output"] is not None)
        if writes:
            try_output("-o", self.target)
        if writes and self.target.exists() and not options["force"]:
            raise click.UsageError(f"{self.target} exists; give another -o, or -f to overwrite it")
        self.writes = writes
        slowdown = options["max_slowdown"]
        self.slowdown = None if slowdown is None else _percent("--max-slowdown", slowdown)
        self.budget = None if options["budget"] is None else _budget_of(run, options["budget"])
        self.bandwidth = None if options["bandwidth"] is None else _size("--bandwidth", options["bandwidth"])

    def run(self) -> int:
        """Plan, write, print; the exit code."""
        from tapegrad.profile.plan.problem import Problem
        from tapegrad.profile.plan.search import Search

        problem = Problem(self.run_file, self.bandwidth)
        if not problem.candidates:
            return self._without_calls(problem)
        search = Search(problem)
        chosen = self._choose(search)
        if chosen is None and self.budget is not None:
            return self._without_calls(problem, search.least.peak_bytes)
        if chosen is None:
            self._refuse(search.least.peak_bytes, "everything that helps is checkpointed then")
            return DOES_NOT_FIT
        self._finish(self._plan(problem, search, chosen), problem, chosen)
        return 0

    def _choose(self, search: Search) -> Outcome | None:
        if self.budget is not None:
            return search.within(self.budget)
        if self.slowdown is not None:
            return search.shortest_peak(int(search.problem.step_ns * (1 + self.slowdown / 100)))
        return search.plain

    def _refuse(self, smallest: int, why: str) -> None:
        from tapegrad.sizes import format_bytes

        click.echo(f"tapegrad: {format_bytes(self.budget or 0)} is not reachable; no peak is below "
                   f"{format_bytes(smallest)} ({smallest} bytes): {why}", err=True)  # fmt: skip

    def _without_calls(self, problem: Problem, least_of_calls: int | None = None) -> int:
        """No call to choose, or none that helps enough: a budget for the whole program is what there is."""
        from tapegrad.profile.plan.file import Plan, Point
        from tapegrad.profile.plan.problem import held_bytes

        plain = problem.outcome(())
        if self.budget is None:
            click.echo("tapegrad: no calls of functions or layers keep values for a gradient, so there is nothing to "
                       "choose; --budget SIZE plans with tg.memory_budget for the whole program", err=True)  # fmt: skip
            return DOES_NOT_FIT
        held = held_bytes(self.run_file)
        least = held if least_of_calls is None else min(held, least_of_calls)
        if self.budget < held:
            self._refuse(least, "so much is alive besides what is kept for the gradient" if least == held
                         else "everything that helps is checkpointed then")  # fmt: skip
            return DOES_NOT_FIT
        fits = plain.peak_bytes <= self.budget
        predicted = Point(min(plain.peak_bytes, self.budget), problem.step_ns if fits else None, ())
        self._finish(Plan(self._made_from(), [], predicted, self.run_file.peak["bytes"], problem.step_ns, least,
                          None if fits else self.budget, self._asked(), "budget"), problem, plain)  # fmt: skip
        return 0

    def _plan(self, problem: Problem, search: Search, chosen: Outcome) -> Plan:
        from tapegrad.profile.plan.file import Plan, Point

        def point(o: Outcome) -> Point:
            return Point(o.peak_bytes, o.step_ns, tuple(problem.actions(o.chosen)))

        return Plan(
            self._made_from(), problem.actions(chosen.chosen), point(chosen), self.run_file.peak["bytes"],
            problem.step_ns, search.least.peak_bytes, None, self._asked(), "milp",
            [point(o) for o in search.pareto()],
        )  # fmt: skip

    def _made_from(self) -> dict[str, Any]:
        meta = self.run_file.meta
        return {
            "file": self.path, "program": meta["program"], "argv": meta["argv"], "module": meta.get("module"),
            "device": meta["device"]["name"], "tapegrad": meta["tapegrad"],
        }  # fmt: skip

    def _asked(self) -> dict[str, int | None]:
        thousandths = None if self.slowdown is None else round(self.slowdown * 10)
        return {"budget_bytes": self.budget, "max_slowdown_permille": thousandths}

    def _finish(self, made: Plan, problem: Problem, chosen: Outcome) -> None:
        from tapegrad.profile.plan import file
        from tapegrad.profile.plan.advice import advice
        from tapegrad.profile.plan.text import print_plan

        if self.writes:
            file.save(made, self.target)
        if self.options["as_json"]:
            click.echo(json.dumps(file.to_json(made), indent=1))
            return
        from rich.console import Console

        console = Console(highlight=False)
        print_plan(made, problem, chosen, console, str(self.target) if self.writes else None)
        if self.options["pareto"]:
            report = f"tapegrad report {shlex.quote(self.path)}"
            for card in advice(self.run_file).cards:
                if card.after_bytes < made.smallest_bytes:
                    console.print(
                        f"A change of the program takes less, {card.effect}: {report}", markup=False, soft_wrap=True
                    )


def _answer_batch(run: Run, options: dict[str, Any]) -> int:
    """Print what a batch would give; the exit code: 3 if it does not fit ``--budget``."""
    from tapegrad.profile.plan.batch import of_one, of_two
    from tapegrad.tracing.file import load

    other, now, wanted = options["other"], options["batch_now"], options["batch"]
    scaled = of_one(run, now) if other is None else of_two(run, load(other), now)
    limit = _device_bytes(run) if options["budget"] is None else _budget_of(run, options["budget"])
    nbytes, ns = scaled.bytes_at(wanted), scaled.ns_at(wanted)
    largest = None if limit is None else scaled.largest(limit)
    fits = limit is None or nbytes <= limit
    if options["as_json"]:
        click.echo(json.dumps({
            "batch_now": scaled.now, "batch": wanted, "measured_bytes": run.peak["bytes"], "peak_bytes": nbytes,
            "step_ns": ns, "step_bound": scaled.bound(wanted) or None, "limit_bytes": limit, "largest_batch": largest,
            "fits": fits, "assumed": scaled.assumed,
        }, indent=1))  # fmt: skip
    else:
        _print_batch(run, scaled, wanted, limit, largest)
    return 0 if fits or options["budget"] is None else DOES_NOT_FIT


def _print_batch(run: Run, scaled: Scaled, wanted: int, limit: int | None, largest: int | None) -> None:
    from rich.console import Console

    from tapegrad.profile.plan.batch import MOST
    from tapegrad.profile.plan.text import change_in_bytes
    from tapegrad.profile.report.table import Output
    from tapegrad.profile.report.units import ms
    from tapegrad.sizes import format_bytes

    out = Output(Console(highlight=False))
    bound = scaled.bound(wanted)
    step = f"step at {bound} {ms(scaled.ns_at(wanted))}" if bound else f"step {ms(scaled.ns_at(wanted))}"
    now, then = scaled.bytes_at(scaled.now), scaled.bytes_at(wanted)
    lines = [
        f"Batch {scaled.now} now: peak {format_bytes(run.peak['bytes'])}, step {ms(scaled.ns_at(scaled.now))}",
        f"Batch {wanted}: predicted peak {format_bytes(then)} ({change_in_bytes(then - now)}), {step}",
    ]
    if limit is not None and largest is not None:
        most = f"the largest batch is {largest:,}" if largest < MOST // 2 else "any batch fits"
        lines.append(
            f"{'Fits' if then <= limit else 'Does not fit'} {format_bytes(limit)}; "
            f"{most if largest else 'no batch does'}"
        )
    for text in lines:
        out.line(text)
    for line in textwrap.wrap(f"Assumed: {scaled.assumed}.", min(out.console.width, 120)):
        out.line(line, "dim")


def _answer_captured(step: CapturedStep, options: dict[str, Any]) -> int:
    """Print the ``budget=`` of a captured step's function; the exit code."""
    from rich.console import Console

    from tapegrad.profile.plan.captured import as_json, print_answer
    from tapegrad.sizes import format_bytes

    if options["output"] is not None:
        raise click.UsageError(f"-o: the plan of a captured step is the budget= of tg.function({step.name}); no file")
    budget = None if options["budget"] is None else _budget_of(step.run, options["budget"])
    pareto = [] if budget is not None else step.pareto()
    chosen = None if budget is None else step.within(budget)
    if options["max_slowdown"] is not None:
        most = _percent("--max-slowdown", options["max_slowdown"]) / 100
        chosen = min((c for c in pareto if c.extra <= most), key=lambda c: c.peak_bytes)
        pareto = []
    if budget is not None and chosen is None:
        least = step.least().peak_bytes
        click.echo(f"tapegrad: {format_bytes(budget)} is not reachable; the smallest peak is {format_bytes(least)} "
                   f"({least} bytes), {format_bytes(step.beside)} of it beside the arena of {step.name}",
                   err=True)  # fmt: skip
        return DOES_NOT_FIT
    if options["as_json"]:
        click.echo(json.dumps(as_json(step, chosen, pareto), indent=1))
    else:
        print_answer(step, chosen, pareto, Console(highlight=False))
    return 0


def _answer_ranks(run: Run, options: dict[str, Any]) -> None:
    """Print what a step would take on more ranks."""
    from rich.console import Console

    from tapegrad.profile.plan.ranks.network import Link, LinkError, network, parse_link
    from tapegrad.profile.plan.ranks.report import Answer, as_json, print_answer

    def link(option: str, text: str) -> Link:
        try:
            return parse_link(text)
        except LinkError as e:
            raise click.UsageError(f"{option}: {e}") from None

    far, per_node = link("--link", options["link"]), options["ranks_per_node"] or 1
    near = far if options["node_link"] is None else link("--node-link", options["node_link"])
    answer = Answer(run, options["ranks"], lambda n: network(n, far, near, per_node))
    if options["as_json"]:
        click.echo(json.dumps(as_json(answer), indent=1))
    else:
        print_answer(answer, Console(highlight=False))


def _budget_of(run: Run, text: str) -> int:
    """Bytes of a ``--budget``.  Raises click.UsageError."""
    if text.strip().endswith("%"):
        total = _device_bytes(run)
        if total is None:
            raise click.UsageError(f"--budget {text}: the run does not say how large the device is; give a size")
        return int(total * _percent("--budget", text) / 100)
    return _size("--budget", text)


def _size(option: str, text: str) -> int:
    """Bytes of an option such as ``512MiB``.  Raises click.UsageError."""
    try:
        return parse_bytes(text)
    except SizeError as e:
        raise click.UsageError(f"{option}: {e}") from None


def _device_bytes(run: Run) -> int | None:
    """The memory of the device of ``run``, or the limit it ran under."""
    for nbytes in (run.meta.get("limit_bytes"), run.meta["device"].get("total_bytes")):
        if isinstance(nbytes, int) and nbytes > 0:
            return nbytes
    return None


def _percent(option: str, text: str) -> float:
    """The number of an option such as ``10%``.  Raises click.UsageError."""
    match = re.fullmatch(r"\s*(\d{1,6}(?:\.\d{1,6})?)\s*%\s*", text)
    if match is None:
        number = text.strip() if re.fullmatch(r"\s*\d{1,6}(\.\d{1,6})?\s*", text) else "10"
        raise click.UsageError(f"{option} {text!r}: a share is a number and a percent sign, such as {number}%")
    return float(match[1])
