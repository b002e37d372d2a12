"""Buffers: the slots of values.  Device bytes live here and nowhere else.

A buffer is *filled*, or its ``array`` is None, and it is one of these:

* *pending* (lazy): a kernel evaluates it from ``inputs``, the buffers that its recipe reads;
* *postponed*: its node, of any kind, is applied to ``inputs`` when its value is needed, or never;
* *evicted*: it was filled, and a budget took its bytes; its ``recipe`` says how to recompute them.

Code that needs bytes asks ``engine/realize.py``, which fills a buffer of any kind.  Bytes live as long as the buffer is
referenced, or until they are evicted.  There are no cycles, so they are freed at their last use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import ref

from tapegrad.core.storage import METER

if TYPE_CHECKING:
    from tapegrad.core.node import Node
    from tapegrad.core.storage import Storage

_allocate = METER.allocate
NOTHING: tuple[Buffer, ...] = ()
PLAIN, POSTPONED, EVICTED = range(3)
"""States of a buffer: filled or pending; postponed; evicted.  The last two hold while its array is None."""
fills = 0
"""How often a buffer was filled or emptied; while it is unchanged, results of a traversal of buffers hold."""


class Buffer:
    """The slot of ``node``'s value.

    ``inputs``: of a pending buffer, what its recipe reads; ``base``: of a filled view, the buffer that owns its bytes;
    ``span``: upper bounds on the pending nodes and the filled arrays that its evaluation takes in, and what the engine
    knows of these (None when filled); ``loop``: of a pending reduction, and of what is to be computed from its results
    in the same kernel, the shape it loops over and the axes it reduces.
    """

    __slots__ = (
        "__weakref__", "array", "base", "errors", "inputs", "loop", "node", "recipe", "span", "state", "storage",
    )  # fmt: skip
    storage: Storage
    """Its bytes, while it has some of its own."""
    recipe: Any
    """While something records within a budget, or the buffer is evicted: how to recompute the value."""
    errors: Any
    """Of a postponed buffer: how NumPy treated floating-point errors where the node was recorded."""

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
        self.state = PLAIN
        if array is not None and base is None:
            _allocate(self)

    def fill(self, array: Any) -> None:
        """Give a buffer without bytes its ``array``, and release what it was to be computed from."""
        global fills
        if self.array is not None:  # an eviction by another thread was undone
            return
        fills += 1
        before = self.inputs, self.span, self.loop
        self.inputs, self.span, self.loop, self.array = NOTHING, None, None, array
        counted = False
        try:
            _allocate(self)
            counted = True
        finally:
            if not counted:  # uncounted bytes must not stay
                self.array = None
                self.inputs, self.span, self.loop = before
        self.state = PLAIN

    def show(self, array: Any, base: Buffer) -> Buffer:
        """Give a buffer without bytes ``array``, a view of the bytes of ``base``."""
        global fills
        fills += 1
        self.array, self.base, self.inputs, self.span, self.loop, self.state = array, base, NOTHING, None, None, PLAIN
        return self

    def evict(self, recipe: Any, in_use_too: bool = False) -> bool:
        """Empty the buffer, whose value ``recipe`` recomputes; False, and it stays filled, if its array is in use.

        ``in_use_too``: empty it all the same.
        An interrupt between two statements leaves a buffer that is either filled or evicted.
        """
        array, storage, owner, excerpt = self.array, self.storage, None, None
        if array.nbytes:  # an empty array is never in use
            owner = owner_of(array)
            if owner is None or (owner is not array and (excerpt := Excerpt.of(array, owner)) is None):
                return False
        weak = None if owner is None else ref(owner)
        del array, owner
        self.hide(recipe)
        owner = None if weak is None else weak()  # a running kernel, another thread, or an export holds it
        if owner is not None and not in_use_too:
            self.array, self.state = owner if excerpt is None else excerpt.of_owner(owner), PLAIN
            return False
        METER.free(storage)  # another thread may have filled the buffer since
        return True

    def hide(self, recipe: Any) -> None:
        """Empty a buffer that owns no bytes, a view or a pending one; ``recipe`` recomputes its value."""
        global fills
        fills += 1
        self.recipe, self.state = recipe, EVICTED
        self.array = self.base = self.span = self.loop = None
        self.inputs = NOTHING

    @property
    def is_recomputable(self) -> bool:
        """Whether a budget may evict the value, and knows how to recompute it."""
        recipe = getattr(self, "recipe", None)
        return recipe is not None and bool(recipe.session)

    def root(self) -> Buffer:
        """Return the buffer that owns the bytes of a filled buffer: itself, or a view's base."""
        return self.base or self


def owner_of(array: Any) -> Any:
    """Return the array that owns the memory of ``array``, and lives as long as any view of it; None if unknown."""
    while type(base := getattr(array, "base", None)) is type(array):
        array = base
    return array if type(array).__weakrefoffset__ else None


class Excerpt(NamedTuple):
    """An array as a view of its owner: some bytes of it, from ``start`` to ``stop``, reshaped, then transposed."""

    start: int
    stop: int
    dtype: Any
    shape: tuple[int, ...]
    axes: tuple[int, ...]

    @staticmethod
    def of(array: Any, owner: Any) -> Excerpt | None:
        """Return ``array`` as an excerpt of ``owner``; None if its bytes are not contiguous there."""
        order = sorted(range(array.ndim), key=lambda i: -array.strides[i])
        dense = array.transpose(order)
        if not (owner.flags.c_contiguous and dense.flags.c_contiguous):
            return None
        start = _address(array) - _address(owner)
        axes = tuple([order.index(i) for i in range(array.ndim)])
        return Excerpt(start, start + array.nbytes, array.dtype, dense.shape, axes)

    def of_owner(self, owner: Any) -> Any:
        """Return the array as a view of ``owner``."""
        part = owner.reshape(-1).view("u1")[self.start : self.stop]
        return part.view(self.dtype).reshape(self.shape).transpose(self.axes)


def _address(array: Any) -> int:
    interface = getattr(array, "__cuda_array_interface__", None) or array.__array_interface__
    return int(interface["data"][0])
