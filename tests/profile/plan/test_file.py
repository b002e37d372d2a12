"""Plan files: what is written comes back, matches the schema, and nothing else gets in."""

from __future__ import annotations

import json
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tapegrad.memory import plan as plan_module
from tapegrad.profile.plan.file import Plan, Point, load, save, to_json
from tapegrad.remat import program_files
from tapegrad.remat.plan import Action, PlanError, read_actions
from tapegrad.tracing.file import save as save_run
from tests.profile.made_runs import empty

ACTIONS = [
    Action("checkpoint", "layer", "Block", "model.py", 40, (0, 2), "lib/model.py"),
    Action("offload", "function", "é </script> \x1b[2J", "C:\\x.py", 3, (1,)),
]


def a_plan() -> Plan:
    return Plan(
        {"file": "r.sqlite", "program": "t.py", "argv": ["t.py", "-x"], "device": "cpu", "tapegrad": "0"},
        ACTIONS, Point(1 << 20, 5_000_000, tuple(ACTIONS)), 3 << 20, 4_000_000, 1 << 19, None,
        {"budget_bytes": 1 << 20, "max_slowdown_permille": None}, "milp",
        [Point(3 << 20, 4_000_000, ()), Point(1 << 20, None, tuple(ACTIONS))],
    )  # fmt: skip


def test_a_plan_comes_back(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    save(a_plan(), path)
    assert load(path) == a_plan()
    assert read_actions(path) == (ACTIONS, None)
    assert [p.name for p in tmp_path.iterdir()] == ["plan.json"]
    assert path.read_bytes().isascii()


def test_nothing_is_left_of_a_plan_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "plan.json").mkdir()
    with pytest.raises(OSError):
        save(a_plan(), tmp_path / "plan.json")
    assert [p.name for p in tmp_path.iterdir()] == ["plan.json"]


def test_plans_match_the_schema() -> None:
    jsonschema = pytest.importorskip("jsonschema")
    schema = json.loads(files("tapegrad.profile.plan").joinpath("schema.json").read_text(encoding="utf-8"))
    jsonschema.Draft202012Validator.check_schema(schema)
    jsonschema.validate(to_json(a_plan()), schema)
    for change in ({"version": 2}, {"actions": [{}]}, {"smallest_bytes": -1}, {"measured": {}}, {"pareto": [1]}):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(to_json(a_plan()) | change, schema)


ROW = {"do": "checkpoint", "kind": "layer", "name": "B", "file": "m.py", "line": 1, "ordinals": [0]}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": "x"}, "not a plan"),
        ({"version": 2}, "version 2.*reads version 1"),
        ({"version": True}, "version True"),
        ({"version": "1"}, "of version '1'"),
        ({"actions": {}}, "'actions' is not a list"),
        ({"actions": [1]}, "action 0 does not have"),
        ({"actions": [ROW, {**ROW, "do": "rm -rf"}]}, "action 1: 'do' is one of"),
        ({"actions": [{**ROW, "kind": "scope"}]}, "'kind' one of"),
        ({"actions": [{**ROW, "name": 1}]}, "name and file"),
        ({"actions": [{**ROW, "file": "a\0b"}]}, "name and file"),
        ({"actions": [{**ROW, "relative": None}]}, "relative is not a string"),
        ({"actions": [{**ROW, "line": -1}]}, "line and ordinals"),
        ({"actions": [{**ROW, "line": True}]}, "line and ordinals"),
        ({"actions": [{**ROW, "ordinals": [0.0]}]}, "line and ordinals"),
        ({"actions": [{**ROW, "ordinals": "0"}]}, "line and ordinals"),
        ({"actions": [{**ROW, "ordinals": [1 << 62]}]}, "line and ordinals"),
        ({"memory_budget": "4GiB"}, "'memory_budget'"),
        ({"memory_budget": 0}, "'memory_budget'"),
        ({"run": []}, "'run' does not have"),
        ({"run": {"file": "a", "program": "b", "device": "c", "tapegrad": "d", "argv": [1]}}, "run.argv"),
        ({"measured": {"peak_bytes": None}}, "'measured' has no peak_bytes"),
        ({"predicted": {"peak_bytes": 1, "step_ns": -1}}, "step_ns is neither"),
        ({"smallest_bytes": None}, "'smallest_bytes'"),
        ({"solver": 1}, "'solver'"),
        ({"asked": {"x": "y"}}, "'asked'"),
        ({"pareto": {}}, "'pareto' is not a list"),
        ({"pareto": [{"peak_bytes": 1, "step_ns": 1, "actions": 1}]}, "pareto point 0: 'actions'"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    path = tmp_path / "p.json"
    path.write_text(json.dumps(to_json(a_plan()) | change))
    with pytest.raises(PlanError, match=message) as caught:
        load(path)
    assert "\n" not in str(caught.value) and str(caught.value).startswith(str(path))


@pytest.mark.parametrize(
    "data", [b"", b"\xff\xfe", b"[" * 100_000, b"{", b"null", b'{"format": NaN}', b"\x1f\x8b\x08" + bytes(50)]
)
def test_what_is_no_json_is_refused_in_one_line(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "p.json"
    path.write_bytes(data)
    with pytest.raises(PlanError, match="not a plan") as caught:
        load(path)
    assert "\n" not in str(caught.value)
    assert data != b"{" or "(Expecting property name" in str(caught.value)


def test_a_run_is_told_from_a_plan(tmp_path: Path) -> None:
    save_run(empty(), tmp_path / "run.sqlite")
    with pytest.raises(PlanError, match="this is a run, not a plan; make one with tapegrad plan"):
        read_actions(tmp_path / "run.sqlite")


def test_plans_without_relative_names_are_read(tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    path.write_text(json.dumps(to_json(a_plan()) | {"actions": [ROW]}))
    assert load(path).actions == [Action("checkpoint", "layer", "B", "m.py", 1, (0,))]


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    for path in (tmp_path / "none.json", tmp_path, "a\0b"):
        with pytest.raises(PlanError):
            load(path)


_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda x: st.lists(x, max_size=3) | st.dictionaries(st.text(max_size=5), x, max_size=3),
)


@settings(max_examples=200, deadline=None)
@given(st.sampled_from(sorted(to_json(a_plan()))), _json)
def test_whatever_stands_there_only_one_error_comes_out(tmp_path_factory: Any, key: str, value: Any) -> None:
    path = tmp_path_factory.getbasetemp() / "any.json"
    path.write_text(json.dumps(to_json(a_plan()) | {key: value}))
    try:
        load(path)
    except PlanError as e:
        assert "\n" not in str(e)


def test_a_definition_is_in_its_file_and_in_what_that_is_a_copy_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(program_files, "program_folder", lambda: str(tmp_path))
    monkeypatch.chdir(tmp_path)
    here, other = str(tmp_path / "lib" / "model.py"), str(tmp_path / "lib" / "other.py")
    for file, relative, places in (
        (here, "", [True, True, False, False]),
        ("/elsewhere/lib/model.py", "lib/model.py", [True, True, False, True]),
        ("/elsewhere/lib/model.py", "", [False, False, False, True]),
        ("/elsewhere/lib/model.py", "lib/none.py", [False, False, False, True]),
    ):
        action = Action("checkpoint", "function", "f", file, 1, (0,), relative)
        asked = [here, "lib/model.py", other, "/elsewhere/lib/model.py"]
        assert [action.is_in(name) for name in asked] == places, (file, relative)
    assert not Action("checkpoint", "function", "f", "<string>", 1, (0,)).is_in("/nowhere.py")


def test_a_file_may_have_so_many_bytes_and_no_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "p.json"
    path.write_text(text := '{"format": "tapegrad.plan", "version": 1, "actions": [], "memory_budget": 1}')
    monkeypatch.setattr(plan_module, "MAX_BYTES", len(text))
    assert plan_module.read_actions(path) == ([], 1)
    monkeypatch.setattr(plan_module, "MAX_BYTES", len(text) - 1)
    with pytest.raises(PlanError, match="larger than 0 MiB"):
        plan_module.read_actions(path)
