"""What declarations of collectives have in common, and what ranks tell each other before one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from math import prod
from typing import Any

from tapegrad.core import tracking
from tapegrad.core.aval import ShapedArray, normalize_axis
from tapegrad.core.buffer import Buffer
from tapegrad.core.node import NO_PARAMS, Node
from tapegrad.core.primitive import Primitive, linear
from tapegrad.core.rule import Params
from tapegrad.core.state import thread
from tapegrad.device import CPU, Device, dtypes
from tapegrad.device.host_scalar import HostScalar
from tapegrad.device.types import Array, Namespace
from tapegrad.distributed.group import Group
from tapegrad.distributed.ordered import bounds
from tapegrad.distributed.room import Room, Taken, bytes_of
from tapegrad.distributed.walks import PEERS
from tapegrad.engine.task import Lies
from tapegrad.errors import DistributedError, DryRunError, ShapeError
from tapegrad.ops.shape.shape import reshape
from tapegrad.tensor import Tensor

Sizes = tuple[int, ...]
"""Lengths along an axis, by rank."""


def flattened(xp: Namespace, x: Array, room: Room) -> Array:
    """A contiguous array of one dimension: ``x``'s memory, or where that is not contiguous, a copy."""
    if x.flags.c_contiguous:
        return x.reshape(-1)
    copy = room.take(x.size, x.dtype)
    xp.copyto(copy.reshape(x.shape), x)
    return copy


def taken_to_flatten(x: Array | HostScalar) -> list[Taken]:
    """What :func:`flattened` takes of a room."""
    return [] if isinstance(x, HostScalar) or x.flags.c_contiguous else [(x.size, x.dtype)]


def flat(out: Array) -> Array:
    """The memory of a result, in one dimension."""
    assert out.flags.c_contiguous
    return out.reshape(-1)


def described(xp: Namespace, x: Array, shape: Sequence[int | str], **more: object) -> str:
    """What must be the same on all ranks: also whether the engine gets it on a GPU."""
    where = "" if xp is CPU.xp else " on a GPU"
    return f"{x.dtype} {tuple(shape)}{where}" + "".join(f", {name}={value}" for name, value in more.items())


def staged(impl: Callable[..., None]) -> Callable[..., None]:
    """``impl`` for arrays on a GPU, which pass through the host's memory."""

    def cuda(device: Device, x: Array, *, out: Array, **params: Any) -> None:
        result = CPU.xp.empty(out.shape, out.dtype)
        impl(CPU.xp, device.numpy(x), out=result, **params)
        out[...] = device.array(result, None, copy=False)

    return cuda


def on_gpu(impl: Callable[..., None]) -> Callable[..., None]:
    """``impl`` for arrays on a GPU, on which the engine takes them; else they pass through the host's memory."""
    through_host = staged(impl)

    def cuda(device: Device, x: Array | HostScalar, *, group: Group, out: Array, **params: Any) -> None:
        if not group.engine.moves(device):
            through_host(device, x, group=group, out=out, **params)
            return
        with device.active():
            there = x.on_device() if isinstance(x, HostScalar) else x
            impl(device.xp, there, group=group, out=out, **params)

    return cuda


def in_room(impl: Callable[..., None]) -> Callable[..., None]:
    """``impl``, which takes ``room=``, with the temporary array that :func:`room_of` has declared as its room."""

    @wraps(impl)
    def run(xp: Namespace, *arrays: Array, temporaries: Sequence[Array] = (), **params: Any) -> None:
        impl(xp, *arrays, room=Room(xp, temporaries[0] if temporaries else None), **params)

    return run


def room_of(taken: Callable[..., list[Taken]]) -> Callable[..., list[Lies]]:
    """The room of ``taken(aval, x, group=, **params)`` as a temporary array; none where the host's memory is used."""

    def temporaries(aval: ShapedArray, *arrays: Array | HostScalar, group: Group, **params: Any) -> list[Lies]:
        moves = group.engine.moves(aval.device)
        nbytes = bytes_of(taken(aval, *arrays, group=group, **params)) if moves else 0
        return [((nbytes,), dtypes.asdtype("uint8"))] if nbytes else []

    return temporaries


def nothing(*args: object, **params: object) -> list[Taken]:
    """What a collective takes that needs no room."""
    return []


def counted(prim: Primitive, aval: ShapedArray) -> Buffer:
    """Memory that a collective takes for longer than its own work; it is counted until it is dropped."""
    device = thread.executor.device(aval.device)
    with tracking.current.reserved((aval,), (prim.name,)):
        buffer = Buffer(device.empty(aval.shape, aval.dtype), Node(prim, NO_PARAMS, aval))
    tracking.current.label(buffer, PEERS.category, prim.name)
    return buffer


def collective(
    name: str, impl: Callable[..., None], infer: Callable[..., ShapedArray], transpose: Callable[..., Tensor],
    lift: Callable[[Params, int], Params], doc: str, cuda: Callable[..., None] | None = None,
    taken: Callable[..., list[Taken]] | None = None,
) -> Primitive:  # fmt: skip
    """A linear primitive whose application all ranks of its group take part in; ``cuda``: on a GPU (None: ``impl``).

    ``taken(aval, x, group=, **params)``: what ``impl`` takes of the room that it is given, in this order.
    """
    run = impl if taken is None else in_room(impl)
    temporaries = room_of(nothing if taken is None else taken)
    return linear(
        name, impl=run, infer=infer, transpose=transpose, lift=lift, into=True, cuda=cuda or on_gpu(run),
        dry=untouched, effect=PEERS, temporaries=temporaries, doc=doc,
    )  # fmt: skip


def untouched(*arrays: Array, out: Array, **params: object) -> Array:
    """What a dry run has of a collective: nobody else takes part."""
    return out


def same(x: ShapedArray, **params: object) -> ShapedArray:
    return x


def unchanged(params: Params, n: int) -> Params:
    return params


def along(aval: ShapedArray, axis: int, n: int) -> ShapedArray:
    return aval.with_shape((*aval.shape[:axis], n, *aval.shape[axis + 1 :]))


def blocks_of(x: Array, axis: int, sizes: Sizes) -> list[Array]:
    """``x`` cut along ``axis`` into blocks of these lengths."""
    at = [sum(sizes[:i]) for i in range(len(sizes) + 1)]
    return [x[(slice(None),) * axis + (slice(i, j),)] for i, j in zip(at, at[1:], strict=False)]


def is_whole(shape: Sequence[int], axis: int) -> bool:
    """Whether blocks along ``axis`` of a contiguous array are contiguous."""
    return prod(shape[:axis]) <= 1


def packed(xp: Namespace, x: Array, axis: int, sizes: Sizes, room: Room) -> list[Array]:
    """The blocks of ``x``, each contiguous and of one dimension: its memory or copies."""
    if x.flags.c_contiguous and is_whole(x.shape, axis):
        return [b.reshape(-1) for b in blocks_of(x, axis, sizes)]
    found = []
    for block in blocks_of(x, axis, sizes):
        found.append(room.take(block.size, block.dtype))
        xp.copyto(found[-1].reshape(block.shape), block)
    return found


def taken_to_pack(x: Array, axis: int, sizes: Sizes) -> list[Taken]:
    """What :func:`packed` takes of a room."""
    if x.flags.c_contiguous and is_whole(x.shape, axis):
        return []
    return [(b.size, b.dtype) for b in blocks_of(x, axis, sizes)]


def receivers(out: Array, axis: int, sizes: Sizes, room: Room) -> list[Array]:
    """Where the blocks of a result come: to their places, if these are contiguous; see :func:`unpack`."""
    blocks = blocks_of(out, axis, sizes)
    return [b.reshape(-1) if is_whole(out.shape, axis) else room.take(b.size, b.dtype) for b in blocks]


def taken_to_receive(aval: ShapedArray, axis: int, sizes: Sizes) -> list[Taken]:
    """What :func:`receivers` takes of a room."""
    each = prod(aval.shape[:axis]) * prod(aval.shape[axis + 1 :])
    return [] if is_whole(aval.shape, axis) else [(n * each, aval.dtype) for n in sizes]


def unpack(xp: Namespace, out: Array, axis: int, sizes: Sizes, received: Sequence[Array]) -> None:
    """Put what has come to its place, where it is not there."""
    if not is_whole(out.shape, axis):
        for block, come in zip(blocks_of(out, axis, sizes), received, strict=True):
            xp.copyto(block, come.reshape(block.shape))


def others_of(shape: Sequence[int], axis: int) -> tuple[int | str, ...]:
    """A shape without the length along ``axis``, which may differ from rank to rank."""
    return (*shape[:axis], "*", *shape[axis + 1 :])


def lift_axis(params: Params, n: int) -> Params:
    return {**params, "axis": params["axis"] + 1}


def rank_of(op: str, root: int, group: Group) -> int:
    if not -group.size <= root < group.size:
        raise DistributedError(f"{op}: there is no rank {root} in {group!r}")
    return int(root) % group.size


def with_sizes(op: str, x: Tensor, axis: int, group: Group, sizes: Sequence[int] | None) -> tuple[Tensor, int, Sizes]:
    if x.ndim == 0:
        x, sizes = reshape(x, (1,)), (1,) * group.size
    axis = normalize_axis(op, axis, x.ndim)
    lengths = tuple(lengths_of(op, x, axis, group)) if sizes is None else tuple(map(int, sizes))
    if len(lengths) != group.size or lengths[group.rank] != x.shape[axis]:
        raise ShapeError(
            f"{op}: sizes {lengths} must name the length along axis {axis} of each of {group.size} ranks; "
            f"rank {group.rank} has {x.shape}"
        )
    return x, axis, lengths


def shares_of(op: str, x: Tensor, axis: int, group: Group, sizes: Sequence[int] | None) -> Sizes:
    if sizes is None:
        at = bounds(x.shape[axis], group.size)
        return tuple(j - i for i, j in zip(at, at[1:], strict=False))
    return checked_sizes(op, x, axis, group, sizes, True)


def checked_sizes(op: str, x: Tensor, axis: int, group: Group, sizes: Sequence[int], whole: bool) -> Sizes:
    lengths = tuple(map(int, sizes))
    if len(lengths) != group.size or min(lengths) < 0 or (whole and sum(lengths) != x.shape[axis]):
        raise ShapeError(f"{op}: sizes {lengths} must cut axis {axis} of {x.shape} into {group.size} blocks")
    return lengths


def lengths_of(op: str, x: Tensor, axis: int, group: Group) -> list[int]:
    """The lengths along ``axis`` of all ranks."""
    return [int(n) for n in sizes_of(op, x, x.shape[axis], group)]


def sizes_of(op: str, x: Tensor, mine: Any, group: Group) -> list[Any]:
    """The sizes that each rank gives before an operation on ``x``."""
    return told_by_all(f"sizes of {op}", (x.shape, str(x.dtype), mine), mine, group, None, f"{x.dtype}, {x.ndim} axes")


def told_by_all(
    what: str, key: Any, mine: Any, group: Group, otherwise: Any = None, detail: str = "an object"
) -> list[Any]:
    """What each rank gives, by rank; in a dry run what they gave for ``key`` the last time, or all ``otherwise``.

    Raises DistributedError on every rank, and DryRunError in a dry run that knows nothing.
    """
    known = group.told_before
    if group.size == 1:
        return [mine]

    def ask() -> list[Any]:
        known[what, key] = group.line.told(mine, group.line.enter(what, detail, 0))
        return known[what, key]

    told = thread.executor.in_earnest(ask, known.get((what, key)))
    if told is None and otherwise is not None:
        return [otherwise] * group.size
    if told is None:
        raise DryRunError(f"{what}: a dry run does not know what other ranks have; give it, or run this once before")
    return told
