"""What a backward walk starts from: the cotangents of its targets, checked."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from tapegrad import nest
from tapegrad.core.aval import ShapedArray
from tapegrad.device import dtypes
from tapegrad.errors import DTypeError, GradientError, NotATensorError, ShapeError, StructureError
from tapegrad.ops.apply import barrier
from tapegrad.ops.create.creation import asarray, ones
from tapegrad.ops.dispatch import cast
from tapegrad.ops.index.slices import IndexedSlices
from tapegrad.ops.shape.shape import broadcast_p, broadcast_to
from tapegrad.tensor import Tensor, identity_of
from tapegrad.variable import Variable

if TYPE_CHECKING:
    from tapegrad.tensor import TensorLike


def wants_zeros(mode: object) -> bool:
    """Whether unconnected sources get zeros.  Raises GradientError for an unknown mode."""
    name = getattr(mode, "value", mode)
    if name not in ("none", "zero"):
        raise GradientError(f"unconnected_gradients is 'none' or 'zero', not {mode!r}")
    return name == "zero"


def apart(given: Iterable[object] = ()) -> Callable[[Any], Any]:
    """A function that maps each result to itself, or to a copy if it is one of ``given`` or came before."""
    known = {id(t._buffer): t for t in given if isinstance(t, Tensor)}

    def of(x: object) -> Any:
        t = x.values if isinstance(x, IndexedSlices) else x
        if isinstance(t, Tensor):
            if id(t._buffer) in known:
                t = identity_of(t)
                x = x.with_values(t) if isinstance(x, IndexedSlices) else t
            known[id(t._buffer)] = t
        return x

    return of


def weights_of(tree: object, targets: list[Any], given: object) -> tuple[list[Tensor], list[bool]]:
    """Return a cotangent for each target, and whether it was given: in the structure of ``tree``, or listed.

    ``targets``: the leaves of ``tree``; those without one get ones.
    """
    if given is None:
        return [ones_of(t) for t in targets], [False] * len(targets)
    given = nest.whole(given)
    weights = nest.flatten(given)
    if not any(nest.alike(x, y) for x in (given, [given]) for y in (targets, tree)):
        raise StructureError(
            f"output_gradients: {len(weights)} given for {len(targets)} targets: their structure is "
            f"{nest.shown(given)}, that of the targets {nest.shown(tree)}; give that structure, or one list of them"
        )
    cotangents = [_weight(i, t, w) for i, (t, w) in enumerate(zip(targets, weights, strict=True))]
    return cotangents, [w is not None for w in weights]


def _weight(i: int, target: Any, weight: TensorLike | None) -> Tensor:
    aval: ShapedArray = (target._cell.get() if isinstance(target, Variable) else target._buffer).node.aval
    if weight is None:
        return ones_of(target)
    return fitted(f"output_gradients: number {i}", "its target", weight, aval)


def fitted(what: str, whose: str, given: TensorLike, aval: ShapedArray) -> Tensor:
    """``given`` as a tensor of ``aval``: a number or 0-d tensor stands for every element.

    Raises DTypeError and ShapeError, which call it ``what``, and ``whose`` what it belongs to.
    """
    strict = isinstance(given, (Tensor, Variable))
    seed = asarray(given)
    if seed.dtype != aval.dtype:
        if strict or not dtypes.can_cast(seed.dtype, aval.dtype):
            raise DTypeError(f"{what} is {seed.dtype}, {whose} {aval.dtype}; use tg.astype")
        seed = cast(seed, aval.dtype)
    if seed.shape == aval.shape:
        return seed
    if seed.ndim == 0:
        return broadcast_to(seed, aval.shape)
    raise ShapeError(f"{what} has shape {seed.shape}, {whose} {aval.shape}")


def handles(role: str, tree: object) -> list[Any]:
    """The leaves of ``tree``.  Raises NotATensorError for one that is neither a tensor nor a variable."""
    leaves = nest.flatten(tree)
    for x in leaves:
        if not isinstance(x, (Tensor, Variable)):
            raise NotATensorError(f"{role}: {type(x).__name__} {x!r:.60} is neither a tensor nor a variable")
    return leaves


def ones_of(x: Tensor) -> Tensor:
    """Return ones of the shape of ``x``, backed by a single element."""
    shape = x.shape
    one = ones((1,) * len(shape), dtype=x.dtype, device=x.device)
    return one if one.shape == shape else barrier(broadcast_p, one, shape=shape)
