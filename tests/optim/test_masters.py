"""Variables of half dtypes: updated in float32, with a master and state of float32."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import tapegrad as tg
from tapegrad import errors, optim

MAKERS: dict[str, Callable[[], Any]] = {
    "SGD": lambda: optim.SGD(1e-4),
    "momentum": lambda: optim.SGD(1e-4, 0.5),
    "Adam": lambda: optim.Adam(1e-4),
    "AdamW": lambda: optim.AdamW(1e-4),
    "RMSprop": lambda: optim.RMSprop(1e-4),
    "Adagrad": lambda: optim.Adagrad(1e-3),
    "Lion": lambda: optim.Lion(1e-4),
    "LAMB": lambda: optim.LAMB(1e-4),
    "clipped": lambda: optim.Adam(1e-4, clipvalue=0.5),
    "accumulating": lambda: optim.Adam(1e-4, gradient_accumulation_steps=2),
}
HALVES = ["bfloat16", "float16"]


def start() -> Any:
    return (np.random.default_rng(0).normal(size=(6, 5)) + 3).astype(np.float32)


def gradients(count: int = 40) -> list[Any]:
    rng = np.random.default_rng(1)
    return [(1 + 0.1 * rng.normal(size=(6, 5))).astype(np.float32) for _ in range(count)]


@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("name", MAKERS)
def test_a_half_variable_is_the_float32_one_rounded(name: str, half: str) -> None:
    """Each step is far below what the variable's digits tell, and yet it gets where float32's gets."""
    rounded = tg.astype(start(), half)
    v, w = tg.Variable(rounded), tg.Variable(tg.astype(rounded, "float32"))
    one, other = MAKERS[name](), MAKERS[name]()
    for g in gradients():
        one.apply([g], [v])
        other.apply([g], [w])
    assert v.dtype == half and w.dtype == "float32"
    np.testing.assert_array_equal(v.numpy(), tg.astype(w, half).numpy())
    if half == "bfloat16":
        assert np.any(v.numpy() != rounded.numpy()), "it stands still"
    slots = one.slots_of(v)
    assert list(slots)[-1] == "master" and {s.dtype for s in slots.values()} == {np.dtype("float32")}
    np.testing.assert_array_equal(slots["master"].numpy(), w.numpy())
    for key, slot in other.slots_of(w).items():
        np.testing.assert_array_equal(slots[key].numpy(), slot.numpy())


def test_without_a_master_it_would_stand_still() -> None:
    """The twin: the same steps, made in bfloat16."""
    x = tg.asarray([3.0], dtype="bfloat16")
    for _ in range(40):
        x = x - tg.asarray(1e-4, dtype="bfloat16")
    assert x.item() == 3.0


def test_a_value_that_somebody_assigns_counts() -> None:
    v, optimizer = tg.Variable(tg.ones(3, dtype="bfloat16")), optim.SGD(2.0**-12)
    optimizer.apply([tg.ones(3)], [v])
    assert optimizer.slots_of(v)["master"].numpy().tolist() == [1 - 2.0**-12] * 3 and v.numpy().tolist() == [1.0] * 3
    v.assign(tg.asarray([1.0, 5.0, np.nan], dtype="bfloat16"))
    optimizer.apply([tg.ones(3)], [v])
    np.testing.assert_array_equal(optimizer.slots_of(v)["master"].numpy(), [1 - 2.0**-11, 5 - 2.0**-12, np.nan])


def test_captured_steps_have_the_bits_of_eager_ones() -> None:
    def run(wrap: Any) -> list[bytes]:
        v, optimizer = tg.Variable(tg.astype(start(), "bfloat16")), optim.AdamW(1e-3, global_clipnorm=1.0)
        step = wrap(lambda g: optimizer.apply([g], [v]))
        for g in gradients(5):
            step(tg.asarray(g))
        return [x.numpy().tobytes() for x in (v, *optimizer.variables)]

    assert run(tg.function) == run(lambda f: f)


@pytest.mark.parametrize("shape", [(), (0, 3), (300, 300)])
def test_shapes(shape: tuple[int, ...]) -> None:
    v, optimizer = tg.Variable(tg.ones(shape, dtype="float16")), optim.Adam(1e-5)
    for _ in range(3):
        optimizer.apply([tg.ones(shape, dtype="float16")], [v])
    assert v.shape == shape and v.dtype == "float16"
    np.testing.assert_allclose(optimizer.slots_of(v)["master"].numpy(), np.full(shape, 1 - 3e-5), rtol=1e-6)


def test_state_is_saved_and_comes_back(tmp_path: Any) -> None:
    layer, optimizer = tg.nn.Dense(3, dtype="bfloat16"), optim.SGD(1e-4)
    layer(np.ones((1, 2), np.float32))
    optimizer.apply([tg.ones(v.shape) for v in layer.trainable_variables], layer.trainable_variables)
    state = optimizer.state_dict(layer)
    assert sorted(state) == ["iterations", "master/bias", "master/kernel"]
    again = optim.SGD(1e-4)
    again.load_state_dict(state, layer)
    np.testing.assert_array_equal(again.slots_of(layer.kernel)["master"].numpy(), state["master/kernel"].numpy())
    tg.distributed.save(tmp_path / "tree", {"layer": layer, "optimizer": optimizer})
    third = optim.SGD(1e-4)
    tg.distributed.load(tmp_path / "tree", {"layer": layer, "optimizer": third})
    np.testing.assert_array_equal(third.slots_of(layer.kernel)["master"].numpy(), state["master/kernel"].numpy())
    assert int(third.iterations) == 1


def test_lbfgs_refuses_them() -> None:
    v = tg.Variable(tg.ones(3, dtype="bfloat16"), name="v")
    with pytest.raises(errors.DTypeError, match=r'needs more digits than bfloat16 has; let variable "v" \(3,\)'):
        optim.LBFGS().minimize(lambda: tg.sum(v * v), [v])


def test_rows_alone_have_masters_too() -> None:
    v, w = tg.Variable(tg.ones((5, 2), dtype="bfloat16")), tg.Variable(tg.ones((5, 2)))
    one, other = optim.LazyAdam(1e-4), optim.LazyAdam(1e-4)
    for _ in range(30):
        g = tg.IndexedSlices(tg.ones((3, 2)), tg.asarray([1, 3, 1]), (5, 2))
        one.apply([g], [v])
        other.apply([g], [w])
    np.testing.assert_array_equal(one.slots_of(v)["master"].numpy(), w.numpy())
    np.testing.assert_array_equal(v.numpy(), tg.astype(w, "bfloat16").numpy())
    assert v.numpy()[1, 0] != 1.0 and v.numpy()[0, 0] == 1.0
