"""What ``bench/gpu_counts.py`` counts of the CUDA path stays within what is held: launches, bytes, instructions."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
from shim import nvrtc
from shim.host import why_no_compiler

BENCH = Path(__file__).resolve().parents[1] / "bench"

pytestmark = [pytest.mark.skipif(why_no_compiler() is not None, reason=str(why_no_compiler())), pytest.mark.slow]


@pytest.fixture
def counts(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCH))
    return importlib.import_module("gpu_counts")


def run(parts: str) -> str:
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("TAPEGRAD_DEVICE", "PYTEST", "PYTHONPATH"))}
    command = [sys.executable, str(BENCH / "gpu_counts.py"), "--only", parts]
    found = subprocess.run(command, env=clean, capture_output=True, text=True, timeout=600)  # 20 s on an idle machine
    assert found.returncode == 0, found.stdout + found.stderr
    return found.stdout


def test_launches_and_bytes_are_within_what_is_held():
    said = run("operations,step,block")
    assert "step: launches" in said and "bytes / bound" in said


def test_instructions_are_within_the_budget():
    nvrtc.library()  # or the test is skipped
    found = run("instructions,tensor cores")
    assert "gelu, backward, bfloat16" in found and "tg_attention_vjp_kv, float32: HMMA" in found


def test_a_count_above_what_is_held_is_found(counts, monkeypatch, capsys):
    held, _, _ = counts.HELD["step: launches"]
    assert not counts.row("step", "launches", held).worse
    monkeypatch.setattr(counts, "rows_of", lambda parts: [counts.row("step", "launches", held + 1)])
    monkeypatch.setattr(sys, "argv", ["gpu_counts.py"])
    with pytest.raises(SystemExit, match=f"step: launches: {held + 1}, held are {held}"):
        counts.main()
    with pytest.raises(KeyError, match="nothing of this name"):
        counts.row("step", "nothing of this name", 1)


def test_the_longest_loop_is_counted(counts):
    line = "        /*0{}*/                   {} ;"
    code = ["MOV R1", ".L_x_1:", "FADD", "FMUL", "@P0 BRA `(.L_x_1)", ".L_x_2:", "FADD", "BRA `(.L_x_2)", "EXIT"]
    sass = "\n".join(one if one.startswith(".") else line.format(f"{i:03x}", one) for i, one in enumerate(code))
    assert counts.in_loop(sass) == 3
