"""A neural ordinary differential equation: the law of a spiral from noisy points, keeping the solution alone.

    python docs/gallery/neural_ode/neural_ode.py [--small] [--picture spiral.svg]

Thirty-two particles move by an unknown law dy/dt = f(y), a damped rotation whose speed depends on the radius.  A
network is trained in the place of f through an adaptive solver of order 5 (``tg.integrate.odeint``).  With
``recompute=True`` the solver's steps between two times are run again to differentiate them, so gradients are those of
the numbers computed, to the bit, while memory grows with the number of points, not of steps.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np

import tapegrad as tg

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import example

SECONDS, NOISE, TOLERANCE = 3.0, 0.02, 1e-5


def true_rate(t: float, y: Any) -> Any:
    """Of points (n, 2)."""
    radius = np.sqrt((y**2).sum(axis=1, keepdims=True))
    return (1.0 + 1.5 * np.tanh(radius)) * y @ np.array([[0.0, 1.0], [-1.0, 0.0]]) - 0.15 * y


def true_paths(start: Any, times: Any) -> Any:
    """(times, n, 2), by SciPy."""
    from scipy.integrate import solve_ivp

    flat = lambda t, y: true_rate(t, y.reshape(-1, 2)).ravel()
    solved = solve_ivp(flat, (0, times[-1]), start.ravel(), "DOP853", t_eval=times, rtol=1e-10, atol=1e-10)
    return solved.y.T.reshape(len(times), -1, 2)


def weights(width: int) -> list[Any]:
    draw = np.random.default_rng(1)
    return [
        draw.standard_normal((2, width)) / 2, np.zeros(width), draw.standard_normal((width, width)) / width**0.5,
        np.zeros(width), draw.standard_normal((width, 2)) / width, np.zeros(2),
    ]  # fmt: skip


def rate(y: Any, t: Any, *ws: Any) -> Any:
    """The network: (n, 2) -> (n, 2)."""
    h = tg.tanh(y @ ws[0] + ws[1])
    h = tg.tanh(h @ ws[2] + ws[3])
    return h @ ws[4] + ws[5]


def loss(ws: Any, points: Any, times: Any, recompute: bool = True) -> Any:
    """Mean square distance of the solution from ``points`` (times, n, 2)."""
    path = tg.integrate.odeint(rate, points[0], times, tuple(ws), rtol=TOLERANCE, atol=TOLERANCE, recompute=recompute)
    return tg.mean((path - points) ** 2)


def gradient(ws: Any, points: Any, times: Any, recompute: bool) -> tuple[int, list[Any]]:
    """The most bytes that a gradient takes, and the gradient."""
    with tg.measure() as m:
        before = m.live_bytes
        found = tg.grad(lambda ws: loss(ws, points, times, recompute))(ws)
    return m.peak_bytes - before, [g.numpy(copy=True) for g in found]


def main() -> None:
    options = example.parser(__doc__).parse_args()
    n, count, width, steps = (8, 5, 16, 30) if options.small else (32, 13, 32, 500)
    draw = np.random.default_rng(0)
    times = np.linspace(0, SECONDS, count)
    start = draw.uniform(-2, 2, (n, 2))
    seen = true_paths(start, times) + NOISE * draw.standard_normal((count, n, 2))
    points = tg.asarray(seen)

    variables = [tg.Variable(w) for w in weights(width)]
    optimizer = tg.optim.Adam(tg.optim.schedules.CosineDecay(1e-2, decay_steps=steps))
    left = []
    for _ in example.steps("steps of Adam", steps):
        with tg.GradientTape() as tape:
            left.append(loss([v.value() for v in variables], points, times))
        optimizer.apply_gradients(zip(tape.gradient(left[-1], variables), variables, strict=True))
    ws = [v.value() for v in variables]
    left = [float(x) for x in left]

    plain, kept = gradient(ws, points, times, recompute=False)
    peak, again = gradient(ws, points, times, recompute=True)
    print(f"a gradient takes {example.mib(plain)} with every step kept, {example.mib(peak)} with the solution kept")
    part, words = (2, "half") if options.small else (3, "a third")
    example.check_memory(f"the solution kept, in {words}", peak, plain / part)
    example.check(all(map(np.array_equal, kept, again)), "the gradients have the same bits")

    others = draw.uniform(-1.5, 1.5, (n, 2))  # where the network has not been trained
    found = tg.integrate.odeint(rate, tg.asarray(others), times, tuple(ws)).numpy()
    truth = true_paths(others, times)
    error = np.sqrt(np.mean((found - truth) ** 2))
    print(f"loss {left[0]:.4g} -> {left[-1]:.4g} (noise alone: {2 * NOISE**2:.2g}); new paths: error {error:.3g}")
    example.check(error < (0.8 if options.small else 0.06), "paths that were not seen are foretold")
    if options.picture:
        draw_paths(options.picture, seen, truth, found, left)


def draw_paths(path: str, seen: Any, truth: Any, found: Any, left: list[float]) -> None:
    figure, axes = example.panels(2, height=3.6)
    for k in range(6):
        axes[0].plot(*truth[:, k].T, color="C1", linewidth=3, alpha=0.4, label=None if k else "true law")
        axes[0].plot(*found[:, k].T, color="C0", label=None if k else "network")
    axes[0].plot(*seen[:, 0].T, "k.", markersize=3, label="some of the data")
    axes[0].set_aspect("equal")
    axes[0].legend()
    axes[1].semilogy(left)
    axes[1].set(xlabel="step of Adam", ylabel="mean square distance")
    example.save(figure, path)


if __name__ == "__main__":
    main()
