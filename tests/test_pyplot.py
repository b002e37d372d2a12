"""Every function of pyplot that takes arrays draws the same picture of tensors and variables as of NumPy's arrays."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from itertools import cycle
from typing import Any

import matplotlib
import numpy as np
import pytest

import tapegrad as tg

matplotlib.use("Agg")
from matplotlib import pyplot as plt

X = np.linspace(1.0, 3.0, 9)
Y = np.sin(X) + 2.0
Z = np.abs(np.random.default_rng(0).normal(size=(9, 9))) + 0.1
GX, GY = np.meshgrid(X, X)
FLAT = (GX.ravel(), GY.ravel(), Z.ravel())

CASES: dict[str, Callable[[Any], Any]] = {
    "acorr": lambda w: plt.acorr(w(Y), maxlags=4),
    "angle_spectrum": lambda w: plt.angle_spectrum(w(Y)),
    "annotate": lambda w: plt.annotate("a", w(X[:2] / 4), w(Y[:2] / 4), arrowprops={}),
    "arrow": lambda w: plt.arrow(*w(X[:4])),
    "axhline": lambda w: plt.axhline(w(Y)[0]),
    "axhspan": lambda w: plt.axhspan(w(X)[0], w(X)[3]),
    "axis": lambda w: plt.axis(w(X[:4])),
    "axline": lambda w: plt.axline(w(Y[:2]), w(X[:2])),
    "axvline": lambda w: plt.axvline(w(Y)[0]),
    "axvspan": lambda w: plt.axvspan(w(X)[0], w(X)[3]),
    "bar": lambda w: plt.bar(w(X), w(Y)),
    "bar, all arguments": lambda w: plt.bar(w(X), w(Y), width=w(Y / 9), bottom=w(Y), yerr=w(Y), hatch=["/"] * 9),
    "bar of integers": lambda w: plt.bar(w(np.arange(3)), w(np.arange(3))),
    "bar of numbers": lambda w: plt.bar(w(X)[0], w(Y)[0]),
    "bar_label": lambda w: plt.bar_label(plt.bar(w(X), w(Y)), w(Y)),
    "barbs": lambda w: plt.barbs(w(GX), w(GY), w(Z), w(Z)),
    "barh": lambda w: plt.barh(w(X), w(Y), xerr=w(Y / 9)),
    "boxplot": lambda w: plt.boxplot(w(Z)),
    "boxplot of a list": lambda w: plt.boxplot([w(Y), w(X)]),
    "broken_barh": lambda w: plt.broken_barh(w(Z[:, :2]), w(Y[:2])),
    "clabel": lambda w: plt.clabel(plt.contour(w(Z)), fontsize=2),
    "clim": lambda w: (plt.imshow(w(Z)), plt.clim(w(X)[0], w(X)[3])),
    "cohere": lambda w: plt.cohere(w(FLAT[2]), w(FLAT[2][::-1]), NFFT=32),
    "colorbar": lambda w: plt.colorbar(plt.imshow(w(Z)), ticks=w(X)),
    "contour": lambda w: plt.contour(w(GX), w(GY), w(Z)),
    "contourf": lambda w: plt.contourf(w(Z), levels=w(np.linspace(0, 3, 5))),
    "csd": lambda w: plt.csd(w(FLAT[2]), w(FLAT[2][::-1]), NFFT=32),
    "ecdf": lambda w: plt.ecdf(w(Y), w(X)),
    "errorbar": lambda w: plt.errorbar(w(X), w(Y), w(Y), w(np.stack([X, Y]))),
    "eventplot": lambda w: plt.eventplot(w(Z)),
    "figimage": lambda w: plt.figimage(w(Z)),
    "fill": lambda w: plt.fill(w(X), w(Y)),
    "fill_between": lambda w: plt.fill_between(w(X), w(Y), w(2 * Y), where=w(Y > 2)),
    "fill_betweenx": lambda w: plt.fill_betweenx(w(X), w(Y), w(2 * Y)),
    "hexbin": lambda w: plt.hexbin(w(X), w(Y), C=w(Y), gridsize=4),
    "hist": lambda w: plt.hist(w(Y), bins=w(X), weights=w(Y)),
    "hist of a list": lambda w: plt.hist([w(Y), w(X)]),
    "hist of a matrix": lambda w: plt.hist(w(Z[:, :3])),
    "hist2d": lambda w: plt.hist2d(w(X), w(Y), bins=3),
    "hlines": lambda w: plt.hlines(w(X), w(Y), w(2 * Y)),
    "imshow": lambda w: plt.imshow(w(Z), extent=w(X[:4])),
    "imshow of colours": lambda w: plt.imshow(w(np.clip(np.stack([Z, Z / 2, Z / 3], 2), 0, 1))),
    "imshow of truths": lambda w: plt.imshow(w(Z > 1)),
    "legend": lambda w: (plt.plot(w(X), w(Z[:, :2]), label=["a", "b"]), plt.legend(fontsize=3)),
    "loglog": lambda w: plt.loglog(w(X), w(Y)),
    "magnitude_spectrum": lambda w: plt.magnitude_spectrum(w(Y)),
    "matshow": lambda w: plt.matshow(w(Z), fignum=0),
    "pcolor": lambda w: plt.pcolor(w(GX), w(GY), w(Z)),
    "pcolormesh": lambda w: plt.pcolormesh(w(GX), w(GY), w(Z)),
    "phase_spectrum": lambda w: plt.phase_spectrum(w(Y)),
    "pie": lambda w: plt.pie(w(Y), explode=w(Y / 9)),
    "plot": lambda w: plt.plot(w(X), w(Y)),
    "plot without x": lambda w: plt.plot(w(Y)),
    "plot of columns": lambda w: plt.plot(w(X), w(Z)),
    "plot of lists": lambda w: plt.plot([w(X)[i] for i in range(3)], [w(Y)[i] for i in range(3)]),
    "plot by name": lambda w: plt.plot("a", "height", data={"a": w(X), "height": w(Y)}),
    "plot, then other data": lambda w: plt.plot(X, Y)[0].set_data(w(Y), w(X)),
    "polar": lambda w: plt.polar(w(X), w(Y)),
    "psd": lambda w: plt.psd(w(FLAT[2]), NFFT=32),
    "quiver": lambda w: plt.quiver(w(GX), w(GY), w(Z), w(Z), w(Z)),
    "quiverkey": lambda w: plt.quiverkey(plt.quiver(w(Z), w(Z)), w(X)[0] / 9, 0.5, 1.0, "a"),
    "rgrids": lambda w: (plt.polar(X, Y), plt.rgrids(w(X))),
    "scatter": lambda w: plt.scatter(w(X), w(Y), s=w(Y), c=w(Y), linewidths=w(Y)),
    "scatter of a point": lambda w: plt.scatter(w(X)[0], w(Y)[0]),
    "semilogx": lambda w: plt.semilogx(w(X), w(Y)),
    "semilogy": lambda w: plt.semilogy(w(X), w(Y)),
    "specgram": lambda w: plt.specgram(w(FLAT[2]), NFFT=32, noverlap=16),
    "spy": lambda w: plt.spy(w(Z > 1)),
    "stackplot": lambda w: plt.stackplot(w(X), w(Y), w(X)),
    "stackplot of rows": lambda w: plt.stackplot(w(X), w(Z)),
    "stairs": lambda w: plt.stairs(w(Y[:-1]), w(X)),
    "stem": lambda w: plt.stem(w(X), w(Y)),
    "step": lambda w: plt.step(w(X), w(Y)),
    "streamplot": lambda w: plt.streamplot(w(GX), w(GY), w(Z), w(Z), density=0.3),
    "table": lambda w: plt.table(cellText=w(np.arange(6).reshape(2, 3))),
    "text": lambda w: plt.text(w(X)[0] / 9, w(Y)[0] / 9, "a"),
    "thetagrids": lambda w: (plt.polar(X, Y), plt.thetagrids(w(30 * X))),
    "tricontour": lambda w: plt.tricontour(*map(w, FLAT)),
    "tricontourf": lambda w: plt.tricontourf(*map(w, FLAT)),
    "tripcolor": lambda w: plt.tripcolor(*map(w, FLAT)),
    "triplot": lambda w: plt.triplot(w(FLAT[0]), w(FLAT[1])),
    "violinplot": lambda w: plt.violinplot(w(Z)),
    "vlines": lambda w: plt.vlines(w(X), w(Y), w(2 * Y)),
    "xcorr": lambda w: plt.xcorr(w(X), w(Y), maxlags=4),
    "xlim": lambda w: plt.xlim(w(X)[0], w(X)[3]),
    "xticks": lambda w: plt.xticks(w(X)),
    "ylim": lambda w: plt.ylim(w(Y[:2])),
    "yticks": lambda w: plt.yticks(w(X)),
}
if hasattr(plt, "grouped_bar"):
    CASES["grouped_bar"] = lambda w: plt.grouped_bar(w(Z[:, :2]))
ABOUT_AXES = {"axis", "rgrids", "thetagrids", "xlim", "xticks", "ylim", "yticks"}


@pytest.fixture(autouse=True)
def small_figures() -> Iterator[None]:
    with plt.rc_context({"figure.figsize": (1.2, 1.0), "figure.dpi": 50, "font.size": 3}):
        yield
    plt.close("all")


def picture(draw: Callable[[Any], Any], convert: Callable[[Any], Any], axes: bool = False) -> np.ndarray:
    plt.close("all")
    plt.figure()
    draw(convert)
    canvas: Any = plt.gcf().canvas
    for part in () if axes else plt.gcf().axes:  # ticks take most of the time
        part.set_axis_off()
    canvas.draw()
    return np.array(canvas.buffer_rgba())


@pytest.mark.sampled(1 / 4)
@pytest.mark.parametrize("name", CASES)
def test_the_picture_is_that_of_arrays(name: str) -> None:
    axes = name in ABOUT_AXES
    wanted = picture(CASES[name], lambda x: x, axes)
    assert (wanted != wanted[0, 0]).any()  # something is drawn
    for kinds in ((tg.asarray, tg.Variable), (tg.Variable, tg.asarray)):
        kind = cycle(kinds)
        np.testing.assert_array_equal(picture(CASES[name], lambda x, kind=kind: next(kind)(x), axes), wanted)


def test_a_pending_tensor_is_drawn() -> None:
    x = np.linspace(0.0, 1.0, 40000)
    wanted = picture(lambda w: plt.plot(w(x)), lambda x: x * 2)
    np.testing.assert_array_equal(picture(lambda w: plt.plot(w(x)), lambda x: tg.asarray(x) * 2), wanted)


def test_another_array_is_another_picture() -> None:
    assert (picture(CASES["plot"], lambda x: x) != picture(CASES["plot"], lambda x: tg.asarray(x) ** 2)).any()


def test_images_are_saved(tmp_path: Any) -> None:
    for file, image in (("a.png", Z), ("b.png", tg.asarray(Z))):
        plt.imsave(tmp_path / file, image)
    assert (tmp_path / "a.png").read_bytes() == (tmp_path / "b.png").read_bytes()


def test_no_command_that_takes_arrays_is_left_out() -> None:
    """Of pyplot's functions, those that are documented to take arrays (some of ratios, or what ``pie`` returns)."""
    tried = {re.split("[ ,]", name)[0] for name in CASES} | {"imsave", "pie_label", "subplots", "subplot_mosaic"}
    functions = {n: f for n, f in vars(plt).items() if inspect.isfunction(f) and f.__module__ == plt.__name__}
    takes = {n for n, f in functions.items() if n[0] != "_" and "array-like" in (inspect.getdoc(f) or "")}
    assert len(takes) > 40 and takes - tried == set()
