"""Optimizers under Keras' names, arguments and defaults: SGD, Adam, AdamW.

An update is written in tensors, so it becomes one kernel per variable, and nothing is assigned before all of it is
checked.  The state lives in variables of the ledger's category "optimizer", saved by ``model.save(path, optimizer)``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from tapegrad import ops
from tapegrad.errors import DTypeError, GradientError, NotATensorError, ShapeError, TapegradError
from tapegrad.tensor import Tensor, materialize
from tapegrad.variable import Variable, unrecorded

__all__ = ["SGD", "Adam", "AdamW", "Optimizer", "clip_by_global_norm"]

Schedule = Callable[[int], float]


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
        # By identity (a Variable has no hash); the variable is kept, so its id is not used again.
        self._slots: dict[int, tuple[Variable, tuple[Variable, ...]]] = {}

    def __repr__(self) -> str:
        return f'optimizer "{self.name}"'

    def update(self, x: Tensor, g: Tensor, slots: tuple[Tensor, ...], rate: float, step: int) -> tuple[Tensor, ...]:
        """The new value of a variable and of its slots, all shaped as the variable; ``step`` counts from 1."""
        raise TapegradError(f"{self}: the class {type(self).__name__} defines no update")

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
                zeros = (
                    Variable(
                        ops.zeros(v.shape, dtype=v.dtype),
                        trainable=False,
                        name=f"{self.name}/{slot}/{v.name}",
                        category="optimizer",
                    )
                    for slot in self.slot_names
                )
                self._slots[id(v)] = v, tuple(zeros)

    @property
    def variables(self) -> list[Variable]:
        """``iterations``, then the slots of every variable in the order of ``build`` or of the first step."""
        return [self.iterations, *(slot for _, slots in self._slots.values() for slot in slots)]

    def slots_of(self, variable: Variable) -> dict[str, Variable]:
        """The state kept for one variable, by slot name; empty if there is none yet."""
        _, slots = self._slots.get(id(variable), (variable, ()))
        return dict(zip(self.slot_names, slots))

    def apply_gradients(self, grads_and_vars: Iterable[tuple[Any, Variable]], *, skip_none: bool = False) -> None:
        """``apply`` for pairs, as Keras wants them: ``apply_gradients(zip(grads, variables))``."""
        pairs = list(grads_and_vars)
        for pair in pairs:
            if not isinstance(pair, tuple | list) or len(pair) != 2:
                raise GradientError(f"{self}: wanted pairs (gradient, variable), got {type(pair).__name__}")
        self.apply([g for g, _ in pairs], [v for _, v in pairs], skip_none=skip_none)

    def apply(self, grads: Sequence[Any], variables: Sequence[Variable], *, skip_none: bool = False) -> None:
        """One step: change every variable by its gradient, which has its shape.

        A gradient that is None is an error naming the variable, unless ``skip_none``, which leaves the variable and
        its state as they are.

        Raises GradientError (None, other number or shape, a variable twice, no gradients at all), DTypeError.
        """
        with unrecorded():
            pairs = self._checked_pairs(list(grads), list(variables), skip_none)
            rate, step = self.current_learning_rate(), self._steps_done() + 1
            for g, v in pairs:
                x, slots = v.read(), self._slots[id(v)][1]
                if self.weight_decay:
                    x = x * _scalar(1.0 - rate * self.weight_decay, x)
                new = self.update(x, g, tuple(s.read() for s in slots), rate, step)
                materialize(*new)  # in one kernel
                for target, value in zip((*slots, v), (*new[1:], new[0])):
                    target.assign(value)
            self.iterations.assign_add(1)

    def current_learning_rate(self) -> float:
        """The rate of the next step.  Raises TapegradError if a schedule gives none."""
        rate = self.learning_rate
        if callable(rate):
            rate = rate(self._steps_done())
        return _at_least(self, "learning_rate", float(rate), 0.0)

    def _steps_done(self) -> int:
        return int(self.iterations.numpy())

    def _checked_pairs(
        self, grads: list[Any], variables: list[Variable], skip_none: bool
    ) -> list[tuple[Tensor, Variable]]:
        """The gradients to apply, as tensors in their variables' dtypes, clipped."""
        if len(grads) != len(variables):
            raise GradientError(f"{self}: wanted one gradient per variable, got {len(grads)} for {len(variables)}")
        self.build(variables)
        if len({id(v) for v in variables}) != len(variables):
            twice = next(v for i, v in enumerate(variables) if any(v is w for w in variables[:i]))
            raise GradientError(f"{self}: {_name(twice)} appears more than once among the variables")
        missing = [v for g, v in zip(grads, variables) if g is None]
        if missing and not skip_none:
            raise GradientError(
                f"{self}: no gradient (None) for {', '.join(map(_name, missing))}: the target does not depend on "
                "them, or the tape did not see how; leave them out, or pass skip_none=True"
            )
        pairs = [(self._checked(g, v), v) for g, v in zip(grads, variables) if g is not None]
        if not pairs:
            raise GradientError(f"{self}: there is no gradient to apply")
        if self.global_clipnorm is None:
            return pairs
        clipped, _ = clip_by_global_norm([g for g, _ in pairs], self.global_clipnorm)
        return [(c, v) for c, (_, v) in zip(clipped, pairs)]

    def _checked(self, gradient: Any, variable: Variable) -> Tensor:
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
        down = _scalar(rate, x) * g
        if not slots:
            return (x - down,)
        velocity = self.momentum * slots[0] - down
        return (x + self.momentum * velocity - down if self.nesterov else x + velocity), velocity


class Adam(Optimizer):
    """Adam (Kingma and Ba, arXiv 1412.6980), in the order of computation that section 2 of the paper ends with.

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
        factor = _scalar(rate * math.sqrt(1.0 - self.beta_2**step) / (1.0 - self.beta_1**step), x)
        m = self.beta_1 * slots[0] + (1.0 - self.beta_1) * g
        v = self.beta_2 * slots[1] + (1.0 - self.beta_2) * (g * g)
        return x - factor * m / (ops.sqrt(v) + self.epsilon), m, v


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


def clip_by_global_norm(grads: Sequence[Any], clip_norm: float) -> tuple[list[Any], Tensor]:
    """All gradients times ``clip_norm / max(norm, clip_norm)``, and ``norm``, the root of the sum of all squares.

    None among the gradients stays None (Pascanu et al., "On the difficulty of training recurrent neural networks",
    ICML 2013).  A norm that is infinite or not a number makes every gradient not a number.

    Raises ShapeError if there is no gradient, TapegradError unless ``clip_norm`` is positive.
    """
    if not clip_norm > 0:
        raise TapegradError(f"clip_by_global_norm: wanted a positive clip_norm, got {clip_norm!r}")
    tensors = [None if g is None else ops.asarray(g) for g in grads]
    squares = [ops.sum(t * t) for t in tensors if t is not None]
    if not squares:
        raise ShapeError("clip_by_global_norm: there is no gradient")
    norm = ops.sqrt(ops.sum(ops.stack(squares)))
    # Not clip_norm / inf: a step of zeros would hide that the gradients overflowed.
    scale = ops.where(ops.isfinite(norm), clip_norm / ops.maximum(norm, clip_norm), math.nan)
    return [None if t is None else t * ops.astype(scale, t.dtype) for t in tensors], norm


def _scalar(value: float, like: Tensor) -> Tensor:
    """A number that changes from step to step; as a Python number each one would stay among the shared constants."""
    return ops.asarray(value, dtype=like.dtype)


def _name(variable: Variable) -> str:
    return f'variable "{variable.name}" {variable.shape}'


def _share(who: Any, name: str, value: float) -> float:
    if not 0 <= value < 1:
        raise TapegradError(f"{who}: wanted {name} in [0, 1), got {value!r}")
    return value


def _at_least(who: Any, name: str, value: float, least: float) -> float:
    if not value >= least:
        raise TapegradError(f"{who}: wanted {name} of at least {least}, got {value!r}")
    return value
