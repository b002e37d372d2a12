"""``tapegrad run``: run a program on each of the ranks that ``mpiexec`` starts, so that all end when one fails."""

from __future__ import annotations

import os
import sys

import click


@click.command(
    context_settings={
        "help_option_names": ["-h", "--help"], "ignore_unknown_options": True, "allow_interspersed_args": False,
    },
    epilog="""\b
Examples:
  mpiexec -n 4 tapegrad run train.py --batch 64
  srun -n 4 tapegrad run -m package.train

The exit code is that of the first program that fails.""",
)  # fmt: skip
@click.option("-m", "--module", is_flag=True, help="PROGRAM is a module, as for python -m.")
@click.argument("program")
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
@click.pass_context
def run(ctx: click.Context, program: str, args: tuple[str, ...], module: bool) -> None:
    """Run a program on each rank that mpiexec or srun has started.

    What a rank writes to stderr carries its number.  An exception, or an exit status that is not 0, ends all ranks
    at once, also before the program has called tg.distributed.init().
    """
    from tapegrad.distributed import faults
    from tapegrad.distributed.group import launcher, timeout_of
    from tapegrad.distributed.mpi import wait_for_all_ranks_to_call_init
    from tapegrad.distributed.waiting import Home
    from tapegrad.profile.recorder import program as running

    if program.startswith("-") and not os.path.exists(program):
        raise click.NoSuchOption(program, ctx=ctx)
    target = running.find(program, args[1:] if args[:1] == ("--",) else args, module)
    home = None
    if launcher() is not None:
        home = Home(wait_for_all_ranks_to_call_init(None, timeout_of(None)))
        sys.stderr = faults.Labelled(sys.stderr, home.rank)
    outcome = running.run(target)
    if outcome.error is not None:
        running.show_traceback(outcome.error)
    if home is not None and outcome.code:
        faults.end(home, f"the program ends with status {outcome.code}, and so all ranks do", outcome.code)
    ctx.exit(outcome.code)
