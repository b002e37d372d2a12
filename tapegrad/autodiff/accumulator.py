"""ForwardAccumulator: forward mode for what happens inside a block."""

from __future__ import annotations

import warnings
from contextlib import ExitStack
from typing import Any, NoReturn

from tapegrad import nest
from tapegrad.autodiff.cotangent_seeds import fitted, handles, wants_zeros
from tapegrad.autodiff.forward import Tangents
from tapegrad.autodiff.zeros import zeros_of
from tapegrad.core import tracking
from tapegrad.core.buffer import Buffer
from tapegrad.core.node import Node
from tapegrad.core.state import tell, tell_no_more, thread
from tapegrad.errors import GradientError, IntegerWatchWarning, TapeError, TapeStateError
from tapegrad.tensor import Tensor, identity_of
from tapegrad.variable import Variable


class ForwardAccumulator(Tangents):
    """Pushes ``tangents`` of ``primals`` forward through what its block computes (TensorFlow's class of that name).

    ``primals``: tensors and variables, nested at will.  ``tangents``: in their structure, of their shapes and dtypes (a
    number stands for every element, None for zeros).  A variable keeps its tangent at each reading.  What the block
    computes is differentiated at once, and no operation is kept; :meth:`jvp` looks the derivative up, also after the
    block.  Accumulators and tapes nest: of tangents, only recorders entered before know how they were computed, and a
    gradient taken inside the block has a tangent: the product of Hessian and tangents.

    Raises GradientError (ValueError) for a primal given twice and for another structure, ShapeError, DTypeError, and
    NotATensorError for primals of another kind; an integer primal draws an IntegerWatchWarning and has no tangent.
    """

    strict = False  # as a tape's, its values may become arrays

    def __init__(self, primals: object, tangents: object) -> None:
        super().__init__()
        self._before = thread.recorders
        self._of_variables: dict[int, Tensor] = {}
        self._recording = False
        directions = nest.require_alike("ForwardAccumulator", "tangents", tangents, "primals", primals)
        known: set[object] = set()
        for i, (x, t) in enumerate(zip(handles("ForwardAccumulator", primals), directions, strict=True)):
            if x.ref() in known:
                raise GradientError(f"ForwardAccumulator: primal {i} is given twice; give the sum of its tangents")
            known.add(x.ref())
            if t is not None:
                self._watch(i, x, t)

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise TapeError("an accumulator is neither copied nor pickled: it refers to values of this process")

    def _watch(self, i: int, x: Tensor | Variable, t: Any) -> None:
        buffer = x._cell.get() if isinstance(x, Variable) else x._buffer
        if not buffer.node.aval.smooth:
            warnings.warn(
                f"ForwardAccumulator: primal {i} is {x.dtype} and has no derivative (None); cast it to a float first",
                IntegerWatchWarning,
                stacklevel=3,
            )
            return
        tangent = fitted(f"ForwardAccumulator: tangent {i}", "its primal", t, buffer.node.aval)
        if isinstance(x, Variable):
            self._of_variables[x.construction_number] = tangent
        else:
            thread.executor.operands.watch(buffer)
        self.seed(Tensor(buffer), tangent)

    def __enter__(self) -> ForwardAccumulator:
        if self._recording:
            raise TapeStateError("this accumulator is recording already; make another one for a nested derivative")
        self._before = thread.recorders
        with ExitStack() as undo:  # a block that is not entered is not left
            undo.callback(self._stop)
            self._recording, self._graph = True, tracking.current.graph()  # so that tangents may be evicted, too
            tell(self)
            undo.pop_all()
        return self

    def __exit__(self, *exc: object) -> None:
        try:
            self._stop()
        finally:
            self._stop()  # an interrupt may have come

    def _stop(self) -> None:
        tell_no_more(self)
        self._graph = None
        self._recording = False

    def jvp(self, target: object, unconnected_gradients: object = "none") -> Any:
        """The derivative of ``target`` (tensors and variables, nested at will) along the tangents, in its structure.

        It computes nothing.  What depends on no primal, or was not computed inside the block, gets None, or zeros with
        ``unconnected_gradients="zero"``.  Raises GradientError and NotATensorError for arguments that do not fit.
        """
        zero = wants_zeros(unconnected_gradients)
        return nest.rebuild(target, (self._found(x, zero) for x in handles("jvp", target)))

    def _found(self, x: Tensor | Variable, zero: bool) -> Tensor | None:
        buffer = x._cell.get() if isinstance(x, Variable) else x._buffer
        tangent = self._of_variables.get(x.construction_number) if isinstance(x, Variable) else None
        tangent = self._pushed.get(buffer) if tangent is None else tangent
        return zeros_of(buffer.node.aval) if tangent is None and zero else tangent

    def read(self, variable: Variable, value: Buffer) -> None:
        """A variable was read: each value that it had has its tangent."""
        tangent = self._of_variables.get(variable.construction_number)
        if tangent is not None and value not in self._pushed:
            self._pushed[value] = tangent

    def _push(
        self, node: Node, inputs: tuple[Buffer, ...], out: Buffer, companions: list[Tensor | None]
    ) -> Tensor | None:
        tangent = super()._push(node, inputs, out, companions)
        if tangent is not None and any(tangent is t for t in companions):  # a tangent is a value of its own
            return self.outside(identity_of, tangent)
        return tangent
