"""Safetensors files, written and read piece by piece, with a checksum of every block of bytes.

The format is a length (8 bytes), a header in JSON and the bytes of the arrays.  It is written here and not by the
package safetensors, which needs all arrays at once and reads no range of a flattened one; so nothing need be installed.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple
from zlib import crc32

from tapegrad.device import CPU, dtypes
from tapegrad.device.types import Array, DType
from tapegrad.errors import SaveError
from tapegrad.saving.disk import sync, system_errors
from tapegrad.saving.entries import ArrayEntry
from tapegrad.saving.together import Rounds

BLOCK_BYTES = 4 << 20
"""Bytes of one checksum: reading a range reads whole blocks."""
ROUND_BYTES = 1 << 30
"""Bytes after which ranks that write or read meet."""

_CODES = {
    "bool": "BOOL", "uint8": "U8", "int8": "I8", "uint16": "U16", "int16": "I16", "uint32": "U32", "int32": "I32",
    "uint64": "U64", "int64": "I64", "float16": "F16", "bfloat16": "BF16", "float32": "F32", "float64": "F64",
    "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2", "complex64": "C64",
}  # fmt: skip
_NAMES = {code: name for name, code in _CODES.items()}
PAIRS = "complex128"
"""The dtype that safetensors lacks: its numbers are pairs of float64 along another axis, the last."""


class Piece(NamedTuple):
    """Consecutive elements of an array in a file."""

    file: str
    offset: int
    slice: tuple[int, int]
    """Of all elements in C order."""
    crc32: list[int] | None
    """Of each block; None: unknown."""


class SavedArray(NamedTuple):
    """An array in files."""

    shape: tuple[int, ...]
    dtype: str
    pieces: list[Piece]


class Index(NamedTuple):
    """The contents of a folder, or of a file."""

    folder: str
    entries: dict[str, Any]
    """Arrays (:class:`SavedArray`), and texts as JSON has them."""
    files: dict[str, dict[str, int]]
    """Of each file ``bytes``, ``header_bytes`` and ``header_crc32``; without those of a file it is not checked."""
    block_bytes: int
    world_size: int


def is_storable(dtype: str) -> bool:
    """Whether files can hold arrays of this dtype."""
    return dtype in _CODES or dtype == PAIRS


def require_storable(name: str, array: ArrayEntry) -> None:
    """Raise SaveError for an array of a dtype that no file can hold."""
    if not is_storable(array.dtype.name):
        raise SaveError(f"{name}: safetensors cannot hold {array.dtype.name}; convert it")


def write(
    path: str, arrays: Mapping[str, ArrayEntry], metadata: dict[str, str], advance: Callable[[int], object]
) -> Rounds[tuple[dict[str, int], dict[str, Piece]]]:
    """Write arrays to a new file, and wait until they are on the disk; what an index says of the file, its pieces.

    Raises OSError, SaveError.
    """
    names = sorted(arrays, key=lambda name: (-arrays[name].dtype.itemsize, name))  # so each is aligned to its elements
    header = _header({name: arrays[name] for name in names}, metadata)
    pieces: dict[str, Piece] = {}
    done = 0
    with open(path, "xb") as file:
        file.write(header)
        for name in names:
            checksums: list[int] = []
            pieces[name] = Piece(os.path.basename(path), file.tell(), arrays[name].slice, checksums)
            for block in blocks(arrays[name].read()):
                checksums.append(crc32(block))
                file.write(block)
                advance(len(block))
                done += len(block)
                if done >= ROUND_BYTES:
                    done = 0
                    sync(file)
                    yield
        sync(file)
        return {"bytes": file.tell(), "header_bytes": len(header), "header_crc32": crc32(header)}, pieces


def blocks(x: Array) -> Iterator[memoryview]:
    """The bytes of a contiguous array, block by block."""
    data = x.reshape(-1).view(CPU.xp.uint8)
    for i in range(0, data.size, BLOCK_BYTES):
        yield data[i : i + BLOCK_BYTES].data


def _header(arrays: Mapping[str, ArrayEntry], metadata: dict[str, str]) -> bytes:
    """The bytes before those of the arrays."""
    pairs = [name for name, array in arrays.items() if array.dtype.name == PAIRS]
    entries: dict[str, object] = {"__metadata__": {**metadata, **({PAIRS: json.dumps(pairs)} if pairs else {})}}
    end = 0
    for name, array in arrays.items():
        require_storable(name, array)
        begin, end = end, end + array.nbytes
        size = array.slice[1] - array.slice[0]
        shape = [*array.shape] if size == math.prod(array.shape) else [size]
        code = _CODES.get(array.dtype.name, "F64")
        shape += [2] if array.dtype.name == PAIRS else []
        entries[name] = {"dtype": code, "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def index_of(path: str) -> tuple[Index, dict[str, Any]]:
    """What a safetensors file holds, whoever wrote it, and its metadata.

    Raises OSError, SaveError for one that is not complete.
    """
    folder, file_name = os.path.split(path)
    entries: dict[str, Any] = {}
    with open(path, "rb") as file:
        nbytes = os.fstat(file.fileno()).st_size
        length = int.from_bytes(file.read(8), "little")
        text = file.read(min(length, nbytes))
    try:
        header = json.loads(text)
        metadata = header.pop("__metadata__", {})
        pairs = json.loads(metadata.get(PAIRS, "[]"))
        at = 8 + length
        for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
            shape, size = tuple(entry["shape"]), entry["data_offsets"][1] - entry["data_offsets"][0]
            dtype = _NAMES.get(entry["dtype"], entry["dtype"])  # one that NumPy lacks fits no array
            if name in pairs:
                shape, dtype = shape[:-1], PAIRS
            if is_storable(dtype):
                size = math.prod(shape) * of_dtype(dtype).itemsize
            if entry["data_offsets"] != [at - 8 - length, at - 8 - length + size] or not all(
                type(n) is int and n >= 0 for n in (*shape, size)
            ):
                raise ValueError(f"{name} has other bytes than its shape")
            entries[name] = SavedArray(shape, dtype, [Piece(file_name, at, (0, math.prod(shape)), None)])
            at += size
        if at != nbytes:
            raise ValueError(f"it has {nbytes} bytes in place of {at}")
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError) as error:
        raise SaveError(f"load: {path} is not a complete safetensors file: {error}; save it again") from error
    return Index(folder, entries, {}, BLOCK_BYTES, 1), metadata


def of_dtype(name: str) -> DType:
    """The dtype of that name."""
    return dtypes.asdtype(name)


class Reader:
    """Reads ranges of the arrays of an index, and checks every block of which it reads a part."""

    def __init__(self, index: Index, advance: Callable[[int], object] = lambda nbytes: None) -> None:
        self._index, self._advance = index, advance
        self._unchecked = dict(index.files)

    def read(self, name: str, start: int, stop: int) -> Array:
        """The elements from ``start`` to ``stop`` of an array: a NumPy array of one dimension.

        Raises SaveError for a file that is not as it was written, SaveFileError for one that cannot be read.
        """
        saved = self._index.entries[name]
        dtype = of_dtype(saved.dtype)
        out = CPU.xp.empty(stop - start, dtype)
        data, size = out.view(CPU.xp.uint8), dtype.itemsize
        for piece in saved.pieces:
            first, last = max(start, piece.slice[0]), min(stop, piece.slice[1])
            if first < last:
                path = os.path.join(self._index.folder, piece.file)
                with system_errors("load", path), open(path, "rb", buffering=0) as file:
                    self._check(file, path, piece.file)
                    within = (first - piece.slice[0]) * size, (last - piece.slice[0]) * size
                    self._read(file, path, name, piece, size, *within, data[(first - start) * size :])
        return out

    def _read(self, file: Any, path: str, name: str, piece: Piece, size: int, begin: int, end: int, out: Array) -> None:
        """Read the bytes from ``begin`` to ``end`` of a piece to the beginning of ``out``."""
        length, nbytes = self._index.block_bytes, (piece.slice[1] - piece.slice[0]) * size
        for number in range(begin // length, -(-end // length)):
            low, high = number * length, min((number + 1) * length, nbytes)
            a, b = max(low, begin), min(high, end)
            into = out[a - begin : b - begin]
            block = into if (a, b) == (low, high) else CPU.xp.empty(high - low, CPU.xp.uint8)
            file.seek(piece.offset + low)
            _fill(file, block, path)
            if piece.crc32 is not None and crc32(block.data) != piece.crc32[number]:
                raise SaveError(
                    f"load: {path}: {name} is damaged: the bytes from {piece.offset + low} to {piece.offset + high} "
                    "are not those that were saved"
                )
            if block is not into:
                into[...] = block[a - low : b - low]
            self._advance(b - a)

    def _check(self, file: Any, path: str, name: str) -> None:
        """Check the length and the header of a file, once."""
        expected = self._unchecked.pop(name, None)
        if expected is None:
            return
        nbytes = os.fstat(file.fileno()).st_size
        if nbytes != expected["bytes"]:
            raise SaveError(f"load: {path} has {nbytes} bytes, but was saved with {expected['bytes']}; copy it again")
        header = CPU.xp.empty(expected["header_bytes"], CPU.xp.uint8)
        _fill(file, header, path)
        if crc32(header.data) != expected["header_crc32"]:
            raise SaveError(f"load: {path} is damaged: its header is not the one that was saved")


def _fill(file: Any, into: Array, path: str) -> None:
    """Read as many bytes as ``into`` has.  Raises SaveError where the file ends before."""
    done = 0
    while done < into.size:
        n = file.readinto(into[done:])
        if not n:
            raise SaveError(f"load: {path} ends too early; copy it again")
        done += n
