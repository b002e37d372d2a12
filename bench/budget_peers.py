"""What does checkpointing in PyTorch cost at the fraction of activation bytes at which ``budget.py`` runs?

    python bench/budget_peers.py [--scale quick|full] [--workloads mlp,resnet,transformer] [--rounds 5] [--json]

The MLP, the ResNet and the transformer of ``budget_workloads.py`` in PyTorch: one step plain, with
``torch.utils.checkpoint`` around each group of 1, 4, 16, ... blocks, and with ``checkpoint_sequential`` in 2, 8, ...
segments (both with use_reentrant=False).  Then ours under ``tg.memory_budget`` at the fractions that PyTorch reaches.

PyTorch's bytes: its profiler reports every allocation and every free of the CPU allocator; the running sum over a step
is what the step holds beyond parameters and data, its maximum the peak P.  (Live storages followed by weak references
in a TorchDispatchMode give the same peaks for the MLP and the transformer; they miss the scratch of convolutions.)  As
in ``budget.py``: A is what the plain forward leaves alive when it ends (the activations), R the larger of P - A of the
plain step and the gradients' bytes; a step that peaks at P has the fraction (P - R) / A.  Ours gets its budget at the
same fraction of our own A.

Each slowdown is over the same library's plain step, in the same round, by the process's CPU time: no library is
compared with the other's speed.  Ours is timed in a block that is open already, as around a loop: entering the first
one looks for arrays among all Python objects, of which PyTorch brings 150,000.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from typing import Any

import common
from budget import MIB, Budgeted, Clocked, Plain, chosen, feasible, plain_run
from budget_workloads import Sizes, Workload

Through = Callable[[Any, Any], Any]
"""``through(blocks, x)`` runs blocks one after the other."""


@dataclass
class Model:
    """A model in PyTorch as a row of blocks, with its input and its loss; ``head`` ends in the loss."""

    blocks: Any
    x: Any
    head: Callable[[Any], Any]
    parameters: list[Any]

    def step(self, through: Through) -> None:
        """Forward (``through`` runs the blocks), backward; the gradients go at once."""
        self.head(through(self.blocks, self.x)).backward()

    def forget(self) -> None:
        for p in self.parameters:
            p.grad = None


def mlp(sizes: Sizes) -> Model:
    import torch
    from torch import nn

    width, batch = sizes["width"], sizes["batch"]
    blocks = nn.Sequential(*[nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(sizes["layers"])])
    x, target = torch.randn(batch, width), torch.randn(batch, width)
    return Model(blocks, x, lambda h: torch.mean(torch.square(h - target)), list(blocks.parameters()))


def resnet(sizes: Sizes) -> Model:
    import torch
    from torch import nn

    def conv(channels: int, filters: int, kernel: int, stride: int = 1) -> Any:
        layer = nn.Conv2d(channels, filters, kernel, stride=stride, padding=kernel // 2, bias=False)
        return nn.Sequential(layer, nn.BatchNorm2d(filters, track_running_stats=False))

    class Block(nn.Module):
        def __init__(self, channels: int, filters: int, stride: int) -> None:
            super().__init__()
            self.first, self.second = conv(channels, filters, 3, stride), conv(filters, filters, 3)
            same = stride == 1 and channels == filters
            self.short = nn.Identity() if same else conv(channels, filters, 1, stride)

        def forward(self, x: Any) -> Any:
            return torch.relu(self.second(torch.relu(self.first(x))) + self.short(x))

    narrow, batch, pixels = sizes["channels"], sizes["batch"], sizes["pixels"]
    rows: list[Any] = [nn.Sequential(conv(3, narrow, 3), nn.ReLU())]
    channels = narrow
    for stage in range(3):
        for number in range(sizes["blocks"]):
            rows.append(Block(channels, narrow << stage, 2 if stage and not number else 1))
            channels = narrow << stage
    blocks, last = nn.Sequential(*rows), nn.Linear(channels, 10)
    images, labels = torch.randn(batch, 3, pixels, pixels), torch.randint(0, 10, (batch,))
    loss = lambda h: nn.functional.cross_entropy(last(h.mean(dim=(2, 3))), labels)
    return Model(blocks, images, loss, [*blocks.parameters(), *last.parameters()])


def transformer(sizes: Sizes) -> Model:
    import torch
    from torch import nn

    width, heads = sizes["width"], sizes["heads"]

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
            self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))
            self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

        def forward(self, x: Any) -> Any:
            n, t, _ = x.shape
            h = self.before(x)
            q, k, v = (f(h).view(n, t, heads, -1).transpose(1, 2) for f in (self.query, self.key, self.value))
            scores = q @ k.transpose(-1, -2) * (width // heads) ** -0.5  # written out, as ours is
            later = torch.ones(t, t, dtype=torch.bool).triu(1)
            mixed = torch.softmax(scores.masked_fill(later, float("-inf")), -1) @ v
            x = x + self.out(mixed.transpose(1, 2).reshape(n, t, width))
            return x + self.narrow(nn.functional.gelu(self.wide(self.between(x))))

    shape = sizes["batch"], sizes["positions"], width
    blocks = nn.Sequential(*[Block() for _ in range(sizes["blocks"])])
    x, target = torch.randn(shape), torch.randn(shape)
    return Model(blocks, x, lambda h: torch.mean(torch.square(h - target)), list(blocks.parameters()))


MODELS = {"deep MLP": mlp, "ResNet": resnet, "transformer": transformer}


def plainly(blocks: Any, x: Any) -> Any:
    return blocks(x)


def grouped(size: int) -> Through:
    """Each ``size`` blocks under a checkpoint."""

    def through(blocks: Any, x: Any) -> Any:
        from torch.utils.checkpoint import checkpoint

        for start in range(0, len(blocks), size):
            x = checkpoint(blocks[start : start + size], x, use_reentrant=False)
        return x

    return through


def in_segments(count: int) -> Through:
    def through(blocks: Any, x: Any) -> Any:
        from torch.utils.checkpoint import checkpoint_sequential

        return checkpoint_sequential(blocks, count, x, use_reentrant=False)

    return through


def methods(count: int) -> Iterator[tuple[str, Through]]:
    """By name, what can be done with ``count`` blocks."""
    size = 1
    while size <= count // 2:
        yield f"checkpoint, {size} block{'s' * (size > 1)} each", grouped(size)
        size *= 4
    segments = 2
    while segments <= count // 2:
        yield f"checkpoint_sequential({segments})", in_segments(segments)
        segments *= 4


def history(call: Callable[[], Any]) -> tuple[int, int]:
    """Bytes of PyTorch's CPU allocator that ``call`` holds at most, and when it has returned (its result included)."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        result = call()
    events = found.profiler.kineto_results.events()
    changes = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
    live = peak = 0
    for _, nbytes in changes:
        live += nbytes
        peak = max(peak, live)
    del result
    return peak, live


@dataclass
class Row:
    workload: str
    method: str
    fraction: float
    peak_mib: float
    slowdown: float
    middle_half: tuple[float, float]
    ours_fraction: float
    ours: float
    ours_middle_half: tuple[float, float]


def rows_of(workload: Workload, scale: str, rounds: int) -> list[Row]:
    model = MODELS[workload.name](workload.scales[scale])
    peak = peak_of(model, plainly)
    _, activations = history(lambda: model.head(plainly(model.blocks, model.x)))
    rest = max(peak - activations, sum(p.numel() * p.element_size() for p in model.parameters))
    plain = plain_run(workload.make(scale))
    found = []
    for name, through in methods(len(model.blocks)):
        peak = peak_of(model, through)
        fraction = (peak - rest) / activations
        step = feasible(plain, plain.budget(fraction))
        times = timed(model, through, plain, step, rounds)
        if not step.equal or any(m.peak_bytes > step.limit for m in step.measures):
            raise SystemExit(f"{workload.name} within {step.limit} bytes: see budget.py")
        found.append(Row(
            workload.name, name, fraction, peak / MIB, common.ratio(times["torch"], times["checkpointed"]),
            common.quartiles(times["torch"], times["checkpointed"]), plain.fraction(step.limit),
            common.ratio(times["plain"], times["budget"]), common.quartiles(times["plain"], times["budget"]),
        ))  # fmt: skip
        print("  " + ", ".join(f"{c} {v}" for c, v in zip(COLUMNS, cells(found[-1]))), flush=True)
    return found


def peak_of(model: Model, through: Through) -> int:
    model.step(through)
    model.forget()
    peak, _ = history(lambda: model.step(through))
    model.forget()
    return peak


def timed(model: Model, through: Through, plain: Plain, step: Budgeted, rounds: int) -> dict[str, list[float]]:
    """CPU seconds, a list with one entry a round for each."""
    import tapegrad as tg

    block = ExitStack()

    def between(name: str) -> None:
        block.close()
        model.forget()
        step.check()
        if name == "budget":
            block.enter_context(tg.memory_budget(step.limit))

    calls = {
        "torch": Clocked(lambda: model.step(plainly)), "checkpointed": Clocked(lambda: model.step(through)),
        "plain": Clocked(plain.step), "budget": Clocked(step),
    }  # fmt: skip
    common.by_turns(dict(calls), rounds, warm_up=0, pause=0.01, prepare=between)
    between("")
    return {name: call.seconds for name, call in calls.items()}


COLUMNS = (
    "workload", "PyTorch's method", "of its activations", "peak, MiB", "slowdown", "middle half", "ours at",
    "our slowdown", "middle half",
)  # fmt: skip


def cells(r: Row) -> list[str]:
    return [
        r.workload, r.method, f"{r.fraction:.2f}", f"{r.peak_mib:.1f}", f"{r.slowdown:.2f}",
        "{:.2f}-{:.2f}".format(*r.middle_half), f"{r.ours_fraction:.2f}", f"{r.ours:.2f}",
        "{:.2f}-{:.2f}".format(*r.ours_middle_half),
    ]  # fmt: skip


def main() -> None:
    parser = common.parser(__doc__, threads=2, rounds=5)
    parser.add_argument("--scale", choices=["quick", "full"], default="full", help="sizes (default: %(default)s)")
    parser.add_argument("--workloads", default=",".join(MODELS), help="parts of names (default: %(default)s)")
    options = parser.parse_args()
    workloads = [w for w in chosen(options.workloads) if w.name in MODELS]
    common.begin(options.threads)
    torch = common.load("torch", options.threads)
    if torch is None:
        raise SystemExit("PyTorch is not installed: pip install torch")
    torch.manual_seed(0)
    common.load("tapegrad", options.threads)
    rows = [row for workload in workloads for row in rows_of(workload, options.scale, options.rounds)]
    facts = common.about(options.threads)
    common.show(f"checkpointing at equal fractions, scale {options.scale}", COLUMNS, [cells(r) for r in rows], facts)
    if options.json:
        common.write("budget_peers", facts, [asdict(r) for r in rows], scale=options.scale, rounds=options.rounds)


if __name__ == "__main__":
    main()
