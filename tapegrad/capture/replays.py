"""The replays of one signature on a tape: forward and backward, and the additional programs for loops.

A loop has the function alone, which carries nothing to a backward, and the gradient, in which forward and backward are
one, so that only values that the gradient reads are computed, and none is carried.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import suppress
from math import inf
from typing import Any

from tapegrad.capture.derivative import Joint
from tapegrad.capture.graphs import replay_of
from tapegrad.capture.memory import Arena, OversizeError, alignment
from tapegrad.capture.program import Kind
from tapegrad.capture.replay import Replay
from tapegrad.core import locks
from tapegrad.core.storage import METER
from tapegrad.tensor import Tensor, alias

_MOST_GROWTH = 1.5
"""How much larger than the backward's an arena may be, so that loops have the gradient as one program."""


class Replays:
    """Forward and backward, bound to memory; the backward shares its arena with the additional programs for loops."""

    def __init__(self, joint: Joint) -> None:
        self.joint = joint
        self._lock = locks.lock()
        self.bind()

    def bind(self) -> None:
        """Bind forward and backward."""
        self._arena = Arena()
        self.forward = replay_of(self.joint.forward)
        self._backward = replay_of(self.joint.backward, shared=self._arena)
        self._function: Replay | None = None
        self._gradient: Replay | None = None

    def unbind(self) -> None:
        """Free the arenas, until :meth:`bind`."""
        del self._arena, self.forward, self._backward, self._function, self._gradient

    def extend(self) -> None:
        """Bind the function alone and the gradient, unless they take too much memory; on a GPU, neither.

        The arena may grow by a half for the gradient.
        """
        whole, device = self.joint.whole, self.joint.forward.device
        if device.lazy:
            return
        align = alignment(device)
        with self._lock:
            try:
                self._gradient = replay_of(whole.gradient(align), shared=self._arena)
            except OversizeError as e:
                if e.nbytes <= _MOST_GROWTH * self._arena.nbytes:
                    larger = Arena()
                    self._gradient = replay_of(whole.gradient(align), shared=larger)
                    self._backward = replay_of(self.joint.backward, shared=larger)
                    self._arena = larger
            with suppress(OversizeError):
                self._function = replay_of(whole.function(align), shared=self._arena)

    def shrink(self) -> None:
        """Drop the function alone and the gradient."""
        self._function = self._gradient = None

    def run(self, tensors: list[Tensor], kept: bool = True) -> tuple[list[Any], list[Tensor]]:
        """Return the leaves of the result, and if the call is ``kept`` the values that the backward program reads."""
        joint = self.joint
        self.forward.run(tensors)
        results = self.forward.results(tensors, None if kept else joint.count)
        if not kept:
            return results, []
        leaves, made = results[: joint.count], iter(results[joint.count :])
        carried: list[Tensor] = []
        for kind, source in joint.carried:
            if kind is Kind.ARGUMENT:
                carried.append(tensors[source])
            elif kind is Kind.MADE and source is not None:
                carried.append(leaves[source])  # the record must not hold its own result, or nothing ends it
                leaves[source] = Tensor(alias(leaves[source]._buffer))
            else:
                carried.append(Tensor(source.get()) if kind is Kind.VARIABLE else next(made))
        return leaves, carried

    def pull(self, carried: list[Tensor], cts: Sequence[Tensor], absent: Collection[int] = ()) -> list[Tensor | None]:
        """Return gradients of the sources; None where they depend on ``absent`` cotangents alone."""
        if METER.limit != inf:
            self.shrink()  # the arena goes; loops within a budget have no use for it
        return self.joint.connected(self._replayed(self._backward, [*carried, *cts]), absent)

    def results(self, tensors: list[Tensor]) -> list[Any]:
        """Return the leaves of the result of a call without a record."""
        function = self._function
        return self.run(tensors, kept=False)[0] if function is None else self._replayed(function, tensors)

    def gradients(
        self, tensors: list[Tensor], cts: Sequence[Tensor], absent: Collection[int] = ()
    ) -> list[Tensor | None]:
        """Return gradients of the sources, recomputing the call."""
        gradient = self._gradient
        if gradient is None:
            return self.pull(self.run(tensors)[1], cts, absent)
        return self.joint.connected(self._replayed(gradient, [*tensors, *cts]), absent)

    def _replayed(self, replay: Replay, tensors: list[Tensor]) -> list[Any]:
        """Run a replay in the shared arena, and return its results."""
        with self._lock:
            replay.run(tensors)
            return replay.results(tensors)
