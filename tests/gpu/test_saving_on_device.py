"""Checkpoints of what lives on a device: to the bit, back where it was, and on the CPU.

Run as ``test_on_device.py`` is, on a device or by the stand-in.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from distributed.saved_values import bits, train, training

import tapegrad as tg
from tapegrad import distributed as D

pytestmark = pytest.mark.gpu


def test_training_on_a_device_goes_on_as_if_it_had_not_stopped(tmp_path: Path) -> None:
    with tg.device("cuda"):
        tree = training(1, tg.optim.Adam)
        train(tree, 2)
        D.save(tmp_path / "s", tree)
        train(tree, 2)
        other = D.load(tmp_path / "s", training(2, tg.optim.Adam))
        assert {v.device.kind for v in (*other["model"].variables, *other["optimizer"].variables)} == {"cuda"}
        train(other, 2)
        assert bits(other) == bits(tree)


@pytest.mark.parametrize("dtype", ["bool", "float16", "bfloat16", "float32", "complex64"])
def test_values_go_back_to_where_they_were(tmp_path: Path, dtype: str) -> None:
    cupy = pytest.importorskip("cupy")
    x = np.arange(12).reshape(3, 4).astype(tg.zeros((), dtype=dtype).dtype)
    tree: dict[str, Any] = {"t": tg.asarray(x, device="cuda"), "v": tg.Variable(tg.asarray(x, device="cuda")), "c": x}
    tree["part"] = tree["t"].T  # a view
    if dtype != "bfloat16":
        tree["raw"] = cupy.asfortranarray(cupy.asarray(x))
    D.save(tmp_path / "s", tree)
    loaded = D.load(tmp_path / "s", tree)
    assert loaded["t"].device.kind == loaded["v"].device.kind == loaded["part"].device.kind == "cuda"
    assert np.array_equal(loaded["t"].numpy(), x) and np.array_equal(loaded["part"].numpy(), x.T)
    assert np.array_equal(loaded["v"].numpy(), x) and np.array_equal(loaded["c"], x)
    if dtype != "bfloat16":
        assert isinstance(loaded["raw"], cupy.ndarray) and np.array_equal(loaded["raw"].get(), x)
    with tg.device("cpu"):
        assert np.array_equal(D.load(tmp_path / "s")["t"].numpy(), x)
