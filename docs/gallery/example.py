"""What the scripts of the gallery share: their command line, a bar, the lines that state what was checked, pictures."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Iterator
from typing import Any


def parser(doc: str | None) -> argparse.ArgumentParser:
    """A command line with what every script takes; ``doc`` is the module's docstring, shown by --help."""
    found = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    found.add_argument("--small", action="store_true", help="sizes that take seconds, for tests")
    found.add_argument("--picture", metavar="FILE", help="draw the result (.svg or .png; needs matplotlib)")
    return found


def steps(what: str, n: int) -> Iterator[int]:
    """``range(n)`` with a bar and the time left on a terminal, on stderr; elsewhere nothing is shown."""
    from rich.console import Console
    from rich.progress import track

    yield from track(range(n), what, console=Console(stderr=True), disable=not sys.stderr.isatty(), transient=True)


def check(holds: object, what: str) -> None:
    """Print what holds.  Ends the script with exit code 1 where it does not."""
    if not holds:
        sys.exit(f"WRONG: {what}")
    print(f"checked: {what}")


def check_memory(what: str, peak: int, limit: float) -> None:
    """The same of bytes: a line that a test reads again."""
    check(0 < peak <= limit, f"memory: {peak} bytes of {int(limit)}: {what}")


def mib(nbytes: float) -> str:
    return f"{nbytes / 2**20:.2f} MiB"


def panels(columns: int, rows: int = 1, height: float = 3.2) -> tuple[Any, Any]:
    """A figure and its axes, drawn without a display."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    pyplot.rcParams.update({
        "font.size": 9, "axes.spines.top": False, "axes.spines.right": False, "svg.fonttype": "none",
        "svg.hashsalt": "tapegrad",
    })  # fmt: skip
    return pyplot.subplots(rows, columns, figsize=(4.0 * columns, height * rows), layout="constrained")


def save(figure: Any, path: str, axes: Iterable[Any] = ()) -> None:
    """Write the picture; ``axes`` that show images get no ticks.  The same picture gives the same bytes."""
    for ax in axes:
        ax.set_xticks([])
        ax.set_yticks([])
    figure.savefig(path, dpi=80, metadata={"Date": None} if path.endswith(".svg") else {"Software": None})
    print(f"written: {path}")
