"""``EMA``: moving averages of variables, which often do better than the variables themselves."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tapegrad import ops
from tapegrad.core.state import unrecorded
from tapegrad.errors import DTypeError, NotATensorError, TapegradError
from tapegrad.ops import updates
from tapegrad.optim.optimizers import checks
from tapegrad.tensor import Tensor
from tapegrad.variable import Variable


class EMA:
    """Exponential moving averages of variables: ``average = decay * average + (1 - decay) * value`` at each ``update``.

    variables: of real floats, or what has ``trainable_variables``, such as a built model.  The averages begin with
    the present values; with ``debias`` they begin with zeros and are divided by ``1 - decay ** updates`` when they are
    read, as Adam's are (Kingma and Ba, arXiv 1412.6980, section 3): a mean with known weights of the values seen.
    They live in ``variables``, of the ledger's category "optimizer", and take one kernel for many variables on CUDA.
    Of a variable that is cut over ranks the piece is averaged.

    Raises TapegradError for a ``decay`` outside of [0, 1) and for no variables, NotATensorError, DTypeError.
    """

    def __init__(self, variables: Any, decay: float = 0.999, *, debias: bool = False, name: str = "ema") -> None:
        self.name = name
        self.decay = checks.share(self, "decay", decay)
        self.debias = debias
        of: Any = getattr(variables, "trainable_variables", variables)
        self._variables = [of] if isinstance(of, Variable) else checks.listed(self, "variables", of)
        if not self._variables:
            raise TapegradError(f"{self}: there are no variables; call a model once, so that it has some")
        self.updates = Variable(0, trainable=False, name=f"{name}/updates", dtype="int64", category="optimizer")
        self._averages = [self._begin(v) for v in self._variables]

    def __repr__(self) -> str:
        return f'EMA "{self.name}"'

    def _begin(self, v: object) -> Variable:
        if not isinstance(v, Variable):
            raise NotATensorError(f"{self}: wanted Variables, got {type(v).__name__}")
        if "float" not in str(v.dtype):
            raise DTypeError(f"{self}: variable {v.name!r} is {v.dtype}; wanted a real float")
        start = ops.zeros_like(_own(v)) if self.debias else ops.asarray(_own(v), copy=True)
        return Variable(start, trainable=False, name=f"{self.name}/{v.name}", category="optimizer")

    @property
    def variables(self) -> list[Variable]:
        """``updates``, how many there were, then the averages in the order of the variables: what there is to save."""
        return [self.updates, *self._averages]

    def update(self) -> None:
        """Take the present values in.  Not recorded by tapes; it may be a part of a captured step."""
        unrecorded(self._update)

    def _update(self) -> None:
        for group in updates.groups([v._aval for v in self._variables]):
            averages = [self._averages[i] for i in group]
            values = [_own(self._variables[i]) for i in group]
            # SGD's kernel: decay * average - -(1 - decay) * value.
            updates.renew(updates.sgd_formula(self.decay - 1.0), [averages], values, self.decay)
        self.updates.assign_add(1)

    def average(self, variable: Variable) -> Tensor:
        """The average of one variable, of its shape and dtype; with ``debias`` the value itself before any update.

        Raises TapegradError for a variable that is not averaged.
        """
        for v, average in zip(self._variables, self._averages):
            if v is variable:
                return unrecorded(self._read, v, average)
        raise TapegradError(f"{self}: variable {variable.name!r} is not averaged")

    def _read(self, variable: Variable, average: Variable) -> Tensor:
        mean = _own(average)
        if not self.debias:
            return mean
        count = ops.astype(ops.asarray(_own(self.updates), device=variable.device), "float64")
        weight = ops.where(count > 0, 1.0 - self.decay**count, 1.0)
        return ops.where(count > 0, mean / ops.astype(weight, variable.dtype), _own(variable))

    def assign(self) -> None:
        """Give the variables their averages for good."""
        for v, x in self._all():
            v.assign(x)

    def _all(self) -> list[tuple[Variable, Tensor]]:
        return [(v, unrecorded(self._read, v, a)) for v, a in zip(self._variables, self._averages)]

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Within the block the variables hold their averages; afterwards what they held before, whatever happens."""
        before = [(v, _own(v)) for v in self._variables]
        self.assign()
        try:
            yield
        finally:
            for v, x in before:
                v.assign(x)


def _own(variable: Variable) -> Tensor:
    """What a variable holds itself: of one that is cut over ranks the piece."""
    return Tensor(variable._cell.get(variable))
