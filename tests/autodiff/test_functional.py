"""grad, value_and_grad, vjp, jacobian, hessian, hvp: results, structures, errors."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from checks import bits_equal, c64, no_garbage, same, values, var64

import tapegrad as tg
from tapegrad import errors, nest
from tapegrad.errors import StructureError


def f(x: Any, tree: Any, k: Any = 1.0) -> Any:
    """A function."""
    return tg.sum(x * x * tree["w"]) * k


X, TREE = np.array([1.0, 2.0]), {"w": np.array([3.0, 4.0])}


def test_grad_of_chosen_arguments() -> None:
    same(tg.grad(f)(X, TREE), [6.0, 16.0])
    same(tg.grad(f, 1)(X, TREE, k=2.0), {"w": [2.0, 8.0]})
    same(tg.grad(f, -1)(X, TREE), {"w": [1.0, 4.0]})
    same(tg.grad(f, (1, 0))(X, TREE), ({"w": [1.0, 4.0]}, [6.0, 16.0]))
    same(tg.grad(f, [0])(X, TREE), ([6.0, 16.0],))
    same(tg.grad(f, 2)(X, TREE, 1.0), 19.0)
    same(tg.value_and_grad(f)(X, TREE), (19.0, [6.0, 16.0]))
    assert tg.grad(f).__doc__ == "A function." and tg.grad(f).__name__ == "f"
    same(tg.grad(lambda a, b: a * 2.0, 1)(c64(1.0), c64([1.0, 2.0])), [0.0, 0.0])  # it does not matter: zeros


def test_auxiliary_results() -> None:
    def with_aux(x: Any) -> Any:
        return tg.sum(x * x), {"n": 3, "x": x}

    (value, aux), g = tg.value_and_grad(with_aux, has_aux=True)(X)
    same([value, g], [5.0, [2.0, 4.0]])
    assert aux["n"] == 3
    g, aux = tg.grad(with_aux, has_aux=True)(X)
    same([g, aux["x"]], [[2.0, 4.0], [1.0, 2.0]])


def test_an_argument_passed_twice_is_two_and_variables_are_arguments() -> None:
    x, v = c64(3.0), var64(5.0)
    same(tg.grad(lambda a, b: a * a * b, (0, 1))(x, x), (18.0, 9.0))
    same(tg.grad(lambda a: a * a * v)(v), 50.0)  # the captured one is a constant
    same(tg.grad(lambda a: a * tg.stop_gradient(a))(x), 3.0)


def test_nested_gradients() -> None:
    cube = tg.grad(lambda q: q * q * q * q)
    same([cube(2.0), tg.grad(cube)(2.0), tg.grad(tg.grad(cube))(2.0)], [32.0, 48.0, 48.0])
    same(tg.grad(lambda x: x * tg.grad(lambda y: x * y)(2.0))(c64(3.0)), 6.0)
    with tg.GradientTape() as tape:
        x = c64(2.0)
        tape.watch(x)
        d = tg.grad(lambda q: q * q * x)(x)
    same([d, tape.gradient(d, x)], [8.0, 8.0])


def test_vjp_again_and_again() -> None:
    x, y = c64([1.0, 2.0]), c64([3.0, 4.0])
    with no_garbage():
        (out, total), pull = tg.vjp(lambda a, b: (a * b, tg.sum(a)), x, y)
        for _ in range(2):
            same(pull((np.array([1.0, 10.0]), 100.0)), ([103.0, 140.0], [1.0, 20.0]))
        same(pull([c64([0.0, 0.0]), 1]), ([1.0, 1.0], [0.0, 0.0]))
        for wrong, says in (
            ((1.0,), r"cotangents is \(\*,\), that of the results \(\*, \*\)"),
            ((c64([1.0]), 1.0), r"shape \(1,\)"),
        ):
            with pytest.raises(ValueError, match=says):
                pull(wrong)
        with pytest.raises(TypeError, match="complex128"):
            pull((np.array([1j, 1j]), 1.0))
        del pull, out, total
    y, pull = tg.vjp(lambda a: [a, a, tg.argmax(a)], x)
    same(pull([c64([1.0, 2.0]), c64([10.0, 20.0]), 0]), ([11.0, 22.0],))


def test_jacobian_and_hessian_of_structures() -> None:
    def g(x: Any, tree: Any) -> Any:
        return {"a": x * tree["w"], "b": (tg.sum(x),)}

    found = tg.jacobian(g, (0, 1))(X, TREE)
    same(found["a"], (np.diag([3.0, 4.0]), {"w": np.diag([1.0, 2.0])}))
    same(found["b"], (([1.0, 1.0], {"w": [0.0, 0.0]}),))
    same(tg.hessian(f)(X, TREE), np.diag([6.0, 8.0]))
    same(tg.hessian(f, 1)(X, TREE), {"w": {"w": np.zeros((2, 2))}})
    blocks = tg.hessian(lambda a, b: tg.sum(a * a * b), (0, 1))(X, TREE["w"])
    cross = np.diag(2 * X)
    same(blocks, ((np.diag([6.0, 8.0]), cross), (cross, np.zeros((2, 2)))))


def test_jacobian_vectorised_equals_looped(rng: np.random.Generator) -> None:
    def g(x: Any) -> Any:
        return tg.matmul(tg.tanh(x), tg.permute_dims(x, (1, 0))) / (1.0 + tg.sum(x * x))

    x = c64(rng.normal(size=(3, 2)))
    y, pull = tg.vjp(g, x)
    rows = [values(pull(np.eye(9)[i].reshape(3, 3))[0]) for i in range(9)]
    same(tg.jacobian(g)(x), np.stack(rows).reshape(3, 3, 3, 2))
    columns = [values(tg.jvp(g, (x,), (np.eye(6)[i].reshape(3, 2),))[1]) for i in range(6)]
    same(tg.jacobian(g)(x), np.stack(columns, axis=-1).reshape(3, 3, 3, 2))


def test_hvp_equals_hessian_times_vector(rng: np.random.Generator) -> None:
    def g(a: Any, b: Any = 2.0) -> Any:
        return tg.sum(tg.exp(a * b) * tg.sin(a)) + tg.prod(a)

    a, v = c64(rng.normal(size=3)), c64(rng.normal(size=3))
    same(tg.hvp(g, a, v), values(tg.hessian(g)(a)) @ v.numpy(), rtol=1e-10)
    b, w = c64(1.5), c64(0.5)
    (ha, hb) = tg.hvp(g, (a, b), (v, w))
    blocks = values(tg.hessian(g, (0, 1))(a, b))
    same(ha, blocks[0][0] @ v.numpy() + blocks[0][1] * w.numpy(), rtol=1e-10)
    same(hb, blocks[1][0] @ v.numpy() + blocks[1][1] * w.numpy(), rtol=1e-10)


def test_bits_do_not_depend_on_the_door(rng: np.random.Generator) -> None:
    x = c64(rng.normal(size=(4, 4)))

    def g(q: Any) -> Any:
        return tg.sum(tg.tanh(tg.matmul(q, q)) * q)

    with tg.GradientTape() as tape:
        tape.watch(x)
        y = g(x)
    wanted = tape.gradient(y, x)
    y, pull = tg.vjp(g, x)
    assert bits_equal([tg.grad(g)(x), pull(1.0)[0]], [wanted, wanted])


@pytest.mark.parametrize(
    ("call", "error", "says"),
    [
        (lambda: tg.grad(f, 2)(X, TREE), ValueError, "argnums 2 names argument 2, but 2 were given"),
        (lambda: tg.grad(f, (0, -3))(X, TREE), ValueError, "argument -3"),
        (lambda: tg.grad(lambda x: x * 2.0)(X), ValueError, r"must return one float, got float64\[2\]; sum it"),
        (lambda: tg.grad(lambda x: 3.0)(X), TypeError, "must return a tensor, got float"),
        (lambda: tg.grad(lambda x: (tg.sum(x), x))(X), TypeError, "must return a tensor, got tuple"),
        (lambda: tg.grad(lambda x: tg.argmax(x))(X), ValueError, "must return one float, got int64"),
        (lambda: tg.grad(lambda x: x)(3), TypeError, "argument of dtype int64; make it a float"),
        (lambda: tg.grad(lambda x: x)("s"), TypeError, "str"),
        (lambda: tg.hessian(lambda x: tg.argmax(x))(X), TypeError, "hessian: .*returned int64.*; make it a float"),
        (
            lambda: tg.linearize(lambda x: x * 2.0, X)[1](),
            ValueError,
            r"tangents is \(\), that of the arguments \(\*,\)",
        ),
        (
            lambda: tg.linearize(lambda x: x * 2.0, X)[1](np.ones(3)),
            ValueError,
            r"a tangent has shape \(3,\)",
        ),
        (lambda: tg.jacobian(lambda x: x)(np.array([1, 2])), TypeError, "int64"),
        (lambda: tg.jacobian(lambda x: "s")(X), TypeError, "str"),
        (lambda: tg.hvp(lambda x: tg.sum(x * x), X, np.ones(3)), ValueError, r"a tangent has shape \(3,\)"),
    ],
)
def test_misuse(call: Any, error: type, says: str) -> None:
    with pytest.raises(error, match=says) as e:
        call()
    assert isinstance(e.value, errors.TapegradError)
    same(tg.grad(f)(X, TREE), [6.0, 16.0])


def tree_of(x: Any, y: Any) -> Any:
    return {"a": x * 2, "b": (y, x * y)}


@pytest.mark.parametrize(
    "wrong", [1.0, (1.0, (1.0, 1.0)), {"a": 1.0, "b": 1.0, "c": 1.0}, {"a": (1.0, 1.0), "b": 1.0}, {"a": 1, "b": (1,)}]
)
def test_structures_are_compared_not_numbers_of_leaves(wrong: Any) -> None:
    x, y = c64(2.0), c64(3.0)
    out, pull = tg.vjp(tree_of, x, y)
    given = re.escape(nest.shown(wrong))
    with pytest.raises(StructureError, match=f"vjp: .*cotangents is {given}, that of the results {{'a': .*, 'b'"):
        pull(wrong)
    same(pull({"b": [10.0, 100.0], "a": 1.0}), (302.0, 210.0))
    held = lambda t: t["a"] * t["b"][0] * t["b"][1]
    for name, run in (("jvp", tg.jvp), ("hvp", tg.hvp)):
        with pytest.raises(StructureError, match=rf"{name}: .* is \({given},\), that of the arguments \({{'a'"):
            run(held, (out,), (wrong,))
    same(tg.hvp(held, (out,), ({"a": 1.0, "b": (0.0, 0.0)},)), ({"a": 0.0, "b": (6.0, 3.0)},))
    with tg.GradientTape(persistent=True) as tape:
        tape.watch((x, y))
        out = tree_of(x, y)
    if not isinstance(wrong, tuple):
        with pytest.raises(StructureError, match=f"output_gradients: .* is {given}, that of the targets {{'a'"):
            tape.gradient(out, [x, y], output_gradients=wrong)
    for right in ({"a": 1.0, "b": (10.0, 100.0)}, [1.0, 10.0, 100.0]):
        same(tape.gradient(out, [x, y], output_gradients=right), [302.0, 210.0])
    same(tape.gradient([out["a"]], x, output_gradients=7.0), 14.0)


PAIR = lambda x: (tg.sum(x * x * x), {"n": 3, "x": x})
WITH_AUX = {
    "vjp": (lambda: tg.vjp(PAIR, X, has_aux=True), lambda found: (found[0], found[1](2.0)), (9.0, ([6.0, 24.0],))),
    "jvp": (lambda: tg.jvp(PAIR, (X,), (np.ones(2),), has_aux=True), lambda found: found[:2], (9.0, 15.0)),
    "linearize": (
        lambda: tg.linearize(PAIR, X, has_aux=True), lambda found: (found[0], found[1](1.0)), (9.0, 15.0)
    ),
    "grad": (lambda: tg.grad(PAIR, has_aux=True)(X), lambda found: found[:1], ([3.0, 12.0],)),
    "jacobian": (lambda: tg.jacobian(PAIR, has_aux=True)(X), lambda found: found[:1], ([3.0, 12.0],)),
    "jacfwd": (lambda: tg.jacfwd(PAIR, has_aux=True)(X), lambda found: found[:1], ([3.0, 12.0],)),
    "hessian": (lambda: tg.hessian(PAIR, has_aux=True)(X), lambda found: found[:1], (np.diag([6.0, 12.0]),)),
    "hvp": (lambda: tg.hvp(PAIR, X, np.ones(2), has_aux=True), lambda found: found[:1], ([6.0, 12.0],)),
}  # fmt: skip


@pytest.mark.parametrize("name", WITH_AUX)
def test_auxiliary_results_come_along(name: str) -> None:
    run, part, wanted = WITH_AUX[name]
    found = run()
    same(part(found), wanted)
    assert found[-1]["n"] == 3
    same(found[-1]["x"], X)


@pytest.mark.parametrize("name", WITH_AUX)
def test_has_aux_wants_a_pair(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "PAIR", lambda x: tg.sum(x))
    with pytest.raises(ValueError, match=r"has_aux the function must return \(value, aux\), got \*"):
        WITH_AUX[name][0]()


LINEAR = [
    lambda x, y: tg.tanh(x) * y - tg.exp(x) / (2.0 + y),
    lambda x, y: {"a": (tg.sum(x * y, axis=0), x), "b": [y, 3.0, None, tg.argmax(x)], "c": tg.asarray(7.0)},
    lambda x, y: tg.matmul(x, tg.permute_dims(y, (1, 0))),
    lambda x, y: (tg.prod(x), tg.logsumexp(x + y, axis=1), tg.sort(y, axis=0), x, x),
    lambda x, y: tg.recompute_grad(lambda q: tg.sin(q) * y)(x),
    lambda x, y: x + y,
    lambda x, y: 3.0,
]


@pytest.mark.parametrize("f", LINEAR)
@pytest.mark.parametrize("shape", [(2, 3), (1, 1), (3, 2)])
def test_linearize_equals_jvp(f: Any, shape: tuple, rng: np.random.Generator) -> None:
    x, y = (c64(rng.uniform(0.5, 2.0, shape)) for _ in range(2))
    with no_garbage():
        out, push = tg.linearize(f, x, y)
        for _ in range(2):
            tx, ty = rng.normal(size=shape), c64(rng.normal(size=shape))
            same((out, push(tx, ty)), tg.jvp(f, (x, y), (tx, ty)), rtol=1e-10)
        same(push(None, ty), tg.jvp(f, (x, y), (None, ty))[1], rtol=1e-10)
        del out, push


def test_linearize_runs_the_function_once_and_nests() -> None:
    runs = []
    x, t = c64([1.0, 2.0]), c64([1.0, -1.0])

    def cube(q: Any) -> Any:
        runs.append(1)
        return q * q * q

    _, push = tg.linearize(cube, x)
    same([push(t), push(2.0)], [[3.0, -12.0], [6.0, 24.0]])
    assert len(runs) == 1
    same(tg.jacfwd(lambda q: tg.linearize(cube, q)[1](t))(x), np.diag([6.0, -12.0]))
    same(tg.vmap(push)(np.eye(2)), np.diag([3.0, 12.0]))
    z = tg.asarray(np.array([1.0 + 2.0j, 0.5j]))
    for f in (lambda q: q * q * tg.exp(q), lambda q: tg.conj(q) * q, lambda q: tg.real(q) * q):
        same(tg.linearize(f, z)[1](z * 1j), tg.jvp(f, (z,), (z * 1j,))[1], rtol=1e-11)


def test_a_linear_function_may_be_empty() -> None:
    y, push = tg.linearize(lambda q: q * 2.0, np.zeros((0, 3)))
    same((y, push(np.zeros((0, 3)))), (np.zeros((0, 3)), np.zeros((0, 3))))
