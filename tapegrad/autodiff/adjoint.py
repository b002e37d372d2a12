"""The transpose of a linear function given as code: how forward mode goes through a rule that only pulls back."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from tapegrad.autodiff.recording import Trace
from tapegrad.autodiff.zeros import zeros_of
from tapegrad.core.aval import ShapedArray
from tapegrad.core.state import during, thread
from tapegrad.errors import NoGradientError
from tapegrad.ops.reduce.reductions import sum
from tapegrad.tensor import Tensor, materialize

Pull = Callable[..., Sequence[Tensor | None]]


def transposed(pull: Pull, avals: Sequence[ShapedArray], tangents: Sequence[Tensor]) -> list[Tensor | None]:
    """``J t`` from ``pull``: ``ct -> J' ct``; ``avals``: of its arguments.

    ``<t, J' u>`` is linear in ``u`` with gradient ``J t``.  Raises NoGradientError if ``pull`` is not linear: then the
    adjoint identity ``<t, J' u> = <u, J t>`` fails at ``u = 1024 J t + 1``, which is beyond the usual bounds of a clip,
    and not zero where the rule has no slope at zero.
    """
    us = [zeros_of(a) for a in avals]
    trace = Trace(u._buffer.node for u in us)
    pulled = trace.during(pull, *us)
    cts: dict[int, Tensor] = {}
    for g, t in zip(pulled, tangents, strict=True):
        if g is not None:
            index = g._buffer.node.index
            cts[index] = cts[index] + t if index in cts else t
    grads = trace.pull(cts)
    pushed = [u if t is None else t for u, t in zip(us, grads, strict=True)]

    def differing() -> tuple[float, float] | None:
        probe = [t * 1024.0 + 1.0 for t in pushed]
        left, right = _inner(pull(*probe), tangents), _inner(probe, pushed)
        finite = left - left == 0 and right - right == 0
        if not finite or abs(left - right) <= 1e-3 * max(abs(left), abs(right)):
            return None
        size = math.sqrt(_inner(probe, probe)) * math.sqrt(_inner(pushed, pushed))  # terms of `right` may cancel
        return None if abs(left - right) <= 1e-3 * size + 1e-30 else (left, right)

    # Of a batch only one example is checked.  Sums are read at once: in a dry run, too, none is to wait for others.
    sides = during(differing, recorders=(), batches=(), deferring=None)
    if sides is not None:
        left, right = sides
        raise NoGradientError(f"it is not linear in its cotangents (adjoint identity: {left:.6g} against {right:.6g})")
    return grads


def _inner(xs: Sequence[Tensor | None], ys: Sequence[Tensor]) -> float:
    """The inner product over all real pairs, as a number: 0 in a dry run, which does the works all the same."""
    pairs = [(x, y) for x, y in zip(xs, ys, strict=True) if x is not None and x.dtype.kind != "c"]
    return math.fsum(_number(sum(x * y)) for x, y in pairs)


def _number(total: Tensor) -> float:
    materialize(total)  # a sum of one number alone is no reduction, and would wait for whoever asks
    return thread.executor.in_earnest(total.item, 0.0)
