"""Runs a kernel's PTX: all threads of several blocks at once, each instruction an operation on whole arrays.

Threads that stand at the lowest place of the code go first, until they come to where others wait, or to a barrier: so
those that parted meet again as soon as they can.  A barrier lets a block through when all its threads that are alive
have come, an instruction of a warp when all have that its mask names; if nobody can go on, that is an error.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from . import arithmetic, moves, warps  # noqa: F401 (they register what they handle)
from .memory import Fault, Global, Own, Shared
from .operands import HANDLERS, UNSIGNED, Lanes, Read, Run, Scope, typed
from .parse import Function, Instruction, Module, PTXError, Register, Symbol, Variable, Vector, parse

MOST_STEPS = 2_000_000
"""Instructions of a launch after which a loop is taken to have no end."""
AT_ONCE = 4096
"""Threads that run side by side."""

OP, BRANCH, TABLE, END, BARRIER, WARP, CALL = range(7)


@dataclass
class Step:
    """One instruction, ready to run."""

    kind: int
    run: Run | None
    guard: tuple[int, bool] | None
    ins: Instruction
    leads: bool = False  # it has a label: others may come here too
    target: Any = None
    members: Read | None = None


class Program:
    """A text's functions, each made ready when it is first wanted, and the memory that they declare."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.module: Module = parse(text)
        self._ready: dict[str, Code] = {}
        self.places: dict[str, tuple[str, int]] = {}
        at = 1 << 16  # no host address
        for variable in self.module.variables.values():
            if variable.space in ("global", "const"):
                self.places[variable.name] = ("global", at)
                at += -(-variable.size // 256) * 256 + 256

    def code(self, name: str) -> Code:
        """The function of this name."""
        if name not in self._ready:
            self._ready[name] = Code(self, self.module.functions[name].read())
        return self._ready[name]

    def constants(self) -> list[tuple[int, Variable]]:
        """Variables of the text in global memory, with their addresses."""
        return [(self.places[v.name][1], v) for v in self.module.variables.values() if v.name in self.places]


class Code:
    """One function's steps."""

    def __init__(self, program: Program, function: Function) -> None:
        self.program, self.function = program, function
        self.places = dict(program.places)
        self.sizes = {"shared": 0, "local": 0, "param": 0}
        outer = [v for v in program.module.variables.values() if v.space == "shared" and v.size]
        dynamic = [v for v in program.module.variables.values() if v.space == "shared" and not v.size]
        # Parameters first: a launch gives them as bytes from 0 on.
        for variable in [*outer, *function.params, *function.returns, *function.variables.values()]:
            at = -(-self.sizes[variable.space] // variable.align) * variable.align
            self.places[variable.name] = (variable.space, at)
            self.sizes[variable.space] = at + variable.size
        self.static = -(-self.sizes["shared"] // 16) * 16
        for variable in dynamic:
            self.places[variable.name] = ("shared", self.static)
        self.scope = Scope(function, self.places)
        self.targets = set(function.labels.values())
        self.steps = [self._step(i, ins) for i, ins in enumerate(function.code)]
        self.executed = np.zeros(len(self.steps) + 1, bool)

    def _step(self, number: int, ins: Instruction) -> Step:
        guard = (ins.guard[0].number, ins.guard[1]) if ins.guard else None
        step = Step(OP, None, guard, ins, number in self.targets)
        try:
            self._fill(step, ins)
        except PTXError as error:
            raise PTXError(f"{self.function.name}, line {ins.line}: {error}: {ins.text}") from None
        except (KeyError, IndexError, StopIteration, ValueError, TypeError) as error:
            raise PTXError(f"{self.function.name}, line {ins.line}: not understood ({error!r}): {ins.text}") from error
        return step

    def _fill(self, step: Step, ins: Instruction) -> None:
        name, first = ins.name, ins.words[0]
        if first in ("bra", "brx"):
            if first == "bra":
                step.kind, step.target = BRANCH, self._label(ins.operands[0])
            else:
                table = self.function.tables[ins.operands[1].name]  # type: ignore[union-attr]
                step.kind, step.target = TABLE, [self.function.labels[one] for one in table]
                step.members = self.scope.read(ins.operands[0], "u32")
        elif name in ("ret", "ret.uni", "exit"):
            step.kind = END
        elif name in ("bar.sync", "barrier.sync", "barrier.sync.aligned"):
            if len(ins.operands) != 1:
                raise PTXError("a barrier of some threads only is not known")
            step.kind = BARRIER
        elif name in ("trap", "membar.gl", "membar.cta", "membar.sys") or first in ("fence", "pragma"):
            step.run = _trap if name == "trap" else lambda f, lanes: None
        elif name == "bar.warp.sync":
            step.kind, step.run = WARP, lambda f, lanes: None
            step.members = self.scope.read(ins.operands[0], "b32")
        elif first == "call":
            step.kind, step.target = CALL, ins
            if self._called(ins) not in self.program.module.functions:
                raise PTXError("no such function is known")
        elif first in HANDLERS:
            step.run = HANDLERS[first](self.scope, ins)
            if first in warps.MEMBERS:
                step.kind, step.members = WARP, self.scope.read(ins.operands[-1], "b32")
            elif first in warps.WHOLE:
                step.kind, step.members = WARP, lambda f: np.full(f.threads, 0xFFFFFFFF, np.uint32)
        else:
            raise PTXError("no such instruction is known")

    @staticmethod
    def _called(ins: Instruction) -> str:
        return next(one.name for one in ins.operands if isinstance(one, Symbol))

    def _label(self, operand: Any) -> int:
        if not isinstance(operand, Symbol) or operand.name not in self.function.labels:
            raise PTXError("to where?")
        return self.function.labels[operand.name]


def _trap(frame: Any, lanes: Lanes) -> None:
    raise Fault("trap", int(lanes.index[0]))


class Frame:
    """The state of a function's threads: registers, carries, memory, and who they are."""

    def __init__(self, code: Code, grid: Sequence[int], block: Sequence[int], blocks: np.ndarray,
                 spaces: dict[str, Any], dynamic: int = 0) -> None:  # fmt: skip
        self.code, self.grid, self.block = code, tuple(grid), tuple(block)
        size = int(np.prod(self.block))
        self.size, self.blocks = size, blocks
        self.threads = size * len(blocks)
        number = np.tile(np.arange(size), len(blocks))
        self.owner = np.repeat(np.arange(len(blocks)), size)
        per_block = -(-size // 32)
        self.warps = per_block * len(blocks)
        self.warp = self.owner * per_block + number // 32
        self.lane = (number % 32).astype(np.uint32)
        self.first_lane = np.arange(self.threads) - number % 32
        self._number = number
        self.carry = np.zeros(self.threads, bool)
        self.alive = np.ones(self.threads, bool)
        self.spaces = dict(spaces)
        sizes = code.sizes
        self.spaces["local"] = Own("local", np.arange(self.threads), self.threads, sizes["local"])
        if "shared" not in self.spaces:
            self.spaces["shared"] = Shared(self.owner, len(blocks), code.static + dynamic, self.warp)
        junk = {bits: np.full(self.threads, 0xA5A5A5A5A5A5A5A5 >> 64 - bits if bits > 1 else 0, kind)
                for bits, kind in UNSIGNED.items()}  # fmt: skip
        self.registers = [junk[one.bits] for one in code.function.registers]

    def special(self, name: str) -> np.ndarray:
        """A register that says who a thread is, or how the launch is cut."""
        what, _, axis = name.lstrip("%").partition(".")
        place = "xyz".index(axis) if axis else 0
        if what in ("ntid", "nctaid"):
            return np.full(self.threads, (self.block if what == "ntid" else self.grid)[place], np.uint32)
        if what in ("tid", "ctaid"):
            number, sizes = (self._number, self.block) if what == "tid" else (self.blocks[self.owner], self.grid)
            before = int(np.prod(sizes[:place]))
            return (number // before % sizes[place]).astype(np.uint32)
        if what == "laneid":
            return self.lane
        one = np.uint32(1)
        if what == "lanemask_lt":
            return (one << self.lane) - one
        if what == "lanemask_le":
            return ((one << self.lane) - one) | one << self.lane
        raise PTXError(f"no special register {name} is known")

    def who(self, thread: int) -> str:
        """A thread's coordinates."""
        index = [int(self.special(f"%{what}.{axis}")[thread]) for what in ("ctaid", "tid") for axis in "xyz"]
        return f"block {tuple(index[:3])}, thread {tuple(index[3:])}"


class _Runner:
    """One frame on its way through the code."""

    def __init__(self, frame: Frame, whole_launch: bool = True) -> None:
        self.frame, self.steps, self.executed = frame, frame.code.steps, frame.code.executed
        self.pending: dict[int, np.ndarray] = {}
        self.waiting: dict[int, np.ndarray] = {}
        self.left = MOST_STEPS
        self.top = whole_launch

    def run(self) -> None:
        self.pending = {0: self.frame.alive.copy()}
        while self.pending or self.waiting:
            if not self.pending:
                self._release()
            at = min(self.pending)
            flags = self.pending.pop(at)
            self._go(at, Lanes(flags, not self.pending and not self.waiting))

    def _add(self, table: dict[int, np.ndarray], at: int, flags: np.ndarray) -> None:
        table[at] = table[at] | flags if at in table else flags

    def _go(self, at: int, lanes: Lanes | None) -> None:
        """On from one place until these threads part, wait, end, or come to where others are."""
        frame, steps, begun = self.frame, self.steps, True
        while lanes is not None:
            if at == len(steps):
                frame.alive = frame.alive & ~lanes.flags
                return
            step = steps[at]
            if step.leads and self.pending and not begun:
                return self._add(self.pending, at, lanes.flags)
            begun = False
            self.left -= 1
            if self.left < 0:
                raise PTXError(f"{self._at(step)}: no end after {MOST_STEPS} instructions")
            self.executed[at] = True
            if step.kind == OP:
                some: Lanes | None = lanes
                if step.guard:
                    p = frame.registers[step.guard[0]]
                    some = lanes.under(p if step.guard[1] else ~p)
                if some is not None:
                    self._do(step, some)
                at += 1
            elif step.kind in (BARRIER, WARP):
                if step.guard:
                    raise PTXError(f"{self._at(step)}: a predicate before what threads do together")
                if not (lanes.whole and self._complete(step, lanes.flags).all()):
                    return self._add(self.waiting, at, lanes.flags)
                self._together(step, lanes)
                at += 1
            else:
                at, lanes = self._turn(at, step, lanes)

    def _turn(self, at: int, step: Step, lanes: Lanes) -> tuple[int, Lanes | None]:
        """Branches, calls and ends: where to go on, and who does."""
        frame, going = self.frame, lanes.flags
        if step.kind == CALL:
            self._call(step, lanes)
            return at + 1, lanes
        if step.kind == TABLE:
            choice = step.members(frame)  # type: ignore[misc]
            for number, target in enumerate(step.target):
                if (some := going & (choice == number)).any():
                    self._add(self.pending, target, some)
            return at, None
        staying: Lanes | None = None
        if step.guard:
            p = frame.registers[step.guard[0]]
            p = p if step.guard[1] else ~p
            going, staying = lanes.flags & p, lanes.under(~p)
            if not going.any():
                return at + 1, lanes
        if step.kind == END:
            frame.alive = frame.alive & ~going
            if staying is not None:
                staying = Lanes(staying.flags, lanes.whole)
            return at + 1, staying
        if staying is None:
            if step.target > at and not self.pending:
                return step.target, lanes
            self._add(self.pending, step.target, lanes.flags)
            return at, None
        self._add(self.pending, step.target, going)
        self._add(self.pending, at + 1, staying.flags)
        return at, None

    def _do(self, step: Step, lanes: Lanes) -> None:
        try:
            step.run(self.frame, lanes)  # type: ignore[misc]
        except Fault as fault:
            raise PTXError(f"{self._at(step)}: {fault.what}, by {self.frame.who(fault.thread)}") from None
        except PTXError as error:
            raise PTXError(f"{self._at(step)}: {error}") from None

    def _at(self, step: Step) -> str:
        return f"kernel {self.frame.code.function.name}, line {step.ins.line} ({step.ins.text})"

    def _complete(self, step: Step, flags: np.ndarray) -> np.ndarray:
        """The threads among those that have come for which everybody is there."""
        frame = self.frame
        if step.kind == BARRIER:
            if not self.top:
                raise PTXError(f"{self._at(step)}: a barrier inside of a function")
            missing = (frame.alive & ~flags).reshape(-1, frame.size).any(axis=1)
            return flags & ~missing[frame.owner] | ~frame.alive
        members = step.members(frame)  # type: ignore[misc]
        mine = np.broadcast_to((members >> frame.lane) & np.uint32(1) != 0, frame.threads)
        if (flags & ~mine).any():
            thread = int(np.flatnonzero(flags & ~mine)[0])
            raise PTXError(f"{self._at(step)}: the mask leaves out {frame.who(thread)}")
        first = np.full(frame.warps, 0, np.uint32)
        first[frame.warp[flags]] = np.broadcast_to(members, frame.threads)[flags]
        if ((first[frame.warp] != members) & flags).any():
            raise PTXError(f"{self._at(step)}: threads of a warp give different masks")
        needed = (first[frame.warp] >> frame.lane) & np.uint32(1) != 0
        absent = needed & frame.alive & ~flags
        short = np.bincount(frame.warp[absent], minlength=frame.warps) > 0
        return flags & ~short[frame.warp] | ~frame.alive

    def _together(self, step: Step, lanes: Lanes) -> None:
        shared = self.frame.spaces["shared"]
        if step.kind == BARRIER:
            shared.passed = shared.passed + lanes.flags
            return
        if step.ins.name == "bar.warp.sync":
            shared.synced = shared.synced + lanes.flags
        self._do(step, lanes)

    def _release(self) -> None:
        for at in sorted(self.waiting):
            flags = self.waiting[at]
            ready = flags & self._complete(self.steps[at], flags)
            if ready.any():
                rest = flags & ~ready
                del self.waiting[at]
                if rest.any():
                    self.waiting[at] = rest
                self._together(self.steps[at], Lanes(ready, not self.waiting))
                self._add(self.pending, at + 1, ready)
                return
        places = "; ".join(self._at(self.steps[at]) for at in sorted(self.waiting))
        raise PTXError(f"threads wait for others that never come: {places}")

    def _call(self, step: Step, lanes: Lanes) -> None:
        """A function of the text, run by these threads before anything else happens."""
        frame, ins = self.frame, step.target
        operands = list(ins.operands)
        name = frame.code._called(ins)
        before = operands[: operands.index(Symbol(name))]
        after = operands[operands.index(Symbol(name)) + 1 :]
        code = frame.code.program.code(name)
        spaces = {kind: frame.spaces[kind] for kind in ("global", "shared")}
        spaces["param"] = Own("param", np.arange(frame.threads), frame.threads, code.sizes["param"])
        inner = Frame(code, frame.grid, frame.block, frame.blocks, spaces)
        inner.alive = lanes.flags.copy()
        pairs = list(zip(_named(after), code.function.params))
        for given, variable in pairs:
            self._copy(frame, given, inner, variable.name, variable.size)
        runner = _Runner(inner, False)
        runner.left = self.left
        runner.run()
        self.left = runner.left
        for given, variable in zip(_named(before), code.function.returns):
            self._copy(inner, variable.name, frame, given, variable.size)

    def _copy(self, source: Frame, name: str, target: Frame, other: str, size: int) -> None:
        start, to = source.code.places[name][1], target.code.places[other][1]
        out = _rows(target)
        out[:, to : to + size] = _rows(source)[:, start : start + size]


def _rows(frame: Frame) -> np.ndarray:
    space = frame.spaces["param"]
    return space.store.bytes[: space.stride * frame.threads].reshape(frame.threads, -1)


def _named(operands: Sequence[Any]) -> list[str]:
    """The parameters' names among the operands of a call."""
    return [one.name for group in operands for one in (group.items if isinstance(group, Vector) else (group,))]


def launch(program: Program, name: str, grid: Sequence[int], block: Sequence[int], arguments: bytes,
           memory: Global, dynamic: int = 0) -> None:  # fmt: skip
    """Run a kernel on a copy of memory; ``arguments``: its parameters one behind the other, each aligned as declared.

    Raises PTXError, which names the kernel, the line and the thread.
    """
    code = program.code(name)
    for address, variable in program.constants():
        part = memory.part(address, variable.size)
        part[:] = np.frombuffer(variable.value or bytes(variable.size), np.uint8)
    total, size = int(np.prod(grid)), int(np.prod(block))
    if size > code.function.most_threads:
        raise PTXError(f"kernel {name}: {size} threads, its bound is {code.function.most_threads}")
    several = max(1, AT_ONCE // size)
    with np.errstate(all="ignore"):
        for first in range(0, total, several):
            blocks = np.arange(first, min(first + several, total))
            threads = size * len(blocks)
            calls = any(step.kind == CALL for step in code.steps)  # then each thread has arguments to give
            own = Own("param", np.arange(threads) * calls, threads if calls else 1, code.sizes["param"])
            if len(arguments) > own.size:
                raise PTXError(f"kernel {name}: {len(arguments)} bytes of arguments for {own.size}")
            own.store.bytes.reshape(-1, own.stride)[:, : len(arguments)] = np.frombuffer(arguments, np.uint8)
            _Runner(Frame(code, _three(grid), _three(block), blocks, {"global": memory, "param": own}, dynamic)).run()


def _three(sizes: Sequence[int]) -> tuple[int, ...]:
    return (*sizes, *[1] * (3 - len(sizes)))


__all__ = ["Callable", "Program", "Register", "launch", "typed"]
