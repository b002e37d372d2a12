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


_X, _IDS = np.arange(1.0, 5.0), [0, 1, 1, 0]
_WITH_FRACTIONS = {
    "argpartition": lambda n: tg.argpartition(_X, n),
    "partition": lambda n: tg.partition(_X, [n]),
    "fft": lambda n: tg.fft.fft(_X, n=n),
    "irfft": lambda n: tg.fft.irfft(_X, n=n),
    "fftfreq": lambda n: tg.fft.fftfreq(n),
    "rfftfreq": lambda n: tg.fft.rfftfreq(n),
    "tile": lambda n: tg.tile(_X, n),
    "resize": lambda n: tg.resize(_X, (n, 2)),
    "zeros": lambda n: tg.zeros((n, 2)),
    "full": lambda n: tg.full(n, tg.asarray(1.0)),
    "constant": lambda n: tg.constant(1.0, shape=(n,)),
    "eye": lambda n: tg.eye(3, k=n),
    "identity": lambda n: tg.identity(n),
    "tri": lambda n: tg.tri(n),
    "vander": lambda n: tg.vander(_X, n),
    "geomspace": lambda n: tg.geomspace(1.0, 2.0, n),
    "hamming": lambda n: tg.hamming(n),
    "kaiser": lambda n: tg.kaiser(n, 2.0),
    "one_hot": lambda n: tg.one_hot([0, 1], n),
    "fori_loop": lambda n: tg.fori_loop(0, n, lambda i, s: s + i, 0),
    "indices": lambda n: tg.indices((2, n)),
    "diag_indices": lambda n: tg.diag_indices(n),
    "unravel_index": lambda n: tg.unravel_index([1], (n, 2)),
    "ravel_multi_index": lambda n: tg.ravel_multi_index([[0], [1]], (n, 2)),
    "rot90": lambda n: tg.rot90(tg.eye(3), n),
    "top_k": lambda n: tg.top_k(_X, n),
    "unfold": lambda n: tg.unfold(_X, 0, 2, n),
    "as_strided": lambda n: tg.as_strided(_X, (2,), (1,), n),
    "pad": lambda n: tg.pad(_X, 1, mode="mean", stat_length=n),
    "segment_sum": lambda n: tg.segment_sum(_X, _IDS, n),
    "histogram_bin_edges": lambda n: tg.histogram_bin_edges(_X, np.asarray(n)),
    "solve_banded": lambda n: tg.linalg.solve_banded((n, 1), 9 * tg.eye(int(n) + 2, 1, -1) + tg.ones((1, 4)), _X),
    "welch": lambda n: tg.signal.welch(_X, nperseg=n),
    "stft": lambda n: tg.signal.stft(_X, nperseg=3, noverlap=n),
    "detrend": lambda n: tg.signal.detrend(_X, bp=[n]),
    "choice": lambda n: tg.random.choice(n),
    "integers": lambda n: tg.random.integers(3, n, 4),
    "seed": lambda n: tg.random.seed(n),
}


@pytest.mark.parametrize("name", _WITH_FRACTIONS)
def test_fractions_in_place_of_integers(name):
    call = _WITH_FRACTIONS[name]
    with pytest.raises(ValueError, match=rf"^{name}: .*integer.*help\({name}\)") as failure:
        call(1.5)
    assert isinstance(failure.value, TypeError)
    call(2), call(np.int16(2)), call(np.array(2))


_IMAGE = np.arange(32.0).reshape(1, 2, 4, 4)


@pytest.mark.parametrize(
    "call",
    [
        lambda n: tg.nn.functional.adaptive_avg_pool2d(_IMAGE, n),
        lambda n: tg.nn.functional.adaptive_max_pool2d(_IMAGE, (n, None)),
        lambda n: tg.nn.functional.interpolate(_IMAGE, size=n),
        lambda n: tg.nn.functional.interpolate(_IMAGE, size=(n, 3)),
        lambda n: tg.nn.functional.interpolate(_IMAGE, scale_factor=n),
        lambda n: tg.nn.functional.shift(np.ones((1, 9, 4, 4)), 3, n),
        lambda n: tg.nn.functional.logmeanexp(_IMAGE, n),
        lambda n: tg.nn.functional.layer_norm(_IMAGE[..., :2], n),
        lambda n: tg.nn.LayerNormalization(n)(_IMAGE),
        lambda n: tg.tensordot(_IMAGE[0, 0], _IMAGE[0, 1], n),
        lambda n: tg.histogram2d(_X, _X, n)[0],
        lambda n: tg.histogram(_X, n)[0],
        lambda n: tg.special.multigammaln(_X, n),
        lambda n: tg.vmap(tg.sum, in_axes=n)(_IMAGE),
        lambda n: tg.signal.detrend(_X, bp=n),
        lambda n: tg.array_split(_X, n)[0],
        lambda n: tg.checkpointed_loop(lambda x: x * 2, _X, n, disk=n - 2),
        lambda n: next(iter(tg.training.DataLoader(_X, n, seed=n, prefetch=n))),
        lambda n: tg.training.EarlyStopping(patience=n).patience,
        lambda n: tg.optim.SGD(0.1, gradient_accumulation_steps=n).gradient_accumulation_steps,
    ],
)
def test_integers_of_numpy(call):
    np.testing.assert_array_equal(call(np.int64(2)), call(2))


def test_rates_of_numpy():
    assert tg.nn.Dropout(np.float32(0.5)).rate == 0.5
    np.testing.assert_array_equal(tg.nn.functional.interpolate(_IMAGE, scale_factor=np.float32(1.5)).shape[2:], (6, 6))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: tg.grad(abs, "x")(1.0), "grad: argnums must be the position.*'x'"),
        (lambda: tg.jacfwd(abs, 0.5)(1.0), "jacfwd: argnums must be the position.*0.5"),
        (lambda: tg.optim.EMA(2.0), "EMA.*a list of variables, got float 2.0"),
        (lambda: tg.optim.SGD(0.1).build(5), "SGD.*a list of variables, got int 5"),
        (lambda: tg.optim.SGD(0.1).apply(5, []), "SGD.*a list of gradients, got int 5"),
        (lambda: tg.optim.SGD(0.1).apply_gradients(5), r"SGD.*a list of pairs \(gradient, variable\), got int 5"),
        (lambda: tg.optim.LBFGS(0.1).minimize(lambda: tg.asarray(1.0), 5), "LBFGS.*a list of variables, got int 5"),
        (lambda: tg.optim.schedules.ExponentialDecay("a", 1, 0.1), "ExponentialDecay: initial_learning_rate.*'a'"),
        (lambda: tg.optim.schedules.ExponentialDecay(0.1, "a", 0.1), "ExponentialDecay: decay_steps.*'a'"),
        (lambda: tg.explain("a"), "cannot make a tensor of str"),
        (lambda: tg.partition(_X, []), r"kth=\[\] names no element"),
        (lambda: tg.array_split(_X, 2.5), "array_split: .*indices_or_sections=2.5.*integer"),
        (lambda: tg.astype(_X, "S"), "'S' is not a dtype of numbers"),
        (lambda: tg.zeros(2, dtype=object), "object.*is not a dtype of numbers"),
    ],
)
def test_arguments_of_a_wrong_kind(call, message):
    with pytest.raises(tg.errors.TapegradError, match=message):
        call()


def test_explain_takes_what_has_a_value(capsys):
    tg.explain(5, tg.Variable([1.0]), _X)
    assert [line.partition(":")[0] for line in capsys.readouterr().out.splitlines()] == [
        "int64[]", "float32[1]", "float64[4]",
    ]  # fmt: skip


def test_sections_as_arrays():
    for sections in (3, [1, 3], [-1]):
        for given in (np.array(sections), tg.asarray(sections)):
            for part, wanted in zip(tg.array_split(_X, given), np.array_split(_X, sections), strict=True):
                np.testing.assert_array_equal(part, wanted)
    assert [part.shape for part in tg.split(_X, np.array(2))] == [(2,), (2,)]


_MATRICES, _ROWS = np.stack([np.eye(2), 2 * np.eye(2)]), np.array([[1.0, 3.0], [2.0, 1.0]])


@pytest.mark.parametrize(
    ("name", "f", "xs"),
    [
        ("logm", tg.linalg.logm, _MATRICES),
        ("sqrtm", lambda x: tg.linalg.sqrtm(x * 2), _MATRICES),
        ("roots", tg.roots, _ROWS),
        ("unique", lambda x: tg.unique(x), _ROWS),
        ("nonzero", tg.nonzero, _ROWS),
        ("odeint", lambda y: tg.integrate.odeint(lambda y, t: -y, y, [0.0, 1.0]), _ROWS),
        ("minimize", lambda y: tg.optim.minimize(lambda x: tg.sum((x - y) ** 2), tg.zeros(2)).x, _ROWS),
        ("piecewise", lambda x: tg.piecewise(x, [x > 1], [lambda v: v * 2, lambda v: v]), _ROWS),
        ("while_loop", lambda x: tg.while_loop(lambda s: tg.sum(s) < 9, lambda s: s * 2, x), _ROWS),
    ],
)
def test_functions_that_vmap_cannot_batch(name, f, xs):
    with pytest.raises(tg.errors.DryRunError, match=f"vmap.*: {name} cannot be batched.*loop.*tg.stack"):
        tg.vmap(f)(xs)
    assert len([f(x) for x in xs]) == 2


@pytest.mark.parametrize(
    "f",
    [
        lambda x: x if x[0] > 1 else -x,
        lambda y: tg.integrate.odeint(lambda y, t: -y if y[0] > 0 else y, y, [0.0, 1.0]),
        lambda x: x.numpy(),
        np.asarray,
    ],
)
def test_values_that_the_users_code_reads_in_vmap(f):
    with pytest.raises(tg.errors.DryRunError, match="is read inside.*use where, not `if`"):
        tg.vmap(f)(_ROWS)
