"""Optimizers under Keras' names, arguments and defaults: SGD, Adam, AdamW.

An update is written in tensors, so it becomes one kernel per variable; SGD, Adam and AdamW take one kernel for many
variables on CUDA.  Nothing is assigned before all of it is checked.  The state lives in variables of the ledger's
category "optimizer", saved by ``model.save(path, optimizer)``.  No step waits for a device.

long because: each optimizer is its constructor, its formulas and where they come from.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol, TypeAlias

from tapegrad import ops
from tapegrad.core.live import present
from tapegrad.core.state import thread, unrecorded
from tapegrad.errors import DTypeError, GradientError, NotATensorError, TapegradError
from tapegrad.memory.ledger.phase import BY_OPTIMIZER, STEPS, optimizing
from tapegrad.ops import updates
from tapegrad.ops.updates import clip_by_global_norm
from tapegrad.tensor import Tensor, TensorLike, materialize
from tapegrad.variable import Variable

__all__ = ["SGD", "Adam", "AdamW", "Optimizer", "clip_by_global_norm"]

Schedule = Callable[[int], float]
Gradient: TypeAlias = "TensorLike | None"
Row = Sequence[Tensor]
Rows = Sequence[tuple[Tensor, ...]]


class Parts(Protocol):
    """Of each variable, the part that this process updates; others update the rest (``tg.distributed.shard``)."""

    def shape(self, variable: Variable) -> tuple[int, ...]:
        """Of the part, and of its slots."""

    def made(self, variable: Variable, slot: Variable) -> None:
        """``slot``, of the part's shape, was made for ``variable``."""

    def gradient(self, g: Any, variable: Variable) -> Tensor:
        """The part of a gradient."""

    def value(self, variable: Variable) -> Tensor:
        """The part of the present value."""

    def total(self, squares: Tensor) -> Tensor:
        """The sum of what all processes give."""

    def assign(self, variables: Sequence[Variable], new: Sequence[Tensor]) -> None:
        """Give the variables the values whose parts are ``new``."""


class Optimizer:
    """Changes variables by their gradients.  Subclasses name their slots and define ``update``.

    ``learning_rate`` is a number or a function of the number of steps done, and may be set at any time.
    ``weight_decay`` first shrinks a variable by ``learning_rate * weight_decay`` of itself, apart from the gradient
    (decoupled, as in Keras: Loshchilov and Hutter, "Decoupled weight decay regularization", arXiv 1711.05101).
    ``global_clipnorm`` scales all gradients down together where their joint norm is larger (see
    :func:`clip_by_global_norm`).
    """

    slot_names: tuple[str, ...] = ()

    def __init__(
        self,
        learning_rate: float | Schedule,
        *,
        weight_decay: float = 0.0,
        global_clipnorm: float | None = None,
        name: str | None = None,
    ) -> None:
        self.name = type(self).__name__ if name is None else name
        self.learning_rate = learning_rate
        if not callable(learning_rate):
            _at_least(self, "learning_rate", learning_rate, 0.0)
        self.weight_decay = _at_least(self, "weight_decay", weight_decay or 0.0, 0.0)
        if global_clipnorm is not None and not global_clipnorm > 0:
            raise TapegradError(f"{self}: wanted a positive global_clipnorm, got {global_clipnorm!r}")
        self.global_clipnorm = global_clipnorm
        self.iterations = Variable(
            0, trainable=False, name=f"{self.name}/iterations", dtype="int64", category="optimizer"
        )
        self.parts: Parts | None = None
        # By identity (a Variable has no hash); the variable is kept, so its id is not used again.
        self._slots: dict[int, tuple[Variable, tuple[Variable, ...]]] = {}
        # What `iterations` held when it was last read, and its number: reading it again would wait for the device.
        self._counted: tuple[object, int] = (None, 0)

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_slots": list(self._slots.values()), "_counted": (None, 0)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        # Keys are the ids of the variables that came along: the model's, if they were pickled or copied together.
        self.__dict__.update(state, _slots={id(v): (v, slots) for v, slots in state["_slots"]})

    def __init_subclass__(cls, **kwargs: object) -> None:
        super().__init_subclass__(**kwargs)
        if "update" in cls.__dict__ and "update_many" not in cls.__dict__:
            cls.update_many = Optimizer.update_many  # type: ignore[method-assign]  # an inherited one has other formulas

    def __repr__(self) -> str:
        return f'optimizer "{self.name}"'

    def update(self, x: Tensor, g: Tensor, slots: tuple[Tensor, ...], rate: float, step: int) -> tuple[Tensor, ...]:
        """The new value of a variable and of its slots, all shaped as the variable; ``step`` counts from 1."""
        raise TapegradError(f"{self}: the class {type(self).__name__} defines no update")

    def update_many(self, xs: Row, gs: Row, slots: Rows, rate: float, step: int, shrink: float | None) -> Rows:
        """``update`` for several variables, each first multiplied by ``shrink`` unless that is None."""
        new = []
        for x, g, own in zip(xs, gs, slots):
            new.append(self.update(updates.decayed(x, shrink), g, own, rate, step))
            materialize(*new[-1])  # in one kernel
        return new

    def build(self, variables: Iterable[Variable]) -> None:
        """Make the state of these variables, zeros.  The first ``apply`` does it for its variables.

        Raises NotATensorError for what is no Variable, DTypeError for one whose dtype has no derivatives.
        """
        for v in list(variables):
            if not isinstance(v, Variable):
                raise NotATensorError(f"{self}: wanted Variables, got {type(v).__name__}")
            if "float" not in str(v.dtype):
                raise DTypeError(f"{self}: cannot train {_name(v)} of dtype {v.dtype}; wanted a real float")
            if id(v) not in self._slots:
                slots = []
                for slot in self.slot_names:
                    name = f"{self.name}/{slot}/{v.name}"
                    x = ops.zeros(v.shape if self.parts is None else self.parts.shape(v), v.dtype, device=v.device)
                    slots.append(Variable(x, trainable=False, name=name, category="optimizer"))
                    if self.parts is not None:
                        self.parts.made(v, slots[-1])
                self._slots[id(v)] = v, tuple(slots)

    def forget(self, variables: Iterable[Variable]) -> None:
        """Drop the state of these variables; the next ``apply`` begins with zeros."""
        for v in variables:
            self._slots.pop(id(v), None)

    @property
    def variables(self) -> list[Variable]:
        """``iterations``, then the slots of every variable in the order of ``build`` or of the first step."""
        return [self.iterations, *(slot for _, slots in self._slots.values() for slot in slots)]

    def slots_of(self, variable: Variable) -> dict[str, Variable]:
        """The state kept for one variable, by slot name; empty if there is none yet."""
        _, slots = self._slots.get(id(variable), (variable, ()))
        return dict(zip(self.slot_names, slots))

    def apply_gradients(self, grads_and_vars: Iterable[tuple[Gradient, Variable]], *, skip_none: bool = False) -> None:
        """``apply`` for pairs, as Keras wants them: ``apply_gradients(zip(grads, variables))``."""
        pairs = list(grads_and_vars)
        for pair in pairs:
            if not isinstance(pair, tuple | list) or len(pair) != 2:
                raise GradientError(f"{self}: wanted pairs (gradient, variable), got {type(pair).__name__}")
        self.apply([g for g, _ in pairs], [v for _, v in pairs], skip_none=skip_none)

    def apply(self, grads: Sequence[Gradient], variables: Sequence[Variable], *, skip_none: bool = False) -> None:
        """One step: change every variable by its gradient, which has its shape.

        A gradient that is None is an error naming the variable, unless ``skip_none``, which leaves the variable and
        its state as they are.

        Raises GradientError (None, other number or shape, a variable twice, no gradients at all), DTypeError.
        """
        with optimizing():
            unrecorded(self._apply, list(grads), list(variables), skip_none)
        STEPS.mark(BY_OPTIMIZER)

    def _apply(self, grads: list[Gradient], variables: list[Variable], skip_none: bool) -> None:
        pairs = self._checked_pairs(grads, variables, skip_none)
        number, (counted, done) = thread.executor.number, self._counted
        if counted is not self._iterations_now():
            done = number(self._steps_done)
        rate, step = number(lambda: self._rate_after(present(done))), done + 1
        for group in updates.groups([v for _, v in pairs]):
            self._change([pairs[i] for i in group], rate, step)
        self.iterations.assign(step)
        self._counted = self._iterations_now(), step

    def _change(self, pairs: list[tuple[Tensor, Variable]], rate: float, step: int) -> None:
        """Assign new values to some variables and to their slots; the old ones are freed on return."""
        variables = [v for _, v in pairs]
        slots = [self._slots[id(v)][1] for v in variables]
        xs = [v._content() if self.parts is None else self.parts.value(v) for v in variables]
        state = [tuple(s._content() for s in own) for own in slots]
        shrink = 1.0 - rate * self.weight_decay if self.weight_decay else None
        new = self.update_many(xs, [g for g, _ in pairs], state, rate, step, shrink)
        for v, own, (value, *others) in zip(variables, slots, new):
            for target, changed in zip(own, others):
                target.assign(changed)
            if self.parts is None:
                v.assign(value)
        if self.parts is not None:
            self.parts.assign(variables, [value for value, *_ in new])

    def current_learning_rate(self) -> float:
        """The rate of the next step.  Raises TapegradError if a schedule gives none."""
        return self._rate_after(self._steps_done() if callable(self.learning_rate) else 0)

    def _rate_after(self, steps: int) -> float:
        rate = self.learning_rate
        current = rate(steps) if callable(rate) else rate
        return _at_least(self, "learning_rate", float(current), 0.0)

    def _steps_done(self) -> int:
        held = self._iterations_now()
        if held is not self._counted[0]:
            array = held.array
            number = getattr(array, "value", array)  # on the host, whatever its device is
            self._counted = held, int(self.iterations.numpy() if array is None else number)
        return self._counted[1]

    def _iterations_now(self) -> Any:
        """What ``iterations`` holds: a new object after every assignment."""
        return self.iterations._cell.get(self.iterations)

    def _checked_pairs(
        self, grads: list[Gradient], variables: list[Variable], skip: bool
    ) -> list[tuple[Tensor, Variable]]:
        """The gradients to apply, as tensors in their variables' dtypes, clipped."""
        if len(grads) != len(variables):
            raise GradientError(f"{self}: wanted one gradient per variable, got {len(grads)} for {len(variables)}")
        self.build(variables)
        if len({id(v) for v in variables}) != len(variables):
            twice = next(v for i, v in enumerate(variables) if any(v is w for w in variables[:i]))
            raise GradientError(f"{self}: {_name(twice)} appears more than once among the variables")
        missing = [v for g, v in zip(grads, variables) if g is None]
        if missing and not skip:
            raise GradientError(
                f"{self}: no gradient (None) for {', '.join(map(_name, missing))}: the target does not depend on "
                "them, or the tape did not record how; leave them out, or pass skip_none=True"
            )
        pairs = [(self._checked(g, v), v) for g, v in zip(grads, variables) if g is not None]
        if not pairs:
            raise GradientError(f"{self}: there is no gradient to apply")
        if self.global_clipnorm is None:
            return pairs
        total = None if self.parts is None else self.parts.total
        clipped, _ = clip_by_global_norm([g for g, _ in pairs], self.global_clipnorm, total)
        return [(c, v) for c, (_, v) in zip(clipped, pairs)]

    def _checked(self, gradient: TensorLike, variable: Variable) -> Tensor:
        if self.parts is not None:
            return self.parts.gradient(gradient, variable)
        g = ops.asarray(gradient)
        if g.shape != variable.shape:
            raise GradientError(f"{self}: wanted a gradient {variable.shape} for {_name(variable)}, got {g.shape}")
        if "complex" in str(g.dtype):
            raise DTypeError(f"{self}: wanted a real gradient for {_name(variable)}, got {g.dtype}")
        return g if g.dtype == variable.dtype else ops.astype(g, variable.dtype)


class SGD(Optimizer):
    """Gradient descent, optionally with momentum (Polyak, 1964) or Nesterov's (Sutskever et al., ICML 2013).

    Without momentum ``x -= rate * g``; with it ``v = momentum * v - rate * g`` and ``x += v``, or with ``nesterov``
    ``x += momentum * v - rate * g``.
    """

    def __init__(
        self,
        learning_rate: float | Schedule = 0.01,
        momentum: float = 0.0,
        nesterov: bool = False,
        weight_decay: float = 0.0,
        *,
        global_clipnorm: float | None = None,
        name: str | None = None,
    ) -> None:
        super().__init__(learning_rate, weight_decay=weight_decay, global_clipnorm=global_clipnorm, name=name)
        self.momentum = _share(self, "momentum", momentum)
        self.nesterov = nesterov
        if momentum:
            self.slot_names = ("momentum",)

    def update(self, x: Tensor, g: Tensor, slots: tuple[Tensor, ...], rate: float, step: int) -> tuple[Tensor, ...]:
        return SGD.update_many(self, [x], [g], [slots], rate, step, None)[0]

    def update_many(self, xs: Row, gs: Row, slots: Rows, rate: float, step: int, shrink: float | None) -> Rows:
        if not self.slot_names:
            return updates.sgd(xs, gs, rate=rate, shrink=shrink)
        vs = [v for (v,) in slots]
        return updates.momentum(xs, gs, vs, rate=rate, momentum=self.momentum, nesterov=self.nesterov, shrink=shrink)


class Adam(Optimizer):
    """Adam (Kingma and Ba, arXiv 1412.6980), in the order of computation at the end of section 2 of the paper.

    ``m = beta_1 m + (1 - beta_1) g``, ``v = beta_2 v + (1 - beta_2) g^2``, ``x -= a m / (sqrt(v) + epsilon)`` with
    ``a = rate sqrt(1 - beta_2^t) / (1 - beta_1^t)``.  As in Keras, ``epsilon`` is the paper's epsilon hat; the epsilon
    of its Algorithm 1, which PyTorch uses, is larger by ``1 / sqrt(1 - beta_2^t)``.
    """

    slot_names = ("m", "v")

    def __init__(
        self,
        learning_rate: float | Schedule = 1e-3,
        beta_1: float = 0.9,
        beta_2: float = 0.999,
        epsilon: float = 1e-7,
        weight_decay: float = 0.0,
        *,
        global_clipnorm: float | None = None,
        name: str | None = None,
    ) -> None:
        super().__init__(learning_rate, weight_decay=weight_decay, global_clipnorm=global_clipnorm, name=name)
        self.beta_1 = _share(self, "beta_1", beta_1)
        self.beta_2 = _share(self, "beta_2", beta_2)
        self.epsilon = _at_least(self, "epsilon", epsilon, 0.0)

    def update(self, x: Tensor, g: Tensor, slots: tuple[Tensor, ...], rate: float, step: int) -> tuple[Tensor, ...]:
        return Adam.update_many(self, [x], [g], [slots], rate, step, None)[0]

    def update_many(self, xs: Row, gs: Row, slots: Rows, rate: float, step: int, shrink: float | None) -> Rows:
        factor = thread.executor.number(lambda: self._factor(rate, step))
        betas = {"beta_1": self.beta_1, "beta_2": self.beta_2}
        ms, vs = ([own[i] for own in slots] for i in (0, 1))
        return updates.adam(xs, gs, ms, vs, factor=factor, **betas, epsilon=self.epsilon, shrink=shrink)

    def _factor(self, rate: float, step: int) -> float:
        rate, step = present(rate), present(step)
        return rate * math.sqrt(1.0 - self.beta_2**step) / (1.0 - self.beta_1**step)


class AdamW(Adam):
    """Adam with decoupled weight decay on by default (Loshchilov and Hutter, arXiv 1711.05101), as in Keras."""

    def __init__(
        self,
        learning_rate: float | Schedule = 1e-3,
        weight_decay: float = 0.004,
        beta_1: float = 0.9,
        beta_2: float = 0.999,
        epsilon: float = 1e-7,
        *,
        global_clipnorm: float | None = None,
        name: str | None = None,
    ) -> None:
        super().__init__(
            learning_rate, beta_1, beta_2, epsilon, weight_decay, global_clipnorm=global_clipnorm, name=name
        )


def _name(variable: Variable) -> str:
    return f'variable "{variable.name}" {variable.shape}'


def _share(who: object, name: str, value: float) -> float:
    if not 0 <= value < 1:
        raise TapegradError(f"{who}: wanted {name} in [0, 1), got {value!r}")
    return value


def _at_least(who: object, name: str, value: float, least: float) -> float:
    if not value >= least:
        raise TapegradError(f"{who}: wanted {name} of at least {least}, got {value!r}")
    return value
