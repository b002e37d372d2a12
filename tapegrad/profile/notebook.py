"""``%%tapegrad`` in a notebook: a cell is profiled, and what it took is shown below it.

After ``%load_ext tapegrad``.  IPython is only used where it runs already.
"""

from __future__ import annotations

import argparse
import io
import os
import shlex
from html import escape
from pathlib import Path
from typing import Any, NoReturn

from rich.console import Console

from tapegrad.errors import TapegradError
from tapegrad.profile.plan.advice import Advice, Card, advice
from tapegrad.profile.recorder.facts import facts
from tapegrad.profile.recorder.program import Program
from tapegrad.profile.recorder.session import Session
from tapegrad.profile.report.outputs import write_html
from tapegrad.profile.report.rows import rows, short_names, short_source
from tapegrad.profile.report.text import print_summary
from tapegrad.sizes import format_bytes
from tapegrad.tracing import html
from tapegrad.tracing.atomic import require_writable
from tapegrad.tracing.file import save
from tapegrad.tracing.ledger import LEDGER
from tapegrad.tracing.run import Run

_WIDTH = 100
_LINES = 10


class NotebookError(TapegradError, ValueError):
    """``%%tapegrad`` is not written right, or cannot be used now."""


class Profiled:
    """What a cell took: ``run`` (see ``profile/runs``); ``print`` it for the summary that a terminal shows."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.advice: Advice = advice(run)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the run file, for ``tapegrad report``.  Raises OSError."""
        save(self.run, path)

    def page(self, path: str | os.PathLike[str]) -> None:
        """Write the HTML report.  Raises OSError."""
        write_html(self.run, Path(path), True)

    def __str__(self) -> str:
        out = io.StringIO()
        console = Console(file=out, width=_WIDTH, highlight=False, color_system=None)
        print_summary(self.run, console, path=None, advice=self.advice)
        return out.getvalue()

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """In a terminal, IPython shows the summary."""
        printer.text(str(self))

    def _repr_html_(self) -> str:
        """In a notebook: peak, lines, and advice as tables."""
        run, seq, names = self.run, self.run.peak["seq"], short_names(self.run)
        lines = [(short_source(r.key, names), r.op, r.bytes) for r in rows(run, seq, "line")[:_LINES]]
        return "".join([
            f"<p><b>peak {format_bytes(run.peak['bytes'])}</b> ({run.peak['bytes']} bytes)</p>",
            html.table(("alive then", "size", "bytes"),
                       [(r.key, format_bytes(r.bytes), str(r.bytes)) for r in rows(run, seq, "category")]),
            html.table(("line", "op", "size", "bytes"), [(key, op, format_bytes(n), str(n)) for key, op, n in lines]),
            *(_card(card, names) for card in self.advice.cards),
        ])  # fmt: skip


def _card(card: Card, names: dict[str, str]) -> str:
    edits = "".join(
        f"<p>{escape(f'{names.get(e.file, e.file)}:{e.line}')}{'' if e.old else ' (above it)'}</p>"
        f"<pre>{escape(e.new)}</pre>"
        for e in card.edits
    )
    return f"<p><b>{escape(card.effect)}</b>: {escape(card.what)}</p>{edits}"


class _Arguments(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise NotebookError(f"%%{self.prog}: {message}\n{self.format_usage()}")

    def exit(self, status: int = 0, message: str | None = None) -> NoReturn:
        raise NotebookError(message or "")


def _arguments() -> _Arguments:
    parser = _Arguments("tapegrad", add_help=False)
    parser.add_argument("-o", "--output", metavar="FILE", help="write the run file")
    parser.add_argument("--html", metavar="FILE", help="write the HTML report")
    parser.add_argument("--stacks", choices=("line", "full", "none"), default="line")
    return parser


def load(shell: Any) -> None:
    """Make ``%%tapegrad`` known to a shell of IPython's."""

    def tapegrad(line: str, cell: str) -> Profiled | None:
        """%%tapegrad [-o FILE] [--html FILE] [--stacks line|full|none]: profile the cell; show peak, lines, advice."""
        return profile_cell(shell, line, cell)

    shell.register_magic_function(tapegrad, "cell")


def profile_cell(shell: Any, line: str, cell: str) -> Profiled | None:
    """Run ``cell`` in ``shell`` as it would have run, and return what it took.

    None if it has raised: the shell shows the error.  Raises NotebookError; OSError, before the cell runs, for files
    that cannot be written.
    """
    options = _arguments().parse_args(shlex.split(line))
    for path in (options.output, options.html):
        if path is not None:
            require_writable(path)
    if LEDGER.journal is not None:
        raise NotebookError("%%tapegrad: a profile is being recorded already")
    session = Session(stacks=options.stacks)
    session.start()
    try:
        result = shell.run_cell(cell)
    finally:
        session.stop()
    error = result.error_before_exec or result.error_in_exec
    kind, message = ("exception", str(error)[:500]) if error else ("finished", "")
    outcome = {"kind": kind, "code": int(bool(error)), "message": message}
    run = session.run({**facts(Program("cell", (), False, "")), "outcome": outcome})
    _name_cells(run, shell)
    found = Profiled(run)
    if options.output is not None:
        found.save(options.output)
    if options.html is not None:
        found.page(options.html)
    return None if error else found


def _name_cells(run: Run, shell: Any) -> None:
    """Files that are cells are called as IPython calls them: ``In[3]``."""
    name_of = getattr(shell.compile, "format_code_name", lambda name: None)
    for i, text in enumerate(run.strings):
        named = name_of(text)
        if named is not None:
            run.strings[i] = named[1]
            if text in run.sources:
                run.sources[named[1]] = run.sources.pop(text)
