"""Wrapped functions that also work as methods and keep name, documentation and the original."""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Callable
from typing import Any, SupportsIndex


class Wrapper:
    """A callable around ``__wrapped__`` that shows its attributes as they are now."""

    __wrapped__: Any
    __call__: Callable[..., Any]

    def __init__(self, f: Callable[..., object]) -> None:
        functools.update_wrapper(self, f, updated=())

    def __get__(self, instance: object, owner: type | None = None) -> Any:
        """Binds to an instance as a function does, if a function is wrapped."""
        f = self.__wrapped__
        bind = getattr(type(f), "__get__", None)
        if instance is None or bind is None:
            return self
        binds = getattr(bind(f, instance, owner), "__self__", None) is instance and not isinstance(f, types.MethodType)
        return types.MethodType(self, instance) if binds else self

    def __reduce_ex__(self, protocol: SupportsIndex) -> Any:
        # A decorated function of a module is pickled by its name, as a function is.
        name = self.__dict__.get("__qualname__")
        if isinstance(name, str) and _named(self.__module__, name) is self:
            return name
        return super().__reduce_ex__(protocol)

    def __getattr__(self, name: str) -> Any:
        if name == "__wrapped__":
            raise AttributeError(name)
        return getattr(self.__wrapped__, name)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.__wrapped__!r})"


def _named(module: str, name: str) -> Any:
    """What stands under a (dotted) name in a module that has been imported, or None."""
    value: object = sys.modules.get(module)
    for part in name.split("."):
        value = getattr(value, part, None)
    return value
