"""Run files: what is written is read again, obeys the schema, and no file whatever makes reading or a view fail."""

from __future__ import annotations

import copy
import gzip
import io
import json
from collections.abc import Callable
from importlib import resources
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rich.console import Console

from tapegrad.profile import compare
from tapegrad.profile.export import csv, memory_viz, perfetto, speedscope
from tapegrad.profile.report import rows, text
from tapegrad.profile.report.outputs import View
from tapegrad.profile.runs import Run, RunFileError, load, save
from tapegrad.profile.runs.file import parse, to_json
from tapegrad.profile.runs.timeline import at
from tapegrad.profile.viewer import html
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
SMALL = [
    to_json(made_runs.training(steps=1, blocks=2, size=4096, checkpointed=1)),
    to_json(made_runs.hostile()),
    to_json(made_runs.out_of_memory()),
    to_json(made_runs.several()),
    to_json(made_runs.captured()),
]
TABLES = [key for key, value in SMALL[0].items() if isinstance(value, dict) and key in Run({}).tables]


def schema() -> dict[str, Any]:
    return json.loads(resources.files("tapegrad.profile.runs").joinpath("schema.json").read_text("utf-8"))


def parsed(document: Any) -> Run:
    return parse(json.dumps(document).encode(), "a.json")


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
@pytest.mark.parametrize("ending", ["json", "json.gz"])
def test_what_is_saved_is_loaded_again(name: str, ending: str, tmp_path: Path) -> None:
    run, path = MAKERS[name](), tmp_path / f"run.{ending}"
    save(run, path)
    assert load(path) == run
    assert [p.name for p in tmp_path.iterdir()] == [path.name]
    assert (path.read_bytes()[:2] == b"\x1f\x8b") == (ending == "json.gz")


@pytest.mark.parametrize("name", MAKERS)
def test_a_saved_run_obeys_the_schema_and_every_view_works(name: str, tmp_path: Path) -> None:
    run = MAKERS[name]()
    jsonschema.Draft202012Validator.check_schema(schema())
    jsonschema.validate(json.loads(json.dumps(to_json(run))), schema())
    use(run, tmp_path)


@pytest.mark.parametrize(
    "change", [("version", 1), ("format", "x"), ("peak", {"bytes": 1.5}), ("allocs", {"x": ["y"]})]
)
def test_the_schema_refuses_what_is_wrong(change: tuple[str, Any]) -> None:
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(SMALL[0] | dict([change]), schema())


def changed(table: str, of: int = 0, **columns: Any) -> dict[str, Any]:
    """A small run with other values in the first rows of a table."""
    document = copy.deepcopy(SMALL[of])
    for column, value in columns.items():
        document[table][column][0] = value
    return document


@pytest.mark.parametrize(
    ("document", "says"),
    [
        (changed("allocs", bytes=-1), "allocs.bytes holds a negative number"),
        (changed("allocs", bytes=1 << 51), "more than 1 PiB"),
        (changed("allocs", bytes=1 << 70), "too large"),
        (changed("allocs", bytes=512.0), "not a list of integers"),
        (changed("allocs", bytes=True), "not a list of integers"),
        (changed("allocs", begin_ns=-5), "allocs.begin_ns holds a negative number"),
        (changed("allocs", end_seq=0), "ends before it begins"),
        (changed("allocs", end_seq=-2), "ends before it begins"),
        (changed("allocs", end_seq=5, end_ns=0), "ends before it begins"),
        (changed("allocs", category=-1), "allocs.category points outside"),
        (changed("allocs", category=10), "allocs.category points outside"),
        (changed("allocs", op=10**6), "allocs.op points outside"),
        (changed("allocs", remat_of=0), "does not lead back"),
        (changed("allocs", remat_of=3), "does not lead back"),
        (changed("calls", parent=1), "calls.parent does not lead to the start"),
        (changed("stacks", parent=0), "stacks.parent does not lead to the start"),
        (changed("stacks", frame=-1), "stacks.frame points outside"),
        (changed("changes", alloc=-1), "changes.alloc points outside"),
        (changed("changes", seq=0), "outside the life"),
        (changed("changes", seq=10**6), "outside the life"),
        (changed("ops", ns=-1), "ops.ns holds a negative number"),
        (changed("communication", of=3, bytes=-1), "communication.bytes holds a negative number"),
        (changed("communication", of=3, done_ns=5), "communication: one ends before it begins"),
        (changed("communication", of=3, under_way=2), "communication.under_way is neither 0 nor 1"),
        (changed("communication", of=3, walk=99), "communication.walk points outside"),
        (changed("walks", of=3, end_ns=-1), "walks: one ends before it begins"),
        (changed("ranks", of=3, peak_bytes=-1), "ranks.peak_bytes holds a negative number"),
        (changed("works", of=4, program=-1), "works.program points outside"),
        (changed("slots", of=4, bytes=-1), "slots.bytes holds a negative number"),
        (changed("slots", of=4, kind=5), "slots.kind points outside"),
        (changed("uses", of=4, slot=-1), "uses.slot points outside"),
        (changed("replays", of=4, program=2), "replays.program points outside"),
        (SMALL[0] | {"peak": SMALL[0]["peak"] | {"step": 7}}, "'peak'"),
        (SMALL[0] | {"version": 1}, "use the tapegrad that wrote it"),
        (SMALL[0] | {"strings": [1]}, "not a list of strings"),
        (SMALL[0] | {"sources": {"a": {"x": "y"}}}, "'sources'"),
        (SMALL[0] | {"meta": SMALL[0]["meta"] | {"limit_bytes": "6"}}, "limit_bytes"),
        ([], "not a run file"),
        ({"format": "tapegrad.run"}, "of version None"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_said_in_one_line(document: Any, says: str) -> None:
    with pytest.raises(RunFileError) as error:
        parsed(document)
    assert says in str(error.value)
    assert str(error.value).startswith("a.json: ") and "\n" not in str(error.value)


def test_the_small_run_is_sound() -> None:
    assert parsed(SMALL[0]).count("allocs") > 10


def test_files_that_are_none(tmp_path: Path) -> None:
    save(made_runs.training(), tmp_path / "a.json.gz")
    whole = (tmp_path / "a.json.gz").read_bytes()
    bomb = gzip.compress(b"[" * 1_000_000)
    for data in (b"", b"\x1f\x8b", whole[:-9], whole[: len(whole) // 2], b"\xff\xfe", b'{"a": NaN}', b"1" * 5000, bomb):
        (tmp_path / "b").write_bytes(data)
        with pytest.raises(RunFileError) as error:
            load(tmp_path / "b")
        assert "\n" not in str(error.value)
    for path in (tmp_path, tmp_path / "none", "a\0b"):
        with pytest.raises(RunFileError):
            load(path)


NUMBERS = st.one_of(
    st.integers(-2, 200), st.sampled_from([1 << 31, 1 << 49, 1 << 53, 1 << 62, -(1 << 62), 1 << 63]),
    st.sampled_from([None, True, 1.5, "1", [], {}]),
)  # fmt: skip
TEXTS = st.sampled_from(
    ["\ud800", "\0", "=1+1", "\x1b[2J", "", "a" * 5000, "\u202e", "\n", "[red]", "$x$", "C:\\", None, 3]
)


@st.composite
def documents(draw: st.DrawFn) -> dict[str, Any]:
    """A sound run with a few numbers, strings or parts replaced."""
    document = copy.deepcopy(draw(st.sampled_from(SMALL)))
    for _ in range(draw(st.integers(1, 4))):
        kind = draw(st.integers(0, 9))
        if kind < 6:
            table = document[draw(st.sampled_from(TABLES))]
            column = table[draw(st.sampled_from(sorted(table)))]
            if column:
                column[draw(st.integers(0, len(column) - 1))] = draw(NUMBERS)
        elif kind < 8:
            document["strings"][draw(st.integers(0, len(document["strings"]) - 1))] = draw(TEXTS)
        elif kind == 8:
            key = draw(st.sampled_from(["meta", "peak", "checks"]))
            document[key][draw(st.sampled_from(sorted(document[key])))] = draw(NUMBERS | TEXTS)
        else:
            key = draw(st.sampled_from(["device", "outcome"]))
            if isinstance(document["meta"][key], dict):
                name = draw(st.sampled_from(sorted(document["meta"][key])))
                document["meta"][key][name] = draw(NUMBERS | TEXTS)
    return document


@pytest.mark.slow
@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(documents())
def test_every_change_is_refused_or_every_view_works(tmp_path: Path, document: dict[str, Any]) -> None:
    try:
        run = parsed(document)
        use(run, tmp_path)
    except RunFileError as error:
        assert "\n" not in str(error)


@settings(max_examples=150)
@given(st.data())
def test_no_bytes_make_reading_fail(data: st.DataObject) -> None:
    plain = json.dumps(SMALL[1]).encode()
    found = bytearray(data.draw(st.sampled_from([plain, gzip.compress(plain, mtime=0)])))
    for _ in range(data.draw(st.integers(1, 3))):
        found[data.draw(st.integers(0, len(found) - 1))] = data.draw(st.integers(0, 255))
    try:
        parse(bytes(found[: data.draw(st.integers(0, len(found)))]), "x")
    except RunFileError as error:
        assert "\n" not in str(error)
