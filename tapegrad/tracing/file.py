"""Run files: SQLite databases with the tables of ``schema.sql``.

A program that is profiled appends to its run file (``log.py``), which can be read at any time, also after the program
was killed; a run that is in memory is written at once.  A file may come from anywhere: whatever is wrong with it ends
in one RunFileError with one line.  Constraints on single rows are the schema's, and SQLite checks them; those between
rows are checked here.
"""

from __future__ import annotations

import json
import os
import platform
import sqlite3
import zlib
from collections import defaultdict
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

from tapegrad.tracing.atomic import atomic
from tapegrad.tracing.database import (
    APPLICATION,
    VERSION,
    Pending,
    RunFileError,
    created,
    decode,
    opened,
    read,
    remove_journal,
    write,
)
from tapegrad.tracing.derive import derive
from tapegrad.tracing.names import NAMES
from tapegrad.tracing.processes import runs
from tapegrad.tracing.run import Run
from tapegrad.tracing.sources import sources_of

MAX_BYTES = 4 << 30
"""The most bytes of a file that is read."""
_OLD = (b'{"format":"tapegrad.run"', b"tapegrad journal")
_KILLED = "killed: it ended without completing its run file; this is what it had recorded"
_RUNNING = "it is still running; this is what it has recorded so far"


def save(run: Run, path: str | os.PathLike[str]) -> None:
    """Write ``run`` to ``path``: all of it, or (on an error) nothing.  Raises OSError."""
    meta = {"meta": run.meta, "peak": run.peak, "checks": run.checks, "sources": run.sources}
    pending = Pending(defaultdict(list), defaultdict(dict))
    pending.rows["meta"] = [[key, json.dumps(value)] for key, value in meta.items()]
    pending.rows["strings"] = [[i, text] for i, text in enumerate(run.strings)]
    for table, columns in run.tables.items():
        pending.rows[table] = [[i, *row] for i, row in enumerate(zip(*columns.values(), strict=True))]
    try:
        with atomic(Path(path)) as part:
            part.touch()  # whose errors say more than SQLite's
            with closing(opened(part, private=True)) as database:
                write(created(database), pending)
            remove_journal(path)
    except sqlite3.OperationalError as error:
        raise OSError(None, str(error), os.fspath(path)) from error


def load(path: str | os.PathLike[str]) -> Run:
    """Read and check a run file, also one that a program is writing, or was writing when it was killed.

    Raises RunFileError, with one line that says what is wrong.
    """
    name = os.fspath(path)
    try:
        return _loaded(name)
    except OSError as e:
        raise RunFileError(f"{name}: {e.strerror or e}") from e
    except RunFileError as e:
        raise RunFileError(f"{name}: {e}") from None
    except sqlite3.OperationalError as e:
        raise RunFileError(f"{name}: cannot be read now ({_first_line(e)})") from None
    except (sqlite3.Error, zlib.error, ValueError, TypeError, LookupError, RecursionError, OverflowError) as e:
        if "\0" in name:
            raise RunFileError(f"{name!r}: {e}") from None
        raise RunFileError(f"{name}: not a run file of tapegrad, or damaged ({_first_line(e)})") from None


def _loaded(name: str) -> Run:
    with open(name, "rb") as file:
        begin = file.read(100)
    if begin.startswith(b"\x1f\x8b"):
        begin = zlib.decompressobj(wbits=31).decompress(begin, 100)
    if begin.startswith(_OLD):
        raise RunFileError("a run file of an older tapegrad, which wrote JSON; record the program anew")
    if not begin.startswith(b"SQLite format 3\0"):
        raise RunFileError("not a run file of tapegrad")
    if os.path.getsize(name) > MAX_BYTES:
        raise RunFileError(f"larger than {MAX_BYTES >> 30} GiB; that is no run file")
    with closing(opened(name, wait=5)) as database:
        database.execute("PRAGMA trusted_schema = OFF")
        database.execute("PRAGMA cell_size_check = ON")
        database.text_factory = decode
        database.execute("BEGIN")
        _check_schema(database)
        rows = database.execute("SELECT key, value FROM meta").fetchall()
        meta = {key: json.loads(value, parse_constant=_refuse) for key, value in rows}
        run = read(database, _meta(meta.get("meta")))
    _check_changes(run)
    recording = meta.get("recording")
    if not isinstance(recording, dict | None):
        raise RunFileError("'recording' is not an object")
    run.checks = _numbers("checks", meta.get("checks", run.checks), run.checks)
    if recording is None:
        run.peak = _numbers("peak", meta.get("peak"), run.peak)
        if run.peak["bytes"] < 0 or not -1 <= run.peak["step"] < run.count("steps"):
            raise RunFileError("'peak' is negative, or in a step that is not there")
        run.sources = _sources(meta.get("sources", {}))
    else:
        run.meta["outcome"] = _outcome(run.meta, recording)
        derive(run)
        if recording.get("source") and recording.get("host") == platform.node():
            run.sources = sources_of(run, only_modules=True)  # a file may name any file of this machine's
    return run


def _check_schema(database: sqlite3.Connection) -> None:
    application, version = (database.execute(f"PRAGMA {p}").fetchone()[0] for p in ("application_id", "user_version"))
    if application != APPLICATION:
        raise RunFileError("not a run file of tapegrad")
    if version != VERSION:
        raise RunFileError(f"of version {version}, and this tapegrad reads version {VERSION}; record the program anew")
    with closing(created(opened(None))) as expected:
        tables = "SELECT type, name, sql FROM sqlite_master ORDER BY name"
        if database.execute(tables).fetchall() != expected.execute(tables).fetchall():
            raise RunFileError(f"its tables are not those of version {VERSION}")
        for table in NAMES:
            names = f"SELECT * FROM {table}"
            if database.execute(names).fetchall() != expected.execute(names).fetchall():
                raise RunFileError(f"its {table} are not those of version {VERSION}")
    if (wrong := database.execute("PRAGMA integrity_check(1)").fetchone()[0]) != "ok":
        raise RunFileError(f"damaged: {_first_line(wrong)}")


def _check_changes(run: Run) -> None:
    a = run.allocs
    for seq, alloc in zip(run.changes["seq"], run.changes["alloc"]):
        if seq <= a["begin_seq"][alloc] or 0 <= a["end_seq"][alloc] <= seq:
            raise RunFileError("changes: one lies outside the life of its allocation")


def _outcome(meta: dict[str, Any], recording: Mapping[str, Any]) -> dict[str, object]:
    """Return how the program of a file that is not complete ended, as far as this machine can tell."""
    pid: Any = meta.get("pid")
    here = recording.get("host") == platform.node() and type(pid) is int and pid > 0 and os.name == "posix"
    if here and runs(pid, recording.get("created")):
        return {"kind": "running", "code": 0, "message": _RUNNING}
    return {"kind": "killed", "code": 137, "message": _KILLED}


def _first_line(text: object) -> str:
    return next(iter(str(text).splitlines()), "")[:100]


def _meta(meta: object) -> dict[str, Any]:
    if not isinstance(meta, dict):
        raise RunFileError("'meta' is not an object")
    argv, outcome, device = meta.get("argv"), meta.setdefault("outcome", {"kind": "", "code": 0}), meta.get("device")
    if not isinstance(argv, list) or not all(isinstance(a, str) for a in argv):
        raise RunFileError("meta.argv is not a list of strings")
    if not isinstance(outcome, dict) or not isinstance(outcome.get("kind"), str) or not _is_int(outcome.get("code")):
        raise RunFileError("meta.outcome has no kind and code")
    if not isinstance(device, dict) or not isinstance(device.get("name"), str):
        raise RunFileError("meta.device has no name")
    for key in ("tapegrad", "program"):
        if not isinstance(meta.get(key), str):
            raise RunFileError(f"meta.{key} is not a string")
    for key, value in (("limit_bytes", meta.get("limit_bytes")), ("total_bytes", device.get("total_bytes"))):
        if value is not None and not (_is_int(value) and value >= 0):
            raise RunFileError(f"meta: {key} is not a number of bytes")
    if not _is_int(rank := meta.get("rank", 0)) or rank < 0:
        raise RunFileError("meta.rank is not a number of a rank")
    if not isinstance(outcome.get("message", ""), str):
        raise RunFileError("meta.outcome.message is not a string")
    return meta


def _numbers(what: str, numbers: object, example: dict[str, int]) -> dict[str, int]:
    if not isinstance(numbers, dict) or set(numbers) != set(example) or not all(_is_int(v) for v in numbers.values()):
        raise RunFileError(f"{what!r} does not have the integers {', '.join(example)}")
    return numbers


def _sources(sources: object) -> dict[str, dict[str, str]]:
    if not isinstance(sources, dict) or not all(
        isinstance(lines, dict) and all(k.isdecimal() and len(k) < 10 and isinstance(v, str) for k, v in lines.items())
        for lines in sources.values()
    ):
        raise RunFileError("'sources' is not text by file and line")
    return sources


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not a number that a run file may hold")


def _is_int(value: object) -> bool:
    return type(value) is int and abs(value) <= 1 << 62
