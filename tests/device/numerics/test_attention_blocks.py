"""The blocks of attention: as many bytes as they say, whole coverage of all scores, and the sums over them."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from tapegrad.device import threads
from tapegrad.device.numerics import attention as blocks
from tapegrad.device.numerics.attention_cut import Cut, Weighting, lengths

# lead, queries, heads, keys, groups, width of keys, of values
SHAPES = [
    ((2,), 5, 4, 7, 2, 3, 6), ((), 300, 4, 500, 2, 8, 16), ((3,), 700, 1, 65, 1, 16, 12), ((40,), 9, 2, 11, 1, 4, 4),
]  # fmt: skip
CAUSAL = [Weighting(0.3, causal, "none", "zero", 0.0) for causal in (False, True)]


@pytest.fixture
def noted(monkeypatch):
    """The arrays that one thread has for itself, by name, in elements."""
    found: list[dict[str, int]] = []

    class Noting(blocks.Scratch):
        def __init__(self, heads):
            super().__init__(heads)
            self.sizes: dict[str, int] = {}
            found.append(self.sizes)

        def array(self, name, shape):
            made = super().array(name, shape)
            self.sizes[name] = max(self.sizes.get(name, 0), made.size)
            return made

    monkeypatch.setattr(blocks, "Scratch", Noting)
    before = threads.get_num_threads()
    threads.set_num_threads(1)
    yield found
    threads.set_num_threads(before)


@pytest.mark.parametrize(("shape", "how"), list(itertools.product(SHAPES, CAUSAL)))
def test_scratch_is_what_it_is_said_to_be(shape, how, noted):
    lead, t, h, s, g, k, w = shape
    rng = np.random.default_rng(0)
    operands = [rng.normal(size=(*lead, *own)) for own in ((t, h, k), (s, g, k), (s, g, w))]
    mask, ct, out = np.zeros((), bool), rng.normal(size=(*lead, t, h, w)), np.empty((*lead, t, h, w))
    packed, stream = np.empty(sum(x.size for x in operands)), (0, 0)
    stats = np.empty((*lead, h, t, 2))
    blocks.forward(*operands, mask, out, how, *stream, stats)
    blocks.tangent(*operands, mask, operands[0], out, how, *stream, 0)
    blocks.backward(*operands, mask, ct, packed, how, *stream, (0, 1, 2), (out, stats))
    for sizes, work in zip(noted, ("forward", "tangent", "backward"), strict=True):
        said = blocks.scratch_bytes(*(x.shape for x in operands), 8, how, work)
        took = 8 * sum(sizes.values())
        assert took <= said <= 1.5 * took + 1000, f"{work} of {shape}: {took}"


@pytest.mark.parametrize(("shape", "how"), list(itertools.product(SHAPES, CAUSAL)))
def test_blocks_cover_each_query_once(shape, how):
    lead, t, h, s, g, _, _ = shape
    whole = (int(np.prod(lead)), g, h // g, t, s)
    cut, times = Cut.of(whole, how), np.zeros(whole[:4], int)
    for family in cut.families(whole):
        for part in cut.parts(whole, family):
            times[part[:4]] += 1
            assert part.seen == (min(s, part.t.stop) if how.causal else s)
    assert (times == 1).all()


@pytest.mark.parametrize(("shape", "how"), list(itertools.product([*SHAPES, ((9,), 130, 2, 130, 2, 8, 8)], CAUSAL)))
def test_blocks_have_no_more_scores_than_fit_a_cache(shape, how):
    """But for rows that are longer, of which a block has 64."""
    lead, t, h, s, g, _, _ = shape
    whole = (int(np.prod(lead)), g, h // g, t, s)
    cut = Cut.of(whole, how)
    most = max(np.prod(lengths(part)) * s for family in cut.families(whole) for part in cut.parts(whole, family))
    assert most <= max(65536, 64 * s)


@pytest.mark.parametrize("how", CAUSAL)
@pytest.mark.parametrize(("t", "s", "heads", "groups"), [(150, 150, 4, 1), (70, 600, 4, 2), (260, 300, 2, 1)])
def test_sums_over_the_blocks_of_a_family(t, s, heads, groups, how):
    """Cotangents of keys and values, which several blocks of queries see, beside those of whole matrices."""
    rng = np.random.default_rng(0)
    q, k, v, ct = (
        rng.normal(size=n) for n in ((3, t, heads, 5), (3, s, groups, 5), (3, s, groups, 6), (3, t, heads, 6))
    )
    whole = (3, groups, heads // groups, t, s)
    assert len(Cut.of(whole, how).parts(whole, Cut.of(whole, how).families(whole)[0])) > 1
    packed = np.empty(q.size + k.size + v.size)
    blocks.backward(q, k, v, np.zeros((), bool), ct, packed, how, 0, 0, (0, 1, 2))
    of_head = np.arange(heads) // (heads // groups)
    keys, values = k[:, :, of_head], v[:, :, of_head]
    scores = np.einsum("nthk,nshk->nhts", q, keys) * how.scale
    if how.causal:
        scores[..., np.arange(s) > np.arange(t)[:, None]] = -np.inf
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    back = np.einsum("nthw,nshw->nhts", ct, values)
    of_scores = weights * (back - (weights * back).sum(-1, keepdims=True)) * how.scale
    each = np.einsum("nhts,nthk->nshk", of_scores, q), np.einsum("nhts,nthw->nshw", weights, ct)
    of_k, of_v = (np.stack([x[:, :, of_head == i].sum(2) for i in range(groups)], axis=2) for x in each)
    of_q = np.einsum("nhts,nshk->nthk", of_scores, keys)
    wanted = np.concatenate([x.reshape(-1) for x in (of_q, of_k, of_v)])
    np.testing.assert_allclose(packed, wanted, rtol=1e-9, atol=1e-11)
