"""The log of a program that is profiled: rows of a run file, appended while the program runs."""

from __future__ import annotations

import json
import os
import sqlite3
import weakref
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager, suppress
from time import perf_counter_ns
from typing import Any

from tapegrad.tracing import database as d
from tapegrad.tracing.atomic import atomic
from tapegrad.tracing.database import Pending, RunFileError, created, opened, read, write
from tapegrad.tracing.derive import derive
from tapegrad.tracing.run import Run

_PATIENCE = 5.0
"""Seconds to wait at the end for other processes that read the file."""


class Log:
    """Appends rows to a run file, or to a database in memory (``path`` None).  Raises OSError.

    Rows are buffered, and written in one transaction by :meth:`flush`; while another process reads the file they wait.
    If the file cannot be written any more, :attr:`problem` says why, and the log continues in memory.  Callers hold the
    meter's lock.
    """

    INTERVAL = 100_000_000
    """Nanoseconds after which :meth:`flush` is due."""

    def __init__(self, path: str | os.PathLike[str] | None = None) -> None:
        self.path = None if path is None else os.path.abspath(path)
        self.problem = ""
        self.due = 0
        """When to flush, by ``perf_counter_ns``."""
        self.losses = 0
        """How often all rows that were written so far were lost."""
        self._texts: dict[str, int] = {}
        self._counts: Counter[str] = Counter()
        self._pending = Pending(defaultdict(list), defaultdict(dict))
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
                d.remove_journal(self.path)
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
        self.put(table, number, *values)
        return number

    def put(self, table: str, number: int, *values: int) -> None:
        """Append, or replace, the row ``number`` of a table whose ids are the caller's."""
        self._pending.rows[table].append([number, *values])

    def update(self, columns: tuple[str, ...], number: int, *values: int) -> None:
        """Set adjacent columns of the row ``number``; ``columns``: the table, and their names."""
        rows = self._pending.rows[columns[0]]
        at = number - rows[0][0] if rows else -1
        if 0 <= at < len(rows) and rows[at][0] == number:
            first = d.FIRST[columns[0], columns[1]]
            rows[at][first : first + len(values)] = values
        else:
            self._pending.updates[columns][number] = values

    def set(self, key: str, value: object) -> None:
        """Set a value of the table ``meta``."""
        self._pending.rows["meta"].append([key, json.dumps(value)])

    def text(self, text: str) -> int:
        """Return the id of a string."""
        number = self._texts.get(text)
        if number is None:
            number = self._texts[text] = len(self._texts)
            self._pending.rows["strings"].append([number, text])
        return number

    def next_id(self, table: str) -> int:
        """Return the id that :meth:`add` will give the next row of a table."""
        return self._counts[table]

    # The database ----------------------------------------------------------------------------------------------

    def flush(self, wait: float = 0) -> bool:
        """Write all rows that are pending, and return whether that succeeded; a forked child writes nothing.

        ``wait``: seconds to wait for other processes that read the file.
        """
        if self._flushing or self._pid != os.getpid():  # by a signal handler, in the middle
            return False
        began, pending, done = perf_counter_ns(), self._pending, False
        try:
            self._flushing = True
            self._pending = Pending(defaultdict(list), defaultdict(dict))
            with self._database(wait) as database:
                write(database, pending)
            done = True
        except (sqlite3.IntegrityError, OverflowError) as error:  # no database would take them
            self.problem, done = f"rows are left out: {error}", True
        except (sqlite3.Error, OSError) as error:
            if getattr(error, "sqlite_errorcode", 0) & 0xFF != sqlite3.SQLITE_BUSY:
                self.problem = getattr(error, "strerror", None) or str(error)
                self._continue_in_memory()
        finally:
            if not done:
                pending.extend(self._pending)
                self._pending = pending
            now = perf_counter_ns()
            self.due = now + max(self.INTERVAL, 10 * (now - began))
            self._flushing = False
        return done

    @contextmanager
    def _database(self, wait: float) -> Iterator[sqlite3.Connection]:
        """Open the database.  A file is not kept open: the program may fork, or close all files.  Raises OSError."""
        if self._memory is not None:
            if self._memory.in_transaction:  # which an interrupt has left
                self._memory.rollback()
            yield self._memory
            return
        assert self.path is not None
        if not self._is_ours():
            raise OSError(None, "it was removed or replaced")
        with closing(opened(self.path, wait)) as database:
            yield database

    def _is_ours(self) -> bool:
        """Return whether the file is there, and not another one of the program's."""
        assert self.path is not None
        try:
            if os.stat(self.path).st_ino != self._inode:
                return False
            with open(self.path, "rb") as file:
                return file.read(72)[68:] == d.APPLICATION.to_bytes(4, "big")  # numbers of inodes are used again
        except FileNotFoundError:
            return False
        except OSError:  # it may be read later: the program has too many files open, say
            return True

    def _continue_in_memory(self) -> None:
        """Continue with a copy of the file, or, if that is gone, without it; if it cannot be read now, do nothing."""
        memory = opened(None)
        try:
            with self._database(0) as file:
                file.backup(memory)
        except (sqlite3.Error, OSError):
            memory.close()
            if self._is_ours():
                return
            memory = created(opened(None))
            self.losses += 1
            self.problem += "; what was recorded before is lost"
            self._pending.rows["strings"] += [[number, text] for text, number in self._texts.items()]
        self._keep_in(memory)

    def delete(self, statements: Iterable[tuple[str, list[tuple[int, ...]]]]) -> list[int]:
        """Delete rows, and return their number for each statement; if that is not possible now, an empty list.

        ``statements``: what follows DELETE FROM, and its parameters, each time it is executed.
        """
        try:
            if not self.flush():
                return []
            with self._database(0) as database:
                database.execute("BEGIN EXCLUSIVE")
                counts = [database.executemany(f"DELETE FROM {where}", values).rowcount for where, values in statements]
                database.execute("COMMIT")
        except (sqlite3.Error, OSError):
            return []
        return counts

    def read(self, meta: dict[str, Any]) -> Run:
        """Return what was recorded so far.  Raises RunFileError if another process keeps the file from being read."""
        if not self.flush(_PATIENCE):
            self._continue_in_memory()
            if not self.flush():
                raise RunFileError(f"{self.path}: another process has locked it, or it cannot be read ({self.problem})")
        with self._database(_PATIENCE) as database:
            if self.losses:
                d.drop_dangling(database)
            run = read(database, meta)
        derive(run)
        return run

    def remove(self) -> None:
        """Remove the file, if it is still this log's and this process's."""
        if self._pid == os.getpid() and self.path is not None and self._is_ours():
            with suppress(OSError):
                os.unlink(self.path)
                d.remove_journal(self.path)
