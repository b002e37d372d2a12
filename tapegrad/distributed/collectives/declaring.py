"""What declarations of collectives have in common, and what ranks tell each other before one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tapegrad.core.aval import ShapedArray, normalize_axis
from tapegrad.core.primitive import Primitive, linear
from tapegrad.core.rule import Params
from tapegrad.core.state import thread
from tapegrad.device import CPU, Device
from tapegrad.device.host_scalar import HostScalar
from tapegrad.device.types import Array, Namespace
from tapegrad.distributed.group import Group
from tapegrad.distributed.ordered import bounds
from tapegrad.distributed.walks import PEERS
from tapegrad.errors import DistributedError, DryRunError, ShapeError
from tapegrad.ops.shape.shape import reshape
from tapegrad.tensor import Tensor

Sizes = tuple[int, ...]
"""Lengths along an axis, by rank."""


def flattened(xp: Namespace, x: Array) -> Array:
    """A contiguous array of one dimension, which may be ``x``'s memory."""
    return xp.ascontiguousarray(x).reshape(-1)


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


def collective(
    name: str, impl: Callable[..., None], infer: Callable[..., ShapedArray], transpose: Callable[..., Tensor],
    lift: Callable[[Params, int], Params], doc: str, cuda: Callable[..., None] | None = None,
) -> Primitive:  # fmt: skip
    """A linear primitive whose application all ranks of its group take part in; ``cuda``: on a GPU (None: ``impl``)."""
    return linear(
        name, impl=impl, infer=infer, transpose=transpose, lift=lift, into=True, cuda=cuda or on_gpu(impl),
        dry=untouched, effect=PEERS, doc=doc,
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


def buffers_for(xp: Namespace, blocks: Sequence[Array]) -> list[Array]:
    return [xp.empty(b.size, b.dtype) for b in blocks]


def unpack(xp: Namespace, blocks: Sequence[Array], received: Sequence[Array]) -> None:
    for block, flat in zip(blocks, received, strict=True):
        xp.copyto(block, flat.reshape(block.shape))


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
