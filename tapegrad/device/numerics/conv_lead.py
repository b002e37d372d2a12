"""Convolutions of operands with more axes in front: these join an axis that a convolution has anyway.

An image has the axes (n, g, c) before its sizes, a kernel (g, o, c) and a result (n, g, o): each axis belongs to two of
the three, but g to all.  So axes in front of an operand and the outcome join the axis that the two share, and axes in
front of all three join the groups.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any, NamedTuple, TypeAlias

from tapegrad.device.numerics.windows import Moves
from tapegrad.device.types import Array, DType, Namespace

IMAGE, KERNEL, RESULT = "ngc", "goc", "ngo"
Operand: TypeAlias = tuple[Array, str]
"""An array, and the names of its axes before the sizes."""


class Prepared(NamedTuple):
    """A convolution to be computed by ``run()``, which takes at most so many bytes for itself.

    ``parts``: bytes of them that are written and read by a kernel more.
    """

    nbytes: int
    run: Callable[[], None]
    parts: int = 0


class Unmade:
    """A C-contiguous array yet to be made, as far as preparing a convolution asks for one."""

    class flags:
        c_contiguous = True

    def __init__(self, shape: tuple[int, ...], dtype: DType) -> None:
        self.shape, self.dtype, self.size = shape, dtype, prod(shape)
        self.nbytes = self.size * dtype.itemsize


Body: TypeAlias = Callable[[Array, Array, Array, Moves], Prepared]
"""What prepares a convolution of two arrays without axes in front, into a third."""


def forward(body: Body, xp: Namespace, x: Array, w: Array, out: Array, moves: Moves) -> Prepared:
    """``body`` of an image and a kernel; x, w and out may have more axes in front, which broadcast."""
    return _prepared(body, xp, (x, IMAGE), (w, KERNEL), (out, RESULT), moves)


def in_image(body: Body, xp: Namespace, ct: Array, w: Array, out: Array, moves: Moves) -> Prepared:
    """``body`` of a cotangent and a kernel; ct, w and out may have more axes in front, which broadcast."""
    return _prepared(body, xp, (ct, RESULT), (w, KERNEL), (out, IMAGE), moves)


def in_kernel(body: Body, xp: Namespace, x: Array, ct: Array, out: Array, moves: Moves) -> Prepared:
    """``body`` of an image and a cotangent; x, ct and out may have more axes in front, which broadcast."""
    return _prepared(body, xp, (x, IMAGE), (ct, RESULT), (out, KERNEL), moves)


def _prepared(body: Body, xp: Namespace, first: Operand, second: Operand, result: Operand, moves: Moves) -> Prepared:
    own = len(moves.strides) + 2
    out, lead = result[0], result[0].shape[:-own]
    if not lead or not out.size:
        return body(first[0], second[0], out, moves)
    count = prod(lead)
    alone = [prod(a.shape[:-own]) == 1 for a, _ in (first, second)]
    # Which axis takes those in front: of the two arrays that have them, the one the third array lacks.
    axis = "g" if not any(alone) else (set("ngoc") - set((first if alone[0] else second)[1])).pop()
    joins = [not without or axis in kind for (_, kind), without in zip((first, second), alone)]
    inner = moves._replace(groups=moves.groups * count if axis == "g" else moves.groups)
    joined: list[Any] = []
    for (a, kind), join in zip((first, second, result), (*joins, True)):
        shape = a.shape[-own:]
        joined.append(Unmade(_joined(shape, kind, axis, count, moves.groups), a.dtype) if join else a.reshape(shape))
    copied = [*joins, axis != result[1][0]]  # else what the axes in front join is the next axis already
    copies = sum(a.nbytes for a, copy in zip(joined, copied) if copy)

    def run() -> None:
        one, other = [
            _join(xp, xp.broadcast_to(a, (*lead, *a.shape[-own:])), len(lead), kind, axis, moves.groups)
            if join else a.reshape(a.shape[-own:])
            for (a, kind), join in zip((first, second), joins)
        ]  # fmt: skip
        kind, flat = result[1], joined[2].shape
        if not copied[2]:
            body(one, other, out.reshape(flat), inner).run()
            return
        found = xp.empty(flat, out.dtype)
        body(one, other, found, inner).run()
        shape, at = _apart(out.shape[len(lead) :], kind, moves.groups), kind.index(axis)
        out[...] = xp.moveaxis(found.reshape(*shape[:at], count, *shape[at:]), at, 0).reshape(out.shape)

    inside = body(joined[0], joined[1], joined[2], inner)
    return Prepared(copies + inside.nbytes, run, inside.parts)


def _apart(shape: tuple[int, ...], kind: str, groups: int) -> tuple[int, ...]:
    """The shape with the groups as an axis of their own."""
    if kind == KERNEL:
        return (groups, shape[0] // groups, *shape[1:])
    return (shape[0], groups, shape[1] // groups, *shape[2:])


def _together(shape: tuple[int, ...], kind: str) -> tuple[int, ...]:
    """The inverse of ``_apart``."""
    if kind == KERNEL:
        return (shape[0] * shape[1], *shape[2:])
    return (shape[0], shape[1] * shape[2], *shape[3:])


def _joined(shape: tuple[int, ...], kind: str, axis: str, count: int, groups: int) -> tuple[int, ...]:
    """The shape whose ``axis`` has become ``count`` times as long."""
    shape, at = _apart(shape, kind, groups), kind.index(axis)
    return _together((*shape[:at], count * shape[at], *shape[at + 1 :]), kind)


def _join(xp: Namespace, a: Array, lead: int, kind: str, axis: str, groups: int) -> Array:
    """``a``, with ``lead`` axes in front, without them: ``axis`` has become that many times as long."""
    count, own = prod(a.shape[:lead]), a.shape[lead:]
    moved = xp.moveaxis(a.reshape(count, *_apart(own, kind, groups)), 0, kind.index(axis))
    return moved.reshape(_joined(own, kind, axis, count, groups))
