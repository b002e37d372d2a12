"""The index of a folder: which bytes of which file hold which elements of which array.

``plan`` decides who writes what, ``build`` makes the index of what was written, ``parse`` reads it again.  It holds the
checksums of all files, and one of itself: no byte of a folder changes without being noticed.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple
from zlib import crc32

from tapegrad.distributed.saving import shards, tree
from tapegrad.distributed.saving.shards import Piece, Written
from tapegrad.distributed.saving.tree import Contents
from tapegrad.errors import SaveError

NAME = "index.json"
_FORMAT, _VERSION = "tapegrad-checkpoint", 1


class Held(NamedTuple):
    """What a rank has of an array."""

    shape: tuple[int, ...]
    dtype: str
    slice: tuple[int, int]


class Manifest(NamedTuple):
    """What a rank has, by name."""

    arrays: dict[str, Held]
    texts: dict[str, object]


class Slice(NamedTuple):
    """Elements of an array that one rank writes, and which ranks have them."""

    start: int
    stop: int
    writer: int
    holders: list[int]


Plan = dict[str, list[Slice]]


def shard_name(rank: int, size: int) -> str:
    """The name of a rank's file."""
    return f"shard-{rank:05d}-of-{size:05d}.safetensors"


def is_file_of_ours(name: str) -> bool:
    """Whether a file of this name is part of a folder."""
    return name == NAME or re.fullmatch(r"shard-\d{5,}-of-\d{5,}\.safetensors", name) is not None


def manifest(found: Contents) -> Manifest:
    """What this rank has.  Raises SaveError for a dtype that no file can hold."""
    for name, array in found.arrays.items():
        shards.require_storable(name, array.dtype)
    arrays = {name: Held(a.shape, a.dtype.name, a.slice) for name, a in found.arrays.items()}
    return Manifest(arrays, {name: text.value for name, text in found.texts.items()})


def plan(manifests: Sequence[Manifest]) -> Plan:
    """Who writes what: what several ranks have is written by one of them, so that each writes about as many bytes.

    Raises SaveError where the ranks' trees differ, or their slices do not make up the array.
    """
    first = manifests[0]
    for rank, other in enumerate(manifests):
        for kind, mine, theirs in (("array", first.arrays, other.arrays), ("value", first.texts, other.texts)):
            if strangers := sorted(mine.keys() ^ theirs.keys()):
                has, lacks = (0, rank) if strangers[0] in mine else (rank, 0)
                raise SaveError(f"save: rank {has} has the {kind} {strangers[0]!r}, rank {lacks} has not")
        for name, held in other.arrays.items():
            if held[:2] != (wanted := first.arrays[name])[:2]:
                raise SaveError(
                    f"save: {name} is {wanted.dtype} {wanted.shape} on rank 0, {held.dtype} {held.shape} on rank {rank}"
                )
    loads = [0] * len(manifests)
    slices: dict[str, dict[tuple[int, int], list[int]]] = {name: _slices(name, manifests) for name in first.arrays}
    todo = [
        ((stop - start) * tree.of_dtype(first.arrays[name].dtype).itemsize, name, start, stop, holders)
        for name, of in slices.items()
        for (start, stop), holders in of.items()
    ]
    made: Plan = {name: [] for name in first.arrays}
    for nbytes, name, start, stop, holders in sorted(todo, key=lambda item: -item[0]):
        writer = min(holders, key=lambda rank: loads[rank])
        loads[writer] += nbytes
        made[name].append(Slice(start, stop, writer, holders))
    return {name: sorted(of) for name, of in made.items()}


def _slices(name: str, manifests: Sequence[Manifest]) -> dict[tuple[int, int], list[int]]:
    """The slices of an array, each with the ranks that have it."""
    size = math.prod(manifests[0].arrays[name].shape)
    found: dict[tuple[int, int], list[int]] = {}
    for rank, held in enumerate(m.arrays[name] for m in manifests):
        if held.slice[0] < held.slice[1] or size == 0:
            found.setdefault(held.slice, []).append(rank)
    at = 0
    for start, stop in sorted(found):
        if start != at:
            break
        at = stop
    if at != size:
        listed = ", ".join(f"{start}:{stop}" for start, stop in sorted(found)) or "none"
        raise SaveError(f"save: the slices of {name} do not make up its {size} elements: {listed}")
    return found


def build(manifests: Sequence[Manifest], planned: Plan, written: Sequence[Written]) -> str:
    """The text of the index.  ``written``: by rank; its checksums are of everything that the rank has.

    Raises SaveError where ranks that should have the same elements have others.
    """
    size, first = len(manifests), manifests[0]
    tensors: dict[str, object] = {}
    for name, slices in planned.items():
        held = first.arrays[name]
        pieces = []
        for start, stop, writer, holders in slices:
            checksums = written[writer].checksums[name]
            for rank in holders:
                if written[rank].checksums[name] != checksums:
                    raise SaveError(
                        f"save: {name} is not the same on ranks {writer} and {rank}; make it so (broadcast), or give "
                        "it as a sharded value"
                    )
            pieces.append(
                {
                    "file": shard_name(writer, size),
                    "offset": written[writer].offsets[name],
                    "slice": [start, stop],
                    "crc32": checksums,
                }  # fmt: skip
            )
        tensors[name] = {"shape": held.shape, "dtype": held.dtype, "pieces": pieces}
        if shards.is_pairs(held.dtype):
            tensors[name] |= {"stored": "pairs of a real and an imaginary part, along another axis"}  # type: ignore[operator]
    files = {
        shard_name(rank, size): {"bytes": w.nbytes, "header_bytes": w.header[0], "header_crc32": w.header[1]}
        for rank, w in enumerate(written)
    }
    body: dict[str, Any] = {
        "format": _FORMAT, "version": _VERSION, "world_size": size, "block_bytes": shards.BLOCK_BYTES,
        "files": files, "tensors": tensors, "values": _values(manifests),
    }  # fmt: skip
    if all(len(slices) == 1 for slices in planned.values()):  # as Hugging Face's index of several files
        sizes = (math.prod(h.shape) * tree.of_dtype(h.dtype).itemsize for h in first.arrays.values())
        body["metadata"] = {"total_size": sum(sizes)}
        body["weight_map"] = {name: shard_name(slices[0].writer, size) for name, slices in planned.items()}
    body["crc32"] = _checksum(body)
    return _text(body)


def _text(body: Mapping[str, object]) -> str:
    """JSON with a line for each file, array and value."""

    def shown(value: object) -> str:
        if not isinstance(value, dict) or not value:
            return json.dumps(value)
        return "{\n" + ",\n".join(f"  {json.dumps(k)}: {json.dumps(v)}" for k, v in value.items()) + "\n }"

    return "{\n" + ",\n".join(f" {json.dumps(k)}: {shown(v)}" for k, v in body.items()) + "\n}\n"


def _values(manifests: Sequence[Manifest]) -> dict[str, object]:
    """The texts by name; of those that differ between ranks all."""
    found: dict[str, object] = {}
    for name in manifests[0].texts:
        values = [m.texts[name] for m in manifests]
        same = len({json.dumps(v) for v in values}) == 1
        found[name] = values[0] if same else {"ranks": values}
    return found


def _checksum(body: Mapping[str, object]) -> int:
    return crc32(json.dumps(body, sort_keys=True, separators=(",", ":")).encode())


@dataclass(frozen=True)
class Saved:
    """An array in a folder."""

    shape: tuple[int, ...]
    dtype: str
    pieces: list[Piece]


@dataclass(frozen=True)
class Index:
    """What a folder holds."""

    arrays: dict[str, Saved]
    texts: dict[str, Any]
    files: dict[str, dict[str, int]]
    block_bytes: int
    world_size: int


def parse(text: str | bytes, where: str) -> Index:
    """The index of a folder from its text.  Raises SaveError for one of another format or version, or damaged."""
    damaged = f"load: {where} is damaged: it is not the index that was saved"
    try:
        body = json.loads(text)
    except ValueError as error:
        raise SaveError(f"{damaged} ({error})") from error
    if not isinstance(body, dict) or body.get("format") != _FORMAT:
        raise SaveError(f"load: {where} is not the index of a folder that tg.distributed.save wrote")
    if body.get("version") != _VERSION:
        raise SaveError(
            f"load: {where} has version {body.get('version')!r} of the format; this tapegrad reads version {_VERSION}: "
            "load it with the tapegrad that saved it"
        )
    if body.pop("crc32", None) != _checksum(body):
        raise SaveError(damaged)
    arrays = {}
    for name, entry in body["tensors"].items():
        pieces = [Piece(p["file"], p["offset"], p["slice"][0], p["slice"][1], p["crc32"]) for p in entry["pieces"]]
        arrays[name] = Saved(tuple(entry["shape"]), entry["dtype"], pieces)
    return Index(arrays, body["values"], body["files"], body["block_bytes"], body["world_size"])
