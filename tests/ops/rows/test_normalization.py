"""layer_norm, by oneDNN and by NumPy's passes: values, gradients to third order, precision, memory, messages."""

from __future__ import annotations

import numpy as np
import pytest

import tapegrad as tg
from tapegrad.device import onednn, threads
from tapegrad.device.numerics import layer_norm_onednn
from tapegrad.errors import ShapeError
from tapegrad.tensor import from_array
from tapegrad.testing import check_grads


def reference(x, gamma, beta, eps=1e-5):
    x = x.astype("float64")
    c = x - x.mean(-1, keepdims=True)
    return c / np.sqrt((c * c).mean(-1, keepdims=True) + eps) * gamma + beta


@pytest.fixture(autouse=True, params=["oneDNN", "NumPy"])
def way(request, monkeypatch):
    """Of float32, which oneDNN takes."""
    if request.param == "NumPy":
        monkeypatch.setattr(onednn, "library", lambda: None)
    elif onednn.library() is None:
        pytest.skip("oneDNN is not installed")
    count = threads.get_num_threads()
    yield request.param
    threads.set_num_threads(count)


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_each_way_is_taken(way, dtype, monkeypatch, rng):
    found, kind = [], layer_norm_onednn.ByOneDNN
    monkeypatch.setattr(kind, "forward", lambda *args, forward=kind.forward: found.append(1) or forward(*args))
    x = rng.normal(size=(3, 4)).astype(dtype)
    tg.layer_norm(x, x[0], x[1]).numpy()
    assert len(found) == ((way, dtype) == ("oneDNN", "float32"))


def test_what_the_library_has_no_fast_code_for_is_left_to_numpy(way, monkeypatch, rng):
    if way == "oneDNN":
        monkeypatch.setattr(layer_norm_onednn.ByOneDNN, "forward", None)
        monkeypatch.setattr(onednn, "SLOW", (b"",))
    x, eps = rng.normal(size=(3, 4)).astype("float32"), 3e-5  # of which no code has been made
    got = tg.layer_norm(x, x[0], x[1], eps=eps).numpy()
    np.testing.assert_allclose(got, reference(x, x[0], x[1], eps), rtol=1e-5, atol=1e-5)


def test_both_ways_agree_in_blocks_of_any_number_of_rows(rng):
    """Also in those that have fewer rows than the first."""
    for shape in ((1, 1), (3, 17), (700, 300), (5, 40_000), (2, 70_001)):
        x, ct = (rng.normal(size=shape).astype("float32") for _ in range(2))
        gamma, beta = (rng.normal(size=shape[1:]).astype("float32") for _ in range(2))
        y, gs = tg.vjp(tg.layer_norm, x, gamma, beta)
        wide = [v.astype("float64") for v in (x, gamma, beta)]
        wanted, wanted_gs = tg.vjp(tg.layer_norm, *wide)
        np.testing.assert_allclose(y.numpy(), wanted.numpy(), rtol=1e-4, atol=1e-4)
        for got, want in zip(gs(ct), wanted_gs(ct.astype("float64")), strict=True):
            np.testing.assert_allclose(got.numpy(), want.numpy(), rtol=1e-3, atol=2e-4)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_no_rows_of_a_jacobian_and_no_examples(dtype, rng):
    x, ones = tg.asarray(rng.normal(size=(3, 4)).astype(dtype)), tg.ones(4, dtype=dtype)
    f = lambda x, gamma: tg.layer_norm(x, gamma, ones)
    for argnums, shapes in (((0,), [(3, 4)]), ((1,), [(4,)]), ((0, 1), [(3, 4), (4,)])):
        none = tg.jacobian(lambda *a: f(*a)[:0], argnums=argnums)(x, ones)
        assert [j.shape for j in none] == [(0, 4, *shape) for shape in shapes]
    pulled = tg.vmap(lambda ct: tg.vjp(f, x, ones)[1](ct))(tg.zeros((0, 3, 4), dtype=dtype))
    assert [ct.shape for ct in pulled] == [(0, 3, 4), (0, 4)]


def test_a_row_has_the_same_bits_among_others(rng):
    x, ct = (rng.normal(size=(1000, 130)).astype("float32") for _ in range(2))
    gamma = rng.normal(size=130).astype("float32")
    of = lambda x, ct: [
        v.numpy() for v in (tg.layer_norm(x, gamma, gamma), tg.vjp(tg.layer_norm, x, gamma, gamma)[1](ct)[0])
    ]
    for part in (slice(1), slice(3, 10), slice(400, 999)):
        for whole, some in zip(of(x, ct), of(x[part], ct[part]), strict=True):
            np.testing.assert_array_equal(whole[part], some)


def test_numbers_that_are_not_finite_stay_in_their_row(rng):
    x, ct = (rng.normal(size=(6, 20)).astype("float32") for _ in range(2))
    x[1, 3], x[4, 0] = np.nan, np.inf
    ones = np.ones(20, "float32")
    with np.errstate(invalid="ignore"):
        y, pull = tg.vjp(tg.layer_norm, x, ones, ones)
        for rows in (y, pull(ct)[0]):
            np.testing.assert_array_equal(np.isfinite(rows.numpy()).all(axis=1), [True, False, True, True, False, True])


@pytest.mark.parametrize("shape", [(3, 4), (5,), (2, 3, 4), (4, 1), (300, 257), (2, 70001)])
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_values(shape, dtype, rng):
    x, gamma, beta = (rng.normal(size=s).astype(dtype) for s in (shape, shape[-1:], shape[-1:]))
    got = tg.layer_norm(x, gamma, beta)
    assert got.dtype == dtype and got.shape == shape
    tolerance = {"float16": 1e-2, "float32": 1e-4, "float64": 1e-11}[dtype]
    np.testing.assert_allclose(got.numpy(), reference(x, gamma, beta), rtol=tolerance, atol=tolerance)


def test_a_big_mean_does_not_cancel(rng):
    """E[x*x] - E[x]**2 would be rounding noise here."""
    x = (rng.normal(size=(8, 512)) + 1e4).astype("float32")
    got = tg.layer_norm(x, np.ones(512, "f"), np.zeros(512, "f")).numpy()
    np.testing.assert_allclose(got, reference(x, 1, 0), atol=5e-3)


def test_a_constant_row_and_empty_arrays():
    assert tg.layer_norm(np.full((2, 3), 7.0), np.ones(3), np.full(3, 2.0)).tolist() == [[2.0] * 3] * 2
    assert tg.layer_norm(np.ones((0, 3)), np.ones(3), np.ones(3)).shape == (0, 3)
    assert tg.layer_norm(np.ones((3, 0)), np.ones(0), np.ones(0)).shape == (3, 0)


@pytest.mark.parametrize("shape", [(3, 4), (5,), (2, 3, 4)])
def test_gradients(shape, rng):
    xs = [rng.normal(size=s) for s in (shape, shape[-1:], shape[-1:])]
    check_grads(lambda x, g, b: tg.layer_norm(x, g, b, eps=0.1), xs, order=3)


@pytest.mark.parametrize("argnum", [0, 1, 2])
def test_jacobians_and_hessians(argnum, rng):
    args = [rng.normal(size=s) for s in ((2, 3, 4), (4,), (4,))]
    f = lambda *a: tg.layer_norm(*a, eps=0.1)
    h = lambda *a: tg.sum(tg.sin(f(*a)))
    for derivative, of, rtol in ((tg.jacobian(f, argnum), f, 1e-6), (tg.hessian(h, argnum), tg.grad(h, argnum), 1e-5)):
        got = derivative(*args).numpy()
        columns = []
        for unit in np.eye(args[argnum].size):
            step = 1e-6 * unit.reshape(args[argnum].shape)
            up, down = (of(*[a + s * step if i == argnum else a for i, a in enumerate(args)]).numpy() for s in (1, -1))
            columns.append((up - down) / 2e-6)
        np.testing.assert_allclose(got, np.stack(columns, -1).reshape(got.shape), rtol=rtol, atol=1e-7)


def test_differentiating_a_jacobian(rng):
    """The derivative primitives with rows of a Jacobian in front have derivatives, too."""
    x, gamma = rng.normal(size=(2, 3)), rng.normal(size=3)
    for argnum in (0, 1):
        norm = lambda *a, n=argnum: tg.sum(tg.jacobian(lambda *b: tg.layer_norm(*b, np.zeros(3), eps=0.1), n)(*a) ** 2)
        check_grads(norm, [x, gamma], order=1)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_same_bits_for_any_number_of_threads(dtype, rng):
    x, w, gamma, beta = (rng.normal(size=s).astype(dtype) for s in ((700, 300), (700, 300), (300,), (300,)))
    found = set()
    for count in (1, 2, 3):
        threads.set_num_threads(count)
        y, gs = tg.value_and_grad(lambda *a: tg.sum(tg.layer_norm(*a) * w), argnums=(0, 1, 2))(x, gamma, beta)
        found.add((y.numpy().tobytes(), *(g.numpy().tobytes() for g in gs)))
    assert len(found) == 1
    for view in (x.T, x[::-1], x[:, ::2]):
        ones = np.ones(view.shape[-1], dtype)
        got = tg.layer_norm(from_array(view), ones, ones).numpy()
        np.testing.assert_array_equal(got, tg.layer_norm(np.ascontiguousarray(view), ones, ones).numpy())


def of_ones(rng, shape):
    """Rows, and the vectors that leave them as they are."""
    return [tg.asarray(rng.normal(size=shape).astype("float32")), tg.ones(shape[-1]), tg.zeros(shape[-1])]


def recorded(operands, watched):
    """The result, and the tape that has recorded it."""
    with tg.GradientTape() as tape:
        tape.watch(watched)
        y = tg.layer_norm(*operands)
    return y, tape


def test_backward_makes_nothing_of_full_size_but_the_gradient(rng):
    operands = x, _, _ = of_ones(rng, (1000, 1000))
    with tg.measure() as m:
        y, tape = recorded(operands, operands)
        assert m.peak_bytes < 2.1 * x.nbytes
        gs = tape.gradient(y, operands, output_gradients=tg.ones(x.shape))
        assert gs[0].shape == x.shape
    assert m.peak_bytes < 4.1 * x.nbytes  # the operand, the result, the cotangent, the gradient


@pytest.mark.parametrize("dtype", ["float32", "float16", "float64"])
def test_cotangents_come_from_one_pass_over_the_rows(dtype, rng):
    x, gamma, beta, ct = (rng.normal(size=s).astype(dtype) for s in ((60, 40), (40,), (40,), (60, 40)))
    passes = {
        (0,): ["layer_norm_vjp_x"], (1,): ["layer_norm_vjp_gamma"], (2,): ["sum"],
        (1, 2): ["layer_norm_vjp_gamma", "sum"], (0, 1): ["layer_norm_vjp"], (0, 1, 2): ["layer_norm_vjp"],
    }  # fmt: skip
    found = {}
    for wanted, names in passes.items():
        operands = [tg.asarray(a) for a in (x, gamma, beta)]
        watched = [operands[i] for i in wanted]
        y, tape = recorded(operands, watched)
        with tg.measure() as m:
            found[wanted] = [g.numpy() for g in tape.gradient(y, watched, output_gradients=tg.asarray(ct))]
        assert [name for name in m.nodes_run if name in {*sum(passes.values(), [])}] == names
    np.testing.assert_array_equal(found[0,][0], found[0, 1, 2][0])
    np.testing.assert_array_equal(found[0, 1][1], found[0, 1, 2][1])
    wide = [v.astype("float64") for v in (x, gamma, beta, ct)]
    wanted = tg.vjp(tg.layer_norm, *wide[:3])[1](wide[3])
    tolerance = {"float16": 4e-3, "float32": 3e-5, "float64": 1e-12}[dtype]
    for got, want in zip((*found[0, 1, 2], *found[1, 2]), (*wanted, *wanted[1:]), strict=True):
        np.testing.assert_allclose(got, want.numpy(), rtol=tolerance, atol=10 * tolerance)


def test_gradients_of_vectors_do_not_keep_that_of_the_rows(rng):
    operands = x, gamma, _ = of_ones(rng, (500, 400))
    with tg.measure() as m:
        y, tape = recorded(operands, operands)
        gs = tape.gradient(y, operands, output_gradients=tg.ones(x.shape))
        del y, tape
        assert m.live_bytes > 2 * x.nbytes
        del gs[0]
        assert m.live_bytes < x.nbytes + 20 * gamma.nbytes


def test_examples_of_a_batch_have_the_same_gradients(rng):
    x, gamma, beta = (rng.normal(size=s) for s in ((5, 3, 4), (4,), (4,)))
    f = lambda x, gamma, beta: tg.sum(tg.sin(tg.layer_norm(x, gamma, beta)))
    for argnums in ((0, 1, 2), (0,), (1, 2)):
        gradients = tg.grad(f, argnums=argnums)
        together = tg.vmap(gradients, in_axes=(0, None, None))(x, gamma, beta)
        for i, example in enumerate(x):
            for got, wanted in zip(together, gradients(example, gamma, beta), strict=True):
                np.testing.assert_allclose(got.numpy()[i], wanted.numpy(), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize(
    ("x", "gamma", "beta"), [((3, 4), (3,), (4,)), ((3, 4), (4,), (3, 4)), ((), (1,), (1,)), ((3, 4), (1,), (4,))]
)
def test_errors(x, gamma, beta):
    with pytest.raises(ShapeError, match="layer_norm") as caught:
        tg.layer_norm(np.ones(x), np.ones(gamma), np.ones(beta))
    assert str(x) in str(caught.value)
