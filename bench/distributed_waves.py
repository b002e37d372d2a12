"""Full-waveform inversion on several ranks: a field of sound speeds from what receivers heard.

    python bench/distributed_waves.py                      # one process
    mpiexec -n 4 python bench/distributed_waves.py         # the same program on 4

The 2-D acoustic wave equation on a grid of ranks: each has a block, and exchanges halos of one cell with its neighbours
at each step.  Steps are run again backwards (``checkpointed_loop``), halos included.  On any number of ranks the
forward run has the same bits, and the gradient is the same to rounding (borders of blocks add in another order).
"""

from __future__ import annotations

import argparse
import hashlib
from typing import Any

import numpy as np

import tapegrad as tg
from tapegrad import distributed as dist

DT2 = 0.25
"""The square of the time step over that of the cell size."""


def near_square(ranks: int) -> tuple[int, int]:
    """Rows and columns of a grid of ``ranks``."""
    rows = next(r for r in range(int(ranks**0.5), 0, -1) if ranks % r == 0)
    return rows, ranks // rows


class Survey:
    """A source in the middle of the top, receivers along a line near the bottom; this rank's block of all."""

    def __init__(self, n: int, steps: int, grid: dist.Grid) -> None:
        self.grid, self.steps, self.shape = grid, steps, (n, n)
        self.block = grid.block(self.shape)
        where = np.zeros(self.shape)
        where[n // 8, n // 2] = 1.0
        heard = np.zeros(self.shape)
        heard[3 * n // 4, :: max(1, n // 16)] = 1.0
        self.source, self.receivers = where[self.block], heard[self.block]
        t = np.arange(steps) - 10.0
        self.pulse = tg.asarray((1 - 0.04 * t * t) * np.exp(-0.02 * t * t))  # Ricker's

    def run(self, speed: Any, seen: Any) -> tuple[Any, Any]:
        """The last state of the waves, and this rank's part of the misfit with what was ``seen`` at each step."""
        zero = tg.asarray(np.zeros([s.stop - s.start for s in self.block]))

        def step(state: Any, i: int) -> Any:
            u, before, misfit = state
            v = dist.halo_exchange(u, 1, self.grid)
            around = v[2:, 1:-1] + v[:-2, 1:-1] + v[1:-1, 2:] + v[1:-1, :-2] - 4.0 * u
            after = 2.0 * u - before + DT2 * speed * around + self.pulse[i] * self.source
            return after, u, misfit + tg.sum(((after - seen[i]) * self.receivers) ** 2)

        start = (zero, zero, tg.asarray(np.float64(0.0)))
        u, _, misfit = tg.checkpointed_loop(step, start, self.steps)
        return u, misfit

    def observed(self, speed: Any) -> Any:
        """The waves of a known field of speeds, at each step."""
        zero = np.zeros([s.stop - s.start for s in self.block])
        u, before, found = tg.asarray(zero), tg.asarray(zero), []
        for i in range(self.steps):
            v = dist.halo_exchange(u, 1, self.grid)
            around = v[2:, 1:-1] + v[:-2, 1:-1] + v[1:-1, 2:] + v[1:-1, :-2] - 4.0 * u
            u, before = 2.0 * u - before + DT2 * speed * around + self.pulse[i] * self.source, u
            found.append(u)
        return tg.stack(found)


def invert(n: int, steps: int, iterations: int) -> dict[str, Any]:
    """Misfits by iteration, a digest of the forward run, the first gradient (on rank 0)."""
    group = dist.init()
    grid = dist.Grid(near_square(group.size))
    survey = Survey(n, steps, grid)
    true = np.full((n, n), 1.0)
    true[n // 2 : n // 2 + n // 6, n // 3 : n // 2] = 1.4
    seen = survey.observed(tg.asarray(true[survey.block]))
    speed = tg.Variable(np.full((n, n), 1.0)[survey.block])
    optimizer = tg.optim.Adam(0.01)
    found: dict[str, Any] = {"misfits": [], "ranks": group.size}
    for k in range(iterations):
        with tg.GradientTape() as tape:
            u, misfit = survey.run(speed.value(), seen)
        gradient = tape.gradient(misfit, speed)
        found["misfits"].append(float(dist.all_reduce(misfit)))
        if k == 0:
            whole = [dist.gather_field(x, grid) for x in (u, gradient)]
            if group.rank == 0:
                last, found["gradient"] = (np.asarray(x) for x in whole)
                found["forward"] = hashlib.sha256(np.ascontiguousarray(last).tobytes()).hexdigest()
        optimizer.apply_gradients([(gradient, speed)])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--size", type=int, default=64, help="cells along each axis (64)")
    parser.add_argument("--steps", type=int, default=200, help="time steps (200)")
    parser.add_argument("--iterations", type=int, default=8, help="steps of the optimizer (8)")
    options = parser.parse_args()
    found = invert(options.size, options.steps, options.iterations)
    if dist.world().rank == 0:
        print(f"{found['ranks']} rank(s), {options.size} x {options.size} cells, {options.steps} steps")
        print(f"forward run, digest: {found['forward'][:16]}")
        print(f"first gradient, norm: {np.linalg.norm(found['gradient']):.12g}")
        for k, misfit in enumerate(found["misfits"]):
            print(f"iteration {k}: misfit {misfit:.6g}")


if __name__ == "__main__":
    main()
