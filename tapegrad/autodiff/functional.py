"""Derivatives of functions: grad, value_and_grad, vjp, jvp, jacobian, hessian, hvp.

Arguments may be tensors, variables, arrays, numbers, and nested structures of these; results mirror them.  Each
argument becomes a value of its own, so a tensor passed twice is two arguments.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from tapegrad import nest
from tapegrad.autodiff import rows
from tapegrad.autodiff.forward import Tangents
from tapegrad.autodiff.recording import Trace
from tapegrad.autodiff.seeds import apart
from tapegrad.autodiff.zeros import zeros_of
from tapegrad.device import dtypes
from tapegrad.errors import DTypeError, GradientError, NotATensorError, ShapeError
from tapegrad.ops.create.creation import asarray, ones
from tapegrad.ops.dispatch import SCALARS, cast
from tapegrad.ops.shape.shape import broadcast_to
from tapegrad.tensor import Tensor, identity_of
from tapegrad.variable import Variable

if TYPE_CHECKING:
    from tapegrad.tensor import TensorLike

Argnums = int | Sequence[int]


class _Sources:
    """The chosen arguments as fresh tensors, and the function called on them."""

    def __init__(self, name: str, args: tuple[object, ...], argnums: Argnums) -> None:
        self.name = name
        chosen = argnums if isinstance(argnums, (tuple, list)) else (argnums,)
        for n in chosen:
            if not -len(args) <= n < len(args):
                raise GradientError(f"{name}: argnums {argnums} names argument {n}, but {len(args)} were given")
        self.positions = [n % len(args) for n in chosen]
        self.single = not isinstance(argnums, (tuple, list))
        self.args = list(args)
        for n in self.positions:
            self.args[n] = nest.map_leaves(self._fresh, args[n])
        self.leaves: list[Tensor] = nest.flatten([self.args[n] for n in self.positions])

    def _fresh(self, x: TensorLike) -> Tensor:
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
        filled = (zeros_of(t._buffer.node.aval) if g is None else g for t, g in zip(self.leaves, values, strict=True))
        trees = tuple(nest.rebuild(self.args[n], filled) for n in self.positions)
        return trees[0] if self.single else trees


def _scalar(name: str, y: object) -> Tensor:
    if not isinstance(y, Tensor):
        raise NotATensorError(f"{name}: the function must return a tensor, got {type(y).__name__}")
    if y.size != 1 or not dtypes.is_inexact(y.dtype):
        raise ShapeError(
            f"{name}: the function must return one float, got {y._buffer.node.aval!r}; sum it, or use jacobian or vjp"
        )
    return y


def value_and_grad(f: Callable[..., Any], argnums: Argnums = 0, has_aux: bool = False) -> Callable[..., Any]:
    """``f`` made to return ``(value, gradient)``; with ``has_aux``, ``f`` returns ``(value, aux)`` and so does this.

    ``f`` returns a tensor of one float.  The gradient in an argument that the value does not depend on is zeros.
    Raises ShapeError, GradientError.
    """

    @functools.wraps(f, updated=())
    def wrapped(*args: object, **kwargs: object) -> Any:
        sources = _Sources("grad", args, argnums)
        trace = sources.trace()
        out = trace.during(functools.partial(f, *sources.args, **kwargs))
        if has_aux and not (isinstance(out, (tuple, list)) and len(out) == 2):
            raise GradientError(f"grad: with has_aux the function must return (value, aux), got {nest.shown(out)}")
        y, aux = out if has_aux else (out, None)
        y = _scalar("grad", y)
        seed = ones(y.shape, dtype=y.dtype, device=y.device)
        grads = sources.mirrored(trace.pull({y._buffer.node.index: seed}))
        return ((y, aux), grads) if has_aux else (y, grads)

    return wrapped


def grad(f: Callable[..., object], argnums: Argnums = 0, has_aux: bool = False) -> Callable[..., Any]:
    """The gradient of ``f`` in the arguments ``argnums``; see :func:`value_and_grad`."""
    both = value_and_grad(f, argnums, has_aux)

    @functools.wraps(f, updated=())
    def wrapped(*args: object, **kwargs: object) -> Any:
        value, grads = both(*args, **kwargs)
        return (grads, value[1]) if has_aux else grads

    return wrapped


def vjp(f: Callable[..., object], *xs: object) -> tuple[Any, Callable[..., Any]]:
    """``f(*xs)``, and a function from cotangents of the result (in its structure) to those of ``xs`` (a tuple).

    The function may be called again and again.  Raises GradientError and ShapeError for cotangents that do not fit.
    """
    sources = _Sources("vjp", xs, tuple(range(len(xs))))
    trace = sources.trace()
    y = trace.during(f, *sources.args)
    outputs = [asarray(leaf) for leaf in nest.flatten(y)]

    def pullback(ct: object) -> Any:
        """Cotangents of the arguments."""
        cts = nest.require_alike("vjp", "cotangents", ct, "results", y)
        seeds: dict[int, Tensor] = {}
        for out, c in zip(outputs, cts, strict=True):
            if dtypes.is_inexact(out.dtype):
                index, c = out._buffer.node.index, _like("vjp: a cotangent", c, out)
                seeds[index] = seeds[index] + c if index in seeds else c
        return sources.mirrored(trace.pull(seeds, consume=False), cts)

    return y, pullback


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


def jvp(f: Callable[..., object], xs: object, tangents: object) -> tuple[Any, Any]:
    """``f(*xs)`` and its directional derivative along ``tangents``, by forward mode: no tape, nothing retained.

    A result that does not depend on ``xs`` has a tangent of zeros, one that is no number (an object, say) None.

    ``xs``, ``tangents``: tuples of arguments and of their tangents, alike in structure.  Raises GradientError,
    ShapeError, and NoGradientError where no forward-mode derivative is known.
    """
    args = tuple(xs) if isinstance(xs, (tuple, list)) else (xs,)
    directions = tuple(tangents) if isinstance(tangents, (tuple, list)) else (tangents,)
    given = nest.require_alike("jvp", "tangents", directions, "arguments", args)
    sources = _Sources("jvp", args, tuple(range(len(args))))
    tangents_of, own = Tangents(), apart(given)

    def pushed() -> Any:
        for x, t in zip(sources.leaves, given, strict=True):
            if t is not None:
                tangents_of.seed(x, _like("jvp: a tangent", t, x))
        return f(*sources.args)

    y = tangents_of.during(pushed)

    def tangent(leaf: object) -> Any:
        if isinstance(leaf, (Variable, *SCALARS)):
            leaf = asarray(leaf)
        if not isinstance(leaf, Tensor):
            return None
        t = tangents_of.pushed(leaf)
        return zeros_of(leaf._buffer.node.aval) if t is None else own(t)

    return y, nest.map_leaves(tangent, y)


def jacobian(f: Callable[..., object], argnums: Argnums = 0) -> Callable[..., Any]:
    """The Jacobian of ``f``: for each output leaf, arrays of shape ``output + argument`` (reverse mode, rows together).

    Raises GradientError, DTypeError.
    """

    @functools.wraps(f, updated=())
    def wrapped(*args: object, **kwargs: object) -> Any:
        sources = _Sources("jacobian", args, argnums)
        trace = sources.trace()
        y = trace.during(functools.partial(f, *sources.args, **kwargs))

        def of(leaf: Any) -> Any:
            node = asarray(leaf)._buffer.node
            indices = [t._buffer.node.index for t in sources.leaves]
            parts = []
            for start, stop in rows.chunks(node.aval.size, [node.aval.size] + [t.size for t in sources.leaves]):
                seed = rows.basis(node.aval, start, stop)
                pulled = trace.pull({node.index: seed}, lead=stop - start, consume=False)
                parts.append({i: g for i, g in zip(indices, pulled, strict=True) if g is not None})
            blocks = rows.joined(parts, node.aval.shape)
            blank = (zeros_of(t._buffer.node.aval.with_shape((*node.aval.shape, *t.shape))) for t in sources.leaves)
            return sources.mirrored([blocks.get(i, b) for i, b in zip(indices, blank, strict=True)])

        return nest.map_leaves(of, y)

    return wrapped


def hessian(f: Callable[..., object], argnums: Argnums = 0) -> Callable[..., Any]:
    """The Hessian of a function of one float: the Jacobian of its gradient.  Raises ShapeError, GradientError."""
    return jacobian(grad(f, argnums), argnums)


def hvp(f: Callable[..., object], xs: Any, vs: object) -> Any:
    """The Hessian of ``f`` at ``xs`` times ``vs`` (forward over reverse: about the cost of two gradients).

    ``xs``, ``vs``: an argument and a direction, or tuples of them.  Returns the structure of ``xs``.
    """
    single = not isinstance(xs, (tuple, list))
    args = (xs,) if single else tuple(xs)
    directions = (vs,) if single or not isinstance(vs, (tuple, list)) else tuple(vs)
    nest.require_alike("hvp", "direction", directions, "arguments", args)
    products = jvp(grad(f, tuple(range(len(args)))), args, directions)[1]
    return products[0] if single else products
