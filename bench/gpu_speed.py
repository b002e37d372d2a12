"""How near do fused kernels come to the speed at which the device copies memory?

    python bench/gpu_speed.py [--log2-size 26] [--rounds 11] [--dry-run]

First the device's copy bandwidth is measured (``cudaMemcpyAsync`` within the device, bytes read plus written).  Then
for every case the same computation by tapegrad, CuPy, PyTorch eager, torch.compile and JAX jit, where they are
installed with CUDA: results must agree, libraries take turns, figures are medians over rounds.  ``share`` is the least
traffic the case needs (each input read once, each output written once) over the time, relative to the copy.
"""

from __future__ import annotations

from typing import Any

import common
import gpu_cases
import gpu_common


def copy_bandwidth(run: gpu_common.Run, elements: int) -> float:
    """Bytes per second, the best of some rounds: nothing but the device's own limit should slow it."""
    a = run.cupy.ones((elements,), "float32")
    b = run.cupy.empty((elements,), "float32")
    stream = run.cupy.cuda.get_current_stream()
    copy = lambda: b.data.copy_from_device_async(a.data, a.nbytes, stream)
    times = gpu_common.timed(run, {"copy": copy})["copy"]
    return 2 * a.nbytes / min(times)


def thinned(x: Any) -> tuple[tuple[int, ...], Any]:
    """The shape, and about a million elements from everywhere: comparing all takes longer than everything else."""
    found = gpu_common.host(x)
    return found.shape, found.reshape(-1)[:: found.size >> 20 | 1]


def compare(run: gpu_common.Run, case: gpu_cases.Case) -> dict[str, Any]:
    """Check that all agree, then time them."""
    worst, calls, failed = {}, {}, {}
    want = None
    for who, make in case.makers(run).items():
        try:
            call = make()
            got = [thinned(x) for x in call()]
        except Exception as e:  # of a peer: a missing compiler, too little memory, an operation it does not have
            if who == "tapegrad":  # the row of the case says so
                raise
            failed[who] = f"{type(e).__name__}: {e}"[:200]
            continue
        want = got if want is None else want
        if [shape for shape, _ in got] != [shape for shape, _ in want]:
            raise SystemExit(f"{case.name}: {who}'s results have other shapes")
        if case.compared:
            floor = case.floor and case.floor * max(float(abs(w).max()) for _, w in want)
            worst[who] = max(
                common.must_agree(who, f"{case.name}, result {i}", g, w, case.tolerance, floor)
                for i, ((_, g), (_, w)) in enumerate(zip(got, want, strict=True))
            )
        calls[who] = call
    times = gpu_common.timed(run, calls)
    return {
        "case": case.name,
        "bytes": case.nbytes,
        "seconds": {who: common.median(t) for who, t in times.items()},
        "times_faster": {who: common.ratio(times["tapegrad"], t) for who, t in times.items() if who != "tapegrad"},
        "worst_difference": worst,
        "failed": failed,
    }


def main() -> None:
    parser = gpu_common.parser(__doc__, seconds=150, rounds=11)
    parser.add_argument("--log2-size", type=int, default=26, help="elements: 2 to this power (default: %(default)s)")
    parser.add_argument("--only", default="", help="cases whose name has this in it")
    options = parser.parse_args()
    run = gpu_common.begin(options)
    elements = 1 << (12 if options.dry_run else options.log2_size)
    bandwidth = copy_bandwidth(run, elements)
    print(f"copy: {bandwidth / 1e9:.0f} GB/s" + (" (of the stand-in)" if run.dry else ""), flush=True)

    def measure(case: gpu_cases.Case) -> dict[str, Any]:
        row = compare(run, case)
        row["share_of_copy"] = {who: case.nbytes / s / bandwidth for who, s in row["seconds"].items()}
        return row

    chosen = (case for case in gpu_cases.cases(elements) if options.only in case.name)
    rows = gpu_common.each(run, "gpu-speed", chosen, measure)
    cells = [
        gpu_common.cells_of_others(r) or
        (r["case"], f"{r['seconds']['tapegrad'] * 1e6:.0f}", f"{r['share_of_copy']['tapegrad']:.0%}",
         *(f"{r['times_faster'][who]:.2f}" if who in r["times_faster"] else "-"
           for who in ("cupy", "torch", "compile", "jax")))
        for r in rows
    ]  # fmt: skip
    columns = ["", "us", "of copy", "x CuPy", "x PyTorch", "x torch.compile", "x JAX"]
    title = f"{elements:,d} float32, copy at {bandwidth / 1e9:.0f} GB/s; tapegrad is x faster than"
    gpu_common.deliver(run, "gpu-speed", title, columns, cells, rows, copy_bandwidth=bandwidth, elements=elements)
    gpu_common.end(rows)


if __name__ == "__main__":
    main()
