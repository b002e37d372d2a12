"""Random regions for the tests of ``explain``, and what it prints."""

from __future__ import annotations

import io
from collections.abc import Callable
from random import Random
from typing import Any

import numpy as np

import tapegrad as tg

UNARY = [tg.sin, tg.tanh, tg.special.erf, tg.special.erfc, tg.exp, lambda x: x * 0.5, lambda x: 1 - x]
BINARY = [tg.add, tg.multiply, tg.hypot, tg.logaddexp, tg.maximum, lambda x, y: tg.where(x > y, x, y)]


def explained(*tensors: Any, device: str | None = None) -> str:
    out = io.StringIO()
    tg.explain(*tensors, device=device, file=out)
    return out.getvalue()


def grown(random: Random, leaves: list[Any]) -> tuple[Any, list[Any]]:
    """A pending tensor of a random region, and some of the values on the way, which are held."""
    made, held = list(leaves), []
    for _ in range(random.randint(2, 12)):
        recent = made[-4:]
        if random.random() < 0.5:
            made.append(random.choice(UNARY)(random.choice(recent)))
        else:
            made.append(random.choice(BINARY)(random.choice(recent), random.choice(made)))
        if random.random() < 0.25:
            held.append(made[-1])
    return made[-1] * leaves[0], held


def leaves_of(random: Random, asarray: Callable, shape: tuple[int, int]) -> list[Any]:
    draw = np.random.default_rng(random.randrange(2**31))
    dtype = random.choice(["float32", "float64"])
    values = [draw.uniform(0.1, 1.0, s).astype(dtype) for s in (shape, shape[::-1], shape[1:])]
    x, y, z = (asarray(v) for v in values)
    return [x, random.choice([y.mT, x, z]), random.choice([x, z])]


def indented(text: str) -> str:
    """As ``explain`` prints a text."""
    return "".join(f"    {line}\n" for line in text.splitlines())
