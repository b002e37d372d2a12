"""Assignments to parts of a variable: ``scatter_*``, ``scatter_nd_*``, ``v[index].assign``; reading parts."""

from __future__ import annotations

import weakref
from typing import Any

import numpy as np
import pytest
from captured import alike
from checks import bits_equal, c64, same, values, var64

import tapegrad as tg
from tapegrad.errors import DTypeError, ImmutableError, IndexingError, ShapeError

CHANGES = {
    "add": np.add, "sub": np.subtract, "max": np.maximum, "min": np.minimum, "mul": np.multiply, "div": np.divide,
}  # fmt: skip
INDICES = [1, [0, 2, 0], [[0, -1], [2, 1]], slice(None, None, 2), (..., 1), [], np.array([True, False, True])]


@pytest.mark.parametrize("index", INDICES, ids=repr)
@pytest.mark.parametrize("change", [*CHANGES, "update"])
def test_scatter(change: str, index: Any, rng: np.random.Generator) -> None:
    start = rng.uniform(0.5, 2.0, (3, 2))
    for updates in (rng.uniform(0.5, 2.0, start[index].shape), 1.5):
        v, wanted = tg.Variable(start), start.copy()
        if change == "update":
            wanted[index] = updates
        elif start[index].size:
            CHANGES[change].at(wanted, index, updates)
        with tg.GradientTape() as tape:
            assert getattr(v, f"scatter_{change}")(index, updates, use_locking=True, name="s") is v
        same(v, wanted)
        assert tape.watched_variables() == ()
    assert getattr(v, f"scatter_{change}")(index, updates, read_value=False) is None


@pytest.mark.parametrize("change", ["add", "sub", "max", "min", "update"])
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_scatter_nd(change: str, depth: int, rng: np.random.Generator) -> None:
    start = rng.normal(size=(3, 4, 2))
    vectors = np.stack([rng.integers(-n, n, (5,)) for n in start.shape[:depth]], axis=-1)
    updates = rng.normal(size=(5, *start.shape[depth:]))
    v, wanted = tg.Variable(start), start.copy()
    for vector, update in zip(vectors, updates, strict=True):
        at = tuple(vector)
        wanted[at] = update if change == "update" else CHANGES[change](wanted[at], update)
    assert getattr(v, f"scatter_nd_{change}")(vectors, updates) is v
    same(v, wanted)
    same(v.gather_nd(vectors), wanted[tuple(vectors.T)])


def test_batch_scatter_update(rng: np.random.Generator) -> None:
    start, updates = rng.normal(size=(2, 3, 4)), rng.normal(size=(2, 2, 4))
    indices = np.array([[0, 2], [1, 1]])
    v, wanted = tg.Variable(start), start.copy()
    for b in range(2):
        for j in range(2):
            wanted[b, indices[b, j]] = updates[b, j]
    same(v.batch_scatter_update(indices, updates), wanted)
    wanted[1] = 7.0
    same(v.batch_scatter_update([1], [np.full((3, 4), 7.0)]), wanted)


def test_parts_are_assigned() -> None:
    v = var64(np.zeros((3, 2)))
    same(v[1].assign([1.0, 2.0]), [[0, 0], [1, 2], [0, 0]])
    same(v[::2, 0].assign_add(5.0), [[5, 0], [1, 2], [5, 0]])
    same(v[..., None, -1].assign_sub([[1.0]]), [[5, -1], [1, 1], [5, -1]])
    same(v[()].assign(np.ones((3, 2)), use_locking=False, name="a"), np.ones((3, 2)))
    assert v[0, 0].assign(7.0, read_value=False) is None and v[0][0].item() == 7.0
    for t in (c64([1.0]), v[[0, 1]], v[np.array([True, False, True])], v + 1.0, v[0][0], v.read()):
        assert not any(hasattr(t, name) for name in ("assign", "assign_add", "assign_sub"))
    part = v[0]
    x = c64(3.0)
    with tg.GradientTape() as tape:
        tape.watch(x)
        y = v[0, 0] * v[0, 0]
        v[0].assign(tg.stack([x, x]))  # cuts
        z = v[0, 0] * 10.0
    same(tape.gradient([y, z], [v, x]), [np.array([[24.0, 0], [0, 0], [0, 0]]), None])
    del v, tape
    with pytest.raises(ImmutableError, match="not there any more"):
        part.assign([1.0, 2.0])


def test_a_part_keeps_neither_variable_nor_index_alive() -> None:
    v, index = var64(np.ones((100, 100))), np.zeros(1000, int)
    part, gone = v[0], weakref.ref(v)
    rows = v[tg.asarray(index)]
    del v
    assert gone() is None and rows.shape == (1000, 100) and part.shape == (100,)


@pytest.mark.parametrize(
    ("call", "error", "says"),
    [
        (lambda v: v.scatter_add([3], 1.0), IndexingError, "scatter_add: index 3 is out of range for an axis of le"),
        (
            lambda v: v.scatter_max(5, 1.0),
            IndexingError,
            r"scatter_max: index 5 is out of range for axis 0 of \(3, 2\)",
        ),
        (lambda v: v.scatter_div([0, -4], 1.0), IndexingError, "scatter_div: index -4 is out of range"),
        (
            lambda v: v.scatter_mul([0.5], 1.0),
            IndexingError,
            "scatter_mul: an array of float64 is no index; use integers",
        ),
        (lambda v: v.scatter_update(0, [1.0, 2.0, 3.0]), ShapeError, r"scatter_update: .*\(3,\)"),
        (lambda v: v.scatter_sub(0, tg.ones(2)), DTypeError, "scatter_sub: variable 'v' is float64, not float32; use"),
        (lambda v: v.scatter_nd_add([[0, 2]], 1.0), IndexingError, "scatter_nd_add: index 2 is out of range"),
        (lambda v: v.scatter_nd_sub([[0, 0, 0]], 1.0), ShapeError, r"scatter_nd_sub: .* 3 axes, but \(3, 2\) has 2"),
        (lambda v: v.scatter_nd_update([[]], 1.0), IndexingError, "scatter_nd_update: index vectors of length 0"),
        (lambda v: v.scatter_nd_max([[1.0]], 1.0), IndexingError, "scatter_nd_max: indices must be integers, got fl"),
        (lambda v: v.batch_scatter_update([[0], [1]], 1.0), ShapeError, r"batch_scatter_update: indices \(2, 1, 1\)"),
        (lambda v: v[0].assign([1.0, 2.0, 3.0]), ShapeError, r"v\[...\].assign: "),
        (lambda v: v[0].assign_add(1j), DTypeError, r"v\[...\].assign_add: variable 'v' is float64"),
        (lambda v: v.sparse_read([4]), IndexingError, "take: index 4 is out of range"),
        (lambda v: v.gather_nd([[0, 9]]), IndexingError, "gather_nd: index 9 is out of range for an axis of length 2"),
    ],
)
def test_misuse(call: Any, error: type, says: str) -> None:
    v = var64([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]], name="v")
    with pytest.raises(error, match=says):
        call(v)
    same(v, [[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])


def test_rows_and_slices_read_have_gradients() -> None:
    v = var64([[1.0, 2.0], [3.0, 4.0]])
    with tg.GradientTape() as tape:
        y = tg.sum(v.sparse_read([0, 0, 1], name="r") * 2.0) + tg.sum(v.gather_nd([[1, 1], [1, -1]]) ** 2)
    same(tape.gradient(y, v), [[4.0, 4.0], [2.0, 2.0 + 16.0]])


def test_captured_and_checkpointed(rng: np.random.Generator) -> None:
    x = c64(rng.normal(size=(3, 2)))

    def program(function: Any) -> Any:
        v = var64(np.ones((3, 2)))

        @function
        def step(t: Any) -> Any:
            v.scatter_add([0, 0, 2], t)
            v[1].assign(tg.sin(v[0]))
            v.scatter_nd_max([[2, 1]], t[0, :1])
            v.scatter_mul(1, 3.0)
            with tg.GradientTape() as tape:
                y = tg.sum(tg.gather_nd(v, [[0, 1], [2, 0]]) ** 2)
            return tape.gradient(y, v)

        return [(step(x * k), v.numpy(copy=True)) for k in (1.0, 2.0, 0.5)]

    alike(program, (1, 1))
    f = lambda q: tg.tanh(tg.gather_nd(q, [[0, 1], [0, 1]]))
    assert bits_equal(*(tg.grad(lambda q, g=g: tg.sum(g(q)))(x) for g in (f, tg.recompute_grad(f))))
    vectors = np.array([[0, 1], [2, 0]])
    rows = tg.vmap(lambda q, i: tg.gather_nd(q, i))(tg.stack([x, x]), tg.asarray(np.stack([vectors, vectors[::-1]])))
    same(rows, [values(x)[tuple(vectors.T)], values(x)[tuple(vectors[::-1].T)]])


def test_the_gradient_of_rows_alone_is_small_and_updates_as_the_whole_does() -> None:
    """What the advice for users of TensorFlow's IndexedSlices says."""
    at, whole = np.array([3, 7, 3]), tg.Variable(np.ones((4096, 8)))
    with tg.GradientTape() as tape:
        loss = tg.sum(whole.sparse_read(at) ** 2 * [[1.0], [2.0], [3.0]])
    whole.assign_sub(0.1 * tape.gradient(loss, whole))
    table = tg.Variable(np.ones((4096, 8)))
    with tg.measure() as m:
        with tg.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(rows := table.sparse_read(at))
            loss = tg.sum(rows**2 * [[1.0], [2.0], [3.0]])
        gradient = tape.gradient(loss, rows)
    assert m.allocated_bytes < table.nbytes / 8
    table.scatter_sub(at, 0.1 * gradient)
    np.testing.assert_allclose(table.numpy(), whole.numpy(), rtol=1e-15)
