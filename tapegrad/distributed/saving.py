"""``save`` and ``load``: a tree of layers, optimizers and numbers in one folder, written and read by all ranks."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from functools import partial
from typing import Any
from zlib import crc32

from tapegrad import ops
from tapegrad.device.types import Array
from tapegrad.distributed.contents import Contents, nested
from tapegrad.distributed.group import Group, of
from tapegrad.random import Generator
from tapegrad.saving import files, folders, index
from tapegrad.saving.entries import ArrayEntry, Entry, TextEntry, of_json, problems, require_fit
from tapegrad.saving.files import Index, Piece, SavedArray
from tapegrad.saving.index import Plan, Written
from tapegrad.saving.progress import progress
from tapegrad.saving.together import Rounds, Work, rounds, run

Path = str | os.PathLike[str]


def save(dir: Path, tree: Any, *, overwrite: bool = False, group: Group | None = None) -> None:
    """Write the values of ``tree`` to a new folder ``dir``; every rank calls it, with a tree of the same names.

    ``tree``: dicts, lists and tuples of layers, optimizers, averages (``optim.EMA``), metrics, variables, tensors,
    arrays, numbers, strings, None and ``random.Generator``; of a :class:`Sharded` value each rank writes its slice, of
    all others one rank.  Numbers and streams may differ between ranks, arrays may not.  The folder holds safetensors
    files and ``index.json``.

    It appears only when all ranks have written everything to the disk.  ``overwrite``: replace a folder that ``save``
    wrote; if the process is killed meanwhile, ``load`` finds the old folder or the new one.  An optimizer's
    hyperparameters, and the structure of the tree, are in the program and are not saved.

    Raises, on every rank, SaveError for what cannot be saved, SaveFileError (an OSError) where a rank cannot write or
    ``dir`` exists, DistributedError where a rank fails in another way; nothing is left then.
    """
    path, group = os.fspath(dir), of(group)
    run(group.exchange_objects, "save", path, _save(path, tree, overwrite, group))


def _save(path: str, tree: Any, overwrite: bool, group: Group) -> Work[None]:
    entries = Contents(tree).filled().entries
    manifests = yield index.manifest(entries)
    planned = index.plan(manifests)
    staged = folders.stage(path, overwrite) if group.rank == 0 else ""
    try:
        folder, *_ = yield staged
        title = f"save {os.path.basename(path)}"
        written = yield from rounds(_write(folder, title, entries, planned, group))
        if group.rank == 0:
            sizes = {index.shard_name(rank, group.size): file["bytes"] for rank, (file, _) in enumerate(written)}
            folders.commit(staged, path, index.text_of(manifests, planned, written), sizes)
    except BaseException:
        if group.rank == 0:
            folders.discard(staged)
        raise


def _write(folder: str, title: str, entries: dict[str, Entry], planned: Plan, group: Group) -> Rounds[Written]:
    """Write this rank's file, and make checksums of what it has and another rank writes."""
    arrays = {name: entry for name, entry in entries.items() if isinstance(entry, ArrayEntry)}
    own = {name: arrays[name] for name, slices in planned.items() if any(s.writer == group.rank for s in slices)}
    path = os.path.join(folder, index.shard_name(group.rank, group.size))
    with progress(title, sum(array.nbytes for array in own.values()), group.rank == 0) as advance:
        file, pieces = yield from files.write(path, own, {"format": "tapegrad-2"}, advance)
    for name in arrays.keys() - own.keys():
        checksums = [crc32(block) for block in files.blocks(arrays[name].read())]
        pieces[name] = Piece("", 0, arrays[name].slice, checksums)
    return file, pieces


def require_writable(dir: Path, *, group: Group | None = None) -> None:
    """Raise, on every rank, what ``save(dir, tree, overwrite=True)`` would of ``dir``: before a work of hours, say.

    Raises SaveError, SaveFileError.
    """
    path = os.fspath(dir)
    _first("save", path, of(group), lambda: folders.discard(folders.stage(path, overwrite=True)))


def exists(dir: Path, *, group: Group | None = None) -> bool:
    """Whether there is something at ``dir`` to load, by the view of rank 0.  Raises SaveError."""
    path = os.fspath(dir)
    return _first("load", path, of(group), lambda: folders.exists(path))


def _first(op: str, path: str, group: Group, step: Callable[[], Any]) -> Any:
    """What ``step`` returns on rank 0, which alone takes it."""

    def work() -> Work[Any]:
        results = yield step() if group.rank == 0 else None
        return results[0]

    return run(group.exchange_objects, op, path, work())


def load(dir: Path, tree: Any = None, *, strict: bool = True, group: Group | None = None) -> Any:
    """Put what ``save`` wrote to ``dir`` into ``tree``; the tree, with the values of its tensors, arrays and numbers.

    Layers, variables, optimizers, random generators and :class:`Sharded` values are set in place; there may be another
    number of ranks, other slices.  Without ``tree``: nested dicts of tensors, numbers and generators (a list of those
    that each of another number of ranks had).  Names, shapes and dtypes must be the same; ``strict=False``: names that
    only the tree or only the folder has are left as they are.

    All that is read is checked; nothing is changed unless all ranks have read all that they need.  Only memory that
    runs out while values are set leaves some of them new; the error says so.

    Raises, on every rank, SaveError naming what does not fit or which file is damaged, SaveFileError (an OSError) for a
    file that is missing or cannot be read, DistributedError where a rank fails in another way.
    """
    return load_needed(dir, tree, lambda name: strict, group)


def load_needed(dir: Path, tree: Any, needed: Callable[[str], bool], group: Group | None = None) -> Any:
    """As :func:`load`, which is strict about the names that are ``needed``."""
    path, group = os.fspath(dir), of(group)
    return run(group.exchange_objects, "load", path, _load(path, tree, needed, group))


def _load(path: str, tree: Any, needed: Callable[[str], bool], group: Group) -> Work[Any]:
    saved: Index
    saved, *_ = yield folders.find(path) if group.rank == 0 else None
    contents = Contents(tree)
    values: dict[str, Any] = {}
    ready: list[Callable[[], object]] = []
    try:
        if tree is None:
            contents.entries = _all_entries(saved, values)
        else:
            contents.filled(saved.entries)
        entries = contents.entries
        texts, misfits = _texts(entries, saved, group, needed)
        misfits += problems(entries, saved.entries, "the folder", needed)
        what = "the tree" if entries.keys() & saved.entries.keys() else "the tree: it may be of another model"
        require_fit(f"load: {path}", what, misfits)
        yield from rounds(_read(path, entries, saved, group, ready))
        ready.extend(partial(entries[name].put, value) for name, value in texts.items())
    except BaseException:
        contents.undo()
        raise
    ready.reverse()
    try:
        while ready:
            ready.pop()()  # each is freed before the next is set
    except Exception as error:
        error.add_note("load: this happened while values were set: some are new, some are not; load again")
        raise
    return nested(values) if tree is None else contents.rebuilt()


def _all_entries(saved: Index, values: dict[str, Any]) -> dict[str, Entry]:
    """Entries of all that a folder holds, which put it into ``values``."""

    def put(name: str, shape: tuple[int, ...], x: Array) -> None:
        values[name] = ops.asarray(x.reshape(shape))

    entries: dict[str, Entry] = {}
    for name, x in saved.entries.items():
        if isinstance(x, SavedArray):
            every = (0, math.prod(x.shape))
            entries[name] = ArrayEntry(x.shape, files.of_dtype(x.dtype), every, tuple, partial(put, name, x.shape))
        else:
            entries[name] = TextEntry(None, partial(values.__setitem__, name), stream=None)
    return entries


def _read(
    path: str, entries: dict[str, Entry], saved: Index, group: Group, ready: list[Callable[[], object]]
) -> Rounds[None]:
    """Read all arrays, and add to ``ready`` what sets them."""
    arrays = {n: e for n, e in entries.items() if isinstance(e, ArrayEntry) and n in saved.entries}
    done = 0
    with progress(f"load {os.path.basename(path)}", sum(a.nbytes for a in arrays.values()), group.rank == 0) as advance:
        reader = files.Reader(saved, advance)
        for name, array in arrays.items():
            ready.append(partial(array.put, reader.read(name, *array.slice)))
            done += array.nbytes
            if done > files.ROUND_BYTES:
                done = 0
                yield


def _texts(
    entries: dict[str, Entry], saved: Index, group: Group, needed: Callable[[str], bool]
) -> tuple[dict[str, Any], list[str]]:
    """The saved values of the tree's numbers, strings and streams; and what does not fit."""
    values: dict[str, Any] = {}
    misfits = []
    for name, entry in entries.items():
        text = saved.entries.get(name)
        if not isinstance(entry, TextEntry) or name not in saved.entries or isinstance(text, SavedArray):
            continue
        if isinstance(text, dict) and "ranks" in text:
            if saved.world_size != group.size:
                if entry.stream is None:
                    values[name] = [of_json(of_rank) for of_rank in text["ranks"]]
                elif needed(name):
                    misfits.append(
                        f"{name}: each of the {saved.world_size} ranks had its own value, and the number of ranks is "
                        f"{group.size} now; leave it out, with strict=False"
                    )
                continue
            text = text["ranks"][group.rank]
        value = of_json(text)
        if entry.stream not in (None, isinstance(value, Generator)):
            wanted, has = ("a random stream", repr(value)) if entry.stream else ("a value", "a random stream")
            misfits.append(f"{name}: wanted {wanted}, the folder has {has}")
        elif entry.fixed and value != entry.value:
            misfits.append(f"{name}: wanted {entry.value!r}, the folder has {value!r}")
        values[name] = value
    return values, misfits
