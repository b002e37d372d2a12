"""Forward mode: tangents through every family of operations, nested, beside tapes, and what it forgets."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from checks import bits_equal, c64, no_garbage, same, values, var64
from inside import weak
from peers import Peers

import tapegrad as tg
from tapegrad import errors, nest
from tapegrad.core import primitive
from tapegrad.ops.apply import barrier
from tapegrad.remat.budget.manager import MANAGER

FUNCTIONS = [
    lambda x, y: tg.tanh(x) * y - tg.exp(x) / (2.0 + y),
    lambda x, y: tg.sum(x * y, axis=0, keepdims=True) - tg.mean(x, axis=1, keepdims=True),
    lambda x, y: tg.matmul(x, tg.permute_dims(y, (1, 0))),
    lambda x, y: tg.concat([x, y[:1], tg.flip(x, axis=1)], axis=0),
    lambda x, y: tg.where(x > y, x * x, y) + tg.maximum(x, y) + tg.abs(x),
    lambda x, y: tg.logsumexp(x + y, axis=1) + tg.prod(x, axis=1) + tg.max(y, axis=1),
    lambda x, y: tg.take(x, tg.asarray([0, 0, 1]), axis=0) * y[0],
    lambda x, y: {"a": (tg.var(x, axis=1),), "b": tg.cumulative_sum(x * y, axis=0)},
    lambda x, y: tg.astype(tg.astype(x, "float32"), "float64") * y,
    lambda x, y: tg.einsum("ij,kj->ik", x, y) + tg.sort(x, axis=0)[0, 0],
    lambda x, y: tg.nn.functional.softmax(x, dim=1) * y,
    lambda x, y: x,
]


@pytest.mark.parametrize("f", FUNCTIONS)
def test_forward_and_reverse_mode_are_adjoint(f: Callable, rng: np.random.Generator) -> None:
    x, y, tx, ty = (c64(rng.uniform(0.5, 2.0, (2, 3))) for _ in range(4))
    out, pushed = tg.jvp(f, (x, y), (tx, ty))
    assert bits_equal(out, f(x, y))
    same_out, pull = tg.vjp(f, x, y)
    cts = [c64(rng.normal(size=t.shape)) for t in nest.flatten(pushed)]
    gx, gy = values(pull(nest.rebuild(same_out, iter(cts))))
    left = sum((values(c) * values(p)).sum() for c, p in zip(cts, nest.flatten(pushed), strict=True))
    same(
        left,
        (gx * tx.numpy()).sum() + (gy * ty.numpy()).sum(),
        rtol=1e-6 if "float32" in f.__code__.co_consts else 1e-10,
    )


def test_results_that_are_no_tensors_and_tangents_of_nothing() -> None:
    v = var64(5.0)
    x = c64([1.0, 2.0])
    y, t = tg.jvp(lambda q: [q * 2.0, 3.0, None, "s", v, tg.argmax(q), tg.asarray(7.0)], (x,), (np.ones(2),))
    assert y[1:4] == [3.0, None, "s"] and t[2:4] == [None, None]
    same([t[0], t[1], t[4], t[5], t[6]], [[2.0, 2.0], 0.0, 0.0, 0, 0.0])
    same(tg.jvp(lambda q, r: q * r, (x, x), (None, 1.0))[1], [1.0, 2.0])


def test_nested_forward_modes_do_not_confuse_each_other() -> None:
    def inner(x: Any) -> Any:
        return tg.jvp(lambda y: x * y, (c64(3.0),), (c64(1.0),))[1]  # x

    same(tg.jvp(lambda x: x * inner(x), (c64(2.0),), (c64(1.0),)), (4.0, 4.0))
    cube = lambda q: q * q * q
    first = lambda q: tg.jvp(cube, (q,), (c64(1.0),))[1]
    second = lambda q: tg.jvp(first, (q,), (c64(1.0),))[1]
    same([first(c64(2.0)), second(c64(2.0)), tg.jvp(second, (c64(2.0),), (c64(1.0),))[1]], [12.0, 12.0, 6.0])


def test_forward_beside_and_inside_a_tape() -> None:
    x = c64(2.0)
    with tg.GradientTape() as tape:
        tape.watch(x)
        _, t = tg.jvp(lambda q: q * q * x, (x,), (c64(1.0),))
    same([t, tape.gradient(t, x)], [8.0, 8.0])

    def by_tape(q: Any) -> Any:
        with tg.GradientTape() as inside:
            inside.watch(q)
            y = q * q * q
        return inside.gradient(y, q)

    same(tg.jvp(by_tape, (x,), (c64(1.0),)), (12.0, 12.0))


@pytest.mark.parametrize("size", [8, 20_000])
def test_nothing_is_retained(size: int) -> None:
    refs: list[weakref.ref] = []
    alive: list[int] = []

    def f(q: Any) -> Any:
        for _ in range(20):
            q = tg.matmul(tg.tanh(tg.reshape(q, (size // 4, 4))), c64(np.eye(4)))
            refs.append(weak(q))
            alive.append(sum(r() is not None for r in refs))
        return tg.sum(q)

    x = c64(np.linspace(0, 1, size))
    with no_garbage():
        tg.jvp(f, (x,), (x,))
    assert max(alive) <= 2 and not any(r() for r in refs)


@pytest.mark.parametrize(
    ("xs", "ts", "error", "says"),
    [
        ((c64(1.0),), (), ValueError, r"tangents is \(\), that of the arguments \(\*,\)"),
        ((c64([1.0, 2.0]),), (c64([1.0]),), ValueError, r"a tangent has shape \(1,\), its value \(2,\)"),
        ((c64(1.0),), (c64(1.0) * 1j,), TypeError, "a tangent is complex128, its value float64"),
        ((tg.asarray(1),), (tg.asarray(1),), TypeError, "argument of dtype int64"),
        (("s",), (1.0,), TypeError, "str"),
    ],
)
def test_arguments_that_do_not_fit(xs: tuple, ts: tuple, error: type, says: str) -> None:
    with pytest.raises(error, match=says) as e:
        tg.jvp(lambda q: q * 2.0, xs, ts)
    assert isinstance(e.value, errors.TapegradError)
    same(tg.jvp(lambda q: q * 2.0, (c64(1.0),), (c64(1.0),))[1], 2.0)


def test_a_value_that_a_budget_drops_comes_back_with_its_tangent(rng: np.random.Generator) -> None:
    """The tape outside is told of a value before it has its tangent."""
    x, tangent = (c64(rng.normal(size=(32, 32))) for _ in range(2))

    def run() -> Any:
        with tg.GradientTape() as tape:

            def slope(q: Any) -> Any:
                tape.watch(q)
                h = tg.softmax(tg.exp(tg.softmax(q)))
                y = tg.sum(h * h)
                del h
                while MANAGER.free_device_memory(1):
                    pass
                return tape.gradient(y, q)

            return tg.jvp(slope, (x,), (tangent,))

    wanted = run()
    with tg.memory_budget("10MiB") as m:
        found = run()
    assert all(map(bits_equal, found, wanted)) and m.evictions and m.restored


@pytest.mark.parametrize("followed", [True, False])
def test_an_operation_among_processes_is_pushed_though_nothing_here_has_a_tangent(
    followed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process may have one, and waits.  With zeros, then; what else has none is not pushed."""
    given = list[Any]()

    def impl(xp: Any, x: Any) -> Any:
        given.append(np.array(x))
        return x * 1

    x, z = c64([1.0, 2.0]), c64([3.0, 4.0])
    monkeypatch.setattr(primitive, "REGISTRY", dict(primitive.REGISTRY))
    everyone = primitive.linear(
        "everyone", impl=impl, infer=lambda x: x, transpose=lambda ct, x: ct, effect=Peers(2), dry=lambda x, out: out
    )
    y, t = tg.jvp(lambda u: barrier(everyone, u if followed else z) + u * 2.0, (x,), (c64([1.0, 10.0]),))
    same(t, [3.0, 30.0] if followed else [2.0, 20.0])
    assert [g.tolist() for g in given] == ([[1.0, 2.0], [1.0, 10.0]] if followed else [[3.0, 4.0], [0.0, 0.0]])
