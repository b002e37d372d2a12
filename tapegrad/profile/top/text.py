"""Devices and processes as two tables."""

from __future__ import annotations

from typing import Any

from rich.console import Console, Group
from rich.text import Text

from tapegrad.profile.report.table import Column, Output
from tapegrad.sizes import format_bytes

STALE = 10.0
"""Seconds after which figures are called old."""
_DEVICES = [
    Column("Device"), Column("name", flexible=True), Column("temp", right=True), Column("use", right=True),
    Column("power", right=True), Column("used", right=True), Column("of", right=True),
]  # fmt: skip
_PROCESSES = [
    Column("PID", right=True), Column("program", flexible=True), Column("on"), Column("step", right=True),
    Column("holds", right=True), Column("live", right=True), Column("peak", right=True), Column("pool", right=True),
]  # fmt: skip


def view(state: dict[str, Any], console: Console) -> Group:
    """What ``state`` says (see ``command.gather``): of processes that are not tapegrad's what the driver says."""
    out = Output(console)
    ours = {process["pid"]: process for process in state["processes"]}
    devices, processes = [], []
    for gpu in state["devices"]:
        for part, name in ((gpu, f"GPU {gpu['index']}"), *((p, f"  MIG {p['index']}") for p in gpu["instances"])):
            devices.append(_device(name, part))
            for process in part["processes"]:
                figures = ours.get(process["pid"], {"program": process["name"] or "?"})
                processes.append((name.strip(), process["pid"], process["used_bytes"], figures))
    on_devices = {pid for _, pid, *_ in processes}
    processes += [("CPU", pid, process["rss_bytes"], process) for pid, process in ours.items() if pid not in on_devices]
    cpu = state["cpu"]
    devices.append(_device("CPU", {**cpu, "name": "", "used_bytes": cpu["total_bytes"] - cpu["available_bytes"]}))
    lines = [Text(out.text(note)) for note in state["notes"]]
    lines += out.lines(_DEVICES, devices)
    if processes:
        lines += [Text(), *out.lines(_PROCESSES, [_process(*process) for process in processes])]
    for pid, process in {pid: process for _, pid, _, process in processes}.items():
        lines += [Text(out.text(f"{pid} {line}")) for line in _details(process)]
    if not state["processes"]:
        lines.append(Text("no program runs under tapegrad profile"))
    return Group(*lines)


def _device(kind: str, device: dict[str, Any]) -> list[str]:
    cell = lambda key, form: "" if device.get(key) is None else form(device[key])
    power = cell("power_mw", lambda mw: f"{mw / 1000:.0f}") + cell("power_limit_mw", lambda mw: f"/{mw / 1000:.0f}")
    return [
        kind, device["name"], cell("temperature_c", "{} C".format), cell("utilization_percent", "{} %".format),
        power and f"{power} W", cell("used_bytes", format_bytes), cell("total_bytes", format_bytes),
    ]  # fmt: skip


def _process(where: str, pid: int, held: int | None, process: dict[str, Any]) -> list[str]:
    size = lambda n: "-" if n is None else format_bytes(n)
    step = process.get("step")
    return [
        str(pid), process["program"], where, "-" if step is None else str(step), size(held),
        *(size(process.get(key)) for key in ("live_bytes", "peak_bytes", "reserved_bytes")),
    ]  # fmt: skip


def _details(process: dict[str, Any]) -> list[str]:
    """Bytes by category, the largest first, and whether they are old."""
    sizes = sorted(((n, name) for name, n in process.get("categories", {}).items() if n), reverse=True)
    lines = [", ".join(f"{name} {format_bytes(n)}" for n, name in sizes)] if sizes else []
    if process.get("updated") is not None and process["age"] > STALE:
        lines.append(f"updated {process['age']:.0f} s ago")
    return lines
