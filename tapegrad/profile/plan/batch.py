"""What a step would hold, and take, with another batch.

Of one run: values whose first dimension is the batch, or a multiple of it, grow with it; parameters, the optimizer's
values, gradients, and values of parameters' shapes do not.  Of two runs of different batches: the bytes of each
allocation are ``a + b * batch``, fitted from both, which needs no assumption but that they did the same.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from tapegrad.core.aval import rounded
from tapegrad.errors import TapegradError
from tapegrad.profile.plan.lives import Life, peak
from tapegrad.profile.plan.problem import Problem, representative
from tapegrad.profile.plan.step import BACKWARD, Step
from tapegrad.tracing.names import CATEGORIES, PHASES
from tapegrad.tracing.run import Run

_FIXED = {CATEGORIES.index(c) for c in ("parameter", "optimizer", "gradient")}
_INPUT = CATEGORIES.index("input")
_OPTIMIZER = PHASES.index("optimizer")
_CLEAR = 2
"""The dimension of the batch must explain this many times the bytes that the next one explains."""
MOST = 1 << 40


class BatchError(TapegradError, ValueError):
    """A batch that cannot be told from a run, or runs that cannot be put together."""


@dataclass(frozen=True)
class Scaled:
    """Predictions as functions of the batch; ``now``: that of the run; ``assumed``: what they assume.

    ``fitted``: whether times are; else they grow with the batch, of which a step's fixed costs are no part.
    """

    now: int
    bytes_at: Callable[[int], int]
    ns_at: Callable[[int], int]
    assumed: str
    fitted: bool = False

    def bound(self, batch: int) -> str:
        """What ``ns_at(batch)`` is: "most" or "least", "" if neither."""
        return "" if self.fitted or batch == self.now else "most" if batch > self.now else "least"

    def largest(self, limit: int) -> int:
        """The largest batch whose peak is at most ``limit`` bytes; 0 if none is."""
        low, high = 0, 1
        while high < MOST and self.bytes_at(high) <= limit:
            low, high = high, 2 * high
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.bytes_at(middle) <= limit else (low, middle)
        return low


def batch_of(run: Run, step: Step) -> int:
    """The batch of a step: the first dimension of its inputs that most bytes share.  Raises BatchError.

    It must be that of two inputs (of values and targets, say) made for the step, and be no other dimension of inputs,
    nor of parameters: what is made once, or is a width as well, need not be a batch.
    """
    a, since, fixed = run.allocs, _walked_before(run, step), _fixed(run, step)
    widths = {n for i in step.lives if a["category"][i] == _INPUT for n in shape(run, i)[1:]}
    widths.update(n for i in fixed for n in shape(run, i))
    leading: Counter[int] = Counter()
    for i in step.lives:
        dims = shape(run, i) if a["category"][i] == _INPUT and a["begin_seq"][i] > since else ()
        if dims and dims[0] > 1 and dims[0] not in widths:
            leading[dims[0]] += 1
    inputs = {n for n, count in leading.items() if count > 1}
    shared: Counter[int] = Counter()
    for _, i in step.allocated:
        dims = shape(run, i)
        if dims and dims[0] in inputs and a["phase"][i] != _OPTIMIZER:
            shared[dims[0]] += a["bytes"][i]
    first = shared.most_common(2)
    if not first or (len(first) > 1 and first[0][1] < _CLEAR * first[1][1]):
        sizes = " or ".join(str(n) for n, _ in first)
        raise BatchError(
            f"the batch of the run could be {sizes}; say which with --batch-now" if sizes
            else "no first dimension of two of the step's inputs is clearly the batch; say it with --batch-now"
        )  # fmt: skip
    return first[0][0]


def _walked_before(run: Run, step: Step) -> int:
    """The end of the backward pass before a step: steps may end later, when the next one's inputs are there already."""
    o = run.ops
    before = (row for row in range(step.op_rows.start - 1, -1, -1) if o["phase"][row] == BACKWARD)
    row = next(before, -1)
    return o["seq"][row] if row >= 0 else step.begin - 1


def shape(run: Run, alloc: int) -> tuple[int, ...]:
    """An allocation's shape; () if it is not known."""
    return tuple(int(n) for n in re.findall(r"\d{1,15}", run.text(run.allocs["shape"][alloc])))


def of_one(run: Run, now: int | None = None) -> Scaled:
    """Predictions from one run.  Raises BatchError."""
    step = _step(run)
    batch = batch_of(run, step) if now is None else now
    grows = _growing(run, step, batch)
    if not grows:
        raise BatchError(f"no value of the step has a first dimension of {batch} or a multiple; see --batch-now")
    requested = run.allocs["requested"]

    def bytes_at(n: int) -> int:
        lives = [
            Life(rounded(requested[i] * n // batch) if i in grows else life.bytes, life.begin, life.end)
            for i, life in step.lives.items()
        ]
        return peak(lives)[0]

    fixed, total = _optimizer_ns(run, step), Problem(run).step_ns
    assumed = (
        f"values with a first dimension of {batch} or a multiple grow with the batch; parameters, gradients, the "
        "optimizer's values and all else do not; time grows likewise, but for the optimizer's"
    )
    return Scaled(batch, bytes_at, lambda n: fixed + (total - fixed) * n // batch, assumed)


def of_two(run: Run, other: Run, now: int | None = None) -> Scaled:
    """Predictions from two runs of different batches that did the same.  Raises BatchError."""
    step, second = _step(run), _step(other)
    b1 = batch_of(run, step) if now is None else now
    pairs = _pairs(run, step, other, second)
    b2 = _other_batch(run, other, pairs, b1)
    r1, r2 = run.allocs["requested"], other.allocs["requested"]

    def bytes_at(n: int) -> int:
        lives = []
        for i, life in step.lives.items():
            more = (r2[pairs[i]] - r1[i]) * (n - b1) // (b2 - b1) if i in pairs else 0
            lives.append(Life(rounded(max(r1[i] + more, 0)) if more else life.bytes, life.begin, life.end))
        return peak(lives)[0]

    t1, t2 = Problem(run).step_ns, Problem(other).step_ns
    assumed = f"bytes of each of {len(pairs)} values, and the step's time, as a + b * batch from batches {b1} and {b2}"
    return Scaled(b1, bytes_at, lambda n: max(0, t1 + (t2 - t1) * (n - b1) // (b2 - b1)), assumed, fitted=True)


def _other_batch(run: Run, other: Run, pairs: dict[int, int], batch: int) -> int:
    """What the batch's dimension is in the other run, by most bytes.  Raises BatchError."""
    sizes: Counter[int] = Counter()
    for i, j in pairs.items():
        one, two = shape(run, i), shape(other, j)
        if one and two and one[0] == batch != two[0]:
            sizes[two[0]] += other.allocs["bytes"][j]
    if not sizes:
        raise BatchError(f"both runs have a batch of {batch}, or neither has; the second one must have another")
    return sizes.most_common(1)[0][0]


def _step(run: Run) -> Step:
    number = representative(run)
    if number is None:
        raise BatchError("the run has no training step: nothing was differentiated")
    return Step(run, number)


def _growing(run: Run, step: Step, batch: int) -> set[int]:
    a, fixed = run.allocs, _fixed(run, step)
    weights = {tuple(sorted(shape(run, i))) for i in fixed if len(shape(run, i)) > 1}
    growing = set()
    for i in step.lives:
        dims = shape(run, i)
        if i in fixed or a["phase"][i] == _OPTIMIZER or not dims:
            continue
        # (batch * positions, width) is flat; (width, width) or (width,) may be a multiple by chance
        flat = len(dims) > 1 and dims[0] > 0 and dims[0] % batch == 0 and tuple(sorted(dims)) not in weights
        if dims[0] == batch or flat:
            growing.add(i)
    return growing


def _fixed(run: Run, step: Step) -> set[int]:
    """What does not depend on the batch: parameters, the optimizer's values, gradients."""
    fixed = {i for i, c in zip(run.changes["alloc"], run.changes["category"]) if c in _FIXED}
    return fixed.union(i for i in step.lives if run.allocs["category"][i] in _FIXED)


def _optimizer_ns(run: Run, step: Step) -> int:
    ns = [run.ops["ns"][row] for row in step.op_rows if run.ops["phase"][row] == _OPTIMIZER]
    return max(ns) - min(ns) if ns else 0


def _pairs(run: Run, step: Step, other: Run, second: Step) -> dict[int, int]:
    """The same allocations of both steps, by order.  Raises BatchError where the runs did not do the same.

    What was alive before may differ, and is left out then: it does not depend on the batch of this step.
    """
    pairs: dict[int, int] = {}
    for inside in (True, False):
        one, two = (_parted(r, s, inside) for r, s in ((run, step), (other, second)))
        if [name for name, _ in one] == [name for name, _ in two]:
            pairs.update((i, j) for (_, i), (_, j) in zip(one, two))
        elif inside:
            raise BatchError(
                f"the two runs did not do the same: {len(one)} and {len(two)} values in a step, or of other operations "
                "(small arrays are computed at once, large ones together); take two batches closer to each other"
            )
    return pairs


def _parted(run: Run, step: Step, inside: bool) -> list[tuple[str, int]]:
    a = run.allocs
    return [(run.text(a["op"][i]), i) for i in sorted(step.lives) if (a["begin_seq"][i] >= step.begin) == inside]
