"""Runs made by hand: small ones with known figures, and large ones."""

from __future__ import annotations

import random

from tapegrad.tracing.names import CATEGORIES, KINDS, MARKS, PHASES
from tapegrad.tracing.run import Run
from tapegrad.tracing.timeline import peak, totals

MIB = 1 << 20


class Builder:
    """Writes the tables of a run, event by event; every event takes the next seq and a microsecond."""

    def __init__(self, **meta: object) -> None:
        self.run = Run(
            {
                "tapegrad": "0.1.0", "python": "3.11.7", "numpy": "2.4.6", "cupy": None, "platform": "Linux",
                "created": "2026-11-21T12:00:00Z", "pid": 4242, "program": "train.py", "module": None,
                "argv": ["train.py", "--batch", "64"], "threads": 2, "limit_bytes": None, "plan": None,
                "stacks": "line",
                "device": {"name": "cpu", "model": "a processor", "total_bytes": 24 << 30, "pool": "HostPool"},
                "outcome": {"kind": "finished", "code": 0, "message": ""},
            }
            | meta
        )  # fmt: skip
        self.seq = -1
        self.step = -1
        self.phase = "other"
        self.call = -1
        self._numbers: dict[str, int] = {}
        self._stacks: dict[tuple, int] = {}
        self._ordinals: dict[tuple, int] = {}

    @property
    def ns(self) -> int:
        return max(self.seq, 0) * 1000

    def _row(self, table: str, **values: int) -> int:
        columns = self.run.tables[table]
        assert set(values) == set(columns), set(values) ^ set(columns)
        for column, value in values.items():
            columns[column].append(value)
        return self.run.count(table) - 1

    def text(self, s: str) -> int:
        if s not in self._numbers:
            self._numbers[s] = len(self.run.strings)
            self.run.strings.append(s)
        return self._numbers[s]

    def stack(self, file: str, line: int, function: str) -> int:
        key = (file, line, function)
        if key not in self._stacks:
            where = {"file": self.text(file), "line": line, "function": self.text(function)}
            frame = self._row("frames", **where, end_line=-1, column=-1, end_column=-1)
            self._stacks[key] = self._row("stacks", frame=frame, parent=-1)
            self.run.sources.setdefault(file, {})[str(line)] = f"y = {function}(x)  # line {line}"
        return self._stacks[key]

    def tick(self) -> int:
        self.seq += 1
        return self.seq

    def enter(self, kind: str, name: str, file: str = "model.py", line: int = 1, first: int = -1) -> int:
        key = (kind, name, file, line, self.step, self.phase)
        ordinal = self._ordinals[key] = self._ordinals.get(key, -1) + 1
        self.call = self._row(
            "calls", kind=KINDS.index(kind), name=self.text(name), file=self.text(file), line=line, parent=self.call,
            step=self.step, ordinal=ordinal, phase=PHASES.index(self.phase), begin_seq=self.seq + 1,
            end_seq=self.seq + 1, begin_ns=self.ns, end_ns=self.ns, first=first,
            site=-1,
        )  # fmt: skip
        return self.call

    def leave(self) -> None:
        calls = self.run.calls
        calls["end_seq"][self.call], calls["end_ns"][self.call] = self.seq, self.ns
        self.call = calls["parent"][self.call]

    def alloc(
        self, nbytes: int, category: str, op: str, place: tuple[str, int, str] = ("model.py", 1, "f"),
        remat_of: int = -1, shape: str = "", dtype: str = "float32", holder: str = "",
    ) -> int:  # fmt: skip
        seq = self.tick()
        self._row(
            "ops",
            seq=seq,
            ns=self.ns,
            name=self.text(op),
            phase=PHASES.index(self.phase),
            call=self.call,
            stack=self.stack(*place),
            bytes=-(-nbytes // 512) * 512,
            cost=nbytes,
            derivative_of=-1,
        )
        seq = self.tick()
        return self._row(
            "allocs", begin_seq=seq, end_seq=-1, begin_ns=self.ns, end_ns=-1, bytes=-(-nbytes // 512) * 512,
            requested=nbytes, category=CATEGORIES.index(category), op=self.text(op), phase=PHASES.index(self.phase),
            stack=self.stack(*place), call=self.call, shape=self.text(shape or f"({nbytes // 4},)"),
            dtype=self.text(dtype), step=self.step, holder=self.text(holder), remat_of=remat_of, last_forward_seq=-1,
            next_backward_seq=-1, device=self.text("cpu"),
            source=self.run.count("ops") - 1,
        )  # fmt: skip

    def change(self, alloc: int, category: str) -> None:
        self._row("changes", seq=self.tick(), alloc=alloc, category=CATEGORIES.index(category))

    def free(self, *allocs: int) -> None:
        for alloc in allocs:
            self.run.allocs["end_seq"][alloc] = self.tick()
            self.run.allocs["end_ns"][alloc] = self.ns

    def mark(self, kind: str, text: str = "") -> None:
        self._row("marks", seq=self.tick(), ns=self.ns, kind=MARKS.index(kind), text=self.text(text))

    def walk(self, begin: int, end: int, rank: int = 0) -> int:
        """Times in us."""
        return self._row("walks", rank=rank, begin_ns=begin * 1000, end_ns=end * 1000)

    def collective(
        self, kind: str, entered: int, done: int, waited: int | None = None, *, begun: int | None = None,
        needed: int | None = None, rank: int = 0, ranks: int = 1, number: int = 1, group: str = "world",
        nbytes: int = MIB, under_way: bool = False, walk: int = -1, line: int = 50, file: str = "model.py",
    ) -> int:  # fmt: skip
        """Times in us; a program waits for all of a collective that is not under way."""
        waited = done - entered if waited is None else waited
        return self._row(
            "communication", rank=rank, group=self.text(group), ranks=ranks, number=number, kind=self.text(kind),
            detail=self.text(f"float32 ({nbytes // 4},)"), bytes=nbytes, file=self.text(file), line=line,
            entered_ns=entered * 1000, begun_ns=(entered if begun is None else begun) * 1000, done_ns=done * 1000,
            needed_ns=(done - waited if needed is None else needed) * 1000, waited_ns=waited * 1000,
            under_way=int(under_way), walk=walk,
        )  # fmt: skip

    def told(self, rank: int, peak: int, begin: int, end: int, sent: int) -> None:
        """A rank has told of itself; times in us."""
        self._row(
            "ranks", rank=rank, peak_bytes=peak, begin_ns=begin * 1000, end_ns=end * 1000, sent_bytes=sent
        )  # fmt: skip

    def begin_step(self) -> None:
        self.step = self._row(
            "steps", begin_seq=self.seq + 1, end_seq=self.seq + 1, begin_ns=self.ns, end_ns=self.ns, cpu_ns=0,
            peak_bytes=0, peak_seq=0, reruns=0, restored=0, evictions=0, offloads=0,
        )  # fmt: skip

    def end_step(self) -> None:
        self.mark("step")
        steps, i = self.run.steps, self.step
        steps["end_seq"][i], steps["end_ns"][i], steps["cpu_ns"][i] = self.seq, self.ns, self.ns
        steps["peak_bytes"][i], steps["peak_seq"][i] = peak(self.run, steps["begin_seq"][i], self.seq)
        self.step = -1

    def finish(self) -> Run:
        best, at = peak(self.run)
        steps = self.run.steps
        step = next(
            (i for i in range(self.run.count("steps")) if steps["begin_seq"][i] <= at <= steps["end_seq"][i]), -1
        )
        self.run.peak = {"bytes": best, "seq": at, "step": step, "reserved_bytes": -1}
        self.run.checks = {"events": self.seq + 1, "dropped": 0, "checked": 0, "drift_bytes": 0}
        assert all(sum(by) == total for _, _, total, by in totals(self.run))
        return self.run


def training(
    steps: int = 3,
    blocks: int = 4,
    size: int = MIB,
    checkpointed: int = 0,
    function: str = "block",
    file: str = "model.py",
) -> Run:
    """A training program: ``blocks`` calls of a layer that each keep 3 arrays of ``size`` bytes for the backward pass.

    The first ``checkpointed`` blocks keep their input alone and are rerun.  Each block also makes one temporary.
    """  # fmt: skip
    b = Builder()
    weights = [b.alloc(size // 4, "parameter", "leaf", (file, 5, "__init__")) for _ in range(blocks)]
    slots = [b.alloc(size // 4, "optimizer", "leaf", (file, 80, "main")) for _ in range(blocks)]
    assert weights and slots
    for _ in range(steps):
        b.begin_step()
        b.phase = "forward"
        x = b.alloc(size, "input", "leaf", (file, 90, "main"))
        kept, inputs, calls = [], [], []
        for i in range(blocks):
            inputs.append(x)
            calls.append(b.enter("layer", function, file, 40))
            mine = []
            for line in (42, 43, 44):
                y = b.alloc(size, "temporary", "matmul", (file, line, function), holder="vjp of matmul")
                temp = b.alloc(size // 2, "temporary", "softmax", (file, line, function))
                if i >= checkpointed or line == 44:
                    b.change(y, "activation")
                mine.append(y)
                b.free(temp)
            if i < checkpointed:
                b.free(*mine[:-1])
            b.leave()
            kept.append(mine)
            x = mine[-1]
        b.phase = "backward"
        grads, ct = [], b.alloc(size, "temporary", "ones", (file, 95, "main"))
        for i in reversed(range(blocks)):
            if i < checkpointed:
                b.phase = "recompute"
                b.enter("layer", function, file, 40, first=calls[i])
                again = [
                    b.alloc(size, "rematerialized", "matmul", (file, line, function), remat_of=old)
                    for line, old in zip((42, 43), kept[i])
                ]
                b.leave()
                b.phase = "backward"
                kept[i][:2] = again
            for y, line in zip(reversed(kept[i]), (44, 43, 42)):
                new = b.alloc(size, "temporary", "matmul", (file, line, function))
                b.free(ct, y)
                ct = new
            grads.append(b.alloc(size // 4, "gradient", "matmul", (file, 96, "main")))
        b.free(ct, inputs[0])
        b.phase = "optimizer"
        b.free(*grads)
        b.phase = "other"
        b.end_step()
    return b.finish()


def many(count: int, seed: int = 0) -> Run:
    """A run of ``count`` allocations of all categories and many lines, with lives of all lengths."""
    chance, b, live = random.Random(seed), Builder(), []
    b.begin_step()
    b.phase = "forward"
    for i in range(count):
        place = (f"pkg/mod_{i % 7}.py", 1 + i % 90, f"f{i % 13}")
        live.append(b.alloc(512 * chance.randint(1, 4096), CATEGORIES[i % 9], ("add", "matmul", "exp")[i % 3], place))
        if len(live) > 200:
            b.free(live.pop(chance.randrange(len(live))))
        if i % (count // 5 + 1) == count // 5:
            b.end_step()
            b.begin_step()
    b.free(*live)
    b.end_step()
    return b.finish()


def empty() -> Run:
    """A run in which nothing was allocated."""
    return Builder().finish()


def hostile() -> Run:
    """Names that would break a page, a terminal or a table if they were not escaped."""
    b = Builder(argv=["</script><script>alert(1)</script>.py"], program="</script><b>x</b> ☃ [red]markup[/red]")
    place = ("C:\\Users\\zoë\\<img src=x onerror=alert(1)>.py", 3, "f</script>\x1b[31m\u202e")
    b.begin_step()
    b.phase = "forward"
    b.enter("function", "ünïcödé 💥 <i>", place[0], 2)
    x = b.alloc(MIB, "activation", "exp<script>", place, shape="(262144,)", holder='"quoted" & <held>')
    b.leave()
    b.free(x)
    b.end_step()
    b.run.sources[place[0]]["3"] = "y = '</script><script>alert(2)</script>'  # 💥 \x1b[2J"
    return b.finish()


def out_of_memory() -> Run:
    """A run that failed in its second step."""
    b = Builder(outcome={"kind": "oom", "code": 1, "message": "matmul: no room for 1.00 GiB"}, limit_bytes=6 * MIB)
    for _ in range(2):
        b.begin_step()
        b.phase = "forward"
        found = [b.alloc(MIB, "activation", "matmul", ("model.py", 7 + i, "f")) for i in range(4)]
        if b.step == 1:
            b.mark("oom", "matmul float32[16384,16384] at model.py:11 asked for 1073741824 bytes")
            b.step = -1
            break
        b.free(*found)
        b.end_step()
    return b.finish()


def several(ranks: int = 3, steps: int = 2) -> Run:
    """Ranks that sum gradients while they walk back, and wait for rank 1 in a sum at the end of each step, of 1 ms."""
    b = Builder(rank=2 % ranks, ranks=ranks)
    for i in range(steps):
        b.begin_step()
        b.free(b.alloc(MIB, "communication", "all_reduce", ("train.py", 20, "main")))
        b.end_step()
        for rank in range(ranks):
            at = 1000 * i
            walk = b.walk(at + 100, at + 700, rank)
            b.collective(
                "all_reduce", at + 200, at + 600, 50, begun=at + 210, rank=rank, ranks=ranks, number=2 * i + 1,
                under_way=True, walk=walk, line=20, file="train.py",
            )  # fmt: skip
            entered = at + (850 if rank == 1 else 800)
            b.collective(
                "all_reduce", entered, at + 900, rank=rank, ranks=ranks, number=2 * i + 2, nbytes=4, line=30,
                file="train.py",
            )  # fmt: skip
    for rank in range(ranks):
        b.told(rank, (4 + rank) * MIB, 0, 1000 * steps, 3 * MIB)
    return b.finish()


def captured(budget: bool = True) -> Run:
    """A program of four works that was replayed twice, in a budget or without: at its third, most of the arena is used.

    Arguments, variables and results of 1 MiB; what is made takes 1, 2, 3 and 1 MiB.
    """
    b = Builder()
    b.phase = "other"
    arena = b.alloc(7 * MIB, "activation", "leaf", ("train.py", 15, "main"), holder="the arena of a captured function")
    plain = _program(b, -1, 0, budget=False) if budget else -1
    program = _program(b, plain, 7 * MIB, budget)
    for _ in range(2):
        b.begin_step()
        seq = b.tick()
        b._row("replays", seq=seq, ns=b.ns, program=program, alloc=arena, step=b.step)
        b.end_step()
    return b.finish()


def _program(b: Builder, plain: int, nbytes: int, budget: bool) -> int:
    program = b._row(
        "programs", name=b.text("train"), plain=plain, bytes=nbytes, alignment=64, device=b.text("cpu")
    )  # fmt: skip
    first, makers = b.run.count("slots"), list[int]()
    for kind, category, mib, begin, end, maker in (
        (0, "input", 1, -1, 1, -1), (1, "parameter", 1, 0, 4, -1), (4, "activation", 1, 0, 3, 0),
        (4, "activation", 2, 1, 3, 1), (4, "rematerialized" if budget else "temporary", 3, 2, 4, 2),
        (4, "gradient", 1, 3, 5, 3), (4, "gradient", 1, 3, 5, 3),
    ):  # fmt: skip
        b._row(
            "slots", program=program, bytes=mib * MIB, kind=kind, category=CATEGORIES.index(category), begin=begin,
            end=end, maker=-1, outside=0,
        )  # fmt: skip
        makers.append(maker)
    uses = (((0, 1), (2,)), ((2, 1), (3,)), ((3,), (4,)), ((4, 2), (5, 6)))
    for i, (reads, writes) in enumerate(uses):
        again, phase = int(budget and i == 2), ("backward" if i > 1 else "forward")
        work = b._row(
            "tasks", program=program, op=b.text("matmul" if i % 2 else "tanh, add"), again=again,
            phase=PHASES.index(phase), cost=20 * MIB, file=b.text("train.py"), line=10 + i, rules=0,
        )  # fmt: skip
        for how, slots in enumerate((reads, writes)):
            for slot in slots:
                b._row("uses", task=work, slot=first + slot, how=how, view=0)
    count = b.run.count("tasks") - len(uses)
    b.run.slots["maker"][first:] = [-1 if maker < 0 else count + maker for maker in makers]
    for slot in (5, 6):
        b._row("uses", task=-1, slot=first + slot, how=3, view=0)
    return program
