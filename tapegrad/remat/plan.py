"""Plans at work: of chosen calls of layers and functions only the results stay; what tapes want besides is recomputed.

A call is known by what it is a call of (kind, name, file and line of its definition) and by its number in the step, as
profiles count (``calls``): the same look at the stack numbers them here and there, and the program is not touched.
When the program has left a chosen call, the budget's manager drops what was made in it, and makes it again from its
recipes for the rules that read it; or moves it to another memory.  Only calls under a recorder count, and none in a
rerun; calls inside a chosen one are counted, but nothing more is done for them.
"""

from __future__ import annotations

import json
import os
import threading
import warnings
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from tapegrad.core import locks
from tapegrad.core.buffer import Buffer
from tapegrad.core.node import Node
from tapegrad.core.protocols import Retained
from tapegrad.core.state import thread
from tapegrad.errors import TapegradError
from tapegrad.remat import policies
from tapegrad.remat.budget.budget import MANAGER, memory_budget, watched
from tapegrad.remat.program_files import full_name, relative_name
from tapegrad.tracing.frames import Call, Frames, caller
from tapegrad.tracing.phase import FORWARD, HERE, phase

FORMAT = "tapegrad.plan"
VERSION = 1
MAX_BYTES = 64 << 20
KINDS = ("function", "layer")
DEEDS = ("checkpoint", "offload")
Key = tuple[str, str, str, int]
"""What a call is a call of: kind, name, file, line of the definition."""


class PlanError(TapegradError, ValueError):
    """A plan that cannot be read, or is none."""


@dataclass(frozen=True)
class Action:
    """What to do with the calls ``ordinals`` of ``key``: "checkpoint", or "offload" (values to another memory).

    ``relative``: the file from the folder of the program on, by which a copy of it is known too; "" if it is not there.
    """

    do: str
    kind: str
    name: str
    file: str
    line: int
    ordinals: tuple[int, ...]
    relative: str = ""

    @property
    def key(self) -> Key:
        """What they are calls of."""
        return self.kind, self.name, full_name(self.file), self.line

    def is_in(self, file: str) -> bool:
        """Whether the definition is in ``file``, or in what that is a copy of."""
        return full_name(self.file) == full_name(file) or bool(self.relative) and self.relative == relative_name(file)


@dataclass(frozen=True, eq=False)
class _Site:
    """One chosen call: what the plan names it, and what to do with it."""

    name: tuple[Key, int]
    action: Action


class _Local(threading.local):
    def __init__(self) -> None:
        self.site: _Site | None = None
        """The chosen call that the program is in."""
        self.nodes: dict[int, None] = {}
        """What was applied in it."""
        self.inputs: dict[int, Retained] = {}
        """What that has read of others: it stays until the call's values have been recomputed."""


MOST_CALLS = 4096


class Applied:
    """A plan in force: told of every operation, it knows the calls by the frames that the program is in."""

    def __init__(self, actions: Iterable[Action]) -> None:
        self._chosen: dict[Key, dict[int, Action]] = {}
        self._known: dict[Key, Key | None] = {}
        self._relative: dict[Key, Key] = {}
        for action in actions:
            self._chosen.setdefault(action.key, {}).update(dict.fromkeys(action.ordinals, action))
            self._known[action.key] = action.key
            if action.relative:
                self._relative[action.kind, action.name, action.relative, action.line] = action.key
        self._met: set[tuple[Key, int]] = set()
        self._frames = Frames("none")
        self._sites: dict[int, _Site | None] = {-1: None}
        """By the number of a call: the chosen one that it is, or lies in."""
        self._forgotten = 0
        self._local = _Local()
        self._lock = locks.lock()

    def applied(self, node: Node, inputs: tuple[Buffer, ...]) -> None:
        """``node`` is about to be applied; if the program has left a chosen call, what only tapes want of it goes."""
        local, site = self._local, None
        if not (HERE.optimizing or (HERE.walking and not HERE.reruns)):
            with self._lock:
                _, call = self._frames.look(caller(1))
                site = self._site(call) if thread.recorders and phase() == FORWARD else None
        if site is not local.site:
            nodes, read, before = [*local.nodes], [*local.inputs.values()], local.site
            local.site, local.nodes, local.inputs = site, {}, {}
            if before is not None:
                answer = policies.OFFLOAD if before.action.do == "offload" else policies.RECOMPUTE
                MANAGER.release(nodes, read, answer)
        if site is not None:
            local.nodes[node.index] = None
            inputs, beside = node.prim.apart(inputs)
            if beside is not None:
                local.nodes[beside.node.index] = None
            for b in inputs:
                index = b.node.index
                if index not in local.nodes and index not in local.inputs:
                    local.inputs[index] = MANAGER.save((b,))
            self._met.add(site.name)

    def unmet(self) -> list[tuple[Key, int]]:
        """The chosen calls that the program has not made so far."""
        return [(key, i) for key, chosen in self._chosen.items() for i in chosen if (key, i) not in self._met]

    def _site(self, number: int) -> _Site | None:
        """The outermost chosen call that a call is, or lies in."""
        if number not in self._sites:
            if number - self._forgotten > MOST_CALLS:
                self._forget(number)
            call = self._frames.calls[number]
            self._sites[number] = None if call is None else self._site(call.parent) or self._chosen_as(call)
        return self._sites[number]

    def _chosen_as(self, call: Call) -> _Site | None:
        if call.phase != FORWARD or call.kind >= len(KINDS):
            return None
        key = self._named((KINDS[call.kind], call.name, full_name(call.file), call.line))
        action = self._chosen[key].get(call.ordinal) if key is not None else None
        return None if key is None or action is None else _Site((key, call.ordinal), action)

    def _named(self, key: Key) -> Key | None:
        """What the plan calls ``key``: by the file's full name, or in a copy of the program by its relative one."""
        if key not in self._known:
            kind, name, file, line = key
            self._known[key] = self._relative.get((kind, name, relative_name(file), line))
        return self._known[key]

    def _forget(self, number: int) -> None:
        """Forget the calls that are over."""
        self._frames.forget(range(self._forgotten, number))
        self._forgotten = number
        self._sites = {n: site for n, site in self._sites.items() if n < 0 or self._frames.calls[n] is not None}


plan: Applied | None = None
"""The plan in force, for all threads."""


@contextmanager
def apply_plan(actions: Iterable[Action], budget_bytes: int | None = None) -> Iterator[Applied]:
    """In the block, in all threads, what chosen calls make is dropped when they return, if only tapes want it.

    It is recomputed, or comes back, when a gradient reads it.  With ``budget_bytes``, memory is kept within it.  Raises
    PlanError if a plan is in force already.
    """
    global plan
    if plan is not None:
        raise PlanError("a plan is in force already; leave its block first")
    with ExitStack() as stack:
        if budget_bytes is not None:
            stack.enter_context(memory_budget(budget_bytes))
        plan = Applied(actions)
        try:
            if plan.unmet():
                stack.enter_context(watched(plan.applied))
            yield plan
        finally:
            plan = None


@contextmanager
def use_plan(path: str | os.PathLike[str]) -> Iterator[Applied]:
    """In the block, do what the plan in the file ``path`` (of ``tapegrad plan``) says with calls.

    A UserWarning says at the end if chosen calls were not met.  Raises PlanError for no plan.
    """
    actions, budget_bytes = read_actions(path)
    with apply_plan(actions, budget_bytes) as applied:
        yield applied
    missed = applied.unmet()
    if missed:
        (kind, name, file, line), number = missed[0]
        warnings.warn(
            f"{os.fspath(path)}: {len(missed)} of the plan's calls were not met, such as call {number} of {kind} "
            f"{name} ({file}:{line}); if the program has changed, make the plan from a new run",
            stacklevel=3,
        )


def read_actions(path: str | os.PathLike[str]) -> tuple[list[Action], int | None]:
    """The actions of the plan in a file, and its budget for the whole program.  Raises PlanError with one line."""
    return actions_of(read_json(path), os.fspath(path))


def read_json(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The JSON object in a plan's file.  Raises PlanError with one line."""
    name = os.fspath(path)
    try:
        with open(name, "rb") as file:
            data = file.read(MAX_BYTES + 1)
        if len(data) > MAX_BYTES:
            raise PlanError(f"{name}: larger than {MAX_BYTES >> 20} MiB; that is no plan")
        if data.startswith(b"SQLite format 3\0"):
            raise PlanError(f"{name}: this is a run, not a plan; make one with tapegrad plan")
        content = json.loads(data.decode("utf-8"), parse_constant=_refuse)
    except OSError as e:
        raise PlanError(f"{name}: {e.strerror or e}") from e
    except PlanError:
        raise
    except (ValueError, RecursionError) as e:
        reason = (str(e).splitlines() or [type(e).__name__])[0][:100]
        raise PlanError(f"{name}: not a plan of tapegrad, or cut off ({reason})") from None
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise PlanError(f"{name}: not a plan of tapegrad")
    if type(content.get("version")) is not int or content["version"] != VERSION:
        raise PlanError(
            f"{name}: of version {content.get('version')!r:.20}, and this tapegrad reads version {VERSION}; "
            "make the plan again with tapegrad plan"
        )
    return content


def actions_of(content: dict[str, Any], name: str) -> tuple[list[Action], int | None]:
    """The actions in a plan's JSON object, and its budget for the whole program.  Raises PlanError."""
    rows, budget = content.get("actions"), content.get("memory_budget")
    if not isinstance(rows, list):
        raise PlanError(f"{name}: 'actions' is not a list")
    if budget is not None and not (is_count(budget) and budget > 0):
        raise PlanError(f"{name}: 'memory_budget' is neither null nor a number of bytes")
    return [_action(row, f"{name}: action {i}") for i, row in enumerate(rows)], budget


def _action(row: object, what: str) -> Action:
    if not isinstance(row, dict) or not {"do", "kind", "name", "file", "line", "ordinals"} <= set(row):
        raise PlanError(f"{what} does not have do, kind, name, file, line and ordinals")
    if row["do"] not in DEEDS or row["kind"] not in KINDS:
        raise PlanError(f"{what}: 'do' is one of {', '.join(DEEDS)} and 'kind' one of {', '.join(KINDS)}")
    if not isinstance(row["name"], str) or not isinstance(row["file"], str) or "\0" in row["file"]:
        raise PlanError(f"{what}: name and file are not strings that can be such")
    ordinals, relative = row["ordinals"], row.get("relative", "")
    if not isinstance(relative, str):
        raise PlanError(f"{what}: relative is not a string")
    if not is_count(row["line"]) or not isinstance(ordinals, list) or not all(map(is_count, ordinals)):
        raise PlanError(f"{what}: line and ordinals are not whole numbers from 0 on")
    return Action(row["do"], row["kind"], row["name"], row["file"], row["line"], tuple(ordinals), relative)


def is_count(value: object) -> bool:
    """Whether a value from a file is an integer from 0 on, and not too large to be meant."""
    return type(value) is int and 0 <= value < 1 << 62


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no number that a plan may hold")
