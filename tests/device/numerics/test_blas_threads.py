"""While a small factorization runs, BLAS libraries have one thread; before and after, as many as they had."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

import tapegrad as tg
from tapegrad.device.numerics import blas_threads

threadpoolctl = pytest.importorskip("threadpoolctl")


@pytest.fixture
def two() -> Any:
    """Pools of two threads, whatever the machine has."""
    tg.linalg.solve_triangular(np.eye(64), np.ones((64, 1)))  # SciPy's is loaded, too
    with threadpoolctl.threadpool_limits(2, user_api="blas"):
        if not any(n > 1 for n in counts()):
            pytest.skip("no BLAS library here has threads")
        yield


def counts() -> list[int]:
    return [info["num_threads"] for info in threadpoolctl.threadpool_info() if info["user_api"] == "blas"]


@pytest.fixture
def inside(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """What the pools had at each call of NumPy's inverse."""
    run, found = np.linalg.inv, list[list[int]]()

    def noting(*args: Any, **options: Any) -> Any:
        found.append(counts())
        return run(*args, **options)

    monkeypatch.setattr(np.linalg, "inv", noting)
    return found


@pytest.mark.parametrize(("n", "alone"), [(63, False), (64, True), (1024, True), (1025, False)])
def test_shapes_decide(n: int, alone: bool, two: Any, inside: list[list[int]]) -> None:
    before = counts()
    tg.linalg.inv(np.eye(n))
    assert inside == [[1] * len(before) if alone else before] and counts() == before


def test_pools_are_given_back_after_an_error(two: Any, inside: list[list[int]]) -> None:
    before = counts()
    with pytest.raises(tg.linalg.LinAlgError):
        tg.linalg.inv(np.zeros((100, 100)))
    assert set(inside[0]) == {1} and counts() == before


def test_other_threads_leave_them(two: Any, inside: list[list[int]]) -> None:
    before = counts()
    thread = threading.Thread(target=lambda: tg.linalg.inv(np.eye(100)))
    thread.start()
    thread.join()
    assert inside == [before] and counts() == before


def test_a_block_inside_a_block(two: Any) -> None:
    before = counts()
    with blas_threads.for_matrices([np.eye(100)]):
        tg.linalg.cholesky(np.eye(100))
    assert counts() == before


def test_bits_do_not_depend_on_threads(two: Any) -> None:
    a = np.random.default_rng(0).normal(size=(300, 300))
    spd, found, functions = a @ a.T + np.eye(300), [], (tg.linalg.cholesky, tg.linalg.inv, tg.linalg.eigvalsh)
    for n in (1, 2):
        with threadpoolctl.threadpool_limits(n, user_api="blas"):
            found.append([f(spd).numpy() for f in functions])
    for one, several in zip(*found, strict=True):
        np.testing.assert_array_equal(one, several)
