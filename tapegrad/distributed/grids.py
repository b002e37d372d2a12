"""Cartesian grids of ranks, each with a block of a field: blocks, halos, and whole fields.

A halo is what a stencil reads of the neighbours' blocks.  Axes are exchanged one after the other, each on blocks that
have the halos of the ones before: so corners arrive without messages of their own.  Backwards the axes come in reverse
order, and cotangents of halos are added to those of the blocks they came from, in a fixed order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from numbers import Integral
from typing import Any

from tapegrad.distributed.collectives.blocks import gather, scatter
from tapegrad.distributed.collectives.declaring import told_by_all
from tapegrad.distributed.collectives.exchanges import neighbour, shift
from tapegrad.distributed.group import Group, of
from tapegrad.distributed.ordered import bounds
from tapegrad.errors import DistributedError, ShapeError
from tapegrad.ops.create.creation import full, zeros
from tapegrad.ops.dispatch import tensor
from tapegrad.ops.shape.join import concat
from tapegrad.ops.shape.shape import broadcast_to, reshape
from tapegrad.tensor import Tensor, TensorLike

Widths = int | Sequence[int | tuple[int, int]]
"""Of a halo: the same everywhere, or for each axis, before and after alike or not."""
Fill = complex | str | Callable[[Tensor, int, int, int], TensorLike]
"""At an open end: a number, ``"edge"``, or a function of the block, the axis, the side (-1, 1) and the width."""


class Grid:
    """Ranks in rows and columns: ``shape`` ranks along each axis, ``coords`` of this one, C order.

    ``periodic``: whether the last rank along an axis has the first for its neighbour, for each axis.

    Raises DistributedError on every rank if they give other shapes, or these are not of as many ranks as the group.
    """

    def __init__(
        self, shape: Sequence[int], periodic: bool | Sequence[bool] = False, group: Group | None = None
    ) -> None:
        self.group = of(group)
        self.shape = tuple(int(n) for n in shape)
        ends = [periodic] * len(self.shape) if isinstance(periodic, bool) else list(periodic)
        self.group.line.enter("grid", f"{self.shape} ranks, periodic={ends}", 0)
        if not self.shape or min(self.shape) < 1 or prod(self.shape) != self.group.size:
            raise DistributedError(
                f"grid: {' x '.join(map(str, self.shape)) or 'no'} ranks do not fill a group of {self.group.size}; "
                "their product must be its size"
            )
        if len(ends) != len(self.shape):
            raise DistributedError(f"grid: periodic names {len(ends)} axes, the grid has {len(self.shape)}")
        self.periodic = tuple(map(bool, ends))
        self.coords = _coords(self.group.rank, self.shape)
        self.lines = tuple(self._line(axis) for axis in range(len(self.shape)))
        """For each axis the group of ranks that differ from this one along it only."""

    def __repr__(self) -> str:
        return f"<grid {self.shape}, this rank at {self.coords}>"

    def _line(self, axis: int) -> Group:
        others = [c for a, c in enumerate(self.coords) if a != axis]
        extents = [n for a, n in enumerate(self.shape) if a != axis]
        color = 0
        for c, n in zip(others, extents, strict=True):
            color = color * n + c
        return self.group.split(color, self.coords[axis])

    def block(self, shape: Sequence[int], rank: int | None = None) -> tuple[slice, ...]:
        """Which part of a field of ``shape`` a rank (None: this one) has; the first ones have one more.

        Axes of the field after those of the grid are not cut.
        """
        if len(shape) < len(self.shape):
            raise ShapeError(f"grid: a field of {len(shape)} axes cannot be cut along {len(self.shape)}")
        coords = self.coords if rank is None else _coords(rank, self.shape)
        cuts = [bounds(n, k) for n, k in zip(shape, self.shape, strict=False)]
        found = [slice(at[c], at[c + 1]) for at, c in zip(cuts, coords, strict=True)]
        return (*found, *(slice(0, n) for n in shape[len(self.shape) :]))


def _coords(rank: int, shape: Sequence[int]) -> tuple[int, ...]:
    found = []
    for n in reversed(shape):
        found.append(rank % n)
        rank //= n
    return tuple(reversed(found))


# Halos -------------------------------------------------------------------------------------------------------------


def halo_exchange(u: TensorLike, width: Widths, grid: Grid, *, fill: Fill = 0) -> Tensor:
    """``u``, this rank's block, with the neighbours' borders around it along the axes of ``grid``.

    ``width``: of the halo, for all axes or for each, (before, after) or the same.  Blocks may be unequal, but each is
    as long as the halo is wide.  ``fill``: what lies beyond an open end.  Two messages an axis, one each way.

    Raises DistributedError on every rank of a line in which a block is too short, ShapeError if all are.
    """
    x = tensor("halo_exchange", u)
    widths = _widths(width, len(grid.shape))
    if x.ndim < len(grid.shape):
        raise ShapeError(f"halo_exchange: a block of {x.ndim} axes on a grid of {len(grid.shape)}")
    for axis, (before, after) in enumerate(widths):
        x = _along_axis(x, axis, before, after, grid, fill)
    return x


def interior(u: TensorLike, width: Widths, grid: Grid) -> Tensor:
    """``u`` without its halo of ``width``."""
    x = tensor("interior", u)
    widths = _widths(width, len(grid.shape))
    return x[tuple(slice(b, n - a) for (b, a), n in zip(widths, x.shape, strict=False))]


def _widths(width: Widths, axes: int) -> list[tuple[int, int]]:
    each: Sequence[Any] = [width] * axes if isinstance(width, (int, Integral)) else list(width)
    found = [(int(w), int(w)) if isinstance(w, (int, Integral)) else (int(w[0]), int(w[1])) for w in each]
    if len(found) != axes or any(min(w) < 0 for w in found):
        raise ShapeError(f"halo_exchange: width {width!r} names no halo for each of {axes} axes")
    return found


def _refuse_short(n: int, axis: int, width: int, grid: Grid) -> None:
    """Raise an error on every rank of the line: no other rank enters a collective of this name."""
    text = f"halo_exchange with a block of {n} elements along axis {axis}, fewer than the halo's width {width}"
    grid.lines[axis].line.enter(text, "no data", 0)
    raise ShapeError(f"{text}; take fewer ranks along this axis, or a narrower halo")


def _along_axis(x: Tensor, axis: int, before: int, after: int, grid: Grid, fill: Fill) -> Tensor:
    line, periodic, n = grid.lines[axis], grid.periodic[axis], x.shape[axis]
    if n < max(before, after) and (line.size > 1 or periodic):
        _refuse_short(n, axis, max(before, after), grid)
    parts = [x]
    if before:
        ghost = _shifted(_cut(x, axis, n - before, n), 1, periodic, line)
        open_end = neighbour(line, -1, periodic) is None
        parts.insert(0, _beyond(ghost, x, axis, -1, before, fill) if open_end else ghost)
    if after:
        ghost = _shifted(_cut(x, axis, 0, after), -1, periodic, line)
        open_end = neighbour(line, 1, periodic) is None
        parts.append(_beyond(ghost, x, axis, 1, after, fill) if open_end else ghost)
    return parts[0] if len(parts) == 1 else concat(parts, axis=axis)


def _shifted(border: Tensor, offset: int, periodic: bool, line: Group) -> Tensor:
    """The neighbour's border.  A rank alone in its line asks nobody, so steps of one process can be captured."""
    if line.size > 1:
        return shift(border, offset, periodic=periodic, group=line)
    return border if periodic else zeros(border.shape, dtype=border.dtype, device=border.device)


def _cut(x: Tensor, axis: int, start: int, stop: int) -> Tensor:
    return x[(slice(None),) * axis + (slice(start, stop),)]


def _beyond(ghost: Tensor, x: Tensor, axis: int, side: int, width: int, fill: Fill) -> Tensor:
    """What lies beyond an open end; ``ghost``: zeros of its shape."""
    if fill == "edge":
        n = x.shape[axis]
        return broadcast_to(_cut(x, axis, 0, 1) if side < 0 else _cut(x, axis, n - 1, n), ghost.shape)
    if callable(fill):
        found = tensor("halo_exchange", fill(x, axis, side, width), x)
        if found.shape != ghost.shape or found.dtype != ghost.dtype:
            raise ShapeError(
                f"halo_exchange: fill gave {found.dtype} {found.shape} for axis {axis}, side {side}; the halo there "
                f"is {ghost.dtype} {ghost.shape}"
            )
        return found
    if isinstance(fill, str):
        raise DistributedError(f'halo_exchange: fill is a number, "edge" or a function, not {fill!r}')
    return ghost if fill == 0 else full(ghost.shape, fill, dtype=ghost.dtype, device=ghost.device)


# Whole fields ------------------------------------------------------------------------------------------------------


def scatter_field(x: TensorLike | None, grid: Grid, root: int = 0) -> Tensor:
    """This rank's block of a field that rank ``root`` has; the others give None.  On the tape."""
    group = grid.group
    whole = None if x is None else tensor("scatter_field", x)
    mine = None if whole is None else (whole.shape, str(whole.dtype))
    told = told_by_all("scatter_field", ("field", mine, root), mine, group)[root]
    if told is None:
        raise DistributedError(f"scatter_field: rank {root}, the root, gives no field")
    shape, dtype = told
    blocks = [grid.block(shape, r) for r in range(group.size)]
    extents = [tuple(s.stop - s.start for s in b) for b in blocks]
    if group.rank == root and whole is not None:
        flat = concat([reshape(whole[b], (-1,)) for b in blocks])
    else:
        flat = zeros((0,), dtype=dtype)
    mine_flat = scatter(flat, root, group=group, sizes=[prod(e) for e in extents])
    return reshape(mine_flat, extents[group.rank])


def gather_field(u: TensorLike, grid: Grid, root: int = 0) -> Tensor | None:
    """The field whose blocks the ranks have, on rank ``root``; None on the others.  On the tape.

    Blocks are those of :meth:`Grid.block`, or any others that fit together.  Raises DistributedError on every rank.
    """
    x, group = tensor("gather_field", u), grid.group
    shapes = [tuple(s) for s in told_by_all("gather_field", ("block", x.shape), x.shape, group, x.shape)]
    _check_fitting(shapes, grid)
    flat = gather(reshape(x, (-1,)), root, group=group, sizes=[prod(s) for s in shapes])
    if group.rank != root:
        return None
    at = [sum(prod(s) for s in shapes[:r]) for r in range(group.size)]
    blocks = [reshape(flat[i : i + prod(s)], s) for i, s in zip(at, shapes, strict=True)]
    return _assembled(blocks, grid.shape, 0)


def _assembled(blocks: list[Tensor], shape: tuple[int, ...], axis: int) -> Tensor:
    """Blocks in C order put together along the axes from ``axis`` on."""
    if axis == len(shape):
        return blocks[0]
    each = len(blocks) // shape[axis]
    parts = [_assembled(blocks[i * each : (i + 1) * each], shape, axis + 1) for i in range(shape[axis])]
    return concat(parts, axis=axis)


def _check_fitting(shapes: list[tuple[int, ...]], grid: Grid) -> None:
    """Raise DistributedError if blocks do not fit together: ranks of one coordinate are equally long there."""
    lengths: dict[tuple[int, int], tuple[int, int]] = {}
    for rank, shape in enumerate(shapes):
        coords = _coords(rank, grid.shape)
        for axis, n in enumerate(shape):
            place = axis, coords[axis] if axis < len(coords) else 0
            known, first = lengths.setdefault(place, (n, rank))
            if n != known or len(shape) != len(shapes[0]):
                raise DistributedError(
                    f"gather_field: the blocks of ranks {first} and {rank} do not fit together along axis {axis}: "
                    f"{shapes[first]} and {shape}"
                )
