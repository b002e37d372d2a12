"""What does the gradient of a loop over the rows of an array cost?

    python bench/slices.py [--rows 32,128,512] [--threads 1] [--rounds 9] [--json]

``h = h * 0.5 + x[t] * w`` for each ``t``, with ``x`` of rows x 32 x 256 numbers (float32), and the gradient in ``x``,
eagerly; PyTorch the same.  Gradients are compared within 1e-5.  Ratios above 1 mean that tapegrad is faster.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import common


def loops(tg: Any, torch: Any, np: Any, rows: int) -> dict[str, Callable[[], Any]]:
    """By name a function that runs the loop and returns the gradient."""
    draw = np.random.default_rng(0)
    x, w = (draw.normal(size=shape).astype("float32") for shape in ((rows, 32, 256), (256,)))

    def end(lib: Any, x: Any, w: Any) -> Any:
        h = lib.zeros((32, 256))
        for t in range(rows):
            h = h * 0.5 + x[t] * w
        return h.sum()

    def ours() -> Any:
        tensor = tg.asarray(x)
        with tg.GradientTape() as tape:
            tape.watch(tensor)
            total = end(tg, tensor, w)
        return tape.gradient(total, tensor).numpy()

    def theirs() -> Any:
        tensor = torch.tensor(x, requires_grad=True)
        end(torch, tensor, torch.tensor(w)).backward()
        return tensor.grad.numpy()

    return {"tapegrad": ours} if torch is None else {"tapegrad": ours, "PyTorch": theirs}


def main() -> None:
    parser = common.parser(__doc__, threads=1, rounds=9)
    parser.add_argument("--rows", default="32,128,512", help="of the array (default: %(default)s)")
    options = parser.parse_args()
    common.begin(options.threads)
    import numpy as np

    tg, torch = (common.load(name, options.threads) for name in ("tapegrad", "torch"))
    rows = []
    for n in map(int, options.rows.split(",")):
        calls = loops(tg, torch, np, n)
        results = {name: call() for name, call in calls.items()}
        if torch is not None:
            common.must_agree("PyTorch", f"{n} rows", results["PyTorch"], results["tapegrad"], 1e-5)
        times = common.by_turns(calls, options.rounds)
        with tg.measure() as measured:
            calls["tapegrad"]()
        rows.append({
            "rows": n, "peak_bytes": measured.peak_bytes,
            **{f"{name}_seconds": common.median(t) for name, t in times.items()},
            **({} if torch is None else {"against_PyTorch": common.ratio(times["tapegrad"], times["PyTorch"])}),
        })  # fmt: skip
    facts = common.about(options.threads)
    time_of = lambda r, name: f"{r[f'{name}_seconds'] * 1e3:.1f}" if f"{name}_seconds" in r else "-"
    cells = [
        (r["rows"], time_of(r, "tapegrad"), time_of(r, "PyTorch"),
         f"{r['against_PyTorch']:.2f}" if "against_PyTorch" in r else "-", f"{r['peak_bytes'] / 2**20:.1f}")
        for r in rows
    ]  # fmt: skip
    columns = ["rows", "tapegrad, ms", "PyTorch, ms", "tapegrad is x faster", "tapegrad's peak, MiB"]
    common.show("a loop over rows, and its gradient", columns, cells, facts)
    if options.json:
        common.write("slices", facts, rows)


if __name__ == "__main__":
    main()
