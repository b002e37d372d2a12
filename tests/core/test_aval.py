"""Shapes and axes."""

import numpy as np
import pytest

from tapegrad.core.aval import broadcast_shapes, counted_axes, normalize_axes, normalize_axis, shaped
from tapegrad.device import CPU
from tapegrad.errors import AxisError, ShapeError

F32 = np.dtype("float32")


def test_avals_are_interned():
    a, b = shaped((2, 3), F32, CPU), shaped([2, 3], F32, CPU)
    assert a is b and (a.size, a.nbytes, a.ndim, a.smooth) == (6, 24, 2, True)
    assert a.with_shape((6,)).with_shape((2, 3)) is a
    assert not a.with_dtype(np.dtype("int64")).smooth


def test_lengths_are_integers_of_python():
    with pytest.raises(TypeError):
        shaped((7919.0, 3), F32, CPU)  # a shape that no other test has: avals are shared by equal keys
    aval = shaped((np.int64(7919), 3), F32, CPU)
    assert [type(n) for n in aval.shape] == [int, int] and aval is shaped((7919, 3), F32, CPU)


@pytest.mark.parametrize("shapes", [[(2, 3), (3,)], [(2, 1), (1, 3)], [(), (4,)], [(0, 3), (1, 3)], [(5,)], []])
def test_broadcasting_is_numpys(shapes):
    assert broadcast_shapes("f", *shapes) == np.broadcast_shapes(*shapes)


def test_a_misfit_names_the_operation_the_shapes_and_the_axis():
    with pytest.raises(ShapeError, match=r"frobnicate: shapes \(2, 3\) and \(2,\) do not broadcast: axis -1"):
        broadcast_shapes("frobnicate", (2, 3), (2,))


def test_axes():
    assert normalize_axes("f", None, 3) == (0, 1, 2)
    assert normalize_axes("f", (-1, 0), 3) == (0, 2)
    assert normalize_axis("f", np.int64(-1), 2) == 1
    assert (normalize_axis("f", -3, 3), normalize_axis("f", 2, 3)) == (0, 2)
    for bad in (3, -4, 1.5, "x"):
        with pytest.raises(AxisError, match="f: axis"):
            normalize_axis("f", bad, 3)
    for several in ((0, 3), (-4, 0), (np.int64(3), 0), (0, 1.5)):
        with pytest.raises(AxisError, match="f: axis"):
            counted_axes("f", several, 3)
    assert counted_axes("f", (2, -3, 0, -1), 3) == [2, 0, 0, 2]
    with pytest.raises(AxisError, match="twice"):
        normalize_axes("f", (1, -2), 3)
