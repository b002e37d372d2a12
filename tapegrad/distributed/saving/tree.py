"""What a tree holds, by name: arrays, and what is written as text (numbers, strings, states of random streams).

A name is the path in the tree, between slashes, and in a layer the path of attributes, between dots:
``model/blocks.0.dense.kernel``.  The state of an optimizer is named as in ``Layer.save``: ``optimizer/iterations`` and
``optimizer/m/model/blocks.0.dense.kernel``.  A variable that the tree holds twice has the name that comes first.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from tapegrad import nest, ops
from tapegrad.device import CPU, dtypes, is_array
from tapegrad.device.types import Array, DType
from tapegrad.distributed.pieces import assign_piece, piece_of
from tapegrad.errors import SaveError
from tapegrad.nn.layers import saving
from tapegrad.nn.layers.layer import Layer, named_variables, unwrapped
from tapegrad.optim import Optimizer
from tapegrad.random import Generator
from tapegrad.tensor import Tensor
from tapegrad.variable import Variable


@runtime_checkable
class Sharded(Protocol):
    """A value of which each rank has some elements: those from ``slice[0]`` to ``slice[1]`` of all in C order.

    The slices of all ranks cover the value; two of them are disjoint or the same.
    """

    @property
    def global_shape(self) -> tuple[int, ...]:
        """The shape of the whole value."""

    @property
    def dtype(self) -> DType:
        """The dtype of the elements."""

    @property
    def slice(self) -> tuple[int, int]:
        """Where this rank's elements begin and end."""

    def local(self) -> Any:
        """This rank's elements: an array or tensor of one dimension."""

    def assign(self, x: Array) -> object:
        """Set this rank's elements from a NumPy array of one dimension."""


@dataclass(frozen=True)
class NamedArray:
    """An array of the tree, or this rank's slice of it."""

    shape: tuple[int, ...]
    dtype: DType
    slice: tuple[int, int]
    """The elements that this rank has, of all in C order."""
    get: Callable[[], Any]
    """They, in any shape and memory."""
    put: Callable[[Array], object]
    """Set them from a NumPy array of one dimension."""

    def read(self) -> Array:
        """This rank's elements: a contiguous NumPy array of one dimension.  Raises SaveError."""
        x = self.get()
        x = CPU.array(x.numpy() if isinstance(x, Tensor | Variable) else x, copy=False)
        start, stop = self.slice
        if x.dtype.name != self.dtype.name or x.size != stop - start:
            raise SaveError(f"a slice of {stop - start} elements of {self.dtype} has {x.size} of {x.dtype}")
        return CPU.xp.ascontiguousarray(x).reshape(-1)


@dataclass(frozen=True)
class NamedText:
    """A number, a string or the state of a random stream."""

    value: object
    """As JSON has it; see :func:`as_json`."""
    put: Callable[[Any], object]
    stream: bool | None = False
    """Whether a random stream is wanted; None: anything."""
    fixed: bool = False
    """Whether what is loaded must be the same."""


@dataclass
class Contents:
    """What a tree holds."""

    tree: object
    arrays: dict[str, NamedArray] = field(default_factory=dict)
    texts: dict[str, NamedText] = field(default_factory=dict)
    leaves: list[Any] = field(default_factory=list)
    built: list[tuple[Optimizer, list[Variable]]] = field(default_factory=list)
    """State of optimizers that was made to be loaded into."""
    _variables: dict[int, tuple[str, Variable]] = field(default_factory=dict)
    """By identity: a variable has no hash."""

    def fill(self, saved: Container[str] = ()) -> None:
        """Look at the tree.  Optimizers make the state that is among the names ``saved``, and lose what is not.

        Raises SaveError for what cannot be saved, naming it.
        """
        named = list(nest.named(self.tree))
        for name, leaf in named:
            self._add_leaf(name, leaf)
        for name, leaf in named:
            if isinstance(leaf, Optimizer):
                self._add_optimizer(name or "value", leaf, saved)
        for name in [*self.arrays, *self.texts]:
            for i in (i for i, letter in enumerate(name) if letter == "/"):
                if name[:i] in self.arrays or name[:i] in self.texts:
                    raise SaveError(f"the tree has a value {name[:i]!r} and one in it, {name!r}; use other keys")

    def rebuilt(self) -> Any:
        """The tree, with what was put into its leaves."""
        return nest.rebuild(self.tree, iter(self.leaves))

    def undo(self) -> None:
        """Drop the state that was made."""
        for optimizer, variables in self.built:
            optimizer.forget(variables)

    def add(self, name: str, value: NamedArray | NamedText) -> None:
        """Raises SaveError if another value has this name."""
        if name in self.arrays or name in self.texts:
            raise SaveError(f"two values of the tree have the name {name!r}; use other keys")
        if isinstance(value, NamedArray):
            self.arrays[name] = value
        else:
            self.texts[name] = value

    def _add_leaf(self, name: str, leaf: Any) -> None:
        index = len(self.leaves)
        self.leaves.append(leaf)

        def put(value: object) -> None:
            self.leaves[index] = value

        held = unwrapped(leaf)
        if isinstance(held, Layer):
            inside = saving.named_state(str(held), list(named_variables(held)), None)
            for path, variable in inside.items():
                self._add_variable(f"{name}/{path}" if name else path, variable)
            return
        name = name or "value"
        if isinstance(leaf, Variable):
            self._add_variable(name, leaf)
        elif isinstance(leaf, Optimizer):
            pass  # once all variables are known
        elif isinstance(leaf, Generator):
            self.add(name, NamedText(as_json(leaf), lambda x: setattr(leaf, "state", x.state), stream=True))
        elif isinstance(leaf, Tensor):
            device, shape = leaf.device, leaf.shape
            self.add(name, _whole(leaf, lambda x: put(ops.asarray(x.reshape(shape), device=device))))
        elif is_array(leaf):
            own = CPU if isinstance(leaf, CPU.xp.ndarray) else ops.asarray(leaf).device
            self.add(name, _whole(leaf, lambda x: put(own.array(x.reshape(leaf.shape), copy=False))))
        elif isinstance(leaf, CPU.xp.generic):
            self.add(name, _whole(leaf, lambda x: put(x[0])))
        elif isinstance(leaf, Sharded):
            self.add(name, _slice(leaf))
        elif leaf is None or type(leaf) in (bool, int, float, complex, str):
            self.add(name, NamedText(as_json(leaf), put))
        elif isinstance(state := getattr(leaf, "variables", None), list) and all(
            isinstance(v, Variable) for v in state
        ):
            for i, variable in enumerate(state):  # averages, a metric: named as the list is
                self._add_variable(f"{name}/{i}", variable)
        else:
            raise SaveError(
                f"{name}: cannot save a {type(leaf).__name__}; a tree holds layers, optimizers, optim.EMA, "
                "metrics, variables, tensors, arrays, numbers, strings, None and random.Generator"
            )

    def _add_variable(self, name: str, variable: Variable) -> None:
        if id(variable) not in self._variables:
            self._variables[id(variable)] = name, variable
            self.add(name, _array(variable))

    def _add_optimizer(self, name: str, optimizer: Optimizer, saved: Container[str]) -> None:
        variables = list(self._variables.values())
        gone: list[Variable] = []
        new: list[Variable] = []
        if f"{name}/iterations" in saved:
            for path, v in variables:
                has, names = bool(optimizer.slots_of(v)), optimizer.names_of(v)
                if names and (f"{name}/{names[0]}/{path}" in saved) != has:
                    (gone if has else new).append(v)
            self.built.append((optimizer, new))
            optimizer.build(new)
        absent = {id(slot) for v in gone for slot in optimizer.slots_of(v).values()}

        def put(kind: str) -> None:
            optimizer.forget(gone)

        self.add(f"{name}/class", NamedText(type(optimizer).__name__, put, fixed=True))
        for path, state in saving.state_of(optimizer, variables, "the tree"):
            if id(state) not in absent:
                self.add(f"{name}/{path}", _array(state))


def _array(value: Any) -> NamedArray:
    """The array of a variable, or of a sharded value in its place."""
    if isinstance(value, Variable) and (piece := piece_of(value)) is not None:
        there = lambda: Tensor(value._cell.get())
        return NamedArray(piece.shape, value.dtype, (piece.start, piece.stop), there, lambda x: assign_piece(value, x))
    if isinstance(value, Variable):
        put = lambda x: value.assign(ops.asarray(x.reshape(value.shape), device=value.device))
        return _whole(value, put)
    return _slice(value)


def _whole(x: Any, put: Callable[[Array], object]) -> NamedArray:
    dtype = x.dtype if x.dtype.isnative else x.dtype.newbyteorder("=")
    return NamedArray(tuple(x.shape), dtype, (0, math.prod(x.shape)), lambda: x, put)


def _slice(x: Sharded) -> NamedArray:
    return NamedArray(tuple(x.global_shape), x.dtype, (x.slice[0], x.slice[1]), x.local, x.assign)


def nested(values: dict[str, Any]) -> Any:
    """Values by their names in nested dicts, one for each part of a name between slashes."""
    if values.keys() == {"value"}:
        return values["value"]
    tree: dict[str, Any] = {}
    for name, value in values.items():
        *path, last = name.split("/")
        inside = tree
        for key in path:
            inside = inside.setdefault(key, {})
        inside[last] = value
    return tree


def as_json(value: Any) -> object:
    """A number, a string, None or a random stream, as JSON can hold it to the last bit; :func:`of_json` reads it."""
    if isinstance(value, Generator):
        key, position = value.state
        return {"stream": [f"{key:032x}", position]}
    if type(value) is complex:
        return {"complex": [repr(value.real), repr(value.imag)]}
    if type(value) is float and not math.isfinite(value):
        return {"float": repr(value)}
    return value


def of_json(value: Any) -> Any:
    """The inverse of :func:`as_json`.  Raises ValueError for anything else."""
    match value:
        case None | bool() | int() | float() | str():
            return value
        case {"stream": [str(key), int(position)]}:
            stream = Generator(0)
            stream.state = int(key, 16), position
            return stream
        case {"complex": [str(real), str(imag)]}:
            return complex(float(real), float(imag))
        case {"float": str(text)}:
            return float(text)
    raise ValueError(f"{value!r} is no value")


def of_dtype(name: str) -> DType:
    """The dtype of that name."""
    return dtypes.asdtype(name)
