"""Derivatives of functions: grad, value_and_grad, vjp, jvp, linearize, hvp; whole matrices: ``jacobians.py``.

Arguments may be tensors, variables, arrays, numbers, and nested structures of these; results mirror them.  Each
argument becomes a value of its own, so a tensor passed twice is two arguments.  With ``has_aux`` the function returns
``(value, aux)``: the value is differentiated, and ``aux`` comes along.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, ParamSpec, TypeVar, overload

from tapegrad import nest
from tapegrad.autodiff.arguments import Argnums, Sources, parted
from tapegrad.autodiff.cotangent_seeds import apart, ones_of
from tapegrad.autodiff.forward import Tangents
from tapegrad.autodiff.recording import Trace
from tapegrad.autodiff.zeros import zeros_of
from tapegrad.device import dtypes
from tapegrad.errors import DTypeError, NoGradientError, NotATensorError, ShapeError
from tapegrad.ops.create.creation import asarray
from tapegrad.ops.dispatch import SCALARS, cast
from tapegrad.ops.shape.shape import broadcast_to
from tapegrad.tensor import Tensor
from tapegrad.variable import Variable

if TYPE_CHECKING:
    from tapegrad.tensor import TensorLike

P = ParamSpec("P")
R = TypeVar("R")


def _scalar(name: str, y: object) -> Tensor:
    if not isinstance(y, Tensor):
        raise NotATensorError(f"{name}: the function must return a tensor, got {type(y).__name__}")
    if y.size != 1 or not dtypes.is_inexact(y.dtype):
        raise ShapeError(
            f"{name}: the function must return one float, got {y._buffer.node.aval!r}; sum it, or use jacobian or vjp"
        )
    return y


def value_and_grad(f: Callable[P, R], argnums: Argnums = 0, has_aux: bool = False) -> Callable[P, tuple[R, Any]]:
    """``f`` made to return ``(value, gradient)``; with ``has_aux``, ``f`` returns ``(value, aux)`` and so does this.

    ``f`` returns a tensor of one float.  The gradient in an argument that the value does not depend on is zeros.
    Raises ShapeError, GradientError.
    """
    run: Callable[..., Any] = f

    @functools.wraps(f, updated=())
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> Any:
        sources = Sources("grad", args, argnums)
        trace = sources.trace()
        y, aux = parted("grad", trace.during(functools.partial(run, *sources.args, **kwargs)), has_aux)
        y = _scalar("grad", y)
        grads = slope(sources, trace, y)
        return ((y, aux), grads) if has_aux else (y, grads)

    return wrapped


def slope(sources: Sources, trace: Trace, y: Tensor) -> Any:
    """The gradient of ``y``, which has one element and was recorded by ``trace``, in the structure of the sources."""
    return sources.mirrored(trace.pull({y._buffer.node.index: ones_of(y)}))


def grad(f: Callable[P, object], argnums: Argnums = 0, has_aux: bool = False) -> Callable[P, Any]:
    """The gradient of ``f`` in the arguments ``argnums``; see :func:`value_and_grad`."""
    both: Callable[P, Any] = value_and_grad(f, argnums, has_aux)

    @functools.wraps(f, updated=())
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> Any:
        value, grads = both(*args, **kwargs)
        return (grads, value[1]) if has_aux else grads

    return wrapped


@overload
def vjp(
    f: Callable[..., R], *xs: object, has_aux: Literal[False] = False
) -> tuple[R, Callable[[object], tuple[Any, ...]]]: ...


@overload
def vjp(f: Callable[..., object], *xs: object, has_aux: bool) -> Any: ...


def vjp(f: Callable[..., object], *xs: object, has_aux: bool = False) -> Any:
    """``f(*xs)``, and a function from cotangents of the result (in its structure) to those of ``xs`` (a tuple).

    The function may be called again and again.  With ``has_aux``: ``(value, pullback, aux)``.  Raises GradientError and
    ShapeError for cotangents that do not fit.
    """
    sources = Sources("vjp", xs, tuple(range(len(xs))))
    trace = sources.trace()
    y, aux = parted("vjp", trace.during(f, *sources.args), has_aux)
    outputs = [None if leaf is None else asarray(leaf) for leaf in nest.flatten(y)]

    def pullback(ct: object) -> Any:
        """Cotangents of the arguments."""
        cts = nest.require_alike("vjp", "cotangents", ct, "results", y)
        seeds: dict[int, Tensor] = {}
        for out, c in zip(outputs, cts, strict=True):
            if out is not None and dtypes.is_inexact(out.dtype):
                index, c = out._buffer.node.index, _like("vjp: a cotangent", c, out)
                seeds[index] = seeds[index] + c if index in seeds else c
        return sources.mirrored(trace.pull(seeds, consume=False), cts)

    return (y, pullback, aux) if has_aux else (y, pullback)


def _like(what: str, x: TensorLike, of: Tensor) -> Tensor:
    """``x`` as a tensor of the shape and dtype of ``of`` (a number stands for every element)."""
    result = asarray(x)
    if result.shape != of.shape:
        if result.ndim:
            raise ShapeError(f"{what} has shape {result.shape}, its value {of.shape}")
        result = broadcast_to(result, of.shape)
    if result.dtype.kind == "c" and of.dtype.kind != "c":
        raise DTypeError(f"{what} is {result.dtype}, its value {of.dtype}")
    return cast(result, of.dtype)


@overload
def jvp(f: Callable[..., R], xs: object, tangents: object, has_aux: Literal[False] = False) -> tuple[R, R]: ...


@overload
def jvp(f: Callable[..., object], xs: object, tangents: object, has_aux: bool) -> Any: ...


def jvp(f: Callable[..., object], xs: object, tangents: object, has_aux: bool = False) -> Any:
    """``f(*xs)`` and its directional derivative along ``tangents``, by forward mode: no tape, nothing retained.

    A result that does not depend on ``xs`` has a tangent of zeros, one that is no number (an object, say) None.  With
    ``has_aux``: ``(value, tangent, aux)``.

    ``xs``, ``tangents``: tuples of arguments and of their tangents, alike in structure.  Raises GradientError,
    ShapeError, and NoGradientError where no forward-mode derivative is known.
    """
    args = tuple(xs) if isinstance(xs, (tuple, list)) else (xs,)
    directions = tuple(tangents) if isinstance(tangents, (tuple, list)) else (tangents,)
    sources = Sources("jvp", args, tuple(range(len(args))))
    given = sources.of_tensors(nest.require_alike("jvp", "tangents", directions, "arguments", args))
    tangents_of, own = Tangents(), apart(given)

    def pushed() -> Any:
        for x, t in zip(sources.leaves, given, strict=True):
            if t is not None:
                tangents_of.seed(x, _like("jvp: a tangent", t, x))
        return f(*sources.args)

    y, aux = parted("jvp", tangents_of.during(pushed), has_aux)
    found = nest.map_leaves(_companion(lambda leaf: own(tangents_of.pushed(leaf))), y)
    return (y, found, aux) if has_aux else (y, found)


def _companion(tangent: Callable[[Tensor], Tensor | None]) -> Callable[[object], Tensor | None]:
    """``tangent`` made a function of any leaf of a result: zeros in place of None; None where it is no number."""

    def of(leaf: object) -> Tensor | None:
        if isinstance(leaf, (Variable, *SCALARS)):
            leaf = asarray(leaf)
        if not isinstance(leaf, Tensor):
            return None
        t = tangent(leaf)
        return zeros_of(leaf._buffer.node.aval) if t is None else t

    return of


@overload
def linearize(f: Callable[..., R], *xs: object, has_aux: Literal[False] = False) -> tuple[R, Callable[..., R]]: ...


@overload
def linearize(f: Callable[..., object], *xs: object, has_aux: bool) -> Any: ...


def linearize(f: Callable[..., object], *xs: object, has_aux: bool = False) -> Any:
    """``f(*xs)``, and a linear function from tangents of ``xs`` (as many arguments) to the tangent of the result.

    ``f`` runs once, and so does its backward walk; each call of the linear function walks that walk back, so many
    tangents cost less than by :func:`jvp`, and what it needs is kept as long as the function is.  With ``has_aux``:
    ``(value, function, aux)``.  Raises as :func:`jvp` does, and NoGradientError for operations that have no second
    derivative.
    """
    sources = Sources("linearize", xs, tuple(range(len(xs))))
    trace = sources.trace()
    y, aux = parted("linearize", trace.during(f, *sources.args), has_aux)
    outputs = {t._buffer.node.index: t for t in nest.flatten(y) if isinstance(t, Tensor) and dtypes.is_inexact(t.dtype)}
    cts = {index: zeros_of(t._buffer.node.aval) for index, t in outputs.items()}
    back = Trace([ct._buffer.node for ct in cts.values()])
    pulled = back.during(functools.partial(trace.pull, dict(cts)))

    def push(*tangents: object) -> Any:
        """The tangent of the result along ``tangents``."""
        given = sources.of_tensors(nest.require_alike("linearize", "tangents", tangents, "arguments", xs))
        seeds: dict[int, Tensor] = {}
        for x, g, t in zip(sources.leaves, pulled, given, strict=True):
            if t is not None and (seed := _like("linearize: a tangent", t, x)) is not None and g is not None:
                index = g._buffer.node.index
                seeds[index] = seeds[index] + seed if index in seeds else seed
        found, own = dict(zip(cts, back.pull(seeds, consume=False), strict=True)), apart(given)
        return nest.map_leaves(_companion(lambda leaf: own(found.get(leaf._buffer.node.index))), y)

    return (y, push, aux) if has_aux else (y, push)


def hvp(f: Callable[..., object], xs: Any, vs: object, has_aux: bool = False) -> Any:
    """The Hessian of ``f`` at ``xs`` times ``vs`` (forward over reverse: about the cost of two gradients).

    ``xs``, ``vs``: an argument and a direction, or tuples of them.  Returns the structure of ``xs``; with ``has_aux``
    ``(product, aux)``.  Where an operation has no forward mode, such as a ``custom_gradient`` whose rule is not linear
    in its cotangent (a gradient clip), ``f`` runs again and the gradient is differentiated in reverse mode, too.
    """
    single = not isinstance(xs, (tuple, list))
    args = (xs,) if single else tuple(xs)
    directions = (vs,) if single or not isinstance(vs, (tuple, list)) else tuple(vs)
    along = nest.require_alike("hvp", "direction", directions, "arguments", args)
    gradient = grad(f, tuple(range(len(args))), has_aux)
    try:
        _, products, *aux = jvp(gradient, args, directions, has_aux)
    except NoGradientError:
        grads, pullback, *aux = vjp(gradient, *args, has_aux=has_aux)
        products = pullback(nest.rebuild(grads, (0.0 if v is None else v for v in along)))
    product = products[0] if single else products
    return (product, *aux) if has_aux else product
