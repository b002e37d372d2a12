"""Convolutions by oneDNN: the values of ``conv_cpu`` and PyTorch, whatever the shapes; bits, memory, which library."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import tracemalloc
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from captured import alike

import tapegrad as tg
from tapegrad.device import onednn
from tapegrad.device.numerics import conv_cpu, conv_onednn
from tapegrad.device.numerics.windows import Moves
from tapegrad.errors import TapegradError
from tapegrad.nn import functional as F

pytestmark = pytest.mark.skipif(onednn.library() is None, reason="oneDNN is not installed")
KINDS = ("forward", "in_image", "in_kernel")
PLAIN = Moves((1, 1), ((1, 1), (1, 1)), (1, 1), 1)


@pytest.fixture
def blocks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of so many elements."""
    monkeypatch.setattr(conv_onednn, "BLOCK", request.param)

    def forget() -> None:
        for plan in (conv_onednn.plan_of_products, conv_onednn.plan_in_kernel):
            plan.cache_clear()

    forget()
    request.addfinalizer(forget)


def drawn(draw: np.random.Generator) -> tuple[Moves, dict[str, tuple[tuple[int, ...], tuple[int, ...]]]]:
    """Moves, and the shapes of the operands of each kind, the result's last."""
    dims, groups, n = int(draw.integers(1, 4)), int(draw.choice([1, 1, 2, 16])), int(draw.integers(1, 6))
    inner, outer = (1, 1) if groups == 16 else (int(c) for c in draw.choice([1, 3, 8, 16, 20], 2))
    each = lambda low, high: tuple(int(v) for v in draw.integers(low, high, dims))
    seldom = lambda high: each(1, high) if draw.random() < 0.3 else (1,) * dims
    kernel, strides, dilation = each(1, 5 - dims // 3), seldom(4), seldom(3)
    reach = [(k - 1) * d for k, d in zip(kernel, dilation)]
    padding = tuple((int(draw.integers(0, r + 1)), int(draw.integers(0, r + 1))) for r in reach)
    size = tuple(max(1, r + 1 - sum(p)) + int(draw.integers(0, 12)) for r, p in zip(reach, padding))
    moves = Moves(strides, padding, dilation, groups)
    x, w = (n, inner * groups, *size), (outer * groups, inner, *kernel)
    y = (n, outer * groups, *moves.over(size, kernel).positions)
    return moves, {"forward": (x, w, y), "in_image": (y, w, x), "in_kernel": (x, y, w)}


def laid(draw: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Numbers in an array that is not contiguous, as often as not."""
    values = draw.normal(size=shape).astype("float32")
    if draw.random() < 0.3:
        values = np.asfortranarray(values)
    return np.repeat(values, 2, axis=-1)[..., ::2] if draw.random() < 0.3 else values


@pytest.mark.parametrize("blocks", [2**18, 2000], indirect=True)
@pytest.mark.parametrize("kind", KINDS)
def test_values_are_those_of_products(kind: str, blocks: None) -> None:
    draw, done = np.random.default_rng(KINDS.index(kind)), 0
    for _ in range(150):
        moves, shapes = drawn(draw)
        *operands, result = shapes[kind]
        given = [laid(draw, shape) for shape in operands]
        wanted, found = np.empty(result), laid(draw, result)
        prepared = getattr(conv_onednn, kind)(*given, found, moves)
        if prepared is None:  # nothing fast for these shapes
            continue
        prepared.run()
        getattr(conv_cpu, kind)(*(a.astype("float64") for a in given), wanted, moves).run()
        np.testing.assert_allclose(
            found, wanted, rtol=0, atol=2e-6 * max(1, np.abs(wanted).max()), err_msg=str((moves, shapes))
        )
        done += 1
    assert done > 40


def test_like_torch() -> None:
    torch = pytest.importorskip("torch")
    draw = np.random.default_rng(3)
    x, w = (draw.normal(size=s).astype("float32") for s in ((6, 16, 20, 18), (24, 16, 3, 5)))
    theirs = [torch.tensor(a, requires_grad=True) for a in (x, w)]
    z = torch.nn.functional.conv2d(*theirs, padding=(1, 2))
    z.backward(torch.ones_like(z))
    ours = [tg.asarray(a) for a in (x, w)]
    with tg.GradientTape() as tape:
        tape.watch(ours)
        y = F.conv2d(*ours, padding=(1, 2))
    np.testing.assert_allclose(y.numpy(), z.detach().numpy(), rtol=1e-4, atol=1e-4)
    for got, want in zip(tape.gradient(y, ours), theirs, strict=True):
        np.testing.assert_allclose(got.numpy(), want.grad.numpy(), rtol=1e-4, atol=1e-3)


def test_it_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer's forward and backward pass run by the library, and its strided image's gradient by products."""
    called: list[str] = []

    def noted(kind: str, do: Any) -> Any:
        return lambda *args: called.append(kind) or do(*args)

    for kind in KINDS:
        monkeypatch.setattr(conv_cpu, kind, noted(kind, getattr(conv_cpu, kind)))
    x, w = tg.ones((2, 16, 9, 9)), tg.ones((16, 16, 3, 3))
    for stride, by_products in ((1, []), (2, ["in_image"])):
        called.clear()
        with tg.GradientTape() as tape:
            tape.watch([x, w])
            y = F.conv2d(x, w, stride=stride)
        tape.gradient(y, [x, w])
        assert sorted(set(called)) == by_products


@pytest.mark.parametrize("blocks", [2**18, 4000], indirect=True)
def test_no_bit_depends_on_threads(blocks: None) -> None:
    draw = np.random.default_rng(5)
    x, w, y = (draw.normal(size=s).astype("float32") for s in ((5, 16, 30, 30), (16, 16, 3, 3), (5, 16, 30, 30)))
    before, found = tg.get_num_threads(), []
    try:
        for count in (1, 3):
            tg.set_num_threads(count)
            results = [np.empty_like(a) for a in (y, x, w)]
            for kind, (a, b), out in zip(KINDS, ((x, w), (y, w), (x, y)), results, strict=True):
                getattr(conv_onednn, kind)(a, b, out, PLAIN).run()
            found.append(results)
    finally:
        tg.set_num_threads(before)
    for one, other in zip(*found, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("n", [4, 64])
def test_scratch_is_what_is_taken(n: int, threads: int) -> None:
    """And it does not grow with the batch, but for the parts of a sum."""
    draw = np.random.default_rng(0)
    x, w = (draw.normal(size=s).astype("float32") for s in ((n, 16, 32, 32), (16, 16, 3, 3)))
    before = tg.get_num_threads()
    tg.set_num_threads(threads)
    try:
        for kind, (a, b), out in zip(KINDS, ((x, w), (x, w), (x, x)), (x, x, w), strict=True):
            found = np.empty_like(out)
            prepared = getattr(conv_onednn, kind)(a, b, found, PLAIN)
            prepared.run()
            tracemalloc.start()
            prepared.run()
            taken = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
            assert 0.5 * prepared.nbytes <= taken <= prepared.nbytes + 20_000  # Python's own objects
            assert prepared.nbytes < threads * 1.3 * 2**20 + 2**19
    finally:
        tg.set_num_threads(before)


def test_special_numbers_reach_only_the_taps_that_meet_them() -> None:
    """Of 3 channels that are computed in lanes of 16."""
    x, g, w = np.ones((2, 3, 6, 6), "f4"), np.ones((2, 5, 4, 4), "f4"), np.ones((5, 3, 3, 3), "f4")
    x[0, 1, 0, 0], x[1, 0, 5, 5] = np.inf, np.nan
    moves = PLAIN._replace(padding=((0, 0), (0, 0)))
    in_kernel, out = np.empty_like(w), np.empty_like(g)
    conv_onednn.in_kernel(x, g, in_kernel, moves).run()
    conv_onednn.forward(x, w, out, moves).run()
    wanted = np.full((5, 3, 3, 3), 32.0)
    wanted[:, 1, 0, 0], wanted[:, 0, 2, 2] = np.inf, np.nan
    np.testing.assert_array_equal(in_kernel, wanted)
    wanted = np.full((2, 5, 4, 4), 27.0)
    wanted[0, :, 0, 0], wanted[1, :, 3, 3] = np.inf, np.nan
    np.testing.assert_array_equal(out, wanted)


def test_captured_and_within_a_budget_it_has_the_bits_of_eager() -> None:
    draw = np.random.default_rng(0)
    w = [tg.Variable(draw.normal(size=s).astype("float32") * 0.1) for s in ((16, 3, 3, 3), (16, 16, 3, 3))]
    x = tg.asarray(draw.normal(size=(4, 3, 12, 12)).astype("float32"))

    def loss_and_gradients() -> Any:
        with tg.GradientTape() as tape:
            h = x
            for v in w:
                h = tg.relu(F.conv2d(h, v, padding=1)) * 1.5 + 0.1
                h = tg.sin(tg.sin(tg.sin(h)))  # of what these retain some is dropped
            loss = tg.sum(h * h)
        return loss, *tape.gradient(loss, w)

    def program(function: Any) -> Any:
        step = function(loss_and_gradients)
        return [step() for _ in range(4)]

    alike(program)
    gc.collect()  # what goes later on would be room within the budget
    with tg.measure() as plain:
        wanted = [t.numpy(copy=True) for t in loss_and_gradients()]
    with tg.memory_budget(plain.peak_bytes - 60_000) as budget:
        found = [t.numpy() for t in loss_and_gradients()]
    assert budget.evictions > 0
    for one, other in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(one, other)


def test_many_threads_use_a_primitive_at_the_same_time() -> None:
    from concurrent.futures import ThreadPoolExecutor

    draw = np.random.default_rng(0)
    w = draw.normal(size=(16, 16, 3, 3)).astype("float32")
    images = [draw.normal(size=(1, 16, 12, 12)).astype("float32") for _ in range(64)]
    of = lambda x: F.conv2d(x, w, padding=1).numpy()
    wanted = [of(x) for x in images]
    with ThreadPoolExecutor(4) as pool:
        for one, other in zip(pool.map(of, images), wanted, strict=True):
            np.testing.assert_array_equal(one, other)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_forked_child_goes_on(tmp_path: Path) -> None:
    """OpenMP's threads do not live in a child: none was started."""
    code = """
import os, numpy as np, tapegrad as tg
from tapegrad.nn import functional as F
tg.set_num_threads(1)
x, w = (np.random.default_rng(0).normal(size=s).astype("float32") for s in ((8, 16, 20, 20), (16, 16, 3, 3)))
wanted = F.conv2d(x, w).numpy()
child = os.fork()
if not child:
    os._exit(0 if np.array_equal(F.conv2d(x, w).numpy(), wanted) else 3)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
"""
    environment = {**os.environ, "OMP_NUM_THREADS": "4"}
    subprocess.run(
        [sys.executable, "-W", "ignore::DeprecationWarning", "-c", code], check=True, timeout=60, env=environment
    )


def test_the_caller_s_openmp_threads_are_as_before() -> None:
    library = onednn.library()
    assert library is not None
    told = library.library
    before = told.omp_get_max_threads()
    told.omp_set_num_threads(3)
    try:
        with library.one_thread():
            assert told.omp_get_max_threads() == 1
        assert told.omp_get_max_threads() == 3
    finally:
        told.omp_set_num_threads(before)


def test_which_library(monkeypatch: pytest.MonkeyPatch) -> None:
    find = onednn.library.__wrapped__
    monkeypatch.setenv("TAPEGRAD_ONEDNN", "0")
    assert find() is None
    monkeypatch.setenv("TAPEGRAD_ONEDNN", "/nowhere/libdnnl.so")
    with pytest.raises(TapegradError, match=r"TAPEGRAD_ONEDNN=/nowhere/libdnnl.so: .*oneDNN 3"):
        find()
    monkeypatch.delenv("TAPEGRAD_ONEDNN")
    absent = SimpleNamespace(name="libdnnl.so.3", locate=lambda: "/nowhere/libdnnl.so.3")
    monkeypatch.setattr(metadata, "files", lambda distribution: [absent])
    with pytest.warns(RuntimeWarning, match="is done without it"):
        assert find() is None
    for files in ([], None):
        monkeypatch.setattr(metadata, "files", lambda distribution, files=files: files)
        assert find() is None


def test_another_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class Library:
        """oneDNN 2 with TBB."""

        class dnnl_version:
            contents = SimpleNamespace(major=2, minor=7, patch=0, cpu_runtime=4)
            restype = None

            def __new__(cls) -> Any:
                return cls

    monkeypatch.setattr(onednn.ctypes, "CDLL", lambda path: Library)
    monkeypatch.setenv("TAPEGRAD_ONEDNN", "libdnnl.so")
    with pytest.raises(TapegradError, match=r"oneDNN 2\.7\.0 with the thread runtime 4; wanted is oneDNN 3"):
        onednn.library.__wrapped__()


def test_without_it_the_values_are_those_of_products(monkeypatch: pytest.MonkeyPatch) -> None:
    x, w = (np.random.default_rng(0).normal(size=s).astype("float32") for s in ((2, 8, 9, 9), (8, 8, 3, 3)))
    found = F.conv2d(x, w).numpy()
    monkeypatch.setattr(onednn, "library", lambda: None)
    np.testing.assert_allclose(F.conv2d(x, w).numpy(), found, rtol=1e-5, atol=1e-5)
