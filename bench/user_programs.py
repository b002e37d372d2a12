"""Five programs of the byte-budget benchmark, written as users write them, without memory in mind.

Their state is in local names, constants are NumPy arrays, values are kept in lists, and one branches on values.  They
are workloads like those of ``budget_workloads.py``: a loss and its parameters, with data from one seed.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from budget_workloads import Draws, Sizes, Step, Workload


def neural_ode(sizes: Sizes, dtype: str) -> Step:
    """Classical Runge-Kutta steps of a field given by two dense layers; the loss reads every state."""
    import tapegrad as tg

    draw, batch, width, dt = Draws(dtype), sizes["batch"], sizes["width"], 1.0 / sizes["steps"]
    start, target = draw.normal(batch, width), draw.normal(batch, width)
    first, bias = draw.weight(width, width, fan_in=2 * width), draw.filled(width, 0.0)
    second = draw.weight(width, width, fan_in=2 * width)

    def field(y: Any) -> Any:
        return tg.tanh(y @ first + bias) @ second

    def loss() -> Any:
        y = tg.asarray(start)
        states = []
        for _ in range(sizes["steps"]):
            a = field(y)
            b = field(y + dt / 2 * a)
            c = field(y + dt / 2 * b)
            d = field(y + dt * c)
            y = y + dt / 6 * (a + 2 * b + 2 * c + d)
            states.append(y)
        return sum(tg.mean((y - target) ** 2) for y in states) / len(states)

    return Step(loss, draw.parameters)


def langevin(sizes: Sizes, dtype: str) -> Step:
    """A chain of Langevin proposals, each accepted or rejected in Python by its energy.

    The acceptance leaves out the ratio of the proposals: this measures memory, and samples no distribution.
    """
    import tapegrad as tg

    draw, shape, rate = Draws(dtype), (sizes["chains"], sizes["width"]), 0.05
    start, noise = draw.normal(*shape), draw.normal(sizes["steps"], *shape)
    levels = np.log(draw.rng.uniform(size=sizes["steps"]))
    mix = draw.weight(sizes["width"], sizes["width"], fan_in=sizes["width"])

    def energy_and_slope(x: Any) -> tuple[Any, Any]:
        h = tg.tanh(x @ mix)
        return tg.mean(x * x) / 2 + tg.mean(h), x + (1 - h * h) @ mix.T

    def loss() -> Any:
        x = tg.asarray(start)
        energy, slope = energy_and_slope(x)
        total = 0.0
        for z, level in zip(noise, levels, strict=True):
            proposal = x - rate * slope + (2 * rate) ** 0.5 * z
            energy_there, slope_there = energy_and_slope(proposal)
            if float(tg.stop_gradient(energy - energy_there)) > level:
                x, energy, slope = proposal, energy_there, slope_there
            total = total + tg.mean(x**2)
        return total / len(levels)

    return Step(loss, draw.parameters)


def unet(sizes: Sizes, dtype: str) -> Step:
    """An encoder and a decoder of two convolutions a level, with skip connections (Ronneberger et al., 2015)."""
    import tapegrad as tg

    F = tg.nn.functional
    draw, channels, levels = Draws(dtype), sizes["channels"], sizes["levels"]
    images = draw.normal(sizes["batch"], 1, sizes["pixels"], sizes["pixels"])
    target = draw.normal(*images.shape)

    def double(inputs: int, outputs: int) -> list[Any]:
        return [draw.weight(outputs, n, 3, 3, fan_in=9 * n) for n in (inputs, outputs)]

    down = [double(channels << (level - 1) if level else 1, channels << level) for level in range(levels)]
    up = [double(3 * channels << level, channels << level) for level in range(levels - 1)]
    last = draw.weight(1, channels, 1, 1, fan_in=channels)

    def convolved(x: Any, weights: list[Any]) -> Any:
        for w in weights:
            x = tg.relu(F.conv2d(x, w, padding=1))
        return x

    def loss() -> Any:
        x = tg.asarray(images)
        skips = []
        for level, weights in enumerate(down):
            x = convolved(F.max_pool2d(x, 2) if level else x, weights)
            skips.append(x)
        for level in reversed(range(levels - 1)):
            x = tg.repeat(tg.repeat(x, 2, axis=2), 2, axis=3)
            x = convolved(tg.concatenate([skips[level], x], axis=1), up[level])
        return tg.mean((F.conv2d(x, last) - target) ** 2)

    return Step(loss, draw.parameters)


def damped_wave(sizes: Sizes, dtype: str) -> Step:
    """A damped wave in its speed; no derivative rule reads the state, which is two fields in local names."""
    import tapegrad as tg

    draw, n = Draws(dtype), sizes["cells"]
    damp = np.linspace(0.98, 1.0, n * n, dtype=dtype).reshape(n, n)
    start = np.zeros((n, n), dtype)
    start[n // 2, n // 2] = 1.0
    speed = draw.variable(np.full((n, n), 0.1, dtype))

    def loss() -> Any:
        u = old = tg.asarray(start)
        for _ in range(sizes["steps"]):
            p = tg.pad(u, 1)
            around = p[2:, 1:-1] + p[:-2, 1:-1] + p[1:-1, 2:] + p[1:-1, :-2] - 4 * u
            u, old = damp * (2 * u - damp * old + speed * around), u
        return tg.sum(u**2)

    return Step(loss, draw.parameters)


def verlet(sizes: Sizes, dtype: str) -> Step:
    """Bodies that attract each other, by velocity Verlet; the loss reads their final positions."""
    import tapegrad as tg

    draw, count, dt = Draws(dtype), sizes["bodies"], 1e-3
    positions, velocities = draw.normal(count, 3), draw.normal(count, 3)
    masses = draw.variable(draw.rng.uniform(0.5, 1.5, count).astype(dtype))

    def acceleration(x: Any) -> Any:
        offsets = x[None, :, :] - x[:, None, :]
        squared = tg.sum(offsets * offsets, axis=2) + 0.01
        return tg.sum(offsets * (masses / (squared * tg.sqrt(squared)))[:, :, None], axis=1)

    def loss() -> Any:
        x, v = tg.asarray(positions), tg.asarray(velocities)
        a = acceleration(x)
        for _ in range(sizes["steps"]):
            x = x + dt * v + dt * dt / 2 * a
            b = acceleration(x)
            v, a = v + dt / 2 * (a + b), b
        return tg.sum(x**2)

    return Step(loss, draw.parameters)


PROGRAMS = [
    Workload("neural ODE", "matmul-bound", neural_ode, {
        "full": {"steps": 500, "batch": 128, "width": 64},
        "quick": {"steps": 60, "batch": 64, "width": 64},
    }),
    Workload("Langevin", "matmul-bound", langevin, {
        "full": {"steps": 500, "chains": 256, "width": 128},
        "quick": {"steps": 60, "chains": 64, "width": 128},
    }),
    Workload("U-Net", "matmul-bound", unet, {
        "full": {"levels": 4, "channels": 16, "pixels": 128, "batch": 4},
        "quick": {"levels": 3, "channels": 8, "pixels": 32, "batch": 4},
    }),
    Workload("damped wave", "elementwise-bound", damped_wave, {
        "full": {"steps": 600, "cells": 300},
        "quick": {"steps": 100, "cells": 80},
    }),
    Workload("Verlet", "elementwise-bound", verlet, {
        "full": {"steps": 1000, "bodies": 64},
        "quick": {"steps": 60, "bodies": 32},
    }),
]  # fmt: skip
"""In the order in which the benchmark shows them."""
