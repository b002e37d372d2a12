"""The stand-in's cuBLAS against NumPy, its kernels against the host shim, its names against the real CuPy."""

from __future__ import annotations

import itertools
import subprocess
import sys
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest

from shim import standin

CODES = {"float16": 2, "bfloat16": 14, "float32": 0, "float64": 1, "complex64": 4, "complex128": 5}
SCALES = {"float64": ("float64", 70), "complex64": ("complex64", 68), "complex128": ("complex128", 70)}
ERRORS = {"float16": 2e-3, "bfloat16": 2e-2, "float32": 1e-5, "complex64": 1e-5}
TYPED = {"float32": "s", "float64": "d", "complex64": "c", "complex128": "z"}
DOUBLE = r"""
extern "C" __global__ void twice(float* x, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) x[i] *= 2;
}
"""


@pytest.fixture
def cupy():
    """The stand-in, installed for one test."""
    yield standin.install()
    standin.uninstall()


@pytest.fixture
def compiler(cupy):
    """A skip where no C++ compiler is."""
    from shim import host

    if why := host.why_no_compiler():
        pytest.skip(why)


def dtype_of(name):
    return np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name)


def draw(shape, name, seed):
    generator = np.random.default_rng(seed)
    values = generator.standard_normal(shape)
    if name.startswith("complex"):
        values = values + 1j * generator.standard_normal(shape)
    return values.astype(dtype_of(name))


def applied(matrices, flag):
    return matrices if flag == 0 else matrices.swapaxes(1, 2) if flag == 1 else matrices.swapaxes(1, 2).conj()


class Product:
    """Two batches of row-major matrices with room between rows and matrices, and the call that multiplies them."""

    def __init__(self, cupy, name, flags=(0, 0), sizes=(3, 4, 5), count=2, shared=False, beta=0.0, into=None):
        (self.m, self.n, self.k), self.flags, self.count, self.name = sizes, flags, count, name
        self.into = into or name
        self.blas, self.handle = cupy.cuda.cublas, cupy.cuda.Device().cublas_handle
        # Column-major (rows, columns) with a leading dimension is row-major (columns, ld), cut to the rows.
        shapes = [(self.k, self.m + 1) if not flags[0] else (self.m, self.k + 1),
                  (self.n, self.k + 2) if not flags[1] else (self.k, self.n + 2), (self.n, self.m + 3)]  # fmt: skip
        counts = (1 if shared else count, count, count)
        names = (name, name, self.into)
        self.host = [draw((c, *s), n, i) for i, (c, s, n) in enumerate(zip(counts, shapes, names))]
        self.device = [cupy.asarray(one) for one in self.host]
        self.strides = [0 if shared else shapes[0][0] * shapes[0][1], *(r * c for r, c in shapes[1:])]
        self.leading = [one[1] for one in shapes]
        scale, self.compute = SCALES.get(name, ("float32", 68))
        self.scalars = np.array([1.5, beta], scale)

    def expected(self):
        rows_a, rows_b = (self.k if self.flags[0] else self.m), (self.n if self.flags[1] else self.k)
        wide = "complex128" if self.name.startswith("complex") else "float64"
        left, right, old = (one.astype(wide).swapaxes(1, 2) for one in self.host)
        product = applied(left[:, :rows_a], self.flags[0]) @ applied(right[:, :rows_b], self.flags[1])
        alpha, beta = self.scalars.astype(wide)
        return alpha * product + (beta * old[:, : self.m] if beta else 0)

    def run(self, function="gemmStridedBatchedEx", **changes):
        alpha = self.scalars.ctypes.data
        values = {"ta": self.flags[0], "tb": self.flags[1], "lda": self.leading[0], "compute": self.compute}
        values |= {"alpha": alpha, "k": self.k} | changes
        fields = [[one.data.ptr, CODES[one.dtype.name], ld, stride]
                  for one, ld, stride in zip(self.device, self.leading, self.strides)]  # fmt: skip
        fields[0][2] = values["lda"]
        batched, typed = "Strided" in function, not function.endswith("Ex")
        a, b, c = ([one[0], *([] if typed else [one[1]]), one[2], *([one[3]] if batched else [])] for one in fields)
        tail = ([self.count] if batched else []) + ([] if typed else [values["compute"], -1])
        head = (self.handle, values["ta"], values["tb"], self.m, self.n, values["k"], values["alpha"])
        getattr(self.blas, function)(*head, *a, *b, alpha + self.scalars.itemsize, *c, *tail)
        return self.device[2].get().swapaxes(1, 2)

    def check(self, function="gemmStridedBatchedEx"):
        result = self.run(function)
        error = ERRORS.get(self.into, 1e-12)
        wide = "complex128" if self.name.startswith("complex") else "float64"
        np.testing.assert_allclose(result[:, : self.m].astype(wide), self.expected(), rtol=error, atol=5 * error)
        untouched = self.host[2].swapaxes(1, 2)[:, self.m :]
        assert (result[:, self.m :] == untouched).all()


@pytest.mark.parametrize("name", CODES)
@pytest.mark.parametrize("flags", list(itertools.product((0, 1, 2), repeat=2)))
def test_product_of_each_dtype_and_transpose(cupy, name, flags):
    Product(cupy, name, flags, beta=0.5).check()
    Product(cupy, name, flags, count=3, shared=True).check()
    Product(cupy, name, flags, count=1).check("gemmEx")


@pytest.mark.parametrize("name", TYPED)
def test_products_named_after_their_dtype(cupy, name):
    Product(cupy, name, (1, 0), count=1).check(f"{TYPED[name]}gemm")
    Product(cupy, name, (0, 1), count=3).check(f"{TYPED[name]}gemmStridedBatched")


@pytest.mark.parametrize("name", ["float16", "bfloat16"])
def test_narrow_operands_into_a_wide_result(cupy, name):
    Product(cupy, name, into="float32").check()


def test_beta_zero_reads_nothing_of_c_and_k_zero_scales_it(cupy):
    product = Product(cupy, "float32")
    product.device[2][:, :, :3] = float("nan")
    assert np.isfinite(product.run()[:, :3]).all()
    product = Product(cupy, "float32", beta=2.0)
    assert np.allclose(product.run(k=0)[:, :3], 2 * product.host[2].swapaxes(1, 2)[:, :3])


@pytest.mark.parametrize("changes, status", [
    ({"lda": 2}, "INVALID_VALUE"), ({"k": -1}, "INVALID_VALUE"), ({"ta": 3}, "INVALID_VALUE"),
    ({"ta": 1, "k": 6}, "INVALID_VALUE"), ({"compute": 70}, "NOT_SUPPORTED"), ({"compute": 1}, "NOT_SUPPORTED"),
])  # fmt: skip
def test_bad_arguments(cupy, changes, status):
    with pytest.raises(cupy.cuda.cublas.CUBLASError, match=f"CUBLAS_STATUS_{status}"):
        Product(cupy, "float32").run(**changes)


def test_addresses_outside_device_memory(cupy):
    error = cupy.cuda.runtime.CUDARuntimeError
    scalar = cupy.ones(1, "float32")
    for changes in ({"lda": 500}, {"alpha": scalar.data.ptr}):
        with pytest.raises(error, match="cudaErrorIllegalAddress"):
            Product(cupy, "float32").run(**changes)


@pytest.mark.parametrize("name", ["float16", "bfloat16"])
def test_narrow_matmul(cupy, name):
    a = cupy.full((4, 4096), 1.0, dtype_of(name))
    for product in (a @ a.T, cupy.einsum("ij,kj->ik", a, a), cupy.tensordot(a, a, axes=([1], [1]))):
        assert product.dtype == dtype_of(name) and (product == 4096).all()  # no sum in the narrow dtype gets there


def test_scalars_on_the_device(cupy):
    product = Product(cupy, "float32")
    blas, handle = product.blas, product.blas.create()
    blas.setPointerMode(handle, blas.CUBLAS_POINTER_MODE_DEVICE)
    scalars = cupy.array([1.5, 0.0], "float32")
    a, b, c = product.device
    blas.sgemm(handle, 0, 0, 3, 4, 5, scalars.data.ptr, a.data.ptr, 4, b.data.ptr, 7, scalars.data.ptr + 4,
               c.data.ptr, 6)  # fmt: skip
    assert np.allclose(c.get().swapaxes(1, 2)[0, :3], product.expected()[0], rtol=1e-5, atol=1e-5)


def test_launch(cupy, compiler):
    module = cupy.RawModule(code=DOUBLE, options=("-std=c++17",))
    assert standin.compiles == 0
    kernel = module.get_function("twice")
    x = cupy.arange(10, dtype="float32")
    with cupy.cuda.Stream(non_blocking=True) as stream:
        kernel((1,), (32,), (x[2:], np.int32(7)))
    module.get_function("twice")
    assert x.tolist() == [0, 1, 4, 6, 8, 10, 12, 14, 16, 9] and standin.compiles == 1
    (launch,) = standin.launches
    assert (launch.name, launch.grid, launch.block, launch.stream) == ("twice", (1,), (32,), stream.ptr)
    kernel((1,), (32,), (x.data, np.int32(1)))


def test_launches_that_fail(cupy, compiler):
    kernel = cupy.RawKernel(DOUBLE, "twice")
    x = cupy.ones(4, "float32")
    for args in ((x.get(), np.int32(4)), [x, np.int32(4)], (SimpleNamespace(__cupy_get_ndarray__=lambda: x), 4)):
        with pytest.raises(TypeError):
            kernel((1,), (4,), args)
    kernel((1,), (4,), (x, np.array([4], np.int32)))
    assert x.tolist() == [2] * 4
    freed = cupy.ones(4, "float32")
    freed.data.mem.free()
    with pytest.raises(cupy.cuda.runtime.CUDARuntimeError, match="freed"):
        kernel((1,), (4,), (freed, np.int32(4)))
    with pytest.raises(RuntimeError, match="CUDA_ERROR_INVALID_VALUE"):
        kernel((1,), (4,), (x, np.int32(4)), shared_mem=50000)
    with pytest.raises(cupy.cuda.compiler.CompileException, match="error"):
        cupy.RawModule(code='extern "C" __global__ void f(float* x) { x[0] = oops; }').get_function("f")
    with pytest.raises(cupy.cuda.driver.CUDADriverError, match="CUDA_ERROR_NOT_FOUND"):
        cupy.RawModule(code=DOUBLE).get_function("thrice")


def test_watched_kernels_know_the_pool(cupy, compiler):
    from shim import host

    standin.configure(check=True)
    kernel, x = cupy.RawKernel(DOUBLE, "twice"), cupy.ones(128, "float32")
    kernel((1,), (128,), (x, np.int32(128)))
    with pytest.raises(host.KernelFault):
        kernel((1 << 12,), (128,), (x, np.int32(1 << 19)))
    assert x.tolist()[:2] == [4, 4]


REAL = """
import importlib, inspect, sys
try:
    import cupy, cupyx, cupy_backends.cuda.api.runtime
except ImportError:
    sys.exit(77)
for line in sys.stdin.read().splitlines():
    name, _, signature = line.partition(" ")
    target = cupyx if name.startswith("cupyx.") else cupy
    try:
        for part in name.split(".")[1:]:
            target = getattr(target, part)
    except AttributeError:
        print("absent:", name)
        continue
    if signature == "ufunc":
        assert isinstance(target, cupy.ufunc), name
    elif signature:
        real = list(inspect.signature(target).parameters.values())
        ours = list(inspect.signature(eval("lambda" + " " + signature + ": 0")).parameters.values())
        if [(p.name, p.kind) for p in real] != [(p.name, p.kind) for p in ours]:
            print("signature:", name, signature, [p.name for p in real])
"""


def offered(cupy):
    """Every public name of the stand-in, with its signature where the table has one."""
    import cupyx

    skipped = {"cupy.cuda.cublas"}  # the real one cannot be loaded without libcublas
    table = dict(line.partition("(")[::2] for line in standin.namespace.TABLE.read_text().splitlines())
    for path, owner in (("cupy", cupy), ("cupy.ndarray", cupy.ndarray), ("cupy.cuda", cupy.cuda), ("cupyx", cupyx),
                        ("cupy.cuda.runtime", cupy.cuda.runtime), ("cupy.cuda.memory", cupy.cuda.memory),
                        ("cupy.cuda.Device", cupy.cuda.Device), ("cupy.cuda.Event", cupy.cuda.Event),
                        ("cupy.cuda.Stream", cupy.cuda.Stream), ("cupy.cuda.MemoryPool", cupy.cuda.MemoryPool),
                        ("cupy.cuda.MemoryPointer", cupy.cuda.MemoryPointer), ("cupy.add", cupy.add),
                        ("cupy.RawModule", cupy.RawModule), ("cupy.RawKernel", cupy.RawKernel)):  # fmt: skip
        for name in dir(owner):
            if name.startswith("_") or f"{path}.{name}" in skipped:
                continue
            if path == "cupy" and name in table:
                yield f"cupy.{name} " + (table[name][:-1] if table[name] else "ufunc")
            elif (path, name) != ("cupy.add", "module"):
                yield f"{path}.{name}"


def test_every_name_is_one_of_cupy(cupy):
    names = "\n".join(offered(cupy))
    assert len(names.splitlines()) > 600
    done = subprocess.run([sys.executable, "-c", REAL], input=names, capture_output=True, text=True, timeout=60)
    if done.returncode == 77:
        pytest.skip("CuPy is not installed")
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
