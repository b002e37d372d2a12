"""NumPy's, SciPy's and CuPy's functions called with tensors are ours, with their derivatives."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import scipy.special

import tapegrad as tg
from tapegrad.errors import DetachedError, ImmutableError, NoGradientError

X = np.linspace(0.1, 1.2, 6).reshape(2, 3)

UFUNCS = {
    "reduce": lambda x: np.add.reduce(x),
    "reduce over axes": lambda x: np.multiply.reduce(x, axis=(0, 1), keepdims=True),
    "maximum": lambda x: np.maximum.reduce(x, axis=1),
    "accumulate": lambda x: np.add.accumulate(x, axis=1),
    "accumulate, axis 0": lambda x: np.multiply.accumulate(x),
    "outer": lambda x: np.arctan2.outer(x, x[0]),
    "idle arguments": lambda x: np.exp(x, where=True, casting="same_kind", order="K"),
    "dtype": lambda x: np.sin(x, dtype=np.float64),
    "scipy": lambda x: scipy.special.erf(x) + scipy.special.expit(x),
    "einsum": lambda x: np.einsum("ij,kj->ik", x, x, optimize=False),
    "array first": lambda x: np.float64(2) * x + np.ones(3) - x,
}


@pytest.mark.parametrize("name", UFUNCS)
def test_values_and_gradients(name):
    f = UFUNCS[name]
    got = f(tg.asarray(X))
    assert isinstance(got, tg.Tensor)
    np.testing.assert_allclose(got.numpy(), f(X), rtol=1e-15, atol=1e-16)
    tg.testing.check_grads(f, (X,), order=2)


def test_what_asks_for_more_is_refused():
    t = tg.asarray(X)
    for call in (lambda: np.add.at(t, 0, 1.0), lambda: np.exp(t, where=X > 0.5), lambda: np.hypot.reduce(t)):
        with pytest.raises(TypeError, match="does not take tensors"):
            call()
    a = X.copy()
    with pytest.raises(ImmutableError, match="not x \\+= t"):
        a += t
    np.testing.assert_array_equal(a, X)
    with pytest.raises(ImmutableError, match="out"):
        t.sum(0, None, a)


def test_methods_take_numpys_arguments_in_numpys_order():
    t = tg.asarray(X)
    np.testing.assert_allclose(t.sum(0, None, None, True).numpy(), X.sum(0, None, None, True))
    np.testing.assert_allclose(t.var(1, None, None, 1).numpy(), X.var(1, None, None, 1))
    np.testing.assert_allclose(t.max(1, None, True).numpy(), X.max(1, None, True))
    assert int(t.argmax(None, None)) == 5


class Kernel(SimpleNamespace):
    """What CuPy hands over: a kernel with a name and numbers of operands, callable with arrays."""

    def __call__(self, *args, **kwargs):
        return self.run(*args, **kwargs)


def test_cupys_own_kernels_are_our_functions():
    t = tg.asarray(X)
    for name, f in {"cupy_exp": tg.exp, "cupy_true_divide": tg.divide, "cupy_absolute": tg.abs}.items():
        args = (t, 2.0) if name == "cupy_true_divide" else (t,)
        got = t.__cupy_override_elementwise_kernel__(Kernel(name=name, nin=len(args)), *args)
        np.testing.assert_array_equal(got.numpy(), f(*args).numpy())
    got = t.__cupy_override_reduction_kernel__(Kernel(name="cupy_sum"), 1, None, None, True)
    np.testing.assert_array_equal(got.numpy(), X.sum(1, keepdims=True))
    wide = t.__cupy_override_reduction_kernel__(Kernel(name="cupy_sum"), 1, "complex128")
    assert wide.dtype == tg.complex128 and np.array_equal(wide.numpy(), X.sum(1))
    np.testing.assert_array_equal(t.__cupy_override_reduction_kernel__(Kernel(name="cupy_max"), 1).numpy(), X.max(1))


def test_a_users_kernel_runs_and_has_no_gradient():
    kernel = Kernel(name="mine", nin=2, run=lambda x, y, **_: x * y + 1)
    t = tg.asarray(X)
    got = t.__cupy_override_elementwise_kernel__(kernel, t, tg.Variable(X))
    np.testing.assert_array_equal(got.numpy(), X * X + 1)
    with pytest.raises(NoGradientError, match="mine: has no gradient"):
        tg.grad(lambda x: tg.sum(x.__cupy_override_elementwise_kernel__(kernel, x, X)))(X)
    with pytest.raises(ImmutableError, match="outputs"):
        t.__cupy_override_elementwise_kernel__(kernel, t, t, np.empty_like(X))
    reduction = Kernel(name="norm", run=lambda x, axis, keepdims: (x * x).sum(axis, keepdims=keepdims))
    np.testing.assert_allclose(t.__cupy_override_reduction_kernel__(reduction, 0).numpy(), (X * X).sum(0))


def test_cupy_itself_asks():
    cupy = pytest.importorskip("cupy")
    if not hasattr(cupy, "ElementwiseKernel"):
        pytest.skip("a stand-in for CuPy launches no elementwise kernels of its own")
    t = tg.asarray(X)
    np.testing.assert_array_equal(cupy.exp(t).numpy(), np.exp(X))
    np.testing.assert_array_equal(cupy.add(1.0, t).numpy(), 1.0 + X)
    np.testing.assert_array_equal(cupy.sum(t, axis=0, keepdims=True).numpy(), X.sum(0, keepdims=True))
    np.testing.assert_allclose(tg.grad(lambda x: cupy.sum(cupy.square(x)))(X).numpy(), 2 * X)


def test_a_dtype_is_that_of_the_answer():
    t = tg.asarray(np.array([np.nan, 1.0, -2.5]))
    for f in (np.isnan, np.isfinite, np.signbit):
        np.testing.assert_array_equal(f(t, dtype=bool).numpy(), f(t.numpy(), dtype=bool))
    np.testing.assert_array_equal(np.less(t, 0.5, dtype=bool).numpy(), [False, False, True])
    small = tg.asarray(np.array([100, 100], np.int32))
    for f in (np.add.reduce, np.add.accumulate):
        got, wanted = f(small, dtype=np.int8), f(small.numpy(), dtype=np.int8)
        assert got.dtype == wanted.dtype
        np.testing.assert_array_equal(got.numpy(), wanted)
    assert np.sin(t, dtype="f4").dtype == tg.float32
    np.testing.assert_array_equal(np.maximum.accumulate(small).numpy(), [100, 100])


def test_what_is_differentiated_is_not_made_an_array_by_the_way():
    for f in (
        lambda a: tg.sum(np.array([a[0], a[1]])),
        lambda a: tg.sum(np.sin([a[0], a[1]])),
        lambda a: np.asarray(a),
    ):
        with pytest.raises(DetachedError, match="being differentiated"):
            tg.grad(f)(X[0])
        with pytest.raises(DetachedError, match="being differentiated"):
            tg.jvp(lambda a, f=f: tg.asarray(f(a)), (X[0],), (X[0],))
    constant = tg.grad(lambda a: tg.sum(a * tg.stop_gradient(a).numpy()))(X[0])
    np.testing.assert_array_equal(constant.numpy(), X[0])
    with tg.GradientTape() as tape:  # as in TensorFlow
        t = tg.asarray(X[0])
        tape.watch(t)
        y = tg.sum(tg.asarray(np.asarray(t)))
    assert tape.gradient(y, t) is None


def test_a_function_of_numpys_is_looked_at_once(monkeypatch):
    """To ask for a signature takes longer than most calls."""
    t = tg.asarray(np.arange(3.0))
    np.concatenate([t, t])
    np.sum(t, 0)

    def asked(f):
        raise AssertionError(f"asked for the signature of {f}")

    monkeypatch.setattr("inspect.signature", asked)
    assert np.concatenate([t, t]).shape == (6,) and np.sum(t, 0).item() == 3.0


@pytest.mark.parametrize("name", ["put", "place", "putmask", "put_along_axis", "copyto"])
def test_functions_that_write_into_an_array_are_refused(name):
    array, values = np.zeros((2, 2)), tg.ones(2)
    args = {
        "put": ([0, 1], values), "place": (array == 0, values), "putmask": (array == 0, values), "copyto": (values,),
        "put_along_axis": (np.zeros((1, 2), int), values, 0),
    }[name]  # fmt: skip
    with pytest.raises(ImmutableError, match=f"numpy.{name} writes into its first argument.*use"):
        getattr(np, name)(array, *args)
    assert not array.any()
