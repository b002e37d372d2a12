"""Tensors, variables, models and their optimizers are copied and pickled as NumPy's arrays are."""

from __future__ import annotations

import copy
import inspect
import multiprocessing
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import joblib
import ml_dtypes
import numpy as np
import pytest
import scipy.sparse

import tapegrad as tg
from tapegrad import nn, optim
from tapegrad.errors import DetachedError, DryRunError, TapeError, TapegradError

WAYS: list[Callable[[Any], Any]] = [
    copy.copy, copy.deepcopy, *(lambda x, p=p: pickle.loads(pickle.dumps(x, p)) for p in (0, 2, 5)),
]  # fmt: skip
by_way = pytest.mark.parametrize("way", WAYS, ids=["copy", "deepcopy", "pickle0", "pickle2", "pickle5"])


@by_way
@pytest.mark.parametrize("dtype", ["bool", "int8", "uint64", "float16", "float32", "complex128", ml_dtypes.bfloat16])
@pytest.mark.parametrize("shape", [(), (0, 3), (2, 3)])
def test_a_tensor(way: Callable, dtype: Any, shape: tuple) -> None:
    x = tg.asarray(np.ones(shape, dtype))
    y = way(x)
    assert type(y) is tg.Tensor and y.dtype == x.dtype and y.shape == shape and y.device is x.device
    np.testing.assert_array_equal(y.numpy(), x.numpy())
    assert (y + y).shape == shape


def test_a_pending_value_and_a_strided_view() -> None:
    x = tg.reshape(tg.arange(90000.0), (300, 300))
    for y in (tg.sin(x) * 2, x[::3, 5].mT if x.ndim == 1 else x.mT[::3], tg.broadcast_to(x[0], (4, 300))):
        np.testing.assert_array_equal(pickle.loads(pickle.dumps(y)).numpy(), y.numpy())


def test_a_copy_of_a_tensor_has_its_derivative() -> None:
    x = tg.asarray([1.0, 2.0])
    for way in WAYS[:2]:
        with tg.GradientTape() as tape:
            tape.watch(x)
            y = way(x) ** 2
        np.testing.assert_array_equal(tape.gradient(y, x).numpy(), [2, 4])
        np.testing.assert_array_equal(tg.grad(lambda t, way=way: tg.sum(way(t) ** 2))(x).numpy(), [2, 4])
    with pytest.raises(DetachedError, match="a pickle takes the value of float32"):
        tg.grad(lambda t: tg.sum(pickle.loads(pickle.dumps(t))))(x)
    with pytest.raises(DryRunError, match="differs from example to example"):
        tg.vmap(lambda t: pickle.loads(pickle.dumps(t)))(x)


@by_way
def test_a_variable_is_a_new_one(way: Callable) -> None:
    v = tg.Variable([1.0, 2.0], trainable=False, name="mine", dtype="float64", category="activation")
    w = way(v)
    assert (w.name, w.trainable, w.category, w.dtype) == ("mine", False, "activation", v.dtype)
    assert w.construction_number != v.construction_number
    w.assign_add([1.0, 1.0])
    assert v.numpy().tolist() == [1, 2] and w.numpy().tolist() == [2, 3]


@by_way
def test_one_thing_held_twice_stays_one(way: Callable) -> None:
    if way is copy.copy:
        return
    v, x = tg.Variable([1.0]), tg.asarray([2.0])
    a, b, c, d = way([v, v, x, x])
    assert a is b and c is d and a is not v


@by_way
def test_references_generators_and_sparse_tensors(way: Callable) -> None:
    x = tg.asarray([1.0])
    ref = way(x.ref())
    assert ref == ref.deref().ref() and ref.deref().numpy() == 1 and len({ref, ref.deref().ref()}) == 1
    g = tg.random.Generator(3)
    g.normal((5,))
    twin = way(g)
    assert twin is not g and (g.normal((5,)) == twin.normal((5,))).numpy().all()
    m = tg.sparse.asarray(scipy.sparse.eye_array(3)).T
    assert (way(m) @ tg.arange(3.0)).numpy().tolist() == [0, 1, 2]


def trained(model: nn.Layer, optimizer: optim.Optimizer) -> list[np.ndarray]:
    x = tg.reshape(tg.arange(24.0), (2, 3, 4)) / 24
    with tg.GradientTape() as tape:
        loss = tg.sum(model(x) ** 2)
    variables = model.trainable_variables
    optimizer.apply(tape.gradient(loss, variables), variables)
    return [v.numpy() for v in (*model.variables, *optimizer.variables)]


@pytest.mark.parametrize("way", WAYS[1:], ids=["deepcopy", "pickle0", "pickle2", "pickle5"])
@pytest.mark.parametrize("make", [lambda: optim.SGD(0.1, momentum=0.9), optim.Adam, optim.AdamW])
def test_training_goes_on_in_the_copy(way: Callable, make: Callable) -> None:
    block = nn.Sequential([nn.Dense(4, activation="relu"), nn.LayerNormalization()])
    model = nn.Sequential([nn.MultiHeadAttention(2, 2), tg.recompute_grad(block), nn.Dense(2, activation="tanh")])
    optimizer = make()
    trained(model, optimizer)
    twin, others = way((model, optimizer))
    assert all(v is not w for v, w in zip(model.variables, twin.variables, strict=True))
    for _ in range(2):
        for ours, theirs in zip(trained(model, optimizer), trained(twin, others), strict=True):
            np.testing.assert_array_equal(ours, theirs)


def names_of(option: str) -> list[str]:
    """What may be named there, as the error for another name says."""
    with pytest.raises(TapegradError, match="a function or one of ") as caught:
        nn.Dense(2, **{option: "no such name"})
    return str(caught.value).partition(" one of ")[2].partition("; got ")[0].split(", ")


LAYERS = [
    lambda: nn.Conv1D(2, 3), lambda: nn.Conv2D(2, 3), lambda: nn.Conv3D(2, 3), lambda: nn.Dropout(0.5),
    lambda: nn.Embedding(4, 2), lambda: nn.LayerNormalization(), lambda: nn.MultiHeadAttention(1, 2),
    *(lambda a=a: nn.Dense(2, activation=a) for a in names_of("activation")),
    *(lambda i=i: nn.Dense(2, kernel_initializer=i) for i in names_of("kernel_initializer")),
]  # fmt: skip


def test_layers_before_they_are_built() -> None:
    for make in LAYERS:
        layer = make()
        for way in WAYS:
            assert type(way(layer)) is type(layer)


def modules() -> list[Any]:
    names = ("linalg", "fft", "special", "stats", "signal", "sparse", "integrate", "random", "nn", "optim", "memory")
    return [tg, nn.functional, tg.policies, tg.testing, *(getattr(tg, n) for n in names)]


def test_every_public_function_is_found_by_its_name() -> None:
    seen = 0
    for module in modules():
        for name in getattr(module, "__all__", [n for n in dir(module) if n[0] != "_"]):
            value = getattr(module, name)
            if inspect.isfunction(value) or isinstance(value, type):
                seen += 1
                assert pickle.loads(pickle.dumps(value)) is value is copy.deepcopy(value), f"{module.__name__}.{name}"
    assert seen > 500


@tg.custom_gradient
def doubled(x: Any) -> Any:
    return x * 2, lambda d: d * 2


@tg.recompute_grad
def squared(x: Any) -> Any:
    return x * x


@tg.primitive
def cubed(x: Any) -> Any:
    return x**3


def negated(x: Any) -> Any:
    return -x


class Holder:
    @tg.recompute_grad
    def method(self, x: Any) -> Any:
        return x + 1


def test_decorated_functions_are_found_by_their_names() -> None:
    cubed(tg.asarray([2.0]))
    for f in (doubled, squared, cubed, Holder.__dict__["method"]):
        assert copy.copy(f) is f and copy.deepcopy(f) is f and pickle.loads(pickle.dumps(f)) is f
    other = copy.deepcopy(tg.primitive(negated))
    assert other(tg.asarray([0.0])).numpy() == 0


def test_a_tape_is_not_copied() -> None:
    x = tg.asarray([1.0])
    with tg.GradientTape() as tape:
        tape.watch(x)
        x * x
    for way in WAYS:
        with pytest.raises(TapeError, match=r"a tape is neither copied nor pickled.*pickle the gradients"):
            way(tape)


def elsewhere(given: Any) -> Any:
    """What a worker does: compute with what came, and send back what it made."""
    x, v, model, f = given
    with tg.GradientTape() as tape:
        loss = tg.sum(f(model(x)) * v)
    return loss, tape.gradient(loss, v), model


@pytest.mark.slow
def test_a_worker_that_was_spawned() -> None:
    x, v, model = tg.ones((2, 3)), tg.Variable(2.0), nn.Sequential([nn.Dense(2, activation="gelu")])
    model(x)
    wanted = elsewhere((x, v, model, tg.tanh))
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        loss, gradient, twin = pool.apply(elsewhere, ((x, v, model, tg.tanh),))
    np.testing.assert_array_equal(loss.numpy(), wanted[0].numpy())
    np.testing.assert_array_equal(gradient.numpy(), wanted[1].numpy())
    np.testing.assert_array_equal(twin(x).numpy(), model(x).numpy())


@pytest.mark.slow
def test_joblib_computes_in_workers_keeps_and_compares(tmp_path: Path) -> None:
    x, v, model = tg.ones((2, 3)), tg.Variable(2.0), nn.Sequential([nn.Dense(2, activation="gelu")])
    wanted = elsewhere((x, v, model, tg.tanh))[1].numpy()
    jobs = [joblib.delayed(elsewhere)((x, v, model, f)) for f in (tg.tanh, lambda z: tg.tanh(z))]
    try:
        for _, gradient, twin in joblib.Parallel(n_jobs=2)(jobs):
            np.testing.assert_array_equal(gradient.numpy(), wanted)
            np.testing.assert_array_equal(twin(x).numpy(), model(x).numpy())
    finally:
        joblib.externals.loky.get_reusable_executor().shutdown(wait=True)  # its threads have used tensors
    joblib.dump([model, x], tmp_path / "kept")
    again, y = joblib.load(tmp_path / "kept")
    np.testing.assert_array_equal(again(y).numpy(), model(x).numpy())
    assert joblib.hash(x) == joblib.hash(tg.ones((2, 3))) != joblib.hash(x * 2)


def test_a_device_that_is_missing_is_replaced_by_the_default() -> None:
    from tapegrad.device import current_device
    from tapegrad.tensor import home

    assert home("cpu").name == "cpu" and home("cuda:63") is current_device()
