"""Loops under JAX's names: plain Python loops, which a tape records step by step.

A step's values are kept as a tape keeps any; for a long loop ``checkpointed_loop`` keeps states only.  As in JAX, a
step returns a state of the structure, shapes and dtypes of the one it was given, and otherwise raises StructureError.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import repeat
from operator import index
from typing import Any

from tapegrad import nest
from tapegrad.autodiff.loop_states import check_state, check_structure, index_for, stacked
from tapegrad.errors import ShapeError, StructureError
from tapegrad.ops.create.creation import asarray
from tapegrad.ops.shape.join import slices


def scan(
    f: Callable[..., object], init: object, xs: object = None, length: int | None = None, reverse: bool = False
) -> tuple[Any, Any]:
    """Carry a state over the leading axis of ``xs``: ``f(state, x) -> (state, y)``; the last state and all ``y``.

    init: the first state, of any structure.  xs: a tensor or structure of them, of one length; None: ``length`` steps
    with ``x = None``.  reverse: from the last ``x`` to the first; ``y`` keep the order of ``xs``.  ``y``: stacked along
    a new leading axis, in the structure that ``f`` returns (None where it returns None, and for no steps at all).

    Raises ShapeError if lengths differ or none is given, StructureError if a step changes the structure of the state or
    of ``y``, or a shape or dtype in the state.
    """
    leaves = [None if leaf is None else asarray(leaf) for leaf in nest.flatten(xs)]
    lengths = {x.shape[0] if x.ndim else None for x in leaves if x is not None}
    lengths |= {length} if length is not None else set()
    if len(lengths) != 1 or None in lengths:
        raise ShapeError(f"scan: lengths {sorted(map(str, lengths))}; give xs of one length, or length=")
    steps = range(lengths.pop() or 0)
    state, ys = init, list[Any]()
    given = [repeat(None) if leaf is None else slices(leaf, backwards=reverse) for leaf in leaves]
    for i in reversed(steps) if reverse else steps:
        out = f(state, nest.rebuild(xs, iter([next(column) for column in given])))
        if not isinstance(out, (tuple, list)) or len(out) != 2:
            raise StructureError(f"scan: f must return (state, y), step {i} returned {nest.shown(out)}")
        check_state("scan", i, state, out[0])
        state = out[0]
        if ys:
            check_structure("scan", "y", i, ys[0], out[1])
        ys.append(out[1])
    if reverse:
        ys.reverse()
    return state, stacked(ys)


def fori_loop(lower: int, upper: int, body: Callable[..., object], init: object) -> Any:
    """The state after ``state = body(i, state)`` for ``i`` from ``lower`` to below ``upper``, from ``init``.

    A captured ``body`` (``tg.function``) gets ``i`` as a 0-d int64 tensor, any other as a Python number.

    Raises StructureError (TypeError, ValueError) for a state that changes its structure, a shape or a dtype.
    """
    state = init
    for i in range(index(lower), index(upper)):
        before, state = state, body(index_for(body, i, state), state)
        check_state("fori_loop", i, before, state)
    return state


def while_loop(cond: Callable[..., object], body: Callable[..., object], init: object) -> Any:
    """The state after ``state = body(state)`` for as long as ``cond(state)`` holds, from ``init``.

    ``cond`` reads values, so the number of steps may depend on them; the gradient is that of the steps taken.
    Raises StructureError (TypeError, ValueError) for a state that changes its structure, a shape or a dtype.
    """
    state, step = init, 0
    while bool(cond(state)):
        before, state = state, body(state)
        check_state("while_loop", step, before, state)
        step += 1
    return state
