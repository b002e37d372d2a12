"""Live numbers: arithmetic with numbers, on either side, follows the present value."""

from __future__ import annotations

import operator

import pytest

from tapegrad.core.live_numbers import LiveNumber


@pytest.mark.parametrize("name", ["add", "sub", "mul", "truediv", "floordiv", "mod", "pow"])
def test_arithmetic_on_either_side_follows_the_present_value(name: str) -> None:
    f, now = getattr(operator, name), [3.0]
    x = LiveNumber(lambda: now[0])
    found = [f(x, 2), f(2, x), f(x, LiveNumber(lambda: 5.0))]
    for now[0] in (3.0, 4.0):
        assert [y.now() for y in found] == [f(now[0], 2), f(2, now[0]), f(now[0], 5.0)]
    for wrong in (lambda: f(x, None), lambda: f(None, x)):
        with pytest.raises(TypeError, match="unsupported operand"):
            wrong()
