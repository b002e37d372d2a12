"""Random numbers inside vmap: the same for all examples, or for each its own, or an error.  Which example fails."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import tapegrad as tg
from tapegrad.errors import DomainError, IndexingError, RandomnessError

N = 4
DRAWS: dict[str, Callable[[Any], tg.Tensor]] = {
    "normal": lambda s: tg.random.normal(s, dtype="float64"),
    "uniform": lambda s: tg.random.uniform(s, low=-1.0),
    "half": lambda s: tg.random.uniform(s, dtype="float16"),
    "bernoulli": lambda s: tg.random.bernoulli(s, 0.4),
    "bits16": lambda s: tg.random.bernoulli(s, 0.4, bits=16),
    "integers": lambda s: tg.random.integers(s, 0, 100),
    "poisson": lambda s: tg.random.poisson(s, 3.0),
    "binomial": lambda s: tg.random.binomial(s, 30, 0.4),
    "gamma": lambda s: tg.random.gamma(s, 2.0),
}


def seeded(f: Callable[[], Any]) -> tuple[Any, Any]:
    """What ``f`` gives from a fresh stream, as an array, and where it leaves the stream."""
    tg.random.seed(3)
    return f().numpy(), tg.random.default_generator.state


def noise(*shape: int) -> np.ndarray:
    return seeded(lambda: tg.random.normal(shape, dtype="float64"))[0]


@pytest.mark.parametrize("name", DRAWS)
def test_each_example_has_what_one_draw_for_the_batch_gives(name: str) -> None:
    draw = DRAWS[name]
    got, after = seeded(lambda: tg.vmap(lambda x: draw((3,)) + 0 * x, randomness="different")(np.zeros((N, 3), "int8")))
    wanted, then = seeded(lambda: draw((N, 3)))
    np.testing.assert_array_equal(got, wanted)
    assert after == then and len(np.unique(got, axis=0)) > 1
    same, after = seeded(lambda: tg.vmap(lambda x: draw((3,)) + 0 * x)(np.zeros((N, 3), "int8")))
    wanted, then = seeded(lambda: draw((3,)))
    np.testing.assert_array_equal(same, np.broadcast_to(wanted, (N, 3)))
    assert after == then


def test_nested_batches_each_say_for_themselves() -> None:
    def drawn(inner: str, outer: str) -> np.ndarray:
        f = tg.vmap(lambda x: x + tg.random.normal((), dtype="float64"), randomness=inner)
        return seeded(lambda: tg.vmap(f, randomness=outer)(np.zeros((2, N))))[0]

    np.testing.assert_array_equal(drawn("different", "different"), noise(2, N))
    np.testing.assert_array_equal(drawn("different", "same"), np.broadcast_to(noise(N), (2, N)))
    np.testing.assert_array_equal(drawn("same", "different"), np.broadcast_to(noise(2)[:, None], (2, N)))


def test_parameters_that_differ_from_example_to_example() -> None:
    a = np.array([1.0, 2.0, 2.0, 9.0])
    draw = lambda x: tg.random.gamma((2,), x, dtype="float64")
    got, _ = seeded(lambda: tg.vmap(draw, randomness="different")(a))
    wanted, _ = seeded(lambda: tg.random.gamma((N, 2), a[:, None], dtype="float64"))
    np.testing.assert_array_equal(got, wanted)
    slope, _ = seeded(lambda: tg.vmap(tg.grad(lambda x: tg.sum(draw(x))), randomness="different")(a))
    whole, _ = seeded(lambda: tg.grad(lambda a: tg.sum(tg.random.gamma((N, 2), a[:, None], dtype="float64")))(a))
    np.testing.assert_allclose(slope, whole, rtol=1e-12)
    nested = tg.vmap(tg.vmap(draw), randomness="different")
    got, _ = seeded(lambda: nested(np.stack([a, a])))
    np.testing.assert_array_equal(got[:, 1], got[:, 2])  # the inner batch shares its numbers
    assert not np.array_equal(got[0], got[1])


def scaled(x: Any) -> tg.Tensor:
    return x * tg.random.normal((), dtype="float64")


@pytest.mark.parametrize("f", [scaled, tg.recompute_grad(scaled)], ids=["plain", "checkpoint"])
def test_derivatives_have_the_numbers_of_the_values(f: Callable[..., tg.Tensor]) -> None:
    ones, batched = np.ones(N), tg.vmap(f, randomness="different")
    for gradient in (
        lambda: tg.vmap(tg.grad(f), randomness="different")(ones),
        lambda: tg.grad(lambda x: tg.sum(batched(x)))(ones),
        lambda: tg.jvp(batched, (ones,), (ones,))[1],
        lambda: tg.function(lambda x: tg.grad(lambda z: tg.sum(batched(z)))(x))(tg.asarray(ones)),
    ):
        np.testing.assert_array_equal(seeded(gradient)[0], noise(N))


def test_replays_of_a_captured_function_draw_on() -> None:
    step = tg.function(lambda x: tg.vmap(scaled, randomness="different")(x))
    tg.random.seed(3)
    got = [step(np.ones(N)).numpy() for _ in range(4)]
    assert step.stats.replays == 2
    tg.random.seed(3)
    np.testing.assert_array_equal(got, [tg.random.normal((N,), dtype="float64").numpy() for _ in range(4)])


def test_a_batch_of_none() -> None:
    assert tg.vmap(scaled, randomness="different")(np.ones(0)).shape == (0,)
    assert tg.vmap(lambda x: tg.random.gamma((2,), x), randomness="different")(np.ones(0)).shape == (0, 2)


def test_a_draw_can_be_refused() -> None:
    refusing = tg.vmap(scaled, randomness="error")
    with pytest.raises(RandomnessError, match=r'vmap\(scaled\): random numbers are drawn.*randomness="different"'):
        refusing(np.ones(N))
    np.testing.assert_array_equal(tg.vmap(lambda x: x + 1, randomness="error")(np.ones(N)).numpy(), np.full(N, 2.0))
    with pytest.raises(RandomnessError):
        tg.vmap(refusing, randomness="different")(np.ones((2, N)))
    with pytest.raises(DomainError, match="'other'; it is one of 'same', 'different', 'error'"):
        tg.vmap(scaled, randomness="other")  # type: ignore[arg-type]


def test_a_rule_that_runs_for_each_example_draws_alike() -> None:
    @tg.custom_gradient
    def noisy(x: Any) -> Any:
        z = tg.random.normal((), dtype="float64")
        return x * z, lambda d: d * z

    for how, count in (("same", 1), ("different", N)):
        batched = tg.vmap(noisy, randomness=how)
        np.testing.assert_array_equal(seeded(lambda f=batched: f(np.ones(N)))[0], np.broadcast_to(noise(count), N))
        tg.random.seed(3)
        value, slope = tg.value_and_grad(lambda x, f=batched: tg.sum(f(x) * [1.0, 10.0, 100.0, 1000.0]))(np.ones(N))
        slope = slope.numpy() / [1.0, 10.0, 100.0, 1000.0]
        assert value.item() == pytest.approx(slope @ [1.0, 10.0, 100.0, 1000.0], rel=1e-12)
        assert len(np.unique(slope.round(12))) == count
        after = [tg.random.normal((), dtype="float64").item() for _ in range(3)]
        assert not np.isclose(np.subtract.outer(after, slope), 0.0).any()  # nothing is drawn twice


def test_an_index_out_of_range_names_its_examples() -> None:
    x, i = np.zeros((4, 3)), np.array([0, 7, 2, 7])
    for f in (lambda x, i: x[i], lambda x, i: tg.take(x, i, axis=0), lambda x, i: x.at[i].set(1.0)):
        with pytest.raises(IndexingError, match="index 7 is out of range for an axis of length 3, in examples 1, 3$"):
            tg.vmap(f)(x, i)
        with pytest.raises(IndexingError, match=r"of length 3, in example \(1, 2\)$"):
            tg.vmap(tg.vmap(f))(np.zeros((2, 4, 3)), np.array([[0, 1, 2, 0], [1, 1, -4, 2]]))
    with pytest.raises(IndexingError, match="of length 3$"):
        tg.take(x[0], i)


def test_what_fails_example_by_example_names_it() -> None:
    @tg.primitive
    def positive(x: Any) -> Any:
        if x < 0:
            raise ValueError("negative")
        return x

    with pytest.raises(ValueError, match="negative") as e:
        tg.vmap(positive)(np.array([1.0, 2.0, -1.0]))
    assert e.value.__notes__ == ["so it is in example 2 of 3 of a vmap"]
