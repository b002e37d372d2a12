"""How much faster is a captured step (``tg.function``) than the same step run eagerly, and than PyTorch's?

    python bench/captured.py [--only rk,transformer,wave] [--threads 1] [--rounds 9] [--steps 100] [--shares] [--json]

* rk: 50 steps of Runge and Kutta's method of order 4 on 4 numbers, with the gradient in 4 parameters (float64): what is
  left is the cost of calling.
* transformer: loss, gradients and Adam's update of the demo's model (float32, batch 4), as in train_step.py; PyTorch
  with its fused attention.  "written" is the same, PyTorch with attention written out.
* wave: the gradient in the velocities of an acoustic wave on 300 x 300 cells (float32), 100 steps (``--steps``) in a
  ``checkpointed_loop``, the captured function being one step of it; PyTorch keeps everything.

Results are compared: captured with eager to the bit, with PyTorch within a tolerance.  Ratios above 1 mean that the
captured step is faster; they are medians of ratios within a round.  With one thread, times are the processor's, which
a busy machine spoils less.  ``--shares``: where the time of a replayed transformer step goes.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import common

Runs = dict[str, Callable[[], Any]]
CELLS, DT = 300, 0.1
CLASSES = {
    "matmul": "products", "gelu": "GELU and its derivative", "layer_norm": "layer norm", "softmax": "softmax",
    "where": "the mask", "update": "Adam", "reshape": "copies of heads", "": "other elementwise works and sums",
}  # fmt: skip
"""What classes of works are called, by a part of a primitive's name; the first that fits counts."""


def rk(tg: Any, torch: Any, np: Any, options: argparse.Namespace) -> Runs:
    start, rates = np.array([1.0, 2.0, 3.0, 4.0]), np.array([0.5, 0.4, 0.3, 0.2])

    def end(lib: Any, y: Any, p: Any) -> Any:
        slope = lambda y: p * lib.sin(y) - y * y * 0.1
        h = 0.01
        for _ in range(50):
            k1 = slope(y)
            k2 = slope(y + h / 2 * k1)
            k3 = slope(y + h / 2 * k2)
            k4 = slope(y + h * k3)
            y = y + h / 6 * (k1 + 2 * k2 + 2 * k3 + k4)
        return lib.sum(y)

    def ours(y: Any, p: Any) -> Any:
        with tg.GradientTape() as tape:
            tape.watch(p)
            loss = end(tg, y, p)
        return tape.gradient(loss, p)

    def theirs() -> Any:
        p = torch.tensor(rates, requires_grad=True)
        (g,) = torch.autograd.grad(end(torch, torch.tensor(start), p), p)
        return g.numpy()

    y, p, captured = tg.asarray(start), tg.asarray(rates), tg.function(ours)
    return {"eager": lambda: ours(y, p).numpy(), "captured": lambda: captured(y, p).numpy(), "PyTorch": theirs}


def demo(tg: Any, np: Any) -> tuple[Any, Any, Callable[..., Any], argparse.Namespace]:
    """Two equal models of the demo, a function that is a step of the second, and the sizes."""
    import train_step

    sizes = argparse.Namespace(batch=4, width=128, blocks=6, heads=4, context=128, vocabulary=80)
    draw = np.random.default_rng(0)
    tokens, labels = (draw.integers(0, 80, (4, 128)) for _ in range(2))
    plain, other = (train_step.Ours(tg, sizes, tokens, labels) for _ in range(2))

    def step(tokens: Any, labels: Any) -> Any:
        loss, gradients, variables = other.demo_model.loss_and_gradients(other.model, tokens, labels)
        other.optimizer.apply(gradients, variables)
        return loss

    return plain, other, tg.function(step), sizes


def transformer(tg: Any, torch: Any, np: Any, options: argparse.Namespace, fused: bool = True) -> Runs:
    import train_step

    plain, other, captured, sizes = demo(tg, np)
    weights = {name: v.numpy(copy=True) for name, v in train_step.weights_of(plain.model).items()}
    runs: Runs = {"eager": plain.step, "captured": lambda: float(captured(other.tokens, other.labels))}
    if torch is not None:
        data = [x.numpy(copy=True) for x in (other.tokens, other.labels)]
        runs["PyTorch"] = train_step.Theirs(torch, sizes, weights, *data, fused=fused).step
    return runs


def written(tg: Any, torch: Any, np: Any, options: argparse.Namespace) -> Runs:
    return transformer(tg, torch, np, options, fused=False)


def shares(tg: Any, np: Any, rounds: int) -> None:
    """Print which part of a replay's time each class of works takes; medians over rounds."""
    from tapegrad.program.replay import Replay

    _, other, captured, _ = demo(tg, np)
    arguments = [other.tokens, other.labels]
    for _ in range(3):
        captured(*arguments)
    (entry,) = captured._entries.values()
    replay = Replay(entry.program, inside=True)
    steps = [(step.names, replay._calls(i)) for i, step in enumerate(replay.program.steps)]
    times: list[list[float]] = [[] for _ in steps]
    for _ in range(rounds):
        replay._begin(arguments)
        for taken, (_, calls) in zip(times, steps, strict=True):
            begin = time.thread_time()
            for f, args in calls:
                f(*args)
            taken.append(time.thread_time() - begin)
    whole = []
    for _ in range(rounds):
        begin = time.thread_time()
        captured(*arguments)
        whole.append(time.thread_time() - begin)
    found = dict.fromkeys(CLASSES.values(), 0.0)
    for taken, (names, _) in zip(times, steps, strict=True):
        found[next(what for part, what in CLASSES.items() if any(part in n for n in names))] += common.median(taken)
    found["calls between them, results and new values of variables"] = common.median(whole) - sum(found.values())
    for what, seconds in sorted(found.items(), key=lambda x: -x[1]):
        print(f"{seconds / common.median(whole):6.1%}  {seconds * 1e3:6.2f} ms  {what}")


def wave(tg: Any, torch: Any, np: Any, options: argparse.Namespace) -> Runs:
    draw = np.random.default_rng(0)
    speed = (1.5 + 0.1 * draw.random((CELLS, CELLS))).astype("float32")
    source = np.zeros((CELLS, CELLS), "float32")
    source[CELLS // 2, CELLS // 2] = 0.01

    def next_wave(padded: Any, u: Any, v: Any, c2: Any, source: Any) -> Any:
        around = padded[2:, 1:-1] + padded[:-2, 1:-1] + padded[1:-1, 2:] + padded[1:-1, :-2]
        return 2 * u - v + DT * DT * c2 * (around - 4 * u) + source

    ours_source, zero = tg.asarray(source), tg.zeros((CELLS, CELLS))

    def step(state: Any) -> Any:
        u, v, c2, energy = state
        w = next_wave(tg.pad(u, 1), u, v, c2, ours_source)
        return w, u, c2, energy + tg.sum(w * w)

    def gradient(step: Any) -> Any:
        c = tg.asarray(speed)
        with tg.GradientTape() as tape:
            tape.watch(c)
            energy = tg.checkpointed_loop(step, (zero, zero, c * c, tg.zeros(())), options.steps)[3]
        return tape.gradient(energy, c).numpy()

    def theirs() -> Any:
        c = torch.tensor(speed, requires_grad=True)
        c2, s = c * c, torch.tensor(source)
        u = v = torch.zeros(CELLS, CELLS)
        energy = torch.zeros(())
        for _ in range(options.steps):
            u, v = next_wave(torch.nn.functional.pad(u[None, None], (1, 1, 1, 1))[0, 0], u, v, c2, s), u
            energy = energy + (u * u).sum()
        energy.backward()
        return c.grad.numpy()

    captured = tg.function(step)
    return {"eager": lambda: gradient(step), "captured": lambda: gradient(captured), "PyTorch": theirs}


PROGRAMS = {"rk": rk, "transformer": transformer, "written": written, "wave": wave}
WHO = ("eager", "captured", "PyTorch")
TOLERANCE = {"rk": 1e-12, "transformer": 1e-5, "written": 1e-5, "wave": 1e-4}


def main() -> None:
    parser = common.parser(__doc__, threads=1, rounds=9)
    parser.add_argument("--only", default=",".join(PROGRAMS), help="some of: %(default)s")
    parser.add_argument("--steps", type=int, default=100, help="of the wave")
    parser.add_argument("--shares", action="store_true", help="of classes of works in a step of the transformer")
    options = parser.parse_args()
    common.begin(options.threads)
    tg, torch = (common.load(name, options.threads) for name in ("tapegrad", "torch"))
    import numpy as np

    if options.shares:
        return shares(tg, np, options.rounds)
    rows = []
    for name in options.only.split(","):
        runs = PROGRAMS[name](tg, torch, np, options)
        if torch is None:
            runs.pop("PyTorch", None)
        first = {who: f() for who, f in runs.items()}  # later on PyTorch's Adam, whose epsilon is another, goes its way
        for _ in range(2):  # the captured step has been run; it is compared, and replayed
            got = {who: f() for who, f in runs.items()}
        if not np.array_equal(got["captured"], got["eager"]):
            raise SystemExit(f"{name}: captured and eager differ")
        if "PyTorch" in first:
            common.must_agree("PyTorch", name, first["PyTorch"], first["eager"], TOLERANCE[name])
        times = common.by_turns(
            runs, options.rounds, clock=time.thread_time if options.threads == 1 else time.perf_counter
        )
        rows.append({
            "program": name, **{f"{who}_seconds": common.median(t) for who, t in times.items()},
            **{f"against_{who}": common.ratio(times["captured"], t) for who, t in times.items() if who != "captured"},
        })  # fmt: skip
    facts = common.about(options.threads)
    cells = [
        (r["program"], *(f"{r[f'{who}_seconds'] * 1e3:.2f}" if f"{who}_seconds" in r else "-" for who in WHO),
         *(f"{r[f'against_{who}']:.2f}" if f"against_{who}" in r else "-" for who in WHO[::2]))
        for r in rows
    ]  # fmt: skip
    columns = ["program", *(f"{who}, ms" for who in WHO), *(f"captured is x faster than {who}" for who in WHO[::2])]
    common.show("captured steps", columns, cells, facts)
    if options.json:
        common.write("captured", facts, rows)


if __name__ == "__main__":
    main()
