"""How fast and how close are erf and erfc, against SciPy and PyTorch, on one thread?

    python bench/erf.py [--size 1048576] [--rounds 25] [--json results.json]

Each makes an array for its result.  The functions take turns within a round, so that a busy machine slows all of them.
SciPy and PyTorch may be missing.  Ratios above 1 mean that ours is slower. The error column
compares with ``math.erf`` and ``math.erfc``.
"""

import argparse
import json
import math
import os
import platform
import statistics
import time

import numpy as np

import tapegrad as tg

try:
    import scipy
    import scipy.special
except ImportError:
    scipy = None
try:
    import torch
except ImportError:
    torch = None


def contenders(name, x):
    """Name -> call that computes ``name`` of x, and returns an array."""
    operand, ours = tg.asarray(x), getattr(tg, name)
    calls = {"tapegrad": lambda: ours(operand).numpy()}
    if scipy:
        calls["scipy"] = lambda: getattr(scipy.special, name)(x)
    if torch:
        operand_t = torch.from_numpy(x)
        calls["torch"] = lambda: getattr(torch, name)(operand_t).numpy()
    return calls


def median_times(calls, rounds):
    """Name -> median seconds of one call, after warm-up rounds that are not counted."""
    times = {who: [] for who in calls}
    for i in range(rounds + 3):
        for who, call in calls.items():
            start = time.perf_counter()
            call()
            if i >= 3:
                times[who].append(time.perf_counter() - start)
    return {who: statistics.median(t) for who, t in times.items()}


def worst_ulp(name, x, got, n=50_000):
    """Largest distance of ``got[:n]`` from libm's value, in units of the last place there."""
    want = np.array([getattr(math, name)(v) for v in x[:n].tolist()])
    finfo = np.finfo(x.dtype)
    unit = np.ldexp(1.0, np.maximum(np.frexp(want)[1] - 1, finfo.minexp) - finfo.nmant)
    return float((np.abs(got[:n].astype(np.float64) - want) / unit).max())


def measure(size, rounds):
    rng = np.random.default_rng(0)
    for name in ("erf", "erfc"):
        for dtype in (np.float32, np.float64):
            x = rng.normal(0.0, 1.5, size).astype(dtype)
            calls = contenders(name, x)
            seconds = median_times(calls, rounds)
            for who, call in calls.items():
                yield {
                    "function": name,
                    "dtype": np.dtype(dtype).name,
                    "library": who,
                    "ns_per_element": seconds[who] / size * 1e9,
                    "ours_over_theirs": seconds["tapegrad"] / seconds[who],
                    "worst_ulp": worst_ulp(name, x, call()),
                }


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, default=1 << 20)
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--json", help="also write the rows to this file")
    options = parser.parse_args()
    tg.set_num_threads(1)
    if torch:
        torch.set_num_threads(1)
    about = {
        "machine": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "load": os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
        "python": platform.python_version(),
        "numpy": np.__version__,
        "scipy": scipy and scipy.__version__,
        "torch": torch and torch.__version__,
    }
    print("  ".join(f"{key} {value}" for key, value in about.items()))
    print(f"{'':6}{'':9}{'':10}{'ns/element':>11}{'ours/theirs':>13}{'worst ulp':>11}")
    rows = []
    for row in measure(options.size, options.rounds):
        rows.append(row)
        print(
            f"{row['function']:6}{row['dtype']:9}{row['library']:10}{row['ns_per_element']:11.2f}"
            f"{row['ours_over_theirs']:13.2f}{row['worst_ulp']:11.2f}",
            flush=True,
        )
    if options.json:
        with open(options.json, "w") as file:
            json.dump({"about": about, "rows": rows}, file, indent=1)


if __name__ == "__main__":
    main()
