"""The work of a gradient grows no faster than the number of operations, operands, results, variables and calls."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import tapegrad as tg

FEW, TIMES = 100, 4


def scalars(n: int) -> list[tg.Tensor]:
    return [tg.asarray(float(i)) for i in range(n)]


def pieces(join: Callable[[list[tg.Tensor]], tg.Tensor]) -> Callable[[int], Any]:
    def run(n: int) -> Any:
        xs = scalars(n)
        with tg.GradientTape() as tape:
            tape.watch(xs)
            y = tg.sum(join(xs) ** 2)
        return tape.gradient(y, xs)

    return run


def chain(operation: Any) -> Any:
    def run(n: int) -> Any:
        x = tg.asarray(np.ones(4))
        with tg.GradientTape() as tape:
            tape.watch(x)
            y = x
            for _ in range(n):
                y = operation(y)
        return tape.gradient(y, x)

    return run


def parts(cut: Callable[[tg.Tensor], Any]) -> Callable[[int], Any]:
    def run(n: int) -> Any:
        x = tg.asarray(np.ones((n, 2)))
        with tg.GradientTape() as tape:
            tape.watch(x)
            y = sum(tg.sum(part) * 2.0 for part in cut(x))
        return tape.gradient(y, x)

    return run


def variables(n: int) -> Any:
    vs = [tg.Variable(float(i)) for i in range(n)]
    with tg.GradientTape() as tape:
        y = tg.sum(tg.stack([v * 2.0 for v in vs]))
    return tape.gradient(y, vs)


def targets(n: int) -> Any:
    x = tg.asarray(np.ones(4))
    with tg.GradientTape() as tape:
        tape.watch(x)
        ys = [x * float(i) for i in range(n)]
    return tape.gradient(ys, x)


def rows(n: int) -> Any:
    xs = scalars(n)
    with tg.GradientTape() as tape:
        tape.watch(xs)
        y = tg.stack(xs)[:3]
    return tape.jacobian(y, xs)


def calls(n: int) -> Any:
    double = tg.custom_gradient(lambda x: (x * 2.0, lambda ct: ct * 2.0))
    x = tg.asarray(np.ones(4))
    with tg.GradientTape() as tape:
        tape.watch(x)
        y = sum(double(x) for _ in range(n))
    return tape.gradient(y, x)


def steps(n: int) -> Any:
    x = tg.asarray(np.ones(4))
    with tg.GradientTape() as tape:
        tape.watch(x)
        y = tg.checkpointed_loop(tg.sin, x, n, schedule="sqrt")
    return tape.gradient(y, x)


AXES: dict[str, Callable[[int], Any]] = {
    "stack": pieces(tg.stack),
    "concat": pieces(lambda xs: tg.concat([tg.reshape(x, (1,)) for x in xs])),
    "hstack": pieces(tg.hstack),
    "block": pieces(lambda xs: tg.block([tg.reshape(x, (1,)) for x in xs])),
    "operations": chain(tg.sin), "checkpoints": chain(lambda x: tg.recompute_grad(tg.sin)(x)),
    "unstack": parts(tg.unstack), "iteration": parts(iter), "split": parts(lambda x: tg.split(x, len(x))),
    "elements": parts(lambda x: [x[i] for i in range(len(x))]),
    "windows": parts(lambda x: [x[i : i + 2] for i in range(len(x))]),
    "columns": parts(lambda x: [column for y in [x.T] for column in (y[:, i] for i in range(len(x)))]),
    "array_split": parts(lambda x: tg.array_split(x, range(1, len(x), 2))),
    "variables": variables, "targets": targets, "rows": rows, "calls": calls,
    "steps": steps,
}  # fmt: skip


def work(run: Callable[[int], Any], n: int) -> dict[str, int]:
    """Kernels, bytes and Python's calls of a run."""
    count = 0

    def note(frame: Any, event: str, arg: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    with tg.measure() as m:
        before = sys.getprofile()
        sys.setprofile(note)
        try:
            run(n)
        finally:
            sys.setprofile(before)
    return {"kernels": m.kernel_runs, "moved": m.bytes_moved, "allocated": m.allocated_bytes, "calls": count}


@pytest.mark.parametrize("axis", AXES)
def test_work_is_linear(axis: str) -> None:
    run = AXES[axis]
    run(2)  # what is imported or compiled at the first use
    few, many = work(run, FEW), work(run, FEW * TIMES)
    for name, count in few.items():
        # 1.5: what cuts an array into n parts takes n log n
        assert many[name] <= 1.5 * TIMES * count + 1000, (name, few, many)
