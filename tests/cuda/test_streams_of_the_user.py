"""Streams on which a device cannot keep the order of works are refused, with the remedy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import tapegrad as tg
from tapegrad.errors import DeviceError

pytestmark = [pytest.mark.usefixtures("cuda"), pytest.mark.sampled(1 / 2)]


def test_per_thread_default_streams() -> None:
    import cupy

    with (
        cupy.cuda.Stream.ptds,
        pytest.raises(DeviceError, match="per-thread default streams.*cupy.cuda.Stream of its own"),
    ):
        tg.ones(3, device="cuda") + 1


@pytest.mark.parametrize("used_before", [False, True])
def test_a_capture_of_the_users(used_before: bool) -> None:
    import cupy

    x: Any = tg.asarray(np.ones(3, np.float32), device="cuda")
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        if used_before:
            (x * 2).numpy()
        stream.begin_capture()
        try:
            with pytest.raises(DeviceError, match="being captured by the program itself.*tg.function"):
                tg.tanh(x @ tg.ones((3, 3), device="cuda")).numpy()
        finally:
            stream.end_capture()
        assert (x * 3).numpy().tolist() == [3, 3, 3]
