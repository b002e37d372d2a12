"""Run files on disk: JSON, compressed by gzip if the name ends in ``.gz``; checked when read.

A file may come from anywhere: whatever is wrong with it ends in one RunFileError with one line, never in another
exception, and nothing in it is executed.  ``schema.json`` describes the format for others.
"""

from __future__ import annotations

import gzip
import json
import os
import zlib
from pathlib import Path
from typing import Any

from tapegrad.errors import TapegradError
from tapegrad.profile.report.units import first_line
from tapegrad.profile.runs.model import CATEGORIES, COLUMNS, KINDS, MARKS, PHASES, SLOT_KINDS, Run
from tapegrad.profile.runs.whole import whole

FORMAT = "tapegrad.run"
VERSION = 4
JOURNAL = ".journal"
"""What is added to the name of a run file for that of the journal, which lies beside it until the run file is whole."""
_JOURNAL_BEGINS = b"tapegrad journal "
MAX_BYTES = 2 << 30
"""The most a file may unpack to; a small file that unpacks to more is an attack."""
_CHOICES = {"categories": CATEGORIES, "phases": PHASES, "kinds": KINDS, "marks": MARKS, "slot_kinds": SLOT_KINDS}
_LARGEST = 1 << 62
_MOST_BYTES = 1 << 50
_NEEDED = {
    ("stacks", "frame"), ("changes", "alloc"), ("works", "program"), ("slots", "program"), ("uses", "slot"),
    ("replays", "program"),
}  # fmt: skip
"""Columns that point at rows and never at none; nor do categories, phases and kinds."""
_NOT_NEGATIVE = (
    ("allocs", "begin_seq"), ("allocs", "begin_ns"), ("allocs", "bytes"), ("allocs", "requested"), ("ops", "seq"),
    ("ops", "ns"), ("marks", "seq"), ("marks", "ns"), ("calls", "begin_ns"), ("steps", "begin_ns"),
    ("communication", "rank"), ("communication", "ranks"), ("communication", "bytes"), ("communication", "entered_ns"),
    ("communication", "waited_ns"), ("walks", "rank"), ("walks", "begin_ns"), ("ranks", "rank"), ("ranks", "begin_ns"),
    ("ranks", "peak_bytes"), ("ranks", "sent_bytes"), ("programs", "bytes"), ("works", "cost"), ("slots", "bytes"),
    ("replays", "seq"), ("replays", "ns"),
)  # fmt: skip


class RunFileError(TapegradError, ValueError):
    """A run file that cannot be read, or is none."""


def save(run: Run, path: str | os.PathLike[str]) -> None:
    """Write ``run`` to ``path``: all of it, or (on an error) nothing.  Raises OSError."""
    path = Path(path)
    text = json.dumps(to_json(run), ensure_ascii=True, separators=(",", ":"), allow_nan=False).encode()
    data = gzip.compress(text, compresslevel=5, mtime=0) if path.suffix == ".gz" else text
    with whole(path) as part:
        part.write_bytes(data)


def to_json(run: Run) -> dict[str, Any]:
    """``run`` as the JSON object that a run file holds."""
    return {
        "format": FORMAT, "version": VERSION, "meta": run.meta, "categories": list(CATEGORIES),
        "phases": list(PHASES), "kinds": list(KINDS), "mark_kinds": list(MARKS), "peak": run.peak,
        "checks": run.checks, "strings": run.strings, "sources": run.sources, **run.tables,
    }  # fmt: skip


def load(path: str | os.PathLike[str]) -> Run:
    """Read and check a run file, or the journal that its program, if it was killed, has left beside it.

    Raises RunFileError, with one line that says what is wrong.
    """
    name = os.fspath(path)
    if not name.endswith(JOURNAL) and os.path.exists(name + JOURNAL):
        name += JOURNAL
    try:
        with open(name, "rb") as file:
            data = file.read(MAX_BYTES + 1)
    except OSError as e:
        raise RunFileError(f"{name}: {e.strerror or e}") from e
    except ValueError as e:  # a name with a zero byte
        raise RunFileError(f"{name!r}: {e}") from e
    return parse(data, name)


def parse(data: bytes, name: str) -> Run:
    """The run in the bytes of a file called ``name``.  Raises RunFileError."""
    if data.startswith(_JOURNAL_BEGINS):
        from tapegrad.profile.recorder.recovered import recover  # what records is not needed otherwise

        return recover(data, name)
    if data[:2] == b"\x1f\x8b":
        data = _unpacked(data, name)
    if len(data) > MAX_BYTES:
        raise RunFileError(f"{name}: unpacks to more than {MAX_BYTES >> 30} GiB; that is no run file")
    try:
        content = json.loads(data.decode("utf-8"), parse_constant=_refuse)
    except (ValueError, RecursionError) as e:
        raise RunFileError(f"{name}: not a run file of tapegrad, or cut off ({first_line(e)[:100]})") from None
    try:
        return checked(content)
    except RunFileError as e:
        raise RunFileError(f"{name}: {e}") from None


def _unpacked(data: bytes, name: str) -> bytes:
    unpacker = zlib.decompressobj(wbits=31)
    try:
        unpacked = unpacker.decompress(data, MAX_BYTES + 1)
    except zlib.error as e:
        raise RunFileError(f"{name}: damaged ({first_line(e)[:100]})") from None
    if not unpacker.eof and len(unpacked) <= MAX_BYTES:
        raise RunFileError(f"{name}: cut off: the end of the compressed data is missing")
    return unpacked


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no number that a run file may hold")


def checked(data: object) -> Run:
    """The run that a JSON object describes.  Raises RunFileError."""
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise RunFileError("not a run file of tapegrad")
    version = data.get("version")
    if not _is_int(version) or version != VERSION:
        raise RunFileError(
            f"of version {version!r:.20}, and this tapegrad reads version {VERSION}; use the tapegrad that wrote it"
        )
    for key, choices in (("categories", CATEGORIES), ("phases", PHASES), ("kinds", KINDS), ("mark_kinds", MARKS)):
        if data.get(key) != list(choices):
            raise RunFileError(f"{key!r} are not those of version {VERSION}")
    strings = data.get("strings")
    if not isinstance(strings, list) or not all(isinstance(s, str) for s in strings):
        raise RunFileError("'strings' is not a list of strings")
    run = Run(_meta(data.get("meta")), strings)
    for name, columns in COLUMNS.items():
        run.tables[name] = _table(name, columns, data.get(name))
    for name, columns in COLUMNS.items():
        for column, into in columns.items():
            if into is not None:
                needed = into in _CHOICES or (name, column) in _NEEDED
                _check_range(f"{name}.{column}", run.tables[name][column], 0 if needed else -1, _size(run, into))
    _check_stacks(run)
    _check_lives(run)
    run.peak = _numbers("peak", data.get("peak"), run.peak)
    run.checks = _numbers("checks", data.get("checks"), run.checks)
    if run.peak["bytes"] < 0 or not -1 <= run.peak["step"] < run.count("steps"):
        raise RunFileError("'peak' is negative, or in a step that is not there")
    run.sources = _sources(data.get("sources", {}))
    return run


def _table(name: str, columns: dict[str, str | None], columns_of: object) -> dict[str, list[int]]:
    if not isinstance(columns_of, dict) or set(columns_of) != set(columns):
        raise RunFileError(f"table {name!r} does not have the columns {', '.join(columns)}")
    for column, values in columns_of.items():
        # bool is an int to isinstance, and a float equal to one is not
        if not isinstance(values, list) or any(type(v) is not int for v in values):
            raise RunFileError(f"{name}.{column} is not a list of integers")
        if values and not -_LARGEST <= min(values) <= max(values) <= _LARGEST:
            raise RunFileError(f"{name}.{column} holds a number too large")
    if len({len(values) for values in columns_of.values()}) != 1:
        raise RunFileError(f"the columns of {name!r} differ in length")
    return columns_of


def _size(run: Run, into: str) -> int:
    if into == "strings":
        return len(run.strings)
    return len(_CHOICES[into]) if into in _CHOICES else run.count(into)


def _check_range(what: str, values: list[int], least: int, size: int) -> None:
    if values and not least <= min(values) <= max(values) < size:
        raise RunFileError(f"{what} points outside its table of {size}")


def _check_stacks(run: Run) -> None:
    """Parents come first, so following them always ends."""
    for name in ("stacks", "calls"):
        if any(parent >= row for row, parent in enumerate(run.tables[name]["parent"])):
            raise RunFileError(f"{name}.parent does not lead to the start")


def _check_lives(run: Run) -> None:
    """Bytes and times are not negative, nothing ends before it begins, and changes lie in between."""
    for name, column in _NOT_NEGATIVE:
        if min(run.tables[name][column], default=0) < 0:
            raise RunFileError(f"{name}.{column} holds a negative number")
    a = run.allocs
    if max(a["bytes"], default=0) > _MOST_BYTES or max(a["requested"], default=0) > _MOST_BYTES:
        raise RunFileError(f"allocs.bytes holds more than {_MOST_BYTES >> 50} PiB in one allocation")
    for begin, end, begin_ns, end_ns in zip(a["begin_seq"], a["end_seq"], a["begin_ns"], a["end_ns"]):
        if end != -1 and not (begin < end and begin_ns <= end_ns):
            raise RunFileError("allocs: one ends before it begins")
    for seq, alloc in zip(run.changes["seq"], run.changes["alloc"]):
        if seq <= a["begin_seq"][alloc] or 0 <= a["end_seq"][alloc] <= seq:
            raise RunFileError("changes: one lies outside the life of its allocation")
    if any(old >= row for row, old in enumerate(a["remat_of"])):
        raise RunFileError("allocs.remat_of does not lead back")
    _check_times(run)


def _check_times(run: Run) -> None:
    """What ranks did together ends after it began."""
    c = run.communication
    for table, begins, ends in (
        ("communication", c["entered_ns"], c["done_ns"]),
        ("walks", run.walks["begin_ns"], run.walks["end_ns"]),
        ("ranks", run.ranks["begin_ns"], run.ranks["end_ns"]),
    ):
        if any(end < begin and not (end == -1 and table == "communication") for begin, end in zip(begins, ends)):
            raise RunFileError(f"{table}: one ends before it begins")
    if not set(c["under_way"]) <= {0, 1}:
        raise RunFileError("communication.under_way is neither 0 nor 1")


def _meta(meta: object) -> dict[str, Any]:
    if not isinstance(meta, dict):
        raise RunFileError("'meta' is not an object")
    argv, outcome, device = meta.get("argv"), meta.get("outcome"), meta.get("device")
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


def _is_int(value: object) -> bool:
    return type(value) is int and abs(value) <= _LARGEST
