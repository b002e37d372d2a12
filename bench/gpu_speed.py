"""How near do fused kernels come to the speed at which the device copies memory?

    python bench/gpu_speed.py [--log2-size 26] [--rounds 11] [--dry-run]

First the device's copy bandwidth is measured (``cudaMemcpyAsync`` within the device, bytes read plus written).  Then
for every case the same computation by tapegrad, CuPy, PyTorch eager, torch.compile and JAX jit, where they are
installed with CUDA: results must agree, libraries take turns, figures are medians over rounds.  ``of copy`` is the
least traffic the case needs (each input read once, each output written once) over the time, relative to the copy.
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
    """Time the libraries whose results agree with the first one's."""
    worst: dict[str, float] = {}
    first: list[list[Any]] = []

    def checked(who: str, make: Any) -> Any:
        call = make()
        got = [thinned(x) for x in call()]
        want = first[0] if first else got
        if [shape for shape, _ in got] != [shape for shape, _ in want]:
            raise common.Disagreement(f"{who}: results have other shapes")
        if case.compared:
            floor = case.floor and case.floor * max(float(abs(w).max()) for _, w in want)
            worst[who] = max(
                common.must_agree(who, f"result {i}", g, w, case.tolerance, floor)
                for i, ((_, g), (_, w)) in enumerate(zip(got, want, strict=True))
            )
        first.append(got)
        return call

    makers = {who: lambda who=who, make=make: checked(who, make) for who, make in case.makers(run).items()}
    return {"bytes": case.nbytes, **gpu_common.measured(run, makers), "worst_difference": worst}


def of_copy(report: gpu_common.Report, case: gpu_cases.Case, row: dict[str, Any]) -> dict[str, Any]:
    """Return the row with shares of the copy's rate, if that was measured."""
    rate = report.rows["copy"].get("rate")
    return {**row, "of_copy": {who: case.nbytes / s / rate for who, s in row["seconds"].items()} if rate else {}}


def main() -> None:
    parser = gpu_common.parser(__doc__, seconds=150, rounds=11)
    parser.add_argument("--log2-size", type=int, default=26, help="elements: 2 to this power (default: %(default)s)")
    parser.add_argument("--dtypes", default="bfloat16,float32", help="in this order (default: %(default)s)")
    parser.add_argument("--only", default="", help="cases whose name has this in it")
    options = parser.parse_args()

    def work(run: gpu_common.Run, report: gpu_common.Report) -> None:
        elements = 1 << (12 if options.dry_run else options.log2_size)
        report.case("copy", lambda: {"rate": copy_bandwidth(run, elements), "elements": elements})
        cases = [case for dtype in options.dtypes.split(",") for case in gpu_cases.cases(elements, dtype)]
        for case in cases:
            if options.only in case.name:
                report.case(case.name, lambda case=case: of_copy(report, case, compare(run, case)))

    gpu_common.conduct(options, "gpu-speed", work)


if __name__ == "__main__":
    main()
