"""The documentation: every page is reached, every public name is listed, figures of the decision page are true."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
MODULES = [
    "tapegrad", "tapegrad.linalg", "tapegrad.fft", "tapegrad.special", "tapegrad.stats", "tapegrad.random",
    "tapegrad.signal", "tapegrad.integrate", "tapegrad.sparse", "tapegrad.nn", "tapegrad.nn.functional",
    "tapegrad.nn.initializers", "tapegrad.optim", "tapegrad.optim.schedules", "tapegrad.training",
    "tapegrad.distributed", "tapegrad.testing", "tapegrad.tree", "tapegrad.memory", "tapegrad.memory.policies",
    "tapegrad.errors",
]  # fmt: skip
LINK = re.compile(r"\]\(([^)#]+)(?:#[^)]*)?\)")


def loaded(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


REFERENCE = loaded(DOCS / "hooks" / "reference.py")


def listed() -> list[str]:
    """Public paths of all that the pages of the reference list."""
    found = []
    for page in sorted((DOCS / "reference").glob("*.md")):
        for mark in REFERENCE.MARK.finditer(page.read_text()):
            found += REFERENCE.listed(mark["module"], mark["rooms"])
    return found


def test_every_public_name_is_listed_once() -> None:
    found = listed()
    wanted = [f"{module}.{name}" for module in MODULES for name in REFERENCE.public(module)]
    assert sorted(set(wanted) - set(found)) == []
    assert sorted(found) == sorted(set(found))
    assert len(wanted) > 800


def test_every_page_is_in_the_navigation() -> None:
    text = (ROOT / "mkdocs.yml").read_text()
    named = set(re.findall(r"[\w/-]+\.md", text.split("\nnav:")[1]))
    pages = {p.relative_to(DOCS).as_posix() for p in DOCS.rglob("*.md")}
    assert named == pages


def test_the_readme_is_short_and_its_links_lead_somewhere() -> None:
    text = (ROOT / "README.md").read_text()
    assert text.count("\n") <= 150
    links = [link for link in LINK.findall(text) if "://" not in link]
    assert len(links) > 20 and [link for link in links if not (ROOT / link).exists()] == []


def test_variables_of_the_environment_are_told() -> None:
    files = (ROOT / "tapegrad").rglob("*.py")
    used = {name for path in files for name in re.findall(r"environ\S*\(?\"(TAPEGRAD_\w+)\"", path.read_text())}
    assert used and used <= set(re.findall(r"`(TAPEGRAD_\w+)`", (DOCS / "reference" / "index.md").read_text()))


TOOLS = {
    "nothing": "nothing", "recompute_grad": "`recompute_grad(block)`", "policy": "policy=",
    "checkpointed_loop": "checkpointed_loop", "memory_budget": "memory_budget", "function": "`function(step)`",
    "function_budget": "budget=",
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", TOOLS)
def test_peaks_of_the_decision_page_are_measured(name: str) -> None:
    page = (DOCS / "which-tool.md").read_text().split("## What each costs")[1]
    [told] = re.findall(rf"^\| [^|]*{re.escape(TOOLS[name])}[^|]* \| ([\d.]+) \| [\d.]+ \|$", page, re.MULTILINE)
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("TAPEGRAD", "PYTEST"))}
    command = [sys.executable, str(DOCS / "which_tool.py"), "--step", name, "--figures"]
    done = subprocess.run(
        command,
        env=clean | {"TAPEGRAD_DEVICE": "cpu", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    peak = int(done.stdout.split()[1])
    assert f"{peak / 2**20:.1f}" == told
    assert (DOCS / "pictures" / f"{name}.svg").exists()
