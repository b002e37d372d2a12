"""Does tapegrad work on this device?  A few small computations, each in a process of its own, in about a minute.

    python bench/gpu_smoke.py [--dry-run]

Results are compared with the CPU engine's, and those of a captured step with eager ones, to the bit.  The last cases
are the rates at which the device copies and multiplies.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import common
import gpu_common
import gpu_kernels
import gpu_rates
import gpu_speed

FORMS = ("softmax", "layer_norm", "cross_entropy", "take", "set and add", "dropout", "cumulative", "sparse")
"""Those of ``gpu_kernels.computations`` that are one case here."""
TOLERANCE = {"bfloat16": 5e-2, "float16": 5e-3, "float32": 1e-5, "float64": 1e-13}


def on_both(tg: Any, f: Callable[[], list[Any]]) -> None:
    """Compare the results of ``f`` on the device and on the CPU, within the tolerance of their dtype."""
    results = []
    for device in ("cpu", "cuda"):
        with tg.device(device):
            tg.random.seed(0)
            results.append([(str(x.dtype), tg.astype(x, "float64").numpy()) for x in f()])
    for i, ((dtype, want), (_, got)) in enumerate(zip(*results, strict=True)):
        common.must_agree("tapegrad", f"result {i}, {dtype}", got, want, TOLERANCE[dtype.rpartition(".")[2]], 1.0)


def regions(tg: Any) -> list[Any]:
    """Return results of a flat and of a reducing region in each dtype."""
    results = []
    for dtype in TOLERANCE:
        x = tg.reshape(tg.linspace(-1.0, 1.0, 60_000, dtype="float32"), (60, 1000))
        x = tg.astype(x, dtype)
        results += [tg.tanh(x * 1.5 + 0.5) * tg.sigmoid(x), tg.mean(x * x, axis=1), tg.mean(tg.exp(x))]
    return results


def products(tg: Any) -> list[Any]:
    """Return a matrix product in each dtype, one operand transposed."""
    a = tg.reshape(tg.linspace(-1.0, 1.0, 64 * 48, dtype="float64"), (64, 48))
    return [tg.matmul(tg.astype(a, dtype).mT, tg.astype(a, dtype)) for dtype in TOLERANCE]


def captured(tg: Any, np: Any) -> None:
    """Require a step to be replayed by ``tg.function``, with the losses of eager steps to the bit."""

    def losses(wrap: Callable[[Any], Any]) -> tuple[list[float], Any]:
        tg.random.seed(0)
        model = tg.nn.Sequential([tg.nn.Dense(32, activation="gelu"), tg.nn.LayerNormalization(), tg.nn.Dense(8)])
        x, labels = tg.random.normal((16, 24)), tg.asarray(np.arange(16) % 8)
        model(x)
        optimizer = tg.optim.Adam(1e-2)

        def step(x: Any, labels: Any) -> Any:
            with tg.GradientTape() as tape:
                loss = tg.mean(tg.cross_entropy(model(x), labels))
            variables = model.trainable_variables
            optimizer.apply(tape.gradient(loss, variables), variables)
            return loss

        f = wrap(step)
        return [float(f(x, labels)) for _ in range(8)], f

    eager, (replayed, f) = losses(lambda f: f)[0], losses(tg.function)
    if eager != replayed:
        raise common.Disagreement(f"losses {replayed}; eager {eager}")
    if not f.stats.replays:
        raise SystemExit(f"the step is not replayed: {f.stats}")


def streams(run: gpu_common.Run, np: Any) -> None:
    """Use tensors made on one stream on another."""
    tg, cupy = run.tg, run.cupy
    first, second = (cupy.cuda.Stream(non_blocking=True) for _ in range(2))
    want = np.full(1 << 16, 1.0, np.float32)
    x = tg.asarray(want)
    for i in range(40):
        with first if i % 2 else second:
            x, want = x * 1.0001 + 0.5, want * np.float32(1.0001) + np.float32(0.5)
    common.must_agree("tapegrad", "a chain over two streams", x.numpy(), want, 1e-5)


def wrong_index(tg: Any) -> None:
    """Require the IndexError of an index that a kernel has noted in pinned memory, when a value is read."""
    try:
        tg.take(tg.ones((4, 3)), tg.asarray([0, 9]), axis=0).numpy()
    except IndexError:
        return
    raise SystemExit("an index out of range raises nothing")


def work(run: gpu_common.Run, report: gpu_common.Report) -> None:
    import numpy as np

    tg = run.tg
    forms = gpu_kernels.computations(tg)

    def forms_agree() -> None:
        for name in FORMS:
            gpu_kernels.compared(tg, np, name, forms[name], "float32", (6, 64))

    n = 32 if run.dry else 8192
    checks: dict[str, Callable[[], Any]] = {
        "regions": lambda: on_both(tg, lambda: regions(tg)),
        "products": lambda: on_both(tg, lambda: products(tg)),
        "captured step": lambda: captured(tg, np),
        "rows, selection, scans": forms_agree,
        "optimizers": lambda: gpu_kernels.optimizers(tg, np),
        "attention": lambda: gpu_kernels.attention(tg, np),
        "convolutions": lambda: gpu_kernels.convolutions(tg, np),
        "two streams": lambda: streams(run, np),
        "deferred check": lambda: wrong_index(tg),
    }
    for name, check in checks.items():
        report.case(name, lambda check=check: check() or {})
    report.case("copy", lambda: {"rate": gpu_speed.copy_bandwidth(run, 1 << (12 if run.dry else 26))})
    for dtype in gpu_rates.DTYPES:
        report.case(f"product, {dtype}", lambda dtype=dtype: {"rate": gpu_rates.product_rate(run, dtype, n)})


def main() -> None:
    options = gpu_common.parser(__doc__, seconds=60, rounds=3).parse_args()
    options.peers = ""
    gpu_common.conduct(options, "gpu-smoke", work, isolated=True)


if __name__ == "__main__":
    main()
