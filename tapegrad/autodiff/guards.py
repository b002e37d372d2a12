"""Guards: what a function reads from its surroundings, and whether that is as it was.

The surroundings are the closure cells, globals and default arguments of the function and of the user's functions and
methods that it calls, and the attributes and elements reached from there under names that their code mentions.
Tensors, variables, functions and other objects are guarded by identity; numbers, strings and the like by type and
value; NumPy arrays by identity and a sample of at most 64 evenly spaced elements, CuPy's by identity alone, since a
look waits for the device.  Not noticed: a change to other elements of a large array, and what is read by a computed
name (``getattr``, ``vars``), from a container of more than 256 elements, an array of objects, a descriptor,
a context variable, a file or the environment, and an attribute that was not there.

A :class:`Guards` is made before the function runs and settled after: what the run itself has changed (a counter, a
layer that is built) is no part of the surroundings.  :class:`Bindings` are the few of a checkpointed call: what the
code of the function itself names.
"""

from __future__ import annotations

import dis
import functools
import sys
import types
import weakref
from collections import ChainMap, UserDict, deque
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from tapegrad.device import CPU, is_array
from tapegrad.tensor import Tensor
from tapegrad.variable import Variable

_MAPPINGS = (dict, UserDict, ChainMap, types.MappingProxyType)
_CONTAINERS = (list, tuple, deque, *_MAPPINGS, set, frozenset, bytearray)
_VALUES = (
    int,
    float,
    complex,
    str,
    bytes,
    bool,
    type(None),
    type(...),
    slice,
    range,
    CPU.xp.dtype,
    CPU.xp.generic,
    frozenset,
)
_MOST = 2000
_DEEPEST = 8
_LONGEST = 256
_SAMPLE = 64
_BY_TEXT = frozenset(("getattr", "vars", "attrgetter", "__dict__"))
_missing = type("missing", (), {"__repr__": lambda self: "nothing"})()


class Read(NamedTuple):
    """One thing that is read: as the user writes it, the expression of a check, and its value."""

    name: str
    expression: str
    value: Any


class Guards:
    """What ``f`` reads from its surroundings, as it is now; :meth:`settle` after a run, then :meth:`hold`.

    ``owner``: a reference to the object whose method ``f`` is, which it takes first.
    """

    def __init__(self, f: Callable[..., Any], owner: weakref.ref[Any] | None = None) -> None:
        self._f, self._owner = f, owner
        self._reads, _ = _look(f, owner)
        self.hold: Callable[[], bool] = bool
        """Whether everything is as it was."""

    def settle(self) -> None:
        """The function has run: leave out what it has changed, take up what it has made."""
        before = {(r.name, r.expression): r.value for r in self._reads}
        reads, constants = _look(self._f, self._owner)
        self._reads = [r for r in reads if _same(before.get((r.name, r.expression), r.value), r.value)]
        self.hold = _compiled(self._reads, constants)

    def failure(self) -> str | None:
        """Return the first guard that does not hold, with both values; None if all do."""
        now = {(r.name, r.expression): r.value for r in _look(self._f, self._owner)[0]}
        for r in self._reads:
            value = now.get((r.name, r.expression), _missing)
            if not _same(r.value, value):
                return f"{r.name}: {_shown(r.value)} -> {_shown(value)}"
        return None


class Sample:
    """An array that may be changed in place: itself, and some of its elements."""

    __slots__ = ("array", "bytes", "view")

    def __init__(self, array: Any) -> None:
        self.array = array
        self.view = self.bytes = None
        if isinstance(array, CPU.xp.ndarray) and array.dtype.kind != "O":
            self.view = _spread(array)
            self.bytes = self.view.tobytes()

    def __call__(self, array: Any) -> bool:
        return array is self.array and (self.view is None or self.view.tobytes() == self.bytes)

    def __repr__(self) -> str:
        return f"array {self.array.dtype}{list(self.array.shape)}"


def _spread(array: Any) -> Any:
    """Return a view of at most ``_SAMPLE`` elements from all over an array."""
    count = _SAMPLE
    steps = []
    for n in sorted(array.shape):
        kept = min(n, max(1, count))
        steps.append(slice(None, None, -(-n // kept) if kept else 1))
        count //= max(1, kept)
    order = sorted(range(array.ndim), key=array.shape.__getitem__)
    index: list[Any] = [slice(None)] * array.ndim
    for axis, step in zip(order, steps, strict=True):
        index[axis] = step
    return array[tuple(index)]


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, Sample) and isinstance(b, Sample):
        return a.array is b.array and a.bytes == b.bytes
    if isinstance(a, weakref.ref) and isinstance(b, weakref.ref):
        return a() is b() and a() is not None
    return a is b or (type(a) is type(b) and isinstance(a, _VALUES) and _key(a) == _key(b))


def _key(value: Any) -> Any:
    """Return a key that separates values of one type: 0.0 from -0.0, but not nan from nan."""
    return value if isinstance(value, frozenset) else repr(value)


def _shown(value: Any) -> str:
    value = value() if isinstance(value, weakref.ref) else value
    if isinstance(value, Variable):
        return f'variable "{value.name}"'
    if isinstance(value, Tensor):
        return f"a tensor {value.dtype}{list(value.shape)}"
    if isinstance(value, (types.FunctionType, type)):
        return value.__qualname__
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."


# Looking around -----------------------------------------------------------------------------------------------------


def _look(f: Callable[..., Any], owner: weakref.ref[Any] | None = None) -> tuple[list[Read], dict[str, Any]]:
    """Return what ``f`` reads now, and the constants that the expressions name."""
    around = _Around()
    if owner is not None:
        around.value("self", around.constant(owner), owner, 0)
    around.function(f)
    around.run()
    return around.reads, around.constants


class _Around:
    """A look at the surroundings of a function: roots first, then what is reached from them."""

    def __init__(self) -> None:
        self.reads: list[Read] = []
        self.constants: dict[str, Any] = {}
        self._names: set[str] = set()
        self._functions: set[int] = set()
        self._seen: dict[int, Any] = {}
        self._open: list[tuple[Any, str, str, int]] = []

    def constant(self, value: Any) -> str:
        name = f"k{len(self.constants)}"
        self.constants[name] = value
        return name

    def function(self, f: Any) -> None:
        """Add what a callable reads, and the names that its code mentions."""
        for _ in range(_DEEPEST):
            if isinstance(f, functools.partial):
                for i, value in enumerate(f.args):
                    self.value(f"argument {i} of a partial", self.constant(f) + f".args[{i}]", value, 1)
                for key, value in f.keywords.items():
                    self.value(f"argument {key} of a partial", self.constant(f) + f".keywords[{key!r}]", value, 1)
                f = f.func
            elif isinstance(f, types.MethodType):
                self.value("self", self.constant(f) + ".__self__", f.__self__, 0)
                f = f.__func__
            elif not isinstance(f, types.FunctionType) and hasattr(f, "__wrapped__"):
                f = f.__wrapped__
            elif not isinstance(f, types.FunctionType) and _is_users(type(f)):
                self.value("self", self.constant(f), f, 0)
                f = type(f).__call__
            else:
                break
        if not isinstance(f, types.FunctionType) or id(f) in self._functions or not _is_users(f):
            return
        self._functions.add(id(f))
        name = self.constant(f)
        for code in _codes(f.__code__):
            self._names.update(code.co_names)
            if not _BY_TEXT.isdisjoint(code.co_names):
                self._names.update(x for x in code.co_consts if isinstance(x, str) and x.isidentifier())
            for key in code.co_names:
                if key in f.__globals__ and not _is_special(key):
                    self.value(f"global {key}", f"{name}.__globals__[{key!r}]", f.__globals__[key], 0)
        for key, cell in zip(f.__code__.co_freevars, f.__closure__ or (), strict=True):
            try:
                value = cell.cell_contents
            except ValueError:
                continue
            self.value(f"closure variable {key}", f"{self.constant(cell)}.cell_contents", value, 0)
        defaults = f.__defaults__ or ()
        parameters = f.__code__.co_varnames[: f.__code__.co_argcount][-len(defaults) :] if defaults else ()
        for i, (key, value) in enumerate(zip(parameters, defaults, strict=True)):
            self.value(f"default {key}", f"{name}.__defaults__[{i}]", value, 0)
        for key, value in (f.__kwdefaults__ or {}).items():
            self.value(f"default {key}", f"{name}.__kwdefaults__[{key!r}]", value, 0)

    def value(self, name: str, expression: str, value: Any, depth: int) -> None:
        """Add a guard of a value, and look into it later."""
        if len(self.reads) >= _MOST or isinstance(value, types.ModuleType) and not _is_users(value):
            return
        if isinstance(value, weakref.ref):
            value, expression = value(), f"{expression}()"
        kept = value
        if is_array(value):
            kept = Sample(value)
        elif not isinstance(value, _VALUES):
            try:
                kept = weakref.ref(value)  # a guard keeps no value alive
            except TypeError:
                kept = value
        self.reads.append(Read(name, expression, kept))
        if not isinstance(value, (*_VALUES, Tensor, Variable)) and not is_array(value) and depth < _DEEPEST:
            self._open.append((value, name, expression, depth + 1))

    def run(self) -> None:
        """Follow values until nothing is new: names that code mentions decide which attributes are read."""
        known: dict[int, tuple[Any, str, str, int]] = {}
        done: set[tuple[int, str]] = set()
        while True:
            while self._open:
                item = self._open.pop()
                if id(item[0]) not in known:
                    known[id(item[0])] = item
                    self._inside(*item)
            count = len(self._names), len(self.reads)
            for value, name, expression, depth in list(known.values()):
                if not isinstance(value, (*_CONTAINERS, types.FunctionType)):
                    for key in sorted(self._names):
                        if (id(value), key) not in done:
                            done.add((id(value), key))
                            self._attribute(value, name, expression, depth, key)
            if not self._open and count == (len(self._names), len(self.reads)):
                return

    def _inside(self, value: Any, name: str, expression: str, depth: int) -> None:
        short = name.split(" ")[-1]
        if isinstance(value, (list, tuple, deque)) and len(value) <= _LONGEST:
            self.reads.append(Read(f"len({short})", f"len({expression})", len(value)))
            for i, item in enumerate(value):
                self.value(f"{short}[{i}]", f"{expression}[{i}]", item, depth)
        elif isinstance(value, _MAPPINGS) and len(value) <= _LONGEST:
            self.reads.append(Read(f"len({short})", f"len({expression})", len(value)))
            for key, item in list(value.items()):
                place = repr(key) if type(key) in (int, str) else self.constant(key)
                self.value(f"{short}[{key!r}]", f"{expression}[{place}]", item, depth)
        elif isinstance(value, bytearray) and len(value) <= _LONGEST:
            self.reads.append(Read(name, f"bytes({expression})", bytes(value)))
        elif isinstance(value, (set, frozenset)) and len(value) <= _LONGEST:
            if all(isinstance(x, _VALUES) for x in value):
                self.reads.append(Read(name, f"frozenset({expression})", frozenset(value)))
        elif _is_layer(value):
            for key, item in list(vars(value).items()):
                self.value(f"{short}.{key}", f"{expression}.__dict__[{key!r}]", item, depth)
        elif isinstance(value, types.FunctionType) or (callable(value) and not isinstance(value, type)):
            self.function(value)

    def _attribute(self, value: Any, name: str, expression: str, depth: int, key: str) -> None:
        kind = value if isinstance(value, type) else type(value)
        if _is_special(key) or not (isinstance(value, types.ModuleType) or _is_users(kind)):
            return
        short = name.split(" ")[-1]
        declared = next((vars(c)[key] for c in kind.__mro__ if key in vars(c)), _missing)
        own = getattr(value, "__dict__", {})
        if isinstance(declared, property):
            self.function(declared.fget)
        elif isinstance(declared, (staticmethod, classmethod)) and key not in own:
            self.function(declared.__func__)
        elif isinstance(declared, types.FunctionType) and (key not in own or kind is value):
            owner = next(c for c in kind.__mro__ if key in vars(c))
            self.value(f"{short}.{key}", f"{self.constant(weakref.ref(owner))}().{key}", declared, depth)
        elif key in own or isinstance(declared, types.MemberDescriptorType):
            try:
                item = own[key] if key in own else getattr(value, key)
            except AttributeError:
                return
            self.value(f"{short}.{key}", f"{expression}.{key}", item, depth)
        elif declared is not _missing and not hasattr(declared, "__get__"):
            self.value(f"{short}.{key}", f"{expression}.{key}", declared, depth)


def _is_special(name: str) -> bool:
    return name.startswith("__") and name.endswith("__")


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _codes(constant)


@functools.cache
def _libraries() -> frozenset[str]:
    ours = {"tapegrad", "numpy", "scipy", "cupy", "cupyx", "ml_dtypes"}
    return (frozenset(sys.stdlib_module_names) | ours) - {"types", "argparse"}  # their namespaces are the user's


def _is_users(thing: Any) -> bool:
    """Whether a function, class or module is the user's, and not a library's that does not change."""
    module = thing.__name__ if isinstance(thing, types.ModuleType) else getattr(thing, "__module__", None)
    root = (module or "").partition(".")[0]
    return root == "__main__" or (root not in _libraries() and root not in ("builtins", ""))


def _is_layer(value: Any) -> bool:
    """Whether a value is a layer, of this package or derived: its attributes are its configuration and its weights."""
    return hasattr(type(value), "trainable_variables") and hasattr(type(value), "call") and hasattr(value, "__dict__")


# Checking -----------------------------------------------------------------------------------------------------------


def _compiled(reads: list[Read], constants: dict[str, Any]) -> Callable[[], bool]:
    """Return one function that checks all guards, cheapest first within what was read first."""
    scope: dict[str, Any] = {
        **constants,
        "key": _key,
        "gone": (AttributeError, KeyError, IndexError, ValueError, TypeError),
    }
    lines = []
    for i, r in enumerate(reads):
        if isinstance(r.value, Sample):
            scope[f"v{i}"] = r.value
            lines.append(f"if not v{i}({r.expression}): return False")
        elif isinstance(r.value, weakref.ref):
            scope[f"v{i}"] = r.value
            lines.append(f"if {r.expression} is not v{i}(): return False")
        elif isinstance(r.value, _VALUES):
            scope[f"v{i}"], scope[f"t{i}"] = r.value, type(r.value)
            lines.append(
                f"if (x := {r.expression}) is not v{i} and (type(x) is not t{i} or key(x) != key(v{i})): return False"
            )
        else:
            scope[f"v{i}"] = r.value
            lines.append(f"if {r.expression} is not v{i}: return False")
    body = "\n        ".join(lines) or "pass"
    text = f"def hold():\n    try:\n        {body}\n    except gone:\n        return False\n    return True\n"
    exec(text, scope)
    hold: Callable[[], bool] = scope.pop("hold")  # no cycle: the scope is the globals of the function
    return hold


# Bindings -----------------------------------------------------------------------------------------------------------


class Bindings:
    """What the names that the code of ``f`` reads, and does not write, are bound to; nothing is looked into."""

    def __init__(self, f: Callable[..., Any]) -> None:
        self._f = f
        self._bound = dict(_bound(f))

    def settle(self) -> None:
        """The function has run: leave out what it has bound to something else."""
        self._bound = {name: x for name, x in _bound(self._f) if name in self._bound and _same(self._bound[name], x)}

    def change(self) -> str | None:
        """Return the first name that is bound to something else now, with both values; None if all are as they were."""
        for name, value in _bound(self._f):
            first = self._bound.get(name, value)
            if not _same(first, value):
                return f"{name} was {_shown(first)} and is {_shown(value)}"
        return None


def _bound(f: Any) -> Iterator[tuple[str, Any]]:
    """Yield the names that the code of ``f`` reads and does not write, and their values."""
    owner: Any = None
    for _ in range(_DEEPEST):
        if isinstance(f, functools.partial):
            f = f.func
        elif isinstance(f, types.MethodType):
            owner, f = f.__self__, f.__func__
        elif not isinstance(f, types.FunctionType) and hasattr(f, "__wrapped__"):
            f = f.__wrapped__
        elif not isinstance(f, types.FunctionType) and _is_users(type(f)):
            owner, f = f, type(f).__call__
        else:
            break
    if not isinstance(f, types.FunctionType):
        return
    names, cells, attributes = _reads_of(f.__code__)
    for i, name in cells:
        try:
            yield f"closure variable {name}", f.__closure__[i].cell_contents  # type: ignore[index]
        except ValueError:
            continue
    for name in names:
        if name in f.__globals__:
            yield f"global {name}", f.__globals__[name]
    if owner is not None and _is_users(type(owner)):
        for name in attributes:
            value = getattr(owner, "__dict__", {}).get(name, _missing)
            if isinstance(value, _VALUES):
                yield f"self.{name}", value


@functools.lru_cache(maxsize=4096)
def _reads_of(code: types.CodeType) -> tuple[list[str], list[tuple[int, str]], list[str]]:
    """Return the globals, the closure variables by position and the attributes that code reads and does not write."""
    read: dict[str, set[str]] = {"GLOBAL": set(), "DEREF": set(), "ATTR": set()}
    written: dict[str, set[str]] = {"GLOBAL": set(), "DEREF": set(), "ATTR": set()}
    for part in _codes(code):
        for instruction in dis.get_instructions(part):
            action, _, kind = instruction.opname.partition("_")
            if kind in read and action in ("LOAD", "STORE", "DELETE"):
                (read if action == "LOAD" else written)[kind].add(instruction.argval)
    cells = [(i, name) for i, name in enumerate(code.co_freevars) if name not in written["DEREF"]]
    return sorted(read["GLOBAL"] - written["GLOBAL"]), cells, sorted(read["ATTR"] - written["ATTR"])
