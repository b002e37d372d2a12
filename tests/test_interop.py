"""Tensors in other packages' hands: PyTorch, JAX, einops, array-api-compat, array-api-extra, and NumPy's own functions.

A package that is not installed skips its tests.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from checks import c64, gradients, same

import tapegrad as tg
from tapegrad import errors, testing

X = np.arange(24.0).reshape(2, 3, 4)


@pytest.fixture(autouse=True)
def _others_may_warn(recwarn: Any) -> None:
    """Warnings of the packages about themselves are none of ours."""


# DLPack with PyTorch and JAX ------------------------------------------------------------------------------------------


@pytest.fixture
def torch() -> Any:
    return pytest.importorskip("torch")


@pytest.fixture
def jax() -> Any:
    return pytest.importorskip("jax")


@pytest.mark.parametrize("dtype", ["bool", "uint8", "int64", "float16", "float32", "float64", "complex64"])
def test_pytorch_both_ways(torch: Any, dtype: str) -> None:
    values = np.arange(6).reshape(2, 3).astype(dtype)
    x = tg.asarray(values)
    theirs = torch.from_dlpack(x)
    np.testing.assert_array_equal(theirs.numpy(), values)
    theirs[0, 0] = 1  # PyTorch writes to what is marked read-only, too
    np.testing.assert_array_equal(x.numpy(), values)
    back = tg.from_dlpack(theirs.T)
    assert back.dtype == dtype and back.shape == (3, 2)
    np.testing.assert_array_equal(back.numpy(), theirs.numpy().T)
    assert np.asarray(back).ctypes.data == theirs.data_ptr()
    assert np.asarray(tg.from_dlpack(theirs, copy=True)).ctypes.data != theirs.data_ptr()


def test_pytorch_shares_where_asked(torch: Any) -> None:
    x = c64([1.0, 2.0])
    assert torch.from_dlpack(x, copy=False).data_ptr() == np.asarray(x).ctypes.data


def test_what_pytorch_refuses(torch: Any) -> None:
    with pytest.raises(BufferError, match="detach"):
        tg.from_dlpack(torch.ones(2, requires_grad=True))
    with pytest.raises(errors.DTypeError, match=r"torch.bfloat16 cannot be imported .* convert it"):
        tg.from_dlpack(torch.ones(2, dtype=torch.bfloat16))


def test_jax_both_ways(jax: Any) -> None:
    x = tg.asarray(np.arange(6, dtype=np.float32).reshape(2, 3))
    theirs = jax.dlpack.from_dlpack(x)
    np.testing.assert_array_equal(np.asarray(theirs), x.numpy())
    back = tg.from_dlpack(theirs)
    assert back.dtype == tg.float32
    same(back + 1, x + 1)


# einops ---------------------------------------------------------------------------------------------------------------

EINOPS: list[Callable[[Any, Any], Any]] = [
    lambda e, x: e.rearrange(x, "a b c -> c (a b)"),
    lambda e, x: e.rearrange(x, "a b (c d) -> (a c) (b d) ()", d=2),
    lambda e, x: e.rearrange([x, x + 1], "l a b c -> a (b l) c"),
    lambda e, x: e.reduce(x, "a b c -> b", "sum"),
    lambda e, x: e.reduce(x, "a (b k) c -> a b c", "mean", k=3),
    lambda e, x: e.reduce(x, "a b c -> a", "max"),
    lambda e, x: e.reduce(x + 1, "a b c -> c", "prod"),
    lambda e, x: e.repeat(x, "a b c -> a (r b) c d", r=2, d=3),
    lambda e, x: e.einsum(x, x, "a b c, a d c -> b d"),
    lambda e, x: e.pack([x, x[:, 0]], "a * c")[0],
    lambda e, x: e.unpack(x, [(1,), (2,)], "a * c")[1],
]


@pytest.mark.parametrize("use", EINOPS)
def test_einops(use: Callable[[Any, Any], Any]) -> None:
    einops = pytest.importorskip("einops")
    got = use(einops, c64(X))
    assert isinstance(got, tg.Tensor)
    np.testing.assert_allclose(got.numpy(), use(einops, X), rtol=1e-15)
    testing.check_grads(lambda x: use(einops, x), (X / 24 + 0.1,), order=2)


def test_einops_on_variables_and_its_facts() -> None:
    einops = pytest.importorskip("einops")
    v = tg.Variable(X)
    with tg.GradientTape() as tape:
        y = einops.reduce(einops.rearrange(v, "a b c -> b (a c)") ** 2, "b d ->", "sum")
    same(tape.gradient(y, v), 2 * X)
    assert einops.parse_shape(c64(X), "a b c") == {"a": 2, "b": 3, "c": 4}
    np.testing.assert_array_equal(einops.asnumpy(c64(X)), X)
    with pytest.raises(einops.EinopsError):
        einops.rearrange(c64(X), "a b -> b a")


@pytest.mark.parametrize("first", ["import einops", "tg.ones(2)"], ids=["einops first", "tapegrad first"])
def test_einops_and_tapegrad_in_either_order(first: str) -> None:
    pytest.importorskip("einops")
    code = f"""
import sys, tapegrad as tg
before = list(sys.meta_path)
{first}
import einops
print(einops.rearrange(tg.ones((2, 3)), "a b -> b a").shape, sys.meta_path == before)"""
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert found.stdout.strip() == "(3, 2) True", found.stderr


def test_an_einops_of_another_make_still_imports(tmp_path: Any) -> None:
    (tmp_path / "einops").mkdir()
    (tmp_path / "einops" / "__init__.py").write_text("from einops import _backends")
    (tmp_path / "einops" / "_backends.py").write_text("")
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import tapegrad as tg; tg.ones(2); import einops"
    assert subprocess.run([sys.executable, "-c", code], timeout=120).returncode == 0


# array-api-compat and array-api-extra ---------------------------------------------------------------------------------


def test_array_api_compat() -> None:
    compat = pytest.importorskip("array_api_compat")
    x = c64(X)
    assert compat.array_namespace(x, 1.0, None) is compat.array_namespace(x, api_version="2024.12") is tg
    assert compat.is_array_api_obj(x) and not compat.is_numpy_array(x)
    assert compat.size(x) == 24 and compat.device(x) is x.device
    assert compat.device(compat.to_device(x, compat.device(x))) is x.device
    with pytest.raises(TypeError, match="Multiple namespaces"):
        compat.array_namespace(x, X)


EXTRA: dict[str, Callable[[Any, Any], Any]] = {
    "cov": lambda e, x: e.cov(x[0]),
    "kron": lambda e, x: e.kron(x[0], x[1]),
    "sinc": lambda e, x: e.sinc(x / 7),
    "atleast_nd": lambda e, x: e.atleast_nd(x, ndim=5),
    "nunique": lambda e, x: e.nunique(x // 5),
    "setdiff1d": lambda e, x: e.setdiff1d(x[0, 0], x[0, 0, 1:3]),
    "one_hot": lambda e, x: e.one_hot(x[0, 0].astype("int64"), 5),
    "lazy_apply": lambda e, x: e.lazy_apply(np.sort, x[0], as_numpy=True),
}


@pytest.mark.parametrize("name", EXTRA)
def test_array_api_extra(name: str) -> None:
    extra = pytest.importorskip("array_api_extra")
    if not hasattr(extra, name):
        pytest.skip(f"this array-api-extra has no {name}")
    got, wanted = EXTRA[name](extra, c64(X)), EXTRA[name](extra, X)
    np.testing.assert_allclose(np.asarray(got), wanted, rtol=1e-12, atol=1e-15)


def test_array_api_extra_has_gradients() -> None:
    extra = pytest.importorskip("array_api_extra")
    testing.check_grads(lambda x: extra.cov(x), (np.random.default_rng(0).normal(size=(3, 5)),), order=2)
    testing.check_grads(lambda x, y: extra.kron(x, y), (X[0], X[1] / 24), order=2)


def test_array_api_extra_writes_to_nothing() -> None:
    """``at`` of that package writes to a copy: to arrays that can be written to, or to JAX's by their own ``at``."""
    extra = pytest.importorskip("array_api_extra")
    x = c64([1.0, 2.0])
    with pytest.raises(errors.ImmutableError, match=r"x.at\[index\].set"):
        extra.at(x)[0].set(3.0)
    same(x, [1.0, 2.0])


# NumPy ----------------------------------------------------------------------------------------------------------------


def test_numpys_functions_pass_gradients() -> None:
    x = c64(X[0] / 24)
    same(gradients(lambda x: np.sum(np.sin(x) * np.copysign(x, -1.0)), [x]), gradients(_plainly, [x]))
    assert isinstance(np.nextafter(x, 1.0), tg.Tensor) and isinstance(np.isin(x, [0.0]), tg.Tensor)
    assert np.result_type(x.dtype, tg.int8) == tg.float64


def _plainly(x: tg.Tensor) -> tg.Tensor:
    return tg.sum(tg.sin(x) * -tg.abs(x))
