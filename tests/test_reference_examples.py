"""The examples of the API reference: each public name has one, and each shows what really comes out."""

from __future__ import annotations

import contextlib
import doctest
import importlib
import importlib.util
import math
import re
from collections.abc import Iterator
from operator import attrgetter
from pathlib import Path
from types import GenericAlias
from typing import Any

import numpy as np
import pytest
from inside import as_in_a_new_process

import tapegrad as tg
from tapegrad.tracing.phase import STEPS

SOURCE = Path(__file__).parents[1] / "docs" / "reference_examples.py"
SPACES = (
    "linalg fft special stats random signal integrate sparse nn nn.functional nn.initializers optim optim.schedules"
    " training distributed testing memory policies"
).split()
NUMBER = re.compile(r"(?<![\w.])[-+]?(?:\d+\.?\d*|\.\d+)(?:e[-+]?\d+)?|(?<=\d)[-+](?:\d+\.?\d*)(?:e[-+]?\d+)?")


def _reference() -> Any:
    spec = importlib.util.spec_from_file_location("reference_examples", SOURCE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


REFERENCE = _reference()
FILES = sorted(REFERENCE.FOLDER.glob("*.txt"))


def public_names() -> set[str]:
    """Every public function, class and distribution, but dtypes, constants, modules and the classes of tg.errors."""
    spaces = {"tapegrad": tg} | {f"tapegrad.{space}": attrgetter(space)(tg) for space in SPACES}
    return {
        f"{path}.{name}"
        for path, space in spaces.items()
        for name in space.__all__
        if (callable(value := getattr(space, name)) or hasattr(value, "cdf"))
        and not isinstance(value, GenericAlias)
        and getattr(value, "__module__", None) != "tapegrad.errors"
    }


def missing(names: set[str], told: set[str]) -> list[str]:
    """Those of ``names`` that have no example."""
    return sorted(names - told)


def unknown(told: set[str]) -> list[str]:
    """Names of examples that do not exist."""
    return sorted(name for name in told if not _exists(name))


def _exists(name: str) -> bool:
    try:
        attrgetter(name.removeprefix("tapegrad."))(tg)
    except AttributeError:
        return False
    return True


class Close(doctest.OutputChecker):
    """Numbers may differ in their last digits, which depend on the processor; all else may not, but in white space."""

    def check_output(self, want: str, got: str, optionflags: int) -> bool:
        return self._close(want.replace("<BLANKLINE>", ""), got) or super().check_output(want, got, optionflags)

    @staticmethod
    def _close(want: str, got: str) -> bool:
        texts = [[" ".join(text.split()) for text in NUMBER.split(side)] for side in (want, got)]
        wanted, gotten = NUMBER.findall(want), NUMBER.findall(got)
        return texts[0] == texts[1] and all(map(_close_numbers, wanted, gotten))


def _close_numbers(want: str, got: str) -> bool:
    """Whole numbers are equal, others close; one that is shown as tiny is not as good as 0."""
    if "." not in want + got and "e" not in want + got:
        return int(want) == int(got)
    tiny = 0.0 < abs(float(want)) < 1e-6
    return math.isclose(float(want), float(got), rel_tol=1e-4, abs_tol=0.0 if tiny else 1e-6)


def failures(text: str) -> str:
    """What the sessions of a file's text print otherwise than they show."""
    told: list[str] = []
    flags = doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS
    for name, session in REFERENCE.parsed(text):
        test = doctest.DocTestParser().get_doctest(session, {"np": np, "tg": tg}, name, None, None)
        with state_kept():
            doctest.DocTestRunner(Close(), verbose=False, optionflags=flags).run(test, out=told.append)
    return "".join(told)


@contextlib.contextmanager
def state_kept() -> Iterator[None]:
    """On the CPU, with the random numbers of seed 0; all that a session may change is as before."""
    generator = tg.random.default_generator
    threads, numbers = tg.get_num_threads(), generator.state
    with as_in_a_new_process():
        tg.set_default_device("cpu")
        tg.random.seed(0)
        try:
            yield
        finally:
            STEPS.restart()
            generator.state = numbers
            if tg.get_num_threads() != threads:
                tg.set_num_threads(threads)


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_examples_print_what_they_show(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # for those that write files
    assert failures(file.read_text(encoding="utf-8")) == ""


def test_every_public_name_has_an_example() -> None:
    told = set(REFERENCE.examples())
    assert unknown(told) == []
    assert missing(public_names(), told) == []


def test_a_missing_name_and_an_unknown_one_are_found() -> None:
    names = public_names()
    assert {"tapegrad.sum", "tapegrad.linalg.det", "tapegrad.nn.Dense", "tapegrad.stats.norm"} <= names
    assert missing(names, names - {"tapegrad.linalg.det"}) == ["tapegrad.linalg.det"]
    assert unknown({"tapegrad.sum", "tapegrad.linalg.dett"}) == ["tapegrad.linalg.dett"]


GOOD = """\
[tapegrad.sum]
>>> tg.sum([[1.0, 2.0], [3.0, 4.0]], axis=0)
tapegrad.Tensor(array([4., 6.], dtype=float32))
"""


@pytest.mark.parametrize(
    "changed",
    [("6.]", "6.1]"), ("4., 6.", "4., -6."), ("float32", "float64"), ("4., 6.", "4., 6., 6."), ("axis=0", "axis=2")],
    ids=["number", "sign", "text", "length", "error"],
)
def test_a_wrong_output_is_found(changed: tuple[str, str]) -> None:
    assert failures(GOOD) == ""
    assert "tapegrad.sum" in failures(GOOD.replace(*changed))


@pytest.mark.parametrize(
    ("want", "got", "same"),
    [
        ("0.33333334", "0.3333333", True), ("0.3333", "0.3343", False), ("1000", "1001", False), ("-0.", "0.", True),
        ("[ 0.5, -1. ]", "[0.5,  -1.]", True), ("1.+2.j", "1.-2.j", False), ("1.e-10", "0.", False),
        ("0.", "1.e-10", True), ("nan", "0.", False), ("a b", "ab", False), ("(2, 3)", "(2, 3, 1)", False),
        ("float32", "float64", False), ("1.5e+03", "1500.01", True),
    ],
)  # fmt: skip
def test_close_outputs(want: str, got: str, same: bool) -> None:
    assert Close().check_output(want, got, doctest.NORMALIZE_WHITESPACE) is same


def of_process() -> tuple[Any, ...]:
    """What an example may change: threads, the state of random numbers, how many steps a gradient ends."""
    before = STEPS.count
    tg.grad(tg.sum)(np.ones(2))
    tg.grad(tg.sum)(np.ones(2))  # ends the step of the one before
    return tg.get_num_threads(), tg.random.default_generator.state, STEPS.count - before


def test_an_example_changes_nothing_for_the_next_one() -> None:
    before = of_process()
    text = "[tapegrad.x]\n>>> tg.set_num_threads(N)\n>>> tg.memory.step()\n>>> _ = tg.random.normal(3)\n"
    text += ">>> tg.nn.Conv2D(3, 1).name\n'conv2d'\n"
    for _ in range(2):
        assert failures(text.replace("N", str(before[0] + 1))) == ""
    assert of_process() == before


def test_files_begin_with_a_name_and_tell_each_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="should come first"):
        REFERENCE.parsed(">>> 1\n1\n" + GOOD)
    (tmp_path / "twice.txt").write_text(GOOD + "\n" + GOOD)
    monkeypatch.setattr(REFERENCE, "FOLDER", tmp_path)
    with pytest.raises(ValueError, match=r"tapegrad\.sum has another example"):
        REFERENCE.examples()
