"""Interpolation, sampling and rearranging of images: what must stay, what must come back, and messages."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

import tapegrad as tg
from tapegrad.errors import ShapeError, TapegradError
from tapegrad.nn import functional as F

rng = np.random.default_rng(23)
IMAGE = rng.normal(size=(2, 3, 5, 6))


@pytest.mark.parametrize("mode", ["nearest", "nearest-exact", "bilinear", "bicubic", "area"])
def test_the_same_size_changes_nothing(mode: str) -> None:
    np.testing.assert_allclose(F.interpolate(IMAGE, size=(5, 6), mode=mode).numpy(), IMAGE, rtol=1e-14)


def test_interpolation_along_an_axis() -> None:
    x = rng.normal(size=(1, 1, 6))
    inner = np.interp((np.arange(13) + 0.5) * 6 / 13 - 0.5, np.arange(6), x[0, 0])
    np.testing.assert_allclose(F.interpolate(x, size=13, mode="linear").numpy()[0, 0], inner, rtol=1e-12)
    ends = np.interp(np.linspace(0, 5, 13), np.arange(6), x[0, 0])
    np.testing.assert_allclose(
        F.interpolate(x, size=13, mode="linear", align_corners=True).numpy()[0, 0], ends, rtol=1e-12
    )
    assert np.array_equal(F.interpolate(x, scale_factor=2).numpy(), np.repeat(x, 2, axis=2))
    np.testing.assert_allclose(F.interpolate(x, size=3, mode="area").numpy(), x.reshape(1, 1, 3, 2).mean(3), rtol=1e-12)
    at = [min(int(i / 0.7), 5) for i in range(4)]
    assert np.array_equal(F.interpolate(x, scale_factor=0.7).numpy(), x[..., at])


def keys(d: float) -> float:
    """Keys' kernel with -0.75."""
    d, a = abs(d), -0.75
    if d <= 1:
        return (a + 2) * d**3 - (a + 3) * d**2 + 1
    return a * d**3 - 5 * a * d**2 + 8 * a * d - 4 * a if d < 2 else 0.0


@pytest.mark.parametrize("align", [False, True])
def test_cubic_interpolation(align: bool) -> None:
    x, m = IMAGE[:, :, :1], 11
    at = np.linspace(0, 5, m) if align else (np.arange(m) + 0.5) * 6 / m - 0.5
    y = F.interpolate(x, size=(1, m), mode="bicubic", align_corners=align).numpy()
    for i, place in enumerate(at):
        near = range(int(np.floor(place)) - 1, int(np.floor(place)) + 3)
        want = sum(keys(place - k) * x[..., min(max(k, 0), 5)] for k in near)
        np.testing.assert_allclose(y[..., i], want, rtol=1e-10, atol=1e-12)


def read(image: np.ndarray, place: tuple[float, ...]) -> np.ndarray:
    """Linear interpolation at a place in pixels, with zeros outside."""
    total = np.zeros(image.shape[0])
    low = np.floor(place).astype(int)
    for corner in itertools.product((0, 1), repeat=len(place)):
        at = low + corner
        weight = np.prod([1 - abs(p - i) for p, i in zip(place, at)])
        if all(0 <= i < n for i, n in zip(at, image.shape[1:])):
            total += weight * image[(slice(None), *at)]
    return total


@pytest.mark.parametrize("align", [False, True])
@pytest.mark.parametrize("size", [(5, 6), (3, 4, 5)])
def test_samples(size: tuple[int, ...], align: bool) -> None:
    x, grid = rng.normal(size=(2, 3, *size)), rng.uniform(-1.4, 1.4, size=(2, *(2, 3, 2)[: len(size)], len(size)))
    y = F.grid_sample(x, grid, align_corners=align).numpy()
    for at in np.ndindex(grid.shape[:-1]):
        place = [
            (g + 1) / 2 * (n - 1) if align else ((g + 1) * n - 1) / 2 for g, n in zip(grid[at][::-1], size, strict=True)
        ]
        np.testing.assert_allclose(
            y[(at[0], slice(None), *at[1:])], read(x[at[0]], tuple(place)), rtol=1e-10, atol=1e-12
        )


@pytest.mark.parametrize("align", [False, True])
@pytest.mark.parametrize("mode", ["bilinear", "nearest", "bicubic"])
@pytest.mark.parametrize("padding", ["zeros", "border", "reflection"])
def test_the_identity_reads_the_image_itself(mode: str, padding: str, align: bool) -> None:
    theta = np.broadcast_to(np.eye(2, 3), (2, 2, 3))
    grid = F.affine_grid(theta, IMAGE.shape, align_corners=align)
    y = F.grid_sample(IMAGE, grid, mode, padding, align)
    np.testing.assert_allclose(y.numpy(), IMAGE, rtol=1e-10, atol=1e-12)
    turned = F.grid_sample(IMAGE, F.affine_grid(theta * [[-1], [1]], IMAGE.shape, align), mode, padding, align)
    np.testing.assert_allclose(turned.numpy(), IMAGE[..., ::-1], rtol=1e-10, atol=1e-12)


def test_outside_there_are_zeros_the_border_or_a_mirror() -> None:
    x = np.array([[[[1.0, 2.0, 3.0]]]])
    grid = np.zeros((1, 1, 4, 2))
    grid[..., 0] = [-3.0, -2.0, 2.0, 9.0]  # pixels -2, -1, 3 and 10 by corners
    for padding, want in (("zeros", [0, 0, 0, 0]), ("border", [1, 1, 3, 3]), ("reflection", [3, 2, 2, 3])):
        y = F.grid_sample(x, grid, padding_mode=padding, align_corners=True)
        np.testing.assert_allclose(y.numpy()[0, 0, 0], want, atol=1e-12)


def test_nearest_places_have_no_slope() -> None:
    g = tg.asarray(rng.uniform(-0.9, 0.9, size=(2, 2, 2, 2)))
    gradient = tg.grad(lambda g: tg.sum(F.grid_sample(IMAGE, g, "nearest")))(g)
    assert gradient is None or not gradient.numpy().any()


def test_pixels_and_channels() -> None:
    x = np.arange(2 * 8 * 2 * 3.0).reshape(2, 8, 2, 3)
    y = F.pixel_shuffle(x, 2).numpy()
    assert y.shape == (2, 2, 4, 6)
    assert y[0, 0, 0, 0] == x[0, 0, 0, 0] and y[0, 0, 0, 1] == x[0, 1, 0, 0] and y[0, 0, 1, 0] == x[0, 2, 0, 0]
    np.testing.assert_array_equal(F.pixel_unshuffle(y, 2).numpy(), x)
    z = F.channel_shuffle(x, 2).numpy()
    np.testing.assert_array_equal(z, x[:, [0, 4, 1, 5, 2, 6, 3, 7]])
    np.testing.assert_array_equal(F.channel_shuffle(z, 4).numpy(), x)
    assert F.pixel_shuffle(np.ones((1, 1, 4, 0, 3)), 2).shape == (1, 1, 1, 0, 6)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: F.interpolate(IMAGE, mode="linear", size=3), ShapeError, "mode 'linear' does not fit"),
        (lambda: F.interpolate(IMAGE, mode="cubic", size=3), TapegradError, "unknown mode 'cubic'"),
        (lambda: F.interpolate(IMAGE), ShapeError, "either size or scale_factor"),
        (lambda: F.interpolate(IMAGE, size=(3, 3, 3)), ShapeError, "wanted an integer or 2 of them"),
        (lambda: F.interpolate(IMAGE, scale_factor=0.1), ShapeError, "sizes must be positive"),
        (lambda: F.interpolate(IMAGE, size=3, align_corners=True), TapegradError, "align_corners"),
        (lambda: F.grid_sample(IMAGE, np.ones((2, 3, 3, 3))), ShapeError, "grid_sample: wanted"),
        (lambda: F.grid_sample(IMAGE, np.ones((2, 3, 3, 2)), "linear"), TapegradError, "unknown mode"),
        (lambda: F.grid_sample(IMAGE, np.ones((2, 3, 3, 2)), padding_mode="edge"), TapegradError, "padding_mode"),
        (lambda: F.affine_grid(np.ones((1, 2, 3)), IMAGE.shape), ShapeError, "affine_grid: wanted theta"),
        (lambda: F.pixel_shuffle(IMAGE, 2), ShapeError, "pixel_shuffle: wanted"),
        (lambda: F.pixel_unshuffle(IMAGE, 2), ShapeError, "pixel_unshuffle: wanted"),
        (lambda: F.channel_shuffle(IMAGE, 2), ShapeError, "divisible by 2"),
    ],
)
def test_what_does_not_fit_is_named(call: Any, error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        call()
