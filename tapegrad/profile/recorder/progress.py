"""Output while a program is recorded: lines at some steps, or a table; and figures for ``tapegrad top``."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from tapegrad.profile.recorder.session import Session
from tapegrad.profile.report.table import Column, Output
from tapegrad.profile.report.units import ms
from tapegrad.profile.top.publish import SECONDS, Publisher
from tapegrad.sizes import format_bytes
from tapegrad.tracing.ledger import LEDGER
from tapegrad.tracing.metrics import CATEGORIES

_EVERY = 10.0
"""Seconds after which there is a line in any case."""


class Lines:
    """A line on stderr after 1, 2, 5, 10, 20, 50, ... steps, and at least every ten seconds while steps end."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._at = self._last = time.perf_counter()
        self._step = 0

    def __call__(self, session: Session) -> None:
        now, step = time.perf_counter(), session.step
        if str(step).rstrip("0") in ("1", "2", "5") or now - self._last >= _EVERY:
            each = (now - self._at) / max(1, step - self._step)
            self._say(
                f"step {step - 1}: {ms(int(each * 1e9))}, peak {format_bytes(session.measure.peak_bytes)}"
                f"{_state(session)}"
            )
            self._last = now
            self._at, self._step = now, step


def _state(session: Session) -> str:
    return "" if session.recording else " (not recorded)"


class Board:
    """What is alive by category, on a terminal, while the program runs; its own output appears above."""

    def __init__(self, session: Session, title: str) -> None:
        self._session, self._title = session, title
        console = Console(stderr=True, highlight=False)
        self._output = Output(console)
        self._live = Live(get_renderable=self._table, console=console, refresh_per_second=4, transient=True)

    def start(self) -> None:
        """Begin to show it."""
        self._live.start()

    def stop(self) -> None:
        """Remove it."""
        self._live.stop()

    def _table(self) -> RenderableType:
        by = LEDGER.by("category")
        live = sum(by.values())
        cells: list[list[str | Text]] = [
            [name, format_bytes(n), "█" * round(30 * n / max(1, live))] for name in CATEGORIES if (n := by.get(name, 0))
        ]
        peak = f"peak {format_bytes(self._session.measure.peak_bytes)}"
        cells.append([Text(text, "bold") for text in ("total", format_bytes(live), peak)])
        columns = [Column("alive now"), Column("bytes", right=True), Column("")]
        return Group(Text(f"{self._title} · step {self._session.step}"), *self._output.lines(columns, cells))


class Beat:
    """Tells ``tapegrad top`` of this process, twice a second, from a thread of its own."""

    def __init__(self, session: Session, facts: dict[str, Any]) -> None:
        self._session, self._facts, self._started = session, facts, time.time()
        self._publisher = Publisher()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="tapegrad-top", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def stop(self) -> None:
        """End, and remove the file."""
        self._over.set()
        self._thread.join()
        self._publisher.close()

    def _run(self) -> None:
        while True:
            by = LEDGER.by("category")
            live = sum(by.values())
            reserved = self._session.reserved_bytes or live
            self._publisher.update(
                {
                    "program": self._facts["program"], "started": self._started, "step": self._session.step,
                    "live_bytes": live, "peak_bytes": self._session.measure.peak_bytes, "categories": by,
                    "device": self._facts["device"]["name"], "reserved_bytes": reserved,
                }
            )  # fmt: skip
            if self._over.wait(SECONDS):
                return
