"""Where the images of a convolution lie so that each tap is one shifted look at them: arithmetic only.

Images are laid into one long row for each channel, with gaps of zeros between lines, planes and images that are as wide
as taps reach beyond an image: a reach to the left of a line ends in the gap of the line before.  On such a *grid* a tap
moves every position by the same number of elements, so what it meets at all positions of all images is one slice.

Strides: every ``s``-th element is an image of its own, a *phase*; a tap reads one phase, at positions that step by one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from math import prod
from typing import NamedTuple

from tapegrad.device.numerics.windows import Window

Sizes = tuple[int, ...]


class Link(NamedTuple):
    """A tap: the position of the target reads the phase of the source so many lines, elements ... further."""

    tap: int
    source: int
    shift: Sizes


class Group(NamedTuple):
    """Taps that differ in their last shift alone.

    They read ``copies`` (from one number to before another) of a source, of which number ``i`` is moved by
    ``Job.moves[source][i]``.
    """

    taps: tuple[int, ...]
    source: int
    copies: tuple[int, int]
    shift: Sizes


Phase = tuple[slice, ...]
"""What a phase takes of an image, along its sizes."""


class Target(NamedTuple):
    """What is computed: a phase, and of what."""

    slices: Phase
    groups: tuple[Group, ...]


@dataclass(frozen=True, eq=False)
class Job:
    """The phases that are read, and those that are computed.  There is one for each window."""

    sources: tuple[Phase, ...]
    targets: tuple[Target, ...]
    moves: tuple[tuple[int, ...], ...]
    """Of each source: by how many elements its copies are moved against the first."""
    covers: bool
    """Whether every element of the result is in a target."""


class Grid(NamedTuple):
    """The grid of so many images, and how a block of them lies there; all offsets are in elements.

    ``first``: the line of each source with which the block begins, and the number of its lines; ``length``: from the
    first position of a target to the last; ``front``: zeros before a source; ``row``: elements of one of its rows.
    """

    sizes: Sizes
    first: tuple[tuple[int, int], ...]
    length: int
    front: int
    row: int
    offsets: tuple[tuple[int, ...], ...]
    """For each target and group: where in the source's row the first position reads."""


def _axes(window: Window) -> list[list[tuple[int, int]]]:
    """Of each axis, for each tap along it: the phase that it reads, and how far it shifts."""
    return [
        [((k * d - low) % s, (k * d - low) // s) for k in range(length)]
        for length, s, (low, _), d in zip(window.kernel, window.strides, window.padding, window.dilation)
    ]


@lru_cache(maxsize=1024)
def forward(window: Window, copied: bool) -> Job:
    """A convolution: the phases of the image are read, the positions computed.

    ``copied``: whether taps that differ in their last shift alone read copies of the source, as one group.
    """
    phases, links = _linked(window)
    return _job(phases, [(_whole(window), links)], True, copied)


@lru_cache(maxsize=1024)
def transposed(window: Window, copied: bool) -> Job:
    """Its transpose in the image: the positions are read, the phases of the image computed."""
    phases, links = _linked(window)
    targets = [
        (slices, [Link(tap, 0, tuple(-a for a in shift)) for tap, source, shift in links if source == i])
        for i, slices in enumerate(phases)
    ]
    covered = sum(prod(lengths(slices, window.size)) for slices in phases)
    return _job([_whole(window)], targets, covered == prod(window.size), copied)


def _whole(window: Window) -> Phase:
    return tuple(slice(None) for _ in window.size)


def _job(sources: list[Phase], targets: list[tuple[Phase, list[Link]]], covers: bool, copied: bool) -> Job:
    moves = []
    for i in range(len(sources)):
        shifts = sorted({link.shift[-1] for _, links in targets for link in links if link.source == i})
        moves.append(tuple(shifts) if copied else (0,))
    made = [Target(slices, tuple(_groups(links, moves, copied))) for slices, links in targets]
    return Job(tuple(sources), tuple(made), tuple(tuple(a - each[0] for a in each) for each in moves), covers)


def _groups(links: list[Link], moves: list[tuple[int, ...]], copied: bool) -> Iterator[Group]:
    if not copied:
        for tap, source, shift in links:
            yield Group((tap,), source, (0, 1), shift)
        return
    runs: list[list[tuple[Link, int]]] = []
    for link in sorted(links, key=lambda link: (link.source, link.shift)):
        number = moves[link.source].index(link.shift[-1])
        last, before = runs[-1][-1] if runs else (None, 0)
        if last is not None and (last.source, last.shift[:-1], before + 1) == (link.source, link.shift[:-1], number):
            runs[-1].append((link, number))
        else:
            runs.append([(link, number)])
    for run in runs:
        (link, first), taps = run[0], tuple(each.tap for each, _ in run)
        yield Group(taps, link.source, (first, first + len(run)), (*link.shift[:-1], moves[link.source][0]))


def _linked(window: Window) -> tuple[list[Phase], list[Link]]:
    """The phases that taps read, and the taps in C order, without those that meet nothing but padding."""
    numbers: dict[Sizes, int] = {}
    links = []
    for tap, each in enumerate(product(*_axes(window))):
        phase, shift = tuple(r for r, _ in each), tuple(a for _, a in each)
        lengths = [len(range(r, n, s)) for r, n, s in zip(phase, window.size, window.strides)]
        if all(n and -positions < a < n for positions, a, n in zip(window.positions, shift, lengths)):
            links.append(Link(tap, numbers.setdefault(phase, len(numbers)), shift))
    slices = [tuple(slice(r, None, s) for r, s in zip(phase, window.strides)) for phase in numbers]
    return slices, links


@lru_cache(maxsize=4096)
def grid(job: Job, sources: tuple[Sizes, ...], targets: tuple[Sizes, ...], images: int, lines: tuple[int, int]) -> Grid:
    """The grid on which lines ``lines`` of the targets of some images are computed.

    sources, targets: the sizes of their phases.
    """
    low, high = _reach(job, 0)
    first = tuple(_clip(lines[0] + low, lines[1] + high, shape[0]) for shape in sources)
    shifted = lines[0] - min(start for start, _ in first)
    spans = [(max(shape[i] for shape in sources), max(shape[i] for shape in targets)) for i in range(len(sources[0]))]
    spans[0] = max(start + count for start, count in first) - min(start for start, _ in first), lines[1] - lines[0]
    reaches = [_reach(job, i) for i in range(len(spans))]
    reaches[0] = low + shifted, high + shifted
    sizes = tuple(max(s + max(0, -a, t - s + b), t) for (s, t), (a, b) in zip(spans, reaches))
    steps = [prod(sizes[i + 1 :]) for i in range(len(sizes))]
    offsets = [
        [sum(a * step for a, step in zip((each.shift[0] + shifted, *each.shift[1:]), steps)) for each in target.groups]
        for target in job.targets
    ]
    furthest = [move[-1] for move in job.moves]
    least = min(min(each) for each in offsets)
    most = max(o + furthest[g.source] for t, each in zip(job.targets, offsets) for g, o in zip(t.groups, each))
    length = (images - 1) * prod(sizes) + sum((t - 1) * step for (_, t), step in zip(spans, steps)) + 1
    front = max(0, -least)
    row = front + max(images * prod(sizes), length + max(0, most))
    return Grid(sizes, first, length, front, row, tuple(tuple(front + o for o in each) for each in offsets))


def _reach(job: Job, axis: int) -> tuple[int, int]:
    """The least and the largest shift along an axis."""
    groups = [group for target in job.targets for group in target.groups]
    shifts = [group.shift[axis] for group in groups]
    if axis == len(groups[0].shift) - 1:
        ends = [(job.moves[g.source][g.copies[0]], job.moves[g.source][g.copies[1] - 1]) for g in groups]
        shifts = [shift + move for shift, moves in zip(shifts, ends) for move in moves]
    return min(shifts), max(shifts)


def _clip(start: int, stop: int, length: int) -> tuple[int, int]:
    """The part of ``start`` to ``stop`` that is within ``length``: its start and its length."""
    start = min(max(0, start), length)
    return start, max(0, min(stop, length) - start)


def lengths(slices: Iterable[slice], sizes: Sizes) -> Sizes:
    """The sizes of a phase."""
    return tuple(len(range(*s.indices(n))) for s, n in zip(slices, sizes))
