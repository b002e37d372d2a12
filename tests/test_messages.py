"""What errors say: the operation, what was expected, what came, and the remedy."""

import numpy as np
import pytest
import scipy.special

import tapegrad as tg
from tapegrad.errors import IntegerWatchWarning, NotATensorError, RecomputeError, ShapeError


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
