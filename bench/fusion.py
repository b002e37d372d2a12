"""How many kernels run and how many bytes move for one transformer block, forward and gradient?

    python bench/fusion.py [--batch 8] [--context 128] [--width 256] [--heads 4] [--quick] [--detail] [--json FILE]

These are counts, not times, so they are the same on every machine.  The block is ``x + dropout(attention(norm(x)))``,
then ``x + dropout(mlp(norm(x)))``, float32, with dropout of the attention's weights and a GELU MLP four times as wide;
the gradient is that of ``x`` and of all 16 weights, for a given cotangent of the result.  Counted are

- tapegrad on CUDA: by the ledger (``tg.measure``), and by every launch, product and copy that reaches the device, which
  must be the same.  Without a GPU the engine runs on a stand-in for CuPy that keeps the log of the second; with one
  there is no log, and the line is left out;
- tapegrad on the CPU, by the ledger.  Its dropout masks are arrays there (random bits are dear on a CPU);
- PyTorch eager: every aten operation that is no view is a kernel, its bytes are tensors read plus tensors written;
- torch.compile: kernels and products of Inductor's final schedule, and its own ``num_bytes_accessed``.

PyTorch runs the CPU's decompositions; ``native_dropout`` is called by its name, because that is what a GPU gets.
Attention is written out in all.  Without dropout, results and gradients must agree; tapegrad's CPU and CUDA must agree
with dropout, too.

The lower bound
---------------
Matrix products, softmax, layer norm and their derivatives are barriers: each reads its operands and writes its results
once.  Between barriers lie stretches of elementwise work, sums over rows and changes of layout; a stretch reads each of
its inputs once and writes each of its outputs once.  ``STRETCHES`` lists both, and the bound is the sum.  Assumed:

1. The barriers are those of the program: three products for query, key and value, and their order as written; a bias is
   added by the stretch behind a product, not by the product, nor does a product add to what it finds in its result.
2. A gradient of a bias is a second output of the stretch that makes the cotangent it sums.
3. Layer norm's backward is one barrier, which reads x and the cotangent once and writes all three gradients.
4. Masks of dropout are drawn in registers, forward and backward; numbers and statistics of rows are not counted.
5. Products read operands in any layout of which rows or columns are contiguous, and attention, one barrier each way,
   heads of (b, t, h * d); what it writes lies likewise, so heads are neither split nor joined by copies.  Its backward
   reads the result of forward, too, in place of taking the softmax again.
6. The interior of a stretch is recomputed in backward from the inputs; results of barriers and stretches that forward
   wrote are read again.  Nothing stays in a cache from one kernel to the next.

A chain of k operations
-----------------------
Ten times ``sin(y) * exp(y)`` are 30 operations of one region: what is kept for the gradient is the region's input.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import common
import fusion_block as block

GOAL = 1.25


@dataclass(frozen=True)
class Sizes:
    """Of the block and of what it is given.  In smaller blocks the CPU engine finds small arrays, and fuses less."""

    batch: int = 8
    context: int = 128
    width: int = 256
    heads: int = 4

    def elements(self) -> dict[str, int]:
        """Of the arrays named in ``STRETCHES``."""
        x = self.batch * self.context * self.width
        return {"x": x, "wide": 4 * x, "w": self.width, "4w": 4 * self.width,
                "W": self.width**2, "4W": 4 * self.width**2}  # fmt: skip


STRETCHES: list[tuple[str, str, str, str]] = [
    ("barrier", "layer norm 1", "x w w", "x"),
    *[("barrier", f"{part} product", "x W", "x") for part in ("query", "key", "value")],
    *[("stretch", f"{part} bias", "x w", "x") for part in ("query", "key", "value")],
    ("barrier", "attention", "x x x", "x"),
    ("barrier", "output product", "x W", "x"),
    ("stretch", "bias, dropout, residual", "x w x", "x"),
    ("barrier", "layer norm 2", "x w w", "x"),
    ("barrier", "expand product", "x 4W", "wide"),
    ("stretch", "bias, gelu", "wide 4w", "wide"),
    ("barrier", "contract product", "wide 4W", "x"),
    ("stretch", "bias, dropout, residual", "x w x", "x"),
    # Backward, from the cotangent of the result.
    ("stretch", "dropout', contract bias'", "x", "x w"),
    ("barrier", "contract kernel'", "wide x", "4W"),
    ("barrier", "contract input'", "x 4W", "wide"),
    ("stretch", "gelu', expand bias'", "wide wide 4w", "wide 4w"),
    ("barrier", "expand kernel'", "x wide", "4W"),
    ("barrier", "expand input'", "wide 4W", "x"),
    ("barrier", "layer norm 2'", "x x w", "x w w"),
    ("stretch", "residual', dropout', output bias'", "x x", "x x w"),
    ("barrier", "output kernel'", "x x", "W"),
    ("barrier", "output input'", "x W", "x"),
    ("barrier", "attention'", "x x x x x", "x x x"),
    *[("stretch", f"{part} bias'", "x", "w") for part in ("query", "key", "value")],
    *[("barrier", f"{part} kernel'", "x x", "W") for part in ("query", "key", "value")],
    *[("barrier", f"{part} input'", "x W", "x") for part in ("query", "key", "value")],
    ("stretch", "sum of the three", "x x x", "x"),
    ("barrier", "layer norm 1'", "x x w", "x w w"),
    ("stretch", "residual'", "x x", "x"),
]
"""Kind, what it does, what it reads and what it writes (names of ``Sizes.elements``); a prime marks a derivative."""


_FURTHER = "(a further pass of the same)"


@dataclass
class Count:
    """What one implementation did."""

    kernels: int
    bytes: int
    detail: list[tuple[str, int, int]]
    """Per kernel: what ran in it, bytes read, bytes written."""


def lower_bound(sizes: Sizes) -> Count:
    """The bound of the module's text."""
    n = sizes.elements()
    rows = [
        (f"{kind}: {what}", *(sum(4 * n[name] for name in names.split()) for names in (reads, writes)))
        for kind, what, reads, writes in STRETCHES
    ]
    return Count(len(rows), sum(read + written for _, read, written in rows), rows)


def count(sizes: Sizes, device: str, rate: float = 0.1) -> Count:
    """Kernels and bytes of tapegrad by its ledger, on a device that is present."""
    import tapegrad as tg
    from tapegrad.tracing.costs import moved_by
    from tapegrad.tracing.ledger import LEDGER

    detail: list[tuple[str, int, int]] = []
    with tg.device(device):
        model, x, ct = block.ours(tg, sizes, rate)
        block.gradients(tg, model, x, ct)  # constants and compiled kernels are there when counting begins
        with tg.measure() as measured:
            ran = LEDGER.ran

            def note(names: tuple[str, ...], moves: Any, passes: Any = (), scratch: int = 0) -> None:
                for i, moved in enumerate([*(moved_by(*arrays) for arrays in moves), *passes]):
                    detail.append((_FURTHER if i else " ".join(names), *moved))
                ran(names, moves, passes, scratch)

            LEDGER.ran = note  # type: ignore[method-assign]
            try:
                block.gradients(tg, model, x, ct)
            finally:
                del LEDGER.ran
    return Count(measured.kernel_runs, measured.bytes_moved, detail)


def on_device(sizes: Sizes, standin: Any, rate: float = 0.1) -> Count:
    """Everything that reached the device, by the log of the stand-in.

    A launch moves the bytes of its array arguments: no kernel of the block reads and writes the same array.
    """
    import tapegrad as tg

    with tg.device("cuda"):
        model, x, ct = block.ours(tg, sizes, rate)
        block.gradients(tg, model, x, ct)
        standin.events.clear()
        block.gradients(tg, model, x, ct)
        seen = [e for e in standin.events if e.kind in ("op", "launch", "d2d", "memset")]
    rows = []
    for e in seen:
        whole = e.kind == "launch"  # everything a kernel was given counts as read, what it may write besides
        read = 0 if whole else sum(n for _, n in set(e.reads))
        written = sum(n for _, n in set(e.reads if whole else e.writes))
        rows.append((f"{e.kind} {e.name} (read and written)" if whole else f"{e.kind} {e.name}", read, written))
    return Count(len(rows), sum(read + written for _, read, written in rows), rows)


def arrays_saved(steps: int = 10, device: str = "cpu", elements: int = 1 << 16) -> int:
    """Arrays of full size that live for the gradient of ``steps`` times ``sin(y) * exp(y)``, its result left out."""
    import tapegrad as tg
    from tapegrad.core.buffer import Buffer
    from tapegrad.tensor import materialize

    with tg.device(device):
        x = tg.full((elements,), 0.1, dtype="float32")
        materialize(x)  # it is an input, and has its bytes before the chain begins
        with tg.GradientTape() as tape:
            tape.watch(x)
            y = x
            for _ in range(steps):
                y = tg.sin(y) * tg.exp(y)
        materialize(y)
        gc.collect()
        # Only buffers made here have this many elements and no more: x, y and what the tape keeps between them.
        alive = [b for b in gc.get_objects() if type(b) is Buffer and b.array is not None]
        saved = [b for b in alive if b.node.aval.shape == (elements,)]
        tape.gradient(y, [x])
    return len(saved) - 1  # y is the user's


@contextmanager
def cuda_or_standin() -> Iterator[Any]:
    """The stand-in for CuPy while it is installed, or None where there is a real device."""
    from tapegrad.device import cuda

    if cuda.available():
        yield None
        return
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
    from shim import standin

    standin.install()
    cuda.forget()
    try:
        yield standin
    finally:
        standin.uninstall()
        cuda.forget()


def collect(options: argparse.Namespace, sizes: Sizes) -> tuple[dict[str, Count], dict[str, dict[int, int]], list[str]]:
    """Counts and saved arrays by implementation, and what was compared."""
    import tapegrad as tg

    counts, saved, notes = {"lower bound": lower_bound(sizes)}, {}, []
    lengths = (1, 10, 30, 100)
    with cuda_or_standin() as standin:
        real = "" if standin else " (real GPU)"
        counts["tapegrad, cuda" + real] = count(sizes, "cuda", options.rate)
        if standin:
            counts["tapegrad, cuda, as the device saw it"] = on_device(sizes, standin, options.rate)
        saved["tapegrad, cuda" + real] = {k: arrays_saved(k, "cuda") for k in lengths}
        found = {rate: block.results(tg, sizes, "cuda", rate) for rate in (0.0, options.rate)}
    counts["tapegrad, cpu"] = count(sizes, "cpu", options.rate)
    saved["tapegrad, cpu"] = {k: arrays_saved(k) for k in lengths}
    for rate, got in found.items():
        worst = block.agree("tapegrad, cuda", got, block.results(tg, sizes, "cpu", rate))
        notes.append(f"tapegrad on cuda and cpu, dropout {rate}: worst difference {worst:.0e}")
    if not options.alone:
        import fusion_peers

        want = block.results(tg, sizes, "cpu", 0.0)
        fusion_peers.collect(sizes, options.rate, lengths, counts, saved, notes, want)
    return counts, saved, notes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in asdict(Sizes()).items():
        parser.add_argument(f"--{name}", type=int, default=default, help="default: %(default)s")
    parser.add_argument("--rate", type=float, default=0.1, help="of dropout (default: %(default)s)")
    parser.add_argument("--alone", "--quick", action="store_true", help="no peers: seconds instead of minutes")
    parser.add_argument("--detail", action="store_true", help="also print every kernel, and every stretch of the bound")
    parser.add_argument("--json", metavar="FILE", type=Path, help="also write the counts there")
    options = parser.parse_args()
    sys.path.insert(0, str(common.HERE.parent))
    sizes = Sizes(options.batch, options.context, options.width, options.heads)
    counts, saved, notes = collect(options, sizes)
    print_all(sizes, counts, saved, notes, options.detail)
    if options.json:
        rows = {who: {"kernels": c.kernels, "bytes": c.bytes, "detail": c.detail} for who, c in counts.items()}
        facts = {"bench": "fusion", "sizes": asdict(sizes), "dropout": options.rate, **common.about(1)}
        options.json.write_text(json.dumps({**facts, "counts": rows, "arrays_saved": saved, "notes": notes}, indent=1))


def print_all(sizes: Sizes, counts: dict[str, Count], saved: Any, notes: list[str], detail: bool) -> None:
    """The tables: counts and ratios to the bound, saved arrays, and on demand every kernel."""
    bound = counts["lower bound"]
    if detail:
        for who, c in counts.items():
            print(f"\n{who}: bytes read, bytes written, what")
            print(*(f"{read:12,d} {written:12,d}  {what}" for what, read, written in c.detail), sep="\n")
    cells = [(who, c.kernels, f"{c.bytes:,d}", f"{c.bytes / bound.bytes:.3f}") for who, c in counts.items()]
    facts = common.about(1)
    title = "one block, forward and gradient: " + ", ".join(f"{name} {n}" for name, n in asdict(sizes).items())
    common.show(title, ["", "kernels", "bytes", "of the bound"], cells, facts)
    print(f"\ngoal: at most {GOAL} times the bound")
    lengths = [str(k) for k in next(iter(saved.values()))]
    cells = [(who, *found.values()) for who, found in saved.items()]
    common.show("arrays saved by k times sin(y) * exp(y), k =", ["", *lengths], cells, facts)
    print(*notes, sep="\n")


if __name__ == "__main__":
    main()
