"""No test names what is private to the package: whoever renames it changes no test, but for one line of ``inside``."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

TESTS = Path(__file__).parent
PACKAGE = TESTS.parent / "tapegrad"
ACCESSORS = {"inside.py", "kernel_modules.py"}
OTHERS = {"_exit", "_fields", "_getframe", "_replace", "_repr_html_"}
"""Of Python and of notebooks."""


DEFINED = re.compile(
    r"""\b(?:def|class)\ (_[a-zA-Z]\w*) | \b(?:self|cls)\.(_[a-zA-Z]\w*) | ^\ *(_[a-zA-Z]\w*)(?::\ [^=\n]+)?\ =\ """,
    re.MULTILINE | re.VERBOSE,
)
SUSPICIOUS = re.compile(r"""[\w)\]]\._[a-zA-Z] | ["']_[a-zA-Z]\w*["'] | tapegrad.*\b_[a-zA-Z]""", re.VERBOSE)
"""Only such files are looked at closely, which takes long."""


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name != "_"


def defined(texts: Iterable[str]) -> set[str]:
    """The private names of functions, classes, attributes and variables."""
    return {name for text in texts for names in DEFINED.findall(text) for name in names if name}


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
            texts = [f"tapegrad.{part}" for path in paths if path.startswith("tapegrad.") for part in path.split(".")]
        for text in texts:
            if isinstance(text, str) and is_private(text.removeprefix("tapegrad.")):
                yield node.lineno, text


def offences(package: set[str], tests: dict[str, str]) -> list[str]:
    """Where tests name what only the package defines, or a private module or member of its modules."""
    only = package - defined(tests.values()) - OTHERS
    suspects = {file: ast.parse(text) for file, text in tests.items() if SUSPICIOUS.search(text)}
    return [
        f"{file}:{line}: {name}"
        for file, tree in suspects.items()
        for line, name in named(tree)
        if name in only or name.startswith("tapegrad.")
    ]


def texts_of(folder: Path, without: Iterable[str] = ()) -> dict[str, str]:
    files = (path for path in sorted(folder.rglob("*.py")) if path.name not in without)
    return {str(path.relative_to(folder)): path.read_text(encoding="utf-8") for path in files}


def test_no_test_names_what_is_private_to_the_package() -> None:
    assert offences(defined(texts_of(PACKAGE).values()), texts_of(TESTS, ACCESSORS)) == []


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
    package = "_cache: dict[str, int] = {}\nclass Slot:\n    def _slot(self):\n        self._own = 1\n"
    assert defined([package]) == {"_cache", "_slot", "_own"}
    assert offences(defined([package]), {"x.py": text}) == [
        "x.py:5: tapegrad._leaf", "x.py:6: tapegrad._common", "x.py:7: _cache",
    ]  # fmt: skip
    assert offences(defined([package]), {"y.py": "x._slot.array, row._replace(a=1)"}) == ["y.py:1: _slot"]
