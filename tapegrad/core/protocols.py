"""Protocols of what the engine calls in higher layers: tapes, transformations, checkpoints and executors.

The engine imports no class that implements them, and works without any.  What it asks of memory: see ``tracking``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, MutableMapping, Sequence

    from tapegrad.core.buffer import Buffer
    from tapegrad.core.node import Node

T = TypeVar("T")


class Recorder(Protocol):
    """It is told of every node made in its thread: a tape, a forward-mode walk, a checkpoint's look-out."""

    def record(self, node: Node, inputs: tuple[Buffer, ...], out: Buffer) -> None:
        """``node`` was applied to ``inputs``; its value is, or will be, in ``out``."""

    def read(self, variable: Any, value: Buffer) -> None:
        """``variable`` was read; ``value`` is its present value."""

    def follows(self, buffer: Buffer) -> bool:
        """Whether what happens to ``buffer``'s value matters to it."""

    def record_call(self, call: Call, inputs: tuple[Buffer, ...], outputs: tuple[Buffer, ...]) -> None:
        """A function with a derivative of its own was called; what it did inside was recorded apart, or not at all."""


class Call(Protocol):
    """A function call that enters a tape as one record: a custom gradient, a checkpoint.

    This protocol is how a checkpoint is entered without the tape knowing what a checkpoint is.
    """

    name: str
    effects: Sequence[Node]
    """Operations inside in which other processes take part (see :class:`Effect`)."""
    again: Callable[[list[Any]], list[Any]] | None
    """While the call is recorded: the same function called on other inputs, recorded; None: it cannot be."""

    def pullback(self, cts: list[Any], needed: frozenset[int], lead: int | None, come: dict[int, Any]) -> list[Any]:
        """Cotangents of the inputs at the ``needed`` positions (None: not connected) from those of the outputs.

        None among ``cts`` stands for zeros; ``lead``: the length of one more leading axis of every cotangent.
        ``come``: what has come so far for other values, by node index; a call may take out what has come for its
        inputs and return sums with it.
        """

    @property
    def pushforward(self) -> Callable[[list[Any]], list[Any]] | None:
        """Tangents of the outputs from those of the inputs (None: zeros).

        None instead of a function: forward mode sees what the call does inside, and is not told of the call.
        """


class Effect(Protocol):
    """What a primitive does besides yielding a value: other processes, its group's, take part, and wait for it.

    It happens where the program says, once, and so does its transpose in a backward walk, in which processes take part
    that by themselves would not need it.
    """

    category: str
    """What the ledger calls the memory that operations with this effect take for themselves."""

    def group(self, node: Node) -> Any:
        """Who takes part."""

    def common(self, groups: Sequence[Any]) -> Any:
        """The smallest group that holds all of ``groups``."""

    def name(self, group: Any) -> Any:
        """What all members call a group."""

    def members(self, group: Any, part: Any) -> Sequence[int]:
        """Which members of ``group`` are those of a ``part`` of it."""

    def pair(self, node: Node) -> Any:
        """What both sides call a message between two processes; None: all of the group take part."""

    def replicated(self, node: Node) -> Any:
        """The group whose members all have the same result; None: they do not."""

    def first(self, group: Any) -> bool:
        """Whether this process is the first one of ``group``."""

    def told(self, group: Any, mine: Any) -> list[Any]:
        """What each process of ``group`` says of a walk that is about to begin, ``mine`` among it."""


class BatchRecorder(Recorder, Protocol):
    """A recorder for which a value is one example of many (see ``autodiff/batching.py``)."""

    def looked_at(self, buffer: Buffer) -> None:
        """The program reads the value.  Raises DryRunError if it differs from example to example."""

    def whole(self, buffer: Buffer) -> Buffer:
        """The values of all examples; ``buffer`` itself if it is the same for all."""

    def aliased(self, old: Buffer, new: Buffer) -> None:
        """``new`` is the value of ``old``, hidden from tapes."""

    def draws(self) -> int:
        """How many draws one draw stands for: the examples if each has its own.  Raises RandomnessError."""


class Executor(Protocol):
    """Runs tasks: at once, abstractly, or later."""

    keeps_arrays: bool
    """Whether arrays outlive their buffers: captured tasks refer to them."""

    def apply(self, node: Node, inputs: tuple[Buffer, ...]) -> Buffer:
        """Apply a primitive and report the node to the recorders; return the buffer of its value, filled or pending.

        Other values than elementwise ones exist on return, but see ``deferring`` in ``state``.
        """

    def run(self, node: Node, inputs: tuple[Buffer, ...], into: Buffer | None = None) -> Buffer:
        """Apply a node without recording it; return the buffer of its value: a new one, or ``into``."""

    def kernel(self, targets: list[Buffer]) -> None:
        """Evaluate pending buffers of one loop shape in one kernel."""

    def do(self, task: Any) -> list[Any]:
        """Run ``task`` (``engine/lowering.py``); return the arrays written."""

    def values(self, task: Any) -> list[Buffer]:
        """Run ``task``, which yields values without a recipe; return their buffers."""

    @property
    def changes(self) -> bool:
        """Whether arrays may be changed in place."""

    def change(self, task: Any) -> None:
        """Run ``task``, which writes into existing arrays."""

    def pull(self, steps: Steps, ct: Any, residuals: Sequence[Buffer]) -> Sequence[Any] | None:
        """Return the cotangents of a node's operands by the steps of its rules; None if these do not apply."""

    def device(self, device: Any) -> Any:
        """Return the device that allocates for ``device``: itself, or in a dry run one that lends abstract arrays."""

    def in_earnest(self, f: Callable[[], T], otherwise: T) -> T:
        """Return ``f()``, which depends on values; in a dry run, which has none, ``otherwise``."""

    def happened(self, f: Callable[[], object]) -> None:
        """Call ``f``, which reports an event: not in a dry run, but in each replay."""

    def decided(self, f: Callable[[], T], otherwise: T) -> T:
        """As :meth:`in_earnest`, of a decision on which later tasks depend: a step with one cannot be captured."""

    def index(self, t: Any) -> Any:
        """Return a 0-d integer tensor as an index: its value, or the tensor while a step is captured."""

    def number(self, f: Callable[[], Any]) -> Any:
        """Return the number ``f()``, which may differ at each call; while a step is captured, a live number."""

    def on_values(self, f: Callable[..., object], *arrays: Any) -> bool:
        """Call ``f``, which may raise, on arrays; return whether they have values, which they lack in a dry run."""

    def differentiable(self, node: Node) -> None:
        """Check that a backward pass may begin at ``node``.  Raises DryRunError."""

    @property
    def constants(self) -> MutableMapping[Any, Buffer]:
        """The shared constants created so far."""

    @property
    def operands(self) -> Any:
        """The copies of arrays that users have passed as operands (``engine/operands.py``)."""

    def concrete(self, array: Any, node: Node) -> Any:
        """Return ``array``, the abstract value of ``node``, in a dry run.  Raises DryRunError outside of one."""

    def named(self, buffer: Buffer, name: str) -> None:
        """Note that the user calls a value ``name``."""


class Residuals(Protocol):
    """What a tape's record holds instead of a tuple of buffers where a budget may evict them."""

    def there(self) -> tuple[Buffer, ...]:
        """Return the buffers that are not evicted."""

    def restored(self) -> tuple[Buffer, ...]:
        """Return the buffers, recomputed if necessary."""


Retained: TypeAlias = "tuple[Buffer, ...] | Residuals"
"""What a record holds of what its rules read."""


class Steps(Protocol):
    """The rules of a small node, listed (see ``autodiff/small_rules.py``).  None: some value is not there."""

    pull: Callable[[Any, Sequence[Buffer]], tuple[Any, ...] | None]
    """Cotangents as arrays, from an array and residuals; nobody is told."""

    def run(self, ct: Any, residuals: Sequence[Buffer]) -> list[Buffer] | None:
        """Cotangents, step by step, by the executor in force."""

    def count(self, ct: Any, residuals: Sequence[Buffer], wrap: Callable[..., Buffer]) -> Sequence[Buffer] | None:
        """Cotangents as buffers, which ``wrap`` makes; None also where the steps must be run one by one."""


class Recipes(Protocol):
    """How the values of a recording can be recomputed."""

    def held(self, node: Node, mine: bool) -> bool | None:
        """Whether somebody may still ask for the node's value; ``mine``: a rule of the asking recording wants it.

        None: it has no recipe; references to the node tell.
        """


class Recording(Recorder, Protocol):
    """A recorder that keeps what rules read."""

    graph: Recipes | None
    """How values can be recomputed, where somebody keeps memory within a budget."""
