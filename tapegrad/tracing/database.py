"""The database of a run file: its statements, and how rows are written and read."""

from __future__ import annotations

import os
import sqlite3
from collections import defaultdict
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from tapegrad.errors import TapegradError
from tapegrad.tracing.names import NAMES
from tapegrad.tracing.run import COLUMNS, OPTIONAL, SCHEMA, Run

APPLICATION = 0x74617065
"""``PRAGMA application_id`` of a run file: "tape"."""
VERSION = 6
"""``PRAGMA user_version``: of the format.  Versions up to 4 were JSON."""
_INSERT = {
    table: f"INSERT OR REPLACE INTO {table} VALUES (?, "
    + ", ".join("nullif(?, -1)" if (table, column) in OPTIONAL else "?" for column in columns)
    + ")"
    for table, columns in COLUMNS.items()
} | {table: f"INSERT OR REPLACE INTO {table} VALUES (?, ?)" for table in ("meta", "strings", *NAMES)}
FIRST = {(table, column): i for table, columns in COLUMNS.items() for i, column in enumerate(columns, 1)}
"""Of a table and column: its index in a row."""
_SELECT = {
    table: "SELECT id, " + ", ".join(f'ifnull("{c}", -1)' for c in columns) + f" FROM {table} ORDER BY id"
    for table, columns in COLUMNS.items()
}


class RunFileError(TapegradError, ValueError):
    """A file that is not a run file, or cannot be read."""


class Pending(NamedTuple):
    """Rows by table, and updates by table and columns, that are to be written."""

    rows: defaultdict[str, list[list[Any]]]
    updates: defaultdict[tuple[str, ...], dict[int, tuple[int, ...]]]

    def extend(self, later: Pending) -> None:
        """Add what came later."""
        for table, rows in later.rows.items():
            self.rows[table] += rows
        for columns, values in later.updates.items():
            self.updates[columns].update(values)


def opened(path: str | os.PathLike[str] | None, wait: float = 0, private: bool = False) -> sqlite3.Connection:
    """Open the database of a file, which must exist, or one in memory (``path`` None); it commits each statement.

    ``wait``: seconds to wait for other processes; ``private``: no other process knows the file, so it is not locked.
    """
    name = ":memory:"
    if path is not None:
        uri = Path(path).absolute().as_uri()
        if not uri.startswith("file:///"):  # of another machine on Windows, which SQLite wants in the path
            uri = uri.replace("file:", "file://", 1)
        name = f"{uri}?mode=rw&nolock={int(private)}"
    database = sqlite3.connect(name, isolation_level=None, timeout=wait, check_same_thread=False, uri=path is not None)
    try:
        database.execute("PRAGMA synchronous = OFF")  # what was written survives the program, if not the system
    except sqlite3.Error:
        database.close()
        raise
    return database


def created(database: sqlite3.Connection) -> sqlite3.Connection:
    """Create the tables of a run file."""
    database.execute(f"PRAGMA application_id = {APPLICATION}")
    database.execute(f"PRAGMA user_version = {VERSION}")
    database.executescript(f"BEGIN; {SCHEMA} COMMIT;")
    for table, names in NAMES.items():
        database.executemany(_INSERT[table], enumerate(names))
    return database


def write(database: sqlite3.Connection, pending: Pending) -> None:
    """Write rows and updates in one transaction; writing them again changes nothing."""
    database.execute("BEGIN EXCLUSIVE")
    for table, rows in pending.rows.items():
        if table == "strings":
            _write_strings(database, rows)
        else:
            database.executemany(_INSERT[table], rows)
    for (table, *columns), values in pending.updates.items():
        assignments = ", ".join(f"{c} = nullif(?, -1)" for c in columns)
        numbered = [(*numbers, number) for number, numbers in values.items()]
        database.executemany(f"UPDATE {table} SET {assignments} WHERE id = ?", numbered)
    database.execute("COMMIT")


def remove_journal(path: str | os.PathLike[str]) -> None:
    """Remove the rollback journal of a program that was killed: SQLite would apply it to a new file at ``path``."""
    with suppress(OSError):
        os.unlink(f"{os.path.realpath(path)}-journal")


def drop_dangling(database: sqlite3.Connection) -> None:
    """Delete the rows that point to rows which are lost, and mean nothing without them."""
    for table, columns in COLUMNS.items():
        for column, target in columns.items():
            if target is not None and (table, column) not in OPTIONAL:
                database.execute(f"DELETE FROM {table} WHERE {column} NOT IN (SELECT id FROM {target})")


def decode(data: bytes) -> str:
    """Return a string as it was before :func:`write`."""
    return data.decode("utf-8", "surrogatepass")


def _write_strings(database: sqlite3.Connection, strings: Iterable[Sequence[Any]]) -> None:
    """Write strings, of which some, such as names of files, may not be UTF-8."""
    encoded = [(number, text.encode("utf-8", "surrogatepass")) for number, text in strings]
    database.executemany("INSERT OR REPLACE INTO strings VALUES (?, CAST(? AS TEXT))", encoded)


def read(database: sqlite3.Connection, meta: dict[str, Any]) -> Run:
    """Read all tables.  Raises RunFileError where a value has the wrong type, or a row points to none that is there."""
    database.text_factory = decode
    rows = {table: list(zip(*database.execute(query))) for table, query in _SELECT.items()}
    strings = database.execute("SELECT id, text FROM strings ORDER BY id").fetchall()
    if not all(isinstance(text, str) for _, text in strings):
        raise RunFileError("strings.text holds a value that is not text")
    ids: dict[str, Sequence[int]] = {table: columns[0] if columns else () for table, columns in rows.items()}
    ids["strings"] = [number for number, _ in strings]
    index = {table: {number: i for i, number in enumerate(numbers)} for table, numbers in ids.items()}
    index |= {table: {i: i for i in range(len(names))} for table, names in NAMES.items()}
    run = Run(meta, [text for _, text in strings])
    for table, columns in COLUMNS.items():
        for number, (column, target) in enumerate(columns.items(), 1):
            values = list(rows[table][number]) if rows[table] else []
            if not set(map(type, values)) <= {int}:
                raise RunFileError(f"{table}.{column} holds a value that is not an integer")
            if target is not None:
                known = index[target]
                values = [known.get(value, -1) for value in values]
                if -1 in values and (table, column) not in OPTIONAL:
                    raise RunFileError(f"{table}.{column} points to no row of {target}")
            run.tables[table][column] = values
    return run
