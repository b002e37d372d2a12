"""Full-waveform inversion, on one process or on several: a field of sound speeds from what receivers heard.

    python docs/gallery/full_waveform_inversion/full_waveform_inversion.py [--small] [--picture speeds.png]
    mpiexec -n 4 python docs/gallery/full_waveform_inversion/full_waveform_inversion.py

The 2-D acoustic wave equation on a grid of ranks: each has a block, and exchanges halos of one cell with its neighbours
at each step.  Steps are run again backwards (``checkpointed_loop``), halos included, and the whole gradient is captured
(``tg.function``).  On any number of ranks the forward run has the same bits, and the gradient is the same to rounding
(borders of blocks add in another order).
"""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path
from typing import Any

import numpy as np

import tapegrad as tg
from tapegrad import distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import example

DT2 = 0.25
"""The square of the time step over that of the cell size."""
SNAPSHOTS = 16


def near_square(ranks: int) -> tuple[int, int]:
    """Rows and columns of a grid of ``ranks``."""
    rows = next(r for r in range(int(ranks**0.5), 0, -1) if ranks % r == 0)
    return rows, ranks // rows


def true_field(n: int) -> Any:
    """The squares of the speeds that are sought, (n, n): two lenses in an even field."""
    y, x = np.mgrid[:n, :n] / n
    return 1.0 + 0.3 * np.exp(-(((y - 0.45) / 0.09) ** 2) - ((x - 0.38) / 0.12) ** 2) - (
        0.2 * np.exp(-(((y - 0.55) / 0.10) ** 2) - ((x - 0.66) / 0.08) ** 2)
    )  # fmt: skip


class Survey:
    """Sources along the top, receivers along the other borders; this rank's block of all."""

    def __init__(self, n: int, steps: int, shots: int, grid: dist.Grid) -> None:
        self.grid, self.steps, self.shape = grid, steps, (n, n)
        self.block = grid.block(self.shape)
        self.sources = []
        for shot in range(shots):
            where = np.zeros(self.shape)
            where[n // 8, (2 * shot + 1) * n // (2 * shots)] = 1.0
            self.sources.append(tg.asarray(where[self.block]))
        heard = np.zeros(self.shape, bool)
        heard[7 * n // 8, n // 16 :: 2] = True
        heard[n // 8 : 7 * n // 8 : 2, [n // 16, n - 1 - n // 16]] = True
        self.receivers = tuple(tg.asarray(i) for i in np.nonzero(heard[self.block]))
        t = np.arange(steps) - 12.0
        self.pulse = tg.asarray((1 - 0.04 * t * t) * np.exp(-0.02 * t * t))  # Ricker's
        self.zero = tg.zeros([s.stop - s.start for s in self.block], dtype="float64")
        self.captured = tg.function(self.gradient)  # written down once for all shots, replayed from then on

    def next_wave(self, u: Any, before: Any, squares: Any, source: Any, i: Any) -> Any:
        v = dist.halo_exchange(u, 1, self.grid)
        around = v[2:, 1:-1] + v[:-2, 1:-1] + v[1:-1, 2:] + v[1:-1, :-2] - 4.0 * u
        return 2.0 * u - before + DT2 * squares * around + self.pulse[i] * source

    def next_misfit(self, state: Any, i: Any) -> Any:
        u, before, misfit, squares, source, traces = state
        after = self.next_wave(u, before, squares, source, i)
        misfit = misfit + tg.sum((after[self.receivers] - traces[i]) ** 2)
        return after, u, misfit, squares, source, traces

    def misfit(self, squares: Any, source: Any, traces: Any, plain: bool = False) -> tuple[Any, Any]:
        """This rank's part of the misfit with the ``traces`` (steps, receivers) of one shot, and the last wave."""
        state = (self.zero, self.zero, tg.asarray(np.float64(0.0)), squares, source, traces)
        if plain:
            for i in range(self.steps):
                state = self.next_misfit(state, i)
        else:
            state = tg.checkpointed_loop(self.next_misfit, state, self.steps, snapshots=SNAPSHOTS)
        return state[2], state[0]

    def observed(self, squares: Any, shot: int) -> Any:
        """What the receivers hear in a known field, (steps, receivers)."""
        u, before, found = self.zero, self.zero, []
        for i in range(self.steps):
            u, before = self.next_wave(u, before, squares, self.sources[shot], i), u
            found.append(u[self.receivers])
        return tg.stack(found)

    def gradient(self, squares: Any, source: Any, traces: Any, plain: bool = False) -> tuple[Any, Any, Any]:
        """Of one shot: this rank's misfit, this rank's gradient, the last wave."""
        with tg.GradientTape() as tape:
            tape.watch(squares)
            misfit, wave = self.misfit(squares, source, traces, plain)
        return misfit, tape.gradient(misfit, squares), wave


def invert(survey: Survey, traces: list[Any], iterations: int) -> tuple[Any, list[float]]:
    """This rank's block of the field found from an even one, and the misfits by iteration."""
    squares = tg.Variable(np.ones(survey.zero.shape))
    optimizer = tg.optim.Adam(tg.optim.schedules.CosineDecay(0.02, decay_steps=iterations))
    misfits = []
    for _ in example.steps("iterations", iterations):
        shots = zip(survey.sources, traces, strict=True)
        found = [survey.captured(squares.value(), source, heard)[:2] for source, heard in shots]
        misfits.append(float(dist.all_reduce(sum(misfit for misfit, _ in found))))
        optimizer.apply_gradients([(sum(gradient for _, gradient in found), squares)])
    return squares.value(), misfits


def on_a_plain_tape(survey: Survey, *shot: Any) -> tuple[int, Any]:
    """The most bytes beside those that are there before, and this rank's gradient of one shot."""
    with tg.measure() as m:
        before = m.live_bytes
        _, gradient, _ = survey.gradient(*shot, plain=True)
    return m.peak_bytes - before, gradient.numpy(copy=True)


def main() -> None:
    options = example.parser(__doc__)
    for name, text in {"size": "cells along each axis", "steps": "time steps", "iterations": "steps of Adam"}.items():
        options.add_argument(f"--{name}", type=int, help=text)
    options = options.parse_args()
    n, steps, shots, iterations = (24, 64, 2, 10) if options.small else (96, 260, 4, 40)
    n, steps, iterations = options.size or n, options.steps or steps, options.iterations or iterations
    group = dist.init()
    grid = dist.Grid(near_square(group.size))
    survey = Survey(n, steps, shots, grid)
    truth = true_field(n)
    traces = [survey.observed(tg.asarray(truth[survey.block]), shot) for shot in range(shots)]

    shot = tg.asarray(np.ones(survey.zero.shape)), survey.sources[0], traces[0]
    plain, kept = on_a_plain_tape(survey, *shot)
    _, gradient, wave = survey.captured(*shot)
    difference = np.abs(gradient.numpy() - kept).max() / np.abs(kept).max()
    wave, gradient = (dist.gather_field(x, grid) for x in (wave, gradient))
    squares, misfits = invert(survey, traces, iterations)
    squares = dist.gather_field(squares, grid)
    taken = survey.captured.plan(*shot).arena_bytes
    if group.rank:
        return
    wave, gradient, squares = (np.asarray(x) for x in (wave, gradient, squares))
    print(f"{group.size} rank(s), {n} x {n} cells, {steps} steps, {shots} shots")
    print(f"forward run, digest: {hashlib.sha256(np.ascontiguousarray(wave).tobytes()).hexdigest()[:16]}")
    print(f"first gradient, norm: {np.linalg.norm(gradient):.12g}")
    for k, misfit in enumerate(misfits):
        print(f"iteration {k}: misfit {misfit:.6g}")
    example.check(difference < 1e-10, "it is the plain tape's gradient to rounding")
    if options.size or options.steps or options.iterations:
        return
    example.check(survey.captured.stats.fallbacks == {}, "every gradient was replayed")
    example.check_memory(f"a gradient, {example.mib(plain)} on a plain tape, in a fourth", taken, plain / 4)
    inside = np.s_[n // 4 : 3 * n // 4, n // 4 : 3 * n // 4]
    error = np.linalg.norm((squares - truth)[inside]) / np.linalg.norm((1 - truth)[inside])
    print(f"misfit {misfits[-1] / misfits[0]:.3g}, error of the field in the middle {error:.3g} of the first")
    example.check(misfits[-1] < misfits[0] * (0.2 if options.small else 0.02), "the misfit falls")
    example.check(error < (0.95 if options.small else 0.5), "the field comes nearer to the true one")
    if options.picture:
        draw(options.picture, truth, squares, misfits)


def draw(path: str, truth: Any, found: Any, misfits: list[float]) -> None:
    figure, axes = example.panels(3, height=3.4)
    for ax, field, title in zip(axes, (truth, found), ("true speed²", "found from an even field"), strict=False):
        image = ax.imshow(field, vmin=0.75, vmax=1.35, cmap="RdBu_r")
        ax.set_title(title)
    figure.colorbar(image, ax=list(axes[:2]), shrink=0.8)
    axes[2].semilogy(misfits)
    axes[2].set(xlabel="iteration", ylabel="misfit")
    example.save(figure, path, axes[:2])


if __name__ == "__main__":
    main()
