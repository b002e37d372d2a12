"""A memory snapshot as PyTorch's viewer (pytorch.org/memory_viz) and ``torch.cuda._memory_viz`` read them, as JSON."""

from __future__ import annotations

import json
import os
from collections import defaultdict
from dataclasses import dataclass, field

from tapegrad.profile.export.stacks import Stacks
from tapegrad.tracing.atomic import ExportError, write_text
from tapegrad.tracing.names import CATEGORIES
from tapegrad.tracing.run import Run
from tapegrad.tracing.timeline import events, last_categories

_BASE = 2 << 20
_LARGEST = 1 << 53
"""Browsers hold integers exactly up to here."""


@dataclass
class _Device:
    """One device: its trace, and where its allocations lie.

    A freed block serves the next allocation of its size, so blocks never overlap while they are alive.
    """

    base: int
    top: int = 0
    trace: list[dict[str, object]] = field(default_factory=list)
    sizes: dict[int, int] = field(default_factory=dict)  # of every block ever cut, by its address
    free: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    live: dict[int, int] = field(default_factory=dict)  # address -> allocation

    def allocate(self, alloc: int, size: int) -> int:
        if self.free[size]:
            address = self.free[size].pop()
        else:
            address = self.base + self.top
            self.top += size
            self.sizes[address] = size
        self.live[address] = alloc
        return address


def write(run: Run, path: str | os.PathLike[str]) -> None:
    """Write the snapshot of ``run`` to ``path``.

    Raises OSError; ExportError if the run holds more bytes than a browser can count.
    """
    write_text(path, [json.dumps(document(run), separators=(",", ":")), "\n"])


def document(run: Run) -> dict[str, object]:
    """The snapshot as an object: one segment and one trace per device."""
    a, stacks = run.allocs, Stacks(run)
    numbers = {name: i for i, name in enumerate(dict.fromkeys(a["device"]))}
    span = sum(a["bytes"])  # no device can need more
    devices = [_Device(_BASE + i * span) for i in range(max(1, len(numbers)))]
    if _BASE + span * len(devices) >= _LARGEST:
        raise ExportError("this run allocated more than 8 PiB in all: too much for a browser to count")
    last, where = last_categories(run), dict[int, int]()
    for e in events(run):
        size = a["bytes"][e.alloc]
        if not size or (e.before >= 0 and e.after >= 0):
            continue
        device = devices[numbers[a["device"][e.alloc]]]
        about = {"size": size, "stream": 0, "time_us": e.ns // 1000}
        if e.before < 0:
            where[e.alloc] = address = device.allocate(e.alloc, size)
            frames = _frames(run, stacks, e.alloc)
            device.trace.append(
                {"action": "alloc", "addr": address, **about, "frames": frames, "category": CATEGORIES[last[e.alloc]]}
            )
        else:
            address = where.pop(e.alloc)
            del device.live[address]
            device.free[size].append(address)
            device.trace += [
                {"action": action, "addr": address, **about, "frames": []}
                for action in ("free_requested", "free_completed")
            ]
    return {
        "segments": [_segment(run, stacks, i, device) for i, device in enumerate(devices) if device.top],
        "device_traces": [_trace(device) for device in devices],
    }


def _trace(device: _Device) -> list[dict[str, object]]:
    """The events of a device between the one that reserves its memory and the one that ends the trace."""
    reserved = {"action": "segment_alloc", "addr": device.base, "size": device.top, "stream": 0, "time_us": 0}
    # The viewer fails on a trace with categories of which none is "unknown".
    end = {"action": "snapshot", "addr": 0, "size": 0, "stream": 0, "frames": [], "category": "unknown"}
    time_us = device.trace[-1]["time_us"] if device.trace else 0
    return [*([reserved | {"frames": []}] if device.top else []), *device.trace, end | {"time_us": time_us}]


def _segment(run: Run, stacks: Stacks, number: int, device: _Device) -> dict[str, object]:
    """All memory of a device as one segment of blocks, as they are at the end of the run."""
    a, blocks, active, requested = run.allocs, list[dict[str, object]](), 0, 0
    for address in sorted(device.sizes):
        alloc, size = device.live.get(address, -1), device.sizes[address]
        block: dict[str, object] = {"address": address, "size": size, "requested_size": 0, "state": "inactive"}
        if alloc >= 0:
            block |= {"requested_size": a["requested"][alloc], "state": "active_allocated"}
            active += size
            requested += a["requested"][alloc]
        blocks.append(block | {"frames": _frames(run, stacks, alloc) if alloc >= 0 else []})
    return {
        "device": number, "address": device.base, "total_size": device.top, "allocated_size": active,
        "active_size": active, "requested_size": requested, "stream": 0, "segment_type": "large",
        "segment_pool_id": [0, 0], "is_expandable": False, "frames": [], "blocks": blocks,
    }  # fmt: skip


def _frames(run: Run, stacks: Stacks, alloc: int) -> list[dict[str, object]]:
    """Innermost first, below a made frame that names op, dtype, shape and holder."""
    a = run.allocs
    text = lambda column: run.text(a[column][alloc])
    what = " ".join(part for part in (text("op"), text("dtype") + text("shape")) if part) or "(unknown)"
    held = f", held by {text('holder')}" if text("holder") else ""
    inner = {"name": what + held, "filename": "tapegrad", "line": 0}
    frames = stacks.of(a["stack"][alloc], a["call"][alloc])
    return [inner, *({"name": f, "filename": file, "line": line} for file, line, f in reversed(frames))]
