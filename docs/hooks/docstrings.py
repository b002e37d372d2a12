"""Docstrings on their way into the reference: Sphinx's roles become code."""

from __future__ import annotations

import re
from typing import Any

import griffe

ROLE = re.compile(r":\w+:`~?([^`]+)`")


class Roles(griffe.Extension):
    """Sees every object that a page asks for."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """``:meth:`x``` is written as ```x```."""
        if obj.docstring is not None:
            obj.docstring.value = ROLE.sub(r"`\1`", obj.docstring.value)
