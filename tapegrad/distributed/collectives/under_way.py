"""A sum over ranks that is started, and waited for later: in between the program computes.

Two primitives: :func:`start` yields a tensor whose memory is being written, :func:`finish` waits and yields the sum.
Nothing else may read the first one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tapegrad.core import tracking
from tapegrad.core.aval import ShapedArray, shaped
from tapegrad.core.buffer import Buffer
from tapegrad.core.primitive import Primitive
from tapegrad.device import CPU, Device, dtypes
from tapegrad.device.types import Array, Namespace
from tapegrad.distributed.collectives.declaring import collective, counted, described, same, unchanged
from tapegrad.distributed.collectives.reductions import all_reduce_p
from tapegrad.distributed.engine import Transfer
from tapegrad.distributed.group import Group
from tapegrad.distributed.matching import UnderWay
from tapegrad.distributed.ordered import AllReduce, taken_by_all_reduce
from tapegrad.distributed.room import Room, bytes_of
from tapegrad.distributed.walks import PEERS
from tapegrad.ops.apply import barrier
from tapegrad.tensor import Tensor


@dataclass(eq=False)
class Sum:
    """A sum under way.  Once it is done, or finished, it holds nothing any more that it does not need."""

    room: Buffer | None
    """The memory for what comes from other ranks; None: there is none, or it is not needed any more."""
    tensor: Tensor | None = None
    """In whose memory the sum is made."""
    array: Any = None
    under_way: UnderWay | None = None
    """None: in a dry run."""

    def help_on(self) -> None:
        """Let it go on."""
        if self.under_way is not None and self.under_way.done():
            self.room = None

    def start(self, group: Group, device: Device, x: Array, exact: bool) -> None:
        """Start to sum ``x`` in its memory."""
        memory = None if self.room is None else self.room.array

        def transfer() -> Transfer:
            with device.active():
                if exact:
                    return AllReduce(group.engine, device.xp, x, "sum", Room(device.xp, memory))
                return group.engine.all_reduce(x, "sum")

        detail = described(device.xp, x, x.shape, exact=exact)
        self.array, self.under_way = x, group.line.start("all_reduce", detail, x.nbytes, transfer)
        group.under_way.append(self)

    def finish(self, group: Group) -> Array:
        """What it has come to, once it has."""
        assert self.under_way is not None
        group.under_way.remove(self)
        self.under_way.wait()
        total, self.array, self.under_way = self.array, None, None
        return total


def _run_start(xp: Namespace, x: Array, *, group: Group, exact: bool, under_way: Sum, out: Array) -> None:
    xp.copyto(out, x)
    under_way.start(group, CPU, out, exact)


def _run_finish(xp: Namespace, x: Array, *, group: Group, exact: bool, under_way: Sum, out: Array) -> None:
    xp.copyto(out, under_way.finish(group))


def _start_on_gpu(device: Device, x: Array, *, group: Group, exact: bool, under_way: Sum, out: Any) -> None:
    if not group.engine.moves(device):
        under_way.start(group, CPU, device.numpy(x).copy(), exact)
        return
    with device.active():
        out[...] = x
    under_way.start(group, device, out, exact)


def _finish_on_gpu(device: Device, x: Any, *, group: Group, exact: bool, under_way: Sum, out: Array) -> None:
    total = under_way.finish(group)
    with device.active():
        out[...] = device.array(total, None, copy=False)


def _transposed_finish(ct: Tensor, x: ShapedArray, *, group: Group, exact: bool, under_way: Sum) -> Tensor:
    return ct


def _transposed_start(ct: Tensor, x: ShapedArray, *, group: Group, exact: bool, under_way: Sum) -> Tensor:
    return barrier(all_reduce_p, ct, group=group, op="sum", exact=exact)


start_p: Primitive = collective(
    "all_reduce_start", _run_start, same, _transposed_start, unchanged, "A sum over ranks under way.", _start_on_gpu
)
finish_p: Primitive = collective(
    "all_reduce_finish", _run_finish, same, _transposed_finish, unchanged, "A sum over ranks that has come.",
    _finish_on_gpu,
)  # fmt: skip


def start(x: Tensor, group: Group, exact: bool = True) -> Sum:
    """The sum of ``x``, of one dimension, over ranks, under way: give it to :func:`finish`."""
    found = Sum(_room(x, group) if exact and group.engine.moves(x.device) else None)
    found.tensor = barrier(start_p, x, group=group, exact=exact, under_way=found)
    tracking.current.label(found.tensor._buffer, PEERS.category, "a sum under way")
    return found


def _room(x: Tensor, group: Group) -> Buffer | None:
    nbytes = bytes_of(taken_by_all_reduce(x.size, x.dtype, group.engine))
    if not nbytes:
        return None
    return counted(start_p, shaped((nbytes,), dtypes.asdtype("uint8"), x.device))


def finish(under_way: Sum, group: Group, exact: bool = True) -> Tensor:
    """What :func:`start` has started, once it has come.  Raises DistributedError on every rank."""
    started, under_way.tensor = under_way.tensor, None
    assert started is not None
    total = barrier(finish_p, started, group=group, exact=exact, under_way=under_way)
    under_way.room = None
    return total


def help_on(group: Group) -> None:
    """Let what is under way go on: MPI moves bytes only while somebody calls it."""
    for under_way in list(group.under_way):
        under_way.help_on()
