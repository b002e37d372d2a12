"""Every kernel as NVRTC compiles it for sm_80 and sm_90: no spills, few registers, wide loads, no contraction.

No GPU is needed, nor a C++ compiler beyond the trial kernel of the stand-in.  The caps are what was measured, rounded
up: emitted kernels of float32 take at most 64 registers, those of other dtypes and whole kernels at most 128.
"""

from __future__ import annotations

import io
import os
import uuid
from functools import cache
from itertools import product

import kernel_modules
import ml_dtypes
import numpy as np
import pytest
from cuda_cases import installed, numbers
from inside import is_lazy
from shim import nvrtc, standin
from test_primitives import good_samples, operands

import tapegrad as tg
from tapegrad.core.aval import shaped
from tapegrad.core.primitive import REGISTRY, Opaque
from tapegrad.core.state import during
from tapegrad.device import CPU, asdevice, multi_tensor
from tapegrad.device.checks import RECORD, Checks
from tapegrad.device.kernel import DECLARED, folder, options
from tapegrad.device.numerics.attention_cut import Weighting
from tapegrad.device.numerics.windows import Moves
from tapegrad.tensor import from_array

pytestmark = pytest.mark.slow

ARCHES = tuple(map(int, os.environ.get("TAPEGRAD_ARCHES", "80 90").split()))
"""What kernels are compiled for."""
BFLOAT = np.dtype(ml_dtypes.bfloat16)
REAL = ("float32", "float16", "bfloat16", "float64")
DTYPES = (*REAL, "complex64", "int32")


@cache
def compiled(text, flags, arch):
    return nvrtc.compile(text, flags, arch)


def check(text, flags, most, what, names=None):
    """No kernel of a text (or of ``names``) spills or takes too many registers, on any architecture."""
    for arch in ARCHES:
        for name, (registers, spilled, _) in compiled(text, flags, arch).usage.items():
            if names is not None and name not in names:
                continue
            assert not spilled, f"{what}: {name} spills {spilled} bytes for sm_{arch}"
            assert registers <= most, f"{what}: {name} takes {registers} registers for sm_{arch}"


class Recorder:
    """A device that compiles nothing and notes what it was asked to compile."""

    xp, cudnn = np, None

    def __init__(self):
        self.asked = set()
        self.checks = Checks(np.zeros(RECORD.itemsize, np.uint8))

    def empty(self, shape, dtype):
        return np.zeros(shape, dtype)

    def compile(self, text, name, flags):
        self.asked.add((name, text, flags))
        return name

    def launch(self, function, grid, block, args, shared=0):
        pass


def asked_of(dtype):
    """What the primitives with kernels of their own compile for their samples, and what the optimizers do."""
    recorder = Recorder()
    ours = [p for p in REGISTRY.values() if isinstance(p, Opaque) and p.cuda is not None]
    for prim in (p for p in ours if not p.name.startswith("matmul")):  # by cuBLAS: there is nothing to compile
        for sample in good_samples(prim):
            xs = [x.astype(dtype) if x.dtype.kind == "f" else x for x in operands(prim, sample, "float32")]
            aval = prim.infer(*(shaped(x.shape, x.dtype, CPU) for x in xs), **sample.params)
            prim.cuda(recorder, *xs, out=recorder.empty(aval.shape, aval.dtype), **sample.params)
    long = recorder.empty((300, 8), dtype)  # to one place: more than a thread adds up
    kernel_modules.index.scatter_add(
        recorder, long, np.zeros(300, np.int64), axis=0, n=2, out=recorder.empty((2, 8), dtype)
    )
    kernel_modules.index.put_rows(recorder, long, np.zeros(2, np.int64), recorder.empty((2, 8), dtype))
    for outputs, tf32 in product((8, 20, 40), {False, dtype == "float32"}):  # tiles of more rows than the samples need
        x, w, y = (recorder.empty(s, dtype) for s in ((1, 8, 6, 6), (outputs, 8, 3, 3), (1, outputs, 4, 4)))
        moves = Moves((1, 1), ((0, 0), (0, 0)), (1, 1), 1, tf32)
        kernel_modules.convolution.forward(recorder, x, w, y, moves).run()
        kernel_modules.convolution.forward(recorder, x, w, y, moves, recorder.empty((outputs,), dtype), True).run()
        kernel_modules.convolution.finish(recorder, y, recorder.empty((outputs,), dtype), True)
        kernel_modules.convolution.in_kernel(recorder, x, y, w, moves).run()
        wide, image = (recorder.empty((n, outputs, 3 + k, 3 + k), dtype) for n, k in ((outputs, 0), (1, 3)))
        kernel_modules.convolution.in_image(recorder, y, wide, image, moves).run()
    for kernel in DECLARED:
        if kernel.file == "check.cu":
            for integers in ("int64", "int32", "uint64", "uint8"):
                recorder.compile(kernel.text(), kernel.name, kernel.options({"T": np.dtype(integers)}))
        if kernel.file == "optim.cu":
            dtypes = [(dtype, dtype, dtype)]
            if np.dtype(dtype).itemsize == 2:  # also of variables with masters
                dtypes += [("float32", gradient, dtype) for gradient in ("float32", dtype)]
            for types in dtypes:
                macros = multi_tensor.macros(*map(np.dtype, types))
                recorder.asked.add((kernel.name, kernel.text(), kernel.options(macros)))
        if kernel.file == "optim_rows.cu":
            macros = {"T": np.dtype(dtype), "PACK": 16 // np.dtype(dtype).itemsize}
            recorder.asked.add((kernel.name, kernel.text(), kernel.options(macros)))
    return recorder.asked


@pytest.mark.parametrize("dtype", [*REAL[:2], BFLOAT, REAL[3]], ids=str)
def test_whole_kernels(dtype):
    asked = asked_of(dtype)
    assert {name for name, _, _ in asked} == {kernel.name for kernel in DECLARED}, "a kernel was not reached"
    for text, flags in {(text, flags) for _, text, flags in asked}:
        name = next(name for name, other, _ in asked if other == text)
        check(text, flags, 255 if name.startswith("tg_attention") else 128, name)  # its sums are kept in registers


@pytest.mark.parametrize("tf32", [False, True])
def test_attention_multiplies_on_tensor_cores(tf32):
    """The widest heads, of which several warps have the same rows; weights dropped, numbers added."""
    recorder, dtype = Recorder(), np.dtype("float32") if tf32 else BFLOAT
    both = {"how": Weighting(0.5, True, "add", "zero", 0.5, tf32), "key": 0, "counter": 0}
    q, k, v, g = (recorder.empty((2, 8, 2, 256), dtype) for _ in range(4))
    mask, packed = recorder.empty((1, 1, 8, 8), dtype), recorder.empty((3 * q.size + 64,), dtype)
    kernel_modules.attention.forward(recorder, q, k, v, mask, out=g, **both)
    kernel_modules.attention.backward(recorder, q, k, v, mask, g, out=packed, pulled=(0, 1, 2, 3), **both)
    for of in (0, 1):
        kernel_modules.attention.tangent(recorder, q, k, v, mask, (q, k)[of], out=g, of=of, **both)
    assert len({name for name, _, _ in recorder.asked}) == 5
    for name, text, flags in recorder.asked:
        check(text, flags, 255, name)
        for arch in ARCHES:
            code = nvrtc.sass(compiled(text, flags, arch))
            assert ("HMMA.1688.F32.TF32" if tf32 else "HMMA.16816.F32.BF16") in code and "LDSM" in code


def test_ptx_of_a_compilation_is_that_of_its_virtual_architecture():
    kernel = next(kernel for kernel in DECLARED if kernel.file == "check.cu")
    text, flags = f"// {uuid.uuid4()}\n{kernel.text()}", kernel.options({"T": np.dtype("int64")})
    by_itself = nvrtc.ptx(text, flags, 80)
    assert nvrtc.compile(text, flags, 80).ptx == by_itself == nvrtc.ptx(text, flags, 80)


def test_every_file_is_reached():
    assert {kernel.file for kernel in DECLARED} == {file.name for file in folder().glob("*.cu")}


# Emitted regions: each form's name, the tensors it reads, and what it computes of them.


def leaf(shape, dtype, view=lambda x: x):
    device = asdevice("cuda")
    base = numbers(shape, "float32").astype(BFLOAT) if dtype == "bfloat16" else numbers(shape, dtype)
    return from_array(view(device.array(base)), device)


def chain(x, y):
    return (x * y + 3) * x - y


FORMS = {
    "contiguous": lambda d: chain(leaf((64, 48), d), leaf((64, 48), d)),
    "misaligned": lambda d: chain(leaf((65,), d, lambda x: x[1:]), leaf((64,), d)),
    "strided": lambda d: chain(leaf((64, 48), d, lambda x: x.T), leaf((48, 64), d)),
    "stepping": lambda d: chain(leaf((60, 10, 9), d, lambda x: x[::2, :, ::-1]), leaf((30, 10, 9), d)),
    "broadcast": lambda d: chain(leaf((64, 48), d), leaf((48,), d)) + leaf((64, 1), d),
    "row of a warp": lambda d: tg.sum(chain(leaf((64, 48), d), leaf((64, 48), d)), axis=1),
    "row of a block": lambda d: tg.sum(chain(leaf((300, 2000), d), leaf((300, 2000), d)), axis=1),
    "row in parts": lambda d: tg.sum(chain(leaf((40000,), d), leaf((40000,), d))),
    "columns": lambda d: tg.sum(chain(leaf((48, 64), d), leaf((64,), d)), axis=0),
    "columns in parts": lambda d: tg.sum(chain(leaf((3000, 64), d), leaf((64,), d)), axis=0),
    "middle axes": lambda d: tg.sum(chain(leaf((6, 7, 8, 9), d), leaf((9,), d)), axis=(1, 3)),
    "drawn": lambda d: leaf((64, 48), d) * drawn((64, 48), d),
    "drawn, 16 bits": lambda d: tg.nn.functional.dropout(leaf((64, 48), d) * 2, 0.5),
}
DRAWS = {
    "drawn": FORMS["drawn"],
    "drawn, 16 bits": FORMS["drawn, 16 bits"],
    "strided": lambda d: leaf((64, 48), d, lambda x: x.T) * drawn((48, 64), d),
    "misaligned": lambda d: leaf((65,), d, lambda x: x[1:]) * drawn((64,), d),
    "reduced": lambda d: tg.sum(leaf((64, 48), d) * drawn((64, 48), d), axis=1),
    "columns": lambda d: tg.sum(leaf((64, 48), d) * drawn((64, 48), d), axis=0),
    "16 bits, reduced": lambda d: tg.sum(tg.nn.functional.dropout(leaf((64, 48), d), 0.5), axis=1),
}
MATHS = {
    "transcendental": lambda d: tg.sigmoid(tg.tanh(tg.exp(leaf((64, 48), d)) * leaf((48,), d)) - leaf((64, 1), d)),
    "special": lambda d: tg.log1p(tg.sin(tg.erf(leaf((64, 48), d)) * leaf((48,), d)) ** leaf((64, 1), d)),
}


def drawn(shape, dtype):
    with tg.device("cuda"):
        unit = tg.random.uniform(shape, dtype="float64" if dtype == "float64" else "float32")
        return unit.astype(BFLOAT if dtype == "bfloat16" else dtype)


def texts_of(make, dtype):
    """The sources of the kernels that a value takes."""
    with installed():
        asdevice("cuda")
        out = io.StringIO()

        def explained():
            y = make(dtype)
            assert is_lazy(y)
            tg.explain(y, device="cuda", file=out)
            assert len(standin.launches) == 1, "only the probe has run"

        during(explained, deferring=[])
    found, kept = [], None
    for line in out.getvalue().splitlines():
        if line == '    #include "scalar.cuh"':
            kept = []
            found.append(kept)
        if kept is not None:
            kept.append(line[4:])
    assert found
    return ["\n".join(lines) + "\n" for lines in found]


@pytest.mark.parametrize("dtype", DTYPES)
def test_emitted_kernels(dtype):
    for name, make in {**FORMS, **(MATHS if dtype in REAL else {})}.items():
        for text in texts_of(make, dtype):
            check(text, options(), 64 if dtype == "float32" else 128, f"{name} of {dtype}")


@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize("dtype", ["float32", "float16", "float64", "complex64", "complex128"])
def test_packs_are_16_bytes_wide(dtype, arch):
    (text,) = texts_of(FORMS["contiguous"], dtype)
    code = nvrtc.sass(compiled(text, options(), arch))
    assert code.count("LDG.E.128") >= 2 and "STG.E.128" in code


@pytest.mark.parametrize("form", ["broadcast", "row of a warp", "row of a block", "columns", "drawn", "drawn, 16 bits"])
def test_packs_are_used_where_they_fit(form):
    (text,) = texts_of(FORMS[form], "float32")
    assert "LDG.E.128" in nvrtc.sass(compiled(text, options(), 90))


def test_what_does_not_fit_is_read_one_by_one():
    for form in ("misaligned", "stepping"):
        (text,) = texts_of(FORMS[form], "float32")
        assert nvrtc.sass(compiled(text, options(), 90)).count("LDG.E.128") < 2


@pytest.mark.parametrize(("dtype", "product", "total", "both"), [("float32", "FMUL", "FADD", "FFMA"),
                                                                 ("float16", "FMUL", "FADD", "FFMA"),
                                                                 ("float64", "DMUL", "DADD", "DFMA")])  # fmt: skip
def test_products_and_sums_are_not_contracted(dtype, product, total, both):
    make = lambda d: leaf((64,), d) * leaf((64,), d, lambda x: x[::-1]) + leaf((64,), d, lambda x: x[:])
    (text,) = texts_of(make, dtype)
    for arch in ARCHES:
        code = nvrtc.sass(compiled(text, options(), arch))
        assert product in code and total in code and both not in code
    contracted = tuple(flag for flag in options() if flag != "--fmad=false")
    freely = both in nvrtc.sass(compiled(text, contracted, 90))
    assert freely == (dtype != "float16")  # of which every product is rounded to 16 bits anyway


@pytest.mark.parametrize(("dtype", "instruction"), [("float16", "HMMA.16816.F32 "), ("bfloat16", "HMMA.16816.F32.BF16"),
                                                    ("float32", "HMMA.1688.F32.TF32")])  # fmt: skip
@pytest.mark.parametrize("name", ["tg_conv", "tg_conv_in_w"])
def test_convolutions_multiply_by_tensor_cores(name, dtype, instruction):
    kernel = next(kernel for kernel in DECLARED if kernel.name == name)
    macros = {"T": dtype if dtype != "bfloat16" else BFLOAT, "ROWS": 8}
    macros["T"] = np.dtype(macros["T"])
    for arch in ARCHES:
        code = nvrtc.sass(compiled(kernel.text(), kernel.options({**macros, "TENSOR": 1}), arch))
        assert instruction in code and "FFMA" not in code.split(f".text.{name}:")[1].split(".text.")[0]
    assert "HMMA" not in nvrtc.sass(compiled(kernel.text(), kernel.options({**macros, "TENSOR": 0}), 90))


def test_a_kernel_that_spills_is_found():
    head = 'extern "C" __global__ void __launch_bounds__(1024) k(const double* x, double* y, int n) {'
    lines = [f"const double v{i} = x[{i} * n] * x[{i + 1} * n];" for i in range(160)]
    total = " + ".join(f"v{i} * v{159 - i}" for i in range(160))
    text = "\n".join([head, *lines, "__syncthreads();", f"y[0] = {total};", "}"])
    with pytest.raises(AssertionError, match="k spills"):
        check(text, ("--std=c++17",), 300, "planted")
    empty = 'extern "C" __global__ void k() {}'
    with pytest.raises(AssertionError, match=f"registers for sm_{ARCHES[0]}"):
        check(empty, (), compiled(empty, (), ARCHES[0]).usage["k"][0] - 1, "planted")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
def test_draws_take_no_local_memory(dtype):
    for name, make in DRAWS.items():
        for text in texts_of(make, dtype):
            for arch in ARCHES:
                for kernel, (_, _, stack) in compiled(text, options(), arch).usage.items():
                    assert stack == 0, f"{name}: {kernel} has {stack} bytes of local memory for sm_{arch}"


def test_local_memory_is_found():
    body = "int a[64]; for (int j = 0; j < 64; ++j) a[j] = x[j]; for (int j = 0; j < n; ++j) a[x[j]] += a[x[j + 3]];"
    text = f'extern "C" __global__ void k(volatile int* x, int i, int n) {{ {body} x[0] = a[i]; }}'
    assert compiled(text, ("--std=c++17",), 90).usage["k"][2] > 0


@pytest.mark.parametrize(("dtype", "packs"), [("float32", 2), ("float64", 2)])
def test_packs_share_the_block_that_they_are_drawn_from(dtype, packs):
    (text,) = texts_of(FORMS["drawn"], dtype)
    assert f"h < {packs}; ++h" in text and text.count("d0(lo0, hi0, at0") == 1
