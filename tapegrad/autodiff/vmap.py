"""vmap: a function of one example made a function of a batch of them."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Collection, Sequence
from math import nan
from numbers import Integral
from typing import TYPE_CHECKING, Any, Literal, ParamSpec, TypeVar, get_args

from tapegrad import nest
from tapegrad.autodiff.batching import Batches, Randomness, example_of, failure_of
from tapegrad.autodiff.custom_gradient import stop_gradient
from tapegrad.core.aval import normalize_axis
from tapegrad.core.cell import Cell, shadowed
from tapegrad.core.state import thread
from tapegrad.device.dtypes import is_inexact
from tapegrad.errors import MOST_TOLD, DomainError, DTypeError, FunctionError, LinAlgError, ShapeError
from tapegrad.ops.create.creation import asarray, eye, ones
from tapegrad.ops.dispatch import SCALARS
from tapegrad.ops.elementwise.selection import where
from tapegrad.ops.shape.shape import moveaxis, reshape
from tapegrad.tensor import Tensor
from tapegrad.variable import Variable

if TYPE_CHECKING:
    from tapegrad.tensor import TensorLike

Failures = Literal["raise", "nan"]
"""What examples give on which an operation on matrices fails: LinAlgError for all of them, or NaN for each of these."""
T = TypeVar("T")
P = ParamSpec("P")
R = TypeVar("R")
Axes = int | None | Sequence[Any] | dict[Any, Any]


def vmap(
    f: Callable[P, R],
    in_axes: Axes = 0,
    out_axes: Axes = 0,
    *,
    randomness: Randomness = "same",
    failures: Failures = "raise",
) -> Callable[P, R]:
    """``f``, a pure function of one example, made a function of a batch of examples.

    in_axes: the axis of each argument along which the examples lie (None: the same for all), one for all or one for
    each argument, which may be nested as the argument is; keyword arguments: axis 0.  out_axes: where the results'
    axis goes, alike.  ``f`` runs once, on the first example, and each operation it applies is applied to the whole
    batch, as its declaration says (an operation that declares nothing: example by example).  So ``f`` must not look at
    values (``if``, ``.item()``): DryRunError.  It nests with itself and with grad, jvp, jacobian, tapes and
    checkpoints, in any order.  (JAX's ``vmap``.)

    randomness: of what is drawn inside, ``"same"``: the same numbers for every example; ``"different"``: numbers of its
    own for each, those of one draw for the whole batch; ``"error"``: RandomnessError.  (PyTorch's words.)

    failures: where an operation on matrices fails for some examples, ``"raise"``: LinAlgError, which names them;
    ``"nan"``: all results of these examples are NaN, and nothing has a gradient through them; those of the others are
    what they are without them.  ``f`` then runs again, with other numbers in place of theirs.  (Of nested ones, the
    outermost may say it; inside ``tg.function`` it is a FunctionError.)

    Raises DomainError for any other word, ShapeError if the arguments have no batch axis, or batches of different
    length; DTypeError for a result that must be NaN, and is of integers.
    """
    for name, word, words in (("randomness", randomness, Randomness), ("failures", failures, Failures)):
        if word not in get_args(words):
            raise DomainError(f"vmap: {name}={word!r}; it is one of {', '.join(map(repr, get_args(words)))}")

    most = MOST_TOLD if failures == "raise" else sys.maxsize

    @functools.wraps(f, updated=())
    def wrapped(*args: object, **kwargs: object) -> Any:
        axes = [*_axes("in_axes", args, in_axes), *_axes("in_axes", kwargs, 0)]
        leaves = [x if a is None else _moved(x, a) for x, a in zip(nest.flatten((args, kwargs)), axes)]
        n = _length(f, [x for x, a in zip(leaves, axes) if a is not None])

        def run(leaves: list[Any], failed: Collection[int]) -> Any:
            batches = Batches(f"vmap({getattr(f, '__name__', type(f).__name__)})", n, randomness, most)
            given = iter([example_of(x, batches) if a is not None else x for x, a in zip(leaves, axes)])
            inner_args, inner_kwargs = nest.rebuild((args, kwargs), given)
            try:
                y = batches.during(lambda: nest.whole(f(*inner_args, **inner_kwargs)))
            except LinAlgError as e:
                raise _told_by_example(e, batches) from None
            nest.refuse_hidden("vmap", y)
            to = _axes("out_axes", y, out_axes)
            return nest.rebuild(y, iter([_result(leaf, batches, a, failed) for leaf, a in zip(nest.flatten(y), to)]))

        return run(leaves, ()) if failures == "raise" else _sparing(run, leaves, axes)

    return wrapped


def _told_by_example(error: LinAlgError, batches: Batches) -> LinAlgError:
    failure = failure_of(error, batches)
    if not thread.batches:  # no vmap outside has more examples; do not keep the operands
        failure.stack = None
    return failure


def _sparing(run: Callable[[list[Any], Collection[int]], T], leaves: list[Any], axes: list[int | None]) -> T:
    """What ``run`` gives while examples that fail have other numbers.  Raises LinAlgError if these fail, too."""
    if any(not isinstance(b, Batches) for b in thread.batches):
        raise FunctionError(
            'vmap: failures="nan" inside a captured function (tg.function), whose program cannot run again without the '
            "examples that fail: leave the vmap outside, or leave out tg.function"
        )
    if thread.batches:
        raise DomainError('vmap: failures="nan" is for the outermost vmap to say: each of its examples is one of many')
    failed: set[int] = set()
    while True:
        writes: dict[Cell, Any] = {}  # each run draws the same numbers
        given = [x if a is None else _replaced(x, failed) for x, a in zip(leaves, axes)]
        try:
            with shadowed(writes):
                y = run(given, failed)
        except LinAlgError as e:
            more = {i[0] for i in e.failed} - failed
            if not e.by_example or not more:
                raise
            failed |= more
            continue
        for cell, content in writes.items():
            cell.set(content)
        return y


def _replaced(x: Tensor, failed: Collection[int]) -> Tensor:
    """``x`` with the numbers of an example that has not failed, or if all have, with ones, for those that have."""
    if not failed:
        return x
    good = next((i for i in range(len(x)) if i not in failed), None)
    if good is not None:
        other = stop_gradient(x[good])
    elif x.ndim > 2 and x.shape[-1] == x.shape[-2]:
        other = eye(x.shape[-1], dtype=x.dtype, device=x.device)
    else:
        other = ones((), dtype=x.dtype, device=x.device)
    return where(_mask(x, failed), other, x)


def _mask(x: Tensor, failed: Collection[int]) -> Tensor:
    """True for the failed examples along the leading axis of ``x``."""
    mask = [i in failed for i in range(len(x))]
    return reshape(asarray(mask, device=x.device), (-1, *(1,) * (x.ndim - 1)))


def _axes(what: str, tree: Any, axes: Axes) -> list[int | None]:
    """One axis for each leaf of ``tree``; ``axes`` is nested as the tree is, or less deeply."""
    if axes is None or isinstance(axes, (int, Integral)):
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


def _result(leaf: object, batches: Batches, axis: int | None, failed: Collection[int]) -> Any:
    if isinstance(leaf, (Variable, *SCALARS)) or hasattr(leaf, "__array__"):
        leaf = asarray(leaf)
    if not isinstance(leaf, Tensor):
        return leaf
    if axis is None:
        if batches.follows(leaf._buffer):
            raise ShapeError("vmap: out_axes is None for a result that differs from example to example")
        return leaf
    whole = batches.every(leaf)
    if failed:
        if not is_inexact(leaf.dtype):
            raise DTypeError(f'vmap: failures="nan", but a result is of {leaf.dtype}, which has no NaN; use tg.astype')
        whole = where(_mask(whole, failed), nan, whole)
    return moveaxis(whole, 0, axis) if axis else whole
