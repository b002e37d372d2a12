"""Putting a plan to work on unchanged programs: the functions it names get a decorator while they are compiled.

The decorator is the innermost one of a definition, on the line where its code object begins, so tracebacks, line
numbers, methods, closures and decorators that are there already stay as they are.  Which functions there are, and what
they are called, is read from the code that Python compiles without the plan, as profiles read it.
"""

from __future__ import annotations

import ast
import inspect
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import CodeType, ModuleType, SimpleNamespace
from typing import Any

from tapegrad.memory.plan import Action

Note = Callable[[str], None]
_SUSPENDS = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR


def targets_in(file: str, actions: Iterable[Action]) -> set[tuple[str, int]]:
    """Name and line of the functions in ``file`` that a plan's actions name."""
    return {(action.name, action.line) for action in actions if action.kind == "function" and action.is_in(file)}


def compile_with_plan(
    source: str | bytes, filename: str, plan: Iterable[Action], note: Note = lambda text: None
) -> CodeType:
    """The code of a module, in which the functions named by ``plan`` ask the plan in force whenever they are called.

    ``note`` is told of functions that cannot be, or are not there.  Raises SyntaxError, as ``compile`` does.
    """
    code = compile(source, filename, "exec", dont_inherit=True)
    there: Counter[tuple[str, int]] = Counter()
    for part in _codes_in(code):
        if part.co_flags & inspect.CO_OPTIMIZED:  # bodies of classes are not
            there[part.co_qualname, part.co_firstlineno] |= part.co_flags
    wanted = set()
    for name, line in sorted(targets_in(filename, plan)):
        if (name, line) not in there:
            note(f"{filename}:{line}: there is no function {name} any more; make the plan from a new run")
        elif there[name, line] & _SUSPENDS:
            note(f"{filename}:{line}: {name} is a generator or coroutine, which cannot be run again")
        else:
            wanted.add((name.rpartition(".")[2], line))
    if not wanted:
        return code
    tree = compile(source, filename, "exec", ast.PyCF_ONLY_AST, dont_inherit=True)
    return compile(_Decorating(wanted).visit(tree), filename, "exec", dont_inherit=True)


@contextmanager
def installed(plan: Iterable[Action], note: Note = lambda text: None) -> Iterator[None]:
    """In the block, modules imported from files that ``plan`` names are compiled with it; no bytecode is kept."""
    actions = list(plan)
    for module in list(sys.modules.values()):
        file = getattr(module, "__file__", None)
        if isinstance(file, str) and module.__name__ != "__main__" and targets_in(file, actions):
            note(f"{file}: was imported before the plan; its functions are left as they are")

    def find_spec(name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        spec = PathFinder.find_spec(name, path, target)
        loader: Any = None if spec is None else spec.loader
        if not isinstance(loader, SourceFileLoader) or not targets_in(loader.path, actions):
            return None
        file, read = loader.path, loader.get_data
        loader.get_code = lambda _: compile_with_plan(read(file), file, actions, note)  # type: ignore[method-assign, assignment]
        return spec

    finder: Any = SimpleNamespace(find_spec=find_spec)
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)


def _codes_in(code: CodeType) -> Iterator[CodeType]:
    for const in code.co_consts:
        if isinstance(const, CodeType):
            yield const
            yield from _codes_in(const)


class _Decorating(ast.NodeTransformer):
    """Decorates definitions by their own names and first lines; others with both are not in the plan when called."""

    def __init__(self, wanted: set[tuple[str, int]]) -> None:
        self._wanted = wanted

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        self.generic_visit(node)
        if (node.name, min([node.lineno, *(d.lineno for d in node.decorator_list)])) in self._wanted:
            node.decorator_list.append(_decorator(node))
        return node

    def visit_Lambda(self, node: ast.Lambda) -> ast.AST:
        self.generic_visit(node)
        if ("<lambda>", node.lineno) not in self._wanted:
            return node
        return ast.copy_location(ast.Call(_decorator(node), [node], []), node)


def _decorator(node: ast.AST) -> ast.expr:
    """``planned``, without a name of the module's: names can be shadowed, and must not appear in it."""
    call = ast.parse("__import__('tapegrad.memory.plan', fromlist=['planned']).planned", mode="eval").body
    for part in ast.walk(call):
        ast.copy_location(part, node)
    return call
