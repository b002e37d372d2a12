"""Buffers: the cache slots of values.  Device bytes live here and nowhere else.

A buffer is *pending* (lazy: ``array`` is None and ``inputs`` names the buffers its recipe reads), or *filled*.  Its
bytes live as long as someone refers to the buffer: a tensor, a tape's record (a rule requires it), a pending buffer
(which is to read it).  There are no counts to keep right and no cycles, so bytes are freed at their last use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tapegrad.core.storage import METER

if TYPE_CHECKING:
    from tapegrad.core.node import Node
    from tapegrad.core.storage import Storage

_allocate = METER.allocate
NOTHING: tuple[Buffer, ...] = ()
fills = 0
"""How many pending buffers have got their bytes; as long as it is the same, results of a walk over them hold."""


class Buffer:
    """The cache slot of ``node``'s value.

    ``inputs``: of a pending buffer, what its recipe reads; ``base``: of a filled view, the buffer that owns its bytes;
    ``span``: upper bounds on the pending nodes and the filled arrays that its evaluation takes in, and what the engine
    knows of these (None when filled); ``loop``: of a pending reduction, and of what is to be computed from its results
    in the same kernel, the shape it loops over and the axes it reduces.
    """

    __slots__ = ("__weakref__", "array", "base", "inputs", "loop", "node", "recipe", "span", "storage")
    storage: Storage
    """Its bytes, once it has some of its own."""
    recipe: Any
    """While something records within a budget: how the value can be made again."""
    postponed: bool = False
    """Whether the node waits as a whole (see :class:`Postponed`): no kernel takes it in before it has been applied."""

    def __init__(
        self,
        array: Any,
        node: Node,
        inputs: tuple[Buffer, ...] = NOTHING,
        span: tuple[Any, ...] | None = None,
        loop: tuple[tuple[int, ...], tuple[int, ...]] | None = None,
        base: Buffer | None = None,
    ) -> None:
        self.array = array
        self.node = node
        self.base = base
        self.inputs = inputs
        self.span = span
        self.loop = loop
        if array is not None and base is None:
            _allocate(self)

    def fill(self, array: Any) -> None:
        """Evaluation gives a pending buffer its bytes; it lets go of what it was to be made from."""
        global fills
        fills += 1
        before = self.inputs, self.span, self.loop
        self.inputs, self.span, self.loop, self.array = NOTHING, None, None, array
        try:
            _allocate(self)
        except BaseException:  # bytes that nobody counts must not stay
            self.array = None
            self.inputs, self.span, self.loop = before
            raise

    def root(self) -> Buffer:
        """The buffer that owns the bytes of a filled buffer: itself, or a view's base."""
        return self.base or self


class Postponed(Buffer):
    """A buffer whose node, of any kind, waits to be applied: until then it is pending.

    ``errors``: how NumPy treated floating-point errors where the node was recorded.
    """

    __slots__ = ("errors", "postponed")

    def __init__(self, node: Node, inputs: tuple[Buffer, ...], errors: Any) -> None:
        super().__init__(None, node, inputs)
        self.errors, self.postponed = errors, True
