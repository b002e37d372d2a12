"""Running a program as ``python`` runs it: as ``__main__``, with its own arguments, exit code and traceback."""

from __future__ import annotations

import builtins
import importlib.util
import os
import runpy
import sys
import threading
import types
import zipfile
from collections.abc import Iterator
from concurrent.futures import thread as pools
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.machinery import SourceFileLoader
from types import TracebackType
from typing import Any

from tapegrad.errors import TapegradError

INTERRUPTED = 130
_HERE = os.path.dirname(__file__)


class ProgramError(TapegradError, OSError):
    """The program to be run is not there, or is none."""


@dataclass
class Outcome:
    """How a program ended: ``kind`` ("finished", "exit", "exception", "oom", "interrupted"), and its exit code."""

    kind: str = "finished"
    code: int = 0
    message: str = ""
    error: BaseException | None = None


@dataclass(frozen=True)
class Program:
    """What to run: a file (or a folder or zip file with a ``__main__``), or a module."""

    name: str
    args: tuple[str, ...]
    is_module: bool
    path: str
    """The file that is run."""

    @property
    def title(self) -> str:
        """A short name: of the file without its ending, or the module's last part."""
        if self.is_module:
            return self.name.rpartition(".")[2]
        stem = os.path.splitext(os.path.basename(os.path.abspath(self.name)))[0]
        return stem or "program"


def find(name: str, args: tuple[str, ...], is_module: bool) -> Program:
    """The program called ``name``.  Raises ProgramError if there is none."""
    if is_module:
        return Program(name, args, True, _module_file(name))
    if not os.path.exists(name):
        raise ProgramError(f"{name}: there is no such file; for a module, give -m")
    return Program(name, args, False, os.path.abspath(name))


def _module_file(name: str) -> str:
    if sys.path[:1] != [os.getcwd()]:
        sys.path.insert(0, os.getcwd())  # as python -m does
    try:  # of its package alone: to find more, packages would be imported, which is part of the program
        spec = importlib.util.find_spec(name.partition(".")[0])
    except (ImportError, ValueError, AttributeError) as e:
        raise ProgramError(f"-m {name}: {e}") from e
    if spec is None:
        raise ProgramError(f"-m {name}: there is no such module")
    return name


def run(program: Program) -> Outcome:
    """Run it to its end, whatever that is, and wait for the threads it has started.

    Nothing that it raises comes out of here.
    """
    others = set(threading.enumerate())
    with _as_main(program) as module:
        try:
            _execute(program, module)
            _wait_for_threads(others)
        except SystemExit as e:
            return _exit(e)
        except KeyboardInterrupt as e:
            return Outcome("interrupted", INTERRUPTED, "interrupted", e)
        except MemoryError as e:
            return Outcome("oom", 1, _first_line(e), e)
        except BaseException as e:
            return Outcome("exception", 1, f"{type(e).__name__}: {_first_line(e)}", e)
    return Outcome()


def _execute(program: Program, module: types.ModuleType) -> None:
    if not program.is_module and (os.path.isdir(program.path) or zipfile.is_zipfile(program.path)):
        runpy.run_path(program.path, run_name="__main__")
        return
    if program.is_module:
        _execute_module(program.name, module)
        return
    with open(program.path, "rb") as file:
        source = file.read()
    exec(compile(source, program.path, "exec", dont_inherit=True), module.__dict__)


def _execute_module(name: str, module: types.ModuleType) -> None:
    spec = importlib.util.find_spec(name)
    if spec is not None and spec.submodule_search_locations is not None:
        name = f"{name}.__main__"
        spec = importlib.util.find_spec(name)
    loader: Any = None if spec is None else spec.loader
    if spec is None or not hasattr(loader, "get_code"):
        raise ImportError(f"No module named {name}, or one that is not written in Python", name=name)
    origin = spec.origin or name
    module.__spec__, module.__package__, module.__loader__ = spec, spec.parent, loader
    module.__file__, sys.argv[0] = origin, origin
    exec(loader.get_code(name), module.__dict__)


@contextmanager
def _as_main(program: Program) -> Iterator[types.ModuleType]:
    module = types.ModuleType("__main__")
    module.__file__ = program.path
    module.__dict__["__builtins__"] = builtins
    module.__loader__ = SourceFileLoader("__main__", program.path)
    before = sys.argv, sys.path[:], sys.modules.get("__main__")
    sys.argv = ["-m" if program.is_module else program.name, *program.args]
    if not program.is_module:
        folder = os.path.dirname(os.path.realpath(program.path))
        sys.path[:1] = [program.path if os.path.isdir(program.path) else folder]  # instead of this command's own
    sys.modules["__main__"] = module
    try:
        yield module
    finally:
        sys.argv, sys.path[:] = before[0], before[1]
        if before[2] is not None:
            sys.modules["__main__"] = before[2]


def _wait_for_threads(others: set[threading.Thread]) -> None:
    """Wait for the threads that are not ``others``, but not for those of pools, which end with the interpreter."""
    pooled = getattr(pools, "_threads_queues", {})
    while mine := [t for t in threading.enumerate() if t not in others and not t.daemon and t not in pooled]:
        for thread in mine:  # which may start others
            thread.join()


def _exit(error: SystemExit) -> Outcome:
    code = error.code
    if code is None:
        return Outcome()
    if isinstance(code, int):
        return Outcome("exit", code & 0xFF, "")
    print(code, file=sys.stderr)
    return Outcome("exit", 1, str(code))


def _first_line(error: BaseException) -> str:
    try:
        return str(error).strip().partition("\n")[0][:500]
    except Exception:
        return "(str() of the exception failed)"


def show_traceback(error: BaseException) -> None:
    """Print the traceback as the interpreter would have: without frames of this package's that ran the program."""
    kind, trace = type(error), error.__traceback__
    while trace is not None and _is_ours(trace):
        trace = trace.tb_next
    sys.excepthook(kind, error.with_traceback(trace), trace)


def _is_ours(trace: TracebackType) -> bool:
    name = trace.tb_frame.f_code.co_filename
    return name.startswith((os.path.dirname(_HERE) + os.sep, "<frozen runpy"))


def outcome_of(outcome: Outcome) -> dict[str, object]:
    """What a run tells of the outcome."""
    return {"kind": outcome.kind, "code": outcome.code, "message": outcome.message}
