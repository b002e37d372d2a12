"""Processes that take part in operations, all of them played by this one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import tapegrad as tg
from tapegrad.core import primitive
from tapegrad.ops.apply import barrier


class Peers:
    """``count`` processes in one group, each of which does and says what this one does; is this the ``foremost``?"""

    category = "collective"

    def __init__(self, count: int, foremost: bool = True) -> None:
        self.count, self.foremost = count, foremost

    def group(self, node: Any) -> str:
        return "all"

    def common(self, groups: Any) -> str:
        return "all"

    name = common
    replicated = group

    def members(self, group: str, line: str) -> list[int]:
        return [*range(self.count)]

    def pair(self, node: Any) -> None:
        return None

    def first(self, group: str) -> bool:
        return self.foremost

    def told(self, group: str, mine: Any) -> list[Any]:
        return [mine] * self.count


def of_all(
    peers: Peers, monkeypatch: pytest.MonkeyPatch, pulled: list[Any] | None = None
) -> Callable[[tg.Tensor], tg.Tensor]:
    """An operation in which ``peers`` take part, and of which all have the same result; ``pulled``: its cotangents."""
    tg.zeros(1)  # every operation is declared

    def pull(ct: Any) -> Any:
        if pulled is not None:
            pulled.append(ct)
        return ct

    monkeypatch.setattr(primitive, "REGISTRY", dict(primitive.REGISTRY))
    everyone = primitive.general(
        "everyone", impl=lambda xp, x: x * 1, infer=lambda x: x, vjp=[pull],
        effect=peers, dry=lambda x, out: out,
    )  # fmt: skip
    return lambda x: barrier(everyone, x)
