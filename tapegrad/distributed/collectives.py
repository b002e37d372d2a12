"""Collectives: operations on the values of several ranks, differentiable to any order in both directions.

Each is a linear map from the values of all ranks to the results of all ranks, and its transpose is a collective, too.
What is differentiated is the **sum over ranks of the targets**; a target that every rank has the same way is counted
once (``walks.py``).

Every rank of the group calls the same collectives in the same order.  They are done when they are called, whether or
not somebody asks for their results, and no budget makes a result again on one rank alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tapegrad.core.aval import ShapedArray, normalize_axis
from tapegrad.core.primitive import Primitive, general, linear
from tapegrad.core.rule import Params
from tapegrad.core.state import thread
from tapegrad.device import CPU, Device
from tapegrad.device.types import Array, Namespace
from tapegrad.distributed.group import Group, of
from tapegrad.distributed.ordered import AllReduce, bounds, reduced
from tapegrad.distributed.walks import PEERS
from tapegrad.errors import DistributedError, DryRunError, DTypeError, ShapeError
from tapegrad.ops.apply import barrier
from tapegrad.ops.create.creation import zeros
from tapegrad.ops.dispatch import cast, tensor
from tapegrad.ops.reduce.reductions import prod
from tapegrad.ops.shape.shape import reshape
from tapegrad.tensor import Tensor, TensorLike

Sizes = tuple[int, ...]
"""Lengths along an axis, by rank."""


def _flat(x: Array) -> Array:
    """A contiguous array of one dimension, which may be ``x``'s memory."""
    return CPU.xp.ascontiguousarray(x).reshape(-1)


def _detail(x: ShapedArray | Array, shape: Sequence[int], **more: object) -> str:
    """What must be the same on all ranks."""
    return f"{x.dtype} {tuple(shape)}" + "".join(f", {name}={value}" for name, value in more.items())


def _staged(impl: Callable[..., None]) -> Callable[..., None]:
    """``impl`` for arrays on a GPU, which pass through the host's memory."""

    def cuda(device: Device, x: Array, *, out: Array, **params: Any) -> None:
        result = CPU.xp.empty(out.shape, out.dtype)
        impl(CPU.xp, device.numpy(x), out=result, **params)
        out[...] = device.array(result, None, copy=False)

    return cuda


def _collective(
    name: str, impl: Callable[..., None], infer: Callable[..., ShapedArray], transpose: Callable[..., Tensor],
    lift: Callable[[Params, int], Params], doc: str,
) -> Primitive:  # fmt: skip
    """A linear primitive whose application all ranks of its group take part in."""
    return linear(
        name, impl=impl, infer=infer, transpose=transpose, lift=lift, into=True, cuda=_staged(impl), effect=PEERS,
        doc=doc,
    )  # fmt: skip


# Reductions --------------------------------------------------------------------------------------------------------


def _run_all_reduce(xp: Namespace, x: Array, *, group: Group, op: str, exact: bool, out: Array) -> None:
    xp.copyto(out, x)
    flat = out.reshape(-1) if out.flags.c_contiguous else _flat(out)

    def start() -> Any:
        return AllReduce(group.engine, flat, op) if exact else group.engine.all_reduce(flat, op)

    group.together("all_reduce", _detail(x, x.shape, op=op, exact=exact), x.nbytes, start)
    if not out.flags.c_contiguous:
        xp.copyto(out, flat.reshape(out.shape))


def _same(x: ShapedArray, **params: object) -> ShapedArray:
    return x


def _unchanged(params: Params, n: int) -> Params:
    return params


all_reduce_p: Primitive = _collective(
    "all_reduce",
    _run_all_reduce,
    _same,
    lambda ct, x, *, group, op, exact: barrier(all_reduce_p, ct, group=group, op=op, exact=exact),
    _unchanged,
    "The sum over ranks, on each of them.",
)


def _extreme_rule(ct: Tensor, x: Tensor, out: Tensor, *, group: Group, op: str) -> Tensor:
    """The cotangents of all ranks, shared equally by those that attain the result."""
    attain = cast(x == out, ct.dtype)
    return all_reduce(ct, group=group) * attain / all_reduce(attain, group=group)


def _extreme_push(t: Tensor, x: Tensor, out: Tensor, *, group: Group, op: str) -> Tensor:
    attain = cast(x == out, t.dtype)
    return all_reduce(t * attain, group=group) / all_reduce(attain, group=group)


def _run_extreme(xp: Namespace, x: Array, *, group: Group, op: str, out: Array) -> None:
    _run_all_reduce(xp, x, group=group, op=op, exact=True, out=out)


extreme_p = general(
    "all_reduce_extreme",
    impl=_run_extreme,
    infer=_same,
    vjp=[_extreme_rule],
    jvp=[_extreme_push],
    lift=_unchanged,
    into=True,
    cuda=_staged(_run_extreme),
    effect=PEERS,
    doc="The greatest or the least element over ranks.",
)


def all_reduce(x: TensorLike, /, op: str = "sum", *, group: Group | None = None, exact: bool = True) -> Tensor:
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


def _run_reduce(xp: Namespace, x: Array, *, group: Group, root: int, out: Array) -> None:
    flat, here = _flat(x), group.rank == root
    pieces = [xp.empty_like(flat) for _ in range(group.size)] if here else []

    def start() -> Any:
        return group.engine.exchange([(root, flat)], list(enumerate(pieces)))

    group.together("reduce", _detail(x, x.shape, root=root), x.nbytes, start)
    if here:
        total = xp.empty_like(flat)
        reduced(pieces, "sum", total)
        xp.copyto(out, total.reshape(out.shape))
    else:
        out.fill(0)


reduce_p: Primitive = _collective(
    "reduce",
    _run_reduce,
    _same,
    lambda ct, x, *, group, root: barrier(broadcast_p, ct, group=group, root=root),
    _unchanged,
    "The sum over ranks on one of them, zeros on the others.",
)


def reduce(x: TensorLike, /, root: int = 0, *, group: Group | None = None) -> Tensor:
    """The sum of ``x`` over the ranks, in their order, on rank ``root``; zeros on the others.

    Raises DistributedError on every rank if shapes or dtypes differ.
    """
    group = of(group)
    return barrier(reduce_p, tensor("reduce", x), group=group, root=_rank("reduce", root, group))


def _run_broadcast(xp: Namespace, x: Array, *, group: Group, root: int, out: Array) -> None:
    flat = xp.empty(x.size, x.dtype)
    if group.rank == root:
        xp.copyto(flat, _flat(x))
    group.together(
        "broadcast", _detail(x, x.shape, root=root), x.nbytes, lambda: group.engine.broadcast(flat, root)
    )  # fmt: skip
    xp.copyto(out, flat.reshape(out.shape))


broadcast_p: Primitive = _collective(
    "broadcast",
    _run_broadcast,
    _same,
    lambda ct, x, *, group, root: barrier(reduce_p, ct, group=group, root=root),
    _unchanged,
    "The value of one rank, on each of them.",
)


def broadcast(x: TensorLike, /, root: int = 0, *, group: Group | None = None) -> Tensor:
    """``x`` of rank ``root``, on each rank; the others give a tensor of its shape and dtype, whose values do not count.

    Raises DistributedError on every rank if shapes or dtypes differ.
    """
    group = of(group)
    return barrier(broadcast_p, tensor("broadcast", x), group=group, root=_rank("broadcast", root, group))


# Gathering and scattering ------------------------------------------------------------------------------------------


def _along(aval: ShapedArray, axis: int, n: int) -> ShapedArray:
    return aval.with_shape((*aval.shape[:axis], n, *aval.shape[axis + 1 :]))


def _blocks(x: Array, axis: int, sizes: Sizes) -> list[Array]:
    """``x`` cut along ``axis`` into blocks of these lengths."""
    at = [sum(sizes[:i]) for i in range(len(sizes) + 1)]
    return [x[(slice(None),) * axis + (slice(i, j),)] for i, j in zip(at, at[1:], strict=False)]


def _buffers(blocks: Sequence[Array]) -> list[Array]:
    return [CPU.xp.empty(b.size, b.dtype) for b in blocks]


def _unpack(blocks: Sequence[Array], received: Sequence[Array]) -> None:
    for block, flat in zip(blocks, received, strict=True):
        CPU.xp.copyto(block, flat.reshape(block.shape))


def _others(shape: Sequence[int], axis: int) -> tuple[int | str, ...]:
    """A shape without the length along ``axis``, which may differ from rank to rank."""
    return (*shape[:axis], "*", *shape[axis + 1 :])


def _lift_axis(params: Params, n: int) -> Params:
    return {**params, "axis": params["axis"] + 1}


def _run_all_gather(xp: Namespace, x: Array, *, group: Group, axis: int, sizes: Sizes, out: Array) -> None:
    blocks = _blocks(out, axis, sizes)
    received = _buffers(blocks)
    detail = f"{x.dtype} {_others(x.shape, axis)}, axis={axis}, sizes={sizes}"
    group.together("all_gather", detail, x.nbytes, lambda: group.engine.all_gather(_flat(x), received))
    _unpack(blocks, received)


all_gather_p: Primitive = _collective(
    "all_gather",
    _run_all_gather,
    lambda x, *, group, axis, sizes: _along(x, axis, sum(sizes)),
    lambda ct, x, *, group, axis, sizes: barrier(reduce_scatter_p, ct, group=group, axis=axis, sizes=sizes),
    _lift_axis,
    "The ranks' blocks one after the other along an axis, on each of them.",
)


def all_gather(
    x: TensorLike, /, axis: int = 0, *, group: Group | None = None, sizes: Sequence[int] | None = None
) -> Tensor:
    """The ranks' ``x`` one after the other along ``axis``, on each rank; they may differ in length along it.

    Of 0-d tensors: a tensor of one dimension.  ``sizes``: all lengths, where they are known (they are asked for else).
    Raises DistributedError on every rank if shapes or dtypes do not fit together, AxisError.
    """
    x, group = tensor("all_gather", x), of(group)
    x, axis, lengths = _with_sizes("all_gather", x, axis, group, sizes)
    return barrier(all_gather_p, x, group=group, axis=axis, sizes=lengths)


def _run_reduce_scatter(xp: Namespace, x: Array, *, group: Group, axis: int, sizes: Sizes, out: Array) -> None:
    send = [(r, _flat(b)) for r, b in enumerate(_blocks(x, axis, sizes))]
    pieces = [xp.empty(out.size, out.dtype) for _ in sizes]
    detail = _detail(x, x.shape, axis=axis, sizes=sizes)
    group.together(
        "reduce_scatter", detail, x.nbytes, lambda: group.engine.exchange(send, list(enumerate(pieces)))
    )  # fmt: skip
    total = xp.empty(out.size, out.dtype)
    reduced(pieces, "sum", total)
    xp.copyto(out, total.reshape(out.shape))


reduce_scatter_p: Primitive = _collective(
    "reduce_scatter",
    _run_reduce_scatter,
    lambda x, *, group, axis, sizes: _along(x, axis, sizes[group.rank]),
    lambda ct, x, *, group, axis, sizes: barrier(all_gather_p, ct, group=group, axis=axis, sizes=sizes),
    _lift_axis,
    "The sum over ranks, each of which gets a block along an axis.",
)


def reduce_scatter(
    x: TensorLike, /, axis: int = 0, *, group: Group | None = None, sizes: Sequence[int] | None = None
) -> Tensor:
    """The sum of ``x`` over the ranks, in their order, of which each rank gets a block along ``axis``.

    ``sizes``: the blocks' lengths (None: equal ones, the first longer by 1 where that does not come out even).
    Raises DistributedError on every rank if shapes or dtypes differ, ShapeError, AxisError.
    """
    x, group = tensor("reduce_scatter", x), of(group)
    axis = normalize_axis("reduce_scatter", axis, x.ndim)
    return barrier(reduce_scatter_p, x, group=group, axis=axis, sizes=_shares("reduce_scatter", x, axis, group, sizes))


def _run_gather(xp: Namespace, x: Array, *, group: Group, axis: int, sizes: Sizes, root: int, out: Array) -> None:
    blocks = _blocks(out, axis, sizes) if group.rank == root else []
    received = _buffers(blocks)
    detail = f"{x.dtype} {_others(x.shape, axis)}, axis={axis}, sizes={sizes}, root={root}"
    start = lambda: group.engine.exchange([(root, _flat(x))], list(enumerate(received)))
    group.together("gather", detail, x.nbytes, start)
    _unpack(blocks, received)


gather_p: Primitive = _collective(
    "gather",
    _run_gather,
    lambda x, *, group, axis, sizes, root: _along(x, axis, sum(sizes) if group.rank == root else 0),
    lambda ct, x, *, group, axis, sizes, root: barrier(scatter_p, ct, group=group, axis=axis, sizes=sizes, root=root),
    _lift_axis,
    "The ranks' blocks one after the other along an axis, on one of them.",
)


def gather(
    x: TensorLike, /, root: int = 0, axis: int = 0, *, group: Group | None = None, sizes: Sequence[int] | None = None
) -> Tensor:
    """The ranks' ``x`` one after the other along ``axis`` on rank ``root``; on the others a tensor of length 0 there.

    ``sizes``: all lengths, where they are known.  Raises DistributedError on every rank if shapes or dtypes do not fit
    together, AxisError.
    """
    x, group = tensor("gather", x), of(group)
    root = _rank("gather", root, group)
    x, axis, lengths = _with_sizes("gather", x, axis, group, sizes)
    return barrier(gather_p, x, group=group, axis=axis, sizes=lengths, root=root)


def _run_scatter(xp: Namespace, x: Array, *, group: Group, axis: int, sizes: Sizes, root: int, out: Array) -> None:
    here = group.rank == root
    send = [(r, _flat(b)) for r, b in enumerate(_blocks(x, axis, sizes))] if here else []
    mine = xp.empty(out.size, out.dtype)
    detail = f"{x.dtype} {_others(x.shape, axis)}, axis={axis}, sizes={sizes}, root={root}"
    group.together("scatter", detail, x.nbytes, lambda: group.engine.exchange(send, [(root, mine)]))
    xp.copyto(out, mine.reshape(out.shape))


def _transpose_scatter(ct: Tensor, x: ShapedArray, *, group: Group, axis: int, sizes: Sizes, root: int) -> Tensor:
    whole = barrier(gather_p, ct, group=group, axis=axis, sizes=sizes, root=root)
    return whole if group.rank == root else zeros(x.shape, dtype=x.dtype, device=x.device)


scatter_p: Primitive = _collective(
    "scatter",
    _run_scatter,
    lambda x, *, group, axis, sizes, root: _along(x, axis, sizes[group.rank]),
    _transpose_scatter,
    _lift_axis,
    "Blocks of one rank's value along an axis, one for each rank.",
)


def scatter(
    x: TensorLike, /, root: int = 0, axis: int = 0, *, group: Group | None = None, sizes: Sequence[int] | None = None
) -> Tensor:
    """A block along ``axis`` of ``x`` of rank ``root``; the others give a tensor of its dtype and dimensions.

    Lengths of the others' ``x`` along ``axis`` do not count (0, say).  ``sizes``: the blocks' lengths (None: equal
    ones, the first longer by 1).  Raises DistributedError on every rank, ShapeError, AxisError.
    """
    x, group = tensor("scatter", x), of(group)
    root, axis = _rank("scatter", root, group), normalize_axis("scatter", axis, x.ndim)
    if sizes is None:
        n = _told("scatter", x, axis, group)[root]
        at = bounds(n, group.size)
        sizes = [j - i for i, j in zip(at, at[1:], strict=False)]
    lengths = _checked("scatter", x, axis, group, sizes, group.rank == root)
    return barrier(scatter_p, x, group=group, axis=axis, sizes=lengths, root=root)


# All to all --------------------------------------------------------------------------------------------------------


def _run_all_to_all(
    xp: Namespace, x: Array, *, group: Group, split: int, concat: int, away: Sizes, come: Sizes, out: Array
) -> None:
    send = [(r, _flat(b)) for r, b in enumerate(_blocks(x, split, away))]
    blocks = _blocks(out, concat, come)
    received = _buffers(blocks)
    alike = list(x.shape)
    alike[split] = alike[concat] = -1
    detail = f"{x.dtype} {tuple(alike)}, from axis {split} to axis {concat}"
    start = lambda: group.engine.exchange(send, list(enumerate(received)))
    group.together("all_to_all", detail, x.nbytes, start)
    _unpack(blocks, received)


def _infer_all_to_all(
    x: ShapedArray, *, group: Group, split: int, concat: int, away: Sizes, come: Sizes
) -> ShapedArray:
    mine = x if split == concat else _along(x, split, away[group.rank])
    return _along(mine, concat, sum(come))


all_to_all_p: Primitive = _collective(
    "all_to_all",
    _run_all_to_all,
    _infer_all_to_all,
    lambda ct, x, *, group, split, concat, away, come: barrier(
        all_to_all_p, ct, group=group, split=concat, concat=split, away=come, come=away
    ),
    lambda params, n: {**params, "split": params["split"] + 1, "concat": params["concat"] + 1},
    "Blocks along an axis, one for each rank; those that come one after the other along another.",
)


def all_to_all(
    x: TensorLike, /, split_axis: int = 0, concat_axis: int = 0, *, group: Group | None = None,
    sizes: Sequence[int] | None = None,
) -> Tensor:  # fmt: skip
    """``x`` cut along ``split_axis``, a block for each rank; what comes is joined along ``concat_axis``.

    ``sizes``: the lengths of the blocks that go to each rank (None: equal ones, the first longer by 1); along two
    different axes all ranks cut alike.  Raises DistributedError on every rank, ShapeError, AxisError.
    """
    x, group = tensor("all_to_all", x), of(group)
    split = normalize_axis("all_to_all", split_axis, x.ndim)
    concat = normalize_axis("all_to_all", concat_axis, x.ndim)
    away = _shares("all_to_all", x, split, group, sizes)
    told = _exchanged("all_to_all", x, (away, x.shape[concat]), group)
    if split == concat:
        come = tuple(cut[group.rank] for cut, _ in told)
    else:
        if len({cut for cut, _ in told}) > 1:
            cuts = "; ".join(f"rank {r}: {cut}" for r, (cut, _) in enumerate(told))
            raise DistributedError(f"all_to_all: along two axes all ranks cut axis {split} alike; {cuts}")
        come = tuple(n for _, n in told)
    return barrier(all_to_all_p, x, group=group, split=split, concat=concat, away=away, come=come)


# Neighbours and pairs ----------------------------------------------------------------------------------------------


def _run_shift(xp: Namespace, x: Array, *, group: Group, offset: int, periodic: bool, out: Array) -> None:
    to, source = neighbour(group, offset, periodic), neighbour(group, -offset, periodic)
    here = xp.empty(out.size, out.dtype)
    send = [] if to is None else [(to, _flat(x))]
    receive = [] if source is None else [(source, here)]
    detail = _detail(x, x.shape, offset=offset, periodic=periodic)
    group.together("shift", detail, x.nbytes, lambda: group.engine.exchange(send, receive))
    if source is None:
        out.fill(0)
    else:
        xp.copyto(out, here.reshape(out.shape))


def neighbour(group: Group, offset: int, periodic: bool) -> int | None:
    """The rank ``offset`` places further; None: beyond the end."""
    there = group.rank + offset
    if periodic:
        return there % group.size
    return there if 0 <= there < group.size else None


shift_p: Primitive = _collective(
    "shift",
    _run_shift,
    _same,
    lambda ct, x, *, group, offset, periodic: barrier(shift_p, ct, group=group, offset=-offset, periodic=periodic),
    _unchanged,
    "The value of the rank some places before; zeros at an open end.",
)


def shift(
    x: TensorLike, /, offset: int = 1, *, periodic: bool = True, fill: complex = 0, group: Group | None = None
) -> Tensor:
    """``x`` of the rank ``offset`` places before this one; all give the same shape and dtype.

    ``periodic``: rank 0 comes after the last; False: at an open end the result is ``fill`` everywhere.
    Raises DistributedError on every rank if shapes or dtypes differ.
    """
    x, group = tensor("shift", x), of(group)
    y = barrier(shift_p, x, group=group, offset=int(offset), periodic=bool(periodic))
    return y if fill == 0 or neighbour(group, -offset, periodic) is not None else y + fill


# What ranks tell each other before ---------------------------------------------------------------------------------


def _rank(op: str, root: int, group: Group) -> int:
    if not -group.size <= root < group.size:
        raise DistributedError(f"{op}: there is no rank {root} in {group!r}")
    return int(root) % group.size


def _with_sizes(op: str, x: Tensor, axis: int, group: Group, sizes: Sequence[int] | None) -> tuple[Tensor, int, Sizes]:
    if x.ndim == 0:
        x, sizes = reshape(x, (1,)), (1,) * group.size
    axis = normalize_axis(op, axis, x.ndim)
    lengths = tuple(_told(op, x, axis, group)) if sizes is None else tuple(map(int, sizes))
    if len(lengths) != group.size or lengths[group.rank] != x.shape[axis]:
        raise ShapeError(
            f"{op}: sizes {lengths} must name the length along axis {axis} of each of {group.size} ranks; "
            f"rank {group.rank} has {x.shape}"
        )
    return x, axis, lengths


def _shares(op: str, x: Tensor, axis: int, group: Group, sizes: Sequence[int] | None) -> Sizes:
    if sizes is None:
        at = bounds(x.shape[axis], group.size)
        return tuple(j - i for i, j in zip(at, at[1:], strict=False))
    return _checked(op, x, axis, group, sizes, True)


def _checked(op: str, x: Tensor, axis: int, group: Group, sizes: Sequence[int], whole: bool) -> Sizes:
    lengths = tuple(map(int, sizes))
    if len(lengths) != group.size or min(lengths) < 0 or (whole and sum(lengths) != x.shape[axis]):
        raise ShapeError(f"{op}: sizes {lengths} must cut axis {axis} of {x.shape} into {group.size} blocks")
    return lengths


def _told(op: str, x: Tensor, axis: int, group: Group) -> list[int]:
    """The lengths along ``axis`` of all ranks."""
    return [int(n) for n in _exchanged(op, x, x.shape[axis], group)]


def _exchanged(op: str, x: Tensor, mine: Any, group: Group) -> list[Any]:
    """What each rank gives; in a dry run what they gave the last time."""
    key = op, x.shape, str(x.dtype), mine
    known: dict[Any, list[Any]] = group.told_before
    if group.size == 1:
        return [mine]

    def ask() -> list[Any]:
        entered = group.line.enter(f"sizes of {op}", f"{x.dtype}, {x.ndim} dimensions", 0)
        known[key] = group.line.told(mine, entered)
        return known[key]

    told = thread.executor.in_earnest(ask, known.get(key))
    if told is None:
        raise DryRunError(f"{op}: a dry run does not know the other ranks' sizes; give sizes=, or run it once before")
    return told
