"""What the files of linear algebra share: operands, conjugate transposes, triangles, and calls of LAPACK.

Rules take and give cotangents of a real loss (``holomorphic=False``): the transpose of ``x -> a @ x`` is then
``g -> a' @ g`` with the conjugate transpose ``a'``, as formulas in the literature have it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from math import prod
from typing import Any, TypeVar

from tapegrad.core.aval import ShapedArray, broadcast_shapes
from tapegrad.core.primitive import Primitive, Sample, general
from tapegrad.core.rule import with_parameters
from tapegrad.device import dtypes
from tapegrad.device.numerics import blas_threads, triangles
from tapegrad.device.types import Array, DType, Namespace
from tapegrad.errors import MOST_TOLD, FailedStack, LinAlgError, ShapeError, told
from tapegrad.ops.create.creation import arange, eye
from tapegrad.ops.dispatch import barrier, promote
from tapegrad.ops.elementwise.comparison import equal, logical_or
from tapegrad.ops.elementwise.complex import conj
from tapegrad.ops.elementwise.selection import where
from tapegrad.ops.shape.shape import broadcast_to, matrix_transpose, reshape
from tapegrad.tensor import Tensor, TensorLike

Failed = tuple[tuple[int, ...], ...]
Matrices = TypeVar("Matrices", Tensor, ShapedArray)
TALL = [[2.0, 1.0], [-1.0, 3.0], [0.5, -0.5]]
WIDE = [[2.0, -1.0, 0.5], [1.0, 3.0, -0.5]]
"""Matrices for tests of primitives."""


def floating(dtype: DType) -> DType:
    """The dtype of results: integers and bools are computed in float64, as NumPy does."""
    return dtype if dtypes.is_inexact(dtype) else dtypes.float64


def complex_of(dtype: DType) -> DType:
    """The complex dtype that holds results of real matrices."""
    return dtypes.complex128 if dtype in (dtypes.float64, dtypes.complex128) else dtypes.complex64


def _inner(dtype: DType) -> DType:
    """What LAPACK computes in: half precision in single."""
    return dtypes.float32 if dtype.itemsize == 2 and dtypes.is_inexact(dtype) else floating(dtype)


def matrices(op: str, *xs: TensorLike) -> tuple[Tensor, ...]:
    """Operands of one inexact dtype.  Raises ShapeError, naming ``op``, for fewer than two dimensions."""
    operands = promote(op, xs, to=floating)
    for x in operands:
        if x.ndim < 2:
            raise ShapeError(f"{op}: needs a matrix, or a stack of them, got shape {x.shape}")
    return operands


def matrix(op: str, x: TensorLike) -> Tensor:
    """One operand; see :func:`matrices`."""
    return matrices(op, x)[0]


def square(op: str, x: TensorLike) -> Tensor:
    """A stack of square matrices.  Raises ShapeError naming ``op``."""
    return check_square(op, matrix(op, x))


def check_square(op: str, x: Matrices) -> Matrices:
    """``x`` (or an aval) itself.  Raises ShapeError unless the last two dimensions are equal."""
    if x.ndim < 2 or x.shape[-1] != x.shape[-2]:
        raise ShapeError(f"{op}: needs square matrices, got shape {x.shape}")
    return x


def stacked(op: str, *xs: Tensor) -> tuple[Tensor, ...]:
    """Matrices whose leading dimensions are broadcast against each other.  Raises ShapeError."""
    batch = broadcast_shapes(op, *(x.shape[:-2] for x in xs))
    return tuple(broadcast_to(x, (*batch, *x.shape[-2:])) for x in xs)


def H(x: Tensor) -> Tensor:
    """The conjugate transpose of each matrix."""
    return conj(matrix_transpose(x))


def column(x: Tensor) -> Tensor:
    """Each vector as a matrix of one column."""
    return reshape(x, (*x.shape, 1))


def row(x: Tensor) -> Tensor:
    """Each vector as a matrix of one row."""
    return reshape(x, (*x.shape[:-1], 1, x.shape[-1]))


def identity(x: Tensor) -> Tensor:
    """The unit matrix like the square matrices ``x``."""
    return eye(x.shape[-1], dtype=x.dtype, device=x.device)


def over(x: Tensor, y: Tensor, but: Tensor | None = None) -> Tensor:
    """``x / y``, but 0 where ``x`` is 0, also if ``y`` is, and where ``but`` holds.

    What no cotangent reaches has no gradient, even if the derivative there is infinite.
    """
    skip = equal(x, 0) if but is None else logical_or(equal(x, 0), but)
    return where(skip, 0, x / where(skip, 1, y))


def on_diagonal(values: Tensor) -> Tensor:
    """The mask of the diagonal of a square matrix with as many rows as there are ``values``."""
    at = arange(values.shape[-1], device=values.device)
    return equal(column(at), at)


def infer_last(*avals: ShapedArray, **params: object) -> ShapedArray:
    """The last operand's shape, in the dtype of results."""
    return avals[-1].with_dtype(floating(avals[-1].dtype))


def declare(
    name: str,
    run: Callable[..., Any],
    infer: Callable[..., ShapedArray],
    *,
    vjp: Sequence[Callable[..., Tensor] | None] = (),
    jvp: Sequence[Callable[..., Tensor] | None] | None = None,
    flops: float = 0.0,
    stacks: bool = True,
    into: bool = False,
    calls_lapack: bool = True,
    **fields: Any,
) -> Primitive:
    """A primitive on matrices: ``run(xp, *arrays, **params)`` is given what LAPACK takes.

    ``stacks``: whether it, and its rules, take stacks of them.  ``into``: whether ``run`` writes into ``out``.
    ``flops``: operations on the first operand over ``m * n * min(m, n)``.  Errors of LAPACK become LinAlgError; what
    does not call it takes no look at its threads.
    """
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    operands = [p.name for p in inspect.signature(run).parameters.values() if p.kind is kind][1:]

    def impl(xp: Namespace, *arrays: Array, **params: Any) -> Array:
        if not calls_lapack:
            return run(xp, *map(_computable, arrays), **params)
        try:
            with blas_threads.for_matrices(arrays):
                return run(xp, *map(_computable, arrays), **params)
        except ValueError as e:  # NumPy's LinAlgError is one, and what SciPy says of infinities and NaN
            reason = str(e)

        out = params.get("out")

        def one(*operands: Array) -> Array:
            if out is not None:
                params["out"] = xp.empty(out.shape[arrays[0].ndim - 2 :], out.dtype)
            return run(xp, *[_computable(a) for a in operands], **params)

        matrices = [a for a, rule in zip(arrays, vjp) if rule is not None] or arrays  # others are flags
        shapes = " and ".join(str(a.shape) for a in matrices)
        raise _failure(name, reason, shapes, list(arrays), partial(_failing, one)) from None

    return general(
        name,
        impl=with_parameters(impl, [inspect.Parameter(p, kind) for p in ("xp", *operands)]),
        infer=infer,
        vjp=vjp,
        jvp=jvp,
        holomorphic=False,
        lift=(lambda params, n: params) if stacks else None,
        batch="all" if stacks else None,
        flops=lambda x, *others, **params: int(flops * x.size * min(x.shape[-2:], default=0)),
        into=into,
        **fields,
    )


def _run_triangle(xp: Namespace, x: Array, *, lower: bool, k: int, half: bool, out: Array) -> None:
    triangles.put(xp, x, out, lower, k, half)


triangle_p: Primitive = declare(
    "triangle",
    _run_triangle,
    infer_last,
    vjp=[lambda ct, *, lower, k, half: _triangle(ct, lower, k, half)],
    jvp=[lambda t, *, lower, k, half: _triangle(t, lower, k, half)],
    samples=[
        Sample(TALL, lower=True, k=0, half=False), Sample(WIDE, lower=True, k=0, half=True),
        Sample([TALL, TALL], lower=False, k=1, half=False), Sample((0, 2, 2), lower=False, k=0, half=True),
    ],
    into=True,
    calls_lapack=False,
    doc="A triangle of each matrix, zeros elsewhere.  One work: rules of factorizations take many of them.",
)  # fmt: skip


def _triangle(x: Tensor, lower: bool, k: int, half: bool) -> Tensor:
    return barrier(triangle_p, x, lower=lower, k=k, half=half)


def _run_product(xp: Namespace, x: Array, y: Array, *, lower: bool, k: int, out: Array) -> None:
    triangles.product(xp, x, y, out, lower, k)


triangle_product_p: Primitive = declare(
    "triangle_product",
    _run_product,
    lambda x, y, *, lower, k: x.with_shape((*x.shape[:-1], y.shape[-1])),
    vjp=[
        lambda ct, y, *, lower, k: _triangle(ct, lower, k, False) @ H(y),
        lambda ct, x, *, lower, k: H(x) @ _triangle(ct, lower, k, False),
    ],
    jvp=[
        lambda t, y, *, lower, k: triangle_of_product(t, y, lower, k),
        lambda t, x, *, lower, k: triangle_of_product(x, t, lower, k),
    ],
    samples=[
        Sample(TALL, WIDE, lower=True, k=0), Sample(WIDE, TALL, lower=False, k=1),
        Sample([TALL, TALL], [WIDE, WIDE], lower=True, k=-1), Sample((0, 2, 1), (0, 1, 2), lower=False, k=0),
    ],
    into=True,
    flops=1.0,
    calls_lapack=False,
    doc="A triangle of the product of two matrices, zeros elsewhere: what lies beyond need not be computed.",
)  # fmt: skip


def triangle_of_product(x: Tensor, y: Tensor, lower: bool, k: int = 0) -> Tensor:
    """The elements of ``x @ y`` on and beyond diagonal ``k``, zeros elsewhere, for stacks of one shape."""
    return barrier(triangle_product_p, *stacked("matmul", x, y), lower=lower, k=k)


def lower_part(x: Tensor, k: int = 0) -> Tensor:
    """The elements on and below diagonal ``k``, zeros above: ``tril`` in one work."""
    return _triangle(x, True, k, False)


def upper_part(x: Tensor, k: int = 0) -> Tensor:
    """The elements on and above diagonal ``k``, zeros below: ``triu`` in one work."""
    return _triangle(x, False, k, False)


def half_lower(x: Tensor) -> Tensor:
    """The lower triangle, with half of the diagonal."""
    return _triangle(x, True, 0, True)


def half_upper(x: Tensor) -> Tensor:
    """The upper triangle, with half of the diagonal."""
    return _triangle(x, False, 0, True)


def _failure(
    name: str, reason: str, shapes: str, arrays: list[Array], failing: Callable[[list[Array], int], Failed]
) -> LinAlgError:
    """The error, which names the matrices of a stack that fail."""
    batch = arrays[0].shape[:-2]
    failed = failing(arrays, MOST_TOLD) if batch else ()
    which = f"; of the stack {batch} these fail: {told(failed)}" if failed else ""
    error = LinAlgError(f"{name}: {reason} (of shape {shapes}){which}")
    error.failed = failed
    error.stack = FailedStack(name, reason, arrays, failing)
    return error


def _failing(one: Callable[..., Array], arrays: list[Array], most: int) -> Failed:
    """The indices of the first matrices on which ``one`` fails, at most so many."""
    batch, failed = arrays[0].shape[:-2], list[tuple[int, ...]]()
    for index in product(*map(range, batch)):
        try:
            one(*(a[index] if a.shape[: len(batch)] == batch else a for a in arrays))
        except ValueError:
            failed.append(index)
            if len(failed) == most:
                break
    return tuple(failed)


_TAKEN = frozenset("fdFD")
"""Characters of the dtypes that LAPACK takes."""


def _computable(a: Array) -> Array:
    return a if a.dtype.char in _TAKEN else a.astype(_inner(a.dtype), copy=False)


def one_by_one(
    xp: Namespace, run: Callable[..., Array], stacks: Sequence[Array], shape: tuple[int, ...], dtype: DType
) -> Array:
    """``run`` on each matrix of equally long ``stacks`` in turn; results of ``shape``."""
    batch = stacks[0].shape[:-2]
    out = xp.empty((prod(batch), *shape), dtype=dtype)
    if out.size:
        flat = [x.reshape(-1, *x.shape[-2:]) for x in stacks]
        for i, operands in enumerate(zip(*flat, strict=True)):
            out[i] = run(*operands)
    return out.reshape(*batch, *shape)
