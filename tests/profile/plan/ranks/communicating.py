"""Runs made by hand that communicate: steps of 10 ms, with two buckets of gradients and a loss."""

from __future__ import annotations

from collections.abc import Callable

from tapegrad.tracing.run import Run
from tests.profile.made_runs import MIB, Builder


def steps(count: int, fill: Callable[[Builder, int, int], None], us: int = 10_000, **meta: object) -> Run:
    """``count`` steps of ``us`` microseconds; ``fill(builder, number, begin)`` puts collectives into one."""
    b = Builder(**meta)
    for number in range(count):
        b.begin_step()
        b.alloc(MIB, "input", "leaf")
        fill(b, number, number * us)
        b.end_step()
    b.run.steps["begin_ns"] = [i * us * 1000 for i in range(count)]
    b.run.steps["end_ns"] = [(i + 1) * us * 1000 for i in range(count)]
    return b.finish()


def gradients(b: Builder, number: int, begin: int) -> None:
    """Backward from 4 to 8 ms: a bucket of 1 MiB at 5 ms and one of 4 MiB at 7 ms; at 9 ms the loss."""
    walk = b.walk(begin + 4000, begin + 8100)
    for at, nbytes in ((5000, MIB), (7000, 4 * MIB)):
        b.collective("all_reduce", begin + at, begin + at + 10, 0, needed=begin + 8000, nbytes=nbytes, under_way=True,
                     walk=walk, line=12, number=3 * number + at // 7000)  # fmt: skip
    b.collective("all_reduce", begin + 9000, begin + 9000, nbytes=4, line=14, number=3 * number + 2)


def training() -> Run:
    """Five such steps on one process."""
    return steps(5, gradients)
