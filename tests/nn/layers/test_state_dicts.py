"""State as dictionaries: of layers, models and optimizers, by the names that files have."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tapegrad as tg
from tapegrad import nn, optim
from tapegrad.errors import NotATensorError, SaveError


def model(seed: int = 0) -> nn.Sequential:
    tg.random.seed(seed)
    made = nn.Sequential([nn.Dense(3, activation="tanh"), tg.recompute_grad(nn.BatchNormalization()), nn.Dense(1)])
    made(np.ones((2, 4), np.float32))
    return made


def train(made: Any, optimizer: Any, steps: int = 2) -> list[bytes]:
    for i in range(steps):
        x = np.random.default_rng(i).normal(size=(5, 4)).astype(np.float32)
        with tg.GradientTape() as tape:
            loss = tg.mean((made(x, training=True) - 1) ** 2)
        vs = made.trainable_variables
        optimizer.apply(tape.gradient(loss, vs), vs)
    return [v.numpy().tobytes() for v in (*made.variables, *optimizer.variables)]


OPTIMIZERS: dict[str, Callable[[], optim.Optimizer]] = {
    "sgd": lambda: optim.SGD(0.1),
    "adam": lambda: optim.Adam(0.1),
    "accumulating": lambda: optim.SGD(0.1, gradient_accumulation_steps=2),
    "rmsprop": lambda: optim.RMSprop(0.1, momentum=0.5, centered=True),
}


def test_names_are_paths_as_in_files(tmp_path: Path) -> None:
    from safetensors.numpy import load_file

    made, optimizer = model(), optim.Adam()
    train(made, optimizer)
    made.save(tmp_path / "m", optimizer)
    state = {**made.state_dict(), **{f"optimizer/{k}": v for k, v in optimizer.state_dict(made).items()}}
    in_file = load_file(tmp_path / "m")
    assert state.keys() == in_file.keys()
    for name, x in state.items():
        assert type(x) is tg.Tensor
        np.testing.assert_array_equal(x.numpy(), in_file[name])


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("captured", [False, True])
def test_training_goes_on_with_the_same_bits(name: str, captured: bool) -> None:
    """Values that were taken do not change, though captured steps write into the memory of variables."""
    made, optimizer = model(), OPTIMIZERS[name]()

    @tg.function
    def step(x: Any) -> None:
        vs = made.trainable_variables
        optimizer.apply([tg.ones(v.shape) * x for v in vs], vs)

    if captured:
        for i in range(4):
            step(tg.asarray(i + 0.5))
    else:
        train(made, optimizer)
    states = made.state_dict(), optimizer.state_dict(made), optimizer.state_dict()
    before = [{k: v.numpy(copy=True) for k, v in state.items()} for state in states]
    if captured:
        for i in range(3):
            step(tg.asarray(i + 0.5))
    wanted = train(made, optimizer)
    for state, values in zip(states, before, strict=True):
        for key, x in state.items():
            np.testing.assert_array_equal(x.numpy(), values[key])
    for of, given in ((True, states[1]), (False, states[2])):
        other, resumed = model(1), OPTIMIZERS[name]()
        assert other.load_state_dict(states[0]) == ([], [])
        resumed.build(other.trainable_variables if not of else [])
        assert resumed.load_state_dict(given, other if of else None) == ([], [])
        if captured:
            for i in range(3):
                vs = other.trainable_variables
                resumed.apply([tg.ones(v.shape) * (i + 0.5) for v in vs], vs)
        assert train(other, resumed) == wanted


def test_arrays_and_torch_s_tensors_are_taken() -> None:
    torch = pytest.importorskip("torch")
    layer, theirs = nn.Dense(3), torch.nn.Linear(4, 3)
    layer(np.ones((1, 4), np.float32))
    state = {"kernel": theirs.weight.detach().T, "bias": theirs.bias.detach().numpy()}
    layer.load_state_dict(state)
    x = np.random.default_rng(0).normal(size=(5, 4)).astype(np.float32)
    np.testing.assert_allclose(layer(x).numpy(), theirs(torch.tensor(x)).detach().numpy(), rtol=1e-5, atol=1e-6)


def test_a_tape_does_not_note_that_state_is_taken() -> None:
    made = model()
    with tg.GradientTape() as tape:
        made.state_dict()
    assert not tape.watched_variables()


def test_what_does_not_fit_is_listed_and_changes_nothing() -> None:
    made = model()
    before = {k: v.numpy(copy=True) for k, v in made.state_dict().items()}
    names = list(before)
    state = {**before, "more": np.ones(2, np.float32)}
    del state[names[0]]
    state[names[1]] = np.zeros(7, np.float32)
    state[names[-1]] = before[names[-1]].astype(np.float64)
    with pytest.raises(SaveError) as error:
        made.load_state_dict(state)
    lines = str(error.value).splitlines()
    assert lines[0].startswith('load_state_dict: the state does not fit Sequential "sequential')
    assert lines[0].endswith("nothing was changed:")
    assert [line.strip() for line in lines[1:]] == [
        f"{names[0]}: missing in the state",
        f"{names[1]}: wanted shape (3,), the state has (7,)",
        f"{names[-1]}: wanted dtype float32, the state has float64",
        "more: in the state only",
    ]
    assert all((v.numpy() == before[k]).all() for k, v in made.state_dict().items())
    with pytest.raises(SaveError, match="wanted shape"):  # shapes matter always
        made.load_state_dict(state, strict=False)
    found = made.load_state_dict({names[2]: before[names[2]] + 1, "more": [1.0]}, strict=False)
    assert found.unexpected == ["more"] and found.missing == [n for n in names if n != names[2]]
    changed = [k for k, v in made.state_dict().items() if (v.numpy() != before[k]).any()]
    assert changed == [names[2]]
    with pytest.raises(SaveError, match="has no variables yet"):
        nn.Dense(2).load_state_dict({})


def test_states_of_optimizers_that_do_not_fit() -> None:
    made, optimizer = model(), optim.Adam()
    train(made, optimizer)
    state = optimizer.state_dict(made)
    other = optim.SGD(0.1, momentum=0.9)
    with pytest.raises(SaveError, match=r"(?s)does not fit optimizer \"SGD\".*momentum/.*: missing in the state"):
        other.load_state_dict(state, made)
    assert other.slots_of(made.trainable_variables[0]) == {}  # not made for nothing
    with pytest.raises(SaveError, match="m/0: in the state only"):
        optim.Adam().load_state_dict(optimizer.state_dict())  # for which variables?
    with pytest.raises(SaveError, match="state variables for variables that are not in what state_dict was given"):
        optimizer.state_dict(made.variables[:1])
    with pytest.raises(NotATensorError, match="wanted a layer, variables, or a mapping of these by name, got int"):
        optimizer.state_dict(3)


def test_variables_without_layers() -> None:
    v, w = tg.Variable([1.0]), tg.Variable([2.0])
    optimizer = optim.Adam()
    optimizer.apply([[1.0], [1.0]], [v, w])
    assert list(optimizer.state_dict()) == ["iterations", "m/0", "v/0", "m/1", "v/1"]
    by_name = {"speed": v, "rest": [w]}
    assert list(optimizer.state_dict(by_name)) == ["iterations", "m/speed", "v/speed", "m/rest.0", "v/rest.0"]
    resumed = optim.Adam()
    resumed.load_state_dict(optimizer.state_dict(by_name), {"speed": w, "rest": [v]})
    np.testing.assert_array_equal(resumed.slots_of(w)["m"].numpy(), optimizer.slots_of(v)["m"].numpy())
    assert int(resumed.iterations) == 1 and list(optim.Adam().state_dict(v)) == ["iterations"]
