"""Derivative rules: functions in tensors whose parameter names say what they read (see ``primitive``)."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, TypeVar

from tapegrad.core.aval import ShapedArray

if TYPE_CHECKING:
    from tapegrad.core.protocols import Steps

F = TypeVar("F", bound=Callable[..., object])
Function: TypeAlias = Callable[..., Any]
"""A function of a declaration: it takes what its parameters name."""
Params: TypeAlias = dict[str, Any]
"""Parameters of one application of a primitive, by name."""
OUT = -1
"""The slot number of the result among a rule's residuals; operands have their positions."""


class Sliced(NamedTuple):
    """What a transpose may return in place of a cotangent whose other rows are zeros: some of its rows."""

    values: Any
    """A tensor ``(n, ...)``."""
    indices: Any
    """Where they belong along the first axis, integers ``(n,)``; rows named twice add up."""
    shape: tuple[int, ...]
    """The shape of the cotangent."""


def with_parameters(f: F, parameters: Sequence[inspect.Parameter]) -> F:
    """``f`` itself, a function made at run time; from now on ``inspect.signature`` gives these parameters."""
    vars(f)["__signature__"] = inspect.Signature(parameters)
    return f


class Rule:
    """A derivative rule: a function in tensors, and what its parameter names say it reads.

    One that takes ``wanted``, positions of operands, is ``joint``: it gives a list of their cotangents.
    """

    __slots__ = ("arguments", "constant", "fn", "joint", "seeded", "slots")

    def __init__(self, fn: Function | float, operands: Sequence[str], retaining: bool = True) -> None:
        self.fn: Any = fn
        self.constant = None if callable(fn) else fn
        self.arguments: list[tuple[str, Any]] = []
        parameters = inspect.signature(fn).parameters if callable(fn) else {}
        for name, parameter in parameters.items():
            if parameter.kind is inspect.Parameter.VAR_POSITIONAL:
                self.arguments.append(("rest", None))
            elif name in ("ct", "t", "i", "wanted", "xs_aval"):
                self.arguments.append((name, None))
            elif name == "out" or (name in operands and retaining):
                self.arguments.append(("value", OUT if name == "out" else operands.index(name)))
            elif name == "out_aval":
                self.arguments.append(("aval", OUT))
            elif name.removesuffix("_aval") in operands:
                self.arguments.append(("aval", operands.index(name.removesuffix("_aval"))))
            else:
                self.arguments.append(("param", name))
        self.slots = tuple(where for kind, where in self.arguments if kind == "value")
        self.joint = "wanted" in parameters
        self.seeded = any(kind in ("ct", "t") for kind, _ in self.arguments)

    def slots_of(self, count: int) -> tuple[int, ...]:
        """The slots it reads of an application to ``count`` operands."""
        return (*self.slots, *range(1, count)) if ("rest", None) in self.arguments else self.slots

    def __call__(
        self,
        seed: Any,
        values: Any,
        avals: Sequence[ShapedArray],
        params: Params,
        position: int | tuple[int, ...],
    ) -> Any:
        """Apply the rule: ``seed`` is the (co)tangent, ``values[slot]`` the residuals as tensors, ``position``
        the operand's, or of a joint rule those of all that are wanted.

        ``avals``: those of the operands, then that of the result.
        """
        given: list[Any] = []
        named: dict[str, Any] = {}
        for kind, where in self.arguments:
            if kind == "value":
                given.append(values[where])
            elif kind == "rest":
                given += [values[k] for k in range(1, len(avals) - 1)]
            elif kind == "param":
                named[where] = params[where]
            elif kind == "aval":
                given.append(avals[where])
            else:
                given.append(seed if kind in ("ct", "t") else position if kind in ("i", "wanted") else avals)
        return self.fn(*given, **named)


class Plan:
    """How one set of tracked operands is differentiated: which slots to keep, and a rule for each tracked operand."""

    __slots__ = ("kept_result", "lacking", "nothing", "positions", "pulls", "quick", "slots", "steps")

    def __init__(self, slots: tuple[int, ...], pulls: tuple[tuple[int, Rule], ...], lacking: tuple[int, ...]) -> None:
        self.slots = slots
        self.pulls = pulls
        self.lacking = lacking  # tracked operands for which the primitive declares no rule
        self.nothing = not pulls and not lacking  # whether no operand is tracked
        self.kept_result = slots.index(OUT) if OUT in slots else None  # where among the residuals the result itself is
        self.positions = tuple(i for i, _ in pulls)
        self.quick = False  # whether the rules may be listed, as ``steps``
        self.steps: Steps | None = None
