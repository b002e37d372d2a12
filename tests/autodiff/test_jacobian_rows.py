"""Rows of Jacobians: chunks that cover all of them, and what becomes of rows that did not come."""

from __future__ import annotations

import numpy as np
import pytest
from inside import aval_of

import tapegrad as tg
from tapegrad.autodiff import jacobian_rows
from tapegrad.autodiff.jacobian_rows import MOST, basis, batch_basis, batch_result, chunks, joined


@pytest.mark.parametrize("count", [1, 2, 7, 64, 1000])
@pytest.mark.parametrize("sizes", [[1], [3, 5], [MOST // 3], [MOST], [7, 2 * MOST], [0]])
def test_chunks_cover_all_rows_once_evenly_and_stay_small(count: int, sizes: list[int]) -> None:
    found = list(chunks(count, sizes))
    assert [start for start, _ in found] == [0, *[stop for _, stop in found[:-1]]] and found[-1][1] == count
    lengths = [stop - start for start, stop in found]
    most = max(1, MOST // max(1, *sizes))
    assert len(set(lengths[:-1])) <= 1 and 0 < lengths[-1] <= lengths[0] <= most
    assert len(found) == -(-count // lengths[0]) and (len(found) == 1 or count > most)


def test_no_rows_are_one_chunk() -> None:
    assert list(chunks(0, [5])) == [(0, 0)]


def test_a_chunk_of_double_precision_takes_at_most_32_mib() -> None:
    size = 1000
    (start, stop), *more = chunks(10**6, [size])
    assert more and 16 * 2**20 < (stop - start) * size * 8 <= 32 * 2**20


def test_one_chunk_is_not_copied() -> None:
    part = {7: tg.asarray(np.ones((6, 2)))}
    with tg.measure() as m:
        found = joined([part], (3, 2))
    assert found[7].shape == (3, 2, 2) and m.allocated_bytes == 0


def test_unit_cotangents() -> None:
    aval = aval_of(tg.zeros((2, 3)))
    whole = np.eye(6, dtype="float32").reshape(6, 2, 3)
    assert np.array_equal(basis(aval, 0, 6).numpy(), whole) and np.array_equal(basis(aval, 2, 5).numpy(), whole[2:5])
    of_batch, columns = batch_basis(aval)
    assert columns == 3 and np.array_equal(of_batch.numpy(), np.broadcast_to(np.eye(3)[:, None], (3, 2, 3)))


def test_rows_that_are_missing_in_some_chunks_are_zeros(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jacobian_rows, "MOST", 4)
    assert list(chunks(8, [1])) == [(0, 4), (4, 8)]
    cut = list(chunks(5, [2]))
    assert cut == [(0, 2), (2, 4), (4, 5)]
    full = np.arange(1.0, 11.0, dtype="float32").reshape(5, 2)
    for missing in ((), (0,), (1,), (2,), (0, 2)):
        parts = [{} if k in missing else {7: tg.asarray(full[a:b])} for k, (a, b) in enumerate(cut)]
        wanted = full.copy()
        for k in missing:
            wanted[slice(*cut[k])] = 0
        found = joined(parts, (5,))
        assert list(found) == [7] and np.array_equal(found[7].numpy(), wanted)
    two = joined([{7: tg.asarray(full[:3])}, {7: tg.asarray(full[3:])}], (5,))
    assert np.array_equal(two[7].numpy(), full)


def test_jacobians_of_each_example() -> None:
    target, source = (aval_of(tg.zeros(shape)) for shape in ((4, 3), (4, 2)))
    cts = np.arange(3.0 * 4 * 2, dtype="float32").reshape(3, 4, 2)
    assert np.array_equal(batch_result(tg.asarray(cts), target, source, 3).numpy(), cts.transpose(1, 0, 2))
    assert np.array_equal(batch_result(None, target, source, 3).numpy(), np.zeros((4, 3, 2)))
