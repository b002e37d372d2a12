"""gather_nd: against loops, for every depth and number of batch axes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from checks import same, var64

import tapegrad as tg
from tapegrad.errors import ShapeError
from tapegrad.testing import check_grads


@pytest.mark.parametrize("batch", [0, 1, 2])
@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("inner", [(), (3,), (0,), (2, 1)])
def test_gather_nd(batch: int, depth: int, inner: tuple, rng: np.random.Generator) -> None:
    x = rng.normal(size=(2, 3, 4, 2))
    shared = x.shape[:batch]
    axes = x.shape[batch : batch + depth]
    vectors = np.stack([rng.integers(-n, n, (*shared, *inner)) for n in axes], -1) if depth else np.zeros(
        (*shared, *inner, 0), int
    )  # fmt: skip
    wanted = np.empty((*shared, *inner, *x.shape[batch + depth :]))
    for place in np.ndindex(*shared, *inner):
        wanted[place] = x[place[:batch]][tuple(vectors[place])]
    same(tg.gather_nd(x, vectors, batch_dims=batch), wanted)
    if wanted.size:
        check_grads(lambda q: tg.sin(tg.gather_nd(q, vectors, batch)), [x], order=2)


@pytest.mark.parametrize(
    ("call", "error", "says"),
    [
        (lambda v: tg.gather_nd(v, 0), ShapeError, r"gather_nd: indices \(\) of \(3, 2\)"),
        (lambda v: tg.gather_nd(v, [[0]], batch_dims=2), ShapeError, "batch_dims=2: the first batch_dims axes"),
        (lambda v: tg.gather_nd(v, [[0]], batch_dims=1), ShapeError, "batch_dims=1"),
        (lambda v: tg.gather_nd(v, [[0]], batch_dims=-1), ShapeError, "batch_dims=-1"),
    ],
)
def test_misuse(call: Any, error: type, says: str) -> None:
    with pytest.raises(error, match=says):
        call(var64(np.ones((3, 2))))
