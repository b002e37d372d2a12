"""CUDA kernels: where their sources lie, how a text becomes a function, and whole kernels by file and name.

The compile cache of CuPy does not look into included files, so a hash of all of ours is among the options.
"""

from __future__ import annotations

import hashlib
from functools import cache
from pathlib import Path
from typing import Any

from tapegrad.core import locks
from tapegrad.device import cuda_types
from tapegrad.errors import KernelError

_lock = locks.lock()


@cache
def folder() -> Path:
    """Where the sources lie: beside the package's modules in a wheel, in ``kernels/`` of a checkout."""
    here = Path(__file__).resolve().parent.parent
    for path in (here / "_kernels", here.parent / "kernels"):
        if (path / "scalar.cuh").is_file():
            return path
    raise KernelError(f"the kernel sources are missing: no scalar.cuh in {here / '_kernels'}; reinstall tapegrad")


@cache
def options() -> tuple[str, ...]:
    """What every kernel is compiled with.

    ``--fmad=false``: no bit may depend on how operations are grouped into kernels.  CuPy itself adds ``-ftz=true``:
    float32 numbers below 1.2e-38 count as 0 on a GPU.
    """
    digest = hashlib.blake2b(digest_size=8)
    for file in sorted(folder().glob("*.cuh")):
        digest.update(file.read_bytes())
    return ("--std=c++17", "--fmad=false", f"-I{folder()}", f"-DTG_HEADERS=0x{digest.hexdigest()}")


class Kernel:
    """One ``__global__`` function of a file in ``kernels/``, compiled at first use for each set of types."""

    __slots__ = ("_functions", "file", "name")

    def __init__(self, file: str, name: str) -> None:
        self.file = file
        self.name = name
        self._functions: dict[Any, Any] = {}
        DECLARED.append(self)

    def __repr__(self) -> str:
        return f"<kernel {self.name} of {self.file}>"

    def __call__(
        self,
        device: Any,
        grid: int | tuple[Any, ...],
        block: int | tuple[Any, ...],
        args: tuple[Any, ...],
        *,
        shared: int = 0,
        **macros: Any,
    ) -> None:
        """Run it; ``macros``: what capital names of the source stand for, dtypes by their storage types, or numbers.

        ``args``: arrays of the device and NumPy scalars of exactly the parameters' types.  Raises KernelError.
        """
        key = (device, *macros.items())
        function = self._functions.get(key)
        if function is None:
            with _lock:
                function = self._functions[key] = device.compile(self.text(), self.name, self.options(macros))
        grid = grid if isinstance(grid, tuple) else (grid,)
        device.launch(function, grid, block if isinstance(block, tuple) else (block,), args, shared)

    def text(self) -> str:
        """The source."""
        return (folder() / self.file).read_text()

    def options(self, macros: dict[str, Any]) -> tuple[str, ...]:
        """Compiler options for these macros."""
        values = {k: v if isinstance(v, int) else cuda_types.storage(v) for k, v in macros.items()}
        return (*options(), *(f"-D{k}={v}" for k, v in values.items()))


DECLARED: list[Kernel] = []
"""Every whole kernel that a primitive has declared; a test matches it with what the files define."""
