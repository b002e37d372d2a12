"""What primitives share: shape rules that are asked once."""

from __future__ import annotations

import numpy as np
import pytest

import tapegrad as tg
from tapegrad.core.aval import ShapedArray, shaped
from tapegrad.device import CPU
from tapegrad.errors import AxisError, ShapeError
from tapegrad.ops.apply import remembered


def test_a_shape_is_inferred_once_for_each_signature_and_refused_each_time() -> None:
    asked = []

    @remembered
    def infer(x: ShapedArray, *, axis: int) -> ShapedArray:
        asked.append((x.shape, axis))
        if axis >= x.ndim:
            raise ShapeError("too far")
        return x.with_shape(x.shape[axis:])

    x, y = (shaped((2, 3), np.dtype(kind), CPU) for kind in ("f4", "f8"))
    for _ in range(2):
        assert infer(x, axis=1).shape == infer(y, axis=1).shape == (3,)
        assert infer(x, axis=1).dtype != infer(y, axis=1).dtype
        assert infer(x, axis=0) is x
        with pytest.raises(ShapeError):
            infer(x, axis=2)
    assert len(asked) == 5


@pytest.mark.parametrize("axes", [(1.0, 0.0), ("1", 0), (2, 0), (-3, 0), (0, 0), (0,)], ids=str)
def test_axes_that_are_refused(axes: tuple[object, ...]) -> None:
    x = tg.ones((2, 3))
    with pytest.raises(AxisError):
        tg.permute_dims(x, axes)
    with pytest.raises(AxisError):
        tg.moveaxis(x, axes, (0, 1))


def test_axes_in_any_integers() -> None:
    x = tg.ones((2, 3, 4))
    for kind in (int, np.int32, np.uint8):
        assert tg.permute_dims(x, tuple(map(kind, (2, 0, 1)))).shape == (4, 2, 3)
        assert tg.moveaxis(x, kind(0), kind(2)).shape == (3, 4, 2)
    assert tg.permute_dims(x, (-1, 0, 1)).shape == (4, 2, 3)
    assert tg.moveaxis(x, [0, -1], [-1, 0]).shape == (4, 3, 2)
