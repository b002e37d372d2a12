"""A process forked from one that has used CUDA cannot use it, and is told so; CUDA's own error says nothing."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable

import numpy as np
import pytest
from cuda_cases import same_bits

import tapegrad as tg
from tapegrad.device import cuda as cuda_module
from tapegrad.errors import DeviceError

pytestmark = [pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here"), pytest.mark.sampled(1 / 2)]
X = np.arange(6.0, dtype="float32")


def said_in_a_child(work: Callable[[], object]) -> str:
    """What ``work`` raises in a forked child, or "nothing"."""
    reading, writing = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forking beside threads, since Python 3.12
        child = os.fork()
    if not child:
        try:
            try:
                work()
                said = "nothing"
            except BaseException as e:
                said = f"{type(e).__name__}: {e}"
            os.write(writing, said.encode())
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        said = pipe.read()
    os.waitpid(child, 0)
    return said


@pytest.mark.parametrize("name", ["its tensors", "new ones", "kernels", "the default", "another device", "copies"])
def test_a_child_is_told_what_to_do(cuda, name):
    x = tg.asarray(X, device=cuda)
    pending = x * 2 + 1
    work = {
        "its tensors": lambda: x.numpy(),
        "new ones": lambda: tg.asarray(X, device="cuda"),
        "kernels": lambda: pending.numpy(),
        "the default": lambda: (tg.set_default_device("cuda"), tg.zeros(3)),
        "another device": lambda: x.to_device("cuda:1"),
        "copies": lambda: x.to_device("cpu"),
    }[name]
    said = said_in_a_child(work)
    assert said.startswith("DeviceError: ") and "forked from one that had used CUDA" in said, said
    assert "get_context('spawn')" in said and "set_default_device('cpu')" in said
    same_bits(pending, X * 2 + 1)  # the parent goes on


def test_a_device_chosen_in_the_parent_is_not_silently_the_cpu(cuda):
    def work():
        with tg.device(cuda):
            tg.asarray(X)

    tg.asarray(X, device=cuda)
    assert "forked" in said_in_a_child(work)


def test_a_child_works_on_the_cpu(cuda):
    x = tg.asarray(X)
    tg.asarray(X, device=cuda)
    assert said_in_a_child(lambda: same_bits(x * 2, X * 2)) == "nothing"


def test_without_this_it_would_be_cudas_error(cuda):
    x = tg.asarray(X, device=cuda)
    cuda_module.forget()
    assert "cudaErrorInitializationError" in said_in_a_child(lambda: (x * 2).numpy())


def test_who_used_cuda_without_us_is_told_too(cupy):
    cupy.ones(3)
    cuda_module.forget()

    def work():
        with pytest.raises(DeviceError, match="cannot be initialised.*by 'spawn'"):
            tg.asarray(X, device="cuda")

    assert said_in_a_child(work) == "nothing"


def test_a_child_works_on_the_cpu_within_a_budget(cuda):
    tg.asarray(X, device=cuda)

    def work():
        with tg.memory_budget("1MiB"), tg.measure():
            assert tg.sum(tg.asarray(X, device="cpu") * 2).item() == 30

    with tg.device("cpu"):
        assert said_in_a_child(work) == "nothing"
