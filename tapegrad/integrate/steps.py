"""Dormand and Prince's steps, of lengths that keep the error within a tolerance."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from tapegrad.core.state import unrecorded
from tapegrad.device import dtypes
from tapegrad.errors import TapegradError
from tapegrad.ops import abs, mean
from tapegrad.tensor import Tensor

# Dormand and Prince, "A family of embedded Runge-Kutta formulae", J. Comput. Appl. Math. 6 (1980) 19: the pair 5(4).
_TIMES = (1 / 5, 3 / 10, 4 / 5, 8 / 9, 1.0)
_STAGES = (
    (1 / 5,),
    (3 / 40, 9 / 40),
    (44 / 45, -56 / 15, 32 / 9),
    (19372 / 6561, -25360 / 2187, 64448 / 6561, -212 / 729),
    (9017 / 3168, -355 / 33, 46732 / 5247, 49 / 176, -5103 / 18656),
)
_RESULT = (35 / 384, 0.0, 500 / 1113, 125 / 192, -2187 / 6784, 11 / 84)
_ERROR = (71 / 57600, 0.0, -71 / 16695, 71 / 1920, -17253 / 339200, 22 / 525, -1 / 40)
"""Weights of the difference between the two results; the last is that of the slope at the end of the step."""

Rate = Callable[[Tensor, Tensor], Tensor]


def _weighted(weights: tuple[float, ...], slopes: list[Tensor]) -> Tensor:
    terms = [w * k for w, k in zip(weights, slopes, strict=True) if w]
    total = terms[0]
    for term in terms[1:]:
        total = total + term
    return total


@dataclass
class Stepper:
    """Takes steps whose estimated error is within ``atol + rtol * |y|`` (in the root mean square)."""

    op: str
    rate: Rate
    rtol: float
    atol: float
    longest: float
    limit: int
    length: float = 0.0
    """The length of the next step to try; 0: not known yet."""

    def _norm(self, x: Tensor, y: Tensor) -> float:
        size = abs(x / (self.atol + self.rtol * abs(y)))
        return math.sqrt(float(mean(size * size)._number())) if x.size else 0.0

    def _guess(self, y: Tensor, slope: Tensor, t: Tensor, way: float) -> float:
        """A first length: Hairer, Norsett and Wanner, "Solving ordinary differential equations I", section II.4."""
        size, speed = self._norm(y, y), self._norm(slope, y)
        h = min(math.fabs(way), 0.01 * size / speed if size > 1e-5 and speed > 1e-5 else 1e-6)
        signed = math.copysign(h, way)
        most = max(speed, self._norm(self.rate(y + signed * slope, t + signed) - slope, y) / h)
        length = min(100 * h, max(1e-6, h * 1e-3) if most <= 1e-15 else (0.01 / most) ** 0.2)
        return length if length > 0 else 1e-6 * math.fabs(way)  # where values are not finite

    def advance(self, y: Tensor, slope: Tensor, start: Tensor, end: Tensor) -> Iterator[tuple[float, Tensor, Tensor]]:
        """The steps from ``start`` to ``end``: after each, the share of the interval done, the value and the slope
        there.

        Raises TapegradError if there are more than ``limit``, or if they have to be too short for the dtype.
        """
        way = end - start
        first, signed = float(start._number()), float(way._number())
        span, done, tries = math.fabs(signed), 0.0, 0
        if not span:  # no step, but the derivative in `end` is the slope
            yield 1.0, y + way * slope, slope
            return
        self.length = self.length or unrecorded(self._guess, y, slope, start, signed)
        shortest = 4 * float(dtypes.finfo(start.dtype).eps) * max(math.fabs(first), span)
        while done < 1.0:
            share = min(self.length, self.longest) / span
            final = done + share >= 1.0 - 1e-9
            share = 1.0 - done if final else share
            tries += 1
            if tries > self.limit or (share * span < shortest and not final):
                raise TapegradError(
                    f"{self.op}: gave up at t = {first + done * signed:.6g} after {tries} steps, the last of length "
                    f"{share * span:.3g}: the solution may diverge, or the equation be stiff; loosen rtol and atol, "
                    "or raise mxstep"
                )
            new, there, error = self._step(y, slope, start + way * done, way * share)
            factor = 10.0 if error == 0.0 else 0.2 if not error < math.inf else 0.9 * error**-0.2
            if not final or factor < 1.0:  # a step that was cut short tells nothing of the length of the next
                self.length = share * span * min(10.0, max(0.2, factor))
            if error <= 1.0:
                done = 1.0 if final else done + share
                y, slope = new, there
                yield done, y, slope

    def through(self, y: Tensor, slope: Tensor, start: Tensor, end: Tensor) -> tuple[Tensor, Tensor]:
        """The value and the slope at ``end``."""
        reached = (0.0, y, slope)
        for reached in self.advance(y, slope, start, end):  # noqa: B007  (only the last is used)
            pass
        return reached[1:]

    def _step(self, y: Tensor, slope: Tensor, t: Tensor, h: Tensor) -> tuple[Tensor, Tensor, float]:
        """One step: the value, the slope there, and the estimated error in units of what is allowed."""
        slopes = [slope]
        for c, row in zip(_TIMES, _STAGES, strict=True):
            slopes.append(self.rate(y + h * _weighted(row, slopes), t + c * h))
        new = y + h * _weighted(_RESULT, slopes)
        slopes.append(self.rate(new, t + h))
        error = unrecorded(lambda: self._norm(h * _weighted(_ERROR, slopes), (abs(y) + abs(new)) / 2))
        return new, slopes[-1], error
