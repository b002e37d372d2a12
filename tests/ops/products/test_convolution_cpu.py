"""Convolutions on a CPU in every way they are cut and multiplied: PyTorch in float64, plain loops, special numbers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import tapegrad as tg
from tapegrad.device import onednn
from tapegrad.device.dtypes import accumulator
from tapegrad.device.numerics import blas, conv_cpu, conv_products
from tapegrad.device.numerics.windows import Moves
from tapegrad.nn import functional as F
from tapegrad.tensor import from_array

WAYS = {"stacked": (10**9, 0), "copied": (0, 10**9), "direct": (0, 0)}
"""From how many rows on slices are not stacked, and below how many channels copies are made."""
CUTS = [None, (64, 1, 60, 40), (400, 20, 900, 2000)]
"""Elements of a block, least positions, multiply-adds of a product, elements of slices."""


@pytest.fixture(autouse=True)
def products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without oneDNN, which has tests of its own."""
    monkeypatch.setattr(onednn, "library", lambda: None)


def forced(monkeypatch: pytest.MonkeyPatch, way: str, cut: tuple[int, ...] | None) -> None:
    monkeypatch.setattr(conv_products, "STACK", WAYS[way][0])
    monkeypatch.setattr(conv_products, "COPY", WAYS[way][1])
    if cut is not None:
        monkeypatch.setattr(conv_cpu, "BLOCK", cut[0])
        for name, value in zip(("LEAST", "PRODUCT", "STACKED_ELEMENTS"), cut[1:], strict=True):
            monkeypatch.setattr(conv_products, name, value)
        monkeypatch.setattr(conv_cpu, "PIECE", 50)


def drawn(draw: np.random.Generator) -> tuple[int, dict[str, Any], tuple[int, ...], tuple[int, ...]]:
    """Dimensions, options, and shapes of an image and a kernel that fits it."""
    dims, groups = int(draw.integers(1, 4)), int(draw.choice([1, 1, 2, 3]))
    c, o, n = int(draw.integers(1, 4)), int(draw.integers(1, 4)), int(draw.integers(0, 4))
    each = lambda low, high: tuple(int(v) for v in draw.integers(low, high, dims))
    kernel, stride, dilation, padding = each(1, 5 - dims // 3), each(1, 4), each(1, 3), each(0, 4)
    size = tuple(
        max(1, (k - 1) * d + 1 - 2 * p) + int(draw.integers(0, 7)) for k, d, p in zip(kernel, dilation, padding)
    )
    options = {"stride": stride, "dilation": dilation, "padding": padding, "groups": groups}
    return dims, options, (n, c * groups, *size), (o * groups, c, *kernel)


def laid(draw: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Numbers in an array that is not contiguous, as often as not."""
    values = draw.normal(size=shape)
    turned = np.asfortranarray(values) if draw.random() < 0.3 else values
    return np.repeat(turned, 2, axis=-1)[..., ::2] if draw.random() < 0.3 else turned


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_like_torch_whatever_the_shapes(way, cut, monkeypatch):
    torch = pytest.importorskip("torch")
    forced(monkeypatch, way, cut)
    draw = np.random.default_rng((CUTS.index(cut), list(WAYS).index(way)))
    for _ in range(40):
        dims, options, image, kernel = drawn(draw)
        x, w = laid(draw, image), laid(draw, kernel)
        theirs = [torch.tensor(a, requires_grad=True) for a in (x, w)]
        z = getattr(torch.nn.functional, f"conv{dims}d")(*theirs, **options)
        ours = [from_array(a) for a in (x, w)]
        with tg.GradientTape() as tape:
            tape.watch(ours)
            y = getattr(F, f"conv{dims}d")(*ours, **options)
        np.testing.assert_allclose(y.numpy(), z.detach().numpy(), rtol=1e-10, atol=1e-11, err_msg=str(options))
        ct = draw.normal(size=y.shape)
        z.backward(torch.tensor(ct))
        for g, t in zip(tape.gradient(y, ours, output_gradients=tg.asarray(ct)), theirs, strict=True):
            np.testing.assert_allclose(g.numpy(), t.grad.numpy(), rtol=1e-10, atol=1e-11, err_msg=str((image, options)))


@pytest.mark.parametrize("way", WAYS)
def test_transposed_like_torch(way, monkeypatch):
    torch = pytest.importorskip("torch")
    forced(monkeypatch, way, CUTS[1])
    draw = np.random.default_rng(7)
    for _ in range(40):
        dims, options, image, kernel = drawn(draw)
        options["output_padding"] = tuple(min(1, max(s, d) - 1) for s, d in zip(options["stride"], options["dilation"]))
        x, w = laid(draw, image), laid(draw, (image[1], kernel[0] // options["groups"], *kernel[2:]))
        lengths = zip(image[2:], options["stride"], options["padding"], options["dilation"], kernel[2:])
        if any((n - 1) * s - 2 * p + d * (k - 1) + 1 < 1 for n, s, p, d, k in lengths):
            continue
        z = getattr(torch.nn.functional, f"conv_transpose{dims}d")(torch.tensor(x), torch.tensor(w), **options)
        y = getattr(F, f"conv_transpose{dims}d")(from_array(x), from_array(w), **options)
        np.testing.assert_allclose(y.numpy(), z.numpy(), rtol=1e-10, atol=1e-11, err_msg=str((image, options)))


@pytest.mark.parametrize("way", WAYS)
def test_special_numbers_reach_only_the_taps_that_meet_them(way, monkeypatch):
    """The first element of a line is met by the first tap alone; on the grid others read it where outputs have gaps."""
    forced(monkeypatch, way, None)
    x, g = np.ones((2, 2, 6, 6)), np.ones((2, 3, 4, 4))
    x[0, 1, 0, 0], x[1, 0, 5, 5] = np.inf, np.nan
    moves, found = Moves((1, 1), ((0, 0), (0, 0)), (1, 1), 1), np.empty((3, 2, 3, 3))
    conv_cpu.in_kernel(x, g, found, moves).run()
    wanted = np.full((3, 2, 3, 3), 32.0)
    wanted[:, 1, 0, 0], wanted[:, 0, 2, 2] = np.inf, np.nan
    np.testing.assert_array_equal(found, wanted)


def test_a_kernel_of_one_tap_copies_no_image():
    """Every operand and result is the arrays' own memory: no scratch but the sum's."""
    x, g, w = np.ones((4, 8, 6, 6)), np.ones((4, 5, 6, 6)), np.ones((5, 8, 1, 1))
    moves = Moves((1, 1), ((0, 0), (0, 0)), (1, 1), 1)
    assert conv_cpu.forward(x, w, np.empty_like(g), moves).nbytes == 0
    assert conv_cpu.in_image(g, w, np.empty_like(x), moves).nbytes == 0
    assert conv_cpu.in_kernel(x, g, np.empty_like(w), moves).nbytes <= 2 * w.nbytes
    assert conv_cpu.forward(x[..., ::-1], w, np.empty_like(g), moves).nbytes == x.nbytes


def test_scratch_does_not_grow_with_the_batch():
    moves = Moves((1, 1), ((1, 1), (1, 1)), (1, 1), 1)
    w, taken = np.ones((16, 16, 3, 3), "float32"), []
    for n in (16, 256):
        x = np.ones((n, 16, 32, 32), "float32")
        taken.append([f(*a, np.empty(s, "float32"), moves).nbytes for f, a, s in (
            (conv_cpu.forward, (x, w), x.shape), (conv_cpu.in_image, (x, w), x.shape),
            (conv_cpu.in_kernel, (x, x), w.shape))])  # fmt: skip
    for few, many in zip(*taken, strict=True):
        assert many <= 1.5 * few < 8 * 2**20


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_the_library_s_products_are_known(dtype):
    """Where NumPy brings OpenBLAS; without it convolutions are right but slower, and this is skipped."""
    if blas.controls is None:
        pytest.skip("NumPy has another library")
    assert blas.adds(accumulator(np.dtype(dtype)))
    x, y, out = (np.arange(n, dtype=dtype).reshape(s) for n, s in ((6, (2, 3)), (12, (3, 4)), (8, (2, 4))))
    at = [(a.ctypes.data, a.shape[1]) for a in (x, y, out)]
    wanted = out + x @ y
    blas.add_product(out.dtype, 2, 4, 3, *at, True)
    np.testing.assert_array_equal(out, wanted)
    turned = [np.ascontiguousarray(a.T) for a in (x, y)]
    at[:2] = [(a.ctypes.data, a.shape[1]) for a in turned]
    blas.add_product(out.dtype, 2, 4, 3, *at, x_turned=True, y_turned=True)
    np.testing.assert_array_equal(out, x @ y)


def test_without_the_library_s_products(monkeypatch, rng):
    """Another library than OpenBLAS: the same values, by NumPy's products."""
    x, w = rng.normal(size=(3, 20, 9, 8)), rng.normal(size=(24, 20, 3, 3))
    wanted = F.conv2d(x, w, padding=1).numpy()
    monkeypatch.setattr(blas, "adds", lambda dtype: False)
    np.testing.assert_allclose(F.conv2d(x, w, padding=1).numpy(), wanted, rtol=1e-12, atol=1e-13)
