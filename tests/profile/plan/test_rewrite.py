"""Programs compiled with a plan: what is changed, and that all else stays."""

from __future__ import annotations

import ast
import asyncio
import importlib
import inspect
import sys
import traceback
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tapegrad as tg
from tapegrad.memory.plan import Action, apply_plan
from tapegrad.profile.plan.rewrite import compile_with_plan, installed

FILE = "/somewhere/program.py"


def action(name: str, line: int, *ordinals: int, file: str = FILE) -> Action:
    return Action("checkpoint", "function", name, file, line, ordinals or (0,))


def build(source: str, *actions: Action) -> tuple[dict[str, Any], list[str]]:
    notes: list[str] = []
    space: dict[str, Any] = {"__name__": "program", "tg": tg}
    exec(compile_with_plan(dedent(source), FILE, actions, notes.append), space)
    return space, notes


def reruns(f: Any, actions: list[Action]) -> int:
    x = tg.Variable([0.5, 1.5])
    with apply_plan(actions) as applied, tg.measure() as m:
        with tg.GradientTape() as tape:
            loss = tg.sum(f(x))
        (g,) = tape.gradient(loss, [x])
    assert applied.unmet() == []
    with tg.GradientTape() as tape:
        loss = tg.sum(f(x))
    assert g.numpy().tobytes() == tape.gradient(loss, x).numpy().tobytes()
    return m.reruns


@pytest.mark.parametrize(
    ("source", "name", "line"),
    [
        ("def f(x):\n    return tg.exp(x)", "f", 1),
        ("\n\nclass A:\n    k = 2.0\n    def g(self, x):\n        return tg.exp(x) * self.k\nf = A().g", "A.g", 5),
        ("class A:\n    @staticmethod\n    def g(x):\n        return tg.exp(x)\nf = A.g", "A.g", 2),
        ("class A:\n    @classmethod\n    def g(cls, x):\n        return tg.exp(x)\nf = A.g", "A.g", 2),
        ("class A:\n    def __init__(self, x): self.x = x\n    @property\n    def g(self): return tg.exp(self.x)\n"
         "f = lambda x: A(x).g", "A.g", 3),
        ("class B:\n    def g(self, x): return x * 2\nclass A(B):\n    def g(self, x):\n"
         "        return tg.exp(super().g(x))\nf = A().g", "A.g", 4),
        ("def outer(k):\n    def f(x):\n        nonlocal k\n        k = k + 0\n        return tg.exp(x) * k\n"
         "    return f\nf = outer(3.0)", "outer.<locals>.f", 2),
        ("f = lambda x: tg.exp(x)", "<lambda>", 1),
        ("f = lambda x: (lambda y: tg.exp(y))(x)", "<lambda>", 1),
        ("f = lambda x: (lambda y: tg.exp(y))(x)", "<lambda>.<locals>.<lambda>", 1),
        ("def outer():\n    return [lambda x, k=k: tg.exp(x) * k for k in (1.0, 2.0)]\nf = outer()[1]",
         "outer.<locals>.<listcomp>.<lambda>" if sys.version_info < (3, 12) else "outer.<locals>.<lambda>", 2),
        ("def outer(n):\n    return list(lambda x: tg.exp(x) for k in [lambda: 1])\nf = outer(1)[0]",
         "outer.<locals>.<genexpr>.<lambda>", 2),
        ("def outer():\n    global f\n    def f(x): return tg.exp(x)\nouter()", "f", 3),
        ("import functools\ndef twice(g):\n    @functools.wraps(g)\n    def h(x): return g(x) * 2\n    return h\n"
         "@twice\n@twice\ndef f(x):\n    return tg.exp(x)", "f", 6),
    ],
)  # fmt: skip
def test_functions_of_all_kinds_run_again(source: str, name: str, line: int) -> None:
    actions = [action(name, line)]
    plain, _ = build(source)
    codes = [
        c for c in walk(compile(dedent(source), FILE, "exec")) if (c.co_qualname, c.co_firstlineno) == (name, line)
    ]
    assert codes, "the test names a function as profiles do"
    space, notes = build(source, *actions)
    assert notes == []
    assert reruns(space["f"], actions) == 1
    changed = [c for c in walk(compile_with_plan(dedent(source), FILE, actions)) if c.co_qualname == name]
    assert {c.co_firstlineno for c in codes} <= {c.co_firstlineno for c in changed}
    assert [list(c.co_lines())[-1][2] for c in codes] == [list(c.co_lines())[-1][2] for c in changed]
    assert plain.keys() == space.keys()


def walk(code: Any) -> list[Any]:
    found = [code]
    for const in code.co_consts:
        if hasattr(const, "co_code"):
            found += walk(const)
    return found


def test_other_functions_and_files_stay_as_they_are() -> None:
    source = "def f(x):\n    return x\ndef g(x):\n    return x\n"
    same = compile_with_plan(source, FILE, [action("f", 1, file="/elsewhere.py")])
    assert same == compile(source, FILE, "exec", dont_inherit=True)
    space, _ = build(source, action("f", 1))
    assert space["f"].__wrapped__.__code__.co_name == "f" and not hasattr(space["g"], "__wrapped__")


def test_what_a_function_shows_stays() -> None:
    source = '''
    """The module's docstring."""
    from __future__ import annotations

    def f(x: Undefined, /, y: int = 2, *rest, z=3, **more) -> Nothing:
        """Doc."""
        return x
    '''
    space, notes = build(source, action("f", 5))
    f = space["f"]
    assert notes == [] and space["__doc__"] == "The module's docstring."
    assert f.__doc__ == "Doc." and f.__qualname__ == "f" and f.__module__ == "program"
    assert f.__annotations__ == {"x": "Undefined", "y": "int", "return": "Nothing"}
    assert str(inspect.signature(f)) == "(x: 'Undefined', /, y: 'int' = 2, *rest, z=3, **more) -> 'Nothing'"


def test_tracebacks_name_the_same_lines() -> None:
    source = "def f(x):\n    # a comment\n    return (\n        x\n        / 0)\n"

    def lines(space: dict[str, Any]) -> list[tuple[int | None, str]]:
        with pytest.raises(ZeroDivisionError) as caught:
            space["f"](1)
        return [(f.lineno, f.name) for f in traceback.extract_tb(caught.tb) if f.filename == FILE]

    assert lines(build(source, action("f", 1))[0]) == lines(build(source)[0]) == [(4, "f")]


def test_decorators_defaults_and_annotations_belong_to_what_is_around() -> None:
    source = """
    def deco(g): return lambda f: f
    @deco(lambda x: x)
    def f(x, g=lambda y: y) -> (lambda: 1):
        return g(x)
    """
    found = {(c.co_qualname, c.co_firstlineno) for c in walk(compile(dedent(source), FILE, "exec"))}
    lambdas = [key for key in found if key[0] == "<lambda>"]
    _, notes = build(source, *(action(*key) for key in lambdas))
    assert len(lambdas) == 2 and notes == []  # of line 3, and both of line 4


def test_generators_and_coroutines_are_left_alone_with_a_note() -> None:
    source = """
    def f(x):
        yield x
    async def g(x):
        return x
    def h(x):
        k = lambda: (yield x)
        return [v for v in f(x)]
    """
    space, notes = build(source, action("f", 2), action("g", 4), action("h", 6))
    assert [n.split(":")[1] for n in notes] == ["2", "4"] and all("generator or coroutine" in n for n in notes)
    assert list(space["f"](1)) == [1] and asyncio.run(space["g"](2)) == 2
    assert hasattr(space["h"], "__wrapped__") and space["h"](3) == [3]


def test_a_function_that_is_gone_is_noted() -> None:
    _, notes = build("def f(x):\n    return x\nclass A:\n    k = 1\n", action("f", 7), action("g", 1), action("A", 3))
    assert len(notes) == 3 and all("there is no function" in n for n in notes)


def test_errors_of_syntax_come_out() -> None:
    with pytest.raises(SyntaxError):
        compile_with_plan("def f(:\n", FILE, [action("f", 1)])


def test_source_with_a_coding_line_and_names_that_need_escapes() -> None:
    source = "# -*- coding: latin-1 -*-\ndef é(x):\n    return 'é'\n".encode("latin-1")
    file = "/a 'quoted' \\ file\n.py"
    space: dict[str, Any] = {}
    exec(compile_with_plan(source, file, [action("é", 2, file=file)]), space)
    assert space["é"](1) == "é" and hasattr(space["é"], "__wrapped__")


def test_imported_modules_are_compiled_with_the_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "planned_package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    for name in ("model", "other"):
        (package / f"{name}.py").write_text("import tapegrad as tg\n\n\ndef f(x):\n    return tg.exp(x)\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    file = str(package / "model.py")
    actions, notes = [action("f", 4, file=file)], list[str]()
    before = list(sys.meta_path)
    try:
        with installed(actions, notes.append):
            model = importlib.import_module("planned_package.model")
            other = importlib.import_module("planned_package.other")
        assert sys.meta_path == before and notes == []
        assert reruns(model.f, actions) == 1 and not hasattr(other.f, "__wrapped__")
        assert inspect.getsource(model.f).startswith("def f(x):") and model.__file__ == file
        assert not list(package.rglob("model.*.pyc")) and list(package.rglob("other.*.pyc"))
        with installed(actions, notes.append):
            pass
        assert len(notes) == 1 and "imported before the plan" in notes[0]
    finally:
        for name in [n for n in sys.modules if n.startswith("planned_package")]:
            del sys.modules[name]


NAMES = st.sampled_from(["f", "g", "h"])


@settings(max_examples=60, deadline=None)
@given(st.recursive(st.just("return 1"), lambda inner: st.tuples(st.sampled_from("dcl"), NAMES, inner), max_leaves=4))
def test_names_are_those_that_python_gives(tree: Any) -> None:
    def text(node: Any, indent: str, inside: str) -> str:
        if isinstance(node, str):
            return f"{indent}{node}" if inside == "d" else f"{indent}x = lambda: 1"
        kind, name, inner = node
        if kind == "l":
            return f"{indent}y = [lambda: (lambda: 2)]\n" + text(inner, indent, inside)
        head = f"{indent}{'def' if kind == 'd' else 'class'} {name}{'()' if kind == 'd' else ''}:\n"
        return head + text(inner, indent + "  ", kind)

    source = text(tree, "", "")
    ast.parse(source)
    wanted = [
        (c.co_qualname, c.co_firstlineno) for c in walk(compile(source, FILE, "exec"))
        if c.co_flags & inspect.CO_NEWLOCALS and c.co_flags & inspect.CO_OPTIMIZED and "comp>" not in c.co_name
    ]  # fmt: skip
    notes: list[str] = []
    compile_with_plan(source, FILE, [action(*key) for key in wanted], notes.append)
    assert notes == []
