"""Shards: safetensors files, written and read piece by piece, with a checksum of every block of bytes.

The format is a length (8 bytes), a header in JSON and the bytes of the arrays.  It is written here and not by the
package safetensors, which wants all arrays at once and reads no range of a flattened one; so nothing need be installed.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import IO, Any
from zlib import crc32

from tapegrad.device import CPU
from tapegrad.device.types import Array, DType
from tapegrad.distributed.saving.together import Rounds
from tapegrad.errors import SaveError
from tapegrad.nn.layers.saving import of_system

BLOCK_BYTES = 4 << 20
"""Bytes that one checksum is of: who reads a range reads whole blocks."""
ROUND_BYTES = 1 << 30
"""Bytes after which ranks that write or read hear of each other."""

_STORED = {
    "bool": "BOOL", "uint8": "U8", "int8": "I8", "uint16": "U16", "int16": "I16", "uint32": "U32", "int32": "I32",
    "uint64": "U64", "int64": "I64", "float16": "F16", "bfloat16": "BF16", "float32": "F32", "float64": "F64",
    "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2",
}  # fmt: skip
_PAIRS = {"complex64": "F32", "complex128": "F64"}
"""Safetensors has no complex numbers: they are pairs of real ones along another axis, the last."""


def require_storable(name: str, dtype: DType) -> None:
    """Raises SaveError for a dtype that no file can hold."""
    if dtype.name not in _STORED and dtype.name not in _PAIRS:
        raise SaveError(f"{name}: safetensors cannot hold {dtype.name}; convert it")


def is_pairs(dtype: str) -> bool:
    """Whether numbers of this dtype are stored as pairs of real ones."""
    return dtype in _PAIRS


@dataclass(frozen=True)
class Row:
    """An array to be written: its name, its dtype, its shape in the file."""

    name: str
    dtype: DType
    shape: tuple[int, ...]
    read: Callable[[], Array]

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return self.dtype.itemsize * math.prod(self.shape)


@dataclass(frozen=True)
class Written:
    """A file that is on the disk."""

    nbytes: int
    header: tuple[int, int]
    """Bytes before the arrays, and their checksum."""
    offsets: dict[str, int]
    """Where each array begins, from the beginning of the file."""
    checksums: dict[str, list[int]]


def write(path: str, rows: list[Row], advance: Callable[[int], object]) -> Rounds[Written]:
    """Write arrays to a new file, and wait until they are on the disk.

    Raises OSError, and what ``read`` raises.
    """
    rows = sorted(rows, key=lambda row: (-row.dtype.itemsize, row.name))  # so each is aligned to its elements
    header, end = _header(rows)
    offsets: dict[str, int] = {}
    checksums: dict[str, list[int]] = {}
    with open(path, "xb") as file:
        file.write(header)
        for row in rows:
            offsets[row.name] = file.tell()
            checksums[row.name] = []
            for block in blocks(row.read()):
                checksums[row.name].append(crc32(block))
                file.write(block)
                advance(len(block))
                if file.tell() // ROUND_BYTES > (file.tell() - len(block)) // ROUND_BYTES:
                    sync(file)
                    yield
        sync(file)
    return Written(len(header) + end, (len(header), crc32(header)), offsets, checksums)


def sync(file: IO[Any]) -> None:
    """Wait until what was written to a file is on the disk."""
    file.flush()
    os.fsync(file.fileno())


def blocks(x: Array) -> Iterator[memoryview]:
    """The bytes of a contiguous array, block by block."""
    data = x.reshape(-1).view(CPU.xp.uint8)
    for i in range(0, data.size, BLOCK_BYTES):
        yield data[i : i + BLOCK_BYTES].data


def _header(rows: list[Row]) -> tuple[bytes, int]:
    """What precedes the arrays, and how many bytes they take."""
    entries: dict[str, object] = {"__metadata__": {"format": "tapegrad-2"}}
    end = 0
    for row in rows:
        begin, end = end, end + row.nbytes
        pairs = is_pairs(row.dtype.name)
        stored = _PAIRS[row.dtype.name] if pairs else _STORED[row.dtype.name]
        shape = [*row.shape, 2] if pairs else [*row.shape]
        entries[row.name] = {"dtype": stored, "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, end


@dataclass(frozen=True)
class Piece:
    """Consecutive elements of an array in a file."""

    file: str
    offset: int
    start: int
    """The first of them, of all in C order."""
    stop: int
    checksums: list[int]


class Reader:
    """Reads ranges of the files of a folder, and checks every block of which it reads a part."""

    def __init__(
        self, folder: str, files: Mapping[str, Mapping[str, Any]], block_bytes: int, advance: Callable[[int], object]
    ) -> None:
        self._folder, self._files, self._block, self._advance = folder, files, block_bytes, advance
        self._checked: set[str] = set()

    def read(self, name: str, dtype: DType, pieces: list[Piece], start: int, stop: int) -> Array:
        """The elements from ``start`` to ``stop`` of an array: a NumPy array of one dimension.

        Raises SaveError for a file that is not as it was written, SaveFileError for one that cannot be read.
        """
        out = CPU.xp.empty(stop - start, dtype)
        data = out.view(CPU.xp.uint8)
        size = dtype.itemsize
        for piece in pieces:
            first, last = max(start, piece.start), min(stop, piece.stop)
            if first < last:
                path = os.path.join(self._folder, piece.file)
                try:
                    self._read(
                        path, name, piece, size, first, last, data[(first - start) * size : (last - start) * size]
                    )
                except OSError as error:
                    raise error if isinstance(error, SaveError) else of_system("load", path, error) from error
        return out

    def _read(self, path: str, name: str, piece: Piece, size: int, first: int, last: int, out: Array) -> None:
        begin, end = (first - piece.start) * size, (last - piece.start) * size
        all_bytes = (piece.stop - piece.start) * size
        with open(path, "rb", buffering=0) as file:
            self._check(path, piece.file, file)
            for number in range(begin // self._block, -(-end // self._block)):
                low = number * self._block
                high = min(low + self._block, all_bytes)
                inside = begin <= low and high <= end
                block = out[low - begin : high - begin] if inside else CPU.xp.empty(high - low, CPU.xp.uint8)
                file.seek(piece.offset + low)
                _fill(file, block, path)
                if crc32(block.data) != piece.checksums[number]:
                    raise SaveError(
                        f"load: {path}: {name} is damaged: the bytes from {piece.offset + low} to "
                        f"{piece.offset + high} are not those that were saved"
                    )
                if not inside:
                    a, b = max(low, begin), min(high, end)
                    out[a - begin : b - begin] = block[a - low : b - low]
                self._advance(high - low)

    def _check(self, path: str, name: str, file: Any) -> None:
        """The length and the header of a file, once."""
        if name in self._checked:
            return
        known = self._files[name]
        nbytes = os.fstat(file.fileno()).st_size
        if nbytes != known["bytes"]:
            raise SaveError(f"load: {path} has {nbytes} bytes, but was saved with {known['bytes']}; copy it again")
        header = CPU.xp.empty(known["header_bytes"], CPU.xp.uint8)
        _fill(file, header, path)
        if crc32(header.data) != known["header_crc32"]:
            raise SaveError(f"load: {path} is damaged: its header is not the one that was saved")
        self._checked.add(name)


def _fill(file: Any, into: Array, path: str) -> None:
    """Read as many bytes as ``into`` has.  Raises SaveError where the file ends before."""
    done = 0
    while done < into.size:
        n = file.readinto(into[done:])
        if not n:
            raise SaveError(f"load: {path} ends too early; copy it again")
        done += n
