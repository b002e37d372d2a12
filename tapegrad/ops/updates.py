"""The updates of optimizers, for many tensors in one go.

On the CPU each tensor's update is one region, or, if it is small, runs at once.  On CUDA, where launching costs more
than most tensors take, all tensors of one dtype are updated by few launches (``kernels/optim.cu``), whose results have
the bits of the formulas here.  Those of half variables read and write the variables beside their masters.
Nothing is recorded on CUDA: an update has no derivative.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import chain
from math import log
from operator import attrgetter
from typing import Any, NamedTuple

from tapegrad.core.aval import ShapedArray
from tapegrad.core.buffer import Buffer
from tapegrad.core.live_numbers import LiveNumber
from tapegrad.core.state import thread
from tapegrad.device import multi_tensor, traffic
from tapegrad.device.dtypes import accumulator
from tapegrad.device.kernel import Kernel
from tapegrad.device.types import Array, DType
from tapegrad.engine.lowering import Function
from tapegrad.engine.realize import array_of, arrays_of, realize
from tapegrad.ops.apply import on_one_device
from tapegrad.ops.casting import cast
from tapegrad.ops.create.creation import asarray, full
from tapegrad.ops.dispatch import promote
from tapegrad.ops.elementwise.arithmetic import maximum, sign, sqrt
from tapegrad.ops.elementwise.exponential import expm1
from tapegrad.ops.elementwise.selection import where
from tapegrad.tensor import Tensor, alias, materialize
from tapegrad.variable import Variable, contents, give

AT_ONCE = 32 * 2**20
"""Bytes of variables in one group, unless one alone has more: their new values exist beside the old ones for a while,
and for large tensors fewer launches gain nothing."""
SMALL = 2**20
"""The same on the CPU, where groups gain nothing: it bounds how many values are there twice."""

Columns = Sequence[Sequence[Buffer]]
"""For each operand of a formula as many buffers as tensors are updated."""
_buffer_of: Callable[[Tensor], Buffer] = attrgetter("_buffer")


class Formula(NamedTuple):
    """An update: of which ``operands`` (x, gradient, slots) those at the positions ``renewed`` get new values.

    ``compute(numbers, *operands)`` gives these; ``kernel``: the same on CUDA for many tensors, ``of_rows``
    for rows of tables, in place (None: there is none).  The kernels are given the numbers after decay.
    """

    name: str
    kernel: Kernel
    renewed: tuple[int, ...]
    compute: Callable[..., tuple[Any, ...]]
    numbers: tuple[float, ...]
    of_rows: Kernel | None = None


_ADAM = Kernel("optim.cu", "tg_adam")
_SGD = Kernel("optim.cu", "tg_sgd")
_MOMENTUM = Kernel("optim.cu", "tg_momentum")
_RMSPROP = Kernel("optim.cu", "tg_rmsprop")
_CENTERED = Kernel("optim.cu", "tg_rmsprop_centered")
_RMSPROP_MOMENTUM = Kernel("optim.cu", "tg_rmsprop_momentum")
_CENTERED_MOMENTUM = Kernel("optim.cu", "tg_rmsprop_centered_momentum")
_ADAGRAD = Kernel("optim.cu", "tg_adagrad")
_LION = Kernel("optim.cu", "tg_lion")
_LAMB = Kernel("optim.cu", "tg_lamb")
_ADAM_ROWS = Kernel("optim_rows.cu", "tg_adam_rows")
_SGD_ROWS = Kernel("optim_rows.cu", "tg_sgd_rows")
_MOMENTUM_ROWS = Kernel("optim_rows.cu", "tg_momentum_rows")
_ADAGRAD_ROWS = Kernel("optim_rows.cu", "tg_adagrad_rows")


def adam_formula(factor: float, beta_1: float, beta_2: float, epsilon: float) -> Formula:
    """Adam's, of ``x``, ``g``, ``m`` and ``v``.

    ``m = beta_1 m + (1 - beta_1) g``, ``v = beta_2 v + (1 - beta_2) g^2``, ``x -= factor m / (sqrt(v) + epsilon)``.
    """
    numbers = (_number(factor), float(beta_1), 1.0 - beta_1, float(beta_2), 1.0 - beta_2, float(epsilon))

    def compute(numbers: Sequence[Tensor], x: Tensor, g: Tensor, m: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        scale, keep_m, add_m, keep_v, add_v, more = numbers
        m = keep_m * m + add_m * g
        v = keep_v * v + add_v * (g * g)
        return x - scale * m / (sqrt(v) + more), m, v

    return Formula("adam_update", _ADAM, (0, 2, 3), compute, numbers, _ADAM_ROWS)


def sgd_formula(rate: float) -> Formula:
    """``x - rate g``."""
    compute = lambda numbers, x, g: (x - numbers[0] * g,)
    return Formula("sgd_update", _SGD, (0,), compute, (_number(rate),), _SGD_ROWS)


def momentum_formula(rate: float, momentum: float, nesterov: bool = False) -> Formula:
    """``v = momentum v - rate g``; ``x + v``, or with ``nesterov`` ``x + momentum v - rate g``."""

    def compute(numbers: Sequence[Tensor], x: Tensor, g: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        down, keep = numbers[0] * g, numbers[1]
        v = keep * v - down
        return (x + keep * v - down if nesterov else x + v), v

    numbers = (_number(rate), float(momentum), int(bool(nesterov)))
    return Formula("momentum_update", _MOMENTUM, (0, 2), compute, numbers, _MOMENTUM_ROWS)


def rmsprop_formula(
    rate: float, rho: float, momentum: float, epsilon: float, centered: bool = False, moved: bool = False
) -> Formula:
    """RMSprop's, of ``x``, ``g``, mean square ``s``, if ``centered`` the mean ``a``, if ``moved`` the velocity ``v``.

    ``s = rho s + (1 - rho) g^2``; ``a = rho a + (1 - rho) g``; ``down = rate g / sqrt(s - a^2 + epsilon)``;
    ``v = momentum v + down``; ``x - down`` or ``x - v``.
    """

    def compute(numbers: Sequence[Tensor], x: Tensor, g: Tensor, s: Tensor, *others: Tensor) -> tuple[Tensor, ...]:
        scale, keep, add, more, keep_v = numbers
        s = keep * s + add * (g * g)
        new: list[Any] = [s]
        variance: Any = s
        if centered:
            a = keep * others[0] + add * g
            variance = maximum(s - a * a, 0.0)  # rounding may have made it negative
            new.append(a)
        down: Any = scale * g / sqrt(variance + more)
        if moved:
            down = keep_v * others[-1] + down
            new.append(down)
        return x - down, *new

    kernel = (_CENTERED_MOMENTUM if moved else _CENTERED) if centered else _RMSPROP_MOMENTUM if moved else _RMSPROP
    numbers = (_number(rate), float(rho), 1.0 - rho, float(epsilon), float(momentum))
    return Formula("rmsprop_update", kernel, (0, *range(2, 3 + centered + moved)), compute, numbers)


def adagrad_formula(rate: float, epsilon: float) -> Formula:
    """``s = s + g^2``, ``x - rate g / sqrt(s + epsilon)``."""

    def compute(numbers: Sequence[Tensor], x: Tensor, g: Tensor, s: Tensor) -> tuple[Tensor, ...]:
        s = s + g * g
        return x - numbers[0] * g / sqrt(s + numbers[1]), s

    numbers = (_number(rate), float(epsilon))
    return Formula("adagrad_update", _ADAGRAD, (0, 2), compute, numbers, _ADAGRAD_ROWS)


def lion_formula(rate: float, beta_1: float, beta_2: float) -> Formula:
    """``x - rate sign(beta_1 m + (1 - beta_1) g)``, ``m = beta_2 m + (1 - beta_2) g``."""

    def compute(numbers: Sequence[Tensor], x: Tensor, g: Tensor, m: Tensor) -> tuple[Tensor, ...]:
        scale, keep_1, add_1, keep_2, add_2 = numbers
        return x - scale * sign(keep_1 * m + add_1 * g), keep_2 * m + add_2 * g

    numbers = (_number(rate), float(beta_1), 1.0 - beta_1, float(beta_2), 1.0 - beta_2)
    return Formula("lion_update", _LION, (0, 2), compute, numbers)


def lamb_formula(scale_m: float, scale_v: float, beta_1: float, beta_2: float, epsilon: float, decay: float) -> Formula:
    """The direction ``u`` against which ``x`` is to go, and the new ``m`` and ``v``.

    ``m`` and ``v`` as of :func:`adam_formula`, ``u = scale_m m / (sqrt(scale_v v) + epsilon) + decay x``.
    """

    def compute(numbers: Sequence[Tensor], x: Tensor, g: Tensor, m: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        by_m, by_v, keep_m, add_m, keep_v, add_v, more, part = numbers
        m = keep_m * m + add_m * g
        v = keep_v * v + add_v * (g * g)
        return by_m * m / (sqrt(by_v * v) + more) + part * x, m, v

    numbers = (_number(scale_m), _number(scale_v), float(beta_1), 1.0 - beta_1, float(beta_2), 1.0 - beta_2,
               float(epsilon), float(decay))  # fmt: skip
    return Formula("lamb_update", _LAMB, (0, 2, 3), compute, numbers)


def groups(avals: Sequence[ShapedArray], kinds: Sequence[object] = ()) -> list[list[int]]:
    """Groups of positions in ``avals``, of tensors that are updated together; ``kinds``: of whom else alike."""
    batches: list[list[int]] = []
    filling: dict[object, tuple[list[int], int]] = {}
    widened: dict[DType, int] = {}
    for i, aval in enumerate(avals):
        device, dtype = aval.device, aval.dtype
        if dtype not in widened:
            widened[dtype] = wide(dtype).itemsize // dtype.itemsize
        on_gpu, nbytes = device.kind == "cuda", aval.nbytes * widened[dtype]
        most = multi_tensor.MANY if widened[dtype] == 1 else multi_tensor.MANY_OF_HALVES
        if not on_gpu and nbytes > SMALL:
            batches.append([i])
            continue
        key = device, dtype, kinds[i] if kinds else None
        group, held = filling.get(key, ([], 0))
        if not group or len(group) == most or held + nbytes > (AT_ONCE if on_gpu else SMALL):
            group, held = [], 0
            batches.append(group)
        group.append(i)
        filling[key] = group, held + nbytes
    return batches


def wide(dtype: DType) -> DType:
    """The dtype in which a variable of ``dtype`` is updated, and its state kept: at least float32.

    A small update of a half value would be rounded away each time.
    """
    return accumulator(dtype)


def decayed(x: Tensor, shrink: float | None) -> Tensor:
    """``x`` times ``shrink``, a number that changes from step to step; None: as it is."""
    return x if shrink is None else x * scalar(shrink, x)


def weight_of(beta: float, step: Tensor) -> Tensor:
    """``1 - beta ** step``, precise for ``beta`` near 1: the weights of a moving average that began with zeros, summed.

    step: 0-d, float64.
    """
    return -expm1(step * log(beta)) if beta else step * 0.0 + 1.0


def _number(value: Any) -> Any:
    return value if isinstance(value, (LiveNumber, Tensor)) else float(value)


def scalar(value: Any, like: Tensor | ShapedArray) -> Tensor:
    """A number, a live one or a 0-d tensor as a tensor of the dtype of ``like``."""
    # As a Python number each one would stay among the shared constants, and make a float64 of a bfloat16.
    return asarray(value, dtype=like.dtype, device=like.device)


def renew(
    formula: Formula, targets: Sequence[Sequence[Variable]], gradients: Sequence[Tensor], shrink: float | None
) -> None:
    """Give variables of one group (see :func:`groups`) and their slots the values that a formula makes of them.

    ``targets``: for each operand but the gradient as many variables; of half variables x is the master, and they are
    the last.  x is first multiplied by ``shrink``.  The old values are freed on return.  Raises DeviceError.
    """
    x, *others = map(contents, targets)
    columns = [x, list(map(_buffer_of, gradients)), *others]
    _require_one_device(formula, columns)
    new = (_by_kernel if x[0].node.aval.device.kind == "cuda" else _renewed_on_cpu)(formula, columns, shrink)
    for position, values in zip(_renewed_by(formula, len(columns)), new, strict=True):
        give(targets[max(0, position - 1)], values)


def of_many(formula: Formula, operands: Sequence[Sequence[Tensor]], shrink: float | None) -> list[tuple[Tensor, ...]]:
    """For each tensor, new values of the operands that the formula renews; x is first multiplied by ``shrink``.

    ``operands``: for each operand of the formula as many tensors as are updated.  Raises DeviceError.
    """
    numbers = formula.numbers
    rows = [promote(formula.name, row) for row in zip(*operands, strict=True)]
    new: list[tuple[Tensor, ...]] = [()] * len(rows)
    shared: dict[object, list[Tensor]] = {}
    for group in groups([row[0]._buffer.node.aval for row in rows]):
        first = rows[group[0]][0]
        if first.device.kind == "cuda":
            for i, made in zip(group, _rows_by_kernel(formula, [rows[i] for i in group], shrink), strict=True):
                new[i] = made
            continue
        scalars = shared.get((first.device, first.dtype))
        if scalars is None:
            wanted = numbers if shrink is None else (*numbers, shrink)
            scalars = shared[first.device, first.dtype] = [scalar(number, first) for number in wanted]
        plain, decay = scalars[: len(numbers)], scalars[len(numbers) :]
        for i in group:
            new[i] = _by_tensors(formula, plain, decay, rows[i])
    return new


def of_halves(
    formula: Formula, values: Sequence[Tensor], operands: Sequence[Sequence[Tensor]], shrink: float | None
) -> list[tuple[Tensor, ...]]:
    """As :func:`of_many`, of variables of half dtypes, which have the ``values``; x are their masters.

    The masters have the digits beyond the values (:func:`digits`).  What is renewed comes with the new value behind it.
    Gradients may be of the half dtype.  On CUDA all of it is one kernel.
    """
    _require_one_device(formula, [list(map(_buffer_of, column)) for column in (*operands, values)])
    rows = list(zip(*operands, values, strict=True))
    new: list[tuple[Tensor, ...]] = [()] * len(rows)
    for group in groups([x._buffer.node.aval for x in values], [g.dtype for g in operands[1]]):
        some = [rows[i] for i in group]
        made = (_rows_by_kernel if values[group[0]].device.kind == "cuda" else _halves_on_cpu)(formula, some, shrink)
        for i, renewed in zip(group, made, strict=True):
            new[i] = renewed
    return new


def _require_one_device(formula: Formula, columns: Columns) -> None:
    """Raises DeviceError where the operands of a tensor lie on several devices."""
    if len({b.node.aval.device for column in columns for b in column}) > 1:
        for row in zip(*columns, strict=True):
            on_one_device(formula.name, row)


def _renewed_by(formula: Formula, width: int) -> tuple[int, ...]:
    """Which of so many operands get new values: one beyond the formula's is the value of a half variable."""
    return (*formula.renewed, *range(max(1, *formula.renewed) + 1, width))


def _renewed_on_cpu(formula: Formula, columns: Columns, shrink: float | None) -> Columns:
    tensors = [list(map(Tensor, column)) for column in columns]
    if len(formula.renewed) == len(_renewed_by(formula, len(columns))):
        new = of_many(formula, tensors, shrink)
    else:
        new = of_halves(formula, tensors[-1], tensors[:-1], shrink)
    return [[alias(t._buffer) for t in column] for column in zip(*new, strict=True)]


def _halves_on_cpu(formula: Formula, rows: list[tuple[Tensor, ...]], shrink: float | None) -> list[tuple[Tensor, ...]]:
    full = [(digits(value, x), *others) for x, *others, value in rows]
    made = of_many(formula, list(zip(*full, strict=True)), shrink)
    return [(*new, rounded(new[0], row[-1].dtype)) for new, row in zip(made, rows, strict=True)]


def digits(value: Tensor, master: Tensor) -> Tensor:
    """The ``value`` of a half variable, or of some rows of it, with the digits that its master has beyond it.

    Where the two do not round to the same, somebody has assigned the value: it counts.
    """
    return where(rounded(master, value.dtype) == value, master, cast(value, master.dtype))


def rounded(x: Tensor, dtype: DType) -> Tensor:
    """``x`` in ``dtype``."""
    return x if x.dtype == dtype else cast(x, dtype)


def with_decay(numbers: tuple[float, ...], shrink: float | None) -> tuple[float, ...]:
    """What kernels are given: a factor of x, whether it counts, and the numbers of a formula."""
    return (1.0, 0, *numbers) if shrink is None else (_number(shrink), 1, *numbers)


def of_tensors(formula: Formula, operands: Sequence[Tensor], shrink: float | None) -> tuple[Tensor, ...]:
    """New values of the operands of one update."""
    return of_many(formula, [[x] for x in operands], shrink)[0]


def _by_tensors(
    formula: Formula, numbers: list[Tensor], shrink: list[Tensor], row: tuple[Tensor, ...]
) -> tuple[Tensor, ...]:
    """One tensor's update on the CPU: the formula in tensors, as one kernel."""
    made = formula.compute(numbers, row[0] * shrink[0] if shrink else row[0], *row[1:])
    materialize(*made)
    return made


def _rows_by_kernel(
    formula: Formula, rows: list[tuple[Tensor, ...]], shrink: float | None
) -> Iterable[tuple[Tensor, ...]]:
    columns = [list(map(_buffer_of, column)) for column in zip(*rows, strict=True)]
    return zip(*(map(Tensor, column) for column in _by_kernel(formula, columns, shrink)), strict=True)


def _by_kernel(formula: Formula, columns: Columns, shrink: float | None) -> Columns:
    """New values of tensors on one CUDA device, of one dtype, in one launch.

    ``columns``: for each operand as many buffers as tensors; the result: for each that is renewed.  An operand beyond
    the formula's is the value of a half variable, whose new value comes last.
    """
    kernel, count, like = formula.kernel, len(columns[0]), columns[0][0].node.aval
    renewed = _renewed_by(formula, len(columns))
    numbers: Sequence[object] = with_decay(formula.numbers, shrink)
    here = like.device
    device = thread.executor.device(here)
    read = list(chain.from_iterable(columns))
    realize(read)  # gradients that are still pending share kernels
    with device.active():
        reads = [x if x.flags.c_contiguous else traffic.contiguous(device.xp, x) for x in arrays_of(read)]
    live: list[Array] = []
    kinds = set(map(type, numbers))
    if LiveNumber in kinds:  # then no float may be an argument
        numbers = [x if isinstance(x, (int, Tensor)) else _live(x) for x in numbers]
    elif Tensor in kinds:  # nor then; while a step is captured they are live numbers, which take no kernels
        number = thread.executor.number
        numbers = [number(partial(float, x)) if isinstance(x, float) else x for x in numbers]
    if LiveNumber in kinds or Tensor in kinds:
        with device.active():
            live = [_on(device, x, like) for x in numbers if not isinstance(x, int)]
    written = count * len(renewed)

    def launch(*arrays: Array) -> None:
        held = iter(arrays[written + len(reads) :])
        changed = [x if isinstance(x, int) else next(held) for x in numbers] if live else numbers
        multi_tensor.launch(kernel, here, (*arrays[written : written + len(reads)], *arrays[:written]), count, changed)

    avals = [b.node.aval for i in renewed for b in columns[i]]
    values = thread.executor.values(Function(formula.name, avals, launch, [*reads, *live]))
    return [values[at : at + count] for at in range(0, written, count)]


def _on(device: Any, x: Any, like: ShapedArray) -> Array:
    """A number as an array of one element."""
    if isinstance(x, LiveNumber):
        return device.array(x, like.dtype)
    t = scalar(x, like) if isinstance(x, Tensor) else full((1,), x, dtype=like.dtype, device=like.device)
    return array_of(t._buffer)


def _live(x: Any) -> LiveNumber:
    return x if isinstance(x, LiveNumber) else LiveNumber(partial(float, x))
