"""Works of CUDA kernels: they need no memory but what they declare."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import tapegrad as tg
from tapegrad.engine.cuda.launch import Launch


@pytest.mark.parametrize("shape", [(5, 12), (3, 40_000)], ids=["at once", "in parts"])
def test_a_kernel_is_lent_what_it_declares_and_takes_nothing_else(
    shape: tuple[int, ...], cuda: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, works = Launch.run, list[Launch]()

    def lent(work: Launch, outputs: list[Any], temporaries: list[Any]) -> list[Any]:
        works.append(work)
        assert [(x.shape, x.dtype) for x in outputs] == list(work.writes)
        assert [(x.shape, x.dtype) for x in temporaries] == list(work.temporaries)
        with monkeypatch.context() as inside:
            inside.setattr(type(cuda), "empty", lambda *args: pytest.fail("memory that was not declared"))
            return run(work, outputs, temporaries)

    monkeypatch.setattr(Launch, "run", lent)
    x = np.linspace(-1, 1, int(np.prod(shape)), dtype="float32").reshape(shape)
    total = tg.sum(tg.asarray(x, device=cuda) * 2.0, axis=1)
    assert np.allclose(total.numpy(), (x * 2).sum(1), atol=1e-3)
    [work] = works
    assert bool(work.temporaries) == (shape[1] > 12)
