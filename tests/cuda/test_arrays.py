"""Arrays of a work on CUDA: several in one go, and one by one where there is not enough memory at first."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest
from shim import standin

import tapegrad as tg
from tapegrad.errors import DeviceMemoryError

pytestmark = pytest.mark.sampled(1 / 2)

LIES = [((3, 4), np.dtype("float32")), ((), np.dtype("int64")), ((0, 2), np.dtype("float16"))]


def described(arrays: Any) -> list[tuple[Any, Any]]:
    return [(x.shape, x.dtype) for x in arrays]


def test_arrays_of_a_work(cuda: Any) -> None:
    assert described(cuda.arrays(LIES)) == LIES
    assert cuda.arrays([]) == []


def test_on_another_stream_they_wait_for_the_first(cuda: Any) -> None:
    x = tg.ones((4, 4), device=cuda) + 1
    x.numpy()
    standin.events.clear()
    with cuda.xp.cuda.Stream(non_blocking=True):
        assert described(cuda.arrays(LIES[:1])) == LIES[:1]
    assert [e.kind for e in standin.events][:3] == ["record", "wait", "malloc"]


@pytest.mark.parametrize("failing", [1, 2, 3])
def test_what_there_is_no_memory_for_is_an_error_or_tried_again_where_memory_came_free(
    cuda: Any, monkeypatch: Any, failing: int
) -> None:
    cuda.empty((1,), np.dtype("int8"))
    calls, real, told = [0], cuda.xp.empty, list[Any]()

    def empty(*args: Any) -> Any:
        calls[0] += 1
        if calls[0] == failing:
            raise cuda.xp.cuda.memory.OutOfMemoryError(4, 0, 0)
        return real(*args)

    def retried(e: MemoryError, device: Any, what: str, nbytes: int, again: Any) -> Any:
        told.append((what, nbytes))
        return again()

    monkeypatch.setattr(cuda.xp, "empty", empty)
    with pytest.raises(DeviceMemoryError, match="CUDA|cuda"):  # within no budget nothing can be given back
        cuda.arrays(LIES)
    calls[0] = 0
    monkeypatch.setattr(sys.modules["tapegrad.device.cuda"], "retried", retried)
    assert described(cuda.arrays(LIES)) == LIES
    assert calls[0] == 4 and told == [[("float32[3, 4]", 48), ("int64[]", 8), ("float16[0, 2]", 0)][failing - 1]]
