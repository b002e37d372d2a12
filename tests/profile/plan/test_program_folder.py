"""Plans of a program that has been copied: which files are the same."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tapegrad.profile.plan.program_folder import folder_of, relative_to_program
from tapegrad.tracing.run import Run
from tests.profile.made_runs import Builder

MODEL = """import tapegrad as tg
from tapegrad import nn

def wide(x, w):
    return tg.exp(tg.tanh(tg.sin(x @ w) * 2.0) @ w)

class Block(nn.Layer):
    def __init__(self):
        super().__init__()
        self.w = tg.Variable(tg.ones((32, 32)) * 0.01)
    def call(self, x):
        return wide(x, self.w)
"""
TRAIN = """import tapegrad as tg
from {package}model import Block

blocks = [Block() for _ in range(4)]
x = tg.ones((512, 32))
for _ in range(3):
    with tg.GradientTape() as tape:
        h = x
        for block in blocks:
            h = block(h)
        loss = tg.sum(h)
    tape.gradient(loss, [block.w for block in blocks])
    tg.memory.step()
"""


def run_of(argv0: str, module: str | None, *files: str) -> Run:
    b = Builder(argv=[argv0], module=module)
    for file in files:
        b.stack(file, 1, "f")
    return b.finish()


@pytest.mark.parametrize(
    ("argv0", "module", "files", "folder"),
    [
        ("train.py", None, ["/a/b/train.py", "/lib/x.py"], "/a/b"),
        ("../b/train.py", None, ["/a/b/train.py"], "/a/b"),
        ("/a/b/train.py", None, ["/a/b/train.py", "/a/b/c/train.py"], "/a/b"),
        ("b\\train.py", None, ["C:\\a\\b\\train.py"], "C:/a/b"),
        ("app", None, ["/a/app/__main__.py"], "/a/app"),
        ("pkg.train", "pkg.train", ["/a/pkg/train.py"], "/a"),
        ("pkg", "pkg", ["/a/pkg/__main__.py"], "/a"),
        ("pkg", "pkg", ["/a/pkg/model.py"], "/a"),
        ("gone.py", None, ["/a/other.py"], None),
    ],
)
def test_the_folder_is_found_in_the_run(argv0: str, module: str | None, files: list[str], folder: str | None) -> None:
    run = run_of(argv0, module, *files)
    assert folder_of(run) == folder
    if folder is not None:
        assert relative_to_program(run, f"{folder}/lib/m.py") == "lib/m.py"
    assert relative_to_program(run, "/elsewhere/m.py") == ""


def command(folder: Path, *args: str) -> str:
    done = subprocess.run([sys.executable, "-m", "tapegrad", *args], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("package", ["", "pkg"])
def test_a_copied_project_meets_its_plan(tmp_path: Path, package: str) -> None:
    here = tmp_path / "here"
    source = here / package
    source.mkdir(parents=True)
    (source / "model.py").write_text(MODEL)
    (source / "train.py").write_text(TRAIN.format(package=f"{package}." if package else ""))
    program = ["-m", f"{package}.train"] if package else ["train.py"]
    command(here, "profile", "-o", "run.sqlite", "-q", *program)
    command(here, "plan", "run.sqlite", "--max-slowdown", "90%")
    there = tmp_path / "there"
    shutil.move(here, there)
    assert "was not met" not in command(there, "profile", "-o", "again.sqlite", "--plan", "plan.json", *program)
    text = (there / "plan.json").read_text()
    assert '"do": "checkpoint"' in text
    (there / "plan.json").write_text(text.replace('"relative": "', '"relative": "x'))
    assert "was not met" in command(there, "profile", "-o", "2.sqlite", "--plan", "plan.json", *program)
