"""How near do attention, convolutions and a transformer block come to the rate at which the device multiplies?

    python bench/gpu_rates.py [--rounds 5] [--only attention] [--dry-run]

First the device's copy bandwidth is measured (as by ``gpu_speed.py``), and for each dtype its product rate: of a large
matrix product by cuBLAS, two operations for each product and sum.  Then every case by tapegrad, PyTorch (attention by
``scaled_dot_product_attention``, convolutions by cuDNN) and JAX jit, where they are installed with CUDA; the block also
by torch.compile and by ``tg.function``.  Where tapegrad's convolutions go by cuDNN, they are also timed by its own
kernels (``x own kernels``).  All compute in the same dtype: float32 without TF32.  Results must agree.

``of copy`` and ``of products``: the least bytes (inputs and outputs once) and the operations that the case needs over
its time, relative to those rates.  Causal attention needs half of the products; backward two and a half times those of
forward, with the scores recomputed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import fusion_block
import fusion_peers
import gpu_cases
import gpu_common
import gpu_speed

DTYPES = ("bfloat16", "float16", "float32")
"""In the order in which they are measured: what most programs use first."""
TOLERANCE = {"float32": 1e-4, "float16": 2e-2, "bfloat16": 1e-1}
"""Of the largest value: halves are rounded at other places by every library."""


@dataclass
class Rated(gpu_cases.Case):
    """A case in one dtype that needs so many operations."""

    operations: float = 0.0
    compiled: bool = False


class Convolved(Rated):
    """A convolution, or its gradient: also without cuDNN, where there is cuDNN."""

    def makers(self, run: gpu_common.Run) -> dict[str, Callable[[], Callable[[], list[Any]]]]:
        from tapegrad.device import asdevice, cudnn

        found, device = super().makers(run), asdevice("cuda")
        if device.cudnn is not None:
            with_cudnn = found["tapegrad"]

            def make() -> Callable[[], list[Any]]:
                call = with_cudnn()

                def own() -> list[Any]:
                    with cudnn.without(device):
                        return call()

                return own

            found["own kernels"] = make
        return found


def product_rate(run: gpu_common.Run, dtype: str, n: int) -> float:
    """Operations per second, the best of some rounds."""
    from tapegrad.tensor import materialize

    tg = run.tg
    # Not constants, which take less power, so that the clock is higher than with real numbers.
    a, b = (tg.random.normal((n, n), dtype=dtype) for _ in range(2))
    call = lambda: materialize(tg.matmul(a, b))
    return 2 * n**3 / min(gpu_common.timed(run, {"product": call})["product"])


def drawn(*shapes: tuple[int, ...]) -> Callable[[], list[Any]]:
    """Makes arrays of these shapes; each case has those of its own."""
    import numpy as np

    def make() -> list[Any]:
        rng = np.random.default_rng(0)
        return [rng.standard_normal(shape, dtype=np.float32) for shape in shapes]

    return make


def both_ways(
    name: str, dtype: str, shapes: list[tuple[int, ...]], result: tuple[int, ...], forward: dict[str, Callable],
    operations: float, backward: float, case: type[Rated] = Rated,
) -> Iterator[Rated]:  # fmt: skip
    """Forward and the gradient of all inputs; ``backward``: how many times the operations the latter needs."""
    each = 4 if dtype == "float32" else 2
    inputs, outputs = each * sum(map(math.prod, shapes)), each * math.prod(result)
    more = {"tolerance": TOLERANCE[dtype], "dtype": dtype}
    yield case(f"{name}, {dtype}", inputs + outputs, drawn(*shapes), forward, operations=operations, **more)
    yield case(f"{name}, {dtype}, gradient", 2 * inputs + outputs, drawn(*shapes, result), forward, backward=True,
               operations=(1 + backward) * operations, **more)  # fmt: skip


def attention(length: int, batch: int, heads: int, width: int, dtype: str) -> Iterator[Rated]:
    """Causal attention of so many positions."""
    shape = (batch, heads, length, width)
    forward = {
        "tapegrad": lambda tg, *x: tg.nn.functional.scaled_dot_product_attention(*x, is_causal=True),
        "torch": lambda torch, *x: torch.nn.functional.scaled_dot_product_attention(*x, is_causal=True),
        "jax": _attention_in_jax,
    }
    operations = 4 * batch * heads * length * length * width / 2
    return both_ways(f"attention, {length} long", dtype, [shape] * 3, shape, forward, operations, 2.5)


def _attention_in_jax(jax: Any, *x: Any) -> Any:
    swapped = (jax.numpy.swapaxes(a, 1, 2) for a in x)
    return jax.numpy.swapaxes(jax.nn.dot_product_attention(*swapped, is_causal=True), 1, 2)


def convolution(name: str, image: tuple[int, ...], outputs: int, size: int, groups: int, dtype: str) -> Iterator[Rated]:
    """A convolution that keeps the size of the image."""
    weights, padding = (outputs, image[1] // groups, size, size), size // 2
    result = (image[0], outputs, *image[2:])
    forward = {
        "tapegrad": lambda tg, x, w: tg.nn.functional.conv2d(x, w, padding=padding, groups=groups),
        "torch": lambda torch, x, w: torch.nn.functional.conv2d(x, w, padding=padding, groups=groups),
        "jax": lambda jax, x, w: jax.lax.conv_general_dilated(
            x, w, (1, 1), [(padding, padding)] * 2, feature_group_count=groups
        ),
    }
    operations = 2 * math.prod(result) * math.prod(weights[1:])
    return both_ways(f"convolution {name}", dtype, [image, weights], result, forward, operations, 2.0, Convolved)


class Block(Rated):
    """Result and gradients of the transformer block of ``fusion.py``, without dropout."""

    sizes: Any = None

    def makers(self, run: gpu_common.Run) -> dict[str, Callable[[], Callable[[], list[Any]]]]:
        tg, torch = run.tg, run.torch
        model, x, ct = fusion_block.ours(tg, self.sizes, 0.0)
        step = lambda x, ct: fusion_block.gradients(tg, model, x, ct)
        captured = tg.function(lambda x, ct: _recorded(tg, model, x, ct))
        found: dict[str, Any] = {"tapegrad": lambda: lambda: step(x, ct), "function": lambda: lambda: captured(x, ct)}
        if torch is not None:
            arrays = [gpu_common.host(t) for t in (x, *fusion_block.weights_of(model), ct)]
            for who in {"torch", "compile"} & set(run.options.peers.split(",")):
                found[who] = lambda who=who: self._theirs(run, arrays, who == "compile")
        return found

    def _theirs(self, run: gpu_common.Run, arrays: list[Any], compiled: bool) -> Callable[[], list[Any]]:
        *leaves, ct = (run.torch.tensor(a, device=run.where) for a in arrays)
        leaves = [x.requires_grad_() for x in leaves]
        return fusion_peers.with_torch(run.torch, self.sizes, 0.0, leaves, ct, compiled=compiled)


def _recorded(tg: Any, model: Any, x: Any, ct: Any) -> list[Any]:
    with tg.GradientTape() as tape:
        tape.watch(x)
        y = model(x)
    return [y, *tape.gradient(y, [x, *fusion_block.weights_of(model)], output_gradients=ct)]


def block(batch: int, context: int, width: int, heads: int) -> Block:
    """The block of such sizes; it need not be causal, and its weights are read twice and written once."""
    tokens = batch * context
    products = 2 * tokens * (4 + 8) * width * width + 4 * batch * context * context * width
    nbytes = 4 * (4 * tokens * width + 3 * 12 * width * width)
    made = Block(
        "transformer block, float32, gradient", nbytes, list, {}, operations=3.0 * products, tolerance=1e-3, floor=1e-3
    )  # a key's bias changes no softmax: its gradient is rounding errors alone
    made.sizes = SimpleNamespace(batch=batch, context=context, width=width, heads=heads)
    return made


def cases(dry: bool) -> Iterator[Rated]:
    """All of them, for a dry run at tiny sizes."""
    lengths = ((8, 1, 2),) if dry else ((2048, 8, 16), (16384, 1, 16), (128, 128, 16))
    image = (1, 4, 6, 6) if dry else (32, 64, 56, 56)
    for dtype in DTYPES[::2] if dry else DTYPES:
        for length, batch, heads in lengths:
            yield from attention(length, batch, heads, 8 if dry else 64, dtype)
        for name, size, groups in (("3x3", 3, 1), ("1x1", 1, 1), ("3x3, depthwise", 3, image[1])):
            yield from convolution(name, image, image[1], size, groups, dtype)
    yield block(2, 4, 16, 2) if dry else block(8, 1024, 1024, 16)


def same_arithmetic(run: gpu_common.Run) -> None:
    """Peers compute float32 in float32: PyTorch's convolutions and JAX's products would take TF32."""
    if run.torch is not None:
        run.torch.backends.cudnn.allow_tf32 = run.torch.backends.cuda.matmul.allow_tf32 = False
    if run.jax is not None:
        run.jax.config.update("jax_default_matmul_precision", "highest")


def main() -> None:
    parser = gpu_common.parser(__doc__, seconds=75, rounds=5)
    parser.add_argument("--only", default="", help="cases whose name has this in it")
    options = parser.parse_args()

    def work(run: gpu_common.Run, report: gpu_common.Report) -> None:
        same_arithmetic(run)
        report.case("copy", lambda: {"rate": gpu_speed.copy_bandwidth(run, 1 << (12 if run.dry else 26))})
        for dtype in DTYPES:
            rate = lambda dtype=dtype: {"rate": product_rate(run, dtype, 32 if run.dry else 8192)}
            report.case(f"product, {dtype}", rate)
        for case in cases(run.dry):
            if options.only in case.name:
                report.case(case.name, lambda case=case: rated(run, report, case))

    gpu_common.conduct(options, "gpu-rates", work)


def rated(run: gpu_common.Run, report: gpu_common.Report, case: Rated) -> dict[str, Any]:
    """Return the row with shares of both rates, if these were measured."""
    row = gpu_speed.of_copy(report, case, gpu_speed.compare(run, case))
    rate = report.rows[f"product, {case.dtype}"].get("rate")
    shares = {who: case.operations / s / rate for who, s in row["seconds"].items()} if rate else {}
    return {**row, "operations": case.operations, "of_products": shares}


if __name__ == "__main__":
    main()
