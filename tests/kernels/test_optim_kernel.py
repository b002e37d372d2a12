"""The optimizers' kernels, run on the CPU by the host shim, against the same updates as array operations, to the bit.

A device that calls itself CUDA, and whose arrays are NumPy's, takes the optimizers down the way they go on a GPU.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from shim import host

import tapegrad as tg
from tapegrad import optim
from tapegrad.device import CPU, Device, asdevice, cuda, many
from tapegrad.errors import DeviceError
from tapegrad.ops import updates
from tapegrad.tensor import from_array

DTYPES = [np.float32, np.float64, np.float16, ml_dtypes.bfloat16]
SIZES = [1, 0, 3, 8, 17, many.CHUNK - 1, many.CHUNK, 0, many.CHUNK + 1, 2 * many.CHUNK + 13]


class Emulated(Device):
    """NumPy's arrays and ufuncs, the kernels of a CUDA device."""

    __slots__ = ("host", "launches")

    def __init__(self, kernels: Any) -> None:
        super().__init__("cuda:7", "cuda", np, 2**62, lazy=False)
        self.host = kernels
        self.launches: list[tuple[str, tuple[int, ...]]] = []

    def empty(self, shape: tuple[int, ...], dtype: Any) -> Any:
        return np.full(shape, -3, dtype)  # what a kernel forgets to write is seen

    def array(self, x: Any, dtype: Any = None, copy: bool = True) -> Any:
        return CPU.array(x, dtype, copy)

    def numpy(self, x: Any) -> Any:
        return x.copy()

    def shared(self, x: Any, owner: Any) -> Any:
        raise AssertionError("nothing here is handed out")

    def is_view(self, x: Any, of: Any) -> bool:
        return np.may_share_memory(x, of)

    def give_back(self) -> None:
        raise AssertionError("nothing here runs out of memory")

    def limit(self, nbytes: int | None) -> None:
        raise AssertionError("nothing here sets a budget")

    def usage(self) -> tuple[int, int]:
        return -1, 0

    def save(self, x: Any, into: Any) -> None:
        raise AssertionError("nothing here is offloaded")

    def load(self, x: Any, data: Any) -> None:
        raise AssertionError("nothing here is offloaded")

    def compile(self, text: str, name: str, options: tuple[str, ...]) -> Any:
        return self.host.compile(text, name, options)

    def launch(self, function: Any, grid: tuple, block: tuple, args: tuple, shared: int = 0) -> None:
        self.launches.append((function.name, grid))
        self.host.launch(function, grid, block, args, shared)


@pytest.fixture
def gpu(emulated) -> Emulated:
    return Emulated(emulated)


def values(sizes: list[int], dtype: Any, seed: int, positive: bool = False) -> list[Any]:
    rng = np.random.default_rng(seed)
    found = [rng.normal(size=n) for n in sizes]
    return [(abs(x) if positive else x).astype(dtype) for x in found]


def shifted(x: Any, by: int = 1) -> Any:
    """A copy that begins ``by`` elements behind a multiple of 16 bytes."""
    room = np.empty(x.size + 16, x.dtype)
    start = -room.ctypes.data // x.itemsize % (16 // x.itemsize) + by
    room[start : start + x.size] = x
    return room[start : start + x.size]


def update(kind: str, arrays: list[list[Any]], device: Device, **options: Any) -> list[Any]:
    """The update called ``kind`` of arrays on a device, as one list of arrays."""
    tensors = {n: [from_array(a, device) for a in column] for n, column in zip(COLUMNS[kind], arrays, strict=True)}
    return [t.numpy() for row in getattr(updates, kind.split("_")[0])(**tensors, **options) for t in row]


def assert_same(found: list[Any], wanted: list[Any]) -> None:
    assert len(found) == len(wanted)
    for a, b in zip(found, wanted, strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


RMSPROP = {"rate": 0.1, "rho": 0.9, "epsilon": 1e-3}
CASES = {
    "adam": ("adam", {"factor": 0.013, "beta_1": 0.9, "beta_2": 0.99, "epsilon": 1e-3}),
    "adamw": ("adam", {"factor": 1e-3, "beta_1": 0.8, "beta_2": 0.95, "epsilon": 1e-7, "shrink": 0.97}),
    "sgd": ("sgd", {"rate": 0.1}),
    "sgd decayed": ("sgd", {"rate": 0.1, "shrink": 0.9}),
    "momentum": ("momentum", {"rate": 0.1, "momentum": 0.9}),
    "nesterov": ("momentum", {"rate": 0.1, "momentum": 0.9, "nesterov": True, "shrink": 0.99}),
    "rmsprop": ("rmsprop", {**RMSPROP, "momentum": 0.0}),
    "rmsprop centered": ("rmsprop_centered", {**RMSPROP, "momentum": 0.0, "shrink": 0.9}),
    "rmsprop with momentum": ("rmsprop_momentum", {**RMSPROP, "momentum": 0.7}),
    "rmsprop with all": ("rmsprop_centered_momentum", {**RMSPROP, "momentum": 0.7, "shrink": 0.97}),
    "adagrad": ("adagrad", {"rate": 0.1, "epsilon": 1e-3, "shrink": 0.97}),
    "lion": ("lion", {"rate": 0.1, "beta_1": 0.9, "beta_2": 0.99, "shrink": 0.97}),
    "lamb": ("lamb", {"scale_m": 1.7, "scale_v": 3.1, "beta_1": 0.9, "beta_2": 0.99, "epsilon": 1e-3, "decay": 0.1}),
}
COLUMNS = {
    "adam": ("xs", "gs", "ms", "vs"),
    "sgd": ("xs", "gs"),
    "momentum": ("xs", "gs", "vs"),
    "rmsprop": ("xs", "gs", "squares"),
    "rmsprop_centered": ("xs", "gs", "squares", "means"),
    "rmsprop_momentum": ("xs", "gs", "squares", "vs"),
    "rmsprop_centered_momentum": ("xs", "gs", "squares", "means", "vs"),
    "adagrad": ("xs", "gs", "sums"),
    "lion": ("xs", "gs", "ms"),
    "lamb": ("xs", "gs", "ms", "vs"),
}
POSITIVE = {("adam", "vs"), ("lamb", "vs"), ("adagrad", "sums")}


def operands(kind: str, sizes: list[int], dtype: Any) -> list[list[Any]]:
    positive = [name == "squares" or (kind, name) in POSITIVE for name in COLUMNS[kind]]
    return [values(sizes, dtype, seed, positive[seed]) for seed in range(len(positive))]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", CASES)
def test_every_bit_is_that_of_array_operations(gpu, case, dtype) -> None:
    kind, options = CASES[case]
    arrays = operands(kind, SIZES, dtype)
    assert_same(update(kind, arrays, gpu, **options), update(kind, arrays, CPU, **options))
    assert gpu.launches == [("tg_" + kind, (11,))]  # blocks: one for each chunk, none for empty tensors


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", CASES)
def test_arrays_that_are_not_aligned(gpu, case, dtype) -> None:
    kind, options = CASES[case]
    arrays = operands(kind, SIZES, dtype)
    odd = [list(map(shifted, column)) if i != 1 else column for i, column in enumerate(arrays)]
    assert odd[0][4].ctypes.data % 16
    assert_same(update(kind, odd, gpu, **options), update(kind, arrays, CPU, **options))


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("case", ["adam", "sgd", "momentum", "rmsprop with all", "adagrad", "lion", "lamb"])
def test_nothing_else_is_touched(watched, case, dtype) -> None:
    """With every access checked: a kernel may read and write the arrays named in its table, and no byte beside them."""
    kind, options = CASES[case]
    gpu = Emulated(watched)
    arrays = operands(kind, [5, 16, 0, 33], dtype)
    arrays[0][1] = shifted(arrays[0][1])
    made: list[Any] = []

    def empty(shape: tuple[int, ...], dtype: Any) -> Any:
        made.append(np.full(shape, -3, dtype))
        host.register(made[-1].ctypes.data, made[-1].nbytes)
        return made[-1]

    Emulated.empty, kept = lambda self, shape, dtype: empty(shape, dtype), Emulated.empty  # type: ignore[method-assign]
    given = [a for column in arrays for a in column if a.size]
    try:
        for a in given:
            host.register(a.ctypes.data, a.nbytes)
        found = update(kind, arrays, gpu, **options)
    finally:
        Emulated.empty = kept  # type: ignore[method-assign]
        for a in (*given, *(a for a in made if a.size)):
            host.unregister(a.ctypes.data)
    assert_same(found, update(kind, arrays, CPU, **options))


def test_views_are_put_in_order_first(gpu) -> None:
    x, g = values([12, 12], np.float32, 0)
    strided, broadcast = np.repeat(g, 2)[::2], np.broadcast_to(np.float32(2), (12,))
    assert_same(update("sgd", [[x], [strided]], gpu, rate=0.5), [x - np.float32(0.5) * g])
    assert_same(update("sgd", [[x], [broadcast]], gpu, rate=0.5), [x - np.float32(1)])
    matrix, turned = x.reshape(3, 4), g.reshape(4, 3).T
    assert_same(update("sgd", [[matrix], [turned]], gpu, rate=0.5), [matrix - np.float32(0.5) * turned])


def test_more_tensors_than_a_table_holds(gpu) -> None:
    sizes = [i % 7 for i in range(2 * many.MANY + 3)]
    arrays = operands("sgd", sizes, np.float32)
    with tg.measure() as m:
        found = update("sgd", arrays, gpu, rate=0.1)
    assert [name for name, _ in gpu.launches] == ["tg_sgd"] * 3
    assert m.nodes_run["sgd_update"] == 3 and m.bytes_moved == 3 * 4 * sum(sizes)
    assert_same(found, update("sgd", arrays, CPU, rate=0.1))
    assert update("sgd", [[], []], gpu, rate=0.1) == []
    assert update("sgd", operands("sgd", [0, 0], np.float32), gpu, rate=0.1)[1].shape == (0,)
    assert len(gpu.launches) == 3  # nothing to do, nothing launched


def test_a_table_fits_into_a_kernel_s_parameters() -> None:
    assert many._table(7).itemsize + 10 * 8 <= 4096  # LAMB's
    assert many._table(9).itemsize + 7 * 8 <= 4096  # RMSprop's with all


def test_groups_are_of_one_dtype_and_not_too_large(gpu, monkeypatch) -> None:
    xs = [
        from_array(np.zeros(n, d), gpu) for n, d in [(4, "f4"), (4, "f8"), (4, "f4"), (100, "f4"), (1, "f4"), (1, "f8")]
    ]
    assert updates.groups(xs) == [[0, 2, 3, 4], [1, 5]]
    monkeypatch.setattr(updates, "AT_ONCE", 40)
    assert updates.groups(xs) == [[0, 2], [1, 5], [3], [4]]
    on_cpu = [from_array(np.zeros(n), CPU) for n in (1, 10, 1000, 2)]
    monkeypatch.setattr(updates, "SMALL", 100)
    assert updates.groups(on_cpu) == [[0, 1], [2], [3]]


def test_operands_on_two_devices_are_refused(gpu) -> None:
    x, g = (from_array(np.ones(2), d) for d in (gpu, CPU))
    with pytest.raises(DeviceError, match="sgd_update: operands on cuda:7 and cpu"):
        updates.sgd([x], [g], rate=0.1)


MAKERS = {
    "sgd": optim.SGD,
    "nesterov": lambda: optim.SGD(0.1, 0.9, True, weight_decay=0.2),
    "adamw": lambda: optim.AdamW(0.1),
    "clipping": lambda: optim.Adam(lambda step: 0.1 / (step + 1), global_clipnorm=1.0),
    "rmsprop": lambda: optim.RMSprop(0.1, momentum=0.5, centered=True, weight_decay=0.1),
    "adagrad": lambda: optim.Adagrad(0.1, clipvalue=0.5),
    "lion": lambda: optim.Lion(0.1, weight_decay=0.1),
}


def trained(device: Device, maker: str, steps: int = 4) -> tuple[list[Any], list[Any]]:
    optimizer = MAKERS[maker]()
    shapes = [(3, 4), (), (0,), (5,), (40, 300)]
    with tg.device(device):
        variables = [tg.Variable(np.full(s, 0.5, np.float32)) for s in shapes]
        variables.append(tg.Variable(np.full((7,), 0.25)))  # another dtype, another launch
        for step in range(steps):
            rng = np.random.default_rng(step)
            grads = [rng.normal(size=v.shape).astype(v.dtype) for v in variables]
            optimizer.apply(grads, variables)
    return variables, optimizer.variables


@pytest.mark.parametrize("maker", MAKERS)
def test_optimizers_end_up_the_same_on_both_devices(gpu, maker) -> None:
    for found, wanted in zip(trained(gpu, maker), trained(CPU, maker), strict=True):
        assert_same([v.numpy() for v in found], [v.numpy() for v in wanted])
    assert len(gpu.launches) == 2 * 4


def test_no_step_waits_for_the_device(gpu, monkeypatch) -> None:
    optimizer = optim.SGD(lambda step: 1.0 / (step + 1))
    fetched = []
    monkeypatch.setattr(tg.Variable, "numpy", lambda self: fetched.append(self.name) or self.read().numpy())
    with tg.device(gpu):
        v = tg.Variable(np.zeros(1))
        for _ in range(3):
            optimizer.apply([np.ones(1)], [v])
        assert not fetched  # the number is on the host
        assert optimizer.iterations.read().item() == 3
        optimizer.iterations.assign(9)  # as loading does
        assert optimizer.current_learning_rate() == 0.1 and not fetched
        optimizer.apply([np.ones(1)], [v])
        assert optimizer.current_learning_rate() == 1 / 11 and not fetched
        optimizer.iterations = tg.Variable(4, dtype="int64")
        assert optimizer.current_learning_rate() == 0.2
    assert v.read().item() == -(1 + 1 / 2 + 1 / 3 + 0.1)


def test_a_subclass_with_formulas_of_its_own_keeps_them(gpu) -> None:
    class Signed(optim.Adam):
        def update(self, x, g, slots, rate, step):
            (plain, *others) = super().update(x, g, slots, rate, step)
            return (x - rate * tg.sign(g), *others)

    for device in (CPU, gpu):
        with tg.device(device):
            v = tg.Variable(np.zeros(3))
            Signed(0.5, weight_decay=0.1).apply([np.array([3.0, -2.0, 0.0])], [v])
            assert v.numpy().tolist() == [-0.5, 0.5, 0.0]


def test_on_the_stand_in_for_cupy_a_step_is_one_launch_and_waits_for_nothing(emulated) -> None:
    from shim import standin

    standin.install()
    cuda.forget()
    try:
        import cupyx

        device = asdevice("cuda:0")
        with cupyx.allow_synchronize(False):
            found = trained(device, "adamw")
        launches = [launch.name for launch in standin.launches]
        assert launches.count("tg_adam") == 2 * 4 and set(launches) <= {"tg_adam", "tg_probe"}
        for ours, wanted in zip(found, trained(CPU, "adamw"), strict=True):
            assert_same([v.numpy() for v in ours], [v.numpy() for v in wanted])
    finally:
        cuda.forget()
        standin.uninstall()
