"""Variable: attributes, assignment, reads; the cells and overlays below; stop_gradient."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
from checks import c64, no_garbage, same, var64
from inside import weak

import tapegrad as tg
from tapegrad import errors


def test_attributes_and_defaults() -> None:
    v = tg.Variable(1.5, name="v")
    assert (v.shape, v.dtype, v.ndim, v.size, v.nbytes, v.name, v.trainable) == ((), np.float32, 0, 1, 4, "v", True)
    assert tg.Variable([1, 2]).dtype == np.int64 and tg.Variable([1, 2]).trainable is True
    assert tg.Variable(np.ones(3, np.float16)).dtype == np.float16
    assert tg.Variable(2.5, dtype="float64").dtype == np.float64
    for name in ("trainable", "shape", "dtype", "name"):
        with pytest.raises(AttributeError):
            setattr(v, name, None)


def test_nothing_is_shared_with_the_outside() -> None:
    initial = np.array([1.0, 2.0])
    v = tg.Variable(initial)
    initial[0] = 99.0
    out, mine = v.numpy(), v.numpy(copy=True)
    assert not out.flags.writeable
    mine[1] = 99.0
    given = np.array([3.0, 4.0])
    same(v, [1.0, 2.0])
    v.assign(given)
    given[0] = 99.0
    same(v, [3.0, 4.0])
    for twin in (tg.Variable(v), copy.deepcopy(v)):
        v.assign([3.0, 4.0])
        twin.assign_add([1.0, 1.0])
        same([v, twin], [[3.0, 4.0], [4.0, 5.0]])


def test_a_variable_made_from_a_slice_does_not_keep_the_rest() -> None:
    big = c64(np.ones((100, 100)))
    kept = weak(big)
    v, w = tg.Variable(big[3]), var64(np.zeros(100))
    w.assign(big[:, 4])
    del big
    assert kept() is None
    same([v, w], [np.ones(100)] * 2)


def test_assignments_return_the_variable_or_nothing() -> None:
    v = var64([1.0, 2.0])
    same(v.assign([3.0, 4.0]), [3.0, 4.0])
    same(v.assign_add(c64([1.0, 1.0])), [4.0, 5.0])
    same(v.assign_sub(var64([0.0, 5.0])), [4.0, 0.0])
    assert v.assign([1.0, 1.0], read_value=False) is None
    assert v.assign_add([1.0, 1.0], read_value=False) is None
    assert v.assign_sub([1.0, 0.0], read_value=False) is None
    same(v, [1.0, 2.0])


@pytest.mark.parametrize("how", ["assign", "assign_add", "assign_sub"])
@pytest.mark.parametrize("wrong", [[1.0, 2.0, 3.0], 5.0, [[1.0, 2.0]], c64([1.0])], ids=str)
def test_assignment_keeps_the_shape(how: str, wrong: Any) -> None:
    v = var64([1.0, 2.0])
    with pytest.raises(ValueError, match=rf"{how}: variable .* has shape \(2,\), the value") as e:
        getattr(v, how)(wrong)
    assert isinstance(e.value, errors.ShapeError)
    same(v, [1.0, 2.0])


@pytest.mark.parametrize("how", ["assign", "assign_add", "assign_sub"])
@pytest.mark.parametrize(
    ("initial", "wrong"),
    [
        (1.0, tg.asarray(1.0)),
        (1.0, tg.asarray(1)),
        (1.0, tg.Variable(1.0)),
        (1.0, 1j),
        (1, 2.7),
        (1, np.float32(2.0)),
        (True, 2),
        (1.0, None),
        (1.0, "2"),
        (1.0, object()),
    ],
)
def test_assignment_refuses_what_the_dtype_cannot_hold(how: str, initial: Any, wrong: Any) -> None:
    v = tg.Variable(np.asarray(initial))
    with pytest.raises((TypeError, ValueError)) as e:
        getattr(v, how)(wrong)
    assert isinstance(e.value, errors.TapegradError)
    assert v.numpy() == np.asarray(initial)


def test_assignment_converts_numbers() -> None:
    v = var64([1.0, 2.0])
    for x in ([1, 2], (True, 3.0), np.float32([1, 2]), np.array([1, 2], np.int8)):
        v.assign(x)
        assert v.dtype == np.float64
    k = tg.Variable(np.uint8(1))
    k.assign(7)
    assert k.numpy() == 7 and k.dtype == np.uint8


def test_it_is_no_key_and_not_changed_by_operators() -> None:
    v = var64([1.0, 2.0])
    with pytest.raises(TypeError):
        hash(v)
    assert v.ref() == v.ref() and len({v.ref(), v.ref(), var64(1.0).ref()}) == 2 and v.ref().deref() is v
    same(v == var64([1.0, 3.0]), [True, False])
    for change in ("+=", "-=", "*=", "/=", "//=", "%=", "**=", "@="):
        with pytest.raises(RuntimeError, match="assign"):
            exec(f"v {change} 2.0", {"v": v})
    with pytest.raises(TypeError, match="assign"):
        v[0] = 1.0
    assert isinstance(v + 1.0, tg.Tensor) and isinstance(v[0], tg.Tensor)


def test_python_sees_a_number() -> None:
    v = tg.Variable(2.5)
    assert (float(v), int(v), v.item(), bool(v)) == (2.5, 2, 2.5, True)
    assert v.tolist() == 2.5 and tg.Variable([[1, 2]], dtype="int64").tolist() == [[1, 2]]
    assert {name for name in dir(tg.Tensor) if name[0] != "_"} - {*dir(tg.Variable)} == {"look"}
    assert np.asarray(v) == 2.5 and len(var64([1.0, 2.0])) == 2 and "2.5" in repr(v)
    with pytest.raises(errors.NotATensorError):
        tg.Variable(None)


def test_what_tensorflow_takes_at_construction() -> None:
    made: list[int] = []

    def initial() -> Any:
        made.append(1)
        return tg.ones((2, 3)) * other

    other = tg.Variable(2.0)
    with tg.GradientTape() as tape:
        v = tg.Variable(initial_value=initial, trainable=None, shape=[2, 3], dtype="float64")
        y = tg.sum(v)
    assert made == [1] and v.trainable and v.dtype == np.float64
    assert [w is v for w in tape.watched_variables()] == [True]  # nothing records how it was made
    same([v, tape.gradient(y, v)], [np.full((2, 3), 2.0), np.ones((2, 3))])
    assert tg.Variable(np.ones(3), shape=3).shape == (3,) and tg.Variable(1.0, shape=()).shape == ()
    for wrong in ((2,), (), (None, 2), (1, 2)):
        with pytest.raises(
            errors.ShapeError, match=r"Variable: 'w' is to have shape .*, its initial value has \(2, 2\)"
        ):
            tg.Variable(np.ones((2, 2)), name="w", shape=wrong)
    with pytest.raises(errors.NotATensorError):
        tg.Variable(lambda: None)


def test_arguments_of_assignments_that_tensorflow_has() -> None:
    v = var64([1.0, 2.0])
    for how, wanted in (("assign", [3.0, 4.0]), ("assign_add", [6.0, 8.0]), ("assign_sub", [3.0, 4.0])):
        same(getattr(v, how)([3.0, 4.0], use_locking=True, name="step"), wanted)
        assert getattr(v, how)([0.0, 0.0] if how != "assign" else wanted, False, None, False) is None
        same(v, wanted)
    same(v.assign(value=[1.0, 1.0]).assign_add(delta=[1.0, 0.0]), [2.0, 1.0])


# Reads and gradients


def test_each_read_has_its_own_value_and_all_count() -> None:
    v, x = var64(2.0), c64(3.0)
    with tg.GradientTape() as tape:
        tape.watch(x)
        y = v * v  # 4
        v.assign(x * 10.0)  # cuts
        z = y * v
        v.assign_add(1.0)
        z = z * v
    v.assign(-1.0)
    same(z, 4.0 * 30.0 * 31.0)
    same(tape.gradient(z, [v, x]), [4.0 * 30.0 * 31.0 + 4.0 * 31.0 + 4.0 * 30.0, None])


def test_initialising_from_a_watched_value_cuts_and_reads_outside_are_not_linked() -> None:
    v = var64(2.0)
    outside = v * 1.0
    with tg.GradientTape() as tape:
        w = tg.Variable(v * 3.0)
        y = w * w + outside
    same(tape.gradient(y, [v, w]), [None, 12.0])


@pytest.mark.parametrize("read", [lambda v: v[0] * v[1], lambda v: tg.prod(v), lambda v: tg.prod(v.read()),
                                  lambda v: tg.prod(v.value()), lambda v: tg.prod(tg.asarray(v)),
                                  lambda v: v.read_value()[0] * v.T[1]])  # fmt: skip
def test_ways_to_read(read: Any) -> None:
    v = var64([2.0, 3.0])
    with tg.GradientTape() as tape:
        y = read(v)
    same(tape.gradient(y, v), [3.0, 2.0])


def test_stop_gradient() -> None:
    v, x = var64(3.0), c64(2.0)
    with tg.GradientTape(persistent=True) as tape:
        tape.watch(x)
        s = tg.stop_gradient(x * x)
        y = s * x * tg.stop_gradient(v) * v
        g = tape.gradient(y, x)
    same([s, tape.gradient(s, x), tape.gradient(y, v), g, tape.gradient(g, x)], [4.0, None, 24.0, 36.0, None])
    assert tape.jacobian(s, x) is None
    same(tg.jvp(lambda q: tg.stop_gradient(q * q) * q, (x,), (c64(1.0),))[1], 4.0)


# Cells


def test_variables_leave_no_garbage() -> None:
    def train() -> None:
        v = var64(np.ones(5))
        for _ in range(3):
            with tg.GradientTape() as tape:
                y = tg.sum(v * v)
            v.assign_sub(tape.gradient(y, v) * 0.1)

    train()  # constants are made once
    with tg.measure() as m, no_garbage():
        before = m.live_bytes
        train()
        assert m.live_bytes == before
