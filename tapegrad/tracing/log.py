"""The log of a program that is profiled: rows of a run file, appended while the program runs."""

from __future__ import annotations

import json
import os
import sqlite3
import weakref
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from time import perf_counter_ns
from typing import Any

from tapegrad.tracing.atomic import atomic
from tapegrad.tracing.database import FIRST, created, opened, read, write
from tapegrad.tracing.derive import derive
from tapegrad.tracing.run import Run

_PATIENCE = 5.0
"""Seconds to wait for other processes that read the file."""


class Log:
    """Appends rows to a run file, or to a database in memory (``path`` None).  Raises OSError.

    Rows are buffered, and written in one transaction by :meth:`flush`.  If the file cannot be written any more,
    :attr:`problem` says why, and what comes is kept in memory.  Callers hold the meter's lock.
    """

    INTERVAL = 100_000_000
    """Nanoseconds after which :meth:`flush` is due."""

    def __init__(self, path: str | os.PathLike[str] | None = None) -> None:
        self.path = None if path is None else os.path.abspath(path)
        self.problem = ""
        self.due = 0
        """When to flush, by ``perf_counter_ns``."""
        self._texts: dict[str, int] = {}
        self._counts: Counter[str] = Counter()
        self._rows: dict[str, list[list[Any]]] = defaultdict(list)
        self._updates: dict[tuple[str, ...], dict[int, tuple[int, ...]]] = defaultdict(dict)
        self._chunks: list[tuple[Any, Any]] = []
        self._flushing = False
        self._pid = os.getpid()
        self._memory: sqlite3.Connection | None = None
        if self.path is None:
            self._keep_in(created(opened(None)))
            return
        try:
            with atomic(self.path) as part:
                part.touch()  # whose errors say more than SQLite's
                with closing(opened(part, private=True)) as database:
                    created(database)
        except sqlite3.OperationalError as error:
            raise OSError(None, str(error), self.path) from error
        self._inode = os.stat(self.path).st_ino

    def _keep_in(self, memory: sqlite3.Connection) -> None:
        self._memory = memory
        weakref.finalize(self, memory.close)

    # Rows ------------------------------------------------------------------------------------------------------

    def add(self, table: str, *values: int) -> int:
        """Append a row, and return its id."""
        number = self._counts[table]
        self._counts[table] = number + 1
        self._rows[table].append([number, *values])
        return number

    def update(self, columns: tuple[str, ...], number: int, *values: int) -> None:
        """Set adjacent columns of the row ``number``; ``columns``: the table, and their names."""
        rows = self._rows[columns[0]]
        if rows and number >= rows[0][0]:
            first = FIRST[columns[0], columns[1]]
            rows[number - rows[0][0]][first : first + len(values)] = values
        else:
            self._updates[columns][number] = values

    def set(self, key: str, value: object) -> None:
        """Set a value of the table ``meta``."""
        self._rows["meta"].append([key, json.dumps(value)])

    def text(self, text: str) -> int:
        """Return the id of a string."""
        number = self._texts.get(text)
        if number is None:
            number = self._texts[text] = len(self._texts)
            self._rows["strings"].append([number, text])
        return number

    def next_id(self, table: str) -> int:
        """Return the id of the row that will be added next."""
        return self._counts[table]

    # The database ----------------------------------------------------------------------------------------------

    def flush(self, wait: float = 0) -> None:
        """Write all rows that are buffered, unless somebody reads the file at this moment.

        ``wait``: seconds to wait for readers; rows that cannot be written then are kept in memory with all others.
        """
        if self._flushing:  # a signal handler's, in the middle
            return
        try:
            self._flushing = True
            self.due = perf_counter_ns() + self.INTERVAL
            self._chunks.append((self._rows, self._updates))
            self._rows, self._updates = defaultdict(list), defaultdict(dict)
            if self._pid != os.getpid():  # the file is the parent's
                self._chunks.clear()
                return
            written = len(self._chunks)
            try:
                with self.database(wait) as database:
                    write(database, self._chunks)
            except (sqlite3.Error, OSError) as error:
                if getattr(error, "sqlite_errorcode", 0) & 0xFF == sqlite3.SQLITE_BUSY and not wait:
                    return
                self._continue_in_memory(error)
            del self._chunks[:written]
        finally:
            self._flushing = False

    @contextmanager
    def database(self, wait: float = _PATIENCE) -> Iterator[sqlite3.Connection]:
        """Open the database.  A file is not kept open: the program may fork, or close all files.  Raises OSError."""
        if self._memory is not None:
            if self._memory.in_transaction:  # which an interrupt has left
                self._memory.rollback()
            yield self._memory
            return
        assert self.path is not None
        if os.stat(self.path).st_ino != self._inode:
            raise OSError(None, "it was replaced")
        with closing(opened(self.path, wait)) as database:
            yield database

    def _continue_in_memory(self, error: sqlite3.Error | OSError) -> None:
        self.problem = getattr(error, "strerror", None) or str(error)
        memory = opened(None)
        try:
            with self.database() as old:
                old.backup(memory)
        except (sqlite3.Error, OSError):
            self.problem += "; what was recorded before is lost"
            memory.close()
            memory = created(opened(None))
            self._chunks.insert(0, ({"strings": [(number, text) for text, number in self._texts.items()]}, {}))
        self._keep_in(memory)
        write(memory, self._chunks)

    def delete(self, table: str, where: str, *values: int) -> int:
        """Delete rows that were flushed, and return their number; 0 if the database cannot be changed now."""
        with suppress(sqlite3.Error, OSError), self.database() as database:
            return database.execute(f"DELETE FROM {table} WHERE {where}", values).rowcount
        return 0

    def ids(self, table: str, where: str) -> list[int]:
        """Return the ids of the rows of a table, as of the last flush that could write."""
        self.flush()
        with self.database() as database:
            return [number for (number,) in database.execute(f"SELECT id FROM {table} WHERE {where}")]

    def run(self, meta: dict[str, Any]) -> Run:
        """Return what was recorded so far."""
        self.flush(_PATIENCE)
        with self.database() as database:
            run = read(database, meta)
        derive(run)
        return run
