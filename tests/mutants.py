"""Which small changes to the engine do its tests notice?  ``python tests/mutants.py --count 200 --jobs 2``.

A sample of mutants: a comparison flipped, ``and`` and ``or`` swapped, ``+`` and ``-``, a small constant raised, a call
dropped, a condition turned round.  Each is made in a copy of the package, where the tests of the same part run until
the first failure: first those of the same module, then the rest of the part's.  What no test notices is printed, and
the exit status is 1 where less than ``--least`` was noticed.  No part of the test suite: it takes minutes a mutant.
"""

from __future__ import annotations

import argparse
import ast
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PARTS = {
    "core": ["tests/core", "tests/test_tensor.py", "tests/test_variable.py", "tests/test_laws.py"],
    "engine": ["tests/engine", "tests/test_laws.py", "tests/test_explain.py", "tests/cuda/test_regions.py",
               "tests/cuda/test_reductions.py"],
    "autodiff": ["tests/autodiff", "tests/test_values.py"],
    "memory": ["tests/memory"],
}  # fmt: skip
"""Folders of the package, and the tests of each."""
FLIPPED: dict[type[ast.AST], type[ast.AST]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In, ast.And: ast.Or, ast.Or: ast.And,
    ast.Add: ast.Sub, ast.Sub: ast.Add,
}  # fmt: skip


@dataclass(frozen=True)
class Mutant:
    """A change of one expression or statement, from ``start`` to ``stop`` in the bytes of the file."""

    path: Path
    line: int
    start: int
    stop: int
    before: str
    after: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}  {' '.join(self.before.split())[:60]}  ->  {' '.join(self.after.split())[:60]}"

    def apply(self, text: bytes) -> bytes:
        """The file with the change."""
        return text[: self.start] + self.after.encode() + text[self.stop :]


def mutants(path: Path, text: str) -> Iterator[Mutant]:
    """All mutants of a file."""
    starts = [0]
    for line in text.encode().splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    tree = ast.parse(text)
    # Python 3.11 does not say where the parts of an f-string stand.
    inside = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in ast.walk(node)}
    for node in ast.walk(tree):
        after = None if id(node) in inside else _changed(node)
        if after is None:
            continue
        place: Any = node
        start, stop = starts[place.lineno - 1] + place.col_offset, starts[place.end_lineno - 1] + place.end_col_offset
        before = text.encode()[start:stop].decode()
        if before != after:
            yield Mutant(path, place.lineno, start, stop, before, after)


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
    """``count`` mutants with their parts, drawn from all."""
    found = [
        (part, mutant)
        for part in parts
        for path in sorted((ROOT / "tapegrad" / part).rglob("*.py"))
        for mutant in mutants(path.relative_to(ROOT), path.read_text())
    ]
    return random.Random(seed).sample(found, min(count, len(found)))


def tests_of(part: str, path: Path) -> list[list[str]]:
    """The tests of the module first, then those of its part."""
    near = sorted(str(p.relative_to(ROOT)) for p in (ROOT / "tests").rglob(f"test_{path.stem}*.py"))
    return [near, PARTS[part]] if near else [PARTS[part]]


def noticed(part: str, mutant: Mutant, seconds: float) -> str:
    """How a mutant was noticed: "failed", "hangs" or "" (not at all)."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder)
        for name in ("tapegrad", "kernels", "tests", "bench", "pyproject.toml", "README.md"):
            source = ROOT / name
            if source.is_dir():
                shutil.copytree(source, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(source, copy / name)
        (copy / mutant.path).write_bytes(mutant.apply((ROOT / mutant.path).read_bytes()))
        environment = {**os.environ, "PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
        for tests in tests_of(part, mutant.path):
            command = [sys.executable, "-m", "pytest", "-x", "-q", "-n0", "-p", "no:cacheprovider", *tests]
            try:
                done = subprocess.run(command, cwd=copy, env=environment, capture_output=True, timeout=seconds)
            except subprocess.TimeoutExpired:
                return "hangs"
            if done.returncode:
                return "failed"
    return ""


def main(arguments: list[str] | None = None) -> int:
    """The command; its exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=200, help="mutants (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the sample (default: %(default)s)")
    parser.add_argument("--parts", default=",".join(PARTS), help="folders of the package (default: %(default)s)")
    parser.add_argument("--jobs", type=int, default=1, help="mutants at once (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=600.0, help="after which tests hang (default: %(default)s)")
    parser.add_argument("--least", type=float, default=0.92, help="part to be noticed (default: %(default)s)")
    options = parser.parse_args(arguments)
    drawn = sample(options.parts.split(","), options.count, options.seed)
    caught = 0
    with ThreadPoolExecutor(options.jobs) as pool:
        answers = pool.map(lambda item: noticed(*item, options.seconds), drawn)
        for number, ((_, mutant), how) in enumerate(zip(drawn, answers), 1):
            caught += bool(how)
            print(f"{number:4}/{len(drawn)}  {caught} noticed  {how or 'NOT NOTICED':12} {mutant}", flush=True)
    print(f"{caught} of {len(drawn)} mutants noticed ({caught / max(1, len(drawn)):.0%}), seed {options.seed}")
    return int(caught < options.least * len(drawn))


if __name__ == "__main__":
    sys.exit(main())
