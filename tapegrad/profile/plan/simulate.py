"""What a step would have held if some of its calls had been checkpointed.

A checkpointed call keeps its inputs and its results; what it made besides goes when it returns.  When the backward pass
comes to it, what pends is computed first, then the call runs again, and makes again what it had made; its results'
cotangents and its inputs stay until its own backward pass is over.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from tapegrad.profile.plan.step import BACKWARD, NEVER, Key, Life, Site, Step

_LAST = 1 << 60
Profile = list[tuple[Key, int]]
"""Bytes alive from each moment on until the next."""


@dataclass
class Change:
    """What checkpointing one call changes.

    ``lives``: what its own forward allocations become; of others ``until``: ends that move back, ``sooner``: ends that
    move forward.
    """

    site: Site
    lives: dict[int, list[Life]] = field(default_factory=dict)
    until: dict[int, Key] = field(default_factory=dict)
    sooner: dict[int, Key] = field(default_factory=dict)
    cotangents: list[Life] = field(default_factory=list)
    """Those of the call's results that would pend."""
    kept_bytes: int = 0
    out_bytes: int = 0


def change_of(step: Step, site: Site) -> Change:
    """What checkpointing ``site`` changes; it must have a backward pass."""
    change = Change(site)
    _make_again(step, site, change)
    _compute_pending(step, site, change)
    _hold_inputs(step, site, change)
    _hold_cotangents(step, site, change)
    return change


def _make_again(step: Step, site: Site, change: Change) -> None:
    """The call's own values: in the first run, and in the rerun, whose events have the order of the first run's."""
    begin, over = site.back_begin, (site.back_begin, -1, _LAST)
    for i in site.made:
        life = step.lives.get(i)
        if life is None:
            continue
        made, end = life.begin[0], life.end
        again = begin, -1, made
        if end[0] <= site.close:
            change.lives[i] = [life, Life(life.bytes, again, (begin, -1, end[0]))]
            continue
        needed = over < end < NEVER
        if made > site.close or end == NEVER or step.read_outside(site, i):
            first = Life(life.bytes, life.begin, _end_of_result(site, end))
            change.out_bytes = max(change.out_bytes, life.bytes)
        else:
            first = Life(life.bytes, life.begin, (site.close, 2, 0))
            change.kept_bytes += life.bytes if needed else 0
        change.lives[i] = [first, Life(life.bytes, again, end if needed else over)]


def _end_of_result(site: Site, end: Key) -> Key:
    """When a result goes that the call's own backward pass does not read: the rerun has made what it reads."""
    return end if end < (site.back_begin, -4, 0) or end > (site.back_close, 0, 0) else (site.back_begin, -4, 0)


def _compute_pending(step: Step, site: Site, change: Change) -> None:
    """What pends when the walk comes to the call is computed then."""
    a, own = step.run.allocs, set(site.backward)
    lo = bisect_right(step.allocated, (site.back_begin, _LAST))
    hi = bisect_right(step.allocated, (site.back_close, _LAST))
    for seq, i in step.allocated[lo:hi]:
        if a["phase"][i] == BACKWARD and i not in own:
            change.sooner.update((j, (site.back_begin, -2, seq)) for j in step.freed_after(seq) if j not in own)


def _hold_inputs(step: Step, site: Site, change: Change) -> None:
    """Inputs of the call stay until its backward pass is over."""
    a = step.run.allocs
    done = (site.back_close, 3, 0)
    freed = step.freed[bisect_right(step.freed, (site.back_begin, _LAST)) : bisect_right(step.freed, (done[0], _LAST))]
    read = step.read[bisect_left(step.read, (site.begin, -1)) : bisect_right(step.read, (site.close, _LAST))]
    for i in {*(i for _, i in freed), *(i for seq, i in read if step.computed_from(seq) in site.mine)}:
        life = step.lives[i]
        if a["phase"][i] != BACKWARD and i not in site.mine and life.begin[0] <= site.close and life.end < done:
            change.until[i] = done


def _hold_cotangents(step: Step, site: Site, change: Change) -> None:
    """Cotangents of the call's results are there when its backward pass begins, and stay until it is over.

    Values that one kernel would read and then free are parts of a sum that pends; it is computed before.
    """
    start, done = (site.back_begin, 0, 0), (site.back_close, 3, 0)
    parts: dict[int, list[int]] = {}
    own, come = set(site.backward), False
    there = bisect_right(step.backward, site.back_close, key=step.run.allocs["begin_seq"].__getitem__)
    for i in step.backward[:there]:
        life = step.lives[i]
        if i in own or i in change.sooner or life.end <= start:
            continue
        if life.bytes == change.out_bytes:
            come = True
            if life.end < NEVER:
                parts.setdefault(step.close_of(life.end[0]), []).append(i)
        if life.end < done:
            change.until[i] = done
    for those in parts.values():
        if len(those) > 1:
            end = max(done, max(step.lives[i].end for i in those))
            change.cotangents.append(Life(change.out_bytes, (site.back_begin, -3, 1), end))
            for i in those:
                change.sooner[i] = site.back_begin, -2, 1
                change.until.pop(i, None)
    if not come and step.cotangent_pends(site):
        change.cotangents.append(Life(change.out_bytes, (site.back_begin, -3, 0), done))


def lives_with(lives: Mapping[int, Life], changes: Iterable[Change]) -> list[Life]:
    """What the lives in a step become with several changes at once (of calls that are not within each other)."""
    own: dict[int, list[Life]] = {}
    until: dict[int, Key] = {}
    sooner: dict[int, Key] = {}
    result: list[Life] = []
    for change in changes:
        own.update(change.lives)
        result += change.cotangents
        for i, key in change.until.items():
            until[i] = max(until.get(i, key), key)
        for i, key in change.sooner.items():
            sooner[i] = min(sooner.get(i, key), key)
    for i, life in lives.items():
        first, *rest = own.get(i, (life,))
        end = min(first.end, sooner.get(i, first.end))
        if i in until:
            end = max(end, until[i])
        result.append(Life(life.bytes, first.begin, max(first.begin, end)))
        result += rest
    return result


def effect_of(lives: Mapping[int, Life], changes: Sequence[Change]) -> Profile:
    """What changes add to the bytes alive."""
    touched = {i for c in changes for part in (c.lives, c.until, c.sooner) for i in part}
    before = {i: lives[i] for i in touched if i in lives}
    gone = [Life(-life.bytes, life.begin, life.end) for life in before.values()]
    return profile([*gone, *lives_with(before, changes)])


def profile(lives: Iterable[Life]) -> Profile:
    """Bytes alive right after each moment at which something begins or ends; ends at a moment come first."""
    events: dict[Key, int] = {}
    for life in lives:
        events[life.begin] = events.get(life.begin, 0) + life.bytes
        if life.end < NEVER:
            events[life.end] = events.get(life.end, 0) - life.bytes
    total, result = 0, []
    for key in sorted(events):
        total += events[key]
        result.append((key, total))
    return result


def peak(lives: Iterable[Life]) -> tuple[int, Key]:
    """The most bytes alive at once, and when first."""
    best, at = 0, (-1, 0, 0)
    for key, total in profile(lives):
        if total > best:
            best, at = total, key
    return best, at


def alive_at(profile: Profile, moment: Key) -> int:
    """Bytes alive at a moment."""
    at = bisect_right(profile, moment, key=lambda pair: pair[0])
    return profile[at - 1][1] if at else 0
