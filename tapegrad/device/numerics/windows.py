"""Where a kernel that moves over an image meets it: arithmetic only, for convolution and pooling."""

from __future__ import annotations

from functools import lru_cache
from itertools import product
from typing import NamedTuple


class Window(NamedTuple):
    """How a kernel moves over an image; each field has an entry for each spatial dimension."""

    size: tuple[int, ...]  # of the image
    kernel: tuple[int, ...]
    strides: tuple[int, ...]
    padding: tuple[tuple[int, int], ...]
    dilation: tuple[int, ...]

    @property
    def positions(self) -> tuple[int, ...]:
        """How many places the kernel takes along each dimension; below 1 where it does not fit."""
        return tuple(
            (n + low + high - (k - 1) * d - 1) // s + 1
            for n, k, s, (low, high), d in zip(self.size, self.kernel, self.strides, self.padding, self.dilation)
        )

    @property
    def is_pointwise(self) -> bool:
        """Whether the kernel has one tap, which meets each element once, in order and nothing else."""
        return set(self.kernel) == {1} and self.positions == self.size and not any(map(any, self.padding))


class Moves(NamedTuple):
    """What a convolution is told beside its operands.

    ``tf32``: its products may round float32 operands to 10 bits of fraction, as tensor cores do.
    """

    strides: tuple[int, ...]
    padding: tuple[tuple[int, int], ...]
    dilation: tuple[int, ...]
    groups: int
    tf32: bool = False

    def over(self, size: tuple[int, ...], kernel: tuple[int, ...]) -> Window:
        """The window of a kernel of that size over an image of that size."""
        return Window(tuple(size), tuple(kernel), self.strides, self.padding, self.dilation)


class Tap(NamedTuple):
    """One tap of the kernel in a block: its number, the positions at which it meets the image, and what it meets."""

    number: int
    at: tuple[slice, ...]
    meets: tuple[slice, ...]

    @property
    def columns(self) -> tuple[int | slice, ...]:
        """Its part of an array with the axes groups, channels, taps, images and positions."""
        return (slice(None), slice(None), self.number, slice(None), *self.at)


@lru_cache(maxsize=1024)
def taps(window: Window, first: int, count: int) -> tuple[Tap, ...]:
    """The taps over ``count`` rows of positions from row ``first``, in C order, without those that meet nothing."""
    along = []
    for axis, positions in enumerate(window.positions):
        start, stop = (first, first + count) if axis == 0 else (0, positions)
        along.append([_meeting(window, axis, k, start, stop) for k in range(window.kernel[axis])])
    kept = []
    for number, parts in enumerate(product(*along)):
        meetings = [part for part in parts if part is not None]
        if len(meetings) == len(parts):
            kept.append(Tap(number, tuple(m[0] for m in meetings), tuple(m[1] for m in meetings)))
    return tuple(kept)


def _meeting(window: Window, axis: int, k: int, start: int, stop: int) -> tuple[slice, slice] | None:
    """Where tap ``k`` meets the image along ``axis``: among positions ``start`` to ``stop``, and in the image."""
    step = window.strides[axis]
    offset = k * window.dilation[axis] - window.padding[axis][0]
    low = max(start, -(offset // step))
    high = min(stop, (window.size[axis] - 1 - offset) // step + 1)
    if high <= low:
        return None
    at = low * step + offset
    return slice(low - start, high - start), slice(at, at + (high - low - 1) * step + 1, step)
