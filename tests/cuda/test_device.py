"""CUDA devices: how they are found and refused, what moves between them, streams, and the engine's features on them."""

from __future__ import annotations

import pickle
import subprocess
import sys
from importlib.util import find_spec
from types import SimpleNamespace

import numpy as np
import pytest
from cuda_cases import FAULTS, broken, same_bits
from inside import array_of, default_as
from shim import standin
from waiting import never_waits

import tapegrad as tg
from tapegrad import memory
from tapegrad.device import CPU, asdevice, current_device, default_device
from tapegrad.errors import DeviceError
from tapegrad.tensor import from_array, materialize

pytestmark = pytest.mark.sampled(1 / 2)

X = np.arange(1.0, 7.0, dtype="float32").reshape(2, 3)


@pytest.mark.parametrize("fault", FAULTS)
def test_what_is_missing_is_said_and_the_cpu_serves(fault, cupy, monkeypatch):
    broken(monkeypatch, fault)
    monkeypatch.delenv("TAPEGRAD_DEVICE", raising=False)
    why, fix = FAULTS[fault]
    assert default_device() is CPU
    with default_as(None):
        assert tg.asarray([1.0]).device is current_device() is CPU
    with pytest.raises(DeviceError) as caught:
        tg.device("cuda").__enter__()
    assert str(caught.value).startswith(f"device 'cuda:0' is not available: {why}"), caught.value
    assert f"; to mend it: {fix}" in str(caught.value)
    monkeypatch.setenv("TAPEGRAD_DEVICE", "cuda")
    with pytest.raises(DeviceError, match="is not available"):
        default_device()


def test_the_default_device(cupy, monkeypatch):
    monkeypatch.delenv("TAPEGRAD_DEVICE", raising=False)
    assert default_device().name == "cuda:0"
    for name in ("cpu", "cuda:1"):
        monkeypatch.setenv("TAPEGRAD_DEVICE", name)
        assert default_device().name == name
    with default_as(None):
        assert tg.zeros(3).device.name == "cuda:1" and tg.asarray(X).device.name == "cuda:1"
    tg.set_default_device("cpu")
    assert tg.zeros(3).device is CPU
    monkeypatch.setenv("TAPEGRAD_DEVICE", "gpu")
    with pytest.raises(DeviceError, match="devices are 'cpu', 'cuda' and 'cuda:N'"):
        default_device()
    with pytest.raises(DeviceError, match="there are 2 CUDA devices, from cuda:0"):
        asdevice("cuda:2")
    assert asdevice("cuda") is asdevice("cuda:0") is pickle.loads(pickle.dumps(asdevice("cuda")))
    assert pickle.loads(pickle.dumps(CPU)) is CPU and asdevice(asdevice("cuda:1")).name == "cuda:1"


def test_a_second_device(cuda):
    with tg.device("cuda:1") as second:
        x = tg.asarray(X)
        w = tg.Variable(X * 2)
    assert x.device is second and array_of(x).device.id == 1 and w.device is second
    with tg.GradientTape() as tape:
        tape.watch(x)
        y = tg.sum(tg.tanh(x * w) + tg.matmul(x, x.T)[:, :1])
    standin.events.clear()
    g = tape.gradient(y, [x, w])
    assert all(t.device is second and array_of(t).device.id == 1 for t in (y, *g))
    assert {e.device for e in standin.events if e.kind == "launch"} == {1}
    assert standin.state.thread.device == 0, "CuPy's current device is as it was"
    same_bits(x.to_device(cuda).to_device("cpu"), X)
    assert array_of(x.to_device(cuda)).device.id == 0


def test_operands_on_different_devices(cuda):
    x, y = tg.asarray(X), tg.asarray(X, device=cuda)
    z = tg.asarray(X, device="cuda:1")
    joined = lambda: tg.concat([y, x]), lambda: tg.where(y > 0, y, x)
    for f in (lambda: x + y, lambda: y * z, lambda: tg.matmul(x, y.T), *joined):
        with pytest.raises(DeviceError, match="to_device"):
            f()
    same_bits(2.0 * y + np.float32(1), 2 * X + 1)  # numbers go anywhere


def test_moving_is_differentiable(cuda):
    x = tg.asarray(X)
    with tg.GradientTape() as tape:
        tape.watch(x)
        y = x.to_device("cuda")
        z = tg.sum((y * y).to_device("cuda:1") * 3)
    assert (y.device, z.device.name) == (cuda, "cuda:1")
    assert array_of(y.to_device(cuda)).data.ptr == array_of(y).data.ptr
    g = tape.gradient(z, x)
    assert g.device is CPU
    same_bits(g, 6 * X)


def test_arrays_of_the_library(cuda, cupy):
    a = cupy.asarray(X)
    copied, shared = tg.asarray(a), tg.asarray(a, copy=False)
    assert copied.device is shared.device is cuda
    a[0, 0] = 50
    assert copied.numpy()[0, 0] == 1 and shared.numpy()[0, 0] == 50
    assert array_of(shared).data.ptr == a.data.ptr != array_of(copied).data.ptr
    assert tg.asarray(a.T).shape == (3, 2) and tg.asarray(a, dtype="float64").dtype == np.float64
    with cupy.cuda.Device(1):
        b = cupy.asarray(X)
        for x in (X, 1.5, [1.0, 2.0]):  # the host's go to tapegrad's default device, not to CuPy's current one
            assert tg.asarray(x, device="cuda").device.name == "cuda:0"
            with tg.device("cuda:1"):
                assert tg.asarray(x).device.name == "cuda:1"
    assert tg.asarray(b).device.name == "cuda:1"
    foreign = SimpleNamespace(__cuda_array_interface__=a.__cuda_array_interface__)
    same_bits(tg.asarray(foreign), a.get())
    on_host = tg.asarray(a, device="cpu")
    assert on_host.device is CPU
    same_bits(on_host, a.get())


def test_protocols(cuda, cupy):
    t, host = tg.asarray(X, device=cuda), tg.asarray(X)
    for name in ("__cuda_array_interface__", "__cupy_get_ndarray__"):
        assert hasattr(t, name) and not hasattr(host, name)
    assert t.__cuda_array_interface__["shape"] == (2, 3) and t.__dlpack_device__() == (2, 0)
    for found in (cupy.from_dlpack(t), cupy.asarray(t)):
        assert found.data.ptr == array_of(t).data.ptr
        same_bits(found.get(), X)
    lazy = t * 2
    same_bits(cupy.asarray(lazy).get(), 2 * X)
    same_bits(np.asarray(t), X)
    with pytest.raises(ValueError, match="without a copy"):
        np.asarray(t, copy=False)
    same_bits(tg.asarray(SimpleNamespace(__dlpack__=array_of(t).__dlpack__, __dlpack_device__=lambda: (2, 0))), X)


def test_arrays_in_other_hands_hold_the_value(cuda, cupy):
    exports = [
        cupy.asarray,
        lambda t: cupy.asarray(t)[1:, ::2],
        lambda t: t.__cupy_get_ndarray__(),
        cupy.from_dlpack,
        lambda t: t.__dlpack__(stream=1),
    ]
    for export in exports:
        with memory.measure() as m:
            before = m.live_bytes
            t = tg.asarray(np.ones((64, 64), np.float32), device=cuda)
            out = export(t)
            del t
            assert m.live_bytes == before + 64 * 64 * 4
            del out
            assert m.live_bytes == before


def test_what_is_fetched_is_read_only_as_on_the_cpu(cuda):
    for t in (tg.asarray(X, device=cuda), tg.asarray(2.0, device=cuda)):
        assert not t.numpy().flags.writeable and not np.asarray(t).flags.writeable
        assert t.numpy(copy=True).flags.writeable and np.array(t).flags.writeable
        with pytest.raises(ValueError, match="without a copy"):
            t.numpy(copy=False)


def happens_before(first: int, last: int, one: int, other: int) -> bool:
    """Whether an event recorded on stream ``one`` in this stretch of the log is waited for on stream ``other``."""
    marks = set()
    for e in standin.events[first:last]:
        if e.kind == "record" and e.stream == one:
            marks.add(e.event)
        elif e.kind == "wait" and e.stream == other and e.event in marks:
            return True
    return False


def test_streams_are_ordered(cuda, cupy):
    one, other = cupy.cuda.Stream(non_blocking=True), cupy.cuda.Stream(non_blocking=True)

    def launched():
        return max(i for i, e in enumerate(standin.events) if e.kind == "launch")

    with one:
        x = tg.asarray(X, device=cuda) * 2
        materialize(x)
        made = launched()
    with other:
        y = tg.exp(x)
        materialize(y)
        used = launched()
        assert standin.events[used].stream == other.ptr and standin.events[made].stream == one.ptr
        assert happens_before(made, used, one.ptr, other.ptr)
        count = len(standin.events)
        materialize(y + 1)
        assert not any(e.kind in ("record", "wait") for e in standin.events[count:]), "one stream needs no event"
    with one:
        z = tg.matmul(y, x.T)
        back = next(i for i, e in enumerate(standin.events) if i > used and e.stream == one.ptr and e.writes)
        assert happens_before(used, back, other.ptr, one.ptr)
    end = len(standin.events)
    z.numpy()
    fetched = next(i for i, e in enumerate(standin.events) if i >= end and e.kind == "d2h")
    assert happens_before(end, fetched, one.ptr, 0)
    assert not any("synchronize" in e.kind for e in standin.events)


def test_a_training_step_never_waits_for_the_device(cuda):
    with tg.device(cuda):
        tg.random.seed(0)
        hidden = [tg.nn.Dense(8, activation="gelu"), tg.nn.LayerNormalization(), tg.nn.Dropout(0.1)]
        model = tg.nn.Sequential([*hidden, tg.nn.Dense(4)])
        optimizer = tg.optim.Adam(1e-2, global_clipnorm=1.0)
        x = tg.asarray(np.random.default_rng(0).normal(size=(6, 5)).astype("float32"))
        labels = tg.asarray([0, 1, 2, 3, 0, 1])
        losses = []

        def step():
            with tg.GradientTape() as tape:
                loss = tg.mean(tg.nn.functional.cross_entropy(model(x, training=True), labels))
            variables = model.trainable_variables
            optimizer.apply(tape.gradient(loss, variables), variables)
            losses.append(loss)

        step()
        with never_waits(cuda.xp):
            standin.events.clear()
            compiled = standin.compiles
            for _ in range(5):
                step()
            kinds = {e.kind for e in standin.events}
        assert standin.compiles == compiled, "a step like the last one compiles nothing"
    assert "launch" in kinds and not any(k == "d2h" or "synchronize" in k for k in kinds)
    assert losses[-1].item() < losses[0].item()


def test_variables(cuda):
    with tg.device(cuda):
        v = tg.Variable(X)
    v.assign(v * 2)
    v.assign_add(X)
    same_bits(v, 3 * X)
    assert v.device is cuda and v.read().device is cuda
    with pytest.raises(DeviceError, match=r"cuda:0.*cpu|cpu.*cuda:0"):
        v.assign(tg.asarray(X))
    with pytest.raises(DeviceError):
        tg.Variable(X).assign(tg.asarray(X, device=cuda))


def test_the_ledger_counts_kernels_and_bytes(cuda):
    n = 1000
    x = tg.asarray(np.ones(n, "float32"), device=cuda)
    standin.launches.clear()
    with tg.measure() as m:
        y = tg.tanh(x * 2.5 + 1)
        materialize(y)
        assert (m.kernel_runs, m.allocated_bytes) == (1, 4096)
        assert m.bytes_moved == 8 * n + 8 and m.nodes_run == {"multiply": 1, "add": 1, "tanh": 1}
        tg.sum(y * y).numpy()
        assert m.kernel_runs == len(standin.launches) == 2 and m.scratch_bytes == 0
    parts = tg.asarray(np.ones(40000, "float32"), device=cuda)
    with tg.measure() as m:
        tg.sum(parts * parts).numpy()
        assert m.kernel_runs == 1 and 0 < m.scratch_bytes <= 4 * 256


def body(x):
    return tg.tanh(x * 1.5) * tg.exp(-x)


def both(f):
    """The same function of a tensor on each device."""
    found = []
    for device in (asdevice("cuda"), CPU):
        with tg.device(device):
            found.append(f(from_array(device.array(X), device)))
    return found


def close(found):
    for got, wanted in zip(*found, strict=True):
        np.testing.assert_allclose(got.numpy(), wanted.numpy(), rtol=1e-5, atol=1e-6)
        assert got.device.kind == "cuda" and wanted.device is CPU


def test_checkpoints_give_the_same_bits(cuda):
    def run(f):
        x = tg.asarray(X, device=cuda)
        with tg.device(cuda), tg.GradientTape() as tape:
            tape.watch(x)
            tg.random.seed(4)
            y = tg.sum(f(f(x)) * tg.nn.functional.dropout(x, 0.5))
        return tape.gradient(y, x)

    plain = run(body)
    with tg.measure() as m:
        same_bits(run(tg.recompute_grad(body)), plain)
        assert m.reruns == 2


def test_transformations(cuda):
    @tg.custom_gradient
    def halved(x):
        return x * 2, lambda ct: ct

    close(both(lambda x: [tg.grad(lambda x: tg.sum(halved(body(x))))(x)]))
    close(both(lambda x: [tg.jacobian(body)(x), tg.hessian(lambda x: tg.sum(body(x)))(x)]))
    close(both(lambda x: tg.jvp(body, (x,), (x,))))
    close(both(lambda x: [tg.grad(lambda x: tg.sum(tg.grad(lambda x: tg.sum(body(x) * x))(x) ** 2))(x)]))


def test_a_persistent_tape(cuda):
    def run(x):
        with tg.GradientTape(persistent=True) as tape:
            tape.watch(x)
            y = body(x)
            z = tg.sum(y * y)
        return [tape.gradient(y, x), tape.gradient(z, x), tape.gradient(z, x), tape.jacobian(y, x)]

    found = both(run)
    close(found)
    same_bits(found[0][1], found[0][2])


@pytest.mark.skipif(find_spec("cupy") is None, reason="CuPy is not installed, so importing it would be noticed anyway")
def test_importing_tapegrad_does_not_import_cupy():
    code = "import sys, {}; sys.exit('cupy' in sys.modules)"
    run = lambda name: subprocess.run([sys.executable, "-c", code.format(name)], timeout=60).returncode
    assert (run("tapegrad"), run("tapegrad, cupy")) == (0, 1)


def test_an_empty_grid_launches_nothing(cuda):
    function = cuda.compile('extern "C" __global__ void seven(int* x) { *x = 7; }', "seven", ())
    x = cuda.array(np.zeros(1, "int32"))
    for grid in ((0,), (3, 0)):
        cuda.launch(function, grid, (1,), (x,))
    assert cuda.numpy(x)[0] == 0 and "seven" not in [launch.name for launch in standin.launches]
