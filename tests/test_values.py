"""A value is what an operation returned: one that changes nothing, and a variable's reading, give a value of their own.

So a gradient in such a value takes in what was done with it, and nothing that was done with what it was made from.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from checks import c64, same

import tapegrad as tg
from tapegrad import memory, nest
from tapegrad.nn import functional as F

# Variables ------------------------------------------------------------------------------------------------------------

READS: dict[str, Callable[[tg.Variable], tg.Tensor]] = {
    "read_value": lambda v: v.read_value(),
    "value": lambda v: v.value(),
    "read": lambda v: v.read(),
    "asarray": tg.asarray,
    "asarray(copy=True)": lambda v: tg.asarray(v, copy=True),
    "asanyarray": tg.asanyarray,
    "constant": tg.constant,
    "array": tg.array,
    "copy": tg.copy,
    "index": lambda v: v[...],
    "reshape": lambda v: v.reshape(v.shape),
    "astype": lambda v: v.astype(v.dtype),
    "from_dlpack": tg.from_dlpack,
    "to_device": lambda v: v.to_device(v.device),
    "positive": lambda v: +v,
}


@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_a_reading_before_the_tape_is_a_constant(read: Callable) -> None:
    v = tg.Variable(3.0)
    old = read(v)
    with tg.GradientTape() as tape:
        y = v / old
    same(tape.gradient(y, v), np.float32(1 / 3))


@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_a_reading_inside_is_linked_and_a_value_of_its_own(read: Callable) -> None:
    v = tg.Variable(3.0)
    with tg.GradientTape(persistent=True) as tape:
        first, second = read(v), read(v)
        y = v * v + 5 * first + first * second
    same(tape.gradient(y, first), 5 + 3.0)
    same(tape.gradient(y, second), 3.0)
    same(tape.gradient(y, v), 2 * 3 + 5 + 2 * 3)
    assert tape.watched_variables() == (v,)


@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_watching_a_reading_is_not_watching_the_variable(read: Callable) -> None:
    v = tg.Variable(3.0, trainable=False)
    old = read(v)
    with tg.GradientTape(persistent=True) as tape:
        tape.watch(old)
        y = v * old
    same(tape.gradient(y, old), 3.0)
    assert tape.gradient(y, v) is None
    v.assign(7.0)
    same(old, 3.0)


def test_a_reading_passes_tangents_and_batches() -> None:
    v = tg.Variable([1.0, 2.0])
    same(
        tg.jvp(lambda x: x.reshape((2,)) * 3 + x[...], (tg.asarray([1.0, 2.0]),), (tg.asarray([1.0, 1.0]),))[1], [4, 4]
    )
    same(tg.vmap(lambda x: x[...] * v.value())(np.ones((3, 2), np.float32)), [[1, 2]] * 3)


# Operations -----------------------------------------------------------------------------------------------------------

NOTHING: dict[str, Callable[[tg.Tensor], Any]] = {
    "reshape": lambda x: x.reshape(x.shape),
    "reshape order F": lambda x: tg.reshape(x[0], (3,), order="F"),
    "x[:]": lambda x: x[:],
    "x[...]": lambda x: x[...],
    "x[()]": lambda x: x[()],
    "x[:, :]": lambda x: x[:, :],
    "permute_dims": lambda x: tg.permute_dims(x, (0, 1)),
    "moveaxis": lambda x: tg.moveaxis(x, 0, 0),
    "swapaxes": lambda x: tg.swapaxes(x, 1, 1),
    "broadcast_to": lambda x: tg.broadcast_to(x, x.shape),
    "broadcast_arrays": lambda x: tg.broadcast_arrays(x, x)[0],
    "squeeze": tg.squeeze,
    "squeeze()": lambda x: tg.squeeze(x, ()),
    "expand_dims": lambda x: tg.expand_dims(x, ()),
    "atleast_1d": tg.atleast_1d,
    "atleast_2d": tg.atleast_2d,
    "ravel and back": lambda x: x.reshape(-1).ravel().reshape(x.shape),
    "flip": lambda x: tg.flip(x, ()),
    "roll": lambda x: tg.roll(x, 0, 0),
    "roll all round": lambda x: tg.roll(x, 3, 1),
    "roll()": lambda x: tg.roll(x, (), ()),
    "rot90": lambda x: tg.rot90(x, 4),
    "tile": lambda x: tg.tile(x, 1),
    "repeat": lambda x: tg.repeat(x, 1, axis=0),
    "pad": lambda x: tg.pad(x, 0),
    "pad edge": lambda x: tg.pad(x, 0, mode="edge"),
    "concat": lambda x: tg.concat([x]),
    "stack": lambda x: tg.stack([x])[0],
    "split": lambda x: tg.split(x, 1)[0],
    "unstack": lambda x: tg.unstack(x[None])[0],
    "meshgrid": lambda x: tg.meshgrid(x[0])[0],
    "sum": lambda x: tg.sum(x, axis=()),
    "sum keepdims": lambda x: tg.sum(x, axis=(), keepdims=True),
    "mean": lambda x: tg.mean(x, axis=()),
    "max": lambda x: tg.max(x, axis=()),
    "min": lambda x: tg.min(x, axis=()),
    "prod": lambda x: tg.prod(x, axis=()),
    "nansum": lambda x: tg.nansum(x, axis=()),
    "diff": lambda x: tg.diff(x, n=0),
    "clip": tg.clip,
    "astype": lambda x: x.astype(x.dtype),
    "real": tg.real,
    "conj": tg.conj,
    "real_if_close": tg.real_if_close,
    "positive": tg.positive,
    "power 1": lambda x: x**1,
    "copy": tg.copy,
    "array": tg.array,
    "asarray(copy=True)": lambda x: tg.asarray(x, copy=True),
    "to_device": lambda x: x.to_device("cpu"),
    "einsum": lambda x: tg.einsum("ij->ij", x),
    "matrix_power": lambda x: tg.linalg.matrix_power(x, 1),
    "multi_dot": lambda x: tg.linalg.multi_dot([x, tg.eye(3, dtype=x.dtype)]),
    "fftshift": lambda x: tg.fft.fftshift(x, axes=()),
    "where": lambda x: tg.where(True, x, x),
    "at": lambda x: x.at[tg.zeros((0,), dtype="int64")].set(0.0),
    "put": lambda x: tg.put(x, [], []),
    "polyder": lambda x: tg.polynomial.polyder(x[0], 0),
    "dropout": lambda x: F.dropout(x, 0.0),
    "dropout, not training": lambda x: F.dropout(x, training=False),
    "alpha_dropout": lambda x: F.alpha_dropout(x, 0.0),
    "interpolate": lambda x: F.interpolate(x[None, None], size=(3, 3))[0, 0],
    "nn.Dropout": lambda x: tg.nn.Dropout(0.5)(x),
    "stack of one and index": lambda x: tg.vstack([x]),
    "name and read": lambda x: tg.name(x, "h")[...],
    "recompute_grad": lambda x: tg.recompute_grad(lambda a: a)(x),
    "custom_gradient": lambda x: tg.custom_gradient(lambda a: (a, lambda ct: ct))(x),
    "vmap": lambda x: tg.vmap(lambda row: row)(x),
    "vmap of a no-op": lambda x: tg.vmap(lambda row: row.reshape(row.shape))(x),
    "of a no-op": lambda x: x[:].reshape(x.shape),
}
X = np.arange(1.0, 10.0).reshape(3, 3) / 10


@pytest.mark.parametrize("op", NOTHING.values(), ids=NOTHING)
@pytest.mark.parametrize("how", ["small", "lazy", "lazy, pending"])
def test_the_gradient_in_the_result_is_that_of_its_own_uses(op: Callable, how: str) -> None:
    values = X if how == "small" else np.ascontiguousarray(np.tile(X, (70, 70))[:199, :199])
    if "lazy" in how and op in (NOTHING["interpolate"], NOTHING["roll all round"], *SMALL_ONLY):
        pytest.skip("written for the small one")
    x = c64(values)
    with tg.GradientTape(persistent=True) as tape:
        tape.watch(x)
        given = x * 1.5 if "pending" in how else x
        y = op(given)
        assert y is not given and y.ref() != given.ref()
        z = tg.sum(given * 2) + tg.sum(y * 3)
    same(tape.gradient(z, y), np.full(y.shape, 3.0))
    of_given = tape.gradient(z, given).numpy()
    if y.shape == x.shape:
        same(of_given, np.full(x.shape, 5.0))
    else:
        same(of_given.max(), 5.0)


SMALL_ONLY = [NOTHING[n] for n in ("multi_dot", "reshape order F", "meshgrid", "polyder")]


def test_a_later_tape_tells_the_result_from_the_argument() -> None:
    x = c64(X)
    y = x.reshape(x.shape)
    with tg.GradientTape(persistent=True) as tape:
        tape.watch(x)
        z = tg.sum(x * y)
    same(tape.gradient(z, x), X)
    assert tape.gradient(z, y) is None


def test_views_cost_no_bytes_and_no_kernel() -> None:
    views = [lambda x: x.reshape(x.shape), lambda x: x[...], tg.copy, lambda x: tg.sum(x, axis=()), tg.conj]
    tg.grad(lambda x: tg.sum(x * 2 + x))(c64(np.ones(300)))  # constants are made once
    for pending in (False, True):
        x = c64(np.ones((300, 300)))
        with memory.measure() as m:
            base, total = m.live_bytes, m.allocated_bytes
            with tg.GradientTape() as tape:
                tape.watch(x)
                given = x * 2 if pending else x
                y = given
                for view in views:
                    y = view(y)
                z = given + y
                z.numpy()
            found = tape.gradient(z, x).numpy()
            assert m.kernel_runs <= 2
            array = y.numpy()
            assert m.kernel_runs <= 3 and m.allocated_bytes - total <= (2 + pending) * x.nbytes + 2048
            assert np.shares_memory(array, given.numpy())
            del y, z, tape, given, found, array
            assert m.live_bytes == base
        same(x, np.ones((300, 300)))


def test_a_pending_view_has_the_bytes_of_what_it_views_whoever_is_read_first() -> None:
    for first in (0, 1, 2):
        x = c64(np.ones((300, 300))) * 2
        values = [x, x[...], x[...].reshape(x.shape)]
        with memory.measure() as m:
            values[first].numpy()
            assert m.kernel_runs == 1
            same([v[7, 7] for v in values], [2.0] * 3)
            assert m.kernel_runs == 1
        assert all(np.shares_memory(values[0].numpy(), v.numpy()) for v in values)


@pytest.mark.parametrize("nothing", [lambda h: h.reshape(h.shape), lambda h: h[...], lambda h: tg.conj(tg.copy(h))])
def test_derivatives_through_no_ops_are_the_plain_bits_under_a_budget(nothing: Callable) -> None:
    rng = np.random.default_rng(0)
    x, t = c64(rng.standard_normal((40, 40))), c64(rng.standard_normal((40, 40)))

    def f(x: tg.Tensor) -> tg.Tensor:
        h = x
        for _ in range(8):
            s = nothing(tg.softmax(h))
            h = nothing(h) * s + nothing(tg.tanh(h)) + tg.stop_gradient(s)
        return tg.sum(h * h)

    def plain_op(x: tg.Tensor) -> tg.Tensor:
        h = x
        for _ in range(8):
            s = tg.softmax(h)
            h = h * s + tg.tanh(h) + tg.stop_gradient(s)
        return tg.sum(h * h)

    work: list[Callable[[Callable], Any]] = [
        lambda f: tg.grad(f)(x),
        lambda f: tg.hvp(f, x, t),
        lambda f: tg.vmap(tg.grad(f))(tg.stack([x, t])),
        lambda f: tg.grad(tg.recompute_grad(f))(x),
    ]
    for run in work:
        want = run(plain_op).numpy(copy=True)
        with memory.measure() as m:
            base = m.live_bytes
            np.testing.assert_array_equal(run(f).numpy(copy=True), want)
            room = m.peak_bytes - base
        for share in (0.9, 0.75):
            with memory.measure() as m, memory.memory_budget(int(base + share * room)):
                np.testing.assert_array_equal(run(f).numpy(copy=True), want)


EMPTY: dict[str, tuple[Callable[[tg.Tensor], Any], tuple[int, ...]]] = {
    "sort": (tg.sort, (0, 3)),
    "sort of nothing": (tg.sort, (2, 0)),
    "top_k": (lambda x: tg.top_k(x, 2).values, (0, 3)),
    "take_along_axis": (lambda x: tg.take_along_axis(x, np.zeros((0, 2), np.int64), axis=1), (0, 3)),
    "take": (lambda x: tg.take(x, np.zeros((0,), np.int64), axis=0), (2, 3)),
    "cov": (tg.cov, (0, 3)),
    "fftconvolve": (lambda x: tg.signal.fftconvolve(x, x), (0, 3)),
    "pdist": (tg.nn.functional.pdist, (1, 3)),
}


@pytest.mark.parametrize("op", EMPTY)
def test_an_empty_result_depends_on_what_it_was_made_of(op: str) -> None:
    f, shape = EMPTY[op]
    x = tg.ones(shape)
    with tg.GradientTape() as tape:
        tape.watch(x)
        y = f(x)
        z = tg.sum(tg.exp(tg.sum(y)) * tg.ones((3,)))
    assert not y.size
    along_y, along_x = tape.gradient(z, [y, x])
    assert along_y.shape == y.shape
    same(along_x, np.zeros(shape))


def test_gradients_are_values_of_their_own() -> None:
    x, w = c64([1.0, 2.0]), c64([3.0, 4.0])
    with tg.GradientTape(persistent=True) as tape:
        tape.watch([x, w])
        y = x + w
    own = [tape.gradient(x, x, w), *tape.gradient(y, [x, w], w), *tg.vjp(lambda a, b: a + b, x, w)[1](w)]
    own += tg.jvp(lambda a: (a, a[...]), (x,), (w,))[1]
    assert len({t.ref() for t in [w, *own]}) == 8
    with tg.GradientTape() as outer:
        outer.watch(w)
        g = tape.gradient(x, x, w)
        z = tg.sum(g * w)
    same(outer.gradient(z, g), [3.0, 4.0])


# All of them ----------------------------------------------------------------------------------------------------------

ITSELF = {"asarray", "asanyarray", "ascontiguousarray", "constant", "from_dlpack", "name"}
"""What converts, and says that a tensor is returned as it is."""
GIVEN: list[np.ndarray] = [
    X, X[0], np.array(0.5), np.arange(4), X.reshape(1, 1, 3, 3), X[0] + 1j,
]  # fmt: skip
REST: list[tuple[tuple, dict[str, Any]]] = [
    *((a, {}) for a in [(), (0,), (1,), ((),), (None,), (-1,), ((3, 3),), (0, 0), (1, 1), ("ij->ij",)]),
    *(((), kwargs) for kwargs in ({"axis": ()}, {"k": 0}, {"n": 0}, {"training": False}, {"p": 0.0}, {"axes": ()})),
    ((), {"axis": (), "keepdims": True}), ((), {"scale_factor": 1}), ((), {"decimals": 3}),
]  # fmt: skip


def functions() -> Iterator[tuple[str, Callable]]:
    homes = [tg, tg.linalg, tg.fft, tg.special, tg.stats, tg.signal, tg.polynomial, F]
    for home in homes:
        for name in sorted(getattr(home, "__all__", ())):
            f = getattr(home, name)
            if callable(f) and not inspect.isclass(f) and name not in ITSELF | {"explain", "broadcast_shapes"}:
                yield f"{home.__name__}.{name}", f


@pytest.mark.slow
def test_no_public_function_returns_its_argument() -> None:
    """Whatever can be called with a tensor and arguments that may ask for nothing."""
    calls, offences = 0, set()
    for name, f in functions():
        for values in GIVEN:
            x = tg.asarray(values)
            for args, kwargs in REST:
                for given in (x, [x]):
                    try:
                        with warnings.catch_warnings():
                            warnings.simplefilter("ignore")
                            found = list(nest.leaves(f(given, *args, **kwargs)))
                    except Exception:
                        continue
                    calls += 1
                    if any(isinstance(t, tg.Tensor) and t.ref() == x.ref() for t in found):
                        offences.add(f"{name}(x, *{args}, **{kwargs}) of shape {x.shape}")
    assert not offences and calls > 5000
