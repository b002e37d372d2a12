"""What tests import of ``autograd.tracer``."""

from typing import Any

import tapegrad as tg


def isbox(x: Any) -> bool:
    return isinstance(x, tg.Tensor)


def primitive(f: Any) -> Any:
    """A function nobody can differentiate through."""

    def run(*args: Any, **kwargs: Any) -> Any:
        return f(*[tg.stop_gradient(x) if isinstance(x, tg.Tensor) else x for x in args], **kwargs)

    return run
