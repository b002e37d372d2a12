"""L-BFGS with a line search, for losses of full batches."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, NoReturn

from tapegrad import ops
from tapegrad.autodiff.tape import GradientTape
from tapegrad.core.state import unrecorded
from tapegrad.errors import DTypeError, GradientError, TapegradError
from tapegrad.ops import updates
from tapegrad.optim.optimizers import checks
from tapegrad.optim.optimizers.optimizer import Optimizer, Schedule
from tapegrad.tensor import Tensor, materialize
from tapegrad.tracing.phase import BY_OPTIMIZER, STEPS, optimizing
from tapegrad.variable import Variable

_LEAST_CURVATURE = 1e-10
"""Of a pair that is kept: the product of a step and the gradient's change, as a part of the change's square."""


class Minimum(NamedTuple):
    """Where a search has ended: ``loss`` there, the largest entry of its ``gradient``, and why it has ended."""

    loss: float
    gradient: float
    iterations: int
    evaluations: int
    converged: bool
    message: str


class _Point(NamedTuple):
    """What was evaluated: the loss and its slope in the direction, the gradient, and its largest entry."""

    loss: float
    slope: float
    gradient: list[Tensor]
    largest: float


class LBFGS(Optimizer):
    """Limited-memory BFGS (Nocedal and Wright, "Numerical optimization", 2006, algorithms 7.4 and 7.5).

    :meth:`minimize` searches; there is no ``apply``, since a step takes several evaluations of the loss.
    Steps keep the strong Wolfe conditions (c1 = 1e-4, c2 = 0.9; SciPy's line search), or with ``line_search=None``
    have the length 1.  Without history the direction is ``-g min(1, 1 / |g|_1)``; ``learning_rate`` scales all of them.
    ``history_size`` pairs of steps and changes of the gradient are kept, as state with two slots each, and used by
    later calls: ``forget(variables)`` where the loss has changed.  Prefer float64: pairs are small differences.

    A call of ``minimize`` ends after ``max_iter`` iterations, or ``max_eval`` evaluations (by default 1.25 times as
    many; the first iteration is always made), or when no entry of the gradient is larger than ``tolerance_grad``, or
    no entry of a step or the change of the loss than ``tolerance_change``; names and defaults are PyTorch's, but for
    the line search, which is on.

    Raises TapegradError for hyperparameters out of range.
    """

    def __init__(
        self,
        learning_rate: float | Schedule = 1.0,
        max_iter: int = 20,
        max_eval: int | None = None,
        tolerance_grad: float = 1e-7,
        tolerance_change: float = 1e-9,
        history_size: int = 10,
        line_search: str | None = "strong_wolfe",
        *,
        name: str | None = None,
    ) -> None:
        super().__init__(learning_rate, name=name)
        self.max_iter = checks.count(self, "max_iter", max_iter)
        self.max_eval = max_iter * 5 // 4 if max_eval is None else checks.count(self, "max_eval", max_eval)
        self.tolerance_grad = checks.at_least(self, "tolerance_grad", tolerance_grad, 0.0)
        self.tolerance_change = checks.at_least(self, "tolerance_change", tolerance_change, 0.0)
        self.history_size = checks.count(self, "history_size", history_size)
        if line_search not in ("strong_wolfe", None):
            raise TapegradError(f'{self}: wanted line_search "strong_wolfe" or None, got {line_search!r}')
        self.line_search = line_search
        self.slot_names = tuple(f"{what}_{i}" for i in range(history_size) for what in ("step", "change"))
        self._pairs = self._zero("pairs")

    @property
    def counters(self) -> dict[str, Variable]:
        """``iterations``, and ``pairs``: how many have been kept; by name."""
        return {"iterations": self.iterations, "pairs": self._pairs}

    def build(self, variables: Iterable[Variable]) -> None:
        """Make the state of these variables.  Raises NotATensorError, and DTypeError, also for a half dtype."""
        variables = checks.listed(self, "variables", variables)
        for v in variables:
            if isinstance(v, Variable) and updates.wide(v.dtype) != v.dtype:
                raise DTypeError(
                    f"{self}: a search along lines needs more digits than {v.dtype} has; let variable "
                    f'"{v.name}" {v.shape} be float32, and compute the loss under tg.autocast'
                )
        super().build(variables)

    def forget(self, variables: Any) -> None:
        """Drop the state of these variables and the order of all pairs: the next search begins without history."""
        super().forget(variables)
        self._counts.put("pairs", self._pairs, 0)

    def apply(self, grads: Any, variables: Any, *, skip_none: bool = False) -> NoReturn:
        """Raises TapegradError: there is ``minimize``."""
        raise TapegradError(f"{self}: a step evaluates the loss several times; call minimize(loss, variables)")

    def minimize(self, loss: Callable[[], Any], variables: Sequence[Variable]) -> Minimum:
        """Change ``variables`` so that ``loss()``, a real scalar of them, becomes small.

        ``loss`` reads the variables and may be a captured function (``tg.function``).  Each evaluation, and twice
        each iteration, waits for the device.  Where no step makes the loss less the variables stay, and ``converged``
        is False.  If ``loss`` raises, the variables have the values of the last iteration that was completed.

        Raises GradientError (no scalar, one that does not depend on a variable, one that is not finite at first, a
        variable twice), NotATensorError, DTypeError, TapegradError for an optimizer cut over ranks.
        """
        if self.parts is not None:
            raise TapegradError(f"{self}: its state is not cut over ranks; minimize without tg.distributed.shard")
        return unrecorded(_Search(self, loss, checks.listed(self, "variables", variables)).run)


class _Search:
    """One call of ``minimize``."""

    def __init__(self, by: LBFGS, loss: Callable[[], Any], variables: list[Variable]) -> None:
        self.by, self.loss, self.variables = by, loss, variables
        self.evaluations = 0

    def run(self) -> Minimum:
        by = self.by
        now, done, stop = self._evaluate([ops.zeros_like(v) for v in self.variables]), 0, None
        if not math.isfinite(now.loss):
            raise GradientError(f"{by}: the loss is {now.loss} where the search begins")
        if now.largest <= by.tolerance_grad:
            return Minimum(now.loss, now.largest, 0, self.evaluations, True, "the gradient is within tolerance_grad")
        while stop is None and done < by.max_iter and (not done or self.evaluations < by.max_eval):
            before, starts = now, [_own(v) for v in self.variables]
            try:
                direction, slope, longest = self._direction(now.gradient)
                alpha, now = self._step(now, starts, direction, slope)
            except BaseException:
                self._move(starts)
                raise
            self._move(_along(starts, alpha, direction))
            if alpha == 0:
                if not by._counts.now("pairs", by._pairs):
                    return Minimum(now.loss, now.largest, done, self.evaluations, False, "no step makes the loss less")
                by._counts.put("pairs", by._pairs, 0)  # once more, down the gradient
                continue
            with optimizing():
                self._keep(alpha, direction, before.gradient, now.gradient)
            done += 1
            by._counts.put("iterations", by.iterations, by._steps_done() + 1)
            STEPS.mark(BY_OPTIMIZER)
            stop = self._why_stop(before.loss, now, alpha * longest)
        reached = "max_iter" if done >= by.max_iter else "max_eval"
        message = f"{reached} is reached" if stop is None else stop
        return Minimum(now.loss, now.largest, done, self.evaluations, stop is not None, message)

    def _why_stop(self, before: float, now: _Point, length: float) -> str | None:
        if now.largest <= self.by.tolerance_grad:
            return "the gradient is within tolerance_grad"
        if length <= self.by.tolerance_change or abs(now.loss - before) <= self.by.tolerance_change:
            return "the last change is within tolerance_change"
        return None

    def _evaluate(self, direction: list[Tensor]) -> _Point:
        self.evaluations += 1
        with GradientTape() as tape:
            value = ops.asarray(self.loss())
        if value.shape != () or "float" not in str(value.dtype):
            raise GradientError(f"{self.by}: wanted a real scalar as loss, got {value.dtype} {value.shape}")
        pairs = self.by._checked_pairs(tape.gradient(value, self.variables), self.variables, False)
        gradient = [g for g, _ in pairs]
        materialize(*gradient)
        told = _numbers(value, _dot(gradient, direction), _largest(gradient))
        return _Point(told[0], told[1], gradient, told[2])

    def _direction(self, gradient: list[Tensor]) -> tuple[list[Tensor], float, float]:
        """Where to go, the slope there, and the largest entry; down the gradient where history leads up."""
        rate = self.by.current_learning_rate()
        kept = self.by._counts.now("pairs", self.by._pairs)
        with optimizing():
            for pairs in dict.fromkeys((kept, 0)):
                direction = [_scaled(d, rate) for d in self._two_loops(gradient, pairs)]
                materialize(*direction)
                slope, longest = _numbers(_dot(gradient, direction), _largest(direction))
                if slope < 0:
                    break
                self.by._counts.put("pairs", self.by._pairs, 0)
        return direction, slope, longest

    def _two_loops(self, gradient: list[Tensor], pairs: int) -> list[Tensor]:
        """Algorithm 7.4; steps and changes are scaled so that the product of each pair is 1."""
        if not pairs:
            norm = ops.sum(ops.stack([ops.sum(ops.abs(g)) for g in gradient]))
            scale = ops.minimum(1.0, 1.0 / norm)
            return [-ops.astype(scale, g.dtype) * g for g in gradient]
        q, weights = [-g for g in gradient], []
        newest_first = [self._pair(i) for i in range(pairs - 1, max(-1, pairs - 1 - self.by.history_size), -1)]
        for step, change in newest_first:
            weights.append(_dot(step, q))
            q = _along(q, -weights[-1], change)
        newest = newest_first[0][1]
        q = [ops.astype(1.0 / _dot(newest, newest), x.dtype) * x for x in q]
        for (step, change), weight in zip(reversed(newest_first), reversed(weights)):
            q = _along(q, weight - _dot(change, q), step)
        return q

    def _pair(self, number: int) -> tuple[list[Tensor], list[Tensor]]:
        at = 2 * (number % self.by.history_size)
        slots = [self.by._slots[id(v)][1] for v in self.variables]
        return [_own(own[at]) for own in slots], [_own(own[at + 1]) for own in slots]

    def _keep(self, alpha: float, direction: list[Tensor], before: list[Tensor], now: list[Tensor]) -> None:
        """One more pair, if the curvature along the step is positive."""
        change = [y - x for x, y in zip(before, now)]
        materialize(*change)
        product, square = _numbers(_dot(change, direction), _dot(change, change))
        product *= alpha
        if not product > _LEAST_CURVATURE * square:
            return
        root, pairs = math.sqrt(product), self.by._counts.now("pairs", self.by._pairs)
        at = 2 * (pairs % self.by.history_size)
        for v, d, y in zip(self.variables, direction, change):
            slots = self.by._slots[id(v)][1]
            slots[at].assign(_scaled(d, alpha / root))
            slots[at + 1].assign(_scaled(y, 1 / root))
        self.by._counts.put("pairs", self.by._pairs, pairs + 1)

    def _step(self, now: _Point, starts: list[Tensor], direction: list[Tensor], slope: float) -> tuple[float, _Point]:
        """How far to go, and what is there; 0 if no length that was tried makes the loss less."""
        tried: dict[float, _Point] = {0.0: now}

        def at(alpha: float) -> _Point:
            if alpha not in tried:
                self._move(_along(starts, alpha, direction))
                tried[alpha] = self._evaluate(direction)
            return tried[alpha]

        if self.by.line_search is None:
            return 1.0, at(1.0)
        found = _strong_wolfe(at, now.loss, slope)
        if found is None:
            found = min(tried, key=lambda alpha: _finite(tried[alpha].loss))
        return found, tried[found]

    def _move(self, xs: Sequence[Tensor]) -> None:
        for v, x in zip(self.variables, xs):
            v.assign(x)


def _strong_wolfe(at: Callable[[float], _Point], loss: float, slope: float) -> float | None:
    """SciPy's search along one line, of which it sees the length alone."""
    from scipy.optimize import line_search

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"(?s).*line search", RuntimeWarning)  # it failed: None says so
        alpha, *_ = line_search(
            lambda x: _finite(at(float(x)).loss), lambda x: at(float(x)).slope, 0.0, 1.0, gfk=slope, old_fval=loss,
            c1=1e-4, c2=0.9, maxiter=25,
        )  # fmt: skip
    return None if alpha is None else float(alpha)


def _finite(loss: float) -> float:
    """A loss as a search compares it: what is not a number is worse than all numbers."""
    return math.inf if math.isnan(loss) else loss


def _own(variable: Variable) -> Tensor:
    return Tensor(variable._cell.get(variable))


def _along(xs: Sequence[Tensor], alpha: Any, direction: Sequence[Tensor]) -> list[Tensor]:
    moved = [x + _scaled(d, alpha) for x, d in zip(xs, direction)]
    materialize(*moved)
    return moved


def _scaled(x: Tensor, by: Any) -> Tensor:
    number = ops.astype(by, x.dtype) if isinstance(by, Tensor) else by
    return x * ops.asarray(number, dtype=x.dtype, device=x.device)


def _dot(xs: Sequence[Tensor], ys: Sequence[Tensor]) -> Tensor:
    return ops.sum(ops.stack([ops.sum(x * y) for x, y in zip(xs, ys)]))


def _largest(xs: Sequence[Tensor]) -> Tensor:
    return ops.max(ops.stack([ops.max(ops.abs(x)) for x in xs if x.size] or [ops.asarray(0.0)]))


def _numbers(*xs: Tensor) -> list[float]:
    """Scalars, read together."""
    return [float(x) for x in ops.stack(list(xs)).numpy()]
