"""What the namespace says about itself, and the array's attributes of the standard."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy as np
import pytest

import tapegrad as tg
from tapegrad import errors


def test_the_namespace() -> None:
    x = tg.ones(2)
    assert x.__array_namespace__() is x.__array_namespace__(api_version="2025.12") is tg
    assert tg.Variable(1.0).__array_namespace__(api_version=None) is tg
    assert tg.__array_api_version__ == "2025.12"
    with pytest.raises(ValueError, match=r"'2019.12' is not served; tapegrad has 2025.12"):
        x.__array_namespace__(api_version="2019.12")


@pytest.mark.parametrize("use", ["tg.__array_api_version__", "tg.__array_namespace_info__().devices()[0]"])
def test_it_can_be_asked_first(use: str) -> None:
    code = f"import tapegrad as tg; print({use})"
    found = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, timeout=120)
    assert found.stdout.strip() in ("2025.12", "cpu"), found.stderr


@pytest.mark.parametrize("version", ["2021.12", "2022.12", "2023.12", "2024.12"])
def test_earlier_versions_are_served(version: str) -> None:
    assert tg.ones(2).__array_namespace__(api_version=version) is tg


def test_devices_and_defaults() -> None:
    info = tg.__array_namespace_info__()
    assert info.default_device() in info.devices() and str(info.devices()[0]) == "cpu"
    assert info.capabilities() == {"boolean indexing": True, "data-dependent shapes": True, "max dimensions": 64}
    assert tg.zeros((1,) * 64, device="cpu").ndim == 64
    for device in (None, "cpu", *info.devices()):
        found = info.default_dtypes(device=device)
        assert tg.asarray(1.0).dtype == found["real floating"] and tg.asarray(1j).dtype == found["complex floating"]
        assert tg.asarray(1).dtype == found["integral"] and tg.argmax(tg.ones(2)).dtype == found["indexing"]
    with pytest.raises(errors.DeviceError, match="moon"):
        info.default_dtypes(device="moon")
    with pytest.raises(errors.DeviceError, match="moon"):
        info.dtypes(device="moon")


def test_dtypes() -> None:
    info = tg.__array_namespace_info__()
    for name, dtype in info.dtypes(device="cpu").items():
        assert getattr(tg, name) == dtype == np.dtype(name)
    with pytest.raises(errors.DTypeError, match="kinds are"):
        info.dtypes(kind="odd")
    if not hasattr(np, "__array_namespace_info__"):
        pytest.skip("NumPy 2.0 does not say")
    wanted = np.__array_namespace_info__()
    assert info.dtypes() == wanted.dtypes()
    for kind in ("bool", "integral", "real floating", "numeric", ("bool", "complex floating"), ()):
        assert info.dtypes(kind=kind) == wanted.dtypes(kind=kind)


def test_the_array_object() -> None:
    x = tg.asarray([[1.0, 2.0]])
    y = x
    y += 1
    y *= 2
    y -= 1
    y /= 2
    y //= 1
    y **= 2
    y %= 5
    assert x.tolist() == [[1.0, 2.0]] and y.tolist() == [[1.0, 4.0]]
    n = tg.asarray([6, 3])
    n &= 5
    n |= 8
    n ^= 1
    n <<= 2
    n >>= 1
    assert n.tolist() == [(((6 & 5) | 8) ^ 1) * 2, (((3 & 5) | 8) ^ 1) * 2]
    m = tg.eye(2)
    m @= tg.ones((2, 2))
    assert m.tolist() == [[1.0, 1.0], [1.0, 1.0]]


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda: [1, 2][tg.asarray(1.0)], TypeError),
        (lambda: [1, 2][tg.asarray(True)], TypeError),
        (lambda: [1, 2][tg.asarray([1])], TypeError),
        (lambda: float(tg.asarray(1j)), TypeError),
        (lambda: int(tg.asarray(1j)), TypeError),
        (lambda: int(tg.asarray(float("nan"))), ValueError),
        (lambda: int(tg.asarray(float("inf"))), OverflowError),
        (lambda: tg.asarray([1], dtype="uint8") + 300, OverflowError),
        (lambda: tg.asarray([1]) & 1.0, TypeError),
        (lambda: tg.ones(2) & tg.ones(2), TypeError),
        (lambda: tg.ones(2) + "text", TypeError),
        (lambda: "text" * tg.ones(2), TypeError),
    ],
)
def test_bad_conversions(call: Any, error: type) -> None:
    with pytest.raises(error):
        call()


def test_device_and_copy_keywords() -> None:
    x = tg.ones(3, device="cpu")
    made = [
        tg.zeros(2, device="cpu"), tg.full(2, 1, device="cpu"), tg.arange(3, device="cpu"), tg.eye(2, device="cpu"),
        tg.linspace(0, 1, 3, device="cpu"), tg.empty(2, device="cpu"), tg.asarray([1], device=x.device, copy=True),
        tg.empty_like(x, dtype="int8", device="cpu"), tg.zeros_like(x, device="cpu"), tg.ones_like(x, device="cpu"),
        tg.full_like(x, 2, device="cpu"), tg.astype(x, "int8", copy=True, device="cpu"),
        tg.from_dlpack(x, device="cpu"), tg.reshape(x, (3, 1), copy=True), tg.astype(x, "float32", copy=False),
    ]  # fmt: skip
    assert all(str(m.device) == "cpu" for m in made)
    assert tg.empty_like(x, dtype="int8").tolist() == [0, 0, 0] and tg.empty_like(x, dtype="int8").dtype == tg.int8
    with pytest.raises(errors.DeviceError):
        tg.astype(x, "int8", device="moon")
