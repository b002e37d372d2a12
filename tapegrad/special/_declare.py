"""One way to declare a function of SciPy's: its name, its partial derivatives, perhaps its CUDA expression.

With a CUDA expression it is elementwise, and fused; without one it runs when recorded, by the library beside the arrays
(``device/numerics/special.py``), and its rules are made of the same partial derivatives.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence

from tapegrad.core.aval import ShapedArray, broadcast_shapes
from tapegrad.core.primitive import Primitive, Sample, elementwise, general
from tapegrad.core.rule import with_parameters
from tapegrad.device.numerics import special
from tapegrad.device.types import Array, DType, Namespace
from tapegrad.ops.apply import same_params
from tapegrad.ops.dispatch import barrier, bind, cast, infer_same, named, promote, real_float, tensor, whole_in_float64
from tapegrad.ops.shape.shape import broadcast_to
from tapegrad.tensor import Tensor, TensorLike

Partial = Callable[..., Tensor] | float | None
Function = Callable[..., Tensor]


def pointwise(
    name: str,
    partials: Sequence[Partial],
    *,
    doc: str,
    operands: Sequence[str] = ("x",),
    scipy: str | None = None,
    part: int | None = None,
    cxx: str | None = None,
    domain: tuple[float, float] = (-2.0, 2.0),
    samples: Sequence[Sample] = (),
) -> Function:
    """Declare SciPy's function ``scipy`` (default: ``name``) of ``operands``; its public function.

    ``partials``: as of ``primitive.elementwise``.  ``part``: which of several results.
    """
    source = scipy or name
    if cxx is not None:
        each = elementwise(
            name,
            infer=infer_same,
            impl=lambda xp, out, *arrays: special.write(xp, source, out, arrays),
            partials=partials,
            operands=operands,
            exact=False,
            costly=True,
            cxx=cxx,
            domain=domain,
            samples=samples,
            doc=doc,
        )
        return _public(each, bind)
    shapes = samples or _standard(len(operands), domain)
    prim = barrier_of(
        name, operands, lambda xp, *arrays: special.value(xp, source, arrays, part), partials, shapes, doc
    )
    return _public(prim, barrier)


def barrier_of(
    name: str, operands: Sequence[str], run: Callable[..., Array], partials: Sequence[Partial],
    samples: Sequence[Sample], doc: str,
    parameters: Sequence[str] = (),
) -> Primitive:  # fmt: skip
    """A primitive of each element that runs when recorded; its rules are made of ``partials``."""

    def impl(xp: Namespace, *arrays: Array, **params: object) -> Array:
        return run(xp, *arrays, **params)

    def infer(*avals: ShapedArray, **params: object) -> ShapedArray:
        return infer_same(*avals, name=name)

    _sign(impl, ("xp", *operands), parameters)
    return general(
        name,
        impl=impl,
        infer=infer,
        vjp=[_seeded(p, "ct") for p in partials],
        jvp=[_seeded(p, "t") for p in partials],
        lift=same_params,
        samples=samples,
        doc=doc,
    )


def _standard(count: int, domain: tuple[float, float]) -> list[Sample]:
    shapes = {1: [((3, 4),), ((),), ((0, 3),)]}.get(count, [((3, 4),) * count, ((),) * count, ((0, 3),) * count])
    return [Sample(*s, domain=domain) for s in shapes]


def _sign(f: Callable[..., object], positional: Sequence[str], by_name: Sequence[str] = ()) -> None:
    """Give a made function the signature that rules and primitives are declared by."""
    kind = inspect.Parameter
    parameters = [kind(p, kind.POSITIONAL_OR_KEYWORD) for p in positional]
    parameters += [kind(p, kind.KEYWORD_ONLY) for p in by_name]
    with_parameters(f, parameters)


def _seeded(partial: Partial, seed: str) -> Callable[..., Tensor] | None:
    """The rule that multiplies a seed by a partial derivative."""
    if partial is None:
        return None
    value = partial
    slope: Callable[..., Tensor | float] = value if callable(value) else lambda: value
    known = inspect.signature(slope).parameters
    positional = [p for p, q in known.items() if q.kind is not inspect.Parameter.KEYWORD_ONLY]
    by_name = [p for p in known if p not in positional]

    def rule(t: Tensor, *values: Tensor, **params: object) -> Tensor:
        return t * slope(*values, **params)

    _sign(rule, (seed, *positional), by_name)
    return rule


def scipy_float(name: str) -> Callable[[DType], DType]:
    """Return SciPy's choice of a dtype: integers and bools are computed in float64.

    The choice raises DTypeError for complex numbers.
    """
    checked = real_float(name)
    return lambda dtype: checked(whole_in_float64(dtype))


def together(name: str, xs: Sequence[TensorLike]) -> list[Tensor]:
    """``xs`` as tensors of one real float dtype and one shape."""
    ts = promote(name, tuple(xs), scipy_float(name))
    shape = broadcast_shapes(name, *(t.shape for t in ts))
    return [t if t.shape == shape else broadcast_to(t, shape) for t in ts]


def with_order(name: str, n: TensorLike, x: TensorLike) -> list[Tensor]:
    """An order and an argument of one dtype and shape; a whole number as the order does not widen the argument."""
    (x,) = promote(name, (x,), scipy_float(name))
    if not isinstance(n, (int, float)):
        n = tensor(name, n, x)
        n = cast(n, x.dtype) if n.dtype.kind in "iub" else n
    return together(name, (n, x))


def _public(prim: Primitive, apply: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The function that users call."""
    count, name, to = len(prim.operands), prim.name, scipy_float(prim.name)

    def op(*xs: TensorLike, **named: TensorLike) -> Tensor:
        if named:
            try:
                xs = inspect.signature(op).bind(*xs, **named).args
            except TypeError as e:
                raise TypeError(f"{name}: {e}") from None
        if len(xs) != count:
            raise TypeError(f"{name}: takes {count} arguments ({', '.join(prim.operands)}), got {len(xs)}")
        return apply(prim, *(promote(name, xs, to) if apply is bind else together(name, xs)))

    kind = inspect.Parameter
    with_parameters(op, [kind(p, kind.POSITIONAL_OR_KEYWORD) for p in prim.operands])
    return named(op, prim, ", ".join(prim.operands), "tapegrad.special")
