"""L-BFGS against its algorithm in NumPy and against torch, and where searches end."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tapegrad as tg
from tapegrad import optim
from tapegrad.errors import DTypeError, GradientError, IntegerWatchWarning, NotATensorError, TapegradError

MATRIX = np.diag([1.0, 3.0, 10.0, 30.0]) + 0.5
START = np.array([1.0, -2.0, 0.5, 3.0])


def rosenbrock(x: Any) -> Any:
    return (1 - x[0]) ** 2 + 100 * (x[1] - x[0] ** 2) ** 2


def numpy_lbfgs(gradient: Callable[[Any], Any], x: Any, steps: int, rate: float, size: int) -> Any:
    """Algorithms 7.4 and 7.5 of Nocedal and Wright, with steps of one length."""
    kept: list[tuple[Any, Any]] = []
    for _ in range(steps):
        g = q = gradient(x)
        weights = []
        for s, y in reversed(kept):
            weights.append((s @ q) / (y @ s))
            q = q - weights[-1] * y
        r = q * (kept[-1][0] @ kept[-1][1] / (kept[-1][1] @ kept[-1][1]) if kept else min(1.0, 1 / abs(g).sum()))
        for (s, y), a in zip(kept, reversed(weights), strict=True):
            r = r + s * (a - (y @ r) / (y @ s))
        new = x - rate * r
        kept = [*kept, (new - x, gradient(new) - g)][-size:]
        x = new
    return x


@pytest.mark.parametrize("size", [1, 3, 20])
@pytest.mark.parametrize("rate", [1.0, 0.3])
def test_without_line_search_it_is_the_algorithm(rate: float, size: int) -> None:
    for steps in (1, 2, 9):
        v = tg.Variable(START)
        optimizer = optim.LBFGS(rate, steps, 99, tolerance_change=0, history_size=size, line_search=None)
        found = optimizer.minimize(lambda v=v: 0.5 * tg.sum(v * (MATRIX @ v)), [v])
        wanted = numpy_lbfgs(lambda x: MATRIX @ x, START, steps, rate, size)
        np.testing.assert_allclose(v.numpy(), wanted, rtol=1e-8, atol=1e-12)
        assert found.iterations == steps and found.evaluations == steps + 1 and int(optimizer.iterations) == steps
        assert found.loss == pytest.approx(0.5 * v.numpy() @ MATRIX @ v.numpy(), rel=1e-12)


def test_like_torch() -> None:
    torch = pytest.importorskip("torch")
    for rate, size in ((1.0, 10), (0.5, 2)):
        v, p = tg.Variable(START), torch.tensor(START, requires_grad=True)
        optim.LBFGS(rate, 8, 99, tolerance_change=0, history_size=size, line_search=None).minimize(
            lambda v=v: tg.sum(tg.cosh(v)), [v]
        )
        theirs = torch.optim.LBFGS([p], rate, 8, 99, tolerance_change=0, history_size=size)

        def loss(theirs: Any = theirs, p: Any = p) -> Any:
            theirs.zero_grad()
            value = torch.cosh(p).sum()
            value.backward()
            return value

        theirs.step(loss)
        np.testing.assert_allclose(v.numpy(), p.detach().numpy(), rtol=1e-8, atol=1e-9)


def test_rosenbrock_takes_as_few_iterations_as_others_do() -> None:
    x = tg.Variable([-1.2, 1.0], dtype="float64")
    found = optim.LBFGS(max_iter=100, tolerance_change=1e-14).minimize(lambda: rosenbrock(x), [x])
    assert found.converged and found.iterations < 45 and found.evaluations < 60
    np.testing.assert_allclose(x.numpy(), [1, 1], rtol=1e-5)


def test_several_variables_and_a_captured_loss() -> None:
    rng = np.random.default_rng(0)
    inputs = rng.normal(size=(60, 3))
    targets = inputs @ np.array([[1.0], [2.0], [-1.0]]) + 0.5

    def run(function: Callable[[Any], Any]) -> tuple[Any, list[Any]]:
        w, b = tg.Variable(np.zeros((3, 1))), tg.Variable(0.0)  # two dtypes
        empty = tg.Variable(np.zeros((0, 2)))

        def loss() -> Any:
            return tg.mean((inputs @ w + tg.astype(b, "float64") - targets) ** 2) + tg.sum(empty)

        found = optim.LBFGS(max_iter=50).minimize(function(loss), [w, b, empty])
        return found, [w.numpy(), b.numpy()]

    plain, values = run(lambda f: f)
    captured, same = run(tg.function)
    assert plain == captured and plain.converged
    assert [x.tobytes() for x in values] == [x.tobytes() for x in same]
    np.testing.assert_allclose(values[0][:, 0], [1, 2, -1], atol=1e-3)
    assert values[1] == pytest.approx(0.5, abs=1e-3) and values[1].dtype == np.float32


def test_a_search_goes_on_from_what_was_saved_copied_or_pickled(tmp_path: Path) -> None:
    def begun() -> tuple[Any, optim.LBFGS]:
        tg.random.seed(3)
        layer = tg.nn.Dense(2, dtype="float64")
        layer(np.ones((1, 3)))
        return layer, optim.LBFGS(max_iter=4, history_size=3, tolerance_change=0)

    def search(layer: Any, optimizer: optim.LBFGS) -> Any:
        x = np.random.default_rng(0).normal(size=(9, 3))
        return optimizer.minimize(lambda: tg.sum(tg.log(tg.cosh(layer(x) - 1))), layer.trainable_variables)

    layer, optimizer = begun()
    search(layer, optimizer)
    layer.save(tmp_path / "m", optimizer)
    again = begun()
    again[0].load(tmp_path / "m", again[1])
    copied, fresh = copy.deepcopy((layer, optimizer)), begun()
    fresh[0].load(tmp_path / "m")
    wanted = search(layer, optimizer)
    for pair in (again, copied):
        assert search(*pair) == wanted
        assert pair[0].kernel.numpy().tobytes() == layer.kernel.numpy().tobytes()
    assert search(*fresh) != wanted  # it has no history
    optimizer.forget(layer.trainable_variables)
    assert int(optimizer.counters["pairs"]) == 0 and optimizer.slots_of(layer.kernel) == {}


def test_why_a_search_ends() -> None:
    v = tg.Variable(START)
    square = lambda: tg.sum(v * v)
    assert optim.LBFGS().minimize(square, [v]).message == "the gradient is within tolerance_grad"
    at_once = optim.LBFGS().minimize(square, [v])
    assert at_once.converged and at_once.iterations == 0 and at_once.evaluations == 1
    v.assign(START)
    assert (
        optim.LBFGS(tolerance_change=1e9).minimize(square, [v]).message == "the last change is within tolerance_change"
    )
    v.assign([-1.2, 1.0, 0.0, 0.0])
    for options, message in (
        ({"max_iter": 3, "max_eval": 99}, "max_iter is reached"),
        ({"max_eval": 3}, "max_eval is reached"),
    ):
        found = optim.LBFGS(**options).minimize(lambda: rosenbrock(v), [v])
        assert not found.converged and found.message == message


def test_a_loss_that_is_not_defined_everywhere() -> None:
    v = tg.Variable(5.0, dtype="float64")
    with np.errstate(all="ignore"):
        found = optim.LBFGS(3.0, max_iter=50).minimize(lambda: v - 2 * tg.log(v), [v])
    assert found.converged and v.item() == pytest.approx(2, rel=1e-6)


def test_where_no_step_makes_the_loss_less_variables_stay() -> None:
    v = tg.Variable(START)

    @tg.custom_gradient
    def wrong(x: Any) -> Any:
        return tg.sum(x * x), lambda ct: -2 * ct * x

    optimizer = optim.LBFGS(max_eval=999)
    for history in (False, True):
        v.assign(START)
        found = optimizer.minimize(lambda: wrong(v), [v])
        assert not found.converged and found.message == "no step makes the loss less", history
        np.testing.assert_array_equal(v.numpy(), START)
        assert int(optimizer.counters["pairs"]) == 0  # it was not trusted any more
        optimizer.minimize(lambda: tg.sum(tg.cosh(v)), [v])
        assert int(optimizer.counters["pairs"]) > 0


def test_after_an_error_variables_are_those_of_the_last_iteration() -> None:
    v, calls = tg.Variable(START), []

    def loss() -> Any:
        calls.append(v.numpy(copy=True))
        if len(calls) == 7:
            raise KeyboardInterrupt
        return tg.sum(tg.cosh(v * [1.0, 2.0, 5.0, 0.3]))

    optimizer = optim.LBFGS()
    with pytest.raises(KeyboardInterrupt):
        optimizer.minimize(loss, [v])
    done, w = int(optimizer.iterations), tg.Variable(START)
    assert done >= 2
    optim.LBFGS(max_iter=done, max_eval=99).minimize(lambda: tg.sum(tg.cosh(w * [1.0, 2.0, 5.0, 0.3])), [w])
    np.testing.assert_array_equal(v.numpy(), w.numpy())


def test_a_search_is_not_recorded() -> None:
    v = tg.Variable([2.0])
    with tg.GradientTape() as tape:
        y = v * v
        optim.LBFGS().minimize(lambda: tg.sum((v - 1) ** 2), [v])
    assert tape.gradient(y, v).tolist() == [4.0]


def test_wrong_use() -> None:
    v, w = tg.Variable(START, name="v"), tg.Variable(1.0, name="w")
    optimizer = optim.LBFGS()
    with pytest.raises(TapegradError, match=r"call minimize\(loss, variables\)"):
        optimizer.apply_gradients([(START, v)])
    with pytest.raises(GradientError, match=r"wanted a real scalar as loss, got float64 \(4,\)"):
        optimizer.minimize(lambda: v * 2, [v])
    with pytest.raises(GradientError, match="the loss is nan where the search begins"):
        optimizer.minimize(lambda: tg.sum(v) * np.nan, [v])
    with pytest.raises(GradientError, match=r'no gradient \(None\) for variable "w"'):
        optimizer.minimize(lambda: tg.sum(v * v), [v, w])
    with pytest.raises(GradientError, match="appears more than once"):
        optimizer.minimize(lambda: tg.sum(v * v), [v, v])
    with pytest.raises(NotATensorError):
        optimizer.minimize(lambda: tg.sum(v * v), [START])  # type: ignore[list-item]
    with pytest.raises(DTypeError, match="of dtype int64"), pytest.warns(IntegerWatchWarning):
        optimizer.minimize(lambda: tg.sum(v * v), [tg.Variable(1)])
    with pytest.raises(TapegradError, match="wanted line_search \"strong_wolfe\" or None, got 'armijo'"):
        optim.LBFGS(line_search="armijo")
    with pytest.raises(TapegradError, match="wanted an integer of at least 1 for history_size, got 0"):
        optim.LBFGS(history_size=0)


def test_within_a_captured_function_it_runs_eagerly() -> None:
    v, optimizer = tg.Variable(START), optim.LBFGS()
    f = tg.function(lambda: optimizer.minimize(lambda: tg.sum(v * v), [v]))
    for _ in range(2):
        v.assign(START)
        assert f().converged
        np.testing.assert_allclose(v.numpy(), np.zeros(4), atol=1e-7)
    assert f.stats.replays == 0 and "depends on values" in str(f.stats.fallbacks)


# torch.optim.LBFGS([x], lr=1, max_iter=n), one step from (-1.2, 1), of PyTorch 2.13.0, by max_iter.
PYTORCH = {
    1: [-0.4898550724637681, 1.289855072463768],
    2: [-0.4898550724637681, 1.289855072463768],
    3: [-0.8216710990752794, 1.0682753957715367],
    4: [-0.9253632377854821, 1.0207786998275232],
    5: [-0.9679198110961271, 1.0040193895843792],
}


@pytest.mark.parametrize("max_iter", PYTORCH)
def test_short_searches_are_pytorchs(max_iter: int) -> None:
    v = tg.Variable([-1.2, 1.0], dtype="float64")
    optim.LBFGS(max_iter=max_iter, line_search=None).minimize(lambda: rosenbrock(v), [v])
    np.testing.assert_allclose(v.numpy(), PYTORCH[max_iter], rtol=1e-12)


@pytest.mark.parametrize("line_search", ["strong_wolfe", None])
@pytest.mark.parametrize("max_eval", [None, 1])
def test_one_iteration_moves(line_search: str | None, max_eval: int | None) -> None:
    v = tg.Variable([-1.2, 1.0], dtype="float64")
    optimizer = optim.LBFGS(max_iter=1, max_eval=max_eval, line_search=line_search)
    end = optimizer.minimize(lambda: tg.sum(v * v), [v])
    assert end.iterations == 1
    assert end.loss == float(tg.sum(v * v)) < 2.44
