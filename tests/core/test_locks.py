"""Locks: all are made in one place, which frees them in a forked child."""

from __future__ import annotations

import re
from pathlib import Path

import tapegrad as tg

PACKAGE = Path(tg.__file__).parent
MADE = re.compile(r"\bR?Lock\(\)")


def test_every_lock_of_the_package_is_made_in_one_place() -> None:
    """What ``tests/tracing/test_laws.py`` sees of forks holds for locks that are made later, too."""
    found = [path for path in PACKAGE.rglob("*.py") if MADE.search(path.read_text("utf-8"))]
    assert [path.relative_to(PACKAGE).as_posix() for path in found] == ["core/locks.py"]
