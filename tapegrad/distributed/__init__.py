"""Several processes, each with a part of the work: collectives on the tape, by MPI and NCCL.

``init`` makes the program a rank of the job; collectives are differentiable operations.  A program of one process runs
unchanged, with nothing installed.
"""

from tapegrad.distributed.collectives.blocks import all_gather, gather, reduce_scatter, scatter
from tapegrad.distributed.collectives.exchanges import all_to_all, shift
from tapegrad.distributed.collectives.pairs import recv, send
from tapegrad.distributed.collectives.reductions import all_reduce, broadcast, reduce
from tapegrad.distributed.contents import Sharded
from tapegrad.distributed.data_parallel import (
    GradientTape,
    broadcast_variables,
    check_replicas,
    mean,
    once,
    part,
)
from tapegrad.distributed.grids import Grid, gather_field, halo_exchange, interior, scatter_field
from tapegrad.distributed.group import Group, barrier, init, world
from tapegrad.distributed.saving import load, save
from tapegrad.distributed.sharding import ShardedGradient, shard
from tapegrad.spellings import open_to_users

__all__ = [
    "GradientTape", "Grid", "Group", "Sharded", "ShardedGradient", "all_gather", "all_reduce", "all_to_all", "barrier",
    "broadcast", "broadcast_variables", "check_replicas", "gather", "gather_field", "halo_exchange", "init", "interior",
    "load", "mean", "once", "part", "recv", "reduce", "reduce_scatter", "save", "scatter", "scatter_field", "send",
    "shard", "shift", "world",
]  # fmt: skip
open_to_users(globals(), __name__)
