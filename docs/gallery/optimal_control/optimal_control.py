"""A crane that stops without sway, whatever its rope: optimal control through 10,000 steps in constant memory.

    python docs/gallery/optimal_control/optimal_control.py [--small] [--picture crane.svg]

A trolley carries a load by 10 m in 8 s.  The load hangs on a rope of 1 to 3 m, which nobody measured: one acceleration
is sought, as a function of time, after which loads on 200 ropes of such lengths are at rest.  ``checkpointed_loop``
makes the gradient with 50 stored states and blocks of 10 steps: what it takes does not depend on the number of steps.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np

import tapegrad as tg

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import example

SECONDS, WAY, GRAVITY = 8.0, 10.0, 9.81
SNAPSHOTS, BLOCK = 50, 10
State = tuple[Any, Any, Any, Any, Any]
"""Place and speed of the trolley, angles and angular speeds of the ropes, the knots of the acceleration."""


class Crane:
    """Loads on ropes of ``lengths`` (m), moved in ``n`` steps by accelerations given at even times."""

    def __init__(self, n: int, ropes: int) -> None:
        self.n, self.dt = n, SECONDS / n
        self.lengths = tg.linspace(1.0, 3.0, ropes, dtype="float64")
        self.still = tg.zeros(ropes, dtype="float64")
        self.steps = tg.function(self.many_steps)  # captured once, replayed from then on

    def acceleration(self, knots: Any, i: Any) -> Any:
        """Of the trolley at step ``i``: between knots a straight line."""
        at = tg.asarray(i, dtype="float64") * ((knots.size - 1) / self.n)
        left = tg.astype(tg.floor(at), "int64")
        share = at - left
        return knots[left] * (1 - share) + knots[left + 1] * share

    def one_step(self, state: State, i: Any) -> State:
        """The state of trolley and ropes one step later."""
        place, speed, angle, turning, knots = state
        a = self.acceleration(knots, i)
        turning = turning - self.dt * (GRAVITY * tg.sin(angle) + a * tg.cos(angle)) / self.lengths
        speed = speed + self.dt * a
        return place + self.dt * speed, speed, angle + self.dt * turning, turning, knots

    def many_steps(self, state: State, block: Any) -> State:
        for k in range(BLOCK):
            state = self.one_step(state, block * BLOCK + k)
        return state

    def checkpointed(self, state: State) -> State:
        return tg.checkpointed_loop(self.steps, state, self.n // BLOCK, snapshots=SNAPSHOTS)

    def plain(self, state: State) -> State:
        """The same with everything kept."""
        for i in range(self.n):
            state = self.one_step(state, i)
        return state

    def cost(self, knots: Any, loop: Any = None) -> Any:
        """Energy of sway (J/kg, mean over ropes), with the trolley's own errors and a price of acceleration."""
        zero = tg.asarray(np.float64(0.0))
        start = (zero, zero, self.still, self.still, knots)
        place, speed, angle, turning, _ = (loop or self.checkpointed)(start)
        sway = tg.mean(0.5 * (self.lengths * turning) ** 2 + GRAVITY * self.lengths * (1 - tg.cos(angle)))
        return sway + 100.0 * (place - WAY) ** 2 + 100.0 * speed**2 + 1e-4 * tg.mean(knots**2)


def smooth_move(knots: int) -> Any:
    """The usual move: accelerate along a sine, then brake along it."""
    t = np.linspace(0.0, 1.0, knots)
    return 2 * np.pi * WAY / SECONDS**2 * np.sin(2 * np.pi * t)


def peak_of_gradient(crane: Crane, knots: Any, loop: Any = None) -> tuple[int, Any]:
    """The most bytes that a value and its gradient take once steps are captured, and the gradient."""
    gradient_of = tg.value_and_grad(lambda k: crane.cost(k, loop))
    gradient_of(knots)
    with tg.measure() as m:
        before = m.live_bytes
        _, gradient = gradient_of(knots)
    return m.peak_bytes - before, gradient.numpy(copy=True)


def sway_by_scipy(knots: Any, lengths: Any) -> Any:
    """The energy of sway (J/kg) for each length by another method and another library."""
    from scipy.integrate import solve_ivp

    times = np.linspace(0.0, SECONDS, knots.size)

    def rates(t: float, y: Any) -> Any:
        angle, turning = y.reshape(2, -1)
        a = np.interp(t, times, knots)
        return np.concatenate([turning, -(GRAVITY * np.sin(angle) + a * np.cos(angle)) / lengths])

    start = np.zeros(2 * lengths.size)
    angle, turning = solve_ivp(rates, (0, SECONDS), start, "DOP853", rtol=1e-9, atol=1e-9).y[:, -1].reshape(2, -1)
    return 0.5 * (lengths * turning) ** 2 + GRAVITY * lengths * (1 - np.cos(angle))


def main() -> None:
    options = example.parser(__doc__).parse_args()
    n, ropes, knots, iterations = (1_000, 20, 17, 5) if options.small else (10_000, 200, 33, 40)
    crane, usual = Crane(n, ropes), smooth_move(knots)

    peak, _ = peak_of_gradient(crane, usual)
    fewer, _ = peak_of_gradient(Crane(n // 2, ropes), usual)
    short = Crane(n // 10, ropes)
    plain, kept = peak_of_gradient(short, usual, short.plain)
    print(f"a gradient through {n} steps: peak {example.mib(peak)}; through {n // 2}: {example.mib(fewer)}")
    print(f"a plain tape takes {example.mib(plain)} for {short.n} steps, so about {example.mib(plain * 10)} for {n}")
    example.check_memory(f"{n} steps take no more than {n // 2} do, and 5 %", peak, 1.05 * fewer)
    _, eager = peak_of_gradient(short, usual, lambda s: tg.checkpointed_loop(short.one_step, s, short.n))
    example.check(np.array_equal(eager, kept), "the loop's gradient has the bits of the plain tape's")
    _, captured = peak_of_gradient(short, usual)
    difference = np.abs(captured - kept).max() / np.abs(kept).max()
    example.check(difference < 1e-12, "captured, it differs by rounding: contributions of a block are added first")

    before_cost = crane.cost(tg.asarray(usual)).item()
    bar = example.steps("iterations", iterations)
    found = tg.optim.minimize(
        crane.cost, usual, method="L-BFGS-B", options={"maxiter": iterations}, callback=lambda _: next(bar, None)
    )
    bar.close()
    lengths, best = crane.lengths.numpy(), found.x.numpy()
    before, after = sway_by_scipy(usual, lengths), sway_by_scipy(best, lengths)
    print(f"cost {before_cost:.4g} -> {found.fun:.4g} in {found.nit} iterations, {found.nfev} gradients")
    print(f"sway that is left, J/kg, worst rope: {before.max():.3g} -> {after.max():.3g} (by SciPy's DOP853)")
    example.check(after.max() < before.max() / (3 if options.small else 20), "the worst sway is a fraction of before")
    if options.picture:
        draw(options.picture, usual, best, lengths, before, after)


def draw(path: str, usual: Any, best: Any, lengths: Any, before: Any, after: Any) -> None:
    figure, (left, right) = example.panels(2)
    times = np.linspace(0.0, SECONDS, usual.size)
    left.plot(times, usual, label="usual move")
    left.plot(times, best, label="optimal")
    left.set(xlabel="time, s", ylabel="acceleration of the trolley, m/s²")
    right.semilogy(lengths, before, label="usual move")
    right.semilogy(lengths, after, label="optimal")
    right.set(xlabel="rope, m", ylabel="sway that is left, J/kg")
    right.legend()
    example.save(figure, path)


if __name__ == "__main__":
    main()
