"""The command ``tapegrad``: one module per subcommand, imported when it is asked for."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pkgutil import resolve_name
from typing import Any, NoReturn

import click
from click.shell_completion import CompletionItem

import tapegrad
from tapegrad.errors import TapegradError

# What --help says of each command, and the module that defines it: asking for help imports none of them.
SECTIONS: dict[str, dict[str, tuple[str, str]]] = {
    "Measure": {
        "profile": ("Run a program and record where the bytes of its tensors go.", "profile_command"),
        "top": ("Show devices, their processes, and what tapegrad's hold.", "top.command"),
    },
    "Run on several processes": {
        "run": ("Run a program on each rank that mpiexec or srun has started.", "run_command"),
    },
    "Understand and change": {
        "report": ("Show a recorded run as text, or write it as files.", "report.command"),
        "plan": ("Choose what to recompute for a budget of memory or time.", "plan.command"),
        "compare": ("Compare two recorded runs, with an exit code for CI.", "compare_command"),
    },
    "This installation": {
        "doctor": ("Say what is installed, which devices work, and how to mend what does not.", "doctor"),
        "demo": ("Train a small transformer in five ways, and compare memory, time and bits.", "demo"),
        "completion": ("Print the script that completes tapegrad's commands in a shell.", "completion"),
    },
}
COMMANDS = {name: entry for section in SECTIONS.values() for name, entry in section.items()}


def command_of(name: str) -> click.Command:
    """A command, imported."""
    command: click.Command = resolve_name(f"tapegrad.profile.{COMMANDS[name][1]}:{name}")
    return command


class LazyGroup(click.Group):
    """A group whose commands are imported when they run, and whose errors are one line each."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        return command_of(cmd_name) if cmd_name in COMMANDS else None

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args[0] not in COMMANDS and not args[0].startswith("-") and not ctx.resilient_parsing:
            _refuse(args[0], ctx)
        return super().resolve_command(ctx, args)

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        commands = [CompletionItem(name, help=COMMANDS[name][0]) for name in COMMANDS if name.startswith(incomplete)]
        return commands + click.Command.shell_complete(self, ctx, incomplete)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        widest = max(map(len, COMMANDS))
        for title, commands in SECTIONS.items():
            with formatter.section(title):
                formatter.write_dl([(f"{name:{widest}}", summary) for name, (summary, _) in commands.items()])

    def main(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return super().main(*args, **kwargs)
        finally:
            _flush()

    def make_context(self, *args: Any, **kwargs: Any) -> click.Context:
        with _quiet():  # help is printed here
            return super().make_context(*args, **kwargs)

    def invoke(self, ctx: click.Context) -> Any:
        if os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb":
            ctx.color = False
        try:
            with _quiet():
                return super().invoke(ctx)
        except KeyboardInterrupt:
            click.echo("\ninterrupted", err=True)
            raise click.exceptions.Exit(130) from None
        except (TapegradError, OSError) as error:
            raise _one_line(error) from error


@contextmanager
def _quiet() -> Iterator[None]:
    """Exit with 0 where a reader closes the pipe early: click and rich would exit with 1."""
    try:
        yield
    except BrokenPipeError:
        raise click.exceptions.Exit(0) from None
    except SystemExit as error:
        if isinstance(error.__context__, BrokenPipeError):
            raise click.exceptions.Exit(0) from None
        raise


def _flush() -> None:
    """Write the rest of the output now: Python would print an error about a closed pipe when it ends."""
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except ValueError:  # closed by the program
        pass


class _Unreadable(click.ClickException):
    """A run file, or a plan, that cannot be read."""

    exit_code = 2


def _refuse(name: str, ctx: click.Context) -> NoReturn:
    import difflib

    close = difflib.get_close_matches(name, COMMANDS, n=2)
    hint = f" Did you mean {' or '.join(repr(c) for c in close)}?" if close else ""
    raise click.UsageError(f"No such command {name!r}.{hint}", ctx)


def _one_line(error: TapegradError | OSError) -> click.ClickException:
    """An error as its first line, without characters that control a terminal."""
    from tapegrad.profile.report.escape import shown
    from tapegrad.profile.report.units import first_line
    from tapegrad.remat.plan import PlanError
    from tapegrad.tracing.database import RunFileError

    text = first_line(error)
    if isinstance(error, OSError) and not isinstance(error, TapegradError) and error.filename is not None:
        text = f"{error.filename}: {error.strerror}"
    kind = _Unreadable if isinstance(error, RunFileError | PlanError) else click.ClickException
    return kind(shown(text))


def _print_version(context: click.Context, option: click.Parameter, asked: bool) -> None:
    if asked:
        click.echo(f"tapegrad, version {tapegrad.__version__}")  # looked up now
        context.exit()


EXIT_CODES = """\b
Exit codes:
  0    fine
  1    an error, or something that was checked is not so
  2    wrong usage, or a run file that cannot be read
  3    a threshold was exceeded, or it does not fit the budget
  130  interrupted
profile ends with the code of the program that it runs."""


@click.group(
    cls=LazyGroup, epilog=EXIT_CODES, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 80}
)
@click.option(
    "-V", "--version", is_flag=True, is_eager=True, expose_value=False, callback=_print_version,
    help="Show the version and exit.",
)  # fmt: skip
def main() -> None:
    """Exact gradients for NumPy and CuPy code, inside a byte budget that is kept.

    \b
    Examples:
      tapegrad profile train.py --batch 64
      tapegrad report tapegrad-train.4242.sqlite --html
      tapegrad plan tapegrad-train.4242.sqlite --budget 4GiB
      tapegrad compare before.sqlite after.sqlite --fail-above 5%
    """
