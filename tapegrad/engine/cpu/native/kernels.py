"""Kernels by structure: compiled once in a thread in the background, and compared with NumPy before their first use.

``TAPEGRAD_NATIVE=2`` compiles at once.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Iterable
from typing import Any

from tapegrad.core import locks
from tapegrad.device import CPU
from tapegrad.engine.cpu.native import machine
from tapegrad.engine.cpu.native.emit import SCALAR, STRIDED, Structure, function
from tapegrad.engine.cpu.native.loops import PROBED, Loop, call, samples

_XP = CPU.xp
_kernels: dict[Structure, int] = {}
"""The address of each kernel that there is; 0 for one that gives other bits than NumPy."""
_queue: list[list[Structure]] = []
_working = [False]
_lock = locks.lock()
"""Protects the queue, and whether a thread works on it."""
_compiling = locks.lock()
"""Held while LLVM compiles, so that no fork comes in between: llvmlite has a lock of its own."""


class Request:
    """Kernels of ``structures`` that calls wait for."""

    def __init__(self, structures: Iterable[Structure]) -> None:
        self._structures = list(dict.fromkeys(structures))  # in order: what is compiled together is kept together

    @property
    def ready(self) -> bool:
        """Whether there are some, and all have been compiled."""
        return bool(self._structures) and all(s in _kernels for s in self._structures)

    def address(self, structure: Structure) -> int:
        """The address of a kernel; 0: there is none."""
        return _kernels[structure]


NOTHING = Request(())


def request(structures: Iterable[Structure]) -> Request:
    """Have kernels of ``structures`` compiled."""
    asked = Request(structures)
    missing = [s for s in asked._structures if s not in _kernels]
    if missing and os.environ.get("TAPEGRAD_NATIVE") == "2":
        _compile(missing)
    elif missing:
        with _lock:
            _queue.append(missing)
            if not _working[0]:
                _working[0] = True
                threading.Thread(target=_work, name="tapegrad-compiler").start()
    return asked


def _work() -> None:
    """Compile what is asked for, until nothing is."""
    while True:
        with _lock:
            if not _queue:
                _working[0] = False
                return
            structures = _queue.pop(0)
        try:
            _compile(structures)
        except Exception:  # what cannot be compiled is run as ever
            _kernels.update((s, 0) for s in structures if s not in _kernels)


def _compile(structures: list[Structure]) -> None:
    with _compiling:
        _add([s for s in structures if s not in _kernels])


def _add(structures: list[Structure]) -> None:
    """Compile these, which are not there."""
    names = {f"k{i}": structure for i, structure in enumerate(structures)}
    addresses = machine.compiled(text_of(names), list(names))
    for name, structure in names.items():
        _kernels[structure] = addresses[name] if _agrees(addresses[name], structure) else 0


def text_of(structures: dict[str, Structure]) -> str:
    """Return the text of a module with a function for each structure."""
    text = "\n".join(function(name, structure) for name, structure in structures.items())
    called = sorted(set(re.findall(r"call (.+?) (@llvm[\w.]+)\((.*)\)", text)))
    declared = {f"declare {kind} {name}({', '.join([kind] * given.count('%'))})" for kind, name, given in called}
    return "\n".join([text, *sorted(declared)])


def _agrees(address: int, structure: Structure) -> bool:
    """Whether the kernel gives the bits of NumPy's ufuncs, but for which NaN a NaN is."""
    leaves = [_leaf(char, kind, i) for i, (char, kind) in enumerate(structure.leaves)]
    values: list[Any] = list(leaves)
    with _XP.errstate(all="ignore"):
        for name, _, operands, to in structure.ops:
            if name in ("copyto", "cast"):
                values.append(_XP.asarray(values[operands[0]], to))
            else:
                values.append(getattr(_XP, name)(*(values[k] for k in operands)))
    expected = [_XP.broadcast_to(values[k], (PROBED,)) for k, _ in structure.stores]
    results = [
        _spread(_XP.zeros(PROBED, x.dtype), kind) for x, (_, kind) in zip(expected, structure.stores, strict=True)
    ]
    arrays = [*leaves, *results]
    call(Loop(address, 0, 0, True), arrays, PROBED, [x.strides[0] if x.ndim else 0 for x in arrays])
    return all(map(_same, results, expected))


def _leaf(char: str, kind: str, seed: int) -> Any:
    x = samples(_XP.dtype(char), seed)
    return x[seed % PROBED : seed % PROBED + 1].reshape(()) if kind == SCALAR else _spread(x, kind)


def _spread(x: Any, kind: str) -> Any:
    return _XP.repeat(x, 2)[::2] if kind == STRIDED else x


def _same(x: Any, y: Any) -> bool:
    if x.dtype.kind != "f":
        return bool((x == y).all())
    nan = _XP.isnan(x)
    return bool((nan == _XP.isnan(y)).all()) and x[~nan].tobytes() == y[~nan].tobytes()


def _forget() -> None:
    """In a child the thread is not there: what was asked for counts as not asked for."""
    _queue.clear()
    _working[0] = False


locks.in_child(_forget)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=_compiling.acquire, after_in_parent=_compiling.release, after_in_child=_compiling.release
    )
