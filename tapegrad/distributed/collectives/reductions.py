"""Sums and extremes over ranks, and the value of one rank on all of them."""

from __future__ import annotations

from typing import Any

from tapegrad.core.aval import ShapedArray
from tapegrad.core.primitive import Primitive, general
from tapegrad.device.host_scalar import HostScalar
from tapegrad.device.types import Array, Namespace
from tapegrad.distributed.collectives.blocks import all_gather
from tapegrad.distributed.collectives.declaring import (
    collective,
    described,
    flat,
    flattened,
    in_room,
    on_gpu,
    rank_of,
    room_of,
    same,
    taken_to_flatten,
    unchanged,
    untouched,
)
from tapegrad.distributed.group import Group, of
from tapegrad.distributed.ordered import AllReduce, reduced, taken_by_all_reduce, taken_by_reduced
from tapegrad.distributed.room import Room, Taken
from tapegrad.distributed.walks import PEERS
from tapegrad.errors import DistributedError, DTypeError
from tapegrad.ops.apply import barrier
from tapegrad.ops.dispatch import cast, tensor
from tapegrad.ops.reduce.reductions import prod
from tapegrad.ops.shape.shape import reshape
from tapegrad.tensor import Tensor, TensorLike


def _run_all_reduce(xp: Namespace, x: Array, *, group: Group, op: str, exact: bool, out: Array, room: Room) -> None:
    xp.copyto(out, x)
    all_elements = flat(out)

    def start() -> Any:
        if exact:
            return AllReduce(group.engine, xp, all_elements, op, room)
        return group.engine.all_reduce(all_elements, op)

    group.together("all_reduce", described(xp, x, x.shape, op=op, exact=exact), x.nbytes, start)


def _taken_by_all_reduce(
    aval: ShapedArray, x: Array | HostScalar, *, group: Group, op: str, exact: bool = True
) -> list[Taken]:
    return taken_by_all_reduce(aval.size, aval.dtype, group.engine, op) if exact else []


all_reduce_p: Primitive = collective(
    "all_reduce",
    _run_all_reduce,
    same,
    lambda ct, x, *, group, op, exact: barrier(all_reduce_p, ct, group=group, op=op, exact=exact),
    unchanged,
    "The sum over ranks, on each of them.",
    taken=_taken_by_all_reduce,
)


def _extreme_rule(ct: Tensor, x: Tensor, out: Tensor, *, group: Group, op: str) -> Tensor:
    """The cotangents of all ranks, shared equally by those that attain the result."""
    attain = cast(x == out, ct.dtype)
    return all_reduce(ct, group=group) * attain / all_reduce(attain, group=group)


def _extreme_push(t: Tensor, x: Tensor, out: Tensor, *, group: Group, op: str) -> Tensor:
    attain = cast(x == out, t.dtype)
    return all_reduce(t * attain, group=group) / all_reduce(attain, group=group)


@in_room
def _run_extreme(xp: Namespace, x: Array, *, group: Group, op: str, out: Array, room: Room) -> None:
    _run_all_reduce(xp, x, group=group, op=op, exact=True, out=out, room=room)


extreme_p = general(
    "all_reduce_extreme",
    impl=_run_extreme,
    infer=same,
    vjp=[_extreme_rule],
    jvp=[_extreme_push],
    lift=unchanged,
    into=True,
    cuda=on_gpu(_run_extreme),
    dry=untouched,
    effect=PEERS,
    temporaries=room_of(_taken_by_all_reduce),
    doc="The greatest or the least element over ranks.",
)


def all_reduce(x: TensorLike, op: str = "sum", *, group: Group | None = None, exact: bool = True) -> Tensor:
    """``x`` reduced over the ranks, elementwise: the same result on each of them.  All give the same shape and dtype.

    ``op``: "sum", "mean", "max", "min" or "prod".  ``exact``: in the order of ranks, half types in float32, so that the
    bits depend on the values alone; False: in the order that MPI or NCCL takes.  Cotangents are summed over ranks, too;
    those of a maximum are shared by the ranks that attain it, as in ``tg.max``.

    Raises DistributedError on every rank if they differ, DTypeError for an order of complex numbers or a sum of bools.
    """
    x, group = tensor("all_reduce", x), of(group)
    if op not in ("sum", "mean", "max", "min", "prod"):
        raise DistributedError(f'all_reduce: op is "sum", "mean", "max", "min" or "prod", not {op!r}')
    kind = x.dtype.kind
    if kind == "c" and op in ("max", "min"):
        raise DTypeError(f"all_reduce: complex numbers have no order; op={op!r} takes abs, real or imag")
    if kind == "b" and op in ("sum", "mean"):
        raise DTypeError('all_reduce: bools have no sum; cast them to integers, or take op="max" (any) or "min" (all)')
    if op == "prod":
        return prod(all_gather(reshape(x, (1, *x.shape)), group=group, sizes=(1,) * group.size), axis=0)
    if op in ("max", "min"):
        return barrier(extreme_p, x, group=group, op=op)
    if op == "mean" and kind not in "fcV":
        raise DTypeError(f"all_reduce: the mean of {x.dtype} is no integer; cast it to a float first")
    total = barrier(all_reduce_p, x, group=group, op="sum", exact=exact)
    return total if op == "sum" else total / group.size


def _run_reduce(xp: Namespace, x: Array, *, group: Group, root: int, out: Array, room: Room) -> None:
    send, here = flattened(xp, x, room), group.rank == root
    pieces = [room.take(x.size, x.dtype) for _ in range(group.size)] if here else []

    def start() -> Any:
        return group.engine.exchange([(root, send)], list(enumerate(pieces)))

    group.together("reduce", described(xp, x, x.shape, root=root), x.nbytes, start)
    if here:
        reduced(xp, pieces, "sum", flat(out), room)
    else:
        out.fill(0)


def _taken_by_reduce(aval: ShapedArray, x: Array | HostScalar, *, group: Group, root: int) -> list[Taken]:
    pieces = [(aval.size, aval.dtype)] * group.size + taken_by_reduced(aval.size, aval.dtype)
    return taken_to_flatten(x) + (pieces if group.rank == root else [])


reduce_p: Primitive = collective(
    "reduce",
    _run_reduce,
    same,
    lambda ct, x, *, group, root: barrier(broadcast_p, ct, group=group, root=root),
    unchanged,
    "The sum over ranks on one of them, zeros on the others.",
    taken=_taken_by_reduce,
)


def reduce(x: TensorLike, root: int = 0, *, group: Group | None = None) -> Tensor:
    """The sum of ``x`` over the ranks, in their order, on rank ``root``; zeros on the others.

    Raises DistributedError on every rank if shapes or dtypes differ.
    """
    group = of(group)
    return barrier(reduce_p, tensor("reduce", x), group=group, root=rank_of("reduce", root, group))


def _run_broadcast(xp: Namespace, x: Array, *, group: Group, root: int, out: Array) -> None:
    if group.rank == root:
        xp.copyto(out, x)
    whole = flat(out)
    group.together(
        "broadcast", described(xp, x, x.shape, root=root), x.nbytes, lambda: group.engine.broadcast(whole, root)
    )  # fmt: skip


broadcast_p: Primitive = collective(
    "broadcast",
    _run_broadcast,
    same,
    lambda ct, x, *, group, root: barrier(reduce_p, ct, group=group, root=root),
    unchanged,
    "The value of one rank, on each of them.",
)


def broadcast(x: TensorLike, root: int = 0, *, group: Group | None = None) -> Tensor:
    """``x`` of rank ``root``, on each rank; the others give a tensor of its shape and dtype, whose values do not count.

    Raises DistributedError on every rank if shapes or dtypes differ.
    """
    group = of(group)
    return barrier(broadcast_p, tensor("broadcast", x), group=group, root=rank_of("broadcast", root, group))
