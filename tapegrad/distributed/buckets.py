"""Buckets: which gradients travel together."""

from __future__ import annotations

from collections.abc import Hashable, Iterable

_FIRST_PART = 4
"""The first bucket is full with this part of the others' bytes, so that communication begins early."""


def buckets(gradients: Iterable[tuple[int, Hashable]], bucket_bytes: int) -> list[list[int]]:
    """Positions of the gradients of each bucket, in their order; of each its bytes and its kind are given.

    A bucket ends where its bytes are full, or the kind changes.
    """
    found: list[list[int]] = []
    taken, most, kind = 0, max(1, bucket_bytes // _FIRST_PART), None
    for i, (nbytes, own) in enumerate(gradients):
        if not found or taken >= most or kind != own:
            most = bucket_bytes if found else most
            found.append([])
            taken, kind = 0, own
        found[-1].append(i)
        taken += nbytes
    return found
