"""What convolutions take of CuPy's pool for themselves lies within the budget: the pool never lends more."""

from __future__ import annotations

import numpy as np
import pytest
from cuda_cases import same_bits
from shim.standin import pool

import tapegrad as tg

pytestmark = pytest.mark.sampled(1 / 2)


@pytest.fixture
def lent(cuda, monkeypatch):
    """The most bytes that were lent at once, in a list."""
    most, malloc = [0], pool.SingleDevicePool.malloc

    def noting(self, asked):
        found = malloc(self, asked)
        most[0] = max(most[0], self.total() - sum(s.size for s in self.free_segments()))
        return found

    monkeypatch.setattr(pool.SingleDevicePool, "malloc", noting)
    monkeypatch.setattr(pool.default, "malloc", pool.default.malloc)
    return most


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("lead", [(), (2,)])
def test_the_pool_never_lends_more_than_the_budget(cuda, lent, dtype, lead):
    rng = np.random.default_rng(0)
    x, w = (tg.asarray(rng.normal(size=s).astype(dtype), device=cuda) for s in ((4, 4, 16, 16), (8, 4, 3, 3)))

    def run():
        with tg.GradientTape() as tape:
            tape.watch([x, w])
            h = x
            for _ in range(30):
                h = tg.softmax(h)
            one = lambda scale: tg.nn.functional.conv2d(h * scale, w, padding=1)
            y = tg.vmap(one)(tg.ones(lead, dtype=dtype, device=cuda)) if lead else one(1.0)
            loss = tg.sum(y * y)
        return tape.gradient(loss, [x, w])

    before = cuda.usage()[0]
    with tg.measure() as plain:
        wanted = run()
    lent[0] = 0
    limit = plain.peak_bytes + plain.scratch_bytes // 2
    with tg.memory_budget(limit) as budget:
        found = run()
    assert budget.evictions > 0 and plain.scratch_bytes > 0
    assert lent[0] - before <= limit, (lent[0], before, limit)
    for one, other in zip(found, wanted, strict=True):
        same_bits(one, other)
