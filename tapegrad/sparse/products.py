"""Products of a matrix in compressed rows (CSR) with dense ones, bilinear in its stored values and the dense operand.

The transposes are each other: a stored value's cotangent is one element of a product, the only ones that are computed
(a *sampled* product); a dense operand's is a product with the transposed matrix.  Leading axes of either are a batch.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Protocol

from tapegrad.core.aval import Shape, ShapedArray, broadcast_shapes, shaped
from tapegrad.core.primitive import REGISTRY, Bad, Primitive, Sample, bilinear
from tapegrad.device import Device, abstract_array, cuda_types, dtypes
from tapegrad.device.kernel import Kernel
from tapegrad.device.numerics import scipy
from tapegrad.device.traffic import contiguous
from tapegrad.device.types import Array, DType, Namespace, Params
from tapegrad.errors import ShapeError
from tapegrad.ops._batched import Companions, widened
from tapegrad.ops.apply import same_params
from tapegrad.ops.dispatch import barrier
from tapegrad.tensor import Tensor

_matmul = Kernel("sparse.cu", "tg_sparse_matmul")
_sampled = Kernel("sparse.cu", "tg_sampled_product")
_THREADS = 256
_MOST_BLOCKS = 2**31 - 1
_CHUNK = 2**20
"""Elements of gathered rows at a time: the CPU's sampled product needs no more memory than this beside its result."""


class LibraryMatrix(Protocol):
    """The attributes of a sparse matrix of SciPy or cupyx that are used."""

    data: Array
    indices: Array
    indptr: Array
    shape: tuple[int, int]
    T: LibraryMatrix

    def __matmul__(self, other: Array) -> Array: ...
    def tocsr(self) -> LibraryMatrix: ...
    def tocsc(self) -> LibraryMatrix: ...
    def copy(self) -> LibraryMatrix: ...
    def sum_duplicates(self) -> None: ...


def rows_of(xp: Namespace, indptr: Array, count: int) -> Array:
    """The row of each stored value."""
    return xp.searchsorted(indptr, xp.arange(count), side="right") - 1


def matrix(
    xp: Namespace, data: Array, indices: Array, indptr: Array, shape: Shape, transposed: bool = False
) -> LibraryMatrix:
    """The matrix as the library's own object, on the same memory."""
    stored = scipy.sparse(xp).csr_matrix((data, indices, indptr), shape=shape)
    return stored.T if transposed else stored


def by_columns(
    xp: Namespace, op: str, f: Callable[[Array, Array], Array], data: Array, dense: Array, rows: int
) -> Array:
    """``f(values, columns)``, ``(rows, k)``, for each of a batch: at once for all that share the stored values.

    ``f`` gets a dtype that SciPy's sparse matrices hold.
    """
    batch, k = broadcast_shapes(op, data.shape[:-1], dense.shape[:-2]), dense.shape[-1]
    data, dense = (x.astype(dtypes.accumulator(x.dtype), copy=False) for x in (data, dense))
    if not prod(batch) * rows * k:
        return xp.zeros((*batch, rows, k), dtype=data.dtype)
    if data.ndim == 1:
        columns = xp.moveaxis(dense, -2, 0)
        results = f(data, columns.reshape(columns.shape[0], -1))
        return xp.ascontiguousarray(xp.moveaxis(results.reshape((rows, *batch, k)), 0, -2))
    data = xp.broadcast_to(data, (*batch, data.shape[-1])).reshape(-1, data.shape[-1])
    dense = xp.broadcast_to(dense, (*batch, *dense.shape[-2:])).reshape(-1, *dense.shape[-2:])
    return xp.stack([f(d, x) for d, x in zip(data, dense, strict=True)]).reshape((*batch, rows, k))


def _run_matmul(
    xp: Namespace, data: Array, dense: Array, indices: Array, indptr: Array, *, shape: Shape, transposed: bool
) -> Array:
    rows = shape[1] if transposed else shape[0]

    def product(values: Array, columns: Array) -> Array:
        if not values.size:
            return xp.zeros((rows, columns.shape[1]), dtype=columns.dtype)
        return matrix(xp, values, indices, indptr, shape, transposed) @ columns

    return by_columns(xp, "sparse_matmul", product, data, dense, rows)


def _long(*values: int) -> tuple[object, ...]:
    return tuple(cuda_types.long(v) for v in values)


def _batched(xp: Namespace, x: Array, batch: Shape, ndim: int) -> tuple[Array, int]:
    """``x`` in C order, and how many elements lie between operands (of ``ndim`` axes) that follow in ``batch``."""
    inner = x.shape[x.ndim - ndim :]
    if prod(x.shape) == prod(inner):
        return contiguous(xp, x), 0
    if prod(x.shape[: x.ndim - ndim]) != prod(batch):
        x = abstract_array.empty((*batch, *inner), x.dtype) if xp is None else xp.broadcast_to(x, (*batch, *inner))
    return contiguous(xp, x), prod(inner)


def batching(name: str, *inner: int) -> Callable[..., Tensor | None]:
    """``batch`` (see ``Primitive``) of an operation whose first operands have a batch before ``inner`` axes each."""

    def batch(operands: list[Tensor], companions: Companions, n: int, params: Params) -> Tensor | None:
        if any(c is not None for c in companions[2:]):
            return None
        lead = max(x.ndim - k for x, k in zip(operands, inner))
        batched = (x if c is None else widened(x, c, lead + k) for x, c, k in zip(operands, companions, inner))
        return barrier(REGISTRY[name], *batched, *operands[2:], **params)

    return batch


def _launch(device: Device, kernel: Kernel, count: int, dtype: DType, args: tuple[object, ...]) -> None:
    kernel(device, min(_MOST_BLOCKS, -(-count // _THREADS)), _THREADS, args, T=dtype)


def _matmul_on_cuda(
    device: Device,
    data: Array,
    dense: Array,
    indices: Array,
    indptr: Array,
    *,
    shape: Shape,
    transposed: bool,
    out: Array,
) -> None:
    if not out.size or not data.size:
        out.fill(0)
        return
    xp, batch = device.xp, out.shape[:-2]
    data, data_step = _batched(xp, data, batch, 1)
    dense, dense_step = _batched(xp, dense, batch, 2)
    indices, starts = contiguous(xp, indices), contiguous(xp, indptr)
    if xp is None:  # a dry run: only the copies are noted
        return
    order = xp.arange(data.shape[-1])
    if transposed:
        order = xp.argsort(indices, kind="stable")
        starts = xp.searchsorted(indices[order], xp.arange(shape[1] + 1))
        indices = rows_of(xp, indptr, order.size)[order]
    sizes = _long(prod(batch), *out.shape[-2:], data_step, dense_step)
    _launch(device, _matmul, out.size, out.dtype, (data, dense, order, indices, starts, out, *sizes))


def _infer_matmul(
    data: ShapedArray, dense: ShapedArray, indices: ShapedArray, indptr: ShapedArray, *, shape: Shape, transposed: bool
) -> ShapedArray:
    rows, columns = shape[::-1] if transposed else shape
    if dense.ndim < 2 or dense.shape[-2] != columns:
        raise ShapeError(f"sparse_matmul: inner sizes differ: ({rows}, {columns}) @ {dense.shape}")
    batch = broadcast_shapes("sparse_matmul", data.shape[:-1], dense.shape[:-2])
    return shaped((*batch, rows, dense.shape[-1]), dense.dtype, dense.device)


def _matmul_flops(data: ShapedArray, dense: ShapedArray, *others: ShapedArray, shape: Shape, transposed: bool) -> int:
    batch = broadcast_shapes("sparse_matmul", data.shape[:-1], dense.shape[:-2])
    return 2 * prod(batch) * data.shape[-1] * dense.shape[-1]


_PATTERN = [1, 0, 2, 2], [0, 1, 1, 4]
"""Indices and starts of a (3, 3) matrix of four stored values: an empty row, columns out of order, one stored twice."""

sparse_matmul_p: Primitive = bilinear(
    "sparse_matmul",
    impl=_run_matmul,
    cuda=_matmul_on_cuda,
    infer=_infer_matmul,
    transposes=[
        lambda ct, dense, indices, indptr, *, transposed: (
            barrier(sampled_product_p, dense, ct, indices, indptr)
            if transposed
            else barrier(sampled_product_p, ct, dense, indices, indptr)
        ),
        lambda ct, data, indices, indptr, *, shape, transposed: barrier(
            sparse_matmul_p, data, ct, indices, indptr, shape=shape, transposed=not transposed
        ),
    ],
    flops=_matmul_flops,
    lift=same_params,
    batch=batching("sparse_matmul", 1, 2),
    samples=[
        Sample((4,), (3, 2), *_PATTERN, shape=(3, 3), transposed=False),
        Sample((4,), (3, 1), *_PATTERN, shape=(3, 3), transposed=True),
        Sample((4,), (5, 3, 2), *_PATTERN, shape=(3, 3), transposed=False),
        Sample((5, 4), (2, 1, 3, 2), *_PATTERN, shape=(3, 3), transposed=True),
        Sample((2,), (3, 2), [0, 2], [0, 2], shape=(1, 3), transposed=False),
        Sample((2,), (1, 2), [0, 2], [0, 2], shape=(1, 3), transposed=True),
        Sample((4,), (3, 0), *_PATTERN, shape=(3, 3), transposed=False),
        Bad((4,), (2, 2), *_PATTERN, shape=(3, 3), transposed=False, error=ShapeError),
        Bad((4,), (3,), *_PATTERN, shape=(3, 3), transposed=False, error=ShapeError),
    ],
)  # fmt: skip


def _run_sampled(xp: Namespace, x: Array, y: Array, indices: Array, indptr: Array) -> Array:
    batch = broadcast_shapes("sampled_product", x.shape[:-2], y.shape[:-2])
    count, k, wide = indices.size, x.shape[-1], dtypes.accumulator(x.dtype)
    rows, out = rows_of(xp, indptr, count), xp.empty((*batch, count), dtype=wide)
    step = max(1, _CHUNK // max(1, k * prod(batch)))
    for first in range(0, count, step):
        part = slice(first, first + step)
        left, right = (t[..., at[part], :] for t, at in ((x, rows), (y, indices)))
        out[..., part] = xp.sum(left.astype(wide, copy=False) * right, axis=-1, dtype=wide)
    return out


def _sampled_on_cuda(device: Device, x: Array, y: Array, indices: Array, indptr: Array, *, out: Array) -> None:
    if not out.size:
        return
    xp, batch = device.xp, out.shape[:-1]
    x, x_step = _batched(xp, x, batch, 2)
    y, y_step = _batched(xp, y, batch, 2)
    indices = contiguous(xp, indices)
    if xp is None:  # a dry run: only the copies are noted
        return
    sizes = _long(prod(batch), indices.size, x.shape[-1], x_step, y_step)
    rows = rows_of(xp, indptr, indices.size)
    _launch(device, _sampled, out.size, out.dtype, (x, y, rows, indices, out, *sizes))


def _infer_sampled(x: ShapedArray, y: ShapedArray, indices: ShapedArray, indptr: ShapedArray) -> ShapedArray:
    if x.ndim < 2 or y.ndim < 2 or x.shape[-1] != y.shape[-1] or x.shape[-2] != indptr.size - 1:
        raise ShapeError(f"sampled_product: {x.shape} and {y.shape} for {indptr.size - 1} rows of a sparse matrix")
    batch = broadcast_shapes("sampled_product", x.shape[:-2], y.shape[:-2])
    return shaped((*batch, indices.size), x.dtype, x.device)


sampled_product_p: Primitive = bilinear(
    "sampled_product",
    impl=_run_sampled,
    cuda=_sampled_on_cuda,
    infer=_infer_sampled,
    transposes=[
        lambda ct, y, x_aval, indices, indptr: barrier(
            sparse_matmul_p, ct, y, indices, indptr, shape=(x_aval.shape[-2], y.shape[-2]), transposed=False
        ),
        lambda ct, x, y_aval, indices, indptr: barrier(
            sparse_matmul_p, ct, x, indices, indptr, shape=(x.shape[-2], y_aval.shape[-2]), transposed=True
        ),
    ],
    flops=lambda x, y, indices, indptr: (
        2 * prod(broadcast_shapes("sampled_product", x.shape[:-2], y.shape[:-2])) * indices.size * x.shape[-1]
    ),
    lift=same_params,
    batch=batching("sampled_product", 2, 2),
    samples=[
        Sample((3, 2), (3, 2), *_PATTERN), Sample((5, 3, 2), (3, 2), *_PATTERN), Sample((3, 0), (3, 0), *_PATTERN),
        Sample((1, 2), (4, 2), [3, 0], [0, 2]), Bad((3, 2), (3, 3), *_PATTERN, error=ShapeError),
        Bad((2, 2), (3, 2), *_PATTERN, error=ShapeError),
    ],
    doc="The elements of ``x @ y.mT`` where a sparse matrix stores values.",
)  # fmt: skip
