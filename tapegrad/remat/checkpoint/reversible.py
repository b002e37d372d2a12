"""reversible: blocks whose inputs are computed back from their outputs, so that no activation is kept per block.

A block (Gomez et al., "The Reversible Residual Network", 2017, arXiv:1707.04585) is two couplings; ``coupling`` tells
how they hand over.  Here: the blocks, and the check that inversion, inexact in floating point, was good enough.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from tapegrad.core.aval import normalize_axis
from tapegrad.core.buffer import Buffer
from tapegrad.core.state import thread, unrecorded
from tapegrad.device.types import Array
from tapegrad.engine.realize import array_of
from tapegrad.errors import DTypeError, NotATensorError, ReversibleError, ShapeError
from tapegrad.remat.checkpoint.recompute import Recompute
from tapegrad.remat.checkpoint.reversible_half import Slot, couple, slots
from tapegrad.tensor import Tensor, convert

if TYPE_CHECKING:
    from tapegrad.device.types import DType

SAMPLE = 64
"""How many elements of a value, at most, are compared with what is brought back."""

_joined: weakref.WeakKeyDictionary[Buffer, tuple[int, list[weakref.ref[Slot]]]] = weakref.WeakKeyDictionary()
"""Of a tensor joined from a block's two outputs: the axis, and their slots."""


class Reversible:
    """A block made by :func:`reversible`; ``f`` and ``g`` are its functions, ``drift`` the largest drift so far."""

    def __init__(
        self, f: Callable[..., Any], g: Callable[..., Any], axis: int, tolerance: float | None, check: bool
    ) -> None:
        self.f, self.g = f, g
        self.drift = 0.0
        self._axis, self._tolerance, self._check = axis, tolerance, check
        self._halves = (Recompute(f, None), Recompute(g, None))

    @property
    def parts(self) -> tuple[Callable[..., Any], ...]:
        """The functions it is made of: a model finds their variables."""
        return self.f, self.g

    def __repr__(self) -> str:
        f, g = (getattr(h, "__name__", type(h).__name__) for h in (self.f, self.g))
        return f"reversible({f}, {g})"

    def __call__(self, x1: Any, x2: Any = None) -> Any:
        """``(y1, y2)`` of two tensors of one shape, or ``y`` of one tensor.  Raises ShapeError, DTypeError."""
        if x2 is None:
            return self._of_one(convert(x1))
        x1, x2 = convert(x1), convert(x2)
        if x1.shape != x2.shape:
            raise ShapeError(
                f"{self!r}: x1 has shape {x1.shape}, x2 {x2.shape}; they must be equal: pad or project one of them"
            )
        y1 = couple(self, self._halves[0], x1, x2)
        return y1, couple(self, self._halves[1], x2, y1)

    def _of_one(self, x: Tensor) -> Tensor:
        axis = normalize_axis(repr(self), self._axis, x.ndim)
        half, odd = divmod(x.shape[axis], 2)
        if odd:
            raise ShapeError(f"{self!r}: axis {axis} of shape {x.shape} has no two halves; pad it to an even length")
        before = (slice(None),) * axis
        xs = x[(*before, slice(0, half))], x[(*before, slice(half, None))]
        known = _joined.get(x._buffer)
        if known is not None and known[0] == axis:  # the halves are outputs of another block
            for part, ref in zip(xs, known[1], strict=False):
                if (slot := ref()) is not None:
                    slots[part._buffer.node.index] = slot
        ys = self(*xs)
        y = ys[0].__array_namespace__().concat(ys, axis=axis)
        made = [slots.get(part._buffer.node.index) for part in ys]
        _joined[y._buffer] = axis, [weakref.ref(slot) for slot in made if slot is not None]
        return y

    def checked(self, results: list[object], a: Tensor) -> Tensor:
        """The one tensor that f or g has returned.  Raises NotATensorError, ShapeError, DTypeError."""
        result = results[0] if len(results) == 1 else None
        if not isinstance(result, Tensor):
            raise NotATensorError(f"{self!r}: f and g must return one tensor, not {results!r:.60}")
        if result.shape != a.shape:
            raise ShapeError(
                f"{self!r}: f or g returned shape {result.shape} to be added to {a.shape}; they must be equal"
            )
        if result.dtype != a.dtype:
            raise DTypeError(f"{self!r}: f or g returned {result.dtype} to be added to {a.dtype}; cast one of them")
        return result

    def sample(self, a: Tensor) -> Any:
        """At most ``SAMPLE`` elements, from all over ``a``, on the host: a long chain must not fill the device."""
        if not self._check:
            return None
        room, steps = SAMPLE, [slice(None)] * a.ndim
        for done, axis in enumerate(sorted(range(a.ndim), key=a.shape.__getitem__)):
            count = max(1, min(a.shape[axis], round(room ** (1 / (a.ndim - done)))))
            room //= count
            steps[axis] = slice(None, None, -(-a.shape[axis] // count) or 1)
        part = unrecorded(a.__getitem__, tuple(steps))
        array_of(part._buffer)
        nothing: Any = ()  # in a dry run, which must not keep the array
        return thread.executor.in_earnest(lambda: part.numpy(copy=True), nothing)

    def compare(self, sample: Any, a: Tensor) -> None:
        """Raise ReversibleError if ``a``, brought back, has drifted too far from what was sampled."""
        sum_of = functools.partial(a.sum, dtype="complex128" if a.dtype.kind == "c" else "float64")
        total = unrecorded(sum_of)
        array_of(total._buffer)
        if thread.executor.in_earnest(lambda: total.item() - total.item() != 0, False):
            raise ReversibleError(
                f"{self!r}: inverting it gave values that are not finite (shape {a.shape}, {a.dtype}): its outputs, or "
                "what f or g makes of them, overflow or are NaN; look for the cause in the forward pass"
            )
        back = self.sample(a)
        drift = thread.executor.in_earnest(lambda: _drift(back, sample), 0.0)
        self.drift = max(self.drift, drift)
        tolerance = self._tolerance
        if tolerance is None:
            tolerance = _epsilon(a.dtype) ** 0.5
        if not drift <= tolerance:
            raise ReversibleError(
                f"{self!r}: inverting it gave back values of shape {a.shape}, {a.dtype}, with a relative drift of "
                f"{drift:.2g}, past the tolerance {tolerance:.2g}: f and g expand rounding errors, or did not repeat; "
                "use a wider dtype, fewer blocks, smaller weights, or recompute_grad in place of reversible"
            )


def _drift(back: Array, sample: Array) -> float:
    """The largest difference, relative to the largest value."""
    return float(abs(back - sample).max(initial=0) / (abs(sample).max(initial=0) or 1))


@functools.cache
def _epsilon(dtype: DType) -> float:
    """The machine epsilon of a real or complex dtype, also of those from outside NumPy."""
    number, step = dtype.type, 1.0
    while number(1 + step / 2) != number(1):
        step /= 2
    return step


def reversible(
    f: Callable[..., Any], g: Callable[..., Any], *, axis: int = -1, tolerance: float | None = None, check: bool = True
) -> Reversible:
    """A block ``y1 = x1 + f(x2)``, ``y2 = x2 + g(y1)`` that is inverted for its gradient, instead of kept (RevNet).

    ``f``, ``g``: functions or layers from a tensor to one of the same shape and dtype.  ``block(x1, x2)`` gives
    ``(y1, y2)``; ``block(x)`` takes and gives one tensor, whose halves along ``axis`` are x1 and x2.  Of a chain of
    blocks, called in a loop or otherwise, a tape keeps the last two outputs alone; ``f`` and ``g`` run once more for
    the gradient.  As with ``recompute_grad``, captured tensors and variables get their gradients, random numbers
    repeat, state changes happen once, and a parameter ``is_recomputing`` is told.

    Gradients are near the plain ones, not bit-identical: inversion rounds, and its error grows from block to block,
    the faster the more f and g expand it.  With ``check``, up to 64 elements of each value are copied to the host and
    compared with what is brought back.  *Drift* is their largest difference, relative to the largest magnitude among
    them; ``block.drift`` is the largest so far, and the gradient's relative error may be some hundred times as large.
    ``tolerance``: the bound on drift; by default the square root of the dtype's machine epsilon (3.5e-4 in float32,
    1.5e-8 in float64), half of its digits.

    Raises NotATensorError, ShapeError and DTypeError for tensors that do not fit; when differentiated, ReversibleError
    (an ArithmeticError) for drift past the tolerance and for values that are not finite, RecomputeError for a rerun of
    another shape or dtype, or with other watched tensors.
    """
    for h in (f, g):
        if not callable(h):
            raise NotATensorError(f"reversible: {h!r:.60} is not callable; give two functions or layers")
    if tolerance is not None and not tolerance >= 0:
        raise ReversibleError(f"reversible: tolerance is a bound on the relative drift, not {tolerance!r}")
    return Reversible(f, g, axis, tolerance, check)
