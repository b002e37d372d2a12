"""The colours of the categories can be told apart from each other and the background, by colour-blind readers, too."""

from __future__ import annotations

import itertools
import math
import re

import pytest

from tapegrad.profile.viewer import html
from tapegrad.tracing.names import CATEGORIES

# How linear red, green and blue are seen without one kind of cone: Machado, Oliveira, Fernandes, "A
# Physiologically-based Model for Simulation of Color Vision Deficiency", 2009, severity 1.
SIGHT = {
    "usual": ((1, 0, 0), (0, 1, 0), (0, 0, 1)),
    "without red": ((0.152286, 1.052583, -0.204868), (0.114503, 0.786281, 0.099216), (-0.003882, -0.048116, 1.051998)),
    "without green": ((0.367322, 0.860646, -0.227968), (0.280085, 0.672501, 0.047413), (-0.011820, 0.042940, 0.968881)),
    "without blue": ((1.255528, -0.076749, -0.178779), (-0.078411, 0.930809, 0.147602), (0.004733, 0.691367, 0.303900)),
}
APART = 20
"""In CIE 1976 units; about 2 is the least that can be seen side by side."""


def lab(colour: str, sight: tuple[tuple[float, ...], ...]) -> tuple[float, float, float]:
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
    r, g, b = (min(max(sum(a * c for a, c in zip(row, linear)), 0), 1) for row in sight)
    x = (0.4124 * r + 0.3576 * g + 0.1805 * b) / 0.95047
    y = 0.2126 * r + 0.7152 * g + 0.0722 * b
    z = (0.0193 * r + 0.1192 * g + 0.9505 * b) / 1.08883
    fx, fy, fz = (t ** (1 / 3) if t > 216 / 24389 else (24389 / 27 * t + 16) / 116 for t in (x, y, z))
    return 116 * fy - 16, 500 * (fx - fy), 200 * (fy - fz)


def palettes() -> list[dict[str, str]]:
    """Of light, dark by choice, and dark by the system's setting."""
    return [dict(re.findall(r"--([\w-]+): (#\w{6});", block)) for block in html.asset("viewer.css").split(":root")[1:]]


def closest(palette: dict[str, str], sight: tuple[tuple[float, ...], ...]) -> tuple[float, str, str]:
    seen = {name: lab(palette[name], sight) for name in (*CATEGORIES, "panel")}
    return min((math.dist(seen[a], seen[b]), a, b) for a, b in itertools.combinations(seen, 2))


@pytest.mark.parametrize("sight", SIGHT)
def test_categories_can_be_told_apart(sight: str) -> None:
    for palette in palettes():
        distance, a, b = closest(palette, SIGHT[sight])
        assert distance >= APART, (a, b)


def test_colours_that_only_differ_in_hue_are_found() -> None:
    palette = palettes()[0] | {"parameter": "#008000", "activation": "#a03c00"}
    assert closest(palette, SIGHT["usual"])[0] >= APART
    assert closest(palette, SIGHT["without red"])[0] < APART or closest(palette, SIGHT["without green"])[0] < APART


def test_dark_is_the_same_whether_chosen_or_preferred() -> None:
    light, chosen, preferred = palettes()
    assert chosen == preferred and light.keys() == chosen.keys() and light != chosen
