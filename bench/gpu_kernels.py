"""Runs every whole kernel and kernels of every generated form once, small: for compute-sanitizer.

    compute-sanitizer --target-processes all --tool memcheck --error-exitcode 1 python bench/gpu_kernels.py [--dry-run]

Widths are such that rows are a warp's, a block's and too long for registers, with and without a tail.  Results are
compared with the CPU engine.  The script fails where a declared kernel has not run.  compute-sanitizer needs
``--target-processes all``, since cases run in a child process.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import common
import gpu_common

WIDTHS = (5, 64, 1023, 5000)
TOLERANCE = {"float32": 1e-4, "float16": 2e-2, "float64": 1e-10}


def computations(tg: Any) -> dict[str, Callable[[Any, Any], Any]]:
    """What is run forward and backward on a matrix and a row of its width."""
    f = tg.nn.functional
    return {
        "softmax": lambda x, w: tg.softmax(x) * w,
        "log_softmax": lambda x, w: tg.log_softmax(x) * w,
        "layer_norm": lambda x, w: tg.layer_norm(x, w, w, eps=1e-3),
        "layer_norm, rows alone": lambda x, w: tg.layer_norm(x, tg.stop_gradient(w), tg.stop_gradient(w)) * w,
        "layer_norm, vectors alone": lambda x, w: tg.layer_norm(tg.stop_gradient(x), w, w) * x,
        "cross_entropy": lambda x, w: tg.cross_entropy(x * w, tg.arange(x.shape[0]) % x.shape[1]),
        "take": lambda x, w: tg.take(x * w, tg.asarray([1, 0, 1]), axis=0),
        "take of columns": lambda x, w: tg.take(x * w, tg.asarray([1, 0, 1]), axis=1),
        "set and add": lambda x, w: x.at[tg.asarray([0, 0])].set(w).at[tg.asarray([1, 1])].add(w),
        "add often": lambda x, w: x.at[tg.zeros(600, dtype="int64")].add(w),
        "elementwise": lambda x, w: tg.tanh(x * w + 0.5) * tg.sigmoid(x),
        "by columns": lambda x, w: tg.exp(x.mT * 0.1) + x.mT,
        "steps": lambda x, w: tg.sqrt(x[::2, ::-1] ** 2 + 1),
        "gelu": lambda x, w: f.gelu(x + w),
        "dropout": lambda x, w: f.dropout(x, 0.3) * w,
        "sums": lambda x, w: tg.sum(x * x) + tg.sum(x * w, axis=0) + tg.max(x + w, axis=0),
        "sum of rows": lambda x, w: tg.sum(x * w, axis=1),
        "product": lambda x, w: tg.matmul(x, tg.reshape(w, (-1, 1))),
        "cumulative": lambda x, w: tg.cumulative_sum(x * w, axis=1),
        "sparse": lambda x, w: tg.sparse.csr(w[:5], [0, 2, 5, 1, 3], [0, 2, 3, 3, 5], (4, 6)) @ x,
    }


def compared(tg: Any, np: Any, name: str, f: Callable, dtype: str, shape: tuple[int, int]) -> float:
    """Value and gradients on the device against those of the CPU; the worst difference."""
    rng = np.random.default_rng(0)
    x, w = (rng.uniform(0.5, 1.5, s).astype(dtype) for s in (shape, shape[1:]))
    found = []
    for device in ("cpu", "cuda"):
        with tg.device(device):
            tg.random.seed(0)
            xs = [tg.asarray(x), tg.asarray(w)]
            with tg.GradientTape() as tape:
                tape.watch(xs)
                y = f(*xs)
            found.append([y.numpy(), *(g.numpy() for g in tape.gradient(y, xs, unconnected_gradients="zero"))])
    return max(common.must_agree(name, f"{dtype} {shape}", g, v, TOLERANCE[dtype], 1.0) for g, v in zip(*found[::-1]))


def optimizers(tg: Any, np: Any) -> None:
    """Every optimizer's kernel, on parameters of several sizes at once, of float32 and of a half dtype."""
    optim = tg.optim
    makers = [
        partial(optim.SGD, 0.1), partial(optim.SGD, 0.1, momentum=0.9), partial(optim.Adam, 0.1),
        partial(optim.AdamW, 0.1), partial(optim.Adagrad, 0.1), partial(optim.Lion, 0.1), partial(optim.LAMB, 0.1),
        *(partial(optim.RMSprop, 0.1, momentum=m, centered=c) for m in (0.0, 0.9) for c in (False, True)),
    ]  # fmt: skip
    found = {}
    for device in ("cpu", "cuda"):
        with tg.device(device):
            for optimizer in (make() for make in makers):
                starts = [tg.linspace(0.0, 1.0, n) for n in (1, 7, 5000)]
                variables = [tg.Variable(tg.astype(x, dtype)) for dtype in ("float32", "bfloat16") for x in starts]
                for _ in range(2):
                    optimizer.apply([tg.sin(tg.asarray(v)) for v in variables], variables)
                found.setdefault(device, []).extend(tg.astype(v, "float32").numpy() for v in variables)
    for i, (got, want) in enumerate(zip(found["cuda"], found["cpu"], strict=True)):
        common.must_agree("optimizers", "a parameter", got, want, 1e-5 if i % 6 < 3 else 1e-2)


def convolutions(tg: Any, np: Any) -> None:
    """Results and gradients: many channels, few in each group, and so large a result that the kernel's is joined."""
    rng = np.random.default_rng(0)
    for shape, weights, groups in (((2, 24, 9, 9), (24, 24, 3, 3), 1), ((2, 6, 40, 40), (6, 1, 3, 3), 6)):
        x, w = (rng.normal(size=s).astype("float32") for s in (shape, weights))
        found = []
        for device in ("cuda", "cpu"):
            with tg.device(device):
                f = lambda x, w, n=groups: tg.sum(tg.nn.functional.conv2d(x, w, padding=1, groups=n) ** 2)
                found.append([g.numpy() for g in tg.grad(f, argnums=(0, 1))(tg.asarray(x), tg.asarray(w))])
        for got, want in zip(*found, strict=True):
            common.must_agree("convolutions", f"a gradient, groups {groups}", got, want, 1e-4)


def finished(device: Any, np: Any) -> None:
    """Bias and relu in place, which follow a convolution by cuDNN."""
    from tapegrad.ops.products import _cuda_conv

    y, b = (np.random.default_rng(0).normal(size=s).astype("float32") for s in ((3, 5, 9, 11), (5,)))
    out = device.array(y)
    device.call(_cuda_conv.finish, device, out, device.array(b), True)
    common.must_agree("bias and relu", "result", device.numpy(out), np.maximum(y + b.reshape(5, 1, 1), 0), 1e-6)


def attention(tg: Any, np: Any) -> None:
    """Results, gradients of all operands and tangents, with numbers added to the scores."""
    rng = np.random.default_rng(0)
    arrays = [rng.normal(size=s).astype("float32") for s in ((2, 4, 70, 24), (2, 2, 90, 24), (2, 2, 90, 16), (70, 90))]
    f = lambda q, k, v, m: tg.nn.functional.scaled_dot_product_attention(q, k, v, m, is_causal=True, enable_gqa=True)
    found = []
    for device in ("cuda", "cpu"):
        with tg.device(device):
            xs = [tg.asarray(x) for x in arrays]
            gradients = tg.grad(lambda *ys: tg.sum(f(*ys) ** 2), argnums=(0, 1, 2, 3))(*xs)
            found.append([x.numpy() for x in (*gradients, tg.jvp(f, xs, xs)[1])])
    for got, want in zip(*found, strict=True):
        common.must_agree("attention", "a derivative", got, want, 1e-4)


def rows_alone(tg: Any, np: Any) -> None:
    """Steps of some rows of a table, by each kind of rule: of a large one by one kernel, of a small one by several."""
    optim = tg.optim
    makers = (
        partial(optim.SGD, 0.1), partial(optim.LazySGD, 0.1, momentum=0.9), partial(optim.LazyAdam, 0.1),
        partial(optim.Adagrad, 0.1),
    )  # fmt: skip
    found: dict[str, list[Any]] = {"cuda": [], "cpu": []}
    for device, results in found.items():
        with tg.device(device):
            for make, n in itertools.product(makers, (60, 6)):
                optimizer = make()
                table = tg.Variable(np.linspace(0, 1, 5 * n, dtype="float32").reshape(n, 5))
                for _ in range(2):
                    with tg.GradientTape() as tape:
                        loss = tg.sum(tg.sin(tg.take(table, tg.asarray([3, n - 1, 3]), axis=0, sparse_grad=True)))
                    optimizer.apply(tape.gradient(loss, [table]), [table])
                results.append(table.numpy())
    for got, want in zip(found["cuda"], found["cpu"], strict=True):
        common.must_agree("rows alone", "a table", got, want, 1e-5)


def work(run: gpu_common.Run, report: gpu_common.Report) -> None:
    import numpy as np

    from tapegrad.device import asdevice, cudnn
    from tapegrad.device.kernel import DECLARED

    tg, resumed = run.tg, bool(report.rows)

    def without_cudnn() -> None:
        with cudnn.without(asdevice("cuda")):
            convolutions(tg, np)

    def check(name: str, f: Callable[[], object]) -> None:
        report.case(name, lambda: {"result": f()})

    check("convolutions", without_cudnn)
    check("bias and relu", lambda: finished(asdevice("cuda"), np))
    check("attention", lambda: attention(tg, np))
    check("optimizers", lambda: optimizers(tg, np))
    check("rows alone", lambda: rows_alone(tg, np))
    widths = WIDTHS[:2] if run.dry else WIDTHS
    dtypes = ("float32",) if run.dry else tuple(TOLERANCE)
    for dtype, width in itertools.product(dtypes, widths):  # the first round runs every kernel already
        for name, f in computations(tg).items():
            check(f"{name}, {dtype}, width {width}", lambda a=(name, f, dtype, (6, width)): compared(tg, np, *a))

    def all_launched() -> None:
        if unused := [kernel for kernel in DECLARED if not kernel._functions]:
            raise SystemExit(f"never launched: {unused}")

    if not resumed:  # else an earlier process has launched some
        check("all declared kernels have run", all_launched)


def main() -> None:
    options = gpu_common.parser(__doc__, seconds=120, rounds=1).parse_args()
    options.peers = ""  # nothing but our own kernels is to be checked
    gpu_common.conduct(options, "gpu-kernels", work)


if __name__ == "__main__":
    main()
