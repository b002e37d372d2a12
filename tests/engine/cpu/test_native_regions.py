"""Regions run by NumPy when they are met first, and by machine code from then on: with the same bits."""

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import tapegrad as tg
from tapegrad.engine import region
from tapegrad.engine.cpu import tiles

pytestmark = pytest.mark.usefixtures("machine_code")


@pytest.fixture(autouse=True, params=["one tile", "tiles of 600, two threads"])
def cut(request: pytest.FixtureRequest) -> Iterator[None]:
    small, size, count = region.SMALL, tiles.TILE, tg.get_num_threads()
    region.set_small(1)
    if request.param != "one tile":
        tiles.set_tile_size(600)
    tg.set_num_threads(2 if "two" in request.param else 1)
    yield
    region.set_small(small)
    tiles.set_tile_size(size)
    tg.set_num_threads(count)


CHAINS: dict[str, Callable[[Any, Any, Any], Any]] = {
    "exact": lambda x, y, s: tg.sqrt(tg.abs(x * y - s)) / (y * y + 1) + tg.maximum(x, y) * tg.minimum(x, s),
    "by pointer": lambda x, y, s: tg.tanh(x * s + y) * tg.exp(-x * x) + tg.sin(y) * s,
    "chosen": lambda x, y, s: tg.where(x > y, x * s, tg.where(x < s, y, 0)) + tg.where(tg.isnan(x), 1, x),
    "booleans": lambda x, y, s: ((x > y) & ~(y >= s)) | tg.isnan(x * y),
    "formulas": lambda x, y, s: tg.gelu(x * s + y) * tg.sigmoid(y) - tg.relu(x) * tg.softplus(s * y),
    "not all of it": lambda x, y, s: tg.special.gammaln(x * s) + y * y * s,
}


def operands(dtype: str, n: int) -> tuple[tg.Tensor, tg.Tensor, tg.Tensor]:
    rng = np.random.default_rng(n)
    x, y = (rng.normal(size=n) * 10.0 ** rng.integers(-3, 4, n) for _ in range(2))
    for value in (np.inf, -np.inf, np.nan, 0.0, -0.0, 1e-42, 1e300):
        with np.errstate(all="ignore"):
            x[rng.integers(n)], y[rng.integers(n)] = np.asarray(value, dtype), np.asarray(-value, dtype)
    return tg.asarray(x.astype(dtype)), tg.asarray(y.astype(dtype)), tg.asarray(np.array(0.3, dtype))


def bits(x: np.ndarray) -> bytes:
    return x.tobytes() if x.dtype == bool else np.where(np.isnan(x), np.nan, x).astype(x.dtype).tobytes()


@pytest.mark.parametrize("n", [1, 203, 5000])
@pytest.mark.parametrize("dtype", ["f4", "f8"])
@pytest.mark.parametrize("chain", CHAINS)
def test_later_runs_have_the_bits_of_the_first(chain: str, dtype: str, n: int) -> None:
    f = CHAINS[chain]
    x, y, s = operands(dtype, n)
    with np.errstate(all="ignore"):
        first, *later = (bits(f(x, y, s).numpy()) for _ in range(4))
    assert set(later) == {first}


@pytest.mark.parametrize("dtype", ["f4", "f8"])
def test_gradients_have_the_bits_of_the_first(dtype: str) -> None:
    x, y, s = operands(dtype, 5000)

    def gradients() -> list[bytes]:
        with np.errstate(all="ignore"), tg.GradientTape() as tape:
            tape.watch([x, y, s])
            z = CHAINS["exact"](x, y, s) * CHAINS["by pointer"](x, y, s) + CHAINS["formulas"](x, y, s)
            return [bits(g.numpy()) for g in tape.gradient(z, [x, y, s])]

    first, *later = (gradients() for _ in range(4))
    assert all(other == first for other in later)


@pytest.mark.parametrize("chain", CHAINS)
def test_captured_regions_have_the_bits_of_eager_ones(chain: str) -> None:
    f = tg.function(CHAINS[chain])
    for n in (5000, 5000, 5000, 200_000, 200_000, 200_000, 200_000):
        x, y, s = operands("f4", n)
        with np.errstate(all="ignore"):
            assert bits(f(x, y, s).numpy()) == bits(CHAINS[chain](x, y, s).numpy())
            if f.stats.replays:
                assert f.verify(x, y, s) is None


@pytest.mark.parametrize("mode", ["warn", "raise", "ignore"])
def test_floating_point_errors_are_reported_every_time_alike(mode: str) -> None:
    x = tg.asarray(np.where(np.arange(5000) == 4321, 0.0, np.linspace(1, 2, 5000)))
    one = tg.asarray(np.array(1.0))

    def reported() -> list[str]:
        with np.errstate(all=mode), warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                assert np.isinf((tg.log(x * one) / x - one).numpy()).sum() == 1
            except FloatingPointError as e:
                return [str(e)]
        return [str(w.message) for w in caught]

    first, *later = (reported() for _ in range(4))
    assert all(other == first for other in later)
    assert bool(first) == (mode != "ignore")


@pytest.mark.parametrize("name", ["gelu", "sigmoid", "softplus", "erf"])
def test_formulas_report_no_errors(name: str) -> None:
    """In them underflow, overflow and the like are intended, whether NumPy runs them or machine code."""
    x = tg.asarray(np.linspace(-200, 200, 5000, dtype="f4"))
    with np.errstate(all="raise"):
        results = {bits((getattr(tg, name)(x * 1) + 1).numpy()) for _ in range(4)}
    assert len(results) == 1


def test_captured_formulas_need_no_call_of_python() -> None:
    f = tg.function(lambda x: tg.gelu(x * 2) * tg.sigmoid(x) + tg.relu(x))
    x = tg.asarray(np.linspace(-3, 3, 600, dtype="f4"))
    for _ in range(4):
        f(x)
    assert " and 0 calls" in f.explain(x), f.explain(x)


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of rows of the tiles that machine code has done."""
    rows: list[int] = []
    bound_to = tiles.TileCode.bound_to

    def counted(self: tiles.TileCode, addresses: Any) -> Any:
        inner = bound_to(self, addresses)
        return lambda position, count: (rows.append(count), inner(position, count))[1]

    monkeypatch.setattr(tiles.TileCode, "bound_to", counted)
    return rows


ROWS: dict[str, Callable[..., Any]] = {
    "rows": lambda x, row, column, gaps: tg.gelu(x * row + 1) * tg.tanh(row),
    "columns": lambda x, row, column, gaps: tg.exp(x - column) / (column * column + 1),
    "both": lambda x, row, column, gaps: tg.where(x > row, x * column, tg.sigmoid(row) - column),
    "gaps": lambda x, row, column, gaps: tg.exp(gaps) * x - gaps * row,
    "sums of rows": lambda x, row, column, gaps: tg.sum(tg.tanh(x * row) * column, axis=-1),
    "sums of columns": lambda x, row, column, gaps: tg.sum(tg.gelu(x + row), axis=tuple(range(x.ndim - 1))),
    "sums": lambda x, row, column, gaps: tg.sum(x * column + tg.sin(row)),
    "a sum alone": lambda x, row, column, gaps: tg.sum(x, axis=0),
    "a sum beside": lambda x, row, column, gaps: (y := tg.tanh(x * row), tg.sum(y * x, axis=0)),
}


@pytest.mark.parametrize("shape", [(7, 100), (40, 203), (6, 5, 128), (2, 5000), (5, 1, 300)], ids=str)
@pytest.mark.parametrize("dtype", ["f4", "f8"])
@pytest.mark.parametrize("chain", ROWS)
def test_broadcast_leaves_and_sums_have_the_bits_of_the_first_run(
    chain: str, dtype: str, shape: tuple[int, ...], served: list[int]
) -> None:
    rng = np.random.default_rng(len(shape))
    draw = lambda *shape: rng.normal(size=shape).astype(dtype)
    x, row, column = (tg.asarray(draw(*s)) for s in (shape, shape[-1:], (*shape[:-1], 1)))
    gaps = tg.asarray(draw(*shape[:-1], 2 * shape[-1]))[..., ::2]

    def results() -> list[bytes]:
        return [bits(y.numpy()) for y in tg.tree.flatten(ROWS[chain](x, row, column, gaps))]

    first, *later = (results() for _ in range(4))
    assert all(other == first for other in later)
    assert served or chain == "a sum alone"


def test_captured_regions_with_sums_report_errors_once(served: list[int]) -> None:
    def f(x: Any) -> Any:
        return tg.sum(1 / (tg.sort(x) * 2 - 3))

    g = tg.function(f)
    good = np.linspace(0, 1, 5000)
    bad = np.where(np.arange(5000) == 4321, 1.5, good)

    def warned(f: Callable[..., Any], x: Any) -> list[str]:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            f(x).numpy()
        return sorted(str(w.message) for w in caught)

    for _ in range(4):
        assert not warned(g, tg.asarray(good))
    for _ in range(5):
        assert warned(g, tg.asarray(bad)) == warned(f, tg.asarray(bad)) != []
