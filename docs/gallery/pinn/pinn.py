"""A physics-informed network: Poisson's equation on a square by second derivatives of a network, in half the memory.

    python docs/gallery/pinn/pinn.py [--small] [--picture poisson.png]

A network u(x, y), zero on the border, is trained until -(u_xx + u_yy) is the given right side at scattered points.
Second derivatives are pushed forward (``jvp`` of ``jvp``), their gradient in the weights is pulled back by a tape, and
the whole step, with Adam's update, is captured (``tg.function``) within half the bytes that it takes plainly.  The true
solution is known, and the network is compared with it.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np

import tapegrad as tg

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import example

AXES = np.eye(2)


def true_solution(x: Any) -> Any:
    """(points, 2) -> (points,)"""
    return np.sin(np.pi * x[:, 0]) * np.sin(2 * np.pi * x[:, 1])


def right_side(x: Any) -> Any:
    """What minus the Laplacian of the true solution is."""
    return 5 * np.pi**2 * true_solution(x)


def weights(width: int, layers: int, seed: int) -> list[Any]:
    """Matrices and biases by turns (Glorot and Bengio 2010)."""
    draw = np.random.default_rng(seed)
    sizes = [2, *[width] * layers, 1]
    found = []
    for inputs, outputs in zip(sizes, sizes[1:], strict=False):
        found += [draw.standard_normal((inputs, outputs)) * np.sqrt(2 / (inputs + outputs)), np.zeros(outputs)]
    return found


def network(ws: Any, x: Any) -> Any:
    """(points, 2) -> (points,); zero on the border, whatever the weights."""
    h = x
    for matrix, bias in zip(ws[:-2:2], ws[1:-2:2], strict=True):
        h = tg.tanh(h @ matrix + bias)
    border = tg.prod(x * (1 - x), axis=1)
    return border * (h @ ws[-2] + ws[-1])[:, 0]


def second_derivative(f: Any, x: Any, direction: Any) -> Any:
    """Of each of the values of ``f`` in its own point of ``x`` along ``direction``."""
    along = tg.broadcast_to(tg.asarray(direction), x.shape)
    slope = lambda x: tg.jvp(f, (x,), (along,))[1]
    return tg.jvp(slope, (x,), (along,))[1]


def loss(ws: Any, x: Any, wanted: Any) -> Any:
    """Mean square of what is left of Poisson's equation."""
    u = lambda x: network(ws, x)
    return tg.mean((second_derivative(u, x, AXES[0]) + second_derivative(u, x, AXES[1]) + wanted) ** 2)


def trainer(start: list[Any], steps: int) -> tuple[list[Any], Any]:
    """Variables, and a function that changes them in one step of Adam."""
    variables = [tg.Variable(w) for w in start]
    optimizer = tg.optim.Adam(tg.optim.schedules.CosineDecay(5e-3, decay_steps=steps))

    def step(x: Any, wanted: Any) -> Any:
        with tg.GradientTape() as tape:
            left = loss([v.value() for v in variables], x, wanted)
        optimizer.apply_gradients(zip(tape.gradient(left, variables), variables, strict=True))
        return left

    return variables, step


def main() -> None:
    options = example.parser(__doc__).parse_args()
    points, width, layers, steps = (128, 16, 2, 400) if options.small else (1024, 32, 3, 3000)
    draw = np.random.default_rng(0)
    start = weights(width, layers, seed=1)
    x = draw.random((points, 2))
    given = [tg.asarray(x), tg.asarray(right_side(x))]

    plain, plain_step = trainer(start, steps)
    captured = tg.function(plain_step)
    for _ in range(3):
        captured(*given)
    whole = captured.plan(*given)
    variables, step = trainer(start, steps)
    fitted = tg.function(step, budget=whole.peak_bytes - whole.arena_bytes // 2)
    for _ in range(3):
        fitted(*given)
    same = all(np.array_equal(a.numpy(), b.numpy()) for a, b in zip(plain, variables, strict=True))
    half = fitted.plan(*given)
    print(str(half).splitlines()[0])
    what = f"a step, {example.mib(whole.arena_bytes)} plainly, in half"
    example.check_memory(what, half.arena_bytes, whole.arena_bytes / 2)
    example.check(same, "three steps have the bits of the plain ones")

    left = [float(fitted(*given)) for _ in example.steps("steps", steps - 3)]
    example.check(fitted.stats.fallbacks == {}, "every step was replayed")
    grid = np.stack(np.meshgrid(*[np.linspace(0, 1, 65)] * 2, indexing="ij"), axis=-1).reshape(-1, 2)
    found = network([v.value() for v in variables], tg.asarray(grid)).numpy()
    error = np.abs(found - true_solution(grid)).max()
    print(f"loss {left[0]:.4g} -> {left[-1]:.4g}; worst error of u {error:.2g}, where |u| <= 1")
    example.check(error < (0.3 if options.small else 5e-3), "the network is the true solution")
    if options.picture:
        draw_fields(options.picture, grid, found, left)


def draw_fields(path: str, grid: Any, found: Any, left: list[float]) -> None:
    figure, axes = example.panels(3, height=3.2)
    for ax, field, title in zip(
        axes, (found, found - true_solution(grid)), ("u, by the network", "its error"), strict=False
    ):
        most = np.abs(field).max()
        image = ax.imshow(field.reshape(65, 65).T, origin="lower", cmap="RdBu_r", vmin=-most, vmax=most)
        figure.colorbar(image, ax=ax, shrink=0.8)
        ax.set_title(title)
    axes[2].semilogy(left)
    axes[2].set(xlabel="step", ylabel="mean square of what is left")
    example.save(figure, path, axes[:2])


if __name__ == "__main__":
    main()
