"""Messages from one rank to another, on the tape: backwards the cotangent goes the other way.

A ``send`` does not wait until the other side receives.  Before its data a message says what it is, and the receiver
compares: what was sent first is received first.

On a GPU, too, they pass through the host's memory: a message of NCCL's holds up all others until it is received.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from tapegrad.core.aval import Shape, ShapedArray, shaped
from tapegrad.core.primitive import Primitive
from tapegrad.device import CPU, dtypes
from tapegrad.device.types import Array, Namespace
from tapegrad.distributed.collectives.declaring import collective, counted, flat, rank_of, staged
from tapegrad.distributed.engine import BETWEEN_TWO
from tapegrad.distributed.group import Group, of
from tapegrad.distributed.watching import WATCHING
from tapegrad.errors import DistributedError
from tapegrad.ops.apply import barrier
from tapegrad.ops.create.creation import zeros
from tapegrad.ops.dispatch import tensor
from tapegrad.tensor import DTypeLike, Tensor, TensorLike

Key = tuple[int, int, int, int]
"""What both sides call a message: ranks of sender and receiver, its number, and how often it was transposed."""
_HEAD_BYTES = 80


def _head(dtype: object, shape: Sequence[int]) -> bytes:
    """What a message says of itself."""
    return f"{dtype} {tuple(shape)}".encode()[:_HEAD_BYTES].ljust(_HEAD_BYTES)


def _run_send(
    xp: Namespace, x: Array, *, group: Group, to: int, key: Key, out: Array, on_host: bool = False
) -> None:  # fmt: skip
    entered = group.line.between_two("send", f"{x.dtype} {x.shape} to rank {to}", x.nbytes, key)
    head = CPU.xp.frombuffer(_head(x.dtype, x.shape), dtype="u1").copy()
    group.sent(group.engine.exchange([(to, head)], [], BETWEEN_TWO))
    held = None if on_host else counted(send_p, shaped((x.size,), x.dtype, CPU))
    copy = xp.empty(x.size, x.dtype) if held is None else held.array
    xp.copyto(copy.reshape(x.shape), x)
    group.sent(group.engine.exchange([(to, copy)], [], BETWEEN_TWO), held)
    WATCHING.now.arrived(entered)


def _run_recv(
    xp: Namespace, token: Array, *, group: Group, source: int, shape: Shape, key: Key, out: Array
) -> None:  # fmt: skip
    group.line.begin_all()
    entered = group.line.between_two("recv", f"{out.dtype} {out.shape} from rank {source}", out.nbytes, key)
    head = CPU.xp.empty(_HEAD_BYTES, "u1")
    group.wait(group.engine.exchange([], [(source, head)], BETWEEN_TWO), entered)
    if head.tobytes() != _head(out.dtype, out.shape):
        raise DistributedError(f"{entered}: rank {source} has sent {head.tobytes().decode().rstrip()} instead")
    group.wait(group.engine.exchange([], [(source, flat(out))], BETWEEN_TWO), entered)


def _back(key: Key) -> Key:
    return (*key[:3], key[3] + 1)


def _transposed_send(ct: Tensor, x: ShapedArray, *, group: Group, to: int, key: Key) -> Tensor:
    return barrier(recv_p, ct, group=group, source=to, shape=x.shape, key=_back(key))


def _transposed_recv(ct: Tensor, token: ShapedArray, *, group: Group, source: int, shape: Shape, key: Key) -> Tensor:
    return barrier(send_p, ct, group=group, to=source, key=_back(key))


def _batched(params: dict[str, Any], n: int) -> dict[str, Any]:
    raise DistributedError("send, recv: cannot be batched; take shift or all_to_all inside vmap and jacobian")


send_p: Primitive = collective(
    "send", _run_send, lambda x, **params: x.with_shape((0,)), _transposed_send, _batched, "A value for another rank.",
    staged(partial(_run_send, on_host=True)),
)  # fmt: skip
recv_p: Primitive = collective(
    "recv", _run_recv, lambda token, *, shape, **params: token.with_shape(shape), _transposed_recv, _batched,
    "A value from another rank.", staged(_run_recv),
)  # fmt: skip


def send(x: TensorLike, to: int, *, group: Group | None = None) -> None:
    """Send ``x`` to rank ``to``, which calls :func:`recv`; this does not wait for it.

    Backwards, the cotangent of what was received there comes here, also if nothing here depends on it.
    """
    x, group = tensor("send", x), of(group)
    to = rank_of("send", to, group)
    barrier(send_p, x, group=group, to=to, key=group.key_of(group.rank, to, False))


def recv(
    shape: Sequence[int], source: int, dtype: DTypeLike = "float32", *, group: Group | None = None
) -> Tensor:  # fmt: skip
    """What rank ``source`` has sent to this one: a tensor of ``shape`` and ``dtype``, in the order of sending.

    Raises DistributedError if something else was sent, or nothing in time.
    """
    group = of(group)
    source = rank_of("recv", source, group)
    token = zeros((0,), dtype=dtypes.asdtype(dtype))
    whole = tuple(int(n) for n in shape)
    return barrier(recv_p, token, group=group, source=source, shape=whole, key=group.key_of(source, group.rank, True))
