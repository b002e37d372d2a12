"""Searches for new failures, five minutes each: ``pytest --everything`` runs them."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

SECONDS = 300


@pytest.mark.search
@pytest.mark.parametrize("search", ["programs.search", "programs.stress"])
def test_a_search_finds_nothing(search: str) -> None:
    seed = int(time.time())
    which = {
        "programs.search": ["--seeds", f"{seed}:{seed + 100_000}", "--jobs", "1"],
        "programs.stress": ["--seed", f"{seed}"],
    }
    command = [sys.executable, "-m", search, "--seconds", str(SECONDS), *which[search]]
    result = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, timeout=4 * SECONDS)
    assert result.returncode == 0, f"{' '.join(command)}\n{result.stdout}\n{result.stderr}"
