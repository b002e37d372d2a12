"""Who may import whom: the layers, the libraries, what `import tapegrad` loads, how long a file may be.

Every check has a twin that plants an offence and sees the check find it.
"""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "tapegrad"

# Which part of tapegrad may import which library; anything else that is not in the standard library is an offence.
LIBRARIES = {
    "numpy": {"device"},
    "ml_dtypes": {"device"},
    "scipy": {"device", "optim", "profile"},
    "cupy": {"device"},
    "cupyx": {"device"},
    "cudnn": {"device"},
    "pynvml": {"device", "profile"},
    "threadpoolctl": {"device"},
    "click": {"profile"},
    "rich": {"profile", "training"},
    "psutil": {"profile", "tracing"},
    "mpi4py": {"distributed"},
    "llvmlite": {"engine"},
    "pytest": {"testing"},
}
# Heavy or optional, so imported inside the function that needs them.
LAZY = {"cupy", "cupyx", "cudnn", "pynvml", "scipy", "threadpoolctl", "mpi4py", "llvmlite"}
# What `import tapegrad` must not load.
NOT_AT_IMPORT = sorted(LIBRARIES.keys() - {"numpy", "ml_dtypes"})


def python_files(package: Path) -> list[Path]:
    return sorted(package.rglob("*.py"))


@cache
def imported_libraries(text: str) -> list[tuple[str, int, bool]]:
    """(top-level name, line, whether it runs when the module is imported) of every import that is not relative."""
    return list(_imported_libraries(ast.parse(text)))


def _imported_libraries(tree: ast.Module) -> Iterator[tuple[str, int, bool]]:
    in_function = {
        id(node)
        for function in ast.walk(tree)
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        for node in ast.walk(function)
    }
    for_checkers = {  # numpy.typing, say: what only the checker of types imports
        id(node)
        for block in ast.walk(tree)
        if isinstance(block, ast.If) and ast.unparse(block.test) == "TYPE_CHECKING"
        for statement in block.body
        for node in ast.walk(statement)
    }
    for node in ast.walk(tree):
        if id(node) in for_checkers:
            continue
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names = [node.module or ""]
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in (
            "__import__",
            "import_module",
            "importlib.import_module",
        ):
            # A name that is only known at run time could be any library.
            names = [arg.value if isinstance(arg, ast.Constant) else "?" for arg in node.args[:1]]
        for name in names:
            yield name.partition(".")[0], node.lineno, id(node) not in in_function


def library_offences(package: Path) -> list[str]:
    offences = []
    for path in python_files(package):
        part = path.relative_to(package).parts[0].removesuffix(".py")
        for name, line, at_import in imported_libraries(path.read_text(encoding="utf-8")):
            if name == "tapegrad" or name in sys.stdlib_module_names:
                continue
            where = f"{path.relative_to(package.parent)}:{line}"
            if part not in LIBRARIES.get(name, set()):
                offences.append(f"{where}: {part} may not import {name}")
            elif name in LAZY and at_import:
                offences.append(f"{where}: import {name} inside the function that needs it")
    return offences


def lint_imports(root: Path) -> subprocess.CompletedProcess[str]:
    """Runs the contracts of pyproject.toml on the package below `root`."""
    code = "from importlinter.cli import lint_imports_command; lint_imports_command()"
    return subprocess.run(
        [sys.executable, "-c", code, "--no-cache"],
        cwd=root,
        capture_output=True,
        text=True,
        timeout=120,
        stdin=subprocess.DEVNULL,
    )


def loaded_by(code: str, *path: Path) -> set[str]:
    """Which of NOT_AT_IMPORT a fresh interpreter has loaded after `code`."""
    probe = f"import sys\n{code}\nprint(*[name for name in {NOT_AT_IMPORT} if name in sys.modules])"
    env = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, path))}
    result = subprocess.run(
        [sys.executable, "-W", "error", "-c", probe], env=env, cwd=path[0], capture_output=True, text=True, timeout=120
    )
    assert result.returncode == 0, result.stderr
    return set(result.stdout.split())


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A copy of the package and its contracts, to plant offences in; returns the folder that holds it."""
    shutil.copytree(PACKAGE, tmp_path / "tapegrad", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    return tmp_path


@pytest.fixture
def fake_libraries(tmp_path: Path) -> Path:
    """A folder where every library that must not be loaded can be: an `except ImportError` cannot hide an import."""
    folder = tmp_path / "libraries"
    folder.mkdir()
    for name in NOT_AT_IMPORT:
        (folder / f"{name}.py").write_text("")
    return folder


def plant(copy: Path, module: str, code: str) -> None:
    with (copy / "tapegrad" / module).open("a", encoding="utf-8") as file:
        file.write(f"\n{code}\n")


def test_layers_are_kept() -> None:
    result = lint_imports(ROOT)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.sampled(1 / 4)
@pytest.mark.parametrize(
    ("module", "code", "contract"),
    [
        ("errors.py", "from tapegrad import tensor", "Layers of tapegrad"),
        ("core/aval.py", "from . import node", "What was asked: values, then buffers and primitives"),
        (
            "engine/realize.py",
            "def late():\n    from tapegrad.autodiff.tape import GradientTape",
            "Layers of tapegrad",
        ),
        ("tensor.py", "import tapegrad", "Layers of tapegrad"),
        ("ops/__init__.py", "from tapegrad import memory", "Layers of tapegrad"),
        ("remat/__init__.py", "from tapegrad import ops", "Rematerialization and ops never import each other"),
        ("engine/region.py", "from tapegrad.engine.cpu import tiles", "Engine: region, then programs, then launches"),
        ("nn/__init__.py", "from tapegrad.core.buffer import Buffer", "Layers and optimizers use public names only"),
        ("a_module_in_no_layer.py", "", "Layers of tapegrad"),
    ],
)
def test_a_broken_layer_is_found(copy: Path, module: str, code: str, contract: str) -> None:
    plant(copy, module, code)
    result = lint_imports(copy)
    assert result.returncode == 1, result.stdout + result.stderr
    assert f"{contract} BROKEN" in result.stdout


def test_only_the_device_layer_imports_array_libraries() -> None:
    assert library_offences(PACKAGE) == []


@pytest.mark.parametrize(
    ("module", "code", "offence"),
    [
        ("core/node.py", "import numpy as np", "core may not import numpy"),
        ("core/node.py", "def f():\n    from numpy.linalg import norm", "core may not import numpy"),
        ("ops/planted.py", "import importlib\nimportlib.import_module('scipy.special')", "ops may not import scipy"),
        ("ops/planted.py", "name = 'numpy'\n__import__(name)", "ops may not import ?"),
        ("tensor.py", "import torch", "tensor may not import torch"),
        ("nest.py", "if not TYPE_CHECKING:\n    import numpy", "nest may not import numpy"),
        ("profile/planted.py", "import numpy", "profile may not import numpy"),
        ("profile/planted.py", "import pynvml", "import pynvml inside the function"),
        (
            "distributed/planted.py",
            "try:\n    import mpi4py\nexcept ImportError:\n    pass",
            "import mpi4py inside the function",
        ),
    ],
)
def test_a_library_in_the_wrong_place_is_found(copy: Path, module: str, code: str, offence: str) -> None:
    plant(copy, module, code)
    [found] = library_offences(copy / "tapegrad")
    assert offence in found


def test_import_loads_only_numpy(fake_libraries: Path) -> None:
    assert loaded_by("import tapegrad", fake_libraries, ROOT) == set()
    assert loaded_by("import tapegrad\ntapegrad.sin", fake_libraries, ROOT) == set()


@pytest.mark.sampled(1 / 8)
@pytest.mark.parametrize("module", ["__init__.py", "_api.py"])
@pytest.mark.parametrize("name", NOT_AT_IMPORT)
def test_a_library_loaded_at_import_is_found(copy: Path, fake_libraries: Path, name: str, module: str) -> None:
    plant(copy, module, f"try:\n    import {name}\nexcept ImportError:\n    pass")
    assert loaded_by("import tapegrad\ntapegrad.sin", fake_libraries, copy) == {name}


POLLS = re.compile(r"tracking\.current is|tracking\.NO_TRACKER|is_dry|\.detailed\b")
MAY_ASK = {"core/tracking.py", "remat/budget/manager.py", "tracing/ledger.py", "tracing/metrics.py"}
"""The blocks that choose the tracker, and the tracker itself."""


def lines_with(package: Path, pattern: re.Pattern[str], allowed: set[str]) -> list[str]:
    """Lines that match ``pattern``, outside of the ``allowed`` files."""
    return [
        f"{name}:{number}"
        for path in sorted(package.rglob("*.py"))
        if (name := path.relative_to(package).as_posix()) not in allowed
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if pattern.search(line)
    ]


def polls(package: Path) -> list[str]:
    """Lines that ask who counts, or whether a budget or a dry run is there: an executor or a tracker knows."""
    return lines_with(package, POLLS, MAY_ASK)


def reference_counts(package: Path) -> list[str]:
    """Lines that ask the interpreter how often a thing is referred to, in a module that does not say why."""
    return lines_with(package, re.compile("getrefcount"), {"core/references.py"})


def test_nobody_asks_who_looks_on() -> None:
    assert polls(PACKAGE) == []


def test_a_question_is_found(copy: Path) -> None:
    (copy / "tapegrad" / "more.py").write_text("who = tracking.current\nif who is not tracking.NO_TRACKER:\n    pass\n")
    assert polls(copy / "tapegrad") == ["more.py:2"]


def test_references_are_counted_in_one_place() -> None:
    assert reference_counts(PACKAGE) == []


def test_another_count_of_references_is_found(copy: Path) -> None:
    (copy / "tapegrad" / "more.py").write_text("import sys\nmine = sys.getrefcount([]) < 3\n")
    assert reference_counts(copy / "tapegrad") == ["more.py:2"]
