"""Batched application: one primitive applied to a whole batch of operands at once, as its family declares.

* elementwise: operands are aligned, and broadcasting does the rest;
* linear: ``lift`` where only the first operand is batched, or all of a variadic one's;
* any other: ``batch``, a field of the declaration: ``"all"`` (``lift``, with every operand batched) or a function;
* what declares nothing runs example by example, and its results are stacked.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, Literal, TypeVar

from tapegrad.autodiff.forward_transform import Pusher
from tapegrad.autodiff.zeros import zeros_of
from tapegrad.core.aval import ShapedArray
from tapegrad.core.buffer import Buffer
from tapegrad.core.cell import shadowed
from tapegrad.core.node import Node
from tapegrad.core.primitive import Elementwise, Linearity
from tapegrad.core.protocols import Call
from tapegrad.core.state import during, thread
from tapegrad.device import CPU, is_array
from tapegrad.engine.realize import array_of
from tapegrad.errors import MOST_TOLD, DryRunError, FailedStack, GradientError, LinAlgError, RandomnessError, told
from tapegrad.ops.casting import cast_p
from tapegrad.ops.create.creation import zeros
from tapegrad.ops.dispatch import barrier, bind, cast
from tapegrad.ops.shape.join import stack
from tapegrad.ops.shape.shape import broadcast_to, expand_dims, reshape
from tapegrad.spellings import called_inside
from tapegrad.tensor import Tensor, alias, identity_of

T = TypeVar("T")
Randomness = Literal["same", "different", "error"]
"""What a draw gives the examples of a batch: one number for all, each its own, or RandomnessError."""


class Batches(Pusher):
    """A recorder of a function's run on the first example; the companion of a value is that of all ``n`` examples.

    Meanwhile the value of one example must not be read: the other examples may have other values.
    """

    strict = False  # it takes no derivative; see `looked_at`

    def __init__(self, op: str, n: int, randomness: Randomness = "same", most_failures: int = MOST_TOLD) -> None:
        super().__init__()
        self.op = op
        self.n = n
        self.most_failures = most_failures
        """How many examples on which an operation on matrices fails an error names."""
        self._randomness = randomness

    def during(self, f: Callable[..., T], *args: object, **changes: Any) -> T:
        """What ``f(*args)`` returns, run on the first example."""
        self._batches = thread.batches
        return super().during(f, *args, batches=(*self._batches, self), **changes)

    def alone(self, f: Callable[..., T], *args: object) -> T:
        """What ``f(*args)`` returns, told only to the recorders outside of this batch."""
        return during(f, *args, recorders=self._told_outside(), batches=self._batches)

    def looked_at(self, buffer: Buffer) -> None:
        """Raises DryRunError if ``buffer`` holds the value of one example."""
        if buffer in self._pushed:
            value, name = f"the value of {buffer.node.aval!r}", called_inside(Batches.during.__code__)
            if name:
                raise DryRunError(
                    f"{self.op}: {name} cannot be batched: it reads {value}, which differs from example to example; "
                    "call it for each example in a loop, and join the results by tg.stack"
                )
            raise DryRunError(
                f"{self.op}: {value} is read inside, but it differs from example to "
                "example: use where, not `if`, no .item() or .numpy(), no masks as indices; or loop over the examples"
            )

    def whole(self, buffer: Buffer) -> Buffer:
        """The values of all examples."""
        companion = self._pushed.get(buffer)
        return buffer if companion is None else companion._buffer

    def aliased(self, old: Buffer, new: Buffer) -> None:
        """``new`` is the value of ``old``, hidden from tapes; the same holds for the values of all examples."""
        companion = self._pushed.get(old)
        if companion is not None:
            self.alone(lambda: self.seed(Tensor(new), Tensor(alias(companion._buffer))))

    def draws(self) -> int:
        """How many draws one draw inside stands for.  Raises RandomnessError."""
        if self._randomness == "error":
            raise RandomnessError(
                f'{self.op}: random numbers are drawn inside; say randomness="different" for numbers of its own for '
                'each example, or randomness="same" for the same ones for all'
            )
        return self.n if self._randomness == "different" else 1

    def joins(self, node: Node) -> bool:
        """What is drawn differs from example to example, though nothing that it is drawn from does."""
        return node.prim.draws and self._randomness == "different"

    def every(self, y: Tensor) -> Tensor:
        """The value of ``y`` for every example, along a leading axis."""
        return _full(y, self.pushed(y), self.n)

    def _push(
        self, node: Node, inputs: tuple[Buffer, ...], out: Buffer, companions: list[Tensor | None]
    ) -> Tensor | None:
        operands = [Tensor(b) for b in inputs]
        if self.joins(node):
            return during(self.alone, _drawn, node, operands, companions, self.n, autocasts=())
        return during(self.alone, batched, node, operands, companions, self.n, self.most_failures, autocasts=())

    def _push_call(
        self, call: Call, inputs: tuple[Buffer, ...], outputs: tuple[Buffer, ...], companions: list[Tensor | None]
    ) -> list[Tensor | None]:
        if not self.outer():  # nobody differentiates the batch, so what the function computed is all there is to know
            return [self._pushed.get(b) for b in outputs]
        if call.again is None:
            raise GradientError(f"{self.op}: {call.name} cannot be batched under a tape; batch the function inside it")
        return self.alone(self._called_one_by_one, call.again, inputs, outputs, companions)

    def _called_one_by_one(
        self,
        again: Callable[..., Any],
        inputs: Sequence[Buffer],
        outputs: Sequence[Buffer],
        companions: list[Tensor | None],
    ) -> list[Tensor | None]:
        results = []
        for i in range(self.n):
            # What is drawn again is not the numbers of the first run; all examples have the same, or each goes on.
            back = self._randomness == "same" and i < self.n - 1
            with shadowed({}) if back else nullcontext():
                results.append(again(_example(inputs, companions, i)))
        if not results:
            return [zeros_of(b.node.aval, 0) for b in outputs]
        return [stack([row[k] for row in results]) for k in range(len(outputs))]


def failure_of(error: LinAlgError, batches: Batches) -> LinAlgError:
    """The error of an operation on matrices inside a ``vmap``, told by example; itself if all examples share them.

    The operation failed on the first example, whose operands the others' stand beside, or on all examples at once.
    """
    stack = error.stack
    if stack is None:
        return error
    beside = {id(b.array): t for b, t in batches._pushed.items() if t is not None}
    whole = {id(t._buffer.array) for t in beside.values()}
    if any(id(a) in beside for a in stack.operands):
        each = [beside.get(id(a)) for a in stack.operands]
        operands = [_stacked(a, t, batches.n) for a, t in zip(stack.operands, each, strict=True)]
    elif any(id(a) in whole for a in stack.operands):
        operands = stack.operands
    else:
        return error
    failed = stack.failing(operands, batches.most_failures)
    lengths = operands[0].shape[:-2]
    count = str(lengths[0]) if len(lengths) == 1 else str(lengths)
    shapes = " and ".join(str(a.shape[len(lengths) :]) for a in operands)
    what = "example" if len(failed) == 1 else "examples"
    failure = LinAlgError(
        f"{batches.op}: {what} {told(failed)} of {count}: {stack.name}: {stack.reason} (of shape {shapes})"
    )
    failure.by_example, failure.failed = True, failed
    failure.stack = FailedStack(stack.name, stack.reason, operands, stack.failing)
    return failure


def _stacked(a: Tensor, companion: Tensor | None, n: int) -> Tensor:
    if companion is not None:
        return array_of(companion._buffer)
    return CPU.xp.broadcast_to(a, (n, *a.shape)) if is_array(a) else a


def example_of(x: Tensor, batches: Batches) -> Tensor:
    """The first of the examples along the leading axis of ``x`` (ones, if there is none); ``batches`` knows it."""
    example = during(_first_of, x, recorders=(), batches=())
    batches.seed(example, x)
    return example


def _first_of(x: Tensor) -> Tensor:
    return identity_of(x[0] if len(x) else zeros(x.shape[1:], dtype=x.dtype, device=x.device) + 1)


def mapped(op: str, f: Callable[[Tensor], Tensor], xs: Tensor) -> Tensor:
    """``f`` of every example along the leading axis of ``xs``, in one run."""
    batches = Batches(op, len(xs))
    return batches.every(batches.during(f, example_of(xs, batches)))


def _example(inputs: Sequence[Buffer], companions: Sequence[Tensor | None], i: int) -> list[Tensor]:
    return [Tensor(b) if c is None else c[i] for b, c in zip(inputs, companions, strict=True)]


def batched(
    node: Node, operands: list[Tensor], companions: list[Tensor | None], n: int, most_failures: int = MOST_TOLD
) -> Tensor:
    """The values of ``node`` for ``n`` examples: ``companions`` where an operand has one, else the operand itself."""
    prim = node.prim
    if isinstance(prim, Elementwise):
        return _elementwise(prim, node.aval, operands, companions, n)
    if callable(prim.batch):
        result = prim.batch(operands, companions, n, node.params)
        if result is not None:
            return result
    elif prim.lift is not None:
        if prim.batch == "all" or prim.linearity is Linearity.ALL or len(operands) == 1:
            full = [_full(x, c, n) for x, c in zip(operands, companions, strict=True)]
            return barrier(prim, *full, **prim.lift(node.params, n))
        first = companions[0]
        if prim.linearity is Linearity.FIRST and first is not None and all(c is None for c in companions[1:]):
            return barrier(prim, first, *operands[1:], **prim.lift(node.params, n))
    return _one_by_one(node, operands, companions, n, most_failures)


def _drawn(node: Node, operands: list[Tensor], companions: list[Tensor | None], n: int) -> Tensor:
    """Of ``node``, which draws, as many numbers for each example: those that follow in the stream."""
    params = node.params
    if "shape" in params:
        params = {**params, "shape": (n, *params["shape"])}
    return barrier(node.prim, *(_full(x, c, n) for x, c in zip(operands, companions, strict=True)), **params)


def _full(x: Tensor, companion: Tensor | None, n: int) -> Tensor:
    return broadcast_to(expand_dims(x, 0), (n, *x.shape)) if companion is None else companion


def _elementwise(
    prim: Elementwise, aval: ShapedArray, operands: list[Tensor], companions: list[Tensor | None], n: int
) -> Tensor:
    ndim = aval.ndim
    aligned = []
    for x, c in zip(operands, companions, strict=True):
        if c is not None and x.ndim < ndim:
            c = reshape(c, (n, *(1,) * (ndim - x.ndim), *x.shape))
        aligned.append(x if c is None else c)
    if prim is cast_p:
        return cast(aligned[0], aval.dtype)
    return bind(prim, *aligned)


def _one_by_one(
    node: Node, operands: list[Tensor], companions: list[Tensor | None], n: int, most_failures: int
) -> Tensor:
    prim = node.prim
    if not n:
        return zeros_of(node.aval, 0)
    buffers = [x._buffer for x in operands]
    results, failed = [], []
    for i in range(n):
        try:
            results.append(barrier(prim, *_example(buffers, companions, i), **node.params))
        except LinAlgError as e:
            error = e
            failed.append((i,))
            if len(failed) == most_failures:
                break
        except Exception as e:
            e.add_note(f"so it is in example {i} of {n} of a vmap")
            raise
    if failed:
        again = LinAlgError(f"{error}; so fail examples {told(tuple(failed))} of {n}")
        again.failed, again.by_example = tuple(failed), not thread.batches  # or of one example of another vmap
        raise again from None
    return stack(results)
