"""The executor of dry runs: it follows shapes and layouts, and computes nothing."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Callable, MutableMapping, Sequence
from typing import Any, TypeVar

from tapegrad.core.buffer import Buffer
from tapegrad.core.node import Node
from tapegrad.core.protocols import Steps
from tapegrad.device import Device, abstract_array
from tapegrad.device.abstract_device import dry
from tapegrad.device.types import Array
from tapegrad.engine import lowering
from tapegrad.engine.executor import CONSTANTS, EXECUTOR, OPERANDS, Executor
from tapegrad.engine.operands import DryOperands
from tapegrad.engine.task import Task
from tapegrad.errors import DryRunError

T = TypeVar("T")


class AbstractExecutor(Executor):
    """Follows shapes and layouts; nothing is computed but what was asked for before ``since``, a node's index."""

    def __init__(self, since: int) -> None:
        self._since = since
        abstract_array.begin()
        self._constants: MutableMapping[Any, Buffer] = ChainMap({}, CONSTANTS)
        self._operands = DryOperands(OPERANDS)

    def small(self, site: Any, arrays: list[Array]) -> Array:
        if site.ufunc is None or site.pooled:
            return abstract_array.empty(site.aval.shape, site.aval.dtype)
        return abstract_array.of_ufunc(arrays, site.aval)

    def pull(self, steps: Steps, ct: Any, residuals: Sequence[Buffer]) -> Sequence[Any] | None:
        """Cotangents as buffers, step by step."""
        return steps.run(ct, residuals)

    def viewed(self, node: Node, array: Array) -> Array:
        """An abstract array of it."""
        return self.do(lowering.Application(node.prim, [array], node.params, node.aval))[0]

    def _temporaries(self, task: Task) -> list[Array]:
        return [abstract_array.empty(*lies) for lies in task.temporaries]

    def _evaluated(self, kernel: lowering.Kernel) -> tuple[list[Array], list[Array]]:
        temporaries, results = super()._evaluated(kernel)
        for i, b in enumerate(kernel.targets):
            if b.node.index < self._since:  # it will be read afterwards
                results[i] = EXECUTOR.do(lowering.of_region([b]).task)[0]
        return temporaries, results

    def device(self, device: Device) -> Device:
        """A device that lends abstract arrays."""
        return dry(device)

    def in_earnest(self, f: Callable[[], T], otherwise: T) -> T:
        """``otherwise``."""
        return otherwise

    def happened(self, f: Callable[[], object]) -> None:
        """Nothing has."""

    def on_values(self, f: Callable[..., object], *arrays: Array) -> bool:
        """Nothing: arrays have no values."""
        return False

    def differentiable(self, node: Node) -> None:
        """Raise DryRunError for a node recorded before the dry run."""
        if node.index < self._since:
            raise DryRunError("a dry run asks a tape that has recorded before; let the function open its own tape")

    @property
    def constants(self) -> MutableMapping[Any, Buffer]:
        """Constants made in this run; they are dropped with it."""
        return self._constants

    @property
    def operands(self) -> DryOperands:
        """Those of this run; they are dropped with it."""
        return self._operands

    def concrete(self, array: Array, node: Node) -> Array:
        """The array itself."""
        return array

    def do(self, task: Task, temporaries: list[Array] | None = None) -> list[Array]:
        """Abstract arrays of the arrays that ``task`` would write."""
        return task.abstract_outputs()
