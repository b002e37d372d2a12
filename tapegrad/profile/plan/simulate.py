"""What a step would have held if some of its calls had been checkpointed.

A checkpointed call keeps its inputs and its results; what it made besides goes when it returns.  When the backward pass
comes to it, what pends is computed first, then the call runs again, and makes again what it had made; its results'
cotangents and its inputs stay until its own backward pass is over, and what pends of that is computed then.
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

    ``lives``: what its own forward allocations become; ``until``: ends that move back, ``sooner`` and ``earlier``:
    ends and beginnings that move forward, of others.
    """

    site: Site
    lives: dict[int, list[Life]] = field(default_factory=dict)
    until: dict[int, Key] = field(default_factory=dict)
    sooner: dict[int, Key] = field(default_factory=dict)
    earlier: dict[int, Key] = field(default_factory=dict)
    results: list[Life] = field(default_factory=list)
    """Values that only exist because the call's results are made when it returns, and their cotangents."""
    sums: dict[int, Life] = field(default_factory=dict)
    """Sums of cotangents that are computed sooner, by when their parts would have gone."""
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
    pends = step.result_pends(site)
    for i in site.made:
        life = step.lives.get(i)
        if life is None:
            continue
        made, end = life.begin[0], life.end
        late, again = made > site.close, (begin, -1, made)
        if end[0] <= site.close:
            change.lives[i] = [life, Life(life.bytes, again, (begin, -1, end[0]))]
            continue
        escapes = not late and (end == NEVER or step.read_outside(site, i))
        if escapes and pends:  # the result is made from it when the call returns
            change.results.append(Life(life.bytes, (site.close, 1, made), _end_of_result(site, end)))
            change.lives[i] = [
                Life(life.bytes, life.begin, (site.close, 2, 0)),
                Life(life.bytes, again, over if end < over else min(end, (step.used_in_backward(site, i), 2, 0))),
            ]
            continue
        needed = over < end < NEVER
        if late or escapes:
            first = Life(life.bytes, (site.close, 1, made) if late else life.begin, _end_of_result(site, end))
            change.out_bytes = max(change.out_bytes, life.bytes)
        else:
            first = Life(life.bytes, life.begin, (step.last_needed(site, i), 2, 0))
            change.kept_bytes += life.bytes if needed else 0
        change.lives[i] = [first]
        if needed:
            change.lives[i].append(Life(life.bytes, over if late else again, end))
        elif not late:
            change.lives[i].append(Life(life.bytes, again, over))
    if change.results:  # one, of the size of the largest value that it is made from
        change.results = [max(change.results, key=lambda life: (life.bytes, life.end))]
        change.out_bytes = max(change.out_bytes, change.results[0].bytes)


def _end_of_result(site: Site, end: Key) -> Key:
    """When a result goes that the call's own backward pass does not read: the rerun has made what it reads."""
    return end if end < (site.back_begin, -4, 0) or end > (site.back_close, 0, 0) else (site.back_begin, -4, 0)


def _compute_pending(step: Step, site: Site, change: Change) -> None:
    """What pends when the walk comes to the call is computed then, and what pends after it when it leaves it."""
    a, own = step.run.allocs, set(site.backward)
    lo = bisect_right(step.allocated, (site.back_begin, _LAST))
    hi = bisect_right(step.allocated, (site.back_last, _LAST))
    moved: dict[int, Key] = {}
    for seq, i in step.allocated[lo:hi]:
        if a["phase"][i] == BACKWARD and i not in own and step.walked_before(i, site.back_begin):
            moved[i] = site.back_begin, -3, seq
    moved |= {i: (site.back_close, 1, seq) for i in own if (seq := a["begin_seq"][i]) > site.back_close}
    for i, at in moved.items():
        change.earlier[i] = at
        for j in step.freed_after(at[2]):
            if a["phase"][j] == BACKWARD and a["begin_seq"][j] <= at[0] and ((j in own) == (i in own)):
                change.sooner[j] = at[0], at[1] + 1, at[2]


def _hold_inputs(step: Step, site: Site, change: Change) -> None:
    """Inputs of the call stay until its backward pass is over."""
    a = step.run.allocs
    done = (site.back_close, 3, 0)
    freed = step.freed[bisect_right(step.freed, (site.back_begin, _LAST)) : bisect_right(step.freed, (done[0], _LAST))]
    read = step.read[bisect_left(step.read, (site.begin, -1)) : bisect_right(step.read, (site.close, _LAST))]
    for i in {*(i for _, i in freed), *(i for _, i in read if step.read_inside(site, i))}:
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
    there = step.backward[: bisect_right(step.backward, site.back_begin, key=step.run.allocs["begin_seq"].__getitem__)]
    for i in (*there, *(i for i in change.earlier if i not in own)):
        life = step.lives[i]
        if i in own or i in change.sooner or not change.earlier.get(i, life.begin) < start < life.end:
            continue
        if life.bytes == change.out_bytes and i not in step.gradients:
            come = True
            if life.end < NEVER:
                parts.setdefault(step.close_of(life.end[0]), []).append(i)
        if life.end < done:
            change.until[i] = done
    for close, those in parts.items():
        if len(those) > 1:
            end = max(done, max(step.lives[i].end for i in those))
            change.sums[close] = Life(change.out_bytes, (site.back_begin, -3, 1), end)
            for i in those:
                change.sooner[i] = site.back_begin, -2, 1
                change.until.pop(i, None)
    if not come and step.cotangent_pends(site):
        change.results.append(Life(change.out_bytes, (site.back_begin, -3, 0), done))


def lives_with(lives: Mapping[int, Life], changes: Iterable[Change]) -> list[Life]:
    """What the lives in a step become with several changes at once (of calls that are not within each other)."""
    own: dict[int, list[Life]] = {}
    until: dict[int, Key] = {}
    sooner: dict[int, Key] = {}
    earlier: dict[int, Key] = {}
    found: list[Life] = []
    sums: dict[int, list[Life]] = {}
    for change in changes:
        own.update(change.lives)
        found += change.results
        for close, life in change.sums.items():
            sums.setdefault(close, []).append(life)
        for i, key in change.until.items():
            until[i] = max(until.get(i, key), key)
        for into, keys in ((sooner, change.sooner), (earlier, change.earlier)):
            for i, key in keys.items():
                into[i] = min(into.get(i, key), key)
    for parts in sums.values():
        parts.sort(key=lambda life: life.begin)
        for life, following in zip(parts, [*parts[1:], None]):
            end = life.end if following is None else min(life.end, (following.begin[0], -2, 1))
            found.append(Life(life.bytes, life.begin, end))
    for i, life in lives.items():
        first, *rest = own.get(i, (life,))
        begin, end = min(earlier.get(i, first.begin), first.begin), first.end
        end = min(end, sooner.get(i, end))
        if i in until and first.begin < until[i]:
            end = max(end, until[i])
        found.append(Life(life.bytes, begin, max(begin, end)))
        found += rest
    return found


def effect_of(lives: Mapping[int, Life], changes: Sequence[Change]) -> Profile:
    """What changes add to the bytes alive."""
    touched = {i for c in changes for part in (c.lives, c.until, c.sooner, c.earlier) for i in part}
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
    total, found = 0, []
    for key in sorted(events):
        total += events[key]
        found.append((key, total))
    return found


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
