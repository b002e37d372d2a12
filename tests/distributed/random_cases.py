"""Random programs with collectives, in which each rank has shapes, blocks and a budget of its own.

A program is drawn once, alike on all ranks: steps over a pool of values of (rows, 4), rows differing from rank to rank.
Its gradients must be those of finite differences of the sum of all ranks' objectives.  Run in other ways, with blocks
that are rerun, captured or looped, within budgets of which each rank has another, gradients have the same bits, and all
ranks do the same number of collectives.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

import tapegrad as tg
from tapegrad import distributed as dist
from tapegrad.distributed import Group

FIRST, MANY = (int(n) for n in os.environ.get("TAPEGRAD_TEST_SEEDS", "0:2").split(":"))
"""Seeds of programs, from the first to below the second."""
COLUMNS = 4
_GARBAGE = 8192
"""Bytes that a budget has besides: garbage of the run before may be there in the run and not in the prediction."""
Rows = tuple[int, ...]
"""Rows of a value, by rank."""
Function = Callable[..., tg.Tensor]


@dataclass
class Step:
    """A function of values of the pool, by their numbers; what it gives is a new one."""

    name: str
    run: Function
    operands: list[int]
    again: Function | None = None
    """The same in another way, where blocks are called in theirs."""


@dataclass
class Block:
    """Steps that are called as one function of the pool."""

    how: str
    steps: list[Step]


@dataclass
class Program:
    """Steps and blocks, and the rows of each value of the pool; the first values are variables."""

    group: Group
    rng: np.random.Generator
    rows: list[Rows]
    parts: list[Step | Block] = field(default_factory=list)

    @property
    def size(self) -> int:
        return self.group.size

    def pick(self, fits: Callable[[Rows], bool] = lambda rows: True) -> int | None:
        """A value of the pool; one of this rank's own rows or a late one more often, so that much is alive at once."""
        found = [i for i, rows in enumerate(self.rows) if fits(rows)]
        if self.rng.random() < 0.7:
            found = [i for i in found if self.rows[i] == self.rows[0]] or found
        return found[-1 - int(self.rng.integers(0, len(found)) * self.rng.random())] if found else None

    def step(self) -> Step:
        """Draw one more step."""
        while True:
            draw = STEPS[self.rng.integers(len(STEPS))]
            found = draw(self)
            if found is not None:
                step, rows = found
                self.rows.append(rows)
                return step


def even(rows: Rows) -> bool:
    return len(set(rows)) == 1


def blocks(length: int, parts: int) -> Rows:
    """The lengths of blocks where the first are longer by 1."""
    each, more = divmod(length, parts)
    return tuple(each + (i < more) for i in range(parts))


# Steps of one rank ---------------------------------------------------------------------------------------------------


def averaged(x: tg.Tensor) -> tg.Tensor:
    """The mean of the rows, and of a row of zeros: there may be none."""
    return tg.sum(x, axis=0, keepdims=True) / (1 + x.shape[0])


def unary(p: Program) -> tuple[Step, Rows] | None:
    a = p.pick()
    assert a is not None
    c = float(p.rng.uniform(0.3, 0.9))
    name, f = [
        ("tanh", lambda x: tg.tanh(x * c)), ("sin", lambda x: tg.sin(x) * c), ("exp", lambda x: tg.exp(-x * x) * c),
        ("product", lambda x: tg.tanh(x @ tg.asarray(np.eye(COLUMNS)[::-1] * c + 0.05))),
    ][p.rng.integers(4)]  # fmt: skip
    return Step(name, f, [a]), p.rows[a]


def binary(p: Program) -> tuple[Step, Rows] | None:
    a = p.pick()
    assert a is not None
    b = p.pick(lambda rows: rows == p.rows[a])
    assert b is not None
    f = [
        lambda x, y: tg.sin(x * y), lambda x, y: (x + tg.sin(y)) * 0.5, lambda x, y: tg.tanh(x - y) * 0.5,
    ][p.rng.integers(3)]  # fmt: skip
    return Step("binary", f, [a, b]), p.rows[a]


def row_times(p: Program) -> tuple[Step, Rows] | None:
    """A value times one of a single row: what collectives of sums give goes into all of a rank's rows."""
    one, a = p.pick(lambda rows: set(rows) == {1}), p.pick()
    if one is None or a is None:
        return None
    return Step("row times", lambda x, y: tg.tanh(x * y), [a, one]), p.rows[a]


# Steps of all ranks --------------------------------------------------------------------------------------------------


def sum_of_sums(p: Program) -> tuple[Step, Rows] | None:
    a = p.pick()
    assert a is not None
    exact = bool(p.rng.integers(2))
    f = lambda x: tg.sin(dist.all_reduce(averaged(x), group=p.group, exact=exact))
    return Step("all_reduce of sums", f, [a]), (1,) * p.size


def sum_of_parts(p: Program) -> tuple[Step, Rows] | None:
    """A sum among half of the ranks: another group."""
    a = p.pick()
    assert a is not None
    half = p.group.split(p.group.rank % 2)
    f = lambda x: tg.sin(dist.all_reduce(averaged(x), group=half))
    return Step("all_reduce of a part", f, [a]), (1,) * p.size


def uniform(draw: Callable[[Program, int, int], tuple[str, Function, Rows]]) -> Callable[[Program], Any]:
    """A step of a value that has the same rows everywhere; ``draw`` is given these, and a rank."""

    def drawn(p: Program) -> tuple[Step, Rows] | None:
        a = p.pick(even)
        if a is None:
            return None
        name, f, rows = draw(p, p.rows[a][0], int(p.rng.integers(p.size)))
        return Step(name, f, [a]), rows

    return drawn


@uniform
def whole_sum(p: Program, n: int, root: int) -> tuple[str, Function, Rows]:
    return "all_reduce", lambda x: dist.all_reduce(x, "mean", group=p.group), (n,) * p.size


@uniform
def scattered_sum(p: Program, n: int, root: int) -> tuple[str, Function, Rows]:
    return "reduce_scatter", lambda x: tg.tanh(dist.reduce_scatter(x, group=p.group)), blocks(n, p.size)


@uniform
def from_one(p: Program, n: int, root: int) -> tuple[str, Function, Rows]:
    return "broadcast", lambda x: dist.broadcast(x, root, group=p.group), (n,) * p.size


@uniform
def to_one(p: Program, n: int, root: int) -> tuple[str, Function, Rows]:
    return "reduce", lambda x: tg.tanh(dist.reduce(x, root, group=p.group)), (n,) * p.size


@uniform
def shifted(p: Program, n: int, root: int) -> tuple[str, Function, Rows]:
    periodic = bool(p.rng.integers(2))
    return "shift", lambda x: dist.shift(x, root + 1, periodic=periodic, group=p.group), (n,) * p.size


@uniform
def exchanged(p: Program, n: int, root: int) -> tuple[str, Function, Rows]:
    return "all_to_all", lambda x: dist.all_to_all(x, group=p.group), tuple(k * p.size for k in blocks(n, p.size))


def gathered(p: Program) -> tuple[Step, Rows] | None:
    """All rows on all ranks, of which each goes on with the same few."""
    a = p.pick()
    assert a is not None
    total = sum(p.rows[a])
    most = max(1, min(total, 6))
    f = lambda x: dist.all_gather(x, group=p.group)[total - most :]
    return (Step("all_gather", f, [a]), (most,) * p.size) if total >= most else None


def sent_round(p: Program) -> tuple[Step, Rows] | None:
    """To one rank and back: gather, then scatter in other portions."""
    a = p.pick()
    assert a is not None
    total, root = sum(p.rows[a]), int(p.rng.integers(p.size))
    sizes = blocks(total, p.size)
    f = lambda x: dist.scatter(tg.sin(dist.gather(x, root, group=p.group)), root, group=p.group, sizes=sizes)
    return Step("gather, scatter", f, [a]), sizes


def stencil(p: Program) -> tuple[Step, Rows] | None:
    """Halos of one row, at open or periodic ends."""
    a = p.pick(lambda rows: min(rows) >= 1)
    if a is None:
        return None
    grid = dist.Grid((p.size,), periodic=bool(p.rng.integers(2)), group=p.group)

    def f(x: tg.Tensor) -> tg.Tensor:
        around = dist.halo_exchange(x, 1, grid)
        return tg.tanh(around[2:] + around[:-2] - x) * 0.5

    return Step("halo_exchange", f, [a]), p.rows[a]


def repeated(p: Program) -> tuple[Step, Rows] | None:
    """A loop whose steps have a collective each; as a block it keeps one state."""
    a = p.pick()
    assert a is not None
    body = lambda x: tg.tanh(x * 0.7 + dist.all_reduce(averaged(x), group=p.group) * 0.2)
    again = lambda x: tg.checkpointed_loop(body, x, 3, snapshots=1)
    return Step("loop", lambda x: body(body(body(x))), [a], again), p.rows[a]


STEPS: list[Callable[[Program], tuple[Step, Rows] | None]] = [
    *([unary, binary, binary, row_times] * 5), sum_of_sums, sum_of_sums, sum_of_parts, whole_sum, scattered_sum,
    from_one, to_one, shifted, exchanged, gathered, sent_round, stencil, repeated,
]  # fmt: skip
BLOCKS = ("plain", "recompute", "recompute", "saved", "captured", "vmap")


def drawn(group: Group, seed: int) -> Program:
    """A program; its first values are two of each rank's own rows and one of the same rows everywhere."""
    rng = np.random.default_rng([seed, group.size])
    own: Rows = tuple(int(n) for n in rng.integers(1, 60, group.size) * rng.integers(1, 40))
    common = int(rng.integers(1, 200))
    program = Program(group, rng, [own, own, (common,) * group.size])
    while len(program.rows) < 36:
        if rng.random() < 0.4:
            how = str(rng.choice(BLOCKS))
            program.parts.append(Block(how, [program.step() for _ in range(rng.integers(1, 5))]))
        else:
            program.parts.append(program.step())
    return program


# Running -------------------------------------------------------------------------------------------------------------


def run(program: Program, pool: Sequence[tg.Tensor], ways: bool) -> list[tg.Tensor]:
    """All values; ``ways``: blocks and loops are called in their own way."""
    values = list(pool)
    for part in program.parts:
        if isinstance(part, Step):
            f = part.again if ways and part.again else part.run
            values.append(f(*(values[i] for i in part.operands)))
        else:
            values += called(part, values, ways)
    return values


def called(block: Block, values: list[tg.Tensor], ways: bool) -> list[tg.Tensor]:
    """What a block gives."""
    n = len(values)
    needed = sorted({i for step in block.steps for i in step.operands if i < n})

    def f(*operands: tg.Tensor) -> tuple[tg.Tensor, ...]:
        known = dict(zip(needed, operands, strict=True))
        for k, step in enumerate(block.steps):
            g = step.again if ways and step.again else step.run
            known[n + k] = g(*(known[i] for i in step.operands))
        return tuple(known[n + k] for k in range(len(block.steps)))

    given = [values[i] for i in needed]
    if block.how == "vmap":  # also in the plain run: products of a batch round otherwise
        return [x[0] for x in tg.vmap(f)(*(x[None] for x in given))]
    if block.how == "recompute" and ways:
        f = tg.recompute_grad(f)
    elif block.how == "saved" and ways:
        f = tg.recompute_grad(f, policy=tg.policies.save_collectives)
    elif block.how == "captured" and ways:
        f = tg.function(f)
    return list(f(*given))


class Task:
    """A program, this rank's numbers, and which of its variables it watches."""

    def __init__(self, group: Group, seed: int) -> None:
        self.group, self.program = group, drawn(group, seed)
        self.mine = mine = np.random.default_rng([seed, group.size, group.rank])
        first = self.program.rows[:3]
        self.start, self.along = (
            [mine.normal(size=(rows[group.rank], COLUMNS)) for rows in first] for _ in range(2)
        )  # fmt: skip
        self.watched = [i for i in range(3) if mine.random() < 0.8]

    def loss(self, pool: Sequence[tg.Tensor], ways: bool) -> tg.Tensor:
        values = run(self.program, pool, ways)
        return sum((tg.sum(v * v) * (0.1 + 0.01 * i) for i, v in enumerate(values)), tg.zeros((), "float64"))

    def gradients(self, ways: bool = True, twice: bool = False) -> list[np.ndarray]:
        """Loss and gradients of this rank; ``twice``: those of the gradients along a direction, too."""
        return [np.asarray(x) for x in self.step(ways, twice)]

    def step(self, ways: bool, twice: bool = False) -> list[tg.Tensor]:
        pool = [tg.asarray(x) for x in self.start]
        wanted = [pool[i] for i in self.watched]
        with tg.GradientTape() as outer:
            outer.watch(wanted)
            with tg.GradientTape() as tape:
                tape.watch(wanted)
                loss = self.loss(pool, ways)
            found = tape.gradient(loss, wanted)
            if twice:
                directions = (tg.asarray(self.along[i]) for i in self.watched)
                slope = sum((tg.sum(g * d) for g, d in zip(found, directions, strict=True)), tg.zeros((), "float64"))
        if twice:
            found = [*found, *outer.gradient(slope, wanted, unconnected_gradients="zero")]
        return [loss, *found]

    def slope(self, h: float = 1e-5) -> float:
        """The derivative of the sum of all ranks' losses along ``along``, by central differences."""
        sides = []
        for sign in (1, -1):
            moved = [
                tg.asarray(x + sign * h * d if i in self.watched else x)
                for i, (x, d) in enumerate(zip(self.start, self.along, strict=True))
            ]
            sides.append(sum(self.group.exchange_objects(self.loss(moved, False).item())))
        return (sides[0] - sides[1]) / (2 * h)

    def counted(self, f: Callable[[], list[np.ndarray]]) -> tuple[list[np.ndarray], int]:
        """What ``f`` gives, and how many collectives that took; it is the same number on all ranks."""
        before = self.group.line.number
        found = f()
        count = self.group.line.number - before
        counts = self.group.exchange_objects(count)
        assert len(set(counts)) == 1, counts
        return found, count

    def check(self) -> None:
        plain, count = self.counted(lambda: self.gradients(ways=False))
        mine = sum(float(np.sum(g * self.along[i])) for g, i in zip(plain[1:], self.watched, strict=True))
        total, wanted = sum(self.group.exchange_objects(mine)), self.slope()
        assert abs(total - wanted) <= 1e-6 * max(1.0, abs(wanted)), (total, wanted)
        equal(self.counted(self.gradients)[0], plain)
        for ways in (False, True):
            with self.budget(ways):
                within, again = self.counted(partial(self.gradients, ways))
            equal(within, plain)
            assert ways or again == count, (again, count)

    def budget(self, ways: bool) -> AbstractContextManager[object]:
        """One that can be kept, on another rank another; on some there is none."""
        found = tg.memory.predict_peak(lambda: self.step(ways), budgets=[])
        share = self.mine.uniform(0, 1.2)
        assert found.least_bytes is not None
        least = found.least_bytes + share * (found.peak_bytes - found.least_bytes)
        least += _GARBAGE
        return tg.memory_budget(int(least)) if share < 1 else nullcontext()


def equal(found: list[np.ndarray], wanted: list[np.ndarray]) -> None:
    for a, b in zip(found, wanted, strict=True):
        assert a.shape == b.shape and a.tobytes() == b.tobytes(), np.abs(a - b).max()


def case_programs(group: Group) -> None:
    for seed in range(FIRST, MANY):
        Task(group, seed).check()


def case_second_order(group: Group) -> None:
    for seed in range(FIRST, MANY, 3):
        task = Task(group, seed)
        for a, b in zip(task.gradients(twice=True), task.gradients(ways=False, twice=True), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-11, atol=1e-11)
