"""Errors after a kernel has failed: a later call notices it, and CUDA is unusable in the process from then on."""

from __future__ import annotations

from contextlib import nullcontext

import numpy as np
import pytest
from shim import standin

import tapegrad as tg
from tapegrad.errors import DeviceError

pytestmark = pytest.mark.sampled(1 / 2)

UNUSABLE = "an earlier kernel failed .*CUDA is unusable in this process: .*TAPEGRAD_CHECK_AT_ONCE=1 to find the kernel"


@pytest.mark.parametrize("own_stream", [False, True])
@pytest.mark.parametrize("status", [700, 716, 717, 718, 719])
@pytest.mark.parametrize("calls", range(6))
def test_every_call_after_a_failed_kernel_says_so(cuda, cupy, calls, status, own_stream):
    with tg.device(cuda), cupy.cuda.Stream(non_blocking=True) if own_stream else nullcontext():
        x = tg.asarray(np.ones((8, 8), "float32"))
        ids = tg.asarray([0, 3])
        tg.take(x, ids, axis=0).numpy()
        standin.configure(fault_after=calls, fault=status)
        with pytest.raises(DeviceError, match=UNUSABLE):
            for _ in range(8):
                tg.take(x, ids, axis=0)
        for use in (
            lambda: x.numpy(),
            lambda: tg.take(x, ids, axis=0),
            lambda: (x @ x).numpy(),
            lambda: tg.sum(x).item(),
            lambda: tg.asarray(np.ones(3, "float32")),
            lambda: tg.Variable(x).assign_add(x).numpy(),
        ):
            with pytest.raises(DeviceError, match=UNUSABLE):
                use()


def test_the_kernel_is_named_if_the_host_waits_for_each(monkeypatch, request):
    monkeypatch.setenv("TAPEGRAD_CHECK_AT_ONCE", "1")  # before the device is first used
    with tg.device(request.getfixturevalue("cuda")):
        x = tg.asarray(np.ones((8, 8), "float32"))
        x.numpy()
        standin.configure(fault_after=0)
        with pytest.raises(DeviceError, match="CUDA is unusable in this process: start it anew$") as error:
            tg.take(x, tg.asarray([0, 3]), axis=0)
        assert f"kernel {standin.launches[-1].name} failed" in str(error.value)


def test_another_error_of_cuda_is_left_as_it_is(cuda):
    with tg.device(cuda):
        x = tg.asarray(np.ones((8, 8), "float32"))
        standin.configure(fault_after=0, fault=46)
        with pytest.raises(RuntimeError, match="cudaError46"):
            for _ in range(3):
                tg.take(x, tg.asarray([0, 3]), axis=0)
