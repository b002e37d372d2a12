"""The files that ``tapegrad report`` writes: their names, what must not be overwritten, and their writers."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import click

from tapegrad.profile.report import rows as r
from tapegrad.profile.report.arenas import arenas
from tapegrad.profile.report.communication import line_rows, rank_rows
from tapegrad.profile.report.writable import try_output
from tapegrad.tracing.run import Run

ENDINGS = {
    "html": ".html", "csv": ".csv", "json": ".view.json", "perfetto": ".perfetto.json",
    "speedscope": ".speedscope.json", "memory_viz": ".memory_viz.json",
}  # fmt: skip
"""The formats, and how the names of their files end if none is given."""
STDOUT = "-"
DERIVED = "\0"  # no file has this name


@dataclass(frozen=True)
class View:
    """What was asked for: a moment, as it was written and as a seq, and how to group, sort and cut."""

    at: str
    seq: int
    by: str
    sort: str
    rows: int
    source: bool

    def to_json(self, run: Run) -> dict[str, object]:
        """What was alive at the moment, in groups; bytes and nanoseconds are integers, -1 stands for none."""
        groups = r.rows(run, self.seq, self.by, self.sort)
        origin = r.origin(run, self.seq)
        return {
            "program": run.meta["program"],
            "at": self.at,
            "seq": self.seq,
            "step": r.step_of(run, self.seq),
            "by": self.by,
            "sort": self.sort,
            "peak": run.peak,
            "total_bytes": sum(row.bytes for row in groups),
            "total_count": sum(row.count for row in groups),
            "origin": asdict(origin) if origin is not None else None,
            "rows": [asdict(row) for row in (groups[: self.rows] if self.rows else groups)],
            "ranks": [asdict(row) for row in rank_rows(run)],
            "communication": [asdict(row) for row in line_rows(run)],
            "arenas": [asdict(arena) for arena in arenas(run)],
            "advice": _advice(run, self.source),
            "recomputed": [asdict(rerun) for rerun in r.reruns(run, self.seq, r.step_of(run, self.seq))],
        }


def targets(asked: dict[str, str], run_path: str, force: bool) -> dict[str, Path | None]:
    """The file for each format that was asked for; None is stdout.

    Raises UsageError if two formats want the same file, or a file exists (unless ``force``).
    """
    files: dict[str, Path | None] = {}
    for kind, name in asked.items():
        files[kind] = None if name == STDOUT else derived(run_path, kind) if name == DERIVED else Path(name)
    resolved = [path.resolve() if path is not None else None for path in files.values()]
    if len(set(resolved)) < len(resolved):
        raise click.UsageError("two files were asked for under one name; give each its own")
    for kind, path in files.items():
        _check(kind, path, run_path, force)
    return files


def _check(kind: str, path: Path | None, run_path: str, force: bool) -> None:
    if path is None:
        return
    option = "--" + kind.replace("_", "-")
    if os.path.isdir(path):
        raise click.UsageError(f"{option} {path} is a folder; give the name of a file")
    try_output(option, path)
    if path.exists() and Path(run_path).exists() and path.samefile(run_path):
        raise click.UsageError(f"{option} {path} is the run itself; choose another name")
    if path.exists() and not force:
        raise click.UsageError(f"{option} {path} exists; use --force to replace it, or another name")


def derived(run_path: str, kind: str) -> Path:
    """The name of the run with another ending, beside it."""
    path = Path(run_path)
    name = path.name.removesuffix(".sqlite") or path.name
    return path.with_name(name + ENDINGS[kind])


def write(kind: str, run: Run, view: View, path: Path | None) -> None:
    """Write one format to a file or (None) to stdout.  Raises OSError, TapegradError."""
    if path is not None:
        _writer(kind)(run, path, view)
        return
    if kind == "json":
        click.echo(json.dumps(view.to_json(run), indent=2))
        return
    with tempfile.TemporaryDirectory(prefix="tapegrad-") as folder:
        file = Path(folder, "out")
        _writer(kind)(run, file, view)
        data = file.read_bytes()
    sys.stdout.flush()
    sys.stdout.buffer.write(data)


def write_html(run: Run, path: Path, source: bool) -> None:
    """The HTML report, with what would help."""
    from tapegrad.profile.viewer import html

    html.write(run, path, source=source, advice=_advice(run, source))


def _advice(run: Run, source: bool) -> dict[str, object]:
    """What would help, where no plan does so already."""
    from tapegrad.profile.plan.advice import Advice, advice

    found = advice(run) if run.meta.get("plan") is None else Advice()
    return (found if source else found.without_source()).to_json()


def _writer(kind: str) -> Callable[[Run, Path, View], None]:
    """Imported when it is needed: the text of a run must not wait for the writers of files."""
    if kind == "json":
        from tapegrad.tracing.atomic import write_text

        return lambda run, path, view: write_text(path, [json.dumps(view.to_json(run), indent=2), "\n"])
    if kind == "html":
        return lambda run, path, view: write_html(run, path, view.source)
    from tapegrad.profile.export import csv, memory_viz, perfetto, speedscope

    writers: dict[str, Callable[[Run, Path, View], None]] = {
        "csv": lambda run, path, view: csv.write(run, path),
        "perfetto": lambda run, path, view: perfetto.write(run, path),
        "speedscope": lambda run, path, view: speedscope.write(run, path, view.seq),
        "memory_viz": lambda run, path, view: memory_viz.write(run, path),
    }
    return writers[kind]
