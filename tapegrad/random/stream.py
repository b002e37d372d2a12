"""Streams of random numbers: a key and a position."""

from __future__ import annotations

import os
from collections.abc import Callable
from operator import index

from tapegrad.core import locks
from tapegrad.core.cell import Cell
from tapegrad.core.state import thread
from tapegrad.device.numerics.bits import blocks16
from tapegrad.tensor import Tensor

METHODS: dict[str, Callable[..., Tensor]] = {}
"""The functions that are also methods of a generator, by name; the package fills it."""


class Generator:
    """A stream of random numbers with a ``seed`` (an integer; None: from the system).

    Its methods are the functions of ``tg.random``: ``generator.normal((3,))`` is ``normal((3,), generator=generator)``.
    """

    def __init__(self, seed: int | None = None) -> None:
        self._lock = locks.lock()
        self._state = Cell((int.from_bytes(os.urandom(8), "little") if seed is None else _seed(seed), 0))

    def seed(self, seed: int) -> None:
        """Start the stream of ``seed`` from its beginning."""
        self._state.set((_seed(seed), 0))

    def take(self, blocks: int) -> tuple[int, int]:
        """The key and the position of ``blocks`` fresh blocks of four 64-bit words."""
        with self._lock:  # two threads must not draw the same numbers
            key, position = self._state.get()
            self._state.set((key, position + blocks))
        return key, position

    def draw(self, size: int, blocks: Callable[[int], int]) -> tuple[int, int]:
        """The key and the position of the blocks that ``blocks`` counts for ``size`` numbers.

        Inside ``vmap(randomness="different")``: for as many of each example.  Raises RandomnessError.
        """
        for batch in thread.batches:
            size *= batch.draws()
        return self.take(blocks(size))

    def draw16(self, size: int) -> tuple[int, int]:
        """The key and the position of the blocks for ``size`` numbers of 16 bits.  Raises RandomnessError."""
        return self.draw(size, blocks16)

    @property
    def state(self) -> tuple[int, int]:
        """The key and the position, to be kept or compared."""
        return self._state.get()

    @state.setter
    def state(self, value: tuple[int, int]) -> None:
        self._state.set((_seed(value[0]), int(value[1])))

    def __reduce__(self) -> tuple[Callable[[tuple[int, int]], Generator], tuple[tuple[int, int]]]:
        return _restored, (self.state,)

    def __getattr__(self, name: str) -> Callable[..., Tensor]:
        if name not in METHODS:
            raise AttributeError(f"a Generator has no {name!r}; it has {', '.join(sorted(METHODS))}")
        function = METHODS[name]

        def method(*args: object, **named: object) -> Tensor:
            return function(*args, generator=self, **named)

        method.__name__, method.__doc__ = name, function.__doc__
        return method

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *METHODS})


def _restored(state: tuple[int, int]) -> Generator:
    generator = Generator(0)
    generator.state = state
    return generator


def _seed(n: int) -> int:
    return index(n) % 2**128


default_generator = Generator(0x7A9E)


def seed(seed: int) -> None:
    """Start the default generator's stream of ``seed`` from its beginning."""
    default_generator.seed(seed)
