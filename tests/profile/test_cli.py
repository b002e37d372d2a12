"""The command `tapegrad` itself: help, completion, errors, exit codes."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

import tapegrad
from tapegrad.errors import TapegradError
from tapegrad.profile import cli
from tapegrad.profile.cli import COMMANDS, SECTIONS, main
from tapegrad.tracing.database import RunFileError
from tapegrad.tracing.file import save
from tests.profile.plan.made import training

NAMES = ["profile", "report", "plan", "compare", "top", "demo", "doctor", "completion", "run"]
SCRIPT = "import sys; from tapegrad.profile.cli import main; main(prog_name='tapegrad')"


def shell(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """The command in a process of its own, with these environment variables."""
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", SCRIPT, *arguments],
        env=os.environ | variables, capture_output=True, text=True, timeout=120, stdin=subprocess.DEVNULL,
    )  # fmt: skip


def replaced(monkeypatch: pytest.MonkeyPatch, name: str, does: BaseException) -> None:
    """The command ``name`` raises ``does``."""

    @click.command()
    def command() -> None:
        raise does

    monkeypatch.setattr(cli, "command_of", lambda _: command)


def test_version() -> None:
    result = CliRunner().invoke(main, ["--version"])
    assert result.exit_code == 0
    assert result.output == f"tapegrad, version {tapegrad.__version__}\n"


def test_files_that_are_not_installed_have_no_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(vars(tapegrad), "__version__", raising=False)

    def missing(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr("importlib.metadata.version", missing)
    assert CliRunner().invoke(main, ["--version"]).output == "tapegrad, version 0+unknown\n"
    monkeypatch.undo()
    vars(tapegrad).pop("__version__", None)


def test_help_lists_every_command_in_its_section() -> None:
    assert sorted(COMMANDS) == sorted(NAMES)
    for arguments in (["--help"], ["-h"]):
        result = CliRunner().invoke(main, arguments)
        assert result.exit_code == 0
        place = 0
        for title, commands in SECTIONS.items():
            assert (place := result.output.index(f"\n{title}:\n", place))
            for name, (summary, _) in commands.items():
                place = result.output.index(f"\n  {name} ", place)
                assert summary.split()[0] in result.output[place:].splitlines()[1]


def test_help_has_examples_and_exit_codes_in_80_columns() -> None:
    shown = CliRunner().invoke(main, ["--help"]).output
    for example in ("profile train.py", "report tapegrad-", "plan tapegrad-", "compare before"):
        assert f"\n    tapegrad {example}" in shown and " --html\n" in shown
    for code in ("0    fine\n", "1    an error", "2    wrong usage", "3    a threshold", "130  interrupted\n"):
        assert f"\n    {code}" in shown
    assert max(map(len, shown.splitlines())) <= 80


@pytest.mark.parametrize("name", NAMES)
def test_every_command_has_help_that_agrees_with_the_summary(name: str) -> None:
    summary, command = COMMANDS[name][0], cli.command_of(name)
    assert command.get_short_help_str(limit=200) == summary
    for option in ("--help", "-h"):
        result = CliRunner().invoke(main, [name, option])
        assert result.exit_code == 0 and f"Usage: main {name}" in result.output
        assert max(map(len, result.output.splitlines())) <= 80


def test_an_unknown_command_goes_to_stderr_with_a_suggestion_and_exit_code_2() -> None:
    for wrong, right in (("dmeo", "'demo'"), ("raport", "'report'"), ("profil", "'profile'")):
        result = CliRunner().invoke(main, [wrong])
        assert result.exit_code == 2 and result.stdout == ""
        assert f"No such command '{wrong}'. Did you mean {right}?" in result.stderr
    result = CliRunner().invoke(main, ["zzzzzz"])
    assert result.exit_code == 2 and result.stderr.endswith("No such command 'zzzzzz'.\n")
    result = CliRunner().invoke(main, ["--halp"])
    assert result.exit_code == 2 and "No such option" in result.stderr


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (TapegradError("no room\nand much more"), 1, "Error: no room\n"),
        (TapegradError(""), 1, "Error: TapegradError\n"),
        (TapegradError("a \x1b[2J file\u202e"), 1, "Error: a \\x1b[2J file\\u202e\n"),
        (RunFileError("x.sqlite: not a run file"), 2, "Error: x.sqlite: not a run file\n"),
        (PermissionError(13, "Permission denied", "/root/x"), 1, "Error: /root/x: Permission denied\n"),
        (OSError("odd"), 1, "Error: odd\n"),
        (KeyboardInterrupt(), 130, "\ninterrupted\n"),
        (BrokenPipeError(32, "Broken pipe"), 0, ""),
        (click.exceptions.Exit(3), 3, ""),
        (click.ClickException("no"), 1, "Error: no\n"),
    ],
)
def test_errors_are_one_line_on_stderr(
    error: BaseException, code: int, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    replaced(monkeypatch, "demo", error)
    result = CliRunner().invoke(main, ["demo"])
    assert (result.exit_code, result.stderr, result.stdout) == (code, said, "")


def test_a_bug_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    replaced(monkeypatch, "demo", ZeroDivisionError("a bug"))
    assert isinstance(CliRunner().invoke(main, ["demo"]).exception, ZeroDivisionError)


@pytest.mark.parametrize(
    "arguments",
    [["--help"], ["report", "a.sqlite"], ["report", "a.sqlite", "--csv", "-"],
     ["report", "small.sqlite", "--csv", "-"], ["plan", "a.sqlite", "--pareto"],
     ["compare", "a.sqlite", "a.sqlite"], ["compare", "a.sqlite", "a.sqlite", "--json"]],
)  # fmt: skip
def test_who_reads_no_further_sees_no_error(arguments: list[str], tmp_path: Path) -> None:
    save(training(), tmp_path / "a.sqlite")
    save(training(steps=1, blocks=1), tmp_path / "small.sqlite")  # whose text waits in a buffer until the end
    running = subprocess.Popen(
        [sys.executable, "-W", "error", "-c", SCRIPT, *arguments], cwd=tmp_path,
        env={name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert running.stdout is not None and running.stderr is not None
    running.stdout.close()
    said = running.stderr.read()
    running.stderr.close()
    assert (running.wait(timeout=60), said) == (0, "")


def test_no_color(monkeypatch: pytest.MonkeyPatch) -> None:
    @click.command()
    def command() -> None:
        click.secho("red", fg="red")

    monkeypatch.setattr(cli, "command_of", lambda _: command)
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    assert CliRunner().invoke(main, ["demo"], color=True).stdout == "\x1b[31mred\x1b[0m\n"
    assert CliRunner().invoke(main, ["demo"]).stdout == "red\n"
    for name, value in (("NO_COLOR", "1"), ("TERM", "dumb")):
        monkeypatch.setenv(name, value)
        assert CliRunner().invoke(main, ["demo"], color=True).stdout == "red\n"
        monkeypatch.delenv(name)


def test_help_imports_no_command() -> None:
    code = SCRIPT.replace("main(", "import atexit\natexit.register(lambda: print('!', *sys.modules))\nmain(")
    for option in ("--help", "--version"):
        result = subprocess.run(
            [sys.executable, "-W", "error", "-c", code, option], capture_output=True, text=True, timeout=60
        )
        assert result.returncode == 0, result.stderr
        modules = result.stdout.partition("!")[2].split()
        assert "tapegrad.profile.cli" in modules
        assert {m.split(".")[0] for m in modules} & {"numpy", "rich", "matplotlib", "cupy", "pynvml"} == set()
        ours = {m for m in modules if m.startswith("tapegrad")}
        assert ours == {"tapegrad", "tapegrad.errors", "tapegrad.profile", "tapegrad.profile.cli"}


def completed(words: str, shell_name: str = "bash") -> list[str]:
    """What a shell is told when the cursor stands behind ``words``."""
    parts = words.split(" ")
    result = shell(
        _TAPEGRAD_COMPLETE=f"{shell_name}_complete",
        COMP_WORDS=words if shell_name != "fish" else " ".join(parts[:-1]),
        COMP_CWORD=str(len(parts) - 1) if shell_name != "fish" else parts[-1],
    )
    assert result.returncode == 0 and result.stderr == "", result.stderr
    return result.stdout.split("\n")


def test_completion_of_commands_and_options() -> None:
    assert completed("tapegrad re") == ["plain,report", ""]
    found = completed("tapegrad ")
    assert [f"plain,{name}" for name in COMMANDS] == found[: len(COMMANDS)]
    assert {"plain,--help", "plain,--version"} <= set(completed("tapegrad --"))
    assert completed("tapegrad demo --") == ["plain,--quick", "plain,--help", ""]
    assert completed("tapegrad doctor --j") == ["plain,--json", ""]
    assert completed("tapegrad completion z") == ["plain,zsh", ""]
    assert completed("tapegrad docto", "fish")[0] == f"plain,doctor\t{COMMANDS['doctor'][0]}"
    assert completed("tapegrad docto", "zsh")[:3] == ["plain", "doctor", COMMANDS["doctor"][0]]


@pytest.mark.parametrize("name", ["bash", "zsh", "fish"])
def test_the_completion_script(name: str) -> None:
    result = shell("completion", name)
    assert result.returncode == 0
    assert f"_TAPEGRAD_COMPLETE={name}_complete" in result.stdout and "tapegrad" in result.stdout
    assert f"completion {name}" in CliRunner().invoke(main, ["completion", "--help"]).output


@pytest.mark.skipif(shutil.which("bash") is None, reason="bash is not installed")
def test_bash_completes(tmp_path: Path) -> None:
    """The script in a shell, as if the user had pressed Tab."""
    (tmp_path / "tapegrad").write_text(f'#!/bin/sh\nexec "{sys.executable}" -c "{SCRIPT}" "$@"\n')
    (tmp_path / "tapegrad").chmod(0o755)
    code = """eval "$(tapegrad completion bash)"
COMP_WORDS=(tapegrad doctor --j) COMP_CWORD=2
_tapegrad_completion tapegrad
echo "got ${COMPREPLY[*]}"
"""
    result = subprocess.run(
        ["bash", "--norc", "-c", code], capture_output=True, text=True, timeout=60, stdin=subprocess.DEVNULL,
        env=os.environ | {"PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"},
    )  # fmt: skip
    assert result.stdout == "got --json\n", result.stderr


def test_an_unknown_shell() -> None:
    result = CliRunner().invoke(main, ["completion", "tcsh"])
    assert result.exit_code == 2 and "'bash', 'zsh', 'fish'" in result.stderr


def test_the_module_offers_what_the_entry_point_names() -> None:
    assert cli.main is main and isinstance(main, click.Group)
