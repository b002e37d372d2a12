"""Threads x tapes x budgets x interrupts x forks: ``PYTHONPATH=tests python -m programs.stress --seconds 600``.

Worker threads run random programs within budgets that come and go, some in budgets of their own.  Meanwhile the main
thread, which runs programs too, is interrupted: by real SIGINT (Ctrl-C), whose KeyboardInterrupt comes anywhere;
workers get KeyboardInterrupts that are injected between two bytecodes.  Now and then the process forks, and the child
runs a program and a budget of its own.  What must hold: a run that was not interrupted has the plain bits, or a
BudgetError; nothing hangs (a watchdog prints all stacks and ends the process); in the end, with the threads gone, live
bytes, buffers, tapes, threads and file descriptors are as many as before, and a budget works.
"""

from __future__ import annotations

import argparse
import ctypes
import faulthandler
import gc
import os
import random
import signal
import sys
import threading
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np
from budget_cases import limited, live
from inside import buffer_of, forget_constants, weak

import tapegrad as tg
from programs.draw import draw
from programs.program import Program
from programs.runs import NAMED, POLICIES, Modified, Run
from programs.variants import WrongError, arrays, check_bits, compiled
from tapegrad.errors import BudgetError
from tapegrad.remat.offload.offload import default_tier

PATIENCE = 60.0
"""Seconds after which a hang is certain, for one program takes milliseconds."""
KINDS = (tg.Tensor, tg.Variable, tg.GradientTape)


def suitable(count: int, seed: int) -> list[tuple[Program, Callable, list[Any], float]]:
    """Programs that any thread may run at any time, with their bits, and how far another order may round."""
    found: list[tuple[Program, Callable, list[Any], float]] = []
    while len(found) < count:
        program = draw(seed)
        seed += 1
        kinds = program.kinds()
        if (
            kinds & {"dropout", "host draw", "control flow", "complex", "reversible"}
            or program.lazy
            or 0 in program.shape
        ):
            continue
        main = compiled(program)
        found.append((program, main, arrays(main(tg, Run())), 0.0))
    return found


def followed() -> bool:
    """Whether a tape that was left keeps what this thread computes."""
    h = tg.softmax(tg.Variable(np.ones((16, 16))))
    value = weak(h)
    del h
    return value() is not None


def census() -> Counter[str]:
    """How many of each kind there are."""
    forget_constants()
    gc.collect()
    found = Counter(type(o).__name__ for o in gc.get_objects() if type(o) in KINDS)
    found["threads"] = threading.active_count()
    found["file descriptors"] = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0
    found["live bytes"] = live()
    return found


class Stress:
    """Everything that goes on at once; ``told`` counts it, ``wrong`` says what should not have been."""

    def __init__(self, seconds: float, workers: int, seed: int, interrupts: bool = True, forks: bool = True) -> None:
        self.until = time.monotonic() + seconds
        self.rng = random.Random(seed)
        self.programs = suitable(24, seed)
        self.wrong: list[str] = []
        self.told: Counter[str] = Counter()
        self.workers, self.interrupts, self.forks = workers, interrupts, forks
        self.beats: dict[int, float] = {}
        self.children = 0
        self.over = False
        self.base = live()
        tier = default_tier(tg.ones(1).device)  # its file and its thread are there from now on
        slot = tier.put(buffer_of(tg.ones(1000)))
        slot.prefetch(), slot.get()

    # One program -----------------------------------------------------------------------------------------------

    def once(self, rng: random.Random) -> None:
        """One run of one program, in a way drawn at random."""
        program, main, wanted, rounding = rng.choice(self.programs)
        checkpoints = (
            rng.random() < 0.4 and program.way in ("tape", "grad", "vjp") and not dict(program.options)["inside"]
        )
        options: dict[str, Any] = {}
        if checkpoints:
            options = {"policies": tuple(rng.choices(list(POLICIES), k=2)), "loops": True}
        budget: Any = nullcontext()
        if rng.random() < 0.5:
            room = rng.choice([64, 256, 1024, 8192]) * 1024
            offloading = tg.policies.offload_names(NAMED) if rng.random() < 0.2 else None
            budget = tg.memory_budget(self.base + room, offloading)
        try:
            with budget, np.errstate(all="ignore"):  # nothing in Python in between: an interrupt may come anywhere
                found = arrays(main(tg, Modified(**options)))
            check_bits(found, wanted, rounding)
            self.told["programs with the right bits"] += 1
        except BudgetError as e:
            traceback.clear_frames(e.__traceback__)
            self.told["programs with a BudgetError"] += 1
        except WrongError as e:
            self.wrong.append(f"seed {program.seed}, {options}: {e}\n{program.text()}")

    def _work(self, number: int) -> None:
        rng = random.Random(number)
        while not self.over:
            self.beats[number] = time.monotonic()
            try:
                self.once(rng)
            except KeyboardInterrupt:
                self.told["injected interrupts"] += 1
            except Exception as e:
                if not self._of_interrupt(e):
                    self.wrong.append("".join(traceback.format_exception(e))[-3000:])
            try:
                if followed():
                    self.wrong.append("a tape is left recording after a run")
            except BudgetError:  # of another thread, which leaves no byte to look with
                pass
            except KeyboardInterrupt:
                self.told["injected interrupts"] += 1

    @staticmethod
    def _of_interrupt(e: BaseException | None) -> bool:
        while e is not None:
            if isinstance(e, KeyboardInterrupt):
                return True
            e = e.__cause__ or e.__context__
        return False

    # What disturbs ---------------------------------------------------------------------------------------------

    def _disturb(self) -> None:
        """In a thread of its own: interrupts for the others, and signals for the process."""
        rng = random.Random(99)
        set_async = ctypes.pythonapi.PyThreadState_SetAsyncExc
        while 0 not in self.beats:  # until then the main thread handles no interrupt
            time.sleep(0.001)
        while not self.over:
            time.sleep(rng.random() * 0.02)
            self.beats[-1] = time.monotonic()
            if self.interrupts and rng.random() < 0.3:
                victim = rng.choice(self.threads)
                if victim.is_alive() and victim.ident is not None:
                    set_async(ctypes.c_ulong(victim.ident), ctypes.py_object(KeyboardInterrupt))
            if self.interrupts and rng.random() < 0.3:
                os.kill(os.getpid(), signal.SIGINT)

    def _watch(self) -> None:
        """In a thread of its own: end the process if a thread has not been heard of for long."""
        while not self.over:
            time.sleep(1.0)
            self._replace_ended()
            late = {n: time.monotonic() - t for n, t in dict(self.beats).items() if time.monotonic() - t > PATIENCE}
            if late:
                print(f"HANGS: {late}", file=sys.stderr, flush=True)
                faulthandler.dump_traceback(all_threads=True)
                os._exit(3)

    def _replace_ended(self) -> None:
        """An interrupt may also come where a worker handles the one before: another worker goes on."""
        for i, t in enumerate(self.threads):
            if not t.is_alive() and not self.over:
                self.told["workers ended by an interrupt"] += 1
                self.threads[i] = self._worker(i + 1)

    def _worker(self, number: int) -> threading.Thread:
        """Started."""
        worker = threading.Thread(target=self._work, args=(number,), daemon=True)
        worker.start()
        return worker

    def _fork(self) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of forks with threads: they are what is tested
            child = os.fork()
        if not child:
            status = 4
            try:
                signal.signal(signal.SIGINT, signal.SIG_IGN)
                faulthandler.dump_traceback_later(PATIENCE / 2, exit=True)
                status = self._child()
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(status)
        until = time.monotonic() + PATIENCE
        while True:
            try:
                pid, status = os.waitpid(child, os.WNOHANG)
                if pid:
                    break
                if time.monotonic() > until:
                    os.kill(child, signal.SIGKILL)
                    self.wrong.append("a forked child hangs")
                time.sleep(0.01)
                self.beats[0] = time.monotonic()
            except KeyboardInterrupt:
                self.told["interrupts by signal"] += 1
            except ChildProcessError:
                return  # reaped, and interrupted just then
        self.told["forks"] += 1
        if status:
            self.wrong.append(f"a forked child ended with status {status}")

    def _child(self) -> int:
        """What a child of a fork does: a program, plainly and in a budget."""
        rng = random.Random(self.told["forks"])
        for _ in range(3):
            program, main, wanted, rounding = rng.choice(self.programs)
            check_bits(arrays(main(tg, Run())), wanted, rounding)
            limit = live() + 64 * 2**20
            with tg.memory_budget(limit):
                check_bits(arrays(main(tg, Run())), wanted, rounding)
        return 0

    # All of it -------------------------------------------------------------------------------------------------

    def run(self) -> list[str]:
        """What was wrong."""
        before = census()
        interval = sys.getswitchinterval()
        sys.setswitchinterval(1e-4)
        handler = signal.signal(signal.SIGINT, signal.default_int_handler)
        self.threads = [self._worker(n + 1) for n in range(self.workers)]
        others = [threading.Thread(target=f, daemon=True) for f in (self._disturb, self._watch)]
        rng, forked = random.Random(7), time.monotonic()
        for t in others:
            t.start()
        while not self.over:
            try:
                self.beats[0] = time.monotonic()
                self.once(rng)
                if self.forks and time.monotonic() - forked > 0.7:
                    self._fork()
                    forked = time.monotonic()
                if time.monotonic() > self.until or len(self.wrong) > 20:
                    signal.signal(signal.SIGINT, signal.SIG_IGN)
                    self.over = True
            except KeyboardInterrupt:
                self.told["interrupts by signal"] += 1
            except Exception as e:
                if not self._of_interrupt(e):
                    self.wrong.append("".join(traceback.format_exception(e))[-3000:])
        for t in (*self.threads, *others):
            t.join(PATIENCE)
            if t.is_alive():
                self.wrong.append(f"{t} does not end")
                faulthandler.dump_traceback(all_threads=True)
        sys.setswitchinterval(interval)
        signal.signal(signal.SIGINT, handler)
        self._left(before)
        return self.wrong

    def _left(self, before: Counter[str]) -> None:
        """Everything is as it was, and a budget works."""
        if limited():
            self.wrong.append("a budget is left in force")
        after = census()
        for what, count in after.items():
            if count > before[what]:
                self.wrong.append(f"{count} {what} at the end, {before[what]} before")
        limit = live() + 64 * 2**20
        for _, main, wanted, rounding in self.programs:
            try:
                with tg.memory_budget(limit), np.errstate(all="ignore"):
                    check_bits(arrays(main(tg, Run())), wanted, rounding)
            except Exception as e:
                self.wrong.append(f"afterwards: {e!r:.500}")


def main(arguments: list[str] | None = None) -> int:
    """The command; its exit status."""
    parser = argparse.ArgumentParser(prog="python -m programs.stress", description=__doc__)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--threads", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0, help="of the programs")
    parser.add_argument("--without", default="", help="some of: interrupts, forks")
    options = parser.parse_args(arguments)
    warnings.simplefilter("ignore")
    without = options.without.split(",")
    stress = Stress(options.seconds, options.threads, options.seed, "interrupts" not in without, "forks" not in without)
    wrong = stress.run()
    for what, count in stress.told.most_common():
        print(f"{count:8}  {what}")
    for text in wrong[:10]:
        print("WRONG:", text)
    print(f"{len(wrong)} things wrong")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
