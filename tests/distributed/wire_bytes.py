"""Prints what collectives of 4 MB send over the network, as a part of the least; run in a network of its own.

The kernel counts the bytes of the loopback device, over which all ranks talk.  How busy the machine is decides into how
many packets TCP cuts a message, so headers are taken off, and how often it sends a packet again, so the least of
several runs counts.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

import tapegrad as tg
from tapegrad import distributed as dist

SIZE, REPEATS = 2**20, 5
HEADERS = 14 + 20 + 32
"""Bytes of Ethernet, IPv4, and TCP with time stamps."""


def sent() -> int:
    """Bytes that the loopback device of this network has sent, without headers."""
    (line,) = (x for x in Path("/proc/net/dev").read_text().splitlines() if x.strip().startswith("lo:"))
    nbytes, packets = map(int, line.split(":")[1].split()[8:10])
    return nbytes - packets * HEADERS


def main() -> None:
    group = dist.init()
    n = group.size
    x = tg.asarray(np.full(SIZE, group.rank, np.float32))
    whole = x.nbytes * (n - 1)
    w = tg.Variable(x)

    def gradient() -> None:
        with dist.GradientTape(bucket_bytes=2**20) as tape:
            loss = tg.sum(w * 2.0)
        tape.gradient(loss, w)

    least = {
        "all_reduce": (2 * whole, lambda: dist.all_reduce(x)),
        "gradient": (2 * whole, gradient),
        "all_gather": (n * whole, lambda: dist.all_gather(x)),
        "reduce_scatter": (whole, lambda: dist.reduce_scatter(x)),
        "all_to_all": (whole, lambda: dist.all_to_all(x)),
        "broadcast": (whole, lambda: dist.broadcast(x)),
        "shift": (n * x.nbytes, lambda: dist.shift(x)),
    }
    for name, (wanted, f) in least.items():
        f()  # connections are made
        runs = []
        for _ in range(REPEATS):
            group.barrier()
            before = sent()
            group.barrier()
            f()
            group.barrier()
            runs.append((sent() - before) / wanted)
        if group.rank == 0:
            print("WIRE", name, min(runs), flush=True)


if __name__ == "__main__":
    main()
