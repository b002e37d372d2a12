"""``tapegrad demo``: a small transformer trained in several ways, and what each way costs."""

from __future__ import annotations

import os
import shlex
import statistics
import time
from collections.abc import Sequence
from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Self

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from tapegrad.errors import TapegradError
from tapegrad.profile.report.table import Column, Output
from tapegrad.profile.report.units import iec

if TYPE_CHECKING:
    from tapegrad.profile.demo_capture import Training
    from tapegrad.profile.demo_train import Demo, Run

# Each way to train: its name, and what is under recompute_grad.
TITLES = {"plain": "plain", "blocks": "blocks under recompute_grad", "attention": "attention under recompute_grad"}
UNDER = {"plain": "nothing", "blocks": "every block", "attention": "attention"}


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("folder", metavar="[DIR]", required=False, type=click.Path(file_okay=False, path_type=Path))
@click.option("--quick", is_flag=True, help="Fewer and smaller steps: under a minute on two cores.")
@click.option("--png", type=click.Path(dir_okay=False, path_type=Path), help="Draw memory over one step to this file.")
@click.option("--steps", type=click.IntRange(min=1), help="Steps of plain training.")
@click.option("--batch", type=click.IntRange(min=1), help="Sequences in a batch.")
@click.option("--seed", type=int, default=0, show_default=True, help="Of the weights and the batches.")
@click.option("--threads", type=click.IntRange(min=1), help="Threads of the fused kernels; the default is all cores.")
def demo(
    folder: Path | None,
    quick: bool,
    png: Path | None,
    steps: int | None,
    batch: int | None,
    seed: int,
    threads: int | None,
) -> None:
    """Train a small transformer plainly, under recompute_grad, and captured by tg.function.

    A character-level transformer learns from the standard library's source.  The same steps are done three ways:
    plainly, with every block under recompute_grad, and with attention alone under it.  Then the plain step is run
    eagerly and captured by tg.function, side by side; also with half the memory for what it makes, if that can be
    kept.  The exit code is 1 unless all give the same gradients, losses and variables, bit for bit.

    With DIR, a script that trains such a model is written to DIR/train.py, for you to profile and change.

    \b
    Examples:
      tapegrad demo --quick
      tapegrad demo --quick --png memory.png trial
    """
    try:
        script = None if folder is None else write_script(folder)
        same = _run(quick, png, steps, batch, seed, threads)
    except BrokenPipeError:
        raise  # the reader has closed the pipe: click handles that
    except (TapegradError, OSError) as error:
        raise click.ClickException(str(error)) from error
    if script is not None:
        _print_next(script)
    if not same:
        raise click.exceptions.Exit(1)


def write_script(folder: Path) -> Path:
    """Write ``train.py`` to ``folder``, which is made if need be; where it lies.

    Raises OSError, also if there is another file of that name.
    """
    text = resources.files("tapegrad.profile").joinpath("demo_script.py").read_text(encoding="utf-8")
    folder.mkdir(parents=True, exist_ok=True)
    script = folder / "train.py"
    if script.exists() and script.read_text(encoding="utf-8", errors="replace") != text:
        raise FileExistsError(f"{script} is another file; move it away or name another folder")
    script.write_text(text, encoding="utf-8")
    return script


def _print_next(script: Path) -> None:
    """Print the commands to try next."""
    out = Console(highlight=False)
    out.print(f"\nwrote {script}; where do its bytes go, and what would help?", markup=False, soft_wrap=True)
    for command in (
        f"cd {shlex.quote(str(script.parent))}",
        "tapegrad profile train.py",
        "tapegrad report tapegrad-train.*.json.gz --html",
        "tapegrad plan tapegrad-train.*.json.gz --budget 64MiB",
        "tapegrad profile --warmup 2 train.py --captured",
    ):
        out.print(f"  {command}", markup=False, soft_wrap=True)


def _run(quick: bool, png: Path | None, steps: int | None, batch: int | None, seed: int, threads: int | None) -> bool:
    # Imported here, so that `tapegrad demo --help` is quick.
    from tapegrad.device.threads import set_num_threads
    from tapegrad.profile import demo_capture, demo_plot, demo_text, demo_train
    from tapegrad.profile.demo_model import CHECKPOINTS
    from tapegrad.profile.export.png import require_matplotlib
    from tapegrad.profile.report.writable import problem_of

    begin = time.perf_counter()
    if png is not None:
        require_matplotlib("png")  # not after minutes of training
        if (problem := problem_of("--png", png)) is not None:
            raise OSError(problem)
    if threads is not None:
        set_num_threads(threads)
    settings = demo_train.QUICK if quick else demo_train.FULL
    settings = replace(settings, seed=seed, steps=steps or settings.steps, batch=batch or settings.batch)
    settings = replace(settings, compared=min(settings.compared, settings.steps))
    out = Console(highlight=False)
    text = demo_text.load()
    work = demo_train.Demo(text, settings)
    _print_heading(out, work)
    runs = []
    for checkpoint in CHECKPOINTS:
        count = settings.steps if checkpoint == "plain" else settings.compared
        with _reporter(out, TITLES[checkpoint], count) as report:
            runs.append(work.train(checkpoint, count, report))
        if checkpoint == "plain":
            _print_outcome(out, work, runs[0])
    with _reporter(out, "timing all three in turns", settings.rounds) as report:
        work.race(runs, report)
    same = demo_train.identical(runs, settings.compared)
    _print_costs(out, runs, same, settings.compared)
    if png is not None:
        demo_plot.plot(runs, [TITLES[r.checkpoint] for r in runs], png)
        out.print(f"memory over one step: {png}", markup=False, soft_wrap=True)
    if os.environ.get("TAPEGRAD_FUNCTION") == "0":
        out.print("captured steps: turned off by TAPEGRAD_FUNCTION=0")
    else:
        with _reporter(out, "eager and captured in turns", demo_capture.UNTIMED + settings.compared) as report:
            trainings = demo_capture.compare(text, settings, report)
        captured_same = demo_capture.identical(trainings)
        _print_captured(out, trainings, captured_same)
        same = same and captured_same
    out.print(f"done in {time.perf_counter() - begin:.0f} s")
    return same


def _print_heading(out: Console, work: Demo) -> None:
    s = work.settings
    out.print(
        f"{work.model.count_params():,} parameters: {s.blocks} blocks, width {s.width}, {s.heads} heads, "
        f"context {s.context}; batches of {s.batch}",
        soft_wrap=True,
    )
    characters = f"{work.text.train.size:,} characters, {len(work.text.vocabulary)} different ones"
    out.print(f"{characters}, of {work.text.source}", markup=False, soft_wrap=True)


def recent(losses: Sequence[float]) -> float:
    """The mean of the last ten, since batches differ more than steps."""
    return statistics.fmean(losses[-10:])


def _print_outcome(out: Console, work: Demo, run: Run) -> None:
    """What the plain run has learned."""
    out.print(
        f"loss {run.losses[0]:.3f} -> {recent(run.losses):.3f} nats per character, "
        f"{work.held_out_loss():.3f} on text held out",
        soft_wrap=True,
    )


def _print_costs(out: Console, runs: list[Run], same: bool, compared: int) -> None:
    titles = ("peak", "activations", "remade", "median step", "reruns")
    columns = [Column("under recompute_grad"), *(Column(title, right=True) for title in titles)]
    cells = [
        [
            UNDER[run.checkpoint], iec(run.peak_bytes), iec(run.activation_bytes), iec(run.remade_bytes),
            _step_time(run, runs[0]), str(run.reruns),
        ]
        for run in runs
    ]  # fmt: skip
    out.print("one training step:")
    Output(out).table(columns, cells)
    _print_bits(
        out, "gradients", same, f"every parameter's at steps 1 and {compared}, and the losses of {compared} steps"
    )


def _print_captured(out: Console, trainings: list[Training], same: bool) -> None:
    """Eager and captured steps side by side."""
    eager, *captured = trainings
    cells = [[eager.title, iec(eager.run.peak_bytes), "", "", _step_time(eager.run, eager.run), ""]]
    for training in captured:
        plan = training.plan()
        cells.append([
            training.title, iec(plan.arena_bytes), str(sum(plan.recomputed.values())), f"{plan.extra:.1%}",
            _step_time(training.run, eager.run), str(training.function.stats.replays),
        ])  # fmt: skip
    titles = ("peak", "made again", "extra work", "median step", "replays")
    out.print(f"one training step, beside the {iec(plan.peak_bytes - plan.arena_bytes)} that it reads:", soft_wrap=True)
    Output(out).table([Column("tg.function"), *(Column(title, right=True) for title in titles)], cells)
    _print_bits(
        out, "captured steps", same, f"the losses of {len(eager.run.losses)} steps, and every variable after them"
    )


def _step_time(run: Run, plain: Run) -> str:
    milliseconds = run.median * 1e3
    return f"{milliseconds:.{0 if milliseconds >= 100 else 1}f} ms ({run.median / plain.median:.2f}x)"


def _print_bits(out: Console, what: str, same: bool, compared: str) -> None:
    out.print(f"{what} bit-identical: {'yes' if same else 'NO'}", style="bold green" if same else "bold red")
    out.print(f"({compared})", style="dim", soft_wrap=True)


class _Lines:
    """Progress as about ten lines, for a file or a pipe."""

    def __init__(self, out: Console, title: str, total: int) -> None:
        self.out, self.title, self.total = out, title, total
        self.losses: list[float] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        pass

    def __call__(self, done: int, loss: float | None = None) -> None:
        if loss is not None:
            self.losses.append(loss)
        if done == 1 or done == self.total or done % max(1, self.total // 10) == 0:
            self.out.print(f"{self.title}: {done}/{self.total}{self.loss()}", soft_wrap=True)

    def loss(self) -> str:
        """The loss now."""
        return f", loss {recent(self.losses):.3f}" if self.losses else ""


class _Bar(_Lines):
    """Progress as a bar on a terminal."""

    def __enter__(self) -> Self:
        self.bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[loss]}"),
            TimeRemainingColumn(),
            console=self.out,
        )
        self.bar.start()
        self.task = self.bar.add_task(self.title, total=self.total, loss="")
        return self

    def __exit__(self, *exception: object) -> None:
        self.bar.stop()

    def __call__(self, done: int, loss: float | None = None) -> None:
        if loss is not None:
            self.losses.append(loss)
        self.bar.update(self.task, completed=done, loss=self.loss().removeprefix(", "))


def _reporter(out: Console, title: str, total: int) -> _Lines:
    return (_Bar if out.is_terminal else _Lines)(out, title, total)
