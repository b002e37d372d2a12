"""Integer instructions on whole arrays of bits: what NumPy has no operator for (PTX ISA, sections 9.7.1 and 9.7.8)."""

from __future__ import annotations

import numpy as np

U8, U32, U64 = np.uint8, np.uint32, np.uint64


def high(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """The upper half of a product of two numbers of 32 or 64 bits, signed or not as the arrays are."""
    if a.dtype.itemsize == 4:
        wide = np.int64 if a.dtype.kind == "i" else U64
        return (a.astype(wide) * b.astype(wide) >> wide(32)).astype(a.dtype)
    x, y, low = a.view(U64), b.view(U64), U64(0xFFFFFFFF)
    half = U64(32)
    x0, x1, y0, y1 = x & low, x >> half, y & low, y >> half
    middle = x1 * y0 + (x0 * y0 >> half)
    other = x0 * y1 + (middle & low)
    out = x1 * y1 + (middle >> half) + (other >> half)
    if a.dtype.kind == "i":
        out = out - np.where(a < 0, y, U64(0)) - np.where(b < 0, x, U64(0))
    return out.view(a.dtype)


def divide(a: np.ndarray, b: np.ndarray, rest: bool = False) -> np.ndarray:
    """The quotient cut towards zero, or the rest; of a division by zero all bits are set, as devices give."""
    zero = b == 0
    safe = np.where(zero, b.dtype.type(1), b)
    if a.dtype.kind == "i":
        unsigned = a.dtype.str.replace("i", "u")
        x, y = (np.where(n < 0, -n, n).view(unsigned) for n in (a, safe))
        out = x % y if rest else x // y
        out = np.where((a < 0) if rest else (a < 0) != (safe < 0), -out, out).view(a.dtype)
    else:
        out = a % safe if rest else a // safe
    return np.where(zero, a if rest else ~a.dtype.type(0), out)


def shift(a: np.ndarray, n: np.ndarray, left: bool) -> np.ndarray:
    """Shifted by an unsigned number of places, of which those beyond the width count as the width."""
    width = 8 * a.dtype.itemsize
    count = np.minimum(n, U32(width - 1)).astype(a.dtype)
    out = a << count if left else a >> count
    if a.dtype.kind == "i" and not left:
        return out  # filled with the sign
    return np.where(n >= width, a.dtype.type(0), out)


def funnel(a: np.ndarray, b: np.ndarray, n: np.ndarray, left: bool, clamp: bool) -> np.ndarray:
    """``shf``: 32 bits of the pair b:a shifted."""
    count = (np.minimum(n, U32(32)) if clamp else n & U32(31)).astype(U64)
    both = b.astype(U64) << U64(32) | a
    return (both << count >> U64(32) if left else both >> count).astype(U32)


def permute(a: np.ndarray, b: np.ndarray, selector: np.ndarray) -> np.ndarray:
    """``prmt.b32`` in its general form."""
    both = b.astype(U64) << U64(32) | a
    out = np.zeros_like(both)
    for i in range(4):
        pick = (selector >> U32(4 * i)).astype(U64)
        byte = both >> (U64(8) * (pick & U64(7))) & U64(255)
        byte = np.where(pick & U64(8), np.where(byte & U64(128), U64(255), U64(0)), byte)
        out |= byte << U64(8 * i)
    return out.astype(U32)


def logic(a: np.ndarray, b: np.ndarray, c: np.ndarray, table: int) -> np.ndarray:
    """``lop3``: any function of three bits, by its table."""
    out = np.zeros(np.broadcast_shapes(a.shape, b.shape, c.shape), a.dtype)
    for row in range(8):
        if table >> row & 1:
            out |= (a if row & 4 else ~a) & (b if row & 2 else ~b) & (c if row & 1 else ~c)
    return out


def extract(a: np.ndarray, place: np.ndarray, length: np.ndarray) -> np.ndarray:
    """``bfe``: a field of bits, extended by its sign if the type is signed."""
    width = 8 * a.dtype.itemsize
    place, length = (place & U32(255)).astype(np.int64), (length & U32(255)).astype(np.int64)
    out = np.empty(np.broadcast_shapes(a.shape, place.shape, length.shape), a.dtype)
    for i, (x, at, count) in enumerate(zip(*(one.tolist() for one in np.broadcast_arrays(a, place, length)))):
        bits = x % (1 << width)
        field = bits >> at & (1 << count) - 1
        if a.dtype.kind == "i" and count and bits >> min(at + count - 1, width - 1) & 1:
            # Above the number's end every bit is its sign.
            field |= -1 << min(count, max(width - at, 0))
        field %= 1 << width
        out[i] = field - (1 << width) if a.dtype.kind == "i" and field >> width - 1 else field
    return out


def insert(a: np.ndarray, b: np.ndarray, place: np.ndarray, length: np.ndarray) -> np.ndarray:
    """``bfi``: the lowest bits of a in place of a field of b."""
    place, length = (n & U32(255) for n in (place, length))
    ones = ~b.dtype.type(0)
    field = ~shift(ones + np.zeros_like(b), length + np.zeros(b.shape, U32), True)
    mask = shift(field, place, True)
    return b & ~mask | shift(a + np.zeros_like(b), place, True) & mask


def leading_zeros(a: np.ndarray) -> np.ndarray:
    """``clz``."""
    out = np.full(a.shape, 8 * a.dtype.itemsize, U32)
    rest, count = a.copy(), out.copy()
    while (more := rest != 0).any():
        count = np.where(more, count - U32(1), count)
        rest >>= a.dtype.type(1)
    return count


def reverse(a: np.ndarray) -> np.ndarray:
    """``brev``."""
    width = 8 * a.dtype.itemsize
    out = np.zeros_like(a)
    for i in range(width):
        out |= (a >> a.dtype.type(i) & a.dtype.type(1)) << a.dtype.type(width - 1 - i)
    return out
