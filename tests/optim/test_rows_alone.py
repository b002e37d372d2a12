"""Steps by gradients of some rows alone: which rows change, to what, what it costs, and that no value held changes."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from checks import bits_equal
from rows_cases import captured_by_turns, training

import tapegrad as tg
from tapegrad import nn, optim
from tapegrad.errors import DTypeError, GradientError

torch = pytest.importorskip("torch")

ROWS = [[3, 1, 3], [0], [], [5, 5, 5, 2]]
"""What four steps name."""
EXACT: dict[str, Callable[..., optim.Optimizer]] = {
    "sgd": lambda **o: optim.SGD(0.1, **o),
    "adagrad": lambda **o: optim.Adagrad(0.1, **o),
}
LAZY: dict[str, tuple[Callable[..., optim.Optimizer], Callable[..., optim.Optimizer]]] = {
    "adam": (lambda **o: optim.LazyAdam(0.1, **o), lambda **o: optim.Adam(0.1, **o)),
    "adamw": (lambda **o: optim.LazyAdamW(0.1, 0.5, **o), lambda **o: optim.AdamW(0.1, 0.5, **o)),
    "nesterov": (lambda **o: optim.LazySGD(0.1, 0.9, True, **o), lambda **o: optim.SGD(0.1, 0.9, True, **o)),
}
DENSE: dict[str, Callable[..., optim.Optimizer]] = {
    "momentum": lambda **o: optim.SGD(0.1, 0.9, **o),
    "decay": lambda **o: optim.SGD(0.1, weight_decay=0.5, **o),
    "adam": lambda **o: optim.Adam(0.1, **o),
    "rmsprop": lambda **o: optim.RMSprop(0.1, **o),
    "lamb": lambda **o: optim.LAMB(0.1, **o),
}
ALL = {**EXACT, **{f"lazy {name}": lazy for name, (lazy, _) in LAZY.items()}}


def table(shape: tuple[int, ...] = (40, 16), dtype: Any = np.float32) -> tg.Variable:
    return tg.Variable(np.random.default_rng(5).normal(size=shape).astype(dtype), name="table")


def gradients(v: tg.Variable) -> Iterator[tg.IndexedSlices]:
    rng = np.random.default_rng(6)
    for at in ROWS:
        values = rng.normal(size=(len(at), *v.shape[1:])).astype(v.dtype)
        yield tg.IndexedSlices(values, np.array(at, np.int64), v.shape)


def state(optimizer: optim.Optimizer) -> list[Any]:
    return [x.numpy(copy=True) for x in optimizer.variables]


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("shape", [(40, 16), (6, 2), (40, 3, 5), (600,), (40, 0)], ids=str)
@pytest.mark.parametrize("name", [*EXACT, *DENSE])
def test_the_bits_of_a_step_by_the_whole_array(name: str, shape: tuple[int, ...], dtype: Any) -> None:
    """Where a row without a gradient stays as it is anyway, and of all that are not lazy."""
    make = (EXACT | DENSE)[name]
    v, w, one, other = table(shape, dtype), table(shape, dtype), make(), make()
    for g in gradients(v):
        one.apply([g], [v])
        other.apply([g.to_dense()], [w])
        assert bits_equal(v.value(), w.value())
    for a, b in zip(state(one), state(other), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("name", LAZY)
def test_lazy_steps_are_the_plain_ones_of_the_rows_named(name: str) -> None:
    """Each row has the history of a table that is stepped when it is named; the number of the step is that of all."""
    lazy, plain = (make() for make in LAZY[name])
    v, each = table(), {}
    rows = {k: tg.Variable(v.numpy()[k : k + 1]) for k in range(40)}
    for step, g in enumerate(gradients(v)):
        lazy.apply([g], [v])
        whole = g.to_dense()
        for k in set(ROWS[step]):
            each.setdefault(k, LAZY[name][1]())
            each[k].iterations.assign(step)
            each[k].apply([whole[k : k + 1]], [rows[k]])
        assert bits_equal(v.value(), tg.concat([rows[k] for k in range(40)]))
    assert int(lazy.iterations) == len(ROWS)
    for slot, values in lazy.slots_of(v).items():
        for k, optimizer in each.items():
            assert bits_equal(values.value()[k : k + 1], optimizer.slots_of(rows[k])[slot].value())
    dense = tg.ones_like(v)  # a whole array makes the plain step
    w, again = tg.Variable(v), copy.deepcopy(plain)
    fresh = LAZY[name][0]()
    fresh.apply([dense], [v])
    again.apply([dense], [w])
    assert bits_equal(v.value(), w.value())


TORCH: dict[str, tuple[Callable[[], optim.Optimizer], Callable[[Any], Any]]] = {
    "sgd": (lambda: optim.SGD(0.1), lambda p: torch.optim.SGD(p, 0.1)),
    "momentum": (lambda: optim.SGD(0.1, 0.9), lambda p: torch.optim.SGD(p, 0.1, momentum=0.9)),
    "adagrad": (
        lambda: optim.Adagrad(0.1, initial_accumulator_value=0.0, epsilon=1e-60),
        lambda p: torch.optim.Adagrad(p, 0.1, eps=1e-30),
    ),
    "sparse adam": (
        lambda: optim.LazyAdam(0.1, 0.8, 0.95, 1e-8),
        lambda p: torch.optim.SparseAdam(p, 0.1, betas=(0.8, 0.95), eps=1e-8),
    ),
}


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
@pytest.mark.parametrize("name", TORCH)
def test_it_is_what_torch_does(name: str) -> None:
    """``torch.nn.Embedding(sparse=True)``, trained; rows named twice, and steps that name other rows."""
    ours, theirs = TORCH[name]
    layer = nn.Embedding(40, 16, sparse=True, dtype="float64")
    layer([0])
    other = torch.nn.Embedding(40, 16, sparse=True, dtype=torch.float64)
    other.weight.data = torch.tensor(layer.embeddings.numpy(copy=True))
    mine, yours = ours(), theirs(list(other.parameters()))
    for at in ([3, 1, 3], [0, 1], [5, 5, 5, 2], [3, 39]):
        with tg.GradientTape() as tape:
            loss = tg.sum(layer(at) ** 3)
        mine.apply([tape.gradient(loss, layer.embeddings)], [layer.embeddings])
        yours.zero_grad()
        (other(torch.tensor(at)) ** 3).sum().backward()
        yours.step()
        np.testing.assert_allclose(layer.embeddings, other.weight.detach().numpy(), rtol=1e-9, atol=1e-12)


# Costs ---------------------------------------------------------------------------------------------------------------


def cost_of_a_step(make: Callable[[], optim.Optimizer], v: tg.Variable) -> tuple[int, int]:
    """Bytes alive at once above those before, and bytes moved, of gradient and step; the state is there before."""
    step, at = training(v, make()), [3, 77_777]
    step(at)
    with tg.measure() as m:
        before = m.live_bytes
        step(at)
    return m.peak_bytes - before, m.bytes_moved


def test_two_rows_cost_two_rows() -> None:
    """Of a table of 25.6 MB: of the variable and of every slot rows are read and written, nothing else."""
    v = table((100_000, 64))
    for make in ALL.values():
        peak, moved = cost_of_a_step(make, v)
        assert peak < 40 * 2 * 64 * 4 and moved < 80 * 2 * 64 * 4
    peak, moved = cost_of_a_step(lambda: optim.Adam(0.1), v)
    assert peak >= v.nbytes and moved > 6 * v.nbytes  # a pass over table, m and v


@pytest.mark.parametrize("name", ALL)
def test_two_rows_of_a_captured_step_cost_two_rows(name: str) -> None:
    """Once nobody else holds what the variables hold: rows are written over the old ones when all works are done."""
    v, at = table((100_000, 64)), tg.asarray(np.array([3, 77_777]))
    eager, _ = cost_of_a_step(ALL[name], v)
    f = tg.function(training(v, ALL[name]()))
    for _ in range(5):
        f(at)
    with tg.measure() as m:
        before = m.live_bytes
        f(at)
    assert f.stats.replays >= 3 and not f.stats.fallbacks
    assert m.peak_bytes - before < 40 * 2 * 64 * 4 and m.bytes_moved < 80 * 2 * 64 * 4
    assert f.plan(at).arena_bytes < 40 * 2 * 64 * 4 < v.nbytes / 100


def test_a_prediction_knows_it() -> None:
    v = table((10_000, 64))
    step = partial(training(v, optim.LazyAdam(0.1)), [3, 7])
    with tg.measure():
        step()  # constants are made once
    predicted = tg.memory.predict_peak(step)
    with tg.measure() as m:
        step()
    assert predicted.peak_bytes - predicted.live_bytes == m.peak_bytes - m.live_bytes < v.nbytes / 10
    assert predicted.bytes_moved == m.bytes_moved


# Values that somebody holds -------------------------------------------------------------------------------------------


def step(v: tg.Variable, optimizer: optim.Optimizer | None = None) -> None:
    g = tg.IndexedSlices(tg.ones((2, *v.shape[1:]), dtype=v.dtype), [1, 3], v.shape)
    (optimizer or optim.SGD(0.5)).apply([g], [v])


HOLDERS: dict[str, Callable[[tg.Variable], Any]] = {
    "array": lambda v: v.numpy(),
    "view of an array": lambda v: v.numpy()[1:2],
    "value": lambda v: v.value(),
    "slice": lambda v: v[1:4],
    "pending": lambda v: tg.reshape(v, (-1,)) * 2.0,
    "variable": tg.Variable,
    "dlpack": lambda v: np.from_dlpack(v.value()),
    "transposed": lambda v: v.value().mT,
    "torch": lambda v: torch.from_dlpack(v.value()),
}


def numbers(x: Any) -> Any:
    return x.numpy().copy() if hasattr(x, "numpy") else x.copy()


@pytest.mark.parametrize("shape", [(40, 16), (4, 4), (4000, 64)], ids=str)
@pytest.mark.parametrize("holder", HOLDERS)
def test_a_value_that_is_held_does_not_change(holder: str, shape: tuple[int, ...]) -> None:
    v = table(shape)
    step(v)  # from now on the memory is the variable's own
    before = v.numpy(copy=True)
    wanted = numbers(HOLDERS[holder](tg.Variable(before)))
    held = HOLDERS[holder](v)
    step(v)
    np.testing.assert_array_equal(numbers(held), wanted)
    changed = before.copy()
    changed[[1, 3]] -= 0.5
    np.testing.assert_array_equal(v, changed)
    del held
    step(v)
    changed[[1, 3]] -= 0.5
    np.testing.assert_array_equal(v, changed)


def test_tapes_and_checkpoints_see_the_values_of_their_time() -> None:
    """Between forward and backward the table changes: what rules read, and what reruns read, does not."""
    at = np.array([1, 2])
    for wrap in (lambda f: f, tg.recompute_grad):
        v = table()
        step(v)
        f = wrap(lambda: tg.sum(tg.tanh(tg.take(v, at, axis=0, sparse_grad=True) @ v.value().mT)))  # noqa: B023
        with tg.GradientTape() as tape:
            wanted = f()
        wanted = tape.gradient(wanted, v)
        with tg.GradientTape() as tape:
            y = f()
        step(v)
        assert bits_equal(tape.gradient(y, v), wanted)


def test_a_budget_remakes_values_of_their_time() -> None:
    v = table((600, 64))
    step(v)
    x = tg.constant(np.random.default_rng(1).normal(size=(64, 64)).astype(np.float32))

    def run(budget: Any) -> Any:
        w = tg.Variable(v)
        step(w)
        with budget, tg.GradientTape() as tape:
            h = w @ x
            for _ in range(6):
                h = tg.tanh(h) @ x
            y = tg.sum(h * h)
            step(w)
            g = tape.gradient(y, w)
        return g

    with tg.measure() as m:
        plain = run(tg.measure())
    assert bits_equal(plain, run(tg.memory_budget(int(m.peak_bytes * 0.8))))


# With everything else -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{"clipvalue": 0.3}, {"clipnorm": 0.7}, {"global_clipnorm": 0.7}], ids=str)
def test_clipping_sees_the_sums(options: dict[str, float]) -> None:
    v, w = table(), table()
    b, c = tg.Variable(np.ones(3, np.float32)), tg.Variable(np.ones(3, np.float32))
    one, other = optim.SGD(0.1, **options), optim.SGD(0.1, **options)
    for g in gradients(v):
        one.apply([g, tg.ones(3)], [v, b])
        other.apply([g.to_dense(), tg.ones(3)], [w, c])
        np.testing.assert_allclose(v, w, rtol=2e-6)
        np.testing.assert_allclose(b, c, rtol=2e-6)


def test_the_clipping_functions() -> None:
    for s in gradients(table(dtype=np.float64)):
        whole = s.to_dense()
        for clipped, wanted in (
            (optim.clip_by_value(s, -0.3, 0.4), optim.clip_by_value(whole, -0.3, 0.4)),
            (optim.clip_by_norm(s, 0.7), optim.clip_by_norm(whole, 0.7)),
            (optim.clip_by_global_norm([s, None], 0.7)[0][0], optim.clip_by_global_norm([whole], 0.7)[0][0]),
        ):
            assert type(clipped) is tg.IndexedSlices
            np.testing.assert_allclose(clipped, wanted, rtol=1e-14)
        assert type(optim.clip_by_value(s, 0.1, 0.4)) is tg.Tensor
        np.testing.assert_allclose(optim.clip_by_value(s, 0.1, 0.4), optim.clip_by_value(whole, 0.1, 0.4), rtol=1e-14)
        np.testing.assert_allclose(optim.clip_by_norm(s, 0.7, axes=1), optim.clip_by_norm(whole, 0.7, axes=1))


def test_accumulated_gradients_are_whole_arrays() -> None:
    v, w = table(), table()
    one, other = (optim.LazyAdam(0.1, gradient_accumulation_steps=2) for _ in range(2))
    for g in gradients(v):
        one.apply([g], [v])
        other.apply([g.to_dense()], [w])
    assert bits_equal(v.value(), w.value()) and int(one.iterations) == 2


@pytest.mark.parametrize("name", [*ALL, "adam"])
def test_captured_steps(name: str) -> None:
    """Also by turns with steps that are not captured, which write where the program has written."""
    run = lambda captured: captured_by_turns(table((600, 16)), (ALL | DENSE)[name](), captured)
    for a, b in zip(run(False), run(True), strict=True):
        np.testing.assert_array_equal(a, b)


def test_saved_state_goes_on(tmp_path: Path) -> None:
    layer, optimizer = nn.Embedding(40, 16, sparse=True), optim.LazyAdam(0.1)
    layer([0])

    def train(layer: nn.Embedding, optimizer: optim.Optimizer, at: list[int]) -> None:
        with tg.GradientTape() as tape:
            loss = tg.sum(layer(at) ** 2)
        optimizer.apply([tape.gradient(loss, layer.embeddings)], [layer.embeddings])

    train(layer, optimizer, [1, 2, 1])
    layer.save(tmp_path / "model.safetensors", optimizer)
    kept = optimizer.state_dict(of=layer)
    both = pickle.loads(pickle.dumps((layer, optimizer)))
    train(layer, optimizer, [2, 3])
    assert type(both[0].embeddings) is tg.Variable and both[0].sparse
    again, other = nn.Embedding(40, 16, sparse=True), optim.LazyAdam(0.1)
    again([0])
    again.load(tmp_path / "model.safetensors", other)
    for a, b in (both, (again, other)):
        train(a, b, [2, 3])
        assert bits_equal(a.embeddings.value(), layer.embeddings.value())
        for x, y in zip(state(b), state(optimizer), strict=True):
            np.testing.assert_array_equal(x, y)
    assert kept["m/embeddings"].numpy()[3].any() == False  # noqa: E712  # later steps do not change it


def test_what_is_refused() -> None:
    v, optimizer = table(), optim.LazyAdam(0.1)
    before = v.numpy(copy=True)
    for g, error, says in (
        (tg.IndexedSlices(np.ones((1, 16), np.float32), [0], (41, 16)), GradientError, r"\(40, 16\).*\(41, 16\)"),
        (tg.IndexedSlices(np.ones((1, 16), np.complex64), [0], (40, 16)), DTypeError, "real gradient"),
    ):
        with pytest.raises(error, match=says):
            optimizer.apply([g], [v])
    np.testing.assert_array_equal(v, before)
    wide = tg.IndexedSlices(np.ones((1, 16)), [0], (40, 16))  # float64, for a variable of float32
    optimizer.apply([wide], [v])
    assert v.dtype == np.float32 and v.numpy()[0, 0] != before[0, 0]


def test_the_lazy_ones_are_what_they_are_made_of() -> None:
    assert repr(optim.LazyAdam(0.1)) == "LazyAdam(learning_rate=0.1)"
    assert optim.LazyAdamW().weight_decay == optim.AdamW().weight_decay and optim.LazySGD(0.1, 0.9).momentum == 0.9
    assert [o.rows_alone for o in (optim.SGD(), optim.SGD(0.1, 0.9), optim.Adam(), optim.LazyAdam())] == [
        True, False, False, True,
    ]  # fmt: skip

    class Other(optim.SGD):  # whose formula may need all rows
        def update(self, x: Any, g: Any, slots: Any, rate: float, step: int) -> Any:
            return (x - 2 * rate * tg.sign(g),)

    class Rows(Other):
        rows_alone = True

    for make, changed in ((Other, False), (Rows, True)):
        v, optimizer = table(), make(0.25)
        before = v.numpy(copy=True)
        assert optimizer.rows_alone is changed
        step(v, optimizer)
        before[[1, 3]] -= 0.5
        np.testing.assert_array_equal(v, before)
    with pytest.raises(AttributeError, match="LazyAdam"):
        optim.SparseAdam  # noqa: B018
