"""The example of full-waveform inversion, as a user runs it: one process and several say the same."""

from __future__ import annotations

import numpy as np
import pytest
from distributed import ranks

import tapegrad as tg
from tapegrad import distributed as dist

pytestmark = pytest.mark.slow

NAME = "full_waveform_inversion"
EXAMPLE = ranks.HERE.parent.parent / "docs" / "gallery" / NAME / f"{NAME}.py"
SMALL = ("--size", "16", "--steps", "20", "--iterations", "2")


def told(size: int) -> list[str]:
    done = ranks.start(size, str(EXAMPLE), *SMALL)
    assert done.returncode == 0, done.stderr
    first, *rest = done.stdout.splitlines()
    assert first.startswith(f"{size} rank(s)")
    rest, checked = rest[:4], rest[4:]
    assert checked == ["checked: it is the plain tape's gradient to rounding"]
    return rest


@pytest.mark.skipif(ranks.missing(), reason="needs mpi4py and an MPI library (pip install mpi4py mpich)")
def test_ranks_say_what_one_process_says() -> None:
    one = told(1)
    assert [told(size) for size in (2, 4)] == [one, one]  # the digest of the forward run, misfits to six digits


def test_steps_of_one_process_are_captured() -> None:
    """A rank alone in its line asks nobody for a halo, so a loop over a captured step replays it."""
    grid = dist.Grid((1, 1), periodic=(False, True), group=dist.init())

    @tg.function
    def step(u, i):
        v = dist.halo_exchange(u, 1, grid)
        return u + 0.1 * (v[2:, 1:-1] + v[:-2, 1:-1] + v[1:-1, 2:] + v[1:-1, :-2] - 4.0 * u)

    start = tg.asarray(np.random.default_rng(0).standard_normal((5, 4)))
    f = lambda run: lambda u: tg.sum(tg.checkpointed_loop(run, u, 12, snapshots=3) ** 2)
    found = [tg.grad(f(run))(start).numpy() for run in (step, step.__wrapped__)]
    assert np.array_equal(*found) and not step.stats.fallbacks and step.stats.replays > 20
    around = np.pad(np.pad(start.numpy(), ((1, 1), (0, 0))), ((0, 0), (1, 1)), mode="wrap")
    np.testing.assert_array_equal(dist.halo_exchange(start, 1, grid).numpy(), around)
