"""The exceptions of tapegrad: each is also the standard exception a NumPy or TensorFlow user would catch."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType
from typing import Any


class TapegradError(Exception):
    """Base of every exception tapegrad raises on its own account."""


class ShapeError(TapegradError, ValueError):
    """Shapes do not fit together; the message names the operation and the shapes."""


class UnsizedError(ShapeError, TypeError):
    """A tensor of no dimensions has no length and cannot be iterated over."""


class LinAlgError(TapegradError, ValueError):
    """A matrix has no inverse, is not positive definite, or an iteration on it does not converge.

    ``failed``: which matrices of a stack, or if ``by_example`` which examples of a ``vmap``, by their indices (at most
    ten).
    """

    failed: tuple[tuple[int, ...], ...] = ()
    by_example: bool = False
    stack: FailedStack | None = None


@dataclass
class FailedStack:
    """What failed on a stack of matrices: kept while a ``vmap`` may have more of them."""

    name: str
    reason: str
    operands: list[Any]
    failing: Callable[[list[Any], int], tuple[tuple[int, ...], ...]]
    """The indices of the matrices that fail among given stacks of operands, at most so many."""


MOST_TOLD = 10


def told(indices: tuple[tuple[int, ...], ...]) -> str:
    """Indices as a message lists them: ``3, 5`` or ``(0, 1), (2, 1)``; a list of ten may be incomplete."""
    listed = ", ".join(str(i[0]) if len(i) == 1 else str(i) for i in indices[:MOST_TOLD])
    return listed + (" and perhaps more" if len(indices) >= MOST_TOLD else "")


class AxisError(ShapeError, IndexError):
    """An axis lies outside the array's dimensions."""


class IndexingError(TapegradError, IndexError):
    """An index is out of range or of a kind that cannot index an array."""


class DTypeError(TapegradError, TypeError, ValueError):
    """A dtype that the operation does not take, or that differs from the one demanded."""


class DomainError(TapegradError, ValueError):
    """A number lies outside what a function is defined for."""


class DeviceError(TapegradError, ValueError):
    """Operands live on different devices, or a device is not available."""


class KernelError(TapegradError, RuntimeError):
    """A CUDA kernel cannot be compiled or launched; the message shows the source, or how to mend the installation."""


class GraphError(TapegradError):
    """Something cannot be part of a CUDA graph; the cause says what."""


class DeviceMemoryError(TapegradError, MemoryError):
    """A device has no room for an array; the message names the bytes asked for, those in use and those there are."""


class OffloadError(TapegradError, OSError):
    """Bytes cannot be moved out of a device's memory, or back: the disk is full, a directory is not writable."""


class BudgetError(DeviceMemoryError):
    """A memory budget cannot be kept: the bytes needed at one time exceed it.

    ``needed_bytes``: the least budget with which this operation could have run.
    """

    def __init__(self, message: str, needed_bytes: int = 0) -> None:
        super().__init__(message)
        self.needed_bytes = needed_bytes


class DryRunError(TapegradError, RuntimeError):
    """A value is read that a dry run (``tg.memory.predict_peak``) has not computed."""


class RandomnessError(TapegradError, RuntimeError):
    """Random numbers are drawn inside a ``vmap`` that does not say whether examples share them."""


class FunctionError(DryRunError):
    """A captured function (``tg.function``) does something that a program cannot repeat, such as reading a value."""


class NotATensorError(TapegradError, TypeError, ValueError):
    """Something that is neither a tensor, a variable, an array nor a number was passed where one is needed."""


class ArgumentError(TapegradError, TypeError, ValueError):
    """An argument of a public function is of a kind or value that the function cannot use; the cause says why."""


class TapeError(TapegradError, RuntimeError):
    """A tape is asked for something that it cannot do any more, or not yet."""


class TapeStateError(TapeError, ValueError):
    """A tape is entered, left, paused or reset in the wrong state."""


class GradientError(TapegradError, ValueError):
    """Gradients of a wrong number, shape or structure."""


class StructureError(GradientError, TypeError):
    """Nested structures that must be alike are not; the message shows both."""


class GradientTypeError(GradientError, TypeError):
    """Gradients, or a gradient function, of a wrong kind."""


class DetachedError(GradientError, TypeError):
    """A value that ``grad``, ``jvp`` or the like differentiates was made a number or an array: the derivative would end
    there.
    """


class NoGradientError(TapegradError, LookupError):
    """A derivative was asked of an operation that declares none."""


class RecomputeError(TapegradError, ValueError):
    """The rerun of a checkpointed function did not repeat what the first run did."""


class ReversibleError(TapegradError, ArithmeticError):
    """Inverting a reversible block gave inputs that differ from the real ones by more than the bound."""


class PolicyError(TapegradError, TypeError, ValueError):
    """Something that is no memory policy, or a policy that returned no decision."""


class ImmutableError(TapegradError, TypeError, RuntimeError):
    """An attempt to change a tensor in place."""


class DistributedError(TapegradError, RuntimeError):
    """Ranks do not do the same, or one of them has failed; the message says which, and what each of them does."""


class DistributedTimeoutError(DistributedError, TimeoutError):
    """A rank has not come to where others wait for it; the message names it, and where they wait."""


class SaveError(TapegradError, ValueError):
    """A file does not fit the variables that it is loaded into, or something cannot be saved."""


class SaveFileError(SaveError, OSError):
    """A file cannot be written or read: a folder is missing, not writable, or full; ``errno`` says which."""


class SaveMissingError(SaveFileError, FileNotFoundError):
    """There is no file, or no folder, of that name."""


class SaveExistsError(SaveFileError, FileExistsError):
    """There is something of that name that is not replaced."""


class CapturedTensorWarning(UserWarning):
    """A function with a custom gradient uses a watched tensor that is not among its arguments: it gets no gradient."""


class PageableWarning(UserWarning):
    """Host memory to offload to cannot be pinned: the caller waits for copies to it."""


class LateTargetWarning(UserWarning):
    """One of several targets was computed after the tape stopped recording: it contributes nothing."""


class IntegerWatchWarning(UserWarning):
    """An integer tensor is watched, or its gradient asked for: that is None."""


class ReplicatedTargetWarning(UserWarning):
    """A target that has the same value on every rank may be counted once for each of them."""


def warn(message: str, category: type[Warning] = UserWarning) -> None:
    """Warn where the user's code calls this package."""
    package = __name__.partition(".")[0]
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] == package:
        level, frame = level + 1, frame.f_back
    warnings.warn(message, category, stacklevel=level)


def users_line(*others: str) -> tuple[str, int] | None:
    """Return the file and line of the innermost code that is neither this package's nor of the packages ``others``."""
    packages = (__name__.partition(".")[0], *others)
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] in packages:
        frame = frame.f_back
    return None if frame is None else (frame.f_code.co_filename, frame.f_lineno)


__all__ = [name for name, thing in globals().items() if isinstance(thing, type) and issubclass(thing, Exception)]


def __dir__() -> list[str]:
    """The exceptions and warnings."""
    return sorted([*__all__, *(name for name in globals() if name.startswith("__"))])
