"""Bytes on the wire, counted by the kernel in a network of the test's own: at most 1.02 times the least."""

from __future__ import annotations

import shutil
import subprocess
import sys

import pytest
from distributed import ranks

pytestmark = pytest.mark.slow

MOST = 1.02
# Everything goes over the network, also between processes of one machine (MPICH).
BY_NETWORK = {
    "MPIR_CVAR_CH4_NETMOD": "ofi", "FI_PROVIDER": "tcp", "FI_TCP_IFACE": "lo", "MPIR_CVAR_NOLOCAL": "1",
    "MPIR_CVAR_CH4_NUM_VCIS": "1",
}  # fmt: skip


def in_own_network(*command: str) -> list[str]:
    return ["unshare", "-rn", "sh", "-c", 'ip link set lo up && exec "$@"', "sh", *command]


def refused() -> str:
    """Why there is no network of our own here, or ""."""
    if ranks.missing():
        return "needs mpi4py and an MPI library"
    if shutil.which("unshare") is None or shutil.which("ip") is None:
        return "needs unshare and ip"
    done = subprocess.run(in_own_network("true"), capture_output=True, text=True, check=False)
    return f"unshare -n is refused: {done.stderr.strip()}" if done.returncode else ""


@pytest.mark.skipif(bool(refused()), reason=refused() or "there is a network of our own")
@pytest.mark.parametrize("size", [2, 4])
def test_no_more_than_the_least(size: int) -> None:
    ratios = counted(size)
    if not within(ratios):  # what a busy machine sends once more comes on top
        second = counted(size)
        ratios = {name: min(ratio, second[name]) for name, ratio in ratios.items()}
    assert within(ratios), ratios


def within(ratios: dict[str, float]) -> bool:
    return all(0.99 <= ratio <= MOST for ratio in ratios.values())


def counted(size: int) -> dict[str, float]:
    """By collective the bytes on the wire, over the least."""
    mpiexec = ranks.launcher()
    assert mpiexec is not None
    command = in_own_network(mpiexec, "-n", str(size), sys.executable, str(ranks.HERE / "wire_bytes.py"))
    done = subprocess.run(
        command, env=ranks.environment(**BY_NETWORK), capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    ratios = {line.split()[1]: float(line.split()[2]) for line in done.stdout.splitlines() if line.startswith("WIRE")}
    assert len(ratios) == 7, done.stdout
    return ratios
