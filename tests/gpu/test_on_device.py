"""What only a device can show: every primitive there, streams, memory shared with others, cuBLAS, and no waiting.

The tests run wherever ``import cupy`` gives something that launches kernels.  So they are themselves tested without a
GPU, by the stand-in for CuPy:  ``python -m pytest -p shim.plugin -m gpu tests/gpu``  (with ``tests`` on PYTHONPATH).
"""

from __future__ import annotations

import gc
import importlib.util
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from inside import array_of
from waiting import never_waits

import tapegrad as tg
from tapegrad import nn
from tapegrad.device import CPU, asdevice
from tapegrad.profile import demo_model
from tapegrad.tensor import from_array, materialize

pytestmark = pytest.mark.gpu

N = 1 << 18
GEMM = {"float16": 2e-3, "bfloat16": 2e-2, "float32": 2e-5, "float64": 1e-13, "complex64": 2e-5, "complex128": 1e-13}
GEMM_SHAPES = ((3, 17, 24), (3, 24, 9))
LAYOUTS = {
    "row-major": lambda xp, a: a,
    "column-major": lambda xp, a: xp.ascontiguousarray(a.swapaxes(-1, -2)).swapaxes(-1, -2),
    "repeated matrix": lambda xp, a: xp.broadcast_to(a[:1], a.shape),
    "repeated row": lambda xp, a: xp.broadcast_to(a[:, :1], a.shape),
    "every other column": lambda xp, a: xp.concatenate([a, a], axis=-1).reshape(*a.shape, 2)[..., 0],
    "reversed": lambda xp, a: a[:, ::-1],
    "heads": lambda xp, a: xp.ascontiguousarray(a.swapaxes(0, 1)).swapaxes(0, 1),
}  # fmt: skip


def _table() -> Any:
    """``tests/cuda/test_table.py``: it takes any CUDA device, and the stand-in is only its fixture's choice."""
    path = Path(__file__).resolve().parents[1] / "cuda" / "test_table.py"
    spec = importlib.util.spec_from_file_location("table_on_cuda", path)
    module = importlib.util.module_from_spec(spec)  # type: ignore[arg-type]
    spec.loader.exec_module(module)  # type: ignore[union-attr]
    return module


table = _table()


@pytest.fixture
def cuda() -> Iterator[Any]:
    """The first CUDA device; the default is the CPU's, so that what runs on the device was asked to."""
    with tg.device("cpu"):
        yield asdevice("cuda")


@pytest.fixture
def cupy(cuda: Any) -> Any:
    return cuda.xp


def on(device: Any, x: np.ndarray) -> tg.Tensor:
    return from_array(device.array(x), device)


def near(got: Any, wanted: Any, rtol: float) -> None:
    """Within ``rtol`` of the largest value, and of the same dtype."""
    assert got.dtype == wanted.dtype and got.shape == wanted.shape
    wide = "complex128" if wanted.dtype.kind == "c" else "float64"
    got, wanted = got.astype(wide), wanted.astype(wide)
    assert np.abs(got - wanted).max(initial=0) <= rtol * np.abs(wanted).max(initial=1)


@pytest.mark.parametrize("dtype", table.ALL)
def test_every_primitive(dtype, cuda):
    table.test_values(dtype, cuda)


@pytest.mark.parametrize("dtype", table.SMOOTH)
def test_every_gradient(dtype, cuda):
    table.test_gradients(dtype, cuda)


# Streams -------------------------------------------------------------------------------------------------------------


def test_a_tensor_made_on_one_stream_is_used_on_another(cuda, cupy, rng):
    """Long work on the one, its result read at once on the other, both ways; a race would show as old bytes."""
    values = rng.uniform(0.5, 1.5, N).astype("float32")
    streams = [cupy.cuda.Stream(non_blocking=True), cupy.cuda.Stream.null, cupy.cuda.Stream(non_blocking=True)]
    wanted = x = on(CPU, values)
    y = on(cuda, values)
    for turn in range(12):
        with streams[turn % 3]:
            y = tg.sqrt(y * y + 1)
            materialize(y)
        wanted = tg.sqrt(wanted * wanted + 1)
    near(y.numpy(), wanted.numpy(), 1e-5)
    assert x.shape == y.shape


def test_a_gradient_is_taken_on_another_stream(cuda, cupy, rng):
    values = rng.uniform(-1, 1, N).astype("float32")
    found = {}
    for device in (cuda, CPU):
        x = on(device, values)
        with tg.device(device):
            with tg.GradientTape() as tape:
                tape.watch(x)
                y = tg.sum(tg.tanh(x) * x)
            if device is cuda:
                with cupy.cuda.Stream(non_blocking=True):
                    found[device] = tape.gradient(y, x).numpy()
            else:
                found[device] = tape.gradient(y, x).numpy()
    near(found[cuda], found[CPU], 1e-6)


def test_the_users_array_belongs_to_the_stream_it_is_handed_in_on(cuda, cupy):
    side = cupy.cuda.Stream(non_blocking=True)
    with side:
        theirs = cupy.full((N,), 2, "float32")
        for _ in range(20):
            theirs = theirs * 1
        x = tg.asarray(theirs, copy=False)
    assert (tg.square(x).numpy() == 4).all()


# Memory shared with others -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "int32", "bool", "complex64"])
def test_cupy_shares_memory_both_ways(dtype, cuda, cupy):
    values = np.arange(12).reshape(3, 4).astype(dtype)
    theirs = cupy.asarray(values)
    x = tg.asarray(theirs, copy=False)
    assert x.device is cuda and array_of(x).data.ptr == theirs.data.ptr
    assert array_of(tg.asarray(theirs)).data.ptr != theirs.data.ptr
    for back in (cupy.asarray(x), cupy.from_dlpack(x)):
        assert back.data.ptr == theirs.data.ptr
        np.testing.assert_array_equal(cupy.asnumpy(back), values)


def test_a_view_keeps_its_strides(cuda, cupy):
    theirs = cupy.asarray(np.arange(24, dtype="float32").reshape(4, 6))
    view = theirs[::2, 1::2].T
    x = tg.asarray(view, copy=False)
    np.testing.assert_array_equal((x + 1).numpy(), cupy.asnumpy(view) + 1)
    assert cupy.asarray(x.mT).strides == view.T.strides
    backwards = tg.asarray(theirs[::-1, ::-2], copy=False)
    np.testing.assert_array_equal(cupy.asnumpy(cupy.asarray(backwards)), cupy.asnumpy(theirs)[::-1, ::-2])


def test_torch_shares_memory_both_ways(cuda, cupy):
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("this PyTorch has no CUDA device")
    theirs = torch.arange(12, dtype=torch.float32, device="cuda").reshape(3, 4)
    x = tg.asarray(theirs, copy=False)
    assert x.device is cuda and array_of(x).data.ptr == theirs.data_ptr()
    y = tg.exp(x)
    for back in (torch.from_dlpack(y), torch.as_tensor(y, device="cuda")):
        assert back.data_ptr() == array_of(y).data.ptr
        torch.testing.assert_close(back, torch.exp(theirs))


def test_the_ledger_is_the_pools_used_bytes(cuda, cupy, rng):
    """With tolerance 0: arrays of several sizes, forward and backward, while they live and when they are gone."""
    pool = cupy.get_default_memory_pool()
    x = on(cuda, rng.uniform(size=(64, 100)).astype("float32"))
    w = on(cuda, rng.uniform(size=(100, 30)).astype("float32"))

    def step() -> list[tg.Tensor]:
        with tg.GradientTape() as tape:
            tape.watch([x, w])
            y = tg.tanh(x @ w) * 2
            z = tg.softmax(y)
        return [y, z, *tape.gradient(z, [x, w], output_gradients=y)]

    kept = step()  # handles and workspaces of the libraries are there before anything is counted
    del kept
    gc.collect()
    with tg.measure() as m:
        before = pool.used_bytes() - m.live_bytes
        kept = step()
        materialize(*kept)
        assert pool.used_bytes() - m.live_bytes == before
        del kept[1:]
        assert pool.used_bytes() - m.live_bytes == before
        del kept
        assert pool.used_bytes() - m.live_bytes == before


def test_out_of_memory_is_an_error_and_the_next_call_works(cuda, cupy):
    pool = cupy.get_default_memory_pool()
    x = tg.asarray(cupy.ones((1 << 20,), "float32"), copy=False)
    limit = pool.get_limit()
    gc.collect()
    pool.free_all_blocks()
    pool.set_limit(size=pool.total_bytes() + (1 << 21))
    try:
        with pytest.raises(MemoryError):
            materialize(x + 1)
    finally:
        pool.set_limit(size=limit)
    assert ((x + 1).numpy() == 2).all()


# The same numbers as on the CPU --------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(7,), (1000,), (33, 65), (2, 3, 129)], ids=str)
@pytest.mark.parametrize("rate", [0.1, 0.5, 2.0**-16])
def test_dropout_draws_the_same_bits(shape, rate, cuda):
    values = np.arange(1, 1 + np.prod(shape), dtype="float32").reshape(shape)
    found = []
    for device in (cuda, CPU):
        with tg.device(device):
            tg.random.seed(5)
            x = on(device, values)
            with tg.GradientTape() as tape:
                tape.watch(x)
                y = nn.functional.dropout(nn.functional.dropout(x, rate), rate)
            found.append([y.numpy(), tape.gradient(y, x).numpy()])
    for got, wanted in zip(*found, strict=True):
        np.testing.assert_array_equal(got, wanted)


@pytest.mark.parametrize("dtype", GEMM)
def test_products_of_any_layout(dtype, cuda, cupy):
    rng = np.random.default_rng(3)
    kind = pytest.importorskip("ml_dtypes").bfloat16 if dtype == "bfloat16" else np.dtype(dtype)
    wide = "complex128" if "complex" in dtype else "float64"
    whole = [rng.uniform(-1, 1, s) + (1j * rng.uniform(-1, 1, s) if "complex" in dtype else 0) for s in GEMM_SHAPES]
    whole = [a.astype(kind) for a in whole]
    for layouts in itertools.product(LAYOUTS, repeat=2):
        hosts = [LAYOUTS[name](np, a).astype(wide) for name, a in zip(layouts, whole)]
        x, y = (from_array(LAYOUTS[name](cupy, cupy.asarray(a)), cuda) for name, a in zip(layouts, whole))
        for got, wanted in ((x @ y, hosts[0] @ hosts[1]), (x @ y[0], hosts[0] @ hosts[1][0])):
            difference = np.abs(got.numpy().astype(wide) - wanted).max() / np.abs(wanted).max()
            assert difference <= GEMM[dtype], (layouts, difference)


def trained(device: Any, steps: int, recompute_blocks: bool = False) -> tuple[list[Any], list[np.ndarray]]:
    """Losses and last gradients of some steps of the demo's transformer, from the same seed."""
    with tg.device(device):
        tg.random.seed(0)
        text = np.random.default_rng(1).integers(0, 20, (2, 17))
        tokens, labels = tg.asarray(text[:, :-1]), tg.asarray(text[:, 1:])
        model = demo_model.CharTransformer(20, 16, 32, 2, 2)
        model.recompute_blocks = recompute_blocks
        model(tokens)
        optimizer, losses = tg.optim.Adam(1e-2), []
        for _ in range(steps):
            loss, gradients, variables = demo_model.loss_and_gradients(model, tokens, labels)
            optimizer.apply(gradients, variables)
            losses.append(loss)
        return [float(loss) for loss in losses], [g.numpy() for g in gradients]


@pytest.mark.parametrize("name", ["float16", "bfloat16"])
def test_halves_are_rounded_to_nearest_even(name, cuda, rng):
    """By the device's own instructions, which no test without a device runs."""
    dtype = tg.asarray(0.0).astype(name).dtype
    x = (rng.normal(size=N) * 2.0 ** rng.integers(-10, 10, N)).astype(np.float32)
    bits = x.view(np.uint32)
    bits[: N // 2] = bits[: N // 2] & ~np.uint32(0xFFF if name == "float16" else 0x7FFF)  # half way between two of them
    with tg.device("cuda"):
        found = (tg.asarray(x) * tg.asarray(1.0)).astype(dtype).numpy()
    np.testing.assert_array_equal(found.view(np.uint16), x.astype(found.dtype).view(np.uint16))


def test_training_follows_the_cpu(cuda):
    (losses, gradients), (wanted, on_cpu) = trained(cuda, 3), trained(CPU, 3)
    np.testing.assert_allclose(losses, wanted, rtol=1e-4)
    floor = 1e-2 * max(np.abs(g).max() for g in on_cpu)
    for got, want in zip(gradients, on_cpu, strict=True):
        assert np.abs(got - want).max() <= 2e-2 * max(np.abs(want).max(), floor)


def test_recomputing_changes_no_bit(cuda):
    plain, again = trained(cuda, 2), trained(cuda, 2, recompute_blocks=True)
    assert plain[0] == again[0]
    for got, wanted in zip(again[1], plain[1], strict=True):
        np.testing.assert_array_equal(got, wanted)


def test_a_training_step_never_waits_for_the_device(cuda, cupy):
    with tg.device(cuda):
        tg.random.seed(0)
        model = nn.Sequential([nn.Dense(32, activation="gelu"), nn.LayerNormalization(), nn.Dropout(0.1), nn.Dense(8)])
        x = tg.random.normal((16, 24))
        labels = tg.asarray(np.arange(16) % 8)
        optimizer = tg.optim.Adam(1e-2)

        def step() -> tg.Tensor:
            with tg.GradientTape() as tape:
                loss = nn.functional.cross_entropy(model(x, training=True), labels)
            variables = model.trainable_variables
            optimizer.apply(tape.gradient(loss, variables), variables)
            return loss

        first, _ = step(), step()  # weights and slots are made, kernels compiled and loaded (which may wait)
        with never_waits(cupy):
            for _ in range(5):
                last = step()
        assert float(last) < float(first)
