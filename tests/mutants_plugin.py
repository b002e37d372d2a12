"""What ``mutants.py`` asks of pytest: which statements each test reaches, or some tests alone, in a given order.

``pytest -p mutants_plugin`` reads the environment: ``MUTANTS_REACH`` names a file to write,
``MUTANTS_TESTS`` one to read.
"""

from __future__ import annotations

import ast
import builtins
import importlib.machinery
import json
import mmap
import os
import sys
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

PARTS = ("core", "engine", "autodiff", "memory")
MOST = 1 << 16
"""Statements, at most; their notes are in memory that a forked child shares."""


def statements(function: ast.AST) -> list[list[ast.stmt]]:
    """The lists of statements of a function, those inside other statements and functions too."""
    bodies = [getattr(node, field, None) for node in ast.walk(function) for field in ("body", "orelse", "finalbody")]
    return [body for body in bodies if isinstance(body, list)]


class _Reached(ast.NodeTransformer):
    """Puts a note before every statement of every function: ``__reached__[i] = 1``, its place being ``places[i]``."""

    def __init__(self, name: str, places: list[tuple[str, int]]) -> None:
        self.name = name
        self.places = places

    def visit_FunctionDef(self, function: ast.FunctionDef) -> ast.FunctionDef:
        for body in statements(function):
            body[:] = [part for statement in body for part in (*self._note(statement), statement)]
        return function

    def _note(self, statement: ast.stmt) -> list[ast.stmt]:
        if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
            return []  # a docstring must come first
        note = ast.parse(f"__reached__[{len(self.places)}] = 1").body[0]
        self.places.append((self.name, statement.lineno))
        for node in ast.walk(note):
            ast.copy_location(node, statement)
        return [note]


class Reach:
    """Notes which statements of the package's parts each test reaches, and how long it takes."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.places: list[tuple[str, int]] = []
        self.notes = mmap.mmap(-1, MOST)
        self.shared: dict[str, set[int]] = {}
        self.imports: set[int] = set()
        self.spawned = False
        sys.addaudithook(self.hear)
        self.tests: list[dict[str, Any]] = []
        self.outcomes: dict[str, str] = {}
        builtins.__reached__ = self.notes  # type: ignore[attr-defined]
        loader: Any = importlib.machinery.SourceFileLoader
        plain, package = loader.source_to_code, Path.cwd() / "tapegrad"

        def source_to_code(this: Any, data: Any, path: Any, *, _optimize: int = -1) -> Any:
            try:
                name = Path(os.fsdecode(path)).relative_to(package).as_posix()
            except ValueError:
                name = ""
            if not name.startswith(PARTS):
                return plain(this, data, path, _optimize=_optimize)
            tree = _Reached(f"tapegrad/{name}", self.places).visit(ast.parse(data))
            return compile(tree, path, "exec", dont_inherit=True, optimize=_optimize)

        execute = loader.exec_module

        def exec_module(this: Any, module: Any) -> None:
            before = self.taken()
            execute(this, module)
            self.imports |= self.taken()
            for i in before:
                self.notes[i] = 1

        loader.source_to_code, loader.exec_module = source_to_code, exec_module

    def hear(self, event: str, arguments: Any) -> None:
        """The interpreter does something: what a new one reaches is not noted."""
        self.spawned |= event == "subprocess.Popen"

    def taken(self) -> set[int]:
        """What was noted since this was asked before."""
        notes = bytes(self.notes)
        self.notes[:] = bytes(MOST)
        return {i for i, note in enumerate(notes) if note}

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: Any) -> Generator[None, Any, Any]:
        """What a fixture of many tests reaches counts for each of them."""
        if fixturedef.scope == "function":
            return (yield)
        self.taken()
        result = yield
        self.shared.setdefault(fixturedef.argname, set()).update(self.taken())
        return result

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: Any) -> Generator[None, Any, Any]:
        self.taken()
        self.spawned = False
        start = time.perf_counter()
        result = yield
        seconds = round(time.perf_counter() - start, 4)
        reached = self.taken().union(*(self.shared.get(name, ()) for name in item.fixturenames))
        outcome = self.outcomes.get(item.nodeid, "passed")
        found = {"test": item.nodeid, "seconds": seconds, "outcome": outcome, "reached": self.sorted(reached)}
        self.tests.append({**found, "spawned": self.spawned})
        return result

    def sorted(self, reached: set[int]) -> list[tuple[str, int]]:
        """Files and lines of what is reached."""
        return sorted({self.places[i] for i in reached})

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.outcome != "passed":
            self.outcomes[report.nodeid] = report.outcome

    def pytest_sessionfinish(self) -> None:
        self.path.write_text(json.dumps({"tests": self.tests, "imports": self.sorted(self.imports)}))


class Only:
    """Runs the tests that a file lists, in its order."""

    def __init__(self, path: Path) -> None:
        self.order = {test: number for number, test in enumerate(json.loads(path.read_text()))}

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        items[:] = sorted((i for i in items if i.nodeid in self.order), key=lambda i: self.order[i.nodeid])


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests(early_config: Any) -> None:
    """Before a ``conftest.py`` is loaded, which may import much of the package."""
    if path := os.environ.get("MUTANTS_REACH"):
        early_config.pluginmanager.register(Reach(Path(path)))


def pytest_configure(config: Any) -> None:
    if path := os.environ.get("MUTANTS_TESTS"):
        config.pluginmanager.register(Only(Path(path)))
