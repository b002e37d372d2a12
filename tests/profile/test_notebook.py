"""The notebook's magic, in a shell of IPython's, and objects as tables."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from IPython.core.interactiveshell import InteractiveShell
from traitlets.config import Config

import tapegrad as tg
from tapegrad.profile.notebook import NotebookError, Profiled, profile_cell
from tapegrad.tracing.file import load
from tapegrad.tracing.ledger import LEDGER

CELL = """\
def block(x, w):
    return tg.tanh(x @ w) * tg.softmax(x @ w)

ws = [tg.Variable(tg.eye(128)) for _ in range(6)]
with tg.GradientTape() as tape:
    x = tg.ones((256, 128))
    for w in ws:
        x = block(x, w)
    loss = tg.mean(x * x)
gradients = tape.gradient(loss, ws)
len(gradients)
"""


@pytest.fixture
def shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])  # the shell puts a module of its own there
    config = Config()
    config.HistoryManager.enabled = False
    found = InteractiveShell(config=config)
    assert found.run_cell("%load_ext tapegrad\nimport tapegrad as tg", store_history=True).success
    yield found
    found.reset()


def test_a_cell_is_profiled_and_does_what_it_does(shell: Any, capsys: pytest.CaptureFixture[str]) -> None:
    result = shell.run_cell("%%tapegrad\n" + CELL, store_history=True)
    assert result.success and shell.user_ns["gradients"][0].shape == (128, 128)
    shown = capsys.readouterr().out
    found = shell.user_ns["Out"][2]
    assert "Out[2]: 6\n" in shown and str(found) in shown  # the value of the last line, then the summary
    assert isinstance(found, Profiled) and found.run.peak["bytes"] > 6 * 256 * 128 * 4
    assert LEDGER.journal is None
    text, page = str(found), found._repr_html_()
    assert f"({found.run.peak['bytes']} bytes)" in text and "x = tg.recompute_grad(block)(x, w)" in text
    assert f"({found.run.peak['bytes']} bytes)" in page and "x = tg.recompute_grad(block)(x, w)" in page
    assert "ipython-input" not in text + page and "In[" in page
    names = {found.run.text(i) for i in found.run.calls["name"]}
    assert names == {"block"}  # nothing of IPython's


def test_the_figures_are_those_of_a_measure(shell: Any) -> None:
    found: Any = profile_cell(shell, "", CELL)
    shell.run_cell("del ws, tape, x, loss, gradients, w")
    shell.run_cell("with tg.measure() as m:\n" + "".join(f"    {line}\n" for line in CELL.splitlines()))
    assert shell.user_ns["m"].peak_bytes - shell.user_ns["m"].live_bytes > 0
    assert found.run.peak["bytes"] == shell.user_ns["m"].peak_bytes


def test_files_are_written_on_demand_and_tried_before(shell: Any, tmp_path: Path) -> None:
    assert shell.run_cell("%%tapegrad -o run.sqlite --html run.html --stacks full\n" + CELL).success
    assert load("run.sqlite").peak["bytes"] and Path("run.html").stat().st_size > 10_000
    with pytest.raises(OSError, match="no/run.sqlite"):
        profile_cell(shell, "-o no/run.sqlite", "ran = True")
    assert "ran" not in shell.user_ns


def test_what_is_written_wrong_is_said(shell: Any) -> None:
    for line in ("--sacks full", "--stacks all", "file.sqlite"):
        with pytest.raises(NotebookError, match="usage: tapegrad"):
            profile_cell(shell, line, "ran = True")
    assert "ran" not in shell.user_ns


def test_an_error_in_the_cell_is_the_shells(shell: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert profile_cell(shell, "-o run.sqlite", CELL + "1 / 0\n") is None
    assert "ZeroDivisionError" in capsys.readouterr().out and LEDGER.journal is None
    assert load("run.sqlite").meta["outcome"]["message"] == "division by zero"
    assert profile_cell(shell, "", "x = (") is None
    assert profile_cell(shell, "", "")._repr_html_()  # type: ignore[union-attr]
    nested = "from tapegrad.profile.notebook import profile_cell\nprofile_cell(get_ipython(), '', '1')"
    assert profile_cell(shell, "", nested) is None
    assert "a profile is being recorded already" in capsys.readouterr().out


def test_objects_are_tables_in_notebooks() -> None:
    def step(x: tg.Tensor) -> tg.Tensor:
        return tg.sum(tg.tanh(x @ x) @ x)

    x = tg.Variable(tg.ones((128, 128)))
    with tg.measure() as m, tg.GradientTape() as tape:
        loss = step(x)
        saved, report = tg.memory.saved(tape), tg.memory.report(tape)
    prediction = tg.memory.predict_peak(step, tg.memory.ShapeDtype((64, 64)), budgets=["1KiB", "10MiB"], least=False)
    assert loss.shape == ()
    for thing, figure in ((m, m.peak_bytes), (saved, None), (report, None), (prediction, None)):
        page = thing._repr_html_()
        assert page.count("<table>") >= 1 and page.count("<tr>") == page.count("</tr>") >= 2
        assert figure is None or f"({figure} bytes)" in page
        assert not re.search(r"<(?!/?(p|table|thead|tbody|tr|td|th)\b)", page)
    assert "test_notebook.py" in m._repr_html_() and "too small" in prediction._repr_html_()
    assert f'<td style="text-align:right">{m.peak_by_category["activation"]}</td>' in m._repr_html_()


def test_without_a_notebook_nothing_of_it_is_loaded(tmp_path: Path) -> None:
    code = "import sys, tapegrad as tg; tg.ones(2); print({'IPython', 'tapegrad.profile'} & set(sys.modules))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path)
    assert found.stdout == "set()\n"
