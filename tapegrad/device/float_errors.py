"""NumPy's error state (``errstate``): taken at one time, set again at another, and obeyed by machine code."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import numpy as np


def errors_now() -> Any:
    """The error state of this thread."""
    return np.geterr()


def treating_errors(errors: Any) -> Any:
    """A block with the error state ``errors``; inside :func:`raising_errors` what is not ignored raises."""
    return np.errstate(**_raised(errors) if _raising.get() else errors)


@contextmanager
def raising_errors() -> Iterator[None]:
    """Raise FloatingPointError in the block for whatever the error state does not ignore: nothing is reported twice."""
    token = _raising.set(True)
    try:
        with np.errstate(**_raised(np.geterr())):
            yield
    finally:
        _raising.reset(token)


def _raised(errors: Any) -> Any:
    return {kind: mode if mode == "ignore" else "raise" for kind, mode in errors.items()}


_raising: ContextVar[bool] = ContextVar("raising", default=False)


_TEXTS = {"divide": "divide by zero", "over": "overflow", "under": "underflow", "invalid": "invalid value"}
"""NumPy's names of its errors, in the order in which it reports them."""
_BITS = {"divide": 1, "over": 2, "under": 4, "invalid": 8}
"""NumPy's flags, which a function of ``np.seterrcall`` gets."""


def reported() -> list[str]:
    """Return the kinds of errors that this thread does not ignore."""
    return [kind for kind, mode in np.geterr().items() if mode != "ignore"]


def report(operation: str, kinds: Collection[str]) -> None:
    """Warn, raise, call, print or log, as the error state says, of errors in a ufunc that has run outside of NumPy."""
    state: dict[str, Any] = {**np.geterr()}
    handler: Any = np.geterrcall()
    flags = sum(_BITS[kind] for kind in kinds)
    for kind, text in _TEXTS.items():
        if kind not in kinds:
            continue
        mode, message = state[kind], f"{text} encountered in {operation}"
        if mode == "warn":
            warnings.warn(message, RuntimeWarning, stacklevel=3)
        elif mode == "raise":
            raise FloatingPointError(message)
        elif mode == "call":
            handler(text, flags)
        elif mode == "print":
            print(f"Warning: {message}", file=sys.stderr)
        elif mode == "log":
            handler.write(f"Warning: {message}\n")
