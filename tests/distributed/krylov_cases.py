"""Iterative solves over ranks: blocks of one vector, whose inner products are summed, and whole vectors."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

import tapegrad as tg
from tapegrad import distributed as dist
from tapegrad.distributed import Group
from tapegrad.errors import DistributedError, ShapeError

TIGHT = {"rtol": 1e-13, "atol": 1e-13}
COLUMNS = 3
Solve = Callable[[Any, Any, float], Any]


class Field:
    """A field of unequal blocks of rows; its matrix is symmetric for ``skew`` 0."""

    def __init__(self, group: Group) -> None:
        self.grid = dist.Grid((group.size,), group=group)
        self.rows = [2 + r for r in range(group.size)]
        self.at = sum(self.rows[: group.rank])
        self.shape = sum(self.rows), COLUMNS
        rng = np.random.default_rng(3)
        self.c, self.b, self.weights = (
            rng.uniform(1, 2, self.shape),
            rng.normal(size=self.shape),
            rng.normal(size=self.shape),
        )
        self.mine = slice(self.at, self.at + self.rows[group.rank])

    def operator(self, c: Any, x: Any, skew: float) -> Any:
        around = dist.halo_exchange(x, 1, self.grid)
        return (2 + c) * x - (1 + skew) * around[2:] - (1 - skew) * around[:-2]

    def dense(self, c: Any, skew: float) -> Any:
        """The matrix of all ranks."""
        n, m = self.shape
        off = (1 + skew) * np.eye(n, k=1) + (1 - skew) * np.eye(n, k=-1)
        return tg.diag(tg.reshape(2 + c, (-1,))) - np.kron(off, np.eye(m))

    def by_blocks(self, method: str, **options: Any) -> Solve:
        def solve(c: Any, b: Any, skew: float) -> Any:
            f = getattr(tg.sparse, method)
            x, info = f(lambda x: self.operator(c, x, skew), b, reduce=dist.all_reduce, **TIGHT, **options)
            assert info == 0, info
            return x

        return solve

    def by_one(self, c: Any, b: Any, skew: float) -> Any:
        return tg.reshape(tg.linalg.solve(self.dense(c, skew), tg.reshape(b, (-1,))), self.shape)


def derivatives(solve: Solve, c: Any, b: Any, weights: Any, skew: float, watched: tuple[bool, bool]) -> list[Any]:
    """The solution, gradients, and gradients of a function of these."""
    c, b = tg.asarray(c), tg.asarray(b)
    sources = [x for x, w in zip((c, b), watched, strict=True) if w]
    with tg.GradientTape() as outer:
        outer.watch(sources)
        with tg.GradientTape() as tape:
            tape.watch(sources)
            x = solve(c, b, skew)
            loss = tg.sum(weights * x**2)
        slopes = tape.gradient(loss, sources)
        total = sum((tg.sum(g**3) for g in slopes), tg.zeros((), "float64"))
    return [np.asarray(v) for v in (x, *slopes, *outer.gradient(total, sources))]


def case_blocks(group: Group) -> None:
    """Solutions and derivatives are those of one process with the whole matrix."""
    f = Field(group)
    scale = partial(tg.multiply, 0.3)
    for method, skew, options in (("cg", 0.0, {}), ("cg", 0.0, {"M": scale}), ("gmres", 0.4, {}),
                                  ("gmres", 0.4, {"M": scale, "restart": 6, "maxiter": 40})):  # fmt: skip
        wanted = derivatives(f.by_one, f.c, f.b, f.weights, skew, (True, True))
        solve = f.by_blocks(method, **options)
        found = derivatives(solve, f.c[f.mine], f.b[f.mine], f.weights[f.mine], skew, (True, True))
        for x, w in zip(found, wanted, strict=True):
            np.testing.assert_allclose(x, w[f.mine], rtol=1e-9, atol=1e-10)


def case_watched_on_one_rank(group: Group) -> None:
    """Ranks that watch other things, or nothing, take part in all solves."""
    f = Field(group)
    watched = (group.rank == 0, group.rank == group.size - 1)
    solve = f.by_blocks("gmres")
    x, *found = derivatives(solve, f.c[f.mine], f.b[f.mine], f.weights[f.mine], 0.4, watched)
    wanted = derivatives(f.by_one, f.c, f.b, f.weights, 0.4, (True, True))
    np.testing.assert_allclose(x, wanted[0][f.mine], rtol=1e-9, atol=1e-10)
    first = [w[f.mine] for w, there in zip(wanted[1:3], watched, strict=True) if there]
    assert len(found) == 2 * len(first)
    for g, w in zip(found, first, strict=False):
        np.testing.assert_allclose(g, w, rtol=1e-9, atol=1e-10)


def case_reruns_and_forward_mode(group: Group) -> None:
    f = Field(group)
    solve = f.by_blocks("cg")
    c, b = (tg.asarray(x[f.mine]) for x in (f.c, f.b))
    plain = tg.grad(lambda c: tg.sum(solve(c, b, 0.0) ** 2))(c)
    again = tg.grad(lambda c: tg.sum(tg.recompute_grad(lambda c: solve(c, b, 0.0))(c) ** 2))(c)
    assert np.asarray(plain).tobytes() == np.asarray(again).tobytes()
    t = np.random.default_rng(8).normal(size=f.shape)
    moved = tg.jvp(lambda c: solve(c, b, 0.0), (c,), (tg.asarray(t[f.mine]),))[1]
    whole = tg.jvp(lambda c: f.by_one(c, tg.asarray(f.b), 0.0), (tg.asarray(f.c),), (tg.asarray(t),))[1]
    np.testing.assert_allclose(np.asarray(moved), np.asarray(whole)[f.mine], rtol=1e-9, atol=1e-11)


def case_whole_vectors(group: Group) -> None:
    """A sum of matrices, one on each rank: every rank has the solution; for gradients vectors are cut."""
    n = 7
    rng = np.random.default_rng([1, group.rank])
    rows = rng.normal(size=(9, n))
    total = sum(group.exchange_objects(rows.T @ rows))
    b = np.random.default_rng(2).normal(size=n)
    product = lambda x: rows.T @ (rows @ x)
    x, info = tg.sparse.cg(lambda x: dist.all_reduce(product(x)), b, **TIGHT)
    assert info == 0
    np.testing.assert_allclose(np.asarray(x), np.linalg.solve(total, b))

    def by_parts(rows: Any) -> Any:
        operator = lambda x: dist.reduce_scatter(tg.matrix_transpose(rows) @ (rows @ dist.all_gather(x)))
        return dist.all_gather(tg.sparse.cg(operator, b[dist.part(n)], reduce=dist.all_reduce, **TIGHT)[0])

    w = tg.asarray(rows)
    with tg.GradientTape() as tape:
        tape.watch(w)
        loss = tg.sum(by_parts(w) ** 2)
    y = np.linalg.solve(total, b)
    adjoint = np.linalg.solve(total, 2 * y)
    wanted = -rows @ (np.outer(y, adjoint) + np.outer(adjoint, y))
    np.testing.assert_allclose(np.asarray(tape.gradient(loss, w)), wanted, rtol=1e-8, atol=1e-10)


def refused(group: Group, f: Callable[[], Any], *words: str, kind: type[Exception] = DistributedError) -> None:
    try:
        f()
        text = "no error"
    except kind as e:
        text = str(e)
    for told in group.exchange_objects(text):
        assert all(word in told for word in words), told


def case_wrong_use(group: Group) -> None:
    """Every rank hears what is missing."""
    w = tg.asarray(np.eye(3) * 2)
    with tg.GradientTape() as tape:
        tape.watch(w)
        x, _ = tg.sparse.cg(lambda x: dist.all_reduce(w @ x), np.ones(3))
        loss = tg.sum(x) * (1.0 + group.rank)
    refused(group, lambda: tape.gradient(loss, w), "cg: a solve", "(all_reduce)", "reduce=tg.distributed.all_reduce")
    summed = lambda x: dist.all_reduce(2.0 * x)
    bad = lambda s: tg.sum(dist.all_reduce(s))
    refused(group, lambda: tg.sparse.cg(summed, np.ones(3), reduce=bad), "reduce made ()", kind=ShapeError)
    if group.size > 1:
        for b in (np.full(3, 1.0 + group.rank), np.full(3, float(group.rank))):  # on rank 0 zeros, then
            for solve in (tg.sparse.cg, tg.sparse.gmres):
                refused(group, partial(solve, summed, b), "is not the same on all ranks", "part(n)")
        start = np.full(3, float(group.rank))
        refused(group, lambda: tg.sparse.cg(summed, np.ones(3), start), "b or x0 is not the same on all ranks")
