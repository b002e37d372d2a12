"""Launching the CUDA kernels of attention (``kernels/attention.cu`` says how a block goes about it)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

from tapegrad.core.aval import Shape
from tapegrad.device import cxx
from tapegrad.device.dtypes import accumulator, bool_
from tapegrad.device.kernel import Kernel
from tapegrad.device.numerics.attention import Weighting
from tapegrad.device.tally import contiguous, passed, spread
from tapegrad.device.types import Array, DType
from tapegrad.errors import ShapeError

if TYPE_CHECKING:
    from tapegrad.device.cuda import CudaDevice

_forward = Kernel("attention.cu", "tg_attention")
_jvp = Kernel("attention.cu", "tg_attention_jvp")
_vjp_q = Kernel("attention.cu", "tg_attention_vjp_q")
_vjp_kv = Kernel("attention.cu", "tg_attention_vjp_kv")
_vjp_mask = Kernel("attention.cu", "tg_attention_vjp_mask")

WIDEST = 256
"""The width of heads that a block's shared memory holds."""
_THREADS, _X = 128, 16
_MOST_SHARED = 99 * 1024
"""Bytes of shared memory that a block may ask for on every device from compute capability 8.0 on."""

_LIES = (
    ("q", "i8", 3), ("k", "i8", 3), ("v", "i8", 3), ("g", "i8", 3), ("u", "i8", 4), ("mask", "i8", 4), ("n", "i8"),
    ("t", "i4"), ("s", "i4"), ("heads", "i4"), ("groups", "i4"), ("width", "i4"), ("features", "i4"),
    ("key", "u8", 2), ("counter", "u8"), ("scale", "f8"), ("inflation", "f8"), ("threshold", "i8"),
    ("causal", "i4"), ("masked", "i4"), ("mean", "i4"), ("of", "i4"), ("pulled", "i4"),
)  # fmt: skip
"""``tg_lies``: steps are in elements."""


class _Tile(NamedTuple):
    """Queries and keys of a block, and its bytes of shared memory."""

    rows: int
    cols: int
    shared: int


def _padded(n: int) -> int:
    return max(_X, -(-n // _X) * _X)


def _tile(kernel: Kernel, width: int, features: int, itemsize: int, drop: bool) -> _Tile:
    """The largest tile whose sums stay in registers and whose operands fit into shared memory."""
    pad = 16 // itemsize
    k, w = _padded(width) + pad, _padded(features) + pad
    sums = 4096 * 4 // itemsize  # 32 float32 of each thread
    for rows, cols in ((64, 32), (32, 32), (32, 16), (16, 16), (8, 16)):
        if kernel is _forward:
            elements, held = rows * k + cols * max(k, w) + rows * (cols + 1), rows * _padded(features)
        elif kernel is _jvp:
            elements = (rows + max(rows, cols)) * k + cols * max(k, w) + 2 * rows * (cols + 1)
            held = 2 * rows * _padded(features)
        else:
            elements = (rows + cols) * (k + w) + 2 * rows * (cols + 1)
            both = cols * (_padded(width) + _padded(features)) // 2
            held = max(rows * _padded(width), both if itemsize == 4 or rows > 8 else 0)
        most = 64 if itemsize == 4 and kernel in (_forward, _vjp_kv) else 16 if itemsize == 8 and drop else 32
        if rows > most:
            continue
        if held <= sums and elements * itemsize <= _MOST_SHARED:
            break
    return _Tile(rows, cols, elements * itemsize)


def _steps(x: Array, own: int) -> list[int] | None:
    """Steps in elements along the axes in front, as one, and along all but the last; None: they do not join."""
    size = x.itemsize
    if x.shape[-1] > 1 and x.strides[-1] != size or any(step % size or step < 0 for step in x.strides):
        return None
    steps = [step // size for step in x.strides]
    front = [(n, step) for n, step in zip(x.shape[:-own], steps[:-own], strict=True) if n != 1]
    if any(outer != n * step for (_, outer), (n, step) in pairwise(front)):
        return None
    return [front[-1][1] if front else 0, *steps[-own:]]


class _Call:
    """One application: its operands as a kernel reads them, and what all its kernels are told."""

    def __init__(self, device: CudaDevice, q: Array, k: Array, v: Array, mask: Array, how: Weighting) -> None:
        self.device, self.how = device, how
        *lead, t, heads, width = q.shape
        s, groups, features = v.shape[-3:]
        self.lead: Shape = tuple(lead)
        if max(width, features) > WIDEST:
            raise ShapeError(f"attention: on CUDA heads are at most {WIDEST} wide, got {width} and {features}")
        self.lies: Any = cxx.structure(_LIES)
        numbers = {
            "n": prod(lead), "t": t, "s": s, "heads": heads, "groups": groups, "width": width, "features": features,
            "scale": how.scale, "inflation": how.inflation, "threshold": how.threshold, "causal": how.causal,
            "mean": how.blind == "mean", "masked": ("none", "see", "add").index(how.masked),
        }  # fmt: skip
        for name, number in numbers.items():
            self.lies[name] = number
        self.q, self.k, self.v = (self.matrices(n, x) for n, x in (("q", q), ("k", k), ("v", v)))
        self.mask = self.q if how.masked == "none" else self.numbers("mask", mask)
        self.macros = {
            "T": q.dtype, "M": mask.dtype if how.masked == "add" else bool_, "DROP": int(how.p > 0),
            "KD": _padded(width), "WD": _padded(features),
        }  # fmt: skip
        self.itemsize = accumulator(q.dtype).itemsize

    def matrices(self, name: str, x: Array) -> Array:
        """(..., t, h, k) with its steps noted; copied if axes in front do not join or rows do not lie in order."""
        steps = _steps(x, 3)
        if steps is None:
            x = contiguous(self.device.xp, x)
            steps = _steps(x, 3)
            assert steps is not None
        self.lies[name] = steps[:3]
        return x

    def numbers(self, name: str, x: Array) -> Array:
        """A mask (..., h or 1, t or 1, s or 1) with its steps noted, 0 where it broadcasts."""
        if self.mixed(x):
            x = spread(self.device.xp, x, (*self.lead, *x.shape[-3:]))
        steps = _steps(x, 3)
        if steps is None:
            x = contiguous(self.device.xp, x)
            steps = _steps(x, 3)
            assert steps is not None
        axes = (prod(x.shape[:-3]), *x.shape[-3:])
        self.lies[name] = [0 if n == 1 else step for n, step in zip(axes, steps, strict=True)]
        return x

    def mixed(self, x: Array) -> bool:
        """Whether some, but not all axes in front of a mask broadcast."""
        return x.shape[:-3] != self.lead and any(n != 1 for n in x.shape[:-3])

    def draws(self, key: int, counter: int) -> None:
        """Where the random numbers come from."""
        self.lies["key"], self.lies["counter"] = (key % 2**64, key >> 64), counter

    def run(self, kernel: Kernel, blocks: Callable[[_Tile], int], *args: Any) -> None:
        """Launch a kernel on as many blocks as ``blocks`` says for its tile."""
        lies = self.lies
        tile = _tile(kernel, int(lies["width"]), int(lies["features"]), self.itemsize, self.how.p > 0)
        count = blocks(tile)
        if count:
            named = {**self.macros, "ROWS": tile.rows, "COLS": tile.cols}
            kernel(self.device, count, _THREADS, (*args, lies), shared=tile.shared, **named)

    def of_queries(self, tile: _Tile) -> int:
        """Blocks for tiles of queries."""
        return int(self.lies["n"] * self.lies["heads"]) * -(-int(self.lies["t"]) // tile.rows)

    def of_keys(self, tile: _Tile) -> int:
        """Blocks for tiles of keys."""
        return int(self.lies["n"] * self.lies["groups"]) * -(-int(self.lies["s"]) // tile.cols)


def forward(
    device: CudaDevice, q: Array, k: Array, v: Array, mask: Array, *, out: Array, how: Weighting, key: int, counter: int
) -> None:
    """``softmax(q k' scale) v`` of each head."""
    if not out.size:
        return
    if not k.shape[-3]:
        out.fill(0)
        return
    call = _Call(device, q, k, v, mask, how)
    call.draws(key, counter)
    call.run(_forward, call.of_queries, call.q, call.k, call.v, call.mask, out)


def tangent(
    device: CudaDevice, q: Array, k: Array, v: Array, mask: Array, u: Array, *, out: Array, how: Weighting, key: int,
    counter: int, of: int,
) -> None:  # fmt: skip
    """The derivative along the tangent ``u`` of operand number ``of``."""
    if not out.size:
        return
    if not k.shape[-3]:
        out.fill(0)
        return
    call = _Call(device, q, k, v, mask, how)
    call.draws(key, counter)
    call.lies["of"] = of
    if of == 3:
        u = call.numbers("u", u)
    else:
        u = call.matrices("g", u)
        call.lies["u"][:3] = call.lies["g"]
    call.run(_jvp, call.of_queries, call.q, call.k, call.v, call.mask, u, out)


def temporaries(aval: Any, q: Array, *rest: Array, **params: object) -> Sequence[tuple[Shape, DType]]:
    """What the derivative keeps of each row: its largest score, 1 over its sum, the mean of its cotangents."""
    return [((prod(q.shape[:-1]), 3), accumulator(q.dtype))]


def backward(
    device: CudaDevice, q: Array, k: Array, v: Array, mask: Array, g: Array, *, out: Array, how: Weighting, key: int,
    counter: int, pulled: tuple[int, ...], temporaries: Sequence[Array] = (),
) -> None:  # fmt: skip
    """The cotangents of the operands ``pulled``, one after the other in ``out``."""
    if not out.size:
        return
    if not g.size or not k.shape[-3]:
        out.fill(0)
        return
    call = _Call(device, q, k, v, mask, how)
    call.draws(key, counter)
    g = call.matrices("g", g)
    call.lies["pulled"] = sum(1 << i for i in pulled)
    parts, place = [out[:0]] * 4, 0
    for i in pulled:
        size = (q, k, v, mask)[i].size
        parts[i] = out[place : place + size]
        place += size
    rows = temporaries[0] if temporaries else device.empty((prod(q.shape[:-1]), 3), accumulator(q.dtype))
    operands = (call.q, call.k, call.v, call.mask, g)
    call.run(_vjp_q, call.of_queries, *operands, parts[0], rows)
    read = sum(x.nbytes for x in (call.q, call.k, call.v, g)) + rows.nbytes
    written = rows.nbytes  # by the first kernel
    if 1 in pulled or 2 in pulled:
        passed(read, written)
        written = 0
        call.run(_vjp_kv, call.of_keys, *operands, rows, parts[1], parts[2])
    if 3 in pulled:
        passed(read, written)
        _pull_mask(call, mask, operands, rows, parts[3])


def _pull_mask(call: _Call, mask: Array, operands: tuple[Array, ...], rows: Array, out: Array) -> None:
    """The cotangent of the numbers that were added to scores."""
    lies, (h, t, s) = call.lies, mask.shape[-3:]
    mixed = call.mixed(mask)
    n = prod(call.lead) if mixed else prod(mask.shape[:-3])
    steps = [h * t * s, t * s, s, 1]
    lies["u"] = [0 if m == 1 else step for m, step in zip((n, h, t, s), steps, strict=True)]

    def blocks(tile: _Tile) -> int:
        return n * h * (1 if t == 1 else -(-t // tile.rows)) * (1 if s == 1 else -(-s // tile.cols))

    if not mixed:
        call.run(_vjp_mask, blocks, *operands, rows, out)
        return
    whole = call.device.empty((*call.lead, h, t, s), out.dtype)
    call.run(_vjp_mask, blocks, *operands, rows, whole)
    axes = tuple(i for i, (a, b) in enumerate(zip(mask.shape, whole.shape)) if a != b)
    if call.device.xp is not None:
        total = call.device.xp.sum(whole, axis=axes, dtype=rows.dtype)
        call.device.xp.copyto(out, total.reshape(-1), casting="same_kind")
