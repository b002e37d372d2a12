"""Blocks from each rank to each, and values of neighbours."""

from __future__ import annotations

from collections.abc import Sequence

from tapegrad.core.aval import ShapedArray, normalize_axis
from tapegrad.core.primitive import Primitive
from tapegrad.device.host_scalar import HostScalar
from tapegrad.device.types import Array, Namespace
from tapegrad.distributed.collectives.declaring import (
    Sizes,
    along,
    collective,
    described,
    flat,
    flattened,
    packed,
    receivers,
    same,
    shares_of,
    sizes_of,
    taken_to_flatten,
    taken_to_pack,
    taken_to_receive,
    unchanged,
    unpack,
)
from tapegrad.distributed.group import Group, of
from tapegrad.distributed.room import Room, Taken
from tapegrad.errors import DistributedError
from tapegrad.ops.apply import barrier
from tapegrad.ops.dispatch import tensor
from tapegrad.tensor import Tensor, TensorLike


def _run_all_to_all(
    xp: Namespace, x: Array, *, group: Group, split: int, concat: int, away: Sizes, come: Sizes, out: Array, room: Room
) -> None:
    send, received = packed(xp, x, split, away, room), receivers(out, concat, come, room)
    alike: list[int | str] = list(x.shape)
    alike[split] = alike[concat] = "*"
    detail = described(xp, x, alike) + f", from axis {split} to axis {concat}"
    start = lambda: group.engine.exchange(list(enumerate(send)), list(enumerate(received)))
    group.together("all_to_all", detail, x.nbytes, start)
    unpack(xp, out, concat, come, received)


def _taken_by_all_to_all(
    aval: ShapedArray, x: Array, *, split: int, concat: int, away: Sizes, come: Sizes, group: Group
) -> list[Taken]:
    return taken_to_pack(x, split, away) + taken_to_receive(aval, concat, come)


def _infer_all_to_all(
    x: ShapedArray, *, group: Group, split: int, concat: int, away: Sizes, come: Sizes
) -> ShapedArray:
    mine = x if split == concat else along(x, split, away[group.rank])
    return along(mine, concat, sum(come))


all_to_all_p: Primitive = collective(
    "all_to_all",
    _run_all_to_all,
    _infer_all_to_all,
    lambda ct, x, *, group, split, concat, away, come: barrier(
        all_to_all_p, ct, group=group, split=concat, concat=split, away=come, come=away
    ),
    lambda params, n: {**params, "split": params["split"] + 1, "concat": params["concat"] + 1},
    "Blocks along an axis, one for each rank; those that come one after the other along another.",
    taken=_taken_by_all_to_all,
)


def all_to_all(
    x: TensorLike, split_axis: int = 0, concat_axis: int = 0, *, group: Group | None = None,
    sizes: Sequence[int] | None = None,
) -> Tensor:  # fmt: skip
    """``x`` cut along ``split_axis``, a block for each rank; what comes is joined along ``concat_axis``.

    ``sizes``: the lengths of the blocks that go to each rank (None: equal ones, the first longer by 1); along two
    different axes all ranks cut alike.  Raises DistributedError on every rank, ShapeError, AxisError.
    """
    x, group = tensor("all_to_all", x), of(group)
    split = normalize_axis("all_to_all", split_axis, x.ndim)
    concat = normalize_axis("all_to_all", concat_axis, x.ndim)
    away = shares_of("all_to_all", x, split, group, sizes)
    told = sizes_of("all_to_all", x, (away, x.shape[concat]), group)
    if split == concat:
        come = tuple(cut[group.rank] for cut, _ in told)
    else:
        if len({cut for cut, _ in told}) > 1:
            cuts = "; ".join(f"rank {r}: {cut}" for r, (cut, _) in enumerate(told))
            raise DistributedError(f"all_to_all: along two axes all ranks cut axis {split} alike; {cuts}")
        come = tuple(n for _, n in told)
    return barrier(all_to_all_p, x, group=group, split=split, concat=concat, away=away, come=come)


def _run_shift(xp: Namespace, x: Array, *, group: Group, offset: int, periodic: bool, out: Array, room: Room) -> None:
    to, source = neighbour(group, offset, periodic), neighbour(group, -offset, periodic)
    send = [] if to is None else [(to, flattened(xp, x, room))]
    receive = [] if source is None else [(source, flat(out))]
    detail = described(xp, x, x.shape, offset=offset, periodic=periodic)
    group.together("shift", detail, x.nbytes, lambda: group.engine.exchange(send, receive))
    if source is None:
        out.fill(0)


def _taken_by_shift(
    aval: ShapedArray, x: Array | HostScalar, *, group: Group, offset: int, periodic: bool
) -> list[Taken]:
    return [] if neighbour(group, offset, periodic) is None else taken_to_flatten(x)


def neighbour(group: Group, offset: int, periodic: bool) -> int | None:
    """The rank ``offset`` places further; None: beyond the end."""
    there = group.rank + offset
    if periodic:
        return there % group.size
    return there if 0 <= there < group.size else None


shift_p: Primitive = collective(
    "shift",
    _run_shift,
    same,
    lambda ct, x, *, group, offset, periodic: barrier(shift_p, ct, group=group, offset=-offset, periodic=periodic),
    unchanged,
    "The value of the rank some places before; zeros at an open end.",
    taken=_taken_by_shift,
)


def shift(
    x: TensorLike, offset: int = 1, *, periodic: bool = True, fill: complex = 0, group: Group | None = None
) -> Tensor:
    """``x`` of the rank ``offset`` places before this one; all give the same shape and dtype.

    ``periodic``: rank 0 comes after the last; False: at an open end the result is ``fill`` everywhere.
    Raises DistributedError on every rank if shapes or dtypes differ.
    """
    x, group = tensor("shift", x), of(group)
    y = barrier(shift_p, x, group=group, offset=int(offset), periodic=bool(periodic))
    return y if fill == 0 or neighbour(group, -offset, periodic) is not None else y + fill
