"""A program that changes streams: every outermost request to a CUDA device goes to one of three streams, by turns.

So any test becomes one of the order between streams, which the happens-before checker looks at.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tapegrad.device.cuda import CudaDevice


class _Depth(threading.local):
    inside = 0


@contextmanager
def changing(cupy: Any) -> Iterator[None]:
    """Inside, each allocation, launch, call and block on a device is asked for on another stream than the one before.

    An array of the user's is handed in on the stream that the user has chosen.
    """
    draw, depth = random.Random(0), _Depth()
    streams: dict[int, list[Any]] = {}

    @contextmanager
    def turn(device: CudaDevice, stay: bool = False) -> Iterator[None]:
        if depth.inside or stay:  # within one operation nobody changes streams
            depth.inside += 1
            try:
                yield
            finally:
                depth.inside -= 1
            return
        with cupy.cuda.Device(device.index):
            if device.index not in streams:
                more = (cupy.cuda.Stream(non_blocking=True) for _ in range(2))
                streams[device.index] = [cupy.cuda.Stream.null, *more]
            draw.choice(streams[device.index]).__enter__()
        depth.inside += 1
        try:
            yield
        finally:
            depth.inside -= 1
            with cupy.cuda.Device(device.index):
                cupy.cuda.get_current_stream().__exit__()

    def turning(name: str) -> Callable[..., Any]:
        method = getattr(CudaDevice, name)

        def call(self: CudaDevice, *args: Any, **kwargs: Any) -> Any:
            with turn(self, name == "array"):
                return method(self, *args, **kwargs)

        return call

    entered = CudaDevice.active

    @contextmanager
    def active(self: CudaDevice) -> Iterator[Any]:
        with turn(self), entered(self) as found:
            yield found

    with pytest.MonkeyPatch.context() as patch:
        for name in ("array", "call", "empty", "launch"):
            patch.setattr(CudaDevice, name, turning(name))
        patch.setattr(CudaDevice, "active", active)
        yield
