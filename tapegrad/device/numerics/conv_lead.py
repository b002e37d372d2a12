"""Convolutions of operands with more axes in front: these join an axis that a convolution has anyway.

An image has the axes (n, g, c) before its sizes, a kernel (g, o, c) and a result (n, g, o): each axis belongs to two of
the three, but g to all.  So axes in front of an operand and the outcome join the axis that the two share, and axes in
front of all three join the groups.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import TypeAlias

from tapegrad.device.numerics import conv
from tapegrad.device.numerics.windows import Moves
from tapegrad.device.pressure import with_scratch
from tapegrad.device.types import Array, Namespace

IMAGE, KERNEL, RESULT = "ngc", "goc", "ngo"
Operand: TypeAlias = tuple[Array, str]
"""An array, and the names of its axes before the sizes."""


def forward(xp: Namespace, x: Array, w: Array, out: Array, moves: Moves) -> None:
    """As ``conv.forward``; x, w and out may have more axes in front, which broadcast."""
    _run(conv.forward, xp, (x, IMAGE), (w, KERNEL), (out, RESULT), moves)


def in_image(xp: Namespace, ct: Array, w: Array, out: Array, moves: Moves) -> None:
    """As ``conv.in_image``; ct, w and out may have more axes in front, which broadcast."""
    _run(conv.in_image, xp, (ct, RESULT), (w, KERNEL), (out, IMAGE), moves)


def in_kernel(xp: Namespace, x: Array, ct: Array, out: Array, moves: Moves) -> None:
    """As ``conv.in_kernel``; x, ct and out may have more axes in front, which broadcast."""
    _run(conv.in_kernel, xp, (x, IMAGE), (ct, RESULT), (out, KERNEL), moves)


def _run(
    body: Callable[..., None], xp: Namespace, first: Operand, second: Operand, result: Operand, moves: Moves
) -> None:
    own = len(moves.strides) + 2
    out, lead = result[0], result[0].shape[: result[0].ndim - own]
    if not lead or not out.size:
        body(xp, first[0], second[0], out, moves)
        return
    count = prod(lead)
    alone = [prod(a.shape[: a.ndim - own]) == 1 for a, _ in (first, second)]
    # Which axis takes those in front: of the two arrays that have them, the one the third array lacks.
    axis = "g" if not any(alone) else (set("ngoc") - set((first if alone[0] else second)[1])).pop()
    copies = 0 if axis == result[1][0] else out.nbytes
    copies += sum(
        count * prod(a.shape[a.ndim - own :]) * a.itemsize
        for (a, kind), without in zip((first, second), alone) if not (without and axis not in kind)
    )  # fmt: skip
    with_scratch(copies, lambda: _run_joined(body, xp, first, second, result, moves, alone, axis))


def _run_joined(
    body: Callable[..., None],
    xp: Namespace,
    first: Operand,
    second: Operand,
    result: Operand,
    moves: Moves,
    alone: list[bool],
    axis: str,
) -> None:
    own = len(moves.strides) + 2
    out, lead = result[0], result[0].shape[: result[0].ndim - own]
    count = prod(lead)
    arrays = []
    for (a, kind), without in zip((first, second), alone):
        if without and axis not in kind:
            arrays.append(a.reshape(a.shape[a.ndim - own :]))
        else:
            whole = xp.broadcast_to(a, (*lead, *a.shape[a.ndim - own :]))
            arrays.append(_join(xp, whole.reshape(count, *whole.shape[len(lead) :]), kind, axis, moves.groups))
    kind, groups = result[1], moves.groups
    shape = _apart(out.shape[len(lead) :], kind, groups)
    at = kind.index(axis)
    joined = (*shape[:at], count * shape[at], *shape[at + 1 :])
    flat = _together(joined, kind)
    inner = moves._replace(groups=groups * count if axis == "g" else groups)
    if at == 0:  # what the axes in front join is the next axis already
        body(xp, *arrays, out.reshape(flat), inner)
        return
    joined = xp.empty(flat, out.dtype)
    body(xp, *arrays, joined, inner)
    joined = joined.reshape(*shape[:at], count, *shape[at:])
    out[...] = xp.moveaxis(joined, at, 0).reshape(out.shape)


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


def _join(xp: Namespace, a: Array, kind: str, axis: str, groups: int) -> Array:
    """``a``, with one axis in front, without it: ``axis`` has become that many times as long."""
    shape = _apart(a.shape[1:], kind, groups)
    at = kind.index(axis)
    moved = xp.moveaxis(a.reshape(a.shape[0], *shape), 0, at)
    return moved.reshape(_together((*shape[:at], a.shape[0] * shape[at], *shape[at + 1 :]), kind))
