"""What does the host pay for a kernel, and what does recomputing cost on the device?

    python bench/gpu_host.py [--rounds 11] [--dry-run]

*Overhead*: microseconds of host time per operation on 1,024 float32, which the device finishes faster than they are
asked for: rounds of 500 calls, without a wait in between.  ``launch`` is ``cupy.RawKernel`` alone, with its arguments
at hand: the least that a library on CuPy can do.  The recorded chain is forward and gradient of 50 operations, cut into
kernels as ever, per kernel run.

*recompute_grad*: forward and gradient of four elementwise segments with matrix products between them, once plain and
once with each segment under ``recompute_grad``; gradients must be equal to the bit, and times take turns.  At most 1.0
times the plain time is the goal, because the plain tape recomputes inside its kernels, too.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import common
import gpu_common

SMALL = 1024
_ADD = """extern "C" __global__ void add_one(const float* x, float* y, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) y[i] = x[i] + 1.0f;
}"""


def per_call(run: gpu_common.Run, calls: dict[str, Callable[[], Any]], number: int) -> dict[str, list[float]]:
    """Host seconds of one call, by round; the device is waited for between turns and not within."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(run.options.rounds + 2):
        for name, call in calls.items():
            run.wait()
            start = time.perf_counter()
            for _ in range(number):
                call()
            seconds = (time.perf_counter() - start) / number
            run.wait()
            if turn >= 2:
                times[name].append(seconds)
    return times


def overheads(run: gpu_common.Run) -> dict[str, Any]:
    """Host seconds of one kernel, by what asks for it."""
    import numpy as np

    from tapegrad.tensor import materialize

    tg, cupy = run.tg, run.cupy
    kernel = cupy.RawModule(code=_ADD).get_function("add_one")
    x, y, n = cupy.ones((SMALL,), "float32"), cupy.empty((SMALL,), "float32"), np.int32(SMALL)
    t = tg.asarray(np.ones(SMALL, "float32"))

    def chain() -> None:
        with tg.GradientTape() as tape:
            tape.watch(t)
            z = t
            for _ in range(25):
                z = tg.sin(z) + 0.5
        materialize(tape.gradient(z, t))

    calls = {
        "launch": lambda: kernel((4,), (256,), (x, y, n)),
        "tapegrad, x + 1": lambda: materialize(t + 1),
        "cupy, x + 1": lambda: x + 1,
    }
    if run.torch is not None:
        leaf = run.torch.ones(SMALL, device=run.where)
        calls["torch, x + 1"] = lambda: leaf + 1
    calls["tapegrad, 50 operations and gradient"] = chain
    with tg.measure() as measured:
        chain()
    kernels = {"tapegrad, 50 operations and gradient": measured.kernel_runs}
    times = per_call(run, calls, 3 if run.dry else 500)
    seconds = {who: common.median(t) / kernels.get(who, 1) for who, t in times.items()}
    return {"seconds": seconds, "kernels": kernels}


def recomputing(run: gpu_common.Run) -> dict[str, Any]:
    """Seconds of forward and gradient, plain and under ``recompute_grad``, and what was alive at most."""
    import numpy as np

    from tapegrad.tensor import materialize

    tg = run.tg
    rows, width = (64, 32) if run.dry else (16384, 2048)
    rng = np.random.default_rng(0)
    x = tg.asarray(rng.standard_normal((rows, width), dtype=np.float32))
    ws = [tg.asarray(rng.standard_normal((width, width), dtype=np.float32) / width**0.5) for _ in range(4)]

    def segment(h: Any) -> Any:
        for _ in range(4):
            h = tg.sin(h) * tg.exp(-0.1 * h * h) + h
        return h

    def step(f: Callable) -> list[Any]:
        with tg.GradientTape() as tape:
            tape.watch([x, *ws])
            h = x
            for w in ws:
                h = f(tg.matmul(h, w))
        found = tape.gradient(h, [x, *ws])
        for g in found:
            materialize(g)
        return found

    again = tg.recompute_grad(segment)
    calls = {"plain": lambda: step(segment), "recompute_grad": lambda: step(again)}
    results, peaks = [], {}
    for who, call in calls.items():
        with tg.measure() as measured:
            results.append([g.numpy() for g in call()])
        peaks[who] = measured.peak_bytes
    if not all(np.array_equal(a, b) for a, b in zip(*results)):
        raise SystemExit("recompute_grad: gradients differ from the plain ones")
    del results
    times = gpu_common.timed(run, calls)
    return {
        "what": f"four elementwise segments on {rows} x {width}",
        "seconds": {who: common.median(t) for who, t in times.items()},
        "times_faster": {"recompute_grad": 1 / common.ratio(times["recompute_grad"], times["plain"])},
        "peak_bytes": peaks,
    }


def main() -> None:
    options = gpu_common.parser(__doc__, seconds=60, rounds=11).parse_args()

    def work(run: gpu_common.Run, report: gpu_common.Report) -> None:
        report.case("host time of one kernel on 1,024 float32", lambda: overheads(run))
        report.case("recompute_grad", lambda: recomputing(run))

    gpu_common.conduct(options, "gpu-host", work)


if __name__ == "__main__":
    main()
