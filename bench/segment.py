"""What does recompute_grad cost where a segment is elementwise?

    python bench/segment.py [--log2-size 22] [--threads 2] [--rounds 15] [--json]

Segments of elementwise operations on a float32 array, each under a tape once plainly and once under
``tg.recompute_grad``.  Plainly, too, the backward kernel computes a segment's interior again; the checkpoint's rerun
records the same operations, which run inside the same kernel.  So what is left is bookkeeping.  The gradients must be
equal to the bit.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import common


def segments(tg: Any) -> dict[str, tuple[Callable[..., Any], int]]:
    """By name a function, and how many arrays of full size it takes."""

    def gate(x: Any, w: Any, b: Any) -> Any:
        return tg.tanh(x * w + b) * tg.sigmoid(x)

    def chain(x: Any) -> Any:
        for _ in range(8):
            x = tg.sin(x) * tg.exp(-x * x)
        return x

    def gelu(x: Any, b: Any) -> Any:
        return tg.gelu(x + b) * 0.5 + x

    return {"tanh(x*w+b)*sigmoid(x)": (gate, 3), "8 times sin(x)*exp(-x*x)": (chain, 1), "gelu(x+b)/2 + x": (gelu, 2)}


def gradient(tg: Any, f: Callable[..., Any], xs: list[Any]) -> Callable[[], list[Any]]:
    def call() -> list[Any]:
        with tg.GradientTape() as tape:
            tape.watch(xs)
            total = tg.sum(f(*xs))
        return tape.gradient(total, xs)

    return call


def main() -> None:
    parser = common.parser(__doc__, threads=2, rounds=15)
    parser.add_argument("--log2-size", type=int, default=22, help="elements: 2 to this power (default: %(default)s)")
    options = parser.parse_args()
    common.begin(options.threads)
    import numpy as np

    tg = common.load("tapegrad", options.threads)
    rng = np.random.default_rng(0)
    rows = []
    for name, (f, count) in segments(tg).items():
        shape = (1 << options.log2_size - 10, 1 << 10)
        xs = [tg.asarray(rng.standard_normal(shape, np.float32)) for _ in range(count)]
        calls = {"plain": gradient(tg, f, xs), "recompute": gradient(tg, tg.recompute_grad(f), xs)}
        for a, b in zip(calls["plain"](), calls["recompute"](), strict=True):
            if not np.array_equal(a, b):
                raise SystemExit(f"{name}: recompute_grad gives another gradient")
        times = common.by_turns(calls, options.rounds, pause=0.01)
        rows.append({
            "segment": name,
            "plain_seconds": common.median(times["plain"]),
            "recompute_over_plain": common.ratio(times["plain"], times["recompute"]),
            "by_best_rounds": common.best_ratio(times["plain"], times["recompute"]),
            "middle_half": common.quartiles(times["plain"], times["recompute"]),
        })  # fmt: skip
    facts = common.about(options.threads)
    cells = [
        (r["segment"], f"{r['plain_seconds'] * 1e3:.0f}", f"{r['recompute_over_plain']:.3f}",
         "{:.3f}-{:.3f}".format(*r["middle_half"]), f"{r['by_best_rounds']:.3f}")
        for r in rows
    ]  # fmt: skip
    title = f"forward and gradients under recompute_grad over plain, 2**{options.log2_size} float32"
    common.show(title, ["segment", "plain, ms", "ratio", "middle half", "by best rounds"], cells, facts)
    if options.json:
        common.write("segment", facts, rows, log2_size=options.log2_size)


if __name__ == "__main__":
    main()
