"""Policies: what is saved is exactly what they say, nothing saved runs again, and no bit of a gradient changes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from budget_cases import check_sound
from checks import bits_equal, no_garbage, values

import tapegrad as tg
from tapegrad.errors import PolicyError, RecomputeError
from tapegrad.ops.interop.names import name
from tapegrad.remat import policies
from tapegrad.remat.offload import tiers
from tapegrad.remat.policies import OFFLOAD, RECOMPUTE, SAVE, any_of, offload_names, save_names

N = 64
ROWS = 1024
BYTES = ROWS * N * 4


def array(*shape: int, seed: int = 0) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal(shape) * 0.2).astype(np.float32)


@pytest.fixture
def weights() -> list[tg.Variable]:
    return [tg.Variable(array(N, N, seed=i)) for i in range(6)]


@pytest.fixture
def x() -> tg.Tensor:
    return tg.asarray(array(ROWS, N, seed=99))


def block(a: tg.Variable, b: tg.Variable) -> Any:
    """Two products, with a named value between them."""

    def f(x: tg.Tensor) -> tg.Tensor:
        h = name(tg.tanh(x @ a), "h")
        return x + tg.sigmoid(h @ b)

    return f


def model(wrap: Any, weights: list[tg.Variable], x: tg.Tensor) -> tg.Tensor:
    for a, b in zip(weights[::2], weights[1::2], strict=True):
        x = wrap(block(a, b))(x)
    return tg.sum(x * x)


def gradients(wrap: Any, weights: list[tg.Variable], x: tg.Tensor) -> tuple[list[np.ndarray], int, tg.memory.Measure]:
    """Gradients, the bytes that are kept for rules after the forward pass, and the figures of the backward pass."""
    with tg.GradientTape() as tape, tg.measure() as m:
        y = model(wrap, weights, x)
    kept = m.live_by_category.get("activation", 0)
    with tg.measure() as back:
        g = tape.gradient(y, weights)
    return values(g), kept, back


ALL: list[Any] = [
    policies.save_nothing,
    policies.save_everything,
    policies.save_matmuls,
    save_names("h"),
    offload_names("h"),
    any_of(offload_names("h"), policies.save_matmuls),
    lambda value: SAVE if value.primitive == "matmul" and not value.names else RECOMPUTE,
]


def wrapping(policy: Any) -> Any:
    return lambda f: tg.recompute_grad(f, policy=policy)


# recompute_grad ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("policy", "saved", "matmuls", "tanhs"),
    [
        (None, 0, 6, 3),
        (policies.save_nothing, 0, 6, 3),
        (policies.save_matmuls, 6, 0, 3),
        (save_names("h"), 3, 3, 0),
        (save_names("other", "h"), 3, 3, 0),
        (save_names("other"), 0, 6, 3),
        (any_of(save_names("h"), policies.save_matmuls), 9, 0, 0),
        (offload_names("h"), 0, 6, 0),
        (lambda v: SAVE if v.product else OFFLOAD if v.names else RECOMPUTE, 6, 0, 0),
    ],
)
def test_saved_is_what_the_policy_says(weights, x, policy, saved, matmuls, tanhs) -> None:
    """Bytes kept, and nodes run again, against a checkpoint alone; nobody reads the product below a saved h."""
    plain, _, back = gradients(lambda f: f, weights, x)
    bare, inputs, _ = gradients(wrapping(None), weights, x)
    got, kept, again = gradients(wrapping(policy), weights, x)
    assert bits_equal(got, plain) and bits_equal(bare, plain)
    assert kept - inputs == saved * BYTES
    assert again.nodes_run["matmul"] - back.nodes_run["matmul"] == matmuls
    assert again.nodes_run["tanh"] == tanhs


def test_everything_saved_runs_no_barrier_again(weights, x) -> None:
    plain, _, back = gradients(lambda f: f, weights, x)
    got, _, again = gradients(wrapping(policies.save_everything), weights, x)
    assert bits_equal(got, plain)
    assert again.nodes_run["matmul"] == back.nodes_run["matmul"] and again.nodes_run["tanh"] == 0
    assert again.reruns == 3


def test_naming_changes_nothing(x) -> None:
    """No node, no kernel, no bytes: the tensor itself, inside a fused chain, too."""

    def chain(n: Any) -> Any:
        with tg.measure() as m, tg.GradientTape() as tape:
            tape.watch(x)
            y = tg.sum(tg.exp(n(tg.sin(n(x * 2.0)))))
            before = m.kernel_runs
        return values(tape.gradient(y, x)), before, m.peak_bytes - m.live_bytes

    named, kernels, _ = chain(lambda t: name(t, "h"))
    plain, wanted, _ = chain(lambda t: t)
    assert bits_equal(named, plain) and kernels == wanted
    assert name(x, "h") is x
    assert name(2.5, "h").item() == 2.5


def test_a_policy_is_asked_of_a_name_and_not_again_where_the_value_is_read(x) -> None:
    """The value is computed at its name; who reads it then does not find it there anew."""
    told: list[tuple[str, ...]] = []

    def policy(value: policies.Value) -> Any:
        told.append(value.names)
        return SAVE if value.names else RECOMPUTE

    def f(x: tg.Tensor) -> tg.Tensor:
        h = name(tg.exp(x), "h")
        asked = told.count(("h",))
        y = tg.sin(h) + h
        assert asked > 0 and told.count(("h",)) == asked
        return y

    with tg.GradientTape() as tape:
        tape.watch(x)
        y = tg.sum(tg.recompute_grad(f, policy=policy)(x))
    assert told.count(("h",)) > 0 and tape.gradient(y, x) is not None


def test_a_named_view_names_its_bytes(weights, x) -> None:
    def f(x: tg.Tensor) -> tg.Tensor:
        h = x @ weights[0]
        return tg.tanh(name(tg.reshape(h, (N, ROWS)), "h")) * 3.0

    def run(policy: Any) -> Any:
        with tg.GradientTape() as tape:
            y = tg.sum(tg.recompute_grad(f, policy=policy)(x))
        with tg.measure() as m:
            g = tape.gradient(y, weights[0])
        return values(g), m.nodes_run["matmul"]

    plain, twice = run(None)
    got, once = run(save_names("h"))
    assert bits_equal(got, plain) and (twice, once) == (2, 1)


@pytest.mark.parametrize("policy", ALL)
def test_nested_checkpoints(weights, x, policy) -> None:
    """Inside a checkpointed function are others, with and without a policy."""

    def outer(x: tg.Tensor) -> tg.Tensor:
        h = name(tg.tanh(x @ weights[4]), "h")
        h = tg.recompute_grad(block(weights[0], weights[1]))(h)
        h = tg.recompute_grad(block(weights[2], weights[3]), policy=policies.save_matmuls)(h)
        return h @ weights[5]

    def run(f: Any) -> Any:
        with tg.GradientTape() as tape:
            y = tg.sum(f(x) ** 2.0)
        return values(tape.gradient(y, weights))

    assert bits_equal(run(tg.recompute_grad(outer, policy=policy)), run(tg.recompute_grad(outer)))


@pytest.mark.parametrize("policy", ALL)
def test_second_order_jacobians_and_two_gradients(policy) -> None:
    w = tg.Variable(array(4, 4))
    x = tg.asarray(array(3, 4, seed=5))

    def f(x: tg.Tensor) -> tg.Tensor:
        return tg.sin(name(tg.tanh(x @ w), "h") @ w)

    def run(f: Any) -> Any:
        with tg.GradientTape(persistent=True) as tape:
            tape.watch(x)
            y = f(x)
            z = tg.sum(y)
        first = tape.gradient(z, [x, w])
        again = tape.gradient(z, [x, w])
        rows = tape.jacobian(y, w)
        with tg.GradientTape() as outer:
            outer.watch(x)
            with tg.GradientTape() as inner:
                inner.watch(x)
                z = tg.sum(f(x))
            g = inner.gradient(z, x)
        second = outer.gradient(tg.sum(g * g), [x, w])
        pushed = tg.jvp(f, (x,), (tg.ones_like(x),))
        over = tg.jvp(tg.grad(lambda u: tg.sum(f(u))), (x,), (tg.ones_like(x),))
        return values([first, again, rows, second, list(pushed), list(over)])

    assert bits_equal(run(tg.recompute_grad(f, policy=policy)), run(tg.recompute_grad(f)))


@pytest.mark.parametrize("policy", ALL)
def test_random_numbers_and_state(policy) -> None:
    count = tg.Variable(0.0, trainable=False)
    w = tg.Variable(array(N, N))

    def f(x: tg.Tensor) -> tg.Tensor:
        h = name(x @ w, "h")
        count.assign_add(1.0)
        return tg.tanh(h) * tg.random.normal(h.shape) * count

    def run(f: Any) -> Any:
        tg.random.seed(7)
        count.assign(0.0)
        with tg.GradientTape() as tape:
            y = tg.sum(f(tg.asarray(array(512, N))))
        return values([tape.gradient(y, w), y, count])

    assert bits_equal(run(tg.recompute_grad(f, policy=policy)), run(f))


def test_another_rerun_is_an_error(weights, x) -> None:
    """Where the saved value's place holds another operation, or the rerun is longer or shorter than the first run."""

    def other(x: tg.Tensor, is_recomputing: bool) -> tg.Tensor:
        h = x @ weights[0]
        return name(tg.tanh(h) if not is_recomputing else tg.sin(h), "h")

    def longer(x: tg.Tensor, is_recomputing: bool) -> tg.Tensor:
        h = name(x @ weights[0], "h")
        return tg.exp(h) if not is_recomputing else tg.exp(h + 0.0)

    for f, words in ((other, "where the first run applied"), (longer, "operations")):
        with tg.GradientTape() as tape:
            y = tg.sum(tg.recompute_grad(f, policy=save_names("h"))(x))
        with pytest.raises(RecomputeError, match=words):
            tape.gradient(y, weights[0])


def test_an_exception_in_a_run_leaves_nothing_behind(weights, x) -> None:
    def f(x: tg.Tensor) -> tg.Tensor:
        name(x @ weights[0], "h")
        raise KeyError("mine")

    with pytest.raises(KeyError), tg.GradientTape():
        tg.recompute_grad(f, policy=save_names("h"))(x)
    check_sound()
    assert tg.tanh(x).shape == x.shape


def test_no_cycles(weights, x) -> None:
    with no_garbage():
        for policy in ALL:
            gradients(wrapping(policy), weights, x)


# memory_budget -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ALL)
@pytest.mark.parametrize("wrap", [lambda f: f, tg.recompute_grad, wrapping(save_names("h"))])
@pytest.mark.parametrize("share", [0.9, 0.6])
def test_budgets_and_policies(weights, x, policy, wrap, share) -> None:
    """Policy x budget x checkpoint: the same bits, and a peak within the budget or an error that says so."""
    with tg.measure() as m, tg.GradientTape() as tape:
        y = model(lambda f: f, weights, x)
        plain = values(tape.gradient(y, weights))
    del y, tape
    limit = int(m.peak_bytes * share)
    with tg.memory_budget(limit, policy=policy) as within:
        try:
            with tg.GradientTape() as tape:
                y = model(wrap, weights, x)
            assert bits_equal(values(tape.gradient(y, weights)), plain)
        except tg.errors.BudgetError:
            assert policy is not policies.save_nothing or wrap is not tg.recompute_grad
    assert within.peak_bytes <= limit


def test_saved_values_are_not_dropped(weights, x) -> None:
    def run(policy: Any) -> Any:
        with tg.memory_budget(int(2.5 * 2**20), policy=policy), tg.measure() as m:
            with tg.GradientTape() as tape:
                y = model(lambda f: f, weights, x)
            g = values(tape.gradient(y, weights))
        return g, m

    plain, without = run(None)
    got, m = run(save_names("h"))
    assert without.evictions and without.nodes_run["tanh"] > 3
    assert m.evictions and m.nodes_run["tanh"] == 3
    assert bits_equal(got, plain)


def test_the_innermost_policy_is_in_force(weights, x) -> None:
    asked = []

    def one(value: policies.Value) -> policies.Answer:
        asked.append("one")
        return SAVE

    def two(value: policies.Value) -> policies.Answer:
        asked.append("two")
        return RECOMPUTE

    with tg.memory_budget("1GiB", policy=one):
        with tg.memory_budget("1GiB", policy=two), tg.memory_budget("1GiB"), tg.GradientTape() as tape:
            tg.tanh(x @ weights[0])
        assert set(asked) == {"two"}
        with tg.GradientTape() as tape:
            tape.watch(x)
            tg.tanh(x @ weights[0])
        assert asked[-1] == "one"


def test_what_a_policy_is_told(weights, x) -> None:
    seen: dict[str, policies.Value] = {}

    def policy(value: policies.Value) -> policies.Answer:
        seen[value.primitive] = value
        return RECOMPUTE

    def f(x: tg.Tensor) -> tg.Tensor:
        return tg.sum(name(name(x @ weights[0], "h"), "g") @ weights[1], axis=1)

    with tg.GradientTape():
        tg.recompute_grad(f, policy=policy)(x)
    assert seen["sum"].params["axis"] == (1,) and not seen["sum"].product
    assert seen["matmul"].product and seen["matmul"].nbytes == BYTES and seen["matmul"].aval.shape == (ROWS, N)


def test_a_policy_is_asked_once_about_a_value_that_waits(x) -> None:
    told: list[str] = []

    def policy(value: policies.Value) -> policies.Answer:
        told.append(value.primitive)
        return RECOMPUTE

    def f(x: tg.Tensor) -> tg.Tensor:
        h = tg.tanh(x)
        return tg.sum(h, axis=0) + tg.sum(h[1:] @ h[1:].mT) + tg.sum(h.mT @ h)

    with tg.GradientTape():
        tg.recompute_grad(f, policy=policy)(x)
    assert told.count("tanh") == 1


def test_a_policy_is_asked_of_what_has_bytes_alone() -> None:
    """Of a chain in one pass the last value has."""
    told: list[str] = []

    def policy(value: policies.Value) -> policies.Answer:
        told.append(value.primitive)
        return policies.SAVE

    x = tg.asarray(np.linspace(0.0, 1.0, 20_000))
    with tg.GradientTape():
        tg.recompute_grad(lambda q: tg.cumsum(tg.exp(tg.sin(q)) * 2.0), policy=policy)(x)
    assert told[-1] == "cumulative_sum" and not {"sin", "exp"} & set(told)


# Errors --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (lambda: tg.recompute_grad(tg.sin, policy="h"), "a policy is a function"),
        (lambda: tg.recompute_grad(tg.sin, policy=save_names), "makes a policy"),
        (lambda: tg.memory_budget("1GiB", policy=3), "memory_budget: a policy is"),
        (lambda: tg.memory.policy(None), "policy: a policy is"),
        (lambda: any_of(policies.save_matmuls, "h"), "any_of: a policy is"),
        (lambda: save_names(), "names are needed"),
        (lambda: offload_names(3), "each a string"),
    ],
)
def test_what_is_no_policy(wrong, words) -> None:
    with pytest.raises(PolicyError, match=words):
        wrong()


def test_what_is_no_answer(weights, x) -> None:
    with tg.GradientTape(), pytest.raises(PolicyError, match="answered 'save' about matmul"):
        tg.recompute_grad(lambda x: x @ weights[0], policy=lambda value: "save")(x)


def test_what_is_no_part_of_the_module() -> None:
    assert [n for n in dir(policies) if n[:2] != "__"] == sorted(policies.__all__)
    with pytest.raises(AttributeError, match="has no attribute 'keep_it_all'"):
        _ = policies.keep_it_all  # type: ignore[attr-defined]


def test_what_is_no_name(x) -> None:
    with pytest.raises(tg.errors.NotATensorError, match="a name is a string"):
        name(x, 3)


def test_a_tier_of_its_own(weights, x, tmp_path) -> None:
    disk = tiers.Disk(tmp_path)
    with tg.GradientTape() as tape:
        y = model(wrapping(offload_names("h", tier=disk)), weights, x)
    assert disk.bytes_held == 3 * BYTES
    tape.gradient(y, weights)
    assert (disk.bytes_held, disk.bytes_written, disk.bytes_read) == (0, 3 * BYTES, 3 * BYTES)
