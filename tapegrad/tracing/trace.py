"""The trace: live bytes by part, and those of each peak, folded from the meter's events."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from tapegrad.core.storage import FREED, Storage
from tapegrad.tracing.metrics import Measure, Parts

RANK = {"temporary": 0, "user": 0, "input": 0, "communication": 1, "activation": 1, "rematerialized": 2,
        "gradient": 3, "optimizer": 4, "parameter": 5}  # fmt: skip
"""Categories by how much they tell."""


def parts_of(storages: Iterable[Storage]) -> Parts:
    """Return the bytes of ``storages`` by their keys: category, primitive and location."""
    parts: Parts = Counter()
    for storage in storages:
        parts[storage.key] += storage.nbytes
    return parts


class Trace:
    """Live bytes by key, as of the last fold, and the peaks of open measures.  The meter's lock protects it."""

    def __init__(self) -> None:
        self.parts: Parts = Counter()
        self._peaks: dict[int, int] = {}

    def restart(self, storages: list[Storage]) -> None:
        """Begin anew with the ``storages`` that are alive; peaks stay."""
        self.parts = parts_of(storages)
        for storage in storages:
            storage.traced = True

    def open(self, measure: Measure, live: int) -> None:
        """Note the peaks of ``measure`` from now on, where ``live`` bytes are alive."""
        self._peaks[id(measure)], measure.peak_parts = live, self.parts.copy()

    def resume(self, measure: Measure, peak: int) -> None:
        """Note the peaks of ``measure`` that are higher than its ``peak`` so far."""
        self._peaks[id(measure)] = peak

    def close(self, measure: Measure) -> None:
        """Note the peaks of ``measure`` no longer."""
        self._peaks.pop(id(measure), None)

    def fold(self, events: Sequence[Any], peak: int, end: int, measures: list[Measure]) -> None:
        """Add ``events``, whose ``peak`` is after the first ``end`` of them; note a new one for ``measures``."""
        if any(peak > self._peaks.get(id(m), peak) for m in measures):
            self._add(events[:end], False)
            self._note(peak, measures)
            events = events[end:]
        self._add(events, True)

    def follow(self, event: Any, measures: list[Measure]) -> None:
        """Add one event."""
        self._add([event], False)
        self._note(sum(self.parts.values()), measures)

    def relabel(self, events: Sequence[Any]) -> None:
        """Let storages serve as other categories, where no measure asks for parts."""
        for event in events:
            if type(event) is not Storage:
                self._relabel(*event)

    def _note(self, live: int, measures: list[Measure]) -> None:
        for m in measures:
            if live > self._peaks.get(id(m), live):
                self._peaks[id(m)], m.peak_parts = live, self.parts.copy()

    def _add(self, events: Sequence[Any], net: bool) -> None:
        """Add ``events``; ``net``: they are the last ones, so what is allocated and freed among them cancels."""
        parts = self.parts
        for event in events:
            if type(event) is not Storage:
                self._relabel(*event)
            elif event.traced:
                event.traced = False
                parts[event.key] -= event.nbytes
            elif not (net and event.state == FREED):
                event.traced = True
                parts[event.key] += event.nbytes

    def _relabel(self, storage: Storage, label: tuple[str, str]) -> None:
        """Let ``storage`` serve as the category of ``label``, unless the one that it serves as tells more."""
        category, before = label[0], storage.key
        if before is not None and RANK[category] > RANK[before[0]]:
            storage.key = (category, *before[1:])
            if storage.traced:
                self.parts[before] -= storage.nbytes
                self.parts[storage.key] += storage.nbytes
