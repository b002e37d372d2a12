"""What it costs to make a value: an estimate from shapes and dtypes alone, so that every schedule can be repeated.

The unit is a byte moved.  A barrier moves its operands and its result; what it computes beyond that is declared by the
primitive (``flops``).  An elementwise value is computed on the way, inside the kernel that reads it: it costs its
writing.
"""

from __future__ import annotations

from collections.abc import Sequence

from tapegrad.core.aval import ShapedArray
from tapegrad.core.node import LEAF, Node
from tapegrad.core.primitive import Barrier, Elementwise, Primitive
from tapegrad.device import cuda_types
from tapegrad.device.types import Array, Params

FLOPS_PER_BYTE = 10
"""Arithmetic that takes as long as moving a byte: about 10 on the CPUs this was measured on (100 Gflop/s at 10 GB/s in
float32), 14 by an H100's data sheet (67 Tflop/s in float32 at 3.35 TB/s)."""

BYTES_MOVED_PER_BYTE_OFFLOADED = 60
"""What it costs to copy a byte to another memory, or back: an H100's memory moves 3350 GB/s, its PCIe 5 link 55 (data
sheets).  That copies overlap with kernels does not count: the link is busy all the same."""


def transfer_of(nbytes: int, there: bool) -> float:
    """The cost of bringing ``nbytes`` back from a tier, and of moving them there unless they are ``there``."""
    return float(BYTES_MOVED_PER_BYTE_OFFLOADED * nbytes * (1 if there else 2))


def cost_of(node: Node, inputs: Sequence[ShapedArray]) -> float:
    """The cost of applying ``node`` to values of these avals, in bytes moved; at least 1."""
    return cost_of_application(node.prim, node.params, node.aval, inputs)


def cost_of_application(prim: Primitive, params: Params, aval: ShapedArray, inputs: Sequence[ShapedArray]) -> float:
    """The cost of applying ``prim`` to values of the avals ``inputs``, which yields one like ``aval``."""
    if prim is LEAF or prim.view:
        return 1.0
    if isinstance(prim, Elementwise):
        return 1.0 + aval.nbytes
    moved = 1.0 + aval.nbytes + sum(a.nbytes for a in inputs)
    if isinstance(prim, Barrier) and prim.flops is not None:
        moved += prim.flops(*inputs, **params) / FLOPS_PER_BYTE
    return moved


def units(cost: float) -> int:
    """A cost as a whole number: of bytes moved by so much arithmetic as one operation takes."""
    return round(cost * FLOPS_PER_BYTE)


def moved_by(read: Sequence[Array], written: Sequence[Array]) -> tuple[int, int]:
    """Bytes of distinct arrays read, what broadcasting repeats counted once, and of arrays written."""
    seen, extent = set(), 0
    for x in read:
        if id(x) not in seen:
            seen.add(id(x))
            extent += cuda_types.extent(x)
    total = 0
    for x in written:
        total += x.nbytes
    return extent, total
