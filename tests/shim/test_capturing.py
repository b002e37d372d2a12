"""The stand-in's streams capture as CUDA's do: nothing is done before the launch, and what CUDA refuses is refused."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from shim import standin
from shim.host import why_no_compiler

pytestmark = pytest.mark.skipif(why_no_compiler() is not None, reason="no compiler")
TEXT = 'extern "C" __global__ void twice(const float* x, float* y) { y[threadIdx.x] = 2 * x[threadIdx.x]; }'


@pytest.fixture
def cupy() -> Iterator[Any]:
    yield standin.install()
    standin.uninstall()


@pytest.fixture
def stream(cupy: Any) -> Iterator[Any]:
    """A stream that is current and capturing."""
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        yield stream
        if stream.ptr in standin.state.captures:
            with pytest.raises(standin.state.CUDARuntimeError, match="Invalidated"):
                stream.end_capture()
            assert not stream.is_capturing()


def test_a_graph_does_what_was_written_down_with_present_values(cupy: Any) -> None:
    kernel = cupy.RawModule(code=TEXT, options=("--std=c++17",)).get_function("twice")
    x, y, z = (cupy.asarray(np.arange(4, dtype="f") * k) for k in (1, 0, 0))
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        stream.begin_capture()
        assert stream.is_capturing()
        kernel((1,), (4,), (x, y))
        cupy.add(y, 1, out=y)
        cupy.copyto(z, y)
        z[:2] = y[2:]
        x.fill(7)
        graph = stream.end_capture()
    assert not stream.is_capturing() and not y.get().any() and not z.get().any()
    graph.launch()
    assert list(y.get()) == [1, 3, 5, 7] and list(z.get()) == [5, 7, 5, 7] and list(x.get()) == [7] * 4
    x.set(np.array([1, 2, 3, 4], "f"))
    graph.launch()
    assert list(y.get()) == [3, 5, 7, 9]


def test_a_graph_is_in_the_order_of_the_stream_that_launches_it(cupy: Any) -> None:
    x, stream, other = cupy.zeros(4), cupy.cuda.Stream(non_blocking=True), cupy.cuda.Stream(non_blocking=True)
    with stream:
        stream.begin_capture()
        x.fill(3)
        graph = stream.end_capture()
    standin.events.clear()
    graph.launch(other)
    assert {entry.stream for entry in standin.events} == {other.ptr}


def test_a_graph_keeps_no_memory_alive(cupy: Any) -> None:
    x, stream = cupy.zeros(4), cupy.cuda.Stream(non_blocking=True)
    with stream:
        stream.begin_capture()
        x.fill(3)
        graph = stream.end_capture()
    del x
    gc.collect()
    with pytest.raises(standin.state.CUDARuntimeError, match="IllegalAddress"):
        graph.launch()


def test_a_graph_and_a_function_of_the_host_inside_a_graph(cupy: Any) -> None:
    x, calls, stream = cupy.zeros(4), [], cupy.cuda.Stream(non_blocking=True)
    with stream:
        stream.begin_capture()
        x += 1
        inner = stream.end_capture()
        stream.begin_capture()
        with pytest.raises(standin.state.CUDARuntimeError, match="IllegalState"):
            stream.begin_capture()
        x *= 2
        inner.launch()
        stream.launch_host_func(calls.append, "called")
        outer = stream.end_capture()
    assert not x.get().any() and not calls
    for _ in range(2):
        outer.launch()
    assert list(x.get()) == [3] * 4 and calls == ["called"] * 2
    stream.launch_host_func(calls.append, "at once")
    assert calls[2:] == ["at once"]


def test_the_default_stream_cannot_capture(cupy: Any) -> None:
    with pytest.raises(RuntimeError, match="default"):
        cupy.cuda.Stream.null.begin_capture()
    with pytest.raises(RuntimeError, match="not capturing"):
        cupy.cuda.Stream(non_blocking=True).end_capture()


def _changed(cupy: Any, x: Any, i: Any) -> Any:
    """An array whose elements were written by index arrays."""
    y = cupy.zeros(8)
    y[i] = x[:4]
    cupy.add.at(y, i, x[4:])
    return y


TAKING = {
    "no values": lambda cupy, x, i: cupy.zeros(8),
    "a sequence": lambda cupy, x, i: cupy.arange(8.0) + cupy.linspace(0, 1, 8),
    "operators": lambda cupy, x, i: (x * 2 + 1) ** 2 - 3 / (1 + x),
    "a sum": lambda cupy, x, i: x.sum() + cupy.max(x),
    "a running sum": lambda cupy, x, i: cupy.cumsum(x),
    "several results": lambda cupy, x, i: cupy.stack(cupy.broadcast_arrays(*cupy.modf(x / 3))),
    "a choice": lambda cupy, x, i: cupy.where(x > 4, x, -x),
    "an index array": lambda cupy, x, i: x[i],
    "writes by an index array": _changed,
    "a Fourier transform": lambda cupy, x, i: cupy.fft.irfft(cupy.fft.rfft(x), n=8),
    "another dtype and another order": lambda cupy, x, i: x.astype("f").reshape(2, 4).T.ravel().copy(),
}


@pytest.mark.parametrize("what", TAKING)
def test_what_takes_memory_is_captured_with_the_memory_of_the_allocator_in_force(cupy: Any, what: str) -> None:
    f, x, i = TAKING[what], cupy.arange(8.0), cupy.asarray(np.array([5, 0, 7, 2]))
    memory, at = cupy.zeros(512), 0

    def lend(size: int) -> Any:
        nonlocal at
        start, at = at, at + -(-size // 64) * 64
        return cupy.cuda.MemoryPointer(cupy.cuda.UnownedMemory(memory.data.ptr + start, size, memory, 0), 0)

    stream = cupy.cuda.Stream(non_blocking=True)
    with stream, cupy.cuda.using_allocator(lend):
        stream.begin_capture()
        result = f(cupy, x, i)
        graph = stream.end_capture()
    assert 0 < at <= memory.nbytes and not memory.get().any()  # nothing has been done yet
    standin.events.clear()
    for k in range(3):
        x.set(np.arange(8.0) + k)
        memory.fill(-1)
        graph.launch(stream)
        wanted = f(cupy, x, i).get()
        assert result.get().dtype == wanted.dtype and np.array_equal(result.get(), wanted)
        graphs = [entry.writes for entry in standin.events if entry.kind == "op" and entry.stream == stream.ptr]
        assert graphs and all(0 <= start - memory.data.ptr < memory.nbytes for ((start, _),) in graphs)


def test_a_plan_of_a_transform_that_went_meanwhile(cupy: Any) -> None:
    """CuPy drops the plan that was used longest ago, and its memory goes."""
    x, y, stream = cupy.arange(8.0), cupy.zeros(8, complex), cupy.cuda.Stream(non_blocking=True)
    memory = cupy.zeros(512)
    with stream, cupy.cuda.using_allocator(lambda size: memory.data):
        stream.begin_capture()
        cupy.copyto(y, cupy.fft.fft(x))
        graph = stream.end_capture()
    graph.launch()
    assert np.allclose(y.get(), np.fft.fft(np.arange(8.0)))
    for n in range(10, 30):
        cupy.fft.fft(cupy.ones(n))
    with pytest.raises(standin.state.CUDARuntimeError, match="IllegalAddress"):
        graph.launch()


def test_memory_of_the_pool_that_went_meanwhile(cupy: Any) -> None:
    """A capture may take memory of the pool, but it does not keep it."""
    x, stream = cupy.arange(4.0), cupy.cuda.Stream(non_blocking=True)
    with stream:
        stream.begin_capture()
        y = x + 1
        graph = stream.end_capture()
    graph.launch()
    assert list(y.get()) == [1, 2, 3, 4]
    del y
    with pytest.raises(standin.state.CUDARuntimeError, match="IllegalAddress"):
        graph.launch()


REFUSED = {
    "a sort by Thrust": lambda cupy, x, s: cupy.sort(x),
    "a sort in place": lambda cupy, x, s: x.sort(),
    "a search for distinct values": lambda cupy, x, s: cupy.unique(x),
    "waiting for the stream": lambda cupy, x, s: s.synchronize(),
    "asking whether it is done": lambda cupy, x, s: s.done,
    "waiting for the device": lambda cupy, x, s: cupy.cuda.Device().synchronize(),
    "waiting for an event of its own": lambda cupy, x, s: s.record().synchronize(),
    "asking for an event of its own": lambda cupy, x, s: s.record().done,
    "loading a module": lambda cupy, x, s: cupy.RawModule(code=TEXT + "\n// another").get_function("twice"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_invalidates_a_capture(cupy: Any, stream: Any, what: str) -> None:
    x = cupy.arange(4)
    stream.begin_capture()
    with pytest.raises(RuntimeError, match="CUDA|cudaError"):
        REFUSED[what](cupy, x, stream)
    with pytest.raises(standin.state.CUDARuntimeError, match="Invalidated"):
        stream.is_capturing()


CUPYS = {
    "a transposition by cuBLAS": (NotImplementedError, lambda cupy, x, s: cupy.asfortranarray(x)),
    "a product": (NotImplementedError, lambda cupy, x, s: cupy.matmul(x, x)),
    "a product into an array": (NotImplementedError, lambda cupy, x, s: cupy.matmul(x, x, out=x)),
    "a decomposition": (NotImplementedError, lambda cupy, x, s: cupy.linalg.qr(x)),
    "a copy to the host": (RuntimeError, lambda cupy, x, s: x.get()),
    "counting what is not zero": (RuntimeError, lambda cupy, x, s: cupy.where(x > 0)),
    "counting what a mask selects": (RuntimeError, lambda cupy, x, s: x[x > 0]),
    "a list of the host's": (RuntimeError, lambda cupy, x, s: x[[0, 1]]),
    "an array of the host's": (RuntimeError, lambda cupy, x, s: cupy.asarray([1.0, 2.0])),
    "reading a number": (RuntimeError, lambda cupy, x, s: float(x[0, 0])),
    "a copy from the host": (RuntimeError, lambda cupy, x, s: x.set(np.zeros((2, 2)))),
    "an asynchronous copy": (RuntimeError, lambda cupy, x, s: x.data.copy_from_host_async(0, 8, s)),
}


@pytest.mark.parametrize("what", CUPYS)
def test_what_cupy_itself_refuses(cupy: Any, stream: Any, what: str) -> None:
    """Before anything has reached CUDA: the capture goes on."""
    x = cupy.ones((2, 2))
    error, f = CUPYS[what]
    stream.begin_capture()
    with pytest.raises(error, match="during stream capture"):
        f(cupy, x, stream)
    assert stream.is_capturing()
    stream.end_capture()


def test_an_event_of_another_stream_is_refused(cupy: Any, stream: Any) -> None:
    event = cupy.cuda.Stream(non_blocking=True).record()
    stream.begin_capture()
    with pytest.raises(standin.state.CUDARuntimeError, match="Isolation"):
        stream.wait_event(event)


def test_another_stream_may_not_wait_for_a_captured_event(cupy: Any, stream: Any) -> None:
    stream.begin_capture()
    event = stream.record()
    stream.wait_event(event)
    with pytest.raises(standin.state.CUDARuntimeError, match="Isolation"):
        cupy.cuda.Stream(non_blocking=True).wait_event(event)


def test_work_on_the_default_stream_while_a_blocking_one_captures(cupy: Any) -> None:
    x, blocking = cupy.zeros(4), cupy.cuda.Stream()
    blocking.begin_capture()
    with pytest.raises(standin.state.CUDARuntimeError, match="Implicit"):
        x.fill(1)
    with pytest.raises(standin.state.CUDARuntimeError, match="Invalidated"):
        blocking.end_capture()
    free = cupy.cuda.Stream(non_blocking=True)
    free.begin_capture()
    x.fill(2)
    free.end_capture()
    assert list(x.get()) == [2] * 4
