"""The optimizers' kernels, run on the CPU by the host shim, against the same updates as array operations, to the bit.

A device that calls itself CUDA, and whose arrays are NumPy's, takes the optimizers down the way they go on a GPU.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from shim import host
from waiting import never_waits

import tapegrad as tg
from tapegrad import optim
from tapegrad.core.aval import shaped
from tapegrad.device import CPU, Device, asdevice, cuda, multi_tensor
from tapegrad.errors import DeviceError
from tapegrad.ops import updates
from tapegrad.tensor import from_array

pytestmark = pytest.mark.sampled(1 / 6)

DTYPES = [np.float32, np.float64, np.float16, ml_dtypes.bfloat16]
SIZES = [
    1,
    0,
    3,
    8,
    17,
    multi_tensor.CHUNK - 1,
    multi_tensor.CHUNK,
    0,
    multi_tensor.CHUNK + 1,
    2 * multi_tensor.CHUNK + 13,
]


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


def update(case: str, arrays: list[list[Any]], device: Device) -> list[Any]:
    """The update called ``case`` of arrays on a device, as one list of arrays; a column more are half values."""
    _, formula, shrink = CASES[case]
    tensors = [[from_array(a, device) for a in column] for column in arrays]
    if len(tensors) > _width(formula):
        *tensors, halves = tensors
        return [t.numpy() for row in updates.of_halves(formula, halves, tensors, shrink) for t in row]
    return [t.numpy() for row in updates.of_many(formula, tensors, shrink) for t in row]


def _width(formula: updates.Formula) -> int:
    return max(1, *formula.renewed) + 1


def assert_same(found: list[Any], wanted: list[Any]) -> None:
    assert len(found) == len(wanted)
    for a, b in zip(found, wanted, strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape and plain(a).tobytes() == plain(b).tobytes()


def plain(x: Any) -> Any:
    """The array with NaN of one kind: CUDA makes another one of them than NumPy does when it rounds."""
    return x if x.dtype.kind == "i" else np.where(np.isnan(x), np.array(np.nan, x.dtype), x)


CASES: dict[str, tuple[str, updates.Formula, float | None]] = {
    "adam": ("adam", updates.adam_formula(0.013, 0.9, 0.99, 1e-3), None),
    "adamw": ("adam", updates.adam_formula(1e-3, 0.8, 0.95, 1e-7), 0.97),
    "sgd": ("sgd", updates.sgd_formula(0.1), None),
    "sgd decayed": ("sgd", updates.sgd_formula(0.1), 0.9),
    "momentum": ("momentum", updates.momentum_formula(0.1, 0.9), None),
    "nesterov": ("momentum", updates.momentum_formula(0.1, 0.9, True), 0.99),
    "rmsprop": ("rmsprop", updates.rmsprop_formula(0.1, 0.9, 0.0, 1e-3), None),
    "rmsprop centered": ("rmsprop_centered", updates.rmsprop_formula(0.1, 0.9, 0.0, 1e-3, True), 0.9),
    "rmsprop with momentum": ("rmsprop_momentum", updates.rmsprop_formula(0.1, 0.9, 0.7, 1e-3, False, True), None),
    "rmsprop with all": ("rmsprop_centered_momentum", updates.rmsprop_formula(0.1, 0.9, 0.7, 1e-3, True, True), 0.97),
    "adagrad": ("adagrad", updates.adagrad_formula(0.1, 1e-3), 0.97),
    "lion": ("lion", updates.lion_formula(0.1, 0.9, 0.99), 0.97),
    "lamb": ("lamb", updates.lamb_formula(1.7, 3.1, 0.9, 0.99, 1e-3, 0.1), None),
}
"""By name: the kernel, the formula, and the decay."""
POSITIVE = {
    "adam": (3,), "lamb": (3,), "adagrad": (2,),
    **dict.fromkeys(("rmsprop", "rmsprop_centered", "rmsprop_momentum", "rmsprop_centered_momentum"), (2,)),
}  # fmt: skip
"""By kernel: the operands that have no negative numbers."""


def operands(case: str, sizes: list[int], dtype: Any) -> list[list[Any]]:
    kind, formula, _ = CASES[case]
    return [values(sizes, dtype, seed, seed in POSITIVE.get(kind, ())) for seed in range(_width(formula))]


def with_halves(case: str, sizes: list[int], half: Any, gradient: Any) -> list[list[Any]]:
    """Masters, gradients, state, and half variables, of which somebody has assigned some elements since."""
    columns = operands(case, sizes, np.float32)
    columns[1] = [g.astype(gradient) for g in columns[1]]
    halves = [x.astype(half) for x in columns[0]]
    for x in halves:
        x[1::3] += half(1.5)
        x[5:6] = np.nan
    return [*columns, halves]


@pytest.mark.sampled(1 / 6)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", CASES)
def test_every_bit_is_that_of_array_operations(gpu, case, dtype) -> None:
    arrays = operands(case, SIZES, dtype)
    assert_same(update(case, arrays, gpu), update(case, arrays, CPU))
    assert gpu.launches == [("tg_" + CASES[case][0], (11,))]  # blocks: one for each chunk, none for empty tensors


@pytest.mark.sampled(1 / 6)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", CASES)
def test_arrays_that_are_not_aligned(gpu, case, dtype) -> None:
    arrays = operands(case, SIZES, dtype)
    odd = [list(map(shifted, column)) if i != 1 else column for i, column in enumerate(arrays)]
    assert odd[0][4].ctypes.data % 16
    assert_same(update(case, odd, gpu), update(case, arrays, CPU))


@pytest.mark.sampled(1 / 6)
@pytest.mark.parametrize("gradient", [None, np.float32], ids=["half gradients", "float32 gradients"])
@pytest.mark.parametrize("half", DTYPES[2:])
@pytest.mark.parametrize("case", CASES)
def test_half_variables_take_one_launch_of_the_same_bits(gpu, case, half, gradient) -> None:
    """Master, state and rounded value of tensors of all sizes, one of which is not aligned."""
    arrays = with_halves(case, SIZES, half, gradient or half)
    odd = [list(column) for column in arrays]
    for column in (odd[0], odd[1], odd[-1]):
        column[4] = shifted(column[4])
    with np.errstate(invalid="ignore"):
        assert_same(update(case, odd, gpu), update(case, arrays, CPU))
    assert gpu.launches == [("tg_" + CASES[case][0], (11,))]


@pytest.mark.sampled(1 / 6)
@pytest.mark.parametrize("make", [
    lambda case, sizes: operands(case, sizes, np.float32), lambda case, sizes: operands(case, sizes, np.float16),
    lambda case, sizes: with_halves(case, sizes, np.float16, np.float16),
], ids=["float32", "float16", "float16 with masters"])  # fmt: skip
@pytest.mark.parametrize("case", ["adam", "sgd", "momentum", "rmsprop with all", "adagrad", "lion", "lamb"])
def test_nothing_else_is_touched(watched, case, make) -> None:
    """With every access checked: a kernel may read and write the arrays named in its table, and no byte beside them."""
    gpu = Emulated(watched)
    arrays = make(case, [5, 16, 0, 33])
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
        found = update(case, arrays, gpu)
    finally:
        Emulated.empty = kept  # type: ignore[method-assign]
        for a in (*given, *(a for a in made if a.size)):
            host.unregister(a.ctypes.data)
    assert_same(found, update(case, arrays, CPU))


def test_views_are_put_in_order_first(gpu) -> None:
    x, g = values([12, 12], np.float32, 0)
    strided, broadcast = np.repeat(g, 2)[::2], np.broadcast_to(np.float32(2), (12,))
    rate = np.float32(0.1)
    assert_same(update("sgd", [[x], [strided]], gpu), [x - rate * g])
    assert_same(update("sgd", [[x], [broadcast]], gpu), [x - rate * np.float32(2)])
    matrix, turned = x.reshape(3, 4), g.reshape(4, 3).T
    assert_same(update("sgd", [[matrix], [turned]], gpu), [matrix - rate * turned])


def test_more_tensors_than_a_table_holds(gpu) -> None:
    sizes = [i % 7 for i in range(2 * multi_tensor.MANY + 3)]
    arrays = operands("sgd", sizes, np.float32)
    with tg.measure() as m:
        found = update("sgd", arrays, gpu)
    assert [name for name, _ in gpu.launches] == ["tg_sgd"] * 3
    assert m.nodes_run["sgd_update"] == 3 and m.bytes_moved == 3 * 4 * sum(sizes)
    assert_same(found, update("sgd", arrays, CPU))
    assert update("sgd", [[], []], gpu) == []
    assert update("sgd", operands("sgd", [0, 0], np.float32), gpu)[1].shape == (0,)
    assert len(gpu.launches) == 3  # nothing to do, nothing launched


def test_more_half_variables_than_a_table_holds(gpu) -> None:
    sizes = [1 + i % 7 for i in range(2 * multi_tensor.MANY_OF_HALVES + 3)]
    arrays = with_halves("adam", sizes, np.float16, np.float16)
    arrays[1][3] = arrays[1][3].astype(np.float32)  # of another dtype, so in a launch of its own
    with tg.measure() as m, np.errstate(invalid="ignore"):
        found = update("adam", arrays, gpu)
    assert [name for name, _ in gpu.launches] == ["tg_adam"] * 4
    assert m.bytes_moved == 30 * sum(sizes) + 2 * sizes[3]
    with np.errstate(invalid="ignore"):
        assert_same(found, update("adam", arrays, CPU))


def test_a_table_fits_into_a_kernel_s_parameters() -> None:
    for more, most in ((0, multi_tensor.MANY), (2, multi_tensor.MANY_OF_HALVES)):
        assert multi_tensor.table_of(7 + more, most).itemsize + 10 * 8 <= 4096  # LAMB's
        assert multi_tensor.table_of(9 + more, most).itemsize + 7 * 8 <= 4096  # RMSprop's with all


def test_groups_are_of_one_dtype_and_not_too_large(gpu, monkeypatch) -> None:
    kinds = [(4, "f4"), (4, "f8"), (4, "f4"), (100, "f4"), (1, "f4"), (1, "f8")]
    xs = [shaped((n,), np.dtype(d), gpu) for n, d in kinds]
    assert updates.groups(xs) == [[0, 2, 3, 4], [1, 5]]
    monkeypatch.setattr(updates, "AT_ONCE", 40)
    assert updates.groups(xs) == [[0, 2], [1, 5], [3], [4]]
    on_cpu = [shaped((n,), np.dtype("f8"), CPU) for n in (1, 10, 1000, 2)]
    monkeypatch.setattr(updates, "SMALL", 100)
    assert updates.groups(on_cpu) == [[0, 1], [2], [3]]


def test_operands_on_two_devices_are_refused(gpu) -> None:
    x, g = (from_array(np.ones(2), d) for d in (gpu, CPU))
    for make in (updates.of_many, lambda *given: updates.of_halves(given[0], [x], *given[1:])):
        with pytest.raises(DeviceError, match="sgd_update: operands on cuda:7 and cpu"):
            make(updates.sgd_formula(0.1), ([x], [g]), None)


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
        for half in DTYPES[2:]:  # and two more
            variables += [tg.Variable(np.full(s, 0.5, half)) for s in shapes]
        for step in range(steps):
            rng = np.random.default_rng(step)
            grads = [rng.normal(size=v.shape).astype(v.dtype) for v in variables]
            optimizer.apply(grads, variables)
    return variables, optimizer.variables


@pytest.mark.parametrize("maker", MAKERS)
def test_optimizers_end_up_the_same_on_both_devices(gpu, maker) -> None:
    for found, wanted in zip(trained(gpu, maker), trained(CPU, maker), strict=True):
        assert_same([v.numpy() for v in found], [v.numpy() for v in wanted])
    assert len(gpu.launches) == 4 * 4


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
        device = asdevice("cuda:0")
        with never_waits(device.xp):
            found = trained(device, "adamw")
        launches = [launch.name for launch in standin.launches]
        assert launches.count("tg_adam") == 4 * 4 and set(launches) <= {"tg_adam", "tg_probe", "tg_fused", "spin"}
        assert launches.count("tg_fused") == 2 * 4  # the first values of masters
        for ours, wanted in zip(found, trained(CPU, "adamw"), strict=True):
            assert_same([v.numpy() for v in ours], [v.numpy() for v in wanted])
    finally:
        cuda.forget()
        standin.uninstall()
