"""einsum: NumPy's values, gradients, big contractions, messages."""

from __future__ import annotations

import numpy as np
import pytest

import tapegrad as tg
from tapegrad.errors import ShapeError
from tapegrad.testing import check_grads

CASES = [
    ("ij,jk->ik", (2, 3), (3, 4)), ("ij,jk", (2, 3), (3, 4)), ("ij,kj->ki", (2, 3), (4, 3)), ("ba", (2, 3)),
    ("ii", (3, 3)), ("ii->i", (3, 3)), ("iji->j", (3, 2, 3)), ("iij,jk->ik", (2, 2, 3), (3, 4)), ("i,j", (2,), (3,)),
    ("...ij,...jk->...ik", (5, 1, 2, 3), (4, 3, 2)), ("b...,b->...", (2, 3, 4), (2,)), ("...i->...", (2, 3)),
    ("...", (2, 3)), ("ij,jk,kl,lm->im", (2, 3), (3, 4), (4, 5), (5, 2)), ("i,i->", (3,), (3,)), ("i,i", (1,), (3,)),
    ("ij->j", (2, 3)), ("bhtd,bhsd->bhts", (2, 3, 4, 5), (2, 3, 6, 5)), ("bthd,bshd->bhts", (2, 4, 3, 5), (2, 6, 3, 5)),
    ("abc,abc->", (2, 3, 4), (2, 3, 4)), ("ij,ij->ij", (2, 3), (2, 3)), ("ij,kl->jkil", (2, 3), (4, 2)),
    ("i,ij,j", (2,), (2, 3), (3,)), (",ij->ji", (), (2, 3)), ("ij,j->i", (0, 3), (3,)), ("ij,jk->ik", (2, 0), (0, 4)),
    ("ijij->ij", (2, 3, 2, 3)), ("ab,bc,cd,da->", (2, 3), (3, 2), (2, 4), (4, 2)),
    (" i j , j -> i ", (2, 3), (3,)), ("Ab,bC->AC", (2, 3), (3, 2)),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=lambda c: c[0])
def test_values_and_gradients(case, rng):
    subscripts, *shapes = case
    xs = [rng.uniform(-1, 1, s) for s in shapes]
    got = tg.einsum(subscripts, *xs)
    wanted = np.einsum(subscripts, *xs)
    assert got.shape == wanted.shape and got.dtype == wanted.dtype
    np.testing.assert_allclose(got.numpy(), wanted, rtol=1e-12, atol=1e-12)
    check_grads(lambda *xs: tg.einsum(subscripts, *xs), xs, order=2)


def test_big_operands(rng):
    x, y = (rng.uniform(-1, 1, s).astype("float32") for s in ((8, 64, 4, 32), (8, 64, 4, 32)))
    got = tg.einsum("bthd,bshd->bhts", x, y).numpy()
    np.testing.assert_allclose(got, np.einsum("bthd,bshd->bhts", x, y, optimize=True), rtol=1e-4, atol=1e-4)


def test_a_diagonal_owns_no_bytes(rng):
    x = tg.asarray(rng.uniform(size=(50, 50)))
    assert np.may_share_memory(tg.einsum("ii->i", x).numpy(), x.numpy())


def test_the_path_avoids_the_big_intermediate(rng):
    """(a b) c with a thin b: left to right would make a 2000 x 2000 matrix."""
    a, b, c = (rng.uniform(-1, 1, s) for s in ((2000, 2), (2, 2000), (2000, 2)))
    with tg.measure() as m:
        tg.einsum("ij,jk,kl->il", *[tg.asarray(v) for v in (a, b, c)]).numpy()
    assert m.peak_bytes < 2000 * 2000 * 8 // 4


@pytest.mark.parametrize(
    ("subscripts", "shapes", "says"),
    [
        ("ij,jk->ik", [(2, 3)], "2 operands, got 1"), ("ij->ik", [(2, 3)], "ik"), ("ij->ii", [(2, 3)], "ii"),
        ("ijk", [(2, 3)], "does not describe"), ("i", [(2, 3)], "does not describe"),
        ("ij,jk", [(2, 3), (4, 5)], "'j'"), ("i...->i", [(2, 3)], "'...'"),
        ("i1", [(2, 3)], "letters"), ("ii", [(2, 3)], "'i'"), ("...i,...i", [(2, 3), (4, 3)], "'...'"),
        ("i......", [(2, 3)], "does not describe"), (7, [], "letters"),
    ],
)  # fmt: skip
def test_errors_say_what_is_wrong(subscripts, shapes, says):
    with pytest.raises(ShapeError, match="einsum") as caught:
        tg.einsum(subscripts, *[np.ones(s) for s in shapes])
    assert says in str(caught.value)
