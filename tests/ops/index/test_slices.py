"""IndexedSlices: gradients of some rows alone, what they cost, and that elsewhere they stand for the whole array."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from checks import bits_equal

import tapegrad as tg
from tapegrad import nn
from tapegrad.errors import AxisError, IndexingError, ShapeError
from tapegrad.nn import functional

torch = pytest.importorskip("torch")


def table(shape: tuple[int, ...] = (6, 3), dtype: Any = np.float64) -> tg.Variable:
    return tg.Variable(np.random.default_rng(3).normal(size=shape).astype(dtype), name="table")


def gradient(v: tg.Variable, loss: Callable[[], Any]) -> Any:
    with tg.GradientTape() as tape:
        y = loss()
    return tape.gradient(y, v)


def read(v: Any, at: Any) -> tg.Tensor:
    return tg.take(v, at, axis=0, sparse_grad=True)


READERS: dict[str, Callable[[Any, Any], Any]] = {
    "take": read,
    "embedding": lambda v, at: functional.embedding(at, v, sparse=True),
    "sparse_read": lambda v, at: v.sparse_read(at),
    "of a reading": lambda v, at: read(v.value(), at),
}


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("at", [[1, 4, 1], [[0, 5], [5, 5]], 2, [], [-1, 0]], ids=str)
def test_the_gradient_of_rows_is_these_rows(reader: str, at: Any) -> None:
    at = np.array(at, np.int64)
    v = table()
    loss = lambda rows: tg.sum(rows**3 * np.arange(1, at.size + 1).reshape(*at.shape, 1))
    g = gradient(v, lambda: loss(READERS[reader](v, at)))
    assert type(g) is tg.IndexedSlices
    assert g.values.shape == (at.size, 3) and g.indices.shape == (at.size,)
    assert g.shape == g.dense_shape == v.shape and g.dtype == v.dtype and g.ndim == 2 and g.device is v.device
    np.testing.assert_array_equal(g.indices, at.reshape(-1) % 6)
    whole = gradient(v, lambda: loss(tg.take(v, at, axis=0)))
    assert type(whole) is tg.Tensor and bits_equal(g.to_dense(), whole)


def test_two_rows_cost_two_rows() -> None:
    """Of a table of 25.6 MB: in bytes alive, and in bytes that kernels move."""
    v = table((100_000, 64), np.float32)
    figures = []
    for reader in (read, lambda v, at: tg.take(v, at, axis=0)):
        with tg.measure() as m:
            before = m.live_bytes
            g = gradient(v, lambda: tg.sum(reader(v, [3, 77_777]) ** 2))  # noqa: B023
        figures.append((m.peak_bytes - before, m.bytes_moved))
        del g
    assert figures[0][0] < 8 * 2 * 64 * 4 and figures[0][1] < 20 * 2 * 64 * 4
    assert figures[1][0] >= v.nbytes and figures[1][1] >= v.nbytes  # the figures tell a whole table


def test_it_is_what_torch_has() -> None:
    for at in ([1, 4, 1], [[0, 5], [5, 5]]):
        v = table()
        weight = torch.tensor(v.numpy(copy=True), requires_grad=True)
        rows = torch.nn.functional.embedding(torch.tensor(at), weight, sparse=True)
        (rows**3).sum().backward()
        g = gradient(v, lambda: tg.sum(functional.embedding(at, v, sparse=True) ** 3))  # noqa: B023
        theirs, ours = weight.grad.coalesce(), g.coalesce()
        np.testing.assert_array_equal(ours.indices, theirs.indices()[0].numpy())
        np.testing.assert_allclose(ours.values, theirs.values().numpy(), rtol=1e-14)


@pytest.mark.parametrize("mode", ["sum", "mean"])
def test_bags_and_padding(mode: str) -> None:
    v, at, offsets = table(), [1, 4, 1, 5], [0, 3]
    loss = lambda sparse: tg.sum(functional.embedding_bag(at, v, offsets, mode=mode, sparse=sparse) ** 3)
    g = gradient(v, lambda: loss(True))
    assert type(g) is tg.IndexedSlices and bits_equal(g.to_dense(), gradient(v, lambda: loss(False)))
    weight = torch.tensor(v.numpy(copy=True), requires_grad=True)
    given = {"mode": mode, "sparse": True}
    (torch.nn.functional.embedding_bag(torch.tensor(at), weight, torch.tensor(offsets), **given) ** 3).sum().backward()
    np.testing.assert_allclose(g, weight.grad.to_dense().numpy(), rtol=1e-14)
    padded = gradient(v, lambda: tg.sum(functional.embedding(at, v, padding_idx=1, sparse=True) ** 2))
    assert type(padded) is tg.IndexedSlices and not padded.numpy()[1].any() and padded.numpy()[4].all()


def test_contributions_to_one_variable() -> None:
    """Rows and rows are joined, in the order of the walk; rows and a whole array make an array."""
    v = table()
    of_rows = lambda: tg.sum(read(v, [1, 4]) ** 2) + tg.sum(read(v, [4]))
    g = gradient(v, of_rows)
    assert type(g) is tg.IndexedSlices and sorted(g.indices.tolist()) == [1, 4, 4]
    for both in (lambda: of_rows() + tg.sum(v * v), lambda: tg.sum(v * v) + of_rows()):
        mixed = gradient(v, both)
        assert type(mixed) is tg.Tensor
        np.testing.assert_allclose(mixed, g.to_dense() + 2 * v, rtol=1e-15)
    tied = gradient(v, lambda: tg.sum(tg.tanh(read(v, [1, 4]) @ v.value().mT)))  # a table used twice
    wanted = gradient(v, lambda: tg.sum(tg.tanh(tg.take(v, [1, 4], axis=0) @ v.value().mT)))
    np.testing.assert_allclose(tied, wanted, rtol=1e-13)


def test_what_is_no_source_is_a_whole_array() -> None:
    """The rows of something computed: the walk needs its whole cotangent."""
    v, weights = table(), np.arange(9.0).reshape(3, 3)
    loss = lambda reader: tg.sum(reader(tg.tanh(v) * v, [1, 4, 1]) * weights)
    g = gradient(v, lambda: loss(read))
    assert type(g) is tg.Tensor and bits_equal(g, gradient(v, lambda: loss(lambda x, at: tg.take(x, at, axis=0))))


def test_functions_of_functions_give_whole_arrays() -> None:
    x = table().value()
    f = lambda t: tg.sum(read(t, [1, 4, 1]) ** 3)
    plain = lambda t: tg.sum(tg.take(t, [1, 4, 1], axis=0) ** 3)
    assert bits_equal(tg.grad(f)(x), tg.grad(plain)(x))
    assert bits_equal(tg.vjp(f, x)[1](2.0), tg.vjp(plain, x)[1](2.0))
    assert bits_equal(tg.hessian(f)(x), tg.hessian(plain)(x))
    assert bits_equal(tg.jacobian(lambda t: read(t, [[0], [5]]))(x), tg.jacobian(lambda t: t[[0, 5], None])(x))
    for a, b in zip(tg.jvp(f, (x,), (x + 1,)), tg.jvp(plain, (x,), (x + 1,)), strict=True):
        assert bits_equal(a, b)
    tg.testing.check_grads(f, [x], order=2)


def test_derivatives_of_the_rows() -> None:
    """Second order and forward mode pass through values; to_dense has a gradient."""
    v = table()
    with tg.GradientTape() as outer:
        with tg.GradientTape() as tape:
            y = tg.sum(read(v, [1, 4, 1]) ** 3)
        g = tape.gradient(y, v)
        z = tg.sum(g.to_dense() ** 2)
    second = outer.gradient(z, v)
    t = v.numpy()
    wanted = np.zeros_like(t)  # z = sum of (6 t^2)^2 at row 1 and of (3 t^2)^2 at row 4
    wanted[1], wanted[4] = 144 * t[1] ** 3, 36 * t[4] ** 3
    np.testing.assert_allclose(second, wanted, rtol=1e-13)
    with tg.ForwardAccumulator(v, tg.ones_like(v)) as accumulator:
        g = gradient(v, lambda: tg.sum(read(v, [1, 4]) ** 3))
    np.testing.assert_allclose(accumulator.jvp(g.values), 6 * t[[1, 4]], rtol=1e-14)


def test_examples_of_a_batch() -> None:
    """Within vmap each example has rows of its own; around it a shared table is read by all."""
    v = table()

    def of_one(at: tg.Tensor) -> Any:
        return gradient(v, lambda: tg.sum(read(v, at) ** 2))

    each = tg.vmap(of_one)(np.array([[0, 1], [5, 5]]))
    assert each.shape == (2, 6, 3)
    np.testing.assert_allclose(each[0], of_one(tg.asarray([0, 1])).to_dense(), rtol=1e-15)
    np.testing.assert_allclose(each[1], of_one(tg.asarray([5, 5])).to_dense(), rtol=1e-15)
    g = gradient(v, lambda: tg.sum(tg.vmap(lambda at: read(v, at) ** 2)(np.array([[0, 1], [5, 5]]))))
    assert type(g) is tg.IndexedSlices and g.indices.tolist() == [0, 1, 5, 5]
    stacked = table((2, 6, 3))
    g = gradient(stacked, lambda: tg.sum(tg.vmap(read)(stacked.value(), np.array([[0, 1], [5, 5]])) ** 2))
    np.testing.assert_allclose(g.numpy()[1][5], 4 * stacked.numpy()[1][5])


def test_checkpoints_and_budgets_keep_the_bits() -> None:
    v = table((6, 200))

    def loss(wrap: Callable[..., Any]) -> Any:
        f = wrap(lambda k: tg.sum(tg.tanh(read(v, [1, k, 1])) ** 2))
        return f(4) + tg.sum(read(v, [0])) + f(5)

    plain, again = gradient(v, lambda: loss(lambda f: f)), gradient(v, lambda: loss(tg.recompute_grad))
    assert type(again) is tg.IndexedSlices
    assert bits_equal(plain.values, again.values) and bits_equal(plain.indices, again.indices)
    with tg.memory_budget(2**20):
        within = gradient(v, lambda: loss(lambda f: f))
    assert bits_equal(plain.values, within.values)

    def loop() -> Any:
        return tg.checkpointed_loop(lambda s, i: s + tg.sum(read(v, [1, 2]) * s), tg.constant(1.0, "float64"), 4)

    in_loop = gradient(v, loop)
    s = tg.constant(1.0, "float64")

    def unrolled() -> Any:
        y = s
        for _ in range(4):
            y = y + tg.sum(tg.take(v, [1, 2], axis=0) * y)
        return y

    np.testing.assert_allclose(in_loop, gradient(v, unrolled), rtol=1e-12)


def test_a_checkpoint_costs_rows_alone() -> None:
    v = table((20_000, 64), np.float32)
    f = tg.recompute_grad(lambda: tg.sum(read(v, [5, 7]) ** 2))
    with tg.measure() as m:
        before = m.live_bytes
        gradient(v, f)
    assert m.peak_bytes - before < v.nbytes / 100


def test_a_layer_and_its_gradient() -> None:
    layer = nn.Embedding(50, 4, sparse=True)
    layer([0])
    g = gradient(layer.embeddings, lambda: tg.sum(layer([[3, 3, 49]]) ** 2))
    assert type(g) is tg.IndexedSlices and g.indices.tolist() == [3, 3, 49] and g.dense_shape == (50, 4)
    assert type(gradient(layer.embeddings, lambda: tg.sum(layer([1]) + tg.sum(layer.embeddings)))) is tg.Tensor


def test_weights_of_the_target() -> None:
    """The rows themselves as target: the gradient is not the very tensor that was given."""
    v, weight = table(), tg.ones((2, 3), dtype="float64")
    with tg.GradientTape() as tape:
        rows = read(v, [2, 0])
    g = tape.gradient(rows, v, output_gradients=weight)
    assert bits_equal(g.values, weight) and g.values.ref() != weight.ref()


# The class itself -----------------------------------------------------------------------------------------------------


def slices(dtype: Any = "float64") -> tg.IndexedSlices:
    return tg.IndexedSlices(tg.asarray([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]], dtype=dtype), [2, 0, 2], (4, 2))


WHOLE = np.array([[3.0, 4.0], [0.0, 0.0], [6.0, 8.0], [0.0, 0.0]])


def test_it_stands_for_the_whole_array() -> None:
    s = slices()
    for whole in (s.to_dense(), tg.asarray(s), np.asarray(s), s.numpy(), tg.sum(tg.stack([s]), axis=0), s @ np.eye(2)):
        np.testing.assert_array_equal(whole, WHOLE)
    assert np.asarray(s, dtype=np.float32).dtype == np.float32
    np.testing.assert_array_equal(tg.exp(s), np.exp(WHOLE))
    np.testing.assert_array_equal(s + 1.0, WHOLE + 1)
    np.testing.assert_array_equal(1.0 - s, 1 - WHOLE)
    np.testing.assert_array_equal(tg.ones((4, 2), dtype="float64") * s, WHOLE)
    np.testing.assert_array_equal(s * np.full((4, 2), 3.0), 3 * WHOLE)
    assert tg.sum(s).item() == 21.0 and repr(s).startswith("tapegrad.IndexedSlices(values=array([[1., 2.],")
    v = tg.Variable(np.ones((4, 2)))
    v.assign_sub(s)
    np.testing.assert_array_equal(v, 1 - WHOLE)


def test_what_is_linear_stays_as_it_is() -> None:
    s = slices()
    half = tg.constant(0.5, "float64")
    for scaled, factor in ((-s, -1.0), (s * 0.5, 0.5), (0.5 * s, 0.5), (s / 2, 0.5), (s * half, 0.5)):
        assert type(scaled) is tg.IndexedSlices, factor
        np.testing.assert_array_equal(scaled, factor * WHOLE)
    assert type(s + s) is type(s - s) is type(sum([s, s])) is tg.IndexedSlices
    np.testing.assert_array_equal(sum([s, s]), 2 * WHOLE)
    np.testing.assert_array_equal(s - s * 2, -WHOLE)
    once = s.coalesce()
    assert once.indices.tolist() == [0, 2] and once.values.tolist() == [[3.0, 4.0], [6.0, 8.0]]
    assert s.astype("float16").dtype == np.float16 and slices("bfloat16").coalesce().numpy()[2, 1] == 8


def test_gradients_pass_through_the_class() -> None:
    x = tg.constant([[1.0, 2.0], [3.0, 4.0]], "float64")
    f = lambda t: tg.sum((tg.IndexedSlices(t, [1, 1], (3, 2)) * 2).to_dense() ** 2)
    np.testing.assert_allclose(tg.grad(f)(x), np.full((2, 1), 1) * 8 * x.numpy().sum(0), rtol=1e-14)
    tg.testing.check_grads(lambda t: tg.IndexedSlices(t, [2, 1], (3, 2)).coalesce().values ** 2, [x])


def test_many_equal_indices_are_added_in_their_order() -> None:
    """Rounding shows an order: float16 sums are rounded once, float32 ones left to right."""
    x = np.random.default_rng(0).normal(size=(200, 2)).astype(np.float32)
    s = tg.IndexedSlices(x, np.zeros(200, np.int64), (3, 2))
    wanted = np.zeros(2, np.float32)
    for row in x:
        wanted = wanted + row
    assert bits_equal(s.to_dense()[0], wanted) and bits_equal(s.coalesce().values[0], wanted)
    half = tg.IndexedSlices(x.astype(np.float16), np.zeros(200, np.int64), (3, 2)).to_dense()
    exact = x.astype(np.float16).astype(np.float64).sum(0)
    np.testing.assert_allclose(half[0], exact, rtol=2e-3)


@pytest.mark.parametrize(
    ("make", "error", "says"),
    [
        (lambda: tg.IndexedSlices(np.ones((2, 3)), [0, 1, 2], (4, 3)), ShapeError, r"IndexedSlices.*\(2, 3\), \(3,\)"),
        (lambda: tg.IndexedSlices(np.ones((2, 3)), [0, 1], (4, 2)), ShapeError, "IndexedSlices: wanted values"),
        (lambda: tg.IndexedSlices(np.ones((2, 3)), [[0, 1]], (4, 3)), ShapeError, "IndexedSlices: wanted values"),
        (lambda: tg.IndexedSlices(np.ones(()), 0, ()), ShapeError, "IndexedSlices: wanted values"),
        (lambda: tg.IndexedSlices(np.ones((2, 3)), [0, 4], (4, 3)), IndexingError, "index 4 is out of range"),
        (lambda: tg.IndexedSlices(np.ones((2, 3)), [0.5, 1], (4, 3)), IndexingError, "integers"),
        (lambda: read(table(), [6]), IndexingError, "take: index 6 is out of range"),
        (lambda: tg.take(table(), [0], axis=1, sparse_grad=True), AxisError, "along axis 0, not along axis 1"),
        (lambda: functional.embedding([7], table(), sparse=True), IndexingError, "index 7"),
    ],
)
def test_errors(make: Callable[[], Any], error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        make()


def test_the_methods_of_variables_take_it() -> None:
    v = tg.Variable(np.ones((4, 2)))
    np.testing.assert_array_equal(v.scatter_add(slices()), 1 + WHOLE)
    np.testing.assert_array_equal(v.scatter_sub(slices()), np.ones((4, 2)))
    np.testing.assert_array_equal(v.scatter_update(slices())[2], [5.0, 6.0])
    with pytest.raises(TypeError, match="scatter_add: wanted indices and updates"):
        v.scatter_add([1, 2])


def test_a_vector_has_slices_of_one_element() -> None:
    v = table((5,))
    g = gradient(v, lambda: tg.sum(tg.take(v, [4, 4, 0], sparse_grad=True) ** 2))
    assert g.values.shape == (3,) and g.dense_shape == (5,)
    np.testing.assert_allclose(g, [2 * v.numpy()[0], 0, 0, 0, 4 * v.numpy()[4]])


def test_it_travels_through_functions_that_take_structures() -> None:
    """Captured functions, checkpoints; vmap gives whole arrays."""
    v = table((600, 8), np.float32)

    def grads(at: Any) -> dict[str, Any]:
        return {"rows": gradient(v, lambda: tg.sum(read(v, at) ** 2))}

    captured, norm = tg.function(grads), tg.function(lambda s: tg.sum(s.to_dense() ** 2))
    for k in range(3):
        at = np.array([k, 3, 3])
        found, wanted = captured(at)["rows"], grads(at)["rows"]
        assert type(found) is tg.IndexedSlices and found.dense_shape == (600, 8)
        assert bits_equal(found.values, wanted.values) and found.indices.tolist() == at.tolist()
        np.testing.assert_allclose(norm(found), np.sum(wanted.numpy() ** 2), rtol=1e-6)
    assert captured.stats.replays and norm.stats.replays and not captured.stats.fallbacks
    other = tg.IndexedSlices(found.values, found.indices, (700, 8))
    assert norm(other).item() == norm(found).item() and norm.stats.traces == 2  # another shape is another program
    loss = lambda wrap: tg.sum(wrap(lambda: grads([1, 2, 1])["rows"])().to_dense() ** 2)
    again, plain = gradient(v, lambda: loss(tg.recompute_grad)), gradient(v, lambda: loss(lambda f: f))
    assert bits_equal(again.to_dense(), plain.to_dense()) and plain.numpy().any()


def test_a_function_s_own_gradient_may_be_slices() -> None:
    v, s = table((4, 2)), slices()

    @tg.custom_gradient
    def f(x: Any) -> Any:
        return tg.sum(x), lambda ct: s * ct

    np.testing.assert_array_equal(gradient(v, lambda: 2 * f(v)), 2 * WHOLE)
    with tg.GradientTape() as tape:
        y = v * 3.0
    np.testing.assert_array_equal(tape.gradient(y, v, output_gradients=s), 3 * WHOLE)
