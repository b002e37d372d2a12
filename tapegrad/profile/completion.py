"""``tapegrad completion``: the script by which a shell completes commands and options."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def completion(ctx: click.Context, shell: str) -> None:
    """Print the script that completes tapegrad's commands in a shell.

    \b
    To have it in every new shell:
      bash   echo 'eval "$(tapegrad completion bash)"' >> ~/.bashrc
      zsh    echo 'eval "$(tapegrad completion zsh)"' >> ~/.zshrc
      fish   tapegrad completion fish > ~/.config/fish/completions/tapegrad.fish

    bash must be 4.4 or newer; in zsh, compinit must have run before.
    """
    script = get_completion_class(shell)
    assert script is not None  # click has all three
    click.echo(script(ctx.find_root().command, {}, "tapegrad", "_TAPEGRAD_COMPLETE").source())
