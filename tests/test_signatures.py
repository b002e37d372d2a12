"""Names of arguments are those of NumPy, SciPy and torch.nn.functional where a name is shared."""

import importlib
import inspect
from types import SimpleNamespace

import numpy as np
import pytest
import scipy.integrate
import scipy.linalg
import scipy.signal
import scipy.special

import tapegrad as tg

KINDS = inspect.Parameter
# Results are new arrays in C order; nothing is computed in place.
IN_PLACE = {"out", "order", "subok", "like", "casting"}
# SciPy's permission to overwrite an operand, and its test for NaN.
SCIPY = {"overwrite_a", "overwrite_b", "overwrite_ab", "overwrite_data", "overwrite_input", "check_finite"}
# PyTorch: ``inplace``, and what ``reduction`` has replaced.
TORCH = {"inplace", "size_average", "reduce", "_stacklevel"}
UFUNC = {"out", "where", "casting", "order", "dtype", "subok", "signature", "axes", "axis", "keepdims"}

DIFFERENCES = {
    "array": {"ndmax"},  # objects are no elements here, so nesting has no limit to set
    "nanmean": {"dtype"}, "nanvar": {"dtype", "mean"}, "nanstd": {"dtype", "mean"},  # astype first
    "var": {"mean"}, "std": {"mean"},
    "linalg.expm_frechet": set(), "linalg.logm": {"disp"}, "linalg.sqrtm": {"disp", "blocksize"},
    "special.comb": {"exact", "repetition"}, "special.factorial": {"exact", "extend"},  # floats, with gradients
    "integrate.solve_ivp": {"dense_output", "events", "vectorized"},
    "integrate.odeint": {
        "Dfun", "col_deriv", "full_output", "ml", "mu", "tcrit", "h0", "hmin", "ixpr", "mxhnil", "mxordn", "mxords",
        "printmessg",
    },
    "nn.functional.interpolate": {"antialias"},
    "nn.functional.linear_cross_entropy": {"options"},
    "nn.functional.multi_head_attention_forward": {"static_k", "static_v"},
}  # fmt: skip
"""Arguments that a function of ours lacks deliberately."""

# Draws take their shape first, as TensorFlow's do: ``tg.random`` is not compared with ``numpy.random``.
HOMES = {
    "": [(tg, np)],
    "linalg": [(tg.linalg, np.linalg), (tg.linalg, scipy.linalg)],  # SciPy's where NumPy has none
    "fft": [(tg.fft, np.fft)],
    "special": [(tg.special, scipy.special)],
    "signal": [(tg.signal, scipy.signal)],
    "integrate": [(tg.integrate, scipy.integrate)],
    "Tensor": [(tg.Tensor, np.ndarray)],
}


def parameters(f):
    try:
        return inspect.signature(f).parameters
    except (TypeError, ValueError):
        return None  # written in C, without a signature


def by_name(f):
    return {name for name, p in parameters(f).items() if p.kind in (KINDS.POSITIONAL_OR_KEYWORD, KINDS.KEYWORD_ONLY)}


def compared(home, ours, theirs):
    """Triples of a name and two functions that share it."""
    for name in dir(ours):
        f, peer = getattr(ours, name), getattr(theirs, name, None)
        if name[:1] != "_" and inspect.isroutine(f) and callable(peer) and not inspect.isclass(peer):
            if parameters(peer) is not None:
                yield f"{home}.{name}".removeprefix("."), f, peer


def lacking(name, f, peer):
    allowed = IN_PLACE | SCIPY | TORCH | DIFFERENCES.get(name, set()) | {"self"}
    return by_name(peer) - by_name(f) - (allowed | UFUNC if isinstance(peer, np.ufunc) else allowed)


@pytest.mark.parametrize("home", HOMES)
def test_arguments_of_numpy_and_scipy_are_taken_by_name(home):
    missing, seen = {}, set()
    for ours, theirs in HOMES[home]:
        for name, f, peer in compared(home, ours, theirs):
            if name not in seen and (lack := lacking(name, f, peer)):
                missing[name] = lack
            seen.add(name)
    assert len(seen) >= 5
    assert not missing


def test_arguments_of_pytorch_are_taken_by_name():
    functional = pytest.importorskip("torch").nn.functional
    names = list(compared("nn.functional", tg.nn.functional, functional))
    assert len(names) > 70
    assert not {name: lack for name, f, peer in names if (lack := lacking(name, f, peer))}


def test_a_difference_that_is_none_is_not_listed():
    for name, allowed in DIFFERENCES.items():
        home, _, function = name.rpartition(".")
        f = getattr(importlib.import_module(f"tapegrad.{home}") if home else tg, function)
        assert not allowed & by_name(f), name


def test_the_comparison_notices_a_missing_name():
    peer = SimpleNamespace(take=lambda a, index: None).take
    assert lacking("take", tg.take, peer) == {"index"}


MODULES = [
    "", "distributed", "fft", "integrate", "linalg", "memory", "nn.functional", "random", "signal", "sparse",
    "special", "testing",
]  # fmt: skip


@pytest.mark.parametrize("module", MODULES)
def test_every_argument_of_a_public_function_can_be_given_by_name(module):
    home = importlib.import_module(f"tapegrad.{module}" if module else "tapegrad")
    functions = [(name, f) for name in home.__all__ if inspect.isfunction(f := getattr(home, name))]
    assert functions
    for name, f in functions:
        assert all(p.kind is not p.POSITIONAL_ONLY for p in parameters(f).values()), name


x = np.arange(6.0).reshape(2, 3)
CALLS = {
    "repeat": {"a": x, "repeats": 2, "axis": 1},
    "moveaxis": {"a": x, "source": 0, "destination": 1},
    "swapaxes": {"a": x, "axis1": 0, "axis2": 1},
    "take": {"a": x, "indices": [0, 2], "axis": 1},
    "tile": {"A": x, "reps": (2, 1)},
    "split": {"ary": x, "indices_or_sections": 3, "axis": 1},
    "searchsorted": {"a": x[1], "v": 3.5},
    "eye": {"N": 2, "M": 3, "dtype": float},
    "stack": {"arrays": [x, x], "axis": 1, "dtype": "float32"},
    "hstack": {"tup": [x, x], "dtype": "float32"},
    "vstack": {"tup": [x, x], "dtype": "float32"},
    "partition": {"a": x, "kth": 1, "kind": "introselect"},
    "isin": {"element": x, "test_elements": [1.0], "kind": "sort"},
    "unique": {"ar": x, "sorted": True},
    "sinc": {"x": x},
    "finfo": {"dtype": "float32"},
    "roll": {"a": x, "shift": 1, "axis": 0},
    "tensordot": {"a": x, "b": x.T, "axes": 1},
    "diff": {"a": x, "n": 1},
    "linalg.norm": {"x": x, "ord": 2},
    "linalg.matrix_power": {"a": x[:, :2], "n": 2},
    "fft.fft": {"a": x, "n": 4},
}


@pytest.mark.parametrize("name", CALLS)
def test_calls_by_numpys_keywords_give_numpys_values(name):
    ours, theirs = tg, np
    for part in name.split("."):
        ours, theirs = getattr(ours, part), getattr(theirs, part)
    result, expected = ours(**CALLS[name]), theirs(**CALLS[name])
    if name == "finfo":
        result, expected = result.eps, expected.eps
    parts = zip(result, expected, strict=True) if isinstance(result, tuple) else [(result, expected)]
    for a, b in parts:
        assert np.shape(a) == np.shape(b)
        assert getattr(a, "dtype", None) == getattr(b, "dtype", None) or name == "finfo"
        np.testing.assert_allclose(np.asarray(a), b)


METHODS = {
    "argsort": {"axis": 0},
    "astype": {"dtype": "float32"},
    "clip": {"min": 1, "max": 2},
    "repeat": {"repeats": 2},
    "round": {"decimals": 1},
    "take": {"indices": [0, 1], "axis": 1, "mode": "clip"},
}


@pytest.mark.parametrize("name", METHODS)
def test_methods_by_keyword(name):
    np.testing.assert_array_equal(getattr(tg.asarray(x), name)(**METHODS[name]), getattr(x, name)(**METHODS[name]))


def test_functions_of_scipy_and_pytorch_by_keyword():
    np.testing.assert_allclose(tg.special.xlogy(x=x, y=x + 1), scipy.special.xlogy(x, x + 1))
    np.testing.assert_allclose(tg.special.multigammaln(a=x + 3, d=2), scipy.special.multigammaln(x + 3, 2))
    np.testing.assert_array_equal(tg.nn.functional.relu(input=x - 2), np.maximum(x - 2, 0))
    assert tg.nn.functional.tanh(input=0.0) == 0


def test_a_wrong_number_of_arguments_names_them():
    with pytest.raises(TypeError, match=r"xlogy: takes 2 arguments \(x, y\), got 1"):
        tg.special.xlogy(1.0)
    with pytest.raises(TypeError, match="'y'"):
        tg.special.xlogy(x=1.0)
