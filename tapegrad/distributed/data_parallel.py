"""Data parallel: every rank has all variables and a part of the data; gradients are summed over ranks.

Gradients travel in buckets, which are started during the backward walk, each once the cotangents of its variables are
final, and waited for at the walk's end.  Which variables share a bucket, and the order of buckets, is what rank 0's
walk suggests the first time; it stays, so all ranks do the same.  Sums are in the order of ranks, elementwise: so no
choice of buckets changes a bit, and N ranks have the bits of one process that adds N micro-batches' gradients.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any

from tapegrad.autodiff.records import Record
from tapegrad.autodiff.tape import GradientTape as Tape
from tapegrad.core import tracking
from tapegrad.core.state import thread
from tapegrad.device.dtypes import is_inexact
from tapegrad.device.numerics import bits
from tapegrad.distributed.buckets import buckets
from tapegrad.distributed.collectives.declaring import told_by_all
from tapegrad.distributed.collectives.reductions import broadcast
from tapegrad.distributed.collectives.under_way import Sum, finish, help_on, start
from tapegrad.distributed.group import Group, of
from tapegrad.distributed.ordered import bounds
from tapegrad.distributed.pieces import Gathered
from tapegrad.distributed.sharding import ShardedGradient, gradient_piece, joined, reduced_pieces
from tapegrad.distributed.terms import warn_of_repeated_terms
from tapegrad.distributed.variables import all_variables, check_alike
from tapegrad.errors import DistributedError
from tapegrad.ops.create.creation import zeros
from tapegrad.ops.dispatch import tensor
from tapegrad.ops.elementwise.selection import where
from tapegrad.ops.reduce.reductions import sum as sum_of
from tapegrad.ops.shape.blocks import reshaped
from tapegrad.tensor import Tensor, TensorLike
from tapegrad.variable import Variable

if TYPE_CHECKING:
    from collections.abc import Iterator

BUCKET_BYTES = 4 * 2**20
_TOLD = 6
"""Variables of which errors tell names and shapes."""
_NUMBER = re.compile(r"_\d+(?=/|$)")
"""Of names that are given by counting: it may differ where a rank has made more."""
Buckets = list[list[int]]
"""Positions of the variables of each bucket."""


class GradientTape(Tape):
    """A tape whose gradients in variables are summed over the ranks of ``group``; else as ``tg.GradientTape``.

    The objective is the sum over ranks of the targets: divide a loss by the global batch (:func:`mean`), or let
    ``average=True`` divide the sums by the number of ranks.  Gradients in tensors are this rank's own.  A variable on
    which no rank's target depends has the gradient None; where some do, it counts as zeros elsewhere.  A term of
    variables alone beside others (a regularizer) counts once for each rank: wrap it in :func:`once`; without, and
    without ``average=True``, there is a ReplicatedTargetWarning.

    ``bucket_bytes``: of gradients that travel together.  ``exact=False``: sums in the order that MPI or NCCL takes.

    A gradient of some rows alone (``sparse=True``) is summed, and comes, as the whole array.

    Raises DistributedError on every rank if their variables differ.
    """

    _slices = False  # ranks name different rows, of which no rank knows how many

    def __init__(
        self, persistent: bool = False, watch_accessed_variables: bool = True, *, group: Group | None = None,
        bucket_bytes: int = BUCKET_BYTES, average: bool = False, exact: bool = True,
    ) -> None:  # fmt: skip
        super().__init__(persistent, watch_accessed_variables)
        if bucket_bytes < 1:
            raise DistributedError(f"GradientTape: bucket_bytes is at least 1, not {bucket_bytes}")
        self._group, self._bucket_bytes, self._average, self._exact = of(group), int(bucket_bytes), average, exact
        self._alone = False
        self._reduced: dict[int, Tensor | ShardedGradient | None] = {}

    @contextmanager
    def _local(self) -> Iterator[None]:
        before, self._alone = self._alone, True
        try:
            yield
        finally:
            self._alone = before

    def no_sync(self) -> AbstractContextManager[None]:
        """In the block, gradients are this rank's own, as of a plain tape: to add up several before a sum."""
        return self._local()

    def gradient(
        self, target: object, sources: object, output_gradients: object = None, unconnected_gradients: object = "none"
    ) -> Any:
        """As of ``tg.GradientTape``, summed over ranks for variables."""
        try:
            return super().gradient(target, sources, output_gradients, unconnected_gradients)
        finally:
            self._reduced = {}

    def _pulled(
        self, walk: Callable[..., dict[int, Tensor]], records: list[Record], cts: dict[int, Tensor], keep: set[int],
        sought: list[Tensor | Variable], consume: bool,
    ) -> dict[int, Tensor]:  # fmt: skip
        variables = _distinct(sought)
        if self._alone or not variables:
            return super()._pulled(walk, records, cts, keep, sought, consume)
        if self._group.size > 1 and not self._average:
            names = {i: v.name for v, indices in zip(variables, self._indices(variables)) for i in indices}
            warn_of_repeated_terms(records, cts, names, self._group.size)
        return tracking.current.walk(self._pulled_in_buckets, walk, records, cts, keep, variables, consume)

    def _pulled_in_buckets(
        self, walk: Callable[..., dict[int, Tensor]], records: list[Record], cts: dict[int, Tensor], keep: set[int],
        variables: list[Variable], consume: bool,
    ) -> dict[int, Tensor]:  # fmt: skip
        """The walk, in parts: between them the sums of the gradients that are final start."""
        last = self._last_uses(records, variables)
        sums = _Sums(self, variables, self._buckets(variables, last))
        grads = {i: cts[i] for i in keep & cts.keys()}  # a target may be a variable
        end = len(records)
        for bucket, first in zip(sums.buckets, sums.ready(last), strict=True):
            if first < end:
                part = records[first:end]
                if consume:
                    del records[first:]
                grads = walk(part, cts, keep, consume=consume)
                end = first
            sums.start(bucket, grads)
            help_on(self._group)
        if end:
            grads = walk(records[:end], cts, keep, consume=consume)
            if consume:
                records.clear()
        self._reduced = sums.finished()
        return grads

    def _last_uses(self, records: Sequence[Record], variables: Sequence[Variable]) -> list[int]:
        """For each variable the position of the record, the earliest, after whose walk its gradient is final."""
        first: dict[int, int] = {}
        for position in range(len(records) - 1, -1, -1):
            for node in records[position].followed:
                first[node.index] = position
        return [min((first[i] for i in some if i in first), default=len(records)) for some in self._indices(variables)]

    def _buckets(self, variables: list[Variable], last: list[int]) -> Buckets:
        """Which variables go together, and in which order: as rank 0 found it good the first time."""
        kinds = [(_NUMBER.sub("", v.name), str(v.dtype), v.shape, v.device.kind) for v in variables]
        key = "buckets", repr(kinds), self._bucket_bytes, self._average, self._exact
        group, known = self._group, self._group.told_before

        def asked() -> Buckets:
            some = "; ".join(f"{name} {dtype} {shape}" for name, dtype, shape, _ in kinds[:_TOLD])
            how = f"bucket_bytes={self._bucket_bytes}, average={self._average}, exact={self._exact}"
            detail = f"{len(kinds)} variables ({some}{'; ...' * (len(kinds) > _TOLD)}), {how}, {bits.digest(repr(key))}"
            entered = group.line.enter("gradient", detail, 0)
            if key not in known:
                known[key] = group.line.told(self._cut(variables, last), entered)
            found: Buckets = known[key][0]
            return found

        def before() -> Buckets:
            found: Buckets = known[key][0] if key in known else self._cut(variables, last)
            return found

        return thread.executor.in_earnest(asked, None) or before()

    def _cut(self, variables: list[Variable], last: list[int]) -> Buckets:
        """In the order in which they become final; a bucket has one dtype and device."""
        order = sorted(range(len(variables)), key=lambda i: (-last[i], i))
        ordered = [variables[i] for i in order]
        sizes = [(v.size * v.dtype.itemsize, (v.dtype, v.device, gradient_piece(v) is None)) for v in ordered]
        return [[order[i] for i in bucket] for bucket in buckets(sizes, self._bucket_bytes)]

    def _sums(self, grads: dict[int, Tensor], sources: Sequence[Tensor | Variable]) -> list[Tensor | None]:
        reduced = [isinstance(s, Variable) and s.construction_number in self._reduced for s in sources]
        others = iter(super()._sums(grads, [s for s, done in zip(sources, reduced, strict=True) if not done]))
        totals: list[Any] = []
        for source, done in zip(sources, reduced, strict=True):
            totals.append(self._reduced[source._number] if done and isinstance(source, Variable) else next(others))
        return totals


class _Sums:
    """The buckets of one walk."""

    def __init__(self, tape: GradientTape, variables: list[Variable], buckets: Buckets) -> None:
        self._tape, self._variables, self.buckets = tape, variables, buckets
        self._there = [False] * len(variables)
        self._under_way: list[Sum | list[Tensor]] = []
        """Of each bucket the sum that comes, or, where gradients are cut, this rank's pieces of it."""

    def ready(self, last: Sequence[int]) -> list[int]:
        """For each bucket, the position down to which records are walked before it starts; they start in order."""
        found, lowest = [], 1 << 62
        for bucket in self.buckets:
            lowest = min(lowest, *(last[i] for i in bucket))
            found.append(lowest)
        return found

    def start(self, bucket: Sequence[int], grads: dict[int, Tensor]) -> None:
        """Start the sum of a bucket's gradients: zeros where this rank has none."""
        group = self._tape._group
        variables = [self._variables[i] for i in bucket]
        found = Tape._sums(self._tape, grads, variables)
        for i, g in zip(bucket, found, strict=True):
            self._there[i] = g is not None
        if gradient_piece(variables[0]) is not None:
            self._under_way.append(reduced_pieces(found, variables, group))
            return
        parts: list[Tensor] = []
        for v, g in zip(variables, found, strict=True):
            parts.append(zeros(v.size, dtype=v.dtype, device=v.device) if g is None else reshaped(g, (v.size,)))
        self._under_way.append(start(parts[0] if len(parts) == 1 else joined(parts), group, self._tape._exact))

    def finished(self) -> dict[int, Tensor | ShardedGradient | None]:
        """The gradient of each variable, by its number: parts of the buckets."""
        tape = self._tape
        there = _any(tape._group, tuple(self._there))
        found: dict[int, Tensor | ShardedGradient | None] = {}
        for bucket, flat in zip(self.buckets, self._under_way, strict=True):
            if isinstance(flat, list):
                for i, mine in zip(bucket, flat, strict=True):
                    v = self._variables[i]
                    piece: Any = gradient_piece(v)
                    share = mine / tape._group.size if tape._average else mine
                    found[v.construction_number] = ShardedGradient(piece, share) if there[i] else None
                continue
            whole = finish(flat, tape._group, tape._exact)
            if tape._average:
                whole = whole / tape._group.size
            at = 0
            for i in bucket:
                v = self._variables[i]
                part = whole if v.size == whole.size else whole[at : at + v.size]
                found[v.construction_number] = reshaped(part, v.shape) if there[i] else None
                at += v.size
        return found


def _distinct(sought: Sequence[Tensor | Variable]) -> list[Variable]:
    """The variables among the sources that have gradients, each once."""
    found: dict[int, Variable] = {}
    for s in sought:  # of a gathered variable the sum is made where it was gathered
        if isinstance(s, Variable) and is_inexact(s.dtype) and not isinstance(s, Gathered):
            found[s.construction_number] = s
    return list(found.values())


def _any(group: Group, flags: tuple[bool, ...]) -> list[bool]:
    """Where some rank has True."""
    told = told_by_all("gradients", ("flags", len(flags)), flags, group, flags)
    return [any(column) for column in zip(*told, strict=True)]


# What programs need around it --------------------------------------------------------------------------------------


def broadcast_variables(variables: Any, root: int = 0, *, group: Group | None = None) -> None:
    """Give all variables of a nested structure the values of rank ``root``.

    Raises DistributedError on every rank, before anything is changed, if their variables differ in number, names,
    shapes or dtypes.
    """
    group = of(group)
    found = all_variables("broadcast_variables", variables)
    check_alike(found, group)
    values = [broadcast(v.value(), root, group=group) for v in found]
    for v, value in zip(found, values, strict=True):
        v.assign(value)


def check_replicas(variables: Any, *, group: Group | None = None) -> None:
    """Raise DistributedError, on every rank, naming the first variable whose bits differ between ranks."""
    group = of(group)
    found = all_variables("check_replicas", variables)
    check_alike(found, group)
    sums = group.exchange_objects([bits.checksum(v.numpy()) for v in found])
    for i, v in enumerate(found):
        for rank, theirs in enumerate(sums):
            if theirs[i] != sums[0][i]:
                raise DistributedError(
                    f"check_replicas: variable {v.name!r} (number {i}) has other bits on rank {rank} than on rank 0; "
                    "call broadcast_variables after they are made, and let all ranks apply the same gradients"
                )


def part(n: int, *, group: Group | None = None) -> slice:
    """This rank's part of ``n`` examples: a slice; the first ranks have one more where it does not come out even."""
    group = of(group)
    at = bounds(n, group.size)
    return slice(at[group.rank], at[group.rank + 1])


def mean(x: TensorLike, count: int | None = None, *, group: Group | None = None) -> Tensor:
    """This rank's share of the mean over all ranks' examples: the sum of ``x`` over the number of all.

    ``count``: of this rank's examples (None: elements of ``x``); parts may be unequal.  The shares' sum over ranks, the
    objective of a tape, is the mean; ``all_reduce`` gives it as a figure.
    """
    x, group = tensor("mean", x), of(group)
    mine = x.size if count is None else int(count)
    total = sum(told_by_all("mean", ("count", mine), mine, group))
    if total < 1:
        raise DistributedError("mean: no rank has any examples")
    return sum_of(x) / total


def once(x: TensorLike, *, group: Group | None = None) -> Tensor:
    """``x``, which every rank has the same way, as a part of an objective: its value on rank 0, zero on the others.

    So a regularizer is added once to the sum over ranks: ``mean(losses) + 1e-4 * once(sum(w**2))``.
    """
    return where(of(group).rank == 0, tensor("once", x), 0)
