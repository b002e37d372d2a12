"""The body of a loop: a captured function whose calls follow each other, with no record of each.

It has two more programs: the function alone, which carries nothing to a backward, and the gradient, in which forward
and backward are one, so that only values that the gradient reads are computed, and none is carried.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any

from tapegrad import nest
from tapegrad.autodiff.zeros import zeros_of
from tapegrad.program.derivative import Joint
from tapegrad.program.replay import MislaidError, RelaidError, Replay
from tapegrad.program.signatures import signature
from tapegrad.tensor import Tensor

Each = Callable[[Callable[[list[Tensor]], Any], list[Tensor]], Any]
"""Makes a replay: ``each(f, tensors)`` is what ``f(tensors)`` returns."""
Results = Callable[[list[Tensor]], list[Any]]
"""The leaves of the result, for these arguments."""
Gradients = Callable[..., list[Tensor | None]]
"""The gradients of the sources, for arguments, cotangents, and the numbers of the cotangents that are absent."""
Extras = Callable[[int], "tuple[Tensor, ...]"]
"""The tensors that a call takes in addition to the state, by its number."""


class Body:
    """A captured function that reads nothing but its arguments and writes nothing but its results.

    ``function`` and ``gradient``: its programs.  Where one is None, methods call their argument ``fallback``, which
    runs the programs of a recorded call.  ``lock``: held by whoever uses their arena.
    """

    def __init__(self, joint: Joint, lock: Any, function: Replay | None, gradient: Replay | None) -> None:
        self._joint, self._lock = joint, lock
        self._function, self._gradient = function, gradient

    def results(self, fallback: Results, tensors: list[Tensor]) -> list[Any]:
        """Return the leaves of the result."""
        return fallback(tensors) if self._function is None else self._replayed(self._function, tensors)

    def pulled(
        self, fallback: Gradients, cts: list[Tensor], absent: Collection[int], tensors: list[Tensor]
    ) -> list[Tensor | None]:
        """Return the gradients of the sources."""
        if self._gradient is None:
            return fallback(tensors, cts, absent)
        return self._joint.connected(self._replayed(self._gradient, [*tensors, *cts]), absent)

    def _replayed(self, replay: Replay, tensors: list[Tensor]) -> list[Any]:
        with self._lock:
            replay.run(tensors)
            return replay.results(tensors)

    def in_a_row(
        self, fallback: Results, count: int, each: Each, beside: Extras, key: Any, tensors: list[Tensor]
    ) -> tuple[int, list[Any]]:
        """See :meth:`Function.in_a_row`: how many calls were made, and the leaves of what the last returned.

        ``key`` and ``tensors``: of the first call.
        """
        result, call = self._joint.forward.result, partial(self.results, fallback)
        leaves: list[Any] = []
        done = 0
        try:
            while done < count:
                # Once the form of the state comes back, it comes back each time: it depends on the program alone.
                if done == 1 and signature((nest.rebuild(result, iter(leaves)), *beside(1)), {})[0] != key:
                    break
                now = [x for x in (*leaves, *beside(done)) if type(x) is Tensor] if done else tensors
                leaves = each(call, now)
                done += 1
        except (RelaidError, MislaidError):  # the next call, made by itself, tells of it
            pass
        return done, leaves

    def gradients(
        self, fallback: Gradients, tensors: list[Tensor], cts: Sequence[Tensor | None], each: Each,
        followed: Collection[int],
    ) -> list[Tensor | None] | None:  # fmt: skip
        """See :meth:`Function.gradients`: for each of the ``tensors``."""
        joint = self._joint
        if any(b.node.index in followed for b in joint.outside):
            return None
        if len({id(t._buffer) for t in tensors}) < len(tensors):  # one argument stands for both
            return None
        weights = [cts[i] for i in joint.weighed]
        avals = joint.whole.avals[joint.whole.given :]
        given = [zeros_of(aval) if ct is None else ct for ct, aval in zip(weights, avals, strict=True)]
        absent = [i for i, ct in enumerate(weights) if ct is None]
        try:
            gradients = each(partial(self.pulled, fallback, given, absent), tensors)
        except (RelaidError, MislaidError):  # the call, made by itself, tells of it
            return None
        of = dict(zip(joint.sources, gradients, strict=True))
        return [of.get(i) for i in range(len(tensors))]
