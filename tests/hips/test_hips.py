"""HIPS autograd's own tests, run on tapegrad through an adapter that goes by its name.

They are not ours to copy.  ``pip download autograd==1.9.1 --no-deps --no-binary :all:`` fetches them;
``AUTOGRAD_SDIST`` names the archive, or the folder it was unpacked to:

    AUTOGRAD_SDIST=autograd-1.9.1.tar.gz pytest tests/hips

Derivatives are checked as closely as there: differences of step 1e-6, to 1e-6 absolute or relative, to second order, in
forward and reverse mode.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import xml.etree.ElementTree as xml
from pathlib import Path

import pytest

ADAPTER = Path(__file__).parent / "adapter"
ROOT = Path(__file__).parents[2]

INTERNALS = {
    "test_core.py": "vector spaces",
    "test_vspaces.py": "vector spaces",
    "test_tests.py": "defvjp of its primitives",
    "test_logic.py::test_no_vjp_def": "its primitives",
    "test_logic.py::test_no_jvp_def": "its primitives",
    "test_logic.py::test_unimplemented_falseyness": "its table of rules",
    "test_misc.py::test_const_graph": "replays its graphs",
    "test_misc.py::test_const_graph_args": "replays its graphs",
    "test_numpy.py::test_make_diagonal": "a function only it has",
    "test_numpy.py::test_diagonal": "a function only it has",
    "test_fft.py::test_rfftn_odd_not_implemented": "a gap of its own",
    "test_wrappers.py::test_deprecated_defgrad_wrapper": "its primitives",
    "test_wrappers.py::test_deprecated_defvjp_wrapper": "its primitives",
    "test_wrappers.py::test_deprecated_defvjp_is_zero_wrapper": "its primitives",
    "test_wrappers.py::test_deprecated_quick_grad_check_wrapper": "a module it no longer has",
    "test_wrappers.py::test_custom_where_dtypes": "its own where, of plain values",
    "test_wrappers.py::test_wrapped_name_and_docs": "the names of its functions",
}
"""What tests HIPS autograd itself, not derivatives."""

DIFFERENT = {
    "test_linalg::test_eigvalh_lower_broadcasting": "moves one triangle only; eigh's gradient is that of a symmetric x",
    "test_linalg::test_eigvalh_upper_broadcasting": "as the one before",
    "test_numpy::test_cast_to_int": "np.int64(x) makes an array by the way, which is refused; tg.astype casts",
    "test_scipy::test_erf": "of complex numbers; here only the Faddeeva function wofz takes them",
    "test_scipy::test_erfc": "as the one before",
    "test_systematic::test_max": "of complex numbers, which have no order here, as in the array API standard",
    "test_systematic::test_min": "as the one before",
}
"""What is meant to be different, and why."""

LEAST = 568
"""How many pass."""


@pytest.fixture(scope="module")
def tests(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Their folder of tests, in a place of its own."""
    given = os.environ.get("AUTOGRAD_SDIST")
    if not given:
        pytest.skip("AUTOGRAD_SDIST names no sdist of autograd (see the docstring of this file)")
    folder = Path(given).resolve()
    if folder.is_file():
        place = tmp_path_factory.mktemp("sdist")
        with tarfile.open(folder) as archive:
            archive.extractall(place, filter="data")
        (folder,) = place.iterdir()
    assert (folder / "tests").is_dir(), f"{folder} holds no tests"
    return folder / "tests"


def outcomes(tests: Path, report: Path) -> dict[str, str]:
    """Whether each test passed, was skipped, or what failed, by module and name."""
    left_out = [f"--ignore={name}" if "::" not in name else f"--deselect={name}" for name in INTERNALS]
    options = [
        "-q",
        "-c",
        os.devnull,
        "-p",
        "no:cacheprovider",
        "--rootdir=.",
        "--tb=line",
        f"--junitxml={report}",
        *left_out,
    ]
    path = os.pathsep.join(map(str, (ADAPTER, ROOT, tests)))
    env = os.environ | {"PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1", "PYTHONWARNINGS": "ignore"}
    command = [sys.executable, "-m", "pytest", *options, f"--junitxml={report}"]
    ran = subprocess.run(command, cwd=tests, env=env, capture_output=True, text=True, timeout=900, check=False)
    assert report.is_file(), ran.stdout + ran.stderr
    found = {}
    for case in xml.parse(report).iter("testcase"):
        name = f"{case.get('classname')}::{case.get('name')}"
        failure = case.find("failure") if case.find("failure") is not None else case.find("error")
        found[name] = "skipped" if case.find("skipped") is not None else "passed"
        if failure is not None:
            found[name] = (failure.get("message") or "")[:300]
    return found


def test_their_tests_pass(tests, tmp_path):
    found = outcomes(tests, tmp_path / "report.xml")
    passed = sum(outcome == "passed" for outcome in found.values())
    failed = {name: what for name, what in found.items() if what not in ("passed", "skipped")}
    print(f"{passed} passed, {len(failed)} failed, {len(found) - passed - len(failed)} skipped of {len(found)}")
    unexpected = {name: what for name, what in failed.items() if name not in DIFFERENT}
    assert not unexpected, "\n".join(f"{name}: {what}" for name, what in unexpected.items())
    assert passed >= LEAST, f"{passed} passed"
