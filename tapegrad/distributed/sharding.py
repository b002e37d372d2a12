"""Sharding: optimizer state, gradients and parameters cut over ranks, each of which keeps and updates its pieces.

The stages are those of ZeRO (Rajbhandari et al., arXiv 1910.02054).  Bytes on each of N ranks for P parameters of
float32 with Adam: 16 P without; 1: 8 P + 8 P/N; 2: 4 P + 12 P/N; 3: 16 P/N and what is gathered at the time.
Updates are elementwise and sums in the order of ranks, so no stage changes a bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tapegrad.core import tracking
from tapegrad.distributed.collectives.blocks import all_gather, gather_pieces_p, reduce_scatter_p
from tapegrad.distributed.collectives.reductions import all_reduce
from tapegrad.distributed.group import Group, of
from tapegrad.distributed.pieces import Gathered, Piece, cut, note, part, piece_of
from tapegrad.distributed.variables import all_variables, check_alike
from tapegrad.distributed.walks import PEERS
from tapegrad.errors import DistributedError, GradientError
from tapegrad.ops.apply import barrier
from tapegrad.ops.create.creation import asarray, astype, zeros
from tapegrad.ops.shape.blocks import reshaped
from tapegrad.ops.shape.join import concat
from tapegrad.ops.updates import wide
from tapegrad.optim import Optimizer
from tapegrad.tensor import Tensor
from tapegrad.variable import Variable

_AT_ONCE = 4 * 2**20
"""Bytes of variables that are gathered together after an update."""


class ShardedGradient:
    """This rank's piece of a gradient: what a tape of ``tg.distributed`` gives at stage 2, for the optimizer.

    ``piece``: which elements; ``local``: they, a tensor of one dimension.
    """

    def __init__(self, piece: Piece, local: Tensor) -> None:
        self.piece, self.local = piece, local

    def __repr__(self) -> str:
        return f"<elements {self.piece.start} to {self.piece.stop} of a gradient {self.piece.shape}>"

    def whole(self) -> Tensor:
        """The gradient, gathered; every rank asks for it."""
        flat = all_gather(self.local, group=self.piece.group, sizes=self.piece.sizes)
        return reshaped(flat, self.piece.shape)


_stage_2: dict[int, Piece] = {}
"""By the numbers of variables whose gradients are cut."""


def gradient_piece(variable: Variable) -> Piece | None:
    """The piece of a variable's gradient that this rank keeps; None: all of it."""
    return _stage_2.get(variable.construction_number)


class Pieces:
    """The parts that this rank updates of the variables of one optimizer (see ``tapegrad.optim``'s ``Parts``)."""

    def __init__(self, group: Group, variables: Sequence[Variable]) -> None:
        self._group = group
        self._cut = {v.construction_number: cut(v.shape, group) for v in variables if not isinstance(v, Gathered)}

    def _piece(self, v: Variable) -> Piece | None:
        """The part of ``v``; None of one that holds its part alone."""
        if isinstance(v, Gathered):
            return None
        if v.construction_number not in self._cut:
            raise DistributedError(f"optimizer: variable {v.name!r} was not given to tg.distributed.shard")
        return self._cut[v.construction_number]

    def shape(self, variable: Variable) -> tuple[int, ...]:
        """One dimension."""
        piece = self._piece(variable)
        return _held(variable) if piece is None else (piece.stop - piece.start,)

    def made(self, variable: Variable, slot: Variable) -> None:
        """A slot is saved as the piece that it is."""
        piece = self._piece(variable) or piece_of(variable)
        assert piece is not None
        note(slot, piece)

    def gradient(self, g: Any, variable: Variable) -> Tensor:
        """The piece of a gradient, or the piece itself.  Raises GradientError."""
        piece = self._piece(variable)
        if isinstance(g, ShardedGradient):
            found = g.local
        else:
            whole = asarray(g)
            if whole.shape != _held(variable):
                raise GradientError(f"variable {variable.name!r} is {_held(variable)}, its gradient {whole.shape}")
            found = whole if piece is None else part(whole, piece)
        return astype(found, wide(variable.dtype))

    def value(self, variable: Variable) -> Tensor:
        """The piece of the present value."""
        piece, content = self._piece(variable), Tensor(variable._cell.get(variable))
        return content if piece is None else part(content, piece)

    def total(self, squares: Tensor) -> Tensor:
        """Over all ranks."""
        return all_reduce(squares, group=self._group)

    def assign(self, variables: Sequence[Variable], new: Sequence[Tensor]) -> None:
        """Gather the new pieces of all ranks, some variables at a time."""
        waiting: list[tuple[Variable, Piece, Tensor]] = []
        for v, x in zip(variables, new, strict=True):
            piece = self._piece(v)
            if piece is None:
                v.assign(x)
                continue
            if waiting and (v.dtype != waiting[0][0].dtype or sum(w.nbytes for w, _, _ in waiting) >= _AT_ONCE):
                self._gather(waiting)
                waiting = []
            waiting.append((v, piece, x))
        if waiting:
            self._gather(waiting)

    def _gather(self, waiting: list[tuple[Variable, Piece, Tensor]]) -> None:
        by_rank = list(zip(*[piece.sizes for _, piece, _ in waiting], strict=True))
        sizes = [sum(row) for row in by_rank]
        mine = joined([x for _, _, x in waiting])
        flat = barrier(gather_pieces_p, mine, group=self._group, axis=0, sizes=tuple(sizes))
        tracking.current.label(flat._buffer, PEERS.category, "gathered variables")
        at = [sum(sizes[:r]) for r in range(len(sizes))]
        for i, (v, _, _) in enumerate(waiting):
            parts = []
            for r, row in enumerate(by_rank):
                parts.append(flat[at[r] : at[r] + row[i]])
                at[r] += row[i]
            v.assign(reshaped(concat(parts), v.shape))


def _held(variable: Variable) -> tuple[int, ...]:
    """The shape of what this rank holds."""
    return variable.held if isinstance(variable, Gathered) else variable.shape


def joined(parts: Sequence[Tensor]) -> Tensor:
    """Tensors of one dimension, one after the other: a bucket."""
    whole = concat(parts)
    tracking.current.label(whole._buffer, PEERS.category, "a bucket")
    return whole


def reduced_pieces(grads: Sequence[Tensor | None], variables: Sequence[Variable], group: Group) -> list[Tensor]:
    """This rank's pieces of the sums over ranks of several gradients; None counts as zeros."""
    pieces = [gradient_piece(v) for v in variables]
    flat = [zeros(v.size, dtype=v.dtype, device=v.device) if g is None else reshaped(g, (v.size,))
            for g, v in zip(grads, variables, strict=True)]  # fmt: skip
    by_owner, sizes = [], []
    for r in range(group.size):
        before = [sum(p.sizes[:r]) for p in pieces if p is not None]
        count = [p.sizes[r] for p in pieces if p is not None]
        by_owner += [x[i : i + n] for x, i, n in zip(flat, before, count, strict=True)]
        sizes.append(sum(count))
    mine = barrier(reduce_scatter_p, joined(by_owner), group=group, axis=0, sizes=tuple(sizes))
    found, at = [], 0
    for p in pieces:
        assert p is not None
        found.append(mine[at : at + p.stop - p.start])
        at += p.stop - p.start
    return found


def shard(what: Any, optimizer: Optimizer, *, stage: int = 1, group: Group | None = None) -> Optimizer:
    """Cut the state of ``optimizer`` for the variables of ``what`` over the ranks; gives the optimizer.

    ``what``: variables, or layers that have some.  ``stage``: 1: optimizer state; 2: gradients, too
    (``tg.distributed.GradientTape`` then gives :class:`ShardedGradient`); 3: parameters, too: each rank keeps its
    piece, and a variable is gathered wherever an operation reads it: wrap blocks in ``recompute_grad``, so that what
    was gathered goes at a block's end and is gathered again by its rerun.  ``global_clipnorm`` takes the norm over all
    ranks.

    Every rank calls it, with variables of the same values (``broadcast_variables``).  Raises DistributedError on every
    rank if they differ in number, shapes or dtypes, if stages or kinds of optimizers do, or if an optimizer has state
    already.
    """
    group = of(group)
    group.line.enter("shard", f"stage={stage!r}, {type(optimizer).__name__}", 0)
    if stage not in (1, 2, 3):
        raise DistributedError(f"shard: stage is 1 (optimizer state), 2 (gradients) or 3 (parameters), not {stage!r}")
    variables = all_variables("shard", what)
    check_alike(variables, group)
    if group.agree(bool(optimizer._slots) or optimizer.parts is not None):
        raise DistributedError(f"shard: {optimizer} has state already, on some rank; shard it before its first step")
    for v in variables:
        piece = cut(v.shape, group)
        if stage == 2:
            _stage_2[v.construction_number] = piece
        elif stage == 3:
            _become_piece(v, piece)
    optimizer.parts = Pieces(group, variables)
    return optimizer


def _become_piece(variable: Variable, piece: Piece) -> None:
    """Let a variable hold its piece alone."""
    mine = asarray(part(Tensor(variable._cell.get()), piece), copy=True)
    held = Variable(mine, name=variable.name)
    variable.__class__ = Gathered
    variable._aval = held._aval
    variable._cell.set(held._cell.get(), variable)
    note(variable, piece)
