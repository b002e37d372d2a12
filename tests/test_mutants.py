"""The search for changes that no test notices: what it changes, and that it can tell."""

from __future__ import annotations

import ast
import json
from pathlib import Path

import mutants
import pytest

SOURCE = """\
def f(a, b):
    print(a)
    if a < b and not b:
        return a + 2
    return "ä", f"{a + 1}", a is None
"""


def test_what_is_changed() -> None:
    found = {(m.before, m.after) for m in mutants.mutants(Path("f.py"), SOURCE)}
    assert found == {
        ("print(a)", "pass"), ("a < b and not b", "(a < b or not b)"), ("a < b", "(a <= b)"), ("not b", "(b)"),
        ("a + 2", "(a - 2)"), ("2", "3"), ("a is None", "(a is not None)"),
    }  # fmt: skip


def test_each_change_is_one_and_still_a_program() -> None:
    for m in mutants.mutants(Path("f.py"), SOURCE):
        text = m.apply(SOURCE.encode()).decode()
        assert ast.dump(ast.parse(text)) != ast.dump(ast.parse(SOURCE))
        assert text.count("\n") == SOURCE.count("\n")


def test_the_statement_of_a_function_that_is_changed() -> None:
    found = {(m.before, m.statement) for m in mutants.mutants(Path("f.py"), "a = b + c\n" + SOURCE)}
    assert {("b + c", 0), ("print(a)", 3), ("not b", 4), ("a + 2", 5)} <= found


def test_every_part_has_changes_and_tests() -> None:
    for part in mutants.PARTS:
        assert len(mutants.sample([part], 5, seed=1)) == 5
        assert all((mutants.ROOT / name).exists() for name in mutants.files_of(part))
    assert mutants.sample(["core"], 3, seed=1) == mutants.sample(["core"], 3, seed=1)


@pytest.mark.search
def test_a_change_is_noticed_or_not_or_hangs(tmp_path: Path) -> None:
    copy = mutants.copy_project(tmp_path)
    path, test = Path("tapegrad/core/aval.py"), "tests/core/test_aval.py::test_axes"
    text = (mutants.ROOT / path).read_bytes()

    (copy / "tests/test_fragile.py").write_text("def test_alone() -> None:\n    raise AssertionError\n")
    fragile = "tests/test_fragile.py::test_alone"

    def how(before: str, after: str, seconds: float = 60, tests: list[str] = [test]) -> str:  # noqa: B006
        start = text.index(before.encode())
        mutant = mutants.Mutant(path, 1, 0, start, start + len(before), before, after)
        return mutants.noticed(copy, mutant, tests, lambda tests: seconds)

    assert how("return axis + ndim", "return axis - ndim") == test
    assert how("names a dimension", "names an axis") == ""
    assert how("names a dimension", "names an axis", tests=[fragile, test]) == ""  # which fails anyway
    assert how("return axis + ndim", "return axis - ndim", tests=[fragile, test]) == test
    assert how("axis = axis.__index__()", "while True: pass", 5) == "hangs"
    assert how("import weakref", "import weakrefs")
    assert (copy / path).read_bytes() == text


@pytest.mark.search
def test_which_tests_reach_a_statement(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mutants.tempfile, "tempdir", str(tmp_path))
    copy = mutants.copy_project(tmp_path / "copy")
    found = mutants.reach(copy, "tests/core/test_aval.py")
    reached = {test["test"]: test["reached"] for test in found["tests"]}
    text = (mutants.ROOT / "tapegrad/core/aval.py").read_text().splitlines()
    place = ["tapegrad/core/aval.py", 1 + next(i for i, line in enumerate(text) if "return axis + ndim if" in line)]
    assert place in reached["tests/core/test_aval.py::test_axes"]
    assert any(place not in places for places in reached.values())
    assert mutants.pytest(copy, ["tests/core/test_node.py"], None)[0] == 0
    assert any(test["reached"] for test in mutants.reach(copy, "tests/core/test_node.py")["tests"])
    monkeypatch.delattr(mutants, "pytest")  # the second time it is known
    assert mutants.reach(copy, "tests/core/test_aval.py") == found
    assert not any(test["spawned"] for test in found["tests"])
    assert any(path == "tapegrad/core/primitive.py" for path, _ in found["imports"])


@pytest.mark.search
def test_what_a_conftest_imports_is_noted_as_well(tmp_path: Path) -> None:
    """It is loaded before pytest is configured."""
    texts = {
        "tapegrad/__init__.py": "", "tapegrad/core/__init__.py": "", "conftest.py": "from tapegrad.core import thing\n",
        "tapegrad/core/thing.py": "def f():\n    return 1\n",
        "tests/mutants_plugin.py": (mutants.ROOT / "tests/mutants_plugin.py").read_text(),
        "test_it.py": "from tapegrad.core import thing\n\n\ndef test_it():\n    assert thing.f() == 1\n",
    }  # fmt: skip
    for name, text in texts.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    made = tmp_path / "reach.json"
    assert mutants.pytest(tmp_path, ["test_it.py"], None, MUTANTS_REACH=str(made))[0] == 0
    (test,) = json.loads(made.read_text())["tests"]
    assert test["reached"] == [["tapegrad/core/thing.py", 2]]
