"""What is wrong with a program: run plainly, in other ways, and on the reference.

* plainly: the reference's values and derivatives, to rounding; where no rule is crooked, those of central differences;
* another thread count and tile size; checkpoints with any policy; loops that keep few states; budgets that begin and
  end anywhere, with and without these, at limits drawn at random and at the least that errors ask for; two threads with
  two programs in one budget: the plain bits;
* predicted by a dry run: the bytes, kernels and evictions of the run, without a budget and within one;
* captured, within a budget that the prediction says can be kept, too: the plain bits;
* recorded for a profile, on disk, too: the plain bits, and a run that tells what the ledger told at each operation;
* always: no peak above a limit, no error for a limit that is enough, live bytes as before, no garbage, no budget and no
  recorder left; at the points of a run the ledger is the sum of the buffers alive.
"""

from __future__ import annotations

import gc
import random
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, ClassVar

import numpy as np
from budget_cases import limited, live, recorded, small_from
from inside import bytes_of_slots, forget_constants

import tapegrad as tg
from programs import ops, profiled, reference
from programs.draw import draw
from programs.program import Program
from programs.runs import POLICIES, Captured, CapturedWithin, Modified, Predicted, Run
from tapegrad import nest
from tapegrad.engine.cpu import tiles
from tapegrad.errors import BudgetError

GRAIN = 512
PATIENCE = 60
CALLS = 4
SPANS = [((0, 3),), ((0, 3),), ((0, 3),), ((1, 3),), ((0, 2),), ((0, 2), (2, 3)), ((0, 3), (1, 2)), ((0, 2), (1, 3))]


class WrongError(AssertionError):
    """What a program did is not what it should have done; the message says what."""


class NoProgramError(Exception):
    """The reference cannot run it."""


def compiled(program: Program, calls: int = 0) -> Callable:
    """``main`` of a program; with ``calls`` that of so many calls of one function."""
    scope: dict[str, Any] = {"np": np}
    exec(compile(program.text(calls), f"<program {program.seed}>", "exec"), scope)
    return scope["main"]


def arrays(tree: Any) -> list[Any]:
    """All leaves as arrays of their own (None stays)."""
    return [
        None if leaf is None else np.array(leaf.numpy() if hasattr(leaf, "numpy") else leaf)
        for leaf in nest.flatten(tree)
    ]


@contextmanager
def settings(program: Program) -> Iterator[None]:
    """The engine set as the program says, and everything back as it was."""
    count = tg.get_num_threads()
    try:
        with small_from(1) if program.lazy else nullcontext(), np.errstate(all="ignore"), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        tg.set_num_threads(count)
        tiles.set_tile_size(tiles.TILE)


def check_bits(got: list[Any], wanted: list[Any], rounding: float = 0.0, joined: bool = False) -> None:
    """Raise WrongError unless all leaves are equal: to the bit, but for signs of zeros; or to ``rounding``.

    ``joined``: a call is one record, so a result of it may count as connected though it alone is not; where ``wanted``
    is zero nothing is compared.
    """
    if len(got) != len(wanted):
        raise WrongError(f"{len(got)} results for {len(wanted)}")
    for place, (g, w) in enumerate(zip(got, wanted, strict=True)):
        if rounding and (g is None) != (w is None):  # zeros may be told as no connection
            g, w = (np.zeros_like(w), w) if g is None else (g, np.zeros_like(g))
        if joined and w is None:
            continue
        if (g is None) != (w is None):
            raise WrongError(f"result {place} is {g!r:.80}, not {w!r:.80}")
        if g is None or (joined and not np.any(w)):
            continue
        if g.dtype != w.dtype or g.shape != w.shape:
            raise WrongError(f"result {place} is {g.dtype}{g.shape}, not {w.dtype}{w.shape}")
        if rounding:
            size = np.abs(np.where(np.isfinite(w), w, 0)).max(initial=0) + 1e-3
            equal = np.allclose(g, w, rtol=rounding, atol=rounding * size, equal_nan=True)
        else:
            equal = np.array_equal(g, w, equal_nan=True)
        if not equal:
            with np.errstate(all="ignore"):
                raise WrongError(
                    f"result {place} differs by up to {np.abs(g - w).max():.3g}: {g!r:.200} for {w!r:.200}"
                )


def _differ(a: Any, b: Any) -> bool:
    return np.ascontiguousarray(a).tobytes() != np.ascontiguousarray(b).tobytes()


def check_clean() -> None:
    """No budget in force, nothing recorded."""
    if limited() or recorded():
        raise WrongError("a budget or a recorder is left")


class Case:
    """A program and everything that is asked of it; ``choice`` decides about limits, policies and the like."""

    def __init__(self, program: Program, seed: int) -> None:
        self.program, self.seed = program, seed
        self.main = compiled(program)
        tags = {tag for step in program.all_steps() for op in ops.OPS if op.text == step.text for tag in op.tags}
        self.crooked, self.draws, self.shared = "crooked" in tags, "draw" in tags, "global" in tags
        self.complex, self.looks = "complex" in tags, bool(tags & {"escape", "array", "look", "host"})
        order = ops.WAYS[program.way].order
        loose = 1e-3 if program.dtype == "float32" else 1e-7
        self.rounding = loose if "round" in tags else 0.0
        self.loose = loose
        """Second derivatives through a checkpoint are equal to rounding."""
        one = order == 1 and program.way not in ("jvp", "vmap of grad") and not self._again()
        self.through = self.rounding or (0.0 if one else loose)
        self.joined = bool(program.handles) or dict(program.options)["unconnected"] == "none"
        self.plain: list[Any] = []
        self.littered = True
        """Whether something else may have left garbage."""

    def _again(self) -> bool:
        options = dict(self.program.options)
        return bool(self.program.way == "tape" and options.get("persistent") and options.get("inside"))

    def choice(self, what: str) -> random.Random:
        """The numbers with which one variant is drawn."""
        return random.Random(f"{self.seed} {what}")

    def run(self, run: Run | None = None, main: Callable | None = None) -> list[Any]:
        """The results of one run on tapegrad, from which nothing must be left."""
        enabled = gc.isenabled()
        forget_constants()
        if self.littered:
            gc.collect()
            self.littered = False
        gc.disable()
        try:
            with tg.measure() as m:
                base = m.live_bytes
                run = run or Run()
                run.measure = m
                try:
                    if isinstance(run, Modified):
                        with run.entered():
                            found = (main or self.main)(tg, run)
                    else:
                        found = (main or self.main)(tg, run)
                    values = arrays(found)
                    del found
                except BudgetError as e:
                    self.littered = True
                    traceback.clear_frames(e.__traceback__)
                    raise BudgetError(str(e), e.needed_bytes) from None
                forget_constants()
                self.data, self.room, left = run.data - base, m.peak_bytes - run.data, m.live_bytes - base
            garbage = gc.collect()
        finally:
            if enabled:
                gc.enable()
        if left:
            raise WrongError(f"{left} bytes are alive after the run")
        if garbage:
            raise WrongError(f"{garbage} unreachable objects were left to the garbage collector")
        return values

    # The variants ----------------------------------------------------------------------------------------------

    def check_plain(self) -> None:
        """Against the reference."""
        try:
            wanted = arrays(self.main(reference, Run()))
        except Exception as e:
            raise NoProgramError(repr(e)) from None
        self.plain = self.run()
        self.plain_data, self.plain_room = self.data, self.room
        if all(w is None or np.isfinite(w).all() for w in wanted):
            check_bits(self.plain, wanted, self.loose * (10 if self.program.dtype == "float32" else 1))

    def check_differences(self) -> None:
        """Central differences of the targets along a direction, where there is a derivative and it is asked for."""
        p = self.program
        if self.crooked or p.way != "tape" or p.dtype != "float64" or self._again() or dict(p.options)["weights"]:
            return
        if any(step.kind in ("watch", "pause") for step in p.steps) or not p.shape[0] * p.shape[1]:
            return
        nudge = np.random.default_rng(3).normal(size=p.shape)
        ends = []
        for sign in (1, -1):
            run = Run()
            run.nudge = sign * 1e-6 * nudge
            ends.append(arrays(self.main(tg, run)))
        self.littered = True
        count = len(p.targets)
        slope = sum((a - b).sum() for a, b in zip(ends[0][:count], ends[1][:count], strict=True)) / 2e-6
        found = (self.plain[count] * nudge).sum()
        size = max(
            1.0, abs(slope), np.abs(self.plain[count]).max(), *(np.abs(t).max(initial=0) for t in ends[0][:count])
        )
        if np.isfinite(size) and abs(slope - found) > 1e-3 * size:
            raise WrongError(f"the slope is {slope}, the gradient says {found}")

    def check_tiles(self) -> None:
        """Other threads and tiles."""
        rng = self.choice("tiles")
        # NumPy computes the last complex numbers of an array otherwise than the rest; tiny tiles take long.
        small = self.program.shape[0] * self.program.shape[1] <= 50
        tile = rng.choice([16, 1024, 4096] if self.complex else [1, 7, 1000] if small else [100, 1000, 4096])
        tg.set_num_threads(rng.choice([1, 2, 3])), tiles.set_tile_size(tile)
        try:
            check_bits(self.run(), self.plain, self.rounding)
        finally:
            tg.set_num_threads(1), tiles.set_tile_size(tiles.TILE)

    def check_ledger(self) -> None:
        """At each point live bytes are those of the buffers alive."""
        seen: list[tuple[int, int]] = []
        with tg.measure() as m:
            check_bits(self.run(Modified(at=lambda point: seen.append((m.live_bytes, bytes_of_slots())))), self.plain)
        for counted, alive in seen[1:]:
            if counted - seen[0][0] != alive - seen[0][1]:
                raise WrongError(
                    f"the ledger says {counted - seen[0][0]} bytes more, the buffers are {alive - seen[0][1]}"
                )

    def modified(self, what: str) -> dict[str, Any]:
        """Checkpoints and loops of a variant."""
        rng = self.choice(what)
        count = rng.choice([1, 2, 3])
        return {"policies": tuple(rng.choices(list(POLICIES), k=count)), "loops": True}

    def check_checkpoints(self) -> None:
        """Every block a checkpoint, every loop of few states."""
        found = self.run(Modified(**self.modified("checkpoints")))
        check_bits(found, self.plain, self.through, joined=self.joined)

    def check_budget(self, checkpoints: bool = False) -> None:
        """Budgets at random limits, and at those that the errors ask for."""
        what = "checkpoints in a budget" if checkpoints else "budget"
        rng = self.choice(what)
        options = self.modified(what) if checkpoints else {}
        if checkpoints:
            wanted = self.run(Modified(**options))
            check_bits(wanted, self.plain, self.through, joined=self.joined)
        else:
            wanted = self.plain
            self.data, self.room = self.plain_data, self.plain_room
        room = self.room
        spans = rng.choice(SPANS)
        parts = [rng.choice([1.0, 1.3, rng.random(), rng.random(), 0.0]) for _ in spans]
        forget_constants()
        base = live() + self.data
        limits = tuple(base + int(room * part) for part in parts)
        offloading = rng.random() < 0.25
        for errors in range(40):
            run = Modified(**options, spans=spans, limits=limits, offloading=offloading)
            needed = 0
            try:
                found = self.run(run)
            except BudgetError as e:
                needed = e.needed_bytes
            if any(peak > limit for peak, limit in run.peaks):
                raise WrongError(f"peak and limit of each budget: {run.peaks}")
            if not needed:
                break
            if not min(limits) < needed <= base + 2 * room + 8192:
                raise WrongError(f"BudgetError asks for {needed} bytes at limits {limits}, {base} before, room {room}")
            least = base + 2 * room + 8192 if errors > 1 else needed
            limits = tuple(max(limit, least) for limit in limits)
        else:
            raise WrongError(f"no limit is enough: {limits}")
        check_bits(found, wanted, self.rounding)
        if errors:
            check_bits(self.run(), self.plain, self.rounding)

    def check_profiled(self) -> None:
        """Recorded for a profile, with checkpoints and in a budget, too: the run and the journal tell what happened."""
        rng = self.choice("profiled")
        options = rng.choice([{}, self.modified("profiled")])
        run: Run = Run()
        if options or rng.random() < 0.5:
            run = Modified(**options, spans=((0, 3),), limits=(2**40,))
        captured = not self.looks and rng.random() < 0.2
        main = compiled(self.program, CALLS) if captured else None
        run = Captured() if captured else run
        stacks, gradients = rng.choice(["line", "full", "none"]), rng.random() < 0.5
        found, _, faults = profiled.recorded(lambda: self.run(run, main), stacks, gradients)
        self.littered = True  # by the session
        if not captured:
            rounding, joined = (self.through, self.joined) if options else (self.rounding, False)
            check_bits(found, self.plain, rounding, joined)
        if faults:
            raise WrongError(faults[0])

    def check_predicted(self) -> None:
        """Bytes, kernels and evictions of a call are those that were predicted, without a budget and within one."""
        if self.looks or self._lies_unseen():
            return
        run = Predicted(self.choice("predicted").random())
        self.run(run, compiled(self.program, 1))
        self.littered = True
        if run.wrong:
            raise WrongError(run.wrong[0])

    def _lies_unseen(self) -> bool:
        """Whether a function of the user's makes arrays that lie as its own do: nothing of that can be known before."""
        kinds = self.program.kinds()
        return "primitive" in kinds and (self.program.lies != "rows" or "view" in kinds)

    def check_captured(self) -> None:
        """The differentiation captured: the bits of an eager one in each of its calls, replayed from the third on."""
        if self.looks:
            return
        main, run = compiled(self.program, CALLS), Captured()
        wanted = self.run(Run(), main)
        got = self.run(run, main)
        self.littered = True  # the function and its globals refer to each other
        check_bits(got, wanted)
        wrong = [i for i, (g, w) in enumerate(zip(got, wanted, strict=True)) if w is not None and _differ(g, w)]
        if wrong:
            raise WrongError(f"results {wrong} differ in signs of zeros or of what is no number")
        if any("lie" not in reason for reason in run.stats.fallbacks) or not run.stats.traces:
            raise WrongError(f"not captured: {run.stats}")

    def check_planned(self) -> None:
        """Captured within a budget that a prediction says can be kept: the same bits, and replays."""
        if self.looks or self._lies_unseen():
            return
        main, run = compiled(self.program, CALLS), CapturedWithin(self.choice("planned").choice([0.0, 0.3, 0.8]))
        wanted = self.run(Run(), main)
        self.littered = True
        got = self.run(run, main)
        self.littered = True
        check_bits(got, wanted, self.rounding)
        # An eager run within the budget may reverse other blocks, which rounds: then it confirms no replay.
        if run.budget is None or self.rounding or any("lie" in reason for reason in run.stats.fallbacks):
            return
        if run.stats.fallbacks or not run.stats.replays:
            raise WrongError(f"within {run.budget} bytes: {run.stats}")

    def check_threads(self) -> None:
        """Two threads, another program in the other, one budget."""
        rng = self.choice("threads")
        other = Case(draw(self.seed + 1), self.seed + 1)
        self.littered = True
        if self.shared or other.shared:
            return
        wanted, rooms = [], 0
        for case in (self, other):  # in a budget a run may hold more than plainly: less is pending
            wanted.append(case.run(Modified(spans=((0, 3),), limits=(2**40,))))
            rooms += case.room + case.data
        check_bits(wanted[0], self.plain, self.rounding)
        part = rng.choice([1.0, 0.8, 0.6])
        outcomes: list[Any] = [None, None]

        def work(place: int, case: Case) -> None:
            with np.errstate(all="ignore"):
                try:
                    found = case.main(tg, Run())
                    outcomes[place] = arrays(found)
                except BudgetError as e:
                    outcomes[place] = str(e)
                    traceback.clear_frames(e.__traceback__)
                except BaseException as e:
                    outcomes[place] = e

        forget_constants()
        gc.collect()
        with tg.measure() as outer:
            base = outer.live_bytes
            with tg.memory_budget(base + int(part * rooms)) as m:
                pair = [threading.Thread(target=work, args=(i, c), daemon=True) for i, c in enumerate((self, other))]
                for t in pair:
                    t.start()
                for t in pair:
                    t.join(PATIENCE)
                if any(t.is_alive() for t in pair):
                    raise WrongError("the threads do not end")
                if m.peak_bytes > base + int(part * rooms):
                    raise WrongError(f"peak {m.peak_bytes}, limit {base + int(part * rooms)}")
            for place, found in enumerate(outcomes):
                if isinstance(found, BaseException):
                    raise found
                if isinstance(found, str):
                    if part == 1.0:
                        raise WrongError(f"BudgetError though there is room for both: {found}")
                else:
                    case = (self, other)[place]
                    try:
                        check_bits(found, wanted[place], case.rounding)
                    except WrongError as e:
                        raise WrongError(f"thread {place} (seed {case.seed}): {e}") from None
            forget_constants()
            gc.collect()
            if outer.live_bytes != base:
                raise WrongError(f"{outer.live_bytes - base} bytes are alive after the threads")
        self.littered = True  # by frames of the threads

    VARIANTS = (
        "plain",
        "differences",
        "tiles",
        "ledger",
        "checkpoints",
        "captured",
        "budget",
        "checkpoints in a budget",
        "threads",
        "profiled",
        "predicted",
        "planned",
    )

    SHARES: ClassVar = {
        "tiles": 0.3, "ledger": 0.3, "captured": 0.5, "checkpoints": 0.3, "threads": 0.4, "profiled": 0.4,
        "predicted": 0.4, "planned": 0.2,
    }  # fmt: skip
    """Of how many programs these variants are tried, if all are asked for: what takes time is to find much."""

    def check(self, variant: str) -> None:
        """One variant.  Raises WrongError, or whatever the program raises."""
        with settings(self.program):
            if variant == "checkpoints in a budget":
                self.check_budget(checkpoints=True)
            else:
                getattr(self, f"check_{variant}")()
            check_clean()


def wrong(program: Program, seed: int, variants: tuple[str, ...] = Case.VARIANTS) -> tuple[str, str] | None:
    """The first variant that fails, and how; None: all is well.  Values are only compared after the plain run."""
    case = Case(program, seed)
    if variants == Case.VARIANTS:
        rng = case.choice("variants")
        variants = tuple(v for v in variants if rng.random() < Case.SHARES.get(v, 1.0))
    for variant in dict.fromkeys(("plain", *variants)):
        try:
            case.check(variant)
        except NoProgramError as e:
            return "no program", str(e)
        except Exception as e:
            return variant, f"{type(e).__name__}: {e}" + ("" if isinstance(e, WrongError) else _where(e))
    return None


def _where(e: BaseException) -> str:
    frames = traceback.extract_tb(e.__traceback__)
    return "".join(f"\n    {f.filename.split('/')[-1]}:{f.lineno} {f.name}: {f.line}" for f in frames[-4:])
