"""Runs the Python code of a Markdown file, so that what a reader pastes is known to work.

Blocks fenced as ``python`` run in order in one namespace, as in one session, with warnings as errors.  A block with
``>>>`` prompts is checked against the output it shows.  Use: ``python tests/readme_blocks.py [README.md]``
"""

from __future__ import annotations

import doctest
import re
import sys
import time
import traceback
import warnings
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


if __name__ == "__main__":
    default = Path(__file__).parent.parent / "README.md"
    sys.exit(run(Path(sys.argv[1]) if len(sys.argv) > 1 else default))
