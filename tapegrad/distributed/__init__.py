"""Several processes, each with a part of the work: collectives on the tape, by MPI and NCCL.

``init`` makes the program a rank of the job; collectives are differentiable operations.  A program of one process runs
unchanged, with nothing installed.
"""

from tapegrad.distributed.collectives.blocks import all_gather, gather, reduce_scatter, scatter
from tapegrad.distributed.collectives.exchanges import all_to_all, shift
from tapegrad.distributed.collectives.reductions import all_reduce, broadcast, reduce
from tapegrad.distributed.group import Group, init, world
from tapegrad.distributed.saving import Sharded, load, save

__all__ = [
    "Group", "Sharded", "all_gather", "all_reduce", "all_to_all", "broadcast", "gather", "init", "load", "reduce",
    "reduce_scatter", "save", "scatter", "shift", "world",
]  # fmt: skip
