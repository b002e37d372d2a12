"""Plans at work: chosen calls of layers and functions run under recompute_grad, though the program does not say so.

A call is known by what it is a call of (kind, name, file and line of its definition) and by its number in the step, as
profiles count (``calls``).  Layers ask here in ``Layer.__call__``; functions do once ``profile/plan/rewrite`` has put
:func:`planned` on their definitions.  Only calls under a recorder are counted, and none in a rerun; inside a call that
is checkpointed, calls are counted, but nothing more is checkpointed.
"""

from __future__ import annotations

import functools
import inspect
import json
import os
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from tapegrad.core.node import next_index
from tapegrad.core.state import thread
from tapegrad.errors import TapegradError
from tapegrad.memory import policies
from tapegrad.memory.budget.budget import memory_budget
from tapegrad.memory.checkpoint.recompute import recompute_grad
from tapegrad.memory.checkpoint.rerun import Lookout, RerunTrace
from tapegrad.memory.ledger.frames import Ordinals
from tapegrad.memory.ledger.phase import BY_GRADIENT, HERE, STEPS
from tapegrad.memory.program_files import full_name, relative_name

if TYPE_CHECKING:
    from tapegrad.core.protocols import Recorder

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


class _Local(threading.local):
    def __init__(self) -> None:
        self.ordinals = Ordinals()


class Applied:
    """A plan in force."""

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
        self._local = _Local()

    def layer(self, layer: Any, inputs: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What ``layer.call`` returns."""
        return self.call(layer_key(type(layer)), layer.call, (inputs, *args), kwargs)

    def call(self, key: Key | None, f: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What ``f`` returns, checkpointed if the plan has chosen this call of ``key``."""
        named = self._named(key) if key is not None else None
        chosen = self._chosen[named] if named is not None else None
        recorders = thread.recorders
        if chosen is None or thread.walks or not (recorders or thread.hidden) or any(map(_repeats, recorders)):
            return f(*args, **kwargs)
        number, worked = self._number(key), _Worked(f)
        action = chosen.get(number)
        try:
            if action is None or not recorders or any(isinstance(r, Lookout) for r in recorders):
                return worked(*args, **kwargs)
            # A policy wants both runs to do the same; what a first call builds, such as weights, the next ones do not.
            policy = _offload if action.do == "offload" and (named, number) in self._met else None
            result = recompute_grad(functools.wraps(f)(worked), policy=policy)(*args, **kwargs)
            if worked.any:
                self._met.add((named, number))  # type: ignore[arg-type]
            return result
        finally:
            if not worked.any:
                self._local.ordinals.take_back(key)

    def unmet(self) -> list[tuple[Key, int]]:
        """The chosen calls that the program has not made so far."""
        return [(key, i) for key, chosen in self._chosen.items() for i in chosen if (key, i) not in self._met]

    def _named(self, key: Key) -> Key | None:
        """What the plan calls ``key``: by the file's full name, or in a copy of the program by its relative one."""
        if key not in self._known:
            kind, name, file, line = key
            self._known[key] = self._relative.get((kind, name, relative_name(file), line))
        return self._known[key]

    def _number(self, key: object) -> int:
        if HERE.differentiated:  # as profiles see the end of a step that nothing else marks
            STEPS.mark(BY_GRADIENT)
        return self._local.ordinals.next(key)


class _Worked:
    """A function, and whether a call of it has made any node: profiles see no other calls, and number none."""

    def __init__(self, f: Callable[..., Any]) -> None:
        self._f = f
        self.any = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        began = next_index()
        try:
            return self._f(*args, **kwargs)
        finally:
            self.any = self.any or next_index() > began + 1


def _repeats(recorder: Recorder) -> bool:
    """Whether a recorder is one of a rerun."""
    return isinstance(recorder, RerunTrace) or (isinstance(recorder, Lookout) and not recorder.outer)


def _offload(value: policies.Value) -> policies.Answer:
    return policies.OFFLOAD


plan: Applied | None = None
"""The plan in force, for all threads."""

_layer_keys: WeakKeyDictionary[type, tuple[Any, Key | None]] = WeakKeyDictionary()


def layer_key(cls: type) -> Key | None:
    """What calls of the layer class ``cls`` are calls of; None if its ``call`` is not written in Python."""
    f: Any = cls.call  # type: ignore[attr-defined]
    entry = _layer_keys.get(cls)
    if entry is None or entry[0] is not f:
        code = getattr(inspect.unwrap(f), "__code__", None)
        key = None if code is None else ("layer", cls.__qualname__, full_name(code.co_filename), code.co_firstlineno)
        entry = _layer_keys[cls] = f, key
    return entry[1]


def planned(f: Callable[..., Any]) -> Callable[..., Any]:
    """A decorator: calls of the function ``f`` ask the plan in force, if there is one."""
    code = f.__code__
    key = "function", f.__qualname__, full_name(code.co_filename), code.co_firstlineno

    @functools.wraps(f)
    def call(*args: Any, **kwargs: Any) -> Any:
        return f(*args, **kwargs) if plan is None else plan.call(key, f, args, kwargs)

    return call


@contextmanager
def apply_plan(actions: Iterable[Action], budget_bytes: int | None = None) -> Iterator[Applied]:
    """In the block, in all threads, the chosen calls are checkpointed; with ``budget_bytes``, memory is kept within it.

    Raises PlanError if a plan is in force already.
    """
    global plan
    if plan is not None:
        raise PlanError("a plan is in force already; leave its block first")
    with ExitStack() as stack:
        if budget_bytes is not None:
            stack.enter_context(memory_budget(budget_bytes))
        plan = Applied(actions)
        try:
            yield plan
        finally:
            plan = None


@contextmanager
def use_plan(path: str | os.PathLike[str]) -> Iterator[Applied]:
    """In the block, do what the plan in the file ``path`` (of ``tapegrad plan``) says with the calls of layers.

    Calls of plain functions need their definitions changed, which ``tapegrad profile --plan`` does; a UserWarning says
    so if the plan has any, and another at the end if chosen calls were not met.  Raises PlanError for no plan.
    """
    actions, budget_bytes = read_actions(path)
    functions = sum(len(a.ordinals) for a in actions if a.kind == "function")
    if functions:
        warnings.warn(
            f"{os.fspath(path)}: the plan has {functions} calls of plain functions, which are left as they are here; "
            "run the program with tapegrad profile --plan, or wrap them in tg.recompute_grad",
            stacklevel=3,
        )
    with apply_plan(actions, budget_bytes) as applied:
        yield applied
    missed = [(key, number) for key, number in applied.unmet() if key[0] == "layer"]
    if missed:
        (_, name, file, line), number = missed[0]
        warnings.warn(
            f"{os.fspath(path)}: {len(missed)} of the plan's calls of layers were not met, such as call {number} of "
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
        if data.startswith(b"\x1f\x8b"):  # gzip
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
