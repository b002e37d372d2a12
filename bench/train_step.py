"""How long is one training step of the demo's transformer, against the same model in PyTorch and JAX?

    python bench/train_step.py [--batch 16] [--width 128] [--blocks 6] [--threads 2] [--rounds 15] [--profile] [--json]

A step is loss, gradients and Adam's update of ``tapegrad.profile.demo_model.CharTransformer`` (float32, context 128).
PyTorch gets the same weights and tokens, twice: eager with its fused attention (``scaled_dot_product_attention``), and
eager with attention written out as in the demo.  JAX gets them with the whole step jitted.

Before anything is timed loss and gradients are compared: the script fails where the loss differs by more than 1e-5, or
a gradient by more than 1e-4 of its largest value (or of a thousandth of the largest value of any gradient).  Ratios
above 1 mean that tapegrad is faster; they are medians of ratios within a round.

``--profile`` prints where our time goes: seconds and calls of every primitive and of every kernel of a region (timed
around each, so that what they do not explain is the cost of recording and walking in Python).
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import common
import train_step_jax

LOSS_TOLERANCE, GRADIENT_TOLERANCE = 1e-5, 1e-4
LEARNING_RATE = 1e-3


def weights_of(model: Any) -> dict[str, Any]:
    """Copies of the demo's model's weights under names of our own, in the order of ``trainable_variables``."""
    found = {"characters": model.characters.embeddings, "positions": model.positions.embeddings}
    for i, block in enumerate(model.blocks):
        for norm in ("norm_1", "norm_2"):
            layer = getattr(block, norm)
            found |= {f"{i}.{norm}.gamma": layer.gamma, f"{i}.{norm}.beta": layer.beta}
        denses = {part: getattr(block.attention, f"{part}_dense") for part in ("query", "key", "value", "output")}
        for name, dense in {**denses, "expand": block.expand, "contract": block.contract}.items():
            found |= {f"{i}.{name}.kernel": dense.kernel, f"{i}.{name}.bias": dense.bias}
    found |= {"norm.gamma": model.norm.gamma, "norm.beta": model.norm.beta, "head.kernel": model.head.kernel}
    names = {id(v): name for name, v in found.items()}
    return {names[id(v)]: v.numpy(copy=True) for v in model.trainable_variables}


class Ours:
    """The demo's model and one batch."""

    def __init__(self, tg: Any, options: Any, tokens: Any, labels: Any) -> None:
        from tapegrad.profile import demo_model

        self.demo_model = demo_model
        tg.random.seed(0)
        self.tokens, self.labels = tg.asarray(tokens), tg.asarray(labels)
        self.model = demo_model.CharTransformer(
            options.vocabulary, options.context, options.width, options.heads, options.blocks
        )
        self.model(self.tokens)  # makes the weights
        self.optimizer = tg.optim.Adam(LEARNING_RATE)

    def gradients(self) -> tuple[Any, list[Any], list[Any]]:
        return self.demo_model.loss_and_gradients(self.model, self.tokens, self.labels)

    def step(self) -> float:
        loss, gradients, variables = self.gradients()
        self.optimizer.apply(gradients, variables)
        return float(loss)


class Theirs:
    """The same in PyTorch; ``fused``: attention by ``scaled_dot_product_attention``."""

    def __init__(
        self, torch: Any, options: Any, weights: dict[str, Any], tokens: Any, labels: Any, *, fused: bool
    ) -> None:
        self.torch, self.options, self.fused = torch, options, fused
        self.weights = {name: torch.tensor(w).requires_grad_() for name, w in weights.items()}
        self.tokens, self.labels = torch.tensor(tokens), torch.tensor(labels)
        self.optimizer = torch.optim.Adam(self.weights.values(), lr=LEARNING_RATE)
        self.places = torch.arange(tokens.shape[1])
        self.mask = self.places[:, None] >= self.places

    def loss(self) -> Any:
        torch, functional, w, options = self.torch, self.torch.nn.functional, self.weights, self.options
        b, t = self.tokens.shape

        def norm(x: Any, name: str) -> Any:
            return functional.layer_norm(x, x.shape[-1:], w[f"{name}.gamma"], w[f"{name}.beta"], 1e-5)

        def dense(x: Any, name: str) -> Any:
            rows = torch.addmm(w[f"{name}.bias"], x.reshape(-1, x.shape[-1]), w[f"{name}.kernel"])
            return rows.view(b, t, -1)

        def attention(x: Any, i: int) -> Any:
            parts = (dense(x, f"{i}.{part}") for part in ("query", "key", "value"))
            q, k, v = (p.view(b, t, options.heads, -1).transpose(1, 2) for p in parts)
            if self.fused:
                heads = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            else:
                scores = (q @ k.mT) * q.shape[-1] ** -0.5
                heads = torch.softmax(scores.masked_fill(~self.mask, -1e9), dim=-1) @ v
            return dense(heads.transpose(1, 2).reshape(b, t, -1), f"{i}.output")

        x = functional.embedding(self.tokens, w["characters"]) + functional.embedding(self.places, w["positions"])
        for i in range(options.blocks):
            x = x + attention(norm(x, f"{i}.norm_1"), i)
            x = x + dense(functional.gelu(dense(norm(x, f"{i}.norm_2"), f"{i}.expand")), f"{i}.contract")
        logits = norm(x, "norm") @ w["head.kernel"]
        return functional.cross_entropy(logits.view(b * t, -1), self.labels.view(-1))

    def gradients(self) -> tuple[Any, list[Any]]:
        self.optimizer.zero_grad()
        loss = self.loss()
        loss.backward()
        return loss.detach(), [p.grad for p in self.weights.values()]

    def step(self) -> float:
        loss, _ = self.gradients()
        self.optimizer.step()
        return float(loss)


def agree(ours: Ours, theirs: Theirs, who: str) -> float:
    """Compare loss and gradients at the same weights; the worst difference of a gradient.

    A key's bias changes no softmax, so its gradient is rounding errors alone: hence the floor.
    """
    want_loss, want = theirs.gradients()
    floor = 1e-3 * max(float(abs(v).max()) for v in want)
    loss, gradients, _ = ours.gradients()
    common.must_agree(who, "the loss", loss, want_loss, LOSS_TOLERANCE)
    return max(
        common.must_agree(who, f"the gradient of {name}", g, v, GRADIENT_TOLERANCE, floor)
        for name, g, v in zip(theirs.weights, gradients, want, strict=True)
    )


class Profile:
    """The time of every primitive that runs at once and of every kernel of a region: medians over steps, per step."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.calls: dict[str, int] = {}
        self.total = 0.0
        self._step: dict[str, list[float]] = {}

    def timed(self, function: Callable, name_of: Callable[..., str]) -> Callable:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self._step.setdefault(name_of(*args), []).append(time.perf_counter() - start)

        return wrapped

    def run(self, step: Callable[[], Any], steps: int) -> None:
        from tapegrad.engine.cpu.tiles import Tiling
        from tapegrad.engine.lowering import Application

        saved = Application.run, Tiling.run
        Application.run = self.timed(Application.run, lambda work, *arrays: work.names[0])
        Tiling.run = self.timed(Tiling.run, lambda work, *arrays: _name_of_kernel(work))
        try:
            steps_seen, totals = [], []
            for _ in range(steps):
                self._step = {}
                start = time.perf_counter()
                step()
                totals.append(time.perf_counter() - start)
                steps_seen.append(self._step)
        finally:
            Application.run, Tiling.run = saved
        self.total = common.median(totals)
        for name, spent in steps_seen[-1].items():
            self.seconds[name] = common.median([sum(seen.get(name, ())) for seen in steps_seen])
            self.calls[name] = len(spent)

    def rows(self) -> list[tuple[str, float, int]]:
        found = sorted(((n, s, self.calls[n]) for n, s in self.seconds.items()), key=lambda row: -row[1])
        rest = self.total - sum(s for _, s, _ in found)
        return [*found, ("everything else (Python, small arrays)", rest, 0)]


def _name_of_kernel(work: Any) -> str:
    counts: dict[str, int] = defaultdict(int)
    for name in work.names:
        counts[name] += 1
    said = [name if n == 1 else f"{n} {name}" for name, n in counts.items()]
    dims = "x".join(map(str, work.shape))
    return f"kernel {dims}: " + ", ".join(said[:6]) + (" ..." if len(said) > 6 else "")


def main() -> None:
    parser = common.parser(__doc__, threads=2, rounds=15)
    for name, default in {"batch": 16, "context": 128, "width": 128, "heads": 4, "blocks": 6, "vocabulary": 96}.items():
        parser.add_argument(f"--{name}", type=int, default=default, help="default: %(default)s")
    parser.add_argument("--profile", action="store_true", help="also print where our time goes")
    options = parser.parse_args()
    common.begin(options.threads)
    import numpy as np

    tg, torch, jax = (common.load(name, options.threads) for name in ("tapegrad", "torch", "jax"))
    rng = np.random.default_rng(0)
    text = rng.integers(0, options.vocabulary, (options.batch, options.context + 1))
    tokens, labels = text[:, :-1], text[:, 1:]

    ours = Ours(tg, options, tokens, labels)
    calls: dict[str, Callable[[], Any]] = {"tapegrad": ours.step}
    worst = {"tapegrad": 0.0}
    weights = weights_of(ours.model)
    if torch:
        for who, fused in (("torch", True), ("torch, attention written out", False)):
            theirs = Theirs(torch, options, weights, tokens, labels, fused=fused)
            worst[who] = agree(ours, theirs, who)
            calls[who] = theirs.step
    if jax:
        in_jax = train_step_jax.TheirsInJax(jax, options, weights, tokens, labels, LEARNING_RATE)
        worst["jax, jitted"] = agree(ours, in_jax, "jax")
        calls["jax, jitted"] = in_jax.step
    times = common.by_turns(calls, options.rounds, pause=0.05)

    rows = [
        {
            "library": who,
            "seconds": common.median(times[who]),
            "speedup_of_tapegrad": common.ratio(times["tapegrad"], times[who]),
            "speedup_of_best": common.best_ratio(times["tapegrad"], times[who]),
            "middle_half": common.quartiles(times["tapegrad"], times[who]),
            "worst_gradient_difference": worst[who],
        }
        for who in calls
    ]
    cells = [
        (r["library"], f"{r['seconds'] * 1e3:.0f}", f"{r['speedup_of_tapegrad']:.2f}",
         "{:.2f}-{:.2f}".format(*r["middle_half"]), f"{r['speedup_of_best']:.2f}",
         f"{r['worst_gradient_difference']:.0e}")
        for r in rows
    ]  # fmt: skip
    cells += [(who, "not installed") for who, module in (("torch", torch), ("jax", jax)) if not module]
    facts = common.about(options.threads)
    parameters = sum(v.size for v in ours.model.trainable_variables)
    title = (
        f"One training step: {options.blocks} blocks, width {options.width}, context {options.context}, "
        f"batch {options.batch}, {parameters:,} parameters, Adam"
    )
    columns = ["", "ms", "tapegrad is x faster", "middle half", "by best rounds", "worst difference of a gradient"]
    common.show(title, columns, cells, facts)
    profile = Profile()
    if options.profile:
        profile.run(ours.step, options.rounds)
        lines = [(n, f"{s * 1e3:.1f}", f"{s / profile.total:.0%}", c or "") for n, s, c in profile.rows()[:40]]
        common.show("Where a step of ours goes", ["", "ms", "share", "calls"], lines, facts)
    if options.json:
        sizes = {
            name: getattr(options, name) for name in ("batch", "context", "width", "heads", "blocks", "vocabulary")
        }
        common.write("train_step", facts, rows, **sizes, profile=profile.rows() if options.profile else None)


if __name__ == "__main__":
    main()
