"""The comparison finds what it is there for: one instruction that is another, a barrier less, a branch of the sources
that only a device compiles."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from shim import nvrtc
from shim.host import KernelFault

from kernels import test_gather as gather
from kernels import test_optim_kernel as optim
from kernels import test_random_kernels as draws
from kernels import test_rows as rows
from tapegrad.device import kernel as kernel_module
from tapegrad.device.kernel import folder, options

from . import bounds
from .test_kernels import Told, Updating
from .twin import Disagreement, Record, Watch, watching

pytestmark = pytest.mark.slow


def softmax(device: Told) -> None:
    x = rows._draw(1, (3, 600), np.float32)
    rows._run(device, rows.softmax_p, (x,), x.shape, {})


def layer_norm(device: Told) -> None:
    x, gamma = rows._draw(1, (3, 4104), np.float16), rows._draw(3, (4104,), np.float16)
    rows._run(device, rows.layer_norm_p, (x, gamma, gamma), x.shape, {"eps": 0.1})


def scatter(device: Told) -> None:
    x = gather._values((600, 8), np.float32, 1)
    gather._scatter(device, x, np.repeat([0, 2, 2], 200), 0, 4)


def drawing(device: Told) -> None:
    macros = ("-DT=tg_float32", "-DPACK=4", "-DKIND=tg_uniform")
    function = device.compile(draws._DRAWN, "drawn", (*options(), *macros))
    found = device.empty((512,), np.float32)
    device.launch(function, (2,), (64,), (found, np.int32(512), *draws._words(7**40, 2), np.uint64(5)))


def lion(device: Told) -> None:
    arrays = optim.operands("lion", [5, 301], np.float32)
    for x in (x for column in arrays for x in column):
        device.told(x)
    optim.update("lion", arrays, Updating(device))


def peaks(device: Told) -> None:
    x = rows._draw(1, (3, 600), np.float32, 10000.0)
    rows._run(device, rows.softmax_p, (x,), x.shape, {})


MUTANTS = {
    "a sum is a difference": (softmax, "tg_softmax", r"add\.rn\.ftz\.f32", "sub.rn.ftz.f32", -1),
    "a maximum is a minimum": (peaks, "tg_softmax", r"setp\.gt\.ftz\.f32", "setp.lt.ftz.f32", -1),
    "no barrier": (layer_norm, "tg_layer_norm", r"bar\.sync \t0;", "", 0),
    "another distance": (layer_norm, "tg_layer_norm", r"(mov\.u32 \t%r\d+, )8;", r"\g<1>4;", 0),
    "another half float": (
        layer_norm, "tg_layer_norm", r"(cvt\.rn\.f16\.f32 (%\w+), %\w+;)", r"\1 xor.b16 \2, \2, 1;", 0
    ),
    "an element further": (scatter, "tg_scatter_add", r"(st\.global[.\w]+ *\t\[%rd\d+)\]", r"\1+32]", -1),
    "beyond the end": (
        scatter, "tg_scatter_add", r"(ld\.global[.\w]+ *\t[^;]*\[%rd\d+)(?:\+\d+)?\]", r"\1+1048576]", 0
    ),
    "a loop that ends early": (scatter, "tg_scatter_pieces", r"setp\.lt\.s64", "setp.gt.s64", 0),
    "the lower half": (drawing, "drawn", r"mul\.hi\.u64", "mul.lo.u64", 4),
    "a shift by another number": (drawing, "drawn", r"(shr\.u64 \t%rd\d+, %rd\d+, )(\d+);", r"\g<1>7;", 0),
    "rounded to zero": (lion, "tg_lion", r"add\.rn\.ftz\.f32", "add.rz.ftz.f32", -1),
    "fused": (
        lion, "tg_lion", r"mul\.rn\.ftz\.f32 \t(%f\d+), (%f\d+), (%f\d+);",
        r"fma.rn.ftz.f32 \1, \2, \3, 0f3C000000;", -1,
    ),
    "a branch turned round": (lion, "tg_lion", r"@%p(\d+) bra", r"@!%p\1 bra", 0),
    "another constant": (lion, "tg_lion", "0fBF800000", "0fBF800001", 0),
}  # fmt: skip
"""What is run, the kernel, what is changed in it into what, and at which of the places that are executed."""


def watched(run: Callable[[Told], None], mutate: Callable[[str], str]) -> Record:
    """What has run, on a device that knows no kernel yet."""
    device, record = Told(), Record()
    try:
        with watching(Watch((80,), lambda kernel: bounds.ROWS, record, mutate)):
            run(device)
    finally:
        device.forget()
        device.close()
    return record


@pytest.mark.parametrize("name", MUTANTS)
def test_a_changed_instruction_is_found(name):
    nvrtc.library()
    run, kernel, pattern, replacement, number = MUTANTS[name]
    record = watched(run, lambda text: text)  # as it is: nothing is found
    assert kernel in record.names
    lines: list[tuple[str, int]] = []
    for program in record.programs:
        if kernel in program.module.functions:
            code = program.code(kernel)
            found = {ins.line for i, ins in enumerate(code.function.code) if code.executed[i]}
            rows = program.text.splitlines()
            lines += [(program.text, line) for line in sorted(found) if re.search(pattern, rows[line - 1])]
    original, line = lines[number]

    def mutate(text: str) -> str:
        rows = text.splitlines()
        if text == original:
            rows[line - 1] = re.sub(pattern, replacement, rows[line - 1])
        return "\n".join(rows)

    with pytest.raises((Disagreement, KernelFault)):
        watched(run, mutate)


@pytest.fixture
def edited(tmp_path, monkeypatch) -> Iterator[Callable[[str, str], None]]:
    """Changes the sources of kernels, in a copy of them."""
    copy = tmp_path / "kernels"
    shutil.copytree(folder(), copy)
    uncached = kernel_module.options.__wrapped__
    monkeypatch.setattr(kernel_module, "folder", lambda: copy)
    monkeypatch.setattr(kernel_module, "options", lambda: uncached())

    def edit(old: str, new: str) -> None:
        count = 0
        for file in copy.glob("*.cuh"):
            text = file.read_text()
            count += text.count(old)
            file.write_text(text.replace(old, new))
        assert count, f"no header holds {old}"

    return edit


CAST = """#include "scalar.cuh"
extern "C" __global__ void cast(const FROM* x, TO* out, int n) {
    if (threadIdx.x < n) out[threadIdx.x] = tg_store<TO>(tg_load(x[threadIdx.x]));
}
"""
ASSEMBLY = [
    ("cvt.rn.f16.f32 %0, %1;", "cvt.rn.f16.f32 %0, %1; xor.b16 %0, %0, 1;", "float32", "float16"),
    ("cvt.f32.f16 %0, %1;", "cvt.f32.f16 %0, %1; xor.b32 %0, %0, 8192;", "float16", "float32"),
    ("cvt.rn.f16.f64 %0, %1;", "cvt.rn.f16.f64 %0, %1; add.u16 %0, %0, 1;", "float64", "float16"),
]


@pytest.mark.parametrize(("old", "new", "source", "target"), ASSEMBLY)
def test_a_changed_branch_that_the_host_leaves_out_is_found(old, new, source, target, edited):
    nvrtc.library()

    def run(told: Told) -> None:
        x, out = np.arange(32).astype(source), told.empty((32,), target)
        types = (f"-DFROM=tg_{source}", f"-DTO=tg_{target}")
        function = told.compile(CAST, "cast", (*kernel_module.options(), *types))
        told.launch(function, (1,), (32,), (x, out, np.int32(32)))
        np.testing.assert_array_equal(out, x.astype(target))  # the host is as before

    watched(run, lambda text: text)
    edited(old, new)
    with pytest.raises(Disagreement, match="kernel cast of compute_80"):
        watched(run, lambda text: text)
