"""The report of ``tapegrad doctor`` for people."""

from __future__ import annotations

from typing import Any

import click

from tapegrad.memory.sizes import format_bytes


def text(found: dict[str, Any]) -> str:
    """The report for people: a heading and indented lines for each section."""
    lines = []
    for heading, part in found.items():
        if heading == "ok":
            continue
        lines.append(click.style(heading, bold=True))
        if isinstance(part, dict):
            width = max(map(len, part), default=0)
            lines += [f"  {name:{width}}  {_plain(value)}" for name, value in part.items()]
        else:
            lines += [f"  {line}" for line in part]
        if not part:
            lines.append("  none" if heading != "to mend" else "  nothing")
    return "\n".join(lines)


def _sized(name: str, value: Any) -> Any:
    return format_bytes(value) if name.endswith(" bytes") and value is not None else value


def _plain(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if value is None:
        return "none"
    if isinstance(value, dict):
        return ", ".join(f"{name.removesuffix(' bytes')} {_plain(_sized(name, one))}" for name, one in value.items())
    return str(value)
