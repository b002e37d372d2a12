"""What a device is: a namespace, memory, and conversion from foreign arrays."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import starmap
from typing import Any, TypeVar

import numpy as np

from tapegrad.device.types import Array, DType
from tapegrad.errors import DeviceError

T = TypeVar("T")


class Device(ABC):
    """One place where arrays live: its name (``"cpu"``, ``"cuda:0"``), its namespace ``xp`` and its memory."""

    __slots__ = ("index", "kind", "lazy", "least_pooled", "name", "xp")

    def __init__(self, name: str, kind: str, xp: Any, least_pooled: int, lazy: bool, index: int = 0) -> None:
        self.name = name
        self.kind = kind
        """``"cpu"`` or ``"cuda"``."""
        self.index = index
        """Its number among the devices of its kind."""
        self.xp = xp
        self.least_pooled = least_pooled
        self.lazy = lazy
        """Whether even small arrays are worth deferring: launching a kernel costs as much as recording many nodes."""

    def __repr__(self) -> str:
        return self.name

    @abstractmethod
    def empty(self, shape: tuple[int, ...], dtype: DType) -> Array:
        """An uninitialised C-contiguous array from the device's pool."""

    def arrays(self, lies: Sequence[tuple[tuple[int, ...], DType]]) -> list[Array]:
        """Such an array of each shape and dtype."""
        return list(starmap(self.empty, lies))

    @abstractmethod
    def array(self, x: object, dtype: DType | None = None, copy: bool = True) -> Any:
        """``x`` (array, number, nested sequence) as an array (a copy is C-contiguous); Python floats become float32.

        Raises NotATensorError for objects that are no numbers.
        """

    def constant(self, value: complex, dtype: DType) -> Any:
        """A number as what a buffer holds: a 0-d array, or a stand-in that kernels take as an argument."""
        return self.xp.asarray(value, dtype=dtype)

    @abstractmethod
    def numpy(self, x: Array) -> Array:
        """A device array's value as a NumPy array, to be read at once: ``x`` itself on the CPU, else a copy."""

    @abstractmethod
    def shared(self, x: Array, owner: object) -> Array:
        """An array of the library on the memory of ``x`` for the user, who must not write to it.

        It, and whatever views of it there are, refer to ``owner``.
        """

    @abstractmethod
    def save(self, x: Array, into: Any) -> None:
        """Write the elements of array ``x``, in C order, over the first ``x.nbytes`` of the buffer ``into``."""

    @abstractmethod
    def load(self, x: Array, data: Any) -> None:
        """Fill the C-contiguous array ``x`` from the first ``x.nbytes`` of the buffer ``data``."""

    @abstractmethod
    def is_view(self, x: Array, of: Array) -> bool:
        """Whether array ``x`` shares memory bounds with array ``of``."""

    @abstractmethod
    def give_back(self) -> None:
        """Return unused blocks of the pool to the system."""

    @abstractmethod
    def usage(self) -> tuple[int, int]:
        """Bytes of the pool that are in use (-1: the pool does not know), and idle bytes in it."""

    def room(self, nbytes: int) -> str:
        """Text for an error: the memory there is, after a request for ``nbytes`` failed."""
        return "the system has no more"

    @abstractmethod
    def limit(self, nbytes: int | None) -> None:
        """Let the pool hold at most so many bytes, used and unused; None: the limit as it was before."""

    def free_idle(self, nbytes: int) -> None:
        """Make room for ``nbytes`` beside the pool: free idle blocks if they do not fit within the limit."""
        return

    def call(self, f: Callable[..., T], /, *args: Any, **kwargs: Any) -> T:
        """What ``f`` returns, called as in the block :meth:`active`."""
        return f(*args, **kwargs)

    def active(self) -> AbstractContextManager[object]:
        """A block in which the namespace's functions work on this device, after what it has been asked before."""
        return nullcontext()

    def placed(self, memory: Array, offset: int, shape: tuple[int, ...], dtype: DType, strides: Any) -> Array:
        """An array on the bytes of ``memory``; its first element lies ``offset`` bytes after that of ``memory``."""
        return np.ndarray(shape, dtype, memory, offset, strides)

    def send(self, x: Array, host: Array) -> None:
        """Copy the bytes of ``host``, an array of NumPy's, which may change afterwards, to those of ``x``."""
        x.view(np.uint8)[...] = host.view(np.uint8)

    def compile(self, text: str, name: str, options: tuple[str, ...]) -> Any:
        """The function ``name`` of CUDA C++ ``text``.  Raises KernelError."""
        raise DeviceError(f"device {self.name} runs no CUDA kernels")

    def launch(
        self, function: Any, grid: tuple[int, ...], block: tuple[int, ...], args: tuple[Any, ...], shared: int = 0
    ) -> None:
        """Run a compiled function on the current stream."""
        raise DeviceError(f"device {self.name} runs no CUDA kernels")
