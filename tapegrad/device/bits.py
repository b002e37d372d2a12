"""Random bits: counter-based Philox4x64-10, and the state of NumPy's and Python's own generators."""

from __future__ import annotations

import hashlib
import random
from math import prod
from typing import Any

import numpy as np

from tapegrad.device.pool import POOL


def philox(key: int, counter: int, words: int) -> Any:
    """``words`` 64-bit words of the Philox4x64-10 stream of ``key`` from 256-bit block number ``counter`` on.

    Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011.  NumPy's Philox is the generator.
    """
    return np.random.Philox(key=key, counter=counter).random_raw(words)


def uniform(key: int, counter: int, shape: tuple[int, ...], dtype: Any) -> Any:
    """Uniform floats in [0, 1): the top 53 bits of a word for float64, 24 bits of a half word for float32."""
    out = POOL.empty(shape, dtype)
    if dtype == np.float64:
        words = philox(key, counter, out.size)
        words >>= np.uint64(11)
        np.multiply(words.reshape(shape), 2.0**-53, out=out)
    else:
        words = philox(key, counter, (out.size + 1) // 2).view(np.uint32)[: out.size]
        words >>= np.uint32(8)
        np.multiply(words.reshape(shape), np.float32(2.0**-24), out=out, casting="unsafe", dtype=np.float32)
    return out


LANES, WORDS, FIELDS = 256, 4, 4
"""Sixteen-bit numbers come in tiles: 256 lanes (threads) beside each other, each with the 4 words of one Philox block,
each word with 4 fields.  Element ``i`` is field ``i % 4`` of word ``i / 1024 % 4`` of lane ``i / 4 % 256`` of tile
``i / 4096``, so a thread that walks a tile word by word reads and writes beside its neighbours."""


def blocks16(shape: tuple[int, ...]) -> int:
    """How many Philox blocks :func:`bits16` uses up."""
    return -(-prod(shape) // (LANES * WORDS * FIELDS)) * LANES


def bits16(key: int, counter: int, shape: tuple[int, ...]) -> Any:
    """Uniform numbers of 16 bits, four to a word, in the order of ``LANES``."""
    size = prod(shape)
    words = philox(key, counter, blocks16(shape) * WORDS).reshape(-1, LANES, WORDS)
    fields = np.ascontiguousarray(words.transpose(0, 2, 1)).view("<u2").reshape(-1)
    return fields[:size].reshape(shape)


def host_state() -> tuple:
    """The state of NumPy's global generator and of Python's ``random``."""
    return np.random.get_state(legacy=False), random.getstate()


def same_host_state(a: tuple, b: tuple) -> bool:
    """Whether nothing was drawn between two states."""
    s, t = a[0]["state"], b[0]["state"]
    same = s["pos"] == t["pos"] and a[0]["has_gauss"] == b[0]["has_gauss"] and np.array_equal(s["key"], t["key"])
    return bool(same) and a[1] == b[1]


def set_host_state(state: tuple) -> None:
    """Set both generators to ``state``."""
    np.random.set_state(state[0])
    random.setstate(state[1])


def checksum(x: Any) -> bytes:
    """A checksum of an array's bits."""
    octets: Any = np.ascontiguousarray(x).reshape(-1).view(np.uint8)
    return hashlib.blake2b(octets, digest_size=16).digest()
