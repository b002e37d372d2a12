"""Collectives on several ranks: values, adjoints, order 2, walks in which ranks differ."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np

import tapegrad as tg
from tapegrad import distributed as dist
from tapegrad.distributed import Group

F64 = np.float64


def data(group: Group, *shape: int, seed: int = 0, dtype: Any = F64) -> np.ndarray:
    """Numbers of this rank."""
    rng = np.random.default_rng([seed, group.rank])
    x = rng.normal(size=shape)
    if np.dtype(dtype).kind == "c":
        x = x + 1j * rng.normal(size=shape)
    return np.asarray(x, dtype=dtype)


def everyone(group: Group, x: np.ndarray) -> list[np.ndarray]:
    return group.exchange_objects(x)


def same(a: Any, b: Any, exact: bool = True) -> None:
    a, b = np.asarray(a), np.asarray(b)
    assert a.shape == b.shape, (a.shape, b.shape)
    assert a.dtype == b.dtype, (a.dtype, b.dtype)
    if exact:
        assert a.tobytes() == b.tobytes(), (a, b)
    else:
        np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-12)


def uneven(group: Group, r: int | None = None) -> int:
    r = group.rank if r is None else r
    return (r * 3) % 4  # 0 among them


def maps(group: Group) -> dict[str, tuple[Callable[[tg.Tensor], tg.Tensor], tuple[int, ...]]]:
    """Linear collectives by name, and the shape of this rank's operand."""
    n, last = group.size, group.size - 1
    sizes = [uneven(group, r) for r in range(n)]
    return {
        "sum": (lambda x: dist.all_reduce(x), (3, 2)),
        "sum of nothing": (lambda x: dist.all_reduce(x), (0, 2)),
        "sum of a number": (lambda x: dist.all_reduce(x), ()),
        "large sum": (lambda x: dist.all_reduce(x), (40, 51)),
        "engine's sum": (lambda x: dist.all_reduce(x, exact=False), (5,)),
        "mean": (lambda x: dist.all_reduce(x, "mean"), (3, 2)),
        "reduce": (lambda x: dist.reduce(x, last), (3, 2)),
        "broadcast": (lambda x: dist.broadcast(x, last), (2, 3)),
        "all_gather": (lambda x: dist.all_gather(x, 1), (2, 3)),
        "uneven all_gather": (lambda x: dist.all_gather(x), (uneven(group), 2)),
        "all_gather of numbers": (lambda x: dist.all_gather(x), ()),
        "reduce_scatter": (lambda x: dist.reduce_scatter(x, 1), (2, 2 * n + 1)),
        "uneven reduce_scatter": (lambda x: dist.reduce_scatter(x, sizes=sizes), (sum(sizes), 2)),
        "gather": (lambda x: dist.gather(x, last, 1), (2, 3)),
        "uneven gather": (lambda x: dist.gather(x), (uneven(group), 2)),
        "scatter": (lambda x: dist.scatter(x, last), (2 * n + 1, 2)),
        "all_to_all": (lambda x: dist.all_to_all(x), (2 * n, 3)),
        "all_to_all across": (lambda x: dist.all_to_all(x, 0, 1), (2 * n + 1, 3)),
        "uneven all_to_all across": (lambda x: dist.all_to_all(x, 1, 0), (uneven(group), n)),
        "shift": (lambda x: dist.shift(x), (3, 2)),
        "shift back": (lambda x: dist.shift(x, -2), (3, 2)),
        "open shift": (lambda x: dist.shift(x, periodic=False), (3, 2)),
    }


def case_values(group: Group) -> None:
    n, r = group.size, group.rank
    for dtype in (np.float32, F64, np.complex64, np.complex128, np.int32, np.float16):
        x = (10 * data(group, 4, 3, dtype=F64)).astype(dtype)
        xs = everyone(group, x)
        total = xs[0].copy()
        for other in xs[1:]:
            total = total + other if dtype != np.float16 else total.astype(np.float32) + other
        same(dist.all_reduce(x), total.astype(dtype))
        same(dist.all_gather(x), np.concatenate(xs))
        same(dist.all_gather(x, -1), np.concatenate(xs, axis=1))
        same(dist.broadcast(x, n - 1), xs[-1])
        same(dist.gather(x), np.concatenate(xs) if r == 0 else x[:0])
        same(dist.shift(x), xs[(r - 1) % n])
        same(dist.reduce(x, n - 1), total.astype(dtype) if r == n - 1 else np.zeros_like(x))
    same(dist.all_reduce(x, "max"), np.max(everyone(group, x), axis=0))
    same(dist.all_reduce(x, "min"), np.min(everyone(group, x), axis=0))
    y = data(group, 5)
    same(dist.all_reduce(y, "prod"), np.prod(everyone(group, y), axis=0), exact=False)
    same(dist.all_reduce(y > 0, "max"), np.any(everyone(group, y > 0), axis=0))
    same(dist.shift(y, periodic=False, fill=7.0), np.full(5, 7.0) if r == 0 else everyone_before(group, y))


def everyone_before(group: Group, y: np.ndarray) -> np.ndarray:
    """Rank 0 asks nobody: it has no neighbour before it."""
    return np.random.default_rng([0, group.rank - 1]).normal(size=y.shape)


def case_layouts(group: Group) -> None:
    """An array in another order, strided, reversed, of bfloat16: values by position, not by memory."""
    x = data(group, 4, 6)
    xs = everyone(group, x)
    total = sum(xs[1:], xs[0].copy())
    same(dist.all_reduce(np.asfortranarray(x)), total)
    same(dist.all_reduce(x[::-1, ::2]), total[::-1, ::2])
    same(dist.all_reduce(tg.transpose(tg.asarray(x))), total.T)
    same(dist.all_gather(np.asfortranarray(x)), np.concatenate(xs))
    b = tg.astype(tg.asarray(x), tg.bfloat16)
    assert dist.all_reduce(b).dtype == tg.bfloat16
    wide = sum(np.asarray(tg.astype(tg.asarray(v), tg.bfloat16)).astype(np.float32) for v in xs)
    np.testing.assert_allclose(np.asarray(dist.all_reduce(b)).astype(np.float32), wide, rtol=8e-3)


def case_adjoints(group: Group) -> None:
    """<ct, A t> = <A' ct, t>, summed over ranks, for real and complex numbers; tangents are the map itself."""
    for dtype in (F64, np.complex128):
        for name, (f, shape) in maps(group).items():
            x, t = data(group, *shape, seed=1, dtype=dtype), data(group, *shape, seed=2, dtype=dtype)
            y, pull = tg.vjp(f, tg.asarray(x))
            ct = data(group, *y.shape, seed=3, dtype=dtype)
            (back,) = pull(tg.asarray(ct))
            pushed = tg.jvp(f, (tg.asarray(x),), (tg.asarray(t),))[1]
            left = sum(everyone(group, np.vdot(ct, np.asarray(pushed))))
            right = sum(everyone(group, np.vdot(np.asarray(back), t)))
            assert abs(left - right) <= 1e-12 * max(1.0, abs(left)), (name, dtype, left, right)
            np.testing.assert_allclose(np.asarray(pushed), np.asarray(f(tg.asarray(t))), rtol=1e-12, err_msg=name)


def case_adjoints_of_given_cotangents(group: Group) -> None:
    """The same identity by a tape, to which each rank gives cotangents of its own, also of what all ranks have."""
    for name, (f, shape) in maps(group).items():
        x, t = data(group, *shape, seed=1), data(group, *shape, seed=2)
        source = tg.asarray(x)
        with tg.GradientTape(persistent=True) as tape:
            tape.watch(source)
            y = f(source)
            twice = y * 2.0
        ct = data(group, *y.shape, seed=3)
        pushed = f(tg.asarray(t)).numpy()
        for target, factor in ((y, 1.0), (twice, 2.0)):
            back = tape.gradient(target, source, output_gradients=tg.asarray(ct), unconnected_gradients="zero")
            left = sum(everyone(group, factor * np.vdot(ct, pushed)))
            right = sum(everyone(group, np.vdot(back.numpy(), t)))
            assert abs(left - right) <= 1e-12 * max(1.0, abs(left)), (name, left, right)


def case_given_and_default_seeds(group: Group) -> None:
    """A replicated target: one without ``output_gradients``; as many as there are ranks with them."""
    x = tg.asarray(np.array([1.0 + group.rank]))
    u = np.array([2.0 + 3.0 * group.rank])
    total = sum(everyone(group, u))

    def gradient(given: Any, twice: bool = False) -> np.ndarray:
        with tg.GradientTape() as tape:
            tape.watch(x)
            y = dist.all_reduce(x)
        return tape.gradient([y, y] if twice else y, x, output_gradients=given).numpy()

    same(gradient(u), total)
    same(gradient(None), np.ones(1))
    same(gradient([u, None], twice=True), total + 1)


def case_differences(group: Group) -> None:
    """Gradients of compositions, with dot products and a loss that every rank has, against differences."""
    x = data(group, 6)
    xs = everyone(group, x)

    m = tg.Variable(F64(1.3))
    with tg.GradientTape() as tape:
        a = dist.all_reduce(tg.sum(x * m))
        top = dist.all_reduce(tg.sum(x * m), "max")
        j = dist.all_reduce(tg.sum((a * x + dist.shift(x * m)) ** 2) + top) * 0.5
    found = dist.all_reduce(tape.gradient(j, m))

    def plain(m: float) -> float:
        a = sum(v.sum() * m for v in xs)
        top = max(v.sum() * m for v in xs)
        parts = [((a * v + xs[(r - 1) % len(xs)] * m) ** 2).sum() + top for r, v in enumerate(xs)]
        return 0.5 * sum(parts)

    h = 1e-6
    wanted = (plain(1.3 + h) - plain(1.3 - h)) / (2 * h)
    np.testing.assert_allclose(float(found), wanted, rtol=1e-8)


def case_second_order(group: Group) -> None:
    """Hessian of a replicated loss times a vector, reverse over reverse, and forward over reverse."""
    x = data(group, 4)
    xs = everyone(group, x)

    def hessian() -> float:
        f = lambda m: sum((sum(v.sum() * m**2 for v in xs) * w + 0).sum() ** 2 for w in xs)
        h = 1e-3
        return (f(1.2 + h) - 2 * f(1.2) + f(1.2 - h)) / h**2

    m = tg.Variable(F64(1.2))
    with tg.GradientTape() as outer:
        with tg.GradientTape() as inner:
            a = dist.all_reduce(tg.sum(x * m**2))
            j = dist.all_reduce(tg.sum(a * x) ** 2)
        g = dist.all_reduce(inner.gradient(j, m))
    second = dist.all_reduce(outer.gradient(g, m))
    np.testing.assert_allclose(float(second), hessian(), rtol=1e-5)


def case_only_some_watch(group: Group) -> None:
    """A source on one rank alone: the others take part in the walk."""
    x = tg.asarray(data(group, 3))
    xs = everyone(group, np.asarray(x))
    for who in range(group.size):
        w = tg.asarray(np.arange(1.0, 4.0))
        with tg.GradientTape() as tape:
            if group.rank == who:
                tape.watch(w)
            total = dist.all_reduce(x * w if group.rank == who else x)
            unused = dist.all_reduce(x)  # reached by no source
            mine = tg.sum(total * x) + tg.sum(unused)
        g = tape.gradient(mine, w if group.rank == who else [])
        if group.rank == who:
            np.testing.assert_allclose(np.asarray(g), sum(xs) * xs[who], rtol=1e-12)


def case_only_some_want(group: Group) -> None:
    """A target that only one rank's loss needs, and a collective after it that nobody's does."""
    x = data(group, 3)
    w = tg.Variable(np.ones(3))
    with tg.GradientTape() as tape:
        total = dist.all_reduce(x * w)
        mine = tg.sum(total) if group.rank == 0 else tg.sum(w) * 0.0
        dist.all_reduce(tg.sum(w))  # a figure to print
    g = tape.gradient(mine, w)
    np.testing.assert_allclose(np.asarray(g), x if group.rank else x, rtol=1e-12)


def case_checkpoints(group: Group) -> None:
    """recompute_grad and checkpointed_loop around collectives: the gradient of the plain program, to the bit."""
    x = tg.asarray(data(group, 5))

    def block(u: tg.Tensor) -> tg.Tensor:
        return tg.tanh(dist.shift(u) * 0.5 + u * dist.all_reduce(tg.sum(u)) * 0.1)

    def gradient(f: Callable[[tg.Tensor], tg.Tensor]) -> np.ndarray:
        w = tg.asarray(np.linspace(0.5, 1, 5) + group.rank)
        with tg.GradientTape() as tape:
            tape.watch(w)
            loss = tg.sum(f(w * x) ** 2)
        return np.asarray(tape.gradient(loss, w))

    def steps(u: tg.Tensor) -> tg.Tensor:
        for _ in range(6):
            u = block(u)
        return u

    plain = gradient(steps)
    same(gradient(tg.recompute_grad(steps)), plain)
    looped = gradient(lambda u: tg.checkpointed_loop(block, u, 6, snapshots=2))
    same(looped, plain)


def case_saved_collectives(group: Group) -> None:
    """With policies.save_collectives a rerun communicates no more; the gradient's bits are the same."""
    x = tg.asarray(data(group, 5))

    def block(u: tg.Tensor) -> tg.Tensor:
        return tg.tanh(dist.shift(u) * 0.5 + u * dist.all_reduce(tg.sum(u)) * 0.1)

    def gradient(**options: Any) -> tuple[np.ndarray, int]:
        w = tg.asarray(np.linspace(0.5, 1, 5) + group.rank)
        with tg.GradientTape() as tape:
            tape.watch(w)
            loss = tg.sum(tg.recompute_grad(block, **options)(w * x) ** 2)
        before = group.line.number
        return np.asarray(tape.gradient(loss, w)), group.line.number - before

    again, count = gradient()
    found, fewer = gradient(policy=tg.policies.save_collectives)
    same(found, again)
    assert count - fewer == 2, (count, fewer)


def case_checkpoint_watched_on_one_rank(group: Group) -> None:
    x = tg.asarray(data(group, 3))
    xs = everyone(group, np.asarray(x))
    w = tg.asarray(np.arange(1.0, 4.0))
    f = tg.recompute_grad(lambda v: dist.all_reduce(v) * x)
    with tg.GradientTape() as tape:
        if group.rank == 0:
            tape.watch(w)
        mine = tg.sum(f(x * w if group.rank == 0 else x))
    g = tape.gradient(mine, w if group.rank == 0 else [])
    if group.rank == 0:
        np.testing.assert_allclose(np.asarray(g), sum(xs) * xs[0], rtol=1e-12)


def case_budget(group: Group) -> None:
    """Ranks with unequal shapes under tight budgets drop different values; no collective is repeated alone."""
    n = 4000 * (1 + group.rank)
    x = tg.asarray(data(group, n))

    def gradient(budget: int | None) -> np.ndarray:
        w = tg.Variable(np.ones(n))

        def run() -> np.ndarray:
            with tg.GradientTape() as tape:
                u = x * w
                for _ in range(8):
                    a = dist.all_reduce(tg.sum(tg.sin(u)))
                    u = tg.cos(u) * a + tg.exp(-u * u)
                loss = tg.sum(u)
            return np.asarray(tape.gradient(loss, w))

        if budget is None:
            return run()
        with tg.memory_budget(budget):
            return run()

    plain = gradient(None)
    same(gradient(20 * n * 8), plain)
    same(gradient(11 * n * 8), plain)


def case_budget_keeps_collectives(group: Group) -> None:
    """Within a budget that drops nearly everything, as many collectives are done as without one."""
    x = tg.asarray(data(group, 5000))
    w = tg.Variable(np.ones(5000))

    def gradient() -> tuple[np.ndarray, int]:
        before = group.line.number
        with tg.GradientTape() as tape:
            u = x * w
            for _ in range(5):
                u = tg.sin(dist.all_reduce(u)) * x + tg.exp(-u * u)
            loss = tg.sum(u)
        return np.asarray(tape.gradient(loss, w)), group.line.number - before

    plain, count = gradient()
    with tg.memory_budget(17 * 40000):
        found, within = gradient()
    same(found, plain)
    assert within == count, (within, count)
    assert everyone(group, within) == [count] * group.size


def case_loop_within_budgets(group: Group) -> None:
    """Stored states of a loop with collectives are not dropped, for only this rank would run steps again."""
    n = 4000 * (1 + 2 * group.rank)
    x = tg.asarray(data(group, n))
    step = lambda u: tg.tanh(u * x + dist.all_reduce(tg.sum(u)) * 1e-3)

    def gradient() -> tuple[np.ndarray, int]:
        w, before = tg.asarray(np.ones(n)), group.line.number
        with tg.GradientTape() as tape:
            tape.watch(w)
            loss = tg.sum(tg.checkpointed_loop(step, w, 12, snapshots=6))
        return np.asarray(tape.gradient(loss, w)), group.line.number - before

    plain, count = gradient()
    least = tg.memory.predict_peak(lambda: gradient_of_loop(step, n), budgets=[]).least_bytes
    assert least is not None
    least += least // 32  # the pool of a GPU may be too fragmented for an array that would fit
    with tg.memory_budget(least) if group.rank == group.size - 1 else nullcontext():
        found, within = gradient()
    same(found, plain)
    assert everyone(group, within) == [count] * group.size, (count, within)


def case_loop_too_large_for_a_budget(group: Group) -> None:
    """A budget evicts the stored states of such a loop, which it does not drop; one that is too small is an error."""
    n = 4000
    x, w = tg.asarray(data(group, n)), tg.asarray(np.ones(n))
    step = lambda u: tg.tanh(u * x + dist.all_reduce(tg.sum(u)) * 1e-3)

    def gradient(snapshots: int, budget: str) -> np.ndarray:
        with tg.memory_budget(budget), tg.GradientTape() as tape:
            tape.watch(w)
            loss = tg.sum(tg.checkpointed_loop(step, w, 12, snapshots=snapshots))
            return np.asarray(tape.gradient(loss, w))

    same(gradient(12, "320KiB"), gradient(12, "1MiB"))
    said = ""
    try:
        gradient(12, "160KiB")
    except tg.errors.BudgetError as e:
        said = str(e)
    assert "beside stored states" in said


def gradient_of_loop(step: Callable[[tg.Tensor], tg.Tensor], n: int) -> tg.Tensor:
    w = tg.asarray(np.ones(n))
    with tg.GradientTape() as tape:
        tape.watch(w)
        loss = tg.sum(tg.checkpointed_loop(step, w, 12, snapshots=6))
    return tape.gradient(loss, w)


def case_loop_differentiated_on_one_rank(group: Group) -> None:
    """The ranks rerun a loop alike in second order, though a single one watches."""
    x = tg.asarray(data(group, 3))
    w = tg.asarray(np.linspace(0.1, 0.3, 3))
    step = lambda u: tg.tanh(u * x + dist.all_reduce(u) * 0.1)
    watched = [w] if group.rank == 0 else []

    def twice(loop: Callable[[tg.Tensor], tg.Tensor]) -> list[np.ndarray]:
        with tg.GradientTape() as outer:
            outer.watch(watched)
            with tg.GradientTape() as tape:
                tape.watch(watched)
                loss = tg.sum(loop(w) ** 2)
            slopes = tape.gradient(loss, watched)
            total = sum((tg.sum(g * g) for g in slopes), tg.zeros((), "float64"))
        return [np.asarray(g) for g in outer.gradient(total, watched)]

    plain = twice(lambda u: step(step(step(step(u)))))
    found = twice(lambda u: tg.checkpointed_loop(step, u, 4, snapshots=1))
    for a, b in zip(found, plain, strict=True):
        same(a, b, exact=False)


def case_reruns_of_parts_in_second_order(group: Group) -> None:
    """Only the ranks of one part walk back through a collective of theirs in a rerun: the others' tapes have none."""
    half = group.split(group.rank % 2)
    w = tg.asarray(np.linspace(0.1, 0.3, 3))
    watched = [w] if group.rank % 2 == 0 else []
    block = lambda u: tg.tanh(dist.all_reduce(u * u, group=half))

    def twice(f: Callable[[tg.Tensor], tg.Tensor]) -> list[np.ndarray]:
        with tg.GradientTape() as outer:
            outer.watch(watched)
            with tg.GradientTape() as tape:
                tape.watch(watched)
                loss = tg.sum(dist.all_reduce(f(w) + 1.0) ** 2)
            slopes = tape.gradient(loss, watched)
            total = sum((tg.sum(g * g) for g in slopes), tg.zeros((), "float64"))
        return [np.asarray(g) for g in outer.gradient(total, watched)]

    for a, b in zip(twice(tg.recompute_grad(block)), twice(block), strict=True):
        same(a, b, exact=False)


def case_bytes_of_a_loop(group: Group) -> None:
    """Ranks with unequal states store as many; what does not fit on one rank is an error on all."""
    n = 2000 * (1 + 3 * group.rank)
    x = tg.asarray(data(group, n))
    step = lambda u: tg.tanh(u * x + dist.all_reduce(tg.sum(u)) * 1e-3)

    def gradient(nbytes: int | None) -> np.ndarray:
        w = tg.asarray(np.ones(n))
        with tg.GradientTape() as tape:
            tape.watch(w)
            loss = tg.sum(tg.checkpointed_loop(step, w, 10, bytes=nbytes))
        return np.asarray(tape.gradient(loss, w))

    same(gradient(2**22), gradient(None))
    same(gradient(30 * 8 * 2000 * (1 + 3 * (group.size - 1))), gradient(None))
    try:
        gradient(16 * 2000 if group.rank == group.size - 1 else 2**22)
    except tg.errors.RecomputeError as e:
        told = everyone(group, str(e))
        assert all("is too little" in text for text in told), told
        assert group.size == 1 or f"on rank {group.size - 1}" in told[0], told
    else:
        raise AssertionError("too few bytes on one rank")


def case_conjugate_gradients_in_a_loop(group: Group) -> None:
    """A solver that a user writes: its inner products are sums over ranks, and its gradient is one process's."""
    n = 8 * group.size
    whole = np.random.default_rng(1).normal(size=(n, n))
    whole = whole @ whole.T + n * np.eye(n)
    here = slice(8 * group.rank, 8 * group.rank + 8)
    b = np.linspace(0, 1, n)[here]
    a = tg.asarray(whole[here])

    def gradient(a: tg.Tensor, b: Any, all_of: Any, total: Any) -> np.ndarray:
        """Of the sum of squares after six iterations in the rows ``a``."""

        def step(state: Any) -> Any:
            x, r, p, rr = state
            ap = a @ all_of(p)
            alpha = rr / total(tg.sum(p * ap))
            r = r - alpha * ap
            new = total(tg.sum(r * r))
            return x + alpha * p, r, r + (new / rr) * p, new

        with tg.GradientTape() as tape:
            tape.watch(a)
            r = tg.asarray(b)
            x = tg.checkpointed_loop(step, (tg.zeros_like(r), r, r, total(tg.sum(r * r))), 6)[0]
            loss = tg.sum(x * x)
        return np.asarray(tape.gradient(loss, a))

    found = gradient(a, b, dist.all_gather, dist.all_reduce)
    alone = gradient(tg.asarray(whole), np.linspace(0, 1, n), lambda x: x, lambda x: x)
    np.testing.assert_allclose(found, alone[here], rtol=1e-9, atol=1e-12)


def case_captured_on_a_tape(group: Group) -> None:
    """A tape around a captured function with collectives: eager, with the reason told."""
    x = data(group, 4)
    f = tg.function(lambda w: dist.all_reduce(w * x))
    for _ in range(3):
        w = tg.asarray(np.ones(4))
        with tg.GradientTape() as tape:
            tape.watch(w)
            y = f(w)
        np.testing.assert_allclose(np.asarray(tape.gradient(y, w)), x, rtol=1e-12)
    if group.size > 1:
        assert any("collectives" in reason for reason in f.stats.fallbacks), f.stats


def case_captured_collectives_are_not_merged(group: Group) -> None:
    """Equal collectives, and one whose result nobody reads: all are done in each replay."""

    def step(w: tg.Tensor) -> tg.Tensor:
        dist.all_reduce(w * 2)
        return dist.all_reduce(w) + dist.all_reduce(w)

    f, w = tg.function(step), tg.asarray(data(group, 3))
    counts = []
    for _ in range(4):
        before = group.line.number
        f(w)
        counts.append(group.line.number - before)
    assert counts == [3, 3, 3, 3], counts


def case_captured(group: Group) -> None:
    """A captured step of each rank: the bits of the eager one."""
    x = data(group, 6)

    def step(w: tg.Tensor) -> Any:
        with tg.GradientTape() as tape:
            tape.watch(w)
            j = dist.all_reduce(tg.sum((w * x + dist.shift(w)) ** 2))
        return j, dist.all_reduce(tape.gradient(j, w))

    captured = tg.function(step)
    for k in range(5):
        w = tg.asarray(np.linspace(0, 1, 6) + k)
        for a, b in zip(step(w), captured(w), strict=True):
            same(a, b)
    assert captured.stats.replays >= 2, captured.stats


def case_jacobian_and_vmap(group: Group) -> None:
    n = group.size
    jacobian = np.asarray(tg.jacobian(dist.all_gather)(tg.asarray(data(group, 2))))
    assert jacobian.shape == (2 * n, 2)
    batch = data(group, 3, 4)
    same(tg.vmap(lambda v: dist.all_reduce(v))(tg.asarray(batch)), np.asarray(dist.all_reduce(batch)))


def case_ambiguous_targets_warn(group: Group) -> None:
    """What every rank has the same way, beside what is reduced, or out of a call: the warning names the user's line."""
    import warnings

    w = tg.Variable(np.ones(3))
    f = tg.recompute_grad(lambda v: dist.all_reduce(tg.sum(v)))
    for build, count, text in (
        (lambda: dist.all_reduce(tg.sum(w)) + tg.sum(w * 2.0), 3 * group.size, "once"),
        (lambda: f(w.value()), 1, "recompute_grad"),
    ):
        with tg.GradientTape() as tape:
            target = build()
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            found = dist.all_reduce(tape.gradient(target, w))
        if group.size > 1:
            assert [x.category for x in told] == [tg.errors.ReplicatedTargetWarning], told
            assert text in str(told[0].message) and told[0].filename == __file__, told[0]
        wanted = count if text == "recompute_grad" else 2 * group.size + group.size**2
        np.testing.assert_allclose(np.asarray(found), np.full(3, wanted * (group.size if count == 1 else 1)))


def case_gradients_in_what_comes_after_a_sum(group: Group) -> None:
    """Rank 0 alone seeds the target; the other ranks' gradients are zeros, so that they can be added up."""
    w, scale = tg.Variable(np.ones(3)), tg.Variable(np.float64(2.0))
    with tg.GradientTape() as tape:
        total = dist.all_reduce(tg.sum(w * data(group, 3)))
        found = tape.gradient(total * scale, [w, scale, total])
    sums = [np.asarray(dist.all_reduce(g)) for g in found]
    everything = sum(everyone(group, data(group, 3)))
    for got, wanted in zip(sums, [2.0 * everything, np.sum(everything), 2.0], strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-12)
    with dist.GradientTape() as parallel:
        target = dist.all_reduce(tg.sum(w * data(group, 3))) * scale
    slopes = parallel.gradient(target, [w, scale])
    np.testing.assert_allclose(np.asarray(slopes[0]), 2.0 * everything, rtol=1e-12)
    np.testing.assert_allclose(np.asarray(slopes[1]), np.sum(everything), rtol=1e-12)
