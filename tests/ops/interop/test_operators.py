"""Operators, methods and NumPy's protocols, on tensors and variables; and no public name is lost."""

from __future__ import annotations

import importlib
import operator
import pkgutil
from types import FunctionType

import numpy as np
import pytest

import tapegrad as tg
from tapegrad import ops

BINARY = ["add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "eq", "ne", "lt", "le", "gt", "ge"]
BITS = ["and_", "or_", "xor", "lshift", "rshift"]


def operands(name, rng):
    if name in BITS:
        return rng.integers(1, 5, (3, 3)), rng.integers(1, 5, (3, 3))
    return rng.uniform(1, 3, (3, 3)), rng.uniform(1, 3, (3, 3))


@pytest.mark.parametrize("name", BINARY + BITS)
def test_binary_operators_with_everything(name, rng):
    a, b = operands(name, rng)
    f = getattr(operator, name)
    for x, y in (
        (tg.asarray(a), tg.asarray(b)), (tg.asarray(a), b), (a, tg.asarray(b)),
        (tg.Variable(a, trainable=False), b), (a, tg.Variable(b, trainable=False)),
        (tg.asarray(a), tg.Variable(b, trainable=False)),
    ):  # fmt: skip
        got = f(x, y)
        assert type(got) is tg.Tensor
        np.testing.assert_allclose(got.numpy(), f(a, b), rtol=1e-14)


@pytest.mark.parametrize("name", [n for n in BINARY if n != "matmul"])
def test_scalars_on_both_sides(name, rng):
    a, f = operands(name, rng)[0].astype(np.float32), getattr(operator, name)
    t = tg.asarray(a)
    for s in (2, 2.5, np.float32(2.5)):
        for got, wanted in ((f(t, s), f(a, s)), (f(s, t), f(s, a))):
            assert type(got) is tg.Tensor and got.dtype == wanted.dtype
            np.testing.assert_allclose(got.numpy(), wanted, rtol=1e-6)


def test_ndarray_first_keeps_the_gradient(rng):
    a = rng.standard_normal((3,))
    for f in (lambda x: a * x, lambda x: np.multiply(a, x), lambda x: np.float64(2.0) * x * (a / 2), lambda x: a @ x):
        np.testing.assert_allclose(tg.grad(lambda x, f=f: tg.sum(f(x)))(tg.ones((3,), dtype="float64")).numpy(), a)


def test_unary_operators():
    x = tg.asarray([-1.5, 2.0])
    assert (-x).tolist() == [1.5, -2] and (+x).tolist() == [-1.5, 2] and abs(x).tolist() == [1.5, 2]
    assert (~tg.asarray([True, False])).tolist() == [False, True]


def test_foreign_objects_get_their_turn():
    class Other:
        def __radd__(self, other):
            return "mine"

        def __add__(self, other):
            return "mine, too"

    assert tg.ones(2) + Other() == "mine" and Other() + tg.ones(2) == "mine, too"
    with pytest.raises(TypeError):
        tg.ones(2) + object()


@pytest.mark.parametrize(
    ("name", "args", "kwargs"),
    [
        ("sum", (1,), {}), ("mean", (), {"axis": 0}), ("max", (0,), {}), ("min", (), {"axis": 1, "keepdims": True}),
        ("prod", (0,), {}), ("var", (1,), {}), ("std", (), {}), ("any", (), {}), ("all", (1,), {}), ("argmax", (1,),
        {}),
        ("argmin", (), {}), ("transpose", (), {}), ("transpose", (1, 0), {}), ("transpose", ((1, 0),), {}),
        ("squeeze", (), {}),
        ("flatten", (), {}), ("ravel", (), {}), ("clip", (0, 0.5), {}), ("take", ([1, 0], 1), {}), ("take", ([1],),
        {"axis": 0}),
        ("reshape", (-1,), {}), ("reshape", (4, 3), {}), ("reshape", ((2, 6),), {}), ("astype", ("float32",), {}),
        ("repeat", (2,), {}), ("cumsum", (1,), {}), ("swapaxes", (0, 1), {}), ("round", (), {}), ("conj", (), {}),
    ],
)  # fmt: skip
def test_methods_like_numpy(name, args, kwargs, rng):
    x = rng.standard_normal((3, 4))
    wanted = getattr(x, name)(*args, **kwargs)
    for t in (tg.asarray(x), tg.Variable(x)):
        got = getattr(t, name)(*args, **kwargs)
        assert type(got) is tg.Tensor and got.shape == wanted.shape and got.dtype == wanted.dtype
        np.testing.assert_allclose(got.numpy(), wanted, rtol=1e-12)


def test_method_arguments_are_checked():
    for call in (lambda: tg.ones(2).sum(0, axis=0), lambda: tg.ones(2).max(0, False, 3)):
        with pytest.raises(TypeError):
            call()


def test_numpy_functions_dispatch(rng):
    x = rng.uniform(0.2, 0.8, (3, 4))
    for t in (tg.asarray(x), tg.Variable(x)):
        for f in (
            np.sin, np.arcsin, np.negative, np.isfinite, np.sum, lambda t: np.sum(t, 1), lambda t: np.max(t, axis=0),
            np.transpose,
            lambda t: np.add(x, t), lambda t: np.power(t, 2), lambda t: np.concatenate([t, x]),
            lambda t: np.stack([t, t], axis=1),
            lambda t: np.where(x > 0.5, t, 0), lambda t: np.cumsum(t, 1), lambda t: np.reshape(t, (4, 3)), np.ravel,
            lambda t: np.clip(t, 0.3, 0.4), lambda t: np.take(t, [1, 0], 1), lambda t: np.expand_dims(t, 0), np.argsort,
        ):  # fmt: skip
            got = f(t)
            assert type(got) is tg.Tensor
            np.testing.assert_allclose(got.numpy(), f(x), rtol=1e-12)


def test_numpy_functions_without_counterpart_say_so():
    t = tg.ones(3)
    for call, words in (
        (lambda: np.busday_count(t, t), "numpy.busday_count does not take tensors"),
        (lambda: np.spacing(t), "numpy.spacing does not take tensors"),
        (lambda: np.hypot.reduce(t), "numpy.hypot.reduce does not take tensors"),
        (lambda: np.add(t, t, out=np.empty(3)), "not written into an array"),
    ):
        with pytest.raises(TypeError, match=words):
            call()
    with pytest.raises(TypeError):
        np.ones(3).__iadd__(t)


def test_array_namespace():
    assert tg.ones(2).__array_namespace__() is tg is tg.Variable(1.0).__array_namespace__(api_version="2025.12")


INNER = {
    "ops.elementwise.arithmetic": {"both_zero", "root_of_squares", "squared_size"},
    "ops.create.transfer": {"to_device"}, "ops.products.attention": {"attended", "attention"},
    "ops.index.slices": {"from_rule", "joined", "summed"},
    "ops.products.attention_curvature": {"along", "gradient", "value"},
    "ops.shape.shape": {"flat_or_along", "infer_reduction", "kept_shape", "lift_axes", "shape_of", "sum_to"},
    "ops.shape.blocks": {"native_index", "reshaped", "sliced_shape", "stretch", "whole"},
    "ops.elementwise.activation": {"logistic", "mish"},
    "ops.elementwise.sigmoid": {"logistic", "logistic_of", "sigmoid_slope"},
    "ops.index.bounds": {"checked", "every", "require"},
    "ops.updates": {
        "adagrad_formula", "adam_formula", "decayed", "digits", "groups", "lamb_formula", "lion_formula",
        "momentum_formula", "of_halves", "of_many", "of_tensors", "renew", "rmsprop_formula", "rounded",
        "scalar", "sgd_formula", "weight_of", "wide", "with_decay",
    }, "ops.row_updates": {"read_rows", "update_rows", "write_rows"},
    "ops.precision": {"get_float32_matmul_precision", "set_float32_matmul_precision", "wanted"},
    "ops.index.getitem": {"getitem"}, "ops.index.assigning": {"bind_assignments"},
    "ops.index.index_vectors": {"nd_index"},
    "ops.interop.info": {"check_version", "namespace_info"}, "ops.interop.einops_backend": {"offer_backend"},
    "ops.shape.join": {"padded", "slices"}, "ops.reduce.reductions": {"difference", "of_nothing"},
    "ops.reduce.scans": {"difference"}, "ops.elementwise.elementary": {"difference"},
    "ops.elementwise.exponential": {"below", "difference", "logistic", "pow_operator"},
    "ops.products.convolution": {
        "as_chosen", "conv", "conv_transpose", "done", "fitted", "flops", "in_w", "in_x", "of",
    },
    "ops.products.convolution_bias": {"conv_bias", "is_one_kernel"},
    "ops.shape.patches": {"fold_windows", "unfold_windows"},
    "ops.rows.pooling": {
        "add_taps", "by_planes", "every_tap", "leading", "max_pool", "max_pool_places", "spread_pool", "sum_pool",
    }, "ops.create.creation": {"spaced"},
}  # fmt: skip


def test_no_public_name_is_lost():
    public = {id(getattr(ops, name)) for name in ops.__all__}
    for info in pkgutil.walk_packages(ops.__path__, "tapegrad.ops."):
        last = info.name.rpartition(".")[2]
        if last.startswith("_") or last in ("operators", "apply", "casting", "dispatch", "numpy_protocols"):
            continue
        module = importlib.import_module(info.name)
        if hasattr(module, "__all__"):
            assert set(module.__all__) <= set(ops.__all__), info.name
            continue
        for name, thing in vars(module).items():
            made_here = getattr(thing, "__module__", None) == module.__name__ or hasattr(thing, "primitive")
            if isinstance(thing, FunctionType) and made_here and not name.startswith("_"):
                assert id(thing) in public or name in INNER.get(info.name.removeprefix("tapegrad."), ()), (
                    f"{info.name}.{name}"
                )
    assert sorted(set(ops.__all__)) == list(ops.__all__)
    assert all(hasattr(tg, name) for name in ops.__all__)


def test_lists_of_tensors_keep_their_gradients():
    s = tg.asarray(np.array(3.0))
    for f in (lambda s: tg.add([s, 2 * s], 1.0), lambda s: tg.sum([s, [s, s][0]]), lambda s: tg.sin((s, s)) * [s, 1.0]):
        tg.testing.check_grads(f, (s,), order=2)


def test_lists_of_numbers_are_as_precise_as_what_they_stand_beside():
    x = np.array([0.1, 0.2])
    for found in (
        tg.subtract(x, [0.1, 0.2]), tg.asarray(x) - [0.1, 0.2], tg.linalg.solve(np.eye(2), [0.1, 0.2]) - x,
        tg.diff(x, prepend=[0.1])[:1], tg.concatenate([x, [0.1, 0.2]])[2:] - x, tg.asarray(x).at[:].set([0.1, 0.2]) - x,
    ):  # fmt: skip
        assert not found.numpy().any()
    assert tg.add([0.1, 0.2], np.float32([1, 2])).dtype == tg.float32
    assert tg.searchsorted([0.1, 0.2, 0.7], np.array([0.1, 0.2, 0.7])).tolist() == [0, 1, 2]
