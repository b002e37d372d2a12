"""Writes the report as one HTML file: template, style, scripts and the run's payload put together, nothing fetched.

The scripts are ES2020 modules, so that tests can import each by itself; in the page they stand one after the other in
one scope, without their import and export lines.
"""

from __future__ import annotations

import base64
import os
import re
from collections.abc import Mapping
from html import escape
from importlib import resources

from tapegrad.profile.viewer.payload import encode
from tapegrad.sizes import format_bytes
from tapegrad.tracing.atomic import atomic
from tapegrad.tracing.run import Run

# Each after those it imports from.
MODULES = (
    "format", "decode", "axis", "calls", "run", "layout", "raster", "dom", "store", "describe", "filter", "plot",
    "timeline", "strips", "cursor", "charts", "details", "table", "flame", "cards", "source", "lineage", "ranks",
    "arenas", "header", "keys", "main",
)  # fmt: skip
_IMPORT = re.compile(r"^import\b[^;]*;\n", re.MULTILINE)
_EXPORT = re.compile(r"^export (?=(?:async )?(?:function|const|class)\b)", re.MULTILINE)
_HIDDEN = re.compile("[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff\ufeff]")


def write(
    run: Run,
    path: str | os.PathLike[str],
    *,
    source: bool = True,
    advice: Mapping[str, object] | None = None,
    max_drawn: int = 200_000,
) -> None:
    """Write ``run`` as an HTML file to ``path``: all of it, or (on an error) nothing; for the arguments see ``page``.

    Raises OSError, and RunFileError for a run with numbers that a browser cannot count exactly.
    """
    text = page(run, source=source, advice=advice, max_drawn=max_drawn)
    with atomic(path) as part:
        part.write_bytes(text.encode())


def page(run: Run, *, source: bool = True, advice: Mapping[str, object] | None = None, max_drawn: int = 200_000) -> str:
    """The HTML report of ``run``.

    ``source``: whether the lines of source text in the run go into it.  ``advice``: what would help, as the JSON object
    of ``plan/advice.py``.  ``max_drawn``: of more allocations than this the smallest are shown as sums only.
    Raises RunFileError for a run with numbers that a browser cannot count exactly.
    """
    payload = encode(run, source=source, advice=advice, max_drawn=max_drawn)
    parts = {
        "title": escape(f"{visible(str(run.meta['program']))} · memory · tapegrad"),
        "peak": escape(format_bytes(run.peak["bytes"])),
        "style": asset("viewer.css"),
        "payload": base64.b64encode(payload).decode(),
        "script": script(),
    }
    return re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], asset("viewer.html"))


def script() -> str:
    """The modules of the page as one script."""
    texts = (_EXPORT.sub("", _IMPORT.sub("", asset(f"{name}.mjs"))) for name in MODULES)
    return '"use strict";\n(() => {\n' + "\n".join(texts) + "})();\n"


def asset(name: str) -> str:
    """The text of a file that is shipped with the viewer."""
    return resources.files("tapegrad.profile.viewer").joinpath("assets", name).read_text(encoding="utf-8")


def visible(text: str) -> str:
    """``text`` with its control characters, turns of the direction of writing and halves of characters spelt out."""
    return _HIDDEN.sub(lambda match: f"\\u{ord(match[0]):04x}", text)
