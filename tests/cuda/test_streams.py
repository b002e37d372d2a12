"""Several streams, two devices and other libraries: what is read is written before, and nothing is lent too early.

The happens-before checker looks at every test in this folder when it ends; here it is shown that it would find faults.
"""

from __future__ import annotations

import random
import weakref
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from cuda_cases import same_bits
from inside import array_of
from shim import standin, waits
from shim.happens import taken
from shim.streams import changing

import tapegrad as tg
from tapegrad.device import cuda as cuda_module
from tapegrad.device import foreign
from tapegrad.errors import NotATensorError
from tapegrad.tensor import materialize

pytestmark = pytest.mark.sampled(1 / 2)

X = np.arange(1.0, 7.0, dtype="float32").reshape(2, 3)


def there_and_back(steps: int = 150) -> None:
    """Values wander between two devices, views among them, while each computes and forgets."""
    draw = random.Random(0)
    names = ("cuda:0", "cuda:1")
    values = [tg.asarray(np.full((8, 6), i, "float32"), device=name) for i, name in enumerate(names)]
    expected = [float(i) for i in range(len(values))]
    for step in range(steps):
        at = draw.randrange(len(values))
        x, number = values[at], expected[at]
        if step % 3 == 0:
            x = x.to_device(names[x.device.name == "cuda:0"])
        elif step % 3 == 1:
            x, number = (x + 1).T if draw.random() < 0.5 else (x + 1)[::-1], number + 1
        else:
            other = next((v for v in values if v.device is x.device and v.shape == x.shape), x)
            x, number = x * 2 + 0 * other, number * 2
        if number > 1e6:
            number = 1.0
            x = x * 0 + 1
        values.append(x)
        expected.append(number)
        materialize(x)
        del x, values[: max(0, len(values) - 5)], expected[: max(0, len(expected) - 5)]
    for x, number in zip(values, expected, strict=True):
        assert (x.numpy() == number).all()


def test_copies_between_devices(cuda, cupy):
    there_and_back()
    with changing(cupy):
        there_and_back()
    assert {e.device for e in standin.events if e.kind == "d2d"} == {0, 1}


def test_each_wait_between_devices_is_needed(cuda, cupy):
    def program() -> None:
        with changing(cupy):
            there_and_back()

    with waits.of(cuda_module) as lines:
        program()
    assert taken() == [] and len(lines) > 2
    for line in lines:
        with waits.of(cuda_module, lambda other, line=line: other == line):
            program()
        assert taken(), f"the wait of line {line} is not needed"


def test_the_librarys_own_copy_waits_for_nobody(cuda, cupy):
    """So that of the engine is its own."""
    x = cupy.ones((8, 6), "float32")
    with cupy.cuda.Device(1):
        cupy.array(x)
    assert taken()


def train() -> Any:
    """Some steps of a small model: products, fused kernels, gathering, draws, an optimizer."""
    tg.random.seed(0)
    model = tg.nn.Sequential([tg.nn.Dense(8, activation="gelu"), tg.nn.LayerNormalization(), tg.nn.Dropout(0.1),
                              tg.nn.Dense(4)])  # fmt: skip
    optimizer = tg.optim.Adam(1e-2, global_clipnorm=1.0)
    x = tg.asarray(np.random.default_rng(0).normal(size=(6, 5)).astype("float32"))
    labels = tg.asarray([0, 1, 2, 3, 0, 1])
    for _ in range(3):
        with tg.GradientTape() as tape:
            loss = tg.mean(tg.nn.functional.cross_entropy(model(x, training=True), labels))
        variables = model.trainable_variables
        optimizer.apply(tape.gradient(loss, variables), variables)
    return loss


@pytest.mark.parametrize("ordered", [True, False])
def test_training_on_changing_streams(cuda, cupy, ordered):
    with tg.device(cuda):
        wanted = train()
        with changing(cupy), waits.of(cuda_module, lambda line: not ordered):
            same_bits(train(), wanted)
    assert (taken() == []) == ordered


class Lender:
    """Another library's array: made, and freed at once when it is let go of, on a stream of that library's."""

    def __init__(self, cupy: Any, stream: Any, version: int, dlpack: bool) -> None:
        with stream:
            self.array = cupy.asarray(X) * 2
        self.dtype = self.array.dtype
        self._stream, self._version, self._cupy = stream, version, cupy
        self.asked: list[Any] = []
        if dlpack:
            self.__dlpack_device__ = lambda: (2, 0)
            self.__dlpack__ = self._export

    def _export(self, *, stream: Any = None, **options: Any) -> Any:
        self.asked.append(stream)
        with self._stream:
            return self.array.__dlpack__(stream=stream, **options)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        with self._stream:
            face = self.array.__cuda_array_interface__ | {"version": self._version}
        if self._version < 3:
            del face["stream"]
        return face


WAYS = {"DLPack": (3, True), "version 3": (3, False), "version 2": (2, False)}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("copy", [True, False])
def test_arrays_of_other_libraries_are_waited_for(cuda, cupy, way, copy):
    """Each names its stream in its own way; an old interface names none, and is taken to mean the legacy stream."""
    version, dlpack = WAYS[way]
    theirs = cupy.cuda.Stream(non_blocking=True) if version == 3 else cupy.cuda.Stream.null
    standin.configure(stream_done=False)
    with cupy.cuda.Stream(non_blocking=True) as ours:
        lender = Lender(cupy, theirs, version, dlpack)
        before = sum("synchronize" in e.kind for e in standin.events)
        x = tg.asarray(lender, copy=None if copy else False)
        assert sum("synchronize" in e.kind for e in standin.events) == before, "the host waits for nobody"
        assert lender.asked == ([ours.ptr] if dlpack else [])
        assert (array_of(x).data.ptr == lender.array.data.ptr) != copy
        del lender
        with theirs:
            again = [cupy.ones((2, 3), "float32") for _ in range(3)]  # take the memory, if it was given back
        same_bits(x * 1, 2 * X)
        del again


@pytest.mark.parametrize("way", ["version 3", "version 2"])
def test_without_the_wait_there_is_a_race(cuda, cupy, way):
    with waits.of(foreign, lambda line: True):
        test_arrays_of_other_libraries_are_waited_for(cuda, cupy, way, True)
    assert taken()


def test_a_copied_array_is_held_until_the_copy_is_done_and_no_longer(cuda, cupy):
    lent = list[weakref.ref]()

    def alive() -> int:
        lender = Lender(cupy, cupy.cuda.Stream(non_blocking=True), 3, False)
        lent.append(weakref.ref(lender.array))
        tg.asarray(lender)
        del lender
        return sum(array() is not None for array in lent)

    standin.configure(stream_done=False)
    assert [alive() for _ in range(3)] == [1, 2, 3]
    standin.configure(stream_done=True)
    assert max(alive() for _ in range(5)) <= 2


class Recorded:
    """As PyTorch's tensors that require gradients are: what exports them raises, none too early for ``hasattr``."""

    requires_grad = True

    def __init__(self, kind: int) -> None:
        self.kind = kind

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.kind, 0

    def __dlpack__(self, **options: Any) -> Any:
        raise BufferError("Can't export tensors that require gradient, use tensor.detach()")

    def __array__(self, *args: Any) -> Any:
        raise RuntimeError("Can't call numpy() on Tensor that requires grad. Use tensor.detach().numpy() instead.")

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        raise RuntimeError("Can't get __cuda_array_interface__ on Variable that requires grad.")


@pytest.mark.parametrize("kind", [1, 2])
def test_tensors_that_require_gradients_are_refused_by_name(cuda, kind):
    for place in ("cpu", "cuda"):
        with pytest.raises(NotATensorError, match=r"Recorded requires gradients, .*hand in x\.detach\(\)"):
            tg.asarray(Recorded(kind), device=place)
    with pytest.raises(NotATensorError, match=r"x\.detach\(\)"):
        tg.matmul(tg.asarray(X), Recorded(kind))


def test_an_interface_serves_where_dlpack_does_not(cuda, cupy):
    def refuses(**options: Any) -> Any:
        raise BufferError("no such dtype")

    face = cupy.asarray(X).__cuda_array_interface__
    theirs = {"__dlpack__": refuses, "__dlpack_device__": lambda: (2, 0)}
    same_bits(tg.asarray(SimpleNamespace(__cuda_array_interface__=face, **theirs)), X)
    same_bits(tg.asarray(SimpleNamespace(__cuda_array_interface__=face, **theirs), device="cpu"), X)
    with pytest.raises(NotATensorError, match="in CUDA memory .BufferError: no such dtype.; convert it"):
        tg.asarray(SimpleNamespace(**theirs))
