"""``Optimizer``: what all optimizers do: their state, the checks of gradients, clipping, accumulation, one step.

An update is written in tensors, so it becomes one kernel per variable; most optimizers take one kernel for many
variables on CUDA (``tapegrad.ops.updates``).  Nothing is assigned before all of it is checked.  The state lives in
variables of the ledger's category "optimizer", saved by ``model.save(path, optimizer)``.  No step waits for a device.
A variable of a half dtype is updated in float32 (``masters.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from math import inf
from typing import Any, NoReturn, TypeAlias, TypedDict

from tapegrad import ops
from tapegrad.core.live_numbers import LiveNumber, present
from tapegrad.core.state import thread, unrecorded
from tapegrad.errors import GradientError, TapegradError
from tapegrad.nn.layers import saving, state_dicts
from tapegrad.nn.layers.state_dicts import Differences, State
from tapegrad.ops import row_updates, updates
from tapegrad.ops.index.slices import IndexedSlices, summed
from tapegrad.optim import clipping
from tapegrad.optim.optimizers import checks, masters
from tapegrad.optim.optimizers.counts import Counts
from tapegrad.optim.optimizers.helpers import Parts, Scaler
from tapegrad.spellings import OPTIMIZERS, Named, missing, taken_by
from tapegrad.tensor import Tensor, TensorLike, materialize
from tapegrad.tracing.phase import BY_OPTIMIZER, STEPS, optimizing
from tapegrad.variable import Variable

Schedule: TypeAlias = Callable[[int], float]
Gradient: TypeAlias = "TensorLike | IndexedSlices | None"
Row: TypeAlias = Sequence[Tensor]
Rows: TypeAlias = Sequence[tuple[Tensor, ...]]


class Options(TypedDict, total=False):
    """Arguments by name that every optimizer takes; see :class:`Optimizer`."""

    clipvalue: float | None
    clipnorm: float | None
    global_clipnorm: float | None
    gradient_accumulation_steps: int
    name: str | None


class Optimizer(Named):
    """Changes variables by their gradients.  Subclasses name their slots and define ``update``.

    ``learning_rate`` is a number or a function of the number of steps done (``tapegrad.optim.schedules``), and may be
    set at any time.
    ``weight_decay`` first shrinks a variable by ``learning_rate * weight_decay`` of itself, apart from the gradient
    (decoupled, as in Keras: Loshchilov and Hutter, "Decoupled weight decay regularization", arXiv 1711.05101).
    ``clipvalue``, ``clipnorm`` or ``global_clipnorm``, one of them: limits the numbers of the gradients, the norm of
    each gradient, or their joint norm (:mod:`tapegrad.optim.clipping`).
    ``gradient_accumulation_steps`` k: only every k-th call changes the variables, by the mean of the gradients of
    k calls; clipping sees that mean, and ``iterations`` counts changes.  A gradient that is skipped counts as zeros.
    Within a captured step (``tg.function``) every call does the work of a change, and all but the k-th drop it.

    A gradient may be a ``tg.IndexedSlices``; rows named twice are added first.  Where :attr:`rows_alone` says so, rows
    that it names are all that a step reads and writes of the variable and of its state, also within a captured step.
    Else it counts as the whole array that it stands for, so that rows of zeros, too, take part in
    momentum, decay and accumulation; as does one for a part of a variable (``tg.distributed.shard``).

    Raises TapegradError for hyperparameters out of range, and where gradients are clipped in two ways.
    """

    slot_names: tuple[str, ...] = ()
    rows_alone: bool = False
    """Whether a step by IndexedSlices changes the rows that they name, and no others."""

    def __getattr__(self, name: str) -> NoReturn:
        raise missing(self, name, OPTIMIZERS)

    def __init__(
        self,
        learning_rate: float | Schedule,
        *,
        weight_decay: float = 0.0,
        clipvalue: float | None = None,
        clipnorm: float | None = None,
        global_clipnorm: float | None = None,
        gradient_accumulation_steps: int = 1,
        name: str | None = None,
    ) -> None:
        self.name = type(self).__name__ if name is None else name
        self.learning_rate = learning_rate
        if not callable(learning_rate):
            checks.at_least(self, "learning_rate", learning_rate, 0.0)
        self.weight_decay = checks.at_least(self, "weight_decay", weight_decay or 0.0, 0.0)
        self.clipvalue = checks.positive(self, "clipvalue", clipvalue)
        self.clipnorm = checks.positive(self, "clipnorm", clipnorm)
        self.global_clipnorm = checks.positive(self, "global_clipnorm", global_clipnorm)
        if sum(limit is not None for limit in (clipvalue, clipnorm, global_clipnorm)) > 1:
            raise TapegradError(f"{self}: wanted at most one of clipvalue, clipnorm and global_clipnorm")
        self.gradient_accumulation_steps = checks.count(
            self, "gradient_accumulation_steps", gradient_accumulation_steps or 1
        )
        self.iterations = self._zero("iterations")
        self._calls = self._zero("calls") if self.gradient_accumulation_steps > 1 else None
        self.parts: Parts | None = None
        # By identity (a Variable has no hash); the variable is kept, so its id is not used again.
        self._slots: dict[int, tuple[Variable, tuple[Variable, ...]]] = {}
        # Of half variables, by identity.
        self._masters: dict[int, Variable] = {}
        self._counts = Counts()

    def _zero(self, name: str) -> Variable:
        return Variable(0, trainable=False, name=f"{self.name}/{name}", dtype="int64", category="optimizer")

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_slots": list(self._slots.values()), "_masters": {}, "_counts": Counts()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        # Keys are the ids of the variables that came along: the model's, if they were pickled or copied together.
        self.__dict__.update(state, _slots={id(v): (v, slots) for v, slots in state["_slots"]})
        self._masters = {id(v): slots[-1] for v, slots in state["_slots"] if masters.narrow(v)}

    def __init_subclass__(cls, **kwargs: object) -> None:
        super().__init_subclass__(**kwargs)
        if "update" in cls.__dict__ and "update_many" not in cls.__dict__:
            cls.update_many = Optimizer.update_many  # type: ignore[method-assign]  # an inherited one has other formulas
        if not {"update", "update_many"}.isdisjoint(cls.__dict__):
            for name in {"formula", "rows_alone"} - cls.__dict__.keys():
                setattr(cls, name, getattr(Optimizer, name))

    def __str__(self) -> str:
        return f'optimizer "{self.name}"'

    def __repr__(self) -> str:
        """The class, with the learning rate and what else is not as by default."""
        kind: type = type(self)
        told = []
        for name, parameter in (taken_by(kind) or {}).items():
            value = vars(self).get(name, parameter.default)
            if name == "learning_rate" or (
                value != parameter.default and (name, value) != ("name", type(self).__name__)
            ):
                told.append(f"{name}={value!r}")
        return f"{type(self).__name__}({', '.join(told)})"

    def update(self, x: Tensor, g: Tensor, slots: tuple[Tensor, ...], rate: float, step: int) -> tuple[Tensor, ...]:
        """The new value of a variable and of its slots, all shaped as the variable; ``step`` counts from 1.

        Under a ``LossScaler`` ``step`` is a tensor, 0-d, of float64.
        """
        raise TapegradError(f"{self}: the class {type(self).__name__} defines no update")

    def update_many(self, xs: Row, gs: Row, slots: Rows, rate: float, step: int, shrink: float | None) -> Rows:
        """``update`` for several variables, each first multiplied by ``shrink`` unless that is None."""
        if (formula := self.formula(rate, step)) is not None:
            return updates.of_many(formula, (xs, gs, *zip(*slots, strict=True)), shrink)
        new = []
        for x, g, own in zip(xs, gs, slots):
            new.append(self.update(updates.decayed(x, shrink), g, own, rate, step))
            materialize(*new[-1])  # in one kernel
        return new

    def formula(self, rate: float, step: int) -> updates.Formula | None:
        """What ``update`` does, where there is a kernel for it; else None."""
        return None

    def initial(self, slot: str) -> float:
        """The number that a slot holds everywhere at first; 0 unless a subclass says otherwise."""
        return 0.0

    @property
    def state_names(self) -> tuple[str, ...]:
        """The names of what is kept for each variable: the slots, and where gradients are added up ``accumulated``."""
        return self.slot_names if self._calls is None else (*self.slot_names, "accumulated")

    @property
    def counters(self) -> dict[str, Variable]:
        """``iterations``, and where gradients are added up ``calls``: how many since the last change; by name."""
        return {"iterations": self.iterations} if self._calls is None else {
            "iterations": self.iterations, "calls": self._calls}  # fmt: skip

    def names_of(self, variable: Variable) -> tuple[str, ...]:
        """The names of what is kept for ``variable``: a half one has a ``master`` besides."""
        return (*self.state_names, "master") if masters.narrow(variable) else self.state_names

    def build(self, variables: Iterable[Variable]) -> None:
        """Make the state of these variables.  The first ``apply`` does it for its variables.

        Raises NotATensorError for what is no Variable, DTypeError for one whose dtype has no derivatives.
        """
        for v in checks.listed(self, "variables", variables):
            if id(v) in self._slots:
                continue
            checks.trained(self, v)
            slots = []
            for slot in self.names_of(v):
                name, dtype = f"{self.name}/{slot}/{v.name}", updates.wide(v.dtype)
                if slot == "master":
                    x = unrecorded(ops.astype, v._content() if self.parts is None else self.parts.value(v), dtype)
                else:
                    x = ops.full(self._shape(v), self.initial(slot), dtype=dtype, device=v.device)
                slots.append(Variable(x, trainable=False, name=name, category="optimizer"))
                if self.parts is not None:
                    self.parts.made(v, slots[-1])
            self._slots[id(v)] = v, tuple(slots)
            if masters.narrow(v):
                self._masters[id(v)] = slots[-1]

    def _shape(self, variable: Variable) -> tuple[int, ...]:
        """Of what is kept for a variable."""
        return variable.shape if self.parts is None else self.parts.shape(variable)

    def forget(self, variables: Iterable[Variable]) -> None:
        """Drop the state of these variables; the next ``apply`` begins with zeros."""
        for v in variables:
            self._slots.pop(id(v), None)
            self._masters.pop(id(v), None)

    @property
    def variables(self) -> list[Variable]:
        """The counters, then the slots of every variable in the order of ``build`` or of the first step."""
        return [*self.counters.values(), *(slot for _, slots in self._slots.values() for slot in slots)]

    def slots_of(self, variable: Variable) -> dict[str, Variable]:
        """The state kept for one variable, by slot name; empty if there is none yet."""
        _, slots = self._slots.get(id(variable), (variable, ()))
        return dict(zip(self.names_of(variable), slots))

    def state_dict(self, of: Any = None) -> State:
        """The counters and the slots, as tensors by name: ``iterations``, ``m/<path>``; later steps do not change them.

        of: a layer, by whose paths variables are named, as in its files; or variables, in a list or by name in a dict.
        By default variables are named by number, in the order of their first step.  Hyperparameters are not in it.

        Raises SaveError for an optimizer that has state for other variables.
        """
        return state_dicts.taken(saving.state_of(self, self._named(of), "what state_dict was given"))

    def load_state_dict(self, state: Mapping[str, TensorLike], of: Any = None, strict: bool = True) -> Differences:
        """Set the state from what :meth:`state_dict` has given for the same ``of``; see ``Layer.load_state_dict``.

        An optimizer that has made no step needs ``of``: its slots are made of what the state has.  Nothing changes
        unless all fits.  Raises SaveError, which lists what is missing, unexpected, of another shape or dtype.
        """
        variables = self._named(of)
        new = saving.build_state(self, variables, state)
        try:
            own = saving.state_of(self, variables, "what load_state_dict was given")
            return state_dicts.put(str(self), own, state, strict)
        except BaseException:
            self.forget(new)
            raise

    def _named(self, of: Any) -> saving.Named:
        return state_dicts.named([v for v, _ in self._slots.values()] if of is None else of)

    def apply_gradients(self, grads_and_vars: Iterable[tuple[Gradient, Variable]], *, skip_none: bool = False) -> None:
        """``apply`` for pairs, as Keras wants them: ``apply_gradients(zip(grads, variables))``."""
        pairs = self.checked(grads_and_vars)
        self.apply([g for g, _ in pairs], [v for _, v in pairs], skip_none=skip_none)

    def checked(self, grads_and_vars: Iterable[tuple[Gradient, Variable]]) -> list[tuple[Gradient, Variable]]:
        """A list of pairs.  Raises GradientError for what is no pair."""
        pairs = checks.listed(self, "pairs (gradient, variable)", grads_and_vars)
        for pair in pairs:
            if not isinstance(pair, tuple | list) or len(pair) != 2:
                raise GradientError(f"{self}: wanted pairs (gradient, variable), got {type(pair).__name__}")
        return pairs

    def apply(self, grads: Sequence[Gradient], variables: Sequence[Variable], *, skip_none: bool = False) -> None:
        """One step: change every variable by its gradient, which has its shape.

        A gradient that is None is an error naming the variable, unless ``skip_none``, which leaves the variable and
        its state as they are.

        Raises GradientError (None, other number or shape, a variable twice, no gradients at all), DTypeError.
        """
        with optimizing():
            unrecorded(
                self._apply,
                checks.listed(self, "gradients", grads),
                checks.listed(self, "variables", variables),
                skip_none,
            )
        STEPS.mark(BY_OPTIMIZER)

    def _apply(
        self, grads: list[Gradient], variables: list[Variable], skip_none: bool, scaler: Scaler | None = None
    ) -> Any:
        """One step, or with ``scaler`` one if all gradients are finite; whether they are, on the device."""
        pairs = self._checked_pairs(grads, variables, skip_none)
        last: Any = True
        changes: Any = True
        if scaler is not None:
            gs, changes = scaler.taken([g for g, _ in pairs])
            pairs = [(g, v) for g, (_, v) in zip(gs, pairs)]
        if self._calls is not None:
            pairs, last = self._accumulated(pairs, self._calls)
            if last is False:
                return changes
        pairs = self._clipped(pairs)
        done = self._counts.number("iterations", self.iterations)
        rate, step = thread.executor.number(partial(self._rate_after, done)), done + 1
        number: Any = step
        flag = last
        if scaler is not None and self._calls is None:
            number, flag = scaler.steps(done), changes
        dense = [(g, v) for g, v in pairs if isinstance(g, Tensor)]
        for group in self.groups(dense):
            self._change([dense[i] for i in group], rate, number, flag)
        for g, v in pairs:
            if isinstance(g, IndexedSlices):
                self._change_rows(g, v, rate, number)
        self._counts.put("iterations", self.iterations, step if last is True else done + last)
        return changes

    def groups(self, pairs: Sequence[tuple[Tensor, Variable]]) -> list[list[int]]:
        """Positions in ``pairs``: those of each group are updated together."""
        return updates.groups([v._aval for _, v in pairs], [g._buffer.node.aval.dtype for g, _ in pairs])

    def _change_rows(self, g: IndexedSlices, v: Variable, rate: float, step: int) -> None:
        """Change the rows of a variable, and of its slots, that ``g`` names, each once, or by -1 for none."""
        tables, narrow = (v, *self._slots[id(v)][1]), id(v) in self._masters
        shrink = self._shrink(rate)
        if not narrow and (formula := self.formula(rate, step)) is not None:
            return row_updates.update_rows(formula, tables, g.indices, g.values, shrink)
        x, *state = (row_updates.read_rows(t, g.indices) for t in tables)
        if narrow:
            x = updates.digits(x, state.pop())
        (new,) = self.update_many([x], [g.values], [tuple(state)], rate, step, shrink)
        changed = (updates.rounded(new[0], v.dtype), *new[1:], new[0]) if narrow else new
        for table, rows in zip(tables, changed, strict=True):
            row_updates.write_rows(table, g.indices, rows)

    def _change(self, pairs: list[tuple[Tensor, Variable]], rate: float, step: int, last: Any) -> None:
        """Assign new values to some variables and to their slots; the old ones are freed on return.

        last: a live number or a tensor that tells whether they change, or True; with a tensor ``step`` is one, too.
        """
        variables = [v for _, v in pairs]
        slots = [self._slots[id(v)][1][: len(self.slot_names)] for v in variables]
        formula = self.formula(rate, step) if last is True and self.parts is None else None
        if formula is not None:
            columns: list[Sequence[Variable]] = [variables, *zip(*slots, strict=True)]
            if id(variables[0]) in self._masters:
                columns = [[self._masters[id(v)] for v in variables], *columns[1:], variables]
            updates.renew(formula, columns, [g for g, _ in pairs], self._shrink(rate))
            return
        values = []
        for v, own, (x, *others, value) in zip(variables, slots, self._renewed(pairs, slots, rate, step, last)):
            for target, changed in zip(own, others):
                target.assign(changed)
            if (master := self._masters.get(id(v))) is not None:
                master.assign(x)
            if self.parts is None:
                v.assign(value)
            values.append(value)
        if self.parts is not None:
            self.parts.assign(variables, values)

    def _shrink(self, rate: float) -> float | None:
        """By what decay multiplies a variable; None: there is none."""
        return 1.0 - rate * self.weight_decay if self.weight_decay else None

    def _renewed(
        self,
        pairs: list[tuple[Tensor, Variable]],
        slots: Sequence[Sequence[Variable]],
        rate: float,
        step: int,
        last: Any,
    ) -> Rows:
        """What becomes of some variables: x, which is the master's value if there is one, the slots, the value."""
        gs, variables = [g for g, _ in pairs], [v for _, v in pairs]
        values = [v._content() if self.parts is None else self.parts.value(v) for v in variables]
        full = [self._masters[id(v)]._content() if id(v) in self._masters else None for v in variables]
        state = [tuple(s._content() for s in own) for own in slots]
        shrink = self._shrink(rate)
        known = [m for m in full if m is not None]
        formula = self.formula(rate, step) if len(known) == len(full) else None
        if formula is not None:
            new: Rows = updates.of_halves(formula, values, (known, gs, *zip(*state, strict=True)), shrink)
            if last is not True:
                old = [(updates.digits(x, m), *own, x) for x, m, own in zip(values, known, state)]
                new = [_where(last, *both) for both in zip(new, old)]
            return new
        xs = [x if m is None else updates.digits(x, m) for x, m in zip(values, full)]
        if known:
            gs = [updates.rounded(g, x.dtype) for g, x in zip(gs, xs)]
        new = self.update_many(xs, gs, state, rate, step, shrink)
        if last is not True:
            new = [_where(last, made, (x, *own)) for made, x, own in zip(new, xs, state)]
        return [(*x, x[0] if m is None else updates.rounded(x[0], old.dtype)) for x, m, old in zip(new, full, values)]

    def _accumulated(
        self, pairs: list[tuple[Tensor, Variable]], calls: Variable
    ) -> tuple[list[tuple[Tensor, Variable]], Any]:
        """Add gradients to what was kept: the means, and whether they are to be applied, which may be a live number.

        The sum begins anew with the first call of k, so the last one need not write zeros.
        """
        k, number = self.gradient_accumulation_steps, thread.executor.number
        before = self._counts.number("calls", calls)
        first, last = number(lambda: present(before) == 0), number(lambda: present(before) == k - 1)
        captured = isinstance(last, LiveNumber)
        means: list[Any] = [None] * len(pairs)
        for group in updates.groups([v._aval for _, v in pairs]):
            gs = [pairs[i][0] for i in group]
            sums = [self._slots[id(pairs[i][1])][1][len(self.slot_names)] for i in group]
            kept = [s._content() for s in sums]
            if captured or last:
                for i, (mean,) in zip(group, updates.of_many(updates.sgd_formula(-1.0 / k), (kept, gs), 1.0 / k)):
                    means[i] = mean
            if captured:
                added = [_where(first, (g,), (s + g,))[0] for s, g in zip(kept, gs)]
                for s, old, x in zip(sums, kept, added):
                    s.assign(_where(last, (old,), (x,))[0])
            elif not last:
                new = gs if first else [x for (x,) in updates.of_many(updates.sgd_formula(-1.0), (kept, gs), None)]
                for s, x in zip(sums, new):
                    s.assign(x)
        self._counts.put("calls", calls, (before + 1) % k)
        return [(mean, v) for mean, (_, v) in zip(means, pairs)], last

    def current_learning_rate(self) -> float:
        """The rate of the next step.  Raises TapegradError if a schedule gives none."""
        return self._rate_after(self._steps_done() if callable(self.learning_rate) else 0)

    def _rate_after(self, steps: int) -> float:
        rate = self.learning_rate
        current = rate(present(steps)) if callable(rate) else rate
        if type(current) is float and 0.0 <= current < inf:
            return current
        return checks.at_least(self, "learning_rate", float(current), 0.0)

    def _steps_done(self) -> int:
        return self._counts.now("iterations", self.iterations)

    def _checked_pairs(
        self, grads: Sequence[Gradient], variables: list[Variable], skip: bool
    ) -> list[tuple[Any, Variable]]:
        """The gradients to apply, in the dtypes in which variables are updated: tensors, or slices of rows alone."""
        if len(grads) != len(variables):
            raise GradientError(f"{self}: wanted one gradient per variable, got {len(grads)} for {len(variables)}")
        self.build(variables)
        checks.each_once(self, variables)
        missing = [v for g, v in zip(grads, variables) if g is None]
        if missing and not skip:
            raise checks.no_gradient(self, missing)
        as_it_is = self.parts is None and (self._takes_halves or not self._masters)
        pairs = [
            (g if as_it_is and type(g) is Tensor and g._buffer.node.aval is v._aval else self._checked(g, v), v)
            for g, v in zip(grads, variables) if g is not None
        ]  # fmt: skip
        if not pairs:
            raise GradientError(f"{self}: there is no gradient to apply")
        if missing and self._calls is not None:  # the sum of a call before, if any, is applied
            pairs += [(ops.zeros(self._shape(v), updates.wide(v.dtype), device=v.device), v) for v in missing]
        return pairs

    def _clipped(self, pairs: list[tuple[Any, Variable]]) -> list[tuple[Any, Variable]]:
        """Of slices the values: rows are named once, and all others are zeros."""
        gs: Sequence[Tensor] = [g.values if isinstance(g, IndexedSlices) else g for g, _ in pairs]
        total = None if self.parts is None else self.parts.total
        if self.clipvalue is not None:
            gs = [clipping.clip_by_value(g, -self.clipvalue, self.clipvalue) for g in gs]
        elif self.clipnorm is not None:
            gs = clipping.each_by_norm(gs, self.clipnorm, total)
        elif self.global_clipnorm is not None:
            gs, _ = clipping.clip_by_global_norm(gs, self.global_clipnorm, total)
        return [(old.with_values(g) if isinstance(old, IndexedSlices) else g, v) for g, (old, v) in zip(gs, pairs)]

    def _checked(self, gradient: TensorLike | IndexedSlices, variable: Variable) -> Any:
        g: Any = gradient.within(variable.shape) if isinstance(gradient, IndexedSlices) else None
        if g is not None and not (self.rows_alone and self.parts is None and self._calls is None):
            gradient, g = g.to_dense(), None
        if self.parts is not None:
            return self.parts.gradient(gradient, variable)
        if g is None:
            g = ops.asarray(gradient)
        checks.gradient(self, g, variable)
        master = self._masters.get(id(variable))
        wide = (variable if master is None else master).dtype
        if isinstance(g, IndexedSlices):
            values, indices = summed(g)
            return IndexedSlices.of(ops.astype(values, wide), indices, g.dense_shape)
        return g if g.dtype == wide or (g.dtype == variable.dtype and self._takes_halves) else ops.astype(g, wide)

    @property
    def _takes_halves(self) -> bool:
        """Whether gradients of half variables need not be of the wider dtype: nothing but the update reads them."""
        limits = self.clipvalue, self.clipnorm, self.global_clipnorm
        return self._calls is None and limits == (None, None, None)


def _where(flag: Any, new: Sequence[Tensor], old: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Each of ``new`` if ``flag``, a live number or a tensor, is true, else of ``old``."""
    chosen = tuple(ops.where(ops.asarray(flag, dtype="bool", device=x.device), x, y) for x, y in zip(new, old))
    materialize(*chosen)
    return chosen
