"""Random programs for the tests of budgets: what a step may do, how a program is differentiated, when budgets hold.

A program is a list of blocks of steps on three registers of one shape; a step writes one register from two.  Values
live as long as a register, a handle (step ``hold``) or a tape wants them, so most of them are wanted by tapes alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from checks import values
from hypothesis import strategies as st

import tapegrad as tg
from tapegrad.errors import BudgetError


@tg.custom_gradient
def _own_rule(a: Any) -> Any:
    y = tg.tanh(a)
    return y, lambda ct: ct * (1.0 - y * y)


@tg.custom_gradient
def _other_rule(a: Any) -> Any:
    y = tg.softmax(a)
    return y, lambda ct: ct * (2.0 + y)


def _assigned(a: Any, b: Any, ws: list) -> Any:
    ws[2].assign(tg.softmax(a)[0])
    return b * ws[2] + ws[2] * a


def _inner_tape(a: Any, b: Any, ws: list) -> Any:
    with tg.GradientTape() as inner:
        inner.watch(a)
        y = tg.sum(tg.sin(a) * tg.softmax(a) * b)
    return inner.gradient(y, a)


def _dead(a: Any, b: Any, ws: list) -> Any:
    tg.exp(tg.matmul(tg.softmax(b), ws[1]))
    return a


OPS: dict[str, Callable[[Any, Any, list], Any]] = {
    "matmul": lambda a, b, w: tg.matmul(a, w[1]),
    "softmax": lambda a, b, w: tg.softmax(a) + b,
    "softmaxes": lambda a, b, w: tg.softmax(tg.softmax(tg.softmax(a))),
    "total": lambda a, b, w: a * 0.1 + tg.tanh(tg.sum(b)),
    "norm": lambda a, b, w: tg.layer_norm(a, w[0], w[2]),
    "cumsum": lambda a, b, w: tg.tanh(tg.cumulative_sum(a, axis=1)),
    "sort": lambda a, b, w: tg.sort(a, axis=1) * b,
    "chain": lambda a, b, w: tg.tanh(tg.sin(a) * 0.9 + tg.exp(-(b * b))),
    "multiply": lambda a, b, w: tg.tanh(a) * b,
    "weight": lambda a, b, w: a * w[0],
    "slices": lambda a, b, w: tg.concat([tg.tanh(a)[:, 1:], b[:, :1]], axis=1),
    "rows": lambda a, b, w: tg.concat([tg.exp(-(a[::2] * a[::2])), a[1::2]], axis=0) * b,
    "sliver": lambda a, b, w: tg.softmax(a)[0, :1] * b,
    "turn": lambda a, b, w: tg.permute_dims(tg.tanh(tg.permute_dims(tg.softmax(a), (1, 0))), (1, 0)),
    "turned back": lambda a, b, w: tg.reshape(tg.permute_dims(tg.permute_dims(a * b, (1, 0)), (1, 0)), a.shape),
    "flat": lambda a, b, w: tg.reshape(tg.softmax(tg.reshape(tg.permute_dims(a, (1, 0)), (-1,))), a.shape) * b,
    "broadcast": lambda a, b, w: tg.broadcast_to(tg.mean(a, axis=0, keepdims=True), a.shape) * tg.cos(b),
    "noise": lambda a, b, w: a * tg.random.bernoulli(a.shape, 0.7, dtype="float64"),
    "normal": lambda a, b, w: tg.tanh(a) + b * tg.random.normal(a.shape, dtype="float64"),
    "assign": _assigned,
    "other rule": lambda a, b, w: _other_rule(a) * b,
    "stop": lambda a, b, w: a * tg.stop_gradient(tg.softmax(b)) + tg.softmax(a),
    "nothing": lambda a, b, w: tg.reshape(tg.asarray(a), a.shape),
    "own rule": lambda a, b, w: _own_rule(a) * b,
    "where": lambda a, b, w: tg.where(a > tg.softmax(b), a, tg.cos(b)),
    "indices": lambda a, b, w: tg.take_along_axis(tg.tanh(a), tg.argsort(b, axis=1), axis=1),
    "jvp": lambda a, b, w: tg.jvp(lambda q: tg.softmax(q) * tg.sin(q), (a,), (b,))[1],
    "inner tape": _inner_tape,
    "dead": _dead,
    "hold": lambda a, b, w: a,
    "release": lambda a, b, w: a,
}

register = st.integers(0, 2)
steps = st.lists(st.tuples(st.sampled_from(sorted(OPS)), register, register, register), min_size=1, max_size=5)
wrappers = st.sampled_from(["plain", "plain", "plain", "recompute", "nested"])
programs = st.lists(st.tuples(wrappers, steps), min_size=1, max_size=3)
ways = st.sampled_from(["once", "once", "persistent", "second", "two tapes", "jvp outside", "jvp inside", "variables"])
spans = st.sampled_from(
    [((0, 3),), ((0, 3),), ((0, 3),), ((1, 3),), ((0, 2),), ((0, 2), (2, 3)), ((0, 3), (1, 2)), ((0, 2), (1, 3))]
)
"""When budgets hold: from the start (0), one block into the tape (1), the tape's end (2), the end of it all (3)."""


@dataclass
class Spans:
    """Budgets that begin and end at certain points of a run; ``peaks``: of each, what was reached and the limit."""

    spans: tuple[tuple[int, int], ...] = ()
    limits: tuple[int, ...] = ()
    peaks: list[tuple[int, int]] = field(default_factory=list)

    @contextmanager
    def entered(self) -> Iterator[Callable[[int], None]]:
        """Yields what is to be told that a point is reached."""
        with ExitStack() as rest:
            stacks = [rest.enter_context(ExitStack()) for _ in self.spans]

            def reach(point: int) -> None:
                for stack, (start, stop), limit in zip(stacks, self.spans, self.limits, strict=True):
                    if stop == point:
                        stack.close()
                    if start == point:
                        m = stack.enter_context(tg.memory_budget(limit))
                        stack.callback(lambda m=m, limit=limit: self.peaks.append((m.peak_bytes, limit)))

            yield reach


@dataclass
class Program:
    """A program on fresh data of one shape, to be run and differentiated in one way."""

    blocks: list[tuple[str, list]]
    shape: tuple[int, int]
    way: str

    def __post_init__(self) -> None:
        rng = np.random.default_rng(7)
        self.x = tg.asarray(rng.normal(size=self.shape))
        self.d = tg.asarray(rng.normal(size=self.shape))
        self.start = rng.normal(size=self.shape[1])
        square = rng.normal(size=(self.shape[1],) * 2) * 0.5
        self.ws = [tg.Variable(self.start), tg.Variable(square), tg.Variable(self.start)]

    def block(self, kind: str, steps: list, held: list) -> Callable:
        def f(*regs: Any) -> tuple:
            regs = list(regs)
            for name, i, j, k in steps:
                if name == "hold" and kind == "plain":
                    held.append(regs[i])
                if name == "release" and kind == "plain":
                    held.clear()
                regs[k] = OPS[name](regs[i], regs[j], self.ws)
            return tuple(regs)

        if kind == "nested" and len(steps) > 1:
            half = len(steps) // 2
            first, second = (
                tg.recompute_grad(self.block("inner", part, held)) for part in (steps[:half], steps[half:])
            )
            return tg.recompute_grad(lambda *regs: second(*first(*regs)))
        return f if kind in ("plain", "inner") else tg.recompute_grad(f)

    def forward(self, x: Any, held: list, reach: Callable) -> tuple:
        regs: tuple = (x, tg.sin(x), tg.softmax(x))
        for number, (kind, steps) in enumerate(self.blocks):
            regs = self.block(kind, steps, held)(*regs)
            if number == 0:
                reach(1)
        return tg.sum(regs[0] * regs[1]) + tg.mean(regs[2]), tg.sum(regs[2])

    def run(self, budgets: Spans | None = None) -> Any:
        """Losses and gradients as arrays."""
        tg.random.seed(11)
        self.ws[2].assign(self.start)
        with np.errstate(all="ignore"), (budgets or Spans()).entered() as reach:
            reach(0)
            return values(getattr(self, "_" + self.way.replace(" ", "_"))(reach))

    def _once(self, reach: Callable) -> Any:
        held: list = []
        with tg.GradientTape() as tape:
            tape.watch(self.x)
            loss, _ = self.forward(self.x, held, reach)
        reach(2)
        found = tape.gradient(loss, [self.x, *self.ws])
        reach(3)
        return [loss, found, held]

    def _variables(self, reach: Callable) -> Any:
        with tg.GradientTape() as tape:
            loss, _ = self.forward(self.x, [], reach)
        reach(2)
        found = tape.gradient(loss, self.ws)
        reach(3)
        return found

    def _persistent(self, reach: Callable) -> Any:
        held: list = []
        with tg.GradientTape(persistent=True) as tape:
            tape.watch(self.x)
            losses = self.forward(self.x, held, reach)
        found = [tape.gradient(losses[0], self.x)]
        reach(2)
        found += [tape.gradient(losses[1], self.x), tape.gradient(losses[0], [self.x, *self.ws])]
        reach(3)
        return found

    def _second(self, reach: Callable) -> Any:
        held: list = []
        with tg.GradientTape() as outer:
            outer.watch(self.x)
            with tg.GradientTape() as tape:
                tape.watch(self.x)
                loss, _ = self.forward(self.x, held, reach)
            g = tape.gradient(loss, self.x)
            s = tg.sum(g * g)
        reach(2)
        found = outer.gradient(s, [self.x, *self.ws])
        reach(3)
        return [g, found]

    def _two_tapes(self, reach: Callable) -> Any:
        held: list = []
        with tg.GradientTape() as one:
            one.watch(self.x)
            with tg.GradientTape(watch_accessed_variables=False) as two:
                two.watch(self.ws[1])
                losses = self.forward(self.x, held, reach)
        found = [one.gradient(losses[0], [self.x, self.ws[0]])]
        reach(2)
        found.append(two.gradient(losses[1], self.ws[1]))
        reach(3)
        return found

    def _jvp_outside(self, reach: Callable) -> Any:
        def slope(x: Any) -> Any:
            with tg.GradientTape() as tape:
                tape.watch(x)
                loss, _ = self.forward(x, [], reach)
            reach(2)
            return tape.gradient(loss, x)

        found = tg.jvp(slope, (self.x,), (self.d,))
        reach(3)
        return found

    def _jvp_inside(self, reach: Callable) -> Any:
        def slope(x: Any) -> Any:
            with tg.GradientTape() as tape:
                tape.watch(x)
                loss, _ = self.forward(x, [], reach)
            return tape.gradient(loss, x)

        with tg.GradientTape() as outer:
            outer.watch(self.x)
            g, t = tg.jvp(slope, (self.x,), (self.d,))
            s = tg.sum(g * t)
        reach(2)
        found = outer.gradient(s, [self.x, *self.ws])
        reach(3)
        return [g, t, found]


def outcome(program: Program, budgets: Spans) -> tuple[Any, int]:
    """What the program yields under the budgets, and 0; or None, and the bytes that its BudgetError asks for."""
    try:
        return program.run(budgets), 0
    except BudgetError as e:
        return None, e.needed_bytes
