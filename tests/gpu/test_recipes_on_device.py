"""The documentation's examples with CuPy kernels, as they stand there."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

import tapegrad as tg

PAGE = Path(__file__).parent.parent.parent / "docs" / "guides" / "primitives.md"


def block(word: str) -> str:
    """The only block fenced as ``py`` in which ``word`` occurs."""
    (found,) = [
        b for b in re.findall(r"^```py\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.M | re.S) if word in b
    ]
    return found


@pytest.mark.gpu
def test_a_kernel_of_cupys_is_an_operation():
    import cupy

    names = {"cupy": cupy, "np": np, "tg": tg}
    exec(compile(block("RawKernel"), PAGE.name, "exec"), names)
    x = np.linspace(-1, 2, 1000)
    with tg.device("cuda"):
        t = tg.asarray(x)
        np.testing.assert_allclose(names["cubed"](t).numpy(), x**3, rtol=1e-14)
        np.testing.assert_allclose(tg.grad(lambda x: tg.sum(names["cubed"](x)))(t).numpy(), 3 * x**2, rtol=1e-14)
        np.testing.assert_allclose(tg.jvp(names["cubed"], (t,), (np.ones(1000),))[1].numpy(), 3 * x**2, rtol=1e-14)


def test_a_function_of_pytorchs_is_an_operation():
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    names = {"torch": torch, "tg": tg}
    exec(compile(block("from_torch"), PAGE.name, "exec"), names)
    x = np.linspace(-2, 2, 9)
    found = tg.grad(lambda x: tg.sum(names["softshrink"](x) ** 2))(tg.asarray(x, device="cpu"))
    np.testing.assert_allclose(found.numpy(), 2 * np.sign(x) * np.maximum(np.abs(x) - 0.5, 0))
