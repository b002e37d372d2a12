"""Every whole kernel, as NVRTC's PTX, against the host: all float dtypes for compute_80, two of them for compute_90, at
small sizes, which take every way through the kernels: rows held and not, packs and none, many to one place.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import kernel_modules
import ml_dtypes
import numpy as np
import pytest
from kernels.conftest import HostDevice
from shim import host, nvrtc
from test_primitives import good_samples, operands

from kernels import test_compiled as compiled
from kernels import test_conv_kernels as conv
from kernels import test_gather as gather
from kernels import test_optim_kernel as optim
from kernels import test_rows as rows
from tapegrad.core.aval import shaped
from tapegrad.core.primitive import REGISTRY, Opaque
from tapegrad.device import CPU, multi_tensor
from tapegrad.device.checks import kind as kind_of_check
from tapegrad.device.kernel import DECLARED
from tapegrad.errors import IndexingError
from tapegrad.ops import updates

from . import bounds
from .twin import Record, Watch, watching

pytestmark = pytest.mark.slow

BFLOAT = np.dtype(ml_dtypes.bfloat16)
CASES = [(np.dtype("float32"), 80), (np.dtype("float16"), 80), (BFLOAT, 80), (np.dtype("float64"), 80),
         (np.dtype("float32"), 90), (BFLOAT, 90)]  # fmt: skip
WIDTHS = {"float32": (5, 32, 1100, 9000), "bfloat16": (5, 2056), "float16": (16,), "float64": (3, 514)}
OTHERS = ("int16", "bool", "complex128", "complex64", "uint8", "int64")
PATTERNS = ("adam", "sgd decayed", "nesterov", "rmsprop", "rmsprop centered", "rmsprop with momentum",
            "rmsprop with all", "adagrad", "lion", "lamb")  # fmt: skip


class Told(HostDevice):
    """Kernels may reach its arrays through addresses in memory, too."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[np.ndarray] = []

    def empty(self, shape: Any, dtype: Any) -> Any:
        return self.told(super().empty(shape, dtype))

    def told(self, x: np.ndarray) -> np.ndarray:
        if x.size:
            host.register(x.ctypes.data, x.nbytes)
            self.made.append(x)
        return x

    def close(self) -> None:
        """What is told of memory that is gone would be read all the same."""
        host.unregister(self.checks.argument(0, 0, 0)["at"].item())

    def forget(self) -> None:
        while self.made:
            host.unregister(self.made.pop().ctypes.data)


class Updating(optim.Emulated):
    """What updates write is known as well."""

    def empty(self, shape: Any, dtype: Any) -> Any:
        return self.host.told(super().empty(shape, dtype))


@pytest.fixture
def told() -> Iterator[Told]:
    nvrtc.library()
    device = Told()
    yield device
    device.forget()
    device.close()


@contextmanager
def compared(arch: int = 80) -> Iterator[Record]:
    """Launches inside are compared, and none is left out."""
    record = Record()
    with watching(Watch((arch,), lambda name: bounds.ROWS, record)):
        yield record
    assert not record.left_out


def primitives(device: Told, dtype: np.dtype, every: bool) -> None:
    """Each primitive with kernels of its own at every sample, or at those that reach a kernel that none before did."""
    known: set[str] = set()
    for prim in [p for p in REGISTRY.values() if isinstance(p, Opaque) and p.cuda is not None]:
        if prim.name.startswith("matmul"):  # cuBLAS multiplies
            continue
        for sample in good_samples(prim):
            xs = [x.astype(dtype) if x.dtype.kind == "f" else x for x in operands(prim, sample, "float32")]
            aval = prim.infer(*(shaped(x.shape, x.dtype, CPU) for x in xs), **sample.params)
            asked = compiled.Recorder()
            prim.cuda(asked, *xs, out=asked.empty(aval.shape, aval.dtype), **sample.params)
            names = {name for name, _, _ in asked.asked}
            if every or names - known:
                prim.cuda(device, *xs, out=device.empty(aval.shape, aval.dtype), **sample.params)
                device.forget()
            known |= names


def along_rows(device: Told, dtype: np.dtype, widths: tuple[int, ...]) -> None:
    """What walks along rows, at widths that choose its ways."""
    for width in widths:
        for leads in ((), (2,)) if width < 50 else ((),):
            for prim, xs, shape, params in rows._cases((3,), width, dtype, leads):
                rows._run(device, prim, [rows._misaligned(x) if width == 5 else x for x in xs], shape, params)
                device.forget()


def gathering(device: Told, dtype: np.dtype) -> None:
    """Elements at places, sums to places, few and many to one; rows put into a table."""
    x, to = gather._values((2, 6, 8), dtype), np.array([[3, 0, 3], [5, 3, 0]])
    gather._take(device, x, to, 1)
    gather._take(device, gather._misaligned(gather._values((5, 3), dtype)), to % 5, 0)
    for width in (8, 3):
        multi_tensor = gather._values((600, width), dtype, 1)
        gather._scatter(device, multi_tensor, np.repeat([0, 2, 2], 200), 0, 4)
    gather._scatter(device, x, to.reshape(-1) % 6, 1, 7)
    for width in (8, 3):
        table, new = gather._values((5, width), dtype), gather._values((3, width), dtype, 1)
        kernel_modules.index.put_rows(device, table, np.array([4, -1, 0]), new)
    device.forget()


def optimizers(device: Told, dtype: np.dtype) -> None:
    """Every update, of tensors of all sizes, some that begin at odd places."""
    gpu, sizes, half = Updating(device), [1, 0, 3, 8, 301], dtype.itemsize == 2
    for case in PATTERNS:
        columns = [optim.operands(case, sizes, dtype)]
        if half:  # with masters, and gradients of either dtype
            columns += [optim.with_halves(case, sizes, dtype.type, gradient) for gradient in (dtype, np.float32)]
        for arrays in columns:
            arrays[0][3] = optim.shifted(arrays[0][3])
            for x in (x for column in arrays for x in column):
                device.told(x)
            optim.update(case, arrays, gpu)
            device.forget()


def rows_of_tables(device: Told, dtype: np.dtype) -> None:
    """Updates of some rows of tables, in place: in packs and one by one."""
    formulas = (updates.adam_formula(0.01, 0.9, 0.99, 1e-3), updates.sgd_formula(0.1),
                updates.momentum_formula(0.1, 0.9, True), updates.adagrad_formula(0.1, 1e-3))  # fmt: skip
    for formula, width in itertools.product(formulas, (8, 3)):
        tables = [np.abs(gather._values((5, width), dtype, i)) for i in range(len(formula.renewed))]
        g, places = gather._values((3, width), dtype, 9), np.array([4, -1, 0])
        numbers = multi_tensor.scalars(updates.with_decay(formula.numbers, 0.97), dtype)
        kernel_modules.index.run(device, formula.of_rows, 3, width, dtype, *tables, g, places, *numbers, np.int64(3))


def convolutions(device: Told, dtype: np.dtype) -> None:
    """The highest tiles, multiplied by tensor cores where they may."""
    for prim, xs, shape, params in conv.three("many rows", dtype, tf32=True):
        conv.found(device, prim, xs, shape, params)
        device.forget()
    for clips in (False, True):
        kernel_modules.convolution.finish(
            device, *(device.told(conv.drawn(s, dtype, 7)) for s in ((2, 3, 9, 11), (3,))), clips
        )
        device.forget()


def checks(device: Told, dtype: np.dtype) -> None:
    """Numbers within bounds, and one that is not."""
    kernel = next(one for one in DECLARED if one.name == "tg_within")
    number = kind_of_check("tests of ptx", lambda least, most, low, high: IndexingError(f"{least} to {most}"))
    for kind in ("int64", "int32", "uint64", "uint8"):
        x = np.arange(70).astype(kind)
        for most in (69, 50):
            within = nullcontext() if most == 69 else pytest.raises(IndexingError, match="69")
            with within:
                kernel(device, 1, 256, (x, device.checks.argument(number, 0, most), np.int64(x.size)), T=x.dtype)


@pytest.mark.parametrize(("dtype", "arch"), CASES, ids=str)
def test_every_kernel_is_run(dtype, arch, told):
    with compared(arch) as record:
        primitives(told, dtype, (dtype.name, arch) == ("float32", 80))
        for part in (gathering, convolutions, optimizers, rows_of_tables, checks):
            part(told, dtype)
        along_rows(told, dtype, WIDTHS[dtype.name] if arch == 80 else (32,))
    assert record.names == {kernel.name for kernel in DECLARED}


@pytest.mark.parametrize("dtype", OTHERS)
def test_gathering_of_other_dtypes(dtype, told):
    with compared() as record:
        gathering(told, np.dtype(dtype))
    assert {"tg_take", "tg_scatter_add", "tg_scatter_pieces"} <= record.names


def test_infinities_and_nan(told):
    with compared():
        for width in (5, 40, 1100):
            rows.test_infinities_and_nan(told, width)
        rows.test_label_out_of_range(told)
