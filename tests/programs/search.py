"""Run many random programs: ``PYTHONPATH=tests python -m programs.search --seeds 0:10000 --jobs 2``.

Prints progress, how often each thing was tried, and, for each failure, the seed, the variant, what was wrong, and a
small program that fails in the same way.  The exit status is 1 if there was any.
"""

from __future__ import annotations

import argparse
import faulthandler
import gc
import multiprocessing
import os
import sys
import time
from collections import Counter
from multiprocessing.connection import Connection, wait
from typing import Any

from programs.draw import draw
from programs.program import Program
from programs.runs import Run
from programs.shrink import shrunk
from programs.variants import Case, compiled, settings, wrong

STUCK = 120.0
"""Seconds after which a program counts as hanging."""
OLD = 10
"""Programs after which what is still alive is no longer looked at by the collector."""


def main(arguments: list[str] | None = None) -> int:
    """The command; its exit status."""
    parser = argparse.ArgumentParser(prog="python -m programs.search", description=__doc__)
    parser.add_argument("--seeds", default="0:1000", metavar="A:B", help="programs of seeds A to below B")
    parser.add_argument("--seconds", type=float, default=0.0, help="end after so many seconds (0: after the last seed)")
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    parser.add_argument("--variants", default="", help="some of: " + ", ".join(Case.VARIANTS))
    parser.add_argument("--shrink", type=float, default=20.0, help="seconds to make a failing program small")
    parser.add_argument("--show", action="store_true", help="print the programs of the seeds, and run none")
    options = parser.parse_args(arguments)
    first, last = (int(n) for n in options.seeds.split(":"))
    variants = tuple(v.strip() for v in options.variants.split(",") if v.strip()) or Case.VARIANTS
    if options.show:
        for seed in range(first, last):
            print(draw(seed).text())
        return 0
    return _Search(range(first, last), options.seconds, options.jobs, variants, options.shrink).run()


def warm_up(count: int = 40) -> None:
    """Run what is imported at its first use, so that the collector need not look at it each time."""
    for seed in range(count):
        program = draw(seed)
        with settings(program):
            try:
                compiled(program)(__import__("tapegrad"), Run())
            except Exception:
                continue
    gc.collect()
    gc.freeze()


def failure(seed: int, variants: tuple[str, ...], seconds: float) -> tuple[Program, dict[str, Any] | None]:
    """The program of a seed, and what is wrong with it: ``variant``, ``how``, and the ``text`` of a small one."""
    program = draw(seed)
    found = wrong(program, seed, variants)
    if found is None:
        return program, None
    variant, how = found
    if variant != "no program" and _by_chance(program, seed, variant):
        return program, None
    kind = _kind(how)

    def alike(candidate: Program) -> bool:
        try:
            again = wrong(candidate, seed, (variant,))
        except Exception:
            return False
        return again is not None and again[0] == variant and _kind(again[1]) == kind

    small = shrunk(program, alike, seconds) if seconds and variant != "no program" else program
    told = wrong(small, seed, (variant,)) if small is not program else None
    return program, {"seed": seed, "variant": variant, "how": (told or found)[1], "kind": kind, "text": small.text(),
                     "lazy": small.lazy, "program": repr(small)}  # fmt: skip


def _by_chance(program: Program, seed: int, variant: str) -> bool:
    """Whether it is the numbers: rounding that decides between branches, say.  With other data it does not fail."""
    if variant not in ("plain", "differences"):
        return False
    others = [wrong(program.with_(seed=1000 + seed + k), seed, (variant,)) for k in range(3)]
    return not any(found is not None and found[0] == variant for found in others)


def _kind(how: str) -> str:
    """A failure without its numbers."""
    words = how.split("\n")[0].split(" differs")[0][:70]
    return "".join(c for c in words if not c.isdigit())


class _Search:
    """Processes, each of which runs one program at a time; one that hangs or dies is replaced."""

    def __init__(self, seeds: range, seconds: float, jobs: int, variants: tuple[str, ...], shrink: float) -> None:
        self.seeds, self.seconds, self.jobs, self.variants, self.shrink = seeds, seconds, jobs, variants, shrink
        self.context = multiprocessing.get_context("spawn")
        self.kinds: Counter[str] = Counter()
        self.failures: list[dict[str, Any]] = []
        self.done = 0

    def run(self) -> int:
        """All of it; the exit status."""
        start, said = time.monotonic(), 0.0
        waiting = iter(self.seeds)
        at: dict[Connection, tuple[Any, int | None, float]] = {}
        for _ in range(self.jobs):
            self._hire(at)
        while at:
            over = self.seconds and time.monotonic() - start > self.seconds
            for end in wait(list(at), timeout=1.0):
                worker, seed, _ = at[end]
                try:
                    told = end.recv()
                except EOFError:
                    self._lost(at, end, f"the process died with exit code {worker.exitcode}")
                    continue
                if told is not None:
                    self._told(told)
                following = None if over else next(waiting, None)
                end.send(following)
                if following is None:
                    worker.join()
                    del at[end]
                else:
                    at[end] = worker, following, time.monotonic()
            for end, (worker, seed, began) in list(at.items()):
                if seed is not None and time.monotonic() - began > STUCK + 3 * self.shrink:
                    worker.kill()
                    self._lost(at, end, "it hangs")
            if time.monotonic() - said > 20:
                said = time.monotonic()
                print(f"{self.done} programs in {said - start:.0f} s, {len(self.failures)} failures", flush=True)
        self._report(time.monotonic() - start)
        return 1 if self.failures else 0

    def _hire(self, at: dict) -> None:
        mine, its = self.context.Pipe()
        worker = self.context.Process(target=_work, args=(its, self.variants, self.shrink), daemon=True)
        worker.start()
        its.close()
        at[mine] = worker, None, time.monotonic()

    def _lost(self, at: dict, end: Connection, why: str) -> None:
        _, seed, _ = at.pop(end)
        if seed is not None:
            self.done += 1
            self._failed(
                {"seed": seed, "variant": "?", "how": why, "kind": why, "text": draw(seed).text(), "lazy": "?"}
            )
            self._hire(at)

    def _told(self, told: tuple) -> None:
        kinds, found = told
        self.done += 1
        self.kinds.update(kinds)
        if found is not None:
            self._failed(found)

    def _failed(self, found: dict[str, Any]) -> None:
        self.failures.append(found)
        alike = sum(f["variant"] == found["variant"] and f["kind"] == found["kind"] for f in self.failures)
        print(f"\nFAILED seed {found['seed']}, variant {found['variant']!r}: {found['how']}", flush=True)
        if alike <= 3:
            print(f"(small arrays lazy: {found['lazy']})\n{found['text']}", flush=True)

    def _report(self, seconds: float) -> None:
        print("\nhow many programs had each kind of thing in them:")
        for kind, count in self.kinds.most_common():
            print(f"  {count:6}  {kind}")
        print(f"{self.done} programs in {seconds:.0f} s ({self.done * 60 / max(seconds, 1e-9):.0f} a minute), "
              f"{len(self.failures)} failures")  # fmt: skip
        groups = Counter((f["variant"], f["kind"]) for f in self.failures)
        for (variant, kind), count in groups.most_common():
            seeds = [f["seed"] for f in self.failures if (f["variant"], f["kind"]) == (variant, kind)]
            print(f"  {count:5}  {variant}: {kind}  (seeds {', '.join(map(str, seeds[:8]))})")


def _work(end: Connection, variants: tuple[str, ...], shrink: float) -> None:
    """One process: seeds in, what was found out."""
    os.environ["OMP_NUM_THREADS"] = os.environ["OPENBLAS_NUM_THREADS"] = "1"
    import tapegrad as tg

    tg.set_num_threads(1)
    warm_up()
    gc.disable()
    end.send(None)
    count = 0
    while (seed := end.recv()) is not None:
        faulthandler.dump_traceback_later(STUCK, exit=False)
        program, found = failure(seed, variants, shrink)
        faulthandler.cancel_dump_traceback_later()
        count += 1
        if count % OLD == 0:
            gc.collect()
            gc.freeze()
        end.send((program.kinds(), found))


if __name__ == "__main__":
    sys.exit(main())
