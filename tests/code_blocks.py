"""Runs the Python code of Markdown files, so that what a reader pastes is known to work.

Blocks fenced as ``python`` run in order in one namespace for each file, as in one session, with warnings as errors.  A
block with ``>>>`` prompts is checked against the output it shows.  Each file runs in a process of its own.

Use: ``python tests/code_blocks.py [README.md docs]``: of a folder all files with blocks, but those of its gallery,
whose blocks are parts of scripts.
"""

from __future__ import annotations

import doctest
import re
import subprocess
import sys
import time
import traceback
import warnings
from collections.abc import Iterator
from pathlib import Path

FENCE = re.compile(r"^```python[ \t]*\n(.*?)^```[ \t]*$", re.MULTILINE | re.DOTALL)


def python_blocks(text: str) -> list[tuple[int, str]]:
    """The blocks as (number of the line before the first code line, code)."""
    return [(text.count("\n", 0, match.start(1)), match.group(1)) for match in FENCE.finditer(text)]


def run_block(path: Path, line: int, code: str, namespace: dict[str, object]) -> None:
    """Runs one block; a traceback points at its line in the file."""
    if ">>>" in code:
        block = doctest.DocTestParser().get_doctest(code, namespace, path.name, str(path), line)
        block.globs = namespace  # get_doctest copies, and later blocks shall see these names
        report: list[str] = []
        flags = doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS
        result = doctest.DocTestRunner(optionflags=flags).run(block, out=report.append, clear_globs=False)
        if result.failed:
            raise AssertionError("".join(report))
    else:
        exec(compile("\n" * line + code, str(path), "exec"), namespace)


def run(path: Path) -> int:
    """Runs every block of the file and prints its time; returns how many failed (1 when there is no block)."""
    blocks = python_blocks(path.read_text(encoding="utf-8"))
    if not blocks:
        print(f"{path}: no python block found")
        return 1
    namespace: dict[str, object] = {"__name__": "__main__"}
    failed = 0
    for line, code in blocks:
        start = time.perf_counter()
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                run_block(path, line, code, namespace)
            outcome = "ok"
        except Exception:
            traceback.print_exc()
            outcome, failed = "FAILED", failed + 1
        print(f"{path}:{line + 1}: {outcome} ({time.perf_counter() - start:.1f} s)", flush=True)
    return failed


def pages(paths: list[Path]) -> Iterator[Path]:
    """The files named, and of folders those with blocks."""
    for path in paths:
        if path.is_dir():
            found = sorted(p for p in path.rglob("*.md") if "gallery" not in p.relative_to(path).parts)
            yield from (p for p in found if python_blocks(p.read_text(encoding="utf-8")))
        else:
            yield path


def main(names: list[str]) -> int:
    """The command: how many files failed."""
    root = Path(__file__).resolve().parent.parent
    found = list(pages([Path(name) for name in names] or [root / "README.md", root / "docs"]))
    if len(found) == 1:
        return run(found[0])
    return sum(subprocess.run([sys.executable, __file__, str(page)]).returncode != 0 for page in found)


if __name__ == "__main__":
    sys.exit(min(main(sys.argv[1:]), 1))
