"""vmap: a function of one example made a function of a batch of them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, get_args

from tapegrad import nest
from tapegrad.autodiff.batching import Batches, Randomness, example_of, failure_of
from tapegrad.core.aval import normalize_axis
from tapegrad.core.state import thread
from tapegrad.errors import DomainError, LinAlgError, ShapeError
from tapegrad.ops.create.creation import asarray
from tapegrad.ops.dispatch import SCALARS
from tapegrad.ops.shape.shape import moveaxis
from tapegrad.tensor import Tensor
from tapegrad.variable import Variable

if TYPE_CHECKING:
    from tapegrad.tensor import TensorLike

Axes = int | None | Sequence[Any] | dict[Any, Any]


def vmap(
    f: Callable[..., object], in_axes: Axes = 0, out_axes: Axes = 0, *, randomness: Randomness = "same"
) -> Callable[..., Any]:
    """``f``, a pure function of one example, made a function of a batch of examples.

    in_axes: the axis of each argument along which the examples lie (None: the same for all), one for all or one for
    each argument, which may be nested as the argument is; keyword arguments: axis 0.  out_axes: where the results'
    axis goes, alike.  ``f`` runs once, on the first example, and each operation it applies is applied to the whole
    batch, as its declaration says (an operation that declares nothing: example by example).  So ``f`` must not look at
    values (``if``, ``.item()``): DryRunError.  It nests with itself and with grad, jvp, jacobian, tapes and
    checkpoints, in any order.  (JAX's ``vmap``.)

    randomness: of what is drawn inside, ``"same"``: the same numbers for every example; ``"different"``: numbers of its
    own for each, those of one draw for the whole batch; ``"error"``: RandomnessError.  (PyTorch's words.)

    Raises DomainError for any other word, ShapeError if the arguments have no batch axis, or batches of different
    length; LinAlgError, which names the examples, where an operation on matrices fails for some.
    """
    if randomness not in get_args(Randomness):
        raise DomainError(f"vmap: randomness={randomness!r}; it is one of {', '.join(map(repr, get_args(Randomness)))}")

    @functools.wraps(f, updated=())
    def wrapped(*args: object, **kwargs: object) -> Any:
        axes = (_axes("in_axes", args, in_axes), _axes("in_axes", kwargs, 0))
        leaves = [x if a is None else _moved(x, a) for x, a in zip(nest.flatten((args, kwargs)), axes[0] + axes[1])]
        n = _length(f, [x for x, a in zip(leaves, axes[0] + axes[1]) if a is not None])
        batches = Batches(f"vmap({getattr(f, '__name__', type(f).__name__)})", n, randomness)
        given = iter(example_of(x, batches) if a is not None else x for x, a in zip(leaves, axes[0] + axes[1]))
        inner_args, inner_kwargs = nest.rebuild((args, kwargs), given)
        try:
            y = batches.during(functools.partial(f, *inner_args, **inner_kwargs))
        except LinAlgError as e:
            raise _told_by_example(e, batches) from None
        results = [_result(leaf, batches, a) for leaf, a in zip(nest.flatten(y), _axes("out_axes", y, out_axes))]
        return nest.rebuild(y, iter(results))

    return wrapped


def _told_by_example(error: LinAlgError, batches: Batches) -> LinAlgError:
    failure = failure_of(error, batches)
    if not thread.batches:  # no vmap outside has more examples; do not keep the operands
        failure.stack = None
    return failure


def _axes(what: str, tree: Any, axes: Axes) -> list[int | None]:
    """One axis for each leaf of ``tree``; ``axes`` is nested as the tree is, or less deeply."""
    if axes is None or isinstance(axes, int):
        return [axes] * sum(1 for _ in nest.leaves(tree))
    if isinstance(tree, dict) and isinstance(axes, dict) and tree.keys() == axes.keys():
        return [a for (_, x), (_, d) in zip(_items(tree), _items(axes)) for a in _axes(what, x, d)]
    same = isinstance(tree, (list, tuple)) and isinstance(axes, (list, tuple)) and len(tree) == len(axes)
    if not same:
        raise ShapeError(f"vmap: {what}={axes!r} is not nested as {nest.structure(tree)} is")
    return [a for x, d in zip(tree, axes, strict=True) for a in _axes(what, x, d)]


def _items(tree: dict[str, object]) -> list[tuple[Any, Any]]:
    """In the order of :func:`nest.leaves`."""
    keys = nest.rebuild(dict.fromkeys(tree), iter(range(len(tree))))
    return sorted(tree.items(), key=lambda item: keys[item[0]])


def _moved(x: TensorLike, axis: int) -> Tensor:
    t = asarray(x)
    if not t.ndim:
        raise ShapeError("vmap: an argument of no dimensions has no batch axis; give None for it in in_axes")
    return moveaxis(t, normalize_axis("vmap", axis, t.ndim), 0)


def _length(f: Callable[..., object], batched: list[Tensor]) -> int:
    lengths = {x.shape[0] for x in batched}
    if len(lengths) != 1:
        what = f"batches of lengths {sorted(lengths)}" if lengths else "no argument with a batch axis"
        raise ShapeError(
            f"vmap: {getattr(f, '__name__', 'f')} got {what}; arguments must have one length along in_axes"
        )
    return lengths.pop()


def _result(leaf: object, batches: Batches, axis: int | None) -> Any:
    if isinstance(leaf, (Variable, *SCALARS)) or hasattr(leaf, "__array__"):
        leaf = asarray(leaf)
    if not isinstance(leaf, Tensor):
        return leaf
    if axis is None:
        if batches.follows(leaf._buffer):
            raise ShapeError("vmap: out_axes is None for a result that differs from example to example")
        return leaf
    whole = batches.every(leaf)
    return moveaxis(whole, 0, axis) if axis else whole
