"""``tapegrad report``: what it prints and writes, and how it ends."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result

from tapegrad.profile.cli import COMMANDS, main
from tapegrad.profile.report.command import report
from tapegrad.profile.report.outputs import ENDINGS
from tapegrad.tracing.file import save
from tests.profile.made_runs import out_of_memory, training

FORMATS = ["--" + kind.replace("_", "-") for kind in ENDINGS if kind != "json"]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    """Runs ``tapegrad report`` in a folder with a run; checks the exit code."""
    save(training(checkpointed=2), tmp_path / "a.sqlite")
    save(out_of_memory(), tmp_path / "oom.sqlite")
    monkeypatch.chdir(tmp_path)

    def invoke(*arguments: str, code: int = 0) -> Result:
        result = CliRunner().invoke(main, ["report", *arguments])
        assert result.exit_code == code, result.output
        assert result.exception is None or isinstance(result.exception, SystemExit)
        return result

    return invoke


def test_help_has_examples_and_exit_codes() -> None:
    result = CliRunner().invoke(report, ["--help"])
    assert "tapegrad report tapegrad-train.4242.sqlite --html --csv" in result.output
    assert "exit code" in result.output and all(option in result.output for option in FORMATS)
    assert report.help is not None and report.help.splitlines()[0] == COMMANDS["report"][0]


def test_text(run) -> None:
    assert run("a.sqlite").stdout.startswith("Peak 13.00 MiB (13631488 bytes)")
    assert run("a.sqlite").stderr == ""
    assert run("a.sqlite", "--at", "step:2").stdout.startswith("Alive 13.00 MiB")
    assert "Out of memory" in run("oom.sqlite").stdout
    table = run("oom.sqlite", "--at", "oom", "--by", "line", "-n", "0", "--sort", "name").stdout
    assert [f"model.py:{n} f()" in table for n in (7, 8, 9, 10)] == [True] * 4
    assert len(run("a.sqlite", "--by", "line", "-n", "2").stdout.splitlines()) == 8


def test_the_json_holds_the_same_integers(run) -> None:
    found = json.loads(run("a.sqlite", "--json", "--by", "line", "-n", "3").stdout)
    assert found["peak"]["bytes"] == found["total_bytes"] == 13631488
    assert found["by"] == "line" and len(found["rows"]) == 3
    assert all(type(row["bytes"]) is int for row in found["rows"])
    whole = json.loads(run("a.sqlite", "--json").stdout)
    assert sum(row["bytes"] for row in whole["rows"]) == whole["total_bytes"]
    assert whole["origin"]["line"] == 44 and whole["recomputed"][0]["bytes"] == 4 << 20
    run("a.sqlite", "--json", "b.json")
    assert json.loads(Path("b.json").read_text()) == whole


def test_files_are_named_after_the_run_and_kept(run) -> None:
    said = run("a.sqlite", *FORMATS)
    assert said.stdout == ""
    names = {f"a{ending}" for kind, ending in ENDINGS.items() if kind != "json"}
    assert {line.removeprefix("wrote ") for line in said.stderr.splitlines()} == names
    assert {p.name for p in Path().iterdir()} == names | {"a.sqlite", "oom.sqlite"}
    before = Path("a.csv").read_bytes()
    Path("a.csv").write_text("mine")
    assert "--csv a.csv exists; use --force" in run("a.sqlite", "--csv", "--html", "new.html", code=2).stderr
    assert Path("a.csv").read_text() == "mine" and not Path("new.html").exists()
    run("a.sqlite", "--csv", "-f")
    assert Path("a.csv").read_bytes() == before


def test_one_may_go_to_stdout(run) -> None:
    for option in FORMATS:
        out = run("a.sqlite", option, "-")
        assert len(out.stdout) > 500 and out.stderr == ""
    assert run("a.sqlite", "--csv", "-", "--html").stderr == "wrote a.html\n"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--html"], "Name it first"),
        (["a.sqlite", "--csv", "-", "--json", "-"], "under one name"),
        (["a.sqlite", "--csv", "x", "--html", "./x"], "under one name"),
        (["a.sqlite", "--json", "a.sqlite", "-f"], "is the run itself"),
        (["a.sqlite", "--csv", "."], "is a folder"),
        (["a.sqlite", "--csv", "none/a.csv"], "does not exist"),
        (["a.sqlite", "--at", "noon"], "is no moment"),
        (["a.sqlite", "--at", "step:9"], "the run has 3"),
        (["a.sqlite", "--at", "seq:99999999"], "there is no event 99999999: the last of the run is"),
        (["a.sqlite", "--at", "oom"], "did not run out of memory"),
        (["a.sqlite", "--open", "--html", "-"], "--open shows a file"),
        (["none.sqlite"], "none.sqlite: No such file"),
        (["."], "Is a directory"),
    ],
)
def test_what_does_not_fit_is_said(run, arguments: list[str], says: str) -> None:
    result = run(*arguments, code=2)
    assert says in result.stderr and result.stdout == ""


def test_a_file_that_is_no_run_is_one_line(run) -> None:
    Path("b\x1b.json").write_text("{}")
    assert run("b\x1b.json", code=2).stderr == "Error: b\\x1b.json: not a run file of tapegrad\n"


def test_what_would_help_is_shown(run, monkeypatch: pytest.MonkeyPatch) -> None:
    from tapegrad.profile.plan import advice

    found = advice.Advice((advice.Card("recompute block()", 2, 1, 0.5),), ())
    monkeypatch.setattr(advice, "advice", lambda run, *rest: found)
    assert "What would help\n2 B -> 1 B, work +50 %\n  recompute block()\n" in run("a.sqlite").stdout.replace("→", "->")
    assert json.loads(run("a.sqlite", "--json").stdout)["advice"]["cards"][0]["after_bytes"] == 1
    assert "What would help" not in run("a.sqlite", "--at", "end").stdout + run("a.sqlite", "--by", "op").stdout


def test_open_shows_the_page(run, monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[str] = []
    monkeypatch.setattr(click, "launch", shown.append)
    run("a.sqlite", "--html")
    assert shown == []
    run("a.sqlite", "--open", "-f")
    assert [Path(p).name for p in shown] == ["a.html"]


def test_a_failure_leaves_nothing_behind(tmp_path: Path) -> None:
    from tapegrad.tracing.atomic import write_text

    def parts():
        yield "a"
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match=r"No space left on device: .*out\.csv"):
        write_text(tmp_path / "out.csv", parts())
    assert list(tmp_path.iterdir()) == []


def test_in_a_terminal_that_knows_ascii_only(run, tmp_path: Path) -> None:
    script = "from tapegrad.profile.cli import main; main(prog_name='tapegrad')"
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", script, "report", "oom.sqlite"],
        env=os.environ | {"PYTHONIOENCODING": "ascii", "COLUMNS": "80"}, capture_output=True, timeout=120, check=True,
    )  # fmt: skip
    assert done.stdout.isascii() and b"Out of memory" in done.stdout and done.stderr == b""
