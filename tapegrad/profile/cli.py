"""The command ``tapegrad``: one module per subcommand, imported when it is asked for."""

from __future__ import annotations

from collections.abc import Callable

import click

import tapegrad


def _demo() -> click.Command:
    from tapegrad.profile.demo import demo

    return demo


def _doctor() -> click.Command:
    from tapegrad.profile.doctor import doctor

    return doctor


# What --help says of each command and how to get it, so that asking for help imports none of them.
COMMANDS: dict[str, tuple[str, Callable[[], click.Command]]] = {
    "demo": ("Train a small transformer on Python's own source, with and without recompute_grad.", _demo),
    "doctor": ("Say what is installed, which devices work, and how to mend what does not.", _doctor),
}


class LazyGroup(click.Group):
    """A group whose commands are imported when they run."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        return COMMANDS[cmd_name][1]() if cmd_name in COMMANDS else None

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, summary) for name, (summary, _) in COMMANDS.items()])


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(tapegrad.__version__, "-V", "--version", prog_name="tapegrad")
def main() -> None:
    """Exact gradients for NumPy and CuPy code, inside a byte budget that is kept."""
