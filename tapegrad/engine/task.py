"""Tasks: things to do on a device.  Each says what it reads and writes, what it takes for itself, and how it runs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

from tapegrad.core.aval import Shape
from tapegrad.device import CPU, Device, abstract_array
from tapegrad.device.types import Array, DType, Params

Lies = tuple[Shape, DType]
"""Shape and dtype of a C-contiguous array."""
Call = tuple[Callable[..., Any], tuple[Any, ...]]
"""A function, and what to call it with."""


def nbytes_of(arrays: Sequence[Lies]) -> int:
    """Bytes of arrays that are yet to be made."""
    return sum([prod(shape) * dtype.itemsize for shape, dtype in arrays])


def into(f: Callable[..., Any], reads: Sequence[Any], out: Array) -> Call:
    """The call of a ufunc, or of another function with ``out=``, that writes ``out``; by position it costs least."""
    if type(f).__name__ == "ufunc" and getattr(f, "__name__", "") not in _BY_NAME:
        return f, (*reads, out)
    return partial(f, out=out), tuple(reads)


@dataclass(frozen=True)
class Silenced:
    """A ufunc that reports no floating-point errors: a step of a formula, in which they are intended."""

    ufunc: Any

    def __call__(self, *reads: Any, out: Array) -> None:
        with CPU.xp.errstate(all="ignore"):
            self.ufunc(*reads, out=out)


_BY_NAME = {"maximum", "minimum"}
"""NumPy 2.4 warns where these get ``out`` by position."""


class Task(ABC):
    """One thing to do on ``device``: evaluates primitives of these ``names`` from ``reads``.

    ``writes``, ``temporaries``: the arrays that it is to be given; a task without ``writes`` makes its result itself.
    ``scratch_bytes``: what the ledger calls scratch: of the temporaries, and of what it takes by itself.
    """

    device: Device
    names: tuple[str, ...]
    reads: Sequence[Array]
    writes: Sequence[Lies]
    temporaries: Sequence[Lies] = ()
    scratch_bytes = 0
    category: str | None = None
    """As what the ledger counts the temporaries while the task is done; None: as scratch."""
    mislaid: dict[int, tuple[int, ...]] | None = None
    """Of calls that have copied results: the strides of each result that lay otherwise than expected, by its number."""

    keys: Sequence[Params] = ()
    """``key`` and ``counter`` of the random numbers that it draws, where it can take them from memory: three words of
    64 bits, of which the last is where the counter's stream is when the step begins."""

    @abstractmethod
    def run(self, outputs: list[Array], temporaries: list[Array]) -> list[Array]:
        """Run the task; return the arrays written."""

    def kept(self) -> Task:
        """Return the task in the form that a program keeps, to make its calls later."""
        return self

    def calls(self, reads: Sequence[Array], outputs: list[Array], temporaries: list[Array]) -> list[Call]:
        """Return the calls that run the task on other arrays of the same layouts, into ``outputs``."""
        raise NotImplementedError(f"{', '.join(self.names)} on {self.device}")

    def copies(self, outputs: list[Array], results: Sequence[Array]) -> None:
        """Copy the results of calls to ``outputs``, and note the strides of those that have another layout."""
        for i, (out, result) in enumerate(zip(outputs, results, strict=True)):
            if out.strides != result.strides and not (out.flags.c_contiguous and result.flags.c_contiguous):
                self.mislaid = {**(self.mislaid or {}), i: result.strides}
            self.device.xp.copyto(out, result)

    def moves(self, outputs: list[Array], temporaries: list[Array]) -> list[tuple[Sequence[Array], Sequence[Array]]]:
        """Return, for each kernel, the arrays that it reads and those that it writes."""
        return [(self.reads, outputs)]

    def abstract_outputs(self) -> list[Array]:
        """Return abstract arrays in place of the arrays written, for a dry run."""
        return [abstract_array.empty(*lies) for lies in self.writes]

    def text(self) -> str:
        """Return a description for readers."""
        return ", ".join(self.names)
