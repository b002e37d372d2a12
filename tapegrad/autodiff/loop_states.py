"""What goes into the steps of loops and comes out: states of one structure, shapes and dtypes, and the index."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tapegrad import nest
from tapegrad.device import dtypes
from tapegrad.errors import StructureError
from tapegrad.ops.create.creation import asarray
from tapegrad.ops.shape.join import stack
from tapegrad.tensor import Tensor

if TYPE_CHECKING:
    from tapegrad.device.types import DType

_NUMBERS = (bool, int, float, complex)


def index_for(step: object, i: int, state: object) -> Any:
    """The index ``i`` as ``step`` takes it: a number; for a captured function a 0-d int64 tensor beside the state.

    A Python number is part of the signature of a captured function, which would have a program for each step.
    """
    if not getattr(step, "takes_live_index", False):
        return i
    devices = (leaf.device for leaf in nest.leaves(state) if isinstance(leaf, Tensor))
    return asarray(i, dtype=dtypes.int64, device=next(devices, None))


def check_structure(name: str, what: str, step: int, before: object, after: object) -> None:
    """Raise StructureError unless ``after``, which ``step`` has returned, has the structure of ``before``."""
    nest.refuse_hidden(name, after)
    if not nest.alike(after, before):
        raise StructureError(
            f"{name}: step {step} changed the structure of {what} from {nest.shown(before)} to {nest.shown(after)}; "
            "return the same structure at each step"
        )


def check_state(name: str, step: int, before: object, after: object) -> None:
    """Raise StructureError unless ``after``, which ``step`` has returned, has the form of ``before``.

    A Python number may become a 0-d tensor of any dtype, and the reverse; an array may become a tensor.
    """
    check_structure(name, "the state", step, before, after)
    old, new = nest.flatten(before), nest.flatten(after)
    if _are_alike(old, new):  # most often
        return
    old, new = list(map(_leaf, old)), list(map(_leaf, new))
    if old != new and not all(map(_fits, old, new)):
        raise StructureError(
            f"{name}: step {step} returned the state {_text(after)}, but was given {_text(before)}; each step must "
            "return a state of the shapes and dtypes of the one it was given: cast or reshape what it returns, or "
            "begin with such a state"
        )


def check_output(name: str, step: int, before: object, after: object) -> None:
    """Raise StructureError unless the output that ``step`` has returned has the form of those before it."""
    check_structure(name, "the output", step, before, after)
    old, new = nest.flatten(before), nest.flatten(after)
    if not _are_alike(old, new) and list(map(_leaf, old)) != list(map(_leaf, new)):
        raise StructureError(
            f"{name}: step {step} returned the output {_text(after)}, the steps before it {_text(before)}; outputs are "
            "stacked: return the same shapes and dtypes at each step"
        )


def stacked(outputs: list[object]) -> Any:
    """The outputs of all steps along a new leading axis, in the structure of one; None where that is None."""
    if not outputs:
        return None
    columns = zip(*(nest.flatten(y) for y in outputs), strict=True)
    whole = [None if column[0] is None else stack([asarray(y) for y in column]) for column in columns]
    return nest.rebuild(outputs[0], iter(whole))


def _are_alike(old: list[Any], new: list[Any]) -> bool:
    """Whether all are tensors, each with the aval of the one in its place."""
    if not {Tensor}.issuperset(map(type, (*old, *new))):
        return False
    return [x._buffer.node.aval for x in old] == [x._buffer.node.aval for x in new]


def _leaf(x: object) -> Any:
    """Shape and dtype; of a number None, of anything else its type's name."""
    if isinstance(x, _NUMBERS):
        return None
    if hasattr(x, "shape") and hasattr(x, "dtype"):
        return tuple(x.shape), x.dtype
    return type(x).__name__


def _fits(old: Any, new: Any) -> bool:
    if isinstance(old, str) and isinstance(new, str):
        return True
    if old is None or new is None:
        return (old or new or ((),))[0] == ()
    return bool(old == new)


def _text(state: object) -> str:
    """The structure with the dtype and shape of each leaf."""

    def text(x: object) -> object:
        form = _leaf(x)
        return _Plain(type(x).__name__ if form is None else form if isinstance(form, str) else _aval(*form))

    return repr(nest.map_leaves(text, state))


def _aval(shape: tuple[int, ...], dtype: DType) -> str:
    return f"{dtype}[{','.join(map(str, shape))}]"


class _Plain(str):
    """Text that prints without quotes."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)
