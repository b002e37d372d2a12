"""Waits that a module asks streams of the stand-in for, by line; some may be left out, to show that they are needed."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import pytest

from shim.standin import cuda


@contextmanager
def of(module: ModuleType, without: Callable[[int], bool] = lambda line: False) -> Iterator[set[int]]:
    """Collect the lines of a module that ask for waits in the block; nobody waits at those that ``without`` names."""
    found = set[int]()

    def watched(method: Callable[..., None]) -> Callable[..., None]:
        def asked(stream: Any, *args: Any) -> None:
            frame = sys._getframe(1)
            if frame.f_code.co_filename == module.__file__:
                found.add(frame.f_lineno)
                if without(frame.f_lineno):
                    return
            method(stream, *args)

        return asked

    with pytest.MonkeyPatch.context() as changed:
        for kind in (cuda.Stream, cuda.ExternalStream):
            for name in ("wait_event", "synchronize"):
                changed.setattr(kind, name, watched(getattr(kind, name)))
        yield found
