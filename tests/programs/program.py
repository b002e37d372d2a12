"""What a program is: steps, as data; and its text, a function ``main`` that runs on tapegrad or on the reference.

``main(tg, run)`` returns what is to be compared.  ``run`` is the way in which it is run: ``run.wrap(i, f)`` is told of
each block that may be a checkpoint, ``run.loop(step, state, n)`` of each loop, ``run.reach(k)`` of each point at which
budgets may begin and end: when the data is there (0), after the first statement (1), after the recording (2), at the
end (3).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from programs import ops

INDENT = "    "
_CALLS = """step, out = run.captured(step), []
for k in range({}):
    out.append(step(x * (1.0 - 0.02 * k), d))
    out.append([v0.read_value(), v1.read_value(), v2.read_value(), v3.read_value(), v4.read_value(), *gen.state])
return out"""
_WORD = re.compile(r"[A-Za-z_]\w*")


@dataclass(frozen=True)
class Step:
    """One statement.  ``text``: Python with ``{0}``, ``{1}`` for ``args``; ``out``: the names that it binds.

    With a ``body`` it is a block that ``run.wrap`` is told of (``text`` is its number, ``args`` its parameters), or, if
    ``kind`` is "pause", steps that the tape does not record.
    """

    kind: str
    text: str
    args: tuple[str, ...] = ()
    out: tuple[str, ...] = ()
    body: tuple[Step, ...] = ()
    results: tuple[str, ...] = ()

    def line(self) -> str:
        """The statement without its body."""
        code = self.text.format(*self.args)
        return f"{', '.join(self.out)} = {code}" if self.out else code

    def reads(self) -> set[str]:
        """The names that it reads, those of its body included."""
        found = set(self.args) | set(self.results)
        for step in self.body:
            found |= step.reads()
        return found

    def captures(self) -> set[str]:
        """The names that a function made here reads whenever it is called."""
        if self.kind == "block":
            bound = set(self.args) | {name for step in self.body for name in step.all_out()}
            return {n for step in self.body for n in (*step.reads(), *step.results)} - bound
        if self.kind == "pause":
            return set().union(*(step.captures() for step in self.body))
        return set(self.args) if "lambda" in self.text else set()

    def all_out(self) -> Iterator[str]:
        """The names that it binds in the function where it stands."""
        yield from self.out
        if self.kind == "pause":
            for step in self.body:
                yield from step.all_out()


@dataclass(frozen=True)
class Program:
    """Steps on data of one shape and dtype, and how they are differentiated."""

    seed: int
    shape: tuple[int, int]
    dtype: str
    way: str
    steps: tuple[Step, ...]
    targets: tuple[str, ...]
    handles: tuple[str, ...] = ()
    lazy: bool = False
    """Whether even small arrays go through regions."""
    tidy: bool = True
    """Whether a name is deleted after its last use, so that tapes alone want its value."""
    lies: str = "rows"
    """How the elements of matrices lie: see ``checks.laid``."""
    options: tuple[tuple[str, Any], ...] = field(default=())

    def with_(self, **changes: Any) -> Program:
        """A copy with other fields."""
        return replace(self, **changes)

    def all_steps(self) -> Iterator[Step]:
        """Every step, those of bodies included."""
        waiting = list(self.steps)
        while waiting:
            step = waiting.pop(0)
            yield step
            waiting = [*step.body, *waiting]

    def kinds(self) -> set[str]:
        """What it does, in words that are counted."""
        found = {step.kind for step in self.all_steps()}
        found |= {f"way: {self.way}", f"dtype: {self.dtype}", "lazy" if self.lazy else "at once"}
        found |= {"tidy" if self.tidy else "untidy", f"lies: {self.lies}"}
        if 0 in self.shape:
            found.add("empty arrays")
        if self.shape[0] * self.shape[1] > 16384:
            found.add("large arrays")
        return found

    def prologue(self) -> list[str]:
        """The lines that make the data."""
        rows, columns = self.shape
        matrix = lambda text: text if self.lies == "rows" else f"run.laid(tg, {text}, {self.lies!r})"
        v1, v3 = matrix(f"data({columns}, {columns}) * 0.4"), matrix(f"data({rows}, {columns}) * 0.5")
        return [
            f"rng = np.random.default_rng({self.seed})",
            "tg.random.seed(11), np.random.seed(5)",
            f"data = lambda *shape: np.asarray(rng.normal(size=shape), dtype={self.dtype!r})",
            f"x, d = tg.asarray({matrix(f'data({rows}, {columns}) + run.nudge')}), tg.asarray(data({rows}, {columns}))",
            f"v0, v1 = tg.Variable(data({columns}) * 0.5), tg.Variable({v1})",
            f"v2, v3 = tg.Variable(np.asarray(data() * 0.5)), tg.Variable({v3})",
            f"v4 = tg.Variable(data({columns}), trainable=False)",
            "gen, held, exported, before = tg.random.Generator(17), [], [], v0.read_value()",
            "run.reach(0)",
        ]

    def text(self, calls: int = 0) -> str:
        """The source of ``main``.

        With ``calls`` the differentiation is a function of its own, which ``run.captured`` is told of, and which is
        called so many times; what variables and the generator hold after each call is compared, too.
        """
        lines = ["def main(tg, run):", *(INDENT + line for line in self.prologue())]
        used = {word for step in self.all_steps() for word in _WORD.findall(step.text)}
        lines += [INDENT + line for name, text in ops.RULES.items() if name in used for line in text.splitlines()]
        body = self._block(self.steps, {*self.targets, *self.handles, "x"}, top=True)
        rest = ["def forward(x):", *(INDENT + line for line in body)]
        rest.append(f"{INDENT}return [{', '.join(self.targets)}], [{', '.join(self.handles)}]")
        rest += ops.WAYS[self.way].text(dict(self.options)).splitlines()
        if calls:
            rest = ["def step(x, d):", *(INDENT + line for line in rest), *_CALLS.format(calls).splitlines()]
        return "\n".join([*lines, *(INDENT + line for line in rest)]) + "\n"

    def _block(self, steps: tuple[Step, ...], wanted: set[str], top: bool = False, params: tuple = ()) -> list[str]:
        """The lines of ``steps``; with ``tidy`` names that nothing reads any more are deleted."""
        kept = wanted.union(*(s.captures() for s in steps)) if steps else wanted
        last: dict[str, int] = {}
        mine = {*params, *(n for s in steps for n in s.all_out())}
        for place, step in enumerate(steps):
            for name in (*step.reads(), *step.all_out()):
                last[name] = place
        lines: list[str] = []
        for place, step in enumerate(steps):
            lines += self._lines(step)
            if top and place == 0:
                lines.append("run.reach(1)")
            gone = sorted(n for n, p in last.items() if p == place and n in mine and n not in kept)
            if self.tidy and gone:
                lines.append(f"del {', '.join(gone)}")
        return lines

    def _lines(self, step: Step) -> list[str]:
        if step.kind == "pause":
            inner = [line for s in step.body for line in self._lines(s)]
            return [step.line(), *(INDENT + line for line in inner)]
        if step.kind != "block":
            return [step.line()]
        name = f"block{step.text}"
        inner = self._block(step.body, set(step.results), params=step.args)
        last = f"return ({', '.join(step.results)},)"
        call = f"{', '.join(step.out)}, = run.wrap({step.text}, {name})({', '.join(step.args)})"
        return [f"def {name}({', '.join(step.args)}):", *(INDENT + line for line in (*inner, last)), call]
