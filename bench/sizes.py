"""What does an eager elementwise operation cost, from 100 to a million elements?

    python bench/sizes.py [--threads 1] [--rounds 15] [--quick] [--json]

``a * b`` (1 operation) and ``(a * b + a) * b`` (a chain of 3), on float32 and float64, with operands that are
contiguous, broadcast (``b`` is one row) or strided (``b`` is a transposed matrix), forward alone, and forward with the
gradients in ``a`` and ``b``.  Every value is computed before the time is read.  NumPy's gradient is written by hand.
PyTorch runs eagerly and JAX under ``jit``, where they are installed.  All take turns within a round; times are medians
in microseconds, with one thread processor time, with more the wall clock.  "over" is what tapegrad takes more than
NumPy, per operation: a gradient counts the operations that NumPy performs.  "PyTorch" and "JAX" say how many times
faster tapegrad is.  The results must agree to 1e-5 of the largest value.

Two threads: ``--threads 2``.  ``--quick``: three sizes, contiguous operands.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import common

TOLERANCE = 1e-5
SIZES = (100, 300, 1_000, 3_000, 10_000, 30_000, 256 * 256, 100_000, 300_000, 1_000_000)
QUICK = (1_000, 256 * 256, 1_000_000)
COLUMNS = {100: (10, 10), 300: (15, 20), 1_000: (25, 40), 3_000: (50, 60), 10_000: (100, 100), 30_000: (150, 200),
           256 * 256: (256, 256), 100_000: (250, 400), 300_000: (500, 600), 1_000_000: (1000, 1000)}  # fmt: skip
OPERATIONS = {(1, False): 1, (3, False): 3, (1, True): 3, (3, True): 8}
"""Of NumPy, by length of the chain and whether the gradient is taken; a broadcast operand's gradient is summed, too."""
Call = Callable[[], Any]


def chain(a: Any, b: Any, length: int) -> Any:
    return a * b if length == 1 else (a * b + a) * b


def with_numpy(a: Any, b: Any, length: int, gradient: bool) -> Call:
    import numpy as np

    def both() -> Any:
        u = a * b
        seed = np.ones_like(u)
        if length == 1:
            y, ga, gb = u, seed * b, seed * a
        else:
            v = u + a
            y, gv = v * b, seed * b
            ga, gb = gv + gv * b, seed * v + gv * a
        return y, ga, gb if gb.shape == b.shape else gb.sum(0)

    return both if gradient else partial(chain, a, b, length)


def with_tapegrad(tg: Any, a: Any, b: Any, length: int, gradient: bool) -> Call:
    x, y = tg.asarray(a), tg.asarray(b.T).T if b.ndim == 2 and not b.flags.c_contiguous else tg.asarray(b)

    def both() -> Any:
        with tg.GradientTape() as tape:
            tape.watch([x, y])
            z = chain(x, y, length)
        gx, gy = tape.gradient(z, [x, y])
        return z.numpy(), gx.numpy(), gy.numpy()

    return both if gradient else lambda: chain(x, y, length).numpy()


def with_torch(torch: Any, a: Any, b: Any, length: int, gradient: bool) -> Call:
    x, y = (torch.from_numpy(t).requires_grad_(gradient) for t in (a, b))

    def both() -> Any:
        z = chain(x, y, length)
        return z.detach(), *torch.autograd.grad(z, (x, y), torch.ones_like(z))

    return both if gradient else lambda: chain(x, y, length)


def with_jax(jax: Any, a: Any, b: Any, length: int, gradient: bool) -> Call:
    import jax.numpy as jnp

    jax.config.update("jax_enable_x64", True)
    x, y = jnp.asarray(a), jnp.asarray(b)

    def both(x: Any, y: Any) -> Any:
        z, pull = jax.vjp(lambda x, y: chain(x, y, length), x, y)
        return z, *pull(jnp.ones_like(z))

    run = jax.jit(both if gradient else partial(chain, length=length))
    return lambda: jax.block_until_ready(run(x, y))


PEERS = {"torch": with_torch, "jax": with_jax}


def operands(size: int, dtype: str, layout: str) -> tuple[Any, Any]:
    import numpy as np

    rng = np.random.default_rng(0)
    rows, columns = COLUMNS[size]
    a = rng.uniform(0.5, 1.5, (rows, columns)).astype(dtype)
    if layout == "broadcast":
        return a, rng.uniform(0.5, 1.5, columns).astype(dtype)
    b = rng.uniform(0.5, 1.5, (columns, rows) if layout == "strided" else (rows, columns)).astype(dtype)
    return a, b.T if layout == "strided" else b


def measure(options: Any, modules: dict[str, Any], size: int, dtype: str, layout: str) -> list[dict[str, Any]]:
    a, b = operands(size, dtype, layout)
    clock = time.process_time if options.threads == 1 else time.perf_counter
    rows = []
    for (length, gradient), operations in OPERATIONS.items():
        calls = {"numpy": with_numpy(a, b, length, gradient)}
        for name, module in modules.items():
            make = with_tapegrad if name == "tapegrad" else PEERS[name]
            calls[name] = make(module, a, b, length, gradient)
        want = calls["numpy"]() if gradient else (calls["numpy"](),)
        for name, call in calls.items():
            for got, value in zip(call() if gradient else (call(),), want, strict=True):
                common.must_agree(name, f"{dtype}, {layout}, {size} elements", got, value, TOLERANCE)
        number = max(16, min(1000, 2**24 // size))  # the first calls of a turn find cold caches
        times = common.by_turns(calls, options.rounds, number=number, clock=clock)
        ours = times["tapegrad"]
        rows.append(
            {
                "dtype": dtype, "layout": layout, "elements": size, "length": length, "gradient": gradient,
                "us": {name: common.median(seconds) * 1e6 for name, seconds in times.items()},
                "best_us": {name: min(seconds) * 1e6 for name, seconds in times.items()},
                "over_us_per_op": (common.median(ours) - common.median(times["numpy"])) / operations * 1e6,
                "speedup": {name: common.ratio(ours, seconds) for name, seconds in times.items()},
            }
        )  # fmt: skip
    return rows


def main() -> None:
    parser = common.parser(__doc__, threads=1, rounds=15)
    parser.add_argument("--quick", action="store_true", help="three sizes, contiguous operands")
    options = parser.parse_args()
    common.begin(options.threads)
    loaded = {name: common.load(name, options.threads) for name in ("tapegrad", *PEERS)}
    modules = {name: module for name, module in loaded.items() if module is not None}
    layouts = ("contiguous",) if options.quick else ("contiguous", "broadcast", "strided")
    facts = common.about(options.threads)
    rows = []
    for dtype in ("float32", "float64"):
        for layout in layouts:
            rows_of_case = [
                row
                for size in (QUICK if options.quick else SIZES)
                for row in measure(options, modules, size, dtype, layout)
            ]
            rows += rows_of_case
            cells = [
                (f"{r['elements']:,}, {r['length']} op" + (", gradient" if r["gradient"] else ""),
                 f"{r['us']['numpy']:.1f}", f"{r['us']['tapegrad']:.1f}", f"{r['over_us_per_op']:.1f}",
                 *(f"{r['speedup'][name]:.2f}" if name in modules else "not installed" for name in PEERS))
                for r in rows_of_case
            ]  # fmt: skip
            columns = ["elements", "NumPy", "tapegrad", "over", "PyTorch", "JAX"]
            common.show(f"{dtype}, {layout}: microseconds", columns, cells, facts)
    if options.json:
        common.write("sizes", facts, rows, quick=options.quick)


if __name__ == "__main__":
    main()
