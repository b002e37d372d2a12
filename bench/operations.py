"""What does an operation of a captured function (``tg.function``) cost on small arrays?

    python bench/operations.py [--size 4] [--length 20] [--rounds 7] [--only where,matmul] [--json]

A chain of ``--length`` times ``x = (f(x) + x) / 4`` on a square float64 array of ``--size`` rows, for each operation
``f``; forward alone, and forward with the gradient of the sum.  Microseconds of one element of the chain, with one
thread, processor time; what a call costs by itself is shared by the chain.  PyTorch runs eagerly.
The results must agree to 1e-10 of the largest value.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import common

TOLERANCE = 1e-10
Call = Callable[[], Any]
Function = Callable[[Any], Any]


def operations(lib: Any, axis: str) -> dict[str, Function]:
    """Return the operations that both libraries spell alike, by name; ``axis``: what they call that argument."""
    along = lambda n: {axis: n}
    return {
        "multiply": lambda x: x * x,
        "tanh": lib.tanh,
        "sqrt": lambda x: lib.sqrt(x + 1),
        "power": lambda x: (x + 1) ** 1.5,
        "where": lambda x: lib.where(x > 0.5, x, x * 2),
        "maximum": lambda x: lib.maximum(x, x * x),
        "clip": lambda x: lib.clip(x, 0.2, 0.8),
        "norm": lambda x: lib.sqrt(lib.sum(x * x)) * x,
        "sum of rows": lambda x: lib.sum(x, **along(0)) * x,
        "sums in rows": lambda x: lib.sum(x, **along(1)) * x,
        "matmul": lambda x: x @ x,
        "matrix, vector": lambda x: x @ x[0],
        "outer": lambda x: x[:, :1] * x[:1],
        "roll": lambda x: lib.roll(x, 1, **{axis + ("s" if axis == "dim" else ""): 0}),
        "concat": lambda x: lib.concat([x[1:], x[:1]], **along(0)),
        "stack": lambda x: lib.stack([x[0]] * x.shape[0], **along(0)),
        "max of rows": lambda x: (lib.max(x, axis=1) if axis == "axis" else lib.amax(x, dim=1)) * x,
    }


def named(tg: Any, torch: Any) -> dict[str, tuple[Function, Function]]:
    """Return each operation in both libraries, by name."""
    ours, theirs = tg.nn.functional, torch.nn.functional
    by_tg, by_torch = operations(tg, "axis"), operations(torch, "dim")
    pairs = {name: (by_tg[name], by_torch[name]) for name in by_tg}
    pairs["sigmoid"] = ours.sigmoid, torch.sigmoid
    pairs["gelu"] = ours.gelu, theirs.gelu
    pairs["softmax"] = lambda x: ours.softmax(x, dim=-1), lambda x: torch.softmax(x, -1)
    pairs["solve"] = (
        lambda x: tg.linalg.solve(x + 4 * tg.eye(x.shape[0], dtype="float64"), x),
        lambda x: torch.linalg.solve(x + 4 * torch.eye(x.shape[0], dtype=torch.float64), x),
    )
    return pairs


def chain(f: Function, x: Any, length: int) -> Any:
    for _ in range(length):
        x = (f(x) + x) * 0.25
    return x


def calls_of(tg: Any, torch: Any, f: Function, g: Function, x: Any, length: int, gradient: bool) -> dict[str, Call]:
    def ours(x: Any) -> Any:
        with tg.GradientTape() as tape:
            tape.watch(x)
            total = tg.sum(chain(f, x, length))
        return tape.gradient(total, x)

    def theirs() -> Any:
        (grad,) = torch.autograd.grad(chain(g, u, length).sum(), u)
        return grad

    t, u = tg.asarray(x), torch.tensor(x, requires_grad=gradient)
    captured = tg.function(ours if gradient else lambda x: chain(f, x, length))
    forward = lambda: chain(g, u, length).numpy()
    return {"tapegrad": lambda: captured(t).numpy(), "torch": theirs if gradient else forward}


def main() -> None:
    parser = common.parser(__doc__, threads=1, rounds=7)
    parser.add_argument("--size", type=int, default=4, help="rows and columns of the array (default: %(default)s)")
    parser.add_argument("--length", type=int, default=20, help="of the chain (default: %(default)s)")
    parser.add_argument("--only", help="names of operations, with commas between")
    options = parser.parse_args()
    common.begin(options.threads)
    os.environ["TAPEGRAD_NATIVE"] = "2"  # calls wait for their machine code, which would else be made meanwhile
    tg, torch = common.load("tapegrad", options.threads), common.load("torch", options.threads)
    if torch is None:
        raise SystemExit("PyTorch is not installed: pip install torch")
    import numpy as np

    x = np.random.default_rng(0).uniform(0.1, 0.9, (options.size, options.size))
    rows, cells = [], []
    pairs = named(tg, torch)
    for name in options.only.split(",") if options.only else pairs:
        cell = [name]
        for gradient in (False, True):
            calls = calls_of(tg, torch, *pairs[name], x, options.length, gradient)
            common.must_agree("torch", name, calls["tapegrad"](), calls["torch"](), TOLERANCE)
            times = common.by_turns(calls, options.rounds, number=50, clock=time.process_time)
            us = {who: common.median(seconds) / options.length * 1e6 for who, seconds in times.items()}
            speedup = common.ratio(times["tapegrad"], times["torch"])
            rows.append({"operation": name, "gradient": gradient, "us": us, "speedup": speedup})
            cell += [f"{us['tapegrad']:.2f}", f"{us['torch']:.2f}", f"{speedup:.1f}"]
        cells.append(tuple(cell))
    facts = common.about(options.threads)
    columns = ["operation", "captured", "PyTorch", "x faster", "with gradient", "PyTorch", "x faster"]
    common.show(f"microseconds of an operation, {options.size} x {options.size} float64", columns, cells, facts)
    if options.json:
        common.write("operations", facts, rows)


if __name__ == "__main__":
    main()
