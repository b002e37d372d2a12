"""Recipes: how to recompute a value whose buffer was evicted, and what a tape's record saves of it.

Within a budget the nodes that a tape may need again are noted in a :class:`Graph`: each :class:`Recipe` names its
inputs' recipes, and the buffers of inputs that have none (variables, data, values of earlier recordings).  A recipe
refers to its value weakly, so values are freed at their last use as ever.  **Eviction empties the buffer** and leaves
all references to it in place: handles, records and pending values find it empty, and whoever reads it fills it again.

A recipe is referenced by the records that save its value (:class:`SavedBuffers`), by the recipes computed from it, by
its evicted buffer, and, during a session, by its buffer in any state, since that may come to be saved.  So a value that
no tape needs is freed at once, and its history when the session ends.
"""

from __future__ import annotations

import itertools
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, final

from tapegrad.core import locks, references
from tapegrad.core.buffer import EVICTED, Buffer
from tapegrad.core.node import SHARED, Node
from tapegrad.core.state import thread
from tapegrad.device.numerics import bits
from tapegrad.engine.region import collect
from tapegrad.errors import RecomputeError
from tapegrad.remat.policies import RECOMPUTE, Answer

if TYPE_CHECKING:
    from tapegrad.remat.budget.eviction import Part


class EvictionCandidate:
    """A value whose bytes may be evicted.

    ``readers``: nodes (by index) whose values may show these bytes, or be pending and read them.  ``near``: the
    candidates next to it, with none in between.  ``cost``: of recomputing it from those.  ``part``: while it is
    evicted, the set of evicted ones it belongs to.  ``row``: while it may be evicted, its row in :class:`Candidates`
    (-1: none).  ``spared``: how many replays under way will read it.  ``answer``: what the policy in force says of it.
    ``transfer``: if that is to offload it, the cost of moving it away and back.  ``anew``: it could not be moved just
    now, so it is offered again, by the cost of recomputing it.  ``unsaved``: it may be evicted though no tape saves it.
    """

    __slots__ = ("anew", "answer", "cost", "near", "part", "readers", "row", "spared", "transfer", "unsaved")

    def __init__(self) -> None:
        self.readers: set[int] = set()
        self.near: list[int] = []
        self.cost = 0.0
        self.part: Part | None = None
        self.row = -1
        self.spared = 0
        self.answer: Answer = RECOMPUTE
        self.transfer: float | None = None
        self.anew = self.unsaved = False


@final
class Recipe:
    """How to compute the value of ``node`` from ``inputs`` (recipes, or buffers of values that have none).

    ``buffer``: a weak reference to its present buffer.  ``saves``: what records hold of it.  ``times``: how often it
    was recomputed.  ``names``: what the user calls it; ``kept``: by the user, from eviction.  ``slot``: its bytes in a
    tier, once they have been moved there.  ``pinned``: its buffer, if it has been decided to keep that in place of what
    it was computed from.  ``beside``: recipe of the by-product that is written along.  ``sources``: while it is
    evicted, what is to stay for its sake.  ``session``: the number of that in which it was made.  ``graph``: once it
    may be evicted though nothing records.  Without ``__slots__``: of most values the defaults stay.
    """

    saves: Sequence[weakref.ref[SavedBuffers]] = ()
    candidate: EvictionCandidate | None = None
    times = 0
    names: tuple[str, ...] = ()
    kept = False
    slot: Any = None
    pinned: Buffer | None = None
    beside: weakref.ref[Recipe] | None = None
    sources: Sequence[object] = ()
    graph: Any = None

    def __init__(self, node: Node, inputs: tuple[Recipe | Buffer, ...], out: Buffer, session: int = 0) -> None:
        self.node = node
        self.inputs = inputs
        self.buffer = weakref.ref(out)
        self.session = session

    def value(self) -> Buffer | None:
        """The buffer, if there is one."""
        return self.buffer()

    def filled(self) -> Buffer | None:
        """The buffer, if it has bytes."""
        b = self.buffer()
        return None if b is None or b.array is None else b

    def lacks_value(self) -> bool:
        """Whether there is no buffer, or only an evicted one."""
        b = self.buffer()
        return b is None or (b.array is None and b.state == EVICTED)

    def save(self, weak: weakref.ref[SavedBuffers]) -> None:
        """Note that a record saves the value."""
        saves = self.saves
        if not saves:
            self.saves = [weak]
        else:
            if len(saves) >= _FIRST_CLEARED and not len(saves) & (len(saves) - 1):  # a power of two
                self.saves = saves = [w for w in saves if w() is not None]
            saves.append(weak)  # type: ignore[attr-defined]

    def is_saved(self) -> bool:
        """Whether some tape's record saves the value."""
        return any(weak() is not None for weak in self.saves)

    def times_saved(self, buffer: Buffer) -> int:
        """How often records refer to ``buffer``, which has the value."""
        return sum([b is buffer for weak in self.saves if (s := weak()) is not None for b in s.buffers])

    def along(self) -> Recipe | None:
        """Return the saved by-product that is computed along with the value, if it has been evicted."""
        beside = None if self.beside is None or self.slot is not None else self.beside()
        if beside is not None and beside.slot is None and beside.lacks_value() and beside.is_saved():
            return beside
        return None

    def restore(self, buffers: Sequence[Buffer]) -> None:
        """Fill ``buffers``, which are evicted."""
        self.graph.restore(buffers)


@final
class SavedBuffers:
    """What a record saves within a budget: ``buffers``, and the ``recipes`` of those that may be evicted.

    ``at``: the latest node when it was recorded; a backward pass reads what it saves in the reverse order of these.
    """

    __slots__ = ("__weakref__", "at", "buffers", "graph", "recipes")

    def __init__(self, graph: Graph, buffers: tuple[Buffer, ...], recipes: tuple[Recipe | None, ...], at: int) -> None:
        self.graph = graph
        self.at = at
        self.buffers = buffers
        self.recipes = recipes

    def restored(self) -> tuple[Buffer, ...]:
        """Return the buffers; fill those that were evicted."""
        self.graph.read(self)
        return self.buffers

    def there(self) -> tuple[Buffer, ...]:
        """Return the buffers that are not evicted."""
        return tuple([b for b in self.buffers if b.array is not None or b.state != EVICTED])


def _checksum(buffer: Buffer) -> bytes:
    return bits.checksum(buffer.node.aval.device.numpy(buffer.array))


class Index:
    """Weak references to recipes by the index of their node; dead ones are removed now and then."""

    def __init__(self) -> None:
        self.refs: dict[int, weakref.ref[Recipe]] = {}
        self._clear_at = 4096
        self._lock = locks.lock()

    def get(self, index: int) -> Recipe | None:
        """Return the recipe of the node of that index, if there is one."""
        ref = self.refs.get(index)
        return None if ref is None else ref()

    def __getitem__(self, index: int) -> Recipe:
        if (value := self.get(index)) is None:
            raise KeyError(index)
        return value

    def __contains__(self, index: int) -> bool:
        return self.get(index) is not None

    def __setitem__(self, index: int, recipe: Recipe) -> None:
        self.refs[index] = weakref.ref(recipe)

    def clear_gone(self) -> None:
        """Remove dead references if their number may have doubled."""
        refs = self.refs
        if len(refs) > self._clear_at:
            with self._lock:  # threads share a graph: they may add while one of them clears
                for i in list(refs):
                    if (known := refs.get(i)) is not None and known() is None:
                        refs.pop(i, None)
                self._clear_at = max(4096, 2 * len(refs))

    def values(self) -> list[Recipe]:
        """Return all recipes."""
        return [r for ref in list(self.refs.values()) if (r := ref()) is not None]

    def __len__(self) -> int:
        return len(self.values())


class Session:
    """A span of recordings and backward passes, each of which holds it: until it ends, live values hold their recipes.

    Afterwards only recipes that a saved or evicted value needs are left: so a tape that lives on holds nothing of later
    steps, and a value carried from step to step does not carry its history along.
    """

    def __init__(self, graph: Graph) -> None:
        self.graph = graph

    def held(self, node: Node, mine: bool) -> bool | None:
        """See :meth:`Graph.held`."""
        return self.graph.held(node, mine)

    def __del__(self) -> None:
        self.graph.forget_live()


class Graph:
    """The recipes of values that tapes save, or may come to save, by node index.

    ``restore`` fills evicted buffers, ``read`` those that a record has saved.
    """

    def __init__(
        self, restore: Callable[[Graph, Sequence[Buffer]], None], read: Callable[[SavedBuffers], None]
    ) -> None:
        self.recipes = Index()
        self.read = read
        self._restore = restore
        self._session: weakref.ref[Session] | None = None
        self.number = next(_numbers)
        """Number of the session, unique among graphs; before the first session, of no value."""
        self._sums: weakref.WeakKeyDictionary[Buffer, bytes] = weakref.WeakKeyDictionary()  # of memory of the user's
        self._live: list[weakref.ref[Buffer]] = []
        """Values that hold their recipes; dead references are removed when it has doubled."""
        self._prune_at = _FIRST_PRUNING
        self._survivors: list[weakref.ref[Buffer]] = []
        """Values that still hold their recipes though their session has ended."""
        self.evicts_unsaved = False
        """Whether values that no tape saves have been offered for eviction since a session last began."""

    def restore(self, buffers: Sequence[Buffer]) -> None:
        """Fill ``buffers``, which are evicted."""
        self._restore(self, buffers)

    def session(self) -> Session:
        """Return the session, which a recording holds from beginning to end."""
        session = self.present()
        if session is None:
            session = Session(self)
            self.number = next(_numbers)
            self._session = weakref.ref(session)
        return session

    def present(self) -> Session | None:
        """Return the session, if there is one."""
        return None if self._session is None else self._session()

    def add(self, node: Node, inputs: tuple[Buffer, ...], out: Buffer) -> None:
        """Note how ``out`` was computed, during a session.

        Results of collectives have no recipe: other processes would have to recompute them, too.
        """
        if node.prim.effect is not None:
            return
        inputs, beside = node.prim.apart(inputs)
        session = self.number
        sources: list[Recipe | Buffer] = []
        for b in inputs:
            try:  # the common case: it is of this session, or has no recipe
                source = b.recipe
                known = source.session
            except AttributeError:
                known = -1
            if known == session:
                sources.append(source)
            else:
                sources.append(b if known == NEVER else self._source(b))
        out.recipe = recipe = _new(Recipe)  # every operation comes here, so without the call of `__init__`
        recipe.node = node
        recipe.inputs = tuple(sources)
        recipe.buffer = own = getattr(out, "storage", None) or weakref.ref(out)  # a storage refers to it, too
        recipe.session = session
        if beside is not None and (written := self.recipes.get(beside.node.index)) is not None:
            recipe.beside = weakref.ref(written)
        self.recipes.refs[node.index] = weakref.ref(recipe)
        live = self._live
        live.append(own)
        if len(live) >= self._prune_at:
            live[:] = [b for b in live if b() is not None]
            self._prune_at = max(_FIRST_PRUNING, 2 * len(live))
            self.recipes.clear_gone()

    def _source(self, buffer: Buffer) -> Recipe | Buffer:
        """Return the recipe of an operand, or the buffer itself if it has none of this session.

        So a value carried from one recording to the next does not carry its history along.
        """
        recipe = self.recipes.get(buffer.node.index)
        if recipe is not None and recipe.session == self.number:
            return recipe
        if recipe is not None and recipe.pinned is None and recipe.filled() is buffer:
            if bytes_held_for(recipe) >= buffer.node.aval.nbytes:
                self.pin(recipe, buffer)
        if recipe is None and buffer.array is not None:
            if buffer.base is not None or buffer.node.params is SHARED:
                self._note_shared(buffer)
            elif not hasattr(buffer, "recipe"):
                buffer.recipe = _NO_RECIPE  # nor ever will
        return buffer

    def _note_shared(self, buffer: Buffer) -> None:
        """Note the checksum of memory shared with the user when it is first read."""
        root = buffer.root()
        if root.node.params is SHARED and root not in self._sums:
            self._sums[root] = thread.executor.in_earnest(lambda: _checksum(root), b"")

    def check(self, buffer: Buffer) -> None:
        """Check that memory shared with the user is unchanged.  Raises RecomputeError."""
        root = buffer.root()
        if root.node.params is SHARED:
            known = self._sums.get(root)
            if thread.executor.in_earnest(lambda: known is not None and known != _checksum(root), False):
                raise RecomputeError(
                    f"memory_budget: the array that a tensor ({root.node.aval!r}) shares with the program, by "
                    "asarray(copy=False) or from_dlpack, was changed between the forward run and the gradient, so what "
                    "was evicted cannot be recomputed from it; let asarray copy it, or change it after the gradient"
                )

    def saving(self, buffers: tuple[Buffer, ...], at: int = 0) -> SavedBuffers | None:
        """Return the saved form of ``buffers``, at node ``at``; None if none of them has a recipe."""
        recipes: list[Recipe | None] = []
        for b in buffers:
            recipe = getattr(b, "recipe", None)  # commonly of this session, or none
            if recipe is None or recipe.session != self.number:
                recipe = None if recipe is not None and recipe.session == NEVER else self.recipes.get(b.node.index)
            recipes.append(recipe)
        if recipes.count(None) == len(recipes):
            return None
        saved = SavedBuffers(self, buffers, tuple(recipes), at)
        weak = weakref.ref(saved)
        for recipe in recipes:
            if recipe is not None:
                recipe.save(weak)
        return saved

    def alive(self, recipe: Recipe, buffer: Buffer) -> None:
        """Note that ``buffer`` holds, or will hold, the value of ``recipe``."""
        recipe.sources = ()
        if recipe.buffer() is not buffer:
            recipe.buffer = weakref.ref(buffer)
        if self.present() is None:  # the user reads it
            buffer.recipe = recipe
            self._survivors.append(weakref.ref(buffer))
            if len(self._survivors) >= self._prune_at:
                self._survivors = [weak for weak in self._survivors if weak() is not None]
                self._prune_at = max(_FIRST_PRUNING, 2 * len(self._survivors))
        else:
            self.may_evict(recipe, buffer)

    def may_evict(self, recipe: Recipe, buffer: Buffer) -> None:
        """Let ``buffer`` hold its recipe until the session ends, unless it is kept for good."""
        if recipe.pinned is not None:  # a cycle otherwise
            return
        buffer.recipe = recipe
        self._live.append(weakref.ref(buffer))

    @property
    def live(self) -> list[Buffer]:
        """The live buffers that hold their recipes."""
        return [b for weak in (*self._live, *self._survivors) if (b := weak()) is not None]

    def survivors(self) -> list[Buffer]:
        """Return the evicted values that no tape saves, which are the user's; filled ones lose their recipes.

        Called when a session is about to begin.
        """
        self.evicts_unsaved = False
        weak, self._survivors = self._survivors, []
        survivors: list[Buffer] = []
        for buffer in filter(None, [w() for w in weak]):
            recipe = buffer.recipe
            if recipe is None or not recipe.lacks_value():
                buffer.recipe = None
                continue
            self._survivors.append(weakref.ref(buffer))
            if not recipe.is_saved():
                survivors.append(buffer)
        return survivors

    def pin(self, recipe: Recipe, buffer: Buffer) -> None:
        """Keep the value for good, and forget what it was computed from."""
        recipe.pinned, recipe.inputs = buffer, ()
        buffer.recipe = None  # a cycle otherwise

    def forget_live(self) -> None:
        """End the session: live values lose their recipes unless they are, or may be, evicted."""
        self.recipes.clear_gone()
        live, self._live = self._live, []
        for weak in live:
            b = weak()
            if b is not None and b.recipe is not None and (self.evicts_unsaved or b.recipe.lacks_value()):
                b.recipe.graph = self
                self._survivors.append(weak)
            elif b is not None:
                b.recipe = None

    def saved(self) -> Iterator[tuple[Recipe, Buffer]]:
        """Yield the filled values that tapes save, with their recipes."""
        for recipe in self.recipes.values():
            buffer = recipe.filled()
            if buffer is not None and recipe.is_saved():
                yield recipe, buffer

    def held(self, node: Node, mine: bool) -> bool | None:
        """Whether the node's value may still be requested; ``mine``: the requesting record saves it.

        It may be by a handle, a pending value, or another record.  None of values without a recipe: references to their
        nodes tell.
        """
        recipe = self.recipes.get(node.index)
        if recipe is None:
            return None
        things = (recipe.value(),)
        return things[0] is not None and references.elsewhere(things)[0] > mine


def bytes_held_for(recipe: Recipe) -> int:
    """Return the bytes of leaf buffers that are alive only so that ``recipe`` can be recomputed."""
    known: Counter[int] = Counter()
    leaves: dict[int, Buffer] = {}
    seen: set[int] = set()
    stack = [recipe]
    i: Recipe | Buffer | None = None
    while stack and len(seen) < _MOST_WALKED:
        for i in stack.pop().inputs:
            if type(i) is not Recipe:
                known[id(i)] += 1
                leaves[id(i)] = i
            elif not i.is_saved() and i.node.index not in seen:
                seen.add(i.node.index)
                stack.append(i)
    del i
    counts = references.elsewhere(leaves.values())
    ours = [b for (key, b), n in zip(leaves.items(), counts, strict=True) if n <= known[key]]
    return sum(b.node.aval.nbytes for b in ours if b.array is not None and b.base is None)


_new = Recipe.__new__
_numbers = itertools.count(1)
NEVER = 0
"""The session of what stands for no recipe."""
_NO_RECIPE = _new(Recipe)
_NO_RECIPE.session = NEVER
_MOST_WALKED = 64
_FIRST_PRUNING = 4096
_FIRST_CLEARED = 16


def roots(buffer: Buffer) -> list[Buffer]:
    """Return the filled buffers whose bytes ``buffer`` holds: itself, a view's base, a pending one's leaves."""
    if buffer.array is not None:
        return [buffer.root()]
    owners = [b.root() for b in collect((buffer,)).leaves if b.array is not None]
    return list({id(b): b for b in owners}.values())


def asked_of(recipes: Iterable[Recipe]) -> list[Buffer]:
    """Return the pending values of ``recipes`` that are referenced by more than tapes and each other."""
    buffers: dict[int, Buffer] = {}
    known: Counter[int] = Counter()
    for recipe in recipes:
        value = recipe.value()
        if value is not None and value.array is None and not value.state:
            buffers[id(value)] = value
            known[id(value)] += recipe.times_saved(value)
    value = None
    known.update(id(b) for pending in buffers.values() for b in pending.inputs)
    counts = references.elsewhere(buffers.values())
    return [b for (key, b), n in zip(buffers.items(), counts, strict=True) if n > known[key]]


def in_hand(recipe: Recipe, others: Iterable[Recipe]) -> bool:
    """Whether anything but tapes refers to the bytes of ``recipe``'s value: a handle, or a running operation.

    ``others``: recipes of values that show or read these bytes.  References are counted; those from records, and from
    views and pending buffers that only records hold, are subtracted.
    """
    known: Counter[int] = Counter()
    buffers: dict[int, Buffer] = {}
    stack: list[Buffer] = []
    for r in {r.node.index: r for r in (recipe, *others)}.values():
        buffer = r.value()
        saves = 0 if buffer is None else r.times_saved(buffer)
        if buffer is not None and saves:
            known[id(buffer)] += saves - 1
            stack.append(buffer)
    buffer = None
    while stack:
        b: Any = stack.pop()
        known[id(b)] += 1
        if id(b) not in buffers:
            buffers[id(b)] = b
            stack += b.inputs if b.base is None else (b.base,)
    b = recipe.value()
    if b is None or id(b) not in buffers:
        return True
    target = id(b)
    del b
    reaching = set[int]()
    for key, below in sorted(
        ((key, tuple(map(id, b.inputs if b.base is None else (b.base,)))) for key, b in buffers.items()),
        key=lambda pair: buffers[pair[0]].node.index,
    ):
        if key == target or any(k in reaching for k in below):
            reaching.add(key)
    counts = references.elsewhere(buffers.values())
    return any(n > known[key] for key, n in zip(buffers, counts, strict=True) if key in reaching)
