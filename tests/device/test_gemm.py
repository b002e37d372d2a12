"""Products through cuBLAS, asked of a recording double that does on NumPy's memory what cuBLAS documents.

What is fixed here is what cannot be seen in results: which products are one call, what is copied, the flags, leading
dimensions, steps and compute types.
"""

from __future__ import annotations

import ctypes
import itertools
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from tapegrad.device import cublas, gemm, traffic
from tapegrad.device.numerics import blas
from tapegrad.errors import KernelError

DTYPES = [np.float16, ml_dtypes.bfloat16, np.float32, np.float64, np.complex64, np.complex128]
FACTORS = {68: np.float32, 77: np.float32, 70: np.float64}  # by compute type; complex where the data is


class Array:
    """The attributes of a CuPy array that the wrapper may use, over NumPy's memory."""

    def __init__(self, xp: Any, host: Any, owner: Any = None) -> None:
        self.xp, self.host, self.owner = xp, host, host if owner is None else owner
        self.data = SimpleNamespace(ptr=host.ctypes.data)
        self.device = xp.device

    shape = property(lambda self: self.host.shape)
    strides = property(lambda self: self.host.strides)
    dtype = property(lambda self: self.host.dtype)
    ndim = property(lambda self: self.host.ndim)
    size = property(lambda self: self.host.size)
    itemsize = property(lambda self: self.host.itemsize)
    nbytes = property(lambda self: self.host.nbytes)
    flags = property(lambda self: self.host.flags)

    def __getitem__(self, index: Any) -> Array:
        return Array(self.xp, self.host[index], self.owner)

    def fill(self, value: Any) -> None:
        self.host[...] = value


class Blas:
    """The library of cuBLAS: checks what cuBLAS checks, computes, and remembers."""

    types = dict(zip((2, 14, 0, 1, 4, 5), DTYPES))

    def __init__(self) -> None:
        self.calls: list[Any] = []
        self.modes = [0]
        self.stream, self.workspace, self.status = -1, (0, 0), 0

    def cublasCreate_v2(self, place: Any) -> int:
        place._obj.value = 77
        return 0

    def cublasDestroy_v2(self, handle: Any) -> int:
        return 0

    def cublasSetMathMode(self, handle: Any, mode: int) -> int:
        self.modes.append(mode)
        return 0

    def cublasSetStream_v2(self, handle: Any, stream: int) -> int:
        self.stream, self.workspace = stream, (0, 0)
        return 0

    def cublasSetWorkspace_v2(self, handle: Any, pointer: int, size: int) -> int:
        self.workspace = pointer, size
        return 0

    def cublasGemmStridedBatchedEx(
        self, handle, ta, tb, m, n, k, alpha, a, at, lda, sa, b, bt, ldb, sb, beta, c, ct, ldc, sc, count, compute, algo
    ):
        assert handle.value == 77 and algo == -1 and at == bt == ct and count >= 1 and min(m, n, k) >= 1
        assert self.workspace == (4096, 32 * 2**20)
        dtype = np.dtype(self.types[at])
        factor = np.dtype(FACTORS[compute])
        if dtype.kind == "c":
            factor = np.result_type(factor, np.complex64)
        assert [read(p, factor, (1,), (1,))[0] for p in (alpha, beta)] == [1, 0]
        assert lda >= (k if ta else m) and ldb >= (n if tb else k) and ldc >= m
        # Element (i, j) of a column-major matrix lies at i + j * ld.
        left = read(a, dtype, (count, m, k), (sa, lda, 1) if ta else (sa, 1, lda))
        right = read(b, dtype, (count, k, n), (sb, ldb, 1) if tb else (sb, 1, ldb))
        wide = np.result_type(factor, dtype) if dtype.kind != "V" else factor
        read(c, dtype, (count, m, n), (sc, 1, ldc))[...] = (left.astype(wide) @ right.astype(wide)).astype(dtype)
        self.calls.append(SimpleNamespace(ta=ta, tb=tb, m=m, n=n, k=k, lda=lda, ldb=ldb, sa=sa, sb=sb, sc=sc,
                                          count=count, compute=compute, mode=self.modes[-1], type=at,
                                          stream=self.stream))  # fmt: skip
        return self.status


def read(pointer: int, dtype: np.dtype, shape: tuple[int, ...], steps: tuple[int, ...]) -> Any:
    extent = 1 + sum((n - 1) * s for n, s in zip(shape, steps))
    raw = np.frombuffer((ctypes.c_char * (extent * dtype.itemsize)).from_address(pointer), np.uint8).view(dtype)
    return np.lib.stride_tricks.as_strided(raw, shape, [s * dtype.itemsize for s in steps])


class Device:
    """A device that notes when it is made the current one."""

    def __init__(self, number: int) -> None:
        self.id, self.compute_capability, self.entered = number, "90", 0

    def __enter__(self) -> None:
        self.entered += 1

    def __exit__(self, *error: Any) -> None:
        pass


class Namespace:
    """CuPy's namespace, as far as the wrapper needs it."""

    def __init__(self) -> None:
        self.device = Device(0)
        self.blas, self.stream = Blas(), SimpleNamespace(ptr=5)
        self.cuda = SimpleNamespace(
            runtime=SimpleNamespace(getDevice=lambda: 0, memGetInfo=lambda: (0, 0), runtimeGetVersion=lambda: 12090),
            get_current_stream=lambda: self.stream,
            Memory=lambda size: SimpleNamespace(ptr=4096, size=size),
        )
        self.copies: list[tuple[int, ...]] = []
        self.others: list[tuple[int, ...]] = []

    calls = property(lambda self: self.blas.calls)

    def ascontiguousarray(self, x: Array) -> Array:
        self.copies.append(x.shape)
        return Array(self, x.host.copy("C"))

    def broadcast_to(self, x: Array, shape: tuple[int, ...]) -> Array:
        return Array(self, np.broadcast_to(x.host, shape), x.owner)

    def matmul(self, x: Array, y: Array, out: Array) -> None:
        self.others.append(out.shape)
        np.matmul(x.host, y.host, out=out.host)


@pytest.fixture(autouse=True)
def notes() -> Iterator[None]:
    """Nobody counts what products note here."""
    yield
    traffic.taken()


@pytest.fixture
def xp(monkeypatch) -> Namespace:
    monkeypatch.delenv("CUPY_TF32", raising=False)
    monkeypatch.setattr(cublas, "mine", cublas.Mine())
    double = Namespace()
    monkeypatch.setattr(cublas, "load", lambda xp: double.blas)
    return double


def values(shape: tuple[int, ...], dtype: Any, seed: int = 0) -> Any:
    rng = np.random.default_rng(seed)
    host = rng.normal(size=shape)
    if np.dtype(dtype).kind == "c":
        host = host + 1j * rng.normal(size=shape)
    return host.astype(dtype)


def product(xp: Namespace, x: Any, y: Any, tf32: bool = False) -> Any:
    """``x @ y`` by the wrapper, compared with NumPy's in double precision; the calls it took."""
    shape = (*np.broadcast_shapes(x.shape[:-2], y.shape[:-2]), x.shape[-2], y.shape[-1])
    out = np.full(shape, -7, x.dtype)
    before = len(xp.calls)
    gemm.matmul(xp, Array(xp, x), Array(xp, y), Array(xp, out), tf32=tf32)
    wide = np.complex128 if x.dtype.kind == "c" else np.float64
    eps = 4 * float(ml_dtypes.finfo(x.dtype).eps) * max(1, x.shape[-1])
    np.testing.assert_allclose(out.astype(wide), x.astype(wide) @ y.astype(wide), rtol=eps, atol=eps)
    return xp.calls[before:]


def turned(x: Any) -> Any:
    """The same values, lying in memory transposed."""
    return np.ascontiguousarray(x.mT).mT


BATCHES = [
    ((), ()),
    ((5,), (5,)),
    ((2, 3), (2, 3)),
    ((5,), ()),
    ((), (5,)),
    ((2, 3), (1, 1)),
    ((1, 5), (5,)),
    ((2, 1, 3), (2, 1, 3)),
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("batches", BATCHES)
def test_one_call_and_no_copy_for_every_dtype_transpose_and_plain_batch(xp, dtype, batches) -> None:
    for left, right in itertools.product((False, True), repeat=2):
        x, y = values((*batches[0], 3, 4), dtype), values((*batches[1], 4, 5), dtype, 1)
        (call,) = product(xp, turned(x) if left else x, turned(y) if right else y)
        assert not xp.copies and not xp.others
        assert (call.m, call.n, call.k) == (5, 3, 4)  # columns first
        assert (call.ta, call.tb) == (right, left)
        assert (call.lda, call.ldb) == (4 if right else 5, 3 if left else 4)
        count = int(np.prod(np.broadcast_shapes(*batches), dtype=int))
        assert (call.count, call.sc) == (count, 15)
        if count > 1:
            assert call.sb == (12 if np.prod(batches[0]) == count else 0)
            assert call.sa == (20 if np.prod(batches[1]) == count else 0)


def test_compute_types(xp) -> None:
    types = {}
    for dtype in DTYPES:
        (call,) = product(xp, values((3, 4), dtype), values((4, 2), dtype))
        types[np.dtype(dtype).name] = call.type, call.compute, call.mode
    assert types == {
        "float16": (2, 68, 16), "bfloat16": (14, 68, 16), "float32": (0, 68, 0),
        "float64": (1, 70, 0), "complex64": (4, 68, 0), "complex128": (5, 70, 0),
    }  # fmt: skip


def test_tf32_only_where_asked_and_only_for_float32(xp, monkeypatch) -> None:
    def compute(dtype: Any, tf32: bool) -> int:
        (call,) = product(xp, values((2, 2), dtype), values((2, 2), dtype), tf32)
        return call.compute

    monkeypatch.setenv("CUPY_TF32", "1")  # who makes the product has asked it
    dtypes = (np.float32, np.float64, np.float16, np.complex64)
    assert [compute(d, False) for d in dtypes] == [68, 70, 68, 68]
    assert [compute(d, True) for d in dtypes] == [77, 70, 68, 68]


def test_parts_of_larger_matrices_are_not_copied(xp, monkeypatch) -> None:
    monkeypatch.setattr(gemm, "CALL", 0)
    big = values((2, 9, 11), np.float32)
    y = values((4, 5), np.float32)
    (call,) = product(xp, big[:, 1:8, 3:7], y)
    assert (call.tb, call.ldb, call.sb, call.sa) == (0, 11, 99, 0)
    (call,) = product(xp, big[:, 2:6, 1:8].mT, y)
    assert (call.tb, call.ldb, call.sb) == (1, 11, 99)
    (call,) = product(xp, big[0, ::3, 3:7], y)  # every third row
    assert (call.tb, call.ldb) == (0, 33)
    heads = values((2, 6, 3, 4), np.float32).transpose(0, 2, 1, 3)  # (batch, heads, length, depth) as attention has it
    calls = product(xp, heads, turned(values((2, 3, 4, 6), np.float32)))
    assert [(c.ldb, c.sb, c.count) for c in calls] == [(12, 4, 3)] * 2
    assert not xp.copies


@pytest.mark.parametrize(("rows", "columns"), [(1, 4), (4, 1), (1, 1)])
def test_vectors_with_any_stride(xp, rows, columns) -> None:
    base = values((30, 30), np.float64)
    for x in (base[:rows, :columns], base[::5, ::7][:rows, :columns], base.T[::5, ::7][:rows, :columns]):
        product(xp, x, values((columns, 3), np.float64))
        product(xp, values((2, rows), np.float64), x)
    strides = [0 if length == 1 else stride for length, stride in zip((rows, columns), (240, 8))]  # as broadcasting has
    x = np.lib.stride_tricks.as_strided(base, (rows, columns), strides)
    product(xp, x, values((columns, 3), np.float64))
    assert not xp.copies


def test_other_layouts_are_copied_once_and_broadcasting_is_not_written_out(xp) -> None:
    y = values((4, 5), np.float32)
    for x in (
        values((6, 8), np.float32)[::2, ::2],
        values((3, 4), np.float32)[::-1],
        np.broadcast_to(values((4,), np.float32), (3, 4)),
        np.broadcast_to(values((3, 1), np.float32), (3, 4)),
        values((3, 4), np.complex64).real,
    ):
        product(xp, x, y)
        assert xp.copies == [(3, 4)]
        xp.copies.clear()
    x = np.broadcast_to(values((6, 8), np.float32)[::2, ::2], (7, 3, 4))
    (call,) = product(xp, x, np.broadcast_to(y, (7, 4, 5)))
    assert xp.copies == [(1, 3, 4)] and (call.sa, call.sb, call.count) == (0, 0, 7)
    xp.copies.clear()
    product(xp, values((5, 3, 4), np.float32)[::-1], y)  # backwards through the batch
    assert xp.copies == [(5, 3, 4)]


def test_rows_that_share_a_matrix_are_one_taller_matrix(xp, monkeypatch) -> None:
    monkeypatch.setattr(gemm, "CALL", 0)
    x, y = values((5, 6, 3, 4), np.float32), values((5, 1, 4, 2), np.float32)  # queries in groups, one key per group
    (call,) = product(xp, x, y)
    assert (call.n, call.count, call.sb, call.sa, call.sc) == (18, 5, 72, 8, 36) and not xp.copies
    calls = product(xp, turned(x), y)  # not where the rows are columns
    assert len(calls) == 5 and not xp.copies
    squares = turned(values((5, 6, 4, 4), np.float32))  # whose steps are those of rows
    assert len(product(xp, squares, y)) == 5 and not xp.copies
    gaps = values((5, 6, 7, 4), np.float32)[:, :, :3]
    assert len(product(xp, gaps, y)) == 5 and not xp.copies


def test_a_partly_broadcast_batch_loops_over_the_shorter_dimension_or_copies(xp, monkeypatch) -> None:
    x, y = values((3, 1, 2, 4), np.float32), values((3, 5, 4, 6), np.float32)
    monkeypatch.setattr(gemm, "CALL", 0)
    calls = product(xp, x, y)
    assert [(c.count, c.sa, c.sb, c.sc) for c in calls] == [(5, 24, 0, 12)] * 3 and not xp.copies
    calls = product(xp, x.transpose(1, 0, 2, 3), y.transpose(1, 0, 2, 3))  # now the outer dimension is the longer one
    assert [(c.count, c.sb) for c in calls] == [(5, 0)] * 3 and not xp.copies
    # Two calls more are worth writing x out, 3 * 5 * 8 floats read and written, as soon as they cost more than that.
    monkeypatch.setattr(gemm, "CALL", 3 * 5 * 8 * 4)
    assert len(product(xp, x, y)) == 3
    monkeypatch.setattr(gemm, "CALL", 3 * 5 * 8 * 4 + 1)
    (call,) = product(xp, x, y)
    assert xp.copies == [(3, 5, 2, 4)] and (call.count, call.sb) == (15, 8)


def test_every_mixture_of_broadcasting_is_right(xp, monkeypatch) -> None:
    shapes = [(2, 3, 4), (1, 3, 4), (2, 1, 4), (2, 3, 1), (1, 1, 4), (2, 1, 1), (4,), (3, 1), ()]
    for most in (0, gemm.CALL):
        monkeypatch.setattr(gemm, "CALL", most)
        for a, b in itertools.product(shapes, repeat=2):
            x, y = values((*a, 2, 3), np.float32), values((*b, 3, 2), np.float32, 1)
            for one, other in itertools.product((x, turned(x)), (y, turned(y))):
                product(xp, one, other)
    backwards = values((4, 3, 2, 2, 3), np.float32).transpose(2, 1, 0, 3, 4)
    product(xp, backwards, values((2, 3, 4, 3, 2), np.float32))


def test_empty_products(xp) -> None:
    for a, b in [
        ((0, 4), (4, 2)),
        ((3, 4), (4, 0)),
        ((0, 3, 4), (4, 2)),
        ((3, 0), (0, 2)),
        ((5, 3, 0), (5, 0, 2)),
        ((0, 0), (0, 0)),
    ]:
        assert product(xp, values(a, np.float32), values(b, np.float32)) == []
    assert not xp.others


def test_other_dtypes_and_mixtures_go_to_cupy(xp) -> None:
    for dtype in (np.int32, np.uint8, np.bool_):
        x = np.ones((2, 2), dtype)
        out = np.zeros((2, 2), dtype)
        blas.matmul(xp, Array(xp, x), Array(xp, x), Array(xp, out))
        assert np.array_equal(out, x @ x)
    assert len(xp.others) == 3 and not xp.calls


def test_the_arrays_device_is_made_current_if_it_is_not(xp) -> None:
    product(xp, values((2, 2), np.float32), values((2, 2), np.float32))
    assert xp.device.entered == 0
    xp.device = Device(1)
    product(xp, values((2, 2), np.float32), values((2, 2), np.float32))
    assert xp.device.entered == 1


def test_a_handle_follows_the_stream_with_its_workspace(xp) -> None:
    for pointer in (5, 6, 6, 5, 0):
        xp.stream.ptr = pointer
        (call,) = product(xp, values((2, 2), np.float32), values((2, 2), np.float32))
        assert call.stream == pointer
    with cublas.workspace(0, SimpleNamespace(ptr=4096, size=32 * 2**20)):
        product(xp, values((2, 2), np.float32), values((2, 2), np.float32))
    product(xp, values((2, 2), np.float32), values((2, 2), np.float32))


def test_what_the_library_refuses_is_an_error(xp) -> None:
    xp.blas.status = 15
    x = Array(xp, np.ones((2, 2)))
    with pytest.raises(cublas.CUBLASError, match="CUBLAS_STATUS_NOT_SUPPORTED") as caught:
        gemm.matmul(xp, x, x, x)
    assert caught.value.status == 15


def test_handles_are_those_of_threads(xp) -> None:
    found = []

    def multiply() -> None:
        product(xp, values((2, 2), np.float32), values((2, 2), np.float32))
        found.append(cublas.mine.handles[0])

    multiply()
    thread = threading.Thread(target=multiply)
    thread.start()
    thread.join()
    assert found[0] is not found[1]


def test_without_the_library_the_error_says_what_to_install(monkeypatch) -> None:
    monkeypatch.delenv("TAPEGRAD_CUBLAS", raising=False)
    monkeypatch.setattr(cublas, "mine", cublas.Mine())
    xp = Namespace()

    class Cuda:
        runtime = xp.cuda.runtime
        get_current_stream = staticmethod(lambda: xp.stream)

        @property
        def cublas(self) -> Any:
            raise ImportError("no libcublas.so.12")

    xp.cuda = Cuda()
    x = Array(xp, np.ones((2, 2)))
    with pytest.raises(KernelError, match=r"no libcublas\.so\.12; install it .*pip install nvidia-cublas-cu12"):
        gemm.matmul(xp, x, x, x)


@pytest.fixture
def cupy():
    """The stand-in for CuPy, whose cuBLAS refuses what cuBLAS refuses."""
    from shim import standin

    yield standin.install()
    standin.uninstall()


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_stand_in_for_cupy_takes_the_calls(cupy, dtype) -> None:
    for a, b in [((3, 4), (4, 5)), ((2, 1, 3, 4), (5, 4, 5)), ((6, 3, 4), (1, 4, 5)), ((2, 6, 3, 4), (2, 1, 4, 5))]:
        hosts = values(a, dtype), values(b, dtype, 1)
        x, y = map(cupy.asarray, hosts)
        shape = (*np.broadcast_shapes(a[:-2], b[:-2]), 3, 5)
        out, back = cupy.empty(shape, dtype), cupy.empty((*shape[:-2], 5, 3), dtype)
        gemm.matmul(cupy, x, y, out)
        gemm.matmul(cupy, y.mT, x.mT, back)
        with cupy.cuda.Device(1):
            gemm.matmul(cupy, x[..., ::-1, ::2], y[..., ::2, :], out)
            gemm.matmul(cupy, x, y, out)
        wide = np.complex128 if np.dtype(dtype).kind == "c" else np.float64
        wanted = hosts[0].astype(wide) @ hosts[1].astype(wide)
        eps = 16 * float(ml_dtypes.finfo(dtype).eps)
        np.testing.assert_allclose(out.get().astype(wide), wanted, rtol=eps, atol=eps)
        np.testing.assert_allclose(back.get().astype(wide), wanted.mT, rtol=eps, atol=eps)
    empty = cupy.empty((3, 5), dtype)
    gemm.matmul(cupy, cupy.empty((3, 0), dtype), cupy.empty((0, 5), dtype), empty)
    assert not empty.get().astype(bool).any()
