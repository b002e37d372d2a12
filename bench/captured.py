"""How much faster is a captured step (``tg.function``) than the same step run eagerly, and than PyTorch's and JAX's?

    python bench/captured.py [--only rk,transformer,wave] [--threads 1] [--rounds 9] [--steps 100] [--cells 300]
                             [--json]

* rk: 50 steps of Runge and Kutta's method of order 4 on 4 numbers, with the gradient in 4 parameters (float64): what is
  left is the cost of calling.
* transformer: loss, gradients and Adam's update of the demo's model (float32, batch 4), as in train_step.py; PyTorch
  with its fused attention.  "written" is the same, PyTorch with attention written out.  JAX writes it out in both.
* wave: the gradient in the velocities of an acoustic wave on 300 x 300 cells (``--cells``; float32), 100 steps
  (``--steps``) in a ``checkpointed_loop``, the captured function being one step of it; PyTorch keeps everything.

Results are compared: captured with eager to the bit, with PyTorch within a tolerance.  Ratios above 1 mean that the
captured step is faster; they are medians of ratios within a round.  With one thread, times are the processor's, which
a busy machine spoils less.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import common

Runs = dict[str, Callable[[], Any]]
DT = 0.1


def rk(tg: Any, torch: Any, jax: Any, np: Any, options: argparse.Namespace) -> Runs:
    start, rates = np.array([1.0, 2.0, 3.0, 4.0]), np.array([0.5, 0.4, 0.3, 0.2])

    def next_y(lib: Any, y: Any, p: Any, h: float = 0.01) -> Any:
        slope = lambda y: p * lib.sin(y) - y * y * 0.1
        k1 = slope(y)
        k2 = slope(y + h / 2 * k1)
        k3 = slope(y + h / 2 * k2)
        k4 = slope(y + h * k3)
        return y + h / 6 * (k1 + 2 * k2 + 2 * k3 + k4)

    def end(lib: Any, y: Any, p: Any) -> Any:
        for _ in range(50):
            y = next_y(lib, y, p)
        return lib.sum(y)

    def end_in_jax(p: Any, y: Any) -> Any:
        """By ``scan``: XLA takes minutes for 50 steps written out."""
        return jax.numpy.sum(jax.lax.scan(lambda y, _: (next_y(jax.numpy, y, p), None), y, None, 50)[0])

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
    runs: Runs = {"eager": lambda: ours(y, p).numpy(), "captured": lambda: captured(y, p).numpy()}
    if torch is not None:
        runs["PyTorch"] = theirs
    if jax is not None:
        jitted = jax.jit(jax.grad(end_in_jax))
        runs["JAX"] = lambda: np.asarray(jitted(rates, start))
    return runs


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


def transformer(tg: Any, torch: Any, jax: Any, np: Any, options: argparse.Namespace, fused: bool = True) -> Runs:
    import train_step
    import train_step_jax

    plain, other, captured, sizes = demo(tg, np)
    weights = train_step.weights_of(plain.model)
    runs: Runs = {"eager": plain.step, "captured": lambda: float(captured(other.tokens, other.labels))}
    data = [x.numpy(copy=True) for x in (other.tokens, other.labels)]
    if torch is not None:
        runs["PyTorch"] = train_step.Theirs(torch, sizes, weights, *data, fused=fused).step
    if jax is not None:
        runs["JAX"] = train_step_jax.TheirsInJax(jax, sizes, weights, *data, train_step.LEARNING_RATE).step
    return runs


def written(tg: Any, torch: Any, jax: Any, np: Any, options: argparse.Namespace) -> Runs:
    return transformer(tg, torch, jax, np, options, fused=False)


def wave(tg: Any, torch: Any, jax: Any, np: Any, options: argparse.Namespace) -> Runs:
    cells = options.cells
    draw = np.random.default_rng(0)
    speed = (1.5 + 0.1 * draw.random((cells, cells))).astype("float32")
    source = np.zeros((cells, cells), "float32")
    source[cells // 2, cells // 2] = 0.01

    def next_wave(padded: Any, u: Any, v: Any, c2: Any, source: Any) -> Any:
        around = padded[2:, 1:-1] + padded[:-2, 1:-1] + padded[1:-1, 2:] + padded[1:-1, :-2]
        return 2 * u - v + DT * DT * c2 * (around - 4 * u) + source

    ours_source, zero = tg.asarray(source), tg.zeros((cells, cells))

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
        u = v = torch.zeros(cells, cells)
        energy = torch.zeros(())
        for _ in range(options.steps):
            u, v = next_wave(torch.nn.functional.pad(u[None, None], (1, 1, 1, 1))[0, 0], u, v, c2, s), u
            energy = energy + (u * u).sum()
        energy.backward()
        return c.grad.numpy()

    def in_jax(c: Any) -> Any:
        jnp, c2 = jax.numpy, c * c

        def next_state(state: Any, _: None) -> Any:
            u, v = state
            w = next_wave(jnp.pad(u, 1), u, v, c2, source)
            return (w, u), jnp.sum(w * w)

        still = jnp.zeros_like(c)
        return jnp.sum(jax.lax.scan(next_state, (still, still), None, options.steps)[1])

    captured = tg.function(step)
    runs: Runs = {"eager": lambda: gradient(step), "captured": lambda: gradient(captured)}
    if torch is not None:
        runs["PyTorch"] = theirs
    if jax is not None:
        jitted = jax.jit(jax.grad(in_jax))
        runs["JAX"] = lambda: np.asarray(jitted(speed))
    return runs


PROGRAMS = {"rk": rk, "transformer": transformer, "written": written, "wave": wave}
WHO = ("captured", "eager", "PyTorch", "JAX")
CALLS = {"rk": 20}
"""Calls in a row: of one that takes less than a millisecond the first measures cold caches."""
TOLERANCE = {"rk": 1e-12, "transformer": 1e-5, "written": 1e-5, "wave": 1e-4}


def compare(name: str, runs: Runs, np: Any) -> dict[str, float]:
    """Ends the script where results differ; gives the seconds of the first two calls of each."""
    calls: list[dict[str, Any]] = []
    ready = dict.fromkeys(runs, 0.0)
    for turn in range(3):  # the captured step is run; it is compared; it is replayed
        calls.append({})
        for who, f in runs.items():
            begin = time.perf_counter()
            calls[-1][who] = f()
            if turn < 2:
                ready[who] += time.perf_counter() - begin
    first, got = calls[0], calls[-1]  # in between the peers' Adam, whose epsilon is another, goes its way
    if not np.array_equal(got["captured"], got["eager"]):
        raise SystemExit(f"{name}: captured and eager differ")
    for who in ("PyTorch", "JAX"):
        if who in first:
            common.must_agree(who, name, first[who], first["eager"], TOLERANCE[name])
    return ready


def main() -> None:
    parser = common.parser(__doc__, threads=1, rounds=9)
    parser.add_argument("--only", default=",".join(PROGRAMS), help="some of: %(default)s")
    parser.add_argument("--steps", type=int, default=100, help="of the wave")
    parser.add_argument(
        "--cells", type=int, default=300, help="of the wave, a side: with few, calling is what takes time"
    )
    options = parser.parse_args()
    common.begin(options.threads)
    tg, torch, jax = (common.load(name, options.threads) for name in ("tapegrad", "torch", "jax"))
    import numpy as np

    if jax is not None:
        jax.config.update("jax_enable_x64", True)  # for rk; the others say float32
    clock = time.process_time if options.threads == 1 else time.perf_counter
    rows = []
    for name in options.only.split(","):
        runs = PROGRAMS[name](tg, torch, jax, np, options)
        ready = compare(name, runs, np)
        times = common.by_turns(runs, options.rounds, number=CALLS.get(name, 1), clock=clock)
        rows.append({
            "program": name, "ready_seconds": ready, **{f"{who}_seconds": common.median(t) for who, t in times.items()},
            **{f"against_{who}": common.ratio(times["captured"], t) for who, t in times.items() if who != "captured"},
        })  # fmt: skip
    facts = common.about(options.threads)
    cells = [
        (r["program"], *(f"{r[f'{who}_seconds'] * 1e3:.2f}" if f"{who}_seconds" in r else "-" for who in WHO),
         *(f"{r[f'against_{who}']:.2f}" if f"against_{who}" in r else "-" for who in WHO[1:]),
         *(f"{r['ready_seconds'][who]:.2f}" if who in r["ready_seconds"] else "-" for who in ("captured", "JAX")))
        for r in rows
    ]  # fmt: skip
    columns = [
        "program", *(f"{who}, ms" for who in WHO), *(f"captured is x faster than {who}" for who in WHO[1:]),
        "first two calls captured, s", "first two calls of JAX, s",
    ]  # fmt: skip
    common.show("captured steps", columns, cells, facts)
    if options.json:
        common.write("captured", facts, rows)


if __name__ == "__main__":
    main()
