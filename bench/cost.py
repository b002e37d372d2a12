"""What does each elementwise function cost on a CPU beside storing its value? (rule 6 of ``tapegrad/engine/region.py``)

    python bench/cost.py

Every differentiable elementwise primitive on one tile of 131,072 elements, single thread: ns an element, and as a
multiple of writing an array of 64 MiB and reading it back (measured by copying one).  A declaration says
``costly=True`` from about ten times on, in both dtypes.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import common

TILE, BIG = 131072, 16 * 2**20


def median_seconds(call: Callable[[], object], rounds: int) -> float:
    call()
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def main() -> None:
    options = common.parser(__doc__, threads=1, rounds=15).parse_args()
    common.begin(options.threads)
    import numpy as np

    common.load("tapegrad", options.threads)
    from tapegrad.core.primitive import REGISTRY, Elementwise

    source = np.ones(BIG, np.float32)
    target = np.empty_like(source)
    copy = (
        median_seconds(lambda: np.copyto(target, source), options.rounds) / BIG * 1e9
    )  # ns for 4 bytes there and back
    rows = []
    for prim in REGISTRY.values():
        if not isinstance(prim, Elementwise) or not prim.vjp or prim.converts or len(prim.operands) > 2:
            continue
        row = {"primitive": prim.name, "costly": prim.costly}
        for dtype in ("float32", "float64"):
            rng = np.random.default_rng(0)
            xs = [rng.uniform(*prim.domain, TILE).astype(dtype) for _ in prim.operands]
            out = np.empty(TILE, dtype)
            try:
                with np.errstate(all="ignore"):
                    ns = median_seconds(lambda p=prim, o=out, a=xs: p.impl(np, o, *a), options.rounds) / TILE * 1e9
            except TypeError:  # not of real floats
                continue
            row[dtype], row[f"{dtype}_over_store"] = ns, ns / (copy * out.itemsize / 4)
        if "float32" in row:
            rows.append(row)
    rows.sort(key=lambda row: -row["float32_over_store"])
    cells = [
        (r["primitive"], f"{r['float32']:.2f}", f"{r['float32_over_store']:.1f}", f"{r['float64']:.2f}",
         f"{r['float64_over_store']:.1f}", "costly" if r["costly"] else "")
        for r in rows[:20]
    ]  # fmt: skip
    facts = common.about(options.threads)
    title = f"the 20 dearest functions; writing and reading 4 bytes takes {copy:.2f} ns"
    common.show(title, ["", "float32, ns", "of a store", "float64, ns", "of a store", ""], cells, facts)
    if options.json:
        common.write("cost", facts, rows, store_ns=copy)


if __name__ == "__main__":
    main()
