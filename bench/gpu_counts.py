"""What can be counted of the CUDA path without a GPU?

    python bench/gpu_counts.py [--only step,block] [--json FILE]

Nothing is timed and nothing is computed: the engine runs on the stand-in for CuPy, whose kernels and products are asked
for and do nothing, so that everything has its full size.  Counted are

- *instructions*: of the loop over packs of 16 bytes, by NVRTC and nvdisasm for sm_90, and registers;
- *tensor cores*: of kernels that multiply there, causal attention of heads 64 wide: instructions that do, registers,
  and bytes that are spilled;
- *operations*: kernels and bytes moved, over the least: inputs once and outputs once, forward and backward apart; of
  attention also the statistics of rows, and in backward the result, which take the place of another softmax;
- *step*: of a training step of the demo's transformer (batch 16, context 128, width 128, 6 blocks), run eagerly: our
  launches, products, functions of CuPy's, what goes to the host and back, and Python calls for each launch;
- *block*: of the transformer block of ``fusion.py``, kernels, and bytes over its bound.

Each count stands beside the most that it may be (``HELD``; a higher one fails the script, and a test that runs it),
what it was when the path was audited (commit bb75a94), and the goal.  Whoever lowers a count lowers what is held.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from math import prod
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import common
import fusion
from gpu_counts_held import HELD

PARTS = ("instructions", "tensor cores", "operations", "step", "block")
DTYPES = ("float32", "float16", "bfloat16")
STEP = SimpleNamespace(batch=16, context=128, width=128, heads=4, blocks=6, vocabulary=96)


@dataclass(frozen=True)
class Row:
    """One count, the most that it may be, what the audit found, and the goal."""

    part: str
    what: str
    count: float
    held: float | None
    audit: float | None
    goal: float | None

    @property
    def worse(self) -> bool:
        """Whether the count is above what is held."""
        return self.held is not None and self.count > self.held


def row(part: str, what: str, count: float) -> Row:
    """The row of a count, which is rounded up to three decimals.  Raises KeyError without an entry in ``HELD``."""
    count = -(-round(count * 1e6) // 1000) / 1000 if isinstance(count, float) else count
    return Row(part, what, count, *HELD[f"{part}: {what}"])


@contextmanager
def nothing_computed() -> Iterator[list[Any]]:
    """The stand-in, whose kernels and products are noted and do nothing; yields the kernels that were asked for."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
    from shim import standin
    from shim.standin import blas, kernels, libcublas

    import tapegrad as tg
    from tapegrad.device import asdevice, cuda

    asked: list[Any] = []

    def function(self: Any, device: int) -> Callable[..., None]:
        asked.append(self)
        return lambda *args, **kwargs: None

    standin.install()
    libcublas.offer()
    cuda.forget()
    asdevice("cuda")  # its probe launches a kernel that must work
    before = kernels.RawKernel._function, blas._scalar
    kernels.RawKernel._function, blas._scalar = function, lambda *where: 0  # type: ignore[method-assign]
    try:
        with tg.device("cuda"):
            yield asked
    finally:
        kernels.RawKernel._function, blas._scalar = before  # type: ignore[method-assign]
        standin.uninstall()
        cuda.forget()


# Instructions ------------------------------------------------------------------------------------------------------


def in_loop(sass: str) -> int:
    """Instructions of the longest loop: from the label that is jumped back to, to the jump."""
    places: dict[str, int] = {}
    longest = count = 0
    for line in sass.splitlines():
        if label := re.match(r"\s*(\.L_x_\d+):", line):
            places[label[1]] = count
        elif re.match(r"\s*/\*[0-9a-f]{4,}\*/\s", line):
            count += 1
            back = re.search(r"\bBRA\b.*?(\.L_x_\d+)", line)
            if back and back[1] in places:
                longest = max(longest, count - places[back[1]])
    return longest


def instructions(tg: Any, asked: list[Any]) -> Iterator[Row]:
    """Of elementwise kernels for one pack: 8 elements of 16 bits, 4 of 32."""
    from shim import nvrtc

    from tapegrad.tensor import materialize

    gelu = tg.nn.functional.gelu

    def backward(x: Any, ct: Any) -> Any:
        with tg.GradientTape() as tape:
            tape.watch(x)
            y = gelu(x)
        return tape.gradient(y, x, output_gradients=ct)

    cases = {"x * 2 + 1": lambda x, ct: x * 2 + 1, "gelu": lambda x, ct: gelu(x), "gelu, backward": backward}
    for name, f in cases.items():
        for dtype in DTYPES:
            x, ct = (tg.zeros((64, 256), dtype=dtype) for _ in range(2))
            materialize(x, ct)
            asked.clear()
            materialize(f(x, ct))
            code, options = asked[-1].code, asked[-1].options
            compiled = nvrtc.compile(code, options, 90)
            yield row("instructions", f"{name}, {dtype}", in_loop(nvrtc.sass(compiled)))
            yield row("instructions", f"{name}, {dtype}, registers", compiled.usage["tg_fused"][0])


# Tensor cores ------------------------------------------------------------------------------------------------------


def tensor_cores(tg: Any, asked: list[Any]) -> Iterator[Row]:
    """Attention in bfloat16, and in float32 with TF32, forward and backward."""
    from shim import nvrtc

    attention = lambda q, k, v: tg.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    for dtype, precision in (("bfloat16", "highest"), ("float32", "high")):
        asked.clear()
        tg.set_float32_matmul_precision(precision)
        try:
            both_ways(tg, attention, [(1, 2, 2048, 64)] * 3, dtype)
        finally:
            tg.set_float32_matmul_precision("highest")
        for code, options in dict.fromkeys((one.code, one.options) for one in asked if "attention" in one.code):
            compiled = nvrtc.compile(code, options, 90)
            ((name, (registers, spilled, _)),) = compiled.usage.items()
            yield row("tensor cores", f"{name}, {dtype}: HMMA", nvrtc.sass(compiled).count("HMMA"))
            yield row("tensor cores", f"{name}, {dtype}: registers", registers)
            yield row("tensor cores", f"{name}, {dtype}: bytes spilled", spilled)


# Operations --------------------------------------------------------------------------------------------------------


def operations(tg: Any, asked: list[Any]) -> Iterator[Row]:
    """Kernels and bytes over the least, forward and backward."""
    from tapegrad.nn.functional.conv import convolve
    from tapegrad.tensor import materialize

    f, full = tg.nn.functional, (4096, 1024)
    attention = lambda q, k, v: f.scaled_dot_product_attention(q, k, v, is_causal=True)
    conv = lambda x, w: f.conv2d(x, w, padding=w.shape[-1] // 2)
    depthwise = lambda x, w: f.conv2d(x, w, padding=1, groups=64)
    with_relu = lambda x, w, b: convolve("conv2d", 2, x, w, b, 1, 1, 1, 1, clips=True)
    image = (4, 64, 56, 56)
    labels = tg.zeros(full[0], dtype="int64")
    materialize(labels)
    rows = lambda q, *_: 2 * 4 * prod(q[:-1])
    kept = {"attention, 128 long": rows, "attention, 2048 long": rows}
    cases: dict[str, tuple[Callable, list[tuple[int, ...]]]] = {
        "softmax": (tg.softmax, [full]),
        "bias and gelu": (lambda x, b: f.gelu(x + b), [full, full[1:]]),
        "layer norm": (lambda x, g, b: tg.layer_norm(x, g, b), [full, full[1:], full[1:]]),
        "sum of all": (tg.sum, [full]),
        "sum of columns": (lambda x: tg.sum(x, axis=0), [full]),
        "cross entropy": (lambda x: tg.cross_entropy(x, labels), [full]),
        "attention, 128 long": (attention, [(16, 4, 128, 32)] * 3),
        "attention, 2048 long": (attention, [(1, 2, 2048, 64)] * 3),
        "convolution 3x3": (conv, [image, (64, 64, 3, 3)]),
        "convolution 3x3, bias and relu": (with_relu, [image, (64, 64, 3, 3), (64,)]),
        "convolution 1x1": (conv, [image, (64, 64, 1, 1)]),
        "convolution 3x3, depthwise": (depthwise, [image, (64, 1, 3, 3)]),
    }
    for name, (function, shapes) in cases.items():
        of_rows = kept[name](*shapes) if name in kept else None
        for part, (kernels, nbytes) in both_ways(tg, function, shapes, kept=of_rows).items():
            if not kernels:
                continue
            yield row("operations", f"{name}, {part}: kernels", kernels)
            yield row("operations", f"{name}, {part}: bytes / least", nbytes)
    yield from adam(tg, full)


def both_ways(
    tg: Any, function: Callable, shapes: list[Any], dtype: str = "float32", kept: int | None = None
) -> dict[str, tuple[int, float]]:
    """Kernels and bytes over the least of one operation and of its gradient in all inputs, the second time.

    ``kept``: bytes of the statistics of rows that forward writes, and backward reads beside the result; None: neither.
    """
    from tapegrad.tensor import materialize

    xs = [tg.zeros(shape, dtype=dtype) for shape in shapes]
    for x in xs:
        materialize(x)
    inputs = sum(x.nbytes for x in xs)
    for _ in range(2):
        with tg.GradientTape() as tape:
            tape.watch(xs)
            with device_log() as forward:
                y = function(*xs)
                materialize(y)
        ct = tg.zeros(y.shape, dtype=dtype)
        materialize(ct)
        with device_log() as backward:
            for g in tape.gradient(y, xs, output_gradients=ct):
                materialize(g)
    least = {"forward": inputs + y.nbytes, "backward": inputs + y.nbytes + inputs}
    if kept is not None:
        least = {"forward": least["forward"] + kept, "backward": least["backward"] + y.nbytes + kept}
    return {part: (len(log), sum(log) / least[part]) for part, log in (("forward", forward), ("backward", backward))}


@contextmanager
def device_log() -> Iterator[list[int]]:
    """The bytes that each kernel of the block has moved; a launch moves those of its distinct arrays."""
    from shim import standin

    start, moved = len(standin.events), []
    yield moved
    for e in standin.events[start:]:
        if e.kind in ("op", "launch", "d2d", "memset", "copy"):
            arrays = set(e.reads) if e.kind == "launch" else [*set(e.reads), *set(e.writes)]
            moved.append(sum(n for _, n in arrays))


def adam(tg: Any, shape: tuple[int, ...]) -> Iterator[Row]:
    """One step on two parameters: of float32, and of bfloat16, whose gradients are so, too, with masters and state."""
    from tapegrad.tensor import materialize

    for dtype, each in (("float32", 7 * 4), ("bfloat16", 3 * 2 + 6 * 4)):
        variables = [tg.Variable(tg.zeros(shape, dtype=dtype)) for _ in range(2)]
        optimizer, gradients = tg.optim.Adam(1e-3), [tg.zeros(shape, dtype=dtype) for _ in variables]
        for g in gradients:
            materialize(g)
        for _ in range(2):
            with tg.measure() as measured:
                optimizer.apply(gradients, variables)
        name = "Adam" if dtype == "float32" else f"Adam, {dtype}"
        yield row("operations", f"{name}: kernels", measured.kernel_runs)
        least = each * sum(g.size for g in gradients)
        yield row("operations", f"{name}: bytes / least", measured.bytes_moved / least)


# The demo's step -----------------------------------------------------------------------------------------------------


def step(tg: Any, asked: list[Any]) -> Iterator[Row]:
    """Of the demo's transformer, whose loss is read at the end."""
    import numpy as np
    import train_step
    from shim import standin

    text = np.random.default_rng(0).integers(0, STEP.vocabulary, (STEP.batch, STEP.context + 1))
    ours = train_step.Ours(tg, STEP, text[:, :-1].copy(), text[:, 1:].copy())
    for _ in range(2):
        ours.step()
    standin.events.clear()
    ours.step()
    kinds = Counter(e.kind for e in standin.events)
    names = Counter(e.name for e in standin.events if e.kind == "launch")
    products = sum(e.name.startswith("gemm") for e in standin.events if e.kind == "op")
    yield row("step", "launches", kinds["launch"])
    yield row("step", "of these layer norm", sum(n for name, n in names.items() if name.startswith("tg_layer_norm")))
    yield row("step", "products", products)
    others = sum(kinds[kind] for kind in ("d2d", "memset", "copy"))
    yield row("step", "copies and functions of CuPy's", kinds["op"] - products + others)
    yield row("step", "copies to the device", kinds["h2d"])
    yield row("step", "copies to the host", kinds["d2h"])
    waits = [e for e in standin.events if e.kind.endswith("synchronize") or e.name == "waits"]
    yield row("step", "waits for the device", len(waits))
    calls = python_calls(ours.step)
    yield row("step", "Python calls", calls)
    yield row("step", "Python calls for each launch", round(calls / kinds["launch"], 1))
    with tg.measure() as measured:
        ours.step()
    yield row("step", "MiB moved", round(measured.bytes_moved / 2**20, 1))


def python_calls(f: Callable[[], object]) -> int:
    """Calls of tapegrad's functions in Python that ``f`` makes."""
    count = 0
    ours: dict[Any, bool] = {}

    def note(frame: Any, event: str, arg: Any) -> None:
        nonlocal count
        if event == "call":
            code = frame.f_code
            if code not in ours:
                ours[code] = "/tapegrad/" in code.co_filename.replace("\\", "/")
            count += ours[code]

    sys.setprofile(note)
    try:
        f()
    finally:
        sys.setprofile(None)
    return count


def block(tg: Any, asked: list[Any]) -> Iterator[Row]:
    """Of the transformer block of ``fusion.py``, with dropout, forward and gradient."""
    counted = fusion.count(fusion.Sizes(), "cuda")
    yield row("block", "kernels", counted.kernels)
    yield row("block", "bytes / bound", counted.bytes / fusion.lower_bound(fusion.Sizes()).bytes)


def rows_of(parts: tuple[str, ...]) -> list[Row]:
    """All rows of some of ``PARTS``."""
    counts = dict(zip(PARTS, (instructions, tensor_cores, operations, step, block), strict=True))
    with nothing_computed() as asked:
        import tapegrad as tg

        return [one for part in parts for one in counts[part](tg, asked)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(PARTS), help="of these parts (%(default)s)")
    parser.add_argument("--json", metavar="FILE", type=Path, help="also write the rows there")
    options = parser.parse_args()
    parts = tuple(options.only.split(","))
    if unknown := [part for part in parts if part not in PARTS]:
        parser.error(f"--only: no part is called {', '.join(map(repr, unknown))}; there are {', '.join(PARTS)}")
    sys.path.insert(0, str(common.HERE.parent))
    rows = rows_of(parts)
    show = lambda x: "" if x is None else f"{x:g}"
    cells = [(f"{r.part}: {r.what}", *map(show, (r.count, r.held, r.audit, r.goal))) for r in rows]
    facts = common.about(1)
    common.show("counted without a GPU", ["", "now", "held at most", "audit", "goal"], cells, facts)
    if options.json:
        options.json.write_text(json.dumps({"bench": "gpu-counts", **facts, "rows": list(map(asdict, rows))}, indent=1))
    if worse := [f"{r.part}: {r.what}: {r.count:g}, held are {show(r.held) or 'none'}" for r in rows if r.worse]:
        raise SystemExit("more than is held:\n" + "\n".join(worse))


if __name__ == "__main__":
    main()
