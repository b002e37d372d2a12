"""Draws inside CUDA kernels: which of them share a block of random words."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import tapegrad as tg
from tapegrad.core.primitive import REGISTRY
from tapegrad.engine.cuda.element import UNIFORM, sharing_of


def drawn(name: str, dtype: str) -> Any:
    tg.zeros(1)  # every operation is declared
    return SimpleNamespace(
        node=SimpleNamespace(prim=REGISTRY[f"random_{name}"], aval=SimpleNamespace(dtype=np.dtype(dtype)))
    )


@pytest.mark.parametrize(
    ("draws", "vec", "packs"),
    [
        ([], 4, 1),
        ([("uniform", "float32")], 4, 2),
        ([("uniform", "float32")] * 3, 4, 2),
        ([("uniform", "float32")], 2, 4),
        ([("uniform", "float32")], 8, 1),
        ([("uniform", "float32")], 1, 1),
        ([("uniform", "float64")], 2, 2),
        ([("uniform", "float64")], 4, 1),
        ([("uniform", "float64")], 8, 1),
        ([("uniform", "float64")], 1, 1),
        ([("uniform", "float32"), ("uniform", "float64")], 2, 1),
        ([("bits16", "float32")], 2, 1),
        ([("bits16", "float32"), ("uniform", "float32")], 2, 1),
    ],
)
def test_packs_share_a_block_where_all_draws_are_uniform_and_of_one_type(
    draws: list[tuple[str, str]], vec: int, packs: int
) -> None:
    """A block makes 8 numbers of 4 bytes, or 4 of 8; where elements go one by one each has its own."""
    assert UNIFORM == {4: 8, 8: 4}
    assert sharing_of([drawn(*draw) for draw in draws], vec) == packs
