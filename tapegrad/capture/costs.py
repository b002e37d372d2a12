"""What the tasks of a program take: estimates from shapes and dtypes alone, so that plans can be repeated.

The unit is a byte moved, some 0.04 ns.  A kernel of elementwise primitives moves what it reads and what it writes, and
each primitive makes a pass over a tile besides; a product takes its arithmetic; a convolution copies its windows.  The
factors were measured (``bench/function.py --tasks``), in float32, on one core of a Xeon with AVX-512.  The engine's own
rule (``tracing/costs.py``) is coarser: it decides in a step, where time is short.  On a GPU passes hide behind
what is moved, and for what is no kernel the engine's rule serves.
"""

from __future__ import annotations

from collections.abc import Sequence

from tapegrad.core.aval import shaped
from tapegrad.core.primitive import Barrier, Reduction
from tapegrad.device.types import Array
from tapegrad.engine.lowering import Application, Kernel
from tapegrad.engine.task import Task
from tapegrad.tracing.costs import cost_of_application

_CALL = 50_000.0
"""A call of a task, in bytes moved: 2 us."""
_PASS = 0.75
"""A pass over a tile, which is in a cache, by the byte of its result."""
_FLOPS_PER_BYTE = 5
"""Arithmetic of products that takes as long as moving a byte: 120 Gflop/s beside 25 GB/s."""
_PASSES = {
    "exp": 2, "expm1": 2, "log": 2, "log1p": 3, "tanh": 2, "sin": 4, "cos": 4, "tan": 2, "sinh": 2, "cosh": 2,
    "asin": 55, "acos": 55, "atanh": 50, "asinh": 5, "atan": 2, "sigmoid": 12, "sigmoid_slope": 12, "softplus": 9,
    "silu": 9, "gelu": 36, "gelu_slope": 48, "erf": 18, "erfc": 44, "power": 5, "hypot": 30, "atan2": 5, "sinc": 13,
    "floor_divide": 80, "remainder": 80, "logaddexp": 140, "where": 6, "sign": 3,
}  # fmt: skip
"""Passes that elementwise primitives take, those that take more than one."""
_MOVES = {
    "reshape": 3, "softmax": 7, "softmax_vjp": 3, "layer_norm": 7, "layer_norm_vjp_x": 8, "layer_norm_vjp_gamma": 5,
}  # fmt: skip
"""How often others move what they read and write, those that move it more than once."""
_WINDOWS = {"conv": 3, "conv_in_w": 5, "conv_in_x": 6}
"""How often convolutions move the windows that they copy."""


def of_kernel(kernel: Kernel) -> float:
    """The cost of a region's kernel."""
    cost = _CALL + sum(b.node.aval.nbytes for b in (*kernel.region.leaves, *kernel.targets))
    for b in () if kernel.task.device.lazy else kernel.region.order:
        prim = b.node.prim
        if not prim.view:
            over = b.inputs[0].node.aval if isinstance(prim, Reduction) else b.node.aval
            cost += _PASS * _PASSES.get(prim.name, 1) * over.nbytes
    return cost


def of_ufunc(name: str, reads: Sequence[Array], write: Array) -> float:
    """The cost of one elementwise primitive on small arrays."""
    return of_call(reads, [write]) + _PASS * _PASSES.get(name, 1) * write.nbytes


def of_task(task: Task, writes: Sequence[Array]) -> float:
    """The cost of a task that is no kernel."""
    if not isinstance(task, Application):
        return of_call(task.reads, writes)
    name, prim = task.prim.name, task.prim
    avals = [shaped(x.shape, x.dtype, task.device) for x in task.reads]
    if task.device.lazy:
        return _CALL + cost_of_application(prim, task.params, task.aval, avals)
    cost = of_call(task.reads, writes, _MOVES.get(name, 1))
    if isinstance(prim, Barrier) and prim.flops is not None:
        flops = prim.flops(*avals, **task.params)
        cost += flops / _FLOPS_PER_BYTE
        if name in _WINDOWS:
            cost += _WINDOWS[name] * _window_bytes(task, flops)
    return cost


def _window_bytes(task: Application, flops: int) -> float:
    """The bytes of all windows that a convolution of so much arithmetic multiplies with each output's kernel."""
    moves, (_, y) = task.params["moves"], task.reads
    outputs = y.shape[-len(moves.strides) - (1 if task.prim.name == "conv_in_w" else 2)]
    return flops / 2 * moves.groups / max(1, outputs) * y.itemsize


def of_call(reads: Sequence[Array], writes: Sequence[Array], moves: int = 1) -> float:
    """The cost of a call that moves what it reads and writes so many times."""
    return _CALL + moves * sum(x.nbytes for x in (*reads, *writes))
