"""Recipes: how to make again a value whose buffer was dropped, and what of it a tape keeps.

Under a budget the nodes that a tape may want again are noted in a :class:`Graph`: each :class:`Recipe` names its
inputs' recipes, and the buffers of inputs that have none (variables, data).  A recipe refers to its value weakly, so
values are freed at their last use as ever.  What a tape's record keeps is a :class:`Kept`: the one strong reference of
the tape's to a buffer, which may be dropped, because the recipe remains.  **Eviction is nothing but that.**

Who owns what: a kept value owns its recipe, and a recipe those it is made from.  While something records, whatever is
alive may come to be kept: recordings own a session, and until that ends each value owns its recipe.  So what no tape
needs goes at once, and a value's history when nothing records.
"""

from __future__ import annotations

import itertools
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from operator import itemgetter
from typing import TYPE_CHECKING, Any, final

from tapegrad.core import locks, references
from tapegrad.core.buffer import Buffer
from tapegrad.core.node import SHARED, Node
from tapegrad.core.state import thread
from tapegrad.device.numerics import bits
from tapegrad.errors import RecomputeError
from tapegrad.memory.policies import RECOMPUTE, Answer

if TYPE_CHECKING:
    from tapegrad.memory.budget.companions import Companions
    from tapegrad.memory.budget.eviction import Part


class Storage:
    """What is known of a value whose bytes tapes want.

    ``holders``: the nodes (by index) whose kept values hold these bytes.  ``near``: the storages next to it, with none
    in between.  ``cost``: of making it from those.  ``part``: while it is dropped, the set of dropped ones it belongs
    to.  ``row``: while it is there, its row among the candidates for eviction (-1: none).  ``spared``: how many
    replays under way will read it.  ``answer``: what the policy in force says of it.  ``transfer``: if that is to
    offload it, the cost of moving it away and back.  ``anew``: it could not be moved just now, so it is offered again,
    by the cost of making it.
    """

    __slots__ = ("anew", "answer", "cost", "holders", "near", "part", "row", "spared", "transfer")

    def __init__(self) -> None:
        self.holders: set[int] = set()
        self.near: list[int] = []
        self.cost = 0.0
        self.part: Part | None = None
        self.row = -1
        self.spared = 0
        self.answer: Answer = RECOMPUTE
        self.transfer: float | None = None
        self.anew = False


@final
class Recipe:
    """How the value of ``node`` comes from ``inputs`` (recipes, or buffers of what has none).

    ``buffer``: a weak reference to its present buffer.  ``kept``: one to what tapes keep of it.  ``roots``: of a kept
    view or pending value, the storages it holds (by index).  ``times``: how often it was made again.  ``names``: what
    the user calls it.  ``slot``: its bytes in a tier, once they have been moved there.  ``pinned``: its buffer,
    if it has been decided to keep that in place of what it was made from.  ``beside``: recipe of the by-product that
    is written along.  ``session``: the number of the last one that has used it.  Without ``__slots__``: of most
    values the defaults stay.
    """

    kept: weakref.ref[Kept] | None = None
    storage: Storage | None = None
    roots: tuple[int, ...] = ()
    times = 0
    names: tuple[str, ...] = ()
    slot: Any = None
    pinned: Buffer | None = None
    beside: weakref.ref[Recipe] | None = None

    def __init__(self, node: Node, inputs: tuple[Recipe | Buffer, ...], out: Buffer, session: int = 0) -> None:
        self.node = node
        self.inputs = inputs
        self.buffer = weakref.ref(out)
        self.session = session

    def value(self) -> Buffer | None:
        """The buffer, if there is one."""
        return self.buffer()

    def keeping(self) -> Kept | None:
        """What tapes keep of it, if any does."""
        return None if self.kept is None else self.kept()

    def along(self) -> Recipe | None:
        """The by-product that is made along with the value: one that tapes keep, and that has been dropped."""
        beside = None if self.beside is None or self.slot is not None else self.beside()
        gone = beside is not None and beside.slot is None and beside.value() is None
        return beside if gone and beside is not None and beside.keeping() is not None else None


@final
class Kept:
    """What the records of tapes keep of one value: its buffer, until that is dropped.

    ``sources``: while it is dropped, kept values of what it is to be made from and that are still there.
    ``companions``: those that come back with the value (see ``companions.py``).  Without ``__slots__``, as recipes are.
    """

    sources: tuple[Kept, ...] = ()
    companions: Companions | None = None

    def __init__(self, recipe: Recipe, graph: Graph, buffer: Buffer) -> None:
        self.recipe = recipe
        self.graph = graph
        self.buffer: Buffer | None = buffer

    def fill(self, buffer: Buffer) -> None:
        """The value is there, or is there again."""
        self.buffer, self.sources = buffer, ()

    def restored(self) -> tuple[Buffer, ...]:
        """The buffer, made again if need be: a record may hold one kept value in place of residuals."""
        return self.graph.restore((self,))

    def there(self) -> tuple[Buffer, ...]:
        """The buffer, if it has not been dropped."""
        return () if self.buffer is None else (self.buffer,)


class Watch(weakref.ref[Kept]):
    """A weak reference to a kept value that somebody has offered for eviction: it tells when no record refers to it."""

    __slots__ = ("graph", "index")
    graph: weakref.ref[Graph]
    index: int


class Residuals:
    """What a record holds: kept values, and buffers that cannot be made again."""

    __slots__ = ("things",)

    def __init__(self, things: tuple[Kept | Buffer, ...]) -> None:
        self.things = things

    def restored(self) -> tuple[Buffer, ...]:
        """The buffers, made again if need be."""
        kept = [k for k in self.things if type(k) is Kept]
        made = iter(kept[0].graph.restore(tuple(kept)))
        return tuple([next(made) if type(k) is Kept else k for k in self.things])

    def there(self) -> tuple[Buffer, ...]:
        """The buffers that have not been dropped."""
        buffers = [k.buffer if type(k) is Kept else k for k in self.things]
        return tuple([b for b in buffers if b is not None])


def _checksum(buffer: Buffer) -> bytes:
    return bits.checksum(buffer.node.aval.device.numpy(buffer.array))


class Index:
    """Recipes by the index of their node, held by others; the numbers of those that are gone are dropped in time."""

    def __init__(self) -> None:
        self.refs: dict[int, weakref.ref[Recipe]] = {}
        self._clear_at = 4096
        self._lock = locks.lock()

    def get(self, index: int) -> Recipe | None:
        """The recipe of the node of that index, if there is one."""
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
        """Drop the numbers of those that are gone, if the rest has doubled; told now and then."""
        refs = self.refs
        if len(refs) > self._clear_at:
            with self._lock:  # recordings of several threads share a graph: they may add while one of them clears
                for i in list(refs):  # makes no tuples, so no collection begins, and no other thread runs meanwhile
                    if (known := refs.get(i)) is not None and known() is None:
                        refs.pop(i, None)
                self._clear_at = max(4096, 2 * len(refs))

    def values(self) -> list[Recipe]:
        """All recipes there are."""
        return [r for ref in list(self.refs.values()) if (r := ref()) is not None]

    def __len__(self) -> int:
        return len(self.values())


class Session:
    """What recordings in progress hold: until it ends, values that are alive hold their recipes, and may be kept.

    When the last of them ends, only those recipes are left that a kept value needs: so a tape that lives on holds
    nothing of later steps, and a value carried from step to step does not carry its history along.
    """

    def __init__(self, graph: Graph) -> None:
        self.graph = graph

    def held(self, node: Node, mine: bool) -> bool | None:
        """See :meth:`Graph.held`."""
        return self.graph.held(node, mine)

    def __del__(self) -> None:
        self.graph.forget_live()


class Graph:
    """The recipes of values that tapes keep, or may come to keep, by node index.

    Who holds a recipe: a kept value, a recipe that is made from it, and, while something records, its value.
    """

    def __init__(self, restore: Callable[[tuple[Kept, ...]], tuple[Buffer, ...]]) -> None:
        self.recipes = Index()
        self.restore = restore
        self._session: weakref.ref[Session] | None = None
        self.number = next(_numbers)
        """The number of the session, which no other graph has; before the first session, one that no value bears."""
        self._sums: weakref.WeakKeyDictionary[Buffer, bytes] = weakref.WeakKeyDictionary()  # of memory of the user's
        self._live: list[weakref.ref[Buffer]] = []
        """Values that hold their recipes; those that are gone are forgotten when it has doubled."""
        self._prune_at = _FIRST_PRUNING

    def session(self) -> Session:
        """What a recording is to hold from its beginning to its end."""
        session = self.present()
        if session is None:
            session = Session(self)
            self.number = next(_numbers)
            self._session = weakref.ref(session)
        return session

    def present(self) -> Session | None:
        """The session, if something records."""
        return None if self._session is None else self._session()

    def add(self, node: Node, inputs: tuple[Buffer, ...], out: Buffer) -> None:
        """Note how ``out`` was made; something records.

        What other processes took part in has no recipe: they would have to make it again, too.
        """
        if node.prim.effect is not None:
            return
        inputs, beside = node.prim.apart(inputs)
        session = self.number
        sources: list[Recipe | Buffer] = []
        for b in inputs:
            try:  # most often it was made in this session, or has no recipe
                source = b.recipe
                known = source.session
            except AttributeError:
                known = -1
            if known == session:
                sources.append(source)
            else:
                sources.append(b if known == NEVER else self._source(b))
        out.recipe = recipe = _new(Recipe)  # without the call of `__init__`: this is on the way of every operation
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
        """What is noted of an operand: its recipe, or itself if it has none."""
        recipe = self.recipes.get(buffer.node.index)
        if recipe is None:
            if buffer.array is not None:
                if buffer.base is not None or buffer.node.params is SHARED:
                    self._note_shared(buffer)
                elif not hasattr(buffer, "recipe"):
                    buffer.recipe = _NO_RECIPE  # and never will have one
            return buffer
        if recipe.session != self.number:
            self._carry(recipe, buffer)
        return recipe

    def _note_shared(self, buffer: Buffer) -> None:
        """Note what memory of the user's holds when it is read."""
        root = buffer.root()
        if root.node.params is SHARED and root not in self._sums:
            self._sums[root] = thread.executor.in_earnest(lambda: _checksum(root), b"")

    def check(self, buffer: Buffer) -> None:
        """``buffer`` is read again.  Raises RecomputeError where the user has changed its memory meanwhile."""
        root = buffer.root()
        if root.node.params is SHARED:
            known = self._sums.get(root)
            if thread.executor.in_earnest(lambda: known is not None and known != _checksum(root), False):
                raise RecomputeError(
                    f"memory_budget: the array that a tensor ({root.node.aval!r}) shares with the program, by "
                    "asarray(copy=False) or from_dlpack, was changed between the forward run and the gradient, so what "
                    "was dropped cannot be made again from it; let asarray copy it, or change it after the gradient"
                )

    def _carry(self, recipe: Recipe, buffer: Buffer) -> None:
        """A value of an earlier session is used: keep it for good if that has fewer bytes than its history."""
        recipe.session = self.number
        if recipe.pinned is None and recipe.value() is buffer and buffer.array is not None:
            if bytes_held_for(recipe) >= buffer.node.aval.nbytes:
                self.pin(recipe, buffer)

    def alive(self, recipe: Recipe, buffer: Buffer) -> None:
        """The value of ``recipe`` is in ``buffer`` now."""
        recipe.buffer = weakref.ref(buffer)
        if self.present() is not None:
            buffer.recipe = recipe
            self._live.append(recipe.buffer)

    def pin(self, recipe: Recipe, buffer: Buffer) -> None:
        """Keep the value for good, and forget what it was made from."""
        recipe.pinned, recipe.inputs = buffer, ()
        buffer.recipe = None  # or the two would hold each other

    def forget_live(self) -> None:
        """Nothing records any more."""
        self.recipes.clear_gone()
        live, self._live = self._live, []
        for ref in live:
            b = ref()
            if b is not None:
                b.recipe = None

    def kept(self) -> Iterator[Kept]:
        """All kept values."""
        for recipe in self.recipes.values():
            kept = recipe.keeping()
            if kept is not None:
                yield kept

    def held(self, node: Node, mine: bool) -> bool | None:
        """Whether somebody may still ask for the node's value; ``mine``: a rule of the asking recording wants it.

        Who has it: a handle, a pending value, another recording's rule (which may hand it out again).  None of values
        without a recipe: references to their nodes tell.
        """
        recipe = self.recipes.get(node.index)
        if recipe is None:
            return None
        kept, buffer = recipe.keeping(), recipe.value()
        known = int(kept is not None and kept.buffer is buffer)
        things = (kept, buffer)
        del kept, buffer
        counts = references.elsewhere(things)
        return (things[0] is not None and counts[0] > mine) or (things[1] is not None and counts[1] > known)


def bytes_held_for(recipe: Recipe) -> int:
    """Bytes of the buffers (data, nothing that can be made again) that are alive only so that it can be made again."""
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
            elif (i.storage is None or not i.storage.holders) and i.node.index not in seen:
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


def asked_of(recipes: Iterable[Recipe]) -> list[Buffer]:
    """The pending values of ``recipes`` that somebody holds besides tapes and what pends of the same recipes."""
    buffers: dict[int, Buffer] = {}
    known: Counter[int] = Counter()
    for recipe in recipes:
        value, kept = recipe.value(), recipe.keeping()
        if value is not None and value.array is None:
            buffers[id(value)] = value
            known[id(value)] += kept is not None and kept.buffer is value
    value = kept = None
    known.update(id(b) for pending in buffers.values() for b in pending.inputs)
    counts = references.elsewhere(buffers.values())
    return [b for (key, b), n in zip(buffers.items(), counts, strict=True) if n > known[key]]


def roots(buffer: Buffer) -> list[Buffer]:
    """The filled buffers whose bytes ``buffer`` holds: its own, a view's base, or what a pending one is made from."""
    if buffer.array is not None:
        return [buffer.root()]
    owners: dict[int, Buffer] = {}
    seen: set[int] = set()
    stack = [buffer]
    while stack:
        for b in stack.pop().inputs:
            if b.array is not None:
                root = b.root()
                owners[id(root)] = root
            elif id(b) not in seen:
                seen.add(id(b))
                stack.append(b)
    return list(owners.values())


def _held_by(b: Buffer) -> tuple[Buffer, ...]:
    return b.inputs if b.base is None else (b.base,)


def releasable(recipe: Recipe, holders: Iterable[Kept]) -> list[Kept] | None:
    """The kept values to drop so that the bytes of ``recipe``'s value go; None if somebody else holds them, too.

    Somebody else: a handle of the user's, an operation under way, a pending value that is held.  That is known by
    counting references: those from kept values, and from views and pending buffers that only these hold, are known.
    """
    target = recipe.node.index
    holding = [k for k in holders if k.buffer is not None]
    if not holding:
        return None
    known: Counter[int] = Counter()
    buffers: dict[int, Buffer] = {}
    stack = [k.buffer for k in holding]
    while stack:
        b: Any = stack.pop()
        known[id(b)] += 1
        if id(b) not in buffers:
            buffers[id(b)] = b
            stack += _held_by(b)
    del b
    reaching: set[int] = set()
    for key, index, below in sorted(
        ((key, b.node.index, tuple(map(id, _held_by(b)))) for key, b in buffers.items()), key=itemgetter(1)
    ):
        if index == target or any(k in reaching for k in below):
            reaching.add(key)
    counts = references.elsewhere(buffers.values())
    if any(n > known[key] for key, n in zip(buffers, counts, strict=True) if key in reaching):
        return None
    return [k for k in holding if id(k.buffer) in reaching]
