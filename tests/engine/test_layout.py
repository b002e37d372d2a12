"""How a pack of elements of an operand is read where its index has to be taken apart into dimensions."""

from __future__ import annotations

import numpy as np
import pytest

from tapegrad.engine.cuda import layout

X = np.zeros(64, np.float32)
assert layout._aligned(X, 4)


@pytest.mark.parametrize(
    ("start", "strides", "inner", "vec", "how"),
    [
        (0, (8, 1), 8, 4, layout.ROW),
        (0, (6, 1), 8, 4, layout.LINE),  # rows begin where no pack does
        (1, (8, 1), 8, 4, layout.LINE),  # so does the first
        (0, (8, 2), 8, 4, layout.LINE),
        (0, (1, 0), 8, 4, layout.SAME),
        (0, (8, 1), 6, 4, layout.STRIDED),  # a pack would lie in two rows
        (0, (8, 1), 8, 1, layout.STRIDED),
        (0, (8, 1), 8, 8, layout.ROW),
    ],
)
def test_how_a_pack_is_read(start: int, strides: tuple[int, ...], inner: int, vec: int, how: str) -> None:
    assert layout._by_dims(X[start:], strides, inner, vec) == how
