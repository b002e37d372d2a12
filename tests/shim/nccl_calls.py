"""Calls of NCCL on two ranks of the stand-in, for ``test_standin_nccl.py``."""

from __future__ import annotations

import os
import sys

import numpy as np
from mpi4py import MPI

from shim import standin

cupy = standin.install()
standin.configure(nccl_patience=0.5)
from cupy.cuda import nccl  # noqa: E402  (the stand-in's)

rank = MPI.COMM_WORLD.Get_rank()
other = 1 - rank


def communicator(device: int) -> tuple:
    cupy.cuda.Device(device).use()
    ident = MPI.COMM_WORLD.bcast(nccl.get_unique_id() if rank == 0 else None)
    return nccl.NcclCommunicator(2, ident, rank), cupy.cuda.Stream(non_blocking=True)


def buffers(stream: object) -> tuple:
    mine, theirs = cupy.full(5, rank, "float32"), cupy.empty(5, "float32")
    cupy.cuda.get_current_stream().synchronize()
    return mine, theirs


def twice() -> None:
    try:
        communicator(0)
    except nccl.NcclError as e:
        print(e, flush=True)


def exchange(comm: object, mine: object, theirs: object, stream: object) -> None:
    comm.send(mine.data.ptr, 5, nccl.NCCL_FLOAT32, other, stream.ptr)
    comm.recv(theirs.data.ptr, 5, nccl.NCCL_FLOAT32, other, stream.ptr)


def told(stream: object) -> None:
    print("sticks" if not stream.record().done else "done", flush=True)


def facing() -> None:
    comm, stream = communicator(rank)
    exchange(comm, *buffers(stream), stream)
    told(stream)
    comm.abort()


def alone() -> None:
    """Nobody receives."""
    comm, stream = communicator(rank)
    mine, _ = buffers(stream)
    comm.send(mine.data.ptr, 5, nccl.NCCL_FLOAT32, other, stream.ptr)
    told(stream)
    comm.abort()


def grouped() -> None:
    comm, stream = communicator(rank)
    mine, theirs = buffers(stream)
    nccl.groupStart()
    exchange(comm, mine, theirs, stream)
    nccl.groupEnd()
    stream.synchronize()
    np.testing.assert_array_equal(theirs.get(), np.full(5, other, "float32"))
    print("arrived", flush=True)


def sum() -> None:
    comm, stream = communicator(rank)
    mine, _ = buffers(stream)
    comm.allReduce(mine.data.ptr, mine.data.ptr, 5, nccl.NCCL_FLOAT32, nccl.NCCL_SUM, stream.ptr)
    comm.broadcast(mine.data.ptr, mine.data.ptr, 5, nccl.NCCL_FLOAT32, 1, stream.ptr)
    stream.synchronize()
    np.testing.assert_array_equal(mine.get(), np.ones(5))
    print("summed", flush=True)


globals()[sys.argv[1]]()
MPI.COMM_WORLD.Barrier()
sys.stdout.flush()
os._exit(0)  # MPI would wait for messages that nobody receives
