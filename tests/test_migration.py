"""The tables of docs/migration: every line gives the same numbers in the library that one comes from, and here."""

from __future__ import annotations

import importlib
import re
import warnings
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tapegrad as tg
from tapegrad import nest

FOLDER = Path(__file__).resolve().parents[1] / "docs" / "migration"
LIBRARY = {"tensorflow": "tensorflow", "pytorch": "torch", "jax": "jax", "cupy": "numpy", "autograd": "autograd"}
ROW = re.compile(r"^\| (.+?) \| (.+?) \|$", re.MULTILINE)
BLOCK = re.compile(r"^```(py|python)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
CODE = re.compile(r"`([^`]+)`")
LINES = 14
"""Each page has at least so many."""


def rows(page: str) -> list[tuple[list[str], list[str]]]:
    """The alternatives in the left and the right column of the section "The same numbers"."""
    section = (FOLDER / f"{page}.md").read_text().split("## The same numbers")[1].split("\n## ")[0]
    found = ROW.findall(section)[2:]  # the head, the line below it
    return [(CODE.findall(left), CODE.findall(right)) for left, right in found]


def names(page: str, fence: str) -> dict[str, Any]:
    """What the blocks of a page, fenced as ``fence``, define."""
    found: dict[str, Any] = {}
    for kind, code in BLOCK.findall((FOLDER / f"{page}.md").read_text()):
        if kind == fence:
            exec(compile(code, f"{page}.md", "exec"), found)
    return found


@cache
def ours(page: str) -> dict[str, Any]:
    return names(page, "python")


@cache
def theirs(page: str) -> dict[str, Any]:
    pytest.importorskip(LIBRARY[page], reason=f"{LIBRARY[page]} is not installed")
    if page == "jax":
        importlib.import_module("jax").config.update("jax_enable_x64", True)
    return names(page, "py")


class Values(list):
    """Arrays in order; ``several`` says whether they came in a container."""

    several = False


def value(code: str, known: dict[str, Any]) -> Values:
    """The arrays that the last of the statements in ``code`` gives."""
    known = dict(known)
    *before, last = code.split("; ")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # other libraries' own
        exec("\n".join(before), known)
        found = eval(last, known)
    leaves = found if isinstance(found, (tuple, list)) else nest.flatten(found)
    arrays = Values(np.asarray(leaf.detach() if hasattr(leaf, "detach") else leaf) for leaf in leaves)
    arrays.several = isinstance(found, (tuple, list, dict))
    return arrays


CASES = [
    pytest.param(page, left, right, id=f"{page}: {left[0]}") for page in LIBRARY for left, right in rows(page)
]  # fmt: skip


@pytest.mark.parametrize(("page", "left", "right"), CASES)
def test_our_column_runs(page: str, left: list[str], right: list[str]) -> None:
    with tg.device("cpu"):
        for code in right:
            assert all(np.isfinite(a).all() for a in value(code, ours(page)) if a.dtype.kind in "fc")


@pytest.mark.parametrize("page", LIBRARY)
def test_both_columns_give_the_same(page: str) -> None:
    """Skipped where the library is not installed."""
    wrong = []
    with tg.device("cpu"):
        for left, right in rows(page):
            expected = value(left[0], theirs(page))
            for known, codes in ((theirs(page), left[1:]), (ours(page), right)):
                wrong += [(left[0], code) for code in codes if not same(value(code, known), expected)]
    assert not wrong


def same(ours: Values, theirs: Values) -> bool:
    """Whether values, shapes and the number of results agree: one array is not a tuple of one."""
    return (
        ours.several == theirs.several
        and len(ours) == len(theirs)
        and all(
            a.shape == b.shape and np.allclose(a, b, rtol=1e-5, atol=1e-7) for a, b in zip(ours, theirs, strict=True)
        )
    )


def test_pages_have_lines() -> None:
    assert all(len(rows(page)) >= LINES for page in LIBRARY)
    assert {page.stem for page in FOLDER.glob("*.md")} == set(LIBRARY)


def test_a_line_that_differs_is_found() -> None:
    expected = value("xp.sum(a, axis=0)", theirs("cupy"))
    for other in (
        "tg.sum(x, axis=0) + 1",
        "tg.sum(x, axis=0, keepdims=True)",
        "(tg.sum(x, axis=0),) * 2",
        "(tg.sum(x, axis=0),)",
    ):
        assert not same(value(other, ours("cupy")), expected)
    with pytest.raises(AttributeError):
        value("tg.no_such(x)", ours("cupy"))
