"""Measures and draws what the page "Which memory tool when" shows: python docs/which_tool.py [--pictures docs/pictures]

One training step of 24 equal blocks (512 x 256, float32) under each tool: its peak in bytes, how long it takes beside
the plain step (medians of interleaved rounds), and live bytes over the step, as the profiler records them.
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import tapegrad as tg

BLOCKS, ROWS, WIDTH = 24, 512, 256
BUDGET = "9MiB"
SNAPSHOTS = 3


def _made() -> tuple[Any, Any]:
    rng = np.random.default_rng(0)
    matrix = tg.Variable(rng.standard_normal((WIDTH, WIDTH), dtype="float32") / 16)
    return matrix, tg.asarray(rng.standard_normal((ROWS, WIDTH), dtype="float32"))


MATRIX, INPUTS = _made()


def block(h: Any) -> Any:
    """One block."""
    return h + tg.tanh(tg.tanh(h @ MATRIX) @ MATRIX)


def named(h: Any) -> Any:
    """The block with a name for the value in its middle."""
    return h + tg.tanh(tg.name(tg.tanh(h @ MATRIX), "inner") @ MATRIX)


def chain(block: Callable[[Any], Any]) -> Any:
    """The loss's gradient through all blocks."""
    with tg.GradientTape() as tape:
        h = INPUTS
        for _ in range(BLOCKS):
            h = block(h)
        loss = tg.mean(h**2)
        del h
    return tape.gradient(loss, MATRIX)


def looped() -> Any:
    """The same by a checkpointed loop."""
    with tg.GradientTape() as tape:
        loss = tg.mean(tg.checkpointed_loop(block, INPUTS, BLOCKS, snapshots=SNAPSHOTS) ** 2)
    return tape.gradient(loss, MATRIX)


def within(budget: str) -> Any:
    """The same inside a budget."""
    with tg.memory_budget(budget):
        return chain(block)


_CAPTURED = tg.function(lambda: chain(block))
_FITTED = tg.function(lambda: chain(block), budget=BUDGET)

TOOLS: dict[str, Callable[[], Any]] = {
    "nothing": lambda: chain(block),
    "recompute_grad": lambda: chain(tg.recompute_grad(block)),
    "policy": lambda: chain(tg.recompute_grad(named, policy=tg.policies.save_names("inner"))),
    "checkpointed_loop": looped,
    "memory_budget": lambda: within(BUDGET),
    "function": lambda: _CAPTURED(),
    "function_budget": lambda: _FITTED(),
}
"""By the name that pictures and the table have."""
TOGETHER = {"plain": "nothing", "recompute_grad": "recompute_grad", f'memory_budget("{BUDGET}")': "memory_budget"}
"""What one picture shows together."""


def own_process(name: str, *options: str) -> str:
    """What this script prints about one tool in a process of its own: no other's arena is alive there."""
    command = [sys.executable, __file__, "--step", name, *options]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


def rows(rounds: int) -> list[tuple[str, int, float]]:
    """Of each tool: its name, its peak, and its time beside that of nothing.  Exits if some bits differ."""
    found: dict[str, list[list[str]]] = {name: [] for name in TOOLS}
    for _ in range(rounds):
        for name in TOOLS:
            found[name].append(own_process(name, "--figures").split())
    if len({bits for lines in found.values() for bits, _, _ in lines}) != 1:
        sys.exit("the tools have different bits")
    plain = [float(seconds) for _, _, seconds in found["nothing"]]
    return [
        (name, int(lines[0][1]), statistics.median(float(line[2]) / p for line, p in zip(lines, plain, strict=True)))
        for name, lines in found.items()
    ]


def figures(name: str) -> str:
    """A digest of the gradient, the peak of a step, and its time."""
    tg.set_num_threads(1)
    step, times = TOOLS[name], []
    for _ in range(3):  # a captured step replays from the third call on
        with tg.measure() as m:
            gradient = step()
    for _ in range(7):
        start = time.process_time()
        step()
        times.append(time.process_time() - start)
    digest = hashlib.sha256(gradient.numpy().tobytes()).hexdigest()
    return f"{digest} {m.peak_bytes} {statistics.median(times)}"


def live_bytes(name: str) -> list[int]:
    """What is alive after each event of the third of three steps, by the profiler."""
    with tempfile.TemporaryDirectory() as folder:
        run, table = Path(folder) / "run.sqlite", Path(folder) / "run.csv"
        command = [sys.executable, "-m", "tapegrad", "profile", "-o", str(run), __file__, "--step", name]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        subprocess.run([sys.executable, "-m", "tapegrad", "report", str(run), "--csv", str(table)], check=True,
                       stdout=subprocess.DEVNULL)  # fmt: skip
        changes: dict[int, int] = {}
        third: list[int] = []
        with table.open(newline="", encoding="utf-8") as lines:
            for line in csv.DictReader(lines):
                begin, nbytes = int(line["begin_seq"]), int(line["bytes"])
                changes[begin] = changes.get(begin, 0) + nbytes
                if line["end_seq"]:
                    changes[int(line["end_seq"])] = changes.get(int(line["end_seq"]), 0) - nbytes
                if line["step"] == "2":
                    third.append(begin)
    live, found = 0, []
    for at in sorted(changes):
        live += changes[at]
        if at >= min(third):
            found.append(live)
    return found


COLORS = ("#3f6fb5", "#c2703d", "#4c9a5f")


def drawn(series: dict[str, list[int]], top: int, width: int = 280, height: int = 90) -> str:
    """Live bytes over the step as SVG, of one tool or several; ``top``: bytes at the upper edge."""
    parts = []
    for (name, values), color in zip(series.items(), COLORS, strict=False):
        x = [i * width / max(1, len(values) - 1) for i in range(len(values))]
        y = [height - v * height / top for v in values]
        points = " ".join(f"{a:.1f},{b:.1f}" for a, b in zip(x, y, strict=True))
        at, note = height - max(values) * height / top - 3, f"{name} {max(values) / 2**20:.1f} MiB".strip()
        parts.append(
            f'<polygon points="0,{height} {points} {width},{height}" fill="{color}" fill-opacity="0.3" '
            f'stroke="{color}"/>'
            f'<text x="{width}" y="{at:.1f}" text-anchor="end" font-family="sans-serif" font-size="11" fill="{color}">'
            f"{note}</text>"
        )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 -14 {width} {height + 16}" width="{width}" '
        f'height="{height + 16}" role="img" '
        f'aria-label="live bytes over one step">{"".join(parts)}'
        f'<line x1="0" x2="{width}" y1="{height}" y2="{height}" stroke="#888"/></svg>\n'
    )


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pictures", type=Path, metavar="FOLDER", help="write NAME.svg for each tool there")
    parser.add_argument("--rounds", type=int, default=5, help="processes for each tool, in turn; 0: only pictures")
    parser.add_argument("--step", choices=TOOLS, help="only do three steps with this tool (for the profiler)")
    parser.add_argument("--figures", action="store_true", help="with --step: print what the table is made of")
    options = parser.parse_args()
    if options.step and options.figures:
        print(figures(options.step))
        return
    if options.step:
        for _ in range(3):
            TOOLS[options.step]()
            tg.memory.step()
        return
    if options.rounds:
        print("| tool | peak, MiB | time |\n|---|---|---|")
    for name, peak, ratio in rows(options.rounds) if options.rounds else ():
        print(f"| {name} | {peak / 2**20:.1f} | {ratio:.2f} |", flush=True)
    if options.pictures:
        found = {name: live_bytes(name) for name in TOOLS}
        top = max(map(max, found.values()))
        for name, values in found.items():
            (options.pictures / f"{name}.svg").write_text(drawn({"peak": values}, top), encoding="utf-8")
        three = {name: found[key] for name, key in TOGETHER.items()}
        (options.pictures / "together.svg").write_text(drawn(three, top, 560, 200), encoding="utf-8")


if __name__ == "__main__":
    main()
