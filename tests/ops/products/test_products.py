"""matmul and what is made of it: NumPy's values, gradients, batches on threads, messages."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from checks import laid

import tapegrad as tg
from tapegrad.device import threads
from tapegrad.errors import AxisError, ShapeError
from tapegrad.tensor import from_array
from tapegrad.testing import check_grads

MATMUL = [
    ((3, 4), (4, 2)), ((4,), (4, 2)), ((3, 4), (4,)), ((4,), (4,)), ((5, 3, 4), (4, 2)), ((5, 3, 4), (5, 4, 2)),
    ((3, 4), (5, 4, 2)), ((2, 1, 3, 4), (5, 4, 2)), ((5, 3, 4), (4,)), ((4,), (5, 4, 2)), ((0, 4), (4, 2)),
    ((3, 0), (0, 2)), ((2, 0, 4), (4, 3)), ((0, 3, 4), (4, 2)), ((1, 1), (1, 1)),
]  # fmt: skip


@pytest.fixture(autouse=True)
def settings():
    count = threads.get_num_threads()
    yield
    threads.set_num_threads(count)


@pytest.mark.parametrize(("a", "b"), MATMUL)
def test_matmul(a, b, rng):
    x, y = rng.uniform(-1, 1, a), rng.uniform(-1, 1, b)
    got = tg.matmul(x, y)
    wanted = np.matmul(x, y)
    assert got.shape == wanted.shape
    np.testing.assert_allclose(got.numpy(), wanted, rtol=1e-12, atol=1e-12)
    if x.size and y.size:
        check_grads(tg.matmul, [x, y], order=2)


def test_matmul_promotes(rng):
    x, y = rng.integers(0, 5, (3, 4)), rng.uniform(size=(4, 2)).astype("float32")
    assert tg.matmul(x, y).dtype == np.float64
    np.testing.assert_array_equal(tg.matmul(x, x.T).numpy(), x @ x.T)
    assert tg.matmul(x, x.T).dtype == np.int64


def test_matmul_of_complex(rng):
    x, y = (rng.normal(size=s) + 1j * rng.normal(size=s) for s in ((3, 4), (4, 2)))
    np.testing.assert_allclose(tg.matmul(x, y).numpy(), x @ y)
    g = tg.grad(lambda x: tg.sum(tg.real(tg.matmul(x, y))))(x)
    np.testing.assert_allclose(g.numpy(), np.ones((3, 2)) @ y.conj().T)


@pytest.mark.parametrize(
    ("a", "b"),
    [((3, 4), (3, 2)), ((2, 3, 4), (3, 4, 2)), ((3,), (4,)), ((), (3,)), ((3,), ()), ((3, 4), (5,)), ((5,), (3, 4))],
)
def test_matmul_names_the_shapes(a, b):
    with pytest.raises(ShapeError, match="matmul") as caught:
        tg.matmul(np.ones(a), np.ones(b))
    assert str(a) in str(caught.value) or str(a[:-2]) in str(caught.value)


def views(x):
    """The same values in several layouts."""
    yield x
    yield np.ascontiguousarray(x.swapaxes(-1, -2)).swapaxes(-1, -2)
    yield np.repeat(x, 2, axis=-1)[..., ::2]
    yield np.ascontiguousarray(np.moveaxis(x, 0, -2)).swapaxes(0, -2) if x.ndim == 3 else x[::-1].copy()[::-1]


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize(
    ("a", "b"),
    [((8, 4, 128, 32), (8, 4, 32, 128)), ((32, 128, 128), (32, 128, 32)), ((3, 1, 200, 90), (70, 90, 20))],
)
def test_batches_on_threads_give_the_same_bits(a, b, dtype, rng):
    x, y = rng.uniform(-1, 1, a).astype(dtype), rng.uniform(-1, 1, b).astype(dtype)
    wanted = np.matmul(x, y)
    for left in views(x):
        found = set()
        for count in (1, 2, 3, 7):
            threads.set_num_threads(count)
            z = tg.matmul(from_array(left), from_array(y)).numpy()
            found.add(z.tobytes())
        assert len(found) == 1
        np.testing.assert_allclose(z, wanted, rtol=1e-4 if dtype == "float32" else 1e-11, atol=1e-4)


def test_a_transposed_operand_is_not_copied(rng):
    """A view reaches the library as it is: the only new array is the result."""
    x = from_array(rng.uniform(size=(300, 200)))
    y = x.mT
    assert np.may_share_memory(y.numpy(), x.numpy())
    with tg.GradientTape() as tape:
        tape.watch(x)
        z = tg.matmul(x.mT, x)
    g = tape.gradient(z, x)
    np.testing.assert_allclose(g.numpy(), 2 * x.numpy().sum(1, keepdims=True) * np.ones((1, 200)))


@pytest.mark.parametrize(
    ("a", "b", "axes"),
    [
        ((3, 4), (4, 5), 1), ((2, 3, 4), (3, 4, 5), 2), ((2, 3), (4, 5), 0), ((2, 3), (2, 3), 2),
        ((2, 3, 4), (4, 3, 5), ([1, 2], [1, 0])), ((2, 3, 4), (5, 3), ([-2], [1])), ((2, 3, 4), (5, 3), (1, -1)),
        ((), (), 0), ((0, 3), (3, 2), 1), ((3, 0), (0, 2), 1),
    ],
)  # fmt: skip
def test_tensordot(a, b, axes, rng):
    x, y = rng.uniform(-1, 1, a), rng.uniform(-1, 1, b)
    got, wanted = tg.tensordot(x, y, axes=axes), np.tensordot(x, y, axes=axes)
    assert got.shape == wanted.shape
    np.testing.assert_allclose(got.numpy(), wanted, rtol=1e-12, atol=1e-12)
    check_grads(lambda x, y: tg.tensordot(x, y, axes=axes), [x, y], order=2)


@pytest.mark.parametrize(
    ("axes", "error"),
    [(1, ShapeError), (3, ShapeError), (-1, ShapeError), (([0], [0, 1]), ShapeError), (([0, 0], [0, 1]), AxisError),
     (([2], [0]), AxisError)],
)  # fmt: skip
def test_tensordot_errors(axes, error):
    with pytest.raises(error, match="tensordot"):
        tg.tensordot(np.ones((2, 3)), np.ones((2, 3)), axes=axes)


@pytest.mark.parametrize(("a", "b"), [((3,), (3,)), ((2, 3), (3,)), ((2, 3), (4, 3)), ((2, 5, 3), (4, 3)), ((), (3,))])
def test_inner(a, b, rng):
    x, y = rng.uniform(-1, 1, a), rng.uniform(-1, 1, b)
    np.testing.assert_allclose(tg.inner(x, y).numpy(), np.inner(x, y), rtol=1e-12)
    check_grads(tg.inner, [x, y], order=2)


@pytest.mark.parametrize(("a", "b"), [((3,), (3,)), ((2, 3), (3,)), ((2, 3), (3, 4)), ((2, 3), (5, 3, 4)), ((2,), ())])
def test_dot(a, b, rng):
    x, y = rng.uniform(-1, 1, a), rng.uniform(-1, 1, b)
    np.testing.assert_allclose(tg.dot(x, y).numpy(), np.dot(x, y), rtol=1e-12)
    check_grads(tg.dot, [x, y], order=2)


@pytest.mark.parametrize(
    ("a", "b", "axis"), [((3,), (3,), -1), ((2, 3), (3,), -1), ((2, 3), (4, 1, 3), -1), ((3, 2), (3, 2), -2)]
)
def test_vecdot(a, b, axis, rng):
    x, y = rng.uniform(-1, 1, a), rng.uniform(-1, 1, b)
    np.testing.assert_allclose(tg.vecdot(x, y, axis=axis).numpy(), np.vecdot(x, y, axis=axis), rtol=1e-12)
    check_grads(lambda x, y: tg.vecdot(x, y, axis=axis), [x, y], order=2)


def test_outer_and_vdot(rng):
    x, y = rng.uniform(-1, 1, (2, 3)), rng.uniform(-1, 1, (4,))
    np.testing.assert_array_equal(tg.outer(x, y).numpy(), np.outer(x, y))
    check_grads(tg.outer, [x, y], order=2)
    np.testing.assert_allclose(tg.vdot(x, x + 1).numpy(), np.vdot(x, x + 1))


@pytest.mark.parametrize(
    ("f", "a", "b", "error"),
    [
        (tg.inner, (3,), (4,), ShapeError), (tg.dot, (2, 3), (2, 3), ShapeError), (tg.vecdot, (3,), (4,), ShapeError),
        (tg.vdot, (3,), (4,), ShapeError), (tg.vecdot, (), (), AxisError), (tg.vecdot, (2, 3), (4, 3), ShapeError),
    ],
)  # fmt: skip
def test_errors(f, a, b, error):
    with pytest.raises(error):
        f(np.ones(a), np.ones(b))


def test_vecdot_of_complex(rng):
    x, y = (rng.normal(size=(2, 3)) + 1j * rng.normal(size=(2, 3)) for _ in range(2))
    np.testing.assert_allclose(tg.vecdot(x, y).numpy(), np.vecdot(x, y))
    np.testing.assert_allclose(tg.vdot(x, y).numpy(), np.vdot(x, y))


@pytest.mark.parametrize(
    ("a", "b"), [((3, 4), (4,)), ((2, 3, 4), (4,)), ((3, 4), (2, 4)), ((5, 1, 3, 4), (2, 4)), ((0, 4), (4,))]
)
def test_matvec_and_vecmat(a, b, rng):
    x, v = (rng.normal(size=s) + 1j * rng.normal(size=s) for s in (a, b))
    np.testing.assert_allclose(tg.matvec(x, v), np.matmul(x, v[..., None])[..., 0], rtol=1e-12)
    turned = x.swapaxes(-1, -2)
    np.testing.assert_allclose(tg.vecmat(v, turned), np.matmul(v.conj()[..., None, :], turned)[..., 0, :], rtol=1e-12)
    check_grads(lambda x, v: (tg.matvec(x, v), tg.vecmat(v, x.mT)), [x.real, v.real])
    for call in (
        lambda: tg.matvec(x[..., :3], v),
        lambda: tg.vecmat(v, x[..., :3].swapaxes(-1, -2)),
        lambda: tg.matvec(v[0], v),
    ):
        with pytest.raises(ShapeError):
            call()


HALVES = ["float16", "bfloat16"]
IN_FLOAT32 = {
    "matmul": (lambda x, y: tg.matmul(x, y), (37, 300), (300, 41)),
    "batch": (lambda x, y: tg.matmul(x, y), (5, 7, 64), (64, 9)),
    "both batched": (lambda x, y: tg.matmul(x, y), (2, 1, 7, 64), (3, 64, 9)),
    "transposed": (lambda x, y: tg.matmul(x.mT, y), (64, 7), (64, 9)),
    "column": (lambda x, y: tg.matmul(x, y), (7, 300), (300,)),
    "dot": (lambda x, y: tg.dot(x, y), (5, 200), (200, 3)),
    "inner": (lambda x, y: tg.inner(x, y), (5, 200), (3, 200)),
    "tensordot": (lambda x, y: tg.tensordot(x, y, 2), (3, 20, 10), (20, 10, 4)),
    "einsum": (lambda x, y: tg.einsum("bij,bkj->bik", x, y), (4, 5, 100), (4, 3, 100)),
    "vecdot": (lambda x, y: tg.vecdot(x, y), (6, 300), (6, 300)),
    "vdot": (lambda x, y: tg.vdot(x, y), (6, 50), (300,)),
    "matvec": (lambda x, y: tg.matvec(x, y), (6, 300), (300,)),
    "vecmat": (lambda x, y: tg.vecmat(x, y), (300,), (300, 4)),
    "conv": (lambda x, y: tg.nn.functional.conv2d(x, y, padding=1), (2, 20, 6, 6), (4, 20, 3, 3)),
    "empty": (lambda x, y: tg.matmul(x, y), (3, 0), (0, 4)),
}


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("case", IN_FLOAT32)
def test_products_of_half_types_are_those_of_float32_rounded_once(case, dtype, rng):
    f, *shapes = IN_FLOAT32[case]
    x, y = (tg.asarray(rng.normal(size=shape), dtype=dtype) for shape in shapes)
    got, wanted = f(x, y), f(tg.astype(x, "float32"), tg.astype(y, "float32"))
    assert got.dtype == dtype and wanted.dtype == "float32"
    np.testing.assert_array_equal(got.numpy(), wanted.numpy().astype(got.dtype))


@pytest.mark.parametrize("dtype", HALVES)
def test_gradients_of_products_of_half_types(dtype, rng):
    x, y = (tg.asarray(rng.normal(size=shape), dtype=dtype) for shape in ((6, 300), (300, 5)))
    ct = tg.asarray(rng.normal(size=(6, 5)), dtype=dtype)
    _, pull = tg.vjp(tg.matmul, x, y)
    for got, a, b in zip(pull(ct), (ct, x.mT), (y.mT, ct), strict=True):
        wanted = a.numpy().astype("float32") @ b.numpy().astype("float32")
        assert got.dtype == dtype
        np.testing.assert_array_equal(got.numpy(), wanted.astype(got.dtype))


def test_a_product_of_float16_passes_through_no_infinity():
    x = tg.asarray([[300.0, 300.0, 300.0]], dtype="float16")
    y = tg.asarray([[300.0], [-300.0], [1.0]], dtype="float16")
    assert tg.matmul(x, y).item() == 300 and tg.vecdot(x[0], y[:, 0]).item() == 300


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("sizes", [(17, 33, 65), (128, 128, 128), (200, 200, 200), (250, 30, 190), (600, 70, 300)])
def test_bits_do_not_depend_on_gaps_in_matrices(dtype: str, sizes: tuple[int, int, int]) -> None:
    """A captured step may hold in one piece what eager code reads with gaps; what lies by columns it holds so.

    Small products have other bits by columns where OpenBLAS has kernels of their own for them (with AVX-512).
    """
    m, n, k = sizes
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((m, k)).astype(dtype), rng.standard_normal((k, n)).astype(dtype)
    wanted = tg.matmul(x, y).numpy()
    for first, second in itertools.product(("rows", "gaps", "all gaps"), repeat=2):
        a, b = (tg.asarray(laid(z, how), copy=False) for z, how in ((x, first), (y, second)))
        np.testing.assert_array_equal(tg.matmul(a, b).numpy(), wanted, err_msg=f"{first} @ {second}")


@pytest.mark.sampled(1 / 4)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("sizes", [(3, 5, 40), (17, 33, 65), (128, 128, 128), (600, 70, 300)])
def test_captured_products_have_the_bits_of_eager_ones_however_matrices_lie(
    dtype: str, sizes: tuple[int, int, int]
) -> None:
    m, n, k = sizes
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((m, k)).astype(dtype), rng.standard_normal((k, n)).astype(dtype)
    for first, second in itertools.product(("rows", "columns", "gaps", "all gaps"), repeat=2):
        a, b = (tg.asarray(laid(z, how), copy=False) for z, how in ((x, first), (y, second)))
        v = tg.Variable(b)

        def gradients(a: tg.Tensor, b: tg.Tensor, v: tg.Variable = v) -> list[tg.Tensor]:
            with tg.GradientTape() as tape:
                tape.watch([a, b])
                z = tg.sum(tg.sin(a @ b) * (a @ v)) + tg.sum(tg.cos(b.T @ a.T))
            return tape.gradient(z, [a, b, v])

        captured, wanted = tg.function(gradients), gradients(a, b)
        for _ in range(3):
            for found, w in zip(captured(a, b), wanted, strict=True):
                np.testing.assert_array_equal(found.numpy(), w.numpy(), err_msg=f"{first} @ {second}")
        assert captured.stats.replays and not captured.stats.fallbacks
