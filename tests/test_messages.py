"""What errors say: the operation, what was expected, what came, and the remedy."""

import ast
import functools
import inspect
import traceback
from pathlib import Path

import numpy as np
import pytest
import scipy.special

import tapegrad as tg
from tapegrad.errors import DomainError, IntegerWatchWarning, NotATensorError, RecomputeError, ShapeError


@pytest.mark.parametrize("optimizer", [tg.optim.Adam, tg.optim.SGD, tg.optim.RMSprop, tg.optim.Lion])
@pytest.mark.parametrize("container", [list, tuple, lambda vs: vs[0]])
def test_variables_in_place_of_the_learning_rate(optimizer, container):
    variables = [tg.Variable([1.0, 2.0]), tg.Variable(3.0)]
    with pytest.raises(
        NotATensorError, match=r"learning rate comes first.*apply_gradients\(zip\(gradients, variables\)\)"
    ):
        optimizer(container(variables))


@pytest.mark.parametrize("value", ["0.1", {}, object(), []])
def test_hyperparameters_that_are_no_numbers(value):
    with pytest.raises(NotATensorError, match="learning_rate must be a number"):
        tg.optim.Adam(value)
    with pytest.raises(NotATensorError, match="beta_1 must be a number"):
        tg.optim.Adam(0.1, beta_1=value)


@pytest.mark.parametrize(
    "draw",
    [
        lambda: tg.random.uniform(0, 1, (3,)),
        lambda: tg.random.normal(0.0, 1.0, (3,)),
        lambda: tg.random.uniform(-1, 1, 3),
        lambda: tg.random.randint(0, 10, (3,)),
        lambda: tg.random.beta(2, 3, (4, 2)),
        lambda: tg.random.gamma(2.0, 1.0, (3,)),
    ],
)
def test_draws_with_the_size_at_the_end(draw):
    with pytest.raises(ValueError, match="the shape comes first.*shape="):
        draw()


def test_parameters_of_draws_may_be_lists():
    x = tg.random.uniform((4, 2), [0.0, 10.0], [1.0, 11.0]).numpy()
    assert (x[:, 0] <= 1).all() and (x[:, 1] >= 10).all()
    assert tg.random.normal((4, 2), mean=[0.0, 100.0]).numpy()[:, 1].min() > 50
    with pytest.raises(NotATensorError, match="random.uniform"):
        tg.random.uniform(2, "a")


@pytest.mark.parametrize("value", [[1.0], np.ones(2), 1.0, None])
def test_the_class_is_no_constructor_of_values(value):
    with pytest.raises(NotATensorError, match=r"tg\.asarray\(x\)"):
        tg.Tensor(value)


@pytest.mark.parametrize("name", ["fftn", "ifftn", "rfftn", "irfftn", "hfftn"])
def test_one_axis_of_a_transform_along_several(name):
    x, f = np.arange(6.0).reshape(2, 3), getattr(tg.fft, name)
    np.testing.assert_array_equal(f(x, axes=-1), f(x, axes=(-1,)))
    np.testing.assert_array_equal(f(x, s=4, axes=0), f(x, s=(4,), axes=(0,)))
    with pytest.raises(ShapeError, match=f"{name}: axes is one integer or a sequence"):
        f(x, axes="a")


def test_an_iterator_as_an_argument_of_a_checkpoint():
    w = tg.Variable([1.0, 2.0])
    f = tg.recompute_grad(lambda xs: sum(x * x for x in xs))
    with tg.GradientTape():
        for one_pass in ((v for v in [w, w]), iter([w, w]), map(abs, [w]), zip([w])):
            with pytest.raises(RecomputeError, match="read only once.*pass a list"):
                f(one_pass)
    with tg.GradientTape() as tape:
        y = f([w, w])
    np.testing.assert_array_equal(tape.gradient(y, w), [4.0, 8.0])


def test_complex_logsumexp():
    x = np.array([[1 + 2j, 3j, -1], [800, 801 + 1j, 5]])
    np.testing.assert_allclose(tg.logsumexp(x, axis=1), scipy.special.logsumexp(x, axis=1), rtol=1e-14)


def test_gradients_of_integers_are_none_with_a_warning():
    w, n = tg.Variable([1.0, 2.0]), tg.Variable(3, name="steps")
    with tg.GradientTape(persistent=True) as tape:
        y = w * w
    with pytest.warns(IntegerWatchWarning, match='variable "steps" is int64'):
        assert tape.gradient(y, [w, n])[1] is None
    with pytest.warns(IntegerWatchWarning, match="a source is int32"):
        tape.jacobian(y, tg.asarray(1, dtype="int32"))
    assert tape.gradient(y, tg.asarray(1.0)) is None  # not watched: silently, as in TensorFlow


# Arguments of a wrong kind: every public function says its own name and what it got.

WRONG = [
    "text", None, 3, -7, 1.5, b"x", ("a",), [1.0, 2.0], [[1.0], [1.0, 2.0]], {"a": 1.0}, object(), np.ones((2, 3, 4)),
    lambda: 1,
]  # fmt: skip
HOMES = {
    "": tg, "nn.functional": tg.nn.functional, "linalg": tg.linalg, "fft": tg.fft, "special": tg.special,
    "random": tg.random, "signal": tg.signal, "sparse": tg.sparse, "integrate": tg.integrate, "optim": tg.optim,
}  # fmt: skip
# What an integer to the power of a negative array gives depends on values, and NumPy says so in its own words.
BY_VALUE = {"pow", "power"}
# These change the settings of the process.
NOT_CALLED = {"set_default_device", "set_num_threads", "set_default_dtype", "seed"}
PACKAGE = str(Path(tg.__file__).parent)


def wrong_calls(f):
    """Calls with each wrong thing in place of each argument, and of all."""
    ps = list(inspect.signature(f).parameters.values())
    required = [p for p in ps if p.kind is p.POSITIONAL_OR_KEYWORD and p.default is p.empty]
    count = len(required) + (not required and any(p.kind is p.VAR_POSITIONAL for p in ps))
    right = [np.ones((2, 2))] * count
    for wrong in WRONG:
        yield [wrong] * count, {}
        for i in range(count):
            yield [*right[:i], wrong, *right[i + 1 :]], {}
        for p in ps:
            if p.default is not p.empty:
                yield right, {p.name: wrong}
    yield right, {"no_such_argument": 1}


def is_deliberate(error):
    """Whether it says what is wrong: one of ours, one raised in this package, or Python's about the call itself."""
    if isinstance(error, tg.errors.TapegradError):
        return True
    if "got an unexpected keyword argument" in str(error):
        return True
    frames = [(frame, line) for frame, line in traceback.walk_tb(error.__traceback__)]
    ours = [(frame, line) for frame, line in frames if frame.f_code.co_filename.startswith(PACKAGE)]
    if not ours or ours[-1][0].f_code.co_filename.endswith("spellings.py"):
        return True
    frame, line = ours[-1]
    return frames[-1][0] is frame and line in raise_lines(frame.f_code.co_filename)


@functools.cache
def raise_lines(file):
    nodes = (n for n in ast.walk(ast.parse(Path(file).read_text())) if isinstance(n, ast.Raise))
    return {line for n in nodes for line in range(n.lineno, n.end_lineno + 1)}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("home", HOMES)
def test_wrong_arguments_end_in_messages_of_ours(home, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    functions = {n: f for n in HOMES[home].__all__ if inspect.isfunction(f := getattr(HOMES[home], n))}
    bare, calls = [], 0
    for name in sorted(functions.keys() - NOT_CALLED - BY_VALUE):
        for args, kwargs in wrong_calls(functions[name]):
            calls += 1
            try:
                functions[name](*args, **kwargs)
            except (TypeError, ValueError, AttributeError, IndexError, KeyError) as error:
                if not is_deliberate(error):
                    bare.append(f"{name}: {type(error).__name__}: {error}")
            except Exception:  # of another kind: an index, memory, arithmetic
                pass
    assert calls > 20
    assert not bare, "\n".join(sorted(set(bare))[:40])


def test_an_unusable_argument_is_named_with_the_function():
    with pytest.raises(
        tg.errors.ArgumentError, match=r"bartlett: cannot be called with M='text'.*help\(bartlett\)"
    ) as e:
        tg.bartlett("text")
    assert isinstance(e.value, TypeError) and isinstance(e.value, ValueError) and e.value.__cause__ is not None
    with pytest.raises(TypeError, match=r"random.uniform|uniform: cannot be called with generator='text'"):
        tg.random.uniform(generator="text")
    with pytest.raises(tg.errors.ArgumentError, match=r"a=ndarray of shape \(2, 2\), axis=\(1.5,\)|axis"):
        tg.roll(np.ones((2, 2)), 1, axis=(np.ones(2),))


def test_errors_of_users_functions_pass_as_they_are():
    def f(x):
        return x + len(3)  # type: ignore[arg-type]

    for call in (
        lambda: tg.jvp(f, (1.0,), (1.0,)),
        lambda: tg.vjp(f, 1.0),
        lambda: tg.fori_loop(0, 2, lambda i, s: f(s), 0.0),
    ):
        with pytest.raises(TypeError, match="has no len") as e:
            call()
        assert not isinstance(e.value, tg.errors.TapegradError)


def test_a_missing_argument_is_named_with_the_operation():
    for call in (lambda: tg.nn.functional.mse_loss(np.ones(2)), lambda: tg.nn.functional.layer_norm(np.ones(2))):
        with pytest.raises(TypeError, match="(mse_loss|layer_norm).*missing"):
            call()
    with pytest.raises(DomainError, match="arange: a step of 0"):
        tg.arange(0, 1, 0)
    with pytest.raises(TypeError, match="split: .*integer"):
        tg.split(np.arange(6.0), [2.5])
