"""The index of a folder: which bytes of which file hold which elements of which array.

``plan`` decides which rank writes what, ``text_of`` describes what was written, ``parse`` reads that again.  It holds
checksums of all files, and one of itself: no byte of a folder changes unnoticed.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple
from zlib import crc32

from tapegrad.errors import SaveError
from tapegrad.saving import files
from tapegrad.saving.entries import ArrayEntry, Entry, of_json
from tapegrad.saving.files import Index, Piece, SavedArray

NAME = "index.json"
_FORMAT, _VERSION = "tapegrad-checkpoint", 1


class Part(NamedTuple):
    """What a rank has of an array."""

    shape: tuple[int, ...]
    dtype: str
    slice: tuple[int, int]


Manifest = dict[str, Any]
"""What a rank has, by name: a :class:`Part`, or a text as JSON has it."""


class Slice(NamedTuple):
    """Elements of an array that one rank writes, and which ranks have them."""

    start: int
    stop: int
    writer: int
    holders: list[int]


Plan = dict[str, list[Slice]]


Written = tuple[dict[str, int], dict[str, Piece]]
"""What an index says of the file of a rank, and a piece of each array that the rank has, whoever writes it."""


def shard_name(rank: int, size: int) -> str:
    """The name of a rank's file."""
    return f"shard-{rank:05d}-of-{size:05d}.safetensors"


def is_file_of_ours(name: str) -> bool:
    """Whether a file of this name is part of a folder."""
    return name == NAME or re.fullmatch(r"shard-\d{5,}-of-\d{5,}\.safetensors", name) is not None


def manifest(entries: Mapping[str, Entry]) -> Manifest:
    """What this rank has.  Raises SaveError for a dtype that no file can hold."""
    parts: Manifest = {}
    for name, entry in entries.items():
        if isinstance(entry, ArrayEntry):
            files.require_storable(name, entry)
            parts[name] = Part(entry.shape, entry.dtype.name, entry.slice)
        else:
            parts[name] = entry.value
    return parts


def plan(manifests: Sequence[Manifest]) -> Plan:
    """Which rank writes what: each about as many bytes, and only one what several have.  All ranks find the same.

    Raises SaveError where the ranks' trees differ, or their slices do not make up the array.
    """
    first = manifests[0]
    for rank, other in enumerate(manifests):
        for name in sorted(first.keys() | other.keys()):
            x, y = (_kind(manifest, name) for manifest in (first, other))
            if x != y:
                (has, kind), lacks = ((0, x), rank) if x else ((rank, y), 0)
                raise SaveError(f"save: rank {has} has the {kind} {name!r}, rank {lacks} has not")
            if x == "array" and first[name][:2] != other[name][:2]:
                forms = [
                    f"{part.dtype} {part.shape} on rank {r}" for r, part in ((0, first[name]), (rank, other[name]))
                ]
                raise SaveError(f"save: {name} is {', '.join(forms)}")
    slices = {name: _slices(name, manifests) for name, part in first.items() if isinstance(part, Part)}
    todo = [
        ((stop - start) * files.of_dtype(first[name].dtype).itemsize, name, start, stop, holders)
        for name, holders_of in slices.items()
        for (start, stop), holders in holders_of.items()
    ]
    loads = [0] * len(manifests)
    planned: Plan = {name: [] for name in slices}
    for nbytes, name, start, stop, holders in sorted(todo, key=lambda item: -item[0]):
        writer = min(holders, key=lambda rank: loads[rank])
        loads[writer] += nbytes
        planned[name].append(Slice(start, stop, writer, holders))
    return {name: sorted(of) for name, of in planned.items()}


def _kind(manifest: Manifest, name: str) -> str | None:
    return None if name not in manifest else "array" if isinstance(manifest[name], Part) else "value"


def _slices(name: str, manifests: Sequence[Manifest]) -> dict[tuple[int, int], list[int]]:
    """The slices of an array, each with the ranks that have it."""
    size = math.prod(manifests[0][name].shape)
    holders: dict[tuple[int, int], list[int]] = {}
    for rank, part in enumerate(manifest[name] for manifest in manifests):
        if part.slice[0] < part.slice[1] or size == 0:
            holders.setdefault(part.slice, []).append(rank)
    if not _covers(holders, size):
        listed = ", ".join(f"{start}:{stop}" for start, stop in sorted(holders)) or "none"
        raise SaveError(f"save: the slices of {name} do not make up its {size} elements: {listed}")
    return holders


def _covers(slices: Any, size: int) -> bool:
    """Whether slices make up ``size`` elements, without gaps or overlaps."""
    at = 0
    for start, stop in sorted(slices):
        if start != at:
            return False
        at = stop
    return at == size


def text_of(manifests: Sequence[Manifest], planned: Plan, written: Sequence[Written]) -> str:
    """The text of the index.  Raises SaveError where ranks that should have the same elements have others."""
    size, first, parts = len(manifests), manifests[0], [pieces for _, pieces in written]
    tensors: dict[str, dict[str, Any]] = {}
    for name, slices in planned.items():
        pieces = [parts[s.writer][name] for s in slices]
        for (_, _, writer, holders), piece in zip(slices, pieces):
            for rank in holders:
                if parts[rank][name].crc32 != piece.crc32:
                    raise SaveError(
                        f"save: {name} is not the same on ranks {writer} and {rank}; make it so (broadcast), or give "
                        "it as a sharded value"
                    )
        tensors[name] = {
            "shape": first[name].shape, "dtype": first[name].dtype, "pieces": [piece._asdict() for piece in pieces],
        }  # fmt: skip
        if first[name].dtype == files.PAIRS:
            tensors[name]["stored"] = "pairs of a real and an imaginary part, along another axis"
    values = {name: _text([m[name] for m in manifests]) for name in first if name not in planned}
    body: dict[str, Any] = {
        "format": _FORMAT, "version": _VERSION, "world_size": size, "block_bytes": files.BLOCK_BYTES,
        "files": {shard_name(rank, size): file for rank, (file, _) in enumerate(written)},
        "tensors": tensors, "values": values,
    }  # fmt: skip
    if all(len(slices) == 1 for slices in planned.values()):  # as Hugging Face's index of several files
        sizes = (math.prod(first[name].shape) * files.of_dtype(first[name].dtype).itemsize for name in planned)
        body["metadata"] = {"total_size": sum(sizes)}
        body["weight_map"] = {name: shard_name(slices[0].writer, size) for name, slices in planned.items()}
    body["crc32"] = _checksum(body)
    return json.dumps(body, indent=1) + "\n"


def _text(values: list[object]) -> object:
    """A text of all ranks: one value, or one of each rank if they differ."""
    return values[0] if len({json.dumps(v) for v in values}) == 1 else {"ranks": values}


def _checksum(body: Mapping[str, object]) -> int:
    return crc32(json.dumps(body, sort_keys=True, separators=(",", ":")).encode())


def parse(text: str | bytes, folder: str, path: str) -> Index:
    """The index of a folder from its text; ``path`` is its name in messages.

    Raises SaveError for one of another format or version, or damaged.
    """
    damaged = f"load: {path} is damaged: it is not the index that was saved"
    try:
        body = json.loads(text)
        if not isinstance(body, dict) or body.get("format") != _FORMAT:
            raise SaveError(f"load: {path} is not the index of a folder that tg.distributed.save wrote")
        if body.get("version") != _VERSION:
            raise SaveError(
                f"load: {path} has version {body.get('version')!r} of the format; this tapegrad reads version "
                f"{_VERSION}: load it with the tapegrad that saved it"
            )
        if body.pop("crc32", None) != _checksum(body):
            raise SaveError(damaged)
        entries: dict[str, Any] = {name: _array(entry, body) for name, entry in body["tensors"].items()}
        for value in body["values"].values():
            of_each = value.get("ranks") if isinstance(value, dict) else None
            _require(of_each is None or len(of_each) == body["world_size"])
            for one in [value] if of_each is None else of_each:
                of_json(one)
        return Index(folder, entries | body["values"], body["files"], body["block_bytes"], body["world_size"])
    except SaveError:
        raise
    except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError) as error:
        raise SaveError(f"{damaged} ({error})") from error


def _array(entry: dict[str, Any], body: dict[str, Any]) -> SavedArray:
    """An array of the index ``body``.  Raises ValueError for one that its files cannot hold."""
    dtype, shape = entry["dtype"], tuple(entry["shape"])
    pieces = [Piece(p["file"], p["offset"], (p["slice"][0], p["slice"][1]), p["crc32"]) for p in entry["pieces"]]
    _require(files.is_storable(dtype) and _covers([p.slice for p in pieces], math.prod(shape)))
    for piece in pieces:
        nbytes, file = (piece.slice[1] - piece.slice[0]) * files.of_dtype(dtype).itemsize, body["files"][piece.file]
        _require(is_file_of_ours(piece.file) and len(piece.crc32 or []) == -(-nbytes // body["block_bytes"]))
        _require(0 <= file["header_bytes"] <= piece.offset <= file["bytes"] - nbytes and "header_crc32" in file)
    return SavedArray(shape, dtype, pieces)


def _require(valid: bool) -> None:
    if not valid:
        raise ValueError("its parts contradict each other")
