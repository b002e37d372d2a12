"""A Gaussian process whose three scales are sampled by Hamiltonian Monte Carlo, every trajectory replayed.

    python docs/gallery/gaussian_process/gaussian_process.py [--small] [--picture process.png]

Length, height and noise of a process are unknown.  Their posterior is sampled with gradients through a Cholesky
factorization.  A trajectory (momenta, ten leapfrog steps, acceptance) is one captured function (``tg.function``).
Means and deviations of the samples are compared with those of a sum over a fine grid, which needs no gradients.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np

import tapegrad as tg

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import example

TRUE = np.log([0.15, 1.0, 0.2])
"""Logarithms of length, height and noise by which the data were drawn."""
LEAPS, PACE = 10, 0.1


def covariance(lib: Any, scales: Any, squares: Any) -> Any:
    """Of the data, (n, n), by logarithms of the scales; ``squares``: of the distances."""
    length, height, noise = (lib.exp(scales[k]) for k in range(3))
    return height**2 * lib.exp(-squares / (2 * length**2)) + noise**2 * lib.eye(len(squares), dtype=squares.dtype)


class Posterior:
    """Of the logarithms of the scales, each with a normal prior of mean -1 and deviation 1."""

    def __init__(self, n: int) -> None:
        draw = np.random.default_rng(0)
        self.x = np.sort(draw.random(n))
        self.squares = (self.x[:, None] - self.x) ** 2
        self.y = np.linalg.cholesky(covariance(np, TRUE, self.squares)) @ draw.standard_normal(n)
        self._squares, self._y = tg.asarray(self.squares), tg.asarray(self.y)

    def log_density(self, scales: Any) -> Any:
        """Up to a constant; (3,) -> ()"""
        factor = tg.linalg.cholesky(covariance(tg, scales, self._squares))
        white = tg.linalg.solve_triangular(factor, self._y, lower=True)
        fit = -0.5 * tg.sum(white**2) - tg.sum(tg.log(tg.linalg.diagonal(factor)))
        return fit - 0.5 * tg.sum((scales + 1) ** 2)

    def trajectory(self, scales: Any) -> Any:
        """Where the chain goes from ``scales``, and whether it moves."""
        gradient = tg.grad(self.log_density)
        momenta = tg.random.normal((3,), dtype="float64")
        place, speed = scales, momenta + 0.5 * PACE * gradient(scales)
        for leap in range(LEAPS):
            place = place + PACE * speed
            speed = speed + (PACE if leap < LEAPS - 1 else 0.5 * PACE) * gradient(place)
        energy = lambda place, speed: 0.5 * tg.sum(speed**2) - self.log_density(place)
        drop = energy(scales, momenta) - energy(place, speed)
        moves = tg.log(tg.random.uniform((), dtype="float64")) < drop
        return tg.where(moves, place, scales), moves

    def by_grid(self, points: int, center: Any, spread: Any) -> tuple[Any, Any]:
        """Means and deviations by a sum over four deviations to each side of ``center``, in NumPy."""
        import scipy.linalg

        axes = [np.linspace(c - 4 * s, c + 4 * s, points) for c, s in zip(center, spread, strict=True)]
        nodes = np.stack(np.meshgrid(*axes, indexing="ij"), axis=-1).reshape(-1, 3)
        logs = np.empty(len(nodes))
        for i in example.steps("grid", len(nodes)):
            factor = np.linalg.cholesky(covariance(np, nodes[i], self.squares))
            white = scipy.linalg.solve_triangular(factor, self.y, lower=True)
            logs[i] = -0.5 * white @ white - np.log(np.diag(factor)).sum() - 0.5 * ((nodes[i] + 1) ** 2).sum()
        weights = np.exp(logs - logs.max())
        weights /= weights.sum()
        mean = weights @ nodes
        return mean, np.sqrt(weights @ (nodes - mean) ** 2)


def main() -> None:
    options = example.parser(__doc__).parse_args()
    n, samples, burn_in, points = (20, 600, 50, 9) if options.small else (100, 4000, 200, 21)
    posterior = Posterior(n)
    tg.random.seed(1)
    scales, chain, moved = tg.asarray(TRUE), [], 0

    with tg.measure() as m:
        before = m.live_bytes
        tg.value_and_grad(posterior.log_density)(scales)
    one_gradient = m.peak_bytes - before
    trajectory = tg.function(posterior.trajectory)
    for _ in example.steps("samples", samples + burn_in):
        scales, moves = trajectory(scales)
        chain.append(scales.numpy(copy=True))
        moved += bool(moves)
    chain = np.array(chain[burn_in:])
    plan = trajectory.plan(scales)
    print(f"{samples} samples, {moved / (samples + burn_in):.0%} accepted, {trajectory.stats.replays} replays")
    what = f"{LEAPS + 1} gradients in a trajectory; one takes {example.mib(one_gradient)}"
    example.check_memory(what, plan.arena_bytes, 1.5 * one_gradient)

    mean, deviation = posterior.by_grid(points, chain.mean(axis=0), chain.std(axis=0))
    errors = deviation * np.sqrt(correlation_time(chain) / samples)
    for k, name in enumerate(("length", "height", "noise")):
        drawn = f"{chain[:, k].mean():.3f} ± {chain[:, k].std():.3f}, whose mean errs by {errors[k]:.3f}"
        print(f"log {name}: {drawn}; by the grid {mean[k]:.3f} ± {deviation[k]:.3f}; the data's {TRUE[k]:.3f}")
    example.check((np.abs(chain.mean(axis=0) - mean) < 4 * errors).all(), "means of the samples are the posterior's")
    example.check((np.abs(chain.std(axis=0) / deviation - 1) < 0.2).all(), "so are the deviations, to a fifth")
    example.check((np.abs(TRUE - mean) < 3 * deviation).all(), "the true scales are within three deviations")
    if options.picture:
        draw(options.picture, posterior, chain)


def correlation_time(chain: Any) -> Any:
    """How many samples count as one, by batch means of sqrt(n) samples; at least 1."""
    size = int(len(chain) ** 0.5)
    batches = chain[: len(chain) // size * size].reshape(-1, size, chain.shape[1]).mean(axis=1)
    return np.maximum(1.0, size * batches.var(axis=0) / chain.var(axis=0))


def draw(path: str, posterior: Posterior, chain: Any) -> None:
    figure, (left, right) = example.panels(2)
    at = np.linspace(0, 1, 200)
    for scales in chain[:: len(chain) // 20]:
        length, height, _ = np.exp(scales)
        cross = height**2 * np.exp(-((at[:, None] - posterior.x) ** 2) / (2 * length**2))
        mean = cross @ np.linalg.solve(covariance(np, scales, posterior.squares), posterior.y)
        left.plot(at, mean, color="C0", alpha=0.3, linewidth=0.8)
    left.plot(posterior.x, posterior.y, ".", color="C1", markersize=4)
    left.set(xlabel="x", ylabel="data, and means of 20 samples")
    some = chain[:: max(1, len(chain) // 400)]
    right.plot(np.exp(some[:, 0]), np.exp(some[:, 1]), ".", markersize=3, alpha=0.5)
    right.plot(*np.exp(TRUE[:2]), "k+", markersize=10)
    right.set(xlabel="length", ylabel="height")
    example.save(figure, path)


if __name__ == "__main__":
    main()
