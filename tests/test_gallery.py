"""The gallery (docs/gallery): every example runs at small size, is right, and takes no more memory than it says."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from shim.host import why_no_compiler

pytestmark = pytest.mark.slow

GALLERY = Path(__file__).resolve().parents[1] / "docs" / "gallery"
EXAMPLES = sorted(path.name for path in GALLERY.iterdir() if path.is_dir() and not path.name.startswith("__"))


def script(name: str) -> Path:
    return GALLERY / name / f"{name}.py"


def run(command: list[object], folder: Path) -> subprocess.CompletedProcess[str]:
    """In an environment of its own: the caller's device does not decide the outcome."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("TAPEGRAD_DEVICE", "PYTEST", "PYTHONPATH"))}
    clean |= {"PYTHONPATH": f"{GALLERY.parents[1]}{os.pathsep}{GALLERY.parents[1] / 'tests'}", "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, "-W", "error", *map(str, command)],
        cwd=folder, env=clean, capture_output=True, text=True, timeout=300, stdin=subprocess.DEVNULL,
    )  # fmt: skip


def of_memory(said: str) -> list[tuple[int, int]]:
    """What a script says of memory: bytes taken, bytes allowed."""
    return [(int(a), int(b)) for a, b in re.findall(r"^checked: memory: (\d+) bytes of (\d+): ", said, re.MULTILINE)]


def test_there_are_examples() -> None:
    assert "raw_kernel" in EXAMPLES


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_is_right_and_keeps_its_memory(name: str, tmp_path: Path) -> None:
    done = run([script(name), "--small", "--picture", "picture.svg"], tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    claims = of_memory(done.stdout)
    assert claims and all(0 < taken <= allowed for taken, allowed in claims), done.stdout
    assert (tmp_path / "picture.svg").read_text().startswith("<?xml")


@pytest.mark.skipif(why_no_compiler() is not None, reason=str(why_no_compiler()))
def test_the_cuda_kernels_of_an_example_run_on_the_stand_in(tmp_path: Path) -> None:
    path = script("raw_kernel")
    code = (
        "import runpy, sys; from shim import standin; standin.install(); "
        f"sys.argv = [{str(path)!r}, '--small']; runpy.run_path({str(path)!r}, run_name='__main__')"
    )
    done = run(["-c", code], tmp_path)
    assert done.returncode == 0 and done.stdout.startswith("device: cuda:0"), done.stdout + done.stderr


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_has_a_page_and_a_picture(name: str) -> None:
    page = (GALLERY / name / "index.md").read_text()
    pictures = re.findall(r"!\[[^\]]+\]\(([^)]+)\)", page)
    assert page.startswith("# ") and pictures
    assert all((GALLERY / name / picture).stat().st_size < 100_000 for picture in pictures)
    listed = (GALLERY / "index.md").read_text()
    assert f"]({name}/index.md)" in listed and f"]({name}/{pictures[0]})" in listed


@pytest.mark.parametrize("name", EXAMPLES)
def test_what_a_page_shows_of_a_script_stands_there(name: str) -> None:
    """Blocks of Python in a page are lines of the script, in the order of the script."""
    page, text = (GALLERY / name / "index.md").read_text(), script(name).read_text().splitlines()
    blocks = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    assert blocks
    for block in blocks:
        lines = [line.strip() for line in block.splitlines() if line.strip() not in ("", "...")]
        rest = map(str.strip, text)
        assert [line for line in lines if line not in rest] == [], f"{name}: not in the script, or in another order"


@pytest.mark.parametrize("path", sorted(GALLERY.glob("*/*.py")), ids=lambda path: f"{path.parent.name}/{path.name}")
def test_a_script_says_what_it_does(path: Path) -> None:
    doc = ast.get_docstring(ast.parse(path.read_text()))
    assert doc and f"python docs/gallery/{path.parent.name}/{path.name}" in doc


def test_a_wrong_result_ends_a_script(tmp_path: Path) -> None:
    """The twin: what the scripts check with can fail."""
    code = f"import sys; sys.path.insert(0, {str(GALLERY)!r}); import example; "
    for line in (
        "example.check(1 > 2, 'more')",
        "example.check_memory('x', 11, 10)",
        "example.check_memory('x', 0, 10)",
    ):
        done = run(["-c", code + line], tmp_path)
        assert done.returncode == 1 and done.stderr.startswith("WRONG: "), done.stderr
    done = run(["-c", code + "example.check_memory('x', 10, 10)"], tmp_path)
    assert done.returncode == 0 and of_memory(done.stdout) == [(10, 10)]
