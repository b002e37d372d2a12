"""Warnings name the line of the program that they are about, not one of this package's."""

from __future__ import annotations

import linecache
import warnings
from collections.abc import Callable

import pytest
from checks import c64

import tapegrad as tg
from tapegrad.errors import CapturedTensorWarning, IntegerWatchWarning, LateTargetWarning


def watches_integers() -> None:
    with tg.GradientTape() as tape:
        tape.watch(tg.asarray([1, 2]))  # warned


def watches_integers_among_others() -> None:
    with tg.GradientTape() as tape:
        tape.watch({"x": c64([1.0]), "n": tg.asarray(3)})  # warned


def pushes_integers() -> None:
    tg.ForwardAccumulator(tg.asarray([1, 2]), tg.asarray([1, 1]))  # warned


def asks_late() -> None:
    x = c64([1.0, 2.0])
    with tg.GradientTape() as tape:
        tape.watch(x)
        y = x * 2.0
    tape.gradient([y, y * 2.0], x)  # warned


def asks_late_of_a_persistent_tape() -> None:
    x = c64([1.0, 2.0])
    with tg.GradientTape(persistent=True) as tape:
        tape.watch(x)
        y = x * 2.0
    tape.gradient([x * 3.0, y], x)  # warned


def captures() -> None:
    x = c64([1.0, 2.0])
    f = tg.custom_gradient(lambda q: (q * x, lambda ct: ct))
    with tg.GradientTape() as tape:
        tape.watch(x)
        f(c64([3.0, 4.0]))
        f(x * 2.0)  # warned


@pytest.mark.parametrize(
    ("f", "category"),
    [
        (watches_integers, IntegerWatchWarning),
        (watches_integers_among_others, IntegerWatchWarning),
        (pushes_integers, IntegerWatchWarning),
        (asks_late, LateTargetWarning),
        (asks_late_of_a_persistent_tape, LateTargetWarning),
        (captures, CapturedTensorWarning),
    ],
)
def test_a_warning_is_about_the_line_that_calls(f: Callable[[], None], category: type[Warning]) -> None:
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        f()
    assert [w.category for w in found][-1:] == [category]
    assert "# warned" in linecache.getline(found[-1].filename, found[-1].lineno), found[-1]
