"""Calls of a captured function that tapes record, as one record each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tapegrad import nest
from tapegrad.autodiff.custom_gradient import custom_gradient
from tapegrad.autodiff.tape import GradientTape
from tapegrad.core import locks
from tapegrad.core.cell import shadowed
from tapegrad.core.state import during, thread
from tapegrad.errors import FunctionError
from tapegrad.ops.create.creation import ones_like
from tapegrad.program.derivative import Joint
from tapegrad.program.eager import called, difference
from tapegrad.program.program import Kind
from tapegrad.program.replay import Replay
from tapegrad.tensor import Tensor
from tapegrad.variable import Variable


class TapedCall:
    """Calls of one signature.  Each keeps what its backward reads: arguments, contents of variables, carried values."""

    def __init__(self, joint: Joint) -> None:
        self._joint = joint
        self._forward, self._backward = Replay(joint.forward), Replay(joint.backward)
        self._keys = [s if isinstance(s, int) else id(s) for s in joint.sources]
        self._lock = locks.lock()

    def __call__(self, f: Callable[..., Any], args: Any, named: Any, tensors: list[Tensor]) -> Any:
        """The result of a replayed call, recorded."""
        joint = self._joint
        static: dict[int, Any] = {}

        @custom_gradient
        def call(*inputs: Tensor) -> Any:
            for _, owner, _ in joint.forward.reads:
                owner.value()  # tapes note that it is read
            leaves, carried = self._run(tensors)
            self._forward.commit()
            made = [i for i, x in enumerate(leaves) if type(x) is Tensor]
            static.update(enumerate(leaves))

            def gradient(*dys: Tensor, variables: Sequence[Variable] = ()) -> Any:
                if thread.recorders:
                    answers = self._again(f, args, named, tensors, dys)
                else:
                    answers = self._pull(carried, [dys[made.index(i)] for i in joint.weighed])
                by_input = [answers.get(i) for i in range(len(inputs))]
                return (by_input, [answers.get(id(v)) for v in variables]) if variables else by_input

            return [leaves[i] for i in made], gradient

        recorded = iter(call(*tensors))
        leaves = [next(recorded) if type(x) is Tensor else x for x in static.values()]
        return nest.rebuild(joint.forward.result, iter(leaves))

    def _run(self, tensors: list[Tensor]) -> tuple[list[Any], list[Tensor]]:
        """The leaves of the result, and what the backward is to take."""
        joint = self._joint
        self._forward.run(tensors)
        results = self._forward.results(tensors)
        leaves, made = results[: joint.count], iter(results[joint.count :])
        carried: list[Tensor] = []
        for kind, source in joint.carried:
            if kind is Kind.ARGUMENT:
                carried.append(tensors[source])
            else:
                carried.append(Tensor(source.get()) if kind is Kind.VARIABLE else next(made))
        return leaves, carried

    def _pull(self, carried: list[Tensor], cts: Sequence[Tensor]) -> dict[int, Any]:
        """Gradients, by the position of an argument or the id of a variable."""
        given = [*carried, *cts]
        with self._lock:
            self._backward.run(given)
            grads = iter(self._backward.results(given))
        return {k: next(grads) for k, has in zip(self._keys, self._joint.has_gradient, strict=True) if has}

    def _again(self, f: Any, args: Any, named: Any, tensors: list[Tensor], dys: Sequence[Tensor]) -> dict[int, Any]:
        """Gradients that can be differentiated again: by running the function once more, operation by operation."""
        if self._joint.forward.writes:
            raise FunctionError(
                "a captured function that draws random numbers or writes to variables was recorded on a tape, and its "
                "gradient is differentiated again: call the function itself, not the captured one"
            )
        return dict(zip(self._keys, self._gradient(f, args, named, tensors, dys)[1], strict=True))

    def _gradient(
        self, f: Any, args: Any, named: Any, tensors: list[Tensor], cts: Sequence[Tensor]
    ) -> tuple[list[Any], list[Any]]:
        """The leaves of the result and the gradients, eagerly; ``cts``: of all tensors, or of those weighed."""
        with GradientTape() as tape:
            tape.watch([t for t in tensors if t.dtype.kind in "fcV"])
            leaves = nest.flatten(called(f, args, named))
        targets = [x for x in leaves if type(x) is Tensor]
        if len(cts) != len(targets):
            targets = [leaves[i] for i in self._joint.weighed]
        wanted = [tensors[s] if isinstance(s, int) else s for s in self._joint.sources]
        return leaves, tape.gradient(targets, wanted, output_gradients=list(cts)) if targets else [None] * len(wanted)

    def wrong(self, f: Callable[..., Any], args: Any, named: Any, tensors: list[Tensor]) -> str | None:
        """Where forward or backward differ from an eager run in some bit (None: nowhere); nothing is written."""
        leaves, carried = self._run(tensors)
        cts = [ones_like(leaves[i]) for i in self._joint.weighed]
        mine = self._pull(carried, cts)
        with shadowed({}):
            wanted, grads = during(self._gradient, f, args, named, tensors, cts, recorders=())
        where = difference(leaves, wanted, ())
        if where is not None:
            return f"a replay differs from an eager run in {where}"
        for key, g in zip(self._keys, grads, strict=True):
            if (key in mine) != (g is not None) or (g is not None and difference([mine[key]], [g], ()) is not None):
                return "a replayed gradient differs from that of an eager run"
        return None
