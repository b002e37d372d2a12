"""Functions that exist for 1, 2 and 3 dimensions, each three made of one body."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Concatenate, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

_SIZES = {1: "l", 2: "h, w", 3: "d, h, w"}


def in_dims(name: str, body: Callable[Concatenate[int, P], R]) -> tuple[Callable[P, R], Callable[P, R], Callable[P, R]]:
    """The functions of 1, 2 and 3 dimensions that call ``body`` with that number before their own arguments.

    ``name``: theirs, with ``{}`` for the number.  In the docstring of ``body``, SIZES stands for the sizes of an image.
    """
    return _in(name, 1, body), _in(name, 2, body), _in(name, 3, body)


def _in(name: str, dims: int, body: Callable[Concatenate[int, P], R]) -> Callable[P, R]:
    @functools.wraps(body, assigned=("__module__",))
    def function(*args: P.args, **kwargs: P.kwargs) -> R:
        return body(dims, *args, **kwargs)

    signature = inspect.signature(body)
    function.__signature__ = signature.replace(parameters=list(signature.parameters.values())[1:])  # type: ignore[attr-defined]
    function.__name__ = function.__qualname__ = name.format(dims)
    function.__doc__ = (body.__doc__ or "").replace("SIZES", _SIZES[dims])
    del function.__wrapped__
    return function
