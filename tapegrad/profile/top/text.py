"""Devices and processes as lines for a terminal of any width, with characters that it has."""

from __future__ import annotations

from typing import Any

from rich.cells import cell_len

from tapegrad.profile.report.escape import clip, drawn_bar, shown
from tapegrad.profile.report.units import unit_of
from tapegrad.sizes import format_bytes

SHORT = {
    "activation": "act", "optimizer": "opt", "parameter": "par", "temporary": "tmp", "gradient": "grad",
    "rematerialized": "remade", "communication": "comm", "input": "in", "user": "user", "unattributed": "other",
}  # fmt: skip
STALE = 10.0
"""Seconds after which figures are called old."""
_BAR = 15


def lines(state: dict[str, Any], width: int, ascii_only: bool) -> list[str]:
    """What ``state`` says (see ``command.gather``) in lines that are no wider than ``width``."""
    ours = {one["pid"]: one for one in state["processes"]}
    draw = _Drawing(width, ascii_only)
    told: set[int] = set()
    for note in state["notes"]:
        draw.put(*draw.clean(note, 500).split(), gap=" ")
    for gpu in state["devices"]:
        draw.put(*_heading(gpu, draw))
        told |= draw.processes(gpu["processes"], ours)
        for part in gpu["instances"]:
            draw.put(f"  MIG {part['index']}  {draw.clean(part['name'])}", _room(part, draw))
            told |= draw.processes(part["processes"], ours)
    total, available = state["cpu"]["total_bytes"], state["cpu"]["available_bytes"]
    if total is not None:
        used = None if available is None else total - available
        draw.put("CPU", _room({"used_bytes": used, "total_bytes": total}, draw))
    for pid, one in ours.items():
        if pid not in told:
            draw.process(one, None)
    if not ours:
        draw.put("  no program runs under tapegrad profile")
    return draw.lines


def _heading(gpu: dict[str, Any], draw: _Drawing) -> list[str]:
    """Name, temperature, use, power, memory of a device; what it does not say is left out."""
    parts = [f"GPU {gpu['index']}  {draw.clean(gpu['name'])}"]
    if gpu["temperature_c"] is not None:
        parts.append(f"{gpu['temperature_c']} {'C' if draw.ascii_only else '°C'}")
    if gpu["utilization_percent"] is not None:
        parts.append(f"{gpu['utilization_percent']} %")
    if gpu["power_mw"] is not None:
        limit = "" if gpu["power_limit_mw"] is None else f"/{gpu['power_limit_mw'] / 1000:.0f}"
        parts.append(f"{gpu['power_mw'] / 1000:.0f}{limit} W")
    if gpu["mig"]:
        parts.append("MIG")
    return [*parts, _room(gpu, draw)]


def _room(device: dict[str, Any], draw: _Drawing) -> str:
    used, total = device["used_bytes"], device["total_bytes"]
    if used is None or not total:
        return "" if total is None else format_bytes(total)
    unit, scale = unit_of(total)
    return f"{used / scale:.1f}/{total / scale:.1f} {unit} {draw.bar(used / total)}"


class _Drawing:
    """Collects the lines of the report."""

    def __init__(self, width: int, ascii_only: bool) -> None:
        self.width, self.ascii_only = width, ascii_only
        self.lines: list[str] = []

    def clean(self, text: str, most: int = 40) -> str:
        encoding = "ascii" if self.ascii_only else "utf-8"
        return clip(shown(text, encoding), most, "..." if self.ascii_only else "…")

    def bar(self, share: float) -> str:
        eighths = round(min(max(share, 0.0), 1.0) * _BAR * 8)
        if self.ascii_only:
            eighths = 8 * round(eighths / 8)
        return drawn_bar(eighths, self.ascii_only).ljust(_BAR, "." if self.ascii_only else "░")

    def put(self, *parts: str, indent: int = 4, gap: str = "  ") -> None:
        """Parts beside each other; those that do not fit go on in a further line."""
        line = ""
        for part in filter(None, parts):
            if line and cell_len(line) + len(gap) + cell_len(part) > self.width:
                self.lines.append(line)
                line = " " * indent + part
            else:
                line = line + gap + part if line else part
            line = clip(line, self.width, "..." if self.ascii_only else "…")
        self.lines.append(line)

    def processes(self, listed: list[dict[str, Any]], ours: dict[int, dict[str, Any]]) -> set[int]:
        """One entry for each process on a device; which of them are ours."""
        for one in listed:
            if one["pid"] in ours:
                self.process(ours[one["pid"]], one["used_bytes"])
            else:
                used = "?" if one["used_bytes"] is None else format_bytes(one["used_bytes"])
                self.put(f"  PID {one['pid']:<7} {self.clean(one['name'] or '?', 24)}", "(not tapegrad)", used)
        return {one["pid"] for one in listed} & ours.keys()

    def process(self, one: dict[str, Any], on_device: int | None) -> None:
        """What a process of ours says of itself, and (in bytes) what the driver or the system says of it."""
        head = f"  PID {one['pid']:<7} {self.clean(one['program'], 24)}"
        if one["step"] is not None:
            head += f"  step {one['step']}"
        for key, label in (("live_bytes", "live"), ("peak_bytes", "peak")):
            if one[key] is not None:
                head += f"  {format_bytes(one[key])} {label}"
        parts = [head, self._split(one["categories"]), self._around(one, on_device)]
        if one["updated"] is not None and one["age"] > STALE:
            parts.append(f"said {one['age']:.0f} s ago")
        self.put(*parts, indent=6, gap=" | " if self.ascii_only else " │ ")

    def _split(self, categories: dict[str, int]) -> str:
        """Bytes by category, the largest first, in one unit."""
        sizes = sorted(((n, name) for name, n in categories.items() if n), reverse=True)
        if not sizes:
            return ""
        unit, scale = unit_of(sizes[0][0])
        return "  ".join(f"{SHORT.get(name) or self.clean(name, 12)} {n / scale:.2f}" for n, name in sizes) + f" {unit}"

    def _around(self, one: dict[str, Any], on_device: int | None) -> str:
        """What lies around the tensors: the pool, and what is outside of it."""
        reserved, parts = one["reserved_bytes"], []
        if reserved is not None:
            parts.append(f"pool {format_bytes(reserved)}")
        if reserved is not None and on_device is not None:
            parts.append(f"outside pool {format_bytes(max(on_device - reserved, 0))}")
        if on_device is None and one["rss_bytes"] is not None:
            parts.append(f"RSS {format_bytes(one['rss_bytes'])}")
        return "  ".join(parts)
