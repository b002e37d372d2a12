"""Attention's statistics of rows: kept by tapes, read by the derivative; and random shapes beside PyTorch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import tapegrad as tg
from tapegrad.device.numerics import attention as blocks
from tapegrad.device.numerics.attention_cut import Weighting
from tapegrad.ops.dispatch import barrier
from tapegrad.ops.products.attention import attended, attention_p

attend = tg.nn.functional.scaled_dot_product_attention


@pytest.fixture
def done(monkeypatch: Any) -> Iterator[list[str]]:
    """What the CPU was asked for, in order; ``+`` with statistics, written or known."""
    found: list[str] = []

    def note(name: str, given: int) -> None:
        f = getattr(blocks, name)

        def noted(*args: Any) -> None:
            found.append(name + "+" * (len(args) > given and args[given] is not None))
            f(*args)

        monkeypatch.setattr(blocks, name, noted)

    for name, given in (("forward", 8), ("backward", 10), ("statistics", 9)):
        note(name, given)
    yield found


def draw(*shape: int, dtype: str = "float64", seed: int = 0) -> tg.Tensor:
    return tg.asarray(np.random.default_rng(seed).normal(size=shape).astype(dtype))


def gradient(f: Any, *xs: tg.Tensor) -> list[np.ndarray]:
    with tg.GradientTape() as tape:
        tape.watch(xs)
        y = f(*xs)
    return [g.numpy() for g in tape.gradient(y, list(xs))]


QKV = [draw(2, 3, 9, 4, seed=i) for i in range(3)]


def loss(*xs: tg.Tensor) -> tg.Tensor:
    return tg.sum(attend(*xs, is_causal=True) ** 2)


def test_a_tape_keeps_the_statistics_and_the_derivative_takes_no_softmax_again(done: list[str]) -> None:
    plain = gradient(loss, *QKV)
    assert done == ["forward+", "backward+"]
    done.clear()
    attend(*QKV)
    assert done == ["forward"]
    done.clear()
    assert [a.tobytes() for a in gradient(tg.recompute_grad(loss), *QKV)] == [a.tobytes() for a in plain]
    assert done == ["forward", "forward+", "backward+"]


def test_products_of_the_derivative(monkeypatch: Any) -> None:
    """Two forward and five backward, of each block: there is one here."""
    shapes, multiply = Counter[str](), blocks.Scratch.multiply

    def counted(self: Any, x: Any, y: Any, out: Any) -> None:
        shapes["all"] += 1
        multiply(self, x, y, out)

    monkeypatch.setattr(blocks.Scratch, "multiply", counted)
    with tg.GradientTape() as tape:
        tape.watch(QKV)
        y = attend(*QKV)
    assert shapes["all"] == 2
    tape.gradient(y, QKV)
    assert shapes["all"] == 7


@pytest.mark.parametrize("p", [0.0, 0.4])
def test_without_statistics_the_derivative_has_the_same_bits(p: float, done: list[str]) -> None:
    """Where no tape had kept them: a rule's own operations, say."""
    params = {"how": Weighting(0.5, True, "none", "zero", p), "key": 5, "counter": 2}
    q, k, v = (draw(2, 9, 3, 4, dtype="float32", seed=i) for i in range(3))
    with tg.GradientTape() as tape:
        tape.watch([q, k, v])
        y = barrier(attention_p, q, k, v, v, **params)
    without = [g.numpy().tobytes() for g in tape.gradient(y, [q, k, v])]
    assert done == ["forward", "backward", "forward+"]
    done.clear()
    assert [g.tobytes() for g in gradient(lambda *xs: attended(*xs, v, **params), q, k, v)] == without
    assert done == ["forward+", "backward+"]


def test_statistics_in_an_axis_of_examples_are_written_by_one_run(done: list[str]) -> None:
    """The gradient inside of ``vmap``, and around it."""
    inside = tg.vmap(lambda *xs: tuple(gradients_of(loss, *xs)))(*QKV)
    assert done.count("statistics") == 0
    assert Counter(done)["backward+"] >= 1 and Counter(done)["backward"] == 0
    done.clear()
    around = gradient(lambda *xs: tg.sum(tg.vmap(loss)(*xs)), *QKV)
    assert Counter(done)["backward+"] == 1 and Counter(done)["backward"] == Counter(done)["statistics"] == 0
    for a, b, whole in zip(inside, around, gradient(loss, *QKV), strict=True):
        np.testing.assert_allclose(a.numpy(), whole, rtol=1e-12)
        np.testing.assert_allclose(b, whole, rtol=1e-12)


def gradients_of(f: Any, *xs: tg.Tensor) -> list[tg.Tensor]:
    with tg.GradientTape() as tape:
        tape.watch(xs)
        y = f(*xs)
    return tape.gradient(y, list(xs))


@pytest.mark.parametrize("width", [1, 16])
def test_dropped_statistics_come_back_with_the_same_bits(width: int, done: list[str]) -> None:
    """Of narrow heads they take twice the bytes of the result, so they are dropped, too, and come back along."""
    q, k, v = (draw(1, 2, 256, width, dtype="float32", seed=i) for i in range(3))

    def f(*xs: tg.Tensor) -> tg.Tensor:
        x = xs[0]
        for _ in range(12):
            x = attend(x, *xs[1:])
        return tg.sum(x**2)

    plain = [g.tobytes() for g in gradient(f, q, k, v)]
    limit, within = 2**19, []
    while not within:
        done.clear()
        try:
            with tg.memory_budget(limit):
                within = [g.tobytes() for g in gradient(f, q, k, v)]
        except tg.errors.BudgetError:
            limit += 2**15
    again = done.count("forward+") - 12 + done.count("statistics")
    assert plain == within and again > 1, "the budget is so small that they are dropped"


# ---- rows of large scores, and rows without keys


def test_rows_whose_scores_are_all_far_below_zero() -> None:
    """Behind a mask of -1e9 a row is uniform in float32: its weights are 1 over the keys in the derivative, too."""
    q, k, v = (draw(1, 6, 4, dtype="float32", seed=i) for i in range(3))
    mask = np.zeros((6, 6), np.float32)
    mask[2], mask[4] = -1e9, 3e8
    ct = draw(1, 6, 4, dtype="float32", seed=4)
    _, _, found = gradient(lambda *xs: tg.sum(attend(*xs, mask) * ct), q, k, v)
    s = (q.numpy()[0] @ k.numpy()[0].T / 2 + mask).astype(np.float32)
    w = np.exp((s - s.max(axis=1, keepdims=True)).astype(np.float64))
    w /= w.sum(axis=1, keepdims=True)
    assert np.ptp(w[2]) == 0
    np.testing.assert_allclose(found[0], w.T @ ct.numpy()[0], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16"])
@pytest.mark.parametrize("kind", ["bool", "float"])
def test_rows_without_keys(dtype: str, kind: str) -> None:
    """Their result is 0, and so is what they add to any gradient."""
    q, k, v, ct = (tg.asarray(draw(1, 2, 5, 4, seed=i), dtype=dtype) for i in range(4))
    seen = np.ones((5, 5), bool)
    seen[1], seen[3] = False, [True, False, True, False, False]
    mask = tg.asarray(seen) if kind == "bool" else tg.asarray(np.where(seen, 0, -np.inf), dtype=dtype)
    with tg.GradientTape() as tape:
        tape.watch([q, k, v])
        y = attend(q, k, v, mask)
    assert not y.numpy()[:, :, 1].any()
    dq, dk, dv = (g.numpy().astype(np.float64) for g in tape.gradient(y, [q, k, v], output_gradients=ct))
    assert not dq[:, :, 1].any() and all(np.isfinite(g).all() for g in (dq, dk, dv))
    without = [tg.asarray(np.delete(x.numpy(), 1, axis=2)) for x in (q, ct)]
    m = tg.asarray(np.delete(mask.numpy(), 1, axis=0))
    with tg.GradientTape() as tape:
        tape.watch([k, v])
        z = attend(without[0], k, v, m)
    others = tape.gradient(z, [k, v], output_gradients=without[1])
    for ours, theirs in zip((dk, dv), others, strict=True):
        np.testing.assert_array_equal(ours, theirs.numpy().astype(np.float64))


# ---- beside PyTorch


def case(seed: int) -> dict[str, Any]:
    """Shapes and rules drawn from a seed."""
    rng = np.random.default_rng(seed)
    lead = [(), (2,), (2, 3), (1,)][rng.integers(4)]
    t, s, k, w = (int(n) for n in rng.integers(1, 12, 4))
    g, r = int(rng.integers(1, 3)), int(rng.integers(1, 3))
    kind = ["none", "bool", "float"][rng.integers(3)]
    causal = bool(rng.integers(2)) and kind == "none"
    shapes = [(*lead, g * r, t, k), (*lead, g, s, k), (*lead, g, s, w)]
    mask = None
    if kind == "bool":
        mask = rng.random((t, s)) < 0.6
        mask[:, 0] = True
    elif kind == "float":
        mask = rng.normal(size=(*lead[-1:], [1, g * r][rng.integers(2)], [1, t][rng.integers(2)], s))
    xs = [rng.normal(size=shape) for shape in shapes]
    return {"xs": xs, "mask": mask, "causal": causal, "us": [rng.normal(size=shape) for shape in shapes]}


def in_torch(torch: Any, q: Any, k: Any, v: Any, mask: Any, causal: bool) -> Any:
    """Written out, so that it has second derivatives."""
    r = q.shape[-3] // k.shape[-3]
    k, v = (x.repeat_interleave(r, dim=-3) for x in (k, v))
    scores = q @ k.mT / q.shape[-1] ** 0.5
    if causal:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
    return torch.softmax(scores, -1) @ v


@pytest.mark.parametrize("seed", range(24))
def test_values_and_both_derivatives_are_those_of_torch(seed: int) -> None:
    torch = pytest.importorskip("torch")
    c = case(seed)
    xs = [torch.tensor(x, requires_grad=True) for x in c["xs"]]
    mask = None if c["mask"] is None else torch.tensor(c["mask"])
    y = in_torch(torch, *xs, mask, c["causal"])
    first = torch.autograd.grad(torch.sin(y).sum(), xs, create_graph=True)
    along = sum((g * torch.tensor(u)).sum() for g, u in zip(first, c["us"], strict=True))
    second = torch.autograd.grad(along, xs, allow_unused=True)
    ours = [tg.asarray(x) for x in c["xs"]]
    m = None if c["mask"] is None else tg.asarray(c["mask"])
    with tg.GradientTape() as outer:
        outer.watch(ours)
        with tg.GradientTape() as inner:
            inner.watch(ours)
            z = attend(*ours, m, is_causal=c["causal"], enable_gqa=True)
            total = tg.sum(tg.sin(z))
        found = inner.gradient(total, ours)
        push = tg.sum(tg.stack([tg.sum(g * u) for g, u in zip(found, c["us"], strict=True)]))
    again = outer.gradient(push, ours)
    for a, b in zip((z, *found, *again), (y, *first, *second), strict=True):
        want = np.zeros(a.shape) if b is None else b.detach().numpy()
        np.testing.assert_allclose(a.numpy(), want, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("seed", range(6))
def test_half_types_are_as_near_as_their_digits(dtype: str, seed: int) -> None:
    """Gradients beside those of the same numbers in float64."""
    c, kind = case(seed), np.dtype(dtype if dtype == "float16" else ml_dtypes.bfloat16)
    xs = [x.astype(kind) for x in c["xs"]]
    m = c["mask"] if c["mask"] is None or c["mask"].dtype == bool else c["mask"].astype(kind)

    def f(dtype: Any) -> list[np.ndarray]:
        own = [tg.asarray(x.astype(dtype)) for x in xs]
        mask = m if m is None or m.dtype == bool else m.astype(dtype)
        got = gradients_of(lambda *xs: tg.sum(attend(*xs, mask, is_causal=c["causal"], enable_gqa=True)), *own)
        return [g.numpy().astype(np.float64) for g in got]

    for near, exact in zip(f(kind), f(np.float64), strict=True):
        np.testing.assert_allclose(
            near, exact, rtol=0, atol=4 * float(ml_dtypes.finfo(kind).eps) * np.abs(exact).max(initial=1)
        )
