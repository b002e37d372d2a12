"""``tg.set_default_dtype``: the dtype of Python floats and of what is created without one."""

from collections.abc import Iterator

import numpy as np
import pytest

import tapegrad as tg
from tapegrad.errors import DTypeError

REAL = {
    "number": lambda: tg.asarray(0.5), "list": lambda: tg.asarray([[1.0, 2.0]]), "function": lambda: tg.sin(1.0),
    "variable": lambda: tg.Variable([1.0]), "stack": lambda: tg.stack([1.0, 2.0]), "zeros": lambda: tg.zeros(2),
    "ones": lambda: tg.ones((2, 2)), "empty": lambda: tg.empty(2), "full": lambda: tg.full(2, 0.5),
    "eye": lambda: tg.eye(2), "tri": lambda: tg.tri(3), "identity": lambda: tg.identity(3),
    "arange": lambda: tg.arange(3.0),
    "linspace": lambda: tg.linspace(0, 1, 3), "logspace": lambda: tg.logspace(0, 1, 3),
    "geomspace": lambda: tg.geomspace(1, 2, 3), "fftfreq": lambda: tg.fft.fftfreq(4), "hamming": lambda: tg.hamming(4),
    "one_hot": lambda: tg.one_hot([1], 2), "where": lambda: tg.where([True], 1.0, 2.0),
    "fromfunction": lambda: tg.fromfunction(lambda i: i, (3,)), "uniform": lambda: tg.random.uniform(2),
    "normal": lambda: tg.random.normal(2), "gamma": lambda: tg.random.gamma(2),
    "generator": lambda: tg.random.Generator(1).normal(2),
    "bernoulli": lambda: tg.random.bernoulli(2), "dirichlet": lambda: tg.random.dirichlet([1.0, 2.0]),
    "truncated": lambda: tg.random.truncated_normal(2),
    "dense": lambda: tg.nn.Dense(2)(np.ones((1, 2))), "embedding": lambda: tg.nn.Embedding(3, 2)([1]),
    "norm": lambda: tg.nn.LayerNormalization()(np.ones((1, 2))), "recurrent": lambda: tg.nn.LSTM(2)(np.ones((1, 2, 2))),
}  # fmt: skip


@pytest.fixture
def double() -> Iterator[None]:
    tg.set_default_dtype("float64")
    yield
    tg.set_default_dtype("float32")


@pytest.mark.parametrize("name", REAL)
def test_it_is_float32_from_the_start(name: str) -> None:
    assert tg.get_default_dtype() == REAL[name]().dtype == "float32"


@pytest.mark.parametrize("name", REAL)
def test_what_has_no_dtype_follows_it(name: str, double: None) -> None:
    assert tg.get_default_dtype() == REAL[name]().dtype == "float64"


def test_complex_numbers_have_the_same_precision(double: None) -> None:
    assert tg.asarray(1j).dtype == tg.linspace(0, 1j, 3).dtype == "complex128"
    info = tg.__array_namespace_info__().default_dtypes()
    assert info["real floating"] == "float64" and info["complex floating"] == "complex128"


def test_values_have_all_digits(double: None) -> None:
    assert tg.asarray(0.1).item() == 0.1
    np.testing.assert_array_equal(tg.linspace(0, 1, 7), np.linspace(0, 1, 7))


def test_what_has_a_dtype_keeps_it(double: None) -> None:
    x = tg.ones(2, dtype="float32")
    assert (x * 0.1).dtype == tg.asarray(np.ones(2, "float32")).dtype == "float32"
    assert tg.nn.Dense(2, dtype="float32")(x[None]).dtype == "float32"
    assert tg.random.normal(2, dtype="float16").dtype == "float16"
    assert tg.asarray([1, 2]).dtype == "int64" and tg.asarray([True]).dtype == "bool"


def test_a_layer_keeps_the_dtype_of_its_construction() -> None:
    layer = tg.nn.Dense(2)
    tg.set_default_dtype("float64")
    try:
        assert layer(np.ones((1, 2))).dtype == "float32"
    finally:
        tg.set_default_dtype("float32")


def test_a_function_is_captured_for_each_default() -> None:
    f = tg.function(lambda x: x + tg.ones(2))
    x = np.zeros(2, "float32")
    assert [f(x).dtype.name for _ in range(2)] == ["float32"] * 2
    tg.set_default_dtype("float64")
    try:
        assert [f(x).dtype.name for _ in range(2)] == ["float64"] * 2
    finally:
        tg.set_default_dtype("float32")
    assert f(x).dtype == "float32"


@pytest.mark.parametrize("dtype", ["float16", "int64", "bfloat16", "complex64", None, "no dtype"])
def test_others_are_refused(dtype: object) -> None:
    with pytest.raises(DTypeError, match="dtype"):
        tg.set_default_dtype(dtype)
    assert tg.get_default_dtype() == "float32"
