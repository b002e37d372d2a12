"""Run files: what is written is read again, and no file whatever makes reading or a view fail."""

from __future__ import annotations

import gzip
import io
import json
import platform
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rich.console import Console

from tapegrad.profile import compare
from tapegrad.profile.export import csv, memory_viz, perfetto, speedscope
from tapegrad.profile.report import rows, text
from tapegrad.profile.report.outputs import View
from tapegrad.profile.viewer import html
from tapegrad.tracing import file as run_file
from tapegrad.tracing.database import RunFileError
from tapegrad.tracing.file import load, save
from tapegrad.tracing.run import COLUMNS, Run
from tapegrad.tracing.timeline import at
from tests.profile import made_runs

MAKERS: dict[str, Callable[[], Run]] = {
    "training": lambda: made_runs.training(steps=2, checkpointed=2),
    "many": lambda: made_runs.many(300),
    "empty": made_runs.empty,
    "hostile": made_runs.hostile,
    "out of memory": made_runs.out_of_memory,
    "several": made_runs.several,
    "captured": made_runs.captured,
}
SMALL = {
    "training": made_runs.training(steps=1, blocks=2, size=4096, checkpointed=1),
    **{name: MAKERS[name]() for name in ("hostile", "out of memory", "several", "captured")},
}


def changed(folder: Path, name: str, *statements: str) -> Path:
    """A file that held a sound run before ``statements`` were executed on it."""
    path = folder / "a.sqlite"
    save(SMALL[name], path)
    with closing(sqlite3.connect(path)) as database, database:
        database.execute("PRAGMA ignore_check_constraints = ON")
        for statement in statements:
            database.execute(statement)
    return path


def use(run: Run, folder: Path) -> None:
    """Everything that shows a run."""
    for width, encoding in ((80, "utf-8"), (30, "ascii")):
        file = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
        console = Console(file=file, width=width, highlight=False)
        text.print_summary(run, console, path="a run.json")
        moments = ["peak", "end", *(f"step:{i}" for i in range(run.count("steps")))]
        if text.OOM in run.marks["kind"]:
            moments.append("oom")
        for moment in moments:
            seq = at(run, moment)
            text.print_summary(run, console, path=None, seq=seq)
            for by in rows.BY:
                text.print_table(run, console, rows.rows(run, seq, by, "idle"), by, seq, 3)
            json.dumps(View(moment, seq, "line", "name", 0, True).to_json(run))
        file.flush()
    for module in (csv, memory_viz, perfetto, speedscope):
        module.write(run, folder / "out")  # type: ignore[attr-defined]
    json.loads((folder / "out").read_text("utf-8"))
    compare.compare(run, run, "line")
    html.page(run)


@pytest.mark.parametrize("name", MAKERS)
def test_what_is_saved_is_loaded_again_and_every_view_works(name: str, tmp_path: Path) -> None:
    run, path = MAKERS[name](), tmp_path / "a run.sqlite"
    save(run, path)
    assert load(path) == run
    assert [p.name for p in tmp_path.iterdir()] == [path.name]
    use(run, tmp_path)


def test_a_run_file_answers_queries(tmp_path: Path) -> None:
    save(made_runs.training(steps=1, blocks=2, size=4096), tmp_path / "a.sqlite")
    with closing(sqlite3.connect(tmp_path / "a.sqlite")) as database:
        query = """
            SELECT categories.name, sum(bytes) FROM allocs JOIN categories ON categories.id = category
            WHERE end_seq IS NULL GROUP BY category ORDER BY category
        """
        assert database.execute(query).fetchall() == [("parameter", 2048), ("optimizer", 2048)]
        assert database.execute("PRAGMA foreign_key_check").fetchall() == []


@pytest.mark.parametrize("text", ["", "\0", "a\0b", "\ud800", "\udcff.py", "\U0001f4a5"])
def test_any_text_is_read_as_it_was(text: str, tmp_path: Path) -> None:
    run = made_runs.empty()
    run.strings.append(text)
    run.meta["program"] = text
    run.sources = {text: {"1": text}}
    save(run, tmp_path / "a.sqlite")
    assert load(tmp_path / "a.sqlite") == run


@pytest.mark.parametrize(
    ("name", "change", "says"),
    [
        ("training", "UPDATE allocs SET bytes = -1 WHERE id = 0", "CHECK constraint failed in allocs"),
        ("training", "UPDATE allocs SET bytes = (1 << 50) + 1 WHERE id = 0", "CHECK constraint failed in allocs"),
        ("training", "UPDATE allocs SET begin_ns = -5 WHERE id = 0", "CHECK constraint failed in allocs"),
        ("training", "UPDATE allocs SET end_seq = 0 WHERE id = 0", "CHECK constraint failed in allocs"),
        ("training", "UPDATE allocs SET end_seq = 500, end_ns = 0 WHERE id = 5", "CHECK constraint failed in allocs"),
        ("training", "UPDATE allocs SET remat_of = 3 WHERE id = 3", "CHECK constraint failed in allocs"),
        ("training", "UPDATE calls SET parent = 1 WHERE id = 1", "CHECK constraint failed in calls"),
        ("training", "UPDATE stacks SET parent = 1 WHERE id = 0", "CHECK constraint failed in stacks"),
        ("training", "UPDATE ops SET ns = -1 WHERE id = 0", "CHECK constraint failed in ops"),
        ("several", "UPDATE communication SET bytes = -1 WHERE id = 0", "CHECK constraint failed in communication"),
        ("several", "UPDATE communication SET done_ns = 5 WHERE id = 0", "CHECK constraint failed in communication"),
        ("several", "UPDATE communication SET under_way = 2 WHERE id = 0", "CHECK constraint failed in communication"),
        ("several", "UPDATE walks SET end_ns = -1 WHERE id = 0", "CHECK constraint failed in walks"),
        ("several", "UPDATE ranks SET peak_bytes = -1 WHERE id = 0", "CHECK constraint failed in ranks"),
        ("captured", "UPDATE slots SET bytes = -1 WHERE id = 0", "CHECK constraint failed in slots"),
        ("training", "UPDATE allocs SET bytes = 'many' WHERE id = 0", "allocs"),
        ("training", "UPDATE ops SET seq = 'late' WHERE id = 0", "ops.seq holds a value that is not an integer"),
        ("training", "UPDATE ops SET seq = 1.5 WHERE id = 0", "ops.seq holds a value that is not an integer"),
        ("training", "UPDATE ops SET name = x'00' WHERE id = 0", "ops.name holds a value that is not an integer"),
        ("training", "UPDATE strings SET text = x'00' WHERE id = 0", "strings.text holds a value that is not text"),
        ("training", "INSERT INTO meta VALUES ('recording', '5')", "'recording' is not an object"),
        ("training", "INSERT INTO meta VALUES ('x', 'NaN')", "NaN is not a number that a run file may hold"),
        ("training", "UPDATE meta SET value = x'ff' WHERE key = 'meta'", "damaged"),
        ("training", "UPDATE meta SET value = json_set(value, '$.rank', 'a') WHERE key = 'meta'", "meta.rank is not"),
        ("training", "UPDATE allocs SET category = 10 WHERE id = 0", "allocs.category points to no row of categories"),
        ("training", "UPDATE stacks SET frame = 99 WHERE id = 0", "stacks.frame points to no row of frames"),
        ("training", "UPDATE changes SET alloc = -1 WHERE id = 0", "changes.alloc points to no row of allocs"),
        ("captured", "UPDATE tasks SET program = -1 WHERE id = 0", "tasks.program points to no row of programs"),
        ("captured", "UPDATE slots SET kind = 5 WHERE id = 0", "slots.kind points to no row of slot_kinds"),
        ("training", "UPDATE changes SET seq = 0 WHERE id = 0", "outside the life"),
        ("training", "UPDATE changes SET seq = 1000000 WHERE id = 0", "outside the life"),
        ("training", "DELETE FROM phases WHERE id = 0", "its phases are not those of version 6"),
        ("training", "DROP TABLE steps", "its tables are not those of version 6"),
        ("training", "CREATE TRIGGER t AFTER INSERT ON ops BEGIN DELETE FROM ops; END", "its tables are not those"),
        ("training", "PRAGMA user_version = 4", "of version 4, and this tapegrad reads version 6; record the program"),
        ("training", "PRAGMA application_id = 0", "not a run file of tapegrad"),
        ("training", "DELETE FROM meta", "'meta' is not an object"),
        ("training", "UPDATE meta SET value = '{' WHERE key = 'meta'", "damaged"),
        ("training", "UPDATE meta SET value = '{}' WHERE key = 'peak'", "'peak' does not have the integers"),
        ("training", "UPDATE meta SET value = json_set(value, '$.step', 7) WHERE key = 'peak'", "'peak' is negative"),
        ("training", "UPDATE meta SET value = json_set(value, '$.bytes', 1.5) WHERE key = 'peak'", "'peak' does not"),
        ("training", "UPDATE meta SET value = '{\"a\": {\"x\": \"y\"}}' WHERE key = 'sources'", "'sources' is not"),
        ("training", "UPDATE meta SET value = json_set(value, '$.limit_bytes', '6') WHERE key = 'meta'", "limit_bytes"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_said_in_one_line(name: str, change: str, says: str, tmp_path: Path) -> None:
    with pytest.raises(RunFileError) as error:
        load(changed(tmp_path, name, change))
    assert says in str(error.value)
    assert str(error.value).startswith(str(tmp_path)) and "\n" not in str(error.value)


OLD = b'{"format":"tapegrad.run","version":4}' + bytes(10_000)


@pytest.mark.parametrize("data", [OLD, gzip.compress(OLD), b"tapegrad journal 1\n"], ids=["JSON", "gzip", "journal"])
def test_files_of_older_versions_are_refused_with_the_remedy(data: bytes, tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(data)
    with pytest.raises(
        RunFileError, match="a run file of an older tapegrad, which wrote JSON; record the program anew"
    ):
        load(tmp_path / "a")


def test_files_that_are_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(made_runs.training(), tmp_path / "a.sqlite")
    whole = (tmp_path / "a.sqlite").read_bytes()
    for data in (b"", whole[:-9000], whole[: len(whole) // 2], whole[:100], b"\xff\xfe", b"1" * 5000):
        (tmp_path / "b").write_bytes(data)
        with pytest.raises(RunFileError) as error:
            load(tmp_path / "b")
        assert "\n" not in str(error.value)
    for path in (tmp_path, tmp_path / "none", "a\0b"):
        with pytest.raises(RunFileError):
            load(path)
    monkeypatch.setattr(run_file, "MAX_BYTES", 1000)
    with pytest.raises(RunFileError, match="larger than"):
        load(tmp_path / "a.sqlite")


def test_a_recording_of_another_machine_shows_no_file_of_this_one(tmp_path: Path) -> None:
    path = tmp_path / "secret.py"
    path.write_text("password\n")
    here = platform.node()
    for host, name, shown in (("elsewhere", path, False), (here, path, True), (here, "/etc/passwd", False)):
        run = made_runs.training(steps=1, file=str(name))
        save(run, tmp_path / "a.sqlite")
        with closing(sqlite3.connect(tmp_path / "a.sqlite")) as database, database:
            database.execute("UPDATE frames SET line = 1")
            recording = json.dumps({"host": host, "source": True})
            database.execute("INSERT INTO meta VALUES ('recording', ?)", (recording,))
        assert load(tmp_path / "a.sqlite").sources == ({str(path): {"1": "password"}} if shown else {})


def test_a_file_that_cannot_be_written_is_one_error_and_nothing_is_left(tmp_path: Path) -> None:
    save(made_runs.training(), tmp_path / "a.sqlite")
    before = (tmp_path / "a.sqlite").read_bytes()
    for path in (tmp_path / "none" / "a.sqlite", tmp_path):
        with pytest.raises(OSError, match=path.name):
            save(made_runs.empty(), path)
    run = made_runs.training()
    run.allocs["bytes"][0] = -1
    with pytest.raises(sqlite3.IntegrityError):
        save(run, tmp_path / "a.sqlite")
    assert [p.name for p in tmp_path.iterdir()] == ["a.sqlite"] and (tmp_path / "a.sqlite").read_bytes() == before


NUMBERS = [*range(-2, 12), 200, 1 << 31, 1 << 49, 1 << 53, 1 << 62, -(1 << 62), (1 << 63) - 1, None, 1.5, "1", b""]
TEXTS = ["\0", "=1+1", "\x1b[2J", "", "a" * 5000, "\u202e", "\n", "[red]", "$x$", "C:\\", "{}", "[1]", "3"]


@pytest.mark.slow
@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_every_change_is_refused_or_every_view_works(tmp_path: Path, data: st.DataObject) -> None:
    path = changed(tmp_path, data.draw(st.sampled_from(sorted(SMALL))))
    with closing(sqlite3.connect(path)) as database:
        database.execute("PRAGMA ignore_check_constraints = ON")
        for _ in range(data.draw(st.integers(1, 4))):
            kind = data.draw(st.integers(0, 9))
            if kind < 7:
                table = data.draw(st.sampled_from(sorted(COLUMNS)))
                column, value = data.draw(st.sampled_from(sorted(COLUMNS[table]))), data.draw(st.sampled_from(NUMBERS))
            else:
                table, column = ("strings", "text") if kind < 9 else ("meta", "value")
                value = data.draw(st.sampled_from(TEXTS))
            rows = database.execute(f"SELECT rowid FROM {table}").fetchall()
            if rows:
                row = data.draw(st.sampled_from(rows))[0]
                try:
                    database.execute(f'UPDATE {table} SET "{column}" = ? WHERE rowid = ?', (value, row))
                except sqlite3.IntegrityError:  # NOT NULL
                    continue
        database.commit()
    try:
        use(load(path), tmp_path)
    except RunFileError as error:
        assert "\n" not in str(error)


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_no_bytes_make_reading_fail(tmp_path: Path, data: st.DataObject) -> None:
    path = tmp_path / "hostile.sqlite"
    if not path.exists():
        save(SMALL["hostile"], path)
    found = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 30))):
        found[data.draw(st.integers(0, len(found) - 1))] = data.draw(st.integers(0, 255))
    (tmp_path / "b").write_bytes(found[: data.draw(st.sampled_from([len(found), len(found) // 2]))])
    try:
        load(tmp_path / "b")
    except RunFileError as error:
        assert "\n" not in str(error)
