"""checkpoint_sequential: a chain of functions within so many bytes, by a plan made from one profiled pass (Rotor)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from tapegrad import nest
from tapegrad.autodiff.tape import GradientTape
from tapegrad.core.aval import rounded
from tapegrad.core.cell import overlay
from tapegrad.core.state import thread, unrecorded
from tapegrad.device.dtypes import is_inexact
from tapegrad.device.numerics import bits
from tapegrad.engine.realize import realize
from tapegrad.errors import RecomputeError
from tapegrad.remat.checkpoint.loop import Loop
from tapegrad.remat.checkpoint.rerun_tape import snapshots
from tapegrad.remat.schedules.actions import Action, Advance, Tape
from tapegrad.remat.schedules.rotor import Rotor, Stage
from tapegrad.remat.schedules.sqrt import by_segments, even_starts
from tapegrad.sizes import format_bytes, parse_bytes
from tapegrad.tensor import Tensor
from tapegrad.tracing.contexts import measure

_NONE: Any = object()


def checkpoint_sequential(
    functions: Iterable[Callable[..., Any]],
    x: Any = _NONE,
    *,
    budget: int | str | None = None,
    segments: int | None = None,
) -> Any:
    """``functions[-1](... functions[1](functions[0](x)))``, of which a tape keeps what the plan says.

    ``x``: any nest of tensors.  Without ``x``: a :class:`CheckpointedSequence` to be called with it; it keeps its plan
    for calls with the same shapes and dtypes.

    ``budget``: bytes (such as ``"2GiB"``) for what the chain keeps and makes in both runs, gradients included, its
    input and its variables not.  One more pass then measures each function, and the fastest plan within the budget is
    made by costs in bytes moved (Beaumont et al., arXiv:1911.13214).  Otherwise ``segments`` even segments, by default
    the square root of their number, each of which is rerun whole (Chen et al., arXiv:1604.06174).  Gradients are
    bit-identical to those of the plain chain, as under ``recompute_grad``.

    Raises RecomputeError (ValueError) if both options are given, and for a budget that no plan keeps: it names the
    function that needs the most, and the least budget.
    """
    sequence = CheckpointedSequence(functions, budget=budget, segments=segments)
    return sequence if x is _NONE else sequence(x)


@dataclass(frozen=True)
class Plan:
    """What is kept of a chain and what is run again; print it."""

    names: tuple[str, ...]
    actions: tuple[Action, ...]
    rotor: Rotor | None

    @property
    def runs(self) -> list[int]:
        """How often each function runs, forward and backward together."""
        counts = [0] * len(self.names)
        for a in self.actions:
            for i in range(a.start, a.stop) if isinstance(a, Advance) else [a.step] if isinstance(a, Tape) else []:
                counts[i] += 1
        return counts

    def __str__(self) -> str:
        width = max((len(name) for name in self.names), default=0)
        lines = [f"{'function':>{width + 4}}  runs"]
        if self.rotor is not None:
            lines[0] += "      output        tape"
        for i, (name, runs) in enumerate(zip(self.names, self.runs, strict=True)):
            lines.append(f"{i:3} {name:>{width}}  {runs:4}")
            if self.rotor is not None:
                stage = self.rotor.stages[i]
                lines[-1] += f"  {format_bytes(stage.out):>10}  {format_bytes(stage.taped):>10}"
        if self.rotor is not None:
            slower = self.rotor.cost / self.rotor.plain_cost if self.rotor.plain_cost else 1.0
            lines.append(f"within {format_bytes(self.rotor.budget)}: {slower:.3f} times the work of the plain chain")
        return "\n".join(lines)


class CheckpointedSequence:
    """A chain of functions with a plan; call it with the chain's input.  ``plan``: the last one used."""

    def __init__(
        self, functions: Iterable[Callable[..., Any]], *, budget: int | str | None = None, segments: int | None = None
    ) -> None:
        self.functions: Sequence[Callable[..., Any]] = list(functions)
        if budget is not None and segments is not None:
            raise RecomputeError("checkpoint_sequential: give budget or segments, not both")
        self._budget = None if budget is None else parse_bytes(budget)
        self._starts = even_starts(len(self.functions), segments)
        self._plans: dict[object, Plan] = {}
        self.plan: Plan | None = None

    @property
    def parts(self) -> tuple[Callable[..., Any], ...]:
        """The functions it is made of: a model finds their variables."""
        return tuple(self.functions)

    def __call__(self, x: Any) -> Any:
        """The chain's output; under a tape by plan."""
        loop = Loop(lambda state, i: self.functions[i](state), "checkpoint_sequential", len(self.functions))
        loop.steady = False
        loop.parts = self.functions
        if thread.recorders and self.functions:
            self.plan = plan = self._plan(x)
            loop.schedule = lambda n: plan.actions
        return loop(x)

    def _plan(self, x: Any) -> Plan:
        leaves = nest.flatten(x)
        key = str(nest.structure(x)), tuple(x._buffer.node.aval if isinstance(x, Tensor) else None for x in leaves)
        if key not in self._plans:
            names = tuple(map(_name, self.functions))
            if self._budget is None:
                self._plans[key] = Plan(names, tuple(by_segments(len(names), self._starts)), None)
            else:
                stages, gradients = self._profile(x, names)
                rotor = Rotor(stages, self._budget, _bytes(x, set()), gradients)
                self._plans[key] = Plan(names, tuple(rotor.actions()), rotor)
        return self._plans[key]

    def _profile(self, x: Any, names: Sequence[str]) -> tuple[list[Stage], int]:
        """The stages as one pass finds them, and the bytes of all variables' gradients."""
        ((x,), _) = snapshots((x,), {})
        random, stages, gradients = bits.host_state(), [], 0
        known: set[int] = set()
        try:
            with overlay({}):
                for f, name in zip(self.functions, names, strict=True):
                    stage, x, more = unrecorded(_measured, f, name, x, known)
                    stages.append(stage)
                    gradients += more
        finally:
            bits.set_host_state(random)
        return stages, gradients


def _measured(f: Callable[..., Any], name: str, x: Any, known: set[int]) -> tuple[Stage, Any, int]:
    """One function run and differentiated: its figures, its output, and the bytes of its variables' gradients.

    ``known``: numbers of the variables whose gradients are counted already.
    """
    with measure() as m, GradientTape() as tape:
        live = m.live_bytes
        inputs = list(_smooth(x))
        tape.watch(inputs)
        y = f(x)
        realize([t._buffer for t in nest.flatten(y) if isinstance(t, Tensor)])
        forward, taped, peak = m.bytes_moved, m.live_bytes - live, m.peak_bytes - live
    out = _bytes(y, {t._buffer.root().node.index for t in nest.flatten(x) if isinstance(t, Tensor)})
    variables = tape.watched_variables()
    targets = list(_smooth(y))
    seeds = unrecorded(lambda: [(t * 0 + 1) for t in targets])
    realize([t._buffer for t in seeds])
    with measure() as m:
        live = m.live_bytes
        grads = tape.gradient(targets, [inputs, list(variables)], output_gradients=seeds)
        backward, made, rise = m.bytes_moved, _bytes(grads, set()), m.peak_bytes - live
    fresh = [v for v in variables if v.construction_number not in known]
    known.update(v.construction_number for v in fresh)
    stage = Stage(name, forward, backward, out, max(taped, out), max(0, peak - max(taped, out)), max(0, rise - made))
    return stage, y, sum(rounded(v.nbytes) for v in fresh)


def _name(f: Callable[..., Any]) -> str:
    name = getattr(f, "name", None)
    return name if isinstance(name, str) else getattr(f, "__name__", type(f).__name__)


def _smooth(tree: object) -> Iterator[Tensor]:
    return (t for t in nest.flatten(tree) if isinstance(t, Tensor) and is_inexact(t.dtype))


def _bytes(tree: object, others: set[int]) -> int:
    """Bytes that the tensors in ``tree`` keep, those of the ``others`` not counted."""
    roots = {(b := t._buffer.root()).node.index: b for t in nest.flatten(tree) if isinstance(t, Tensor)}
    return sum(rounded(b.node.aval.nbytes) for i, b in roots.items() if i not in others)
