"""The body of a loop: a captured function whose calls follow each other, with no record of each."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any

from tapegrad import nest
from tapegrad.autodiff.zeros import zeros_of
from tapegrad.capture.replay import MislaidError, RelaidError
from tapegrad.capture.replays import Replays
from tapegrad.capture.signatures import signature
from tapegrad.tensor import Tensor

Each = Callable[[Callable[[list[Tensor]], Any], list[Tensor]], Any]
"""Makes a replay: ``each(f, tensors)`` is what ``f(tensors)`` returns."""
Extras = Callable[[int], "tuple[Tensor, ...]"]
"""The tensors that a call takes in addition to the state, by its number."""


class Body:
    """A captured function that reads nothing but its arguments and writes nothing but its results."""

    def __init__(self, replays: Replays) -> None:
        self._replays = replays

    def in_a_row(
        self, count: int, each: Each, beside: Extras, key: Any, tensors: list[Tensor]
    ) -> tuple[int, list[Any]]:
        """See :meth:`Function.in_a_row`: how many calls were made, and the leaves of what the last returned.

        ``key`` and ``tensors``: of the first call.
        """
        result, call = self._replays.joint.forward.result, self._replays.results
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
        self, tensors: list[Tensor], cts: Sequence[Tensor | None], each: Each, followed: Collection[int]
    ) -> list[Tensor | None] | None:
        """See :meth:`Function.gradients`: for each of the ``tensors``."""
        joint = self._replays.joint
        if any(b.node.index in followed for b in joint.outside):
            return None
        if len({id(t._buffer) for t in tensors}) < len(tensors):  # one argument stands for both
            return None
        weights = [cts[i] for i in joint.weighed]
        avals = joint.whole.avals[joint.whole.given :]
        given = [zeros_of(aval) if ct is None else ct for ct, aval in zip(weights, avals, strict=True)]
        absent = [i for i, ct in enumerate(weights) if ct is None]
        try:
            gradients = each(partial(self._replays.gradients, cts=given, absent=absent), tensors)
        except (RelaidError, MislaidError):  # the call, made by itself, tells of it
            return None
        of = dict(zip(joint.sources, gradients, strict=True))
        return [of.get(i) for i in range(len(tensors))]
