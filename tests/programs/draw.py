"""A program from a seed.  What is drawn is run on the reference as it grows, so that only what makes sense stays."""

from __future__ import annotations

import random
from typing import Any

import numpy as np

from programs import ops, reference
from programs.program import Program, Step
from programs.runs import Run

SHAPES = [(4, 3), (8, 16), (6, 64), (3, 1), (1, 4), (1, 1), (0, 3), (3, 0), (130, 130), (5, 5), (16, 2)]
WEIGHTS = [5, 4, 3, 1, 1, 0.5, 0.5, 0.4, 0.8, 3, 2]
LARGEST = 30.0


def draw(seed: int) -> Program:
    """The program of a seed."""
    return _Drawing(seed).program()


class _Drawing:
    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        self.way = rng.choices(list(ops.WAYS), [w.weight for w in ops.WAYS.values()])[0]
        shape = rng.choices(SHAPES, WEIGHTS)[0]
        self.start = Program(
            seed % 1000, shape, rng.choices(["float64", "float32"], [3, 1])[0], self.way, (), (),
            lazy=rng.random() < 0.4, tidy=rng.random() < 0.8, options=self._options(),
        )  # fmt: skip
        without = set(ops.WAYS[self.way].without)
        if ops.WAYS[self.way].order > 1 and shape[0] * shape[1] > 16384:
            without.add("costly")
        if dict(self.start.options)["inside"]:  # a second derivative, too
            without.add("nonlinear")
        self.ops = [op for op in ops.OPS if not without & set(op.tags)]
        self.weights = [op.weight for op in self.ops]
        self.names, self.blocks, self.deep = 0, 0, 0
        self.scope: dict[str, Any] = {"tg": reference, "np": np, "run": Run(), "tape": reference.GradientTape()}
        exec("\n".join([*self.start.prologue(), *ops.RULES.values()]), self.scope)

    def _options(self) -> tuple:
        rng, found = self.rng, {}
        for name in ("persistent", "watch all", "weights", "inside"):
            found[name] = rng.random() < 0.3
        found["only watched"] = rng.random() < 0.15
        found["unconnected"] = rng.choice(["none", "zero"])
        found["source"] = rng.choice(["x", "v0", "v1"])
        return tuple(found.items())

    def program(self) -> Program:
        """All of it."""
        rng, large = self.rng, self.start.shape[0] * self.start.shape[1] > 16384
        count = rng.randint(2, 6) if large else rng.randint(3, 14)
        values, steps = ["x"], []
        with np.errstate(all="ignore"):
            for _ in range(count):
                steps += self._some(values)
            steps += self._targets(values)
        targets = [s.out[0] for s in steps if s.kind == "target"]
        made = [v for v in values[1:] if v not in targets]
        others = rng.sample(made, min(len(made), rng.choice([0, 0, 1])))
        joined = {out for step in steps if len(step.results) > 1 for out in step.out}
        made = [v for v in made if v not in joined]  # to a tape the results of a checkpoint do not depend on each other
        handles = rng.sample(made, min(len(made), rng.choice([0, 0, 1, 2, 3])))
        (lies,) = rng.choices(["rows", "columns", "all gaps"], [6, 1, 1])
        return self.start.with_(steps=tuple(steps), targets=(*targets, *others), handles=tuple(handles), lies=lies)

    def _some(self, values: list[str]) -> list[Step]:
        choice = self.rng.random()
        if choice < 0.14 and self.deep < 2:
            return self._block(values)
        if choice < 0.17 and not self.deep and self._may_pause():
            return self._pause(values)
        for _ in range(6):
            found = self._step(values)
            if found is not None:
                return [found]
        return []

    def _may_pause(self) -> bool:
        """Not where a second derivative would depend on whether a rule reads what was not recorded, or its operands."""
        return "tape" not in ops.WAYS[self.way].without and not self._again()

    def _again(self) -> bool:
        """Whether second derivatives are asked for: then a checkpoint's first run and its rerun both get cotangents.

        A rule of a step in it is called for each, and what it gives is summed: right for a linear rule alone.
        """
        return ops.WAYS[self.way].order > 1 or bool(dict(self.start.options)["inside"])

    def _step(self, values: list[str]) -> Step | None:
        (op,) = self.rng.choices(self.ops, self.weights)
        if self.deep and ("tape" in op.tags or "escape" in op.tags or ("nonlinear" in op.tags and self._again())):
            return None
        args = self._args(op, values)
        if args is None:
            return None
        statement = not op.results or op.text.startswith(("held", "exported", "tape.", "{0}.assign"))
        try:
            found = eval(op.text.format(*args), self.scope)
        except (ValueError, IndexError, TypeError, np.exceptions.AxisError):
            return None
        if statement:
            return Step(op.kind, op.text, args)
        results = found if isinstance(found, tuple) else (found,)
        if not all(self._fits(r) for r in results):
            return None
        names = tuple(self._name(r, values) for r in results)
        return Step(op.kind, op.text, args, names)

    def _fits(self, value: Any) -> bool:
        rows, columns = self.start.shape
        return (
            isinstance(value, reference.T)
            and value.dtype == self.start.dtype
            and value.ndim <= 3
            and value.a.size <= max(2 * rows * columns, 64)
            and bool(np.isfinite(value.a).all())
            and np.abs(value.a).max(initial=0) < LARGEST
        )

    def _name(self, value: Any, values: list[str]) -> str:
        self.names += 1
        name = f"h{self.names}"
        self.scope[name] = value
        values.append(name)
        return name

    def _args(self, op: ops.Op, values: list[str]) -> tuple[str, ...] | None:
        found: list[str] = []
        for sort in op.sorts:
            if sort == "t":
                found.append(self._recent(values))
            elif sort == "s":
                alike = [v for v in values if self.scope[v].shape == self.scope[found[0]].shape]
                found.append(self.rng.choice(alike))
            elif sort == "v":
                found.append(self.rng.choice(["v0", "v0", "v2", "v3", "v4"]))
            else:
                variable = self.rng.choice(["v0", "v0", "v2", "v3", "v1"])
                alike = [v for v in values if self.scope[v].shape == self.scope[variable].shape]
                if not alike:
                    return None
                found += [variable, self.rng.choice(alike)]
        return tuple(found)

    def _recent(self, values: list[str]) -> str:
        return self.rng.choice(values[-3:] if self.rng.random() < 0.7 else values)

    def _block(self, values: list[str]) -> list[Step]:
        number, self.blocks = self.blocks, self.blocks + 1
        params = tuple(dict.fromkeys(self._recent(values) for _ in range(self.rng.randint(1, 3))))
        self.deep += 1
        inner, body = list(values), []
        for _ in range(self.rng.randint(2, 5)):
            body += self._some(inner)
        self.deep -= 1
        made = inner[len(values) :]
        if not made:
            return []
        results = tuple(dict.fromkeys([made[-1], self.rng.choice(made)]))
        out = tuple(self._name(self.scope[r], values) for r in results)
        return [Step("block", str(number), params, out, tuple(body), results)]

    def _pause(self, values: list[str]) -> list[Step]:
        body: list[Step] = []
        for _ in range(self.rng.randint(1, 2)):
            found = self._step(values)
            body += [] if found is None else [found]
        return [Step("pause", "with tape.stop_recording():", (), (), tuple(body))] if body else []

    def _targets(self, values: list[str]) -> list[Step]:
        """One target that much of what was made leads to, and sometimes a second one."""
        recent = values[-4:]
        text = " + ".join(f"tg.sum(tg.sin({{{i}}}) * {{{i}}})" for i in range(len(recent)))
        steps = [Step("target", text, tuple(recent), (f"t{1}",))]
        if self.rng.random() < 0.4:
            steps.append(Step("target", "tg.tanh({0}) * 0.5", (self._recent(values),), ("t2",)))
        for step in steps:
            self.scope[step.out[0]] = eval(step.text.format(*step.args), self.scope)
            values.append(step.out[0])
        return steps
