"""``LossScaler``: gradients of float16 kept away from its limits, and steps that overflow left out.

A float16 gradient below 6e-8 is 0, and one above 65504 infinite.  So the loss is multiplied by a large number, and its
gradients, which are that much larger, are divided by it in float32 before they are applied; a step in which one is not
finite changes nothing but the number, which shrinks (Micikevicius et al., "Mixed precision training", arXiv 1710.03740,
section 3.2).  All of it is decided on the device: nothing waits for it, and a captured step holds it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tapegrad import ops
from tapegrad.core.state import unrecorded
from tapegrad.errors import TapegradError
from tapegrad.nn.layers import state_dicts
from tapegrad.nn.layers.state_dicts import Differences, State
from tapegrad.ops.index.slices import IndexedSlices
from tapegrad.optim.optimizers import LBFGS, Optimizer, checks
from tapegrad.optim.optimizers.optimizer import Gradient
from tapegrad.tensor import Tensor, TensorLike, materialize
from tapegrad.tracing.phase import BY_OPTIMIZER, STEPS, optimizing
from tapegrad.variable import Variable

LEAST = 2.0**-14
"""A scale does not shrink below it: gradients that are not finite then have another reason."""
_LARGEST = 3.4028234663852886e38  # of float32


class LossScaler:
    """Scales the loss for ``optimizer``, whose steps it leaves out where gradients are not finite.

        with tg.GradientTape() as tape:
            with tg.autocast("float16"):
                loss = ...
            scaled = scaler.scale(loss)
        scaler.apply_gradients(zip(tape.gradient(scaled, variables), variables))

    The scale begins with ``initial_scale``, is multiplied by ``backoff_factor`` after a step that was left out, and by
    ``growth_factor`` after ``growth_interval`` steps in a row that were not.  (Keras' ``LossScaleOptimizer``, PyTorch's
    ``GradScaler``.)  Steps that were left out are no steps of Adam's and LAMB's corrections for the beginning;
    ``optimizer.iterations``, by which learning rates change, counts them.  Under ``gradient_accumulation_steps`` a call
    whose gradients are not finite adds zeros.  Over ranks all leave a step out, or none.
    On a CPU NumPy warns of overflows, as ever (``np.errstate``).

    Raises TapegradError for numbers out of range, and for ``LBFGS``, which reads its loss.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        initial_scale: float = 2.0**15,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        *,
        name: str = "loss_scaler",
    ) -> None:
        self.name = name
        if not isinstance(optimizer, Optimizer) or isinstance(optimizer, LBFGS):
            raise TapegradError(f"{self}: wanted an optimizer other than LBFGS, got {type(optimizer).__name__}")
        self.optimizer = optimizer
        self.initial_scale = checks.at_least(self, "initial_scale", float(initial_scale), LEAST)
        self.growth_factor = checks.at_least(self, "growth_factor", float(growth_factor), 1.0)
        self.backoff_factor = checks.share(self, "backoff_factor", float(backoff_factor))
        checks.positive(self, "backoff_factor", backoff_factor)
        self.growth_interval = checks.count(self, "growth_interval", growth_interval)
        self._scale = self._made("scale", self.initial_scale, "float32")
        self._good_steps = self._made("good_steps", 0, "int64")
        self._skipped = self._made("skipped", 0, "int64")

    def _made(self, what: str, value: float, dtype: str) -> Variable:
        return Variable(value, trainable=False, name=f"{self.name}/{what}", dtype=dtype, category="optimizer")

    def __str__(self) -> str:
        return f'loss scaler "{self.name}"'

    def __repr__(self) -> str:
        return f"LossScaler({self.optimizer!r}, growth_interval={self.growth_interval})"

    @property
    def variables(self) -> list[Variable]:
        """The scale, how many steps in a row were finite since it changed, and how many were left out in all."""
        return [self._scale, self._good_steps, self._skipped]

    @property
    def current_scale(self) -> Tensor:
        """The present scale, float32, on the device."""
        return unrecorded(self._scale.read)

    @property
    def skipped(self) -> Tensor:
        """How many steps were left out so far, int64, on the device."""
        return unrecorded(self._skipped.read)

    def scale(self, loss: TensorLike) -> Tensor:
        """``loss`` times the present scale, in float32 at least; to be differentiated in its place."""
        x = ops.asarray(loss)
        return x * ops.asarray(self._scale, device=x.device)

    def unscale(self, grads: Iterable[Gradient]) -> list[Any]:
        """Gradients of a scaled loss divided by the present scale, in float32 at least; None stays None.

        For those who look at gradients before they apply them by themselves; see :meth:`update`.
        """
        known = [g if g is None or isinstance(g, IndexedSlices) else ops.asarray(g) for g in grads]
        return unrecorded(self._unscaled, known)

    def _unscaled(self, grads: Sequence[Any]) -> list[Any]:
        return [g if g is None else self._divided(g) for g in grads]

    def _divided(self, g: Any) -> Any:
        if isinstance(g, IndexedSlices):
            return g.with_values(self._divided(g.values))
        return g * (1.0 / ops.asarray(self._scale, device=g.device))

    def update(self, finite: TensorLike) -> None:
        """Change the scale after a step whose gradients were ``finite`` or not: a bool, or a 0-d tensor of one."""
        unrecorded(self._update, finite)

    def _update(self, finite: TensorLike) -> None:
        fine = ops.asarray(finite, dtype="bool", device=self._scale.device)
        now, good = self._scale.read(), self._good_steps.read() + 1
        grows = good >= self.growth_interval
        most = _LARGEST / self.growth_factor
        grown = ops.where(grows & (now <= most), ops.minimum(now, most) * self.growth_factor, now)
        shrunk = ops.maximum(now * self.backoff_factor, LEAST)
        new = ops.where(fine, grown, shrunk), ops.where(fine & ~grows, good, 0)
        skipped = self._skipped.read() + ops.astype(~fine, "int64")
        materialize(*new, skipped)
        for variable, value in zip(self.variables, (*new, skipped)):
            variable.assign(value)

    def apply_gradients(self, grads_and_vars: Iterable[tuple[Gradient, Variable]], *, skip_none: bool = False) -> None:
        """One step of the optimizer by gradients of a scaled loss, left out unless all are finite; then the new scale.

        Raises as ``optimizer.apply_gradients`` does.
        """
        pairs = self.optimizer.checked(grads_and_vars)
        with optimizing():
            unrecorded(self._apply, [g for g, _ in pairs], [v for _, v in pairs], skip_none)
        STEPS.mark(BY_OPTIMIZER)

    def _apply(self, grads: list[Gradient], variables: list[Variable], skip_none: bool) -> None:
        self._update(self.optimizer._apply(grads, variables, skip_none, self))

    def taken(self, gradients: Sequence[Any]) -> tuple[list[Any], Tensor]:
        """For the optimizer: gradients unscaled, or what changes nothing; and whether all are finite, on all ranks."""
        home = self._scale.device
        each = [ops.all(ops.isfinite(_numbers(g))).to_device(home) for g in self._unscaled(gradients)]
        finite = ops.all(ops.stack(each))
        parts = self.optimizer.parts
        if parts is not None:
            finite = parts.total(ops.astype(~finite, "float32")) == 0
        plain: list[Any] = self._unscaled(gradients)  # once more: what was looked at above need not be stored
        return [_if(finite, g) for g in plain], finite

    def steps(self, iterations: Any) -> Tensor:
        """For the optimizer: which of its real changes the one after ``iterations`` calls is, from 1, in float64."""
        return ops.asarray(iterations, dtype="float64", device=self._scale.device) + 1 - self._skipped.read()

    def state_dict(self) -> State:
        """``scale``, ``good_steps`` and ``skipped``, as tensors by name; later steps do not change them."""
        return state_dicts.taken(self._named())

    def load_state_dict(self, state: Mapping[str, TensorLike], strict: bool = True) -> Differences:
        """Set what :meth:`state_dict` has given; see ``Layer.load_state_dict``.  Raises SaveError."""
        return state_dicts.put(str(self), self._named(), state, strict)

    def _named(self) -> list[tuple[str, Variable]]:
        return list(zip(("scale", "good_steps", "skipped"), self.variables))


def _numbers(g: Any) -> Tensor:
    return g.values if isinstance(g, IndexedSlices) else g


def _if(finite: Tensor, g: Any) -> Any:
    """A gradient, or what changes nothing."""
    flag = ops.asarray(finite, device=g.device)
    if isinstance(g, IndexedSlices):
        return IndexedSlices.of(ops.where(flag, g.values, 0.0), ops.where(flag, g.indices, -1), g.dense_shape)
    return ops.where(flag, g, 0.0)
