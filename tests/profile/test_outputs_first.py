"""Whatever a command is to write is tried before it works: an output that cannot be written costs nothing."""

from __future__ import annotations

import os
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from tapegrad.profile.cli import main
from tapegrad.profile.report.writable import try_output
from tapegrad.tracing.atomic import atomic, require_writable

PROGRAM = """
import sys
import tapegrad as tg
print("it ran")
x = tg.ones((100, 100))
with tg.GradientTape() as tape:
    tape.watch(x)
    y = tg.sum(tg.tanh(x) * x)
tape.gradient(y, x)
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(PROGRAM)
    return tmp_path


BAD = {
    "no/run.sqlite": "the folder {}/no does not exist; make it first",
    "train.py/run.sqlite": "cannot be written: Not a directory; give another path",
    "n" * 300 + ".json": "cannot be written: File name too long",
    "/proc/run.sqlite": "cannot be written|does not exist",
}


@pytest.mark.parametrize("name", BAD, ids=["folder", "file", "long", "proc"])
@pytest.mark.parametrize("html", [False, True])
def test_profile(name: str, html: bool, folder: Path) -> None:
    found = CliRunner().invoke(main, ["profile", *(["--html"] if html else []), "-o", name, "train.py"])
    assert found.exit_code == 2 and "it ran" not in found.output
    flat = " ".join(found.output.split())
    assert any(says.format(folder) in flat for says in BAD[name].split("|")), flat
    assert sorted(os.listdir()) == ["train.py"]


def test_profile_tries_the_page_too(folder: Path) -> None:
    Path("run.html").mkdir()
    found = CliRunner().invoke(main, ["profile", "--html", "-o", "run.sqlite", "train.py"])
    assert found.exit_code == 2 and "--html" in found.output and "Is a directory" in found.output
    assert "it ran" not in found.output and not Path("run.sqlite").exists()


def test_a_run_that_fails_leaves_the_old_files(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Path("run.sqlite").write_text("old")
    try_output("-o", "run.sqlite")
    assert Path("run.sqlite").read_text() == "old"
    with pytest.raises(ZeroDivisionError), atomic("run.sqlite") as part:
        part.write_text("new")
        1 / 0  # noqa: B018
    assert Path("run.sqlite").read_text() == "old" and sorted(os.listdir()) == ["run.sqlite", "train.py"]


def test_report_and_plan_try_before_they_work(folder: Path) -> None:
    run = CliRunner()
    assert run.invoke(main, ["profile", "-q", "-o", "run.sqlite", "train.py"]).exit_code == 0
    for command in (
        ["report", "run.sqlite", "--csv", "a.csv", "--html", "no/a.html"],
        ["report", "run.sqlite", "--csv", "a.csv", "--json", "train.py/a.json"],
        ["plan", "run.sqlite", "--budget", "50%", "-o", "no/plan.json"],
    ):
        found = run.invoke(main, command)
        assert found.exit_code == 2 and ("no does not exist" in found.output or "Not a directory" in found.output)
    assert sorted(os.listdir()) == ["run.sqlite", "train.py"]


@pytest.mark.skipif(os.name != "posix", reason="pipes and permissions")
def test_what_can_be_written(folder: Path) -> None:
    os.mkfifo("pipe")
    Path("link").symlink_to("target")
    for path in ("pipe", "link", "new", "train.py"):
        require_writable(path)
    assert sorted(os.listdir()) == ["link", "pipe", "train.py"]  # nothing is left, nothing is made
    with pytest.raises(click.UsageError, match="^-o . cannot be written: Is a directory; give another path$"):
        try_output("-o", ".")
    if os.geteuid():
        os.chmod(folder, 0o500)
        with pytest.raises(click.UsageError, match="-o new cannot be written: Permission denied; give another path"):
            try_output("-o", "new")
        os.chmod(folder, 0o700)
