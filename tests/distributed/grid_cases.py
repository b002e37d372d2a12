"""Grids, halos, whole fields and messages between two ranks."""

from __future__ import annotations

from typing import Any

import numpy as np
from collective_cases import data, everyone, same

import tapegrad as tg
from tapegrad import distributed as dist
from tapegrad.distributed import Grid, Group


def shapes(group: Group) -> list[tuple[int, ...]]:
    return {1: [(1,), (1, 1)], 2: [(2,), (1, 2), (2, 1)], 3: [(3,), (3, 1)], 4: [(4,), (2, 2), (4, 1)]}[group.size]


FILLS: dict[str, Any] = {"constant": {"mode": "constant", "constant_values": 3.0}, "edge": {"mode": "edge"}}


def case_halos_are_the_neighbours(group: Group) -> None:
    """The block with its halo is a window of the padded field: corners, unequal blocks, widths, ends of all kinds."""
    field = np.random.default_rng(1).normal(size=(11, 13, 2))
    for shape in shapes(group):
        for periodic in (False, True):
            for width in (1, [2, 1], [(1, 2), (0, 1)], 0):
                each = width if isinstance(width, list) else [width] * 2
                pads = [(w, w) if isinstance(w, int) else w for w in each][: len(shape)]
                grid = Grid(shape, periodic)
                block = grid.block(field.shape)
                own = [*pads, *[(0, 0)] * (3 - len(pads))]
                kinds = {"wrap": {"mode": "wrap"}} if periodic else FILLS
                for name, how in kinds.items():
                    around = np.pad(field, own, **how)
                    window = tuple(slice(s.start, s.stop + sum(w)) for s, w in zip(block, own, strict=True))
                    fill: Any = 3.0 if name == "constant" else name if name == "edge" else 0
                    some = width if isinstance(width, int) else width[: len(shape)]
                    u = dist.halo_exchange(field[block], some, grid, fill=fill)
                    same(u, around[window])
                    same(dist.interior(u, some, grid), field[block])


def case_adjoint(group: Group) -> None:
    """<ct, H u> = <H' ct, u> over all ranks; backwards twice is forwards."""
    for shape in shapes(group):
        for periodic in (False, True):
            grid = Grid(shape, periodic)
            u = data(group, *(5 + c for c in grid.coords), seed=1)
            y, pull = tg.vjp(lambda v, grid=grid: dist.halo_exchange(v, 2, grid, fill=0), tg.asarray(u))
            ct = data(group, *y.shape, seed=2)
            (back,) = pull(tg.asarray(ct))
            left = sum(everyone(group, np.vdot(ct, np.asarray(y))))
            right = sum(everyone(group, np.vdot(np.asarray(back), u)))
            assert abs(left - right) < 1e-12 * max(1, abs(left)), (shape, periodic, left, right)


def laplacian(u: Any) -> Any:
    return u[2:, 1:-1] + u[:-2, 1:-1] + u[1:-1, 2:] + u[1:-1, :-2] - 4.0 * u[1:-1, 1:-1]


def case_wave_equation(group: Group) -> None:
    """2-D waves with a checkpointed loop: forward bits of one process, the gradient to rounding."""
    n, steps = 17, 12
    rng = np.random.default_rng(0)
    first, speed = rng.normal(size=(n, n)), 0.1 + 0.05 * rng.random((n, n))
    target = rng.normal(size=(n, n))

    def run(grid: Grid | None, cut: Any) -> tuple[np.ndarray, np.ndarray]:
        c, zero = tg.asarray(speed[cut]), tg.asarray(np.zeros((n, n))[cut])

        def around(u: Any) -> Any:
            return tg.pad(u, [(1, 1), (1, 1)]) if grid is None else dist.halo_exchange(u, 1, grid)

        with tg.GradientTape() as tape:
            tape.watch(c)
            step = lambda s: (2.0 * s[0] - s[1] + c * laplacian(around(s[0])), s[0])
            u, _ = tg.checkpointed_loop(step, (tg.asarray(first[cut]), zero), steps, snapshots=3)
            misfit = tg.sum((u - target[cut]) ** 2)
        return np.asarray(u), np.asarray(tape.gradient(misfit, c))

    whole = slice(None), slice(None)
    plain_u, plain_g = run(None, whole)
    for shape in (s for s in shapes(group) if len(s) == 2):
        grid = Grid(shape)
        cut = grid.block((n, n))
        u, g = run(grid, cut)
        same(u, plain_u[cut])
        np.testing.assert_allclose(g, plain_g[cut], rtol=1e-10, atol=1e-12)


def case_fields(group: Group) -> None:
    field = np.random.default_rng(1).normal(size=(9, 7, 2))
    for shape in shapes(group):
        grid = Grid(shape)
        root = group.size - 1
        mine = dist.scatter_field(field if group.rank == root else None, grid, root)
        same(mine, field[grid.block(field.shape)])
        again = dist.gather_field(mine, grid)
        assert (again is None) == (group.rank != 0)
        if again is not None:
            same(again, field)

        w = tg.Variable(np.float64(2.0))
        x = tg.asarray(field)
        with tg.GradientTape() as tape:
            tape.watch(x)
            mine = dist.scatter_field(x * w if group.rank == 0 else None, grid)
            back = dist.gather_field(mine**2, grid)
            loss = tg.sum(back) if back is not None else tg.sum(mine) * 0.0
        gx = tape.gradient(loss, x)
        if group.rank == 0:
            np.testing.assert_allclose(np.asarray(gx), 8 * field, rtol=1e-12)


def case_send_and_recv(group: Group) -> None:
    """A ring by messages: the cotangent goes the other way, also where nothing here depends on it."""
    n, r = group.size, group.rank
    x = tg.asarray(data(group, 4))
    w = tg.Variable(np.float64(1.0 + r))
    with tg.GradientTape(persistent=True) as tape:
        dist.send(x * w, (r + 1) % n)
        got = dist.recv((4,), (r - 1) % n, "float64")
        loss = tg.sum(got**2)
    before = np.asarray(everyone(group, np.asarray(x))[(r - 1) % n]) * (1.0 + (r - 1) % n)
    np.testing.assert_allclose(np.asarray(got), before, rtol=1e-12)
    g = tape.gradient(loss, w)
    np.testing.assert_allclose(float(g), 2 * float(w) * float((np.asarray(x) ** 2).sum()), rtol=1e-12)


def case_one_message(group: Group) -> None:
    """From the first rank to the last; others have no part in it."""
    if group.size == 1:
        return
    last = group.size - 1
    w = tg.Variable(np.ones(3))
    with tg.GradientTape() as tape:
        if group.rank == 0:
            dist.send(w * 2.0, last)
        loss = tg.sum(dist.recv((3,), 0, "float64") * w) if group.rank == last else tg.sum(w) * 0.0
        total = dist.all_reduce(loss)
    g = np.asarray(tape.gradient(total, w))
    np.testing.assert_allclose(g, 2.0 * np.ones(3) if group.rank in (0, last) else np.zeros(3))


def case_wrong_grids_and_blocks(group: Group) -> None:
    for shape in ((group.size + 1,), (0,), ()):
        try:
            Grid(shape)
        except tg.errors.DistributedError as e:
            assert "fill" in str(e)
        else:
            raise AssertionError(shape)
    if group.size > 1:
        grid = Grid((group.size,))
        u = np.zeros((1 if group.rank == group.size - 1 else 4, 3))
        try:
            dist.halo_exchange(u, 2, grid)
        except tg.errors.DistributedError as e:
            assert "block of 1 elements along axis 0" in str(e), e
        else:
            raise AssertionError("no error")
        try:
            dist.gather_field(np.zeros((2, 2 + group.rank)), grid)
        except tg.errors.DistributedError as e:
            assert "do not fit together" in str(e), e
        else:
            raise AssertionError("no error")
