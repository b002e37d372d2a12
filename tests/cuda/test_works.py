"""Works of CUDA kernels: they need no memory but what they declare."""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np
import pytest
from inside import array_of, aval_of
from shim.standin import pool

import tapegrad as tg
from tapegrad.engine.cuda.launch import Launch
from tapegrad.engine.lowering import Application
from tapegrad.ops.products.products import matmul_p

pytestmark = pytest.mark.sampled(1 / 2)


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


def views(kind: str, cuda: Any) -> list[Any]:
    """Operands of a product that cuBLAS cannot read as they lie."""
    draw = lambda *shape: np.random.default_rng(0).integers(-8, 9, shape).astype("float32")
    x, y = (tg.asarray(a, device=cuda) for a in (draw(4, 6, 10), draw(4, 10, 6)))
    if kind == "reversed":
        return [x[:, ::-1], y]
    if kind == "steps":
        return [x[:, :, ::2], y[:, ::2]]
    return [tg.broadcast_to(tg.reshape(x, (2, 1, 2, 6, 10)), (2, 3, 2, 6, 10)), tg.reshape(y[:2], (1, 1, 2, 10, 6))]


@pytest.mark.parametrize("kind", ["reversed", "steps", "uneven"])
def test_a_product_is_lent_what_it_copies_into_and_takes_nothing_else(
    kind: str, cuda: Any, cupy: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, y = views(kind, cuda)
    wanted = np.matmul(x.numpy(), y.numpy())
    arrays = [array_of(t) for t in (x, y)]
    work = Application(matmul_p, arrays, {}, matmul_p.infer(aval_of(x), aval_of(y)))
    assert work.temporaries and work.scratch_bytes == sum(4 * prod(shape) for shape, _ in work.temporaries)
    outputs, temporaries = ([cuda.empty(*lies) for lies in each] for each in (work.writes, work.temporaries))
    with monkeypatch.context() as inside:
        inside.setattr(pool.SingleDevicePool, "malloc", lambda *args: pytest.fail("memory that was not declared"))
        [out] = work.run(outputs, temporaries)
    assert np.array_equal(out.get(), wanted)
    with tg.measure() as m:
        tg.matmul(x, y)
    assert m.scratch_bytes == work.scratch_bytes
    with tg.measure() as m:
        tg.matmul(y.mT, y)
    assert m.scratch_bytes == 0
