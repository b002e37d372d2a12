"""Operations in which other processes take part: what of them a backward walk does is agreed before it begins.

A process that skipped one of them, because here nothing depends on the sources or no cotangent comes, would leave the
others waiting.  So each tells which of its operations are *reached* from the sources and which are *wanted* by the
targets; what any of them tells holds for all, and may reach and want further ones.  It ends when all tell the same.

What is differentiated is the sum of the targets over all processes.  A target that they all have the same way (it is
made of results of a sum over all, say, and of numbers) is one target, not many: the first process alone seeds it.  A
cotangent that the user gives for a target is this process's own, whatever the target is.
"""

from __future__ import annotations

import hashlib
from collections.abc import Hashable, Iterable, Sequence
from typing import Any, NamedTuple

from tapegrad.autodiff.records import Applied, Called, Record
from tapegrad.core.buffer import Buffer
from tapegrad.core.node import LEAF, Node
from tapegrad.core.protocols import Effect
from tapegrad.core.state import thread
from tapegrad.device.numerics import bits
from tapegrad.engine.realize import array_of
from tapegrad.errors import DistributedError, ReplicatedTargetWarning, warn

LOCAL, REPLICATED, MIXED, HIDDEN = "local", "replicated", "mixed", "hidden"
"""How a target depends on values that all processes have: not at all, alone, among others, within a call."""


class Agreed(NamedTuple):
    """What a walk does."""

    path: set[int]
    """The values that depend on the sources, on any process."""
    forced: set[int]
    """Results of operations (their first ones) that are pulled whether or not a cotangent has come here."""
    unseeded: set[int]
    """Targets that another process seeds."""
    behind: dict[int, Node]
    """Values that those depend on, by index: if nothing comes to such a source its gradient is zeros, not none."""


class _Joint(NamedTuple):
    """One record in which others take part."""

    position: int
    key: Hashable
    what: str
    line: Hashable
    """The group whose members all have it, by its name; None: a message between two."""


def effects_of(record: Record) -> Sequence[Node]:
    """The operations of a record in which other processes take part."""
    if type(record) is Called:
        return record.call.effects
    node = record.results[0]
    return () if node.prim.effect is None else (node,)


def told(inside: Sequence[Node], mine: tuple[Any, ...]) -> list[Any]:
    """What each process says that takes part in operations, such as those inside a call; ``mine``: this one."""
    peers: Any = inside[0].prim.effect
    found: list[Any] = peers.told(peers.common([peers.group(node) for node in inside]), mine)
    return found


def agreed(
    peers: Effect, records: Sequence[Record], cts: Iterable[int], keep: set[int],
    targets: Sequence[Buffer | None] = (),
) -> Agreed:  # fmt: skip
    """What all processes do in a walk from ``cts`` to ``keep``, which are indices of values.

    ``targets``: those that are seeded with ones, None for each that has a cotangent of this process.  Raises
    DistributedError on every process if their recordings differ.
    """
    joints: list[_Joint] = []
    lines: dict[Any, int] = {}
    for position, record in enumerate(records):
        inside = effects_of(record)
        if inside:
            group = peers.common([peers.group(node) for node in inside])
            lines[group] = number = lines.get(group, 0) + 1
            joints.append(_joint(peers, position, record, group, number))
    group = peers.common(list(lines))
    digests = {peers.name(line): (peers.members(group, line), *_digest(joints, peers.name(line))) for line in lines}
    kinds = [LOCAL if t is None else _kind(records, t.node) for t in targets]
    sums = [b"" if t is None or kind is LOCAL else _checksum(t) for kind, t in zip(kinds, targets, strict=True)]
    reached, wanted = dict.fromkeys((j.key for j in joints), False), dict.fromkeys((j.key for j in joints), False)
    cts = set(cts)
    unseeded: set[int] | None = None
    while True:
        path = _reach(records, joints, keep, reached)
        _want(records, joints, cts, path, wanted)
        mine = (digests, len(joints), reached, wanted, kinds, sums)
        told = peers.told(group, mine)
        _compare(told, joints)
        if unseeded is None:  # once: the others' seeds are in what they want
            unseeded = _unseeded(peers, group, targets, kinds, [t[5] for t in told])
        everyone = [_united([t[2] for t in told]), _united([t[3] for t in told])]
        for key in reached:
            reached[key], wanted[key] = everyone[0][key], everyone[1][key]
        if all(flags[key] == both[key] for t in told for flags, both in zip(t[2:4], everyone) for key in flags):
            break
    forced: set[int] = set()
    for j in joints:
        if reached[j.key] and wanted[j.key]:
            record = records[j.position]
            forced.add(record.results[0].index)
            path.update(n.index for n in record.followed)
    return Agreed(path, forced, unseeded, _behind(records, targets, unseeded) if unseeded else {})


def _united(flags: Sequence[dict[Hashable, bool]]) -> dict[Hashable, bool]:
    """What holds for a key on any process; a message between two of them has one on these alone."""
    found: dict[Hashable, bool] = {}
    for each in flags:
        for key, flag in each.items():
            found[key] = found.get(key, False) or flag
    return found


def _joint(peers: Effect, position: int, record: Record, group: Any, number: int) -> _Joint:
    line = peers.name(group)
    if type(record) is Called:
        return _Joint(position, (line, number), f"{record.call.name} with {len(record.call.effects)}", line)
    node = record.results[0]
    key = peers.pair(node)
    return _Joint(position, key or (line, number), f"{node.prim.name} {node.aval.dtype}", None if key else line)


def _digest(joints: list[_Joint], line: Hashable) -> tuple[bytes, int]:
    """Of what all members of a group have, and how much that is."""
    what = [j.what for j in joints if j.line == line]
    return hashlib.blake2b(repr(what).encode(), digest_size=8).digest(), len(what)


def _reach(records: Sequence[Record], joints: list[_Joint], keep: set[int], reached: dict[Hashable, bool]) -> set[int]:
    """The values that depend on ``keep``; notes which joint records do."""
    path, at = set(keep), {j.position: j.key for j in joints}
    for position, record in enumerate(records):
        depends = any(n.index in path for n in record.followed)
        key = at.get(position)
        if key is not None:
            depends = reached[key] = depends or reached[key]
        if depends:
            path.update(n.index for n in record.results)
    return path


def _want(
    records: Sequence[Record], joints: list[_Joint], cts: set[int], path: set[int], wanted: dict[Hashable, bool]
) -> None:
    """Note which joint records' results get cotangents, which come from ``cts``."""
    come, at = set(cts), {j.position: j.key for j in joints}
    for position in range(len(records) - 1, -1, -1):
        record = records[position]
        has = any(n.index in come and n.index in path for n in record.results)
        key = at.get(position)
        if key is not None:
            has = wanted[key] = has or wanted[key]
        if has:
            come.update(n.index for n in record.followed)


def _compare(told: Sequence[Any], joints: list[_Joint]) -> None:
    """Members of one group have the same; a rerun in which others do not take part may be their own affair."""
    for line, (members, *digest) in ((line, entry) for t in told for line, entry in t[0].items()):
        theirs = {r: told[r][0].get(line, (members, b"", 0))[1:] for r in members}
        if any(list(one) != digest for one in theirs.values()):
            counts = ", ".join(f"rank {r}: {count}" for r, (_, count) in theirs.items())
            mine = ", ".join(j.what for j in joints[-5:])
            raise DistributedError(
                "gradient: the ranks' tapes hold different collectives, so they cannot walk back together; their "
                f"numbers are {counts}; the last ones of this rank: {mine}.  Let every rank call the same ones in the "
                "same order"
            )


# Targets -----------------------------------------------------------------------------------------------------------


def _kind(records: Sequence[Record], target: Node) -> str:
    """How a target depends on values that all processes have."""
    kinds: dict[int, str] = {}
    for record in records:
        if type(record) is Called and any(map(_is_replicated, record.call.effects)):
            found = HIDDEN
        elif type(record) is Applied and _is_replicated(record.node):
            found = REPLICATED
        else:
            found = _together([kinds.get(n.index) or _alone(n) for n in record.followed])
        for n in record.results:
            kinds[n.index] = found
    return kinds.get(target.index) or (REPLICATED if _is_replicated(target) else LOCAL)


def _is_replicated(node: Node) -> bool:
    effect = node.prim.effect
    return effect is not None and effect.replicated(node) is not None


def _alone(node: Node) -> str | None:
    """A value that was not recorded: None of a number, which says nothing."""
    if _is_replicated(node):
        return REPLICATED
    return None if node.prim is LEAF and not node.aval.ndim else LOCAL


def _together(kinds: Sequence[str | None]) -> str:
    found = {k for k in kinds if k is not None}
    if len(found) == 1:
        return found.pop()
    if not found or found == {LOCAL}:
        return LOCAL
    return HIDDEN if HIDDEN in found else MIXED


def _checksum(target: Buffer) -> bytes:
    device = target.node.aval.device
    return thread.executor.in_earnest(lambda: bits.checksum(device.numpy(array_of(target))), b"")


def _unseeded(
    peers: Effect, group: Any, targets: Sequence[Buffer | None], kinds: Sequence[str], sums: Sequence[Sequence[bytes]]
) -> set[int]:
    """The targets that the first process alone seeds, if this is another one."""
    found: set[int] = set()
    for i, (target, kind) in enumerate(zip(targets, kinds, strict=True)):
        if target is None or kind is LOCAL or any(s[i] != sums[0][i] for s in sums):
            continue
        if kind is REPLICATED or kind is HIDDEN:
            if not peers.first(group):
                found.add(target.node.index)
        if kind is not REPLICATED and len(sums) > 1:
            _warn(kind)
    return found


def _behind(records: Sequence[Record], targets: Sequence[Buffer | None], unseeded: set[int]) -> dict[int, Node]:
    """The values that unseeded targets depend on, these included."""
    nodes = {t.node.index: t.node for t in targets if t is not None and t.node.index in unseeded}
    for record in reversed(records):
        if any(n.index in nodes for n in record.results):
            nodes.update((n.index, n) for n in record.followed)
    return nodes


def _warn(kind: str) -> None:
    if kind is HIDDEN:
        text = (
            "the target is the same on every rank and comes from a call with collectives inside (recompute_grad, a "
            "loop): it is counted once; if it is each rank's own, reduce it outside of the call"
        )
    else:
        text = (
            "the target is the same on every rank, but is made of reduced values and of others: it is counted once "
            "for each rank; wrap what every rank has the same way, a regularizer say, in tg.distributed.once(...)"
        )
    warn(f"gradient: {text}", ReplicatedTargetWarning)
