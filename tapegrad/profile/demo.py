"""``tapegrad demo``: a small transformer trained in several ways, and what each way costs."""

from __future__ import annotations

import statistics
import time
from typing import TYPE_CHECKING

import click
from rich.console import Console

from tapegrad.profile.report.table import Column, Output
from tapegrad.profile.report.units import ms

if TYPE_CHECKING:
    from tapegrad.profile.demo_train import Training


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--quick", is_flag=True, help="Fewer and smaller steps: under a minute on two cores.")
def demo(quick: bool) -> None:
    """Train a small transformer in five ways, and compare memory, time and bits.

    A character-level transformer learns from the standard library's source.  The first steps are done plainly, with
    each block under recompute_grad, inside a memory_budget, captured by tg.function, and captured within a budget.
    The budgets are half of what a plain step takes besides the model.  Then the captured step trains on.

    The exit code is 1 unless all ways give the same losses and variables, bit for bit.
    """
    # Imported here, so that `tapegrad demo --help` is quick.
    from tapegrad.profile import demo_text, demo_train

    begin = time.perf_counter()
    out = Console(highlight=False)
    settings = demo_train.QUICK if quick else demo_train.FULL
    text = demo_text.load()
    characters = f"{text.train.size:,} characters of {text.source}"
    out.print(f"{settings.steps} steps of training on {characters}", markup=False, soft_wrap=True)
    with out.status("comparing"):
        trainings = demo_train.compare(text, settings)
    same = _print_table(out, trainings)
    [captured] = [training for training in trainings if training.title == "tg.function"]
    _train_on(out, captured)
    out.print(f"done in {time.perf_counter() - begin:.0f} s")
    if not same:
        raise click.exceptions.Exit(1)


def _print_table(out: Console, trainings: list[Training]) -> bool:
    """Print the cost of each way; return whether all have the state of the first."""
    plain = trainings[0]
    expected = plain.state()
    rows, same = [], True
    for training in trainings:
        model, peak = (round(n / 2**20, 1) for n in (training.model_bytes, training.peak_bytes))
        equal = training.state() == expected
        same = same and equal
        rows.append([
            training.title, f"{model:.1f} MiB", f"{peak - model:.1f} MiB", f"{peak:.1f} MiB",
            ms(round(training.step_seconds * 1e9)), f"{training.step_seconds / plain.step_seconds:.2f}",
            "same" if equal else "DIFFER",
        ])  # fmt: skip
    titles = ("model", "+ step", "= peak", "time", "of plain", "bits")
    Output(out).table([Column("a step"), *(Column(title, right=True) for title in titles)], rows)
    s, count = plain.settings, plain.model.count_params()
    for line in (
        f"model: {count:,} parameters ({s.blocks} blocks, width {s.width}), and Adam's moments",
        f"step: all else at the peak of a step, of {s.batch} x {s.context} characters; half: of the plain step",
        f"time: median of {len(plain.seconds)} steps in turns",
        f"bits: of the losses of {len(plain.losses)} steps, and of all variables after them",
    ):
        out.print(f"  {line}", style="dim", soft_wrap=True)
    return same


def _train_on(out: Console, training: Training) -> None:
    """Do the rest of the steps, and print the loss at a tenth of them each."""
    steps = training.settings.steps
    for done in range(1, steps + 1):
        if done > len(training.losses):
            training.advance()
        if done in (1, steps) or done % max(1, steps // 10) == 0:
            # Batches differ more than steps: the mean of the last ten.
            out.print(f"step {done}: loss {statistics.fmean(training.losses[max(0, done - 10) : done]):.3f}")
    out.print(f"on text held out: {training.held_out_loss():.3f} nats per character")
