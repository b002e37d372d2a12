"""Runs made by hand in which, as in recorded ones, what the walk back makes belongs to the call it differentiates."""

from __future__ import annotations

import random

from tapegrad.profile.plan.problem import Problem
from tapegrad.tracing.run import Run
from tests.profile.made_runs import MIB, Builder


def training(steps: int = 3, blocks: int = 4, name: str = "Block", file: str = "model.py", batch: int = 16) -> Run:
    """``blocks`` calls of a layer, each keeping two arrays of 1 MiB besides its result, and making a temporary."""
    b = Builder()
    weights = [b.alloc(MIB // 4, "parameter", "leaf", (file, 5, "__init__"), shape="(256, 256)") for _ in range(blocks)]
    assert weights
    big, half = (f"({batch}, {MIB // n // batch})" for n in (4, 8))
    for _ in range(steps):
        b.begin_step()
        b.phase, kept = "forward", []
        x, y = (b.alloc(MIB // 2, "input", "leaf", (file, 90, "main"), shape=half) for _ in range(2))
        for _ in range(blocks):
            call, mine = b.enter("layer", name, file, 40), []
            for line in (42, 43, 44):
                mine.append(b.alloc(MIB, "activation", "matmul", (file, line, name), shape=big))
                b.free(b.alloc(MIB // 2, "temporary", "softmax", (file, line, name), shape=big))
            b.run.allocs["last_forward_seq"][mine[0]] = b.run.allocs["last_forward_seq"][mine[1]] = b.seq
            b.leave()
            kept.append((call, mine))
        for (_, mine), (following, _) in zip(kept, kept[1:]):  # which reads the results
            b.run.allocs["last_forward_seq"][mine[2]] = b.run.ops["seq"][b.run.ops["call"].index(following)]
        b.phase = "backward"
        ct, grads = b.alloc(MIB, "temporary", "ones", (file, 95, "main"), shape=big), []
        for call, mine in reversed(kept):
            b.call = call
            for made in reversed(mine):
                new = b.alloc(MIB, "temporary", "matmul", (file, 42, name), shape=big)
                b.free(ct, made)
                ct = new
            b.free(b.alloc(MIB // 4, "temporary", "matmul", (file, 42, name), shape="(256, 256)"))
            grads.append(b.alloc(MIB // 4, "gradient", "matmul", (file, 96, "main"), shape="(256, 256)"))
        b.call = -1
        b.free(ct, x, y)
        b.phase = "optimizer"
        b.free(*grads)
        b.phase = "other"
        b.end_step()
    return b.finish()


def nested(seed: int, blocks: int = 3, parts: int = 2) -> Problem:
    """Blocks of calls of random sizes and times, within each other."""
    chance, b = random.Random(seed), Builder()
    for _ in range(2):
        b.begin_step()
        b.phase, kept = "forward", []
        x = b.alloc(MIB, "input", "leaf")
        for _ in range(blocks):
            b.enter("layer", "Block", line=10)
            for _ in range(parts):
                call = b.enter("function", "part", line=20)
                mine = [b.alloc(512 * chance.randint(100, 4000), "activation", "matmul") for _ in range(2)]
                for _ in range(chance.randint(0, 5)):
                    b.alloc(512, "temporary", "exp")
                out = b.alloc(MIB, "activation", "matmul")
                b.leave()
                kept.append((call, [*mine, out]))
            b.leave()
        b.phase = "backward"
        for call, values in reversed(kept):
            b.call = call
            b.free(*reversed(values), b.alloc(512 * chance.randint(1, 500), "temporary", "matmul"))
            b.call = -1
        b.free(x)
        b.end_step()
    return Problem(b.finish())
