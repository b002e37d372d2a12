"""speedscope: what was alive at the peak, and at the peak of each step, as flame graphs of bytes."""

from __future__ import annotations

import json
import os
from collections import Counter

from tapegrad.profile.export.stacks import Frame, Stacks
from tapegrad.tracing.atomic import write_text
from tapegrad.tracing.names import CATEGORIES
from tapegrad.tracing.run import Run
from tapegrad.tracing.timeline import events

SCHEMA = "https://www.speedscope.app/file-format-schema.json"
Stack = tuple[int, ...]


def write(run: Run, path: str | os.PathLike[str], seq: int | None = None) -> None:
    """Write the stacks of what was alive to ``path``; ``seq``: a moment to show first.  Raises OSError."""
    write_text(path, [json.dumps(document(run, seq)), "\n"])


def document(run: Run, seq: int | None = None) -> dict[str, object]:
    """The file as an object: one profile per moment, one sample per stack, weighed in bytes."""
    moments = [("alive at the peak", run.peak["seq"])]
    moments += [(f"alive at the peak of step {i}", at) for i, at in enumerate(run.steps["peak_seq"])]
    if seq is not None and seq != run.peak["seq"]:
        moments.insert(0, (f"alive at seq {seq}", seq))
    frames: dict[tuple[Frame, str], int] = {}
    samples = _samples(run, {at for _, at in moments}, frames)
    return {
        "$schema": SCHEMA,
        "name": run.meta["program"],
        "exporter": f"tapegrad {run.meta['tapegrad']}",
        "activeProfileIndex": 0,
        "shared": {"frames": [_frame(frame, suffix) for frame, suffix in frames]},
        "profiles": [_profile(name, samples[at]) for name, at in moments],
    }


def _profile(name: str, stacks: Counter[Stack]) -> dict[str, object]:
    largest = sorted(stacks.items(), key=lambda pair: (-pair[1], pair[0]))
    return {
        "type": "sampled", "name": name, "unit": "bytes", "startValue": 0, "endValue": sum(stacks.values()),
        "samples": [list(stack) for stack, _ in largest], "weights": [n for _, n in largest],
    }  # fmt: skip


def _frame(frame: Frame, leaf: str) -> dict[str, object]:
    file, line, function = frame
    if leaf:
        return {"name": leaf}
    entry: dict[str, object] = {"name": function or "(unknown)"}
    if file:
        entry |= {"file": file} | ({"line": line} if line > 0 else {})
    return entry


def _samples(run: Run, moments: set[int], frames: dict[tuple[Frame, str], int]) -> dict[int, Counter[Stack]]:
    """By moment the bytes of each stack: calls, then what was done, then what the bytes served as."""
    a, stacks, live = run.allocs, Stacks(run), dict[int, int]()
    known: dict[tuple[int, ...], Stack] = {}
    number = lambda frame, leaf="": frames.setdefault((frame, leaf), len(frames))

    def stack_of(i: int, category: int) -> Stack:
        key = (a["stack"][i], a["call"][i], a["op"][i], category)
        if key not in known:
            leaves = [run.text(a["op"][i]) or "(unknown)", CATEGORIES[category]]
            known[key] = (
                *(number(frame) for frame in stacks.of(key[0], key[1])),
                *(number(("", 0, ""), leaf) for leaf in leaves),
            )
        return known[key]

    def snapshot() -> Counter[Stack]:
        sizes: Counter[Stack] = Counter()
        for i, category in live.items():
            sizes[stack_of(i, category)] += a["bytes"][i]
        return sizes

    samples, pending = {}, sorted(moments, reverse=True)
    for e in events(run):
        while pending and pending[-1] < e.seq:
            samples[pending.pop()] = snapshot()
        if e.after < 0:
            live.pop(e.alloc, None)
        else:
            live[e.alloc] = e.after
    return samples | {at: snapshot() for at in pending}
