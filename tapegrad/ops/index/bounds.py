"""Checks that indices are within bounds, which read their values.

On a GPU nothing waits for the check: an index out of range is clipped, and the error is raised when the host next waits
for the device.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable

from tapegrad.core import tracking
from tapegrad.core.state import thread, unrecorded
from tapegrad.device import abstract_array, checks, dtypes, traffic
from tapegrad.device.host_scalar import HostScalar
from tapegrad.device.types import Array
from tapegrad.engine.realize import array_of
from tapegrad.errors import MOST_TOLD, IndexingError, told
from tapegrad.ops.dispatch import cast, tensor
from tapegrad.ops.elementwise.arithmetic import clip
from tapegrad.ops.elementwise.selection import where
from tapegrad.ops.index import _cuda_index
from tapegrad.tensor import Tensor, TensorLike


def checked(op: str, indices: TensorLike, n: int, beside: Tensor) -> Tensor:
    """``indices`` of an axis of ``beside`` as int64 in ``[0, n)``, negative ones counted from the end.

    Raises IndexingError for another dtype and out of range (it reads the values).
    """
    positions = tensor(op, indices, beside)
    if not dtypes.is_integer(positions.dtype):
        if positions.size or positions.dtype.kind == "b":
            raise IndexingError(
                f"{op}: indices must be integers, got {positions.dtype}; use astype, or a mask of bools"
            )
    if not positions.size:
        return cast(positions, dtypes.int64)
    source, positions = positions, cast(positions, dtypes.int64)
    if positions.device.lazy:
        wrong = ("index", op), lambda wrong, low, high: _out_of_range(op, wrong, high + 1)
        unrecorded(require, every(source), -n, n - 1, *wrong)
        return unrecorded(lambda: clip(where(positions < 0, positions + n, positions), 0, n - 1))
    array = array_of(every(positions)._buffer)
    if not abstract_array.is_abstract(array):
        _within(array, -n, n - 1, op, array.ndim - positions.ndim)
        return where(positions < 0, positions + n, positions) if int(array.min()) < 0 else positions
    if thread.executor.on_values(lambda array: _within(array, -n, n - 1, op), array):
        return where(positions < 0, positions + n, positions)
    return positions  # taken to be in range, and none negative


def _within(array: Array, low: int, high: int, op: str, axes: int = 0) -> None:
    """Raises IndexingError, which names the examples that have the index, along the first ``axes``."""
    least, most = int(array.min()), int(array.max())
    if least < low or most > high:
        wrong = least if least < low else most
        places = zip(*[axis.tolist() for axis in (array == wrong).nonzero()[:axes]])
        raise _out_of_range(op, wrong, high + 1, tuple(dict.fromkeys(places))[:MOST_TOLD])


def every(x: Tensor) -> Tensor:
    """What a check of ``x`` has to read: in a batch (see ``vmap``) the values of all examples, else ``x`` itself."""
    buffer = x._buffer
    for batch in reversed(thread.batches):
        buffer = batch.whole(buffer)
    return Tensor(buffer)


def _out_of_range(op: str, index: int, n: int, examples: tuple[tuple[int, ...], ...] = ()) -> IndexingError:
    where = f", in example{'s' * (len(examples) > 1)} {told(examples)}" if examples else ""
    return IndexingError(f"{op}: index {index} is out of range for an axis of length {n}{where}")


def require(x: Tensor, low: int, high: int, name: Hashable, error: Callable[[int, int, int], Exception]) -> None:
    """Raise ``error(value, low, high)`` if some integer in ``x`` lies outside ``[low, high]``.

    On a GPU it is raised when the host next waits for it: reading a value at once would stop the pipeline in every
    step.  So the error may depend only on its arguments and on ``name``, the name of the check.
    """
    if not x.size:
        return
    device, number = x.device, x._buffer.array

    def look(array: Array) -> None:
        least, most = int(array.min()), int(array.max())
        if least < low or most > high:
            raise error(least if least < low else most, low, high)

    if not device.lazy or type(number) is HostScalar:
        array = number.value if type(number) is HostScalar else array_of(x._buffer)
        if abstract_array.is_abstract(array):
            thread.executor.on_values(look, array)
        else:
            look(array)
        return
    kind, array = checks.kind(name, _first_wrong(error)), array_of(x._buffer)
    if not thread.executor.on_values(lambda array: _cuda_index.within(device, array, low, high, kind), array):
        _cuda_index.within(thread.executor.device(device), array, low, high, kind)  # tells of its passes
    tracking.current.ran((), (), traffic.taken())


def _first_wrong(error: Callable[[int, int, int], Exception]) -> checks.Describe:
    return lambda least, most, low, high: error(least if least < low else most, low, high)
