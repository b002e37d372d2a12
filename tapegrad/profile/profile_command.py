"""``tapegrad profile``: run a program, record where the bytes of its tensors go, and say so."""

from __future__ import annotations

import os
import platform
import signal
import sys
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tapegrad.profile.report.writable import try_output

if TYPE_CHECKING:
    from tapegrad.profile.ranks.gathering import Ranks
    from tapegrad.profile.recorder.program import Outcome, Program
    from tapegrad.profile.recorder.progress import Beat, Board
    from tapegrad.profile.recorder.session import Session
    from tapegrad.tracing.log import Log
    from tapegrad.tracing.run import Run


@click.command(
    context_settings={
        "help_option_names": ["-h", "--help"], "ignore_unknown_options": True, "allow_interspersed_args": False,
        "max_content_width": 80,
    },
    epilog="""\b
Examples:
  tapegrad profile train.py --batch 64
  tapegrad profile -o before.sqlite --steps 5 --warmup 2 -m package.train
  tapegrad profile --plan plan.json train.py --batch 64
  tapegrad profile --gradients -q -o a.sqlite train.py   (for compare)
  mpiexec -n 4 tapegrad profile train.py

The exit code is that of the program.""",
)  # fmt: skip
@click.option("-m", "--module", is_flag=True, help="PROGRAM is a module, as for python -m.")
@click.option(
    "-o",
    "--output",
    type=click.Path(dir_okay=False, path_type=Path),
    help="The run file.  [default: tapegrad-PROGRAM.PID.sqlite]",
)
@click.option("-f", "--force", is_flag=True, help="Overwrite the run file when the program begins.")
@click.option("-q", "--quiet", is_flag=True, help="Print nothing but what the program prints.")
@click.option("--steps", type=click.IntRange(min=1), metavar="N", help="Record N steps only; the program goes on.")
@click.option("--warmup", type=click.IntRange(min=0), default=0, metavar="N", help="Leave out the first N steps.")
@click.option(
    "--stacks",
    type=click.Choice(["line", "full", "none"]),
    default="line",
    show_default=True,
    help="The line that made a value, the whole stack, or nothing.",
)
@click.option("--live", is_flag=True, help="Show what is alive while the program runs.")
@click.option("--plan", "plan_path", type=click.Path(dir_okay=False), metavar="FILE", help="Run with a plan.")
@click.option("--budget", metavar="SIZE", help="Run within this memory budget, such as 2GiB.")
@click.option("--limit", metavar="SIZE", help="CUDA: let the pool hold no more, as on a smaller card.")
@click.option("--device", metavar="NAME", help='Default device: "cpu", "cuda" or "cuda:1".')
@click.option("--gradients", is_flag=True, help="Record a digest of every gradient, for compare.")
@click.option("--check", is_flag=True, help="Compare the ledger with the allocator, all the time.")
@click.option("--html", "html", is_flag=True, help="Write the HTML report, too.")
@click.option("--no-source", is_flag=True, help="Keep the program's source lines out of the run file.")
@click.argument("program")
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
@click.pass_context
def profile(ctx: click.Context, program: str, args: tuple[str, ...], **options: Any) -> None:
    """Run a program and record where the bytes of its tensors go.

    PROGRAM and its ARGS are run as by python.  The run file, a SQLite database, is written while the program
    runs: `tapegrad report RUNFILE` shows it at any time, also after an exception, out of memory, Ctrl-C or SIGKILL.
    At the end the peak is printed: what was alive, by category and by line, and what would help.

    Started by mpiexec or srun, all ranks are recorded, and rank 0 writes one run file: what each of them held, sent
    and waited for, and all about the one with the highest peak.
    """
    from tapegrad.profile.ranks.gathering import several
    from tapegrad.profile.recorder.program import find

    if program.startswith("-") and not os.path.exists(program):
        raise click.NoSuchOption(program, ctx=ctx)
    target = find(program, args[1:] if args[:1] == ("--",) else args, options["module"])
    ranks = several()
    try:
        code = _Profiling(target, options, ranks).run()
    except click.ClickException as e:
        if ranks is None:
            raise
        ranks.end(e.exit_code, e.format_message())
    ctx.exit(code)


class _Profiling:
    """One run of one program; ``ranks``: those of the job, if it is one of several."""

    def __init__(self, program: Program, options: dict[str, Any], ranks: Ranks | None) -> None:
        from rich.console import Console

        from tapegrad.sizes import parse_bytes

        self.program, self.options, self.ranks = program, options, ranks
        self.rank = 0 if ranks is None else ranks.rank
        self.failed = False
        """Whether the run file could not be written."""
        self.budget = None if options["budget"] is None else parse_bytes(options["budget"])
        self.limit = None if options["limit"] is None else parse_bytes(options["limit"])
        self.path = options["output"] or Path(f"tapegrad-{program.title}.{os.getpid()}.sqlite")
        if self.rank:  # rank 0 writes and tells
            self.options = options | {"quiet": True, "live": False, "html": False}
            self.path = self.path.with_name(f"{self.path.name.removesuffix('.sqlite')}.rank{self.rank}.sqlite")
        self.target = self.path.absolute()  # the program may change its folder
        self._check_path()
        self.page = self.target.with_name(self.path.name.removesuffix(".sqlite") + ".html")
        if self.options["html"]:
            try_output("--html", self.page)
        # those of this command: the program may replace or close its own
        self.errors, self.out = Console(file=sys.stderr, highlight=False), Console(file=sys.stdout, highlight=False)

    def _check_path(self) -> None:
        try_output("-o", self.path)
        if self.path.exists() and not self.options["force"]:
            raise click.UsageError(f"{self.path} exists; give another -o, or -f to overwrite it")

    def run(self) -> int:
        """Run, save, tell; the exit code."""
        from tapegrad.profile.recorder import program as running
        from tapegrad.profile.recorder.facts import facts

        with ExitStack() as stack:
            self._prepare(stack)
            self.facts = facts(self.program)
            each = "" if self.ranks is None else f"{self.ranks.size} ranks, "
            self._say(f"{each}{self.facts['device']['name']} {self.facts['device']['model']} -> {self.path}")
            if self.ranks is not None:
                self.facts |= {"rank": self.rank, "ranks": self.ranks.size}
            self.session = self._session()
            shown = self._show()
            self._flush_on_signal(stack)
            if self.ranks is not None:
                self.ranks.begin()
            self.session.start()
            try:
                outcome = running.run(self.program)
            finally:
                self.session.stop()
                if mine := os.getpid() == self.facts["pid"]:  # else the program has forked: the run is the parent's
                    for what in shown:
                        what.stop()
        if self.ranks is not None and mine:
            return self._end_with(self.ranks, outcome)
        recorded = None
        if mine:
            recorded = self._recorded(running.outcome_of(outcome))
            self._save(recorded)
        if outcome.error is not None:
            if recorded is not None:
                self._explain(recorded)
            running.show_traceback(outcome.error)
        if recorded is not None:
            self._tell(recorded)
        return outcome.code or int(self.failed)

    def _end_with(self, ranks: Ranks, outcome: Outcome) -> int:
        """The exit code; on rank 0, the run of all ranks is saved and told."""
        from tapegrad.profile.ranks.merging import part_of
        from tapegrad.profile.recorder import program as running

        if outcome.error is not None:
            sys.excepthook = sys.__excepthook__  # that of tapegrad.distributed ends all ranks
            running.show_traceback(outcome.error)
        told = running.outcome_of(outcome)
        ranks.tell_of_end(told)
        session = self.session
        recorded = self._recorded(told)
        mine = part_of(self.rank, recorded, session.journal.began_ns, session.ended_ns, session.collectives.sent_bytes)
        if self.rank:
            status = ranks.delivered(mine, recorded)
            if status is None:
                self._save(recorded)
                ranks.end(outcome.code, f"rank 0 does not come; what rank {self.rank} has recorded is in {self.path}")
            self.session.log.remove()
            return status or 0
        everyones, status = ranks.gathered(mine, recorded)
        self._save(everyones)
        self._explain(everyones)
        self._tell(everyones)
        ranks.dismiss(status)
        if status:
            ranks.end(status, f"the job ends with status {status}: {everyones.meta['outcome']['message']}")
        return int(self.failed)

    def _prepare(self, stack: ExitStack) -> None:
        """Device, limit, budget and plan, in force until ``stack`` closes."""
        import tapegrad as tg
        from tapegrad.device import current_device

        if self.options["device"] is not None:
            tg.set_default_device(self.options["device"])
        if self.limit is not None:
            device = current_device()
            if device.kind != "cuda":
                raise click.UsageError("--limit is of CuPy's pool; on the CPU --budget keeps within a size")
            device.limit(self.limit)
            stack.callback(device.limit, None)
        if self.budget is not None:
            stack.enter_context(tg.memory_budget(self.budget))
        self.plan: dict[str, object] | None = None
        if self.options["plan_path"] is not None:
            from tapegrad.remat.plan import apply_plan, read_actions

            actions, budget = read_actions(self.options["plan_path"])
            self.plan = {"file": str(self.options["plan_path"]), "actions": len(actions)}
            self.applied = stack.enter_context(apply_plan(actions, budget))

    def _session(self) -> Session:
        from tapegrad.profile.recorder.progress import Lines
        from tapegrad.profile.recorder.session import Session

        o = self.options
        lines = None if o["quiet"] or (o["live"] and sys.stderr.isatty()) else Lines(self._say)
        return Session(
            stacks=o["stacks"], steps=o["steps"], warmup=o["warmup"], check=o["check"], gradients=o["gradients"],
            on_step=lines, log=self._log(), warn=self._say,
        )  # fmt: skip

    def _log(self) -> Log | None:
        """Return the run file, to which all that is recorded is written from the start; None: it is no file."""
        from tapegrad.tracing.log import Log

        if self.target.exists() and not self.target.is_file():  # a device, a pipe
            return None
        try:
            log = Log(self.target)
        except OSError as error:
            self._say(f"{self.target} cannot be written ({error.strerror or error}): of a program that is killed, "
                      "nothing will be known")  # fmt: skip
            return None
        log.set("meta", {**self._meta(), "stacks": self.options["stacks"]})
        log.set("recording", {"host": platform.node(), "created": time.time(), "source": not self.options["no_source"]})
        log.flush()
        return log

    def _show(self) -> list[Beat | Board]:
        from tapegrad.profile.recorder.progress import Beat, Board

        shown: list[Beat | Board] = [Beat(self.session, self.facts)]
        if self.options["live"] and sys.stderr.isatty() and not self.options["quiet"]:
            shown.append(Board(self.session, self.program.title))
        for what in shown:
            what.start()
        return shown

    def _flush_on_signal(self, stack: ExitStack) -> None:
        """Let SIGUSR2 write what was recorded last."""
        number = getattr(signal, "SIGUSR2", None)
        if number is not None:
            before = signal.signal(number, lambda *_: self.session.flush())
            stack.callback(signal.signal, number, before)

    def _meta(self) -> dict[str, Any]:
        return {**self.facts, "limit_bytes": self.limit or self.budget, "plan": self.plan}

    def _recorded(self, outcome: dict[str, object]) -> Run:
        return self.session.run(self._meta() | {"outcome": outcome}, source=not self.options["no_source"])

    def _save(self, recorded: Run) -> None:
        from tapegrad.tracing.file import save

        try:
            save(recorded, self.target)
        except OSError as e:
            self._print(f"{self.path} cannot be written: {e.strerror or e}")
            self.failed = True
            self._save_elsewhere(recorded)

    def _save_elsewhere(self, recorded: Run) -> None:
        """Save a long run in another folder, for it must not be lost."""
        import tempfile

        from tapegrad.tracing.file import save

        with suppress(OSError):
            rescued = Path(tempfile.mkdtemp(prefix="tapegrad-"), self.path.name)
            save(recorded, rescued)
            self._print(f"the run is in {rescued}")

    def _explain(self, recorded: Run) -> None:
        from tapegrad.profile.report.text import OOM, print_oom

        if recorded.meta["outcome"]["kind"] == "oom" and OOM in recorded.marks["kind"] and not self.options["quiet"]:
            print_oom(recorded, self.errors, path=str(self.path))

    def _tell(self, recorded: Run) -> None:
        if self.plan is not None:
            for (kind, name, file, line), number in self.applied.unmet()[:5]:
                self._say(f"the plan's call {number} of {kind} {name} ({file}:{line}) was not met")
        if (highest := self.session.measure.peak_bytes) > recorded.peak["bytes"]:
            self._say(f"a higher peak of {highest} bytes came when nothing was recorded; see --steps and --warmup")
        if self.options["html"]:
            from tapegrad.profile.report.outputs import write_html

            try:
                write_html(recorded, self.page, not self.options["no_source"])
                self._say(f"wrote {self.page}")
            except OSError as e:
                self._print(f"{self.page} cannot be written: {e.strerror or e}")
                self.failed = True
        if not self.options["quiet"]:
            try:
                self._summarize(recorded)
            except (BrokenPipeError, SystemExit):  # rich exits; a pipe that is closed early is no failure
                os.dup2(os.open(os.devnull, os.O_WRONLY), 1)

    def _summarize(self, recorded: Run) -> None:
        from tapegrad.profile.plan import file
        from tapegrad.profile.plan.advice import advice
        from tapegrad.profile.plan.text import verified
        from tapegrad.profile.report.text import print_summary

        out = self.out
        if out.file.closed:  # by the program
            return
        out.print()
        seq = recorded.peak["seq"] if recorded.peak["seq"] >= 0 else None
        helps = advice(recorded, str(self.path)) if self.plan is None else None
        print_summary(recorded, out, path=str(self.path), seq=seq, advice=helps)
        if self.plan is not None:
            for line in verified(recorded, file.load(self.options["plan_path"])):
                out.print(line, markup=False, soft_wrap=True)
        out.file.flush()

    def _say(self, text: str) -> None:
        if not self.options["quiet"]:
            self._print(text)

    def _print(self, text: str) -> None:
        with suppress(OSError, ValueError):  # the program may have closed stderr
            self.errors.print(f"tapegrad: {text}", markup=False, soft_wrap=True, style="dim")
