"""A CUDA kernel of one's own made differentiable: tomography with a projector written as a CuPy RawKernel.

    python docs/gallery/raw_kernel/raw_kernel.py [--small] [--picture slice.png]

A scanner turns around an object; each reading is a weighted sum along a line.  Two kernels of CUDA C++ (projection, and
back-projection, its transpose) become two operations by ``tg.primitive``; each is the other's rule, so derivatives of
any order and mode follow.  A slice is found from noisy readings by L-BFGS, with a penalty that tapegrad differentiates.
On a machine without a GPU the same operations run on NumPy.
"""

from __future__ import annotations

import functools
import sys
from pathlib import Path
from typing import Any

import numpy as np

import tapegrad as tg

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import example

SOURCE = r"""
// Where a pixel's middle meets the detector, in cells; "reading d" gets 1 - |where - d| of it if that is positive.
__device__ double where(int x, int y, int n, int cells, double c, double s) {
    return (x - 0.5 * (n - 1)) * c + (y - 0.5 * (n - 1)) * s + 0.5 * (cells - 1);
}

extern "C" __global__ void project(const double* image, const double* turns, double* readings,
                                   int n, int angles, int cells) {
    int i = blockDim.x * blockIdx.x + threadIdx.x;
    if (i >= angles * cells) return;
    double c = cos(turns[i / cells]), s = sin(turns[i / cells]), sum = 0;
    for (int y = 0; y < n; y++)
        for (int x = 0; x < n; x++) {
            double share = 1 - fabs(where(x, y, n, cells, c, s) - i % cells);
            if (share > 0) sum += share * image[y * n + x];
        }
    readings[i] = sum;
}

extern "C" __global__ void project_back(const double* readings, const double* turns, double* image,
                                        int n, int angles, int cells) {
    int i = blockDim.x * blockIdx.x + threadIdx.x;
    if (i >= n * n) return;
    double sum = 0;
    for (int a = 0; a < angles; a++) {
        double at = where(i % n, i / n, n, cells, cos(turns[a]), sin(turns[a]));
        int left = (int)floor(at);
        if (left >= 0 && left < cells) sum += (1 - (at - left)) * readings[a * cells + left];
        if (left + 1 >= 0 && left + 1 < cells) sum += (at - left) * readings[a * cells + left + 1];
    }
    image[i] = sum;
}
"""
THREADS = 128


@functools.cache
def kernel(name: str) -> Any:
    """Compiled once, at the first use: CuPy is imported where an array of CuPy's came."""
    import cupy

    return cupy.RawKernel(SOURCE, name)


def launch(name: str, given: Any, turns: Any, shape: tuple[int, int], n: int, cells: int) -> Any:
    """An array of ``shape`` made of ``given`` by one of the kernels, a thread for each of its entries."""
    import cupy

    found = cupy.empty(shape, dtype="float64")
    sizes = (np.int32(n), np.int32(turns.size), np.int32(cells))
    given, turns = cupy.ascontiguousarray(given), cupy.ascontiguousarray(turns)
    kernel(name)((-(-found.size // THREADS),), (THREADS,), (given, turns, found, *sizes))
    return found


def shares(turn: Any, n: int, cells: int) -> tuple[Any, Any]:
    """In NumPy, for one angle: the reading to the left of each pixel, and what the one to the right of it gets."""
    y, x = np.mgrid[:n, :n] - 0.5 * (n - 1)
    at = x * np.cos(turn) + y * np.sin(turn) + 0.5 * (cells - 1)
    left = np.floor(at).astype(int)
    return left, at - left


@tg.primitive(infer=lambda image, turns, n, cells: ((turns.size, cells), image.dtype))
def project(image: Any, turns: Any, n: int, cells: int) -> Any:
    """Readings (angles, cells) of an image (n, n)."""
    if not isinstance(image, np.ndarray):
        return launch("project", image, turns, (turns.size, cells), n, cells)
    found = np.empty((turns.size, cells))
    for row, turn in zip(found, turns, strict=True):
        left, right = shares(turn, n, cells)
        row[:] = np.bincount(left.ravel(), ((1 - right) * image).ravel(), cells)
        row += np.bincount(left.ravel() + 1, (right * image).ravel(), cells)
    return found


@tg.primitive(infer=lambda readings, turns, n, cells: ((n, n), readings.dtype))
def project_back(readings: Any, turns: Any, n: int, cells: int) -> Any:
    """The transpose: an image (n, n) of readings (angles, cells)."""
    if not isinstance(readings, np.ndarray):
        return launch("project_back", readings, turns, (n, n), n, cells)
    found = np.zeros((n, n))
    for row, turn in zip(readings, turns, strict=True):
        left, right = shares(turn, n, cells)
        found += (1 - right) * row[left] + right * row[left + 1]
    return found


# Each is linear in its first argument, and the other is its transpose; the angles are constants.  No rule names the
# image or the readings, so no tape keeps them.
project.defvjp(lambda ct, turns, n, cells: project_back(ct, turns, n=n, cells=cells), None)
project.defjvp(lambda t, turns, n, cells: project(t, turns, n=n, cells=cells), None)
project_back.defvjp(lambda ct, turns, n, cells: project(ct, turns, n=n, cells=cells), None)
project_back.defjvp(lambda t, turns, n, cells: project_back(t, turns, n=n, cells=cells), None)


def phantom(n: int) -> Any:
    """A head with two ventricles and a tumor, (n, n)."""
    y, x = (np.mgrid[:n, :n] - 0.5 * (n - 1)) / (0.5 * n)
    inside = lambda cx, cy, rx, ry: ((x - cx) / rx) ** 2 + ((y - cy) / ry) ** 2 < 1
    ellipses = [(0, 0, 0.70, 0.85, 1.0), (0, 0, 0.62, 0.77, -0.6), (-0.25, 0, 0.12, 0.3, -0.3),
                (0.25, 0, 0.14, 0.3, -0.3), (0.1, 0.5, 0.12, 0.1, 0.4)]  # fmt: skip
    return sum(value * inside(*where) for *where, value in ellipses)


def penalty(image: Any) -> Any:
    """The length of edges: the sum of smoothed absolute differences of neighbours."""
    down, right = image[1:, :-1] - image[:-1, :-1], image[:-1, 1:] - image[:-1, :-1]
    return tg.sum(tg.sqrt(down**2 + right**2 + 1e-4))


def main() -> None:
    options = example.parser(__doc__).parse_args()
    n, angles, iterations = (16, 12, 25) if options.small else (96, 60, 120)
    cells = int(1.5 * n) + 2
    turns = tg.asarray(np.linspace(0, np.pi, angles, endpoint=False))
    print(f"device: {turns.device}; {n} x {n} pixels, {angles} angles, {cells} readings each")
    draw = np.random.default_rng(0)
    image, readings = (tg.asarray(draw.standard_normal(shape)) for shape in ((n, n), (angles, cells)))
    left = tg.sum(project(image, turns, n=n, cells=cells) * readings).item()
    right = tg.sum(image * project_back(readings, turns, n=n, cells=cells)).item()
    example.check(abs(left - right) < 1e-10 * abs(left), "one kernel is the transpose of the other")
    small = tg.asarray(draw.standard_normal((5, 5)))
    tg.testing.check_grads(lambda x: tg.sin(project(x, turns[:3], n=5, cells=9)), (small,), order=2)
    print("checked: derivatives of first and second order, in both modes, are those of differences")

    truth = phantom(n)
    clean = project(tg.asarray(truth), turns, n=n, cells=cells)
    seen = clean + 0.01 * tg.max(clean) * tg.asarray(draw.standard_normal(clean.shape))

    def loss(image: Any) -> Any:
        return tg.sum((project(image, turns, n=n, cells=cells) - seen) ** 2) / n + 0.02 * penalty(image)

    variable = tg.Variable(tg.zeros((n, n), dtype="float64"))
    with tg.measure() as m:
        before = m.live_bytes
        with tg.GradientTape() as tape:
            value = loss(variable.value())
        tape.gradient(value, variable)
    bar = example.steps("iterations", iterations)
    found = tg.optim.minimize(
        loss, np.zeros((n, n)), method="L-BFGS-B", options={"maxiter": iterations}, callback=lambda _: next(bar, None)
    )
    bar.close()
    image = found.x.numpy()
    error = np.linalg.norm(image - truth) / np.linalg.norm(truth)
    alone = project_back(seen, turns, n=n, cells=cells).numpy()
    alone = alone * (alone * truth).sum() / (alone**2).sum()
    print(f"loss {value.item():.4g} -> {found.fun:.4g} in {found.nit} iterations; error {error:.3g} of the slice; "
          f"by back-projection alone {np.linalg.norm(alone - truth) / np.linalg.norm(truth):.3g}")  # fmt: skip
    example.check_memory("a gradient takes no more than ten slices and two sets of readings",
                         m.peak_bytes - before, 10 * image.nbytes + 2 * clean.size * 8 + 8192)  # fmt: skip
    example.check(error < (0.6 if options.small else 0.25), "the slice is found")
    if options.picture:
        draw_slices(options.picture, truth, alone, image)


def draw_slices(path: str, truth: Any, alone: Any, found: Any) -> None:
    figure, axes = example.panels(3, height=4.0)
    for ax, image, title in zip(
        axes, (truth, alone, found), ("true slice", "back-projection alone", "found with gradients"), strict=True
    ):
        ax.imshow(image, cmap="gray", vmin=0, vmax=1)
        ax.set_title(title)
    example.save(figure, path, axes)


if __name__ == "__main__":
    main()
