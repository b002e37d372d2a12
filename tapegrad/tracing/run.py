"""A recorded run in memory: tables of integers, and the strings they point into.

``schema.sql`` declares the tables.  Here each is a dict of columns of equal length; the number of a row is its index in
them, and -1 stands for NULL.
"""

from __future__ import annotations

import sqlite3
from contextlib import closing
from dataclasses import dataclass, field
from importlib.resources import files
from typing import Any

from tapegrad.tracing.names import NAMES

Table = dict[str, list[int]]

SCHEMA = files("tapegrad.tracing").joinpath("schema.sql").read_text("utf-8")


def _columns() -> tuple[dict[str, dict[str, str | None]], set[tuple[str, str]]]:
    """Return the tables that :data:`SCHEMA` declares, and the columns that may hold NULL."""
    columns: dict[str, dict[str, str | None]] = {}
    optional = set()
    with closing(sqlite3.connect(":memory:")) as database:
        database.executescript(SCHEMA)
        for (table,) in database.execute(
            "SELECT name FROM sqlite_master WHERE type = 'table' ORDER BY rowid"
        ).fetchall():
            targets = {row[3]: row[2] for row in database.execute(f"PRAGMA foreign_key_list({table})")}
            for _, name, _, required, _, key in database.execute(f"PRAGMA table_info({table})"):
                if not key:
                    columns.setdefault(table, {})[name] = targets.get(name)
                    if not required:
                        optional.add((table, name))
    return {table: c for table, c in columns.items() if table not in {"meta", "strings", *NAMES}}, optional


COLUMNS, OPTIONAL = _columns()
"""By table and column: the table to whose rows a column points (None: it is a plain number); and the (table, column)
pairs in which -1 stands for none."""


def _empty() -> dict[str, Table]:
    return {name: {column: [] for column in columns} for name, columns in COLUMNS.items()}


@dataclass
class Run:
    """One recorded run.

    ``meta``: versions, program, arguments, device, outcome.  ``peak``: ``bytes`` (the most alive
    at once), ``seq`` (the first event at which they were), ``step``, ``reserved_bytes`` (-1: not known).  ``checks``:
    ``events``, ``dropped`` (events of steps that were not kept), ``checked`` (comparisons with the pool),
    ``drift_bytes`` (the largest difference).  ``sources``: by file and line number the text of lines that appear.
    """

    meta: dict[str, Any]
    strings: list[str] = field(default_factory=list)
    tables: dict[str, Table] = field(default_factory=_empty)
    peak: dict[str, int] = field(default_factory=lambda: {"bytes": 0, "seq": -1, "step": -1, "reserved_bytes": -1})
    checks: dict[str, int] = field(default_factory=lambda: {"events": 0, "dropped": 0, "checked": 0, "drift_bytes": 0})
    sources: dict[str, dict[str, str]] = field(default_factory=dict)

    def __getattr__(self, name: str) -> Table:
        if name in COLUMNS:
            return self.__dict__["tables"][name]
        raise AttributeError(name)

    @property
    def finished(self) -> bool:
        """Whether the program came to its end, and well."""
        return self.meta["outcome"]["kind"] in ("finished", "exit") and self.meta["outcome"]["code"] == 0

    def count(self, table: str) -> int:
        """Return the number of rows of a table."""
        return len(next(iter(self.tables[table].values())))

    def text(self, index: int) -> str:
        """Return a string by its number, "" for -1."""
        return "" if index < 0 else self.strings[index]

    def frame_of(self, stack: int) -> tuple[str, int, str]:
        """Return file, line and function of a stack's innermost frame; ("", 0, "") for -1."""
        if stack < 0:
            return "", 0, ""
        frame = self.stacks["frame"][stack]
        return (
            self.text(self.frames["file"][frame]),
            self.frames["line"][frame],
            self.text(self.frames["function"][frame]),
        )
