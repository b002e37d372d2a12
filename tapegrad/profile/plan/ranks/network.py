"""Networks: what a message costs.

A message of n bytes takes ``latency + n / bytes_per_second`` (Hockney, "The communication challenge for MPP", Parallel
Computing 20, 1994), each rank sends one and receives one at a time, and messages of other ranks do not slow it down.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from tapegrad.errors import TapegradError

_LINK = re.compile(
    r"\s*(\d{1,9}(?:\.\d{1,9})?)\s*(|[kKMGT]i?)(B|bit)/s\s*,\s*(\d{1,9}(?:\.\d{1,9})?)\s*(ns|us|µs|ms|s)\s*"
)
_PREFIXES = {"": 1, "K": 1000, "M": 1000**2, "G": 1000**3, "T": 1000**4,
             "Ki": 1024, "Mi": 1024**2, "Gi": 1024**3, "Ti": 1024**4}  # fmt: skip
_SECONDS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0}


class LinkError(TapegradError, ValueError):
    """A text that is no link."""


@dataclass(frozen=True)
class Link:
    """The way between two ranks: ``bytes_per_second`` each way, ``latency`` in seconds."""

    bytes_per_second: float
    latency: float

    def seconds(self, nbytes: float) -> float:
        """Of a message."""
        return self.latency + nbytes / self.bytes_per_second


def parse_link(text: str) -> Link:
    """A link such as ``25GB/s,5us``: B/s or bit/s with K, M, G, T or Ki, Mi ..., and ns, us, ms or s.

    Raises LinkError.
    """
    match = _LINK.fullmatch(text)
    if match is None:
        raise LinkError(
            f"{text!r} is no link: it is bytes or bits a second, a comma and the time that a message of no bytes "
            "takes, such as 25GB/s,5us or 200Gbit/s,1.5us"
        )
    speed = float(match[1]) * _PREFIXES[match[2][:1].upper() + match[2][1:]] / (8 if match[3] == "bit" else 1)
    if not speed:
        raise LinkError(f"{text!r} is no link: nothing ever comes at {match[1]} {match[2]}{match[3]}/s")
    return Link(speed, float(match[4]) * _SECONDS[match[5]])


@dataclass(frozen=True)
class Network:
    """``ranks`` processes and the kinds of links between them; where ranks go in step, the slowest one counts."""

    ranks: int
    links: tuple[Link, ...]

    def rounds(self, count: int, nbytes: float) -> float:
        """Seconds in which ranks send, and receive, ``count`` messages of ``nbytes``, one after the other."""
        return count * max(link.seconds(nbytes) for link in self.links)


def network(ranks: int, far: Link, near: Link, per_node: int = 1) -> Network:
    """``per_node`` ranks on each node, with ``near`` between them, and ``far`` between those of two nodes."""
    within, between = [near] * (per_node > 1), [far] * (ranks > per_node or per_node == 1)
    return Network(ranks, (*within, *between))
