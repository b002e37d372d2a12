"""Blocks of all ranks put together, and values cut into blocks for them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from tapegrad.core.aval import ShapedArray, normalize_axis
from tapegrad.core.primitive import Primitive
from tapegrad.device.types import Array, Namespace
from tapegrad.distributed.collectives.declaring import (
    Sizes,
    along,
    checked_sizes,
    collective,
    described,
    flat,
    flattened,
    lengths_of,
    lift_axis,
    others_of,
    packed,
    rank_of,
    receivers,
    shares_of,
    taken_to_flatten,
    taken_to_pack,
    taken_to_receive,
    unpack,
    with_sizes,
)
from tapegrad.distributed.group import Group, of
from tapegrad.distributed.ordered import bounds, reduced, taken_by_reduced
from tapegrad.distributed.room import Room, Taken
from tapegrad.ops.apply import barrier
from tapegrad.ops.create.creation import zeros
from tapegrad.ops.dispatch import tensor
from tapegrad.tensor import Tensor, TensorLike


def _run_all_gather(
    xp: Namespace, x: Array, *, group: Group, axis: int, sizes: Sizes, out: Array, room: Room, kind: str = "all_gather"
) -> None:
    received, send = receivers(out, axis, sizes, room), flattened(xp, x, room)
    detail = described(xp, x, others_of(x.shape, axis), axis=axis, sizes=sizes)
    group.together(kind, detail, x.nbytes, lambda: group.engine.all_gather(send, received))
    unpack(xp, out, axis, sizes, received)


def _taken_by_all_gather(aval: ShapedArray, x: Array, *, axis: int, sizes: Sizes, group: Group) -> list[Taken]:
    return taken_to_receive(aval, axis, sizes) + taken_to_flatten(x)


all_gather_p: Primitive = collective(
    "all_gather",
    _run_all_gather,
    lambda x, *, group, axis, sizes: along(x, axis, sum(sizes)),
    lambda ct, x, *, group, axis, sizes: barrier(reduce_scatter_p, ct, group=group, axis=axis, sizes=sizes),
    lift_axis,
    "The ranks' blocks one after the other along an axis, on each of them.",
    taken=_taken_by_all_gather,
)


gather_pieces_p: Primitive = collective(
    "gather_pieces",
    partial(_run_all_gather, kind="gather_pieces"),
    lambda x, *, group, axis, sizes: along(x, axis, sum(sizes)),
    lambda ct, x, *, group, axis, sizes: barrier(reduce_scatter_p, ct, group=group, axis=axis, sizes=sizes),
    lift_axis,
    "A variable whose pieces the ranks hold.  A target made of it is each rank's own, as one of a whole variable is.",
    taken=_taken_by_all_gather,
)


def all_gather(
    x: TensorLike, axis: int = 0, *, group: Group | None = None, sizes: Sequence[int] | None = None
) -> Tensor:
    """The ranks' ``x`` one after the other along ``axis``, on each rank; they may differ in length along it.

    Of 0-d tensors: a tensor of one dimension.  ``sizes``: all lengths, where they are known (they are asked for else).
    Raises DistributedError on every rank if shapes or dtypes do not fit together, AxisError.
    """
    x, group = tensor("all_gather", x), of(group)
    x, axis, lengths = with_sizes("all_gather", x, axis, group, sizes)
    return barrier(all_gather_p, x, group=group, axis=axis, sizes=lengths)


def _run_reduce_scatter(
    xp: Namespace, x: Array, *, group: Group, axis: int, sizes: Sizes, out: Array, room: Room
) -> None:
    send = list(enumerate(packed(xp, x, axis, sizes, room)))
    pieces = [room.take(out.size, out.dtype) for _ in sizes]
    detail = described(xp, x, x.shape, axis=axis, sizes=sizes)
    group.together(
        "reduce_scatter", detail, x.nbytes, lambda: group.engine.exchange(send, list(enumerate(pieces)))
    )  # fmt: skip
    reduced(xp, pieces, "sum", flat(out), room)


def _taken_by_reduce_scatter(aval: ShapedArray, x: Array, *, axis: int, sizes: Sizes, group: Group) -> list[Taken]:
    pieces = [(aval.size, aval.dtype)] * len(sizes)
    return taken_to_pack(x, axis, sizes) + pieces + taken_by_reduced(aval.size, aval.dtype)


reduce_scatter_p: Primitive = collective(
    "reduce_scatter",
    _run_reduce_scatter,
    lambda x, *, group, axis, sizes: along(x, axis, sizes[group.rank]),
    lambda ct, x, *, group, axis, sizes: barrier(all_gather_p, ct, group=group, axis=axis, sizes=sizes),
    lift_axis,
    "The sum over ranks, each of which gets a block along an axis.",
    taken=_taken_by_reduce_scatter,
)


def reduce_scatter(
    x: TensorLike, axis: int = 0, *, group: Group | None = None, sizes: Sequence[int] | None = None
) -> Tensor:
    """The sum of ``x`` over the ranks, in their order, of which each rank gets a block along ``axis``.

    ``sizes``: the blocks' lengths (None: equal ones, the first longer by 1 where that does not come out even).
    Raises DistributedError on every rank if shapes or dtypes differ, ShapeError, AxisError.
    """
    x, group = tensor("reduce_scatter", x), of(group)
    axis = normalize_axis("reduce_scatter", axis, x.ndim)
    return barrier(
        reduce_scatter_p, x, group=group, axis=axis, sizes=shares_of("reduce_scatter", x, axis, group, sizes)
    )


def _run_gather(
    xp: Namespace, x: Array, *, group: Group, axis: int, sizes: Sizes, root: int, out: Array, room: Room
) -> None:
    here = group.rank == root
    received, send = receivers(out, axis, sizes, room) if here else [], flattened(xp, x, room)
    detail = described(xp, x, others_of(x.shape, axis), axis=axis, sizes=sizes, root=root)
    group.together("gather", detail, x.nbytes, lambda: group.engine.exchange([(root, send)], list(enumerate(received))))
    if here:
        unpack(xp, out, axis, sizes, received)


def _taken_by_gather(aval: ShapedArray, x: Array, *, group: Group, axis: int, sizes: Sizes, root: int) -> list[Taken]:
    received = taken_to_receive(aval, axis, sizes) if group.rank == root else []
    return received + taken_to_flatten(x)


gather_p: Primitive = collective(
    "gather",
    _run_gather,
    lambda x, *, group, axis, sizes, root: along(x, axis, sum(sizes) if group.rank == root else 0),
    lambda ct, x, *, group, axis, sizes, root: barrier(scatter_p, ct, group=group, axis=axis, sizes=sizes, root=root),
    lift_axis,
    "The ranks' blocks one after the other along an axis, on one of them.",
    taken=_taken_by_gather,
)


def gather(
    x: TensorLike, root: int = 0, axis: int = 0, *, group: Group | None = None, sizes: Sequence[int] | None = None
) -> Tensor:
    """The ranks' ``x`` one after the other along ``axis`` on rank ``root``; on the others a tensor of length 0 there.

    ``sizes``: all lengths, where they are known.  Raises DistributedError on every rank if shapes or dtypes do not fit
    together, AxisError.
    """
    x, group = tensor("gather", x), of(group)
    root = rank_of("gather", root, group)
    x, axis, lengths = with_sizes("gather", x, axis, group, sizes)
    return barrier(gather_p, x, group=group, axis=axis, sizes=lengths, root=root)


def _run_scatter(
    xp: Namespace, x: Array, *, group: Group, axis: int, sizes: Sizes, root: int, out: Array, room: Room
) -> None:
    send = list(enumerate(packed(xp, x, axis, sizes, room))) if group.rank == root else []
    detail = described(xp, x, others_of(x.shape, axis), axis=axis, sizes=sizes, root=root)
    group.together("scatter", detail, x.nbytes, lambda: group.engine.exchange(send, [(root, flat(out))]))


def _taken_by_scatter(aval: ShapedArray, x: Array, *, group: Group, axis: int, sizes: Sizes, root: int) -> list[Taken]:
    return taken_to_pack(x, axis, sizes) if group.rank == root else []


def _transpose_scatter(ct: Tensor, x: ShapedArray, *, group: Group, axis: int, sizes: Sizes, root: int) -> Tensor:
    whole = barrier(gather_p, ct, group=group, axis=axis, sizes=sizes, root=root)
    return whole if group.rank == root else zeros(x.shape, dtype=x.dtype, device=x.device)


scatter_p: Primitive = collective(
    "scatter",
    _run_scatter,
    lambda x, *, group, axis, sizes, root: along(x, axis, sizes[group.rank]),
    _transpose_scatter,
    lift_axis,
    "Blocks of one rank's value along an axis, one for each rank.",
    taken=_taken_by_scatter,
)


def scatter(
    x: TensorLike, root: int = 0, axis: int = 0, *, group: Group | None = None, sizes: Sequence[int] | None = None
) -> Tensor:
    """A block along ``axis`` of ``x`` of rank ``root``; the others give a tensor of its dtype and dimensions.

    Lengths of the others' ``x`` along ``axis`` do not count (0, say).  ``sizes``: the blocks' lengths (None: equal
    ones, the first longer by 1).  Raises DistributedError on every rank, ShapeError, AxisError.
    """
    x, group = tensor("scatter", x), of(group)
    root, axis = rank_of("scatter", root, group), normalize_axis("scatter", axis, x.ndim)
    if sizes is None:
        n = lengths_of("scatter", x, axis, group)[root]
        at = bounds(n, group.size)
        sizes = [j - i for i, j in zip(at, at[1:], strict=False)]
    lengths = checked_sizes("scatter", x, axis, group, sizes, group.rank == root)
    return barrier(scatter_p, x, group=group, axis=axis, sizes=lengths, root=root)
