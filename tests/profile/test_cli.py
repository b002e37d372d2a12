"""The command `tapegrad` itself."""

from __future__ import annotations

import subprocess
import sys

from click.testing import CliRunner

import tapegrad
from tapegrad.profile.cli import COMMANDS, main


def test_version() -> None:
    result = CliRunner().invoke(main, ["--version"])
    assert result.exit_code == 0
    assert result.output == f"tapegrad, version {tapegrad.__version__}\n"


def test_help_lists_every_command_with_its_summary() -> None:
    for option in ("--help", "-h"):
        result = CliRunner().invoke(main, [option])
        assert result.exit_code == 0
        for name, (summary, _) in COMMANDS.items():
            assert name in result.output
            assert summary.split()[0] in result.output


def test_every_command_has_help_that_agrees_with_the_summary() -> None:
    for name, (summary, get) in COMMANDS.items():
        assert get().get_short_help_str(limit=200) == summary
        result = CliRunner().invoke(main, [name, "--help"])
        assert result.exit_code == 0 and "Usage:" in result.output


def test_an_unknown_command_goes_to_stderr_with_exit_code_2() -> None:
    result = CliRunner().invoke(main, ["dmeo"])
    assert result.exit_code == 2
    assert "No such command 'dmeo'" in result.stderr and result.stdout == ""


def test_help_imports_no_command() -> None:
    code = (
        "import sys; from click.testing import CliRunner; from tapegrad.profile.cli import main\n"
        "assert CliRunner().invoke(main, ['--help']).exit_code == 0\n"
        "print(*[name for name in sys.modules if name.split('.')[0] in ('rich', 'matplotlib')"
        " or name.startswith('tapegrad.profile.demo')])"
    )
    result = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == ""
