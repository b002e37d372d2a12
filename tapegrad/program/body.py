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
Gradients = Callable[..., list[Tensor | None]]
"""The gradients of the sources, of the arguments, of cotangents, and of which of these are absent."""
Beside = Callable[[int], "tuple[Tensor, ...]"]
"""The tensors that a call takes beside the state, by its number."""


class Body:
    """A captured function that reads nothing but its arguments and writes nothing but its results."""

    def __init__(self, joint: Joint, lock: Any, following: Results, pulled: Gradients) -> None:
        """``lock``: held by whoever uses the arena of its programs.

        ``following`` and ``pulled``: the results, and the gradients of the sources, by the programs of a call that is
        recorded.  They serve until :meth:`use` has given it programs of its own.
        """
        self._joint, self._lock = joint, lock
        self.following, self.pulled = following, pulled

    def use(self, function: Replay | None, gradient: Replay | None) -> None:
        """Use programs of its own, as far as there are some."""
        if function is not None:
            self.following = partial(self._replayed, function)
        if gradient is not None:
            self.pulled = partial(self._pulled, gradient)

    def _pulled(
        self, replay: Replay, tensors: list[Tensor], cts: list[Tensor], absent: Collection[int] = ()
    ) -> list[Tensor | None]:
        return self._joint.connected(self._replayed(replay, [*tensors, *cts]), absent)

    def _replayed(self, replay: Replay, tensors: list[Tensor]) -> list[Any]:
        with self._lock:
            replay.run(tensors)
            return replay.results(tensors)

    def in_a_row(
        self, count: int, each: Each, beside: Beside, key: Any, tensors: list[Tensor]
    ) -> tuple[int, list[Any]]:
        """See :meth:`Function.in_a_row`: how many calls were made, and the leaves of what the last returned.

        ``key`` and ``tensors``: of the first call.
        """
        result = self._joint.forward.result
        leaves: list[Any] = []
        done = 0
        try:
            while done < count:
                # Once the form of the state comes back, it comes back each time: it depends on the program alone.
                if done == 1 and signature((nest.rebuild(result, iter(leaves)), *beside(1)), {})[0] != key:
                    break
                now = [x for x in (*leaves, *beside(done)) if type(x) is Tensor] if done else tensors
                leaves = each(self.following, now)
                done += 1
        except (RelaidError, MislaidError):  # the next call, made by itself, tells of it
            pass
        return done, leaves

    def gradients(
        self, tensors: list[Tensor], cts: Sequence[Tensor | None], each: Each, followed: Collection[int]
    ) -> list[Tensor | None] | None:
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
            gradients = each(partial(self.pulled, cts=given, absent=absent), tensors)
        except (RelaidError, MislaidError):  # the call, made by itself, tells of it
            return None
        of = dict(zip(joint.sources, gradients, strict=True))
        return [of.get(i) for i in range(len(tensors))]
