"""All rows of the coverage table, gathered from the modules ``cases_*``."""

from __future__ import annotations

import csv
import importlib
from pathlib import Path

from table.coverage_case import Case

HERE = Path(__file__).parent
CASES: dict[str, Case] = {}
LEFT_OUT: dict[str, str] = {}
"""Operations that tapegrad does not have, with the reason."""
for name in sorted(p.stem for p in HERE.glob("cases_*.py")):
    found = importlib.import_module(f"table.{name}")
    CASES.update(found.CASES)
    LEFT_OUT.update(found.LEFT_OUT)
with (HERE / "peers.csv").open(encoding="utf-8") as file:
    PEERS = {row["op"]: row for row in csv.DictReader(file)}
"""What HIPS autograd, PyTorch, JAX and Chainer differentiate, by a survey of their rules and documentation."""
