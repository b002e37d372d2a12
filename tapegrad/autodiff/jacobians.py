"""Whole matrices of derivatives of functions: jacobian (rows together), jacfwd (columns together), hessian."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ParamSpec

from tapegrad import nest
from tapegrad.autodiff import jacobian_rows
from tapegrad.autodiff.arguments import Argnums, Sources, parted
from tapegrad.autodiff.forward import Tangents
from tapegrad.autodiff.functional import slope
from tapegrad.autodiff.recording import Trace
from tapegrad.autodiff.vmap import vmap
from tapegrad.autodiff.zeros import zeros_of
from tapegrad.device import dtypes
from tapegrad.errors import DTypeError
from tapegrad.ops.create.creation import asarray, eye
from tapegrad.ops.shape.shape import moveaxis, reshape
from tapegrad.tensor import Tensor

P = ParamSpec("P")


def jacobian(f: Callable[P, object], argnums: Argnums = 0, has_aux: bool = False) -> Callable[P, Any]:
    """The Jacobian of ``f``: for each output leaf, arrays of shape ``output + argument`` (reverse mode, rows together).

    With ``has_aux``, ``f`` returns ``(value, aux)``, and this ``(Jacobian, aux)``.  Raises GradientError, DTypeError.
    """
    function: Callable[..., Any] = f

    @functools.wraps(f, updated=())
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> Any:
        sources = Sources("jacobian", args, argnums)
        trace = sources.trace()
        y, aux = parted("jacobian", trace.during(functools.partial(function, *sources.args, **kwargs)), has_aux)
        found = _rows(sources, trace, y)
        return (found, aux) if has_aux else found

    return wrapped


def _rows(sources: Sources, trace: Trace, y: object) -> Any:
    """The Jacobian of each leaf of ``y``, which was recorded by ``trace``."""

    def of(leaf: Any) -> Any:
        node = asarray(leaf)._buffer.node
        indices = [t._buffer.node.index for t in sources.leaves]
        parts = []
        for start, stop in jacobian_rows.chunks(node.aval.size, [node.aval.size] + [t.size for t in sources.leaves]):
            seed = jacobian_rows.basis(node.aval, start, stop)
            pulled = trace.pull({node.index: seed}, lead=stop - start, consume=False)
            parts.append({i: g for i, g in zip(indices, pulled, strict=True) if g is not None})
        blocks = jacobian_rows.joined(parts, node.aval.shape)
        blank = (zeros_of(t._buffer.node.aval.with_shape((*node.aval.shape, *t.shape))) for t in sources.leaves)
        return sources.mirrored([blocks.get(i, b) for i, b in zip(indices, blank, strict=True)])

    return nest.map_leaves(of, y)


def jacfwd(f: Callable[P, object], argnums: Argnums = 0, has_aux: bool = False) -> Callable[P, Any]:
    """The Jacobian of ``f`` as :func:`jacobian` shapes it, by forward mode: for more outputs than arguments.

    ``f`` runs once, and all columns go through each of its operations together; nothing is kept.  The dtypes are those
    of the outputs.  In a complex argument it is the derivative along the real axis: of a holomorphic ``f`` the complex
    derivative, whose conjugate is what reverse mode gives.  With ``has_aux``, ``f`` returns ``(value, aux)``, and this
    ``(Jacobian, aux)``.  Raises as :func:`jvp` does.
    """
    function: Callable[..., Any] = f

    @functools.wraps(f, updated=())
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> Any:
        sources = Sources("jacfwd", args, argnums)
        run = functools.partial(function, *sources.args, **kwargs)
        results: list[Any] = []

        def pushed(units: list[Tensor]) -> list[Tensor]:
            tangents = Tangents()
            for x, unit in zip(sources.leaves, units, strict=True):
                tangents.seed(x, unit)
            results.extend(parted("jacfwd", tangents.during(run), has_aux))
            outputs = [asarray(leaf) for leaf in nest.flatten(results[0])]
            found = [tangents.pushed(t) for t in outputs]
            return [zeros_of(t._buffer.node.aval) if d is None else d for t, d in zip(outputs, found, strict=True)]

        columns = iter(vmap(pushed)(_units(sources.leaves)))
        found = nest.map_leaves(lambda leaf: sources.mirrored(_blocks(next(columns), sources.leaves)), results[0])
        return (found, results[1]) if has_aux else found

    return wrapped


def _units(leaves: list[Tensor]) -> list[Tensor]:
    """For each leaf, along a leading axis, its part of the unit tangents in the elements of all leaves."""
    count, start, units = sum(t.size for t in leaves), 0, []
    for t in leaves:
        units.append(reshape(eye(count, t.size, k=-start, dtype=t.dtype, device=t.device), (count, *t.shape)))
        start += t.size
    return units


def _blocks(columns: Tensor, leaves: list[Tensor]) -> list[Tensor]:
    """The tangents of an output along a leading axis, as its Jacobian in each leaf."""
    last, start, blocks = moveaxis(columns, 0, -1), 0, []
    for t in leaves:
        blocks.append(reshape(last[..., start : start + t.size], (*columns.shape[1:], *t.shape)))
        start += t.size
    return blocks


def hessian(f: Callable[P, object], argnums: Argnums = 0, has_aux: bool = False) -> Callable[P, Any]:
    """The second derivatives of ``f``: for each output leaf, arrays of shape ``output + argument + argument``.

    Of a function of one float without dimensions it is the Jacobian of its gradient.  With ``has_aux``, ``f`` returns
    ``(value, aux)``, and this ``(Hessian, aux)``.  Raises GradientError, and DTypeError for outputs that are no floats.
    """
    function: Callable[..., Any] = f

    @functools.wraps(f, updated=())
    def first(*args: P.args, **kwargs: P.kwargs) -> Any:
        sources = Sources("hessian", args, argnums)
        trace = sources.trace()
        y, aux = parted("hessian", trace.during(functools.partial(function, *sources.args, **kwargs)), has_aux)
        y = nest.map_leaves(asarray, y)
        for leaf in nest.leaves(y):
            if not dtypes.is_inexact(leaf.dtype):
                raise DTypeError(f"hessian: the function returned {leaf._buffer.node.aval!r}; make it a float")
        scalar = isinstance(y, Tensor) and not y.ndim
        found = slope(sources, trace, y) if scalar else _rows(sources, trace, y)
        return (found, aux) if has_aux else found

    return jacobian(first, argnums, has_aux)
