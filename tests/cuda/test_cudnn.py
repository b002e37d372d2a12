"""Convolutions by cuDNN, whose frontend is a stand-in: values, bits in every way to run, bytes, fallbacks, messages."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from cuda_cases import same_bits
from shim import standin
from shim.standin import libcudnn, pool

import tapegrad as tg
from tapegrad.device import asdevice
from tapegrad.device import cudnn as binding
from tapegrad.device.numerics.windows import Moves
from tapegrad.errors import GraphError, KernelError, TapegradError
from tapegrad.nn import functional as F
from tapegrad.ops.products.convolution import conv, conv_transpose

pytestmark = pytest.mark.sampled(1 / 2)

CASES = {
    "plain": ((2, 3, 6, 5), (4, 3, 3, 2), Moves((1, 1), ((0, 0), (0, 0)), (1, 1), 1)),
    "all at once": ((2, 4, 9, 8), (6, 2, 3, 2), Moves((2, 1), ((1, 2), (0, 1)), (1, 2), 2)),
    "stride over kernel": ((2, 3, 8), (4, 3, 2), Moves((3,), ((0, 0),), (1,), 1)),
    "line": ((3, 4, 17), (6, 2, 5), Moves((1,), ((2, 1),), (2,), 2)),
    "depthwise": ((3, 6, 6, 5), (6, 1, 3, 3), Moves((1, 1), ((1, 1), (1, 1)), (1, 1), 6)),
    "solid": ((1, 2, 5, 6, 4), (3, 2, 2, 3, 2), Moves((1, 2, 1), ((1, 0), (0, 1), (2, 1)), (1, 1, 2), 1)),
    "1x1 strided": ((3, 4, 5, 4), (5, 4, 1, 1), Moves((2, 2), ((0, 0), (0, 0)), (1, 1), 1)),
}
KINDS = {"conv_fprop", "conv_dgrad", "conv_wgrad"}
TOLERANCE = {"float32": 1e-6, "float16": 2e-3, "bfloat16": 2e-2}


@pytest.fixture
def library(cupy: Any) -> Any:
    """The stand-in of the frontend, which tapegrad is to use; its log."""
    libcudnn.offer()
    return libcudnn.log


@pytest.fixture
def gpu(library: Any, cuda: Any) -> Any:
    """A device with cuDNN."""
    return cuda


@pytest.fixture
def lent(gpu: Any, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The most bytes of the pool that were lent at once, in a list."""
    most, malloc = [0], pool.SingleDevicePool.malloc

    def noting(self: Any, asked: int) -> Any:
        found = malloc(self, asked)
        most[0] = max(most[0], self.total() - sum(s.size for s in self.free_segments()))
        return found

    monkeypatch.setattr(pool.SingleDevicePool, "malloc", noting)
    monkeypatch.setattr(pool.default, "malloc", pool.default.malloc)
    return most


def drawn(device: Any, shape: tuple[int, ...], dtype: str = "float32", seed: int = 0) -> tg.Tensor:
    return tg.asarray(np.random.default_rng([seed, *shape]).normal(size=shape).astype(dtype), device=device)


def three(x: tg.Tensor, w: tg.Tensor, moves: Moves) -> list[tg.Tensor]:
    """A convolution and both its derivatives."""
    with tg.GradientTape() as tape:
        tape.watch([x, w])
        y = conv(x, w, moves=moves)
    return [y, *tape.gradient(y, [x, w], output_gradients=tg.cos(tg.asarray(y)))]


def near(found: Any, wanted: Any, tolerance: float) -> None:
    a, b = (np.asarray(t.numpy()).astype("float64") for t in (found, wanted))
    assert found.dtype == wanted.dtype
    np.testing.assert_allclose(a, b, rtol=0, atol=tolerance * max(1, np.abs(b).max()))


# Values ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("case", CASES)
def test_values_are_those_of_our_kernels(gpu: Any, library: Any, case: str, dtype: str) -> None:
    *shapes, moves = CASES[case]
    x, w = (drawn(gpu, shape, dtype) for shape in shapes)
    found = three(x, w, moves)
    assert {kind for kind, _, _ in library.ran} == KINDS
    assert not any(launch.name.startswith("tg_conv") for launch in standin.launches)
    with binding.without(gpu):
        wanted = three(x, w, moves)
    assert len(library.ran) == 3
    for one, other in zip(found, wanted, strict=True):
        near(one, other, TOLERANCE[dtype])


@pytest.mark.parametrize("case", ["all at once", "line", "solid"])
def test_second_derivatives_and_batches(gpu: Any, library: Any, case: str) -> None:
    *shapes, moves = CASES[case]
    x, w = (drawn(gpu, shape) for shape in shapes)

    def run() -> list[tg.Tensor]:
        with tg.GradientTape() as outer:
            outer.watch([x, w])
            y, in_x, in_w = three(x, w, moves)
            loss = tg.sum(y * y) + tg.sum(in_x * in_x * in_x) + tg.sum(in_w * in_w)
        rows = tg.vmap(lambda a: conv(x * a, w + a, moves=moves))(tg.asarray([0.5, 2.0], device=gpu))
        tangent = tg.jvp(lambda x: conv(x, w, moves=moves), [x], [tg.sin(x)])[1]
        back = conv_transpose(y, w, moves=moves, size=x.shape[2:])
        return [*outer.gradient(loss, [x, w]), rows, tangent, back]

    found = run()
    assert len(library.ran) > 10
    with binding.without(gpu):
        wanted = run()
    for one, other in zip(found, wanted, strict=True):
        near(one, other, 1e-5)


def test_float32_is_rounded_for_tensor_cores_only_where_that_is_chosen(gpu: Any, library: Any) -> None:
    x, w = drawn(gpu, (2, 8, 9, 9)), drawn(gpu, (8, 8, 3, 3))
    plain = F.conv2d(x, w)
    before = tg.get_float32_matmul_precision()
    try:
        tg.set_float32_matmul_precision("high")
        rounded = F.conv2d(x, w)
    finally:
        tg.set_float32_matmul_precision(before)
    assert [engine for _, engine, _ in library.ran] == ["plain", "cores"]
    error = np.abs(rounded.numpy() - plain.numpy()).max() / np.abs(plain.numpy()).max()
    assert 1e-5 < error < 5e-3


@pytest.mark.parametrize("dtype", ["float64", "complex64"])
def test_other_dtypes_are_ours(gpu: Any, library: Any, dtype: str) -> None:
    F.conv2d(drawn(gpu, (2, 3, 6, 6), dtype), drawn(gpu, (4, 3, 3, 3), dtype)).numpy()
    assert not library.built and standin.launches[-1].name == "tg_conv"


def test_products_empty_arrays_and_windows_in_the_padding_are_ours(gpu: Any, library: Any) -> None:
    x = drawn(gpu, (2, 3, 6, 6))
    F.conv2d(x, drawn(gpu, (4, 3, 1, 1))).numpy()
    F.conv2d(x[:0], drawn(gpu, (4, 3, 3, 3))).numpy()
    F.conv2d(x, drawn(gpu, (4, 3, 3, 3)), padding=3).numpy()
    assert not library.built and not gpu.cudnn.declined


LAYS = {
    "every other": lambda x: tg.reshape(tg.stack([x, x], axis=-1), (*x.shape[:-1], -1))[..., ::2],
    "channels last": lambda x: tg.moveaxis(tg.moveaxis(x, 1, -1) + 0, -1, 1),
    "backwards": lambda x: tg.flip(tg.flip(x, -1) + 0, -1),
    "not aligned": lambda x: tg.reshape(tg.concat([tg.reshape(x, -1)[:1], tg.reshape(x, -1)], 0)[1:], x.shape),
}


@pytest.mark.parametrize("lay", LAYS)
def test_bits_do_not_depend_on_how_operands_lie(gpu: Any, library: Any, lay: str) -> None:
    *shapes, moves = CASES["all at once"]
    x, w = (drawn(gpu, shape) for shape in shapes)
    wanted = three(x, w, moves)
    lain = [LAYS[lay](x), LAYS[lay](w)]
    with tg.measure() as m:
        found = three(*lain, moves)
    assert m.scratch_bytes >= 512
    for one, other in zip(found, wanted, strict=True):
        same_bits(one, other)


# Ways to run ----------------------------------------------------------------------------------------------------------


def network(gpu: Any) -> Any:
    x, w, d = (drawn(gpu, s) for s in ((2, 6, 9, 8), (6, 6, 3, 3), (6, 1, 3, 3)))

    def step(x: Any, w: Any, d: Any) -> Any:
        with tg.GradientTape() as tape:
            tape.watch([x, w, d])
            h = tg.tanh(F.conv2d(x, w, padding=1))
            for _ in range(12):
                h = tg.softmax(h)
            h = tg.relu(F.conv2d(h, d, padding=1, groups=6))
            loss = tg.sum(F.conv2d(h, w[:, :, :2, :2]) ** 2)
        return tape.gradient(loss, [x, w, d])

    return step, x, w, d


def test_every_way_to_run_gives_the_same_bits(gpu: Any, library: Any) -> None:
    step, x, w, d = network(gpu)
    plain = step(x, w, d)
    built, calls = len(library.built), len(library.ran)
    captured = tg.function(step)
    ways = [step(x, w, d), tg.recompute_grad(lambda: step(x, w, d))()]
    ways += [captured(x, w, d) for _ in range(3)]
    with tg.measure() as m:
        base = m.live_bytes
        step(x, w, d)
    with tg.memory_budget(base + int((m.peak_bytes - base) * 0.9)) as budget:
        ways.append(step(x, w, d))
    assert budget.evictions and captured.stats.replays
    assert len(library.built) == built, "a plan was built again"
    assert len(library.ran) >= 7 * calls
    for way in ways:
        for got, wanted in zip(way, plain, strict=True):
            same_bits(got, wanted)


def test_a_captured_step_is_graphs_with_the_convolutions_inside(gpu: Any, library: Any) -> None:
    step, x, w, d = network(gpu)
    captured = tg.function(step)
    for _ in range(3):
        captured(x, w, d)
    library.ran.clear()
    standin.events.clear()
    captured(x, w, d)
    graphs = [i for i, entry in enumerate(standin.events) if entry.kind == "graph"]
    inside = [i for i, entry in enumerate(standin.events) if entry.kind == "op" and entry.name in KINDS]
    assert graphs and len(inside) == len(library.ran) == 9 and min(inside) > graphs[0]
    assert "one by one" not in str(captured.stats), captured.stats


def test_nothing_is_made_while_a_stream_captures(gpu: Any, library: Any) -> None:
    x, w = drawn(gpu, (2, 3, 6, 6)), drawn(gpu, (4, 3, 3, 3))
    y = F.conv2d(x, w).numpy()
    kernel = conv(x[:1], w, moves=Moves((1, 1), ((0, 0), (0, 0)), (1, 1), 1))
    kernel.numpy()
    binding_of = gpu.cudnn

    def other() -> None:
        binding_of.plan(binding.FORWARD, (5, 3, 6, 6), w.shape, (5, 4, 4, 4), np.dtype("f4"), CASES["plain"][2])

    with pytest.raises(GraphError, match="a plan for conv_fprop .* must be made before a stream captures"):
        gpu.graph(other)
    with pytest.raises(GraphError, match="a handle must be made before"):
        gpu.graph(lambda: binding.made(gpu.xp, 0))
    other()  # and the refusal is not remembered
    np.testing.assert_array_equal(F.conv2d(x, w).numpy(), y)


def test_bias_and_relu_give_the_bits_of_operations_of_their_own(gpu: Any, library: Any) -> None:
    for dtype in TOLERANCE:
        x, w, b = drawn(gpu, (2, 4, 9, 8), dtype), drawn(gpu, (6, 4, 3, 3), dtype), drawn(gpu, (6,), dtype)

        def run(apart: bool, x: Any = x, w: Any = w, b: Any = b) -> list[Any]:
            with tg.GradientTape() as tape:
                tape.watch([x, w, b])
                y = F.conv2d(x, w) + tg.reshape(b, (6, 1, 1)) if apart else F.conv2d(x, w, b)
                loss = tg.sum(y * tg.sin(y))
            return [y, *tape.gradient(loss, [x, w, b])]

        library.ran.clear()
        for one, other in zip(run(False), run(True), strict=True):
            same_bits(one, other)
        assert len(library.ran) == 6
    x = drawn(gpu, (2, 4, 9, 8))
    with tg.device(gpu):
        layer = tg.nn.Conv2D(6, 3, padding=1, activation="relu")
        layer(x)
        layer.bias.assign(drawn(gpu, (6,)))
    apart = tg.relu(F.conv2d(x, layer.kernel, padding=1) + tg.reshape(layer.bias, (6, 1, 1)))
    for found in (layer(x), tg.function(layer)(x), tg.recompute_grad(layer)(x)):
        same_bits(found, apart)
    assert {"tg_conv_finish"} == {n for launch in standin.launches if (n := launch.name).startswith("tg_conv")}


def test_bias_and_relu_are_one_pass_more(gpu: Any, library: Any) -> None:
    x = drawn(gpu, (2, 4, 9, 8))
    with tg.device(gpu):
        layer = tg.nn.Conv2D(6, 3, padding=1, activation="relu")
        y = layer(x)
    with tg.measure() as m:
        layer(x)
    least = x.nbytes + layer.kernel.nbytes + layer.bias.nbytes + y.nbytes
    assert (m.kernel_runs, m.bytes_moved) == (2, least + 2 * y.nbytes)


def test_work_goes_to_the_current_stream_and_threads_share_a_handle(gpu: Any, library: Any) -> None:
    x, w = drawn(gpu, (2, 3, 6, 6)), drawn(gpu, (4, 3, 3, 3))
    before = len(library.handles)
    wanted, streams, results = F.conv2d(x, w).numpy(), [], []

    def work() -> None:
        stream = gpu.xp.cuda.Stream(non_blocking=True)
        streams.append(stream.ptr)
        with stream:
            results.append(F.conv2d(x, w).numpy())

    standin.events.clear()
    for _ in range(2):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    ran = [entry.stream for entry in standin.events if entry.name == "conv_fprop"]
    assert ran == streams and len(library.handles) == before + 1
    for found in results:
        np.testing.assert_array_equal(found, wanted)


def test_each_device_has_a_handle_and_plans_of_its_own(gpu: Any, library: Any) -> None:
    second = asdevice("cuda:1")
    first, other = (F.conv2d(drawn(d, (2, 3, 6, 6)), drawn(d, (4, 3, 3, 3))) for d in (gpu, second))
    np.testing.assert_array_equal(first.numpy(), other.numpy())
    assert {handle.device for handle in library.handles} >= {0, 1} and len(library.built) == 2
    assert second.cudnn is not gpu.cudnn


# Bytes ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_the_pool_never_lends_more_than_the_budget(gpu: Any, library: Any, lent: list[int], dtype: str) -> None:
    x, w = drawn(gpu, (4, 4, 16, 16), dtype), drawn(gpu, (8, 4, 3, 3), dtype)

    def run() -> Any:
        with tg.GradientTape() as tape:
            tape.watch([x, w])
            h = x
            for _ in range(30):
                h = tg.softmax(h)
            y = F.conv2d(h, w, padding=1)
            loss = tg.sum(y * y)
        return tape.gradient(loss, [x, w])

    before = gpu.usage()[0]
    with tg.measure() as plain:
        wanted = run()
    spare = {size for _, _, size in library.ran}
    assert plain.scratch_bytes >= max(spare) > 0
    lent[0] = 0
    limit = plain.peak_bytes + plain.scratch_bytes // 2
    with tg.memory_budget(limit) as budget:
        found = run()
    assert budget.evictions > 0
    assert lent[0] - before <= limit, (lent[0], before, limit)
    for one, other in zip(found, wanted, strict=True):
        same_bits(one, other)


def test_what_is_predicted_is_what_happens(gpu: Any, library: Any) -> None:
    step, x, w, d = network(gpu)
    step(x, w, d)
    with tg.device(gpu):
        layer = tg.nn.Conv2D(6, 3, padding=1, activation="relu")
        layer(x)

    def run() -> Any:
        with tg.GradientTape() as tape:
            tape.watch(x)
            y = layer(tg.moveaxis(tg.moveaxis(x, 1, -1) + 0, -1, 1))
        return step(x, w, d), tape.gradient(y, layer.kernel)

    said = tg.memory.predict_peak(run, budgets=[], least=False)
    with tg.measure() as m:
        run()
    assert said.peak_bytes == m.peak_bytes
    assert (said.kernel_runs, said.bytes_moved) == (m.kernel_runs, m.bytes_moved)


def test_scratch_is_the_workspace_the_plan_asks_for(gpu: Any, library: Any) -> None:
    x, w = drawn(gpu, (2, 3, 6, 6)), drawn(gpu, (4, 3, 3, 3))
    with tg.measure() as m:
        F.conv2d(x, w)
    ((_, _, size),) = library.ran
    assert size % 512 and m.scratch_bytes == -(-size // 512) * 512


def test_errors_about_memory_tell_of_the_handle(gpu: Any, library: Any) -> None:
    F.conv2d(drawn(gpu, (2, 3, 6, 6)), drawn(gpu, (4, 3, 3, 3)))
    assert gpu.cudnn.outside_bytes == 3 << 20
    assert f"{3 << 20} in cuDNN's handle" in gpu.room(1)


# Whether it is used ---------------------------------------------------------------------------------------------------


def test_what_has_no_engine_is_ours(gpu: Any, library: Any) -> None:
    library.declines = lambda graph: graph.kind == "conv_dgrad"
    *shapes, moves = CASES["all at once"]
    x, w = (drawn(gpu, shape) for shape in shapes)
    found = three(x, w, moves)
    assert {kind for kind, _, _ in library.ran} == KINDS - {"conv_dgrad"}
    assert [launch.name for launch in standin.launches if launch.name.startswith("tg_conv")] == ["tg_conv"]
    ((asked, why),) = gpu.cudnn.declined.items()
    assert asked[0] == "conv_dgrad" and "no engine for this one" in why
    three(x, w, moves)
    assert len(gpu.cudnn.declined) == 1
    library.declines = lambda graph: False
    with binding.without(gpu):
        near(three(x, w, moves)[1], found[1], 1e-5)


def test_a_plan_that_fails_says_how_to_do_without(gpu: Any, library: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("CUDNN_STATUS_EXECUTION_FAILED")

    monkeypatch.setattr(libcudnn.pygraph, "execute", fail)
    with pytest.raises(KernelError, match="EXECUTION_FAILED; TAPEGRAD_CUDNN=0 does without"):
        F.conv2d(drawn(gpu, (2, 3, 6, 6)), drawn(gpu, (4, 3, 3, 3))).numpy()


def test_it_can_be_switched_off(gpu: Any, library: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TAPEGRAD_CUDNN", "0")
    F.conv2d(drawn(gpu, (2, 3, 6, 6)), drawn(gpu, (4, 3, 3, 3))).numpy()
    assert gpu.cudnn is None and not library.built
    assert binding.said(gpu) == "none; TAPEGRAD_CUDNN=0"


def test_it_is_used_where_it_is_installed(gpu: Any, library: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TAPEGRAD_CUDNN")
    assert gpu.cudnn is not None and binding.said(gpu) == "9.28.0 for convolutions"


def test_where_it_is_not_installed_ours_is(gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TAPEGRAD_CUDNN")
    monkeypatch.delitem(sys.modules, "cudnn")
    monkeypatch.setattr(binding.importlib.util, "find_spec", lambda name: None)
    assert gpu.cudnn is None and "pip install 'tapegrad[cudnn12]'" in binding.said(gpu)


@pytest.fixture
def old(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(libcudnn.module, "backend_version", lambda: 8907)
    yield


def test_an_installation_that_cannot_be_used_is_told(gpu: Any, old: None, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(TapegradError, match=r"TAPEGRAD_CUDNN=1: .*it found cuDNN 8\.9\.7; wanted is cuDNN 9"):
        binding.library()
    monkeypatch.delenv("TAPEGRAD_CUDNN")
    with pytest.warns(RuntimeWarning, match="nvidia-cudnn-frontend is installed, but cannot be used"):
        assert gpu.cudnn is None


def test_a_device_that_it_cannot_use_is_told(gpu: Any, library: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    library.fails = "cudnnHandle Create failed: CUDNN_STATUS_NOT_INITIALIZED"
    with pytest.raises(TapegradError, match="cuDNN cannot use cuda:0: .*NOT_INITIALIZED"):
        binding.made(gpu.xp, 0)
    monkeypatch.delenv("TAPEGRAD_CUDNN")
    y = F.conv2d(drawn(gpu, (2, 3, 6, 6)), drawn(gpu, (4, 3, 3, 3)))
    assert y.numpy().any() and gpu.cudnn is None and "NOT_INITIALIZED" in binding.said(gpu)


def test_a_handle_is_given_back(gpu: Any, library: Any) -> None:
    before = len(library.handles)
    found = binding.made(gpu.xp, 0)
    assert len(library.handles) == before + 1
    del found
    assert len(library.handles) == before


def test_without_is_undone(gpu: Any) -> None:
    known = gpu.cudnn
    with pytest.raises(ZeroDivisionError), binding.without(gpu):
        assert gpu.cudnn is None
        1 / 0  # noqa: B018
    assert gpu.cudnn is known is not None


BFLOAT = np.dtype(ml_dtypes.bfloat16)


@pytest.mark.parametrize("dtype", [np.dtype("f4"), np.dtype("f2"), BFLOAT], ids=str)
def test_engines_that_must_not_be_used_are_refused(gpu: Any, library: Any, dtype: np.dtype) -> None:
    """The stand-in names them first; whichever it takes for them is exact and has the same bits each time."""
    found = gpu.cudnn.plan(binding.FORWARD, (2, 3, 6, 6), (4, 3, 3, 3), (2, 4, 4, 4), dtype, CASES["plain"][2])
    assert found is not None and library.built[-1].engine.name == ("plain" if dtype == "f4" else "cores")
