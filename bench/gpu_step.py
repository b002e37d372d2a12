"""How long is one training step of the demo's transformer on a GPU, eager and captured, against PyTorch and JAX?

    python bench/gpu_step.py [--batch 32] [--width 512] [--blocks 6] [--rounds 11] [--dry-run]

The step, the model and the peers are those of ``train_step.py``: loss, gradients and Adam's update, float32, the same
weights and tokens.  The loss must agree to 1e-4 and gradients to 1e-3 of their largest value.  Every step fetches its
loss, so each ends with a wait for the device.

Captured is the same step by ``tg.function``, which replays it as CUDA graphs: its losses must be those of the eager one
to the bit.  PyTorch runs eagerly, as one CUDA graph of the whole step (``torch.cuda.CUDAGraph``), and with its loss by
``torch.compile(mode="reduce-overhead")``, which uses CUDA graphs, too (``--peers compile``).  JAX's step is jitted.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import common
import gpu_common
import train_step
import train_step_jax

LOSS_TOLERANCE, GRADIENT_TOLERANCE = 1e-4, 1e-3


def agree(who: str, ours: Any, theirs: Any) -> float:
    """Compare loss and gradients at the same weights; the worst difference of a gradient."""
    loss, gradients, _ = ours.gradients()
    want_loss, want = theirs.gradients()
    host = gpu_common.host
    floor = 1e-2 * max(float(abs(host(v)).max()) for v in want)
    common.must_agree(who, "the loss", host(loss), host(want_loss), LOSS_TOLERANCE)
    return max(
        common.must_agree(who, f"the gradient of {name}", host(g), host(v), GRADIENT_TOLERANCE, floor)
        for name, g, v in zip(theirs.weights, gradients, want, strict=True)
    )


def captured_step(run: Any, options: Any, tokens: Any, labels: Any) -> tuple[Callable[[], float], Callable[[], str]]:
    """The step by ``tg.function``, and how it is replayed; its losses are those of an eager one."""
    eager, ours = (train_step.Ours(run.tg, options, tokens, labels) for _ in range(2))

    def whole(tokens: Any, labels: Any) -> Any:
        loss, gradients, variables = ours.demo_model.loss_and_gradients(ours.model, tokens, labels)
        ours.optimizer.apply(gradients, variables)
        return loss

    captured = run.tg.function(whole)
    step = lambda: float(captured(ours.tokens, ours.labels))
    for i in range(4):
        mine, other = step(), eager.step()
        if mine != other:
            raise SystemExit(f"the captured step's loss differs from the eager one's in step {i}: {mine!r}, {other!r}")
    if not captured.stats.replays:
        raise SystemExit(f"the step is not replayed: {captured.stats}")
    return step, lambda: captured.explain(ours.tokens, ours.labels)


def as_graph(torch: Any, theirs: train_step.Theirs) -> Callable[[], float]:
    """PyTorch's whole step as one CUDA graph, after three steps on a stream of their own, as its manual asks."""
    theirs.optimizer = torch.optim.Adam(theirs.weights.values(), lr=train_step.LEARNING_RATE, capturable=True)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            theirs.step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss, _ = theirs.gradients()
        theirs.optimizer.step()

    def step() -> float:
        graph.replay()
        return float(loss)

    return step


def peers(
    run: Any, options: Any, ours: Any, weights: dict[str, Any], tokens: Any, labels: Any, worst: dict[str, float]
) -> dict[str, dict[str, Callable[[], Callable[[], float]]]]:
    """Return functions that make a step, by case and library; ``worst`` receives the differences of gradients."""
    chosen = options.peers.split(",")

    def in_torch(who: str, fused: bool, wrap: Callable[[Any], Callable[[], float]]) -> Callable[[], float]:
        theirs = train_step.Theirs(run.torch, options, weights, tokens, labels, fused=fused)
        worst[who] = agree(who, ours, theirs)
        return wrap(theirs)

    def by_compiler(theirs: Any) -> Callable[[], float]:
        theirs.loss = run.torch.compile(theirs.loss, mode="reduce-overhead")
        return theirs.step

    def in_jax() -> Callable[[], float]:
        theirs = train_step_jax.TheirsInJax(run.jax, options, weights, tokens, labels, train_step.LEARNING_RATE)
        worst["jax"] = agree("jax", ours, theirs)
        return theirs.step

    steps: dict[str, Any] = {}
    if run.torch is not None:
        run.torch.set_default_device(run.where)
        plain = lambda theirs: theirs.step
        if "torch" in chosen:
            steps["PyTorch"] = {
                "torch": lambda: in_torch("torch", True, plain),
                "attention written out": lambda: in_torch("attention written out", False, plain),
            }
        if "torch" in chosen and not run.dry:
            wrap = lambda theirs: as_graph(run.torch, theirs)
            steps["PyTorch, one CUDA graph"] = {"CUDA graph": lambda: in_torch("CUDA graph", True, wrap)}
        if "compile" in chosen and not run.dry:
            steps["torch.compile, CUDA graphs"] = {"compile": lambda: in_torch("compile", True, by_compiler)}
    if run.jax is not None:
        steps["JAX, jitted"] = {"jax": in_jax}
    return steps


def main() -> None:
    parser = gpu_common.parser(__doc__, seconds=60, rounds=11)
    for name, default in {"batch": 32, "context": 128, "width": 512, "heads": 8, "blocks": 6, "vocabulary": 96}.items():
        parser.add_argument(f"--{name}", type=int, default=default, help="default: %(default)s")
    options = parser.parse_args()
    if options.dry_run:
        options.batch, options.context, options.width, options.heads, options.blocks = 2, 16, 32, 2, 2
    gpu_common.conduct(options, "gpu-step", lambda run, report: work(options, run, report))


def work(options: Any, run: Any, report: Any) -> None:
    import numpy as np

    text = np.random.default_rng(0).integers(0, options.vocabulary, (options.batch, options.context + 1))
    tokens, labels = text[:, :-1].copy(), text[:, 1:].copy()
    settings = {k: getattr(options, k) for k in ("batch", "context", "width", "heads", "blocks", "vocabulary")}
    worst: dict[str, float] = {}
    explained: dict[str, Any] = {}

    def function() -> Callable[[], float]:
        step, explain = captured_step(run, options, tokens, labels)
        explained["captured"] = explain()
        return step

    def alone() -> dict[str, Any]:
        ours = train_step.Ours(run.tg, options, tokens, labels)
        row = gpu_common.measured(run, {"tapegrad": lambda: ours.step, "function": function})
        with run.tg.measure() as measured:
            ours.step()
        return {**row, **settings, **explained, "kernel_runs": measured.kernel_runs, "peak_bytes": measured.peak_bytes}

    def against(case: str) -> dict[str, Any]:
        ours = train_step.Ours(run.tg, options, tokens, labels)
        makers = peers(run, options, ours, train_step.weights_of(ours.model), tokens, labels, worst)[case]
        row = gpu_common.measured(run, {**makers, "tapegrad": lambda: ours.step, "function": function})
        return {**row, **settings, "worst_difference": worst}

    report.case("tapegrad", alone)
    for case in peers(run, options, None, {}, tokens, labels, worst):
        report.case(case, lambda case=case: against(case))


if __name__ == "__main__":
    main()
