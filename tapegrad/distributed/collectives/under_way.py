"""A sum over ranks that is started, and waited for later: in between the program computes.

Two primitives: :func:`start` yields a tensor whose memory is being written, :func:`finish` waits and yields the sum.
Nothing else may read the first one.
"""

from __future__ import annotations

from typing import Any

from tapegrad.core.aval import ShapedArray
from tapegrad.core.primitive import Primitive
from tapegrad.device import CPU, Device
from tapegrad.device.types import Array, Namespace
from tapegrad.distributed.collectives.declaring import collective, described, same, unchanged
from tapegrad.distributed.collectives.reductions import all_reduce_p
from tapegrad.distributed.engine import Transfer
from tapegrad.distributed.group import Group
from tapegrad.distributed.ordered import AllReduce
from tapegrad.ops.apply import barrier
from tapegrad.tensor import Tensor


def _start(group: Group, device: Device, x: Array, exact: bool, address: int) -> None:
    """Start the sum of ``x``, in its memory."""

    def transfer() -> Transfer:
        with device.active():
            return AllReduce(group.engine, device.xp, x) if exact else group.engine.all_reduce(x, "sum")

    detail = described(device.xp, x, x.shape, exact=exact)
    group.under_way[address] = x, group.line.start("all_reduce", detail, x.nbytes, transfer)


def _finish(group: Group, address: int) -> Array:
    x, under_way = group.under_way.pop(address)
    under_way.wait()
    return x


def _run_start(xp: Namespace, x: Array, *, group: Group, exact: bool, out: Array) -> None:
    xp.copyto(out, x)
    _start(group, CPU, out, exact, out.ctypes.data)


def _run_finish(xp: Namespace, x: Array, *, group: Group, exact: bool, out: Array) -> None:
    xp.copyto(out, _finish(group, x.ctypes.data))


def _start_on_gpu(device: Device, x: Array, *, group: Group, exact: bool, out: Any) -> None:
    if not group.engine.moves(device):
        _start(group, CPU, device.numpy(x).copy(), exact, out.data.ptr)
        return
    with device.active():
        out[...] = x
    _start(group, device, out, exact, out.data.ptr)


def _finish_on_gpu(device: Device, x: Any, *, group: Group, exact: bool, out: Array) -> None:
    total = _finish(group, x.data.ptr)
    with device.active():
        out[...] = device.array(total, None, copy=False)


def _transposed_finish(ct: Tensor, x: ShapedArray, *, group: Group, exact: bool) -> Tensor:
    return ct


def _transposed_start(ct: Tensor, x: ShapedArray, *, group: Group, exact: bool) -> Tensor:
    return barrier(all_reduce_p, ct, group=group, op="sum", exact=exact)


start_p: Primitive = collective(
    "all_reduce_start", _run_start, same, _transposed_start, unchanged, "A sum over ranks under way.", _start_on_gpu
)
finish_p: Primitive = collective(
    "all_reduce_finish", _run_finish, same, _transposed_finish, unchanged, "A sum over ranks that has come.",
    _finish_on_gpu,
)  # fmt: skip


def start(x: Tensor, group: Group, exact: bool = True) -> Tensor:
    """The sum of ``x``, of one dimension, over ranks, under way: give it to :func:`finish`, and to nobody else."""
    return barrier(start_p, x, group=group, exact=exact)


def finish(x: Tensor, group: Group, exact: bool = True) -> Tensor:
    """What :func:`start` has started, once it has come.  Raises DistributedError on every rank."""
    return barrier(finish_p, x, group=group, exact=exact)


def help_on(group: Group) -> None:
    """Let what is under way go on: MPI moves bytes only while somebody calls it."""
    for _, under_way in list(group.under_way.values()):
        under_way.done()
