"""Runs: small elementwise nodes that are evaluated one after another, of which an account is told in one step."""

from __future__ import annotations

from typing import Any, NamedTuple


class Evaluated(NamedTuple):
    """One node of a run: its primitive, the bytes of its value and those that its kernel moved.

    ``last_read``: the numbers of the earlier nodes whose values go when this one is evaluated.
    """

    name: str
    nbytes: int
    moved: int
    last_read: tuple[int, ...] = ()


class Run:
    """What is the same whenever these ``nodes`` are evaluated; ``results``: the numbers of those whose values stay.

    ``change``: what the account that was told first has worked out from it, once.
    """

    __slots__ = ("change", "nodes", "results")

    def __init__(self, nodes: tuple[Evaluated, ...], results: tuple[int, ...] = (0,)) -> None:
        self.nodes = nodes
        self.results = results
        self.change: Any = None


def runs_of(site: Any) -> tuple[Run, Run]:
    """The run of a small node whose operands own their bytes, and that of one whose operands are the same array."""
    nbytes = site.aval.nbytes
    reads = sum([a.nbytes for a in site.avals]), max([a.nbytes for a in site.avals], default=0)
    found = site.runs = tuple([Run((Evaluated(site.prim.name, nbytes, read + nbytes),)) for read in reads])
    return found
