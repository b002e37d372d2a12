"""Linear algebra with the default threads and with one: wall and processor time, medians of interleaved processes.

    python bench/linalg_threads.py [--rounds 5] [--sizes 100,300,1000]

A Gaussian process (value and gradient of its likelihood, by Cholesky and by solve and slogdet), and single operations.
The default must not be slower than one thread; on cores that others use the medians of processor time tell most.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from statistics import median
from typing import Any

WAYS = {"default": {}, "one thread": {"OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "TAPEGRAD_NUM_THREADS": "1"}}


def cases(n: int) -> dict[str, Callable[[], Any]]:
    """What is timed, on matrices of ``n`` rows."""
    import numpy as np

    import tapegrad as tg

    draw = np.random.default_rng(0)
    points, seen = draw.uniform(0, 10, (n, 1)), draw.normal(size=n)
    squares, a = (points - points.T) ** 2, draw.normal(size=(n, n))
    spd, right, eye = tg.asarray(a @ a.T + n * np.eye(n)), tg.asarray(seen[:, None]), tg.eye(n, dtype="float64")
    theta = tg.asarray([0.0, 0.0, -2.0], dtype="float64")

    def kernel(t: Any) -> Any:
        length, scale, noise = tg.exp(t[0]), tg.exp(t[1]), tg.exp(t[2])
        return scale * tg.exp(-0.5 * squares / (length * length)) + noise * eye

    def by_cholesky(t: Any) -> Any:
        factor = tg.linalg.cholesky(kernel(t))
        z = tg.linalg.solve_triangular(factor, right, lower=True)
        return 0.5 * tg.sum(z * z) + tg.sum(tg.log(tg.linalg.diagonal(factor)))

    def by_solve(t: Any) -> Any:
        k = kernel(t)
        return 0.5 * tg.sum(right * tg.linalg.solve(k, right)) + 0.5 * tg.linalg.slogdet(k)[1]

    return {
        "gp by cholesky": lambda: tg.value_and_grad(by_cholesky)(theta)[1].numpy(),
        "gp by solve": lambda: tg.value_and_grad(by_solve)(theta)[1].numpy(),
        "cholesky": lambda: tg.linalg.cholesky(spd).numpy(),
        "solve": lambda: tg.linalg.solve(spd, right).numpy(),
        "slogdet": lambda: tg.linalg.slogdet(spd)[1].numpy(),
        "eigh": lambda: tg.linalg.eigh(spd)[0].numpy(),
        "matmul": lambda: (spd @ spd).numpy(),
    }


def timed(f: Callable[[], Any], seconds: float = 0.3) -> tuple[float, float]:
    """Medians of wall and processor time, in ms."""
    f()
    walls, processor, end = [], [], time.perf_counter() + seconds
    while len(walls) < 3 or (time.perf_counter() < end and len(walls) < 50):
        begin, used = time.perf_counter(), time.process_time()
        f()
        walls.append(1e3 * (time.perf_counter() - begin))
        processor.append(1e3 * (time.process_time() - used))
    return median(walls), median(processor)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--sizes", default="100,300,1000")
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one is not None:
        print(json.dumps({name: timed(f) for name, f in cases(options.one).items()}))
        return
    for n in map(int, options.sizes.split(",")):
        found: dict[str, list[dict[str, Any]]] = {way: [] for way in WAYS}
        for _ in range(options.rounds):
            for way, variables in WAYS.items():
                command = [sys.executable, __file__, "--one", str(n)]
                done = subprocess.run(command, env=os.environ | variables, capture_output=True, text=True, check=True)
                found[way].append(json.loads(done.stdout))
        for name in found["default"][0]:
            wall, used = ({w: median(r[name][i] for r in found[w]) for w in WAYS} for i in (0, 1))
            print(
                f"{n:5} {name:15} default {wall['default']:8.2f} ms (processor {used['default']:8.2f})   "
                f"one thread {wall['one thread']:8.2f} ms ({used['one thread']:8.2f})   "
                f"ratio {wall['default'] / wall['one thread']:.2f} ({used['default'] / used['one thread']:.2f})"
            )


if __name__ == "__main__":
    main()
