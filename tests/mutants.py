"""Which small changes to the engine do its tests notice?  ``python tests/mutants.py --count 200 --jobs 2``.

A sample of mutants: a comparison flipped, ``and`` and ``or`` swapped, ``+`` and ``-``, a small constant raised, a call
dropped, a condition turned round.  Each is made in a copy of the project, where those tests of its part run that reach
the changed statement, until the first failure: files that take the least time first.  Which test reaches what is found
once (``mutants_plugin.py``; some minutes) and kept in a folder for temporary files until the package or the test
changes.  What no test notices is printed as a diff, and the exit
status is 1 where less than ``--least`` was noticed.  No part of the test suite: it takes seconds a mutant.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import functools
import hashlib
import itertools
import json
import os
import queue
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
SHARED = ["tests/test_laws.py", "tests/test_programs.py"]
PARTS = {
    "core": ["tests/core", "tests/test_tensor.py", "tests/test_variable.py", "tests/test_primitives.py",
             "tests/test_pickling.py", *SHARED],
    "engine": ["tests/engine", "tests/test_explain.py", "tests/cuda/test_regions.py", "tests/cuda/test_reductions.py",
               "tests/cuda/test_scratch.py", "tests/cuda/test_checks.py", "tests/cuda/test_explain.py",
               "tests/cuda/test_half_types.py", *SHARED],
    "autodiff": ["tests/autodiff", "tests/test_values.py", "tests/test_primitives.py",
                 "tests/ops/interop/test_numpy_protocols.py", *SHARED],
    "remat": ["tests/remat", "tests/profile/recorder", "tests/profile/plan/test_applying.py",
               "tests/profile/plan/test_file.py", "tests/engine/test_by_product.py",
               "tests/cuda/test_offload_on_device.py", "tests/cuda/test_pressure_on_device.py", *SHARED],
    "tracing": ["tests/tracing", "tests/profile/recorder", *SHARED],
}  # fmt: skip
"""Folders of the package, and the tests of each."""
FLIPPED: dict[type[ast.AST], type[ast.AST]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In, ast.And: ast.Or, ast.Or: ast.And,
    ast.Add: ast.Sub, ast.Sub: ast.Add,
}  # fmt: skip
LARGEST = 12 << 30
"""Bytes of memory that the tests of a mutant may take: some never stop taking more."""


@dataclass(frozen=True)
class Mutant:
    """A change of one expression or statement, from ``start`` to ``stop`` in the bytes of the file.

    ``statement`` is the line of the statement of a function that is changed; 0 where that runs at import.  ``nth``: of
    those that read the same, with the line before.
    """

    path: Path
    line: int
    statement: int
    start: int
    stop: int
    before: str
    after: str
    nth: int = 1

    def __str__(self) -> str:
        return f"{self.path}:{self.line}  {_one_line(self.before)[:60]}  ->  {_one_line(self.after)[:60]}"

    def apply(self, text: bytes) -> bytes:
        """The file with the change."""
        return text[: self.start] + self.after.encode() + text[self.stop :]

    def diff(self) -> str:
        """The change as lines of text."""
        old = (ROOT / self.path).read_bytes()
        lines = [text.decode().splitlines(keepends=True) for text in (old, self.apply(old))]
        return "".join(difflib.unified_diff(*lines, str(self.path), str(self.path), n=1))


def _one_line(text: str) -> str:
    return " ".join(text.split())


def mutants(path: Path, text: str) -> Iterator[Mutant]:
    """All mutants of a file."""
    seen: Counter[tuple[str, ...]] = Counter()
    lines = ["", *(line.strip() for line in text.splitlines())]
    starts = [0]
    for line in text.encode().splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    for node, statement in _with_statements(ast.parse(text)):
        after = _changed(node)
        if after is None:
            continue
        place: Any = node
        start, stop = starts[place.lineno - 1] + place.col_offset, starts[place.end_lineno - 1] + place.end_col_offset
        before = text.encode()[start:stop].decode()
        if before != after:
            alike = (*lines[place.lineno - 1 : place.lineno + 1], before, after)
            seen[alike] += 1
            yield Mutant(path, place.lineno, statement, start, stop, before, after, seen[alike])


def _with_statements(node: ast.AST, statement: int = 0, inside: bool = False) -> Iterator[tuple[ast.AST, int]]:
    """All nodes, each with the line of its statement if a function holds that, else with 0."""
    if inside and isinstance(node, ast.stmt):
        statement = node.lineno
    yield node, statement
    if isinstance(node, ast.JoinedStr):
        return  # Python 3.11 does not say where the parts of an f-string stand
    for field, value in ast.iter_fields(node):
        body = inside or isinstance(node, ast.FunctionDef) and field == "body"
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield from _with_statements(child, statement, body)


def _changed(node: ast.AST) -> str | None:
    """The source of a changed ``node``; None if nothing is changed here."""
    if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in FLIPPED:
        return f"({ast.unparse(ast.Compare(node.left, [FLIPPED[type(node.ops[0])]()], node.comparators))})"
    if isinstance(node, ast.BoolOp):
        return f"({ast.unparse(ast.BoolOp(FLIPPED[type(node.op)](), node.values))})"
    if isinstance(node, ast.BinOp) and type(node.op) in FLIPPED:
        return f"({ast.unparse(ast.BinOp(node.left, FLIPPED[type(node.op)](), node.right))})"
    if isinstance(node, ast.Constant) and type(node.value) is int and 0 <= node.value <= 3:
        return str(node.value + 1)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        return f"({ast.unparse(node.operand)})"
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        return "pass"
    return None


def sample(parts: list[str], count: int, seed: int) -> list[tuple[str, Mutant]]:
    """``count`` mutants with their parts, drawn from all; the first ones of a larger sample."""
    found = [
        (part, mutant)
        for part in parts
        for path in sorted((ROOT / "tapegrad" / part).rglob("*.py"))
        for mutant in mutants(path.relative_to(ROOT), path.read_text())
    ]
    random.Random(seed).shuffle(found)
    return found[:count]


def files_of(part: str) -> list[str]:
    """The test files of a part."""
    paths = [ROOT / name for name in PARTS[part]]
    files = [file for path in paths for file in ([path] if path.is_file() else sorted(path.rglob("test_*.py")))]
    return [str(file.relative_to(ROOT)) for file in files]


def copy_project(folder: Path) -> Path:
    """A copy of what the tests need."""
    for name in ("tapegrad", "kernels", "tests", "bench", "docs", "pyproject.toml", "README.md"):
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, folder / name)
    return folder


def pytest(copy: Path, arguments: list[str], seconds: float | None, **variables: str) -> tuple[int | None, str]:
    """The exit status of pytest in a copy (None if it did not end in time), and what it printed."""
    environment = {
        **os.environ, "PYTHONPATH": f"{copy}{os.pathsep}{copy / 'tests'}", "OMP_NUM_THREADS": "1", **variables,
    }  # fmt: skip
    # With bytecode one file is compiled for each mutant.  To note statements all are, in a way of its own: not to keep.
    environment["PYTHONPYCACHEPREFIX"] = str(copy / "bytecode")
    environment["PYTHONDONTWRITEBYTECODE"] = ""
    if "MUTANTS_REACH" in variables:
        environment |= {"PYTHONPYCACHEPREFIX": str(copy / "none"), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-n0", "-p", "no:cacheprovider", "-p", "mutants_plugin"]
    import resource  # Windows has none

    limit = functools.partial(resource.setrlimit, resource.RLIMIT_DATA, (LARGEST, LARGEST))
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            command + arguments, cwd=copy, env=environment, stdout=output, stderr=subprocess.STDOUT,
            start_new_session=True, preexec_fn=limit,
        )  # fmt: skip
        try:
            status = process.wait(seconds)
        except subprocess.TimeoutExpired:
            status = None
        # Its children end with it, those too that it has left.
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        process.wait()
        output.seek(0)
        return status, output.read().decode(errors="replace")


def reach(copy: Path, file: str) -> dict[str, Any]:
    """The tests of a file, each with its seconds and the statements that it reaches, and those reached by imports."""
    sources = [*sorted((ROOT / "tapegrad").rglob("*.py")), Path(__file__).with_name("mutants_plugin.py"), ROOT / file]
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()
    kept = Path(tempfile.gettempdir()) / f"tapegrad-mutants-{os.getuid()}" / f"{digest}.json"
    if not kept.exists():
        kept.parent.mkdir(exist_ok=True)
        made, order = copy / "reach.json", copy / "tests.json"
        pytest(copy, [file], None, MUTANTS_REACH=str(made))
        found = json.loads(made.read_text())
        found["tests"] = [test for test in found["tests"] if test["outcome"] != "skipped"]
        # Some count instructions, and fail where statements are noted: these are tried without.
        failed = [test["test"] for test in found["tests"] if test["outcome"] == "failed"]
        order.write_text(json.dumps(failed))
        _, output = pytest(copy, [file], None, MUTANTS_TESTS=str(order)) if failed else (0, "")
        told = re.compile(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", re.MULTILINE)
        useless = set(told.findall(output)) & set(failed)
        for test in sorted(useless):
            print(f"{test} fails without any change: left out", file=sys.stderr)
        found["tests"] = [test for test in found["tests"] if test["test"] not in useless]
        kept.write_text(json.dumps(found))
    return json.loads(kept.read_text())


class Tests:
    """The tests of the parts, and what each reaches."""

    def __init__(self, parts: list[str], copies: queue.Queue[Path], pool: ThreadPoolExecutor) -> None:
        files = sorted({file for part in parts for file in files_of(part)})

        def found(file: str) -> dict[str, Any]:
            copy = copies.get()
            try:
                return reach(copy, file)
            finally:
                copies.put(copy)

        self.seconds: dict[str, float] = {}
        self.reaching: dict[tuple[str, int], set[str]] = {}
        self.imports: dict[tuple[str, int], list[str]] = {}
        self.spawning: set[str] = set()
        for number, (file, what) in enumerate(zip(files, pool.map(found, files)), 1):
            print(f"{number:4}/{len(files)}  {file}", file=sys.stderr, flush=True)
            names = [test["test"] for test in what["tests"]]
            for path, line in what["imports"]:
                self.imports.setdefault((path, line), []).extend(names)
            for test in what["tests"]:
                self.seconds[test["test"]] = test["seconds"]
                if test["spawned"]:
                    self.spawning.add(test["test"])
                for path, line in test["reached"]:
                    for statement in (line, 0):
                        self.reaching.setdefault((path, statement), set()).add(test["test"])

    def of(self, part: str, mutant: Mutant, seconds: float) -> list[str]:
        """The tests of a part that may reach a mutant, the cheapest up to ``seconds``, the cheapest files first."""
        files = set(files_of(part))
        place = str(mutant.path), mutant.statement
        tests = self.spawning.union(self.reaching.get(place, ()), self.imports.get(place, ()))
        costs: dict[str, float] = {}
        chosen, total = [], 0.0
        for test in sorted(tests, key=lambda test: (self.seconds[test], test)):
            file = test.partition("::")[0]
            if file in files and total + self.seconds[test] <= seconds:
                total += self.seconds[test]
                costs[file] = costs.get(file, 0.0) + self.seconds[test]
                chosen.append(test)
        return sorted(chosen, key=lambda test: (costs[test.partition("::")[0]], test.partition("::")[0]))

    def limit(self, tests: list[str]) -> float:
        """Seconds after which tests hang."""
        return 40 + 4 * sum(self.seconds[test] for test in tests)


_times = itertools.count(10**9)


def write(path: Path, text: bytes) -> None:
    """Change a file of a copy; its time is one that no bytecode has been made of yet."""
    path.write_bytes(text)
    now = next(_times)
    os.utime(path, (now, now))


def noticed(copy: Path, mutant: Mutant, tests: list[str], seconds: Callable[[list[str]], float]) -> str:
    """The first test that notices a mutant, or why there is none to name; "" if no test does.

    ``seconds``: how long some of the ``tests`` may take.
    """
    text = (ROOT / mutant.path).read_bytes()
    files = list(dict.fromkeys(test.partition("::")[0] for test in tests))
    # Most mutants are noticed at once: it takes longer to import all files than to run the first.
    waiting = [[test for test in tests if test.partition("::")[0] in some] for some in (files[:2], files[2:])]
    while waiting:
        some = waiting.pop(0)
        write(copy / mutant.path, mutant.apply(text))
        try:
            how = _failure(copy, some, seconds)
        finally:
            write(copy / mutant.path, text)
        if how in some and _failure(copy, some[: some.index(how) + 1], seconds) == how:
            print(f"{how} fails without any change where others do not run: left out", file=sys.stderr)
            waiting.insert(0, [test for test in some if test != how])
        elif how:
            return how
    return ""


def _failure(copy: Path, tests: list[str], seconds: Callable[[list[str]], float]) -> str:
    """The first test that fails, or why none can be named; "" if all pass."""
    if not tests:
        return ""
    order = copy / "tests.json"
    order.write_text(json.dumps(tests))
    files = list(dict.fromkeys(test.partition("::")[0] for test in tests))
    status, output = pytest(copy, ["-x", *files], seconds(tests), MUTANTS_TESTS=str(order))
    if status is None:
        return "hangs"
    failure = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", output, re.MULTILINE)
    return "" if not status else failure[1] if failure else f"pytest ends with status {status}"


def main(arguments: list[str] | None = None) -> int:
    """The command; its exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("places", nargs="*", help="FILE or FILE:LINE: all mutants there instead of a sample")
    parser.add_argument("--count", type=int, default=200, help="mutants (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the sample (default: %(default)s)")
    parser.add_argument("--parts", default=",".join(PARTS), help="folders of the package (default: %(default)s)")
    parser.add_argument("--jobs", type=int, default=1, help="mutants at once (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=30.0, help="of tests a mutant (default: %(default)s)")
    parser.add_argument("--least", type=float, default=0.92, help="part to be noticed (default: %(default)s)")
    options = parser.parse_args(arguments)
    parts = options.parts.split(",")
    drawn = sample(parts, sys.maxsize if options.places else options.count, options.seed)
    if options.places:
        drawn = [(p, m) for p, m in drawn if {str(m.path), f"{m.path}:{m.line}"} & set(options.places)]
    copies: queue.Queue[Path] = queue.Queue()
    survivors: list[Mutant] = []
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(options.jobs) as pool:
        for job in range(options.jobs):
            copies.put(copy_project(Path(folder) / str(job)))
        tests = Tests(parts, copies, pool)

        def tried(item: tuple[str, Mutant]) -> tuple[str, int]:
            part, mutant = item
            chosen = tests.of(part, mutant, options.seconds)
            copy = copies.get()
            try:
                return noticed(copy, mutant, chosen, tests.limit), len(chosen)
            finally:
                copies.put(copy)

        for number, ((_, mutant), (how, count)) in enumerate(zip(drawn, pool.map(tried, drawn)), 1):
            if not how:
                survivors.append(mutant)
                how = f"NOT NOTICED ({count} tests reach it)"
            print(f"{number:4}/{len(drawn)}  {mutant}  {how}", flush=True)
    for mutant in survivors:
        print(f"\n{mutant.diff()}", end="")
    caught = len(drawn) - len(survivors)
    print(f"\n{caught} of {len(drawn)} mutants noticed, {len(survivors)} not")
    return int(caught < options.least * len(drawn))


if __name__ == "__main__":
    sys.exit(main())
