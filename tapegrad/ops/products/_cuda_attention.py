"""Launching the CUDA kernels of attention (``kernels/attention.cuh`` says how their blocks go about it)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import pairwise
from math import prod
from typing import TYPE_CHECKING, Any

from tapegrad.core.aval import Shape
from tapegrad.device import cuda_types
from tapegrad.device.dtypes import accumulator, bool_, float32
from tapegrad.device.kernel import Kernel
from tapegrad.device.numerics.attention import nothing, slices, statistics_shape
from tapegrad.device.numerics.attention_cut import Weighting
from tapegrad.device.traffic import contiguous, passed, spread
from tapegrad.device.types import Array, DType
from tapegrad.errors import ShapeError
from tapegrad.ops.products._attention_tiles import THREADS, Numbers, Plan, padded, tile

if TYPE_CHECKING:
    from tapegrad.device.cuda import CudaDevice

_forward = Kernel("attention.cu", "tg_attention")
_jvp = Kernel("attention_jvp.cu", "tg_attention_jvp")
_vjp_q = Kernel("attention_vjp_q.cu", "tg_attention_vjp_q")
_vjp_kv = Kernel("attention_vjp_kv.cu", "tg_attention_vjp_kv")
_vjp_mask = Kernel("attention_vjp_mask.cu", "tg_attention_vjp_mask")

WIDEST = 256
"""The width of heads that a block's shared memory holds."""

_MOST_LAYOUTS = 256
"""Of which the steps are known: each step of a training has the same."""

_LIES = (
    ("q", "i8", 3), ("k", "i8", 3), ("v", "i8", 3), ("g", "i8", 3), ("u", "i8", 4), ("mask", "i8", 4), ("n", "i8"),
    ("t", "i4"), ("s", "i4"), ("heads", "i4"), ("groups", "i4"), ("width", "i4"), ("features", "i4"),
    ("key", "u8", 2), ("counter", "u8"), ("scale", "f8"), ("inflation", "f8"), ("threshold", "i8"),
    ("causal", "i4"), ("masked", "i4"), ("mean", "i4"), ("of", "i4"), ("pulled", "i4"),
)  # fmt: skip
"""``tg_lies``: steps are in elements."""


def _steps(x: Array) -> list[int] | None:
    """Steps in elements along the axes in front, as one, and along the last three; None: they do not join."""
    size = x.itemsize
    if x.flags.c_contiguous:  # most often: without a look at each stride
        t, h, n = x.shape[-3:]
        return [t * h * n, h * n, n, 1]
    return _joined_steps(x.shape, x.strides, size)


@lru_cache(_MOST_LAYOUTS)
def _joined_steps(shape: Shape, strides: Shape, size: int) -> list[int] | None:
    """The same of elements of ``size`` bytes that lie so, in a list that is not to be changed."""
    if shape[-1] > 1 and strides[-1] != size or any(step % size or step < 0 for step in strides):
        return None
    steps = [step // size for step in strides]
    front = [(n, step) for n, step in zip(shape[:-3], steps[:-3], strict=True) if n != 1]
    if any(outer != n * step for (_, outer), (n, step) in pairwise(front)):
        return None
    return [front[-1][1] if front else 0, *steps[-3:]]


class _Call:
    """One application: its operands as a kernel reads them, and what all its kernels are told."""

    def __init__(
        self, device: CudaDevice, q: Array, k: Array, v: Array, mask: Array, how: Weighting, key: int, counter: int,
        features: int | None = None,
    ) -> None:  # fmt: skip
        """``features``: the width of values, if nobody reads ``v``."""
        self.device = device
        *lead, t, heads, width = q.shape
        s, groups = v.shape[-3:-1]
        features = v.shape[-1] if features is None else features
        self.lead: Shape = tuple(lead)
        widest = max(width, features)
        if widest > WIDEST:
            raise ShapeError(f"attention: on CUDA heads are at most {WIDEST} wide, got {width} and {features}")
        self.lies: Any = cuda_types.structure(_LIES)
        told = {
            "n": prod(lead), "t": t, "s": s, "heads": heads, "groups": groups, "width": width, "features": features,
            "scale": how.scale, "inflation": how.inflation, "threshold": how.threshold, "causal": how.causal,
            "mean": how.blind == "mean", "masked": ("none", "see", "add").index(how.masked),
            "key": (key % 2**64, key >> 64), "counter": counter,
        }  # fmt: skip
        for name, number in told.items():
            self.lies[name] = number
        self.q, self.k, self.v = self.matrices("q", q), self.matrices("k", k), self.matrices("v", v)
        self.mask = self.q if how.masked == "none" else self.added("mask", mask)
        wide = accumulator(q.dtype)
        tensor = q.dtype.itemsize == 2 or how.tf32 and q.dtype == float32
        self.numbers = Numbers(tensor, q.dtype.itemsize if tensor else wide.itemsize, wide.itemsize, how.p > 0)
        self.widths = padded(width, widest), padded(features, widest)
        self.macros = {
            "T": q.dtype, "M": mask.dtype if how.masked == "add" else bool_, "DROP": int(how.p > 0),
            "KD": self.widths[0], "WD": self.widths[1], "TENSOR": int(tensor),
        }  # fmt: skip

    def matrices(self, name: str, x: Array) -> Array:
        """(..., t, h, k) with its steps noted; copied if axes in front do not join or rows do not lie in order."""
        x, steps = self._stepped(x)
        self.lies[name] = (steps[:3] + [0])[: self.lies[name].size]
        return x

    def added(self, name: str, x: Array) -> Array:
        """A mask (..., h or 1, t or 1, s or 1) with its steps noted, 0 where it broadcasts."""
        if self.mixed(x):
            x = spread(self.device.xp, x, (*self.lead, *x.shape[-3:]))
        x, steps = self._stepped(x)
        axes = (prod(x.shape[:-3]), *x.shape[-3:])
        self.lies[name] = [0 if n == 1 else step for n, step in zip(axes, steps, strict=True)]
        return x

    def _stepped(self, x: Array) -> tuple[Array, list[int]]:
        steps = _steps(x)
        if steps is None:
            x = contiguous(self.device.xp, x)
            steps = _steps(x)
            assert steps is not None
        return x, steps

    def mixed(self, x: Array) -> bool:
        """Whether some, but not all axes in front of a mask broadcast."""
        return x.shape[:-3] != self.lead and any(n != 1 for n in x.shape[:-3])

    def run(self, kernel: Kernel, plan: Plan, blocks: Callable[[int, int], int], *args: Any, **own: int) -> None:
        """Launch a kernel on as many blocks as ``blocks`` says for the rows and columns of its tile."""
        of = tile(plan, self.numbers, lambda rows: blocks(rows, 1))
        count = blocks(of.rows, of.cols)
        if count:
            named = {**self.macros, **own, "ROWS": of.rows, "COLS": of.cols, "SPLIT": of.split}
            kernel(self.device, count, THREADS, (*args, self.lies), shared=of.shared, **named)

    def forward(self, out: Array | None, stats: Array | None) -> None:
        """The result, the statistics of rows, or both; statistics have the same bits without the result."""
        width, features = self.widths
        plan = Plan((width,), (width, features), (features,), 1)
        there = stats if out is None else out
        assert there is not None
        given = there[..., :0] if out is None else out, there[..., :0] if stats is None else stats
        own = {"RESULT": int(out is not None), "KEEPS": int(stats is not None)}
        self.run(_forward, plan, self.of_queries, self.q, self.k, self.v, self.mask, *given, **own)

    def of_queries(self, rows: int, cols: int) -> int:
        """Blocks for tiles of queries."""
        return int(self.lies["n"] * self.lies["heads"]) * -(-int(self.lies["t"]) // rows)

    def of_keys(self, rows: int, cols: int) -> int:
        """Blocks for tiles of keys."""
        return int(self.lies["n"] * self.lies["groups"]) * -(-int(self.lies["s"]) // rows)


def forward(
    device: CudaDevice, q: Array, k: Array, v: Array, mask: Array, *, out: Array, how: Weighting, key: int,
    counter: int, beside: Array | None = None,
) -> None:  # fmt: skip
    """``softmax(q k' scale) v`` of each head; ``beside``: where the statistics of rows go."""
    if not nothing(out, k):
        _Call(device, q, k, v, mask, how, key, counter).forward(out, beside)
    elif beside is not None:
        statistics(device, q, k, mask, out=beside, how=how, features=v.shape[-1])


def statistics(
    device: CudaDevice, q: Array, k: Array, mask: Array, *, out: Array, how: Weighting, features: int
) -> None:
    """The largest score of each row, and 1 over the sum of its exponentials; ``features``: the width of values."""
    if not nothing(out, k):
        _Call(device, q, k, k, mask, how, 0, 0, features).forward(None, out)


def tangent(
    device: CudaDevice, q: Array, k: Array, v: Array, mask: Array, u: Array, *, out: Array, how: Weighting, key: int,
    counter: int, of: int,
) -> None:  # fmt: skip
    """The derivative along the tangent ``u`` of operand number ``of``."""
    if nothing(out, k):
        return
    call = _Call(device, q, k, v, mask, how, key, counter)
    call.lies["of"] = of
    u = call.added("u", u) if of == 3 else call.matrices("u", u)
    width, features = call.widths
    own, other = ((width,), (width, features, width)) if of == 1 else ((width, width), (width, features))
    plan = Plan(own, other, (features, features), 6)  # both sums change at once, which takes some more
    call.run(_jvp, plan, call.of_queries, call.q, call.k, call.v, call.mask, u, out)


def temporaries(
    aval: Any, q: Array, k: Array, v: Array, mask: Array, g: Array, *known: Array, **params: object
) -> Sequence[tuple[Shape, DType]]:
    """The means of the cotangents of each query's weights; and the result and the statistics unless they are known."""
    wide = accumulator(q.dtype)
    means = ((prod(q.shape[:-1]),), wide)
    return [means] if known else [means, (g.shape, q.dtype), (statistics_shape(q.shape), wide)]


def backward(
    device: CudaDevice, q: Array, k: Array, v: Array, mask: Array, g: Array, *known: Array, out: Array, how: Weighting,
    key: int, counter: int, pulled: tuple[int, ...], temporaries: Sequence[Array] = (),
) -> None:  # fmt: skip
    """The cotangents of the operands ``pulled``, one after the other in ``out``.

    ``known``: attention's result, and the statistics of rows; none: they are computed.
    """
    if nothing(out, k, g):
        return
    call = _Call(device, q, k, v, mask, how, key, counter)
    if not temporaries:
        temporaries = [device.empty(*lies) for lies in _temporaries(out, q, k, v, mask, g, *known)]
    means, *own = temporaries
    if not known:
        call.forward(*own)
        passed(call.q.nbytes + call.k.nbytes + call.v.nbytes, own[0].nbytes + own[1].nbytes)
    result, stats = known or own
    if not (result.flags.c_contiguous and stats.flags.c_contiguous):  # of examples that have it in common
        result, stats = contiguous(device.xp, result), contiguous(device.xp, stats)
    g = call.matrices("g", g)
    call.lies["pulled"] = sum(1 << i for i in pulled)
    places = slices([x.shape for x in (q, k, v, mask)], pulled)
    parts = [out[places.get(i, slice(0))] for i in range(4)]
    operands = (call.q, call.k, call.v, call.mask, g, stats)
    both = call.widths
    call.run(_vjp_q, Plan(both, both, both[:1], 2, "own"), call.of_queries, *operands, result, means, parts[0])
    read = call.q.nbytes + call.k.nbytes + call.v.nbytes + g.nbytes + stats.nbytes + means.nbytes
    written = means.nbytes  # by the first kernel
    if 1 in pulled or 2 in pulled:
        passed(read, written)
        written = 0
        plan = Plan(both, both, both, 2, "other")
        call.run(_vjp_kv, plan, call.of_keys, *operands, means, parts[1], parts[2])
    if 3 in pulled:
        passed(read, written)
        _pull_mask(call, mask, (*operands, means), parts[3])


_temporaries = temporaries


def _pull_mask(call: _Call, mask: Array, operands: tuple[Array, ...], out: Array) -> None:
    """The cotangent of the numbers that were added to scores."""
    lies, (h, t, s) = call.lies, mask.shape[-3:]
    mixed = call.mixed(mask)
    n = prod(call.lead) if mixed else prod(mask.shape[:-3])
    steps = [h * t * s, t * s, s, 1]
    lies["u"] = [0 if m == 1 else step for m, step in zip((n, h, t, s), steps, strict=True)]

    def blocks(rows: int, cols: int) -> int:
        return n * h * (1 if t == 1 else -(-t // rows)) * (1 if s == 1 else -(-s // cols))

    plan = Plan(call.widths, call.widths, (), 3, "own")
    whole = call.device.empty((*call.lead, h, t, s), out.dtype) if mixed else out
    call.run(_vjp_mask, plan, blocks, *operands, whole)
    if mixed and call.device.xp is not None:
        axes = tuple(i for i, (a, b) in enumerate(zip(mask.shape, whole.shape)) if a != b)
        total = call.device.xp.sum(whole, axis=axes, dtype=operands[-1].dtype)
        call.device.xp.copyto(out, total.reshape(-1), casting="same_kind")
