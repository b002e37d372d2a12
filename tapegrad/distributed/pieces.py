"""Pieces: which elements of a variable this rank holds, of those that are cut over the ranks of a group."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

from tapegrad import ops
from tapegrad.core import tracking
from tapegrad.core.aval import Shape
from tapegrad.device.types import Array
from tapegrad.distributed.collectives.blocks import gather_pieces_p
from tapegrad.distributed.group import Group
from tapegrad.distributed.ordered import bounds
from tapegrad.distributed.walks import PEERS
from tapegrad.errors import UnsizedError
from tapegrad.ops.apply import barrier
from tapegrad.ops.shape.blocks import reshaped
from tapegrad.tensor import Tensor, TensorLike
from tapegrad.variable import Variable, everyone


@dataclass(frozen=True)
class Piece:
    """Of a variable of ``shape``, the elements from ``start`` to ``stop`` in C order: this rank's of ``group``."""

    group: Group
    shape: Shape
    start: int
    stop: int

    @property
    def sizes(self) -> tuple[int, ...]:
        """How many elements each rank has."""
        at = bounds(prod(self.shape), self.group.size)
        return tuple(j - i for i, j in zip(at, at[1:], strict=False))


_known: dict[int, Piece] = {}
"""By the numbers of variables whose contents are pieces."""


def cut(shape: Shape, group: Group) -> Piece:
    """This rank's piece: equal ones, the first ranks' longer by 1 where that does not come out even."""
    at = bounds(prod(shape), group.size)
    return Piece(group, tuple(shape), at[group.rank], at[group.rank + 1])


def part(x: Tensor, piece: Piece) -> Tensor:
    """The elements of the whole that are ``piece``."""
    return reshaped(x, (x.size,))[piece.start : piece.stop]


def note(variable: Variable, piece: Piece) -> None:
    """The content of ``variable`` is ``piece``."""
    for number in [n for n in _known if n not in everyone]:
        del _known[number]
    _known[variable.construction_number] = piece


def piece_of(variable: Variable) -> Piece | None:
    """The piece that a variable holds; None: it holds all."""
    return _known.get(variable.construction_number)


def assign_piece(variable: Variable, x: Array) -> None:
    """Give a variable another content of its shape."""
    variable.assign(ops.asarray(x, device=variable.device))


class Gathered(Variable):
    """A variable that holds a piece, and is gathered from all ranks wherever an operation reads it.

    What was gathered is an intermediate result: it goes when nobody needs it, within ``recompute_grad`` at the end of
    the block, and is gathered again by the rerun.  ``shape``, ``ndim`` and ``size`` are the whole's, for layers
    ask for them.  Gradients are those of the piece, summed over ranks; ``nbytes``, ``numpy`` and ``assign_add`` are the
    piece's, a tensor of one dimension; ``assign`` takes that or the whole.
    """

    __slots__ = ()

    @property
    def shape(self) -> Shape:
        """Of the whole."""
        return _known[self.construction_number].shape

    @property
    def ndim(self) -> int:
        """Of the whole."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """Of the whole."""
        return prod(self.shape)

    @property
    def held(self) -> Shape:
        """The piece's shape."""
        return self._aval.shape

    def __len__(self) -> int:
        if not self.ndim:
            raise UnsizedError(f"len: variable {self.name!r} of no dimensions has no length")
        return self.shape[0]

    def assign(
        self, value: TensorLike, use_locking: bool = False, name: str | None = None, read_value: bool = True
    ) -> Any:
        """Exchange the piece, for one or for that of the whole.  Arguments and errors as of ``Variable.assign``."""
        x = Tensor(self._fitting("assign", value))
        if x.shape == self.shape:
            piece = _known[self.construction_number]
            x = part(x, piece)
        return super().assign(x, read_value=read_value)

    def _content(self) -> Tensor:
        mine, piece = super()._content(), _known[self.construction_number]
        whole = barrier(gather_pieces_p, mine, group=piece.group, axis=0, sizes=piece.sizes)
        tracking.current.label(whole._buffer, PEERS.category, "gathered variables")
        return reshaped(whole, piece.shape)
