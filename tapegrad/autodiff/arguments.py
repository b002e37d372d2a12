"""What a derivative of a function is taken in: the chosen arguments, as values of their own."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import index
from typing import TYPE_CHECKING, Any

from tapegrad import nest
from tapegrad.autodiff.cotangent_seeds import apart
from tapegrad.autodiff.recording import Trace
from tapegrad.autodiff.zeros import zeros_of
from tapegrad.device import dtypes
from tapegrad.errors import DTypeError, GradientError, GradientTypeError
from tapegrad.ops.create.creation import asarray
from tapegrad.tensor import Tensor, identity_of

if TYPE_CHECKING:
    from tapegrad.tensor import TensorLike

Argnums = int | Sequence[int]


class Sources:
    """The chosen arguments as fresh tensors, and the function called on them."""

    def __init__(self, name: str, args: tuple[object, ...], argnums: Argnums) -> None:
        self.name = name
        try:
            chosen = tuple(map(index, argnums if isinstance(argnums, (tuple, list)) else (argnums,)))
        except TypeError:
            raise GradientTypeError(
                f"{name}: argnums must be the position of an argument or several of them, got {argnums!r:.60}"
            ) from None
        for n in chosen:
            if not -len(args) <= n < len(args):
                raise GradientError(f"{name}: argnums {argnums} names argument {n}, but {len(args)} were given")
        self.positions = [n % len(args) for n in chosen]
        self.single = not isinstance(argnums, (tuple, list))
        self.args = list(args)
        for n in self.positions:
            nest.refuse_hidden(name, args[n])
            self.args[n] = nest.map_leaves(self._fresh, args[n])
        self._all: list[Tensor | None] = nest.flatten([self.args[n] for n in self.positions])
        self.leaves = [t for t in self._all if t is not None]

    def _fresh(self, x: TensorLike | None) -> Tensor | None:
        if x is None:  # an empty place in a structure
            return None
        t = identity_of(asarray(x))
        if not dtypes.is_inexact(t.dtype):
            raise DTypeError(f"{self.name}: cannot differentiate in an argument of dtype {t.dtype}; make it a float")
        return t

    def trace(self) -> Trace:
        """A recording that follows them."""
        return Trace([t._buffer.node for t in self.leaves])

    def mirrored(self, values: list[Any], given: Iterable[object] = ()) -> Any:
        """``values`` in the structure of the chosen arguments: zeros for None, a new tensor for one of ``given``."""
        values = list(map(apart(given), values))
        of_each = iter(zip(self.leaves, values, strict=True))
        filled = (None if t is None else self._filled(*next(of_each)) for t in self._all)
        trees = tuple(nest.rebuild(self.args[n], filled) for n in self.positions)
        return trees[0] if self.single else trees

    @staticmethod
    def _filled(source: Tensor, value: Any) -> Any:
        return zeros_of(source._buffer.node.aval) if value is None else value

    def of_tensors(self, values: Iterable[Any]) -> list[Any]:
        """Return those of ``values``, one for each leaf of the arguments, whose leaf is not None."""
        return [value for t, value in zip(self._all, values, strict=True) if t is not None]


def parted(name: str, result: Any, has_aux: bool) -> tuple[Any, Any]:
    """What is differentiated of a function's result, and what comes along with it (None without ``has_aux``).

    Raises StructureError for an object that holds tensors and is no structure.
    """
    if not has_aux:
        nest.refuse_hidden(name, result)
        return result, None
    if not (isinstance(result, (tuple, list)) and len(result) == 2):
        raise GradientError(f"{name}: with has_aux the function must return (value, aux), got {nest.shown(result)}")
    nest.refuse_hidden(name, result[0])
    return result[0], result[1]
