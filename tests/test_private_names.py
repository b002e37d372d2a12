"""No test names what is private to the package: whoever renames it changes no test, but for one line of ``inside``."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from pathlib import Path

TESTS = Path(__file__).parent
PACKAGE = TESTS.parent / "tapegrad"
ACCESSORS = {"inside.py", "kernel_modules.py"}
OTHERS = {"_exit", "_fields", "_getframe", "_replace", "_repr_html_"}
"""Of Python and of notebooks."""


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name != "_"


def defined(trees: Iterable[ast.Module]) -> set[str]:
    """The private names that modules give to something."""
    names = set[str]()
    for node in (node for tree in trees for node in ast.walk(tree)):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            names.add(node.attr)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
    return set(filter(is_private, names))


def named(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """The private names of others that a module uses, each with its line; of the package's modules any."""
    for node in ast.walk(tree):
        texts = list[object]()
        if isinstance(node, ast.Attribute):
            if not (isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")):
                texts = [node.attr]
        elif isinstance(node, ast.Call):
            name = getattr(node.func, "attr", getattr(node.func, "id", ""))
            if name in ("getattr", "setattr", "delattr"):
                texts = [argument.value for argument in node.args[1:2] if isinstance(argument, ast.Constant)]
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            paths = [f"{getattr(node, 'module', '')}.{alias.name}".strip(".") for alias in node.names]
            texts = [part for path in paths if path.startswith("tapegrad.") for part in path.split(".")]
            yield from ((node.lineno, f"tapegrad: {part}") for part in texts if is_private(str(part)))
            continue
        yield from ((node.lineno, text) for text in texts if isinstance(text, str) and is_private(text))


def offences(package: set[str], tests: dict[str, ast.Module]) -> list[str]:
    """Where tests name what only the package defines."""
    own = defined(tests.values())
    return [
        f"{file}:{line}: {name}"
        for file, tree in tests.items()
        for line, name in named(tree)
        if name.startswith("tapegrad: ") or name in package - own - OTHERS
    ]


def parsed(folder: Path, without: Iterable[str] = ()) -> dict[str, ast.Module]:
    files = (path for path in sorted(folder.rglob("*.py")) if path.name not in without)
    return {str(path.relative_to(folder)): ast.parse(path.read_text(encoding="utf-8")) for path in files}


def test_no_test_names_what_is_private_to_the_package() -> None:
    assert offences(defined(parsed(PACKAGE).values()), parsed(TESTS, ACCESSORS)) == []


def test_a_private_name_is_found_wherever_it_is_used() -> None:
    text = """
class Mine:
    def __init__(self):
        self._own = self._buffer = 1
from tapegrad.core.node import _leaf
import tapegrad.linalg._common
monkeypatch.setattr(module, "_cache", {})
x._slot.array, self._slot, x._own, row._replace(a=1), x.__class__
"""
    tests = {"test_x.py": ast.parse(text)}
    assert offences({"_slot", "_cache", "_own", "_leaf", "_common"}, tests) == [
        "test_x.py:5: tapegrad: _leaf", "test_x.py:6: tapegrad: _common", "test_x.py:7: _cache", "test_x.py:8: _slot",
    ]  # fmt: skip
