"""The search for changes that no test notices: what it changes, and that it can tell."""

from __future__ import annotations

import ast
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


def test_every_part_has_changes_and_tests() -> None:
    for part, tests in mutants.PARTS.items():
        assert len(mutants.sample([part], 5, seed=1)) == 5
        assert all((mutants.ROOT / name).exists() for name in tests)
    assert mutants.sample(["core"], 3, seed=1) == mutants.sample(["core"], 3, seed=1)


@pytest.mark.parametrize(("after", "how"), [("'leave'", "failed"), ("'leaf'", "")])
def test_a_change_is_noticed_or_not(after: str, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path = Path("tapegrad/core/primitive.py")
    text = (mutants.ROOT / path).read_bytes()
    start = text.index(b'"leaf", "leaf"')
    mutant = mutants.Mutant(path, 1, start, start + len(b'"leaf"'), '"leaf"', after)
    monkeypatch.setattr(mutants, "tests_of", lambda part, path: [["tests/core/test_node.py"]])
    assert mutants.noticed("core", mutant, 60) == how
