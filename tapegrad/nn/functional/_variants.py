"""Public functions that differ in one argument of a body that they share: in the number of dimensions, say."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Concatenate, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")

_SIZES = {1: "l", 2: "h, w", 3: "d, h, w"}


def variant(name: str, body: Callable[Concatenate[T, P], R], first: T, doc: str) -> Callable[P, R]:
    """The function ``name`` that calls ``body`` with ``first`` before its own arguments."""

    @functools.wraps(body, assigned=("__module__",))
    def function(*args: P.args, **kwargs: P.kwargs) -> R:
        return body(first, *args, **kwargs)

    signature = inspect.signature(body)
    vars(function)["__signature__"] = signature.replace(parameters=list(signature.parameters.values())[1:])
    function.__name__ = function.__qualname__ = name
    function.__doc__ = doc
    del function.__wrapped__
    return function


def in_dims(name: str, body: Callable[Concatenate[int, P], R]) -> tuple[Callable[P, R], Callable[P, R], Callable[P, R]]:
    """The functions of 1, 2 and 3 dimensions that call ``body`` with that number before their own arguments.

    ``name``: theirs, with ``{}`` for the number.  In the docstring of ``body``, SIZES stands for the sizes of an image.
    """
    doc = body.__doc__ or ""
    one, two, three = (variant(name.format(n), body, n, doc.replace("SIZES", sizes)) for n, sizes in _SIZES.items())
    return one, two, three
