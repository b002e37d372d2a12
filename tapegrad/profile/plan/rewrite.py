"""Putting a plan to work on unchanged programs: the functions it names get a decorator while they are compiled.

The decorator is the innermost one of a definition, on the line where its code object begins, so tracebacks, line
numbers, methods, closures and decorators that are there already stay as they are.  A function is known by its qualified
name and the first line of its code, as profiles know it.
"""

from __future__ import annotations

import ast
import importlib.abc
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import CodeType
from typing import Any

from tapegrad.memory.applying import Action

Note = Callable[[str], None]
_Function = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda


def targets_in(file: str, actions: Iterable[Action]) -> set[tuple[str, int]]:
    """Name and line of the functions in ``file`` that a plan's actions name."""
    return {(action.name, action.line) for action in actions if action.kind == "function" and action.is_in(file)}


def compile_with_plan(
    source: str | bytes, filename: str, plan: Iterable[Action], note: Note = lambda text: None
) -> CodeType:
    """The code of a module, in which the functions named by ``plan`` ask the plan in force whenever they are called.

    ``note`` is told of functions that cannot be, or are not there.  Raises SyntaxError, as ``compile`` does.
    """
    wanted = targets_in(filename, plan)
    flags = ast.PyCF_ONLY_AST
    tree = compile(source, filename, "exec", flags, dont_inherit=True)
    if wanted:
        rewriter = _Rewriter(wanted, filename, note)
        tree = ast.fix_missing_locations(rewriter.visit(tree))
        for name, line in sorted(wanted - rewriter.found):
            note(f"{filename}:{line}: there is no function {name} any more; make the plan from a new run")
    return compile(tree, filename, "exec", dont_inherit=True)


@contextmanager
def installed(plan: Iterable[Action], note: Note = lambda text: None) -> Iterator[None]:
    """In the block, modules imported from files that ``plan`` names are compiled with it; no bytecode is kept."""
    actions = list(plan)
    for module in list(sys.modules.values()):
        file = getattr(module, "__file__", None)
        if isinstance(file, str) and module.__name__ != "__main__" and targets_in(file, actions):
            note(f"{file}: was imported before the plan; its functions are left as they are")
    finder = _Finder(actions, note)
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)


class _Finder(importlib.abc.MetaPathFinder):
    """Finds modules where Python would, and has some compiled with a plan."""

    def __init__(self, actions: list[Action], note: Note) -> None:
        self._actions, self._note = actions, note

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is None or spec.origin is None or not isinstance(spec.loader, SourceFileLoader):
            return None
        if not targets_in(spec.origin, self._actions):
            return None
        spec.loader = _Loader(fullname, spec.origin, self._actions, self._note)
        return spec


class _Loader(SourceFileLoader):
    """Compiles from source, always."""

    def __init__(self, fullname: str, path: str, actions: list[Action], note: Note) -> None:
        super().__init__(fullname, path)
        self._actions, self._note = actions, note

    def get_code(self, fullname: str) -> CodeType:
        path = self.get_filename(fullname)
        return compile_with_plan(self.get_data(path), path, self._actions, self._note)


class _Rewriter(ast.NodeTransformer):
    """Decorates the definitions in ``wanted``; ``found``: those that there are."""

    def __init__(self, wanted: set[tuple[str, int]], filename: str, note: Note) -> None:
        self.found: set[tuple[str, int]] = set()
        self._wanted, self._filename, self._note = wanted, filename, note
        self._prefix: list[str] = []
        self._globals: list[set[str]] = [set()]  # names that the function around declares global

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.AST:
        self._inside(node, f"{self._qualified(node.name)}.")
        return node

    def visit_FunctionDef(self, node: Any) -> ast.AST:
        name = self._qualified(node.name)
        self._inside(node, f"{name}.<locals>.")
        line = min([node.lineno, *(d.lineno for d in node.decorator_list)])
        if self._take(node, name, line):
            node.decorator_list.append(self._decorator(name, line, node))
        return node

    visit_AsyncFunctionDef = visit_FunctionDef

    def visit_Lambda(self, node: ast.Lambda) -> ast.AST:
        name = self._qualified("<lambda>")
        self._inside(node, f"{name}.<locals>.")
        if not self._take(node, name, node.lineno):
            return node
        return ast.copy_location(ast.Call(self._decorator(name, node.lineno, node), [node], []), node)

    def visit_GeneratorExp(self, node: ast.GeneratorExp) -> ast.AST:
        return self._comprehension(node, "<genexpr>")

    def visit_ListComp(self, node: ast.ListComp) -> ast.AST:
        return self._comprehension(node, "<listcomp>")

    def visit_SetComp(self, node: ast.SetComp) -> ast.AST:
        return self._comprehension(node, "<setcomp>")

    def visit_DictComp(self, node: ast.DictComp) -> ast.AST:
        return self._comprehension(node, "<dictcomp>")

    def _comprehension(self, node: Any, name: str) -> ast.AST:
        """A comprehension is a function of its own, but for what it first iterates over; since 3.12 only generators."""
        if name != "<genexpr>" and sys.version_info >= (3, 12):
            return self.generic_visit(node)
        outermost = node.generators[0]
        outermost.iter = self.visit(outermost.iter)
        first, outermost.iter = outermost.iter, ast.Constant(None)
        self._prefix.append(f"{self._qualified(name)}.")
        self.generic_visit(node)
        self._prefix.pop()
        outermost.iter = first
        return node

    def _qualified(self, name: str) -> str:
        return name if name in self._globals[-1] else "".join(self._prefix[-1:]) + name

    def _inside(self, node: Any, prefix: str) -> None:
        """Visit what ``node`` holds: its body is inside, while decorators, defaults and annotations are around it."""
        body = node.body if isinstance(node.body, list) else [node.body]
        for name, value in ast.iter_fields(node):
            if name != "body":
                self._visit_around(node, name, value)
        self._prefix.append(prefix)
        self._globals.append({n for part in body for n in _declared_global(part)})
        visited = [self.visit(part) for part in body]
        self._prefix.pop()
        self._globals.pop()
        node.body = visited if isinstance(node.body, list) else visited[0]

    def _visit_around(self, node: Any, name: str, value: Any) -> None:
        if isinstance(value, list):
            setattr(node, name, [self.visit(v) if isinstance(v, ast.AST) else v for v in value])
        elif isinstance(value, ast.AST):
            setattr(node, name, self.visit(value))

    def _take(self, node: _Function, name: str, line: int) -> bool:
        if (name, line) not in self._wanted:
            return False
        self.found.add((name, line))
        if isinstance(node, ast.AsyncFunctionDef) or _yields(node):
            self._note(f"{self._filename}:{line}: {name} is a generator or coroutine, which cannot be run again")
            return False
        return True

    def _decorator(self, name: str, line: int, node: _Function) -> ast.expr:
        """The decorator needs no name of the module's: names can be shadowed, and must not appear in it."""
        module = "__import__('tapegrad.memory.applying', fromlist=['planned'])"
        found = ast.parse(f"{module}.planned({name!r}, {self._filename!r}, {line})", mode="eval").body
        for part in ast.walk(found):
            if isinstance(part, ast.expr):
                part.lineno = part.end_lineno = node.lineno
                part.col_offset = part.end_col_offset = node.col_offset
        return found


def _own_parts(node: ast.AST) -> Iterator[ast.AST]:
    """What lies in a function or a statement, without the insides of functions and classes in it."""
    waiting = [node]
    while waiting:
        part = waiting.pop()
        yield part
        if not isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.ClassDef):
            waiting.extend(ast.iter_child_nodes(part))


def _declared_global(statement: ast.AST) -> Iterator[str]:
    for part in _own_parts(statement):
        if isinstance(part, ast.Global):
            yield from part.names


def _yields(node: _Function) -> bool:
    body = node.body if isinstance(node.body, list) else [node.body]
    return any(isinstance(p, ast.Yield | ast.YieldFrom) for part in body for p in _own_parts(part))
