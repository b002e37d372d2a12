"""Laws of the engine on random graphs: no policy, thread count or tile size changes a bit; nothing is left behind."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from checks import bits_equal, c64, no_garbage, same, values
from hypothesis import given, settings
from hypothesis import strategies as st

import tapegrad as tg
from tapegrad import nest
from tapegrad.device import threads
from tapegrad.engine import region
from tapegrad.engine.cpu import tiles

Block = list[tuple[str, int, int]]
LAZY = 1  # with this threshold even tiny arrays go through regions and tiles
EAGER = 10**9


@pytest.fixture(autouse=True)
def defaults() -> Iterator[None]:
    small, count = region.SMALL, threads.get_num_threads()
    yield
    region.set_small(small), threads.set_num_threads(count), tiles.set_tile_size(tiles.TILE)


OPS: dict[str, Callable[[Any, Any, Any], Any]] = {
    "tanh": lambda a, b, w: tg.tanh(a),
    "sin": lambda a, b, w: tg.sin(a) * 0.9,
    "exp": lambda a, b, w: tg.exp(-(a * a)),
    "sqrt": lambda a, b, w: tg.sqrt(tg.abs(a) + 0.5),
    "sigmoid": lambda a, b, w: tg.sigmoid(a) + a,
    "add": lambda a, b, w: a + b,
    "subtract": lambda a, b, w: a - b * 0.5,
    "multiply": lambda a, b, w: tg.tanh(a) * b,
    "divide": lambda a, b, w: a / (1.0 + b * b),
    "maximum": lambda a, b, w: tg.maximum(a, b),
    "where": lambda a, b, w: tg.where(a > b, a, tg.cos(b)),
    "weight": lambda a, b, w: a * w[0],
    "row": lambda a, b, w: a + w[0] * b,
    "matmul": lambda a, b, w: tg.matmul(a, w[1]),
    "centre": lambda a, b, w: a - tg.mean(a, axis=1, keepdims=True),
    "total": lambda a, b, w: a * 0.1 + tg.tanh(tg.sum(b)),
    "softmax": lambda a, b, w: tg.nn.functional.softmax(a, dim=1) + b,
    "flip": lambda a, b, w: tg.flip(a, axis=1) + b,
    "turn": lambda a, b, w: tg.permute_dims(tg.tanh(tg.permute_dims(a, (1, 0))), (1, 0)),
    "halves": lambda a, b, w: tg.concat([a[:, 1:], b[:, :1]], axis=1),
    "strided": lambda a, b, w: tg.concat([tg.exp(-a[::2]), a[1::2]], axis=0) * b,
    "cumsum": lambda a, b, w: tg.tanh(tg.cumulative_sum(a, axis=1)),
    "copies": lambda a, b, w: tg.sum(tg.stack([a, b, a]), axis=0),
    "noise": lambda a, b, w: a * tg.random.bernoulli(a.shape, 0.7, dtype=str(a.dtype)),
}

blocks = st.lists(
    st.lists(st.tuples(st.sampled_from(sorted(OPS)), st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=6),
    min_size=1,
    max_size=4,
)
shapes = st.sampled_from([(1, 1), (1, 7), (5, 1), (3, 4), (8, 5), (17, 3)])
dtypes = st.sampled_from(["float32", "float64"])


def plain(f: Callable) -> Callable:
    return f


def checkpoint(f: Callable) -> Callable:
    return tg.recompute_grad(f, check="values")


class Graph:
    """Blocks one after another on ``x`` and two weights; each may also read ``x`` and the first block's result."""

    def __init__(self, program: list[Block], shape: tuple[int, int], dtype: str) -> None:
        rng = np.random.default_rng(7)
        self.program = program
        self.x = tg.asarray(rng.normal(size=shape).astype(dtype))
        self.ws = [
            tg.Variable(rng.normal(size=shape[1:]).astype(dtype)),
            tg.Variable((rng.normal(size=(shape[1],) * 2) * 0.5).astype(dtype)),
        ]

    def block(self, block: Block, wrap: Callable, captured: list, nested: Callable = plain) -> Callable:
        def steps(local: list, ops: Block) -> list:
            for name, i, j in ops:
                local = [*local, OPS[name](local[i % len(local)], local[j % len(local)], self.ws)]
            return local

        def f(h: Any) -> Any:
            half = len(block) // 2
            middle = nested(lambda q: steps([q, *captured], block[:half])[-1])(h) if half else h
            return steps([middle, h, *captured], block[half:])[-1]

        return wrap(f)

    def run(self, wrap: Callable = plain, nested: Callable = plain, every: int = 1) -> Any:
        """Loss and gradients; every ``every``-th block is wrapped."""
        tg.random.seed(11)
        with np.errstate(all="ignore"), tg.GradientTape() as tape:
            tape.watch(self.x)
            h, captured = self.x, [self.x]
            for k, block in enumerate(self.program):
                h = self.block(block, wrap if k % every == 0 else plain, list(captured), nested)(h)
                captured = captured if k else [*captured, h]
            loss = tg.sum(h * h) + tg.mean(h)
            del h, captured
            found = tape.gradient(loss, [self.x, *self.ws], unconnected_gradients="zero")
        return values([loss, found])


@settings(max_examples=60)
@given(blocks, shapes, dtypes, st.sampled_from([LAZY, EAGER]), st.integers(1, 2))
def test_checkpoints_change_no_bit(program: list[Block], shape: Any, dtype: str, small: int, every: int) -> None:
    region.set_small(small)
    graph = Graph(program, shape, dtype)
    wanted = graph.run()
    assert bits_equal(graph.run(checkpoint, every=every), wanted)
    assert bits_equal(graph.run(checkpoint, checkpoint, every), wanted)


@settings(max_examples=40)
@given(blocks, shapes, dtypes, st.sampled_from([1, 2, 3, 5]), st.sampled_from([1, 2, 7, 65536]), st.booleans())
def test_threads_and_tiles_change_no_bit(
    program: list[Block], shape: Any, dtype: str, count: int, tile: int, wrapped: bool
) -> None:
    region.set_small(LAZY)
    graph = Graph(program, shape, dtype)
    threads.set_num_threads(1), tiles.set_tile_size(tiles.TILE)
    wanted = graph.run()
    threads.set_num_threads(count), tiles.set_tile_size(tile)
    assert bits_equal(graph.run(checkpoint if wrapped else plain), wanted)


@pytest.mark.parametrize("shape", [(300, 67), (16384, 3)])
def test_large_arrays_too(shape: tuple[int, int]) -> None:
    program = [
        [("weight", 0, 0), ("tanh", 3, 0), ("matmul", 4, 0), ("multiply", 5, 1)],
        [("turn", 0, 0), ("centre", 2, 0), ("strided", 3, 1), ("noise", 4, 0), ("softmax", 5, 1)],
        [("halves", 0, 1), ("sqrt", 4, 0), ("total", 5, 4), ("weight", 6, 0), ("copies", 6, 5)],
    ]
    graph = Graph(program, shape, "float32")
    wanted = graph.run()
    for count, tile in ((1, 65536), (2, 4096), (3, 1000)):
        threads.set_num_threads(count), tiles.set_tile_size(tile)
        assert bits_equal(graph.run(), wanted)
        assert bits_equal(graph.run(checkpoint), wanted)
        assert bits_equal(graph.run(checkpoint, checkpoint, 2), wanted)


@settings(max_examples=40)
@given(blocks, shapes, st.sampled_from([LAZY, EAGER]), st.booleans())
def test_nothing_is_left_behind(program: list[Block], shape: Any, small: int, wrapped: bool) -> None:
    region.set_small(small)
    graph = Graph(program, shape, "float64")
    wrap = checkpoint if wrapped else plain
    graph.run(wrap)  # makes the constants
    with no_garbage(), tg.measure() as m:
        base = m.live_bytes
        graph.run(wrap)
        assert m.live_bytes == base


@settings(max_examples=30)
@given(blocks, st.sampled_from([(3, 4), (2, 1)]))
def test_lazy_and_eager_agree_with_differences(program: list[Block], shape: Any) -> None:
    graph = Graph(
        [[step for step in b if step[0] not in ("maximum", "where", "noise")] for b in program], shape, "float64"
    )
    found = []
    for small in (LAZY, EAGER):
        region.set_small(small)
        found.append(graph.run(checkpoint))
    same(found[0], found[1], rtol=1e-9, atol=1e-9)
    x0, (_, (gx, *_)) = graph.x.numpy(), found[0]
    direction = np.random.default_rng(3).normal(size=shape)
    ends = []
    for sign in (1, -1):
        graph.x = c64(x0 + sign * 1e-6 * direction)
        ends.append(graph.run()[0])
    slope = (ends[0] - ends[1]) / 2e-6
    assert abs(slope - (gx * direction).sum()) <= 1e-4 * max(1.0, abs(slope), np.abs(gx).max())


@settings(max_examples=25)
@given(blocks, st.sampled_from([(3, 4), (2, 1)]))
def test_forward_and_second_order_through_checkpoints(program: list[Block], shape: Any) -> None:
    graph = Graph(program, shape, "float64")
    t = c64(np.random.default_rng(5).normal(size=shape))

    def loss(wrap: Callable) -> Callable:
        def f(x: Any) -> Any:
            tg.random.seed(11)
            h = x
            for block in graph.program:
                h = graph.block(block, wrap, [x])(h)
            return tg.sum(tg.tanh(h))

        return f

    with np.errstate(all="ignore"):
        for of in (
            lambda f: tg.jvp(f, (graph.x,), (t,)),
            lambda f: tg.hvp(f, graph.x, t),
            lambda f: tg.grad(f)(graph.x),
        ):
            wanted = values(of(loss(plain)))
            if all(np.isfinite(leaf).all() for leaf in nest.flatten(wanted)):
                same(of(loss(checkpoint)), wanted, rtol=1e-8, atol=1e-8)


def test_variables_changed_at_any_time_change_no_gradient() -> None:
    graph = Graph([[("weight", 0, 0), ("tanh", 2, 0)], [("matmul", 0, 0), ("row", 0, 2)]], (3, 4), "float64")
    wanted = graph.run()
    step = graph.block(graph.program[0], checkpoint, [graph.x])
    with tg.GradientTape() as tape:
        tape.watch(graph.x)
        first = step(graph.x)
        h = graph.block(graph.program[1], checkpoint, [graph.x, first])(first)
        loss = tg.sum(h * h) + tg.mean(h)
    for w in graph.ws:
        w.assign(w * 0.0)
    assert bits_equal([loss, tape.gradient(loss, [graph.x, *graph.ws])], wanted)
