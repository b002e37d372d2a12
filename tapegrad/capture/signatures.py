"""Signatures: what of a call's arguments decides on its program, and what tells two of them apart."""

from __future__ import annotations

from typing import Any

from tapegrad import nest
from tapegrad.capture.eager import PLAIN
from tapegrad.core.state import precision, thread
from tapegrad.device import CPU, dtypes, threads
from tapegrad.tensor import Tensor

_BY_TEXT = (float, complex, CPU.xp.generic)
_BY_VALUE = (*PLAIN, CPU.xp.generic)


def are_tensors(args: tuple[Any, ...], named: dict[str, Any]) -> bool:
    """Whether all arguments are tensors, given by position."""
    return not named and {Tensor}.issuperset(map(type, args))


def signature(args: Any, named: Any, plain: bool = False) -> tuple[Any, tuple[Any, ...], list[Tensor]]:
    """What decides on the program; what has to stay alive so that it means the same; and the tensors.

    plain: it is known that all arguments are tensors, given by position.
    """
    plain = plain or are_tensors(args, named)
    leaves, shape = (args, len(args)) if plain else _of_states(args, named) or _of_any(args, named)
    tensors: list[Tensor] = []
    positions: dict[int, int] = {}
    held: list[Any] = []
    parts: list[Any] = []
    for x in leaves:
        if type(x) is Tensor:
            buffer = x._buffer
            aval, array = buffer.node.aval, buffer.array
            lies = None if array is None or not array.ndim or array.flags.c_contiguous else array.strides
            parts.append((aval, lies, positions.setdefault(id(buffer), len(tensors))))
            tensors.append(x)
        elif isinstance(x, _BY_VALUE):
            parts.append((type(x), repr(x) if isinstance(x, _BY_TEXT) else x, None))  # nan is not nan
        else:
            parts.append((type(x), id(x)))
            held.append(x)
    return (
        (shape, tuple(parts), threads.crew.count, thread.autocasts[-1:], precision(), dtypes.asdtype(None)),
        tuple(held),
        tensors,
    )


def _of_states(args: Any, named: Any) -> tuple[list[Any], Any] | None:
    """Of tensors and plain tuples of tensors, given by position: the leaves, and how many each argument has.

    A loop's state is most often such a tuple: a signature of four tensors then takes 2.3 us in place of 3.8.
    """
    if named:
        return None
    leaves: list[Any] = []
    counts: list[int] = []
    for x in args:
        if type(x) is Tensor:
            leaves.append(x)
            counts.append(-1)
        elif type(x) is tuple and {Tensor}.issuperset(map(type, x)):
            leaves += x
            counts.append(len(x))
        else:
            return None
    return leaves, tuple(counts)


def _of_any(args: Any, named: Any) -> tuple[list[Any], Any]:
    leaves = nest.flatten((args, named) if named else args)
    return leaves, (nest.structure(args), nest.structure(named) if named else None)


def advice(entries: dict[Any, Any], key: Any) -> str:
    """What differs from the nearest signature known."""
    differences = min((_differences(known, key) for known in entries), key=len)
    return "the nearest signature differs in " + "; ".join(differences[:3])


def _differences(a: Any, b: Any) -> list[str]:
    if a[0] != b[0]:
        return ["the structure of the arguments"]
    pairs = zip(a[1], b[1], strict=True)
    differences = [f"argument {i}: {_shown(x)} and {_shown(y)}" for i, (x, y) in enumerate(pairs) if x != y]
    differences += ["the number of threads"] if a[2] != b[2] else []
    differences += ["the autocast in force"] if a[3] != b[3] else []
    differences += ["the precision of float32 products"] if a[4] != b[4] else []
    return differences + (["the default dtype"] if a[5] != b[5] else [])


def _shown(part: Any) -> str:
    if isinstance(part[0], type):
        return f"{part[0].__name__} {part[1]}" if len(part) == 3 else f"another {part[0].__name__}"
    return repr(part[0])
