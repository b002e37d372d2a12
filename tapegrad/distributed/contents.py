"""What a tree holds, by name: arrays, and what is written as text (numbers, strings, states of random streams).

A name is the path in the tree, between slashes, and in a layer the path of attributes, between dots:
``model/blocks.0.dense.kernel``.  The state of an optimizer is named as in ``Layer.save``: ``optimizer/iterations`` and
``optimizer/m/model/blocks.0.dense.kernel``.  A variable that the tree holds twice has the name that comes first.
"""

from __future__ import annotations

from collections.abc import Container
from typing import Any, Protocol, runtime_checkable

from tapegrad import nest, ops
from tapegrad.device import CPU, is_array
from tapegrad.device.types import Array, DType
from tapegrad.distributed.pieces import assign_piece, piece_of
from tapegrad.errors import SaveError
from tapegrad.nn.layers import saving
from tapegrad.nn.layers.layer import Layer, named_variables, unwrapped
from tapegrad.optim import Optimizer
from tapegrad.random import Generator
from tapegrad.saving.entries import ArrayEntry, Entry, TextEntry, as_json, of_variable, whole
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


class Contents:
    """What a tree holds, by name."""

    def __init__(self, tree: object) -> None:
        self.entries: dict[str, Entry] = {}
        self._tree = tree
        self._leaves: list[Any] = []
        self._variables: dict[int, tuple[str, Variable]] = {}
        """By identity: a variable has no hash."""
        self._built: list[tuple[Optimizer, list[Variable]]] = []
        """State of optimizers that was made to be loaded into."""

    def filled(self, saved: Container[str] = ()) -> Contents:
        """Look at the tree.  Optimizers make the state that is among the names ``saved``, and lose what is not.

        Raises SaveError for what cannot be saved, naming it.
        """
        named = list(nest.named(self._tree))
        for name, leaf in named:
            self._add_leaf(name, leaf)
        for name, leaf in named:
            if isinstance(leaf, Optimizer):
                self._add_optimizer(name or "value", leaf, saved)
        for name in self.entries:
            for i in (i for i, letter in enumerate(name) if letter == "/"):
                if name[:i] in self.entries:
                    raise SaveError(f"the tree has a value {name[:i]!r} and one in it, {name!r}; use other keys")
        return self

    def rebuilt(self) -> Any:
        """The tree, with what was put into its leaves."""
        return nest.rebuild(self._tree, iter(self._leaves))

    def undo(self) -> None:
        """Drop the state that was made."""
        for optimizer, variables in self._built:
            optimizer.forget(variables)

    def _add(self, name: str, entry: Entry) -> None:
        if name in self.entries:
            raise SaveError(f"two values of the tree have the name {name!r}; use other keys")
        self.entries[name] = entry

    def _add_leaf(self, name: str, leaf: Any) -> None:
        index = len(self._leaves)
        self._leaves.append(leaf)

        def put(value: object) -> None:
            self._leaves[index] = value

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
            self._add(name, TextEntry(as_json(leaf), lambda x: setattr(leaf, "state", x.state), stream=True))
        elif isinstance(leaf, Tensor):
            device, shape = leaf.device, leaf.shape
            self._add(name, whole(leaf, lambda x: put(ops.asarray(x.reshape(shape), device=device))))
        elif is_array(leaf):
            own = CPU if isinstance(leaf, CPU.xp.ndarray) else ops.asarray(leaf).device
            self._add(name, whole(leaf, lambda x: put(own.array(x.reshape(leaf.shape), copy=False))))
        elif isinstance(leaf, CPU.xp.generic):
            self._add(name, whole(leaf, lambda x: put(x[0])))
        elif isinstance(leaf, Sharded):
            start, stop = leaf.slice
            self._add(name, ArrayEntry(tuple(leaf.global_shape), leaf.dtype, (start, stop), leaf.local, leaf.assign))
        elif leaf is None or type(leaf) in (bool, int, float, complex, str):
            self._add(name, TextEntry(as_json(leaf), put))
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
            self._add(name, _of_variable(variable))

    def _add_optimizer(self, name: str, optimizer: Optimizer, saved: Container[str]) -> None:
        variables = list(self._variables.values())
        gone: list[Variable] = []
        if f"{name}/iterations" in saved:
            names = [f"{slot}/{path}" for path, v in variables for slot in optimizer.names_of(v)[:1]]
            new = saving.build_state(optimizer, variables, (n for n in names if f"{name}/{n}" in saved))
            self._built.append((optimizer, new))
            gone = [v for path, v in variables if not any(f"{name}/{n}/{path}" in saved for n in optimizer.names_of(v))]
        absent = {id(slot) for v in gone for slot in optimizer.slots_of(v).values()}
        put = lambda kind: optimizer.forget(gone)
        self._add(f"{name}/class", TextEntry(type(optimizer).__name__, put, fixed=True))
        for path, state in saving.state_of(optimizer, variables, "the tree"):
            if id(state) not in absent:
                self._add(f"{name}/{path}", _of_variable(state))


def _of_variable(v: Variable) -> ArrayEntry:
    """The entry of a variable, or of the piece of it that this rank has."""
    piece = piece_of(v)
    if piece is None:
        return of_variable(v)
    get = lambda: Tensor(v._cell.get())
    return ArrayEntry(piece.shape, v.dtype, (piece.start, piece.stop), get, lambda x: assign_piece(v, x))


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
