"""Writing files: whole or not at all, and never in the place of what is no file."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from tapegrad.profile.export import csv
from tapegrad.profile.plan import file as plan_file
from tapegrad.profile.viewer import html
from tapegrad.tracing.atomic import atomic
from tapegrad.tracing.file import save
from tests.profile.made_runs import training

needs_pipes = pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no named pipes here")


def write_plan(path: Path) -> None:
    plan_file.save(plan_file.Plan({}, [], plan_file.Point(1, 2, ()), 1, 2, 1), path)


WRITERS: dict[str, Callable[[Path], None]] = {
    "run": lambda path: save(training(steps=1), path),
    "csv": lambda path: csv.write(training(steps=1), path),
    "html": lambda path: html.write(training(steps=1), path),
    "plan": write_plan,
}


@needs_pipes
@pytest.mark.parametrize("kind", WRITERS)
def test_what_is_no_file_gets_the_bytes_and_stays(kind: str, tmp_path: Path) -> None:
    pipe, link = tmp_path / "pipe", tmp_path / "link"
    os.mkfifo(pipe)
    link.symlink_to(pipe)
    found: list[bytes] = []
    reader = threading.Thread(target=lambda: found.append(pipe.read_bytes()), daemon=True)
    reader.start()
    WRITERS[kind](link)
    reader.join(timeout=30)
    WRITERS[kind](tmp_path / "file")
    assert found == [(tmp_path / "file").read_bytes()]
    assert link.is_symlink() and pipe.is_fifo()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file", "link", "pipe"]


@pytest.mark.parametrize("kind", WRITERS)
def test_links_stay(kind: str, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    target, link = tmp_path / "other" / "file", tmp_path / "link"
    link.symlink_to(target)
    for _ in range(2):
        WRITERS[kind](link)
        assert link.is_symlink() and target.stat().st_size > 0 and not target.is_symlink()
        target.write_bytes(b"old")
    assert [p.name for p in target.parent.iterdir()] == ["file"]


@pytest.mark.parametrize("kind", WRITERS)
def test_errors_name_what_was_asked_for(kind: str, tmp_path: Path) -> None:
    with pytest.raises(OSError) as raised:
        WRITERS[kind](tmp_path / "none" / "file")
    assert isinstance(raised.value, FileNotFoundError) and raised.value.filename == str(tmp_path / "none" / "file")
    with pytest.raises(IsADirectoryError) as found:
        WRITERS[kind](tmp_path)
    assert found.value.filename == str(tmp_path)


def test_a_failure_keeps_what_was_there(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("old")
    for error in (OSError(28, "No space left on device"), OSError("odd"), ValueError("no")):
        with pytest.raises(type(error)) as raised, atomic(path) as part:
            part.write_text("half")
            raise error
        assert not isinstance(error, OSError) or error.errno is None or raised.value.filename == str(path)
        assert path.read_text() == "old" and [p.name for p in tmp_path.iterdir()] == ["file"]
