"""``save`` and ``load``: what each rank does, step by step, and where the ranks wait for each other."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any
from zlib import crc32

from tapegrad import ops
from tapegrad.device.types import Array
from tapegrad.distributed.group import Group, of
from tapegrad.distributed.saving import folder, shards
from tapegrad.distributed.saving.index import Index, Manifest, Plan, build, manifest, parse, plan, shard_name
from tapegrad.distributed.saving.progress import Progress
from tapegrad.distributed.saving.shards import Reader, Row, Written, blocks, write
from tapegrad.distributed.saving.together import Rounds, in_rounds, on_every_rank, on_first_rank
from tapegrad.distributed.saving.tree import Contents, NamedArray, NamedText, nested, of_dtype, of_json
from tapegrad.nn.layers.saving import does_not_fit
from tapegrad.random import Generator

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
    found = Contents(tree)

    def look() -> Manifest:
        found.fill()
        return manifest(found)

    manifests = on_every_rank(group, "save", path, look)

    def begin() -> tuple[Plan, str]:
        return plan(manifests), folder.begin(path, overwrite)

    planned, made = on_first_rank(group, "save", path, begin)

    work = _write(made, found, planned, group)

    def discard() -> None:
        work.close()  # which closes the file
        if group.rank == 0:
            folder.discard(made)

    def commit() -> None:
        sizes = {shard_name(rank, group.size): w.nbytes for rank, w in enumerate(written)}
        folder.commit(made, path, build(manifests, planned, written), sizes)

    try:
        written = in_rounds(group, "save", path, work, discard)
        on_first_rank(group, "save", path, commit, discard)
    except BaseException:
        discard()
        raise


def require_writable(dir: Path, *, group: Group | None = None) -> None:
    """Raise, on every rank, what ``save(dir, tree, overwrite=True)`` would of ``dir``: before a work of hours, say.

    Raises SaveError, SaveFileError.
    """
    path = os.fspath(dir)
    on_first_rank(of(group), "save", path, lambda: folder.discard(folder.begin(path, overwrite=True)))


def _write(made: str, found: Contents, planned: Plan, group: Group) -> Rounds[Written]:
    """Write this rank's file, and make checksums of what it has and another rank writes."""
    mine = [name for name, slices in planned.items() if any(s.writer == group.rank for s in slices)]
    rows = []
    for name in mine:
        array = found.arrays[name]
        whole = len(planned[name]) == 1
        shape = array.shape if whole else (array.slice[1] - array.slice[0],)
        rows.append(Row(name, array.dtype, shape, array.read))
    title = f"save {os.path.basename(made)[1:].partition('.tmp-')[0]}"
    with Progress(title, sum(row.nbytes for row in rows), group.rank == 0) as advance:
        written = yield from write(os.path.join(made, shard_name(group.rank, group.size)), rows, advance)
    for name in found.arrays.keys() - set(mine):
        written.checksums[name] = [crc32(block) for block in blocks(found.arrays[name].read())]
    return written


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

    def find() -> tuple[str, Index]:
        where, text = folder.find(path)
        return where, parse(text, os.path.join(path, folder.index.NAME))

    where, index = on_first_rank(group, "load", path, find)
    found = Contents(tree)
    values: dict[str, Any] = {}
    ready: list[Callable[[], object]] = []

    def read() -> Rounds[None]:
        if tree is None:
            _fill_from(found, index, values)
        else:
            found.fill(index.arrays)
        texts, problems = _texts(found, index, group, needed)
        problems += _problems(found, index, needed)
        if problems:
            common = any(name in index.arrays or name in index.texts for name in (*found.arrays, *found.texts))
            raise does_not_fit(
                f"load: {path}", "the tree" if common else "the tree: it may be of another model", problems
            )
        arrays = {name: array for name, array in found.arrays.items() if name in index.arrays}
        done = 0
        nbytes = sum((a.slice[1] - a.slice[0]) * a.dtype.itemsize for a in arrays.values())
        with Progress(f"load {os.path.basename(path)}", nbytes, group.rank == 0) as advance:
            reader = Reader(where, index.files, index.block_bytes, advance)
            for name, array in arrays.items():
                x = reader.read(name, array.dtype, index.arrays[name].pieces, *array.slice)
                ready.append(partial(array.put, x))
                if (done := done + x.nbytes) > shards.ROUND_BYTES:
                    done = 0
                    yield
        ready.extend(partial(found.texts[name].put, value) for name, value in texts.items())
        ready.reverse()

    def put() -> None:
        try:
            while ready:
                ready.pop()()  # each is freed before the next is set
        except Exception as error:
            error.add_note("load: this happened while values were set: some are new, some are not; load again")
            raise

    in_rounds(group, "load", path, read(), found.undo)
    on_every_rank(group, "load", path, put)
    return nested(values) if tree is None else found.rebuilt()


def _fill_from(found: Contents, index: Index, values: dict[str, Any]) -> None:
    """Make entries of all that a folder holds, which put it into ``values``."""

    def put(name: str, shape: tuple[int, ...], x: Array) -> None:
        values[name] = ops.asarray(x.reshape(shape))

    for name, saved in index.arrays.items():
        size = math.prod(saved.shape)
        array = NamedArray(saved.shape, of_dtype(saved.dtype), (0, size), tuple, partial(put, name, saved.shape))
        found.add(name, array)
    for name in index.texts:
        found.add(name, NamedText(None, partial(values.__setitem__, name), stream=None))


def _texts(
    found: Contents, index: Index, group: Group, needed: Callable[[str], bool]
) -> tuple[dict[str, Any], list[str]]:
    """The values of the tree's numbers, strings and streams in the folder; and what does not fit."""
    values: dict[str, Any] = {}
    problems = []
    for name, entry in found.texts.items():
        text = index.texts.get(name)
        if name not in index.texts:
            continue
        if isinstance(text, dict) and "ranks" in text and index.world_size == group.size:
            text = text["ranks"][group.rank]
        elif isinstance(text, dict) and "ranks" in text:
            if entry.stream is None:
                values[name] = [of_json(of_rank) for of_rank in text["ranks"]]
            elif needed(name):
                problems.append(
                    f"{name}: each of the {index.world_size} ranks had its own value, and the number of ranks is "
                    f"{group.size} now; leave it out, with strict=False"
                )
            continue
        value = of_json(text)
        if entry.stream not in (None, isinstance(value, Generator)):
            wanted, has = ("a random stream", repr(value)) if entry.stream else ("a value", "a random stream")
            problems.append(f"{name}: wanted {wanted}, the folder has {has}")
        elif entry.fixed and value != entry.value:
            problems.append(f"{name}: wanted {entry.value!r}, the folder has {value!r}")
        values[name] = value
    return values, problems


def _problems(found: Contents, index: Index, needed: Callable[[str], bool]) -> Iterator[str]:
    """What of the tree does not fit the folder, one line each."""
    for name, array in found.arrays.items():
        saved = index.arrays.get(name)
        if name in index.texts:
            yield f"{name}: wanted an array, the folder has a value without shape"
        elif saved is None:
            if needed(name):
                yield f"{name}: missing in the folder"
        elif saved.shape != array.shape:
            yield f"{name}: wanted shape {array.shape}, the folder has {saved.shape}"
        elif saved.dtype != array.dtype.name:
            yield f"{name}: wanted dtype {array.dtype}, the folder has {saved.dtype}"
    for name in found.texts:
        if name in index.arrays:
            yield f"{name}: wanted a value without shape, the folder has an array"
        elif name not in index.texts and needed(name):
            yield f"{name}: missing in the folder"
    for name in (*index.arrays, *index.texts):
        if name not in found.arrays and name not in found.texts and needed(name):
            yield f"{name}: in the folder only"
